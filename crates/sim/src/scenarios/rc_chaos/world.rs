//! What a run is like: hosts, links, connections, traffic, disturbances. How it is drawn from its seed
//! is in the module `draw`.

use core::net::IpAddr;
use core::time::Duration;

use millstream_wire::Psn;

use super::datagrams::{Fault, PortPlan};
use super::host::Polling;
use super::operation::Operation;
use super::pool::PoolPlan;
use crate::{HostOptions, LinkOptions, Probability, Rng};

/// A class of trouble, which a replay can leave out to find what a failure needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Trouble {
    /// Packets that are lost.
    Loss,
    /// Packets that arrive twice.
    Duplicate,
    /// Packets that later ones overtake.
    Reorder,
    /// Packets with a flipped bit.
    Corrupt,
    /// Links cut for a while.
    Blackout,
    /// Queue pairs reset, destroyed or taken to the error state, and connected anew.
    Reset,
    /// Hosts that lose everything and start again.
    Crash,
    /// Memory regions deregistered and registered anew.
    Deregister,
    /// Access rights taken from a queue pair.
    Revoke,
    /// Receive requests that are not posted.
    Starve,
    /// Completion queues that nobody polls.
    Pause,
    /// Send queues drained, and resumed.
    Drain,
    /// Receive requests too short for what comes.
    Short,
    /// Keys that are about to be invalidated, or may not be.
    Keys,
}

impl Trouble {
    /// All of them.
    pub const ALL: [Self; 14] = [
        Self::Loss,
        Self::Duplicate,
        Self::Reorder,
        Self::Corrupt,
        Self::Blackout,
        Self::Reset,
        Self::Crash,
        Self::Deregister,
        Self::Revoke,
        Self::Starve,
        Self::Pause,
        Self::Drain,
        Self::Short,
        Self::Keys,
    ];

    /// Its name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loss => "loss",
            Self::Duplicate => "duplicate",
            Self::Reorder => "reorder",
            Self::Corrupt => "corrupt",
            Self::Blackout => "blackout",
            Self::Reset => "reset",
            Self::Crash => "crash",
            Self::Deregister => "deregister",
            Self::Revoke => "revoke",
            Self::Starve => "starve",
            Self::Pause => "pause",
            Self::Drain => "drain",
            Self::Short => "short",
            Self::Keys => "keys",
        }
    }

    /// The trouble of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|trouble| trouble.name() == name)
    }
}

/// How a connection is taken down.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Lowering {
    /// To RESET: outstanding requests vanish, the queue pair keeps its number.
    Reset,
    /// To the error state first: outstanding requests are flushed.
    Flush,
    /// Destroyed: the next one has another number.
    Destroy,
}

impl Lowering {
    pub(super) const ALL: [Self; 3] = [Self::Reset, Self::Flush, Self::Destroy];
}

/// Memory of a stream, by what it is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Role {
    /// The initiator's bytes for SEND and WRITE.
    Source,
    /// Where the initiator's READs go.
    Sink,
    /// Where its SENDs go.
    Inbox,
    /// Where its WRITEs go.
    Target,
    /// What its READs read.
    Readable,
    /// What its atomic operations work on.
    Counters,
}

impl Role {
    pub(super) const COUNT: usize = 6;
    pub(super) const ALL: [Self; Self::COUNT] =
        [Self::Source, Self::Sink, Self::Inbox, Self::Target, Self::Readable, Self::Counters];

    /// Whether it lies at the initiator.
    pub(super) const fn is_local(self) -> bool {
        matches!(self, Self::Source | Self::Sink)
    }
}

/// Something that happens to a run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Disturbance {
    /// The links between the hosts of a connection are cut: forward, backward, or both.
    Blackout {
        connection: usize,
        directions: [bool; 2],
        share_of_patience: u32,
    },
    /// A connection is taken down, this end first.
    Reset {
        connection: usize,
        first: usize,
        lowering: Lowering,
    },
    /// An end is taken to the error state, and the other not told.
    Fail {
        connection: usize,
        end: usize,
    },
    Crash {
        host: usize,
        down: Duration,
    },
    Deregister {
        stream: usize,
        role: Role,
        absent: Duration,
    },
    /// An end grants no remote access for a while.
    Revoke {
        connection: usize,
        end: usize,
        absent: Duration,
    },
    Starve {
        stream: usize,
        duration: Duration,
    },
    Pause {
        host: usize,
        duration: Duration,
    },
    /// An end goes to SQD, and some time after it is drained back to RTS.
    Drain {
        connection: usize,
        end: usize,
    },
    /// A queue pair for datagrams is taken down.
    ResetPort {
        port: usize,
        lowering: Lowering,
    },
    /// It goes to SQD for a while.
    DrainPort {
        port: usize,
    },
}

