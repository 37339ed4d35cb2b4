//! What must hold of every packet that a machine sends, whatever the network does to it
//! (DESIGN 5.6, invariant 4).
//!
//! The checker sees only the wire. It holds a machine to the rules of the reliable connection:
//! every packet well formed and under its right ICRC; packet sequence numbers used without gaps;
//! the same packet whenever a number is sent again; acknowledgements and message sequence numbers
//! that never go back.

use core::net::IpAddr;
use std::collections::{BTreeMap, VecDeque};

use millstream_wire::icrc::{self, Addresses, Addressing};
use millstream_wire::{
    Aeth, Mtu, NakCode, Opcode, Operation, Packet, Psn, Qpn, ROCE_PORT, Syndrome,
};

use crate::Datagram;

/// Requests remembered per flow; older ones are not compared when they are sent again.
const REMEMBERED: usize = 1 << 14;
/// Where 64-bit numbers start, so that none falls below zero.
const BASE: u64 = 1 << 32;

/// Watches every flow. A flow is what one queue pair sends: sender, receiver, and the receiver's
/// queue pair number name it, since a reliable connection is between two.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    /// See [`crate::Simulation::allow_changed_sources`].
    pub(crate) changed_sources: bool,
    flows: BTreeMap<(IpAddr, IpAddr, Qpn), Flow>,
}

#[derive(Debug, Default)]
struct Flow {
    /// In order, without overlap: each reaches to the start of the next.
    requests: VecDeque<Request>,
    acknowledged: Option<Acknowledged>,
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
    /// Forgets the flows from and to a machine: its queue pairs start anew.
    pub(crate) fn forget(&mut self, address: IpAddr) {
        self.flows
            .retain(|(source, destination, _), _| *source != address && *destination != address);
    }

    /// Looks at a datagram as a machine sends it.
    pub(crate) fn sent(&mut self, datagram: &Datagram) -> Result<(), String> {
        let packet = Packet::parse(&datagram.payload)
            .map_err(|error| format!("sent a malformed packet: {error}"))?;
        check_form(datagram, &packet)?;
        let key = (datagram.source, datagram.destination, packet.bth.destination_qpn);
        let content = if self.changed_sources { 0 } else { content(&packet) };
        let flow = self.flows.entry(key).or_default();
        match packet.opcode.operation() {
            Operation::Acknowledge => match packet.extended.aeth {
                Some(aeth) => flow.acknowledge(packet.bth.psn, aeth),
                None => Err("sent an acknowledgement without its header".into()),
            },
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
            if !allowed.contains(&step) && !resumed {
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
        let near = self.acknowledged.map_or((BASE, BASE), |a| (a.expected_psn, a.msn));
        let psn = psn.extend(near.0);
        let expected_psn = match aeth.syndrome() {
            Syndrome::Ack { .. } => psn + 1,
            Syndrome::ReceiverNotReady { .. } | Syndrome::Nak(NakCode::PsnSequenceError) => psn,
            // An error may be found in the middle of what was received, and ends the connection.
            Syndrome::Nak(_) => return Ok(()),
            Syndrome::Reserved(byte) => return Err(format!("sent reserved syndrome {byte:#04x}")),
        };
        let new = Acknowledged { expected_psn, msn: aeth.msn.extend(near.1) };
        let old = self.acknowledged.replace(new).unwrap_or(new);
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
        Ok(())
    }
}

/// A hash of what a request says, apart from the acknowledge-request bit, which a sender may set
/// anew when it sends the packet again.
fn content(packet: &Packet<'_>) -> u64 {
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
    add(packet.extended.immediate.map_or(u64::MAX, |immediate| immediate.0.into()));
    add(packet.payload.len() as u64);
    let (words, rest) = packet.payload.as_chunks::<8>();
    words.iter().for_each(|word| add(u64::from_le_bytes(*word)));
    rest.iter().for_each(|&byte| add(byte.into()));
    hash
}
