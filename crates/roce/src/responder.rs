//! The responder half of a queue pair: executes requests in order, once each, and answers them
//! (IBTA 9.7.3 to 9.7.5).

use core::iter;

use millstream_wire::{
    Aeth, AtomicAckEth, AtomicEth, ExtendedHeaders, NakCode, Opcode, Operation, Packet, Position,
    Psn, Reth, Syndrome,
};

use crate::completion::{Completion, CompletionOperation, CompletionStatus};
use crate::endpoint::Shared;
use crate::events::AsyncEvent;
use crate::memory::{AccessDenied, AccessKind, AtomicOperation, Destination, Memory, RemoteAccess};
use crate::queue_pair::{QueuePair, header};
use crate::receives::{Receive, Receives};
use crate::replies::{AtomicReply, ReadReply, Replies, Reply};
use crate::work::{ATOMIC_LENGTH, Piece, parts};
use crate::{Access, Instant, ProtectionDomainId, Transmit};

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

/// Why a request is not executed.
enum Refusal {
    /// No receive request is posted: try later.
    NotReady,
    /// What it has brought, or packets before it, could not be flushed.
    Unflushed,
    /// Fatal for the queue pair; the remote hears why.
    Nak(NakCode),
    /// As above, and the receive request at the head ends with this status.
    Receive(CompletionStatus, NakCode),
}

impl From<AccessDenied> for Refusal {
    fn from(denied: AccessDenied) -> Self {
        Self::Nak(match denied {
            AccessDenied::Protection => NakCode::RemoteAccessError,
            AccessDenied::InvalidRequest => NakCode::InvalidRequest,
        })
    }
}

const INVALID: Refusal = Refusal::Nak(NakCode::InvalidRequest);

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

    /// When an acknowledgement that waits has waited long enough.
    pub(crate) const fn deadline(&self) -> Option<Instant> {
        self.waits_until
    }

    /// Nothing is acknowledged any more, but by what was said already.
    pub(crate) fn stop(&mut self) {
        self.waits_until = None;
    }

    /// Asks for the next packet in order again.
    fn ask_again(&mut self, syndrome: Syndrome) {
        self.replies.ask_again(self.expected, self.message_number(), syndrome);
    }
}

