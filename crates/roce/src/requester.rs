//! The requester half of a queue pair: sends work requests, resends what was lost, completes what
//! was acknowledged (IBTA 9.7.5.1, 9.7.6).
//!
//! Every posted request owns a range of 64-bit packet sequence numbers, so that any packet can be
//! made again from its number alone: going back is setting `next`. A READ owns one number for each
//! response packet, and is asked for in chunks that start at fixed numbers, so that a repeated
//! request never reaches beyond one that the responder has seen.

mod recovery;

use std::collections::VecDeque;

use core::time::Duration;

use millstream_wire::{
    ICRC_LENGTH, MAX_HEADER_LENGTH, Mtu, NakCode, Operation, Packet, Position, Psn, Qpn, Syndrome,
};

use crate::budget::{ReceiveBudget, Turn, cost};
use crate::completion::{Completion, CompletionStatus};
use crate::endpoint::{Shared, index_of};
use crate::fetches::Fetches;
use crate::inline::{InlineData, InlineSlot};
use crate::memory::Memory;
use crate::pieces::{PieceList, PieceRing};
use crate::queue_pair::{QueuePair, header};
use crate::request_packets::{Part, packet_of};
use crate::responder::scatter;
use crate::round_trip::RoundTrip;
use crate::window::Window;
use crate::work::{Piece, SendOperation, SendRequest, parts, parts_and_rest};
use crate::{Instant, Transmit};

/// READ responses asked for by one request packet: a quarter of the largest window, within these
/// bounds, of which the upper one is for the largest packets. That bounds how much one lost request
/// costs, and how far the answers of a long READ may run ahead of the window; and few requests let
/// the responder send its answers in large batches, since the first and the last answer to each are
/// longer than the others.
const READ_CHUNK: (u64, u64) = (16, 32);

/// An acknowledgement is asked for at least every so many packets.
const ACKNOWLEDGE_INTERVAL: u64 = 16;

/// The longest WRITE that goes out as one message for each packet, where that is allowed. The first
/// packet of a message is 16 bytes longer than the next, and the kernel takes equal ones together,
/// 64 KiB at a time: so the first two of each message cost a call of their own. Of a WRITE of this
/// length that is a fifth of the calls, and about what 16 bytes more in each packet cost too.
const LONGEST_SPLIT: u64 = 128 << 10;

/// A packet's bytes beside its payload, at most.
const HEADERS: u64 = (MAX_HEADER_LENGTH + 3 + ICRC_LENGTH) as u64;

#[derive(Debug)]
pub(crate) struct Requester {
    /// Requests that are not complete, oldest first. Their number ranges follow each other.
    queue: VecDeque<SendWork>,
    max_queue: usize,
    /// [`crate::QueuePairConfig::split_writes`].
    pub(crate) split_writes: bool,
    pieces: PieceRing,
    inline: InlineData,
    /// The oldest number that is not acknowledged.
    unacknowledged: u64,
    /// The next number to send; behind `sent` when going back.
    next: u64,
    /// One past the highest number ever sent.
    sent: u64,
    /// One past the last posted request's range.
    posted: u64,
    /// One past the range of the last READ or atomic operation that was posted.
    fetches_end: u64,
    /// In SQD, one past the last number that is sent: the end of the last request that was begun.
    stop_at: Option<u64>,
    /// Index in `queue` of the request that holds `next`.
    cursor: usize,
    /// Requests for READs and atomic operations in flight.
    fetches: Fetches,
    /// Its place among those that wait for the receive budget.
    pub(crate) turn: Turn,
    pub(crate) initiator_depth: usize,
    /// READ responses asked for by one request packet.
    read_chunk: u64,
    /// Silence that is tolerated `retry_count` + 1 times; `None` = for ever.
    pub(crate) timeout: Option<Duration>,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    rnr_retries_used: u8,
    /// The peer is not ready before this.
    rnr_until: Option<Instant>,
    /// When silence has lasted long enough to send again.
    deadline: Option<Instant>,
    /// When the peer last moved us forward, or the first packet in flight was sent.
    last_progress: Instant,
    /// The loss at this number was acted on, at this time.
    recovered: Option<(u64, Instant)>,
    window: Window,
    /// The most packets with data in flight that the peer has room for.
    send_limit: u64,
    acknowledge_interval: u64,
    round_trip: RoundTrip,
    /// What to send again to learn what became of what is in flight.
    probe: Option<Probe>,
}

