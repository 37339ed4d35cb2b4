//! Packets that came before their turn.
//!
//! Where several processors or paths carry a flow, packets overtake each other. A responder drops what
//! is behind a gap and reports the gap (IBTA 9.7.5.2.8), and a requester whose READ has a gap in its answers asks
//! for them again; then all that is in flight is sent again. So a
//! few packets are kept for a moment ([`crate::EndpointConfig::reordering`], the reordering window of
//! RFC 8985): when those that they have overtaken come, or come again, they are handled, in order. They go when
//! that takes [`EXPIRY`]: what is no part of the stream must not wait for its number.

use core::time::Duration;
use std::collections::VecDeque;

use millstream_wire::{Bth, ExtendedHeaders, Mtu, Opcode, Packet, Syndrome};

/// Packets that an endpoint keeps at most, and how far ahead of its turn one is.
pub(crate) const ROOM: usize = 64;

/// How long packets are kept when nothing comes in order.
pub(crate) const EXPIRY: Duration = Duration::from_millis(100);

/// Who handles packets in the order of their numbers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Stream {
    /// The index of a queue pair.
    pub(crate) pair: u32,
    pub(crate) half: Half,
}

/// The half of a queue pair.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Half {
    Requester,
    Responder,
}

/// A packet, but for what only matters on its way.
#[derive(Debug)]
pub(crate) struct EarlyPacket {
    stream: Stream,
    psn: u64,
    bth: Bth,
    opcode: Opcode,
    extended: ExtendedHeaders,
    payload: Vec<u8>,
}

/// The packets that wait for their turn, of all queue pairs of an endpoint.
#[derive(Debug, Default)]
pub(crate) struct EarlyPackets {
    /// In the order in which they came.
    packets: VecDeque<EarlyPacket>,
    /// Room for payloads. With those of `packets` they are [`ROOM`], or none.
    unused: Vec<Vec<u8>>,
}

impl EarlyPackets {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.packets.len()
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// The smallest number in a stream.
    pub(crate) fn first(&self, stream: Stream) -> Option<u64> {
        let ours = self.packets.iter().filter(|packet| packet.stream == stream);
        ours.map(|packet| packet.psn).min()
    }

    /// Keeps a packet if there is room. Returns whether it is kept.
    pub(crate) fn keep(&mut self, stream: Stream, psn: u64, packet: &Packet<'_>) -> bool {
        let same = |kept: &&mut EarlyPacket| (kept.stream, kept.psn) == (stream, psn);
        if let Some(kept) = self.packets.iter_mut().find(same) {
            // A repeat asks for an acknowledgement where the first copy had no reason to.
            kept.bth.acknowledge_request |= packet.bth.acknowledge_request;
            return true;
        }
        if self.packets.len() == ROOM {
            return false;
        }
        let mut payload = self.room();
        payload.extend_from_slice(packet.payload);
        let Packet { bth, opcode, extended, .. } = *packet;
        self.packets.push_back(EarlyPacket { stream, psn, bth, opcode, extended, payload });
        true
    }

    /// Where a payload can be. The first one brings all there will ever be, 256 KiB, so that later ones cost no
    /// allocation.
    fn room(&mut self) -> Vec<u8> {
        if self.packets.is_empty() && self.unused.is_empty() {
            self.packets.reserve_exact(ROOM);
            self.unused.extend((0..ROOM).map(|_| Vec::with_capacity(Mtu::B4096.bytes())));
        }
        self.unused.pop().unwrap_or_default()
    }

    /// Takes the packet of a stream with this number, and drops those with smaller ones.
    pub(crate) fn take(&mut self, stream: Stream, psn: u64) -> Option<EarlyPacket> {
        self.drop_if(|packet| packet.stream == stream && packet.psn < psn);
        let at = self.packets.iter().position(|it| (it.stream, it.psn) == (stream, psn))?;
        self.packets.remove(at)
    }

    /// A packet that was taken is done with.
    pub(crate) fn give_back(&mut self, packet: EarlyPacket) {
        let mut payload = packet.payload;
        payload.clear();
        self.unused.push(payload);
    }

    /// Drops those of a stream.
    pub(crate) fn forget(&mut self, stream: Stream) {
        self.drop_if(|packet| packet.stream == stream);
    }

