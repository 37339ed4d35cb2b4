//! Runs that failed once. Each stays here, as it was found and with the least trouble that showed
//! it, so that what it found is not made again.

use millstream_sim::scenarios::rc_chaos::{self, Options, Trouble};
use millstream_sim::scenarios::{Outputs, Parameters, run};

/// Runs of rc-chaos: why, the seed, what is left out, and how many requests a direction has.
const RC_CHAOS: &[(&str, u64, &str, Option<u32>)] = &[
    (
        "a host that came back has a queue pair with a number of before; one queue pair of a peer \
         is connected to it, and another still tries to reach its predecessor",
        7_263_308,
        "",
        None,
    ),
    (
        "the same",
        7_263_308,
        "loss,duplicate,reorder,blackout,reset,deregister,revoke,starve,pause,drain,short",
        Some(4),
    ),
    ("the same, of a host that always gives the same numbers again", 360, "", None),
    (
        "the same, and what the one that still tries sends has the packet sequence number that is \
         expected of the other: the run must not draw it",
        20_467_322,
        "",
        None,
    ),
    (
        "the same",
        20_467_322,
        "loss,blackout,deregister,revoke,starve,pause,drain,short,keys",
        Some(16),
    ),
    (
        "a READ waited for another one's answer, which did not come, and so was not silent itself: the check \
         must not count that time",
        6_019_991,
        "",
        None,
    ),
];

/// Runs of the other scenarios: why, which, and the seed.
const OTHERS: &[(&str, &str, u64)] = &[
    ("trouble that was planned before the last transfers began after them", "te-chaos", 6166),
    (
        "a peer was started again, and each rail to the one before failed once",
        "te-chaos",
        1_003_462,
    ),
    (
        "a request for a connection came twice, and the refusal of the second one ended the test of the \
         connection, each time",
        "te-chaos",
        1_003_138,
    ),
    (
        "each task that ended behind a fence that was waited for asked for it once more",
        "te-chaos",
        2_850_443_395_801_043_352,
    ),
    ("the same", "tent-chaos", 507_251_995_007_070_056),
    (
        "a rank said beyond its window that it has nothing, and nobody was told that the communicator had \
         ended for that",
        "inc-chaos",
        2102,
    ),
    ("the same, in a tree", "inc-chaos", 2906),
    (
        "a rank takes itself for the root of a Broadcast, and has no vector",
        "inc-chaos",
        1174078271078329387,
    ),
    (
        "a switch that owed data was told that the next call is awaited, which nobody called, and it asked \
         its ranks for ever",
        "inc-chaos",
        9_049_628,
    ),
    ("the same, with other calls behind", "inc-chaos", 9_017_174),
    (
        "a queue pair that probes one of a machine that has died sends the oldest and the newest packet: the \
         check must know that it has sent those between",
        "control-chaos",
        21584,
    ),
    ("the same, of longer messages", "control-chaos", 35267),
    ("the same, of a rank that has died", "control-chaos", 50738),
    ("the same, of two queue pairs", "control-chaos", 61722),
    ("the same, of a switch", "control-chaos", 94266),
    (
        "a rank stood still, was given up meanwhile, and came back to a controller that was restarted and knew \
         nothing of that: the check must let it say that its switch is lost, which has ended its node",
        "control-chaos",
        63202,
    ),
    (
        "a task that was refused memory on one rail, and then canceled, waited for another rail that was silent",
        "te-chaos",
        98347,
    ),
    (
        "a queue of less room than a packet of each connection lost the answers to a READ, and what was left of its \
         requests was lost otherwise, eight times in a row: the run must not draw such a queue",
        "swarm",
        6_852_576_201_835_879_803,
    ),
];

#[test]
fn rc_chaos_runs_that_failed_once_pass() {
    for &(why, seed, without, operations) in RC_CHAOS {
        let trouble = |name| Trouble::from_name(name).unwrap_or_else(|| panic!("{name}?"));
        let without = without.split(',').filter(|name| !name.is_empty()).map(trouble).collect();
        let options = Options { seed, without, operations };
        let outcomes = rc_chaos::run(&options, Outputs::default()).unwrap();
        assert!(outcomes.report.passed(), "{options}: {why}\n{}", outcomes.report);
    }
}

#[test]
fn runs_of_other_scenarios_that_failed_once_pass() {
    for &(why, scenario, seed) in OTHERS {
        let report = run(scenario, &Parameters { seed, ..Parameters::default() }, None).unwrap();
        assert!(report.passed(), "{why}\n{report}");
    }
}
