//! What happens to packets on their way, and what somebody else sends who sees them.

use core::net::IpAddr;
use core::time::Duration;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use millstream_wire::icrc::{self, Addresses, Addressing};
use millstream_wire::{Opcode, Psn, Qpn, ROCE_PORT};

use crate::{Datagram, NodeId, PacketInfo, Probability, Rng, Rule, Verdict};

/// Packets that the outsider remembers.
const REMEMBERED: usize = 64;

/// What the outsider has seen.
#[derive(Debug, Default)]
pub(super) struct Seen {
    packets: Vec<Datagram>,
    /// The latest request's number, by address and queue pair that it went to.
    latest: BTreeMap<(IpAddr, Qpn), Psn>,
}

/// Loses acknowledgements, delays packets, and shows them to the outsider.
pub(super) struct Weather {
    pub(super) acknowledgement_loss: Probability,
    pub(super) late: Probability,
    pub(super) rng: Rng,
    pub(super) seen: Rc<RefCell<Seen>>,
    /// What the outsider itself sends is not new to it.
    pub(super) outsider: NodeId,
}

impl Rule for Weather {
    fn on_packet(&mut self, packet: &PacketInfo<'_>) -> Verdict {
        let Some(parsed) = packet.packet.as_ref().filter(|_| packet.source != self.outsider) else {
            return Verdict::Pass;
        };
        let mut seen = self.seen.borrow_mut();
        if seen.packets.len() < REMEMBERED {
            seen.packets.push(packet.datagram.clone());
        } else if self.rng.below(8) == 0 {
            seen.packets[self.rng.below(REMEMBERED as u64) as usize] = packet.datagram.clone();
        }
        let acknowledgement = parsed.opcode == Opcode::RcAcknowledge;
        if !acknowledgement {
            let name = (packet.datagram.destination, parsed.bth.destination_qpn);
            seen.latest.insert(name, parsed.bth.psn);
        }
        if acknowledgement && self.acknowledgement_loss.happens(&mut self.rng) {
            Verdict::Drop
        } else if self.late.happens(&mut self.rng) {
            Verdict::Delay(Duration::from_micros(self.rng.below(2000)))
        } else {
            Verdict::Pass
        }
    }
}

/// A queue pair, and who it is connected to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) address: IpAddr,
    pub(super) qpn: Qpn,
    pub(super) peer: IpAddr,
}

/// A packet that must change nothing, with a name for what it is.
pub(super) fn forge(
    rng: &mut Rng,
    seen: &Seen,
    known: &[Known],
    own: IpAddr,
) -> Option<(&'static str, Datagram)> {
    let count = seen.packets.len() as u64;
    let mut datagram = seen.packets.get(rng.below(count) as usize)?.clone();
    let name = match rng.below(6) {
        0 => "forged: a packet again, much later",
        1 => {
            // The next one that is expected, or any.
            let connection = known[rng.below(known.len() as u64) as usize];
            datagram.destination = connection.address;
            datagram.source = own;
            aim(rng, seen, &mut datagram, connection.qpn);
            "forged: from an address that has no part in it"
        }
        2 => {
            let connection = known[rng.below(known.len() as u64) as usize];
            if connection.peer == datagram.source {
                return None;
            }
            datagram.destination = connection.address;
            aim(rng, seen, &mut datagram, connection.qpn);
            "forged: for a queue pair of others"
        }
        3 => {
            let psn =
                Psn::from_bytes([datagram.payload[9], datagram.payload[10], datagram.payload[11]]);
            let before = rng.between(20_000, 1 << 22) as u32;
            set_psn(&mut datagram, Psn::new(psn.value().wrapping_sub(before)));
            scribble(rng, &mut datagram);
            seal(&mut datagram);
            "forged: with an old number and other content"
        }
        4 => {
            let at = rng.below(datagram.payload.len() as u64) as usize;
            // The ICRC does not cover the fifth byte.
            datagram.payload[if at == 4 { 5 } else { at }] ^= 1 << rng.below(8);
            "forged: with a wrong ICRC"
        }
        _ => {
            let length = rng.below(200) as usize;
            datagram.payload.resize(length, 0);
            rng.fill(&mut datagram.payload);
            "forged: noise"
        }
    };
    Some((name, datagram))
}

/// Gives it a queue pair, and often the number that is expected next.
fn aim(rng: &mut Rng, seen: &Seen, datagram: &mut Datagram, qpn: Qpn) {
    datagram.payload[5..8].copy_from_slice(&qpn.to_bytes());
    if let Some(latest) = seen.latest.get(&(datagram.destination, qpn))
        && rng.below(4) > 0
    {
        set_psn(datagram, Psn::new(latest.value() + rng.below(2) as u32));
    }
    scribble(rng, datagram);
    seal(datagram);
}

fn set_psn(datagram: &mut Datagram, psn: Psn) {
    datagram.payload[9..12].copy_from_slice(&psn.to_bytes());
}

/// Other bytes at the end, which is payload where there is much of it.
fn scribble(rng: &mut Rng, datagram: &mut Datagram) {
    let end = datagram.payload.len() - 4;
    let start = end.saturating_sub(64).max(40);
    if start < end {
        rng.fill(&mut datagram.payload[start..end]);
    }
}

fn seal(datagram: &mut Datagram) {
    let Datagram { source, destination, identification, source_port, .. } = *datagram;
    let Some(addresses) = Addresses::unfragmented(source, destination, identification) else {
        return;
    };
    let addressing = Addressing { addresses, source_port, destination_port: ROCE_PORT };
    let icrc = icrc::of_datagram(&addressing, &datagram.payload);
    let at = datagram.payload.len() - 4;
    datagram.payload[at..].copy_from_slice(&icrc.to_le_bytes());
}
