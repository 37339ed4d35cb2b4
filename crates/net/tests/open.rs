//! Addresses: which can be opened, and what is said of those that cannot.

mod common;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket as StdSocket};

use common::{Signal, StreamNode, address, config, has_ipv6, start};
use millstream_net::address::{first_free_loopback, local_address_for, path_mtu};
use millstream_net::udp::{SocketConfig, UdpSocket};
use millstream_net::{OpenError, Progress};
use millstream_wire::ROCE_PORT;

fn open(address: IpAddr) -> Result<UdpSocket, OpenError> {
    let buffer_length = 1 << 16;
    UdpSocket::open(&SocketConfig {
        address,
        port: ROCE_PORT,
        segmentation_offload: true,
        buffer_length,
    })
}

#[test]
fn a_port_in_use_is_a_clear_error() {
    let own = address();
    let node = || StreamNode::new(own, own, &[100]);
    let _first = start(config(own), node(), &Signal::default());
    // SAFETY: the memory of a `StreamNode` is never changed, and lives as long as the node.
    let error = unsafe { Progress::start(config(own), node(), |_| ()) }.err().unwrap();
    assert!(matches!(error, OpenError::PortInUse { address, port: 4791 } if address == own));
    let message = error.to_string();
    assert!(message.contains(&own.to_string()) && message.contains("--bind"), "{message}");
}

#[test]
fn a_socket_on_all_addresses_takes_ours_too() {
    // As the kernel's soft RoCE does; on another port, not to disturb others.
    let all = StdSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let port = all.local_addr().unwrap().port();
    let error = UdpSocket::open(&SocketConfig {
        address: address(),
        port,
        segmentation_offload: true,
        buffer_length: 1 << 16,
    });
    assert!(
        matches!(error.unwrap_err(), OpenError::PortInUse { port: taken, .. } if taken == port)
    );
}

#[test]
fn addresses_of_others_and_of_nobody_are_refused() {
    // TEST-NET-3 is nobody's.
    let foreign = IpAddr::from([203, 0, 113, 7]);
    assert!(
        matches!(open(foreign).unwrap_err(), OpenError::NotLocal { address } if address == foreign)
    );
    let unsuitable: [IpAddr; 5] = [
        Ipv4Addr::UNSPECIFIED.into(),
        Ipv6Addr::UNSPECIFIED.into(),
        Ipv4Addr::BROADCAST.into(),
        Ipv4Addr::new(224, 0, 0, 1).into(),
        Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1).into(),
    ];
    for address in unsuitable {
        let error = open(address).unwrap_err();
        assert!(matches!(error, OpenError::Unsuitable { address: named, .. } if named == address));
    }
}

#[test]
fn mapped_addresses_are_ipv4() {
    let own = address();
    let IpAddr::V4(v4) = own else { unreachable!("test addresses are IPv4") };
    assert_eq!(open(v4.to_ipv6_mapped().into()).unwrap().info().address, own);
}

#[test]
fn what_the_socket_got_is_reported() {
    let small = open(address()).unwrap().info();
    // The kernel doubles what is asked for, to have room for its own.
    assert_eq!((small.receive_buffer, small.send_buffer), (1 << 17, 1 << 17));
    assert_eq!(small.port, ROCE_PORT);
}

#[test]
fn the_local_address_follows_the_route() {
    let own = address();
    assert_eq!(local_address_for(own).unwrap(), IpAddr::from([127, 0, 0, 1]));
    if has_ipv6("the_local_address_follows_the_route over IPv6") {
        let localhost = IpAddr::V6(Ipv6Addr::LOCALHOST);
        assert_eq!(local_address_for(localhost).unwrap(), localhost);
    }
}

#[test]
fn the_path_mtu_is_that_of_the_interface() {
    let (own, other) = (address(), address());
    let mtu = path_mtu(own, other).unwrap();
    // Of the loopback interface: 65,536 unless somebody changed it, never less than IPv4 demands.
    assert!((68..=65_536).contains(&mtu), "{mtu}");
    let others = IpAddr::V6(Ipv6Addr::LOCALHOST);
    assert!(path_mtu(own, others).is_err(), "no path leads from IPv4 to IPv6");
}

#[test]
fn the_first_free_loopback_is_free() {
    // A port that no other test uses while this socket holds it on 127.0.0.1.
    let first = StdSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = first.local_addr().unwrap().port();
    assert_eq!(first_free_loopback(port), Some(Ipv4Addr::new(127, 0, 0, 2)));
    let _second = StdSocket::bind((Ipv4Addr::new(127, 0, 0, 2), port)).unwrap();
    assert_eq!(first_free_loopback(port), Some(Ipv4Addr::new(127, 0, 0, 3)));
    drop(first);
    assert_eq!(first_free_loopback(port), Some(Ipv4Addr::LOCALHOST));
    let _all = StdSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let port = _all.local_addr().unwrap().port();
    assert_eq!(first_free_loopback(port), None);
}
