//! Unreliable datagrams (UD, IBTA 9.8.3): messages of one packet, to and from any queue pair.
//! Nothing is acknowledged, so nothing that arrives is ever answered. Multicast is not offered.

use core::net::IpAddr;
use std::collections::VecDeque;

use millstream_wire::ipv4::Ipv4Header;
use millstream_wire::ipv6::Ipv6Header;
use millstream_wire::udp::{self, UdpHeader};
use millstream_wire::{
    Bth, Deth, ExtendedHeaders, ImmDt, MAX_HEADER_LENGTH, Opcode, Packet, Psn, Qpn,
};

use crate::Instant;
use crate::attributes::QueuePairState;
use crate::completion::{Completion, CompletionOperation, CompletionStatus};
use crate::endpoint::Shared;
use crate::error::PostError;
use crate::inline::{InlineData, InlineSlot};
use crate::memory::Memory;
use crate::node::{DatagramMeta, Identification, Transmit};
use crate::pieces::{PieceList, PieceRing};
use crate::queue_pair::QueuePair;
use crate::responder::scatter;
use crate::work::{Piece, SendOperation, SendRequest};

/// Bytes at the start of a datagram's receive buffer that tell where it came from.
pub const GLOBAL_ROUTE_HEADER_LENGTH: usize = 40;

/// A queue key with this bit is for privileged senders: a request that gives one sends that of its
/// own queue pair instead (IBTA 10.2.5).
const CONTROLLED_QUEUE_KEY: u32 = 1 << 31;

/// Who a datagram is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DatagramDestination {
    /// The device.
    pub address: IpAddr,
    /// The queue pair.
    pub qpn: Qpn,
    /// Its queue key. One with the top bit set stands for that of the sending queue pair.
    pub queue_key: u32,
}

/// What a queue pair for datagrams has in place of a requester.
#[derive(Debug)]
pub(crate) struct Datagrams {
    queue: VecDeque<Work>,
    max_queue: usize,
    pieces: PieceRing,
    inline: InlineData,
    /// So many at the head of the queue were handed to the driver. Their bytes are the
    /// application's again when the driver comes back, see [`crate::Node::handle_timeout`].
    sent: usize,
    /// When the first of them was.
    sent_at: Option<Instant>,
    pub(crate) next_psn: Psn,
    pub(crate) queue_key: u32,
}

#[derive(Clone, Copy, Debug)]
struct Work {
    id: u64,
    immediate: Option<u32>,
    pieces: PieceList,
    destination: DatagramDestination,
    length: u64,
    /// Its bytes, when it brought them along.
    inline: Option<InlineSlot>,
    signaled: bool,
    solicited: bool,
    /// Its local memory is not what it should be: it fails when its turn comes.
    broken: bool,
}

impl Work {
    fn completion(&self, qpn: Qpn, status: CompletionStatus) -> Completion {
        let length = self.length as u32;
        let operation = CompletionOperation::Send;
        Completion { length, ..Completion::new(self.id, qpn, status, operation) }
    }
}

impl Datagrams {
    pub(crate) fn new(max_queue: usize, max_inline: usize) -> Self {
        Self {
            queue: VecDeque::with_capacity(max_queue),
            max_queue,
            pieces: PieceRing::default(),
            inline: InlineData::new(max_queue, max_inline),
            sent: 0,
            sent_at: None,
            next_psn: Psn::new(0),
            queue_key: 0,
        }
    }

    fn take_oldest(&mut self) -> Option<Work> {
        let work = self.queue.pop_front()?;
        self.pieces.release(&work.pieces);
        Some(work)
    }

    /// Datagrams that are not complete.
    pub(crate) fn usage(&self) -> usize {
        self.queue.len()
    }

    /// Whether the driver has datagrams that are not complete.
    pub(crate) fn is_sending(&self) -> bool {
        self.sent > 0
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.sent_at
    }
}

