//! What must hold of every packet that a machine sends, whatever the network does to it.
//!
//! The checker sees only the wire. It holds a machine to the rules of the reliable connection:
//! every packet well formed and under its right ICRC; packet sequence numbers used without gaps;
//! the same packet whenever a number is sent again; acknowledgements and message sequence numbers
//! that never go back.

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use millstream_wire::icrc::{self, Addresses, Addressing};
use millstream_wire::{
    Aeth, Mtu, NakCode, Opcode, Operation, Packet, Psn, Qpn, ROCE_PORT, Syndrome,
};

use crate::Datagram;

/// Requests remembered per flow; older ones are not compared when they are sent again.
const REMEMBERED: usize = 1 << 14;
/// Where 64-bit numbers start, so that none falls below zero.
const BASE: u64 = 1 << 32;

/// Watches every flow.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    /// See [`crate::Simulation::allow_changed_sources`].
    pub(crate) changed_sources: bool,
    /// See [`crate::Simulation::allow_changed_sources_of`].
    pub(crate) changing: BTreeSet<IpAddr>,
    flows: BTreeMap<Name, Flow>,
}

/// What one queue pair sends to another.
///
/// The wire names the receiver's queue pair alone. Two of one sender may have the same receiver: one
/// is connected to it, the other was connected to one of the receiving machine's former life that had
/// the same number, and still tries.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Name {
    source: (IpAddr, Qpn),
    destination: (IpAddr, Qpn),
}

#[derive(Debug, Default)]
struct Flow {
    /// In order, without overlap: each reaches to the start of the next.
    requests: VecDeque<Request>,
    /// By acknowledgements alone.
    acknowledged: Option<Acknowledged>,
    /// Also by NAKs, which tell of READs and atomic operations that were executed too. An
    /// acknowledgement of a repeat may come after one of these and say less, since those have
    /// answers of their own.
    answered: Option<Acknowledged>,
    /// The last that was sent of what is forgotten. A probe begins with the oldest of that, and goes on with the newest.
    forgotten: Option<Psn>,
}

/// A request packet that was sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Request {
    psn: u64,
    /// Bytes asked for, when it is a READ: it takes the numbers of its response.
    read: Option<u32>,
    opcode: Opcode,
    content: u64,
}

#[derive(Clone, Copy, Debug)]
struct Acknowledged {
    /// The packet that the responder expects, as far as its answers tell.
    expected_psn: u64,
    /// Messages completed.
    msn: u64,
}

impl Checker {
    /// Forgets the flows from and to a machine: its queue pairs start anew. Who was connected to one may not know, and sends
    /// again what it has sent.
    pub(crate) fn forget(&mut self, address: IpAddr) {
        self.forget_sender(address);
        for (_, flow) in self.flows.iter_mut().filter(|(name, _)| name.destination.0 == address) {
            let last = flow.requests.back().map(|last| Psn::from_extended(last.psn));
            *flow = Flow { forgotten: last.or(flow.forgotten), ..Flow::default() };
        }
    }

    /// Forgets what a machine sent: it starts anew. Its peers do not, until they know.
    pub(crate) fn forget_sender(&mut self, address: IpAddr) {
        self.flows.retain(|name, _| name.source.0 != address);
    }

    /// Forgets what a queue pair sent.
    pub(crate) fn forget_queue_pair(&mut self, address: IpAddr, qpn: Qpn) {
        self.flows.retain(|name, _| name.source != (address, qpn));
    }

    /// Looks at a datagram as a queue pair of a machine sends it.
    pub(crate) fn sent(&mut self, source: Qpn, datagram: &Datagram) -> Result<(), String> {
        let packet = Packet::parse(&datagram.payload)
            .map_err(|error| format!("sent a malformed packet: {error}"))?;
        check_form(datagram, &packet)?;
        let name = Name {
            source: (datagram.source, source),
            destination: (datagram.destination, packet.bth.destination_qpn),
        };
        let changes = self.changed_sources || self.changing.contains(&datagram.source);
        let content = content(&packet, !changes);
        let flow = self.flows.entry(name).or_default();
        match packet.opcode.operation() {
            Operation::Acknowledge => match packet.extended.aeth {
                Some(aeth) => flow.acknowledge(packet.bth.psn, aeth),
                None => Err("sent an acknowledgement without its header".into()),
            },
            // Datagrams of many go to one: whose they are is not the flow's.
            _ if packet.opcode.has_deth() => Ok(()),
            Operation::ReadResponse
            | Operation::AtomicAcknowledge
            | Operation::CongestionNotification => Ok(()),
            _ => flow.request(&packet, content),
        }
        .map_err(|what| {
            format!("{what} (to {} qp {})", datagram.destination, packet.bth.destination_qpn)
        })
    }
}

