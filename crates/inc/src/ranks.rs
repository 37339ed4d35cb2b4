//! Which ranks are below a port of a switch.

use core::ops::Range;

/// A set of ranks: ranges in order, none of which is empty, with gaps between them.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Ranks(Vec<Range<u32>>);

impl Ranks {
    /// One rank: what is below the port of a host.
    pub fn one(rank: u32) -> Self {
        Self([rank].into_iter().map(|rank| rank..rank.saturating_add(1)).collect())
    }

    /// Whether a rank is one of them.
    pub fn contains(&self, rank: u32) -> bool {
        let at = self.0.partition_point(|range| range.end <= rank);
        self.0.get(at).is_some_and(|range| range.contains(&rank))
    }

    /// The lowest.
    pub fn first(&self) -> Option<u32> {
        Some(self.0.first()?.start)
    }

    /// How many.
    pub fn len(&self) -> u64 {
        self.0.iter().map(|range| u64::from(range.end - range.start)).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranges.
    pub fn ranges(&self) -> &[Range<u32>] {
        &self.0
    }

    /// Whether some rank is in both.
    pub fn meets(&self, other: &Self) -> bool {
        let (mut ours, mut theirs) = (self.0.iter().peekable(), other.0.iter().peekable());
        while let (Some(a), Some(b)) = (ours.peek(), theirs.peek()) {
            if a.start < b.end && b.start < a.end {
                return true;
            }
            if a.end <= b.end {
                ours.next();
            } else {
                theirs.next();
            }
        }
        false
    }
}

impl FromIterator<u32> for Ranks {
    fn from_iter<T: IntoIterator<Item = u32>>(ranks: T) -> Self {
        ranks.into_iter().map(|rank| rank..rank.saturating_add(1)).collect()
    }
}

impl FromIterator<Range<u32>> for Ranks {
    fn from_iter<T: IntoIterator<Item = Range<u32>>>(ranges: T) -> Self {
        let mut all: Vec<Range<u32>> =
            ranges.into_iter().filter(|range| !range.is_empty()).collect();
        all.sort_unstable_by_key(|range| range.start);
        let mut merged: Vec<Range<u32>> = Vec::with_capacity(all.len());
        for range in all {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        Self(merged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_in_order_and_merged() {
        let ranks: Ranks = [7, 3, 4, 9, 4].into_iter().collect();
        assert_eq!(ranks.ranges(), [3..5, 7..8, 9..10]);
        assert_eq!((ranks.first(), ranks.len(), ranks.is_empty()), (Some(3), 4, false));
        let held: Vec<u32> = (0..12).filter(|&rank| ranks.contains(rank)).collect();
        assert_eq!(held, [3, 4, 7, 9]);
        assert_eq!(Ranks::default().first(), None);
        assert_eq!(Ranks::one(5), [5].into_iter().collect());
        let ranges: Ranks = [4..8, 0..0, 0..4].into_iter().collect();
        assert_eq!((ranges.first(), ranges.len(), ranges.ranges().len()), (Some(0), 8, 1));
    }

    #[test]
    fn sets_meet_where_they_share_a_rank() {
        let set = |ranks: &[u32]| ranks.iter().copied().collect::<Ranks>();
        for (a, b, meet) in [
            (&[1, 3, 5][..], &[0, 2, 4, 6][..], false),
            (&[1, 3, 5], &[0, 5], true),
            (&[1, 2, 3], &[3], true),
            (&[1, 2, 3], &[4], false),
            (&[], &[4], false),
        ] {
            assert_eq!(set(a).meets(&set(b)), meet);
            assert_eq!(set(b).meets(&set(a)), meet);
        }
    }
}
