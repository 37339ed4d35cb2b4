//! The packets of answers: acknowledgements, results of atomic operations, and what READs ask for.

use core::iter;

use millstream_wire::{Aeth, AtomicAckEth, ExtendedHeaders, NakCode, Opcode, Psn, Syndrome};

use crate::Transmit;
use crate::endpoint::Shared;
use crate::memory::{Memory, RemoteAccess};
use crate::queue_pair::{QueuePair, header};
use crate::replies::{AtomicReply, ReadReply, Reply};
use crate::work::Piece;

impl QueuePair {
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
