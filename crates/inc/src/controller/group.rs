//! One group on its way to a communicator.

use core::net::IpAddr;
use std::collections::BTreeMap;

use millstream_roce::Instant;
use millstream_wire::{Mtu, Psn, Qpn};

use super::ConnectionId;
use crate::plan::{SwitchId, Tree};
use crate::protocol::{
    AbortReason, Awaited, FromController, Plan, RankList, Refusal, SwitchChild, SwitchEdge,
};
use crate::ranks::Ranks;

/// How far a group is. One that does not exist has no state.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum GroupState {
    /// Some ranks have joined.
    CreatingGroup,
    /// All have; they wait for a switch, or are told about it.
    GroupReady,
    /// The ranks, then the switch, make their ends of the connections.
    CreatingCommunicator,
    /// The ranks have the plan.
    CommunicatorReady,
}

/// A host's end of the connection to its switch.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostEnd {
    pub(super) qpn: Qpn,
    pub(super) psn: Psn,
    pub(super) path_mtu: Mtu,
}

#[derive(Debug)]
pub(super) struct Member {
    pub(super) connection: ConnectionId,
    pub(super) address: IpAddr,
    pub(super) end: Option<HostEnd>,
    /// It has said that it is done. Its connection may be gone.
    pub(super) left: bool,
}

#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) world: u32,
    pub(super) members: BTreeMap<u32, Member>,
    /// When the making of it fails.
    pub(super) deadline: Option<Instant>,
    /// Known once a switch was found.
    pub(super) tree: Option<Tree>,
    /// Its number, once the first rank has connected.
    pub(super) communicator: Option<u64>,
    /// The switch was asked to make the communicator.
    pub(super) requested: bool,
    pub(super) ready: bool,
}

/// Why a group ends.
#[derive(Debug)]
pub(super) enum End {
    /// It was never made.
    Refused(Refusal),
    /// It was, or nearly.
    Aborted(AbortReason),
}

impl Group {
    pub(super) fn new(name: &str, world: u32, deadline: Instant) -> Self {
        Self {
            name: name.to_owned(),
            world,
            members: BTreeMap::new(),
            deadline: Some(deadline),
            tree: None,
            communicator: None,
            requested: false,
            ready: false,
        }
    }

    pub(super) fn state(&self) -> GroupState {
        match () {
            () if self.ready => GroupState::CommunicatorReady,
            () if self.communicator.is_some() => GroupState::CreatingCommunicator,
            () if self.is_full() => GroupState::GroupReady,
            () => GroupState::CreatingGroup,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.members.len() == self.world as usize
    }

    /// Whether it is on a switch, or about to be.
    pub(super) fn uses(&self, switch: SwitchId) -> bool {
        self.tree.as_ref().is_some_and(|tree| tree.contains(switch))
    }

    /// The only switch of the tree.
    pub(super) fn switch(&self) -> Option<SwitchId> {
        Some(self.tree.as_ref()?.nodes().first()?.switch)
    }

    /// What it waits for. `switch` is the name of its switch.
    pub(super) fn awaited(&self, switch: Option<&str>) -> Awaited {
        if !self.is_full() {
            // Between those that are there: a world is a claim, which should cost nobody time.
            let ends = self.members.keys().copied().chain([self.world]);
            let gaps = ends.scan(0, |next, end| Some(core::mem::replace(next, end + 1)..end));
            let count = self.world - self.members.len() as u32;
            return Awaited::Ranks { missing: RankList::new(gaps, count) };
        }
        let Some(switch) = switch else { return Awaited::Switch };
        if !self.requested {
            let unconnected = self.members.iter().filter(|(_, member)| member.end.is_none());
            return Awaited::Connections { ranks: unconnected.map(|(&rank, _)| rank).collect() };
        }
        Awaited::Communicator { switch: switch.to_owned() }
    }

    /// The hosts as the switch needs to know them, and their smallest path MTU; `None` until all
    /// have connected.
    pub(super) fn children(&self) -> Option<(Vec<SwitchChild>, Mtu)> {
        let mut path_mtu = Mtu::B4096;
        let mut children = Vec::with_capacity(self.members.len());
        for (&rank, member) in &self.members {
            let end = member.end?;
            path_mtu = path_mtu.min(end.path_mtu);
            let HostEnd { qpn, psn, .. } = end;
            let ranks = Ranks::one(rank);
            children.push(SwitchChild {
                ranks,
                is_switch: false,
                address: member.address,
                qpn,
                psn,
            });
        }
        Some((children, path_mtu))
    }

    /// The plan of each host, when the switch gave every rank its edge and no more.
    pub(super) fn plans(
        &self,
        edges: &[SwitchEdge],
        plan: &Plan,
    ) -> Option<Vec<(ConnectionId, Plan)>> {
        if edges.len() != self.members.len() {
            return None;
        }
        let of = |(&rank, member): (&u32, &Member)| {
            let edge = edges.iter().find(|edge| edge.rank == rank)?;
            let plan = Plan { qpn: edge.qpn, psn: edge.psn, ..plan.clone() };
            Some((member.connection, plan))
        };
        self.members.iter().map(of).collect()
    }

    /// What a member is told at the end.
    pub(super) fn farewell(&self, member: &Member, end: &End) -> FromController {
        match end {
            _ if member.left => FromController::Closed,
            End::Aborted(reason) if self.ready => FromController::Abort { reason: reason.clone() },
            End::Aborted(reason) => {
                FromController::Refused { reason: Refusal::Aborted { reason: reason.clone() } }
            }
            End::Refused(reason) => FromController::Refused { reason: reason.clone() },
        }
    }
}
