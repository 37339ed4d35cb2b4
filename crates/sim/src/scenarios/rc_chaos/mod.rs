//! Everything that may happen to reliable connections, at once: faulty links, blackouts, queue
//! pairs that are reset and connected anew while packets of their former lives are under way, hosts
//! that crash, memory that goes away, receivers that starve, completions that nobody polls. A run
//! is drawn from its seed alone, and small, so that there can be very many.
//!
//! A reference model (the module `stream`) says at any time which byte may appear where; every effect
//! on memory and every completion is held against it as it happens. Failures must have a reason that
//! the run gave. When all has ended, trouble stops, every connection must carry a last message each
//! way, the network must come to rest, and all memory is compared.

mod arrivals;
mod campaign;
mod connection;
mod datagrams;
mod director;
mod draw;
mod execution;
mod follow;
mod host;
mod lives;
mod memory;
mod operation;
mod pattern;
mod pool;
mod ports;
mod sharing;
mod stream;
mod tally;
mod traffic;
mod trouble;
mod world;

use core::fmt;
use core::time::Duration;

use millstream_roce::{EndpointConfig, IcrcCheck};

pub use campaign::{Campaign, shrink};
pub use tally::Tally;
pub use world::Trouble;

use super::{NetworkCounts, Outputs, Parameters, Report, ScenarioError};
use crate::{NodeId, Outcome, Simulation};
use director::{Director, Network, Phase};
use host::Host;
use world::World;

/// Which run.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Options {
    /// Decides everything.
    pub seed: u64,
    /// Trouble to leave out.
    pub without: Vec<Trouble>,
    /// Requests of each direction of a connection at most, where given.
    pub operations: Option<u32>,
}

impl Options {
    /// All of a seed's trouble.
    pub fn new(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }
}

impl fmt::Display for Options {
    /// As arguments of `millstream sim`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--scenario {} --seed {}", super::RC_CHAOS, self.seed)?;
        if !self.without.is_empty() {
            let names: Vec<&str> = self.without.iter().map(|trouble| trouble.name()).collect();
            write!(f, " --without {}", names.join(","))?;
        }
        self.operations.map_or(Ok(()), |count| write!(f, " --iters {count}"))
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

/// Virtual time within which a run must be over: patience of seconds for each of some hundred
/// packets of each of some requests.
const LIMIT: Duration = Duration::from_secs(1 << 33);

/// Runs a seed.
pub fn run(options: &Options, outputs: Outputs<'_>) -> Result<Outcomes, ScenarioError> {
    let mut world = World::draw(options.seed);
    for trouble in &options.without {
        world.remove(*trouble);
    }
    if let Some(limit) = options.operations {
        for stream in world.connections.iter_mut().flat_map(|plan| &mut plan.streams) {
            stream.operations.truncate(limit as usize);
        }
    }
    let mut network = Simulation::new(options.seed);
    outputs.attach(&mut network)?;
    let links = build(&world, &mut network);
    let mut director = Director::new(world, links);
    director.start(&mut network);
    let deadline = network.after(LIMIT);
    let outcome = network.run_until(deadline, |network| {
        director.advance(network);
        false
    });
    if outcome != Outcome::Violated {
        if outcome == Outcome::Quiet && director.phase == Phase::Done {
            director.close(&mut network);
        } else {
            let phase = director.phase;
            network.violate(format!("not finished: {outcome:?} in phase {phase:?}"));
            for stream in 0..director.streams.len() {
                if !director.streams[stream].is_idle() {
                    director.violate(&mut network, stream, "not finished");
                }
            }
        }
    }
    network.finish()?;
    Ok(outcomes(options, &director, &network))
}

fn build(world: &World, network: &mut Network<'_>) -> Vec<((usize, usize), crate::LinkId)> {
    let checks_integrity = world.link.corrupt != crate::Probability::NEVER;
    for plan in &world.hosts {
        let config = EndpointConfig {
            icrc: IcrcCheck::Exact,
            max_window: plan.max_window,
            ..EndpointConfig::new(plan.address, plan.seed)
        };
        let host = Host::new(config, plan.polling, checks_integrity);
        network.add_machine(plan.address, host, plan.options);
    }
    let count = world.hosts.len();
    let pairs = (0..count).flat_map(|from| (from + 1..count).map(move |to| (from, to)));
    pairs
        .flat_map(|(from, to)| {
            let [there, back] = network.connect(NodeId(from), NodeId(to), world.link);
            [((from, to), there), ((to, from), back)]
        })
        .collect()
}

fn outcomes(options: &Options, director: &Director, network: &Network<'_>) -> Outcomes {
    let mut tally = director.tally.clone();
    tally.one("runs");
    let operations = || director.streams.iter().flat_map(|stream| &stream.plan.operations);
    let what = format!(
        "{} hosts, {} connections in {} lives, {} requests, {} disturbances",
        director.world.hosts.len(),
        director.connections.len(),
        director.connections.iter().map(|connection| connection.life).sum::<u32>(),
        operations().count(),
        director.world.disturbances.len(),
    );
    for host in network.machines() {
        for counters in host.counters() {
            for (name, count) in [
                ("packets: duplicates", counters.duplicates),
                ("packets: out of sequence", counters.out_of_sequence),
                ("packets: RNR NAKs", counters.rnr_naks_sent),
                ("packets: late, of no queue pair", counters.dropped_qpn),
                ("packets: late, in no state for them", counters.dropped_state),
                ("packets: late responses", counters.dropped_response),
                ("packets: bad ICRC", counters.dropped_icrc),
                ("timeouts", counters.timeouts),
            ] {
                tally.add(name, count);
            }
        }
    }
    let report = Report {
        scenario: super::RC_CHAOS,
        seed: options.seed,
        digest: network.digest(),
        what,
        bytes: operations().map(|operation| u64::from(operation.applied)).sum(),
        virtual_time: Duration::from_nanos(network.now().nanos()),
        network: NetworkCounts::of(network),
        devices: Vec::new(),
        violations: network.violations().to_vec(),
        table: None,
    };
    Outcomes { report, tally }
}

/// The scenario `rc-chaos`. Only the seed and the number of operations are parameters of it.
pub(super) fn scenario(
    parameters: &Parameters,
    outputs: Outputs<'_>,
) -> Result<Report, ScenarioError> {
    let Parameters { seed, operations, .. } = *parameters;
    run(&Options { seed, without: Vec::new(), operations }, outputs).map(|outcomes| outcomes.report)
}
