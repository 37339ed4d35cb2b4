//! `controller`: groups, communicators and their trees.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use millstream_control::controller::{self, ControllerConfig};
use serde::Serialize;

use crate::daemon::ReadyLine;
use crate::failure::not_yet;
use crate::output;

/// Where hosts and switches look for one unless told otherwise.
pub(crate) const DEFAULT: &str = "127.0.0.1:52200";

/// Arguments of `controller`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Where to listen
    #[arg(long, value_name = "ADDR", default_value_t = ControllerConfig::DEFAULT_LISTEN)]
    listen: SocketAddr,
    /// The network: switches, hosts and the links between them
    #[arg(long, value_name = "FILE.yaml", hide = true)]
    topology: Option<PathBuf>,
}

/// The `ready` line.
#[derive(Serialize)]
struct Ready {
    /// Where hosts and switches find it.
    listen: SocketAddr,
}

/// Runs `controller`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let Some(topology) = &arguments.topology {
        let topology = output::escaped(topology);
        return Err(not_yet(&format!("--topology {topology}: every group gets one switch")));
    }
    let line = ReadyLine::default();
    let ready = |listen| line.print(&Ready { listen });
    controller::run(ControllerConfig::new(arguments.listen), ready, line.shutdown())?;
    line.outcome()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_is_found_where_it_listens() {
        let default: SocketAddr = DEFAULT.parse().unwrap();
        assert_eq!(default.port(), ControllerConfig::DEFAULT_LISTEN.port());
    }
}
