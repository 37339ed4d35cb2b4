//! What an endpoint says that it keeps: all of it, no more than it may, and nothing in the end.

mod common;

use common::{Options, Pair, pattern, piece};
use millstream_roce::{
    Node, QueuePairAttributes, QueuePairState, ReceiveRequest, SendOperation, Transmit, Usage,
};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;

fn usage(pair: &Pair, host: usize) -> Usage {
    let endpoint = &pair.hosts[host].endpoint;
    let (usage, limits) = (endpoint.usage(), endpoint.limits());
    assert!(usage.is_within(&limits), "{usage:?} {limits:?}");
    usage
}

/// Hands what one host sends to the other, which does not answer yet.
fn deliver(pair: &mut Pair, from: usize) {
    let mut transmit = Transmit::new();
    let now = pair.now;
    let mut datagrams = Vec::new();
    let host = &mut pair.hosts[from];
    while host.endpoint.poll_transmit(now, &mut transmit) {
        let mut datagram = Vec::new();
        assert!(transmit.assemble(&host.endpoint, host.address, 4791, 0, &mut datagram));
        datagrams.push(datagram);
    }
    datagrams.iter().for_each(|datagram| pair.inject(1 - from, datagram));
}

#[test]
fn everything_that_is_kept_is_counted() {
    let mut pair = Pair::with(Options { depth: 2, ..Options::default() });
    let local = pair.register(0, LOCAL, pattern(4096, 1));
    let remote = pair.register(1, REMOTE, pattern(4096, 2));
    assert_eq!(usage(&pair, 0), Usage::default());

    let read = SendOperation::Read { remote_address: REMOTE, remote_key: remote };
    let add = SendOperation::FetchAdd { remote_address: REMOTE, remote_key: remote, add: 1 };
    pair.post(0, 1, read, &[piece(local, LOCAL, 600)]);
    pair.post(0, 2, add, &[piece(local, LOCAL, 8)]);
    pair.post(0, 3, SendOperation::Send { immediate: None }, &[piece(local, LOCAL, 600)]);
    pair.receive(1, 4, &[piece(remote, REMOTE, 600)]);
    pair.receive(1, 5, &[]);
    assert_eq!(usage(&pair, 0), Usage { send_requests: 3, ..Usage::default() });
    assert_eq!(usage(&pair, 1), Usage { receive_requests: 2, ..Usage::default() });

    deliver(&mut pair, 0);
    let expected = Usage { send_requests: 3, fetches: 2, deadlines: 1, ..Usage::default() };
    assert_eq!(usage(&pair, 0), expected);
    let answers = Usage {
        receive_requests: 1,
        answers: 3,
        repeatable: 2,
        completions: 1,
        ..Usage::default()
    };
    assert_eq!(usage(&pair, 1), answers);

    deliver(&mut pair, 1);
    assert_eq!((usage(&pair, 0).send_requests, usage(&pair, 0).completions), (0, 3));
    assert_eq!(usage(&pair, 1), Usage { answers: 0, ..answers });

    for host in 0..2 {
        let host = &mut pair.hosts[host];
        let reset = QueuePairAttributes {
            state: Some(QueuePairState::Reset),
            ..QueuePairAttributes::default()
        };
        host.endpoint.modify_queue_pair(pair.now, host.qpn, &reset).unwrap();
        host.endpoint.poll_completions(host.queue, &mut Vec::new(), usize::MAX);
        host.endpoint.destroy_queue_pair(host.qpn);
        assert_eq!(host.endpoint.poll_timeout(), None);
    }
    assert_eq!([usage(&pair, 0), usage(&pair, 1)], [Usage::default(); 2]);
}

#[test]
fn shared_receive_requests_are_counted() {
    let mut pair = Pair::new();
    let endpoint = &mut pair.hosts[1].endpoint;
    let queue = endpoint.create_shared_receive_queue(common::DOMAIN, 3).unwrap();
    let request = ReceiveRequest { id: 1, pieces: [] };
    for count in 1..=3 {
        endpoint.post_shared_receive(queue, &request).unwrap();
        assert_eq!(endpoint.shared_receives_waiting(queue), count);
        assert_eq!(endpoint.usage().shared_receive_requests, count);
    }
    assert!(endpoint.post_shared_receive(queue, &request).is_err());
    assert_eq!(endpoint.usage(), Usage { shared_receive_requests: 3, ..Usage::default() });
    assert_eq!(endpoint.limits().shared_receive_requests, 3);
    endpoint.destroy_shared_receive_queue(queue).unwrap();
    assert_eq!(endpoint.usage(), Usage::default());
    assert_eq!(
        (endpoint.shared_receives_waiting(queue), endpoint.limits().shared_receive_requests),
        (0, 0)
    );
}
