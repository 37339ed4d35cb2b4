//! Starts of a peer's process that are over.

use std::collections::VecDeque;

/// So many are known. Of more, the first is taken for a new one if somebody still has its descriptor.
const MAX: usize = 64;

/// Incarnations that will not come back: another one has been heard of since.
#[derive(Debug, Default)]
pub(super) struct Buried(VecDeque<u64>);

impl Buried {
    /// This one is over. 0 is none.
    pub(super) fn bury(&mut self, incarnation: u64) {
        if incarnation == 0 || self.has(incarnation) {
            return;
        }
        if self.0.len() == MAX {
            self.0.pop_front();
        }
        self.0.push_back(incarnation);
    }

    pub(super) fn has(&self, incarnation: u64) -> bool {
        self.0.contains(&incarnation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_are_known() {
        let mut buried = Buried::default();
        assert!(!buried.has(0));
        (0..=MAX as u64).for_each(|incarnation| buried.bury(incarnation));
        assert!(!buried.has(0) && (1..=MAX as u64).all(|it| buried.has(it)));
        buried.bury(2);
        assert!(buried.has(1), "it is known already");
        buried.bury(1000);
        assert!(!buried.has(1) && buried.has(2) && buried.has(1000));
    }
}
