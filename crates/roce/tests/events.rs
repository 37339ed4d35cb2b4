//! What an endpoint tells without being asked: each event when it should come, once, and no other.

mod common;

use std::net::IpAddr;

use common::forge::Forge;
use common::{Options, Pair, connect, meta, pattern};
use millstream_roce::{AsyncEvent, Instant, Node, QueuePairAttributes, QueuePairState as State};
use millstream_wire::Opcode;

const REMOTE: u64 = 0x2000_0000_0000;
const FIRST: u32 = 100;

fn options() -> Options {
    Options { psn: [FIRST, 200], ..Options::default() }
}

fn go(pair: &mut Pair, state: State) {
    let (now, host) = (pair.now, &mut pair.hosts[1]);
    let attributes = QueuePairAttributes { state: Some(state), ..Default::default() };
    host.endpoint.modify_queue_pair(now, host.qpn, &attributes).unwrap();
}

fn events(pair: &mut Pair) -> Vec<AsyncEvent> {
    std::iter::from_fn(|| pair.hosts[1].endpoint.poll_event()).collect()
}

/// Brings host 1 from RESET to RTR.
fn receive_only(pair: &mut Pair) {
    go(pair, State::Reset);
    let steps = connect(&options(), 1, pair.hosts[0].address, pair.hosts[0].qpn);
    for attributes in &steps[..2] {
        let host = &mut pair.hosts[1];
        host.endpoint.modify_queue_pair(Instant::ZERO, host.qpn, attributes).unwrap();
    }
}

#[test]
fn the_first_packet_in_rtr_is_an_event_once_for_each_connection() {
    let mut pair = Pair::with(options());
    let key = pair.register(1, REMOTE, pattern(8, 0));
    let write = |psn| {
        move |pair: &Pair| {
            Forge::new(pair, 1, Opcode::RcWriteOnly, psn).reth(REMOTE, key, 4).payload(b"good")
        }
    };
    for _ in 0..2 {
        receive_only(&mut pair);
        // What is dropped says nothing about the peer.
        let mut foreign = write(FIRST)(&pair);
        foreign.bth.partition_key = 0x8001;
        foreign.inject(&mut pair);
        let stranger = meta(IpAddr::from([10, 0, 0, 9]), pair.hosts[1].address);
        let good = write(FIRST)(&pair).datagram(&pair);
        pair.hosts[1].endpoint.handle_datagram(Instant::ZERO, &stranger, &good);
        let mut damaged = good.clone();
        damaged[20] ^= 1;
        pair.inject(1, &damaged);
        assert_eq!(events(&mut pair), []);
        let established = AsyncEvent::CommunicationEstablished(pair.hosts[1].qpn);
        pair.inject(1, &good);
        assert_eq!(events(&mut pair), [established]);
        write(FIRST + 1)(&pair).inject(&mut pair);
        assert_eq!(events(&mut pair), []);
    }
    // In RTS the application has said itself that the peer is there.
    let mut pair = Pair::with(options());
    let key = pair.register(1, REMOTE, pattern(8, 0));
    Forge::new(&pair, 1, Opcode::RcWriteOnly, FIRST)
        .reth(REMOTE, key, 4)
        .payload(b"good")
        .inject(&mut pair);
    assert_eq!(events(&mut pair), []);
    assert_eq!(pair.region(1, key)[..4], *b"good");
}

#[test]
fn a_device_that_fails_says_so_once_before_its_queue_pairs() {
    let mut pair = Pair::with(options());
    let qpn = pair.hosts[1].qpn;
    for _ in 0..2 {
        pair.hosts[1].endpoint.fail_all();
    }
    assert_eq!(events(&mut pair), [AsyncEvent::DeviceFatal, AsyncEvent::QueuePairFatal(qpn)]);
}

#[test]
fn events_that_nobody_takes_are_bounded_and_the_lost_are_counted() {
    let mut pair = Pair::with(options());
    for _ in 0..1500 {
        go(&mut pair, State::SendQueueDrained);
        go(&mut pair, State::ReadyToSend);
    }
    assert_eq!(pair.hosts[1].endpoint.events_waiting(), 1024);
    assert_eq!(pair.counters(1).events_lost, 1500 - 1024);
    assert_eq!(events(&mut pair).len(), 1024);
    assert_eq!(pair.hosts[1].endpoint.events_waiting(), 0);
}

#[test]
fn only_failures_name_a_failed_queue_pair() {
    let pair = Pair::with(options());
    let (qpn, queue) = (pair.hosts[1].qpn, pair.hosts[1].queue);
    for event in [
        AsyncEvent::QueuePairFatal(qpn),
        AsyncEvent::QueuePairRequestError(qpn),
        AsyncEvent::QueuePairAccessError(qpn),
    ] {
        assert_eq!(event.failed_queue_pair(), Some(qpn));
    }
    for event in [
        AsyncEvent::CommunicationEstablished(qpn),
        AsyncEvent::SendQueueDrained(qpn),
        AsyncEvent::CompletionQueueOverrun(queue),
        AsyncEvent::DeviceFatal,
    ] {
        assert_eq!(event.failed_queue_pair(), None);
    }
}
