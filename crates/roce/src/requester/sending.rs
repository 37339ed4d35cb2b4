//! The next request packet, if the window, the receive budget and the peer allow one.

use millstream_wire::{ICRC_LENGTH, MAX_HEADER_LENGTH, Operation, Psn};

use super::Probe;
use crate::budget::cost;
use crate::completion::CompletionStatus;
use crate::endpoint::{Shared, index_of};
use crate::memory::Memory;
use crate::queue_pair::{QueuePair, header};
use crate::request_packets::{Part, packet_of};
use crate::work::{Piece, SendOperation, parts, parts_and_rest};
use crate::{Instant, Transmit};

/// A packet's bytes beside its payload, at most.
const HEADERS: u64 = (MAX_HEADER_LENGTH + 3 + ICRC_LENGTH) as u64;

impl QueuePair {
    /// Writes the next request packet, if the window and the peer allow one.
    pub(crate) fn request<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
        transmit: &mut Transmit,
    ) -> bool {
        let requester = &mut self.requester;
        if requester.rnr_until.is_some() {
            return false;
        }
        let end = requester.stop_at.unwrap_or(requester.posted);
        let probe = requester.probe;
        let in_flight = requester.in_flight();
        let mut allowed = u64::from(requester.window.size());
        let psn = match probe {
            Some(Probe::Oldest) => requester.unacknowledged,
            Some(Probe::Newest) => requester.next - 1,
            None if requester.next >= end || in_flight >= allowed => return false,
            None => requester.next,
        };
        while requester.queue.get(requester.cursor).is_some_and(|work| work.end() <= requester.next)
        {
            requester.cursor += 1;
        }
        let at = if probe.is_some() { requester.index_of(psn) } else { requester.cursor };
        let Some(work) = requester.queue.get(at) else { return false };
        if work.broken {
            self.fail_broken(shared);
            return false;
        }
        if requester.unacknowledged < work.after {
            return false;
        }
        let index = psn - work.first;
        let mtu = self.path.mtu.bytes() as u64;
        let offset = index * mtu;
        let fetches = work.fetches();
        let mut charge = 0;
        let packets = if fetches {
            let chunk = requester.read_chunk;
            let packets = (chunk - index % chunk).min(work.end() - psn);
            // A depth of 0 can be set in SQD, when some wait already: one at a time, then.
            let depth = requester.fetches.len() >= requester.initiator_depth.max(1);
            // A probe is of one that is counted already.
            let waits = in_flight > 0 && in_flight + packets > allowed;
            if probe.is_none() && (depth || waits) {
                if !depth {
                    // What is left is no room for a chunk: all of it that READs can use is used.
                    requester.window.sent(allowed);
                }
                return false;
            }
            if matches!(work.operation, SendOperation::Read { .. }) {
                let bytes = cost((work.length - offset).min(packets * mtu), packets);
                let budget = &mut shared.budget;
                if psn >= requester.sent {
                    // Without a timeout answers that are lost would take their room for ever.
                    if requester.timeout.is_some() {
                        if !budget.ask(index_of(self.qpn), &mut requester.turn, bytes) {
                            return false;
                        }
                        charge = bytes;
                    }
                } else if !requester.window.is_silent() {
                    // Recovery waits for nobody. A peer that stays silent takes no room from others.
                    budget.ask_again(bytes);
                    charge = bytes;
                }
            }
            packets
        } else {
            // What is to come from the peer takes none of its room.
            allowed = allowed.min(requester.send_limit.saturating_add(requester.fetches.packets()));
            if probe.is_none() && in_flight >= allowed {
                return false;
            }
            1
        };
        let ends = psn + packets == work.end();
        let part = Part { length: work.length, offset, packets, ends, split: work.split };
        let (opcode, extended) = packet_of(&work.operation, part, mtu);
        let pieces = || requester.pieces.get(&work.pieces);
        let payload = || parts(pieces(), offset, if fetches { 0 } else { mtu });
        // So many bytes after this packet can be sent before the peer answers.
        let window =
            if probe.is_some() { 0 } else { (allowed - in_flight).saturating_sub(1) * mtu };
        let mut stage = |(piece, following): (Piece, u64)| {
            shared.memory.stage(&piece, following.min(window)).is_ok()
        };
        let staged = parts_and_rest(pieces(), offset, if fetches { 0 } else { mtu });
        if !staged.into_iter().all(&mut stage) {
            requester.queue[at].broken = true;
            self.fail_broken(shared);
            return false;
        }
        let inline = work.inline.map_or(&[][..], |slot| requester.inline.get(slot));
        let length = if fetches { 0 } else { (work.length - offset).min(mtu) };
        let mut bth = header(&self.path, opcode, Psn::from_extended(psn), length);
        bth.acknowledge_request = ends
            || fetches
            || psn.is_multiple_of(requester.acknowledge_interval)
            || in_flight + 1 >= allowed
            || self.congestion.pauses_after(now, length + HEADERS)
            || probe.is_some();
        // Only what takes a receive request raises an event (IBTA 9.2.3).
        let takes_receive = opcode.operation() == Operation::Send || extended.immediate.is_some();
        bth.solicited_event = ends && takes_receive && work.solicited;
        self.path.write(&bth, &extended, payload(), transmit);
        transmit.put_inline(inline);
        shared.counters.payload_bytes_sent += length;

        if let Some(probe) = probe {
            let more = probe == Probe::Oldest && in_flight > 1;
            requester.probe = more.then_some(Probe::Newest);
            return true;
        }
        if fetches {
            requester.fetches.begin(psn + packets, packets, charge);
        }
        let fresh = psn >= requester.sent;
        if requester.sent == requester.unacknowledged {
            requester.last_progress = now;
        }
        requester.next = psn + packets;
        requester.sent = requester.sent.max(requester.next);
        requester.window.sent(requester.next - requester.unacknowledged);
        if fresh && bth.acknowledge_request {
            // A READ is measured by its first answer: the others come as fast as the path carries them.
            let answered = if fetches { psn + 1 } else { requester.next };
            requester.round_trip.sent(now, answered);
        }
        if requester.deadline.is_none() {
            requester.arm(now);
        }
        true
    }

    /// A request whose local memory is wrong fails once all before it are complete.
    fn fail_broken<M: Memory>(&mut self, shared: &mut Shared<M>) {
        if self.requester.queue.front().is_some_and(|work| work.broken) {
            self.fail_fatally(shared, Some(CompletionStatus::LocalProtection));
        }
    }
}
