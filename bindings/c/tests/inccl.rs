//! INCCL: ranks that are processes of C programs, with a controller and switches.

mod common;

use std::process::Command;

use common::cluster::{self, Cluster, Rank};
use common::{Program, compile_with};
use millstream_lab::Stopwatch;

#[test]
fn part_of_another_test() {
    cluster::part_of_another_test();
}

/// The bound that callers are promised, from the death of someone to the error.
const BOUND: std::time::Duration = std::time::Duration::from_secs(5);

/// A program of this package, for one test: they run at the same time.
fn program(test: &str, name: &str) -> Program {
    compile_with(&format!("{name}-{test}"), &format!("tests/programs/{name}.c"), &[])
}

/// The example, whose results are checked in place of what it calls.
fn checked_example(test: &str) -> Program {
    let wrap = common::package().join("tests/programs/inccl_wrap.c");
    let flags = ["-Wl,--wrap=inccl_allreduce_write", wrap.to_str().unwrap()];
    compile_with(&format!("allreduce-{test}"), "examples/allreduce.c", &flags)
}

/// What a rank of the checked example prints.
const RIGHT: &str = "1024 elements are right\n";

/// All ranks of a program that end well, and print this.
fn run_with(cluster: &Cluster, program: &Program, world: u32, wanted: &str) {
    for output in cluster.run(program, world) {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && said.is_empty(), "{}: {said}", output.status);
        assert_eq!(String::from_utf8(output.stdout).unwrap(), wanted);
    }
}

#[test]
fn the_example_gives_every_rank_the_sums_of_one_two_three_and_eight() {
    let (cluster, program) = (Cluster::start(1), checked_example("sums"));
    // Right after each other, and the same size again.
    for world in [2, 3, 8, 1, 2, 2] {
        run_with(&cluster, &program, world, RIGHT);
    }
}

