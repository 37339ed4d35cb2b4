//! The transfer engine's decisions under everything at once: eight processes of one to three NICs move
//! bytes between each other, over roce endpoints on the simulated network. NICs go away, paths are cut
//! one way, processes are killed, connections are evicted, transfers are canceled and run out of time,
//! packets are later than anyone waits, and control messages are lost, late, doubled and out of
//! order.
//!
//! A reference model (the module `ledger`) judges each write when it happens. When all has ended trouble
//! stops, every process that knows another moves some more bytes to it, and all must come to rest.

mod checks;
mod control;
mod director;
mod ledger;
mod nic;
mod process;
mod traffic;
mod trouble;
mod watch;
mod world;

use core::time::Duration;
use std::cell::RefCell;
use std::rc::Rc;

use millstream_roce::{EndpointConfig, IcrcCheck};
use millstream_transfer_core::{End, Ended, Failure, PriorityLevel};

use self::director::{Director, Event, Network, Phase};
use self::ledger::Ledger;
use self::nic::{Busy, Nic};
use self::process::Process;
use self::world::{Outages, Weather, World, address};
use super::rc_chaos::Tally;
use super::{NetworkCounts, Outputs, Parameters, Report, ScenarioError, within};
use crate::{HostOptions, NodeId, Outcome, Rng, Simulation};

/// Transfers of a run, where nothing else is said.
const TRANSFERS: u32 = 60;

/// Which run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Options {
    /// Decides everything.
    pub seed: u64,
    /// Transfers: some 11 a second of virtual time.
    pub transfers: u32,
    /// With the policy TENT, over NICs that become slow, and whose completions come in bursts, as well: so that
    /// what is measured of a rail is not what it does.
    pub tent: bool,
}

impl Options {
    /// A short run.
    pub const fn new(seed: u64) -> Self {
        Self { seed, transfers: TRANSFERS, tent: false }
    }
}

/// What a run showed.
#[derive(Clone, Debug)]
pub struct Outcomes {
    /// What there is to tell, and what does not hold.
    pub report: Report,
    /// What happened how often.
    pub tally: Tally,
}

/// Runs a seed.
pub fn run(options: &Options, outputs: Outputs<'_>) -> Result<Outcomes, ScenarioError> {
    let mut rng = Rng::fork(options.seed, 0x7ec4);
    let world = World::draw(&mut rng, options.transfers.into(), options.tent);
    let mut network = Simulation::new(options.seed);
    outputs.attach(&mut network)?;
    let mut director = build(options.seed, world, rng, &mut network);
    director.plan(&mut network, Duration::ZERO, Event::Burst);
    // Every transfer ends in two minutes, and every pause is shorter.
    let limit = Duration::from_secs(3600 + u64::from(options.transfers));
    let deadline = network.after(limit);
    let outcome = network.run_until(deadline, |network| {
        director.advance(network);
        false
    });
    if outcome != Outcome::Violated {
        if outcome == Outcome::Quiet && director.phase == Phase::Done && director.is_idle() {
            close(&mut director, &mut network);
        } else {
            let phase = director.phase;
            network.violate(format!("not finished: {outcome:?} in phase {phase:?}"));
        }
    }
    network.finish()?;
    Ok(outcomes(options, director, &network))
}

fn build(seed: u64, world: World, mut rng: Rng, network: &mut Network<'_>) -> Director {
    let ledger = Rc::new(RefCell::new(Ledger::new(seed)));
    let (busy, outages) = (Busy::default(), Rc::new(RefCell::new(Outages::default())));
    let mut processes = Vec::new();
    let mut number = 0;
    for (process, &count) in world.nics.iter().enumerate() {
        let nics = (number..number + usize::from(count)).map(NodeId).collect();
        for _ in 0..count {
            let config = EndpointConfig {
                icrc: IcrcCheck::Exact,
                max_queue_pairs: 256,
                ..EndpointConfig::new(address(number), rng.bits())
            };
            let nic = Nic::new(number, process, config, &ledger, &busy);
            network.add_machine(address(number), nic, HostOptions::default());
            number += 1;
        }
        processes.push(Process::new(nics, world.max_closed));
    }
    // Each NIC sends everything over one link.
    for from in 0..number {
        let link = network.add_link(world.link);
        for to in (0..number).filter(|&to| to != from) {
            network.route(NodeId(from), NodeId(to), link);
        }
    }
    let weather =
        Weather { outages: Rc::clone(&outages), late: world.late, rng: Rng::fork(seed, 0x1a7e) };
    network.add_rule(weather);
    // What is drawn for it is apart, so that all other runs are what they were before it was there: those that are pinned
    // among them. In that of seed 1, of which there are long ones, memory is taken back.
    let mut unregister = Rng::fork(seed, 0x0503);
    let unregister = (unregister.below(4) == 0).then_some(unregister);
    Director::new(world, (rng, unregister), processes, (ledger, busy, outages))
}

