//! Bytes through real sockets: every byte and every ICRC is checked by the receiving node.

mod common;

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::time::Duration;

use common::{Signal, StreamNode, address, config, has_ipv6, start};
use millstream_net::udp::{ReceiveBatch, SocketConfig, UdpSocket};
use millstream_net::{DriverCounters, ProgressConfig};
use socket2::{Domain, SockAddr, Socket, Type};

/// Full packets with a shorter last one, single odd ones, runs of tiny ones: groups of all kinds.
fn mixed_lengths() -> Vec<usize> {
    let mut lengths = vec![4096; 20];
    lengths.extend([100, 4096, 1, 0, 3, 4096, 4096, 2]);
    lengths.extend([64; 130]);
    lengths
}

/// Sends 5000 datagrams to a peer and back; returns what the first sender's driver did.
fn exchange(segmentation_offload: bool) -> DriverCounters {
    const TOTAL: usize = 5000;
    let (here, there) = (address(), address());
    let signal = Signal::default();
    let run = |own, peer| {
        let mut node = StreamNode::new(own, peer, &mixed_lengths());
        node.window = 100;
        start(ProgressConfig { segmentation_offload, ..config(own) }, node, &signal)
    };
    let ends = [run(here, there), run(there, here)];
    for end in &ends {
        end.shared().lock().unwrap().total = TOTAL;
    }
    for end in &ends {
        let mut highest = 0;
        signal.wait_until("all datagrams", || {
            let node = end.shared().lock_without_waking().unwrap();
            highest = node.highest_identification;
            node.received == TOTAL && node.acknowledged == TOTAL
        });
        let info = end.shared().socket_info();
        assert_eq!(info.address, if std::ptr::eq(end, &ends[0]) { here } else { there });
        assert!(segmentation_offload || !info.segmentation && !info.coalescing);
        if info.segmentation && info.coalescing {
            assert!(highest > 0, "segmented messages were expected");
        } else {
            assert_eq!(highest, 0);
        }
    }
    let shared = ends[0].shared();
    // Published after the round that was waited for.
    signal.wait_until("the counters", || shared.driver_counters().sent_datagrams > TOTAL as u64);
    let counters = shared.driver_counters();
    assert_eq!((counters.unsent_datagrams, counters.too_long_datagrams), (0, 0));
    assert_eq!((counters.truncated_messages, counters.overflowed_messages), (0, 0));
    counters
}

#[test]
fn bytes_and_icrcs_arrive_with_segmentation() {
    let counters = exchange(true);
    if counters.segmentation_refusals == 0 {
        assert!(counters.sent_messages < counters.sent_datagrams / 2, "{counters:?}");
    }
}

#[test]
fn bytes_and_icrcs_arrive_without_segmentation() {
    let counters = exchange(false);
    assert_eq!(counters.sent_messages, counters.sent_datagrams);
    assert_eq!(counters.segmentation_refusals, 0);
}

#[test]
fn ipv6_to_oneself() {
    if !has_ipv6("ipv6_to_oneself") {
        return;
    }
    const TOTAL: usize = 2000;
    let own = IpAddr::V6(Ipv6Addr::LOCALHOST);
    for segmentation_offload in [true, false] {
        let mut node = StreamNode::new(own, own, &mixed_lengths());
        node.total = TOTAL;
        let signal = Signal::default();
        let config = ProgressConfig { port: 0, segmentation_offload, ..config(own) };
        let end = start(config, node, &signal);
        signal.wait_until("all datagrams", || {
            let node = end.shared().lock_without_waking().unwrap();
            node.received == TOTAL && node.acknowledged == TOTAL
        });
    }
}

#[test]
fn datagrams_that_fit_no_packet_are_counted_and_the_rest_arrives() {
    let (here, there) = (address(), address());
    let signal = Signal::default();
    // 12 + 65,491 + 1 + 4 bytes: one more than the longest.
    let mut node = StreamNode::new(here, there, &[65_491, 40, 40, 40]);
    node.total = 1;
    let sender = start(config(here), node, &signal);
    signal.wait_until("the refusal", || sender.shared().driver_counters().too_long_datagrams == 1);
    let mut node = StreamNode::new(there, here, &[65_491, 40, 40, 40]);
    node.received = 1;
    let receiver = start(config(there), node, &signal);
    sender.shared().lock().unwrap().total = 4;
    signal
        .wait_until("the rest", || receiver.shared().lock_without_waking().unwrap().received == 4);
}

