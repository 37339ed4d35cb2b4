//! The controller among hosts and switches: groups form, call and leave while processes die and stand still, and
//! while control connections stall and break.
//!
//! Real are the controller ([`millstream_inc::controller::Controller`]), the switches, the hosts' workers and what they
//! send on the data network. What the daemons and the library do around them, who connects again when, and what is
//! said then, is in the modules `switch` and `rank` as it is in `crates/control` and `crates/collective`.

mod agent;
mod connections;
mod controller;
mod director;
mod job;
mod rank;
mod ready;
mod stream;
mod switch;
mod trouble;
mod world;

use core::time::Duration;

use self::director::Director;
use self::world::World;
use super::Outcomes;
use super::build::Network;
use crate::scenarios::{CONTROL_CHAOS, NetworkCounts, Outputs, Parameters, Report, ScenarioError};
use crate::{Outcome, Rng, Simulation};

/// Virtual time within which a run must be over.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs a seed.
pub fn run(seed: u64, outputs: Outputs<'_>) -> Result<Outcomes, ScenarioError> {
    let mut rng = Rng::fork(seed, 0xc0_4a05);
    let world = World::draw(&mut rng);
    let mut network: Network<'_> = Simulation::new(seed);
    outputs.attach(&mut network)?;
    let mut director = Director::new(world, rng, &mut network);
    director.start(&mut network);
    let deadline = network.after(LIMIT);
    let outcome = network.run_until(deadline, |network| {
        director.advance(network);
        director.is_over()
    });
    match outcome {
        Outcome::Done | Outcome::Violated => {}
        Outcome::Quiet | Outcome::Deadline => {
            network.violate(format!("{outcome:?}, and not all jobs are over"));
        }
    }
    network.finish()?;
    let Director { world, mut tally, .. } = director;
    tally.one("runs");
    let ranks: Vec<usize> = world.jobs.iter().map(|job| job.hosts.len()).collect();
    let what = format!(
        "{} switches, jobs of {ranks:?} ranks, {} troubles",
        world.switches,
        world.troubles.len()
    );
    let report = Report {
        scenario: CONTROL_CHAOS,
        seed,
        digest: network.digest(),
        what,
        bytes: 0,
        virtual_time: Duration::from_nanos(network.now().nanos()),
        network: NetworkCounts::of(&network),
        devices: Vec::new(),
        violations: network.violations().to_vec(),
        table: Some(tally.to_string()),
    };
    Ok(Outcomes { report, tally })
}

/// The scenario `control-chaos`. Only the seed is a parameter of it.
pub(in crate::scenarios) fn scenario(
    parameters: &Parameters,
    outputs: Outputs<'_>,
) -> Result<Report, ScenarioError> {
    run(parameters.seed, outputs).map(|outcomes| outcomes.report)
}
