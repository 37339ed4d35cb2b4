//! A controller, switches and ranks in this process.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use millstream_collective::{Communicator, JoinConfig};
use millstream_control::api::ControllerView;
use millstream_control::controller::{ControllerConfig, FanIn};
use millstream_control::switch::SwitchConfig;
use millstream_control::{Shutdown, controller, shutdown, switch};
use millstream_verbs::{Device, SoftConfig};
use serde_json::Value;

use super::Arguments;
use crate::cluster::MAX_ADDRESSES;

/// A controller and switches in this process, until it ends.
pub(super) struct Cluster {
    controller: SocketAddr,
    fan_in: u32,
    /// What the controller shows of its groups.
    view: Arc<ControllerView>,
    _stop: Vec<Shutdown>,
}

/// The ranks of a group, which have joined.
pub(super) struct Group {
    pub(super) ranks: Vec<Communicator>,
    pub(super) trees: u8,
    pub(super) fan_in: u32,
    /// Levels of switches that its trees have.
    pub(super) levels: u32,
}

/// For the controller to show a group that has formed: it does so twice a second.
const SHOWN: Duration = Duration::from_secs(20);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// An address of 127/8 that no other such process uses.
fn address(host: u32) -> IpAddr {
    let process = std::process::id();
    Ipv4Addr::new(127, 192 | (process >> 8) as u8 & 63, process as u8, host as u8 + 1).into()
}

impl Cluster {
    /// With so many switches, which have so many children each at most. `first` are the switches of earlier ones, whose
    /// addresses are taken.
    pub(super) fn start(fan_in: u32, first: u32, switches: u32) -> anyhow::Result<Self> {
        let view = Arc::new(ControllerView::new(None));
        let mut config = ControllerConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        config.rules.fan_in = FanIn::new(fan_in).unwrap_or(FanIn::MAX);
        config.view = Some(Arc::clone(&view));
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
            let address = address(MAX_ADDRESSES - 1 - first - number);
            let config = SwitchConfig::new(controller, format!("sweep-{number}"), address);
            thread::spawn(move || {
                let ready = |address| ready.send(address).unwrap_or_default();
                switch::run(config, ready, stopped)
            });
            serving.recv().context("a switch does not start")?;
            stop.push(stop_switch);
        }
        Ok(Self { controller, fan_in, view, _stop: stop })
    }

    /// All ranks of a group.
    pub(super) fn join(
        &self,
        world: u32,
        trees: u8,
        arguments: &Arguments,
    ) -> anyhow::Result<Group> {
        let group = format!("sweep-of-{world}-over-{trees}");
        let join = |rank| -> anyhow::Result<Communicator> {
            let open = |tree: u8| {
                Device::open_soft(&SoftConfig::new(address(rank + u32::from(tree) * world)))
            };
            let mut config = JoinConfig::new(self.controller, &*group, world, rank, &open(0)?);
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
        let ranks = thread::scope(|scope| {
            let ranks: Vec<_> = (0..world).map(|rank| scope.spawn(move || join(rank))).collect();
            let joined = ranks.into_iter().map(thread::ScopedJoinHandle::join);
            joined
                .map(|rank| rank.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect::<anyhow::Result<Vec<_>>>()
        })?;
        let levels = match ranks.iter().any(|rank| rank.switch().is_some()) {
            true => self.levels(&group)?,
            false => 0,
        };
        Ok(Group { ranks, trees, fan_in: self.fan_in, levels })
    }

    /// Levels of switches in the trees of a group that has formed, not as they should be but as the controller has made
    /// them.
    fn levels(&self, group: &str) -> anyhow::Result<u32> {
        let pages = Arc::clone(&self.view).pages();
        let start = Instant::now();
        while start.elapsed() < SHOWN {
            if let Some(page) = pages(&format!("/api/v1/groups/{group}")) {
                let shown: Value = serde_json::from_str(&page.text)?;
                if shown["state"] == "communicator_ready" {
                    let depth = depth(&shown["communicator"]["nodes"]);
                    return depth.context("the controller shows what is no tree");
                }
            }
            thread::sleep(LOOK);
        }
        bail!("the controller does not show the group");
    }
}

/// Levels of the deepest of these trees, whose nodes name the ones above, which come before them.
fn depth(nodes: &Value) -> Option<u32> {
    let mut levels: Vec<u32> = Vec::new();
    for node in nodes.as_array()? {
        let level = match &node["parent"] {
            Value::Null => 1,
            parent => levels.get(usize::try_from(parent.as_u64()?).ok()?)? + 1,
        };
        levels.push(level);
    }
    levels.into_iter().max()
}

impl Group {
    /// Ends it.
    pub(super) fn leave(self) {
        // Together, since who leaves waits for the others.
        thread::scope(|scope| {
            for rank in self.ranks {
                scope.spawn(move || drop(rank));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn levels_are_those_of_the_deepest_tree() {
        let nodes = |parents: &[Option<u32>]| {
            parents.iter().map(|parent| json!({ "parent": parent })).collect::<Value>()
        };
        for (parents, levels) in [
            (&[None][..], Some(1)),
            (&[None, Some(0), Some(0)], Some(2)),
            // Two trees.
            (&[None, None, Some(1), Some(2)], Some(3)),
            (&[], None),
            // Nothing is above what comes first.
            (&[Some(0)], None),
        ] {
            assert_eq!(depth(&nodes(parents)), levels, "{parents:?}");
        }
        assert_eq!(depth(&Value::Null), None);
    }
}
