//! `sim`: the same seed gives the same run, faults or not.

mod common;

use common::{Folder, run};

const FAULTS: [&str; 4] = ["sim", "--loss=10%", "--duplicate=5%", "--reorder=5%"];

#[test]
fn faults_do_not_change_the_result() {
    let report = run(&[&FAULTS[..], &["--json"]].concat()).success().json();
    assert_eq!(report["passed"], true);
    let [first] = &report["runs"].as_array().unwrap()[..] else { panic!("{report}") };
    assert_eq!(first["violations"], serde_json::json!([]));
    for count in ["lost", "duplicated", "held_back"] {
        assert!(first["packets"][count].as_u64().unwrap() > 0, "{count} in {report}");
    }
}

#[test]
fn a_seed_gives_the_same_run_again() {
    let folder = Folder::new();
    let record = |seed: &str, name: &str| {
        let file = folder.file(name);
        let output = run(&[&FAULTS[..], &["--seed", seed, "--pcap", &file]].concat()).success();
        (output.stdout, std::fs::read(file).unwrap())
    };
    let first = record("7", "first");
    assert!(first.1.len() > 10_000);
    assert!(first == record("7", "second"), "two runs of one seed differ");
    let other = record("8", "other");
    assert!(first.0 != other.0 && first.1 != other.1);
    // In JSON too.
    let json = [&FAULTS[..], &["--seed=7", "--json"]].concat();
    assert_eq!(run(&json).success().stdout, run(&json).success().stdout);
}

#[test]
fn every_scenario_runs_and_every_run_has_its_own_seed() {
    for scenario in ["allreduce", "transfer", "swarm"] {
        let arguments = ["sim", "--scenario", scenario, "--seed=3", "--runs=3", "--json"];
        let report = run(&arguments).success().json();
        let runs = report["runs"].as_array().unwrap();
        let seeds: Vec<u64> = runs.iter().map(|run| run["seed"].as_u64().unwrap()).collect();
        assert_eq!(seeds, [3, 4, 5]);
        assert_ne!(runs[0]["digest"], runs[1]["digest"]);
        // Text has a line for each.
        assert_eq!(run(&arguments[..5]).success().stdout.lines().count(), 3);
    }
}

#[test]
fn a_chaos_campaign_is_the_same_on_any_number_of_threads() {
    let campaign = |jobs: &str| {
        let arguments = ["sim", "--scenario=rc-chaos", "--runs=200", "--seed=5", "--json", jobs];
        let mut report = run(&arguments).success().json();
        assert_eq!((&report["passed"], &report["runs"]), (&true.into(), &200.into()), "{report}");
        assert_eq!(report["failures"], serde_json::json!([]));
        for timing in ["seconds", "runs_per_s", "jobs"] {
            report[timing].take();
        }
        report
    };
    let first = campaign("--jobs=1");
    assert!(first["happened"]["crashes"].as_u64().unwrap() > 0, "{first}");
    assert_eq!(first, campaign("--jobs=3"));
}

#[test]
fn the_last_seeds_are_run_too() {
    for (seed, runs) in [("18446744073709551615", 1_u64), ("18446744073709551551", 65)] {
        let count = format!("--runs={runs}");
        let arguments =
            ["sim", "--scenario=rc-chaos", "--seed", seed, &count, "--iters=1", "--json"];
        let report = run(&arguments).success().json();
        assert_eq!((&report["passed"], &report["runs"]), (&true.into(), &runs.into()), "{report}");
    }
}

#[test]
fn runs_are_told_of_in_order_on_any_number_of_threads() {
    let campaign = |jobs: &str| {
        let arguments = ["sim", "--scenario=te-chaos", "--runs=150", "--seed=5", "--json", jobs];
        run(&arguments).success().json()
    };
    let first = campaign("--jobs=1");
    let seeds = first["runs"].as_array().unwrap().iter().map(|run| run["seed"].as_u64().unwrap());
    assert!(seeds.eq(5..155), "{first}");
    assert_eq!(first, campaign("--jobs=3"));
}

#[test]
fn a_chaos_run_can_be_made_smaller_and_recorded() {
    let folder = Folder::new();
    let (pcap, log) = (folder.file("pcap"), folder.file("log"));
    let seed = ["sim", "--scenario=rc-chaos", "--seed=4", "--without=crash,loss", "--iters=2"];
    run(&[&seed[..], &["--pcap", &pcap, "--log", &log]].concat()).success();
    assert!(std::fs::read(pcap).unwrap().len() > 1000);
    assert!(std::fs::read_to_string(log).unwrap().contains("post stream"));
    let output = run(&["sim", "--scenario=rc-chaos", "--without=rain"]);
    assert!(output.failure(2).contains("blackout"), "{}", output.stderr);
    run(&["sim", "--scenario=rc-chaos", "--loss=1%"]).failure(2);
    run(&["sim", "--scenario=swarm", "--without=crash"]).failure(2);
}

#[test]
fn the_list_of_scenarios_is_what_runs() {
    let list = run(&["sim", "--list"]).success().stdout;
    assert!(list.lines().any(|name| name == "rc-chaos"), "{list}");
    let object = run(&["sim", "--list", "--json"]).success().json();
    let names = object["scenarios"].as_array().unwrap().iter().map(|name| name.as_str().unwrap());
    assert!(names.eq(list.lines()), "{object}");
    for name in list.lines() {
        let unknown = run(&["sim", "--scenario", name, "--seed=18446744073709551615", "--runs=2"]);
        assert!(unknown.failure(2).contains("2^64"), "{name}: {}", unknown.stderr);
    }
}

#[test]
fn recordings_that_cannot_be_written_are_told() {
    let output = run(&["sim", "--pcap", "no/such/folder"]);
    assert!(output.failure(1).contains("no/such/folder"), "{}", output.stderr);
}
