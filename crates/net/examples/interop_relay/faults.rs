//! What befalls RoCE packets. Frames of anything else pass.

use std::ops::Range;

use millstream_wire::ethernet::{self, EthernetHeader};
use millstream_wire::ipv4::Ipv4Header;
use millstream_wire::udp::{self, UdpHeader};
use millstream_wire::{ICRC_LENGTH, ROCE_PORT};

/// UDP payloads of this size and more carry data, whatever their headers.
const DATA_LENGTH_MIN: usize = 100;
/// Where the checksum stands in a UDP header.
const UDP_CHECKSUM: usize = 6;
/// The shortest packet has a base transport header and an ICRC.
const BTH_LENGTH: usize = 12;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Direction {
    ToGuest,
    FromGuest,
}

/// What happens to packets, and what has happened. The same packets meet the same for a seed.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Packets of a thousand that are lost, that pass twice, and, of those with data, that have a
    /// wrong bit in it.
    lost: u64,
    twice: u64,
    corrupt: u64,
    /// Only in this direction.
    only: Option<Direction>,
    wrong_icrc: bool,
    drop_all: bool,
    state: u64,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    passed: u64,
    lost: u64,
    twice: u64,
    corrupted: u64,
}

impl Faults {
    /// Words and numbers: `pass` for no faults, `drop` for no packets, `wrong-icrc`,
    /// `loss PERMILLE`, `duplicate PERMILLE`, `corrupt PERMILLE` (a bit of the data),
    /// `to-guest` or `from-guest` for one direction only, `seed N`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut faults = Self { state: 1, ..Self::default() };
        let mut words = text.split_whitespace();
        while let Some(word) = words.next() {
            let mut number = || {
                let number = words.next().and_then(|number| number.parse::<u64>().ok());
                number.ok_or_else(|| format!("{word} needs a number"))
            };
            match word {
                "pass" => {}
                "drop" => faults.drop_all = true,
                "wrong-icrc" => faults.wrong_icrc = true,
                "loss" => faults.lost = number()?,
                "duplicate" => faults.twice = number()?,
                "corrupt" => faults.corrupt = number()?,
                "to-guest" => faults.only = Some(Direction::ToGuest),
                "from-guest" => faults.only = Some(Direction::FromGuest),
                "seed" => faults.state = number()?.wrapping_add(1),
                _ => return Err(format!("there is no fault {word:?}")),
            }
        }
        Ok(faults)
    }

    /// How often this frame goes on: 0, 1 or 2 times. It may be changed.
    pub(crate) fn meet(&mut self, direction: Direction, frame: &mut [u8]) -> usize {
        let Some(place) = roce_datagram(frame) else { return 1 };
        if self.only.is_some_and(|only| only != direction) {
            return 1;
        }
        if self.drop_all || self.random(1000) < self.lost {
            self.counts.lost += 1;
            return 0;
        }
        // A checksum of 0 is none: the ICRC alone is to find what is wrong.
        let datagram = &mut frame[place];
        let last = datagram.len() - 1;
        if self.wrong_icrc {
            datagram[UDP_CHECKSUM..UDP_CHECKSUM + 2].fill(0);
            datagram[last] ^= 1;
            self.counts.corrupted += 1;
        }
        let data = datagram.len() >= UdpHeader::LENGTH + DATA_LENGTH_MIN;
        if data && self.random(1000) < self.corrupt {
            datagram[UDP_CHECKSUM..UDP_CHECKSUM + 2].fill(0);
            // Before it are up to three bytes of padding.
            datagram[last - ICRC_LENGTH - 3] ^= 4;
            self.counts.corrupted += 1;
        }
        self.counts.passed += 1;
        if self.random(1000) < self.twice {
            self.counts.twice += 1;
            return 2;
        }
        1
    }

    /// What has happened since the faults were set.
    pub(crate) fn counters(&self) -> String {
        let Counts { passed, lost, twice, corrupted } = self.counts;
        format!("passed {passed} lost {lost} twice {twice} corrupted {corrupted}")
    }

    fn random(&mut self, below: u64) -> u64 {
        // Knuth's MMIX generator; its high bits are good enough for this.
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) % below
    }
}

/// Where the UDP datagram of a RoCE packet stands in a frame that holds one.
fn roce_datagram(frame: &[u8]) -> Option<Range<usize>> {
    let (head, packet) = EthernetHeader::parse(frame).ok()?;
    if head.ether_type != ethernet::IPV4 {
        return None;
    }
    let (ip, datagram) = Ipv4Header::parse(packet).ok()?;
    if ip.protocol != udp::PROTOCOL {
        return None;
    }
    let (udp, payload) = UdpHeader::parse(datagram).ok()?;
    let roce = udp.destination_port == ROCE_PORT && payload.len() >= BTH_LENGTH + ICRC_LENGTH;
    let start = EthernetHeader::LENGTH + Ipv4Header::LENGTH;
    roce.then_some(start..start + UdpHeader::LENGTH + payload.len())
}