/// A packet that is sent again after a silence, though it may only be slow. With the oldest the
/// peer has what it misses, if that was lost; whether more was, its answer to the newest says: an
/// acknowledgement of all, or a NAK of the next loss, even from a peer that reported one before.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Probe {
    Oldest,
    Newest,
}

/// A posted request and its numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendWork {
    id: u64,
    operation: SendOperation,
    pieces: PieceList,
    /// Its first number.
    first: u64,
    /// How many numbers it takes.
    packets: u64,
    length: u64,
    /// It is not begun before all numbers below this are acknowledged. Fenced requests wait so for
    /// the READs and atomic operations before them (IBTA 10.8.3.3).
    after: u64,
    /// Its bytes, when it brought them along.
    inline: Option<InlineSlot>,
    signaled: bool,
    solicited: bool,
    /// Its local memory is not what it should be: it fails when its turn to complete comes.
    broken: bool,
    /// A WRITE whose packets are a message each.
    split: bool,
}

// Two cache lines: a queue of them is walked with every packet.
const _: () = assert!(size_of::<SendWork>() <= 128);

impl SendWork {
    fn end(&self) -> u64 {
        self.first + self.packets
    }

    fn fetches(&self) -> bool {
        self.operation.fetches()
    }

    pub(crate) fn completion(&self, qpn: Qpn, status: CompletionStatus) -> Completion {
        let operation = self.operation.completes_as();
        let length = self.length as u32;
        Completion { length, ..Completion::new(self.id, qpn, status, operation) }
    }
}

/// How many packets go where one of the largest would.
fn window_scale(mtu: Mtu) -> u32 {
    let scale = (Mtu::B4096.bytes() / mtu.bytes()) as u32;
    scale.min(4)
}

/// How many packets may be in flight. The limit is stated for the largest packets; what it protects is the receiver's
/// buffer.
pub(crate) fn window_limit(max_window: u32, mtu: Mtu) -> u32 {
    max_window.saturating_mul(window_scale(mtu))
}

impl Requester {
    pub(crate) fn new(
        max_queue: usize,
        max_inline: usize,
        split_writes: bool,
        answer_delay: Duration,
    ) -> Self {
        Self {
            queue: VecDeque::with_capacity(max_queue),
            max_queue,
            split_writes,
            pieces: PieceRing::default(),
            inline: InlineData::new(max_queue, max_inline),
            unacknowledged: 0,
            next: 0,
            sent: 0,
            posted: 0,
            fetches_end: 0,
            stop_at: None,
            cursor: 0,
            fetches: Fetches::default(),
            turn: Turn::default(),
            initiator_depth: 0,
            read_chunk: READ_CHUNK.0,
            timeout: None,
            retry_count: 0,
            rnr_retry: 0,
            rnr_retries_used: 0,
            rnr_until: None,
            deadline: None,
            last_progress: Instant::ZERO,
            recovered: None,
            window: Window::new(1),
            send_limit: u64::MAX,
            acknowledge_interval: ACKNOWLEDGE_INTERVAL,
            round_trip: RoundTrip::new(answer_delay),
            probe: None,
        }
    }

    /// Sends this number first. One lap is added so that numbers before it exist too.
    pub(crate) fn start(&mut self, psn: Psn, mtu: Mtu, max_window: u32, budget: &ReceiveBudget) {
        let first = u64::from(Psn::COUNT) + u64::from(psn.value());
        self.unacknowledged = first;
        self.next = first;
        self.sent = first;
        self.posted = first;
        let (scale, limit) = (window_scale(mtu), window_limit(max_window, mtu));
        self.window = Window::new(limit);
        let longest = READ_CHUNK.1 * u64::from(scale);
        let chunk = (u64::from(limit) / 4).clamp(READ_CHUNK.0, longest);
        self.read_chunk = chunk.min(budget.longest_chunk(mtu.bytes() as u64));
    }

    /// The peer has room for so many bytes of packets with data.
    pub(crate) fn limit_sends(&mut self, bytes: u32, mtu: Mtu) {
        self.send_limit = (u64::from(bytes) / cost(mtu.bytes() as u64, 1)).max(1);
        // More packets leave while the answer to the first half is on its way.
        self.acknowledge_interval = ACKNOWLEDGE_INTERVAL.min((self.send_limit / 2).max(1));
    }

    /// Nothing more is sent.
    pub(crate) fn stop(&mut self, budget: &mut ReceiveBudget) {
        self.next = self.posted;
        self.unacknowledged = self.posted;
        self.sent = self.posted;
        self.cursor = 0;
        budget.give_back(self.fetches.forget_from(0));
        self.rnr_until = None;
        self.deadline = None;
        self.probe = None;
    }

