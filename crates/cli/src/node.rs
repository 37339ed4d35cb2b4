//! `node`: serves a segment of memory.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

use crate::failure::not_yet;
use crate::units;

/// Arguments of `node`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The node's name
    #[arg(long, value_name = "N")]
    name: String,
    /// Where segments are found: p2p
    #[arg(long, value_name = "URI")]
    metadata: String,
    /// How bytes move: rdma, rdma:soft, local
    #[arg(long, value_name = "P", value_delimiter = ',', required = true)]
    protocol: Vec<String>,
    /// Local address; may be given more than once
    #[arg(long, value_name = "IP")]
    bind: Vec<IpAddr>,
    /// Bytes of memory to serve
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    buffer: u64,
    /// Put this file's bytes at the start of the memory
    #[arg(long, value_name = "F")]
    file: Option<PathBuf>,
    /// Send every packet as its own datagram, as captures want it
    #[arg(long)]
    no_segmentation_offload: bool,
}

/// Runs `node`.
pub(crate) fn run(_arguments: &Arguments) -> anyhow::Result<()> {
    Err(not_yet("this version cannot serve segments"))
}
