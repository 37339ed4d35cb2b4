//! The Internet checksum (RFC 1071): of IPv4 headers, and of UDP with its pseudo-header.

use core::net::IpAddr;

/// A running sum of 16-bit words, in ones' complement.
#[derive(Clone, Copy, Debug, Default)]
pub struct Checksum {
    sum: u64,
    /// The bytes so far are odd in number: the next one is the low half of a word.
    odd: bool,
}

impl Checksum {
    /// Nothing summed yet.
    pub const fn new() -> Self {
        Self { sum: 0, odd: false }
    }

    /// The pseudo-header of a UDP datagram of so many bytes, header included (RFC 768, RFC 8200
    /// section 8.1). `None` when the families differ.
    pub fn udp(source: IpAddr, destination: IpAddr, length: u16) -> Option<Self> {
        let mut checksum = Self::new();
        match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                checksum.update(&source.octets());
                checksum.update(&destination.octets());
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                checksum.update(&source.octets());
                checksum.update(&destination.octets());
            }
            _ => return None,
        }
        checksum.sum += u64::from(crate::udp::PROTOCOL) + u64::from(length);
        Some(checksum)
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        if self.odd
            && let Some((&low, tail)) = rest.split_first()
        {
            self.add(u64::from(low));
            self.odd = false;
            rest = tail;
        }
        // Words of 32 bits: what a half of one carries into the other is right after folding,
        // since 2^16 is 1 modulo 2^16 - 1.
        let (words, tail) = rest.as_chunks::<4>();
        // Each piece adds less than 2^48, so that the sum cannot overflow.
        for piece in words.chunks(1 << 16) {
            let sum: u64 = piece.iter().map(|word| u64::from(u32::from_be_bytes(*word))).sum();
            self.add(sum);
        }
        let (pairs, last) = tail.as_chunks::<2>();
        for pair in pairs {
            self.add(u64::from(u16::from_be_bytes(*pair)));
        }
        if let [high] = last {
            self.add(u64::from(*high) << 8);
            self.odd = true;
        }
    }

    /// The sum, folded to 16 bits: what a packet carries that leaves the rest to an offload.
    pub const fn folded(self) -> u16 {
        let mut sum = self.sum;
        while sum >> 16 != 0 {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    /// The checksum: the complement of the sum. Over bytes that hold their right checksum, it is 0.
    pub const fn finish(self) -> u16 {
        !self.folded()
    }

    const fn add(&mut self, sum: u64) {
        // Two halves below 2^32 and a piece below 2^48: far from 2^64, however many there are.
        self.sum = (self.sum & 0xffff_ffff) + (self.sum >> 32) + sum;
    }
}

#[cfg(test)]
mod tests {
    use core::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    fn of(bytes: &[u8]) -> u16 {
        let mut checksum = Checksum::new();
        checksum.update(bytes);
        checksum.finish()
    }

    /// As RFC 1071 writes it down.
    fn plain(bytes: &[u8]) -> u16 {
        let mut sum = 0_u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    #[test]
    fn the_example_of_the_rfc() {
        // RFC 1071, section 3: the sum is ddf2.
        assert_eq!(of(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
        assert_eq!(of(&[]), 0xffff);
    }

    #[test]
    fn all_lengths_and_all_ways_to_cut_agree() {
        let bytes: Vec<u8> = (0..67_u8).map(|i| i.wrapping_mul(197) ^ 0xf0).collect();
        for length in 0..bytes.len() {
            let bytes = &bytes[..length];
            assert_eq!(of(bytes), plain(bytes), "{length}");
            for first in 0..length {
                for second in first..length.min(first + 5) {
                    let mut checksum = Checksum::new();
                    checksum.update(&bytes[..first]);
                    checksum.update(&bytes[first..second]);
                    checksum.update(&bytes[second..]);
                    assert_eq!(checksum.finish(), plain(bytes), "{first} {second} {length}");
                }
            }
        }
        assert_eq!(of(&[0xff; 65_535]), plain(&[0xff; 65_535]));
        let long = vec![0xff; 1 << 20];
        assert_eq!(of(&long), plain(&long));
    }

    #[test]
    fn the_pseudo_header_is_in_it() {
        let (source, destination) = (Ipv4Addr::new(192, 168, 0, 7), Ipv4Addr::new(192, 168, 0, 7));
        let mut checksum = Checksum::udp(source.into(), destination.into(), 0x2c).unwrap();
        let mut plain_bytes = Vec::new();
        plain_bytes.extend(source.octets());
        plain_bytes.extend(destination.octets());
        plain_bytes.extend([0, 17, 0, 0x2c, 1, 2, 3]);
        checksum.update(&[1, 2, 3]);
        assert_eq!(checksum.finish(), plain(&plain_bytes));
        let mixed = Checksum::udp(source.into(), Ipv6Addr::LOCALHOST.into(), 8);
        assert!(mixed.is_none());
    }
}
