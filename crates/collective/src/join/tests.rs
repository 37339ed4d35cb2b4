//! Ports of InfiniBand are refused.

use std::net::SocketAddr;

use millstream_verbs::SoftConfig;

use super::*;
use crate::joining::is_rank_taken;

#[test]
fn a_rank_has_no_port_of_infiniband() {
    let port = |lid| PortAddress { ip: "fe80::1".parse().unwrap(), lid };
    assert!(check_ports([("mlx5_0", port(0)), ("mlx5_1", port(0))].into_iter()).is_ok());
    let refused = check_ports([("mlx5_0", port(0)), ("mlx5_1", port(7))].into_iter());
    let error = refused.unwrap_err().to_string();
    assert!(error.starts_with("mlx5_1 has a port of InfiniBand"), "{error}");
}

#[test]
fn who_joins_with_a_port_of_infiniband_is_refused_before_anybody_is_asked() {
    let address = |last| IpAddr::from([127, 97, std::process::id() as u8, last]);
    let open = |last| Device::open_soft(&SoftConfig::new(address(last))).unwrap();
    let (first, second) = (open(1), open(2));
    // Nobody listens there.
    let controller = SocketAddr::new(address(3), 1);
    let mut config = JoinConfig::new(controller, "g", 1, 0, &first);
    config.more_devices.push(second.clone());
    let join = |infiniband: Option<&Device>| {
        let port = |device: &Device| match infiniband {
            Some(it) if it.name() == device.name() => {
                PortAddress { ip: "fe80::1".parse().unwrap(), lid: 7 }
            }
            _ => device.port_address(),
        };
        join_at(&config, port, is_rank_taken, &mut |_| {}).err().unwrap()
    };
    for device in [&first, &second] {
        let error = join(Some(device));
        let named = matches!(&error, JoinError::InfiniBand { device: it } if it == device.name());
        assert!(named, "{error}");
    }
    let error = join(None);
    assert!(matches!(error, JoinError::Unreachable { .. }), "{error}");
}
