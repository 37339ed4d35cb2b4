//! Ports of InfiniBand are refused; and for how long a rank joins.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;

use millstream_inc::protocol::{Commanded, FrameDecoder, encode};
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

fn address(last: u8) -> IpAddr {
    IpAddr::from([127, 97, std::process::id() as u8, last])
}

#[test]
fn who_joins_with_a_port_of_infiniband_is_refused_before_anybody_is_asked() {
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

/// For how long a rank says that it waits.
fn patience_of(stream: &mut TcpStream) -> Duration {
    let mut decoder = FrameDecoder::new();
    loop {
        match decoder.next_message().unwrap() {
            Some(ToController::Join(hello)) => return Duration::from_millis(hello.timeout_ms),
            Some(message) => panic!("it says {message:?}"),
            None => {
                let mut bytes = [0; 4096];
                let count = stream.read(&mut bytes).unwrap();
                assert_ne!(count, 0, "it does not join");
                decoder.extend(&bytes[..count]);
            }
        }
    }
}

#[test]
fn the_time_for_which_the_only_controller_does_not_lead_is_not_granted_again() {
    const TIMEOUT: Duration = Duration::from_secs(4);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let controller = listener.local_addr().unwrap();
    let (said, patience) = mpsc::channel();
    thread::spawn(move || {
        let reason = Refusal::NotLeader { leader: None, detail: "nobody leads".to_owned() };
        let refused = Commanded { term: 1, message: FromController::Refused { reason } };
        let refused = encode(&refused).unwrap();
        for answer in [Some(&refused), Some(&refused), Some(&refused), None] {
            let mut stream = listener.accept().unwrap().0;
            said.send(patience_of(&mut stream)).unwrap();
            // In the end it would wait for the others, and is lost.
            if let Some(answer) = answer {
                stream.write_all(answer).unwrap();
            }
        }
    });
    let device = Device::open_soft(&SoftConfig::new(address(4))).unwrap();
    let config = JoinConfig {
        path: Path::Switch,
        timeout: TIMEOUT,
        ..JoinConfig::new(controller, "g", 2, 1, &device)
    };
    let error = join(&config, is_rank_taken, &mut |_| {}).err().unwrap();
    assert!(matches!(error, JoinError::Lost { .. }), "{error}");
    let patience: Vec<Duration> = patience.try_iter().collect();
    assert_eq!(patience.len(), 4, "{patience:?}");
    for (pauses, patience) in (0_u32..).zip(patience) {
        assert!(patience <= TIMEOUT - pauses * PAUSE, "{patience:?} after {pauses} pauses");
    }
}
