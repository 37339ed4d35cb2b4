//! `bench allreduce`: AllReduce over local processes.

use clap::Args;

use crate::allreduce::Vector;
use crate::failure::not_yet;

/// Arguments of `bench allreduce`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Host processes
    #[arg(long, value_name = "N")]
    hosts: u16,
    /// Hosts below one switch
    #[arg(long, value_name = "F")]
    fan_in: Option<u16>,
    /// Shape of the switches
    #[arg(long, value_name = "SHAPE")]
    switches: Option<String>,
    #[command(flatten)]
    vector: Vector,
    /// How often
    #[arg(long, value_name = "I", default_value_t = 20)]
    iters: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(_arguments: &Arguments) -> anyhow::Result<()> {
    Err(not_yet("this version cannot measure AllReduce"))
}
