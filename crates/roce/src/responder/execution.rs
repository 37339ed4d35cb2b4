//! Executes the request packet that is next in order, or says why not.

use millstream_wire::{AtomicEth, NakCode, Operation, Packet, Position, Psn, Reth};

use super::{Incoming, scatter};
use crate::Access;
use crate::completion::{Completion, CompletionOperation, CompletionStatus};
use crate::endpoint::Shared;
use crate::memory::{AccessDenied, AccessKind, AtomicOperation, Destination, Memory, RemoteAccess};
use crate::queue_pair::QueuePair;
use crate::receives::Receive;
use crate::replies::AtomicReply;
use crate::work::ATOMIC_LENGTH;

/// Why a request is not executed.
pub(super) enum Refusal {
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

impl QueuePair {
    /// Executes the packet in order; returns how many sequence numbers it takes.
    pub(super) fn execute<M: Memory>(
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
    pub(super) fn atomic_operation(
        &self,
        packet: &Packet<'_>,
    ) -> Option<(RemoteAccess, AtomicOperation)> {
        let AtomicEth { virtual_address, remote_key, swap_or_add, compare } =
            packet.extended.atomic?;
        let operation = match packet.opcode.operation() {
            Operation::CompareSwap => AtomicOperation::CompareSwap { compare, swap: swap_or_add },
            _ => AtomicOperation::FetchAdd { add: swap_or_add },
        };
        let reth = Reth { virtual_address, remote_key, dma_length: ATOMIC_LENGTH };
        Some((self.remote_access(AccessKind::Atomic, &reth), operation))
    }

    pub(super) fn remote_access(&self, kind: AccessKind, reth: &Reth) -> RemoteAccess {
        RemoteAccess {
            qpn: self.qpn,
            domain: self.domain,
            kind,
            key: reth.remote_key,
            address: reth.virtual_address,
            length: reth.dma_length,
        }
    }

    pub(super) fn complete_receive<M: Memory>(
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
}