impl Disturbance {
    /// Its class.
    pub(super) const fn trouble(&self) -> Trouble {
        match self {
            Self::Blackout { .. } => Trouble::Blackout,
            Self::Reset { .. } | Self::Fail { .. } | Self::ResetPort { .. } => Trouble::Reset,
            Self::Crash { .. } => Trouble::Crash,
            Self::Deregister { .. } => Trouble::Deregister,
            Self::Revoke { .. } => Trouble::Revoke,
            Self::Starve { .. } => Trouble::Starve,
            Self::Pause { .. } => Trouble::Pause,
            Self::Drain { .. } | Self::DrainPort { .. } => Trouble::Drain,
        }
    }
}

/// One direction of a connection.
#[derive(Clone, Debug)]
pub(super) struct StreamPlan {
    pub(super) operations: Vec<Operation>,
    /// Send requests posted and not known to be complete, at most.
    pub(super) send_depth: usize,
    /// Receive requests posted at the other end, at most.
    pub(super) receive_depth: usize,
    /// The longest pause before the next request is posted.
    pub(super) pace: Duration,
    /// How long a receive request is posted after one was consumed.
    pub(super) receive_lag: Duration,
    /// Its messages go into the shared receive queue of their host.
    pub(super) shares: bool,
    /// Its WRITEs may go out as one message for each packet.
    pub(super) splits: bool,
}

/// A connection between two hosts.
#[derive(Clone, Debug)]
pub(super) struct ConnectionPlan {
    pub(super) hosts: [usize; 2],
    pub(super) first_psns: [Psn; 2],
    pub(super) streams: [StreamPlan; 2],
}

/// A host.
#[derive(Clone, Debug)]
pub(super) struct HostPlan {
    pub(super) address: IpAddr,
    pub(super) options: HostOptions,
    pub(super) polling: Polling,
    /// Completions that may wait at a time.
    pub(super) enough: usize,
    pub(super) max_window: u32,
    pub(super) seed: u64,
    /// The buffers of its shared receive queue.
    pub(super) pool: Option<PoolPlan>,
}

impl HostPlan {
    /// So many more completions may wait at a time.
    pub(super) fn make_room(&mut self, completions: usize) {
        if self.polling.capacity == self.enough {
            self.polling.capacity += completions;
        }
        self.enough += completions;
    }
}

/// A whole run.
#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) hosts: Vec<HostPlan>,
    pub(super) link: LinkOptions,
    pub(super) connections: Vec<ConnectionPlan>,
    /// Queue pairs for datagrams.
    pub(super) ports: Vec<PortPlan>,
    /// In order of time.
    pub(super) disturbances: Vec<(Duration, Disturbance)>,
    /// Completion queues may be too small for what completes.
    pub(super) may_overrun: bool,
    /// Decides what is drawn as the run goes on.
    pub(super) rng: Rng,
}

impl World {
    /// Leaves out a class of trouble.
    pub(super) fn remove(&mut self, trouble: Trouble) {
        let link = &mut self.link;
        match trouble {
            Trouble::Loss => link.loss = Probability::NEVER,
            Trouble::Duplicate => link.duplicate = Probability::NEVER,
            Trouble::Reorder => link.reorder = Probability::NEVER,
            Trouble::Corrupt => link.corrupt = Probability::NEVER,
            Trouble::Short => {
                for stream in self.connections.iter_mut().flat_map(|plan| &mut plan.streams) {
                    stream.operations.iter_mut().for_each(|operation| operation.short = false);
                }
            }
            Trouble::Keys => {
                for stream in self.connections.iter_mut().flat_map(|plan| &mut plan.streams) {
                    stream.operations.iter_mut().for_each(Operation::heed);
                }
                for port in &mut self.ports {
                    port.messages.iter_mut().for_each(|message| message.fault = Fault::None);
                }
            }
            _ => self.disturbances.retain(|(_, what)| what.trouble() != trouble),
        }
    }

    /// The longest time that a packet and its answer take, in both directions' queues.
    pub(super) fn round_trip(&self) -> Duration {
        let link = &self.link;
        let queue = link.rate.map_or(Duration::ZERO, |rate| {
            let nanos = u128::from(link.queue_bytes + 10_000) * 8_000_000_000 / u128::from(rate);
            Duration::from_nanos(nanos as u64)
        });
        let one_way = queue + link.latency * 2 + link.jitter * 2 + link.reorder_delay;
        let coalescing = self.hosts.iter().map(|host| host.options.coalescing).max();
        2 * (one_way + coalescing.unwrap_or_default())
    }

    /// Whether packets arrive twice.
    pub(super) fn doubles(&self) -> bool {
        self.link.duplicate != Probability::NEVER
    }

    /// Whether packets do not arrive, by the link's own doing. That some are doubled or late is no
    /// reason to give up.
    pub(super) fn loses(&self) -> bool {
        let LinkOptions { loss, corrupt, .. } = self.link;
        [loss, corrupt].iter().any(|&fault| fault != Probability::NEVER)
    }
}
