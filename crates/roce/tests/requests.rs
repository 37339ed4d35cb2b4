//! What a send request can ask for besides its operation: inline bytes, an invalidation.

mod common;

use std::time::Duration;

use common::{DOMAIN, Options, Pair, Wire, everything, pattern, piece};
use millstream_roce::{
    Access, Completion, CompletionOperation, CompletionStatus, CreateError, MAX_INLINE,
    MAX_SCATTER_GATHER, Piece, PostError, QueuePairCapabilities, QueuePairConfig, QueuePairState,
    ReceiveRequest, SendOperation, SendRequest,
};
use millstream_wire::{Mtu, Opcode, Packet};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const LONG: Duration = Duration::from_secs(10);

const SEND: SendOperation = SendOperation::Send { immediate: None };

fn write(remote_key: u32, offset: u64) -> SendOperation {
    SendOperation::Write { remote_address: REMOTE + offset, remote_key, immediate: None }
}

/// A wire that loses the first of every two datagrams of each opcode, to both sides.
fn losing() -> Wire {
    let mut seen = std::collections::BTreeMap::new();
    Box::new(move |to, datagram| {
        let opcode = Packet::parse(datagram).unwrap().opcode as u8;
        let count: &mut u32 = seen.entry((to, opcode)).or_default();
        *count += 1;
        if *count % 2 == 1 { vec![] } else { vec![datagram.to_vec()] }
    })
}

fn statuses(completions: &[Completion]) -> Vec<(u64, CompletionStatus)> {
    completions.iter().map(|completion| (completion.id, completion.status)).collect()
}

fn inline_pair(max_inline: usize) -> Pair {
    Pair::with(Options { max_inline, ..Options::default() })
}

fn post_inline<P: AsRef<[Piece]>>(
    pair: &mut Pair,
    request: &SendRequest<P>,
    bytes: &[u8],
) -> Result<(), PostError> {
    let host = &mut pair.hosts[0];
    host.endpoint.post_send_inline(pair.now, host.qpn, request, bytes)
}

#[test]
fn inline_bytes_arrive_and_are_the_callers_again_at_once() {
    for losses in [false, true] {
        let mut pair = inline_pair(MAX_INLINE);
        if losses {
            pair.wire = losing();
        }
        let remote = pair.register(1, REMOTE, vec![0xee; 300 * 20]);
        let mut expected = vec![0xee; 300 * 20];
        let mut buffer = [0; MAX_INLINE];
        for (index, length) in [0, 1, 2, 3, 4, 5, 63, 64, 255, 256].into_iter().enumerate() {
            for (kind, offset) in [300 * index, 300 * (10 + index)].into_iter().enumerate() {
                buffer = [(7 + index + 100 * kind) as u8; MAX_INLINE];
                let operation = if kind == 0 {
                    write(remote, offset as u64)
                } else {
                    pair.receive(1, 50, &[piece(remote, REMOTE + offset as u64, 300)]);
                    SendOperation::Send { immediate: Some(9) }
                };
                let request = SendRequest::new(index as u64, operation, []);
                post_inline(&mut pair, &request, &buffer[..length]).unwrap();
                expected[offset..offset + length].fill(buffer[0]);
            }
        }
        buffer.fill(0);
        pair.run(LONG);
        let sent = pair.completions(0);
        assert_eq!(sent.len(), 20);
        assert!(sent.iter().all(|completion| completion.status == CompletionStatus::Success));
        let lengths: Vec<u32> = sent.iter().step_by(2).map(|sent| sent.length).collect();
        assert_eq!(lengths, [0, 1, 2, 3, 4, 5, 63, 64, 255, 256]);
        let received: Vec<u32> =
            pair.completions(1).iter().map(|received| received.length).collect();
        assert_eq!(received, lengths);
        assert_eq!(pair.region(1, remote), expected);
    }
}