impl QueuePair {
    /// Executes a request packet, or says why not. Returns whether there may be something to send.
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
        // Whatever else it is, its answer says that all before it was executed.
        if !more && !self.flush_requests(shared) {
            return;
        }
        if psn < expected {
            shared.counters.duplicates += 1;
            self.handle_duplicate(shared, packet, psn);
            return;
        }
        if psn > expected {
            shared.counters.out_of_sequence += 1;
            // Numbers that start again say that the requester has gone back, and that what it sent
            // again is lost too: to it, this is another gap.
            let gone_back = psn <= self.responder.behind_gap;
            if !self.responder.gap_reported || gone_back && !self.responder.not_ready {
                self.responder.gap_reported = true;
                self.responder.not_ready = false;
                self.responder.ask_again(Syndrome::Nak(NakCode::PsnSequenceError));
            }
            self.responder.behind_gap = psn;
            return;
        }
        self.responder.gap_reported = false;
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
        if self.responder.deadline().is_some() && self.flush_requests(shared) {
            self.responder.acknowledge();
        }
    }

    /// Acknowledges what has waited long enough, as above.
    pub(crate) fn acknowledge_if_due<M: Memory>(&mut self, now: Instant, shared: &mut Shared<M>) {
        if self.responder.deadline().is_some_and(|until| until <= now) {
            self.acknowledge_waiting(shared);
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

    /// Executes the packet in order; returns how many sequence numbers it takes.
    fn execute<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        packet: &Packet<'_>,
    ) -> Result<u64, Refusal> {
        let operation = packet.opcode.operation();
        let position = packet.opcode.position();
        let in_progress = match self.responder.incoming {
            None => None,
            Some(Incoming::Send { .. }) => Some(Operation::Send),
            Some(Incoming::Write { .. }) => Some(Operation::Write),
        };
        let in_sequence =
            if position.starts() { in_progress.is_none() } else { in_progress == Some(operation) };
        let mtu = self.path.mtu.bytes();
        let length_fits = match position {
            Position::First | Position::Middle => packet.payload.len() == mtu,
            Position::Last => (1..=mtu).contains(&packet.payload.len()),
            Position::Only => packet.payload.len() <= mtu,
        };
        if !in_sequence || !length_fits {
            return Err(INVALID);
        }
        match operation {
            Operation::Send => self.execute_send(shared, packet),
            Operation::Write => self.execute_write(shared, packet),
            Operation::ReadRequest => self.execute_read(shared, packet),
            Operation::CompareSwap | Operation::FetchAdd => self.execute_atomic(shared, packet),
            // Anything else that is not offered.
            _ => Err(INVALID),
        }
    }

    fn execute_send<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        packet: &Packet<'_>,
    ) -> Result<u64, Refusal> {
        let receive = self.responder.receives.claim(shared).ok_or(Refusal::NotReady)?;
        let offset = match self.responder.incoming {
            Some(Incoming::Send { offset }) => offset,
            _ => 0,
        };
        let end = offset + packet.payload.len() as u64;
        let limit = receive.length.min(shared.config.max_message_length.into());
        if end > limit {
            let status = CompletionStatus::LocalLength;
            return Err(Refusal::Receive(status, NakCode::InvalidRequest));
        }
        // Our own mistake, so the remote hears of a failure, not of an invalid request.
        let failed = |_| {
            let status = CompletionStatus::LocalProtection;
            Refusal::Receive(status, NakCode::RemoteOperationalError)
        };
        let pieces = self.responder.receives.pieces();
        scatter(shared, receive.domain, pieces, offset, packet.payload).map_err(failed)?;
        if packet.opcode.position().ends() {
            shared.memory.flush().map_err(|_| Refusal::Unflushed)?;
            // A key that may not be invalidated ends the message here, and at the peer (IBTA
            // 9.9.6.3.1 wants no answer; the peer would learn of it by a timeout).
            let denied = |_| {
                let status = CompletionStatus::LocalProtection;
                Refusal::Receive(status, NakCode::RemoteAccessError)
            };
            if let Some(key) = packet.extended.invalidate {
                shared.memory.invalidate(self.domain, key.0).map_err(denied)?;
            }
            self.responder.incoming = None;
            self.responder.receives.take(shared);
            self.complete_receive(shared, receive, CompletionStatus::Success, packet, end);
        } else {
            self.responder.incoming = Some(Incoming::Send { offset: end });
        }
        Ok(1)
    }

    fn execute_write<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        packet: &Packet<'_>,
    ) -> Result<u64, Refusal> {
        let ends = packet.opcode.position().ends();
        // An immediate takes a receive request: without one the packet must leave no trace.
        if packet.extended.immediate.is_some()
            && self.responder.receives.next_length(shared).is_none()
        {
            return Err(Refusal::NotReady);
        }
        let (access, offset) = match (self.responder.incoming, packet.extended.reth) {
            (Some(Incoming::Write { access, offset }), None) => (access, offset),
            (None, Some(reth)) => {
                if !self.access.contains(Access::REMOTE_WRITE) {
                    return Err(Refusal::Nak(NakCode::RemoteAccessError));
                }
                let access = self.remote_access(AccessKind::Write, &reth);
                if access.length > shared.config.max_message_length {
                    return Err(INVALID);
                }
                let fits = if ends {
                    reth.dma_length as usize == packet.payload.len()
                } else {
                    reth.dma_length as usize > packet.payload.len()
                };
                if !fits {
                    return Err(INVALID);
                }
                if access.length > 0 {
                    shared.memory.authorize(&access)?;
                }
                (access, 0)
            }
            _ => return Err(INVALID),
        };
        // Both terms are bounded: the offset by the length, the payload by the path MTU.
        let end = u64::from(offset) + packet.payload.len() as u64;
        let complete = end == u64::from(access.length);
        if end > access.length.into() || complete != ends {
            return Err(INVALID);
        }
        if !packet.payload.is_empty() {
            shared.memory.write(&Destination::Remote { access, offset }, packet.payload)?;
        }
        if !ends {
            self.responder.incoming = Some(Incoming::Write { access, offset: end as u32 });
            return Ok(1);
        }
        if packet.extended.immediate.is_some() {
            shared.memory.flush().map_err(|_| Refusal::Unflushed)?;
        }
        self.responder.incoming = None;
        if packet.extended.immediate.is_some()
            && let Some(receive) = self.responder.receives.take(shared)
        {
            self.complete_receive(shared, receive, CompletionStatus::Success, packet, end);
        }
        Ok(1)
    }

    fn execute_read<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        packet: &Packet<'_>,
    ) -> Result<u64, Refusal> {
        let reth = packet.extended.reth.ok_or(INVALID)?;
        if !packet.payload.is_empty() || reth.dma_length > shared.config.max_message_length {
            return Err(INVALID);
        }
        if !self.access.contains(Access::REMOTE_READ) {
            return Err(Refusal::Nak(NakCode::RemoteAccessError));
        }
        if !self.responder.replies.has_resources() {
            return Err(INVALID);
        }
        let access = self.remote_access(AccessKind::Read, &reth);
        if access.length > 0 {
            shared.memory.authorize(&access)?;
        }
        // The message counts when it is accepted, before its answer is out (IBTA C9-148).
        let msn = Psn::from_extended(self.responder.messages + 1);
        self.responder.replies.read(self.responder.expected, msn, access);
        Ok(self.path.mtu.packets(access.length.into()))
    }

    fn execute_atomic<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        packet: &Packet<'_>,
    ) -> Result<u64, Refusal> {
        let (access, operation) = self.atomic_operation(packet).ok_or(INVALID)?;
        // The address must be naturally aligned (IBTA 9.4.5).
        let aligned = access.address.is_multiple_of(ATOMIC_LENGTH.into());
        if !packet.payload.is_empty() || !aligned {
            return Err(INVALID);
        }
        if !self.access.contains(access.right()) {
            return Err(Refusal::Nak(NakCode::RemoteAccessError));
        }
        if !self.responder.replies.has_resources() {
            return Err(INVALID);
        }
        let original = shared.memory.atomic(&access, operation)?;
        let psn = self.responder.expected;
        let msn = Psn::from_extended(self.responder.messages + 1);
        let reply = AtomicReply { psn, msn, access, operation, original, repeated: false };
        self.responder.replies.atomic(reply);
        Ok(1)
    }

    /// The atomic operation that a packet asks for.
    fn atomic_operation(&self, packet: &Packet<'_>) -> Option<(RemoteAccess, AtomicOperation)> {
        let AtomicEth { virtual_address, remote_key, swap_or_add, compare } =
            packet.extended.atomic?;
        let operation = match packet.opcode.operation() {
            Operation::CompareSwap => AtomicOperation::CompareSwap { compare, swap: swap_or_add },
            _ => AtomicOperation::FetchAdd { add: swap_or_add },
        };
        let reth = Reth { virtual_address, remote_key, dma_length: ATOMIC_LENGTH };
        Some((self.remote_access(AccessKind::Atomic, &reth), operation))
    }

    fn remote_access(&self, kind: AccessKind, reth: &Reth) -> RemoteAccess {
        RemoteAccess {
            qpn: self.qpn,
            domain: self.domain,
            kind,
            key: reth.remote_key,
            address: reth.virtual_address,
            length: reth.dma_length,
        }
    }

    fn complete_receive<M: Memory>(
        &self,
        shared: &mut Shared<M>,
        receive: Receive,
        status: CompletionStatus,
        packet: &Packet<'_>,
        length: u64,
    ) {
        let operation = match packet.opcode.operation() {
            Operation::Write => CompletionOperation::ReceiveWrite,
            _ => CompletionOperation::Receive,
        };
        let success = status == CompletionStatus::Success;
        let completion = Completion {
            length: length as u32,
            immediate: packet.extended.immediate.map(|immediate| immediate.0),
            invalidated: packet.extended.invalidate.filter(|_| success).map(|key| key.0),
            ..Completion::new(receive.id, self.qpn, status, operation)
        };
        let solicited = packet.bth.solicited_event;
        shared.complete_receive(self.receive_completions, completion, solicited);
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

    /// Writes the next answer, if any.
    pub(crate) fn respond<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        transmit: &mut Transmit,
    ) -> bool {
        loop {
            match self.responder.replies.next() {
                None => return false,
                Some(Reply::Acknowledge { psn, msn }) => {
                    self.responder.replies.pop();
                    shared.counters.acks_sent += 1;
                    self.acknowledgement(psn, Aeth::new(Syndrome::ACK_UNLIMITED, msn), transmit);
                    return true;
                }
                Some(Reply::Negative { psn, msn, syndrome }) => {
                    self.responder.replies.pop();
                    match syndrome {
                        Syndrome::ReceiverNotReady { .. } => shared.counters.rnr_naks_sent += 1,
                        _ => shared.counters.naks_sent += 1,
                    }
                    self.acknowledgement(psn, Aeth::new(syndrome, msn), transmit);
                    return true;
                }
                Some(Reply::Atomic(atomic)) => {
                    self.responder.replies.pop();
                    self.atomic_acknowledgement(&atomic, transmit);
                    return true;
                }
                Some(Reply::Read(read)) => {
                    if self.read_response(shared, &read, transmit) {
                        return true;
                    }
                    // The region went away. Whoever repeats a READ has had its data, or asks once
                    // more; else this is said in the place of the data, and nothing follows.
                    if read.repeated {
                        self.responder.replies.pop();
                    } else {
                        self.responder.replies.clear();
                        let code = NakCode::RemoteAccessError;
                        self.refuse(shared, read.psn, code, self.event_of(code));
                    }
                }
            }
        }
    }

    fn acknowledgement(&self, psn: u64, aeth: Aeth, transmit: &mut Transmit) {
        let bth = header(&self.path, Opcode::RcAcknowledge, Psn::from_extended(psn), 0);
        let extended = ExtendedHeaders { aeth: Some(aeth), ..ExtendedHeaders::default() };
        self.path.write(&bth, &extended, iter::empty(), transmit);
    }

    fn atomic_acknowledgement(&self, atomic: &AtomicReply, transmit: &mut Transmit) {
        let opcode = Opcode::RcAtomicAcknowledge;
        let bth = header(&self.path, opcode, Psn::from_extended(atomic.psn), 0);
        let extended = ExtendedHeaders {
            aeth: Some(Aeth::new(Syndrome::ACK_UNLIMITED, atomic.msn)),
            atomic_ack: Some(AtomicAckEth { original: atomic.original }),
            ..ExtendedHeaders::default()
        };
        self.path.write(&bth, &extended, iter::empty(), transmit);
    }

    /// Writes the next packet of the READ response at the head of the replies.
    fn read_response<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        read: &ReadReply,
        transmit: &mut Transmit,
    ) -> bool {
        let ReadReply { psn, msn, access, offset, .. } = *read;
        let length = (access.length - offset).min(self.path.mtu.bytes() as u32);
        let address = access.address.wrapping_add(offset.into());
        let piece = Piece { key: access.key, address, length };
        // Asked again for each packet: the region may be gone by now, or its rights, or another may
        // have its key.
        let part = RemoteAccess { address, length, ..access };
        let following = u64::from(access.length - offset - length);
        if length > 0
            && (shared.memory.authorize(&part).is_err()
                || shared.memory.stage(&piece, following).is_err())
        {
            return false;
        }
        let opcode = match (offset == 0, offset + length == access.length) {
            (true, true) => Opcode::RcReadResponseOnly,
            (true, false) => Opcode::RcReadResponseFirst,
            (false, false) => Opcode::RcReadResponseMiddle,
            (false, true) => Opcode::RcReadResponseLast,
        };
        self.responder.replies.advance(length);
        let bth = header(&self.path, opcode, Psn::from_extended(psn), length.into());
        let extended = ExtendedHeaders {
            aeth: opcode.has_aeth().then(|| Aeth::new(Syndrome::ACK_UNLIMITED, msn)),
            ..ExtendedHeaders::default()
        };
        shared.counters.payload_bytes_sent += u64::from(length);
        let payload = Some(piece).filter(|piece| piece.length > 0);
        self.path.write(&bth, &extended, payload.into_iter(), transmit);
        true
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
