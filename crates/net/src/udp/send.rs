//! Sending: what a UDP socket needs beside the datagrams, and single messages.

use std::io::{self, IoSlice};
use std::net::IpAddr;

use socket2::{MsgHdr, SockAddr};

use super::socket::UdpSocket;
use crate::batch::{Head, Refusal, Sender};
use crate::control::SegmentControl;
use crate::socket::Bound;

/// Where a message goes, and how long its segments are.
pub(crate) struct UdpHead {
    destination: Destination,
    control: SegmentControl,
    control_length: usize,
}

/// A socket address as the kernel reads it, without the room that other families need.
enum Destination {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

impl Destination {
    fn new(address: IpAddr, port: u16) -> Self {
        let port = port.to_be();
        match address {
            IpAddr::V4(address) => Self::V4(libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: port,
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.octets()) },
                sin_zero: [0; 8],
            }),
            IpAddr::V6(address) => Self::V6(libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: port,
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: address.octets() },
                sin6_scope_id: 0,
            }),
        }
    }

    /// Where it is, and how long. The kernel only reads it.
    fn place(&self) -> (*mut libc::c_void, usize) {
        match self {
            Self::V4(address) => ((&raw const *address).cast_mut().cast(), size_of_val(address)),
            Self::V6(address) => ((&raw const *address).cast_mut().cast(), size_of_val(address)),
        }
    }
}

impl Head for UdpHead {
    fn bytes(&self) -> &[u8] {
        &[]
    }

    fn describe(&mut self, header: &mut libc::msghdr) {
        let (name, length) = self.destination.place();
        header.msg_name = name;
        header.msg_namelen = length as libc::socklen_t;
        if self.control_length > 0 {
            header.msg_control = self.control.as_mut_ptr();
            header.msg_controllen = self.control_length as _;
        }
    }
}

impl Sender for UdpSocket {
    type Head = UdpHead;

    fn bound(&self) -> &Bound {
        Self::bound(self)
    }

    fn head(
        &self,
        destination: IpAddr,
        count: usize,
        segment: usize,
        _length: usize,
    ) -> Result<UdpHead, Refusal> {
        let mut control = SegmentControl::new();
        // A group of more than one fits a message, so its datagrams fit 16 bits.
        let control_length = if count > 1 { control.set_segment(segment as u16) } else { 0 };
        let destination = Destination::new(destination, self.bound().port());
        Ok(UdpHead { destination, control, control_length })
    }
}

