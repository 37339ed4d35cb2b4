//! The transfer engine's decisions under everything at once. A seed that fails here is a bug;
//! `millstream sim --scenario te-chaos --seed N` shows it again.

use millstream_sim::scenarios::Outputs;
use millstream_sim::scenarios::rc_chaos::Tally;
use millstream_sim::scenarios::te_chaos::{Options, Outcomes, run};

fn outcomes(options: &Options) -> Outcomes {
    run(options, Outputs::default()).unwrap()
}

#[test]
fn whatever_happens() {
    let mut tally = Tally::default();
    for seed in 0..400 {
        let outcomes = outcomes(&Options::new(seed));
        assert!(outcomes.report.passed(), "{}", outcomes.report);
        tally.merge(&outcomes.tally);
    }
    // All of it did happen.
    for name in [
        "answers of earlier connections",
        "completions withheld",
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
        "ended: timeout",
        "ended: timeout, undefined",
        "fences asked for",
        "fences confirmed",
        "NIC flaps",
        "NICs that wait for memory",
        "packets: of no queue pair",
        "packets: very late",
        "paths cut",
        "peers that are gone",
        "processes killed",
        "processes stopped",
        "restarts noticed",
        "slices: broken",
        "slices: done",
        "slices: flushed",
        "tests of rails: answered",
        "tests of rails: failed",
        "transfers for which there is no rail",
    ] {
        assert!(tally.count(name) > 0, "{name} never happened:\n{tally}");
    }
    assert_eq!(tally.count("slices: refused"), 0);
}

#[test]
fn a_seed_is_a_run() {
    for seed in 0..5 {
        let [first, second] = [(); 2].map(|()| outcomes(&Options::new(seed)));
        assert_eq!(first.report.digest, second.report.digest);
        assert_eq!(first.tally, second.tally);
    }
}
