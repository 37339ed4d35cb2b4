//! Bytes arrive, whole and in order, and completions say so.

use millstream_verbs::{
    CompletionOperation, MAX_SCATTER_GATHER, Piece, ReceiveRequest, SendOperation, SendRequest,
};

use crate::harness::{
    CAPABILITIES, End, SEND, next_good, pattern, piece, read_from, register, request, two,
    two_without_offload, write_to,
};

#[test]
fn every_kind_of_message_moves_many_packets() {
    every_kind_of_message(two());
}

#[test]
fn every_kind_of_message_moves_without_segmentation_offload() {
    every_kind_of_message(two_without_offload());
}

fn every_kind_of_message([a, b]: [End; 2]) {
    let length = 1_000_001;
    let mut source = pattern(length, 7);
    let (mut target, mut written, mut back) = (vec![0; length], vec![0; length], vec![0; length]);
    let source_region = register(&a, &mut source);
    let target_region = register(&b, &mut target);
    let written_region = register(&b, &mut written);
    let back_region = register(&a, &mut back);
    let pieces = [piece(&target_region, 0, length)];
    b.pair.post_receive(&[ReceiveRequest { id: 1, pieces }]).unwrap();
    let whole = piece(&source_region, 0, length);
    let read = request(3, read_from(&written_region), piece(&back_region, 0, length));
    a.pair
        .post_send(&[
            request(1, SEND, whole),
            request(2, write_to(&written_region, 0), whole),
            read,
        ])
        .unwrap();
    let sent = next_good(&a.completions, 3);
    let seen: Vec<_> = sent.iter().map(|c| (c.id, c.operation, c.length, c.qpn)).collect();
    let (length32, qpn) = (length as u32, a.pair.number());
    assert_eq!(
        seen,
        [
            (1, CompletionOperation::Send, length32, qpn),
            (2, CompletionOperation::Write, length32, qpn),
            (3, CompletionOperation::Read, length32, qpn),
        ]
    );
    let received = next_good(&b.completions, 1)[0];
    assert_eq!(received.operation, CompletionOperation::Receive);
    assert_eq!((received.id, received.length), (1, length32));
    assert_eq!((received.qpn, received.immediate), (b.pair.number(), None));
    drop([source_region, target_region, written_region, back_region]);
    assert_eq!(target, source);
    assert_eq!(written, source);
    assert_eq!(back, source);
}

#[test]
fn immediate_data_arrives_as_it_was_given() {
    let [a, b] = two();
    let (mut source, mut target) = (pattern(5000, 1), vec![0; 5000]);
    let source_region = register(&a, &mut source);
    let target_region = register(&b, &mut target);
    let pieces = [piece(&target_region, 0, 100)];
    let empty = [Piece::default()];
    b.pair
        .post_receive(&[
            ReceiveRequest { id: 10, pieces },
            ReceiveRequest { id: 11, pieces: empty },
            ReceiveRequest { id: 12, pieces: empty },
        ])
        .unwrap();
    let write = |immediate| SendOperation::Write {
        remote_address: target_region.address(),
        remote_key: target_region.remote_key(),
        immediate,
    };
    let immediate = Some(0x0102_0304);
    a.pair
        .post_send(&[
            request(1, SendOperation::Send { immediate }, piece(&source_region, 0, 100)),
            request(2, write(Some(u32::MAX - 1)), piece(&source_region, 0, 5000)),
            request(3, write(None), piece(&source_region, 0, 10)),
            request(4, write(Some(0)), piece(&source_region, 0, 1)),
        ])
        .unwrap();
    let sent = next_good(&a.completions, 4);
    assert!(sent.iter().all(|c| c.immediate.is_none()), "{sent:?}");
    let received: Vec<_> = next_good(&b.completions, 3)
        .iter()
        .map(|c| (c.id, c.operation, c.length, c.immediate))
        .collect();
    assert_eq!(
        received,
        [
            (10, CompletionOperation::Receive, 100, immediate),
            (11, CompletionOperation::ReceiveWrite, 5000, Some(u32::MAX - 1)),
            (12, CompletionOperation::ReceiveWrite, 1, Some(0)),
        ]
    );
}

