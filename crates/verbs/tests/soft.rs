//! What only soft devices have: an address each, and segmentation offload.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use millstream_verbs::{Device, OpenError, Provider, SoftConfig};

/// An address of 127/8 that no other test process uses, nor other tests of this one.
fn address(host: u8) -> IpAddr {
    let process = std::process::id();
    Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, host).into()
}

#[test]
fn an_address_that_others_have_to_themselves_is_refused() {
    let config = SoftConfig::new(address(1));
    let other = UdpSocket::bind((config.address, 4791)).unwrap();
    let error = Device::open_soft(&config).unwrap_err();
    assert!(matches!(error, OpenError::PortInUse { .. }), "{error}");
    drop(other);
    let first = Device::open_soft(&config).unwrap();
    assert_eq!(first.provider(), Provider::Soft);
    drop(first);
    // Everything of the first is gone, its sockets too.
    UdpSocket::bind((config.address, 4791)).unwrap();
}
