//! The ranks of a group that are there, and what is known of all of them together: each of many says something, and nothing that
//! is done for one looks at all, but for the last that comes and those that leave after fewer collectives than any before.

use core::net::IpAddr;
use core::ops::Deref;
use std::collections::btree_map::ValuesMut;
use std::collections::{BTreeMap, BTreeSet};

use millstream_roce::Instant;

use super::ConnectionId;
use super::rank_set::RankSet;
use crate::protocol::{FallbackOffer, HostQueuePair, LostSwitch, SameMachine};
use crate::spec::CommunicatorOptions;

#[derive(Debug)]
pub(super) struct Member {
    /// None while it is away.
    pub(super) connection: Option<ConnectionId>,
    pub(super) address: IpAddr,
    /// For further trees.
    pub(super) more_addresses: Vec<IpAddr>,
    /// Its queue pairs, one for each tree; none before it has connected.
    pub(super) ends: Vec<HostQueuePair>,
    /// How ranks of its machine find it, if it wants that.
    pub(super) same_machine: Option<SameMachine>,
    /// What it asks of the communicator.
    pub(super) options: CommunicatorOptions,
    /// Whether it takes the place of a switch.
    pub(super) fallback: FallbackOffer,
    /// Switches that it has lost before, which are not to serve the group.
    pub(super) avoid: Vec<LostSwitch>,
    /// It has said that it is done, after so many collectives ([`Members::leave`]). Its connection may be gone.
    pub(super) left: Option<u64>,
    /// It is away, and lost when it is not back by then.
    pub(super) away_until: Option<Instant>,
}

impl Member {
    /// Where a tree reaches it.
    pub(super) fn address_of(&self, tree: usize) -> Option<IpAddr> {
        match tree.checked_sub(1) {
            None => Some(self.address),
            Some(more) => self.more_addresses.get(more).copied(),
        }
    }
}

/// The members of a group by their ranks. They are read as a map.
#[derive(Debug)]
pub(super) struct Members {
    all: BTreeMap<u32, Member>,
    absent: RankSet,
    /// Those that have left, by how many collectives they have called.
    left: BTreeSet<(u64, u32)>,
    /// What any of them asks for, since all are there.
    options: CommunicatorOptions,
}

impl Members {
    /// None, of so many.
    pub(super) fn new(world: u32) -> Self {
        Self {
            all: BTreeMap::new(),
            absent: RankSet::all(world),
            left: BTreeSet::new(),
            options: CommunicatorOptions::default(),
        }
    }

    pub(super) fn insert(&mut self, rank: u32, member: Member) {
        let left = member.left;
        let before = self.all.insert(rank, member);
        if let Some(collectives) = before.and_then(|member| member.left) {
            self.left.remove(&(collectives, rank));
        }
        self.left.extend(left.map(|collectives| (collectives, rank)));
        self.absent.remove(rank);
        if self.absent.is_empty() {
            let all = self.all.values().map(|member| member.options);
            self.options = all.fold(CommunicatorOptions::default(), CommunicatorOptions::or);
        }
    }

    pub(super) fn remove(&mut self, rank: &u32) -> Option<Member> {
        let member = self.all.remove(rank)?;
        if let Some(collectives) = member.left {
            self.left.remove(&(collectives, *rank));
        }
        self.absent.insert(*rank);
        Some(member)
    }

    pub(super) fn get_mut(&mut self, rank: &u32) -> Option<&mut Member> {
        self.all.get_mut(rank)
    }

    pub(super) fn values_mut(&mut self) -> ValuesMut<'_, u32, Member> {
        self.all.values_mut()
    }

    /// A rank says that it is done, after so many collectives.
    pub(super) fn leave(&mut self, rank: u32, collectives: u64) {
        if let Some(member) = self.all.get_mut(&rank) {
            let before = member.left.replace(collectives);
            if let Some(before) = before {
                self.left.remove(&(before, rank));
            }
            self.left.insert((collectives, rank));
        }
    }

    /// Of those that have left, the one that has called the fewest collectives: how many, and its rank.
    pub(super) fn first_left(&self) -> Option<(u64, u32)> {
        self.left.first().copied()
    }

    /// Whether all that are there have left.
    pub(super) fn all_have_left(&self) -> bool {
        self.left.len() == self.all.len()
    }

    /// Those that are not there.
    pub(super) const fn absent(&self) -> &RankSet {
        &self.absent
    }

    /// What any of them asks for, once all are there.
    pub(super) const fn options(&self) -> CommunicatorOptions {
        self.options
    }

    /// What is known of all is what a look at each gives.
    #[cfg(test)]
    pub(super) fn assert_counted(&self, world: u32) {
        let left = self.all.iter().filter_map(|(&rank, member)| Some((member.left?, rank)));
        assert_eq!(self.left, left.collect::<BTreeSet<_>>());
        let absent = (0..world).filter(|rank| !self.all.contains_key(rank));
        assert_eq!(self.absent, absent.collect::<RankSet>());
        if self.absent.is_empty() {
            let options = self.all.values().map(|member| member.options);
            let options = options.fold(CommunicatorOptions::default(), CommunicatorOptions::or);
            assert_eq!(self.options, options);
        }
    }
}

impl Deref for Members {
    type Target = BTreeMap<u32, Member>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}