impl QueuePair {
    /// Appends a datagram to the send queue.
    pub(crate) fn post_datagram<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        request: &SendRequest<&[Piece]>,
        inline: Option<&[u8]>,
    ) -> Result<(), PostError> {
        let (qpn, domain) = (self.qpn, self.domain);
        let Some(datagrams) = &mut self.datagrams else { return Err(PostError::Unknown(qpn)) };
        let SendOperation::Send { immediate } = request.operation else {
            return Err(PostError::NotADatagram(qpn));
        };
        let destination = request.datagram.ok_or(PostError::DestinationMissing(qpn))?;
        let local = shared.config.address;
        if destination.address.is_ipv4() != local.is_ipv4() {
            return Err(PostError::AddressFamily { local, remote: destination.address });
        }
        request.check_pieces()?;
        let (length, limit) = (request.length(), shared.config.max_datagram_length);
        if length > u64::from(limit) {
            return Err(PostError::TooLong { length, limit });
        }
        if datagrams.queue.len() >= datagrams.max_queue {
            return Err(PostError::QueueFull { limit: datagrams.max_queue });
        }
        let allowed = |piece: &Piece| {
            piece.length == 0 || shared.memory.check_local(domain, piece, false).is_ok()
        };
        let broken = !request.pieces.iter().all(allowed);
        let inline = inline.map(|bytes| datagrams.inline.keep(bytes));
        let length = inline.map_or(length, InlineSlot::length);
        let pieces = datagrams.pieces.keep(request.pieces);
        let &SendRequest { id, signaled, solicited, .. } = request;
        datagrams.queue.push_back(Work {
            id,
            immediate,
            pieces,
            destination,
            length,
            inline,
            signaled,
            solicited,
            broken,
        });
        if !self.state.sends() {
            // SQE and ERR: accepted, and flushed at once.
            self.flush_datagrams(shared, CompletionStatus::Flushed);
        }
        Ok(())
    }

    /// Writes the next datagram to send, if there is one.
    pub(crate) fn transmit_datagram<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
        transmit: &mut Transmit,
    ) -> bool {
        let (qpn, state) = (self.qpn, self.state);
        let Some(datagrams) = &mut self.datagrams else { return false };
        let next = datagrams.queue.get_mut(datagrams.sent);
        let Some(work) = next.filter(|_| state == QueuePairState::ReadyToSend) else {
            return false;
        };
        let pieces = &datagrams.pieces;
        if !pieces.get(&work.pieces).all(|piece| shared.memory.stage(&piece, 0).is_ok()) {
            work.broken = true;
        }
        if work.broken {
            // Those before it complete first.
            if !datagrams.is_sending() {
                self.fail_send_queue(shared);
            }
            return false;
        }
        let DatagramDestination { address, qpn: destination_qpn, queue_key } = work.destination;
        let immediate = work.immediate;
        let opcode = match immediate {
            None => Opcode::UdSendOnly,
            Some(_) => Opcode::UdSendOnlyWithImmediate,
        };
        let controlled = queue_key & CONTROLLED_QUEUE_KEY != 0;
        let queue_key = if controlled { datagrams.queue_key } else { queue_key };
        let extended = ExtendedHeaders {
            deth: Some(Deth { queue_key, reserved: 0, source_qpn: qpn }),
            immediate: immediate.map(ImmDt),
            ..ExtendedHeaders::default()
        };
        let length = work.length;
        let pad_count = (length.wrapping_neg() & 3) as u8;
        let bth = Bth {
            solicited_event: work.solicited,
            pad_count,
            partition_key: self.path.partition_key,
            ..Bth::new(opcode as u8, destination_qpn, datagrams.next_psn)
        };
        let mut headers = [0; MAX_HEADER_LENGTH];
        headers[..Bth::LENGTH].copy_from_slice(&bth.to_bytes());
        let header_length = Bth::LENGTH + extended.emit(&mut headers[Bth::LENGTH..]);
        let payload = pieces.get(&work.pieces);
        transmit.gather(address, &headers[..header_length], payload, pad_count);
        if let Some(slot) = work.inline {
            transmit.put_inline(datagrams.inline.get(slot));
        }
        shared.counters.payload_bytes_sent += length;
        datagrams.next_psn = datagrams.next_psn.add(1);
        datagrams.sent += 1;
        datagrams.sent_at.get_or_insert(now);
        true
    }

    /// What the driver was given is out.
    pub(crate) fn complete_datagrams<M: Memory>(&mut self, shared: &mut Shared<M>) {
        let Some(datagrams) = &mut self.datagrams else { return };
        datagrams.sent_at = None;
        for _ in 0..core::mem::take(&mut datagrams.sent) {
            let Some(work) = datagrams.take_oldest() else { break };
            if work.signaled {
                let completion = work.completion(self.qpn, CompletionStatus::Success);
                shared.complete(self.send_completions, completion);
            }
        }
    }

    /// The oldest request failed: SQE (IBTA 10.3.1.6).
    fn fail_send_queue<M: Memory>(&mut self, shared: &mut Shared<M>) {
        self.state = QueuePairState::SendQueueError;
        self.flush_datagrams(shared, CompletionStatus::LocalProtection);
    }

    /// Ends all datagrams: the oldest with `status`, the rest flushed.
    pub(crate) fn flush_datagrams<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        mut status: CompletionStatus,
    ) {
        let Some(datagrams) = &mut self.datagrams else { return };
        datagrams.sent = 0;
        datagrams.sent_at = None;
        while let Some(work) = datagrams.take_oldest() {
            shared.complete(self.send_completions, work.completion(self.qpn, status));
            status = CompletionStatus::Flushed;
        }
    }

    /// Whether a datagram has the key of this queue pair (IBTA 9.6.1.4).
    pub(crate) fn takes_queue_key(&self, packet: &Packet<'_>) -> bool {
        let (Some(datagrams), Some(deth)) = (&self.datagrams, packet.extended.deth) else {
            return false;
        };
        datagrams.queue_key == deth.queue_key
    }

    /// Delivers a datagram into the next receive request. Without one that it fits into it is
    /// dropped, and the request stays (IBTA 9.9.3, fault class D).
    pub(crate) fn receive_datagram<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        meta: &DatagramMeta,
        datagram_length: usize,
        packet: &Packet<'_>,
    ) {
        let length = GLOBAL_ROUTE_HEADER_LENGTH + packet.payload.len();
        let fits = self
            .responder
            .receives
            .next_length(shared)
            .is_some_and(|available| available >= length as u64);
        let Some(receive) = fits.then(|| self.responder.receives.take(shared)).flatten() else {
            shared.counters.dropped_no_receive += 1;
            return;
        };
        let header = global_route_header(meta, datagram_length);
        let pieces = || self.responder.receives.pieces();
        let at = GLOBAL_ROUTE_HEADER_LENGTH as u64;
        let written = scatter(shared, receive.domain, pieces(), 0, &header)
            .and_then(|()| scatter(shared, receive.domain, pieces(), at, packet.payload));
        let delivered = written.and(shared.memory.flush());
        let status = match delivered {
            Ok(()) => CompletionStatus::Success,
            Err(_) => CompletionStatus::LocalProtection,
        };
        let operation = CompletionOperation::Receive;
        let delivered = status == CompletionStatus::Success;
        let completion = Completion {
            length: if delivered { length as u32 } else { 0 },
            immediate: packet.extended.immediate.map(|immediate| immediate.0),
            source: packet.extended.deth.map(|deth| deth.source_qpn),
            ..Completion::new(receive.id, self.qpn, status, operation)
        };
        let solicited = packet.bth.solicited_event;
        shared.complete_receive(self.receive_completions, completion, solicited);
        if delivered {
            shared.counters.payload_bytes_received += packet.payload.len() as u64;
        } else {
            self.fail_fatally(shared, None);
        }
    }
}

