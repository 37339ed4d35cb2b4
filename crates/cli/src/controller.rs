//! `controller`: groups, communicators and their trees.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use crate::failure::not_yet;

/// Arguments of `controller`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Where to listen
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:52200")]
    listen: SocketAddr,
    /// The network: switches, hosts and the links between them
    #[arg(long, value_name = "FILE.yaml")]
    topology: Option<PathBuf>,
}

/// Runs `controller`.
pub(crate) fn run(_arguments: &Arguments) -> anyhow::Result<()> {
    Err(not_yet("this version has no controller"))
}
