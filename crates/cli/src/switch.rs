//! `switch`: a switch whose memory adds.

use std::net::IpAddr;

use clap::Args;

use crate::failure::not_yet;

/// Arguments of `switch`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The controller's HOST:PORT
    #[arg(long, value_name = "ADDR")]
    controller: String,
    /// The switch's name
    #[arg(long, value_name = "S")]
    name: String,
    /// Local address
    #[arg(long, value_name = "IP")]
    bind: IpAddr,
}

/// Runs `switch`.
pub(crate) fn run(_arguments: &Arguments) -> anyhow::Result<()> {
    Err(not_yet("this version has no switch"))
}