/// What stands at the start of the receive buffer, as Linux fills it for RoCEv2: the IPv6 header, or
/// an IPv4 header in the last 20 bytes. A UDP socket does not show the header, so that what the
/// driver does not know is what a sender without special wishes writes.
fn global_route_header(
    meta: &DatagramMeta,
    datagram_length: usize,
) -> [u8; GLOBAL_ROUTE_HEADER_LENGTH] {
    const USUAL_HOP_LIMIT: u8 = 64;
    const DONT_FRAGMENT: u16 = 0x4000;
    const CONGESTION_EXPERIENCED: u8 = 3;
    let type_of_service = if meta.congestion_experienced { CONGESTION_EXPERIENCED } else { 0 };
    let payload_length = UdpHeader::LENGTH + datagram_length;
    match (meta.source, meta.destination) {
        (IpAddr::V6(source), IpAddr::V6(destination)) => Ipv6Header {
            traffic_class: type_of_service,
            flow_label: 0,
            payload_length: payload_length as u16,
            next_header: udp::PROTOCOL,
            hop_limit: USUAL_HOP_LIMIT,
            source,
            destination,
        }
        .to_bytes(),
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let (Identification::Known(identification) | Identification::Guessed(identification)) =
                meta.identification;
            let header = Ipv4Header {
                type_of_service,
                total_length: (Ipv4Header::LENGTH + payload_length) as u16,
                identification,
                flags: DONT_FRAGMENT,
                time_to_live: USUAL_HOP_LIMIT,
                protocol: udp::PROTOCOL,
                checksum: 0,
                source,
                destination,
            };
            let header = Ipv4Header { checksum: header.computed_checksum(), ..header };
            let mut bytes = [0; GLOBAL_ROUTE_HEADER_LENGTH];
            bytes[GLOBAL_ROUTE_HEADER_LENGTH - Ipv4Header::LENGTH..]
                .copy_from_slice(&header.to_bytes());
            bytes
        }
        // No datagram comes from one family to the other.
        _ => [0; GLOBAL_ROUTE_HEADER_LENGTH],
    }
}
