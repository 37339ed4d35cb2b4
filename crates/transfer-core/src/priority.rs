//! The order in which priorities are served, without starving any.

/// How soon a request is wanted, compared with others to the same peer. Only policies with
/// [`crate::Policy::has_priorities`] tell them apart.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum PriorityLevel {
    /// First: somebody waits for it. Others leave room for it on each rail while such requests come.
    Latency,
    /// Where nothing else is said.
    #[default]
    Normal,
    /// Last: what is to be done some time.
    Bulk,
}

impl PriorityLevel {
    /// All of them, the highest first.
    pub const ALL: [Self; 3] = [Self::Latency, Self::Normal, Self::Bulk];

    /// As settings and policy files have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Normal => "normal",
            Self::Bulk => "bulk",
        }
    }

    /// The level of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.name() == name)
    }

    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// One value for each level.
pub(crate) type ByLevel<T> = [T; PriorityLevel::ALL.len()];

/// Bounded shares: a level that waits while higher ones are served is served first once so many bytes of these
/// were posted, for one slice. So of a rail that is always wanted each level has a part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shares {
    /// So many bytes of higher levels go before a slice that waits.
    limit: u64,
    /// Bytes of higher levels that were posted since a slice of this level was, while this level waited.
    passed: ByLevel<u64>,
}

impl Shares {
    pub(crate) const fn new(limit: u64) -> Self {
        Self { limit, passed: [0; PriorityLevel::ALL.len()] }
    }

    /// Whether it is this level's turn before higher ones.
    pub(crate) const fn is_due(&self, level: PriorityLevel) -> bool {
        self.passed[level.index()] >= self.limit
    }

    /// The order in which levels are to be served now: those that are due, then the higher ones.
    pub(crate) fn order(&self) -> ByLevel<PriorityLevel> {
        let mut order = PriorityLevel::ALL;
        order.sort_by_key(|level| (!self.is_due(*level), *level));
        order
    }

    /// A slice of a level was posted, while those of some others `wait`.
    pub(crate) fn posted(
        &mut self,
        level: PriorityLevel,
        length: u32,
        waits: impl Fn(PriorityLevel) -> bool,
    ) {
        self.passed[level.index()] = 0;
        for lower in PriorityLevel::ALL.into_iter().filter(|lower| *lower > level) {
            let passed = &mut self.passed[lower.index()];
            *passed = if waits(lower) { *passed + u64::from(length) } else { 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use PriorityLevel::{Bulk, Latency, Normal};

    /// What is posted, slice by slice, when these levels always wait.
    fn served(levels: &[PriorityLevel], slices: usize, length: u32) -> ByLevel<usize> {
        let mut shares = Shares::new(1000);
        let mut served = [0; 3];
        let wait = PriorityLevel::ALL.map(|level| levels.contains(&level));
        for _ in 0..slices {
            let next = shares.order().into_iter().find(|level| wait[level.index()]).unwrap();
            served[next.index()] += 1;
            shares.posted(next, length, |level| wait[level.index()]);
        }
        served
    }

    #[test]
    fn each_level_has_its_share_however_much_higher_ones_want() {
        assert_eq!(served(&[Latency], 110, 100), [110, 0, 0]);
        // A slice after each 1000 bytes of those above it.
        assert_eq!(served(&[Latency, Bulk], 110, 100), [100, 0, 10]);
        assert_eq!(served(&[Normal, Bulk], 110, 100), [0, 100, 10]);
        // What counts is bytes: long slices let others pass sooner.
        assert_eq!(served(&[Latency, Bulk], 110, 500), [74, 0, 36]);
        let [latency, normal, bulk] = served(&PriorityLevel::ALL, 1200, 100);
        assert!(latency > 900 && normal >= 90 && bulk >= 90, "{latency} {normal} {bulk}");
    }

    #[test]
    fn what_did_not_wait_has_nothing_to_catch_up() {
        let mut shares = Shares::new(1000);
        shares.posted(Latency, 900, |level| level == Bulk);
        shares.posted(Latency, 900, |level| level == Latency);
        shares.posted(Latency, 900, |level| level == Bulk);
        assert_eq!(shares.order(), PriorityLevel::ALL);
        shares.posted(Latency, 100, |level| level == Bulk);
        assert_eq!(shares.order(), [Bulk, Latency, Normal]);
        shares.posted(Bulk, 100, |level| level == Bulk);
        assert_eq!(shares.order(), PriorityLevel::ALL);
    }

    #[test]
    fn names_are_of_one_level_each() {
        for level in PriorityLevel::ALL {
            assert_eq!(PriorityLevel::from_name(level.name()), Some(level));
        }
        assert_eq!(PriorityLevel::from_name("high"), None);
    }
}