/// Length, padding and ICRC.
fn check_form(datagram: &Datagram, packet: &Packet<'_>) -> Result<(), String> {
    let padded = packet.payload.len() + packet.padding.len();
    if !padded.is_multiple_of(4) || packet.padding.iter().any(|&byte| byte != 0) {
        return Err(format!("sent {:?} with wrong padding", packet.opcode));
    }
    if packet.payload.len() > Mtu::B4096.bytes() {
        return Err(format!("sent a payload of {} bytes", packet.payload.len()));
    }
    // Only what takes a receive request asks for a solicited event (IBTA 9.2.3).
    let takes_receive = packet.opcode.operation() == Operation::Send
        && packet.opcode.position().ends()
        || packet.extended.immediate.is_some();
    if packet.bth.solicited_event && !takes_receive {
        return Err(format!("sent {:?} with the solicited event bit", packet.opcode));
    }
    let Datagram { source, destination, source_port, identification, .. } = *datagram;
    let addresses = Addresses::unfragmented(source, destination, identification)
        .ok_or_else(|| format!("sent from {source} to {destination}: different families"))?;
    let addressing = Addressing { addresses, source_port, destination_port: ROCE_PORT };
    let right = icrc::of_datagram(&addressing, &datagram.payload);
    if right != packet.icrc {
        return Err(format!("sent ICRC {:#010x}, where {right:#010x} is right", packet.icrc));
    }
    Ok(())
}

impl Flow {
    fn request(&mut self, packet: &Packet<'_>, content: u64) -> Result<(), String> {
        let opcode = packet.opcode;
        let is_read = opcode.operation() == Operation::ReadRequest;
        let near = self.requests.back().map_or(BASE, |last| last.psn);
        let request = Request {
            psn: packet.bth.psn.extend(near),
            read: packet.extended.reth.filter(|_| is_read).map(|reth| reth.dma_length),
            opcode,
            content,
        };
        let Some(last) = self.requests.back().copied() else {
            self.requests.push_back(request);
            return Ok(());
        };
        if request.psn > last.psn {
            let step = request.psn - last.psn;
            let allowed = match last.read {
                None => 1..=1,
                // The path MTU is not on the wire.
                Some(length) => {
                    Mtu::B4096.packets(length.into())..=Mtu::B256.packets(length.into())
                }
            };
            // A READ that is resumed takes up a number within its own response.
            let resumed = is_read && last.read.is_some() && step < *allowed.start();
            let again = self.forgotten.is_some_and(|it| request.psn <= it.extend(request.psn));
            if !allowed.contains(&step) && !resumed && !again {
                return Err(format!(
                    "sent {opcode:?} with psn {}, {step} after {:?} with psn {}",
                    packet.bth.psn,
                    last.opcode,
                    Psn::from_extended(last.psn),
                ));
            }
            if self.requests.len() == REMEMBERED {
                self.requests.pop_front();
            }
            self.requests.push_back(request);
            return Ok(());
        }
        let after = self.requests.partition_point(|old| old.psn <= request.psn);
        let Some(old) = after.checked_sub(1).map(|index| self.requests[index]) else {
            return Ok(());
        };
        let same = if old.read.is_some() { is_read } else { old == request };
        if same {
            return Ok(());
        }
        Err(format!(
            "sent {opcode:?} with psn {}, which was {:?} with psn {} and other content before",
            packet.bth.psn,
            old.opcode,
            Psn::from_extended(old.psn)
        ))
    }

