//! Whole runs with names, parameters and a report.

pub mod allreduce;
pub mod congestion;
pub mod grid;
pub mod inc_chaos;
pub mod inc_scale;
pub mod rc_chaos;
mod report;
pub mod swarm;
pub mod te_chaos;
pub mod transfer;

use std::io::{self, Write};

use thiserror::Error;

pub use report::{NetworkCounts, Report};

use crate::{ConnectionOptions, LinkOptions, Machine, Probability, Simulation};

/// The scenarios that [`run`] knows, the default one first.
pub const NAMES: [&str; 11] = [
    "allreduce",
    "transfer",
    "swarm",
    "grid",
    RC_CHAOS,
    "congestion",
    TE_CHAOS,
    TENT_CHAOS,
    INC_CHAOS,
    CONTROL_CHAOS,
    INC_SCALE,
];
const RC_CHAOS: &str = "rc-chaos";
const TE_CHAOS: &str = "te-chaos";
const TENT_CHAOS: &str = "tent-chaos";
const INC_CHAOS: &str = "inc-chaos";
const CONTROL_CHAOS: &str = "control-chaos";
const INC_SCALE: &str = "inc-scale";

/// Connections that survive 8.6 s of silence, where half a second is usual: of packets and answers
/// that are both lost one time in five, ten in a row are, sooner or later.
const PATIENT: ConnectionOptions = ConnectionOptions { timeout: 18, ..ConnectionOptions::DEFAULT };

/// What a scenario is run with. What is `None` is the scenario's own choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// Decides everything random.
    pub seed: u64,
    /// Fraction of packets that are lost.
    pub loss: f64,
    /// Fraction of packets that arrive twice.
    pub duplicate: f64,
    /// Fraction of packets that are overtaken by later ones.
    pub reorder: f64,
    /// Fraction of packets that have a bit flipped.
    pub corrupt: f64,
    /// Hosts of an allreduce: over one switch 1 to 64, over trees 1 to 65,536.
    pub hosts: Option<u32>,
    /// Bytes of an allreduce's vector, or of a transfer's longest message.
    pub length: Option<u64>,
    /// How many allreduces, or messages per connection and direction.
    pub operations: Option<u32>,
    /// Queue pairs of a transfer.
    pub connections: Option<u32>,
}

impl Default for Parameters {
    /// A network with a little of every fault.
    fn default() -> Self {
        Self {
            seed: 1,
            loss: 0.01,
            duplicate: 0.01,
            reorder: 0.01,
            corrupt: 0.001,
            hosts: None,
            length: None,
            operations: None,
            connections: None,
        }
    }
}

impl Parameters {
    /// The default link with these faults.
    fn link(&self) -> Result<LinkOptions, ScenarioError> {
        Ok(LinkOptions {
            loss: probability("loss", self.loss)?,
            duplicate: probability("duplicate", self.duplicate)?,
            reorder: probability("reorder", self.reorder)?,
            corrupt: probability("corrupt", self.corrupt)?,
            ..LinkOptions::default()
        })
    }
}

/// Why a scenario was not run, or not to its end.
#[derive(Debug, Error)]
pub enum ScenarioError {
    /// There is none of this name.
    #[error("there is no scenario \"{0}\": choose one of {NAMES:?}")]
    Unknown(String),
    /// A parameter is out of range.
    #[error("{name} = {value} is out of range: {range}")]
    Parameter {
        /// Which.
        name: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        range: String,
    },
    /// The capture or the log could not be written.
    #[error("the output of the simulation cannot be written: {0}")]
    Output(#[from] io::Error),
    /// The scenario is many runs, which do not fit one capture.
    #[error("scenario \"{0}\" makes many runs and writes no capture or log: run one of the others")]
    NoOutput(&'static str),
}

/// Where a run is recorded besides its report.
#[derive(Default)]
pub struct Outputs<'a> {
    /// Every packet as it is sent, as pcap.
    pub pcap: Option<&'a mut dyn Write>,
    /// Every event, one line each.
    pub log: Option<&'a mut dyn Write>,
}

impl<'a> Outputs<'a> {
    /// Lets a simulation write to them.
    fn attach<M: Machine>(self, simulation: &mut Simulation<'a, M>) -> io::Result<()> {
        if let Some(log) = self.log {
            simulation.log(log);
        }
        if let Some(pcap) = self.pcap {
            simulation.capture(pcap)?;
        }
        Ok(())
    }
}

/// Runs a scenario.
pub fn run(
    name: &str,
    parameters: &Parameters,
    pcap: Option<&mut dyn Write>,
) -> Result<Report, ScenarioError> {
    run_with_outputs(name, parameters, Outputs { pcap, log: None })
}

/// Runs a scenario, with more to see than its packets.
pub fn run_with_outputs(
    name: &str,
    parameters: &Parameters,
    outputs: Outputs<'_>,
) -> Result<Report, ScenarioError> {
    match name {
        "allreduce" => allreduce::scenario(parameters, outputs),
        "transfer" => transfer::scenario(parameters, outputs),
        "swarm" => swarm::scenario(parameters, outputs),
        "grid" => grid::scenario(parameters, &outputs),
        "congestion" => congestion::scenario(parameters, &outputs),
        RC_CHAOS => rc_chaos::scenario(parameters, outputs),
        INC_CHAOS => inc_chaos::scenario(parameters, outputs),
        CONTROL_CHAOS => inc_chaos::control::scenario(parameters, outputs),
        INC_SCALE => inc_scale::scenario(parameters, &outputs),
        TE_CHAOS => te_chaos::scenario(parameters, outputs, false),
        TENT_CHAOS => te_chaos::scenario(parameters, outputs, true),
        _ => Err(ScenarioError::Unknown(name.into())),
    }
}

fn probability(name: &'static str, value: f64) -> Result<Probability, ScenarioError> {
    Probability::new(value).ok_or_else(|| ScenarioError::Parameter {
        name,
        value: value.to_string(),
        range: "0 to 1".into(),
    })
}

/// The value, or the scenario's choice, when it is between the limits.
fn within<T: Copy + PartialOrd + core::fmt::Display>(
    name: &'static str,
    value: Option<T>,
    choice: T,
    first: T,
    last: T,
) -> Result<T, ScenarioError> {
    let value = value.unwrap_or(choice);
    if value < first || value > last {
        let range = format!("{first} to {last}");
        return Err(ScenarioError::Parameter { name, value: value.to_string(), range });
    }
    Ok(value)
}
