//! Scripted faults: what happens to which packet, decided by the test.

use core::time::Duration;

use millstream_roce::Instant;
use millstream_wire::Packet;

use crate::{Datagram, LinkId, NodeId};

/// A packet that is about to enter a link.
#[derive(Clone, Copy, Debug)]
pub struct PacketInfo<'a> {
    /// Now.
    pub now: Instant,
    /// Who sent it.
    pub source: NodeId,
    /// Who will get it.
    pub destination: NodeId,
    /// The link it is about to enter.
    pub link: LinkId,
    /// All of it.
    pub datagram: &'a Datagram,
    /// What it says; `None` when it is no RoCEv2 packet.
    pub packet: Option<Packet<'a>>,
}

/// What a rule wants done.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// Nothing: ask the next rule, and let the link decide after the last.
    Pass,
    /// Drop it.
    Drop,
    /// Deliver it so much later than it would be; later packets may overtake it.
    Delay(Duration),
    /// Deliver it twice.
    Duplicate,
}

/// A rule. The first one that does not say [`Verdict::Pass`] decides.
pub trait Rule {
    /// Looks at a packet.
    fn on_packet(&mut self, packet: &PacketInfo<'_>) -> Verdict;
}

impl<F: FnMut(&PacketInfo<'_>) -> Verdict> Rule for F {
    fn on_packet(&mut self, packet: &PacketInfo<'_>) -> Verdict {
        self(packet)
    }
}