    fn acknowledge(&mut self, psn: Psn, aeth: Aeth) -> Result<(), String> {
        let near = self.answered.map_or((BASE, BASE), |a| (a.expected_psn, a.msn));
        let psn = psn.extend(near.0);
        let (expected_psn, before) = match aeth.syndrome() {
            Syndrome::Ack { .. } => (psn + 1, self.acknowledged),
            Syndrome::ReceiverNotReady { .. } | Syndrome::Nak(NakCode::PsnSequenceError) => {
                (psn, self.answered)
            }
            // An error may be found in the middle of what was received, and ends the connection.
            Syndrome::Nak(_) => return Ok(()),
            Syndrome::Reserved(byte) => return Err(format!("sent reserved syndrome {byte:#04x}")),
        };
        let new = Acknowledged { expected_psn, msn: aeth.msn.extend(near.1) };
        let old = before.unwrap_or(new);
        if new.expected_psn < old.expected_psn {
            return Err(format!(
                "took back an acknowledgement: expected psn {} after {}",
                Psn::from_extended(new.expected_psn),
                Psn::from_extended(old.expected_psn),
            ));
        }
        if new.msn < old.msn {
            return Err(format!(
                "took back messages: msn {} after {}",
                aeth.msn,
                Psn::from_extended(old.msn)
            ));
        }
        if let Syndrome::Ack { .. } = aeth.syndrome() {
            self.acknowledged = Some(new);
        }
        let is_newer = |old: Acknowledged| old.expected_psn <= new.expected_psn;
        if self.answered.is_none_or(is_newer) {
            self.answered = Some(new);
        }
        Ok(())
    }
}

/// A hash of what a request says, apart from the acknowledge-request bit, which a sender may set
/// anew when it sends the packet again. Without `payload`, only its length counts.
fn content(packet: &Packet<'_>, payload: bool) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |word: u64| {
        hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^= hash >> 32;
    };
    if let Some(reth) = packet.extended.reth {
        [reth.virtual_address, reth.remote_key.into(), reth.dma_length.into()]
            .into_iter()
            .for_each(&mut add);
    }
    if let Some(atomic) = packet.extended.atomic {
        [atomic.virtual_address, atomic.remote_key.into(), atomic.swap_or_add, atomic.compare]
            .into_iter()
            .for_each(&mut add);
    }
    add(packet.extended.immediate.map_or(u64::MAX, |immediate| immediate.0.into()));
    add(packet.extended.invalidate.map_or(u64::MAX, |key| key.0.into()));
    add(packet.payload.len() as u64);
    let (words, rest) = if payload { packet.payload } else { &[] }.as_chunks::<8>();
    words.iter().for_each(|word| add(u64::from_le_bytes(*word)));
    rest.iter().for_each(|&byte| add(byte.into()));
    hash
}

#[cfg(test)]
mod tests {
    use millstream_wire::{Bth, Deth, ExtendedHeaders, Ieth, ImmDt, Reth};

    use super::*;

    const QPN: Qpn = Qpn::new(0x1234);
    const SOURCE: Qpn = Qpn::new(0x77);

    /// A datagram of one packet, with the right padding and ICRC.
    fn datagram(
        opcode: Opcode,
        psn: u32,
        payload: &[u8],
        change: impl FnOnce(&mut ExtendedHeaders),
    ) -> Datagram {
        let padding = &[0; 3][..payload.len().wrapping_neg() & 3];
        let mut extended = ExtendedHeaders::default();
        change(&mut extended);
        let mut bth = Bth::new(opcode as u8, QPN, Psn::new(psn));
        bth.pad_count = padding.len() as u8;
        let packet = Packet { bth, opcode, extended, payload, padding, icrc: 0 };
        let mut bytes = vec![0; 5000];
        let length = packet.emit(&mut bytes);
        bytes.truncate(length);
        let mut datagram = Datagram {
            number: 0,
            source: IpAddr::from([10, 0, 0, 1]),
            source_port: ROCE_PORT,
            destination: IpAddr::from([10, 0, 0, 2]),
            identification: 0,
            congestion_experienced: false,
            payload: bytes,
        };
        seal(&mut datagram);
        datagram
    }

    fn seal(datagram: &mut Datagram) {
        let addresses = Addresses::unfragmented(datagram.source, datagram.destination, 0).unwrap();
        let addressing =
            Addressing { addresses, source_port: ROCE_PORT, destination_port: ROCE_PORT };
        let icrc = icrc::of_datagram(&addressing, &datagram.payload);
        let at = datagram.payload.len() - 4;
        datagram.payload[at..].copy_from_slice(&icrc.to_le_bytes());
    }

    fn send(psn: u32, payload: &[u8]) -> Datagram {
        datagram(Opcode::RcSendOnly, psn, payload, |_| ())
    }

    fn read(psn: u32, length: u32) -> Datagram {
        let reth = Reth { virtual_address: 0, remote_key: 0, dma_length: length };
        datagram(Opcode::RcReadRequest, psn, &[], |headers| headers.reth = Some(reth))
    }

