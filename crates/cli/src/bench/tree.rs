//! Over how many switches collectives are measured.

use clap::Args;
use millstream_collective::MAX_TREES;
use millstream_control::controller::FanIn;
use millstream_inc::protocol::MAX_SHARED_MEMORY_WORLD;

use crate::cluster::{Cluster, MAX_ADDRESSES};
use crate::collective::Path;
use crate::controller::FAN_IN;
use crate::failure::usage;

/// The most processes of hosts, and of switches.
pub(super) const MAX_PROCESSES: i64 = 1024;

/// Arguments of benchmarks of collectives.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Tree {
    /// By which way hosts reach each other
    #[arg(long, value_enum, default_value_t = Path::Switch)]
    pub(super) path: Path,
    /// Children that a switch has in the tree at most, hosts and switches
    #[arg(long, value_name = "F", default_value_t = FanIn::MAX.get(), value_parser = clap::value_parser!(u32).range(FAN_IN))]
    pub(super) fan_in: u32,
    /// Switch processes, which take the places in the tree by turns
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_PROCESSES))]
    pub(super) switches: u32,
    /// Trees of the communicator: each host has so many addresses
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=MAX_TREES as i64))]
    pub(super) trees: u8,
}

impl Tree {
    /// Whether so many hosts fit below it.
    pub(super) fn check(&self, hosts: u32) -> anyhow::Result<()> {
        if !self.has_switches() {
            return self.check_shared_memory(hosts);
        }
        let fan_in = self.fan_in;
        let most = FanIn::new(fan_in).map_or(0, FanIn::max_world);
        if hosts > most {
            return Err(usage(format!(
                "--fan-in {fan_in}: a tree of it has up to {most} hosts, not --hosts {hosts}"
            )));
        }
        let addresses = hosts * u32::from(self.trees);
        if self.trees > 1 && addresses > MAX_ADDRESSES {
            return Err(usage(format!(
                "--trees {}: {hosts} hosts would need {addresses} addresses, of {MAX_ADDRESSES}",
                self.trees
            )));
        }
        Ok(())
    }

    /// That no other tree than by default is asked for, where there is none.
    fn check_shared_memory(&self, hosts: u32) -> anyhow::Result<()> {
        let path = self.path.name();
        for (flag, is_said) in [
            ("--fan-in", self.fan_in != FanIn::MAX.get()),
            ("--switches", self.switches > 1),
            ("--trees", self.trees > 1),
        ] {
            if is_said {
                let reason = "all hosts are on this machine and share memory";
                return Err(usage(format!("{flag} is for --path switch: with {path} {reason}")));
            }
        }
        if hosts > MAX_SHARED_MEMORY_WORLD {
            let most = MAX_SHARED_MEMORY_WORLD;
            return Err(usage(format!(
                "--hosts {hosts}: up to {most} share memory, more need --path switch"
            )));
        }
        Ok(())
    }

    /// Whether hosts reach each other over switches. Where memory is shared, these would have nothing to do.
    fn has_switches(&self) -> bool {
        self.path == Path::Switch
    }

    /// Switches that are started.
    pub(super) fn switches(&self) -> u32 {
        if self.has_switches() { self.switches } else { 0 }
    }

    /// Children that a switch may have, if there is one.
    pub(super) fn fan_in(&self) -> u32 {
        if self.has_switches() { self.fan_in } else { 0 }
    }

    /// Trees that there are.
    pub(super) fn trees(&self) -> u8 {
        if self.has_switches() { self.trees } else { 0 }
    }

    /// What measures need beside hosts.
    pub(super) fn start(&self) -> anyhow::Result<Cluster> {
        Cluster::start(self.switches(), self.fan_in)
    }

    /// The switches of a cluster, in words.
    pub(super) fn describe(&self, hosts: u32, cluster: &Cluster) -> String {
        if cluster.addresses.is_empty() {
            return "shared memory".to_owned();
        }
        let addresses = cluster.addresses.join(", ");
        let switches = match cluster.addresses.len() {
            1 => format!("a switch at {addresses}"),
            count => format!("{count} switches at {addresses}"),
        };
        let switches = match self.fan_in {
            fan_in if fan_in < hosts => format!("{switches}, up to {fan_in} children each"),
            _ => switches,
        };
        match self.trees {
            1 => switches,
            trees => format!("{trees} trees of {switches}"),
        }
    }
}