#[test]
fn pieces_are_gathered_and_scattered() {
    let [a, b] = two();
    let (mut source, mut target) = (pattern(10_000, 2), vec![0; 10_000]);
    let source_region = register(&a, &mut source);
    let target_region = register(&b, &mut target);
    let from = [(5, 3000), (4000, 0), (9000, 1), (3005, 900)]
        .map(|(offset, length)| piece(&source_region, offset, length));
    let into = [(0, 1), (100, 2900), (7000, 1000), (50, 0)]
        .map(|(offset, length)| piece(&target_region, offset, length));
    let pieces = &into;
    b.pair.post_receive(&[ReceiveRequest { id: 1, pieces }]).unwrap();
    let pieces = &from;
    let message = SendRequest { solicited: true, ..SendRequest::new(2, SEND, pieces) };
    a.pair.post_send(&[message]).unwrap();
    assert_eq!(next_good(&a.completions, 1)[0].length, 3901);
    assert_eq!(next_good(&b.completions, 1)[0].length, 3901);
    drop([source_region, target_region]);
    let message = [&source[5..3005], &source[9000..9001], &source[3005..3905]].concat();
    let mut expected = vec![0; 10_000];
    expected[0] = message[0];
    expected[100..3000].copy_from_slice(&message[1..2901]);
    expected[7000..8000].copy_from_slice(&message[2901..]);
    assert_eq!(target, expected);
}

/// As many pieces as a request may have, on both sides, of every operation that has them.
#[test]
fn a_request_has_as_many_pieces_as_the_device_says() {
    let [a, b] = two();
    let most = a.device.attributes().max_scatter_gather;
    assert!((1..=MAX_SCATTER_GATHER).contains(&most), "{most}");
    let (mut source, mut target) = (pattern(16_384, 2), vec![0; 16_384]);
    let (mut written, mut back) = (vec![0; 16_384], vec![0; 16_384]);
    let [source_region, back_region] = [&mut source, &mut back].map(|bytes| register(&a, bytes));
    let [target_region, written_region] =
        [&mut target, &mut written].map(|bytes| register(&b, bytes));
    // Each of its own length, with gaps between them.
    let lengths = (0..most).map(|index| 1 + index * 60);
    let pieces = |region| {
        let pieces: Vec<_> = lengths
            .clone()
            .enumerate()
            .map(|(index, length)| piece(region, index * 1024, length))
            .collect();
        pieces
    };
    let total: usize = lengths.clone().sum();
    b.pair.post_receive(&[ReceiveRequest { id: 1, pieces: pieces(&target_region) }]).unwrap();
    let requests = [
        SendRequest::new(1, SEND, pieces(&source_region)),
        SendRequest::new(2, write_to(&written_region, 0), pieces(&source_region)),
        SendRequest {
            fence: true,
            ..SendRequest::new(3, read_from(&written_region), pieces(&back_region))
        },
    ];
    a.pair.post_send(&requests).unwrap();
    let sent = next_good(&a.completions, 3);
    assert!(sent.iter().all(|c| c.length as usize == total), "{sent:?}");
    assert_eq!(next_good(&b.completions, 1)[0].length as usize, total);
    drop([source_region, target_region, written_region, back_region]);
    let mut whole = Vec::new();
    let mut expected = vec![0; 16_384];
    for (index, length) in lengths.enumerate() {
        let bytes = &source[index * 1024..][..length];
        whole.extend_from_slice(bytes);
        expected[index * 1024..][..length].copy_from_slice(bytes);
    }
    assert!(target == expected && back == expected);
    assert!(written[..total] == whole);
}

#[test]
fn messages_without_bytes_complete() {
    let [a, b] = two();
    b.pair.post_receive(&[ReceiveRequest { id: 1, pieces: [] }]).unwrap();
    let (remote_address, remote_key) = (0, 0);
    let operations = [
        SEND,
        SendOperation::Write { remote_address, remote_key, immediate: None },
        SendOperation::Read { remote_address, remote_key },
    ];
    for (id, operation) in (1..).zip(operations) {
        a.pair.post_send(&[request(id, operation, Piece::default())]).unwrap();
        let sent = next_good(&a.completions, 1)[0];
        assert_eq!((sent.id, sent.length), (id, 0));
    }
    assert_eq!(next_good(&b.completions, 1)[0].length, 0);
}

