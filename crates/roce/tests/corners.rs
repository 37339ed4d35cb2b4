//! Corners where little happens, or everything at once.

mod common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use common::operations::{REMOTE, SEND, read, write};
use common::{DOMAIN, Lcg, Options, Pair, Wire, connect, pattern, piece};
use millstream_roce::{
    AsyncEvent, CompletionStatus, Instant, Node, PostError, QueuePairAttributes, QueuePairState,
    SendOperation, SendRequest, Transmit,
};
use millstream_wire::{Mtu, Opcode, Operation, Packet};

const LOCAL: u64 = 0x1000_0000;
const SUCCESS: CompletionStatus = CompletionStatus::Success;

fn ends(pair: &mut Pair, host: usize) -> Vec<(u64, CompletionStatus)> {
    pair.poll(host);
    pair.completions(host).iter().map(|c| (c.id, c.status)).collect()
}

fn lossy(seed: u64, one_in: u32) -> Wire {
    let mut lcg = Lcg(seed);
    Box::new(move |_, datagram| match lcg.below(one_in) {
        0 => vec![],
        _ => vec![datagram.to_vec()],
    })
}

fn minutes(n: u64) -> Duration {
    Duration::from_secs(60 * n)
}

#[test]
fn receiver_not_ready_in_the_middle_of_lossy_sends() {
    for seed in 0..40 {
        let mut pair = Pair::with(Options { timeout: 14, ..Options::default() });
        pair.wire = lossy(seed, 7);
        let count = 40;
        let length = 700;
        let source = pair.register(0, LOCAL, pattern(length * count, 1));
        let target = pair.register(1, REMOTE, vec![0; length * count]);
        for id in 0..count {
            let from = LOCAL + (id * length) as u64;
            pair.post(0, id as u64, SEND, &[piece(source, from, length)]);
        }
        // A receive is posted each time that the sender was told to wait.
        let mut posted = 0;
        while pair.step() {
            let told = pair.counters(1).rnr_naks_sent as usize;
            while posted < count.min(told) {
                let to = REMOTE + (posted * length) as u64;
                pair.receive(1, posted as u64, &[piece(target, to, length)]);
                posted += 1;
            }
        }
        let expected: Vec<_> = (0..count as u64).map(|id| (id, SUCCESS)).collect();
        assert_eq!(ends(&mut pair, 0), expected, "seed {seed}");
        assert_eq!(ends(&mut pair, 1), expected, "seed {seed}");
        assert_eq!(pair.region(1, target), pattern(length * count, 1), "seed {seed}");
    }
}

#[test]
fn closed_while_everything_is_in_flight() {
    let mut pair = Pair::with(Options { timeout: 10, retry_count: 1, ..Options::default() });
    let source = pair.register(0, LOCAL, pattern(4000, 1));
    let target = pair.register(1, REMOTE, vec![0; 4000]);
    pair.receive(0, 9, &[piece(source, LOCAL, 8)]);
    let local = [piece(source, LOCAL, 4000)];
    for (id, operation) in [(1, write(target)), (2, read(target)), (3, SEND)] {
        pair.post(0, id, operation, &local);
        pair.post(1, id, SEND, &[piece(target, REMOTE, 4000)]);
    }
    assert!(pair.answers(0).len() > 10);
    let error = QueuePairAttributes { state: Some(QueuePairState::Error), ..Default::default() };
    let host = &mut pair.hosts[0];
    host.endpoint.modify_queue_pair(pair.now, host.qpn, &error).unwrap();
    let flushed = CompletionStatus::Flushed;
    assert_eq!(ends(&mut pair, 0), [(1, flushed), (2, flushed), (3, flushed), (9, flushed)]);
    // The application asked for it: no event. The peer hears nothing, and gives up.
    assert_eq!(pair.hosts[0].endpoint.poll_event(), None);
    pair.run(minutes(1));
    assert_eq!(ends(&mut pair, 0), []);
    let given_up = [(1, CompletionStatus::RetryExceeded), (2, flushed), (3, flushed)];
    assert_eq!(ends(&mut pair, 1), given_up);
}

