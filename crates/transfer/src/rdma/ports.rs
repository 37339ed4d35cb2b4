//! Where ports are that peers tell of, and which can reach each other.

use std::net::IpAddr;

use millstream_metadata::{DeviceDesc, HandShakeDesc};
use millstream_topology::{Address, Pair, reachable_pairs};
use millstream_verbs::PortAddress;

/// Where a device of a segment is.
pub(super) fn port_address(device: &DeviceDesc) -> PortAddress {
    PortAddress { ip: device.gid.address(), lid: device.lid }
}

/// Where the sender of a handshake says that it is. Old peers say neither GID nor LID.
pub(super) fn sender_of(handshake: &HandShakeDesc) -> Option<PortAddress> {
    let lid = handshake.local_lid;
    handshake.local_gid.map(|gid| PortAddress { ip: gid.address(), lid })
}

/// The ports that can reach each other, by their places.
pub(super) fn pairs(own: &[PortAddress], theirs: &[PortAddress]) -> Vec<Pair> {
    let own: Vec<_> = own.iter().map(|at| [infiniband(at).unwrap_or(Address::Ip(at.ip))]).collect();
    // Of theirs it is not certain: some devices of RoCE say that they have a LID.
    let theirs = theirs.iter().map(|at| [Some(Address::Ip(at.ip)), infiniband(at)]);
    let theirs: Vec<Vec<_>> = theirs.map(|at| at.into_iter().flatten().collect()).collect();
    reachable_pairs(&own, &theirs)
}

/// A port as one of InfiniBand, if it says so.
fn infiniband(at: &PortAddress) -> Option<Address> {
    match at.ip {
        IpAddr::V6(gid) if at.is_infiniband() => Some(Address::InfiniBand(gid)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(ip: &str, lid: u16) -> PortAddress {
        PortAddress { ip: ip.parse().unwrap(), lid }
    }

    #[test]
    fn a_handshake_carries_gid_and_lid_over_the_wire() {
        for at in [port("fe80::2:c903:a0:1", 0xbfff), port("10.0.0.7", 0)] {
            let local_gid = Some(millstream_metadata::Gid::from_address(at.ip));
            let said = HandShakeDesc { local_lid: at.lid, local_gid, ..HandShakeDesc::default() };
            let heard = HandShakeDesc::from_json(&said.to_json()).unwrap();
            assert_eq!(sender_of(&heard), Some(at));
        }
        // Old peers leave out both. A LID alone says nothing.
        for (text, expected) in [
            ("{}", None),
            (r#"{"local_lid":7}"#, None),
            (
                r#"{"local_gid":"fe:80:00:00:00:00:00:00:00:00:00:00:00:00:00:01"}"#,
                Some(port("fe80::1", 0)),
            ),
        ] {
            let heard = HandShakeDesc::from_json(text.as_bytes()).unwrap();
            assert_eq!(sender_of(&heard), expected, "{text}");
        }
    }

    #[test]
    fn a_device_of_a_segment_is_where_its_descriptor_says() {
        let gid = r#""gid":"fe:80:00:00:00:00:00:00:00:02:c9:03:00:a0:00:01""#;
        for (text, lid) in [
            (format!(r#"{{"name":"mlx5_0","lid":42,{gid}}}"#), 42),
            (format!(r#"{{"name":"mlx5_0",{gid}}}"#), 0),
        ] {
            let device: DeviceDesc = serde_json::from_str(&text).unwrap();
            assert_eq!(port_address(&device), port("fe80::2:c903:a0:1", lid));
        }
    }

    #[test]
    fn ports_of_one_kind_reach_each_other() {
        let own = [port("fe80::1", 1), port("10.0.0.1", 0), port("fd00::2", 0)];
        let theirs = [
            port("fe80::2", 0),
            port("fe80::3", 3),
            // RoCE, whatever it says.
            port("10.0.0.3", 3),
            port("fd00::3", 1),
            // Of another subnet, if it is one of InfiniBand.
            port("fec0::3", 4),
        ];
        let pairs = pairs(&own, &theirs);
        let found: Vec<_> = pairs.iter().map(|pair| (pair.own, pair.peer)).collect();
        assert_eq!(found, [(0, 1), (1, 2), (2, 3), (2, 4)]);
        // What is not left out can be connected.
        for (here, there) in found {
            assert_eq!(own[here].check_peer(&theirs[there]), Ok(()));
        }
    }
}
