//! All groups, by their numbers and by their identities, and when something is due for one of them.

use core::ops::Deref;
use std::collections::BTreeMap;
use std::collections::btree_map::ValuesMut;

use millstream_roce::Instant;

use super::GroupId;
use super::group::Group;
use super::timed::{HasDeadline, Timed};
use crate::protocol::GroupIdentity;

/// All groups. They are read as a map.
#[derive(Debug)]
pub(super) struct Groups {
    all: Timed<GroupId, Group>,
    by_identity: BTreeMap<GroupIdentity, GroupId>,
}

impl HasDeadline for Group {
    fn due_at(&self) -> Option<Instant> {
        let all = [self.deadline, self.fall_back_at, self.claimed_by(), self.named_by()];
        all.into_iter().flatten().min()
    }
}

impl Groups {
    pub(super) const fn new() -> Self {
        Self { all: Timed::new(), by_identity: BTreeMap::new() }
    }

    pub(super) fn insert(&mut self, id: GroupId, group: Group) {
        self.by_identity.insert(group.identity, id);
        self.all.insert(id, group);
    }

    pub(super) fn remove(&mut self, id: &GroupId) -> Option<Group> {
        let group = self.all.remove(id)?;
        if self.of(group.identity) == Some(*id) {
            self.by_identity.remove(&group.identity);
        }
        Some(group)
    }

    pub(super) fn get_mut(&mut self, id: &GroupId) -> Option<&mut Group> {
        self.all.get_mut(id)
    }

    pub(super) fn values_mut(&mut self) -> ValuesMut<'_, GroupId, Group> {
        self.all.values_mut()
    }

    /// The one with this identity.
    pub(super) fn of(&self, identity: GroupIdentity) -> Option<GroupId> {
        self.by_identity.get(&identity).copied()
    }

    /// When something is due for one of them.
    pub(super) fn first(&mut self) -> Option<Instant> {
        self.all.first()
    }

    /// Those for which this deadline is over, in the order in which they were made.
    pub(super) fn due(
        &mut self,
        now: Instant,
        deadline: impl Fn(&Group) -> Option<Instant>,
    ) -> Vec<GroupId> {
        let mut due = self.all.due(now);
        due.retain(|id| self.all.get(id).and_then(&deadline).is_some_and(|at| at <= now));
        due
    }

    /// Whether the deadline that was given last is that of all. For assertions.
    pub(super) fn agrees(&self) -> bool {
        self.all.agrees()
    }

    /// Each is found by its identity, and nothing else is.
    #[cfg(test)]
    pub(super) fn assert_known(&self) {
        let all = self.all.iter().map(|(&id, group)| (group.identity, id));
        let all: BTreeMap<GroupIdentity, GroupId> = all.collect();
        assert_eq!(self.by_identity, all);
    }
}

impl Deref for Groups {
    type Target = BTreeMap<GroupId, Group>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}