#[test]
fn a_region_deregistered_while_a_read_streams_out_of_it() {
    let mut pair = Pair::new();
    // More than one request asks for.
    let length = 256 * 400;
    let back = pair.register(0, LOCAL, vec![0; length]);
    let target = pair.register(1, REMOTE, pattern(length, 1));
    pair.post(0, 1, read(target), &[piece(back, LOCAL, length)]);
    pair.post(0, 2, read(target), &[piece(back, LOCAL, length)]);
    while pair.counters(0).payload_bytes_received < 256 * 40 {
        assert!(pair.step());
    }
    let came = pair.counters(0).payload_bytes_received as usize;
    pair.hosts[1].endpoint.memory_mut().deregister(target).unwrap();
    pair.run(minutes(1));
    let expected = [(1, CompletionStatus::RemoteAccess), (2, CompletionStatus::Flushed)];
    assert_eq!(ends(&mut pair, 0), expected);
    assert_eq!(pair.region(0, back)[..came], pattern(length, 1)[..came]);
    assert_eq!(pair.state(1), QueuePairState::Error);
}

#[test]
fn a_completion_queue_that_overruns() {
    let mut pair = Pair::with(Options { completions: 4, ..Options::default() });
    let source = pair.register(0, LOCAL, vec![1; 8]);
    let target = pair.register(1, REMOTE, vec![0; 8]);
    for id in 0..8 {
        pair.post(0, id, write(target), &[piece(source, LOCAL, 8)]);
    }
    // As `Pair::step`, but nobody polls the completion queue.
    let mut transmit = Transmit::new();
    for (from, to) in [(0, 1), (1, 0)] {
        let meta = common::meta(pair.hosts[from].address, pair.hosts[to].address);
        while pair.hosts[from].endpoint.poll_transmit(pair.now, &mut transmit) {
            let mut datagram = Vec::new();
            let host = &pair.hosts[from];
            assert!(transmit.assemble(&host.endpoint, host.address, 4791, 0, &mut datagram));
            pair.hosts[to].endpoint.handle_datagram(pair.now, &meta, &datagram);
        }
    }
    let host = &mut pair.hosts[0];
    let (queue, qpn) = (host.queue, host.qpn);
    assert_eq!(host.endpoint.poll_event(), Some(AsyncEvent::CompletionQueueOverrun(queue)));
    assert_eq!(host.endpoint.poll_event(), Some(AsyncEvent::QueuePairFatal(qpn)));
    assert_eq!(host.endpoint.poll_event(), None);
    assert_eq!(pair.state(0), QueuePairState::Error);
    assert_eq!(ends(&mut pair, 0), [0, 1, 2, 3].map(|id| (id, SUCCESS)));
    assert_eq!(pair.state(1), QueuePairState::ReadyToSend);
}

#[test]
fn a_send_queue_filled_and_drained_again_and_again() {
    let mut pair = Pair::with(Options { work_requests: 5, ..Options::default() });
    let source = pair.register(0, LOCAL, pattern(700, 1));
    let target = pair.register(1, REMOTE, vec![0; 700]);
    for round in 0..20 {
        for id in 0..5 {
            pair.post(0, round * 5 + id, write(target), &[piece(source, LOCAL, 700)]);
            pair.receive(1, round * 5 + id, &[]);
        }
        let pieces = [piece(source, LOCAL, 1)];
        let operation = write(target);
        let request = SendRequest::new(0, operation, pieces);
        let host = &mut pair.hosts[0];
        let full = host.endpoint.post_send(pair.now, host.qpn, &request);
        assert_eq!(full, Err(PostError::QueueFull { limit: 5 }));
        pair.run(minutes(1));
        assert_eq!(ends(&mut pair, 0).len(), 5);
        // Receives are taken by SENDs, here of nothing.
        for id in 0..5 {
            pair.post(0, id, SEND, &[]);
        }
        pair.run(minutes(1));
        assert_eq!(ends(&mut pair, 1).len(), 5);
        assert_eq!(ends(&mut pair, 0).len(), 5);
    }
}