#[test]
fn more_inline_bytes_than_there_is_room_for_are_refused() {
    let mut pair = inline_pair(64);
    let remote = pair.register(1, REMOTE, vec![0; 100]);
    let local = pair.register(0, LOCAL, vec![0; 100]);
    let qpn = pair.hosts[0].qpn;
    let request = SendRequest::new(1, write(remote, 0), []);
    assert_eq!(
        post_inline(&mut pair, &request, &[1; 65]),
        Err(PostError::InlineTooLong { length: 65, limit: 64 })
    );
    let with_pieces = SendRequest::new(1, request.operation, [piece(local, LOCAL, 1)]);
    assert_eq!(post_inline(&mut pair, &with_pieces, &[1]), Err(PostError::NotInline(qpn)));
    let read = SendOperation::Read { remote_address: REMOTE, remote_key: remote };
    let read = SendRequest { operation: read, ..request };
    assert_eq!(post_inline(&mut pair, &read, &[1]), Err(PostError::NotInline(qpn)));
    // None of them took a place or changed what follows.
    post_inline(&mut pair, &request, &[5; 64]).unwrap();
    pair.run(LONG);
    assert_eq!(statuses(&pair.completions(0)), [(1, CompletionStatus::Success)]);
    assert_eq!(pair.region(1, remote)[..64], [5; 64]);

    let capabilities =
        QueuePairCapabilities { max_inline: MAX_INLINE + 1, ..QueuePairCapabilities::new(1, 1) };
    let host = &mut pair.hosts[0];
    assert_eq!(
        host.endpoint.create_queue_pair(&QueuePairConfig::new(DOMAIN, host.queue, capabilities)),
        Err(CreateError::OutOfRange { what: "max_inline", value: 257, limit: MAX_INLINE })
    );
}

/// A pair whose host 1 has a region that remotes may invalidate if `granted`, and a receive.
fn invalidating(granted: bool) -> (Pair, u32, u32) {
    let mut pair = Pair::with(Options { mtu: Mtu::B256, ..Options::default() });
    let access = if granted { everything() | Access::REMOTE_INVALIDATE } else { everything() };
    let memory = pair.hosts[1].endpoint.memory_mut();
    let target = memory.register(DOMAIN, REMOTE, access, vec![3; 1000]).unwrap();
    let local = pair.register(0, LOCAL, pattern(1000, 4));
    let receive = pair.register(1, LOCAL, vec![0; 1000]);
    pair.receive(1, 10, &[piece(receive, LOCAL, 1000)]);
    (pair, local, target)
}

#[test]
fn a_send_invalidates_a_region_for_remotes() {
    for length in [0, 1, 256, 1000] {
        for losses in [false, true] {
            let (mut pair, local, target) = invalidating(true);
            if losses {
                pair.wire = losing();
            }
            let pieces = [piece(local, LOCAL, length)];
            // Before it, the region is open.
            pair.post(0, 1, write(target, 0), &pieces);
            pair.post(0, 2, SendOperation::SendInvalidate { remote_key: target }, &pieces);
            pair.run(LONG);
            let success = CompletionStatus::Success;
            assert_eq!(statuses(&pair.completions(0)), [(1, success), (2, success)]);
            let received = pair.completions(1);
            assert_eq!(statuses(&received), [(10, success)]);
            assert_eq!(received[0].operation, CompletionOperation::Receive);
            assert_eq!(received[0].invalidated, Some(target));
            assert_eq!(received[0].length as usize, length);
            // Its owner still sends from it; remotes have no right left.
            pair.receive(0, 20, &[piece(local, LOCAL, 1000)]);
            pair.post(1, 3, SEND, &[piece(target, REMOTE, 1000)]);
            pair.run(LONG);
            assert_eq!(statuses(&pair.completions(1)), [(3, success)]);
            assert_eq!(statuses(&pair.completions(0)), [(20, success)]);
            // A NAK that closes a queue pair is said once.
            pair.wire = Box::new(|_, datagram| vec![datagram.to_vec()]);
            let before = pair.region(1, target).to_vec();
            let pieces = [piece(local, LOCAL, 8)];
            pair.post(0, 4, write(target, 0), &pieces);
            pair.run(LONG);
            let refused = (4, CompletionStatus::RemoteAccess);
            assert_eq!(statuses(&pair.completions(0)), [refused]);
            assert_eq!(pair.region(1, target), before);
        }
    }
}