#[test]
fn the_example_says_in_a_line_why_there_is_nothing() {
    let program = compile_with("allreduce-alone", "examples/allreduce.c", &[]);
    let output = program.command().args(["2", "127.0.0.1:1", "0"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("inccl_allreduce_write: the communicator is null; "), "{said}");
    assert!(said.contains("cannot reach the controller at 127.0.0.1:1"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(output.status.success() && output.stdout.is_empty());
}

#[test]
fn all_collectives_types_and_operations() {
    let program = program("all", "inccl_all");
    for cluster in [Cluster::start(2), Cluster::of_shared_memory()] {
        for world in [1, 3] {
            run_with(&cluster, &program, world, "done\n");
        }
    }
}

#[test]
fn what_is_null_wrong_or_destroyed_is_a_code_and_a_line() {
    let (cluster, program) = (Cluster::start(1), program("bad", "inccl_bad"));
    let output = program.run(&[&cluster.controller.to_string()]);
    assert_eq!(output.stdout, b"done\n");
    let said = String::from_utf8(output.stderr).unwrap();
    for line in said.lines() {
        assert!(line.starts_with("inccl_"), "{line}");
    }
    // By null two calls say so, by others the destruction as well.
    let count = |text: &str| said.matches(text).count();
    assert_eq!(count("inccl_allreduce_write: the communicator is null"), 1, "{said}");
    assert_eq!(count("inccl_allreduce_write: "), 5, "{said}");
    assert_eq!(count("inccl_communicator_destroy: "), 4, "{said}");
}

#[test]
fn a_sanitizer_finds_nothing() {
    let cluster = Cluster::start(1);
    let flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover"];
    let program = compile_with("inccl_bad-sanitized", "tests/programs/inccl_bad.c", &flags);
    program.run(&[&cluster.controller.to_string()]);
    let program = compile_with("inccl_all-sanitized", "tests/programs/inccl_all.c", &flags);
    run_with(&cluster, &program, 2, "done\n");
}

/// All ranks of the program of failures, of which rank `r` does what is said in place `r`.
fn all_ready<const N: usize>(cluster: &Cluster, program: &Program, whats: [&str; N]) -> [Rank; N] {
    let world = N as u32;
    let mut number = 0;
    let mut ranks = whats.map(|what| {
        number += 1;
        Rank::start(&mut cluster.rank(program, &[what], world, number - 1))
    });
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "ready\n"));
    // Now that all have their communicators, what one of them does is no obstacle to that.
    ranks.iter_mut().for_each(Rank::go);
    ranks
}

#[test]
fn who_survives_a_killed_rank_is_told_and_the_next_run_is_a_new_group() {
    let (cluster, program) = (Cluster::start(1), program("killed", "inccl_failures"));
    let example = checked_example("killed");
    for _ in 0..2 {
        let [victim, void, call] = all_ready(&cluster, &program, ["sleep", "void", "call"]);
        let stopwatch = Stopwatch::start();
        victim.kill();
        let said = void.output();
        let line = String::from_utf8(said.stderr).unwrap();
        assert!(line.starts_with("inccl_allreduce_write: rank 0 is lost"), "{line}");
        assert_eq!(line.lines().count(), 1, "{line}");
        let printed = call.printed();
        assert!(printed.starts_with("6 rank 0 is lost"), "{printed}");
        let took = stopwatch.took();
        assert!(took.own() < BOUND, "{took}");
        // All are killed, and nobody has time to say goodbye.
        let ranks = all_ready(&cluster, &program, ["sleep", "call", "sleep"]);
        for rank in ranks {
            rank.kill();
        }
        run_with(&cluster, &example, 3, RIGHT);
    }
    // One that is not complete. Another rank 0 is refused once the controller knows the first.
    let half = loop {
        let half = Rank::start(&mut cluster.rank(&example, &[], 2, 0));
        let mut other = cluster.rank(&program, &["call"], 2, 0);
        let output = other.env("INCCL_JOIN_TIMEOUT_MS", "100").output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        if printed.contains("has a rank 0 already") {
            break half;
        }
        // The other one came first, and would do so again before the first asks again.
        assert!(printed.contains("is incomplete"), "{printed}");
    };
    half.kill();
    run_with(&cluster, &example, 2, RIGHT);
}

#[test]
fn who_destroys_cancels_or_comes_too_late_ends_it_for_all() {
    let (cluster, program) = (Cluster::start(1), program("ended", "inccl_failures"));
    let [destroys, sleeps] = all_ready(&cluster, &program, ["destroy", "sleep"]);
    let printed = destroys.printed();
    assert!(printed.starts_with("12 the communicator was closed"), "{printed}");
    sleeps.kill();

    let [cancels, sleeps, waits] = all_ready(&cluster, &program, ["cancel", "sleep", "call"]);
    let printed = cancels.printed();
    assert!(printed.starts_with("12 collective 1 was canceled"), "{printed}");
    let printed = waits.printed();
    assert!(printed.starts_with("6 rank 0 is lost") && printed.contains("canceled"), "{printed}");
    sleeps.kill();

    let late = |what, rank| {
        let mut command = cluster.rank(&program, &[what], 2, rank);
        Rank::start(command.env("INCCL_CALL_TIMEOUT_MS", "500"))
    };
    let (waits, mut sleeps) = (late("call", 0), late("sleep", 1));
    assert_eq!(sleeps.line(), "ready\n");
    let printed = waits.printed();
    assert!(printed.starts_with("ready\n6 ") && printed.contains("rank 1"), "{printed}");
}

#[test]
fn who_is_refused_for_a_quota_waits_for_room_as_long_as_it_may() {
    let cluster = Cluster::start_with(1, "--groups 1", "");
    let program = program("quota", "inccl_failures");
    let [holder] = all_ready(&cluster, &program, ["sleep"]);
    let other = || {
        let mut command = cluster.rank(&program, &["call"], 1, 0);
        command.env("INCCL_GROUP", "other");
        command
    };
    let refused = other().env("INCCL_JOIN_TIMEOUT_MS", "300").output().unwrap();
    let printed = String::from_utf8(refused.stdout).unwrap();
    assert!(
        printed.starts_with("no group: ") && printed.contains("may have 1 groups"),
        "{printed}"
    );
    // What the killed one had is taken back seconds later.
    let patient = Rank::start(&mut other());
    holder.kill();
    let printed = patient.printed();
    assert!(printed.starts_with("ready\n0 "), "{printed}");
}

#[test]
fn jobs_of_one_name_do_not_mix() {
    let (cluster, program) = (Cluster::start(1), program("jobs", "inccl_failures"));
    let example = checked_example("jobs");
    let [first, second] = all_ready(&cluster, &program, ["sleep", "sleep"]);
    // The name is taken.
    let mut late = cluster.rank(&program, &["call"], 2, 1);
    late.env("INCCL_JOIN_TIMEOUT_MS", "300");
    let output = late.output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.starts_with("no group: group \"default\" has a rank 1 already"), "{printed}");
    // By another name, or of another job, it is no obstacle.
    for (variable, value) in [("INCCL_GROUP", "other"), ("INCCL_JOB", "7"), ("PMIX_NAMESPACE", "a")]
    {
        let command = |rank| {
            let mut command: Command = cluster.rank(&example, &[], 2, rank);
            command.env(variable, value);
            Rank::start(&mut command)
        };
        let ranks = [command(0), command(1)];
        assert!(ranks.map(Rank::printed).iter().all(|printed| printed == RIGHT));
    }
    // Two ranks of different jobs wait for others of their own.
    let impatient = |job: &str, rank| {
        let mut command = cluster.rank(&program, &["call"], 2, rank);
        Rank::start(command.env("INCCL_JOIN_TIMEOUT_MS", "500").env("INCCL_JOB", job))
    };
    for (job, rank) in [("8", 0), ("9", 1)].map(|(job, rank)| (job, impatient(job, rank))) {
        let output = rank.output();
        let printed = String::from_utf8(output.stdout).unwrap();
        let incomplete = format!("no group: group \"default@{job}\" is incomplete");
        assert!(printed.starts_with(&incomplete), "{printed}");
    }
    // Who waits for the end of the first gets its turn.
    let waiting = [0, 1].map(|rank| Rank::start(&mut cluster.rank(&example, &[], 2, rank)));
    first.kill();
    second.kill();
    assert!(waiting.map(Rank::printed).iter().all(|printed| printed == RIGHT));
}

#[test]
fn a_rank_uses_the_address_that_it_is_given() {
    let (cluster, program) = (Cluster::start(1), program("bound", "inccl_failures"));
    let start = |rank: u32| {
        let mut command = cluster.rank(&program, &["sleep"], 2, rank);
        command.env("INCCL_BIND", format!("127.77.0.{}", rank + 1));
        Rank::start(&mut command)
    };
    let mut ranks = [start(0), start(1)];
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "ready\n"));
    let taken =
        cluster.rank(&program, &["call"], 2, 0).env("INCCL_JOIN_TIMEOUT_MS", "100").output();
    let printed = String::from_utf8(taken.unwrap().stdout).unwrap();
    assert!(printed.contains("at 127.77.0.1:"), "{printed}");
}