#[test]
fn messages_that_are_too_long_are_not_accepted() {
    let mut pair = Pair::with(Options { max_message_length: 600, ..Options::default() });
    let source = pair.register(0, LOCAL, pattern(700, 1));
    for (pieces, length) in [
        (vec![piece(source, LOCAL, 601)], 601),
        (vec![piece(source, LOCAL, 300), piece(source, LOCAL, 301)], 601),
        (vec![piece(source, LOCAL, u32::MAX as usize); 4], 4 * u64::from(u32::MAX)),
    ] {
        let request = SendRequest::new(1, SEND, pieces);
        let host = &mut pair.hosts[0];
        let refused = host.endpoint.post_send(pair.now, host.qpn, &request);
        assert_eq!(refused, Err(PostError::TooLong { length, limit: 600 }));
    }
    pair.post(0, 1, SEND, &[piece(source, LOCAL, 600)]);
}

#[test]
fn no_reads_without_initiator_depth() {
    let mut pair = Pair::with(Options { depth: 0, ..Options::default() });
    let source = pair.register(0, LOCAL, pattern(64, 1));
    let target = pair.register(1, REMOTE, vec![0; 64]);
    let pieces = [piece(source, LOCAL, 64)];
    let operation = read(target);
    let request = SendRequest::new(1, operation, pieces);
    let host = &mut pair.hosts[0];
    let refused = host.endpoint.post_send(pair.now, host.qpn, &request);
    assert_eq!(refused, Err(PostError::NoReads(host.qpn)));
    pair.post(0, 2, write(target), &[piece(source, LOCAL, 64)]);
    pair.run(minutes(1));
    assert_eq!(ends(&mut pair, 0), [(2, SUCCESS)]);
}

#[test]
fn no_more_reads_in_flight_than_the_peer_executes() {
    for depth in [1, 2, 5] {
        for seed in 0..20 {
            let mut pair = Pair::with(Options { depth, timeout: 14, ..Options::default() });
            pair.wire = lossy(seed, 20);
            let length = 256 * 40;
            let back = pair.register(0, LOCAL, vec![0; length]);
            let target = pair.register(1, REMOTE, pattern(length, 1));
            for id in 0..6 {
                pair.post(0, id, read(target), &[piece(back, LOCAL, length)]);
            }
            pair.run(minutes(1));
            let expected = [0, 1, 2, 3, 4, 5].map(|id| (id, SUCCESS));
            assert_eq!(ends(&mut pair, 0), expected, "{depth} {seed}");
            assert_eq!(pair.region(0, back), pattern(length, 1));
        }
    }
}

#[test]
fn nothing_but_empty_messages() {
    for one_in in [u32::MAX, 5] {
        let mut pair = Pair::with(Options { timeout: 14, ..Options::default() });
        pair.wire = lossy(3, one_in);
        let write_immediate =
            SendOperation::Write { remote_address: 0, remote_key: 0, immediate: Some(5) };
        let read = SendOperation::Read { remote_address: 0, remote_key: 0 };
        let write = SendOperation::Write { remote_address: 0, remote_key: 0, immediate: None };
        let empty = [piece(0, 0, 0), piece(7, u64::MAX, 0)];
        for round in 0..20 {
            pair.receive(1, 2 * round, &[]);
            pair.receive(1, 2 * round + 1, &empty);
            for operation in [SEND, write, read, write_immediate] {
                pair.post(0, round, operation, &empty);
            }
        }
        pair.run(minutes(1));
        assert_eq!(ends(&mut pair, 1).len(), 40);
        let ends = ends(&mut pair, 0);
        assert_eq!(ends.len(), 80);
        assert!(ends.is_sorted_by_key(|(id, _)| *id));
        assert!(ends.iter().all(|(_, status)| *status == SUCCESS));
    }
}