#[test]
fn only_signaled_requests_complete_and_all_of_them_in_order() {
    let [a, b] = two();
    let (mut source, mut target) = (pattern(4096, 3), vec![0; 4096]);
    let source_region = register(&a, &mut source);
    let target_region = register(&b, &mut target);
    // Several times what the queue holds.
    for round in 0..10_u64 {
        let requests: Vec<_> = (0..32)
            .map(|index| {
                let offset = index * 128;
                let operation = write_to(&target_region, offset);
                let bytes = piece(&source_region, offset as usize, 128);
                let signaled = index % 8 == 7;
                SendRequest { signaled, ..request(round * 32 + index, operation, bytes) }
            })
            .collect();
        a.pair.post_send(&requests).unwrap();
        let ids: Vec<_> = next_good(&a.completions, 4).iter().map(|c| c.id).collect();
        assert_eq!(ids, [7, 15, 23, 31].map(|index| round * 32 + index));
    }
    assert_eq!(a.completions.poll(&mut Vec::new(), 1), 0);
    drop([source_region, target_region]);
    assert_eq!(target, source);
}

/// What was read is sent on: a fenced SEND waits until it is there. Without the fence the bytes of
/// the round before would go out.
#[test]
fn a_fenced_send_passes_on_what_was_read_before_it() {
    let [a, b] = two();
    let length = 50_000;
    let mut here = vec![0; length];
    let here_region = register(&a, &mut here);
    for round in 0..20 {
        let (mut source, mut target) = (pattern(length, round), vec![0; length]);
        let (source_region, target_region) = (register(&b, &mut source), register(&b, &mut target));
        let id = u64::from(round);
        let pieces = [piece(&target_region, 0, length)];
        b.pair.post_receive(&[ReceiveRequest { id, pieces }]).unwrap();
        let bytes = piece(&here_region, 0, length);
        let read = request(id, read_from(&source_region), bytes);
        let send = SendRequest { fence: true, ..request(id, SEND, bytes) };
        a.pair.post_send(&[read, send]).unwrap();
        next_good(&a.completions, 2);
        next_good(&b.completions, 1);
        drop((source_region, target_region));
        assert!(target == source, "round {round}");
    }
    drop(here_region);
}

#[test]
fn a_full_queue_takes_more_after_completions() {
    let [a, b] = two();
    let (mut source, mut target) = (pattern(64, 4), vec![0; 64]);
    let source_region = register(&a, &mut source);
    let target_region = register(&b, &mut target);
    let limit = CAPABILITIES.max_send_requests;
    let requests: Vec<_> = (0..limit as u64 * 3)
        .map(|id| request(id, write_to(&target_region, 0), piece(&source_region, 0, 64)))
        .collect();
    let mut completions = Vec::new();
    let mut posted = 0;
    while completions.len() < requests.len() {
        match a.pair.post_send(&requests[posted..]) {
            Ok(()) => posted = requests.len(),
            Err((accepted, error)) => {
                assert_eq!(error, millstream_verbs::PostError::QueueFull { limit });
                posted += accepted;
            }
        }
        completions.extend(next_good(&a.completions, 1));
    }
    assert!(completions.iter().map(|c| c.id).eq(0..requests.len() as u64));
}

#[test]
fn both_directions_at_once() {
    let [a, b] = two();
    let (mut bytes_a, mut bytes_b) = (pattern(200_000, 5), pattern(200_000, 6));
    let (region_a, region_b) = (register(&a, &mut bytes_a), register(&b, &mut bytes_b));
    let half = 100_000;
    for round in 0..8 {
        let to_b = request(round, write_to(&region_b, half), piece(&region_a, 0, half as usize));
        let to_a = request(round, write_to(&region_a, half), piece(&region_b, 0, half as usize));
        a.pair.post_send(&[to_b]).unwrap();
        b.pair.post_send(&[to_a]).unwrap();
    }
    next_good(&a.completions, 8);
    next_good(&b.completions, 8);
    drop([region_a, region_b]);
    assert_eq!(bytes_a[100_000..], pattern(200_000, 6)[..100_000]);
    assert_eq!(bytes_b[100_000..], pattern(200_000, 5)[..100_000]);
}
