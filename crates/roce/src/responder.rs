//! The responder half of a queue pair: executes requests in order, once each, and answers them
//! (IBTA 9.7.3 to 9.7.5).

mod answers;
mod execution;

use millstream_wire::{NakCode, Opcode, Operation, Packet, Position, Psn, Syndrome};

use self::execution::Refusal;
use crate::early::{self, Half, Stream};
use crate::endpoint::{Shared, index_of};
use crate::events::AsyncEvent;
use crate::memory::{AccessDenied, AccessKind, Destination, Memory, RemoteAccess};
use crate::queue_pair::QueuePair;
use crate::receives::Receives;
use crate::replies::Replies;
use crate::work::{Piece, parts};
use crate::{Access, Instant, ProtectionDomainId};

#[derive(Debug)]
pub(crate) struct Responder {
    /// The next packet sequence number in order, extended to 64 bits.
    expected: u64,
    /// Messages completed; its low 24 bits are the MSN.
    messages: u64,
    /// The number of the newest packet that an acknowledgement alone answers, and the MSN then.
    acknowledged: (u64, Psn),
    pub(crate) receives: Receives,
    incoming: Option<Incoming>,
    pub(crate) replies: Replies,
    /// A NAK for the current gap is out: the next packets of the gap get none (IBTA 9.7.5.2.8).
    gap_reported: bool,
    /// The latest number that arrived behind the gap.
    behind_gap: u64,
    /// When the gap is to be reported, if what is missing has not come.
    gap_until: Option<Instant>,
    /// The latest number from behind a gap that is kept, of those that came since a gap was reported. What is
    /// missing before it was overtaken or lost; other gaps are of what is on its way again.
    heard_to: u64,
    /// Until when packets are kept, if nothing comes in order before.
    kept_until: Option<Instant>,
    /// The oldest packet whose payload the memory has not flushed, and how many messages were complete
    /// before it.
    unflushed: Option<(u64, u64)>,
    /// Until when an acknowledgement waits for a request to leave with.
    waits_until: Option<Instant>,
    /// What is behind the gap is out of sequence by our own doing: the requester was asked to wait.
    not_ready: bool,
    pub(crate) minimum_rnr_timer: u8,
}

/// A message whose first packet has arrived.
#[derive(Clone, Copy, Debug)]
enum Incoming {
    Send { offset: u64 },
    Write { access: RemoteAccess, offset: u32 },
}

impl Responder {
    pub(crate) fn new(receives: Receives) -> Self {
        Self {
            expected: 0,
            messages: 0,
            acknowledged: (0, Psn::new(0)),
            receives,
            incoming: None,
            replies: Replies::default(),
            gap_reported: false,
            behind_gap: 0,
            gap_until: None,
            heard_to: 0,
            kept_until: None,
            unflushed: None,
            waits_until: None,
            not_ready: false,
            minimum_rnr_timer: 0,
        }
    }

    /// Expects this number first. One lap is added so that numbers before it exist too.
    pub(crate) fn start(&mut self, psn: Psn) {
        self.expected = u64::from(Psn::COUNT) + u64::from(psn.value());
        self.acknowledged = (self.expected - 1, self.message_number());
    }

    /// The number that it expects next.
    pub(crate) fn receive_psn(&self) -> Psn {
        Psn::from_extended(self.expected)
    }

    fn message_number(&self) -> Psn {
        Psn::from_extended(self.messages)
    }

    /// Acknowledges all packets of SENDs and WRITEs that were executed.
    ///
    /// READs and atomic operations after the newest of them are left out, though they were executed
    /// too: only their answers acknowledge those, and a requester that lost one may take an
    /// acknowledgement with its number for it. Linux's soft-RoCE does, and completes a READ whose
    /// data never came.
    fn acknowledge(&mut self) {
        self.waits_until = None;
        let (psn, msn) = self.acknowledged;
        self.replies.acknowledge(psn, msn);
    }

    /// When an acknowledgement that waits, or a gap, has waited long enough.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        [self.waits_until, self.gap_until, self.kept_until].into_iter().flatten().min()
    }

    /// Nothing is acknowledged or asked for any more, but by what was said already.
    pub(crate) fn stop(&mut self) {
        self.waits_until = None;
        self.gap_until = None;
        self.kept_until = None;
    }

    /// Asks for the next packet in order again.
    fn ask_again(&mut self, syndrome: Syndrome) {
        self.replies.ask_again(self.expected, self.message_number(), syndrome);
    }
}