#[test]
fn the_smallest_windows_still_move() {
    for max_window in [0, 1, 2, 3] {
        for one_in in [u32::MAX, 9] {
            let options =
                Options { max_window, mtu: Mtu::B4096, timeout: 14, ..Options::default() };
            let mut pair = Pair::with(options);
            pair.wire = lossy(max_window.into(), one_in);
            let length = 4096 * 20 + 5;
            let source = pair.register(0, LOCAL, pattern(length, 1));
            let target = pair.register(1, REMOTE, vec![0; length]);
            let back = pair.register(0, LOCAL * 2, vec![0; length]);
            pair.receive(1, 1, &[piece(target, REMOTE, length)]);
            pair.post(0, 1, write(target), &[piece(source, LOCAL, length)]);
            pair.post(0, 2, read(target), &[piece(back, LOCAL * 2, length)]);
            pair.post(0, 3, SEND, &[piece(source, LOCAL, length)]);
            pair.run(minutes(1));
            let expected = [1, 2, 3].map(|id| (id, SUCCESS));
            assert_eq!(ends(&mut pair, 0), expected, "{max_window} {one_in}");
            assert_eq!(pair.region(0, back), pattern(length, 1));
        }
    }
}

#[test]
fn no_retries_means_one_timeout() {
    let mut pair = Pair::with(Options { timeout: 16, retry_count: 0, ..Options::default() });
    pair.wire = Box::new(|_, _| vec![]);
    let source = pair.register(0, LOCAL, vec![1; 8]);
    pair.post(0, 1, SEND, &[piece(source, LOCAL, 8)]);
    pair.run(minutes(1));
    assert_eq!(ends(&mut pair, 0), [(1, CompletionStatus::RetryExceeded)]);
    assert_eq!(pair.now.nanos(), 4096 << 16);
}

#[test]
fn timeout_zero_waits_for_ever_and_a_later_packet_brings_the_loss_to_light() {
    let mut pair = Pair::with(Options { timeout: 0, ..Options::default() });
    let lost = Rc::new(Cell::new(false));
    let first = lost.clone();
    pair.wire = Box::new(
        move |_, datagram| {
            if first.replace(true) { vec![datagram.to_vec()] } else { vec![] }
        },
    );
    let source = pair.register(0, LOCAL, vec![1; 8]);
    let target = pair.register(1, REMOTE, vec![0; 8]);
    pair.post(0, 1, write(target), &[piece(source, LOCAL, 8)]);
    pair.run(minutes(1));
    assert_eq!(ends(&mut pair, 0), []);
    assert_eq!(pair.hosts[0].endpoint.poll_timeout(), None);
    pair.post(0, 2, write(target), &[piece(source, LOCAL, 8)]);
    pair.run(minutes(1));
    assert_eq!(ends(&mut pair, 0), [(1, SUCCESS), (2, SUCCESS)]);
}

#[test]
fn both_directions_of_one_queue_pair_at_once() {
    for seed in 0..20 {
        let mut pair = Pair::with(Options { timeout: 14, ..Options::default() });
        pair.wire = lossy(seed, 30);
        let length = 256 * 30 + 3;
        let mut keys = Vec::new();
        for host in 0..2 {
            let source = pair.register(host, LOCAL, pattern(length, host as u8));
            let target = pair.register(host, REMOTE, vec![0; length]);
            let back = pair.register(host, LOCAL * 2, vec![0; length]);
            let received = pair.register(host, LOCAL * 3, vec![0; length]);
            pair.receive(host, 100, &[piece(received, LOCAL * 3, length)]);
            keys.push([source, target, back, received]);
        }
        for (host, &[source, _, back, _]) in keys.iter().enumerate() {
            let target = keys[1 - host][1];
            let local = [piece(source, LOCAL, length)];
            pair.post(host, 1, write(target), &local);
            pair.post(host, 2, read(target), &[piece(back, LOCAL * 2, length)]);
            pair.post(host, 3, SEND, &local);
            pair.post(host, 4, read(target), &[piece(back, LOCAL * 2, length)]);
        }
        pair.run(minutes(1));
        for (host, &[_, target, back, received]) in keys.iter().enumerate() {
            let mut ends = ends(&mut pair, host);
            ends.sort_by_key(|(id, _)| *id);
            assert_eq!(ends, [1, 2, 3, 4, 100].map(|id| (id, SUCCESS)), "seed {seed}");
            assert_eq!(pair.region(host, back), pattern(length, host as u8), "seed {seed}");
            assert_eq!(pair.region(host, target), pattern(length, 1 - host as u8), "seed {seed}");
            assert_eq!(pair.region(host, received), pattern(length, 1 - host as u8));
        }
    }
}

