//! `allreduce`: one host of an AllReduce.

use std::net::IpAddr;

use clap::{Args, ValueEnum};

use crate::failure::not_yet;
use crate::units;

/// Arguments of `allreduce`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The controller's HOST:PORT
    #[arg(long, value_name = "ADDR")]
    controller: String,
    /// The group to take part in
    #[arg(long, value_name = "G")]
    group: String,
    /// Hosts in the group
    #[arg(long, value_name = "N")]
    world: u16,
    /// This host's place among them, from 0
    #[arg(long, value_name = "R")]
    rank: u16,
    /// Local address [default: one that leads to the controller]
    #[arg(long, value_name = "IP")]
    bind: Option<IpAddr>,
    #[command(flatten)]
    vector: Vector,
    /// How often
    #[arg(long, value_name = "I", default_value_t = 1)]
    iters: u32,
    /// Check every element of every result
    #[arg(long)]
    verify: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What is reduced, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct Vector {
    /// Bytes of the vector
    #[arg(long, value_name = "S", value_parser = units::size)]
    pub(crate) size: u64,
    /// Type of the elements, such as int32
    #[arg(long, value_name = "T")]
    pub(crate) dtype: String,
    /// Operation, such as sum
    #[arg(long, value_name = "O")]
    pub(crate) op: String,
    /// How vectors travel
    #[arg(long, value_enum, default_value = "write")]
    pub(crate) mode: Mode,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Mode {
    /// RDMA WRITE: the result lands where it belongs
    Write,
    /// SEND into receive requests
    Send,
}

/// Runs `allreduce`.
pub(crate) fn run(_arguments: &Arguments) -> anyhow::Result<()> {
    Err(not_yet("this version has no AllReduce"))
}
