//! The endpoint as a node: packets that come and go, and deadlines.

use millstream_wire::{Bth, Opcode, Operation, Packet, ParseError, Qpn, Reth};

use super::{BURST, Endpoint};
use crate::Instant;
use crate::completion::CompletionStatus;
use crate::config::Transport;
use crate::counters::Baseline;
use crate::memory::Memory;
use crate::node::{DatagramMeta, Node, Transmit};
use crate::work::Piece;

impl<M: Memory> Node for Endpoint<M> {
    fn expect(&self, datagram: &[u8]) {
        if let Some((bth, rest)) = datagram.split_first_chunk::<{ Bth::LENGTH }>()
            && let Ok(opcode) = Opcode::from_byte(bth[0])
            && opcode.has_reth()
            && opcode.operation() == Operation::Write
            && let Ok(reth) = Reth::parse(rest)
        {
            // The payload, and what may follow it, as a pad and the ICRC.
            let payload = (rest.len() - Reth::LENGTH) as u64;
            let length = payload.min(reth.dma_length.into());
            self.shared.memory.expect(reth.remote_key, reth.virtual_address, length);
        }
    }

    fn handle_datagram(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        if let Some(index) = self.handle_one(now, meta, datagram)
            && !self.shared.early.is_empty()
        {
            while self.handle_one_early(now, index) {}
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.flush();
        self.shared.memory.unstage();
        while let Some(index) = self.timers.pop_due(now) {
            let index = index as usize;
            let Some(pair) = self.queue_pairs[index].as_mut() else { continue };
            if pair.deadline().is_some_and(|deadline| deadline <= now) {
                pair.congestion.wait_is_over(now);
                pair.complete_datagrams(&mut self.shared);
                pair.acknowledge_if_due(now, &mut self.shared);
                pair.handle_gap_deadlines(now, &mut self.shared);
                let before = Baseline::of(&self.shared.counters);
                pair.handle_deadline(now, &mut self.shared);
                pair.counters.add_since(&before, &self.shared.counters);
                self.after_change(index);
            } else {
                self.arm(index);
            }
        }
    }

    fn poll_timeout(&mut self) -> Option<Instant> {
        let pairs = &self.queue_pairs;
        let pair = |index: u32| pairs.get(index as usize)?.as_ref();
        self.timers.earliest(|index| pair(index)?.deadline())
    }

    fn poll_transmit(&mut self, now: Instant, transmit: &mut Transmit) -> bool {
        loop {
            self.call_waiting();
            let Some(&index) = self.ready.front() else { return false };
            let Some(pair) = self.queue_pairs[index as usize].as_mut() else {
                self.ready.pop_front();
                continue;
            };
            pair.requester.turn.asked = false;
            let before = Baseline::of(&self.shared.counters);
            let sent = pair.transmit(now, &mut self.shared, transmit);
            if !sent {
                pair.ready = false;
                // Nobody waits behind one that wants nothing now.
                if !pair.requester.turn.asked {
                    self.shared.budget.leave(index, &mut pair.requester.turn);
                }
                self.ready.pop_front();
                self.burst = 0;
                self.arm(index as usize);
                continue;
            }
            transmit.source_qpn = pair.qpn;
            self.shared.counters.packets_sent += 1;
            pair.counters.packets_sent += 1;
            pair.counters.add_since(&before, &self.shared.counters);
            self.burst += 1;
            if self.burst >= BURST {
                self.burst = 0;
                self.ready.rotate_left(1);
            }
            self.arm(index as usize);
            return true;
        }
    }

    fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
        self.shared.memory.bytes(piece).ok()
    }
}

impl<M: Memory> Endpoint<M> {
    /// As [`Node::handle_datagram`], but requests that have waited for this one are left to
    /// [`Endpoint::handle_next_early`], to be called until there is none. For those who must act on what each packet
    /// brings before the next one.
    pub fn handle_datagram_alone(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        self.handle_one(now, meta, datagram);
    }

