//! `sim`: scenarios in the seeded network simulator.

use std::path::PathBuf;

use clap::Args;

use crate::failure::not_yet;
use crate::units;

/// Arguments of `sim`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Which scenario
    #[arg(long, value_name = "NAME|FILE")]
    scenario: Option<String>,
    /// The seed of the first run
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// How many runs, each with the next seed
    #[arg(long, value_name = "R", default_value_t = 1)]
    runs: u64,
    /// Share of packets that are lost
    #[arg(long, value_name = "SHARE", value_parser = units::share)]
    loss: Option<f64>,
    /// Share of packets that come twice
    #[arg(long, value_name = "SHARE", value_parser = units::share)]
    duplicate: Option<f64>,
    /// Share of packets that others overtake
    #[arg(long, value_name = "SHARE", value_parser = units::share)]
    reorder: Option<f64>,
    /// Record the packets of the first run
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs `sim`.
pub(crate) fn run(_arguments: &Arguments) -> anyhow::Result<()> {
    Err(not_yet("this version has no simulator"))
}
