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

/// Bounded shares: a queue that waits while higher levels are served is served first once so many bytes of these
/// were posted, for one slice; so many times as many, if so many of its level wait. So of a rail that is always
/// wanted each level has a part, and each queue has a part of that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shares {
    /// So many bytes of higher levels go before a slice that waits.
    limit: u64,
    /// By level: bytes of all higher ones that were posted, in all.
    higher: ByLevel<u64>,
}

impl Shares {
    pub(crate) const fn new(limit: u64) -> Self {
        Self { limit, higher: [0; PriorityLevel::ALL.len()] }
    }

    /// What a queue of a level keeps when it has something to wait for, and when a slice of it was posted.
    pub(crate) const fn mark(&self, level: PriorityLevel) -> u64 {
        self.higher[level.index()]
    }

    /// Whether it is the turn of a queue that has this mark before higher levels, where so many of its level wait.
    pub(crate) const fn is_due(&self, level: PriorityLevel, mark: u64, waiting: usize) -> bool {
        self.higher[level.index()] - mark >= self.limit * waiting as u64
    }

    /// A slice of a level was posted.
    pub(crate) fn posted(&mut self, level: PriorityLevel, length: u32) {
        for higher in &mut self.higher[level.index() + 1..] {
            *higher += u64::from(length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use PriorityLevel::{Bulk, Latency, Normal};

    /// What is posted, slice by slice, when queues of these levels always wait.
    fn served(levels: &[PriorityLevel], slices: usize, length: u32) -> Vec<usize> {
        let mut shares = Shares::new(1000);
        let mut queues: Vec<_> = levels.iter().map(|level| (*level, 0, 0)).collect();
        for _ in 0..slices {
            let of = |level| levels.iter().filter(|it| **it == level).count();
            let is_due = |&(level, mark, _): &(_, _, _)| shares.is_due(level, mark, of(level));
            let due = queues.iter().position(is_due);
            let (level, mark, count) = &mut queues[due.unwrap_or(0)];
            *count += 1;
            shares.posted(*level, length);
            *mark = shares.mark(*level);
        }
        queues.into_iter().map(|(.., count)| count).collect()
    }

    #[test]
    fn each_level_has_its_share_however_much_higher_levels_want() {
        assert_eq!(served(&[Latency], 110, 100), [110]);
        // A slice after each 1000 bytes of those above it.
        assert_eq!(served(&[Latency, Bulk], 110, 100), [100, 10]);
        assert_eq!(served(&[Normal, Bulk], 110, 100), [100, 10]);
        // What counts is bytes: long slices let others pass sooner.
        assert_eq!(served(&[Latency, Bulk], 110, 500), [74, 36]);
        let of_all = served(&PriorityLevel::ALL, 1200, 100);
        assert!(of_all[0] > 900 && of_all[1] >= 90 && of_all[2] >= 90, "{of_all:?}");
        // Two queues of a level share that of one.
        assert_eq!(served(&[Latency, Bulk, Bulk], 2200, 100), [2000, 100, 100]);
    }

    #[test]
    fn names_are_of_one_level_each() {
        for level in PriorityLevel::ALL {
            assert_eq!(PriorityLevel::from_name(level.name()), Some(level));
        }
        assert_eq!(PriorityLevel::from_name("high"), None);
    }
}
