//! The transfer engine's decisions under everything at once. A seed that fails here is a bug;
//! `millstream sim --scenario te-chaos --seed N` shows it again.

use millstream_sim::scenarios::Outputs;
use millstream_sim::scenarios::rc_chaos::Tally;
use millstream_sim::scenarios::te_chaos::{Options, Outcomes, run};

fn outcomes(options: &Options) -> Outcomes {
    run(options, Outputs::default()).unwrap()
}

/// What happens with either policy.
const NAMES: &[&str] = &[
    "answers of earlier connections",
    "connections aborted",
    "connections closed by their initiator",
    "connections evicted",
    "connections made",
    "connections of the dead closed",
    "connections refused",
    "control ports silent",
    "ended: canceled",
    "ended: canceled, undefined",
    "ended: completed",
    "ended: failed, undefined",
    "ended: no rail",
    "ended: not fenced, undefined",
    "ended: peer gone",
    "ended: peer restarted",
    "ended: refused",
    "ended: timeout",
    "ended: timeout, undefined",
    "fences asked for",
    "fences confirmed",
    "memory taken back",
    "NIC flaps",
    "NICs that wait for memory",
    "packets: of no queue pair",
    "packets: very late",
    "paths cut",
    "peers that are gone",
    "processes killed",
    "processes stopped",
    "restarts noticed",
    "work requests: broken",
    "slices: done",
    "work requests: flushed",
    "work requests: refused",
    "tests of rails: answered",
    "tests of rails: failed",
    "transfers for which there is no rail",
];

/// What is no matter of the policy, and happens in one of a thousand runs with TENT.
const RARE_WITH_TENT: &str = "completions withheld";

/// What happens with TENT.
const TENT_NAMES: &[&str] = &[
    "NICs of changing rates",
    "NICs that are slow",
    "NICs whose completions are late",
    "completed: bulk",
    "completed: latency",
    "completed: normal",
    "floods of a level",
];

/// Makes short runs; what happened in them.
fn runs(seeds: core::ops::Range<u64>, tent: bool) -> Tally {
    let mut tally = Tally::default();
    for seed in seeds {
        let outcomes = outcomes(&Options { tent, ..Options::new(seed) });
        assert!(outcomes.report.passed(), "{}", outcomes.report);
        tally.merge(&outcomes.tally);
    }
    for name in NAMES {
        assert!(tally.count(name) > 0, "{name} never happened:\n{tally}");
    }
    tally
}

#[test]
fn whatever_happens() {
    let tally = runs(0..400, false);
    assert!(tally.count(RARE_WITH_TENT) > 0, "{tally}");
    assert!(TENT_NAMES.iter().all(|name| tally.count(name) == 0));
}

#[test]
fn whatever_happens_with_tent() {
    let tally = runs(0..600, true);
    for name in TENT_NAMES {
        assert!(tally.count(name) > 0, "{name} never happened:\n{tally}");
    }
}

#[test]
fn a_seed_is_a_run() {
    for seed in 0..5 {
        for tent in [false, true] {
            let options = Options { tent, ..Options::new(seed) };
            let [first, second] = [(); 2].map(|()| outcomes(&options));
            assert_eq!(first.report.digest, second.report.digest);
            assert_eq!(first.tally, second.tally);
        }
    }
}
