//! What a process of a run is: its NICs, a flow to each peer, and the target's side of connections.

use std::collections::BTreeMap;

use millstream_roce::Instant;
use millstream_transfer_core::{
    Access, Classic, Config, Flow, Initiator, Order, Priority, RailId, RailSpec, Target, TaskId,
};
use millstream_wire::{Psn, Qpn};

use super::nic::SEND_DEPTH;
use super::world::World;
use crate::NodeId;

/// Connections that a process takes, and that it remembers.
const MAX_OPEN: usize = 64;
const MAX_CLOSED: usize = 32;

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
}

/// A transfer that is under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) initiator: usize,
    pub(super) target: usize,
    pub(super) task: TaskId,
    /// When it must be over.
    pub(super) limit: Instant,
    pub(super) last: bool,
}

/// What a process knows of a peer.
pub(super) struct Peer {
    pub(super) flow: Flow<Classic>,
    pub(super) links: BTreeMap<RailId, Link>,
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
    pub(super) target: Target,
    pub(super) wanted: BTreeMap<Initiator, Wanted>,
    pub(super) accepted: BTreeMap<(Initiator, u64), End>,
}

impl Process {
    pub(super) fn new(nics: Vec<NodeId>) -> Self {
        Self {
            up: true,
            life: 0,
            nics,
            peers: BTreeMap::new(),
            by_qpn: BTreeMap::new(),
            target: Target::new(MAX_OPEN, MAX_CLOSED),
            wanted: BTreeMap::new(),
            accepted: BTreeMap::new(),
        }
    }

    /// It is killed: it forgets everything, and comes back as another.
    pub(super) fn forget(&mut self) {
        *self =
            Self { life: self.life + 1, up: false, ..Self::new(core::mem::take(&mut self.nics)) };
    }

    /// Whether what it keeps for its peers is within its limits.
    pub(super) fn is_bounded(&self) -> bool {
        self.target.open() <= MAX_OPEN && self.target.remembered() <= MAX_OPEN + MAX_CLOSED
    }
}

/// The incarnation of a process in one of its lives.
pub(super) fn incarnation(process: usize, life: u32) -> u64 {
    (process as u64) << 32 | u64::from(life)
}

/// The process and the life of an incarnation.
pub(super) const fn life_of(incarnation: u64) -> (usize, u32) {
    ((incarnation >> 32) as usize, incarnation as u32)
}

impl Peer {
    /// A flow over all pairs of NICs. `life` is the peer's life, as far as is known.
    pub(super) fn new(world: &World, own: usize, peer: usize, life: u32, seed: u64) -> Self {
        let order = if seed.is_multiple_of(2) { Order::RoundRobin } else { Order::Random(seed) };
        let (local, remote) = (world.nics[own], world.nics[peer]);
        // Two locations: one to which the first NIC is near, and one to which all are.
        let priorities = |count: u16| {
            let first = Priority { preferred: vec![0], available: (1..count).collect() };
            vec![first, Priority { preferred: (0..count).collect(), available: Vec::new() }]
        };
        let policy = Classic::new(order, priorities(local), priorities(remote));
        let config = Config { max_slice_pieces: 8, ..world.config };
        let mut flow = Flow::new(config, policy, incarnation(peer, life), 0);
        for local_nic in 0..local {
            for peer_nic in 0..remote {
                let spec = RailSpec {
                    local_nic,
                    peer_nic,
                    transport: 0,
                    access: Access::Connection,
                    max_slices: SEND_DEPTH as u32,
                };
                flow.add_rail(spec);
            }
        }
        Self { flow, links: BTreeMap::new(), wake: None }
    }
}
