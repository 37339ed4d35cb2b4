//! In-network collectives under everything at once: hosts and switches, trees of one to six levels, several
//! communicators, all collectives, types and operations in both modes, over links that lose, double,
//! reorder and corrupt packets. Machines stand still, are cut off and die, ranks disagree or break the
//! protocol, and an outsider forges packets.
//!
//! Every result is compared with a reference that is computed in another way (the module `reference`), all
//! memory around it and after the call too. Where nothing happened that a communicator need not survive, every
//! call has to succeed on every rank; where something did, every rank has to hear of it. One communicator goes on when
//! a switch is lost (the module `failover`), and hosts may have several ranks (`several`).

mod build;
mod call;
pub mod control;
mod director;
mod ends;
mod failover;
mod machine;
mod member;
mod mismatch;
mod outsider;
mod plain;
mod reference;
mod several;
mod slow;
mod tree;
mod world;

use core::time::Duration;
use std::cell::RefCell;
use std::rc::Rc;

use self::director::Director;
use self::outsider::{Seen, Weather};
use self::world::World;
use super::rc_chaos::Tally;
use super::{NetworkCounts, Outputs, Parameters, Report, ScenarioError};
use crate::{Outcome, Rng, Simulation};

/// Which numbers decide on several trees of a communicator: such that the runs that failed once (`tests/pinned.rs`) have
/// none.
const TREES: u64 = 0x7f31;

/// The same of hosts with several ranks, and of a communicator that goes on when a switch is lost: none of those runs has any.
const SEVERAL: u64 = 0x5e6a;
const FAILOVER: u64 = 0xfa1c;

/// The same of hosts with several ranks in a communicator that goes on.
const SEVERAL_GO_ON: u64 = 0x5e9f;

/// The same of ranks that call late, or not at all.
const ABSENCES: u64 = 0xab67;

/// The same of a communicator of plain hosts.
const PLAIN: u64 = 0x91bd;

/// The same of a machine that is slow to acknowledge.
const SLOW: u64 = 0x5110;

/// Virtual time within which a run must be over.
const LIMIT: Duration = Duration::from_secs(3600);

/// What a run showed.
#[derive(Clone, Debug)]
pub struct Outcomes {
    /// What there is to tell, and what does not hold.
    pub report: Report,
    /// What happened how often.
    pub tally: Tally,
}

/// Runs a seed.
pub fn run(seed: u64, outputs: Outputs<'_>) -> Result<Outcomes, ScenarioError> {
    let mut rng = Rng::fork(seed, 0x17c_4a05);
    let mut world = World::draw(&mut rng);
    world.share_hosts(&mut Rng::fork(seed, SEVERAL));
    world.add_trees(&mut Rng::fork(seed, TREES));
    world.add_absences(&mut Rng::fork(seed, ABSENCES));
    world.add_plain(&mut Rng::fork(seed, PLAIN));
    world.add_failover(&mut Rng::fork(seed, FAILOVER), &mut Rng::fork(seed, SEVERAL_GO_ON));
    world.add_slow(&mut Rng::fork(seed, SLOW));
    let mut network = Simulation::new(seed);
    outputs.attach(&mut network)?;
    let built = build::build(&world, &mut rng, &mut network);
    let bytes = built.bytes;
    let seen = Rc::new(RefCell::new(Seen::default()));
    network.add_rule(Weather {
        acknowledgement_loss: world.acknowledgement_loss,
        late: world.late,
        rng: Rng::fork(seed, 0x1a7e),
        seen: Rc::clone(&seen),
        outsider: built.outsider,
    });
    let mut director = Director::new(world, built, seen, rng);
    director.start(&mut network);
    let deadline = network.after(LIMIT);
    let outcome = network.run_until(deadline, |network| {
        director.advance(network);
        false
    });
    match outcome {
        Outcome::Violated => {}
        Outcome::Quiet => director.close(&mut network),
        Outcome::Done | Outcome::Deadline => {
            network.violate("an hour has passed, and packets or timers go on".into());
        }
    }
    network.finish()?;
    Ok(outcomes(seed, director, &network, bytes))
}

fn outcomes(seed: u64, director: Director, network: &build::Network<'_>, bytes: u64) -> Outcomes {
    let Director { world, mut tally, .. } = director;
    tally.one("runs");
    for group in &world.groups {
        if world.groups.iter().filter(|it| it.family == group.family).count() > 1 {
            tally.one("trees of communicators that have several");
        }
        for absence in &group.absences {
            tally.one(match (absence.late, group.mismatch) {
                (None, _) => "absences: from a call in which ranks differ",
                (Some(_), Some((call, odd, _))) if (call, odd) == (absence.call, absence.rank) => {
                    "absences: the rank that differs is late"
                }
                (Some(_), Some((call, ..))) if call == absence.call => {
                    "absences: late for a call in which ranks differ"
                }
                (Some(_), _) => "absences: late for a call",
            });
        }
        if !group.several.is_empty() {
            tally.one("communicators of hosts with several ranks");
        }
        if group.plain.is_some() {
            tally.one("communicators of plain hosts");
            continue;
        }
        for shape in &group.calls {
            if shape.stripe.is_none() {
                tally.one("calls in chunks");
            }
            tally.one(shape.collective.name());
            if shape.is_small(&group.sizes) {
                tally.one("calls whose vector goes with the descriptor");
            }
            tally.one(shape.data_type.name());
            if shape.reduces() {
                tally.one(shape.operation.name());
            }
        }
        const LEVELS: [&str; 7] = [
            "",
            "trees of 1",
            "trees of 2",
            "trees of 3",
            "trees of 4",
            "trees of 5",
            "trees of 6",
        ];
        tally.one(LEVELS[group.tree.levels().min(6)]);
    }
    for counters in network.machines().filter_map(|machine| machine.counters()) {
        for (name, count) in [
            ("packets: duplicates", counters.duplicates),
            ("packets: from a wrong address", counters.dropped_source),
            ("packets: bad ICRC", counters.dropped_icrc),
            ("packets: RNR NAKs", counters.rnr_naks_sent),
            ("timeouts", counters.timeouts),
        ] {
            tally.add(name, count);
        }
    }
    let what = format!(
        "{} hosts, {} switches, {} communicators with trees of {:?} nodes, {} calls",
        world.hosts,
        world.switches,
        world.groups.len(),
        world.groups.iter().map(|group| group.tree.nodes.len()).collect::<Vec<_>>(),
        world.groups.iter().map(|group| group.calls.len()).sum::<usize>(),
    );
    if let Some(slow) = &world.slow {
        tally.one(if slow.merges {
            "machines that merge acknowledgements"
        } else {
            "machines that acknowledge one by one"
        });
        tally.add("acknowledgements that were kept back", {
            network.machines().map(machine::Participant::kept_back).sum()
        });
    }
    let report = Report {
        scenario: super::INC_CHAOS,
        seed,
        digest: network.digest(),
        what,
        bytes,
        virtual_time: Duration::from_nanos(network.now().nanos()),
        network: NetworkCounts::of(network),
        devices: Vec::new(),
        violations: network.violations().to_vec(),
        table: Some(tally.to_string()),
    };
    Outcomes { report, tally }
}

/// The scenario `inc-chaos`. Only the seed is a parameter of it.
pub(super) fn scenario(
    parameters: &Parameters,
    outputs: Outputs<'_>,
) -> Result<Report, ScenarioError> {
    run(parameters.seed, outputs).map(|outcomes| outcomes.report)
}
