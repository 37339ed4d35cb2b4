//! What the ranks of a host know of the search for other trees, which the one of them that is on the wire begins and ends.
//!
//! The others join with it, each for itself, since the controller is to know all ranks. Meanwhile time does not count.

use std::sync::atomic::Ordering;
use std::time::Duration;

use millstream_net::shared_memory::futex;

use super::area::Area;
use super::failure::{self, Failure};
use super::layout::{LOSS_AT, PAUSED_AT, RECOVERY_AT};

/// Which trees the host is on, or looks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Recovery {
    /// How many sets of trees there were before.
    pub(crate) generation: u32,
    /// They are looked for.
    pub(crate) is_under_way: bool,
}

impl Recovery {
    const fn of(word: u32) -> Self {
        Self { generation: word.div_ceil(2), is_under_way: word % 2 == 1 }
    }

    const fn word(self) -> u32 {
        if self.is_under_way { 2 * self.generation - 1 } else { 2 * self.generation }
    }
}

impl Area {
    /// Who is on the wire looks for the trees of this generation, because of this.
    pub(super) fn begin_recovery(&self, generation: u32, loss: &Failure) {
        failure::forget(&self.memory, LOSS_AT);
        failure::say(&self.memory, LOSS_AT, loss);
        self.say_recovery(Recovery { generation, is_under_way: true });
    }

    /// It is on them, after so long.
    pub(super) fn end_recovery(&self, generation: u32, took: Duration) {
        let paused = self.long(PAUSED_AT);
        let took = took.as_millis().try_into().unwrap_or(u64::MAX);
        paused.store(paused.load(Ordering::Relaxed).saturating_add(took), Ordering::Relaxed);
        self.say_recovery(Recovery { generation, is_under_way: false });
    }

    fn say_recovery(&self, recovery: Recovery) {
        self.word(RECOVERY_AT).store(recovery.word(), Ordering::Release);
        self.wake_recovery();
        self.wake();
    }

    pub(super) fn recovery(&self) -> Recovery {
        Recovery::of(self.word(RECOVERY_AT).load(Ordering::Acquire))
    }

    /// Why other trees were looked for last.
    pub(super) fn loss(&self) -> Option<Failure> {
        failure::heard(&self.memory, LOSS_AT, self.members.world())
    }

    /// How long the host has looked for trees in all, without what is under way.
    pub(super) fn paused(&self) -> Duration {
        Duration::from_millis(self.long(PAUSED_AT).load(Ordering::Relaxed))
    }

    /// Sleeps while the search is at this, for so long at most.
    pub(super) fn sleep_while(&self, recovery: Recovery, most: Duration) {
        futex::sleep_while(self.word(RECOVERY_AT), recovery.word(), most);
    }

    /// Wakes those who sleep there, to look again.
    pub(super) fn wake_recovery(&self) {
        futex::wake_all(self.word(RECOVERY_AT));
    }
}

#[cfg(test)]
mod tests {
    use millstream_net::shared_memory::GroupOwner;

    use super::super::layout::Layout;
    use super::super::members::Members;
    use super::*;

    #[test]
    fn the_ranks_of_a_host_see_each_search_for_trees_its_reason_and_how_long_it_took() {
        let (_owner, memory) = GroupOwner::create(Layout::new(2).length()).unwrap();
        let area = Area::new(memory, Members::all(2));
        assert_eq!(area.recovery(), Recovery { generation: 0, is_under_way: false });
        assert_eq!((area.loss(), area.paused()), (None, Duration::ZERO));
        for generation in 1..4 {
            let detail = format!("the {generation}th time");
            let loss = Failure::SwitchLost { switch: [10, 0, 0, 1].into(), detail };
            area.begin_recovery(generation, &loss);
            assert_eq!(area.recovery(), Recovery { generation, is_under_way: true });
            assert_eq!(area.loss(), Some(loss));
            area.end_recovery(generation, Duration::from_millis(1500));
            assert_eq!(area.recovery(), Recovery { generation, is_under_way: false });
            assert_eq!(area.paused(), Duration::from_millis(1500) * generation);
        }
    }
}
