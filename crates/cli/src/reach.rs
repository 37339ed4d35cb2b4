//! Arguments of commands that work on a segment: how it is found, how bytes move, and for how long
//! to try.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use clap::Args;
use millstream_metadata::HostPort;
use millstream_transfer::{PolicyFile, PriorityLevel, SubmitOptions};

use crate::failure::usage;
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
    #[arg(long, value_name = "PATH", value_parser = ["local", "shm", "rdma", "nvmeof", "tcp", "relay"])]
    pub(crate) require: Option<String>,
    /// Local address, each an RDMA device [default: one that leads to the segment]
    #[arg(long, value_name = "IP")]
    pub(crate) bind: Vec<IpAddr>,
    /// Ask this node, a relay, for a way to segments to which nothing else leads (docs/relay.md); may repeat
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) relay: Vec<HostPort>,
    /// Send every packet as its own datagram, as captures want it
    #[arg(long)]
    pub(crate) no_segmentation_offload: bool,
    #[command(flatten)]
    pub(crate) wishes: Wishes,
    #[command(flatten)]
    pub(crate) settings: SettingsArguments,
}

/// What requests ask for (docs/policy-file.md).
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Wishes {
    /// How soon the requests are wanted, beside others of this process to the same peer (with --policy tent)
    /// [default: that of --class, or normal]
    #[arg(long, value_name = "LEVEL", value_parser = PriorityLevel::ALL.map(PriorityLevel::name))]
    pub(crate) priority: Option<String>,
    /// Their class of the policy file (transfer.policy_file, MC_TENT_CONF)
    #[arg(long, value_name = "NAME")]
    pub(crate) class: Option<String>,
    /// What they are for, as rules of the policy file name it
    #[arg(long, value_name = "NAME")]
    pub(crate) intent: Option<String>,
    /// Fail where a request is not done so long after it was submitted; with --policy tent also where it cannot be.
    /// A request of put and get is 2 MiB
    #[arg(long, value_name = "D", value_parser = units::duration)]
    pub(crate) deadline: Option<Duration>,
}

impl Wishes {
    /// Of requests that are submitted now.
    pub(crate) fn options(&self) -> SubmitOptions {
        SubmitOptions {
            // A time beyond all that there are is none.
            deadline: self.deadline.and_then(|after| Instant::now().checked_add(after)),
            priority: self.priority.as_deref().and_then(PriorityLevel::from_name),
            policy: self.class.clone(),
            intent: self.intent.clone(),
            ..SubmitOptions::default()
        }
    }

    /// Whether the policy file has the class.
    pub(crate) fn check(&self, file: &PolicyFile) -> anyhow::Result<()> {
        let Some(wanted) = &self.class else { return Ok(()) };
        if file.classes.iter().any(|class| class.name == *wanted) {
            return Ok(());
        }
        let known: Vec<_> = file.classes.iter().map(|class| class.name.as_str()).collect();
        Err(usage(match known[..] {
            [] => format!(
                "--class {wanted}: there is no policy file that has classes: \
                 set transfer.policy_file, or MC_TENT_CONF"
            ),
            _ => format!("--class {wanted}: the policy file has {}", known.join(", ")),
        }))
    }
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
