//! Bytes go both ways, in each framing.

use std::time::{Duration, Instant};

use millstream_transfer::{
    Config, Opcode, Pieces, PiecesRequest, SubmitOptions, TcpConfig, TransferEngine, TransferPiece,
    TransferState,
};

use super::fixture::{Pair, descriptor, framings, pair};
use crate::common::{LONG, contents, pattern, private, request, shared};

/// A WRITE of version 1 may arrive after it is COMPLETED.
fn eventually(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LONG, "it never arrived");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn bytes_arrive_and_come_back_whatever_their_number() {
    const LENGTH: usize = 9 << 20;
    for (name, config) in framings() {
        let Pair { segment, remote, local, initiator, target: _target } = pair(config, LENGTH);
        for (seed, length) in
            [1, 7, 4096, 65_536, 65_537, (1 << 20) + 1, 8 << 20].into_iter().enumerate()
        {
            let bytes = pattern(length, seed as u64);
            local.write(3, &bytes).unwrap();
            let write = request(Opcode::Write, (&local, 3), &segment, 5, length as u64);
            let batch = initiator.submit_new(&[write], &SubmitOptions::default()).unwrap();
            assert!(initiator.wait(&batch, LONG), "{name}: {length}");
            let status = initiator.status(&batch, 0).unwrap();
            assert_eq!(status.state, TransferState::Completed, "{name}: {:?}", status.error);
            assert_eq!(status.transferred_bytes, length as u64);
            assert_eq!(status.transport, Some("tcp"));
            assert_eq!(status.unconfirmed, name == "version 1");
            match status.unconfirmed {
                true => eventually(|| contents(&remote, 5, length) == bytes),
                false => assert!(contents(&remote, 5, length) == bytes, "{name}: {length}"),
            }
            let other = pattern(length, 1000 + seed as u64);
            remote.write(5, &other).unwrap();
            let read = request(Opcode::Read, (&local, 3), &segment, 5, length as u64);
            initiator.submit_and_wait(&[read], LONG).unwrap();
            assert!(contents(&local, 3, length) == other, "{name}: {length}");
        }
        assert_eq!(contents(&remote, 0, 5), [0; 5], "{name}: nothing beside a request");
    }
}

#[test]
fn batches_of_many_requests_and_of_pieces() {
    const EACH: u64 = 3000;
    const COUNT: u64 = 700;
    for (name, config) in framings() {
        let Pair { segment, remote, local, initiator, target: _target } = pair(config, 5 << 20);
        let bytes = pattern(5 << 20, 9);
        local.write(0, &bytes).unwrap();
        let requests: Vec<_> = (0..COUNT)
            .map(|i| request(Opcode::Write, (&local, i * EACH), &segment, i * 2 * EACH, EACH))
            .collect();
        initiator.submit_and_wait(&requests, LONG).unwrap();
        let at = |i: u64| contents(&remote, (i * 2 * EACH) as usize, EACH as usize);
        let expected = |i: u64| &bytes[(i * EACH) as usize..][..EACH as usize];
        eventually(|| (0..COUNT).all(|i| at(i) == expected(i)));
        // Back, turned around.
        let first = TransferPiece {
            source: local.address(),
            target_offset: segment.address_of(0, 0, 1).unwrap(),
            length: EACH,
        };
        let list: Vec<_> = (0..COUNT)
            .map(|i| TransferPiece {
                source: first.source + (COUNT - 1 - i) * EACH,
                target_offset: first.target_offset + i * 2 * EACH,
                ..first
            })
            .collect();
        let reading = |pieces| PiecesRequest { opcode: Opcode::Read, target: segment.id(), pieces };
        let batch = initiator.allocate_batch(2).unwrap();
        initiator
            .submit_pieces(&batch, &[reading(Pieces::List(&list))], &SubmitOptions::default())
            .unwrap();
        assert!(initiator.wait(&batch, LONG));
        assert_eq!(initiator.status(&batch, 0).unwrap().state, TransferState::Completed, "{name}");
        for i in 0..COUNT {
            let found = contents(&local, ((COUNT - 1 - i) * EACH) as usize, EACH as usize);
            assert!(found == expected(i), "{name}: {i}");
        }
    }
}

#[test]
fn addresses_of_both_families_and_ports_of_a_range() {
    let any: std::net::IpAddr = std::net::Ipv6Addr::LOCALHOST.into();
    if std::net::TcpListener::bind((any, 0)).is_err() {
        assert_ne!(std::env::var("MILLSTREAM_REQUIRE").as_deref(), Ok("all"), "there is no IPv6");
        return eprintln!("skipped: there is no IPv6");
    }
    let ports = 20_000..=29_000;
    let config = TcpConfig { ports: Some(ports.clone()), ..TcpConfig::default() };
    let engine = || {
        let engine = TransferEngine::new(Config::new(any)).unwrap();
        engine.install_tcp(config.clone()).unwrap();
        engine
    };
    let (target, initiator) = (engine(), engine());
    assert!(ports.contains(&descriptor(&target).tcp_data_port.unwrap()));
    let (remote, local) = (shared(&target, 4096), private(&initiator, 4096));
    local.write(0, &[3; 4096]).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 4096);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    assert_eq!(contents(&remote, 0, 4096), [3; 4096]);
}

#[test]
fn descriptors_say_what_the_original_looks_for() {
    let Pair { target, .. } = pair(TcpConfig::default(), 100);
    let said = descriptor(&target);
    assert_eq!((said.protocol.as_str(), said.tcp_proto_version), ("tcp", Some(2)));
    assert_eq!(said.tcp_message_version, Some(3));
    let host = target.listening_at().ip().to_string();
    assert_eq!(said.tcp_data_host, Some(host));
    let one = super::fixture::engine(TcpConfig { version_one: true, ..TcpConfig::default() });
    let said = descriptor(&one);
    assert_eq!((said.tcp_proto_version, said.tcp_message_version), (Some(1), None));
}