    /// Begins no more requests.
    pub(crate) fn drain(&mut self) {
        let begun = self.queue.iter().rev().find(|work| work.first < self.sent);
        self.stop_at = Some(begun.map_or(self.sent, SendWork::end));
    }

    /// Begins requests again.
    pub(crate) fn resume(&mut self) {
        self.stop_at = None;
    }

    /// Whether all requests that were begun before [`Requester::drain`] are complete.
    pub(crate) fn is_drained(&self) -> bool {
        self.stop_at.is_some_and(|end| self.unacknowledged >= end)
    }

    /// Requests that are not complete, and fetches under way.
    pub(crate) fn usage(&self) -> (usize, usize) {
        (self.queue.len(), self.fetches.len())
    }

    pub(crate) fn is_full(&self) -> bool {
        self.queue.len() >= self.max_queue
    }

    /// Appends a request of `length` bytes, or with its own inline; the caller has checked that
    /// there is room.
    pub(crate) fn post(
        &mut self,
        request: &SendRequest<&[Piece]>,
        length: u64,
        inline: Option<&[u8]>,
        mtu: Mtu,
        broken: bool,
    ) {
        let &SendRequest { id, operation, pieces, signaled, solicited, fence, .. } = request;
        let inline = inline.map(|bytes| self.inline.keep(bytes));
        let length = inline.map_or(length, InlineSlot::length);
        let (first, packets) = (self.posted, mtu.packets(length));
        let plain_write = matches!(operation, SendOperation::Write { immediate: None, .. });
        self.queue.push_back(SendWork {
            id,
            operation,
            pieces: self.pieces.keep(pieces),
            first,
            packets,
            length,
            after: if fence { self.fetches_end } else { 0 },
            inline,
            signaled,
            solicited,
            broken,
            split: plain_write && self.split_writes && length <= LONGEST_SPLIT,
        });
        self.posted += packets;
        if operation.fetches() {
            self.fetches_end = self.posted;
        }
    }

