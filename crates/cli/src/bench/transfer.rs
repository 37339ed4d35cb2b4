//! `bench transfer`: reads and writes of a segment.

use std::net::IpAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::failure::not_yet;
use crate::units;

/// Arguments of `bench transfer`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Where segments are found: p2p
    #[arg(long, value_name = "URI")]
    metadata: String,
    /// How bytes move: rdma, rdma:soft, local
    #[arg(long, value_name = "P")]
    protocol: String,
    /// Local address [default: one that leads to the segment]
    #[arg(long, value_name = "IP")]
    bind: Option<IpAddr>,
    /// The segment; with --metadata p2p its HOST:PORT
    #[arg(long, value_name = "N")]
    segment: String,
    /// What to do
    #[arg(long, value_enum)]
    op: Operation,
    /// Bytes of a request
    #[arg(long, value_name = "S", value_parser = units::size)]
    block_size: u64,
    /// Requests of a batch
    #[arg(long, value_name = "B")]
    batch_size: usize,
    /// Threads that submit batches
    #[arg(long, value_name = "T")]
    threads: usize,
    /// How long to measure
    #[arg(long, value_name = "D", value_parser = units::duration)]
    duration: Duration,
    /// Also measure a plain UDP stream and a memory copy
    #[arg(long)]
    baseline: bool,
    /// Send every packet as its own datagram, as captures want it
    #[arg(long)]
    no_segmentation_offload: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Operation {
    Read,
    Write,
    Mix,
}

pub(super) fn run(_arguments: &Arguments) -> anyhow::Result<()> {
    Err(not_yet("this version cannot measure transfers"))
}