    fn answer(psn: u32, syndrome: Syndrome, msn: u32) -> Datagram {
        let aeth = Aeth::new(syndrome, Psn::new(msn));
        datagram(Opcode::RcAcknowledge, psn, &[], |headers| headers.aeth = Some(aeth))
    }

    fn ack(psn: u32, msn: u32) -> Datagram {
        answer(psn, Syndrome::ACK_UNLIMITED, msn)
    }

    /// Sends all; the last must be objected to with these words, and no other. With no words, none.
    fn objects(datagrams: &[Datagram], words: &str) {
        let mut checker = Checker::default();
        let (last, before) = datagrams.split_last().unwrap();
        for datagram in before {
            assert_eq!(checker.sent(SOURCE, datagram), Ok(()));
        }
        match checker.sent(SOURCE, last) {
            Ok(()) => assert_eq!(words, "", "nothing was objected to"),
            Err(what) => assert!(!words.is_empty() && what.contains(words), "{what}"),
        }
    }

    #[test]
    fn what_the_protocol_allows_passes() {
        let nak = Syndrome::Nak(NakCode::PsnSequenceError);
        objects(&[send(5, b"a"), send(6, b"b"), send(5, b"a"), send(6, b"b"), send(7, b"")], "");
        objects(&[send(0xff_ffff, b"a"), send(0, b"b"), send(0xff_ffff, b"a"), send(1, b"c")], "");
        objects(&[read(5, 4096), send(9, b""), read(5, 4096), read(7, 2048), send(9, b"")], "");
        objects(&[read(5, 4096), read(7, 2048), read(9, 0), send(10, b"")], "");
        objects(&[ack(0xff_fffe, 7), answer(0xff_ffff, nak, 7), ack(1, 9), ack(1, 9)], "");
        // A READ was executed between the two, and then an old WRITE was repeated.
        objects(&[ack(5, 1), answer(9, nak, 2), ack(5, 1), answer(9, nak, 2), ack(9, 3)], "");
    }

    #[test]
    fn a_gap_in_the_numbers_is_objected_to() {
        objects(&[send(5, b""), send(7, b"")], "2 after RcSendOnly");
        objects(&[read(5, 4096), send(22, b"")], "17 after RcReadRequest");
        objects(&[read(5, 8192), send(6, b"")], "1 after RcReadRequest");
        objects(&[send(0xff_ffff, b""), send(1, b"")], "2 after RcSendOnly");
    }

    #[test]
    fn other_content_under_an_old_number_is_objected_to() {
        objects(&[send(5, b"a"), send(6, b""), send(5, b"b")], "other content");
        let immediate = datagram(Opcode::RcSendOnlyWithImmediate, 5, b"a", |headers| {
            headers.immediate = Some(ImmDt(1));
        });
        objects(&[send(5, b"a"), immediate], "other content");
        objects(&[send(5, b"a"), read(5, 1)], "other content");
        objects(&[read(5, 4096), send(9, b""), send(7, b"")], "other content");
    }

    #[test]
    fn changed_sources_may_be_allowed() {
        let mut checker = Checker { changed_sources: true, ..Checker::default() };
        assert_eq!(checker.sent(SOURCE, &send(5, b"a")), Ok(()));
        assert_eq!(checker.sent(SOURCE, &send(5, b"b")), Ok(()));
        assert!(checker.sent(SOURCE, &read(5, 1)).is_err());
    }

    #[test]
    fn changed_sources_may_be_allowed_to_one_machine() {
        for (address, changes) in [([10, 0, 0, 1], true), ([10, 0, 0, 2], false)] {
            let changing = [IpAddr::from(address)].into();
            let mut checker = Checker { changing, ..Checker::default() };
            assert_eq!(checker.sent(SOURCE, &send(5, b"a")), Ok(()));
            assert_eq!(checker.sent(SOURCE, &send(5, b"b")).is_ok(), changes);
        }
    }

