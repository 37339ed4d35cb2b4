//! What the IP header really says. All that is claimed of ICRCs stands on this: a UDP socket that is
//! unconnected and does path MTU discovery sends identification 0 and don't-fragment.

mod common;

use std::io::{self, Read};
use std::net::IpAddr;
use std::time::Duration;

use common::{Signal, StreamNode, address, config, skip, start};
use millstream_net::ProgressConfig;
use millstream_wire::icrc::{self, Addresses, Addressing};
use millstream_wire::ipv4::Ipv4Header;
use millstream_wire::udp::UdpHeader;
use millstream_wire::{ICRC_LENGTH, ROCE_PORT};
use socket2::{Domain, Protocol, Socket, Type};

/// IPv4 packets of all interfaces, without their link headers.
fn capture() -> io::Result<Socket> {
    let protocol = Protocol::from(i32::from((libc::ETH_P_IP as u16).to_be()));
    let socket = Socket::new(Domain::from(libc::AF_PACKET), Type::DGRAM, Some(protocol))?;
    socket.set_recv_buffer_size(4 << 20)?;
    socket.set_read_timeout(Some(Duration::from_secs(20)))?;
    Ok(socket)
}

#[test]
fn the_icrc_is_right_for_the_header_on_the_wire() {
    const TOTAL: usize = 100;
    /// Of what the sender sends. The ICRC does not cover it.
    const CLASS: u8 = 0xb8;
    let mut capture = match capture() {
        Ok(capture) => capture,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return skip("the_icrc_is_right_for_the_header_on_the_wire", "CAP_NET_RAW");
        }
        Err(error) => panic!("no packet socket: {error}"),
    };
    let (here, there) = (address(), address());
    let signal = Signal::default();
    // Segmented messages would be captured whole.
    let config = |own| ProgressConfig { segmentation_offload: false, ..config(own) };
    let _receiver = start(config(there), StreamNode::new(there, here, &[1000, 3, 0]), &signal);
    let classed = ProgressConfig { traffic_class: CLASS, ..config(here) };
    let sender = start(classed, StreamNode::new(here, there, &[1000, 3, 0]), &signal);
    sender.shared().lock().unwrap().total = TOTAL;
    let mut seen = 0;
    let mut buffer = vec![0; 1 << 16];
    while seen < TOTAL {
        let length = capture.read(&mut buffer).expect("the packets of this test");
        let Ok((ip, segment)) = Ipv4Header::parse(&buffer[..length]) else { continue };
        let ends: [IpAddr; 2] = [ip.source.into(), ip.destination.into()];
        if ends != [here, there] {
            continue;
        }
        let (udp, datagram) = UdpHeader::parse(segment).unwrap();
        assert_eq!((udp.source_port, udp.destination_port), (ROCE_PORT, ROCE_PORT));
        let addressing = Addressing::new(Addresses::from(&ip), &udp);
        let expected = icrc::of_datagram(&addressing, datagram).to_le_bytes();
        assert_eq!(datagram[datagram.len() - ICRC_LENGTH..], expected);
        assert_eq!((ip.identification, ip.type_of_service), (0, CLASS));
        seen += 1;
    }
}
