//! Ranks of a group that come and go, of which people are told: as ranges, so that who lists them does not look at each.

use std::collections::BTreeMap;

use crate::protocol::RankList;

/// A set of ranks.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct RankSet {
    /// The end of each range by its start. Between two of them is a gap.
    ranges: BTreeMap<u32, u32>,
    count: u32,
}

impl RankSet {
    /// All ranks of a group with so many.
    pub(super) fn all(world: u32) -> Self {
        let range = (world > 0).then_some((0, world));
        Self { ranges: range.into_iter().collect(), count: world }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The first ranges, and how many ranks there are.
    pub(super) fn list(&self) -> RankList {
        RankList::new(self.ranges.iter().map(|(&start, &end)| start..end), self.count)
    }

    pub(super) fn insert(&mut self, rank: u32) {
        if self.range_of(rank).is_some() {
            return;
        }
        let end = self.ranges.remove(&(rank + 1)).unwrap_or(rank + 1);
        let before = self.ranges.range(..rank).next_back().map(|(&start, &end)| (start, end));
        let joined = before.filter(|&(_, end)| end == rank);
        self.ranges.insert(joined.map_or(rank, |(start, _)| start), end);
        self.count += 1;
    }

    pub(super) fn remove(&mut self, rank: u32) {
        let Some((start, end)) = self.range_of(rank) else { return };
        self.ranges.remove(&start);
        for (start, end) in [(start, rank), (rank + 1, end)] {
            if start < end {
                self.ranges.insert(start, end);
            }
        }
        self.count -= 1;
    }

    /// The range that a rank is in, if it is one of them.
    fn range_of(&self, rank: u32) -> Option<(u32, u32)> {
        let (&start, &end) = self.ranges.range(..=rank).next_back()?;
        (rank < end).then_some((start, end))
    }
}

impl FromIterator<u32> for RankSet {
    fn from_iter<T: IntoIterator<Item = u32>>(ranks: T) -> Self {
        let mut set = Self::default();
        ranks.into_iter().for_each(|rank| set.insert(rank));
        set
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_is_listed_as_its_ranks_are() {
        for (world, gone, text) in [
            (1, &[][..], "0"),
            (5, &[], "0-4"),
            (5, &[0], "1-4"),
            (5, &[4, 2], "0-1, 3"),
            (5, &[1, 2, 3], "0, 4"),
            (2, &[0, 1, 1], ""),
        ] {
            let mut set = RankSet::all(world);
            gone.iter().for_each(|&rank| set.remove(rank));
            assert_eq!(set.list().to_string(), text);
            assert_eq!(set.is_empty(), text.is_empty());
        }
        // However many there are, it is one range, or as many as are listed.
        let mut set = RankSet::all(65_536);
        (0..65_536).filter(|rank| rank % 2 == 0).for_each(|rank| set.remove(rank));
        let odd = (0..65_536).filter(|rank| rank % 2 == 1);
        assert_eq!(set.list(), odd.collect::<RankList>());
        (0..65_536).for_each(|rank| set.insert(rank));
        assert_eq!(set, RankSet::all(65_536));
    }

    proptest! {
        #[test]
        fn ranks_come_and_go(
            steps in proptest::collection::vec((any::<bool>(), 0..12_u32), 0..60),
        ) {
            let (mut set, mut model) = (RankSet::default(), BTreeSet::new());
            for (comes, rank) in steps {
                match comes {
                    true => {
                        set.insert(rank);
                        model.insert(rank);
                    }
                    false => {
                        set.remove(rank);
                        model.remove(&rank);
                    }
                }
                prop_assert_eq!(set.list(), model.iter().copied().collect::<RankList>());
                prop_assert_eq!(&set, &model.iter().copied().collect::<RankSet>());
            }
        }
    }
}
