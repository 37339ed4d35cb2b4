//! Whether a packet's ICRC is right, when not all of what it covers is known.

use millstream_wire::icrc::{self, Addresses, Addressing, Solver};
use millstream_wire::{ICRC_LENGTH, ROCE_PORT};

use crate::node::{DatagramMeta, Identification};

/// How the ICRC of arriving packets is checked. IPv6 packets are always checked exactly, unless
/// `Off`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum IcrcCheck {
    /// Not at all: for media that check themselves.
    Off,
    /// The IPv4 identification must be as known or guessed: 32 bits of protection.
    Exact,
    /// Any IPv4 identification below 64, as of a segmented send: 26 bits of protection.
    SegmentIndex,
    /// Any IPv4 identification, as real NICs and the Linux kernel choose them: 16 bits of
    /// protection where the identification is not known.
    AnyIdentification,
}

/// Identification solvers, one for each length that a packet came in with. A solver costs about as
/// much as a packet of its length (0.4 to 14 us), so none is made twice: neither garbage nor a mixture of lengths wears them out.
#[derive(Debug, Default)]
pub(crate) struct Solvers {
    /// By length in words: headers and padded payload are whole words, some thousand lengths in all.
    by_words: Vec<Option<Box<Solver>>>,
}

impl Solvers {
    /// Whether the ICRC of a packet is right as far as that can be known. The caller has checked that
    /// the packet's length is one that the protocol allows.
    pub(crate) fn icrc_matches(
        &mut self,
        check: IcrcCheck,
        meta: &DatagramMeta,
        datagram: &[u8],
        received: u32,
    ) -> bool {
        if check == IcrcCheck::Off {
            return true;
        }
        let (identification, known) = match meta.identification {
            Identification::Known(identification) => (identification, true),
            Identification::Guessed(identification) => (identification, false),
        };
        let Some(addresses) =
            Addresses::unfragmented(meta.source, meta.destination, identification)
        else {
            return false;
        };
        let addressing =
            Addressing { addresses, source_port: meta.source_port, destination_port: ROCE_PORT };
        debug_assert!(datagram.len() >= ICRC_LENGTH, "a packet was parsed from it");
        let computed = icrc::of_datagram(&addressing, datagram);
        if computed == received {
            return true;
        }
        let limit = match check {
            IcrcCheck::SegmentIndex => 64,
            IcrcCheck::AnyIdentification => u32::from(u16::MAX) + 1,
            IcrcCheck::Off | IcrcCheck::Exact => return false,
        };
        if known || meta.source.is_ipv6() {
            return false;
        }
        let words = datagram.len() / 4;
        if words >= self.by_words.len() {
            self.by_words.resize_with(words + 1, || None);
        }
        let solver =
            self.by_words[words].get_or_insert_with(|| Box::new(Solver::new(datagram.len())));
        solver
            .identification(identification, computed, received)
            .is_some_and(|identification| u32::from(identification) < limit)
    }
}
