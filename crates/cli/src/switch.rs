//! `switch`: a switch whose memory adds.

use std::net::{IpAddr, SocketAddr};

use clap::Args;
use millstream_control::switch::{self, SwitchConfig};
use millstream_control::terminated;
use serde::Serialize;

use crate::{address, output};

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
    /// Send every packet as its own datagram, as captures want it
    #[arg(long)]
    no_segmentation_offload: bool,
}

/// The `ready` line.
#[derive(Serialize)]
struct Ready<'a> {
    name: &'a str,
    controller: SocketAddr,
    /// Its address on the data network.
    address: IpAddr,
}

/// Runs `switch`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { controller, name, bind, no_segmentation_offload } = arguments;
    let controller = address::resolve(controller)?;
    let ready = |address| {
        // Printing a struct of names and addresses cannot fail.
        let _ = output::ready(&Ready { name, controller, address });
    };
    let segmentation_offload = !no_segmentation_offload;
    let config = SwitchConfig {
        segmentation_offload,
        ..SwitchConfig::new(controller, name.as_str(), *bind)
    };
    switch::run(config, ready, terminated())?;
    Ok(())
}
