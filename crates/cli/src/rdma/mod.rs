//! `rdma`: one queue pair to one peer.

mod exchange;
mod link;
mod pattern;
mod pingpong;

use std::net::IpAddr;

use clap::{Args, Subcommand};

use crate::failure::{not_yet, usage};
use crate::{address, units};

/// The commands of `rdma`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Send messages to and fro, checking every byte; a peer of ibv_rc_pingpong
    Pingpong(Arguments),
    /// Measure the bandwidth of SEND
    SendBw(Arguments),
    /// Measure the bandwidth of RDMA WRITE
    WriteBw(Arguments),
    /// Measure the bandwidth of RDMA READ
    ReadBw(Arguments),
    /// Measure the rate of atomic operations
    Atomic(Arguments),
}

/// Arguments of every command of `rdma`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Device to use, such as soft-127.0.0.2
    #[arg(long, value_name = "D", conflicts_with = "bind")]
    device: Option<String>,
    /// Local address [default: one that leads to the peer]
    #[arg(long, value_name = "IP")]
    bind: Option<IpAddr>,
    /// Bytes in a message
    #[arg(long, value_name = "S", default_value = "4096", value_parser = units::size)]
    size: u64,
    /// Number of exchanges
    #[arg(long, value_name = "N", default_value_t = 1000)]
    iters: u32,
    /// TCP port on which the two sides find each other
    #[arg(long, default_value_t = 18515)]
    port: u16,
    /// Path MTU: 256, 512, 1024, 2048 or 4096
    #[arg(long, value_name = "M", default_value_t = 1024)]
    mtu: usize,
    /// Send every packet as its own datagram, as captures want it
    #[arg(long)]
    no_segmentation_offload: bool,
    /// The server to connect to; without it, be the server
    #[arg(value_name = "HOST")]
    host: Option<String>,
}

impl Arguments {
    /// The local address that was asked for.
    fn address(&self) -> anyhow::Result<Option<IpAddr>> {
        match &self.device {
            None => Ok(self.bind),
            Some(name) => address::of_device(name).map(Some).ok_or_else(|| {
                usage(format!("there is no device {name}: soft devices are named soft-ADDRESS"))
            }),
        }
    }
}

/// Runs a command of `rdma`.
pub(crate) fn run(command: &Command) -> anyhow::Result<()> {
    let name = match command {
        Command::Pingpong(arguments) => return pingpong::run(arguments),
        Command::SendBw(_) => "send-bw",
        Command::WriteBw(_) => "write-bw",
        Command::ReadBw(_) => "read-bw",
        Command::Atomic(_) => "atomic",
    };
    Err(not_yet(&format!("this version has no rdma {name}, only rdma pingpong")))
}
