//! `bench allreduce` as nccl-tests is used: without flags, with one row, and with a process that
//! dies.

mod common;

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;
use std::time::Duration;

use common::{Running, child, millstream, processes_of_group, run};

/// From the death of a process to the error.
const BOUND: Duration = Duration::from_secs(10);

/// Starts a bench in a process group of its own, and waits for its first row.
fn start(arguments: &[&str]) -> Running {
    let mut command = millstream();
    command.args(["bench", "allreduce"]).args(arguments).process_group(0);
    let mut bench = Running::start("bench allreduce", &mut command);
    let [about, columns, row] = [bench.line(), bench.line(), bench.line()];
    let over = [" hosts over a switch at 127.", " hosts over 3 switches at 127."];
    assert!(over.iter().any(|over| about.contains(over)), "{about}");
    let columns: Vec<&str> = columns.split_whitespace().collect();
    let expected =
        "size count type redop time us algbw GB/s busbw GB/s wrong".split(' ').collect::<Vec<_>>();
    assert_eq!(columns, expected);
    assert!(row.ends_with(" 0"), "{row}");
    bench
}

#[test]
fn without_flags_there_is_a_table_over_sizes() {
    let output = run(&["bench", "allreduce", "--iters=1", "--warmup-iters=1"]).success();
    let rows: Vec<Vec<&str>> =
        output.stdout.lines().skip(2).map(|row| row.split_whitespace().collect()).collect();
    let sizes: Vec<String> = rows.iter().map(|row| row[..2].join(" ")).collect();
    let expected = ["4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB"];
    assert_eq!(sizes, expected);
    for row in rows {
        assert_eq!([row[3], row[4]], ["int32", "sum"]);
        assert!(row[6].parse::<f64>().unwrap() > 0.0, "{row:?}");
        assert_eq!(row[8], "0");
    }
}

#[test]
fn several_rows_are_one_object() {
    let arguments = ["--hosts=2", "--size=4,0,64KiB", "--iters=2", "--json"];
    let table = run(&[&["bench", "allreduce"], &arguments[..]].concat()).success().json();
    let rows = table["rows"].as_array().unwrap();
    for (row, bytes) in rows.iter().zip([4_u64, 0, 65_536]) {
        assert_eq!(row["bytes"], bytes);
        assert_eq!(row["checked"], 2 * 2 * bytes / 4);
        for key in ["algbw_mb_per_s", "busbw_mb_per_s"] {
            // A number also where there are no bytes.
            assert_eq!(row[key].as_f64().unwrap() > 0.0, bytes > 0, "{key} in {row}");
        }
        assert!(row["latency_us"]["mean"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert_eq!(rows.len(), 3);
}

#[test]
fn trees_of_switches_are_exact() {
    // Two levels on three switches and on one, and three levels.
    for (hosts, fan_in, switches) in [(4, 2, 3), (4, 2, 1), (5, 2, 2)] {
        let [hosts, fan_in, switches] = [
            format!("--hosts={hosts}"),
            format!("--fan-in={fan_in}"),
            format!("--switches={switches}"),
        ];
        let arguments = ["bench", "allreduce", &hosts, &fan_in, &switches, "--json"];
        let more = ["--size=4,0,1000004", "--iters=3", "--warmup-iters=0"];
        let table = run(&[&arguments[..], &more].concat()).success().json();
        for row in table["rows"].as_array().unwrap() {
            assert_eq!(row["wrong"], 0, "{row}");
            assert_eq!(format!("--switches={}", row["switches"]), switches);
        }
    }
}

#[test]
fn several_trees_are_exact() {
    let shape = ["bench", "allreduce", "--hosts=3", "--trees=2", "--switches=2", "--json"];
    let more = ["--size=4,0,32768,1000004", "--iters=3", "--warmup-iters=0"];
    let table = run(&[&shape[..], &more].concat()).success().json();
    for row in table["rows"].as_array().unwrap() {
        assert_eq!((&row["wrong"], &row["trees"]), (&0.into(), &2.into()), "{row}");
    }
    let many = run(&["bench", "allreduce", "--hosts=100", "--trees=3"]);
    assert!(many.failure(2).contains("100 hosts would need 300 addresses"));
}

/// Kills a child in the second row; returns the sentence.
#[test]
fn shared_memory_is_exact() {
    let arguments = ["bench", "allreduce", "--path=shared-memory", "--hosts=3", "--json"];
    let table =
        run(&[&arguments[..], &["--size=4KiB,1MiB", "--iters=3"]].concat()).success().json();
    for row in table["rows"].as_array().unwrap() {
        assert_eq!(row["path"], "shared-memory", "{row}");
        for of_tree in ["switches", "fan_in", "trees"] {
            assert_eq!(row[of_tree], 0, "{row}");
        }
        assert_eq!(row["wrong"], 0, "{row}");
    }
}

#[test]
fn what_is_said_of_a_tree_where_there_is_none_is_refused() {
    for (arguments, reason) in [
        (&["--path=shared-memory", "--fan-in=2"][..], "--fan-in is for --path switch"),
        (&["--path=auto", "--switches=3"], "--switches is for --path switch"),
        (&["--path=auto", "--trees=2"], "--trees is for --path switch"),
        (&["--path=auto", "--hosts=257"], "up to 256 share memory"),
    ] {
        let refused = run(&[&["bench", "allreduce"], arguments].concat());
        assert!(refused.failure(2).contains(reason), "{arguments:?}");
    }
}

fn killed(words: &[&str]) -> String {
    killed_in(&["--hosts=3"], words)
}

fn killed_in(shape: &[&str], words: &[&str]) -> String {
    let arguments = ["--size=4,4MiB", "--iters=300", "--warmup-iters=0"];
    let bench = start(&[shape, &arguments].concat());
    let group = bench.id();
    let victim = child(group, words).unwrap().to_string();
    assert!(Command::new("kill").args(["-s", "KILL", &victim]).status().unwrap().success());
    let output = bench.output_within(BOUND);
    assert_eq!(processes_of_group(group), [0; 0]);
    output.failure(1).to_owned()
}

#[test]
fn who_is_killed_is_named_in_time() {
    let host = killed(&["--rank", "2"]);
    assert!(host.contains("rank 2 is lost"), "{host}");
    let switch = killed(&["switch"]);
    assert!(switch.contains("the switch ended") && switch.contains("signal: 9"), "{switch}");
    let tree = ["--hosts=4", "--fan-in=2", "--switches=3"];
    let host = killed_in(&tree, &["--rank", "2"]);
    assert!(host.contains("rank 2 is lost"), "{host}");
    for name in ["s0", "s1", "s2"] {
        let switch = killed_in(&tree, &["--name", name]);
        assert!(switch.contains(&format!("switch {name} ended")), "{switch}");
    }
}

#[test]
fn control_c_ends_it_with_the_rows_that_there_are() {
    for whole_group in [true, false] {
        let bench = start(&["--hosts=2", "--size=4,16MiB", "--iters=300", "--warmup-iters=0"]);
        let group = bench.id();
        let target = if whole_group { format!("-{group}") } else { group.to_string() };
        let mut kill = Command::new("kill");
        assert!(kill.args(["-s", "INT", "--", &target]).status().unwrap().success());
        let output = bench.output_within(BOUND);
        assert_eq!(output.status.signal(), Some(2), "{}", output.stderr);
        assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{}", output.stderr);
        assert_eq!(processes_of_group(group), [0; 0]);
    }
}