    /// Handles the request to a queue pair that came before its turn ([`crate::EndpointConfig::reordering`]), if
    /// it is its turn now. Returns whether there was one.
    pub fn handle_next_early(&mut self, now: Instant, qpn: Qpn) -> bool {
        !self.shared.early.is_empty()
            && self.index(qpn).is_some_and(|index| self.handle_one_early(now, index))
    }

    /// Returns the index of the queue pair whose request it was.
    fn handle_one(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) -> Option<usize> {
        self.shared.counters.packets_received += 1;
        let packet = match Packet::parse(datagram) {
            Ok(packet) => packet,
            Err(ParseError::UnknownOpcode(_)) => {
                self.shared.counters.dropped_opcode += 1;
                return None;
            }
            Err(_) => {
                self.shared.counters.dropped_malformed += 1;
                return None;
            }
        };
        let index = self.admit(meta, datagram, &packet)?;
        if let Some(pair) = self.queue_pairs[index].as_mut() {
            pair.counters.packets_received += 1;
        }
        let source = (index as u32, packet.opcode.is_response());
        if !self.flush_other(source) {
            return None;
        }
        let pair = self.queue_pairs[index].as_mut()?;
        if packet.opcode.operation() == Operation::CongestionNotification {
            self.shared.counters.congestion_notifications += 1;
            pair.congestion.notified(now);
            return None;
        }
        let reliable = pair.transport == Transport::ReliableConnection;
        if meta.congestion_experienced && reliable && !packet.payload.is_empty() {
            pair.congestion.marked(now);
        }
        let before = Baseline::of(&self.shared.counters);
        pair.communicate(&mut self.shared);
        let mut request = None;
        if packet.opcode.has_deth() {
            pair.receive_datagram(&mut self.shared, meta, datagram.len(), &packet);
        } else if packet.opcode.is_response() {
            pair.handle_response(now, &mut self.shared, &packet);
        } else {
            pair.handle_request(now, &mut self.shared, &packet);
            request = Some(index);
        }
        pair.counters.add_since(&before, &self.shared.counters);
        self.unflushed = (!self.shared.memory.is_flushed()).then_some(source);
        self.after_change(index);
        request
    }

    fn handle_one_early(&mut self, now: Instant, index: usize) -> bool {
        let source = (index as u32, false);
        if !self.flush_other(source) {
            return false;
        }
        let Some(pair) = self.queue_pairs[index].as_mut() else { return false };
        let before = Baseline::of(&self.shared.counters);
        let handled = pair.handle_early(now, &mut self.shared);
        pair.counters.add_since(&before, &self.shared.counters);
        self.unflushed = (!self.shared.memory.is_flushed()).then_some(source);
        self.after_change(index);
        handled
    }

    /// Flushes what others have written than the one whose packet comes; `false` when its queue pair has just
    /// failed by that.
    fn flush_other(&mut self, source: (u32, bool)) -> bool {
        match self.unflushed.filter(|&unflushed| unflushed != source) {
            Some(unflushed) => self.flush() || unflushed.0 != source.0,
            None => true,
        }
    }

    /// Puts the queue pair that has waited longest for the receive budget on the ready list, when
    /// there is room for what it wants.
    fn call_waiting(&mut self) {
        let budget = &self.shared.budget;
        let Some(index) = budget.first_waiting() else { return };
        if let Some(pair) = &mut self.queue_pairs[index as usize]
            && !pair.ready
            && pair.requester.turn.waits_for.is_some_and(|bytes| budget.has_room(bytes))
        {
            pair.ready = true;
            self.ready.push_back(index);
        }
    }

    /// Flushes what queue pairs have written; whether that was nothing, or went well. Whose packets did not
    /// get where they belong, that queue pair fails.
    fn flush(&mut self) -> bool {
        let Some((index, responses)) = self.unflushed.take() else { return true };
        let index = index as usize;
        let Some(pair) = self.queue_pairs[index].as_mut() else { return true };
        let flushed = match responses {
            false => pair.flush_requests(&mut self.shared),
            true => self.shared.memory.flush().is_ok(),
        };
        if !flushed {
            if responses {
                pair.fail_fatally(&mut self.shared, Some(CompletionStatus::LocalProtection));
            }
            self.after_change(index);
        }
        flushed
    }
}
