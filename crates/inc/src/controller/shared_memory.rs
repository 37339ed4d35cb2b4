//! Groups whose ranks are all of one machine: they share memory, and need no switch.

use super::group::{End, Group};
use super::resume::Revived;
use super::{Controller, GroupId};
use crate::protocol::{
    FromController, MAX_SHARED_MEMORY_WORLD, Refusal, SharedMemoryPlan, shortened,
};

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
            None => self.plan(id),
        }
    }

    /// The communicator is ready: nothing but the ranks has a part in it.
    fn share(&mut self, id: GroupId) {
        self.next_communicator += 1;
        let communicator = self.next_communicator;
        let Some(group) = self.groups.get_mut(&id) else { return };
        (group.ready, group.deadline) = (true, None);
        group.revived =
            Some(Revived { communicator, until: None, departed: false, placement: None });
        let first = group.members.values().next().and_then(|member| member.same_machine.as_ref());
        let socket = first.map(|same| same.socket.clone()).unwrap_or_default();
        let plan = SharedMemoryPlan { communicator, group: group.identity, socket };
        let told: Vec<_> = group.members.values().filter_map(|member| member.connection).collect();
        for connection in told {
            self.send(connection, FromController::SharedMemory(plan.clone()));
            self.tell_controllers(connection);
        }
        self.report_ready(id);
    }
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
