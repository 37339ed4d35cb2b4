//! Packets made by hand, as a hostile or broken peer would, and what an endpoint answers to them.

use core::ops::Range;

use millstream_roce::{Completion, Counters, Node, QueuePairState, Transmit};
use millstream_wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, ExtendedHeaders, Ieth, ImmDt, NakCode, Opcode,
    Packet, Psn, Qpn, Reth, Syndrome,
};

use super::{Pair, sign};

/// A packet to host `to`, from its peer, with everything right that is not set wrong.
#[derive(Clone)]
pub(crate) struct Forge {
    pub(crate) to: usize,
    pub(crate) bth: Bth,
    opcode: Opcode,
    extended: ExtendedHeaders,
    payload: Vec<u8>,
}

impl Forge {
    /// With the extended headers that the opcode calls for, all zero.
    pub(crate) fn new(pair: &Pair, to: usize, opcode: Opcode, psn: u32) -> Self {
        let bth = Bth::new(opcode as u8, pair.hosts[to].qpn, Psn::new(psn));
        let (extended, _) = ExtendedHeaders::parse(opcode, &[0; 32]).unwrap();
        Self { to, bth, opcode, extended, payload: Vec::new() }
    }

    pub(crate) fn reth(mut self, virtual_address: u64, remote_key: u32, dma_length: u32) -> Self {
        self.extended.reth = Some(Reth { virtual_address, remote_key, dma_length });
        self
    }

    pub(crate) fn syndrome(mut self, syndrome: Syndrome) -> Self {
        self.extended.aeth = Some(Aeth::new(syndrome, Psn::new(0)));
        self
    }

    pub(crate) fn immediate(mut self, value: u32) -> Self {
        self.extended.immediate = Some(ImmDt(value));
        self
    }

    pub(crate) fn invalidate(mut self, key: u32) -> Self {
        self.extended.invalidate = Some(Ieth(key));
        self
    }

    pub(crate) fn atomic(self, virtual_address: u64, remote_key: u32) -> Self {
        self.atomic_of(virtual_address, remote_key, 0, 1)
    }

    pub(crate) fn atomic_of(
        mut self,
        virtual_address: u64,
        remote_key: u32,
        compare: u64,
        swap_or_add: u64,
    ) -> Self {
        self.extended.atomic =
            Some(AtomicEth { virtual_address, remote_key, swap_or_add, compare });
        self
    }

    pub(crate) fn original(mut self, original: u64) -> Self {
        self.extended.atomic_ack = Some(AtomicAckEth { original });
        self
    }

    pub(crate) fn deth(mut self, queue_key: u32, source: u32) -> Self {
        let source_qpn = Qpn::new(source);
        self.extended.deth = Some(Deth { queue_key, reserved: 0, source_qpn });
        self
    }

    pub(crate) fn payload(mut self, payload: &[u8]) -> Self {
        self.payload = payload.to_vec();
        self.bth.pad_count = (payload.len().wrapping_neg() & 3) as u8;
        self
    }

    pub(crate) fn acknowledge_request(mut self) -> Self {
        self.bth.acknowledge_request = true;
        self
    }

    /// To host 0: a packet of the answer to a READ of these numbers.
    pub(crate) fn read_answer(pair: &Pair, psn: u32, read: Range<u32>) -> Self {
        let opcode = match (psn == read.start, psn + 1 == read.end) {
            (true, true) => Opcode::RcReadResponseOnly,
            (true, false) => Opcode::RcReadResponseFirst,
            (false, true) => Opcode::RcReadResponseLast,
            (false, false) => Opcode::RcReadResponseMiddle,
        };
        let forge = Self::new(pair, 0, opcode, psn);
        match opcode {
            Opcode::RcReadResponseMiddle => forge,
            _ => forge.syndrome(Syndrome::ACK_UNLIMITED),
        }
    }

    /// The datagram, with its ICRC right.
    pub(crate) fn datagram(&self, pair: &Pair) -> Vec<u8> {
        let packet = Packet {
            bth: self.bth,
            opcode: self.opcode,
            extended: self.extended,
            payload: &self.payload,
            padding: &[0; 3][..usize::from(self.bth.pad_count)],
            icrc: 0,
        };
        sign(pair, self.to, &packet)
    }

    pub(crate) fn inject(&self, pair: &mut Pair) {
        let datagram = self.datagram(pair);
        pair.inject(self.to, &datagram);
    }
}

/// A packet that an endpoint sent, in short.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Answer {
    pub(crate) opcode: Opcode,
    pub(crate) psn: u32,
    pub(crate) syndrome: Option<Syndrome>,
    pub(crate) msn: Option<u32>,
    pub(crate) payload: usize,
    /// Of an answer to an atomic operation: the value from before.
    pub(crate) original: Option<u64>,
}

pub(crate) const fn nak(psn: u32, code: NakCode) -> (Opcode, u32, Option<Syndrome>) {
    (Opcode::RcAcknowledge, psn, Some(Syndrome::Nak(code)))
}

pub(crate) const fn ack(psn: u32) -> (Opcode, u32, Option<Syndrome>) {
    (Opcode::RcAcknowledge, psn, Some(Syndrome::ACK_UNLIMITED))
}

/// All of a host that a remote can change, but for counters.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct State {
    pub(crate) queue_pair: QueuePairState,
    regions: Vec<Option<Vec<u8>>>,
    completions: Vec<Completion>,
}

impl Pair {
    /// What a host has to send now; it does not arrive anywhere.
    pub(crate) fn answers(&mut self, host: usize) -> Vec<Answer> {
        let mut transmit = Transmit::new();
        let mut answers = Vec::new();
        let host = &mut self.hosts[host];
        while host.endpoint.poll_transmit(self.now, &mut transmit) {
            let mut datagram = Vec::new();
            assert!(transmit.assemble(&host.endpoint, host.address, 4791, 0, &mut datagram));
            let packet = Packet::parse(&datagram).unwrap();
            answers.push(Answer {
                opcode: packet.opcode,
                psn: packet.bth.psn.value(),
                syndrome: packet.extended.aeth.map(|aeth| aeth.syndrome()),
                msn: packet.extended.aeth.map(|aeth| aeth.msn.value()),
                payload: packet.payload.len(),
                original: packet.extended.atomic_ack.map(|ack| ack.original),
            });
            assert!(answers.len() < 1_000_000, "no end of answers");
        }
        answers
    }

    /// As [`Pair::answers`], without what only some tests look at.
    pub(crate) fn short_answers(&mut self, host: usize) -> Vec<(Opcode, u32, Option<Syndrome>)> {
        self.answers(host).iter().map(|a| (a.opcode, a.psn, a.syndrome)).collect()
    }

    pub(crate) fn counters(&self, host: usize) -> Counters {
        *self.hosts[host].endpoint.counters()
    }

    /// Takes the completions out of the endpoint into [`Pair::completions`]'s list.
    pub(crate) fn poll(&mut self, host: usize) {
        let host = &mut self.hosts[host];
        host.endpoint.poll_completions(host.queue, &mut host.completions, usize::MAX);
    }

    pub(crate) fn snapshot(&mut self, host: usize, keys: &[u32]) -> State {
        self.poll(host);
        let memory = self.hosts[host].endpoint.memory();
        State {
            queue_pair: self.state(host),
            regions: keys.iter().map(|&key| memory.region(key).map(<[u8]>::to_vec)).collect(),
            completions: self.hosts[host].completions.clone(),
        }
    }
}