/// The two ends were told different path MTUs: an error, never a hang or wrong bytes.
#[test]
fn path_mtus_that_differ() {
    for mtus in [[Mtu::B256, Mtu::B1024], [Mtu::B1024, Mtu::B256]] {
        for which in 0..3 {
            for length in [0, 100, 256, 257, 1000, 1024, 5000] {
                let mut pair = Pair::with(Options { mtu: mtus[1], ..Options::default() });
                reconnect(&mut pair, 0, &Options { mtu: mtus[0], ..Options::default() });
                let source = pair.register(0, LOCAL, pattern(length + 1, 1));
                let target = pair.register(1, REMOTE, pattern(length + 1, 1));
                pair.receive(1, 1, &[piece(target, REMOTE, length)]);
                let operation = [write(target), read(target), SEND][which];
                pair.post(0, 1, operation, &[piece(source, LOCAL, length)]);
                pair.run(minutes(1));
                let [(1, status)] = ends(&mut pair, 0)[..] else { panic!("no completion") };
                let works = length <= 256;
                assert_eq!(status == SUCCESS, works, "{mtus:?} {which} {length}: {status:?}");
                assert_eq!(pair.region(1, target), pattern(length + 1, 1));
                assert_eq!(pair.region(0, source), pattern(length + 1, 1));
            }
        }
    }
}

/// Takes a host's queue pair through RESET to RTS again.
fn reconnect(pair: &mut Pair, host: usize, options: &Options) {
    let peer = &pair.hosts[1 - host];
    let steps = connect(options, host, peer.address, peer.qpn);
    let reset = QueuePairAttributes { state: Some(QueuePairState::Reset), ..Default::default() };
    let host = &mut pair.hosts[host];
    for attributes in [reset].into_iter().chain(steps) {
        host.endpoint.modify_queue_pair(pair.now, host.qpn, &attributes).unwrap();
    }
}

#[test]
fn a_queue_pair_works_again_after_reset() {
    let mut pair = Pair::with(Options { timeout: 10, retry_count: 0, ..Options::default() });
    let source = pair.register(0, LOCAL, pattern(4000, 1));
    let target = pair.register(1, REMOTE, vec![0; 4000]);
    for round in 0..5_u32 {
        // Half of a message arrives, and the connection breaks.
        let mut count = 0;
        pair.wire = Box::new(move |_, datagram| {
            count += 1;
            if count <= 5 { vec![datagram.to_vec()] } else { vec![] }
        });
        pair.receive(1, 7, &[piece(target, REMOTE, 4000)]);
        pair.post(0, 1, SEND, &[piece(source, LOCAL, 4000)]);
        pair.run(minutes(1));
        assert_eq!(ends(&mut pair, 0), [(1, CompletionStatus::RetryExceeded)]);
        for host in 0..2 {
            let psn = [round * 77, 5];
            reconnect(&mut pair, host, &Options { psn, ..Options::default() });
        }
        pair.wire = Box::new(|_, datagram| vec![datagram.to_vec()]);
        pair.receive(1, 8, &[piece(target, REMOTE, 4000)]);
        pair.post(0, 2, SEND, &[piece(source, LOCAL, 4000)]);
        pair.run(minutes(1));
        assert_eq!(ends(&mut pair, 0), [(2, SUCCESS)]);
        // What was posted before the reset is gone, without a completion.
        assert_eq!(ends(&mut pair, 1), [(8, SUCCESS)]);
        assert_eq!(pair.region(1, target), pattern(4000, 1));
        for host in 0..2 {
            let options = Options { timeout: 10, retry_count: 0, ..Options::default() };
            reconnect(&mut pair, host, &options);
        }
    }
}

