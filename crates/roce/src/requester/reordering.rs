//! Answers that came before those of a READ or an atomic operation that were sent before them.

use millstream_wire::Packet;

use crate::Instant;
use crate::early::{self, Half, Stream};
use crate::endpoint::{Shared, index_of};
use crate::memory::Memory;
use crate::queue_pair::QueuePair;

impl QueuePair {
    /// Takes an answer to one of our requests, and those that have waited for it.
    pub(crate) fn handle_response<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
        packet: &Packet<'_>,
    ) {
        self.answered(now, shared, packet);
        if shared.early.is_empty() {
            return;
        }
        let answers = self.answers();
        while let Some(psn) = shared.early.first(answers) {
            if self.requester.misses_data_before(psn) {
                self.wait_for_the_next_gap(now, shared);
                break;
            }
            let Some(early) = shared.early.take(answers, psn) else { break };
            shared.counters.reordered += 1;
            self.answered(now, shared, &early.packet());
            shared.early.give_back(early);
        }
    }

    /// The answers that came before their turn are its.
    fn answers(&self) -> Stream {
        Stream { pair: index_of(self.qpn), half: Half::Requester }
    }

    /// An answer from behind data that has not come: it was overtaken, or lost.
    pub(super) fn handle_answer_gap<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
        packet: &Packet<'_>,
        psn: u64,
    ) {
        let missing = self.requester.unacknowledged;
        let is_near = psn - missing <= early::ROOM as u64;
        let reordering = shared.config.reordering;
        if !reordering.is_zero() && is_near && shared.early.keep(self.answers(), psn, packet) {
            self.requester.kept_until.get_or_insert(now + early::EXPIRY);
            self.requester.wait_for_gap(now + reordering);
        } else {
            self.lost(now, shared, missing);
        }
    }

    /// What the peer has refused is sent again: it may take that.
    pub(super) fn forget_early_refusals<M>(&self, shared: &mut Shared<M>) {
        if !shared.early.is_empty() {
            shared.early.forget_refusals(self.answers());
        }
    }

    /// What is kept is behind another gap than before.
    fn wait_for_the_next_gap<M>(&mut self, now: Instant, shared: &Shared<M>) {
        let requester = &mut self.requester;
        requester.kept_until.get_or_insert(now + early::EXPIRY);
        // What was asked for again is on its way.
        if requester.unacknowledged >= requester.asked_again_to {
            requester.wait_for_gap(now + shared.config.reordering);
        }
    }

    /// Takes what is missing for so long for lost, and drops what was kept behind it for too long.
    pub(super) fn handle_answer_gap_deadlines<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
    ) {
        if self.requester.gap_until.is_some_and(|until| until <= now) {
            self.requester.gap_until = None;
            self.lost(now, shared, self.requester.unacknowledged);
        }
        if self.requester.kept_until.is_some_and(|until| until <= now) {
            self.requester.kept_until = None;
            shared.early.forget(self.answers());
        }
    }
}