    pub(crate) fn take_oldest(&mut self) -> Option<SendWork> {
        let work = self.queue.pop_front()?;
        self.pieces.release(&work.pieces);
        Some(work)
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        match (self.rnr_until, self.deadline) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn in_flight(&self) -> u64 {
        self.next - self.unacknowledged
    }

    /// Index in `queue` of the request that holds a number.
    fn index_of(&self, psn: u64) -> usize {
        self.queue.partition_point(|work| work.end() <= psn)
    }

    /// Whether the oldest and the newest packet in flight may be sent again without harm. A READ
    /// may not: the answer may be long, and Linux rxe forgets how a READ began once the end of it
    /// was asked for again.
    fn can_probe(&self) -> bool {
        let harmless = |psn| {
            let work = self.queue.get(self.index_of(psn));
            work.is_some_and(|work| !matches!(work.operation, SendOperation::Read { .. }))
        };
        self.in_flight() > 0 && harmless(self.unacknowledged) && harmless(self.next - 1)
    }

    /// Whether a READ response may stand at this place in its message. Each request asks for the
    /// rest of a chunk. Repeats of the middle of one come as First, Middle or Last, as the responder
    /// likes.
    fn fits_chunk(&self, position: Position, index: u64, packets: u64) -> bool {
        let starts = index.is_multiple_of(self.read_chunk);
        let ends = (index + 1).is_multiple_of(self.read_chunk) || index + 1 == packets;
        (position.starts() || !starts) && position.ends() == ends
    }

    /// Sends again from `psn` on.
    fn go_back(&mut self, psn: u64, budget: &mut ReceiveBudget) {
        self.next = psn;
        self.probe = None;
        self.cursor = self.index_of(psn);
        budget.give_back(self.fetches.forget_from(psn));
    }

    fn progress(&mut self, now: Instant, packets: u64, budget: &mut ReceiveBudget) {
        self.last_progress = now;
        self.rnr_retries_used = 0;
        // Whatever the peer was not ready for, it has taken since.
        self.rnr_until = None;
        self.round_trip.acknowledged(now, self.unacknowledged);
        self.window.acknowledged(packets as u32, self.round_trip.delay());
        if self.sent == self.unacknowledged {
            self.window.rested();
        }
        self.next = self.next.max(self.unacknowledged);
        self.probe = None;
        budget.give_back(self.fetches.forget_before(self.unacknowledged));
        self.arm(now);
    }

    /// A NAK that comes so late can be about what was sent again. One that was on its way before
    /// is not counted twice.
    fn forget_recovery(&mut self, now: Instant) {
        let answers = |(_, sent_at): (u64, Instant)| {
            self.round_trip.is_possible(now.saturating_duration_since(sent_at))
        };
        if self.recovered.is_some_and(answers) {
            self.recovered = None;
        }
    }

    /// The peer is still sending what was in flight before it got to know of a loss: the answer to
    /// what was sent again comes after that.
    fn heard(&mut self, now: Instant) {
        if let (Some(_), Some(timeout)) = (self.deadline, self.timeout) {
            let next = now + self.round_trip.timeout(timeout);
            self.deadline = Some(next.min(self.last_progress + self.patience(timeout)));
        }
    }

    /// The silence after which the peer is taken for dead. It is measured, not timeouts counted:
    /// probes may come sooner than the timeout (they cost a packet), but the peer gets all of the
    /// time that it was promised.
    fn patience(&self, timeout: Duration) -> Duration {
        timeout * (u32::from(self.retry_count) + 1)
    }

    /// Starts the clock for the oldest packet in flight, or stops it.
    fn arm(&mut self, now: Instant) {
        let waiting = self.sent > self.unacknowledged;
        self.deadline = match self.timeout {
            Some(timeout) if waiting => Some(now + self.round_trip.timeout(timeout)),
            _ => None,
        };
    }
}

impl QueuePair {
    /// Takes an answer to one of our requests.
    pub(crate) fn handle_response<M: Memory>(
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
            Some(Syndrome::Ack { .. }) => self.acknowledged(now, shared, psn + 1),
            Some(Syndrome::Nak(NakCode::PsnSequenceError)) => {
                shared.counters.naks_received += 1;
                self.acknowledged(now, shared, psn);
                self.requester.forget_recovery(now);
                self.lost(now, shared, psn);
            }
            Some(Syndrome::ReceiverNotReady { timer }) => {
                shared.counters.rnr_naks_received += 1;
                self.acknowledged(now, shared, psn);
                self.receiver_not_ready(now, shared, psn, timer);
            }
            Some(Syndrome::Nak(code)) => {
                shared.counters.naks_received += 1;
                self.acknowledged(now, shared, psn);
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

    /// Everything before `end` has been executed; READs and atomic operations also need their data.
    fn acknowledged<M: Memory>(&mut self, now: Instant, shared: &mut Shared<M>, end: u64) {
        let before = self.requester.unacknowledged;
        let mut missing = None;
        while self.requester.unacknowledged < end {
            let Some(work) = self.requester.queue.front() else { break };
            if work.fetches() {
                // Executed, but its data has not come: the response was lost.
                missing = Some(self.requester.unacknowledged);
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
        if let Some(psn) = missing {
            self.lost(now, shared, psn);
        }
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

    /// A request whose local memory is wrong fails once all before it are complete.
    fn fail_broken<M: Memory>(&mut self, shared: &mut Shared<M>) {
        if self.requester.queue.front().is_some_and(|work| work.broken) {
            self.fail_fatally(shared, Some(CompletionStatus::LocalProtection));
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
        self.acknowledged(now, shared, first);
        if self.requester.unacknowledged != psn {
            let missing = self.requester.unacknowledged;
            self.lost(now, shared, missing);
            self.requester.heard(now);
            return;
        }
        // So all before it is complete.
        let Some(work) = self.requester.queue.front() else { return };
        let mtu = self.path.mtu.bytes() as u64;
        let index = psn - first;
        let offset = index * mtu;
        let positive =
            packet.extended.aeth.is_none_or(|aeth| matches!(aeth.syndrome(), Syndrome::Ack { .. }));
        if data.len() as u64 != (work.length - offset).min(mtu)
            || !self.requester.fits_chunk(packet.opcode.position(), index, work.packets)
            || !positive
        {
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
        shared.counters.payload_bytes_received += data.len() as u64;
        shared.budget.give_back(self.requester.fetches.arrived(psn, data.len() as u64));
        self.requester.unacknowledged = psn + 1;
        if self.requester.unacknowledged == end {
            self.complete_oldest(shared);
        }
        self.requester.progress(now, 1, &mut shared.budget);
    }

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
            requester.round_trip.sent(now, requester.next);
        }
        if requester.deadline.is_none() {
            requester.arm(now);
        }
        true
    }
}