#[test]
fn the_end_of_time_is_reached_without_a_hang() {
    let mut pair = Pair::with(Options { retry_count: 3, ..Options::default() });
    pair.wire = Box::new(|_, _| vec![]);
    pair.now = Instant::from_nanos(u64::MAX - 1_000_000);
    let source = pair.register(0, LOCAL, vec![1; 8]);
    pair.post(0, 1, SEND, &[piece(source, LOCAL, 8)]);
    for _ in 0..1000 {
        if !pair.step() {
            break;
        }
    }
    assert_eq!(ends(&mut pair, 0), [(1, CompletionStatus::RetryExceeded)]);
}

#[test]
fn queue_pairs_take_turns() {
    let mut pair = Pair::with(Options { max_window: 1024, ..Options::default() });
    let source = pair.register(0, LOCAL, pattern(256 * 200, 1));
    let host = &mut pair.hosts[0];
    let config = millstream_roce::QueuePairConfig::new(
        DOMAIN,
        host.queue,
        millstream_roce::QueuePairCapabilities::new(8, 8),
    );
    let peer = pair.hosts[1].address;
    let host = &mut pair.hosts[0];
    let mut qpns = vec![host.qpn];
    for i in 0..2 {
        let qpn = host.endpoint.create_queue_pair(&config).unwrap();
        let far = millstream_wire::Qpn::new(0x9000 + i);
        for attributes in connect(&Options::default(), 0, peer, far) {
            host.endpoint.modify_queue_pair(Instant::ZERO, qpn, &attributes).unwrap();
        }
        qpns.push(qpn);
    }
    let pieces = [piece(source, LOCAL, 256 * 200)];
    let operation = write(1);
    let request = SendRequest::new(1, operation, pieces);
    // One whose place another takes leaves no turn behind.
    let gone = host.endpoint.create_queue_pair(&config).unwrap();
    for attributes in connect(&Options::default(), 0, peer, millstream_wire::Qpn::new(0x9009)) {
        host.endpoint.modify_queue_pair(Instant::ZERO, gone, &attributes).unwrap();
    }
    host.endpoint.post_send(Instant::ZERO, gone, &request).unwrap();
    assert!(host.endpoint.destroy_queue_pair(gone));
    let heir = host.endpoint.create_queue_pair(&config).unwrap();
    for attributes in connect(&Options::default(), 0, peer, millstream_wire::Qpn::new(0x9010)) {
        host.endpoint.modify_queue_pair(Instant::ZERO, heir, &attributes).unwrap();
    }
    qpns.push(heir);
    for qpn in qpns {
        host.endpoint.post_send(Instant::ZERO, qpn, &request).unwrap();
    }
    let mut transmit = Transmit::new();
    let mut order = Vec::new();
    while host.endpoint.poll_transmit(Instant::ZERO, &mut transmit) {
        order.push(transmit.headers()[5..8].to_vec());
    }
    let runs: Vec<_> =
        order.chunk_by(|a, b| a == b).map(|run| (run[0].clone(), run.len())).collect();
    assert!(runs.iter().all(|(_, length)| *length <= 16), "{runs:?}");
    // Four by turns.
    assert!(runs.windows(4).all(|w| (1..4).all(|i| w[0].0 != w[i].0)), "{runs:?}");
    // All of them got as far as the first window.
    assert_eq!(order.len(), 4 * 64);
}