#[test]
fn peers_that_are_not_there_do_no_harm() {
    let (here, nobody, there) = (address(), address(), address());
    let signal = Signal::default();
    let mut node = StreamNode::new(here, nobody, &[1000]);
    node.total = 2000;
    node.window = usize::MAX;
    let lonely = start(config(here), node, &signal);
    signal.wait_until("sending to nobody", || {
        lonely.shared().driver_counters().sent_datagrams >= 2000
    });
    // It still hears others.
    let mut node = StreamNode::new(there, here, &[1000]);
    node.total = 10;
    let other = start(config(there), node, &signal);
    signal.wait_until("an answer", || {
        other.shared().lock_without_waking().unwrap().acknowledged == 10
    });
    assert!(lonely.shared().failure().is_none());
}

fn set_traffic_class(socket: &Socket, address: IpAddr, class: libc::c_int) {
    let (level, option) = match address {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    };
    // SAFETY: `class` is an integer of the length that is passed, alive during the call.
    let result = unsafe {
        let length = size_of_val(&class) as libc::socklen_t;
        libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const class).cast(), length)
    };
    assert_eq!(result, 0);
}

#[test]
fn the_congestion_mark_is_seen() {
    let mut locals = vec![address()];
    if has_ipv6("the_congestion_mark_is_seen over IPv6") {
        locals.push(Ipv6Addr::LOCALHOST.into());
    }
    for address in locals {
        let buffer_length = 1 << 16;
        let receiver = UdpSocket::open(&SocketConfig {
            address,
            port: 0,
            segmentation_offload: true,
            buffer_length,
        })
        .unwrap();
        let to = SockAddr::from(std::net::SocketAddr::new(address, receiver.info().port));
        let sender = Socket::new(Domain::for_address(to.as_socket().unwrap()), Type::DGRAM, None);
        let sender = sender.unwrap();
        let mut batch = ReceiveBatch::new(2);
        let mut counters = DriverCounters::default();
        for class in 0..4 {
            set_traffic_class(&sender, address, 0xb8 | class);
            sender.send_to(b"marked", &to).unwrap();
            assert!(receiver.wait_readable(Duration::from_secs(10)).unwrap());
            assert_eq!(receiver.receive(&mut batch, &mut counters).unwrap(), 1);
            let (meta, datagram) = batch.datagrams().next().unwrap();
            assert_eq!(datagram, b"marked");
            assert_eq!(meta.congestion_experienced, class == 3, "{class}");
        }
    }
}

#[test]
fn what_is_sent_has_the_traffic_class_that_is_set() {
    let open = |address| {
        let (port, buffer_length) = (0, 1 << 16);
        let config = SocketConfig { address, port, segmentation_offload: true, buffer_length };
        UdpSocket::open(&config).unwrap()
    };
    let sender = open(std::net::Ipv4Addr::LOCALHOST.into());
    let traffic_class = || socket2::SockRef::from(&sender).tos_v4().unwrap();
    assert_eq!(traffic_class(), 0);
    for class in [0b10, 0xb8, 0xff] {
        sender.set_traffic_class(class).unwrap();
        assert_eq!(traffic_class(), u32::from(class));
    }
}

#[test]
fn what_a_full_receive_buffer_dropped_is_counted() {
    const SENT: u64 = 200;
    let receiver = UdpSocket::open(&SocketConfig {
        address: address(),
        port: 0,
        segmentation_offload: true,
        buffer_length: 1 << 14,
    })
    .unwrap();
    let info = receiver.info();
    let sender = std::net::UdpSocket::bind((address(), 0)).unwrap();
    let to = (info.address, info.port);
    for _ in 0..SENT {
        sender.send_to(&[0; 1000], to).unwrap();
    }
    let mut batch = ReceiveBatch::new(8);
    let mut counters = DriverCounters::default();
    while receiver.receive(&mut batch, &mut counters).unwrap() > 0 {}
    assert!(counters.received_datagrams < SENT, "the buffer is too large for this test");
    // The next one brings the count.
    sender.send_to(&[0; 1000], to).unwrap();
    assert_eq!(receiver.receive(&mut batch, &mut counters).unwrap(), 1);
    assert_eq!(counters.overflowed_messages, SENT + 1 - counters.received_datagrams);
}
