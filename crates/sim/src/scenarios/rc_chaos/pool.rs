//! Receive buffers that are made for no message in particular: those of a shared receive queue, and
//! those of a queue pair for datagrams. Whoever has a message takes the oldest.

use core::time::Duration;
use std::collections::VecDeque;

use millstream_roce::{Instant, Piece, ReceiveRequest};

use super::draw::pick;
use super::execution::UNTOUCHED;
use super::operation::Layout;
use crate::Rng;

/// Set in the number of a receive request of a pool.
const POOLED: u64 = 1 << 62;
/// Bytes between slots.
const GAP: u32 = 5;

/// What a pool is like.
#[derive(Clone, Debug)]
pub(super) struct PoolPlan {
    /// Receive requests that are posted at a time.
    pub(super) depth: usize,
    /// How many more when trouble is over, and nobody may be short of them.
    pub(super) spare: usize,
    /// Bytes that a slot must have.
    pub(super) length: u32,
    /// With fewer requests than this its owner wants to hear of it.
    pub(super) limit: usize,
    /// How long a slot is posted again after its message came.
    pub(super) lag: Duration,
    /// Some slots have less room than others.
    pub(super) uneven: bool,
}

impl PoolPlan {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        let depth = *pick(rng, &[1, 2, 4, 8]);
        Self {
            depth,
            spare: 0,
            length: 0,
            limit: rng.below(depth as u64 + 1) as usize,
            lag: Duration::from_micros(*pick(rng, &[0, 0, 10, 200])),
            uneven: false,
        }
    }
}

/// Where a message goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Slot {
    /// In the region of its pool.
    pub(super) offset: u32,
    pub(super) length: u32,
    pub(super) layout: Layout,
    /// How often it was posted.
    round: u32,
    state: State,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Idle,
    Posted,
    Taken,
}

/// A region of slots, and the receive requests that name them.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) plan: PoolPlan,
    pub(super) address: u64,
    pub(super) key: u32,
    slots: Vec<Slot>,
    /// Those that are posted, oldest first.
    posted: VecDeque<usize>,
    /// Nothing is posted before this.
    pub(super) starved_until: Instant,
}

impl Pool {
    pub(super) fn new(plan: PoolPlan, address: u64, rng: &mut Rng) -> Self {
        let mut offset = GAP;
        let slots = (0..plan.depth + plan.spare).map(|_| {
            let short = plan.uneven && rng.below(4) == 0;
            let length = if short { plan.length / 4 } else { plan.length };
            let slot =
                Slot { offset, length, layout: Layout::draw(rng), round: 0, state: State::Idle };
            offset += length + GAP;
            slot
        });
        let slots = slots.collect();
        let posted = VecDeque::new();
        Self { plan, address, key: 0, slots, posted, starved_until: Instant::ZERO }
    }

    /// Nobody may be short of receive requests from now on.
    pub(super) fn open_all(&mut self) {
        self.plan.depth = self.slots.len();
        self.plan.lag = Duration::ZERO;
        self.starved_until = Instant::ZERO;
    }

    /// What its region holds before anything comes.
    pub(super) fn blank(&self) -> Vec<u8> {
        let last = self.slots.last().map_or(0, |slot| slot.offset + slot.length);
        vec![UNTOUCHED; (last + GAP) as usize]
    }

    pub(super) fn slot(&self, index: usize) -> &Slot {
        &self.slots[index]
    }

    /// Receive requests that are posted.
    pub(super) fn posted(&self) -> usize {
        self.posted.len()
    }

    /// The next receive request to post, and where in the region its bytes are.
    pub(super) fn next(&mut self) -> Option<(ReceiveRequest<Vec<Piece>>, core::ops::Range<usize>)> {
        let slots = &self.slots[..self.plan.depth];
        let index = slots.iter().position(|slot| slot.state == State::Idle)?;
        let slot = &mut self.slots[index];
        slot.round += 1;
        slot.state = State::Posted;
        self.posted.push_back(index);
        let address = self.address + u64::from(slot.offset);
        let pieces = slot.layout.pieces(self.key, address, slot.length);
        let id = POOLED | u64::from(slot.round) << 16 | index as u64;
        let range = slot.offset as usize..(slot.offset + slot.length) as usize;
        Some((ReceiveRequest { id, pieces }, range))
    }

    /// The room of the request that is taken next.
    pub(super) fn room(&self) -> Option<u32> {
        self.posted.front().map(|&index| self.slots[index].length)
    }

    /// A message takes the oldest.
    pub(super) fn take(&mut self) -> Option<usize> {
        let index = self.posted.pop_front()?;
        self.slots[index].state = State::Taken;
        Some(index)
    }

    /// What was taken is the application's again.
    pub(super) fn release(&mut self, index: usize) {
        self.slots[index].state = State::Idle;
    }

    /// All that was posted is gone.
    pub(super) fn clear(&mut self) {
        while let Some(index) = self.take() {
            self.release(index);
        }
    }

    /// Whether a receive request is one of a pool.
    pub(super) const fn is_pooled(id: u64) -> bool {
        id >> 62 == 1
    }

    /// Whether a receive request is the last one that was posted for a slot.
    pub(super) fn is_of(&self, index: usize, id: u64) -> bool {
        let slot = &self.slots[index];
        id == POOLED | u64::from(slot.round) << 16 | index as u64
    }

    /// Whether its region holds what it did before, but for slots that are in use.
    pub(super) fn is_untouched(&self, bytes: &[u8]) -> bool {
        let mut at = 0;
        let blank = |bytes: &[u8]| bytes.iter().all(|&byte| byte == UNTOUCHED);
        for slot in &self.slots {
            let end = slot.offset as usize + slot.length as usize;
            let posted = slot.state == State::Posted;
            let from = if posted { end } else { slot.offset as usize };
            if !bytes.get(at..from).is_some_and(blank) {
                return false;
            }
            at = end;
        }
        bytes.get(at..).is_some_and(blank)
    }
}
