//! What an engine is made with has its effect.

mod common;

use std::io::{ErrorKind, Read};
use std::net::IpAddr;

use common::{LONG, address, engine_with, private, request, shared};
use millstream_transfer::{Config, Opcode, RdmaConfig, Settings, Sources, TransferEngine};
use socket2::{Domain, Protocol, Socket, Type};

#[test]
fn a_name_without_a_port_is_that_of_an_engine_at_the_default_port() {
    let (own, other) = (address(), address());
    let target = TransferEngine::new(common::config(own)).unwrap();
    target.install_rdma(RdmaConfig::new(&[own])).unwrap();
    let _buffer = shared(&target, 100);
    let default_port = target.name().parse::<std::net::SocketAddr>().unwrap().port();
    let initiator =
        TransferEngine::new(Config { default_port: Some(default_port), ..common::config(other) })
            .unwrap();
    let segment = initiator.open_segment(&own.to_string()).unwrap();
    assert_eq!(segment.buffers().len(), 1);
    // One segment, by both names.
    assert_eq!(initiator.open_segment(target.name()).unwrap().id(), segment.id());
}

#[test]
fn engines_of_one_partition_reach_each_other_and_no_others() {
    let config = |partition_key_index| {
        let mut config = RdmaConfig {
            partition_key_index,
            // A peer counts as gone soon.
            acknowledge_timeout: 10,
            retry_count: 0,
            ..RdmaConfig::new(&[address()])
        };
        config.soft.partition_keys = vec![0xffff, 0x8001];
        config
    };
    let target = engine_with(config(1));
    let _buffer = shared(&target, 100);
    for (index, reached) in [(1, true), (0, false)] {
        let initiator = engine_with(config(index));
        let local = private(&initiator, 100);
        let segment = initiator.open_segment(target.name()).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, 100);
        let result = initiator.submit_and_wait(&[write], LONG);
        assert_eq!(result.is_ok(), reached, "{index}: {result:?}");
    }
}

/// IPv4 packets of all interfaces, without their link headers; `None`, and the test is skipped, without CAP_NET_RAW.
fn capture(test: &str) -> Option<Socket> {
    let protocol = Protocol::from(i32::from((libc::ETH_P_IP as u16).to_be()));
    let socket = match Socket::new(Domain::PACKET, Type::DGRAM, Some(protocol)) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let required = std::env::var("MILLSTREAM_REQUIRE").is_ok_and(|value| value == "all");
            assert!(!required, "{test} needs CAP_NET_RAW, which is not to be had here");
            println!("skipped {test}: it needs CAP_NET_RAW");
            return None;
        }
        result => result.unwrap(),
    };
    socket.set_recv_buffer_size(4 << 20).unwrap();
    // What is read was sent before.
    socket.set_nonblocking(true).unwrap();
    Some(socket)
}

#[test]
fn packets_have_the_traffic_class_of_the_settings() {
    let test = "packets_have_the_traffic_class_of_the_settings";
    let settings = |class: &str| {
        let variables = vec![("MC_IB_TC".to_owned(), class.to_owned())];
        Settings::load(&Sources { variables, ..Sources::default() }).unwrap()
    };
    let (here, there) = (address(), address());
    let target = engine_with(settings("-1").rdma(&[there]));
    let initiator = engine_with(settings("184").rdma(&[here]));
    let _remote = shared(&target, 100);
    let local = private(&initiator, 100);
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 100);
    // The WRITE, and what acknowledges it. Other tests' packets may take the room of the capture, so there are more.
    let ways = [(here, there, 184), (there, here, 0)];
    let mut seen = [false; 2];
    for _ in 0..100 {
        let Some(mut capture) = capture(test) else { return };
        initiator.submit_and_wait(std::slice::from_ref(&write), LONG).unwrap();
        let mut packet = vec![0; 1 << 16];
        while let Ok(length) = capture.read(&mut packet) {
            let address =
                |at: usize| IpAddr::from(<[u8; 4]>::try_from(&packet[at..at + 4]).unwrap());
            let is_udp = length >= 28 && packet[9] == 17;
            let way = |&(from, to, _): &_| (from, to) == (address(12), address(16));
            if let Some(index) = ways.iter().position(way).filter(|_| is_udp) {
                let (from, _, class) = ways[index];
                assert_eq!(packet[1], class, "from {from}");
                seen[index] = true;
            }
        }
        if seen == [true; 2] {
            return;
        }
    }
    panic!("what was seen of {ways:?}: {seen:?}");
}

#[test]
fn tasks_that_begin_anywhere_arrive_too() {
    let config =
        || RdmaConfig { path_round_robin: false, ..RdmaConfig::new(&[address(), address()]) };
    let (target, initiator) = (engine_with(config()), engine_with(config()));
    let remote = shared(&target, 100_000);
    let local = private(&initiator, 100_000);
    local.write(0, &common::pattern(100_000, 7)).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    let writes: Vec<_> = (0..100)
        .map(|index| request(Opcode::Write, (&local, index * 1000), &segment, index * 1000, 1000))
        .collect();
    initiator.submit_and_wait(&writes, LONG).unwrap();
    assert!(common::contents(&remote, 0, 100_000) == common::pattern(100_000, 7));
}

#[test]
fn the_text_of_a_configuration_has_no_password() {
    let metadata = "redis://user:hunter2@192.0.2.1:6379/0".to_owned();
    let config = Config { metadata, ..common::config(std::net::Ipv4Addr::LOCALHOST.into()) };
    let text = format!("{config:?}");
    assert!(text.contains("192.0.2.1:6379") && !text.contains("hunter2"), "{text}");
}
