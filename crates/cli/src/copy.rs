//! `put` and `get`: copy a file into and out of a segment.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

use crate::failure::not_yet;
use crate::units;

/// Arguments of `put` and `get`.
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
    /// Where in the segment's buffer, from its start
    #[arg(long, value_name = "O", value_parser = units::size)]
    offset: u64,
    /// Bytes to copy [default: all of the file, or up to the end of the buffer]
    #[arg(long, value_name = "L", value_parser = units::size)]
    length: Option<u64>,
    /// Send every packet as its own datagram, as captures want it
    #[arg(long)]
    no_segmentation_offload: bool,
    /// The file
    file: PathBuf,
}

/// Runs `put`.
pub(crate) fn put(_arguments: &Arguments) -> anyhow::Result<()> {
    Err(not_yet("this version cannot copy into segments"))
}

/// Runs `get`.
pub(crate) fn get(_arguments: &Arguments) -> anyhow::Result<()> {
    Err(not_yet("this version cannot copy out of segments"))
}
