//! Groups whose ranks are all of one machine: they share memory, and need no switch. Of several machines each has a rank
//! that is connected to switches for all of its own, with which it shares memory.

use std::collections::{BTreeMap, HashMap};

use super::group::{End, Group};
use super::resume::Revived;
use super::{Controller, GroupId};
use crate::plan::{Forest, Tree};
use crate::protocol::{
    AbortReason, Failover, FromController, MAX_SHARED_MEMORY_WORLD, Refusal, SharedMemoryPlan,
    shortened,
};
use crate::ranks::Ranks;

impl Controller {
    /// Gives a full group what its ranks want: shared memory, or a tree of switches.
    pub(super) fn place(&mut self, id: GroupId) {
        let Some(group) = self.groups.get(&id) else { return };
        let Some(reason) = obstacle(group) else { return self.share(id) };
        let required =
            |rank: &u32| group.members[rank].same_machine.as_ref().is_some_and(|it| it.required);
        match group.members.keys().copied().find(required) {
            Some(rank) => {
                let (group, reason) = (group.name.clone(), shortened(reason));
                self.end_group(id, &End::Refused(Refusal::NotShared { group, rank, reason }));
            }
            None => {
                if let Some(group) = self.groups.get_mut(&id) {
                    group.hosts = hosts(group).unwrap_or_default();
                }
                self.plan(id);
            }
        }
    }

    /// The communicator is ready: nothing but the ranks has a part in it.
    fn share(&mut self, id: GroupId) {
        self.next_communicator += 1;
        let communicator = self.next_communicator;
        let Some(group) = self.groups.get_mut(&id) else { return };
        (group.ready, group.deadline) = (true, None);
        let (until, placement, made_here) = (None, None, true);
        group.revived =
            Some(Revived { communicator, until, departed: false, placement, made_here });
        let first = group.members.values().next().and_then(|member| member.same_machine.as_ref());
        let socket = first.map(|same| same.socket.clone()).unwrap_or_default();
        let (group, ranks) = (group.identity, Ranks::default());
        // There are no switches.
        let (failover, meeting, fallback) = (Failover::Off, None, None);
        let plan =
            SharedMemoryPlan { communicator, group, socket, ranks, failover, meeting, fallback };
        let Some(group) = self.groups.get(&id) else { return };
        let told: Vec<_> = group.members.values().filter_map(|member| member.connection).collect();
        for connection in told {
            self.send(connection, FromController::SharedMemory(plan.clone()));
            self.tell_controllers(connection);
        }
        self.report_ready(id);
    }
}

impl Controller {
    /// The communicator is ready: tells those that others are connected to switches for.
    pub(super) fn share_hosts(&mut self, id: GroupId) {
        let Some(group) = self.groups.get(&id) else { return };
        let Some(root) = group.nodes.first() else { return };
        let (failover, meeting) = (group.failover(), group.meeting());
        let mut told = Vec::new();
        for (lowest, ranks) in &group.hosts {
            let lowest = group.members.get(lowest);
            let same = lowest.and_then(|member| member.same_machine.as_ref());
            let plan = SharedMemoryPlan {
                communicator: root.communicator,
                group: group.identity,
                socket: same.map(|same| same.socket.clone()).unwrap_or_default(),
                ranks: ranks.clone(),
                failover,
                meeting: meeting.clone(),
                fallback: group.fallback.as_ref().map(|fallback| fallback.reason.clone()),
            };
            let others = ranks.ranges().iter().cloned().flatten().skip(1);
            let connections = others.filter_map(|rank| group.members.get(&rank)?.connection);
            told.extend(connections.map(|connection| (connection, plan.clone())));
        }
        for (connection, plan) in told {
            self.send(connection, FromController::SharedMemory(plan));
            self.tell_controllers(connection);
        }
    }

    /// Whether a rank can know this of another one: they share memory, or did for an earlier controller. Those that join again
    /// share it before their group is ready.
    pub(super) fn may_blame(&self, id: GroupId, rank: u32, cause: &AbortReason) -> bool {
        let group = self.groups.get(&id).filter(|group| group.ready || group.is_full());
        let Some(group) = group else { return false };
        let (AbortReason::PeerLost { rank: blamed, .. }
        | AbortReason::Mismatch { rank: blamed, .. }
        | AbortReason::Overdue { rank: blamed, .. }) = *cause
        else {
            return false;
        };
        let host = |rank| Some(&group.members.get(&rank)?.same_machine.as_ref()?.host);
        match (host(rank), host(blamed)) {
            (Some(own), Some(other)) => own == other,
            // Of one from before it is not known.
            (None, _) => group.revived.is_some() && blamed < group.world,
            (Some(_), None) => false,
        }
    }
}

impl Group {
    /// Its trees, which were planned for those that are connected to them.
    pub(super) fn forest(&self, trees: Vec<Tree>) -> Forest {
        let forest = Forest::new(trees);
        if self.hosts.is_empty() { forest } else { forest.with_hosts(&self.hosts) }
    }
}

/// The ranks of each host of a full group, by the lowest, if some host has several that can share memory and nobody
/// wants the switch for himself.
fn hosts(group: &Group) -> Option<BTreeMap<u32, Ranks>> {
    let mut of_host: HashMap<&str, Vec<u32>> = HashMap::new();
    for (&rank, member) in group.members.iter() {
        let same = member.same_machine.as_ref().filter(|_| !member.options.plain)?;
        of_host.entry(&same.host).or_default().push(rank);
    }
    let largest = of_host.values().map(Vec::len).max()?;
    if largest == 1 || largest > MAX_SHARED_MEMORY_WORLD as usize {
        return None;
    }
    let of = |ranks: Vec<u32>| Some((*ranks.first()?, ranks.into_iter().collect()));
    Some(of_host.into_values().filter_map(of).collect())
}

/// Why the ranks of a full group do not share memory, if so.
fn obstacle(group: &Group) -> Option<String> {
    if group.world > MAX_SHARED_MEMORY_WORLD {
        return Some(format!(
            "it has {} ranks, and no more than {MAX_SHARED_MEMORY_WORLD} can",
            group.world
        ));
    }
    let host = |rank: &u32| Some(&group.members.get(rank)?.same_machine.as_ref()?.host);
    group.members.iter().find_map(|(rank, member)| match &member.same_machine {
        None => Some(format!("rank {rank} at {} wants a switch", member.address)),
        Some(same) if Some(&same.host) != host(&0) => Some(format!(
            "rank {rank} at {} and rank 0 are of different machines, containers or users",
            member.address
        )),
        Some(_) => None,
    })
}