    #[test]
    fn an_answer_that_goes_back_is_objected_to() {
        let nak = Syndrome::Nak(NakCode::PsnSequenceError);
        let not_ready = Syndrome::ReceiverNotReady { timer: 1 };
        objects(&[ack(5, 1), ack(4, 1)], "took back an acknowledgement");
        objects(&[ack(0, 1), ack(0xff_ffff, 1)], "took back an acknowledgement");
        objects(&[ack(5, 1), answer(5, nak, 1)], "took back an acknowledgement");
        objects(&[ack(5, 1), answer(5, not_ready, 1)], "took back an acknowledgement");
        objects(&[ack(4, 1), answer(9, nak, 2), ack(5, 1), answer(8, nak, 2)], "took back");
        objects(&[ack(5, 1), answer(9, nak, 2), ack(4, 1)], "took back an acknowledgement");
        objects(&[ack(5, 1), ack(6, 0)], "took back messages");
        objects(&[ack(5, 0), ack(6, 0xff_ffff)], "took back messages");
        objects(&[answer(5, Syndrome::Reserved(0x40), 0)], "reserved syndrome");
    }

    #[test]
    fn malformed_packets_are_objected_to() {
        let mut wrong = send(5, b"abcd");
        wrong.payload[12] ^= 1;
        objects(&[wrong], "is right");
        let mut wrong = send(5, b"abc");
        let padding = wrong.payload.len() - 5;
        wrong.payload[padding] = 1;
        seal(&mut wrong);
        objects(&[wrong], "wrong padding");
        let mut wrong = send(5, b"abcd");
        wrong.payload.truncate(15);
        objects(&[wrong], "malformed");
        objects(&[send(5, &[0; 4097])], "4097 bytes");
    }

    #[test]
    fn only_what_takes_a_receive_request_is_solicited() {
        for (opcode, words) in [
            (Opcode::RcSendOnly, ""),
            (Opcode::RcSendLastWithInvalidate, ""),
            (Opcode::UdSendOnly, ""),
            (Opcode::RcWriteOnlyWithImmediate, ""),
            (Opcode::RcSendFirst, "solicited"),
            (Opcode::RcWriteOnly, "solicited"),
            (Opcode::RcReadRequest, "solicited"),
        ] {
            let mut datagram = datagram(opcode, 5, &[], |headers| {
                headers.reth = opcode.has_reth().then_some(Reth {
                    virtual_address: 0,
                    remote_key: 0,
                    dma_length: 0,
                });
                headers.immediate = opcode.has_immediate().then_some(ImmDt(1));
                headers.invalidate = opcode.has_invalidate().then_some(Ieth(1));
                headers.deth = opcode.has_deth().then_some(Deth {
                    queue_key: 0,
                    reserved: 0,
                    source_qpn: QPN,
                });
            });
            // The byte after the opcode has the bit at its top.
            datagram.payload[1] |= 0x80;
            seal(&mut datagram);
            objects(&[datagram], words);
        }
    }

    #[test]
    fn each_queue_pair_has_its_own_numbers_whoever_it_sends_to() {
        let mut checker = Checker::default();
        let other = Qpn::new(0x78);
        for psn in [5, 6] {
            assert_eq!(checker.sent(SOURCE, &send(psn, b"a")), Ok(()));
            assert_eq!(checker.sent(other, &send(psn + 1000, b"b")), Ok(()));
        }
        checker.forget_queue_pair(IpAddr::from([10, 0, 0, 1]), other);
        assert_eq!(checker.sent(other, &send(77, b"b")), Ok(()));
        assert!(checker.sent(SOURCE, &send(77, b"a")).is_err());
    }

    #[test]
    fn what_was_sent_to_a_machine_that_has_died_may_be_sent_again_with_gaps() {
        let mut checker = Checker::default();
        let mut sent = |packets: &[u32]| {
            packets.iter().all(|&psn| checker.sent(SOURCE, &send(psn, b"a")).is_ok())
        };
        assert!(sent(&[0xff_ffff, 0, 1, 2]));
        checker.forget(IpAddr::from([10, 0, 0, 2]));
        let mut sent = |packets: &[u32]| {
            packets.iter().all(|&psn| checker.sent(SOURCE, &send(psn, b"a")).is_ok())
        };
        assert!(sent(&[0xff_ffff, 2, 3]));
        assert!(!sent(&[5]), "what was never sent");
    }

    #[test]
    fn a_machine_that_starts_anew_may_start_anywhere() {
        let mut checker = Checker::default();
        for (number, address) in [[10, 0, 0, 1], [10, 0, 0, 2]].into_iter().enumerate() {
            assert_eq!(checker.sent(SOURCE, &send(5 + 100 * number as u32, b"a")), Ok(()));
            checker.forget(address.into());
        }
        assert_eq!(checker.sent(SOURCE, &send(77, b"a")), Ok(()));
    }
}
