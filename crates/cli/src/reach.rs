//! Arguments of commands that work on a segment: how it is found, how bytes move, and for how long
//! to try.

use std::net::IpAddr;
use std::time::Duration;

use clap::Args;

use crate::settings::SettingsArguments;
use crate::units;

/// How segments are found, and how bytes move to and from them.
#[derive(Args, Clone, Debug)]
pub(crate) struct Reach {
    /// Where segments are found: p2p, or the URI of a metadata server: http://HOST:PORT/metadata
    #[arg(long, value_name = "URI", default_value = "p2p")]
    pub(crate) metadata: String,
    /// How bytes move: auto (the first of local, shm, rdma and tcp that leads to the segment, and nvmeof for
    /// files), or one of rdma, rdma:soft, rdma:ibverbs, tcp, shm, local, nvmeof
    #[arg(long, value_name = "P", default_value = "auto")]
    pub(crate) protocol: String,
    /// Fail where bytes would move otherwise than by this path
    #[arg(long, value_name = "PATH", value_parser = ["local", "shm", "rdma", "nvmeof", "tcp"])]
    pub(crate) require: Option<String>,
    /// Local address, each an RDMA device [default: one that leads to the segment]
    #[arg(long, value_name = "IP")]
    pub(crate) bind: Vec<IpAddr>,
    /// Send every packet as its own datagram, as captures want it
    #[arg(long)]
    pub(crate) no_segmentation_offload: bool,
    #[command(flatten)]
    pub(crate) settings: SettingsArguments,
}

/// For how long a command tries.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Fail when no byte has moved for so long, whoever holds it up; 0s waits for ever
    #[arg(long, value_name = "D", default_value = "30s", value_parser = units::duration)]
    pub(crate) timeout: Duration,
    /// Go on where it stopped so many times, a second after the peer or the way to it failed
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) retry: u32,
    /// Wait up to so long for a peer that is not there yet, or a local address that is in use
    #[arg(long, value_name = "D", default_value = "0s", value_parser = units::duration)]
    pub(crate) wait: Duration,
}

impl Patience {
    /// After how long without a byte to fail; `None` is never.
    pub(crate) fn limit(&self) -> Option<Duration> {
        (!self.timeout.is_zero()).then_some(self.timeout)
    }
}
