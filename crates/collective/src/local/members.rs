//! The ranks that share memory: all of a group, or those of one of its hosts.

use std::sync::Arc;

use millstream_inc::Ranks;
use millstream_inc::protocol::MAX_SHARED_MEMORY_WORLD;

/// Who shares memory. There, ranks are named by their places among these.
#[derive(Clone, Debug)]
pub(crate) struct Members {
    /// Their numbers in the group, in their order.
    ranks: Arc<[u32]>,
    /// How many ranks the group has.
    world: u32,
    /// There are other hosts. The first of these ranks is connected to switches for all of them.
    others: bool,
}

impl Members {
    /// All ranks of a group.
    pub(crate) fn all(world: u32) -> Self {
        Self { ranks: (0..world).collect(), world, others: false }
    }

    /// Those of a host, of a group with several; what is strange about them, if something is.
    pub(crate) fn of_host(ranks: &Ranks, world: u32) -> Result<Self, String> {
        let count = ranks.len();
        if count == 0 || count > MAX_SHARED_MEMORY_WORLD.into() {
            return Err(format!("{count} ranks share memory: 1 to {MAX_SHARED_MEMORY_WORLD} can"));
        }
        let ranks: Arc<[u32]> = ranks.ranges().iter().cloned().flatten().collect();
        match ranks.last() {
            Some(&last) if last >= world => Err(format!("rank {last} is none of {world}")),
            _ => Ok(Self { ranks, world, others: true }),
        }
    }

    /// Their numbers in the group, in their order.
    pub(crate) fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// How many ranks the group has.
    pub(crate) const fn world(&self) -> u32 {
        self.world
    }

    /// Whether the group has other hosts.
    pub(crate) const fn has_others(&self) -> bool {
        self.others
    }

    /// The number of the rank at a place. Of places that there are not, one that no rank has.
    pub(crate) fn rank(&self, place: u32) -> u32 {
        self.ranks.get(place as usize).copied().unwrap_or(u32::MAX)
    }

    /// The place of a rank, if it is one of them.
    pub(crate) fn place(&self, rank: u32) -> Option<u32> {
        Some(self.ranks.binary_search(&rank).ok()? as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_places_and_those_that_cannot_be_are_refused() {
        let of = |ranks: &[u32], world| Members::of_host(&ranks.iter().copied().collect(), world);
        let members = of(&[1, 4, 5], 6).unwrap();
        assert_eq!((members.ranks(), members.count(), members.world()), (&[1, 4, 5][..], 3, 6));
        assert_eq!([1, 2, 4, 5].map(|rank| members.place(rank)), [Some(0), None, Some(1), Some(2)]);
        assert_eq!([0, 2, 3].map(|place| members.rank(place)), [1, 5, u32::MAX]);
        assert!(members.has_others() && !Members::all(3).has_others());
        assert_eq!(Members::all(3).place(2), Some(2));
        assert!(of(&[], 6).unwrap_err().contains("0 ranks"));
        assert!(of(&[1, 6], 6).unwrap_err().contains("rank 6"));
        let many: Vec<u32> = (0..257).collect();
        assert!(of(&many, 300).unwrap_err().contains("257 ranks"));
    }
}
