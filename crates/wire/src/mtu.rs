//! Path MTU: how much payload one packet carries.

use core::fmt;

/// The path MTU of a queue pair: payload bytes per packet (IBTA 9.1.1). Headers come on top.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1024 bytes: the largest that a 1500-byte Ethernet frame carries.
    #[default]
    B1024,
    /// 2048 bytes.
    B2048,
    /// 4096 bytes: needs an IP MTU of at least 4188.
    B4096,
}

impl Mtu {
    /// All of them, smallest first.
    pub const ALL: [Self; 5] = [Self::B256, Self::B512, Self::B1024, Self::B2048, Self::B4096];

    /// What headers and ICRC may add to the payload within an IP packet: IPv6 (40), UDP (8), BTH
    /// (12), the largest extended headers (RETH + ImmDt 20, AtomicETH 28) and ICRC (4).
    const OVERHEAD: usize = 40 + 8 + 12 + 28 + 4;

    /// Payload bytes per packet.
    pub const fn bytes(self) -> usize {
        match self {
            Self::B256 => 256,
            Self::B512 => 512,
            Self::B1024 => 1024,
            Self::B2048 => 2048,
            Self::B4096 => 4096,
        }
    }

    /// The path MTU of exactly so many bytes.
    pub fn from_bytes(bytes: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }

    /// The largest path MTU whose packets fit an interface with this IP MTU.
    pub fn fitting(link_mtu: usize) -> Option<Self> {
        Self::ALL.into_iter().rev().find(|mtu| mtu.bytes() + Self::OVERHEAD <= link_mtu)
    }

    /// How many packets a message of so many bytes takes: at least one.
    pub const fn packets(self, length: u64) -> u64 {
        if length == 0 { 1 } else { length.div_ceil(self.bytes() as u64) }
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fitting_leaves_room_for_the_headers() {
        assert_eq!(Mtu::fitting(1500), Some(Mtu::B1024));
        assert_eq!(Mtu::fitting(9000), Some(Mtu::B4096));
        assert_eq!(Mtu::fitting(65536), Some(Mtu::B4096));
        assert_eq!(Mtu::fitting(4100), Some(Mtu::B2048));
        assert_eq!(Mtu::fitting(4187), Some(Mtu::B2048));
        assert_eq!(Mtu::fitting(4188), Some(Mtu::B4096));
        assert_eq!(Mtu::fitting(300), None);
    }

    #[test]
    fn only_the_five_sizes_are_mtus() {
        for mtu in Mtu::ALL {
            assert_eq!(Mtu::from_bytes(mtu.bytes()), Some(mtu));
            assert_eq!(Mtu::from_bytes(mtu.bytes() - 1), None);
            assert_eq!(Mtu::from_bytes(mtu.bytes() + 1), None);
        }
    }

    #[test]
    fn an_empty_message_takes_one_packet() {
        assert_eq!(Mtu::B1024.packets(0), 1);
        assert_eq!(Mtu::B1024.packets(1024), 1);
        assert_eq!(Mtu::B1024.packets(1025), 2);
    }
}