impl QueuePair {
    /// Executes a request packet, or says why not.
    pub(crate) fn handle_request<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
        packet: &Packet<'_>,
    ) {
        let psn = packet.bth.psn.extend(self.responder.expected);
        let expected = self.responder.expected;
        let operation = packet.opcode.operation();
        let more = psn == expected && matches!(operation, Operation::Send | Operation::Write);
        if psn > expected {
            self.handle_gap(now, shared, packet, psn);
            return;
        }
        // Whatever else it is, its answer says that all before it was executed.
        if !more && !self.flush_requests(shared) {
            return;
        }
        if psn < expected {
            shared.counters.duplicates += 1;
            self.handle_duplicate(shared, packet, psn);
            return;
        }
        self.responder.gap_reported = false;
        self.responder.gap_until = None;
        self.responder.kept_until = None;
        self.responder.not_ready = false;
        let executed = self.execute(shared, packet);
        match &executed {
            Ok(_) if shared.memory.is_flushed() => self.responder.unflushed = None,
            Ok(_) => {
                self.responder.unflushed.get_or_insert((psn, self.responder.messages));
            }
            Err(Refusal::Unflushed) => {
                self.refuse_unflushed(shared);
                return;
            }
            Err(_) if !self.flush_requests(shared) => return,
            Err(_) => {}
        }
        match executed {
            Ok(packets) => {
                shared.counters.payload_bytes_received += packet.payload.len() as u64;
                self.responder.expected += packets;
                if packet.opcode.position().ends() {
                    self.responder.messages += 1;
                }
                let answered = matches!(
                    packet.opcode.operation(),
                    Operation::ReadRequest | Operation::CompareSwap | Operation::FetchAdd
                );
                if !answered {
                    let newest = (self.responder.expected - 1, self.responder.message_number());
                    self.responder.acknowledged = newest;
                    if packet.bth.acknowledge_request && self.flush_requests(shared) {
                        self.acknowledge_request(now, packet.opcode);
                    }
                }
            }
            Err(Refusal::Unflushed) => {}
            Err(Refusal::NotReady) => {
                self.responder.gap_reported = true;
                self.responder.not_ready = true;
                shared.early.forget(self.requests());
                let timer = self.responder.minimum_rnr_timer;
                self.responder.ask_again(Syndrome::ReceiverNotReady { timer });
            }
            Err(Refusal::Nak(code)) => {
                let event = self.event_of(code);
                self.refuse(shared, psn, code, event);
            }
            Err(Refusal::Receive(status, code)) => {
                if let Some(receive) = self.responder.receives.take(shared) {
                    self.complete_receive(shared, receive, status, packet, 0);
                }
                self.refuse(shared, psn, code, AsyncEvent::QueuePairFatal(self.qpn));
            }
        }
    }

    /// Acknowledges what was executed: at once, or with a request that may be about to leave.
    fn acknowledge_request(&mut self, now: Instant, opcode: Opcode) {
        let alone = (opcode.operation(), opcode.position()) == (Operation::Send, Position::Only);
        let delay = self.acknowledgement_delay;
        if alone && !delay.is_zero() {
            self.responder.waits_until.get_or_insert(now + delay);
        } else {
            self.responder.acknowledge();
        }
    }

    /// Acknowledges what has waited for a request, if all before it is where it belongs.
    pub(crate) fn acknowledge_waiting<M: Memory>(&mut self, shared: &mut Shared<M>) {
        if self.responder.waits_until.is_some() && self.flush_requests(shared) {
            self.responder.acknowledge();
        }
    }

    /// Acknowledges what has waited long enough, as above.
    pub(crate) fn acknowledge_if_due<M: Memory>(&mut self, now: Instant, shared: &mut Shared<M>) {
        if self.responder.waits_until.is_some_and(|until| until <= now) {
            self.acknowledge_waiting(shared);
        }
    }

    /// The requests that came before their turn are its.
    fn requests(&self) -> Stream {
        Stream { pair: index_of(self.qpn), half: Half::Responder }
    }

    /// A packet from behind a gap: what is missing was overtaken, or lost.
    fn handle_gap<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
        packet: &Packet<'_>,
        psn: u64,
    ) {
        shared.counters.out_of_sequence += 1;
        let requests = self.requests();
        let responder = &mut self.responder;
        // Numbers that start again say that the requester has gone back, and that what it sent
        // again is lost too: to it, this is another gap.
        let gone_back = psn <= responder.behind_gap && !responder.not_ready;
        responder.behind_gap = psn;
        if responder.gap_reported && !gone_back {
            return;
        }
        responder.gap_reported = false;
        let reordering = shared.config.reordering;
        let is_near = psn - responder.expected <= early::ROOM as u64;
        if !reordering.is_zero() && is_near && shared.early.keep(requests, psn, packet) {
            responder.heard_to = responder.heard_to.max(psn);
            responder.gap_until.get_or_insert(now + reordering);
            responder.kept_until.get_or_insert(now + early::EXPIRY);
        } else {
            self.report_gap(shared);
        }
    }

    /// Asks for what is missing. The requester sends all from there on again.
    fn report_gap<M: Memory>(&mut self, shared: &mut Shared<M>) {
        self.responder.gap_until = None;
        if self.flush_requests(shared) {
            let responder = &mut self.responder;
            responder.gap_reported = true;
            responder.not_ready = false;
            if responder.behind_gap < responder.expected {
                // It came before others, and it was its turn meanwhile.
                responder.behind_gap = responder.heard_to;
            }
            responder.heard_to = 0;
            responder.ask_again(Syndrome::Nak(NakCode::PsnSequenceError));
        }
    }

    /// Executes the packet that is next, if it was kept until those before it had come. Returns whether it
    /// was.
    pub(crate) fn handle_early<M: Memory>(&mut self, now: Instant, shared: &mut Shared<M>) -> bool {
        let requests = self.requests();
        if let Some(early) = shared.early.take(requests, self.responder.expected) {
            shared.counters.reordered += 1;
            self.handle_request(now, shared, &early.packet());
            shared.early.give_back(early);
            return true;
        }
        // Behind the next gap.
        if shared.early.first(requests).is_some() {
            let responder = &mut self.responder;
            responder.kept_until.get_or_insert(now + early::EXPIRY);
            if responder.expected < responder.heard_to {
                responder.gap_until.get_or_insert(now + shared.config.reordering);
            }
        }
        false
    }

    /// Reports a gap that is open for so long that what is missing was lost, and drops what was kept behind one
    /// for too long.
    pub(crate) fn handle_gap_deadlines<M: Memory>(&mut self, now: Instant, shared: &mut Shared<M>) {
        if self.responder.gap_until.is_some_and(|until| until <= now) {
            self.report_gap(shared);
        }
        if self.responder.kept_until.is_some_and(|until| until <= now) {
            self.responder.kept_until = None;
            shared.early.forget(self.requests());
        }
    }

    /// Whether all requests that were executed are where they belong; if not, they are refused.
    pub(crate) fn flush_requests<M: Memory>(&mut self, shared: &mut Shared<M>) -> bool {
        let flushed = shared.memory.is_flushed() || shared.memory.flush().is_ok();
        match flushed {
            true => self.responder.unflushed = None,
            false => self.refuse_unflushed(shared),
        }
        flushed
    }

    /// What was executed since the last flush does not count, and the remote hears so.
    pub(crate) fn refuse_unflushed<M: Memory>(&mut self, shared: &mut Shared<M>) {
        let none = (self.responder.expected, self.responder.messages);
        let (psn, messages) = self.responder.unflushed.take().unwrap_or(none);
        self.responder.messages = messages;
        let event = AsyncEvent::QueuePairFatal(self.qpn);
        self.refuse(shared, psn, NakCode::RemoteOperationalError, event);
    }

    /// A request that was executed before: its answer was lost, or the network doubled it.
    fn handle_duplicate<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        packet: &Packet<'_>,
        psn: u64,
    ) {
        if let Some((access, operation)) = self.atomic_operation(packet) {
            let msn = self.responder.message_number();
            self.responder.replies.repeat_atomic(psn, msn, &access, operation);
            return;
        }
        let Some(reth) = packet.extended.reth.filter(|_| packet.opcode == Opcode::RcReadRequest)
        else {
            self.responder.acknowledge();
            return;
        };
        // A READ is executed again (IBTA 9.7.5.1.2), perhaps only the end of it. What is no part
        // of a READ that was executed, or may not be read any more, is dropped in silence.
        let access = self.remote_access(AccessKind::Read, &reth);
        if self.responder.replies.wants_repeat(psn, &access, self.path.mtu)
            && self.access.contains(Access::REMOTE_READ)
            && (access.length == 0 || shared.memory.authorize(&access).is_ok())
        {
            let msn = self.responder.message_number();
            self.responder.replies.repeat(psn, msn, access, self.path.mtu);
        }
    }

    /// Answers with a fatal NAK, after all that was to be said before, and goes to the error state.
    fn refuse<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        psn: u64,
        code: NakCode,
        event: AsyncEvent,
    ) {
        let msn = self.responder.message_number();
        self.responder.replies.refuse(psn, msn, Syndrome::Nak(code));
        self.fail_but_answer(shared, event);
    }

    /// What the application hears of a request that was refused so, when no completion says it.
    const fn event_of(&self, code: NakCode) -> AsyncEvent {
        match code {
            NakCode::RemoteAccessError => AsyncEvent::QueuePairAccessError(self.qpn),
            NakCode::InvalidRequest => AsyncEvent::QueuePairRequestError(self.qpn),
            _ => AsyncEvent::QueuePairFatal(self.qpn),
        }
    }
}

/// Writes `payload` into local pieces of a domain, `offset` bytes from their start.
pub(crate) fn scatter<M: Memory>(
    shared: &mut Shared<M>,
    domain: ProtectionDomainId,
    pieces: impl Iterator<Item = Piece>,
    offset: u64,
    mut payload: &[u8],
) -> Result<(), AccessDenied> {
    for Piece { key, address, length } in parts(pieces, offset, payload.len() as u64) {
        let (now, rest) = payload.split_at(length as usize);
        shared.memory.write(&Destination::Local { domain, key, address }, now)?;
        payload = rest;
    }
    Ok(())
}
