//! Reliable connections under everything at once. A seed that fails here is a bug;
//! `millstream sim --scenario rc-chaos --seed N` shows it again.

use millstream_sim::scenarios::Outputs;
use millstream_sim::scenarios::rc_chaos::{Campaign, Options, Trouble, run};

fn outcomes(options: &Options) -> millstream_sim::scenarios::rc_chaos::Outcomes {
    run(options, Outputs::default()).unwrap()
}

#[test]
fn whatever_happens() {
    let mut campaign = Campaign::new();
    for seed in 0..1000 {
        let outcomes = outcomes(&Options::new(seed));
        assert!(outcomes.report.passed(), "{}", outcomes.report);
        campaign.add(&outcomes);
    }
    // All of it did happen.
    let tally = &campaign.tally;
    for name in [
        "access revoked",
        "blackouts",
        "completion queues left alone",
        "completion queues overrun",
        "crashes",
        "datagrams: delivered",
        "datagrams: failed",
        "datagrams: flushed",
        "datagrams: no receive request",
        "datagrams: queue pairs taken down",
        "datagrams: send queues drained",
        "datagrams: send queues recovered",
        "datagrams: sent",
        "packet sequence numbers wrapped",
        "packets: bad ICRC",
        "packets: duplicates",
        "packets: late responses",
        "packets: late, in no state for them",
        "packets: late, of no queue pair",
        "packets: out of sequence",
        "packets: RNR NAKs",
        "posted: compare-and-swap",
        "posted: datagram",
        "posted: datagram for nobody",
        "posted: datagram of unknown memory",
        "posted: datagram with another queue key",
        "posted: fetch-and-add",
        "posted: inline",
        "posted: key that is being invalidated",
        "posted: key that may not be invalidated",
        "posted: READ",
        "posted: SEND",
        "posted: SEND with invalidate",
        "posted: WRITE",
        "posted: WRITE of several messages",
        "posted: WRITE with immediate",
        "queue pairs destroyed",
        "queue pairs failed",
        "queue pairs flushed and reset",
        "queue pairs reset",
        "queue pairs taken to ERR",
        "receive: flushed",
        "receive: local length error",
        "receive: local protection error",
        "receive: success",
        "receives starved",
        "regions deregistered",
        "regions invalidated",
        "send queues drained",
        "shared receive queues ran low",
        "send: flushed",
        "send: local protection error",
        "send: receiver not ready exceeded",
        "send: remote access error",
        "send: remote invalid request",
        "send: remote operational error",
        "send: retry count exceeded",
        "send: success",
        "timeouts",
    ] {
        assert!(tally.count(name) > 0, "{name} never happened:\n{tally}");
    }
    assert_eq!(tally.count("send: other") + tally.count("receive: other"), 0);
}

#[test]
fn a_seed_is_a_run() {
    for seed in 0..20 {
        let [first, second] = [(); 2].map(|()| outcomes(&Options::new(seed)));
        assert_eq!(first.report.digest, second.report.digest);
        assert_eq!(first.tally, second.tally);
    }
}

#[test]
fn without_trouble_nothing_fails() {
    for seed in 0..100 {
        let without = Trouble::ALL.to_vec();
        let outcomes = outcomes(&Options { without, ..Options::new(seed) });
        assert!(outcomes.report.passed(), "{}", outcomes.report);
        let trouble =
            ["crashes", "blackouts", "queue pairs taken to ERR", "send: remote access error"];
        for name in trouble {
            assert_eq!(outcomes.tally.count(name), 0, "{name} in seed {seed}");
        }
    }
}

#[test]
fn campaigns_made_in_parts_are_the_same() {
    let campaign = |seeds: core::ops::Range<u64>| {
        let mut campaign = Campaign::new();
        seeds.for_each(|seed| campaign.add(&outcomes(&Options::new(seed))));
        campaign
    };
    let merge = |parts: [Campaign; 2]| {
        let mut all = Campaign::new();
        parts.iter().for_each(|part| all.merge(part));
        (all.digest, all.runs, all.bytes, all.tally)
    };
    let parts = || [campaign(0..5), campaign(5..10)];
    assert_eq!(merge(parts()), merge(parts()));
    assert_eq!(merge(parts()).1, 10);
}
