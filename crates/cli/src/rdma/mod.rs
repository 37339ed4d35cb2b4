//! `rdma`: RDMA between two machines, as libibverbs' examples and perftest do it.

mod completions;
mod connection;
mod exchange;
mod link;
mod memory;
mod patience;
mod pattern;
mod perf;
mod pingpong;
mod server;

use clap::Subcommand;

/// The commands of `rdma`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Send messages to and fro, checking every byte; a peer of ibv_rc_pingpong
    Pingpong(pingpong::Arguments),
    /// Send datagrams to and fro, checking every byte; a peer of ibv_ud_pingpong
    UdPingpong(pingpong::Common),
    /// Measure SEND
    SendBw(perf::Arguments),
    /// Measure RDMA WRITE
    WriteBw(perf::Arguments),
    /// Measure RDMA READ
    ReadBw(perf::Arguments),
    /// Measure atomic operations
    Atomic(perf::AtomicArguments),
}

/// Runs a command of `rdma`.
pub(crate) fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Pingpong(arguments) => pingpong::run(arguments),
        Command::UdPingpong(arguments) => pingpong::run_datagrams(arguments),
        Command::SendBw(arguments) => perf::run(perf::Operation::Send, arguments),
        Command::WriteBw(arguments) => perf::run(perf::Operation::Write, arguments),
        Command::ReadBw(arguments) => perf::run(perf::Operation::Read, arguments),
        Command::Atomic(arguments) => perf::run_atomic(arguments),
    }
}
