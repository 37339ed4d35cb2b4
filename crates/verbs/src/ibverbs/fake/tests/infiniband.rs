//! Ports of InfiniBand, which the kernel's soft-RoCE has not.

use super::*;

/// Of the subnet without a prefix of its own, and of another one.
const GIDS: [&str; 2] = ["fe80::2:c903:a0:1", "fec0::2:c903:a0:1"];

fn port(lid: u16) -> ffi::PortAttr {
    let link_layer = ffi::LINK_LAYER_INFINIBAND;
    ffi::PortAttr { link_layer, lid, active_mtu: 5, gid_tbl_len: 3, ..ethernet() }
}

fn open(config: &IbverbsConfig) -> Fake {
    Fake::open_port(config, port(0x12), &GIDS).unwrap()
}

fn peer(ip: &str, lid: u16) -> PortAddress {
    PortAddress { ip: ip.parse().unwrap(), lid }
}

#[test]
fn its_device_tells_the_first_gid_and_the_lid() {
    let fake = open(&IbverbsConfig::default());
    let expected = peer(GIDS[0], 0x12);
    assert_eq!((fake.device.port_address(), fake.device.gid_index()), (expected, 0));
    assert_eq!(fake.device.path_mtu(expected.ip).unwrap(), Mtu::B4096);
    // One that is asked for by its index or as an address.
    for (gid_index, address) in [(Some(1), None), (None, Some(GIDS[1].parse().unwrap()))] {
        let fake = open(&IbverbsConfig { gid_index, address, ..IbverbsConfig::default() });
        assert_eq!((fake.device.address(), fake.device.gid_index()), (peer(GIDS[1], 0).ip, 1));
    }
    // A subnet manager gives it another one; for a moment it may have none.
    for (now, told) in [(0x13, 0x13), (0, 0x12)] {
        lock(&fake.script.port).lid = now;
        assert_eq!(fake.device.lid(), told);
    }
    assert_eq!(Fake::open().device.lid(), 0);
}

#[test]
fn a_port_without_a_subnet_is_refused() {
    let good = port(0x12);
    for (port, gids, expected) in [
        (port(0), &GIDS[..], "the LID 0x0000"),
        (port(0xc000), &GIDS[..], "the LID 0xc000"),
        (ffi::PortAttr { state: 2, ..good }, &GIDS[..], "is initializing"),
        (good, &["::", "::"][..], "has no GID"),
    ] {
        let opened = Fake::open_port(&IbverbsConfig::default(), port, gids);
        let error = opened.err().unwrap().to_string();
        assert!(error.contains(expected) && error.contains("subnet manager"), "{error}");
    }
    let other = ffi::PortAttr { link_layer: 0, ..good };
    let error = Fake::open_port(&IbverbsConfig::default(), other, &GIDS).err().unwrap();
    assert!(matches!(error, IbverbsError::OtherLinkLayer { link_layer: 0, .. }), "{error}");
}

#[test]
fn the_way_to_a_peer_has_its_lid_and_gid_and_the_service_level() {
    let fake = open(&IbverbsConfig { service_level: 5, ..IbverbsConfig::default() });
    let pair = fake.unconnected(&fake.queue(), Transport::ReliableConnection).unwrap();
    let peer = peer("fe80::2:c903:a0:7", 0xbfff);
    connect_to(&pair, peer).unwrap();
    let [way] = lock(&fake.script.ways)[..] else { panic!() };
    assert_eq!((way.dlid, way.sl, way.is_global, way.port_num), (0xbfff, 5, 1, 1));
    let expected = "fe80::2:c903:a0:7".parse::<std::net::Ipv6Addr>().unwrap();
    assert_eq!((way.grh.dgid.0, way.grh.sgid_index), (expected.octets(), 0));
}

#[test]
fn a_peer_of_ethernet_has_no_destination_lid() {
    // Whatever it says.
    let fake = Fake::open();
    let pair = fake.unconnected(&fake.queue(), Transport::ReliableConnection).unwrap();
    connect_to(&pair, peer("10.0.0.7", 7)).unwrap();
    let [way] = lock(&fake.script.ways)[..] else { panic!() };
    assert_eq!((way.dlid, way.is_global), (0, 1));
}

#[test]
fn what_no_packet_gets_to_is_refused() {
    let fake = open(&IbverbsConfig::default());
    for (ip, lid) in [("fe80::7", 0), ("10.0.0.7", 0), ("fe80::7", 0xc000), ("fe80::7", 0xffff)] {
        let pair = fake.unconnected(&fake.queue(), Transport::ReliableConnection).unwrap();
        let error = connect_to(&pair, peer(ip, lid)).unwrap_err();
        let named = error.to_string().contains(ip);
        let expected = match error {
            ModifyError::LinkLayer { .. } => lid == 0,
            ModifyError::RemoteLid { .. } => lid != 0,
            _ => false,
        };
        assert!(named && expected, "{ip}, {lid:#x}: {error}");
    }
    assert!(lock(&fake.script.ways).is_empty());
    let datagrams = fake.unconnected(&fake.queue(), Transport::UnreliableDatagram);
    assert!(matches!(datagrams, Err(CreateError::Unsupported(_))), "{datagrams:?}");
}
