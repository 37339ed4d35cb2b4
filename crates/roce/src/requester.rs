//! The requester half of a queue pair: sends work requests, resends what was lost, completes what
//! was acknowledged (IBTA 9.7.5.1, 9.7.6).
//!
//! Every posted request owns a range of 64-bit packet sequence numbers, so that any packet can be
//! made again from its number alone: going back is setting `next`. A READ owns one number for each
//! response packet, and is asked for in chunks that start at fixed numbers, so that a repeated
//! request never reaches beyond one that the responder has seen.

mod recovery;
mod reordering;
mod responses;
mod sending;

use std::collections::VecDeque;

use core::time::Duration;

use millstream_wire::{Mtu, Position, Psn, Qpn};

use crate::Instant;
use crate::budget::{ReceiveBudget, Turn, cost};
use crate::completion::{Completion, CompletionStatus};
use crate::fetches::Fetches;
use crate::inline::{InlineData, InlineSlot};
use crate::pieces::{PieceList, PieceRing};
use crate::round_trip::RoundTrip;
use crate::window::Window;
use crate::work::{Piece, SendOperation, SendRequest};

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
    /// The packet that was reported lost last.
    lost: Option<u64>,
    /// One past the highest number that was sent when all was last sent again: what is below may come twice.
    asked_again_to: u64,
    /// When the gap in the answers to READs is a loss, if what is missing has not come.
    gap_until: Option<Instant>,
    /// Until when answers are kept, if nothing comes in order before.
    kept_until: Option<Instant>,
    window: Window,
    /// The most packets with data in flight that the peer has room for.
    send_limit: u64,
    acknowledge_interval: u64,
    round_trip: RoundTrip,
    /// What to send again to learn what became of what is in flight.
    probe: Option<Probe>,
    /// The latest silence amid answers that was taken for a loss.
    suspicion: Option<Suspicion>,
}

/// A silence amid the answers to a READ was taken for a loss. It was none if what was asked for again comes twice
/// (as DSACK tells TCP, RFC 3708): one that came once may be either copy.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Suspicion {
    /// The number of the answer that was missing.
    psn: u64,
    /// How long it lasted, when that has come.
    silence: Option<Duration>,
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
            lost: None,
            asked_again_to: 0,
            gap_until: None,
            kept_until: None,
            window: Window::new(1),
            send_limit: u64::MAX,
            acknowledge_interval: ACKNOWLEDGE_INTERVAL,
            round_trip: RoundTrip::new(answer_delay),
            probe: None,
            suspicion: None,
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
        self.gap_until = None;
        self.kept_until = None;
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
        let Self { rnr_until, deadline, gap_until, kept_until, .. } = *self;
        [rnr_until, deadline, gap_until, kept_until].into_iter().flatten().min()
    }

    fn in_flight(&self) -> u64 {
        self.next - self.unacknowledged
    }

    /// Whether a number before this one belongs to data that has not come.
    fn misses_data_before(&self, psn: u64) -> bool {
        let before = self.queue.iter().take_while(|work| work.first < psn);
        before.into_iter().any(SendWork::fetches) && self.unacknowledged < psn
    }

    /// Whether a number is that of data.
    fn fetches_at(&self, psn: u64) -> bool {
        self.queue.get(self.index_of(psn)).is_some_and(SendWork::fetches)
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
        self.asked_again_to = self.sent;
        self.probe = None;
        self.cursor = self.index_of(psn);
        budget.give_back(self.fetches.forget_from(psn));
    }

    fn progress(&mut self, now: Instant, packets: u64, budget: &mut ReceiveBudget) {
        self.last_progress = now;
        self.gap_until = None;
        self.kept_until = None;
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
            let next = now + self.silence(timeout);
            self.deadline = Some(next.min(self.last_progress + self.patience(timeout)));
        }
    }

    /// The silence after which the peer is taken for dead. It is measured, not timeouts counted:
    /// probes may come sooner than the timeout (they cost a packet), but the peer gets all of the
    /// time that it was promised.
    fn patience(&self, timeout: Duration) -> Duration {
        timeout * (u32::from(self.retry_count) + 1)
    }

    /// The silence after which it is asked again.
    fn silence(&self, timeout: Duration) -> Duration {
        self.round_trip.timeout(timeout, self.is_amid_answers())
    }

    /// Whether some of the answers to the oldest request have come, and others not.
    fn is_amid_answers(&self) -> bool {
        let Some(oldest) = self.queue.front().filter(|oldest| oldest.fetches()) else {
            return false;
        };
        !(self.unacknowledged - oldest.first).is_multiple_of(self.read_chunk)
    }

    /// The silence is taken for a loss.
    fn suspect(&mut self) {
        if self.is_amid_answers() {
            self.suspicion = Some(Suspicion { psn: self.unacknowledged, silence: None });
        }
    }

    /// An answer with data comes in its turn.
    fn end_silence(&mut self, now: Instant, psn: u64) {
        let silence = now.saturating_duration_since(self.last_progress);
        // What was asked for twice may have been lost, and not slow.
        if psn >= self.asked_again_to && self.is_amid_answers() {
            self.round_trip.followed(silence);
        }
        if let Some(suspicion) = &mut self.suspicion
            && suspicion.psn == psn
        {
            suspicion.silence = Some(silence);
        }
    }

    /// An answer comes that was complete before.
    fn came_again(&mut self, psn: u64) {
        if let Some(Suspicion { psn: suspected, silence: Some(silence) }) = self.suspicion
            && suspected == psn
        {
            self.suspicion = None;
            self.round_trip.followed(silence);
        }
    }

    /// Nobody is silent before this.
    fn wait_for_gap(&mut self, until: Instant) {
        let until = *self.gap_until.get_or_insert(until);
        self.deadline = self.deadline.map(|deadline| deadline.max(until));
    }

    /// Starts the clock for the oldest packet in flight, or stops it.
    fn arm(&mut self, now: Instant) {
        let waiting = self.sent > self.unacknowledged;
        self.deadline = match self.timeout {
            Some(timeout) if waiting => Some(now + self.silence(timeout)),
            _ => None,
        };
    }
}
