//! The controller among hosts and switches. A seed that fails here is a bug;
//! `millstream sim --scenario control-chaos --seed N` shows it again.

use millstream_sim::scenarios::Outputs;
use millstream_sim::scenarios::inc_chaos::Outcomes;
use millstream_sim::scenarios::inc_chaos::control::run;
use millstream_sim::scenarios::rc_chaos::Tally;

fn outcomes(seed: u64) -> Outcomes {
    run(seed, Outputs::default()).unwrap()
}

#[test]
fn whatever_happens() {
    let mut tally = Tally::default();
    for seed in 0..1000 {
        let outcomes = outcomes(seed);
        assert!(outcomes.report.passed(), "{}", outcomes.report);
        tally.merge(&outcomes.tally);
    }
    // All of it did happen.
    for name in [
        "connections broken",
        "control connections cut",
        "controllers that died",
        "controllers that stood still",
        "jobs done",
        "jobs that were killed",
        "links cut",
        "nodes that nobody claims",
        "processes that stood still",
        "ranks that came back",
        "ranks that died",
        "ranks that left early",
        "ranks: blame a rank",
        "ranks: blame a switch",
        "ranks: not joined",
        "ranks: refused",
        "reports of switches",
        "switches that died",
        "told by the controller of a lost rank",
        "told by the controller of a lost switch",
    ] {
        assert!(tally.count(name) > 0, "{name} never happened:\n{tally}");
    }
}

#[test]
fn a_seed_is_a_run() {
    for seed in 0..5 {
        let [first, second] = [(); 2].map(|()| outcomes(seed));
        assert_eq!(first.report.digest, second.report.digest);
        assert_eq!(first.tally, second.tally);
    }
}