/// Only what takes a receive request raises an event (IBTA 9.2.3).
#[test]
fn the_solicited_event_bit() {
    let mut pair = Pair::new();
    let source = pair.register(0, LOCAL, pattern(600, 1));
    let target = pair.register(1, REMOTE, vec![0; 600]);
    let seen = Rc::new(RefCell::new(Vec::new()));
    let log = seen.clone();
    pair.wire = Box::new(move |to, datagram| {
        let packet = Packet::parse(datagram).unwrap();
        if to == 1 && packet.opcode.operation() != Operation::Acknowledge {
            log.borrow_mut().push((packet.opcode, packet.bth.solicited_event));
        }
        vec![datagram.to_vec()]
    });
    let with_immediate =
        SendOperation::Write { remote_address: REMOTE, remote_key: target, immediate: Some(1) };
    for (operation, length) in
        [(SEND, 300), (SEND, 4), (write(target), 4), (with_immediate, 4), (read(target), 4)]
    {
        pair.receive(1, 1, &[piece(target, REMOTE, 600)]);
        let pieces = [piece(source, LOCAL, length)];
        let request = SendRequest { solicited: true, ..SendRequest::new(1, operation, pieces) };
        let host = &mut pair.hosts[0];
        host.endpoint.post_send(pair.now, host.qpn, &request).unwrap();
    }
    pair.run(minutes(1));
    use Opcode as O;
    let expected = [
        (O::RcSendFirst, false),
        (O::RcSendLast, true),
        (O::RcSendOnly, true),
        (O::RcWriteOnly, false),
        (O::RcWriteOnlyWithImmediate, true),
        (O::RcReadRequest, false),
    ];
    assert_eq!(*seen.borrow(), expected);
}

/// What the receiver is woken for: the last packet of a message says it (IBTA 9.2.3), of those that
/// take a receive; and failures (IBTA 11.4.2.2).
#[test]
fn solicited_completions_are_known_until_they_are_polled() {
    let mut pair = Pair::new();
    let source = pair.register(0, LOCAL, pattern(600, 1));
    let target = pair.register(1, REMOTE, vec![0; 600]);
    let with_immediate =
        SendOperation::Write { remote_address: REMOTE, remote_key: target, immediate: Some(1) };
    let solicited = |pair: &Pair| {
        let host = &pair.hosts[1];
        host.endpoint.solicited_waiting(host.queue)
    };
    // Completions stay where they are: the harness polls them away.
    let send = |pair: &mut Pair, operation, solicited| {
        pair.receive(1, 1, &[piece(target, REMOTE, 600)]);
        let pieces = [piece(source, LOCAL, 600)];
        let request = SendRequest { solicited, ..SendRequest::new(1, operation, pieces) };
        let host = &mut pair.hosts[0];
        host.endpoint.post_send(pair.now, host.qpn, &request).unwrap();
        let mut transmit = Transmit::new();
        while pair.hosts[0].endpoint.poll_transmit(pair.now, &mut transmit) {
            let (host, mut datagram) = (&pair.hosts[0], Vec::new());
            assert!(transmit.assemble(&host.endpoint, host.address, 4791, 0, &mut datagram));
            pair.inject(1, &datagram);
        }
    };
    let poll = |pair: &mut Pair, count| {
        let host = &mut pair.hosts[1];
        host.endpoint.poll_completions(host.queue, &mut Vec::new(), count)
    };
    for operation in [SEND, with_immediate] {
        send(&mut pair, operation, false);
        assert!(!solicited(&pair), "{operation:?}");
        send(&mut pair, operation, true);
        send(&mut pair, operation, false);
        assert!(solicited(&pair), "{operation:?}");
        assert_eq!(poll(&mut pair, 1), 1);
        assert!(solicited(&pair), "{operation:?}");
        assert_eq!(poll(&mut pair, 1), 1);
        assert!(!solicited(&pair), "{operation:?}");
        assert_eq!(poll(&mut pair, 5), 1);
    }
    // What takes no receive raises nothing.
    let (count, write) = (poll(&mut pair, 5), write(target));
    send(&mut pair, write, true);
    assert!(count == 0 && !solicited(&pair));
    let attributes = QueuePairAttributes {
        state: Some(QueuePairState::Error),
        ..QueuePairAttributes::default()
    };
    let host = &mut pair.hosts[1];
    host.endpoint.modify_queue_pair(pair.now, host.qpn, &attributes).unwrap();
    assert!(solicited(&pair));
}
