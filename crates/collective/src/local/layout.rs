//! Where everything is in the memory of a group, in bytes from its start.
//!
//! ```text
//! header     what it is, the barrier's count, a failure, the search for other trees
//! members    who each rank's process is, how far it is, and what it has called
//! small      for each rank two places, used by turns, for vectors that all ranks read at once
//! slots      for each rank three places, used by turns, for a chunk of a longer vector
//! results    of a group with other hosts two places, used by turns, for what comes from them
//! ```
//!
//! What different ranks write is in different cache lines, in pairs of them, since processors fetch pairs.

use super::members::Members;

/// Says what the memory is, with the version of this layout.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"MSgroup\x02");

pub(super) const MAGIC_AT: usize = 0;
pub(super) const WORLD_AT: usize = 8;
/// How often ranks have arrived at barriers, all of them together.
pub(super) const ARRIVALS_AT: usize = 128;
/// How many threads sleep there, or did when their process was killed.
pub(super) const SLEEPERS_AT: usize = 256;
/// What has failed: `failure.rs`.
pub(super) const FAILURE_AT: usize = 384;
/// Whether other trees are looked for, how long that took in all, and why: `recovery.rs`.
pub(super) const RECOVERY_AT: usize = 1024;
pub(super) const PAUSED_AT: usize = 1032;
pub(super) const LOSS_AT: usize = 1152;

const MEMBERS_AT: usize = 4096;
const MEMBER_BYTES: usize = 256;
const PAGE: usize = 4096;

/// Of a rank: its process number, and when that started.
pub(super) const PID: usize = 0;
pub(super) const STARTED: usize = 8;
/// The last barrier at which it has arrived.
pub(super) const ARRIVED: usize = 128;
/// How many collectives it has done, and 1 more than that when it has left.
pub(super) const FINISHED: usize = 136;
pub(super) const LEFT: usize = 144;

/// Of a rank, two places that are used by turns: the number of a call and one, and its descriptor.
pub(super) const CALL_BYTES: usize = 64;
const CALLS: usize = 0;

/// The longest vector that all ranks read at once.
pub(super) const SMALL_BYTES: usize = 8 << 10;

/// Bytes of a chunk. Those of a few ranks fit a processor's L2.
pub(super) const SLOT_BYTES: usize = 128 << 10;

/// Bytes of a chunk where there are other hosts: each chunk is a call of its own there, and waits for all hosts. All
/// ranks of the largest group have an element of 8 bytes in it.
pub(super) const HOST_SLOT_BYTES: usize = 512 << 10;
const _: () = assert!(HOST_SLOT_BYTES / 8 >= millstream_inc::MAX_WORLD as usize);

/// Chunks of which there are results: one is written and one is read at the same time.
pub(super) const RESULTS: u64 = 2;

/// Chunks of a rank: one is written, one is reduced and one is read at the same time.
pub(super) const SLOTS: u64 = 3;

/// The memory of so many ranks that share it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Layout {
    world: usize,
    slot_bytes: usize,
    results: usize,
}

impl Layout {
    /// Of a group that is on one host.
    pub(super) const fn new(world: u32) -> Self {
        Self { world: world as usize, slot_bytes: SLOT_BYTES, results: 0 }
    }

    /// Of a host of a group with others.
    pub(super) const fn of_host(world: u32) -> Self {
        let results = RESULTS as usize;
        Self { world: world as usize, slot_bytes: HOST_SLOT_BYTES, results }
    }

    pub(super) fn of(members: &Members) -> Self {
        let layout = if members.has_others() { Self::of_host } else { Self::new };
        layout(members.count())
    }

    pub(super) const fn member(self, rank: u32) -> usize {
        MEMBERS_AT + rank as usize * 2 * MEMBER_BYTES
    }

    /// Where a rank says what its call of this number is.
    pub(super) const fn call(self, rank: u32, sequence: u64) -> usize {
        self.member(rank) + MEMBER_BYTES + CALLS + (sequence % 2) as usize * 2 * CALL_BYTES
    }

    const fn small_at(self) -> usize {
        (MEMBERS_AT + self.world * 2 * MEMBER_BYTES).next_multiple_of(PAGE)
    }

    /// Where a rank has its short vector of the call of this number.
    pub(super) const fn small(self, rank: u32, sequence: u64) -> usize {
        self.small_at() + (rank as usize * 2 + (sequence % 2) as usize) * SMALL_BYTES
    }

    const fn slots_at(self) -> usize {
        self.small_at() + self.world * 2 * SMALL_BYTES
    }

    /// Where a rank has this chunk.
    pub(super) const fn slot(self, rank: u32, chunk: u64) -> usize {
        let slot = rank as usize * SLOTS as usize + (chunk % SLOTS) as usize;
        self.slots_at() + slot * self.slot_bytes
    }

    const fn results_at(self) -> usize {
        self.slots_at() + self.world * SLOTS as usize * self.slot_bytes
    }

    /// Where the result of this chunk is that all hosts have.
    pub(super) const fn result(self, chunk: u64) -> usize {
        self.results_at() + (chunk % RESULTS) as usize * self.slot_bytes
    }

    /// All bytes.
    pub(super) const fn length(self) -> usize {
        self.results_at() + self.results * self.slot_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::failure::FAILURE_BYTES;

    #[test]
    fn nothing_lies_over_anything_else() {
        let worlds = [1, 2, 3, 64, 256];
        let layouts = worlds.map(|world| (world, Layout::new(world), SLOT_BYTES));
        let of_hosts = worlds.map(|world| (world, Layout::of_host(world), HOST_SLOT_BYTES));
        for (world, layout, slot_bytes) in layouts.into_iter().chain(of_hosts) {
            let mut ranges = vec![
                (MAGIC_AT, 16),
                (ARRIVALS_AT, 4),
                (SLEEPERS_AT, 4),
                (FAILURE_AT, FAILURE_BYTES),
                (RECOVERY_AT, 4),
                (PAUSED_AT, 8),
                (LOSS_AT, FAILURE_BYTES),
            ];
            for rank in 0..world {
                ranges.extend([(layout.member(rank), 152)]);
                for turn in 0..2 {
                    ranges.push((layout.call(rank, turn), CALL_BYTES));
                    ranges.push((layout.small(rank, turn), SMALL_BYTES));
                }
                ranges.extend((0..SLOTS).map(|chunk| (layout.slot(rank, chunk), slot_bytes)));
            }
            if slot_bytes == HOST_SLOT_BYTES {
                ranges.extend((0..RESULTS).map(|chunk| (layout.result(chunk), slot_bytes)));
            }
            ranges.sort_unstable();
            for pair in ranges.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?} of {world}");
                assert!(pair[1].0.is_multiple_of(8), "{pair:?}");
            }
            let &(last, bytes) = ranges.last().unwrap();
            assert_eq!(last + bytes, layout.length());
        }
        let layout = Layout::new(4);
        assert_eq!(layout.slot(1, 7), layout.slot(1, 4), "by turns");
        assert_eq!(layout.small(1, 7), layout.small(1, 5));
    }
}
