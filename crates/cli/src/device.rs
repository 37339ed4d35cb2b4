//! Which one device a command uses: which provider, which address, which driver.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use millstream_verbs::{Device, Driver, IbverbsConfig, SoftConfig};

use crate::failure::usage;
use crate::retry;
use crate::{address, bind};

/// The options that choose a device.
#[derive(Args, Debug)]
pub(crate) struct Choice {
    /// Device: soft-ADDRESS, or one of the system's such as mlx5_0 or rxe0 [default: soft]
    #[arg(short, long, value_name = "D", conflicts_with = "bind")]
    device: Option<String>,
    /// Local address of a soft device; of a rank, several have a tree each [default: one that leads to the peer, or the
    /// controller]
    #[arg(long, value_name = "IP")]
    bind: Vec<IpAddr>,
    /// How a soft device sends: udp, which needs no privileges, or packet, which needs CAP_NET_RAW
    /// and checks the whole invariant CRC [default: udp]
    #[arg(long, value_name = "DRIVER")]
    driver: Option<Driver>,
    /// Entry of the GID table of one of the system's devices [default: MC_GID_INDEX, or the best of
    /// RoCE v2]
    #[arg(short = 'x', long, value_name = "INDEX")]
    gid_index: Option<u8>,
    /// Look for work all the time instead of sleeping: less latency, for a processor or two
    #[arg(long)]
    busy_poll: bool,
    /// Send every packet of a soft device as its own datagram, as captures want it
    #[arg(long)]
    no_segmentation_offload: bool,
}

/// What [`Choice`] comes to.
#[derive(Clone, Debug)]
pub(crate) struct Chosen {
    kind: Kind,
    /// Threads look for work all the time.
    pub(crate) busy_poll: bool,
}

#[derive(Clone, Debug)]
enum Kind {
    /// A soft device on this address, or on one that leads to the peer.
    Soft {
        address: Option<IpAddr>,
        driver: Driver,
        segmentation_offload: bool,
    },
    System(IbverbsConfig),
}

impl Choice {
    /// Threads look for work all the time.
    pub(crate) fn busy_poll(&self) -> bool {
        self.busy_poll
    }

    /// What was chosen, or which options do not go together.
    pub(crate) fn resolve(&self) -> anyhow::Result<Chosen> {
        if let [_, second, ..] = self.bind[..] {
            return Err(usage(format!("--bind {second}: this command has one device")));
        }
        self.resolve_at(self.bind.first().copied())
    }

    /// As [`Choice::resolve`], for a command that can have several soft devices.
    pub(crate) fn resolve_all(&self) -> anyhow::Result<Vec<Chosen>> {
        match &self.bind[..] {
            [] => Ok(vec![self.resolve_at(None)?]),
            all => all.iter().map(|&address| self.resolve_at(Some(address))).collect(),
        }
    }

    fn resolve_at(&self, bind: Option<IpAddr>) -> anyhow::Result<Chosen> {
        bind::check(&self.bind)?;
        let kind = match self.device.as_deref().map(|name| (name, address::of_device(name))) {
            Some((name, None)) if name.starts_with("soft-") => {
                return Err(usage(format!(
                    "--device {name}: soft devices are named soft-ADDRESS, such as soft-127.0.0.2"
                )));
            }
            Some((name, None)) => {
                for (option, given) in [
                    ("--no-segmentation-offload", self.no_segmentation_offload),
                    ("--driver", self.driver.is_some()),
                ] {
                    if given {
                        return Err(usage(format!(
                            "{option} is for soft devices, and {name} is not one"
                        )));
                    }
                }
                let default = IbverbsConfig::from_environment()?;
                Kind::System(IbverbsConfig {
                    name: Some(name.to_owned()),
                    gid_index: self.gid_index.or(default.gid_index),
                    ..default
                })
            }
            soft => {
                if let Some(index) = self.gid_index {
                    return Err(usage(format!(
                        "--gid-index {index}: a soft device has one address; choose it with --bind"
                    )));
                }
                let address = soft.and_then(|(_, address)| address).or(bind);
                let segmentation_offload = !self.no_segmentation_offload;
                let driver = self.driver.unwrap_or_default();
                Kind::Soft { address, driver, segmentation_offload }
            }
        };
        Ok(Chosen { kind, busy_poll: self.busy_poll })
    }
}

impl Chosen {
    /// An address to open it for, if it is clear which one it is without knowing the peer.
    pub(crate) fn any_peer(&self) -> Option<IpAddr> {
        match self.kind {
            Kind::Soft { address, .. } => address,
            Kind::System(_) => Some(IpAddr::from([0; 4])),
        }
    }

    /// Opens it, to talk to `peer`. An address in use is waited for.
    pub(crate) fn open(&self, peer: IpAddr, until: Instant) -> anyhow::Result<Device> {
        retry::until(until, retry::is_address_in_use, || self.open_now(peer))
    }

    fn open_now(&self, peer: IpAddr) -> anyhow::Result<Device> {
        match &self.kind {
            Kind::System(config) => {
                let name = config.name.as_deref().unwrap_or_default();
                Device::open_ibverbs(config).with_context(|| format!("cannot open {name}"))
            }
            Kind::Soft { address, driver, segmentation_offload } => {
                address::open_device(*address, peer, |address| SoftConfig {
                    driver: *driver,
                    segmentation_offload: *segmentation_offload,
                    busy_poll: self.busy_poll.then_some(Duration::MAX),
                    ..SoftConfig::new(address)
                })
            }
        }
    }

    /// The local address that was asked for: where a server listens.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        match self.kind {
            Kind::Soft { address, .. } => address,
            Kind::System(_) => None,
        }
    }
}
