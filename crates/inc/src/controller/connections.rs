//! Who is connected, when something is due for each, and how many there are of each kind.
//!
//! All of them say something all the time: nothing that is done for a message looks at all connections.

use core::ops::Deref;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use millstream_roce::Instant;

use super::quotas::{Holder, Owner};
use super::timed::{HasDeadline, Timed};
use super::{ConnectionId, GroupId};
use crate::plan::SwitchId;

/// What the peer of a connection is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Role {
    /// It has not said, and must until then.
    New {
        until: Instant,
    },
    Switch(SwitchId),
    Host {
        group: GroupId,
        rank: u32,
    },
}

#[derive(Debug)]
pub(super) struct Connection {
    /// Counted, as the owner is: [`Connections`] changes them.
    role: Role,
    owner: Owner,
    /// What it is told has this term.
    pub(super) term: u64,
    pub(super) next_ping: Instant,
    /// Questions in a row that got no answer.
    pub(super) unanswered: u32,
    /// Somebody wants its place, and since then it was asked whether it is there, and has said nothing.
    pub(super) doubted: bool,
}

impl Connection {
    /// One that says until then what it is.
    pub(super) const fn new(until: Instant, owner: Owner, term: u64, next_ping: Instant) -> Self {
        let role = Role::New { until };
        Self { role, owner, term, next_ping, unanswered: 0, doubted: false }
    }

    pub(super) const fn role(&self) -> Role {
        self.role
    }

    pub(super) const fn owner(&self) -> Owner {
        self.owner
    }
}

impl HasDeadline for Connection {
    fn due_at(&self) -> Option<Instant> {
        Some(match self.role {
            Role::New { until } => until.min(self.next_ping),
            Role::Switch(_) | Role::Host { .. } => self.next_ping,
        })
    }
}

/// How many connections there are of each kind.
#[derive(Debug, Default, Eq, PartialEq)]
struct Counts {
    hosts: usize,
    switches: usize,
    /// Those that have not said what they are. There is a limit on them.
    strangers: BTreeSet<ConnectionId>,
    of_holders: BTreeMap<Holder, u64>,
}

impl Counts {
    fn add(&mut self, id: ConnectionId, connection: &Connection) {
        match connection.role {
            Role::New { .. } => {
                self.strangers.insert(id);
            }
            Role::Switch(_) => self.switches += 1,
            Role::Host { .. } => self.hosts += 1,
        }
        for holder in connection.owner.holders() {
            *self.of_holders.entry(holder).or_default() += 1;
        }
    }

    fn remove(&mut self, id: ConnectionId, connection: &Connection) {
        match connection.role {
            Role::New { .. } => {
                self.strangers.remove(&id);
            }
            Role::Switch(_) => self.switches -= 1,
            Role::Host { .. } => self.hosts -= 1,
        }
        for holder in connection.owner.holders() {
            if let Entry::Occupied(mut count) = self.of_holders.entry(holder) {
                *count.get_mut() -= 1;
                // There are more addresses than can be kept.
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }
}

/// All connections. They are read as a map.
#[derive(Debug)]
pub(super) struct Connections {
    all: Timed<ConnectionId, Connection>,
    counts: Counts,
}

impl Connections {
    pub(super) fn new() -> Self {
        Self { all: Timed::new(), counts: Counts::default() }
    }

    pub(super) fn insert(&mut self, id: ConnectionId, connection: Connection) {
        self.remove(&id);
        self.counts.add(id, &connection);
        self.all.insert(id, connection);
    }

    pub(super) fn remove(&mut self, id: &ConnectionId) -> Option<Connection> {
        let connection = self.all.remove(id)?;
        self.counts.remove(*id, &connection);
        Some(connection)
    }

    pub(super) fn get_mut(&mut self, id: &ConnectionId) -> Option<&mut Connection> {
        self.all.get_mut(id)
    }

    /// The peer has said what it is.
    pub(super) fn set_role(&mut self, id: ConnectionId, role: Role) {
        self.change(id, |connection| connection.role = role);
    }

    /// The peer has proved a token.
    pub(super) fn set_token(&mut self, id: ConnectionId, token: usize) {
        self.change(id, |connection| connection.owner.token = Some(token));
    }

    fn change(&mut self, id: ConnectionId, change: impl FnOnce(&mut Connection)) {
        let Some(connection) = self.all.get_mut(&id) else { return };
        self.counts.remove(id, connection);
        change(connection);
        self.counts.add(id, connection);
    }

    /// What they have sent was not read: nobody has left a question without an answer, and who has not said what it is may do so
    /// until then.
    pub(super) fn forgive(&mut self, until: Instant) {
        for connection in self.all.values_mut() {
            connection.unanswered = 0;
            if let Role::New { until: own } = &mut connection.role {
                *own = (*own).max(until);
            }
        }
    }

    /// When something is due for one of them.
    pub(super) fn first(&mut self) -> Option<Instant> {
        self.all.first()
    }

    /// For which something is due, in the order in which they came.
    pub(super) fn due(&mut self, now: Instant) -> Vec<ConnectionId> {
        self.all.due(now)
    }

    pub(super) const fn hosts(&self) -> usize {
        self.counts.hosts
    }

    pub(super) const fn switches(&self) -> usize {
        self.counts.switches
    }

    /// Those that have not said what they are, the oldest first.
    pub(super) fn strangers(
        &self,
    ) -> impl ExactSizeIterator<Item = (ConnectionId, &Connection)> + Clone {
        self.counts.strangers.iter().map(move |id| (*id, &self.all[id]))
    }

    /// How many one has.
    pub(super) fn count_of(&self, holder: Holder) -> u64 {
        self.counts.of_holders.get(&holder).copied().unwrap_or_default()
    }

    /// Whether the deadline that was given last is that of all. For assertions.
    pub(super) fn agrees(&self) -> bool {
        self.all.agrees()
    }

    /// What is counted is what a count of all gives.
    #[cfg(test)]
    pub(super) fn assert_counted(&self) {
        let mut counts = Counts::default();
        self.all.iter().for_each(|(&id, connection)| counts.add(id, connection));
        assert_eq!(self.counts, counts);
    }
}

impl Deref for Connections {
    type Target = BTreeMap<ConnectionId, Connection>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}
