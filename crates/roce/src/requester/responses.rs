//! What a requester does with answers: requests are complete, must be sent again, or have failed.

use millstream_wire::{NakCode, Operation, Packet, Syndrome};

use crate::Instant;
use crate::completion::CompletionStatus;
use crate::endpoint::Shared;
use crate::memory::Memory;
use crate::queue_pair::QueuePair;
use crate::responder::scatter;

/// Data of a READ or an atomic operation that was executed: its answer was lost, or overtaken.
#[derive(Debug)]
struct Missing;

impl QueuePair {
    /// Takes an answer to one of our requests.
    pub(super) fn answered<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
        packet: &Packet<'_>,
    ) {
        let psn = packet.bth.psn.extend(self.requester.unacknowledged);
        // Answers to what was never sent (ghosts), and to what was answered before.
        let outstanding = self.requester.unacknowledged..self.requester.sent;
        if !outstanding.contains(&psn) {
            shared.counters.dropped_response += 1;
            if packet.opcode.operation() == Operation::ReadResponse {
                self.requester.came_again(psn);
            }
            return;
        }
        let syndrome = match packet.opcode.operation() {
            Operation::ReadResponse | Operation::AtomicAcknowledge => {
                self.data_arrived(now, shared, packet, psn);
                return;
            }
            Operation::Acknowledge => packet.extended.aeth.map(|aeth| aeth.syndrome()),
            _ => None,
        };
        match syndrome {
            Some(Syndrome::Ack { .. }) => {
                if self.acknowledged(now, shared, psn + 1).is_err() {
                    let missing = self.requester.unacknowledged;
                    match self.requester.fetches_at(psn) {
                        // It stands where data should, which was lost.
                        true => self.lost(now, shared, missing),
                        false => self.handle_answer_gap(now, shared, packet, psn),
                    }
                }
            }
            Some(Syndrome::Nak(NakCode::PsnSequenceError)) => {
                if self.acknowledged(now, shared, psn).is_err() {
                    return self.handle_answer_gap(now, shared, packet, psn);
                }
                shared.counters.naks_received += 1;
                self.requester.forget_recovery(now);
                self.lost(now, shared, psn);
            }
            Some(Syndrome::ReceiverNotReady { timer }) => {
                if self.acknowledged(now, shared, psn).is_err() {
                    return self.handle_answer_gap(now, shared, packet, psn);
                }
                shared.counters.rnr_naks_received += 1;
                self.receiver_not_ready(now, shared, psn, timer);
            }
            Some(Syndrome::Nak(code)) => {
                if self.acknowledged(now, shared, psn).is_err() {
                    return self.handle_answer_gap(now, shared, packet, psn);
                }
                shared.counters.naks_received += 1;
                if self.requester.unacknowledged == psn {
                    let status = match code {
                        NakCode::InvalidRequest | NakCode::PsnSequenceError => {
                            CompletionStatus::RemoteInvalidRequest
                        }
                        NakCode::RemoteAccessError => CompletionStatus::RemoteAccess,
                        NakCode::RemoteOperationalError => CompletionStatus::RemoteOperational,
                    };
                    self.fail_fatally(shared, Some(status));
                }
            }
            Some(Syndrome::Reserved(_)) | None => {
                self.fail_fatally(shared, Some(CompletionStatus::BadResponse));
            }
        }
    }

    /// Everything before `end` has been executed; READs and atomic operations also need their data. An error says
    /// that some of it has not come, from the oldest number that is not acknowledged on.
    fn acknowledged<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
        end: u64,
    ) -> Result<(), Missing> {
        let before = self.requester.unacknowledged;
        let mut data = Ok(());
        while self.requester.unacknowledged < end {
            let Some(work) = self.requester.queue.front() else { break };
            if work.fetches() {
                data = Err(Missing);
                break;
            }
            let work_end = work.end();
            self.requester.unacknowledged = end.min(work_end);
            if self.requester.unacknowledged == work_end {
                self.complete_oldest(shared);
            }
        }
        let progress = self.requester.unacknowledged - before;
        if progress > 0 {
            self.requester.progress(now, progress, &mut shared.budget);
        }
        data
    }

    fn complete_oldest<M: Memory>(&mut self, shared: &mut Shared<M>) {
        if let Some(work) = self.requester.take_oldest() {
            self.requester.cursor = self.requester.cursor.saturating_sub(1);
            if work.signaled {
                let completion = work.completion(self.qpn, CompletionStatus::Success);
                shared.complete(self.send_completions, completion);
            }
        }
    }

    /// Takes a packet of a READ response, or the answer to an atomic operation.
    fn data_arrived<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
        packet: &Packet<'_>,
        psn: u64,
    ) {
        // A response acknowledges all requests before its own.
        let index = self.requester.queue.partition_point(|work| work.end() <= psn);
        let Some(work) = self.requester.queue.get(index) else { return };
        // An atomic operation is answered by one number, which becomes 8 bytes of this machine.
        let original = packet.extended.atomic_ack.map(|ack| ack.original.to_ne_bytes());
        let data = original.as_ref().map_or(packet.payload, <[u8; 8]>::as_slice);
        if !work.fetches() || work.operation.is_atomic() != original.is_some() {
            self.fail_fatally(shared, Some(CompletionStatus::BadResponse));
            return;
        }
        let first = work.first;
        let mtu = self.path.mtu.bytes() as u64;
        let index = psn - first;
        let offset = index * mtu;
        let positive =
            packet.extended.aeth.is_none_or(|aeth| matches!(aeth.syndrome(), Syndrome::Ack { .. }));
        let fits = data.len() as u64 == (work.length - offset).min(mtu)
            && self.requester.fits_chunk(packet.opcode.position(), index, work.packets)
            && positive;
        if self.acknowledged(now, shared, first).is_err() || self.requester.unacknowledged != psn {
            self.requester.heard(now);
            match fits {
                true => self.handle_answer_gap(now, shared, packet, psn),
                false => self.lost(now, shared, self.requester.unacknowledged),
            }
            return;
        }
        // So all before it is complete.
        let Some(work) = self.requester.queue.front() else { return };
        if !fits {
            self.fail_fatally(shared, Some(CompletionStatus::BadResponse));
            return;
        }
        let end = work.end();
        let pieces = self.requester.pieces.get(&work.pieces);
        let scattered = scatter(shared, self.domain, pieces, offset, data);
        // It is complete when all of it is where it belongs.
        let flushed = |()| if psn + 1 == end { shared.memory.flush() } else { Ok(()) };
        if scattered.and_then(flushed).is_err() {
            self.fail_fatally(shared, Some(CompletionStatus::LocalProtection));
            return;
        }
        self.requester.end_silence(now, psn);
        if packet.opcode.position().ends() {
            self.requester.round_trip.answered();
        }
        shared.counters.payload_bytes_received += data.len() as u64;
        shared.budget.give_back(self.requester.fetches.arrived(psn, data.len() as u64));
        self.requester.unacknowledged = psn + 1;
        if self.requester.unacknowledged == end {
            self.complete_oldest(shared);
        }
        self.requester.progress(now, 1, &mut shared.budget);
    }
}