#[test]
fn what_may_not_be_invalidated_is_not() {
    let (_, _, elsewhere) = invalidating(true);
    for (granted, key) in [(false, None), (true, Some(elsewhere ^ 0xff)), (true, Some(0))] {
        let (mut pair, local, target) = invalidating(granted);
        let remote_key = key.unwrap_or(target);
        let pieces = [piece(local, LOCAL, 300)];
        pair.post(0, 1, SendOperation::SendInvalidate { remote_key }, &pieces);
        pair.run(LONG);
        assert_eq!(statuses(&pair.completions(0)), [(1, CompletionStatus::RemoteAccess)]);
        let received = pair.completions(1);
        assert_eq!(statuses(&received), [(10, CompletionStatus::LocalProtection)]);
        assert_eq!(received[0].invalidated, None);
        assert_eq!(pair.state(1), QueuePairState::Error);
        let memory = pair.hosts[1].endpoint.memory_mut();
        assert_eq!(memory.region(target).unwrap(), vec![3; 1000]);
    }
}

#[test]
fn an_invalidation_stands_in_the_last_packet_of_its_message() {
    let (mut pair, local, target) = invalidating(true);
    let seen = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let log = std::rc::Rc::clone(&seen);
    pair.wire = Box::new(move |to, datagram| {
        if to == 1 {
            let packet = Packet::parse(datagram).unwrap();
            log.borrow_mut().push((packet.opcode, packet.extended.invalidate.map(|key| key.0)));
        }
        vec![datagram.to_vec()]
    });
    let operation = SendOperation::SendInvalidate { remote_key: target };
    pair.post(0, 1, operation, &[piece(local, LOCAL, 700)]);
    pair.run(LONG);
    assert_eq!(
        *seen.borrow(),
        [
            (Opcode::RcSendFirst, None),
            (Opcode::RcSendMiddle, None),
            (Opcode::RcSendLastWithInvalidate, Some(target)),
        ]
    );
}

#[test]
fn a_batch_ends_at_the_first_request_that_is_refused() {
    let mut pair = Pair::with(Options::default());
    let local = pair.register(0, LOCAL, vec![7; 100]);
    let remote = pair.register(1, REMOTE, vec![0; 100]);
    let few = [piece(local, LOCAL, 10)];
    let many = [piece(local, LOCAL, 1); MAX_SCATTER_GATHER + 1];
    let request = |id, count| {
        let pieces = if count == 1 { &few[..] } else { &many[..count] };
        SendRequest::new(id, write(remote, id * 20), pieces)
    };
    let limit = MAX_SCATTER_GATHER;
    let refused = PostError::TooManyPieces { count: limit + 1, limit };
    let host = &mut pair.hosts[0];
    let requests = [request(0, 1), request(1, limit), request(2, limit + 1), request(3, 1)];
    let posted = host.endpoint.post_sends(pair.now, host.qpn, &requests);
    assert_eq!(posted, Err((2, refused)));
    let posted = host.endpoint.post_sends(pair.now, host.qpn, &requests[2..]);
    assert_eq!(posted, Err((0, refused)));
    let receive = ReceiveRequest { id: 1, pieces: many };
    assert_eq!(host.endpoint.post_receive(host.qpn, &receive), Err(refused));
    pair.run(LONG);
    let done = CompletionStatus::Success;
    assert_eq!(statuses(&pair.completions(0)), [(0, done), (1, done)]);
    let mut expected = [0; 100];
    expected[..10].fill(7);
    expected[20..36].fill(7);
    assert_eq!(pair.region(1, remote), expected);
}
