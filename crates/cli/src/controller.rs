//! `controller`: groups, communicators and their trees.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::Args;
use millstream_control::controller::{self, ControllerConfig, FanIn};
use serde::Serialize;

use crate::daemon::ReadyLine;
use crate::failure::not_yet;
use crate::output;

/// Where hosts and switches look for one unless told otherwise.
pub(crate) const DEFAULT: &str = "127.0.0.1:52200";

/// What `--fan-in` can be.
pub(crate) const FAN_IN: RangeInclusive<i64> = FanIn::MIN.get() as i64..=FanIn::MAX.get() as i64;

/// Arguments of `controller`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Where to listen
    #[arg(long, value_name = "ADDR", default_value_t = ControllerConfig::DEFAULT_LISTEN)]
    listen: SocketAddr,
    /// Children that a switch has in a tree at most, hosts and switches: groups of more hosts get trees
    /// of switches
    #[arg(long, value_name = "F", default_value_t = FanIn::MAX.get(), value_parser = clap::value_parser!(u32).range(FAN_IN))]
    fan_in: u32,
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
        return Err(not_yet(&format!(
            "--topology {topology}: trees of switches follow from --fan-in"
        )));
    }
    let line = ReadyLine::default();
    let ready = |listen| line.print(&Ready { listen });
    let mut config = ControllerConfig::new(arguments.listen);
    config.rules.fan_in = FanIn::new(arguments.fan_in).unwrap_or(FanIn::MAX);
    controller::run(config, ready, line.shutdown())?;
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
