//! A controller, switches and ranks in this process.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::thread;

use anyhow::Context;
use millstream_collective::{Communicator, JoinConfig};
use millstream_control::controller::ControllerConfig;
use millstream_control::switch::SwitchConfig;
use millstream_control::{Shutdown, controller, shutdown, switch};
use millstream_verbs::{Device, SoftConfig};

use super::Arguments;

/// A controller and switches in this process, until it ends.
pub(super) struct Cluster {
    controller: SocketAddr,
    _stop: Vec<Shutdown>,
}

/// An address of 127/8 that no other such process uses.
fn address(host: u32) -> IpAddr {
    let process = std::process::id();
    Ipv4Addr::new(127, 192 | (process >> 8) as u8 & 63, process as u8, host as u8 + 1).into()
}

impl Cluster {
    /// With so many switches.
    pub(super) fn start(switches: u8) -> anyhow::Result<Self> {
        let config = ControllerConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let (stop_controller, stopped) = shutdown();
        let (ready, listening) = mpsc::channel();
        thread::spawn(move || {
            // That it cannot be sent means that this process is about to fail.
            let ready = |address| ready.send(address).unwrap_or_default();
            controller::run(config, ready, stopped)
        });
        let controller = listening.recv().context("the controller does not start")?;
        let mut stop = vec![stop_controller];
        for number in 0..switches {
            let (stop_switch, stopped) = shutdown();
            let (ready, serving) = mpsc::channel();
            // From above, where no rank is.
            let address = address(253 - u32::from(number));
            let config = SwitchConfig::new(controller, format!("sweep-{number}"), address);
            thread::spawn(move || {
                let ready = |address| ready.send(address).unwrap_or_default();
                switch::run(config, ready, stopped)
            });
            serving.recv().context("a switch does not start")?;
            stop.push(stop_switch);
        }
        Ok(Self { controller, _stop: stop })
    }

    /// All ranks of a group.
    pub(super) fn join(
        &self,
        world: u32,
        trees: u8,
        arguments: &Arguments,
    ) -> anyhow::Result<Vec<Communicator>> {
        let join = |rank| -> anyhow::Result<Communicator> {
            let open = |tree: u8| {
                Device::open_soft(&SoftConfig::new(address(rank + u32::from(tree) * world)))
            };
            let group = format!("sweep of {world} over {trees}");
            let mut config = JoinConfig::new(self.controller, group, world, rank, &open(0)?);
            config.path = arguments.path.into();
            config.host_label = format!("host {}", rank % arguments.hosts);
            for tree in 1..trees {
                config.more_devices.push(open(tree)?);
            }
            let joined = Communicator::join(&config)?;
            let found = joined.switches().count();
            let shared = joined.switch().is_none();
            anyhow::ensure!(
                shared || found == usize::from(trees),
                "{found} trees in place of {trees}"
            );
            Ok(joined)
        };
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..world).map(|rank| scope.spawn(move || join(rank))).collect();
            let joined = ranks.into_iter().map(thread::ScopedJoinHandle::join);
            joined
                .map(|rank| rank.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }
}
