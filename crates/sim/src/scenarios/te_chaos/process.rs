//! What a process of a run is: its NICs, a flow to each peer, and the target's side of connections.

use std::collections::BTreeMap;

use millstream_roce::Instant;
use millstream_transfer_core::{
    AnyPolicy, Classic, Config, Flow, Initiator, Order, Priority, PriorityLevel, RailId, RailSpec,
    Target, TaskId, Tent, TentConfig,
};
use millstream_wire::{Psn, Qpn};

use super::nic::SEND_DEPTH;
use super::watch::{Counts, InFlight, Waiting};
use super::world::World;
use crate::NodeId;

/// Pieces of a slice.
const SLICE_PIECES: u32 = 8;
/// Connections that a process takes.
const MAX_OPEN: usize = 64;

/// An end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) nic: NodeId,
    pub(super) qpn: Qpn,
    pub(super) psn: Psn,
}

/// A connection that was asked for here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub(super) epoch: u64,
    pub(super) end: End,
    /// Nothing that completes on it is told any more.
    pub(super) mute: bool,
    /// The peer has accepted it.
    pub(super) connected: bool,
}

/// A transfer that is under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) initiator: usize,
    pub(super) target: usize,
    pub(super) task: TaskId,
    pub(super) priority: PriorityLevel,
    pub(super) submitted: Instant,
    /// Its bytes, and those that were posted for it.
    pub(super) length: u64,
    pub(super) posted: u64,
    /// When it must be over.
    pub(super) limit: Instant,
    pub(super) last: bool,
    /// It is of a flood, beside which others wait.
    pub(super) flood: bool,
}

/// What a process knows of a peer.
pub(super) struct Peer {
    pub(super) flow: Flow<AnyPolicy>,
    pub(super) links: BTreeMap<RailId, Link>,
    /// The last incarnation of the peer that was heard of.
    pub(super) known: u64,
    /// Fences that are not answered: how often they were asked for.
    pub(super) asked: BTreeMap<(RailId, u64), u32>,
    /// A transfer that waits beside a flood of a higher level.
    pub(super) waiting: Option<Waiting>,
    /// What was posted and done on each rail.
    pub(super) counts: BTreeMap<RailId, Counts>,
    pub(super) in_flight: BTreeMap<RailId, InFlight>,
    /// The director's event for the flow's next timeout.
    pub(super) wake: Option<Instant>,
}

/// What was asked for by who wants to connect.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) epoch: u64,
    /// The initiator's end.
    pub(super) end: End,
    /// Which NIC of ours.
    pub(super) nic: NodeId,
}

pub(super) struct Process {
    pub(super) up: bool,
    pub(super) life: u32,
    pub(super) nics: Vec<NodeId>,
    pub(super) peers: BTreeMap<usize, Peer>,
    /// The queue pairs of connections that were asked for here.
    pub(super) by_qpn: BTreeMap<(NodeId, Qpn), (usize, RailId)>,
    /// Connections that are closed and remembered.
    max_closed: usize,
    pub(super) target: Target,
    /// The highest epoch that was accepted, or whose fence was confirmed.
    pub(super) past: BTreeMap<Initiator, u64>,
    pub(super) wanted: BTreeMap<Initiator, Wanted>,
    pub(super) accepted: BTreeMap<(Initiator, u64), End>,
}

impl Process {
    pub(super) fn new(nics: Vec<NodeId>, max_closed: usize) -> Self {
        Self {
            up: true,
            life: 0,
            nics,
            peers: BTreeMap::new(),
            by_qpn: BTreeMap::new(),
            max_closed,
            target: Target::new(MAX_OPEN, max_closed),
            past: BTreeMap::new(),
            wanted: BTreeMap::new(),
            accepted: BTreeMap::new(),
        }
    }

    /// It is killed: it forgets everything, and comes back as another.
    pub(super) fn forget(&mut self) {
        let anew = Self::new(core::mem::take(&mut self.nics), self.max_closed);
        *self = Self { life: self.life + 1, up: false, ..anew };
    }

    /// Whether what it keeps for its peers is within its limits.
    pub(super) fn is_bounded(&self) -> bool {
        self.target.open() <= MAX_OPEN
            && self.target.remembered() <= self.target.open() + self.max_closed
            && self.target.floors() <= MAX_OPEN + self.max_closed
    }
}

/// The incarnation of a process in one of its lives. None is 0.
pub(super) fn incarnation(process: usize, life: u32) -> u64 {
    (process as u64 + 1) << 32 | u64::from(life)
}

/// The process and the life of an incarnation.
pub(super) const fn life_of(incarnation: u64) -> (usize, u32) {
    ((incarnation >> 32) as usize - 1, incarnation as u32)
}

impl Peer {
    /// A flow over all pairs of NICs. `life` is the peer's life, as far as is known.
    pub(super) fn new(world: &World, own: usize, peer: usize, life: u32, seed: u64) -> Self {
        let order = if seed.is_multiple_of(2) { Order::RoundRobin } else { Order::Random(seed) };
        let (local, remote) = (world.nics[own], world.nics[peer]);
        // Three locations: one to which the first NIC is near, one to which all are, and one for
        // which there is none.
        let priorities = |count: u16| {
            let first = Priority { preferred: vec![0], available: (1..count).collect() };
            let all = Priority { preferred: (0..count).collect(), available: Vec::new() };
            vec![first, all, Priority::default()]
        };
        let (local_nics, peer_nics) = (priorities(local), priorities(remote));
        let policy = match world.tent {
            false => AnyPolicy::Classic(Classic::new(order, local_nics, peer_nics)),
            true => AnyPolicy::Tent(Tent::new(TentConfig::default(), local_nics, peer_nics)),
        };
        let config = Config { max_slice_pieces: SLICE_PIECES, ..world.config };
        let known = incarnation(peer, life);
        let mut flow = Flow::new(config, policy, known, 0);
        for local_nic in 0..local {
            for peer_nic in 0..remote {
                let spec = RailSpec {
                    local_nic,
                    peer_nic,
                    transport: 0,
                    access: world.access,
                    max_requests: SEND_DEPTH as u32 + 1 - SLICE_PIECES,
                };
                flow.add_rail(spec);
            }
        }
        Self {
            flow,
            links: BTreeMap::new(),
            known,
            asked: BTreeMap::new(),
            waiting: None,
            counts: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            wake: None,
        }
    }
}