/// Nothing happens any more: nothing may be left over.
fn close(director: &mut Director, network: &mut Network<'_>) {
    for own in 0..director.processes.len() {
        let process = &director.processes[own];
        let mut kept: Vec<_> = process.by_qpn.keys().copied().collect();
        kept.extend(process.accepted.values().map(|end| (end.nic, end.qpn)));
        kept.sort_unstable();
        let nics = || process.nics.iter().copied();
        let mut live: Vec<_> = nics()
            .flat_map(|nic| network.machine(nic).live.iter().map(move |&qpn| (nic, qpn)))
            .collect();
        live.sort_unstable();
        let mut wrong = Vec::new();
        if live != kept {
            wrong.push(format!("it has the queue pairs {live:?}, and knows {kept:?}"));
        }
        if process.target.open() != process.accepted.len() || !process.wanted.is_empty() {
            let (open, wanted) = (process.target.open(), process.wanted.len());
            let accepted = process.accepted.len();
            wrong.push(format!("{open} open, {accepted} accepted, {wanted} wanted"));
        }
        for (peer, found) in &process.peers {
            if !found.flow.is_idle() || found.flow.poll_timeout().is_some() {
                wrong.push(format!("its flow to {peer} is not at rest"));
            }
            wrong.extend(found.miscounted());
        }
        for nic in nics() {
            let usage = network.machine(nic).endpoint().usage();
            if (usage.send_requests, usage.fetches, usage.completions) != (0, 0, 0) {
                wrong.push(format!("{nic:?} keeps {usage:?}"));
            }
        }
        wrong.into_iter().for_each(|what| network.violate(format!("process {own}: {what}")));
    }
}

/// The name of how a task ended.
const fn name_of_end(ended: &Ended) -> &'static str {
    match (ended.end, ended.target_undefined) {
        (End::Completed, _) => "ended: completed",
        (End::Canceled, false) => "ended: canceled",
        (End::Canceled, true) => "ended: canceled, undefined",
        (End::Timeout, false) => "ended: timeout",
        (End::Timeout, true) => "ended: timeout, undefined",
        (End::Failed(Failure::NotFenced), _) => "ended: not fenced, undefined",
        (End::Failed(_), true) => "ended: failed, undefined",
        (End::Failed(Failure::Refused), _) => "ended: refused",
        (End::Failed(Failure::Attempts), _) => "ended: attempts",
        (End::Failed(Failure::NoRail), _) => "ended: no rail",
        (End::Failed(Failure::PeerRestarted), _) => "ended: peer restarted",
        (End::Failed(Failure::PeerGone), _) => "ended: peer gone",
        (End::Failed(Failure::ShutDown), _) => "ended: shut down",
    }
}

/// What is counted of completed transfers of a level.
const fn name_of_level(level: PriorityLevel) -> &'static str {
    match level {
        PriorityLevel::Latency => "completed: latency",
        PriorityLevel::Normal => "completed: normal",
        PriorityLevel::Bulk => "completed: bulk",
    }
}

fn outcomes(options: &Options, director: Director, network: &Network<'_>) -> Outcomes {
    let mut tally = director.tally;
    tally.add("packets: very late", director.outages.borrow().late_packets);
    tally.add("writes into undefined ranges", director.ledger.borrow().writes_undefined);
    let dropped = network.machines().map(|nic| nic.endpoint().counters().dropped_qpn).sum();
    tally.add("packets: of no queue pair", dropped);
    let what = format!(
        "{} NICs of {} processes, {} transfers",
        network.machines().count(),
        director.processes.len(),
        director.made
    );
    let report = Report {
        scenario: if options.tent { super::TENT_CHAOS } else { super::TE_CHAOS },
        seed: options.seed,
        digest: network.digest(),
        what,
        bytes: director.bytes,
        virtual_time: Duration::from_nanos(network.now().nanos()),
        network: NetworkCounts::of(network),
        devices: Vec::new(),
        violations: network.violations().to_vec(),
        table: Some(tally.to_string()),
    };
    Outcomes { report, tally }
}

/// The scenario `te-chaos`, or `tent-chaos`. Only the seed and the number of transfers are parameters of it.
pub(super) fn scenario(
    parameters: &Parameters,
    outputs: Outputs<'_>,
    tent: bool,
) -> Result<Report, ScenarioError> {
    let transfers = within("iters", parameters.operations, TRANSFERS, 1, 100_000_000)?;
    run(&Options { seed: parameters.seed, transfers, tent }, outputs)
        .map(|outcomes| outcomes.report)
}
