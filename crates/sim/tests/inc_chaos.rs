//! In-network collectives under everything at once. A seed that fails here is a bug;
//! `millstream sim --scenario inc-chaos --seed N` shows it again.

use millstream_inc::{Collective, DataType, ReduceOperation};
use millstream_sim::scenarios::Outputs;
use millstream_sim::scenarios::inc_chaos::{Outcomes, run};
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
    let collectives = Collective::ALL.iter().map(|it| it.name());
    let types = DataType::ALL.iter().map(|it| it.name());
    let operations = ReduceOperation::ALL.iter().map(|it| it.name());
    let others = [
        "aborts on request",
        "absences: from a call in which ranks differ",
        "absences: late for a call",
        "absences: late for a call in which ranks differ",
        "absences: the rank that differs is late",
        "acknowledgements that were kept back",
        "breaches",
        "calls in chunks",
        "calls whose vector goes with the descriptor",
        "communicators of hosts with several ranks",
        "communicators of plain hosts",
        "fail-over: calls done anew",
        "fail-over: calls made up for",
        "fail-over: communicators of hosts with several ranks",
        "fail-over: hosts with several ranks that went on",
        "fail-over: no copy of what was overwritten",
        "fail-over: not finished",
        "fail-over: parts computed anew",
        "fail-over: ranks that did all",
        "fail-over: ranks that failed",
        "fail-over: ranks that went on",
        "fail-over: results given to others",
        "fail-over: results or sources got from others",
        "fail-overs",
        "fail-overs over hosts",
        "fail-overs over switches",
        "forged: a packet again, much later",
        "forged: for a queue pair of others",
        "forged: from an address that has no part in it",
        "forged: noise",
        "forged: with a wrong ICRC",
        "forged: with an old number and other content",
        "links cut",
        "machines that acknowledge one by one",
        "machines that died",
        "machines that merge acknowledgements",
        "machines that stand still",
        "packets: RNR NAKs",
        "packets: bad ICRC",
        "packets: duplicates",
        "packets: from a wrong address",
        "plain hosts: all messages were answered",
        "plain hosts: breaches",
        "plain hosts: failed",
        "plain hosts: of different lengths",
        "ranks: all calls ended well",
        "ranks: connection broken",
        "ranks: no answer",
        "ranks: told of a lost rank",
        "ranks: told of a lost switch",
        "ranks: told of a lost switch below",
        "ranks: told of a mismatch",
        "ranks: told of a request",
        "ranks: told of a violation",
        "slow links",
        "switches: child lost",
        "switches: mismatch",
        "switches: parent lost",
        "switches: some did not hear of an abort in time",
        "switches: violation",
        "timeouts",
        "trees of communicators that have several",
        "trees of 1",
        "trees of 2",
        "trees of 3",
        "trees of 4",
        "trees of 5",
        "trees of 6",
    ];
    for name in collectives.chain(types).chain(operations).chain(others) {
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
