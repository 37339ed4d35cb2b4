//! A datagram on its way, with the IP fields that matter.

use core::net::IpAddr;

use millstream_roce::{DatagramMeta, Identification};

/// A UDP datagram to the RoCE port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Datagram {
    /// Its number among all that were sent: what a log line refers to.
    pub number: u64,
    /// Sender's address.
    pub source: IpAddr,
    /// Sender's UDP port.
    pub source_port: u16,
    /// Receiver's address.
    pub destination: IpAddr,
    /// IPv4 identification; 0 on IPv6.
    pub identification: u16,
    /// A queue on the way was filling up (the congestion-experienced mark of the IP header).
    pub congestion_experienced: bool,
    /// The UDP payload.
    pub payload: Vec<u8>,
}

impl Datagram {
    /// Bytes of UDP and IP headers before the payload.
    pub const fn header_length(&self) -> usize {
        match self.source {
            IpAddr::V4(_) => 20 + 8,
            IpAddr::V6(_) => 40 + 8,
        }
    }

    /// Bytes that it takes on an Ethernet: with the Ethernet header (14), frame check sequence (4),
    /// preamble (8) and the gap between frames (12).
    pub const fn wire_length(&self) -> usize {
        self.header_length() + self.payload.len() + 38
    }

    /// What the receiver is told beside the payload; through a UDP socket it does not see the
    /// identification, and takes it for 0.
    pub(crate) const fn meta(&self, sees_ip_header: bool) -> DatagramMeta {
        DatagramMeta {
            source: self.source,
            source_port: self.source_port,
            destination: self.destination,
            identification: if sees_ip_header {
                Identification::Known(self.identification)
            } else {
                Identification::Guessed(0)
            },
            congestion_experienced: self.congestion_experienced,
        }
    }
}
