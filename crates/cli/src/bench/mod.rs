//! `bench`: measurements.

mod allreduce;
mod transfer;

use clap::Subcommand;

/// The commands of `bench`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure reads and writes of a segment
    Transfer(transfer::Arguments),
    /// Measure AllReduce over local processes
    Allreduce(allreduce::Arguments),
}

/// Runs a command of `bench`.
pub(crate) fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Transfer(arguments) => transfer::run(arguments),
        Command::Allreduce(arguments) => allreduce::run(arguments),
    }
}
