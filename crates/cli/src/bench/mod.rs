//! `bench`: measurements.

mod allreduce;
mod collective;
pub(crate) mod figures;
mod rdma;
mod row;
mod sweep;
mod transfer;
mod tree;

use clap::Subcommand;

use crate::settings::SettingsArguments;

/// The commands of `bench`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure reads and writes of a segment
    Transfer(Box<transfer::Arguments>),
    /// Measure WRITE, READ and SEND between two soft devices, beside plain UDP and TCP
    Rdma(rdma::Arguments),
    /// The other end of `bench rdma`'s latency
    #[command(hide = true)]
    LatencyEnd(rdma::LatencyEnd),
    /// An end of `bench rdma --processes`
    #[command(hide = true)]
    BandwidthEnd(rdma::BandwidthEnd),
    /// Measure AllReduce over local processes
    Allreduce(allreduce::Arguments),
    /// Measure collectives over local processes
    Collective(collective::Arguments),
    /// Check all collectives, types and operations against results computed here
    Sweep(sweep::Arguments),
}

impl Command {
    pub(crate) const fn settings(&self) -> Option<&SettingsArguments> {
        match self {
            Self::Transfer(arguments) => Some(arguments.settings()),
            _ => None,
        }
    }
}

/// Runs a command of `bench`.
pub(crate) fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Transfer(arguments) => transfer::run(arguments),
        Command::Rdma(arguments) => rdma::run(arguments),
        Command::LatencyEnd(arguments) => rdma::run_latency_end(arguments),
        Command::BandwidthEnd(arguments) => rdma::run_bandwidth_end(arguments),
        Command::Allreduce(arguments) => allreduce::run(arguments),
        Command::Collective(arguments) => collective::run(arguments),
        Command::Sweep(arguments) => sweep::run(arguments),
    }
}