impl UdpSocket {
    /// Sends one message now, as datagrams of `segment` bytes if it is longer than that.
    pub(crate) fn send_message(
        &self,
        to: &SockAddr,
        pieces: &[IoSlice<'_>],
        segment: usize,
    ) -> io::Result<()> {
        let length: usize = pieces.iter().map(|piece| piece.len()).sum();
        let mut control = SegmentControl::new();
        let mut message = MsgHdr::new().with_addr(to).with_buffers(pieces);
        if let Some(segment) = u16::try_from(segment).ok().filter(|_| segment < length) {
            let control_length = control.set_segment(segment);
            message = message.with_control(&control.bytes()[..control_length]);
        }
        self.socket().sendmsg(&message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use millstream_roce::{DatagramMeta, Instant, MAX_SCATTER_GATHER, Node, Piece, Transmit};
    use millstream_wire::ROCE_PORT;
    use millstream_wire::icrc::{self, Addresses, Addressing};

    use super::*;
    use crate::DriverCounters;
    use crate::batch::SendBatch;
    use crate::udp::{ReceiveBatch, SocketConfig};

    /// Sends so many datagrams of 100 bytes of payload; of every third, the memory has gone.
    struct Sender {
        destination: IpAddr,
        left: u64,
    }

    static PAYLOAD: [u8; 100] = [0x5a; 100];

    impl Node for Sender {
        fn handle_datagram(&mut self, _now: Instant, _meta: &DatagramMeta, _datagram: &[u8]) {}

        fn handle_timeout(&mut self, _now: Instant) {}

        fn poll_timeout(&mut self) -> Option<Instant> {
            None
        }

        fn poll_transmit(&mut self, _now: Instant, transmit: &mut Transmit) -> bool {
            if self.left == 0 {
                return false;
            }
            self.left -= 1;
            let piece = Piece { key: 0, address: self.left % 3, length: 100 };
            transmit.set(self.destination, &[0; 12], &[piece], 0);
            true
        }

        fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
            (piece.address > 0).then_some(&PAYLOAD)
        }
    }

    fn open(port: u16, segmentation_offload: bool) -> UdpSocket {
        UdpSocket::open(&SocketConfig {
            address: Ipv4Addr::LOCALHOST.into(),
            port,
            segmentation_offload,
            buffer_length: 1 << 20,
        })
        .unwrap()
    }

    /// Sends 100 datagrams from a socket to itself; returns the identification of each that came,
    /// found by its ICRC.
    fn send_to_itself(socket: &UdpSocket, counters: &mut DriverCounters) -> Vec<u16> {
        let local = socket.info();
        let mut node = Sender { destination: local.address, left: 150 };
        let mut batch = SendBatch::<UdpHead>::new(128);
        // SAFETY: all bytes are static.
        assert!(!unsafe { batch.collect(&mut node, Instant::ZERO, counters) });
        batch.send(socket, counters).unwrap();
        assert!(batch.is_empty());
        let mut identifications = Vec::new();
        let mut incoming = ReceiveBatch::new(8);
        while socket.receive(&mut incoming, counters).unwrap() > 0 {
            for (meta, datagram) in incoming.datagrams() {
                assert_eq!((meta.source, meta.source_port), (local.address, local.port));
                assert_eq!(datagram[12..112], PAYLOAD);
                let icrc = |identification| {
                    let (source, destination) = (meta.source, meta.destination);
                    let addresses =
                        Addresses::unfragmented(source, destination, identification).unwrap();
                    let source_port = meta.source_port;
                    let destination_port = ROCE_PORT;
                    let addressing = Addressing { addresses, source_port, destination_port };
                    icrc::of_datagram(&addressing, datagram).to_le_bytes()
                };
                let right = (0..64).find(|&guess| icrc(guess) == datagram[112..]);
                identifications.push(right.expect("an identification below 64"));
            }
        }
        identifications
    }

    #[test]
    fn identifications_are_positions_in_the_message() {
        let socket = open(0, true);
        let mut counters = DriverCounters::default();
        let identifications = send_to_itself(&socket, &mut counters);
        assert_eq!(counters.withdrawn_datagrams, 50);
        if socket.info().segmentation {
            assert_eq!(identifications, (0..64).chain(0..36).collect::<Vec<_>>());
            assert_eq!((counters.send_calls, counters.sent_messages), (1, 2));
        } else {
            assert_eq!(identifications, [0; 100]);
        }
        assert_eq!((counters.sent_datagrams, counters.sent_bytes), (100, 100 * 116));
    }

    #[test]
    fn a_kernel_that_refuses_to_segment_gets_single_datagrams() {
        let socket = open(0, true);
        if !socket.info().segmentation {
            return;
        }
        // Segments need checksums of their own, so the kernel refuses to make any without.
        socket.set_no_checksum();
        let mut counters = DriverCounters::default();
        for calls in [3, 4] {
            // The first message refused, then sent singly, then the rest; the second time, all
            // singly at once.
            assert_eq!(send_to_itself(&socket, &mut counters), [0; 100]);
            assert_eq!((counters.send_calls, counters.segmentation_refusals), (calls, 1));
            assert!(!socket.info().segmentation);
        }
        assert_eq!((counters.sent_datagrams, counters.sent_messages), (200, 200));
        assert_eq!(counters.unsent_datagrams, 0);
    }

    /// As many messages as it takes: the kernel gathers no more than 1024 pieces for one.
    #[test]
    fn datagrams_of_many_pieces_are_segmented_too() {
        struct Scattered(u64);
        impl Node for Scattered {
            fn handle_datagram(&mut self, _now: Instant, _meta: &DatagramMeta, _datagram: &[u8]) {}

            fn handle_timeout(&mut self, _now: Instant) {}

            fn poll_timeout(&mut self) -> Option<Instant> {
                None
            }

            fn poll_transmit(&mut self, _now: Instant, transmit: &mut Transmit) -> bool {
                let pieces = [Piece { key: 0, address: 1, length: 4 }; MAX_SCATTER_GATHER];
                transmit.set(Ipv4Addr::LOCALHOST.into(), &[0; 12], &pieces[..], 0);
                self.0 = self.0.wrapping_sub(1);
                self.0 < u64::MAX
            }

            fn bytes(&self, _piece: &Piece) -> Option<&[u8]> {
                PAYLOAD.get(..4)
            }
        }
        let socket = open(0, true);
        let mut batch = SendBatch::<UdpHead>::new(128);
        let mut counters = DriverCounters::default();
        // SAFETY: all bytes are static.
        assert!(!unsafe { batch.collect(&mut Scattered(100), Instant::ZERO, &mut counters) });
        let segmentation = socket.info().segmentation;
        batch.send(&socket, &mut counters).unwrap();
        assert_eq!((counters.sent_datagrams, counters.segmentation_refusals), (100, 0));
        assert_eq!(socket.info().segmentation, segmentation);
    }

    #[test]
    fn families_do_not_mix() {
        let socket = open(0, true);
        let mut node = Sender { destination: std::net::Ipv6Addr::LOCALHOST.into(), left: 30 };
        let mut batch = SendBatch::<UdpHead>::new(100);
        let mut counters = DriverCounters::default();
        // SAFETY: all bytes are static.
        assert!(!unsafe { batch.collect(&mut node, Instant::ZERO, &mut counters) });
        batch.send(&socket, &mut counters).unwrap();
        assert_eq!((counters.sent_datagrams, counters.unsent_datagrams), (0, 20));
    }

    #[test]
    fn a_full_batch_leaves_the_rest_for_later() {
        let mut node = Sender { destination: Ipv4Addr::LOCALHOST.into(), left: 30 };
        let mut batch = SendBatch::<UdpHead>::new(15);
        let mut counters = DriverCounters::default();
        // SAFETY: all bytes are static.
        let full = unsafe { batch.collect(&mut node, Instant::ZERO, &mut counters) };
        assert!(full && !batch.is_empty());
        // Of 22, 7 had no memory.
        assert_eq!((node.left, counters.withdrawn_datagrams), (8, 7));
    }
}
