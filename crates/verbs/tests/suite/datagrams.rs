//! Unreliable datagrams between two devices.

use millstream_verbs::{
    CompletionOperation, DatagramDestination, GLOBAL_ROUTE_HEADER_LENGTH, PostError, Psn,
    QueuePair, QueuePairAttributes, QueuePairOptions, QueuePairState, ReceiveRequest,
    SendOperation, SendRequest, Transport,
};

use crate::harness::{
    CAPABILITIES, End, SEND, next_good, open, pattern, piece, read_from, register, request,
};

const KEY: u32 = 0x1111_1111;

/// A queue pair for datagrams, ready to send.
fn ready(end: &End) -> QueuePair {
    let options = QueuePairOptions {
        transport: Transport::UnreliableDatagram,
        ..QueuePairOptions::new(&end.completions, CAPABILITIES)
    };
    let pair = end.domain.create_queue_pair_with(&options).unwrap();
    for (state, queue_key, send_psn) in [
        (QueuePairState::Initialized, Some(KEY), None),
        (QueuePairState::ReadyToReceive, None, None),
        (QueuePairState::ReadyToSend, None, Some(Psn::new(0xff_ffff))),
    ] {
        let state = Some(state);
        pair.modify(&QueuePairAttributes { state, queue_key, send_psn, ..Default::default() })
            .unwrap();
        assert_eq!(Some(pair.state()), state);
    }
    pair
}

fn to(end: &End, pair: &QueuePair) -> Option<DatagramDestination> {
    let (address, qpn) = (end.device.address(), pair.number());
    Some(DatagramDestination { address, qpn, queue_key: KEY })
}

#[test]
fn messages_go_both_ways_between_queue_pairs_that_are_not_connected() {
    let ends = [open(), open(), open()];
    let pairs: Vec<_> = ends.iter().map(ready).collect();
    let length = ends[0].device.attributes().max_datagram_length as usize;
    assert!(length >= 1024, "{length}");
    let room = length + GLOBAL_ROUTE_HEADER_LENGTH;
    let mut sources = [1, 2, 3].map(|seed| pattern(length, seed));
    let mut targets = [0; 3].map(|_| vec![0; 2 * room]);
    let mut regions = Vec::new();
    for ((end, source), target) in ends.iter().zip(&mut sources).zip(&mut targets) {
        regions.push([register(end, source), register(end, target)]);
    }
    for (pair, [_, target]) in pairs.iter().zip(&regions) {
        let receive =
            |id: usize| ReceiveRequest { id: id as u64, pieces: [piece(target, id * room, room)] };
        pair.post_receive(&[receive(0), receive(1)]).unwrap();
    }
    // Each to both others, to the second with immediate data.
    for (i, (pair, [source, _])) in pairs.iter().zip(&regions).enumerate() {
        for (j, immediate) in [((i + 1) % 3, None), ((i + 2) % 3, Some(7))] {
            let datagram = to(&ends[j], &pairs[j]);
            let operation = SendOperation::Send { immediate };
            let request = request(j as u64, operation, piece(source, 0, length));
            pair.post_send(&[SendRequest { datagram, ..request }]).unwrap();
        }
    }
    let mut received = Vec::new();
    for end in &ends {
        let all = next_good(&end.completions, 4);
        let (sent, got): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|c| c.operation == CompletionOperation::Send);
        assert!(sent.len() == 2 && sent.iter().all(|c| c.length as usize == length), "{sent:?}");
        received.push(got);
    }
    drop(regions);
    for (i, received) in received.iter().enumerate() {
        for completion in received {
            assert_eq!(completion.length as usize, room);
            let from = pairs.iter().position(|pair| Some(pair.number()) == completion.source);
            let from = from.unwrap();
            assert_eq!(completion.immediate, ((from + 2) % 3 == i).then_some(7));
            let start = completion.id as usize * room;
            let (header, message) =
                targets[i][start..start + room].split_at(GLOBAL_ROUTE_HEADER_LENGTH);
            assert_eq!(message, sources[from]);
            if let std::net::IpAddr::V4(address) = ends[from].device.address() {
                assert_eq!(header[32..36], address.octets());
            }
        }
    }
}

#[test]
fn what_is_no_datagram_is_refused() {
    let a = open();
    let pair = ready(&a);
    let limit = a.device.attributes().max_datagram_length;
    let mut bytes = vec![0; limit as usize + 1];
    let region = register(&a, &mut bytes);
    let whole = piece(&region, 0, limit as usize + 1);
    let qpn = pair.number();
    let refused = pair.post_send(&[request(1, SEND, whole)]);
    assert_eq!(refused, Err((0, PostError::DestinationMissing(qpn))));
    let datagram = to(&a, &pair);
    let refused = pair.post_send(&[SendRequest { datagram, ..request(1, SEND, whole) }]);
    let length = u64::from(limit) + 1;
    assert_eq!(refused, Err((0, PostError::TooLong { length, limit })));
    let read = request(1, read_from(&region), piece(&region, 0, 8));
    let refused = pair.post_send(&[SendRequest { datagram, ..read }]);
    assert_eq!(refused, Err((0, PostError::NotADatagram(qpn))));
    drop(region);
}

#[test]
fn a_connection_takes_no_other_destination() {
    let [a, _b] = crate::harness::two();
    let datagram = to(&a, &a.pair);
    let elsewhere = SendRequest { datagram, ..request(1, SEND, Default::default()) };
    let refused = a.pair.post_send(&[elsewhere]);
    assert_eq!(refused, Err((0, PostError::DestinationNotAllowed(a.pair.number()))));
}