    /// Drops those of a stream that say no.
    pub(crate) fn forget_refusals(&mut self, stream: Stream) {
        let refuses = |packet: &EarlyPacket| {
            let syndrome = packet.extended.aeth.map(|aeth| aeth.syndrome());
            syndrome.is_some_and(|syndrome| !matches!(syndrome, Syndrome::Ack { .. }))
        };
        self.drop_if(|packet| packet.stream == stream && refuses(packet));
    }

    /// Drops those of both halves of a queue pair.
    pub(crate) fn forget_pair(&mut self, pair: u32) {
        self.drop_if(|packet| packet.stream.pair == pair);
    }

    fn drop_if(&mut self, goes: impl Fn(&EarlyPacket) -> bool) {
        let Self { packets, unused } = self;
        packets.retain_mut(|packet| {
            let goes = goes(packet);
            if goes {
                packet.payload.clear();
                unused.push(core::mem::take(&mut packet.payload));
            }
            !goes
        });
    }
}

impl EarlyPacket {
    /// As it came. Padding and ICRC were checked then.
    pub(crate) fn packet(&self) -> Packet<'_> {
        let Self { bth, opcode, extended, payload, .. } = self;
        Packet { bth: *bth, opcode: *opcode, extended: *extended, payload, padding: &[], icrc: 0 }
    }
}

#[cfg(test)]
mod tests {
    use millstream_wire::{Psn, Qpn};

    use super::*;

    fn stream(pair: u32) -> Stream {
        Stream { pair, half: Half::Responder }
    }

    fn keep(early: &mut EarlyPackets, pair: u32, psn: u64) -> bool {
        let opcode = Opcode::RcSendOnly;
        let payload = [psn as u8; 8];
        let packet = Packet {
            bth: Bth::new(opcode as u8, Qpn::default(), Psn::from_extended(psn)),
            opcode,
            extended: ExtendedHeaders::default(),
            payload: &payload,
            padding: &[],
            icrc: 0,
        };
        early.keep(stream(pair), psn, &packet)
    }

    fn take(early: &mut EarlyPackets, pair: u32, psn: u64) -> bool {
        let Some(taken) = early.take(stream(pair), psn) else { return false };
        assert_eq!(taken.packet().payload, [psn as u8; 8]);
        assert_eq!(taken.packet().bth.psn, Psn::from_extended(psn));
        early.give_back(taken);
        true
    }

    #[test]
    fn packets_are_taken_once_by_number_and_older_ones_dropped() {
        let mut early = EarlyPackets::default();
        for (pair, psn) in [(1, 12), (1, 10), (2, 10), (1, 11), (1, 12)] {
            assert!(keep(&mut early, pair, psn));
        }
        assert_eq!(early.len(), 4, "one came twice");
        assert!(!take(&mut early, 1, 9));
        assert!(take(&mut early, 1, 11));
        assert!(!take(&mut early, 1, 11));
        assert_eq!(early.len(), 2, "what is before it is dropped");
        assert_eq!([1, 2].map(|pair| early.first(stream(pair))), [Some(12), Some(10)]);
        early.forget(stream(1));
        assert_eq!(early.first(stream(1)), None);
        assert!(!take(&mut early, 1, 12));
        assert!(take(&mut early, 2, 10));
    }

    #[test]
    fn each_half_of_a_queue_pair_has_its_own() {
        let mut early = EarlyPackets::default();
        let answers = Stream { pair: 1, half: Half::Requester };
        assert!(keep(&mut early, 1, 10));
        assert_eq!((early.first(answers), early.take(answers, 20).is_some()), (None, false));
        early.forget(answers);
        assert_eq!(early.first(stream(1)), Some(10));
        early.forget_pair(1);
        assert!(early.is_empty());
    }

    #[test]
    fn room_is_bounded_and_comes_back() {
        let mut early = EarlyPackets::default();
        for round in 0..1000 {
            assert!((0..ROOM as u64).all(|psn| keep(&mut early, 1, psn)));
            assert!(keep(&mut early, 1, 0), "it is kept already");
            assert!(!keep(&mut early, 1, ROOM as u64) && !keep(&mut early, 2, 0));
            assert!(take(&mut early, 1, round % ROOM as u64));
            assert!(keep(&mut early, 2, 0));
            early.forget(stream(1));
            early.forget_pair(2);
        }
        assert_eq!((early.unused.len(), early.len()), (ROOM, 0));
    }
}
