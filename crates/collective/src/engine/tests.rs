use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use millstream_inc::{Collective, DataType, HostConfig, HostWorker, Mode, ReduceOperation};
use millstream_verbs::{
    CompletionOperation, CompletionStatus, Piece, QueuePair, QueuePairCapabilities, SendOperation,
    SendRequest, SoftConfig,
};

use super::*;
use crate::LONGEST;
use crate::memory::{ControlBlock, Domains, Operands, Scratch, Span};

/// Rank 0 of 2, whose switch is a queue pair that asks for patience for ever, since nothing is posted there.
fn engine() -> (Arc<Engine>, QueuePair) {
    let (engine, mut switches) = engine_of(1);
    (engine, switches.remove(0))
}

/// As above, with so many trees.
fn engine_of(trees: usize) -> (Arc<Engine>, Vec<QueuePair>) {
    let slot = EngineSlot::default();
    let parts: Vec<_> = (0..trees).map(|tree| tree_of(&slot, tree)).collect();
    let (mut of_engine, mut others) = (Vec::new(), Vec::new());
    for (tree, link, switch, edge) in parts {
        of_engine.push((tree, link));
        others.push((switch, edge));
    }
    let engine = Engine::new(of_engine, trees, 2, &slot);
    for (tree, (_, edge)) in others.iter().enumerate() {
        engine.connect(tree, edge, Psn::new(0)).unwrap();
    }
    (engine, others.into_iter().map(|(switch, _)| switch).collect())
}

fn tree_of(slot: &EngineSlot, tree: usize) -> (Tree, Link, QueuePair, Edge) {
    let host = address(next_host());
    let device = Device::open_soft(&SoftConfig::new(host)).unwrap();
    let domain = device.allocate_protection_domain();
    let control = ControlBlock::new(&domain).unwrap();
    let (control_key, control_address) = control.place();
    let worker = HostWorker::new(HostConfig {
        segment_bytes: 65536,
        window: 4,
        control_key,
        control_address,
        rank: 0,
        world: 2,
        path_mtu: Mtu::B1024,
    });
    let worker = worker.unwrap();
    let capabilities = QueuePairCapabilities::new(
        worker.required_send_requests() as usize,
        worker.required_receive_requests() as usize,
    );
    let queue = completion_queue(&device, 1000, slot, tree).unwrap();
    let pair = domain.create_queue_pair(&queue, &queue, capabilities).unwrap();
    let others = device.create_completion_queue(1000).unwrap();
    let switch = domain.create_queue_pair(&others, &others, capabilities).unwrap();
    let none = QueuePairAttributes::default();
    let state = Some(QueuePairState::Initialized);
    switch.modify(&QueuePairAttributes { state, access: Some(Access::empty()), ..none }).unwrap();
    let ready = QueuePairAttributes {
        state: Some(QueuePairState::ReadyToReceive),
        remote_address: Some(host),
        path_mtu: Some(Mtu::B1024),
        destination_qpn: Some(pair.number()),
        receive_psn: Some(Psn::new(0)),
        responder_resources: Some(0),
        minimum_rnr_timer: Some(1),
        ..none
    };
    switch.modify(&ready).unwrap();
    let edge =
        Edge { qpn: switch.number(), psn: Psn::new(0), path_mtu: Mtu::B1024, receive_share: None };
    let tree = Tree::new(worker, control, MAX_STARTED);
    (tree, Link { pair, device, switch: host, receive_share: Mutex::default() }, switch, edge)
}

/// One that only this process has.
fn address(host: u8) -> IpAddr {
    let process = std::process::id();
    Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, host).into()
}

fn next_host() -> u8 {
    static NEXT: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

pub(crate) fn barrier(limit: Duration) -> Work {
    let call = CollectiveCall {
        collective: Collective::Barrier,
        operation: ReduceOperation::Sum,
        data_type: DataType::UInt8,
        root: 0,
        count: 0,
        stripe: Stripe::WHOLE,
        mode: Mode::Write,
        source_key: 0,
        source_address: 0,
        destination_key: 0,
        destination_address: 0,
    };
    let operands = Operands::default();
    Work { call, operands, registered: false, source: Span::EMPTY, destination: Span::EMPTY, limit }
}

#[test]
fn trees_that_others_have_replaced_keep_no_copies() {
    let (engine, _switches) = engine_of(2);
    engine.prepare_failover(true);
    let domains = Domains::of(engine.links.iter().map(|link| &link.device));
    let vector = Scratch::new(&domains, 400_000).unwrap();
    let work = barrier(LONGEST);
    let (count, data_type) = (100_000, DataType::UInt32);
    let call = CollectiveCall { collective: Collective::AllReduce, count, data_type, ..work.call };
    let (source, destination) = (vector.span(), vector.span());
    let work = Work { call, registered: true, source, destination, ..work };
    assert_eq!(engine.start(&work), Ok(0));
    let keeps = || engine.lock().trees.iter().any(Tree::keeps_overwritten);
    assert!(keeps());
    engine.fail(CollectiveError::Closed);
    engine.halt();
    engine.retire();
    assert!(!keeps());
}

/// More peers than any receive buffer has room for.
const MANY: usize = 1000;

/// How many peers more a device would tell that it has room for as much as the first.
fn room(device: &Device) -> usize {
    let grant = || device.grant_receive_share(1).unwrap();
    let first = grant().bytes_of_one();
    let shares = std::iter::repeat_with(grant).take(MANY);
    // They are there until all are counted.
    let full: Vec<_> = shares.take_while(|it| it.bytes_of_one() == first).collect();
    full.len()
}

#[test]
fn trees_that_others_have_replaced_have_no_part_of_the_receive_buffer() {
    let slot = EngineSlot::default();
    let (tree, mut link, _switch, _) = tree_of(&slot, 0);
    let device = link.device.clone();
    let before = room(&device);
    link.receive_share = Mutex::new(device.grant_receive_share(1));
    let engine = Engine::new(vec![(tree, link)], 1, 2, &slot);
    let is_large = before < MANY;
    assert_eq!(room(&device) < before, is_large, "of a small buffer all get the least");
    engine.fail(CollectiveError::Closed);
    engine.halt();
    engine.retire();
    assert_eq!(room(&device), before);
    assert!(engine.links[0].granted().is_none());
}

/// In the error state a device may still write, where what is lost is about to be put back.
#[test]
fn trees_that_are_halted_touch_no_memory_any_more() {
    let (engine, _switches) = engine_of(2);
    assert_eq!(engine.start(&barrier(LONGEST)), Ok(0));
    engine.fail(CollectiveError::Closed);
    engine.halt();
    let states: Vec<_> = engine.links.iter().map(|link| link.pair.state()).collect();
    assert_eq!(states, [QueuePairState::Reset; 2]);
}

#[test]
fn what_was_under_way_on_trees_that_have_failed_says_until_when_it_was_to_be_over() {
    let (engine, _switch) = engine();
    let limit = Duration::from_secs(1000);
    let before = Instant::now();
    // The second one has not begun.
    assert_eq!(engine.start(&barrier(limit)), Ok(0));
    assert_eq!(engine.start(&barrier(limit)), Ok(1));
    let after = Instant::now();
    engine.fail(CollectiveError::Closed);
    engine.halt();
    let due = engine.were_due();
    let [(0, deadline)] = &due[..] else { panic!("{due:?}") };
    assert!((before + limit..=after + limit).contains(deadline), "{due:?}");
}

/// The numbers of the packets that have come, until there are so many, and then what else has come by then.
fn packets(socket: &UdpSocket, count: usize) -> BTreeSet<[u8; 3]> {
    let (mut numbers, mut packet) = (BTreeSet::new(), [0; 2048]);
    loop {
        socket.set_nonblocking(numbers.len() >= count).unwrap();
        match socket.recv(&mut packet) {
            // The packet sequence number, in the base transport header.
            Ok(_) => numbers.insert([packet[9], packet[10], packet[11]]),
            Err(_) => return numbers,
        };
    }
}

/// A switch that acknowledges nothing gets so much: what it has told that it has room for, and what it was told that it may
/// have under way.
#[test]
fn no_more_is_under_way_to_a_switch_than_either_end_has_room_for() {
    // Of the path MTU, and what each takes of a buffer beside its bytes.
    let room = |packets: u32| Some(packets * (1024 + 352));
    // What a device grants that has one packet of 4096 bytes under way itself at most.
    let little = || {
        let config = SoftConfig::new(address(next_host()));
        let device = Device::open_soft(&SoftConfig { max_window: 1, ..config }).unwrap();
        device.grant_receive_share(1)
    };
    let cases = [
        (Some(0), None, 1),
        (room(3), None, 3),
        (room(6), None, 6),
        (None, None, 8),
        (room(6), little(), 3),
        (room(2), little(), 2),
        (None, little(), 3),
    ];
    for (receive_share, granted, count) in cases {
        let what = format!("{receive_share:?}, {granted:?}");
        let slot = EngineSlot::default();
        let (tree, mut link, _unused, mut edge) = tree_of(&slot, 0);
        link.switch = address(255 - next_host());
        link.receive_share = Mutex::new(granted);
        edge.receive_share = receive_share;
        let socket = UdpSocket::bind((link.switch, 4791)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let engine = Engine::new(vec![(tree, link)], 1, 2, &slot);
        engine.connect(0, &edge, Psn::new(0)).unwrap();
        let pair = &engine.links[0].pair;
        let nothing = Piece { key: 0, address: 0, length: 0 };
        let send = SendOperation::Send { immediate: None };
        pair.post_send(&[0; 8].map(|id| SendRequest::new(id, send, [nothing]))).unwrap();
        assert_eq!(packets(&socket, count).len(), count, "{what}");
    }
}

/// Whether the collective under way is overdue.
fn overdue(engine: &Engine) -> Option<bool> {
    engine.lock().trees[0].running.map(|running| running.overdue)
}

#[test]
fn a_deadline_ends_only_the_collective_that_it_is_of_and_that_once() {
    let (engine, _switch) = engine();
    assert_eq!(engine.start(&barrier(Duration::ZERO)), Ok(0));
    assert_eq!(engine.start(&barrier(Duration::ZERO)), Ok(1));
    // As if another one had been under way when the time was looked at.
    engine.expire(0, 1);
    assert_eq!((overdue(&engine), engine.failure()), (Some(false), None));
    engine.expire(0, 0);
    assert_eq!((overdue(&engine), engine.failure()), (Some(true), None));
    // As if another thread had been first.
    engine.expire(0, 0);
    assert_eq!((overdue(&engine), engine.failure()), (Some(true), None));
    engine.lock().trees[0].running.as_mut().unwrap().deadline = Instant::now();
    engine.expire(0, 1);
    assert_eq!((overdue(&engine), engine.failure()), (Some(true), None));
    engine.expire(0, 0);
    let failure = engine.failure();
    assert!(matches!(failure, Some(CollectiveError::Timeout { sequence: 0, .. })), "{failure:?}");
    assert!(!engine.cancel(1, CollectiveError::Canceled { sequence: 1 }), "it is over");
    assert_eq!(engine.failure(), failure);
}

/// The switch takes nothing from before the deadline on, and is known to be lost a moment after that.
#[test]
fn a_switch_that_is_silent_is_lost_though_the_time_is_over_before_that_is_known() {
    let slot = EngineSlot::default();
    let (tree, mut link, _unused, edge) = tree_of(&slot, 0);
    link.switch = address(255 - next_host());
    let _silent = UdpSocket::bind((link.switch, 4791)).unwrap();
    let engine = Engine::new(vec![(tree, link)], 1, 2, &slot);
    engine.connect(0, &edge, Psn::new(0)).unwrap();
    assert_eq!(engine.start(&barrier(Duration::ZERO)), Ok(0));
    let outcome = engine.wait(0, LONGEST);
    assert!(matches!(outcome, Some(Err(CollectiveError::SwitchLost { .. }))), "{outcome:?}");
}

#[test]
fn silence_is_the_answer_of_a_switch_to_a_deadline_in_send_mode_only() {
    let limit = Duration::ZERO;
    for (mode, is_lost) in [(Mode::Write, true), (Mode::Send, false)] {
        let (engine, _switch) = engine();
        let (count, data_type, collective) = (100_000, DataType::UInt32, Collective::AllReduce);
        let work = barrier(limit);
        let call = CollectiveCall { collective, count, data_type, mode, ..work.call };
        assert_eq!(engine.start(&Work { call, ..work }), Ok(0));
        engine.expire(0, 0);
        assert_eq!((overdue(&engine), engine.failure()), (Some(true), None));
        let qpn = engine.links[0].pair.number();
        let (status, operation) = (CompletionStatus::RetryExceeded, CompletionOperation::Send);
        engine.completed(0, &[Completion::new(1 << 62, qpn, status, operation)]);
        let failure = engine.failure();
        match is_lost {
            true => {
                let is_it = matches!(failure, Some(CollectiveError::SwitchLost { .. }));
                assert!(is_it, "{mode:?}: {failure:?}");
            }
            false => {
                let (sequence, results, segments) = (0, 0, 7);
                let timeout = CollectiveError::Timeout { sequence, results, segments, limit };
                assert_eq!(failure, Some(timeout));
            }
        }
    }
}

#[test]
fn what_comes_after_one_that_goes_on_does_not_end_it_though_a_rank_has_left() {
    let (engine, _switch) = engine();
    assert_eq!(engine.start(&barrier(LONGEST)), Ok(0));
    engine.peer_left(1, 1);
    assert_eq!(engine.start(&barrier(LONGEST)), Ok(1));
    assert_eq!((engine.failure(), engine.progress()), (None, (2, true)));
    engine.peer_left(1, 0);
    let failure = engine.failure();
    assert!(matches!(failure, Some(CollectiveError::PeerLost { rank: 1, .. })), "{failure:?}");
}

/// As if the switch of a tree had taken the descriptor of its first collective, a barrier, and agreed.
fn agree(engine: &Engine, tree: usize) {
    let qpn = engine.links[tree].pair.number();
    let of = |id, operation| Completion::new(id, qpn, CompletionStatus::Success, operation);
    let sent = of(1 << 62, CompletionOperation::Send);
    let agreed = of(1 << 63, CompletionOperation::Receive);
    let immediate = Some(1 << 30);
    engine.completed(tree, &[sent, Completion { immediate, ..agreed }]);
}

fn is_lost(failure: Option<CollectiveError>) -> bool {
    matches!(failure, Some(CollectiveError::PeerLost { rank: 1, .. }))
}

/// Barriers take turns on the trees.
#[test]
fn who_leaves_after_a_collective_does_not_end_it_where_the_next_is_under_way_on_another_tree() {
    // The next begins before the rank is known to have left, or after.
    for early in [true, false] {
        let (engine, _switches) = engine_of(2);
        let start = |number| assert_eq!(engine.start(&barrier(LONGEST)), Ok(number));
        start(0);
        if early {
            start(1);
        }
        engine.peer_left(1, 1);
        if !early {
            start(1);
        }
        start(2);
        assert_eq!((engine.failure(), engine.progress()), (None, (3, true)), "{early}");
        assert_eq!(engine.lock().trees[1].running.is_some(), early);
        agree(&engine, 0);
        assert_eq!(engine.wait(0, Duration::ZERO), Some(Ok(())));
        assert!(is_lost(engine.failure()), "{early}: {:?}", engine.failure());
        for number in [1, 2] {
            let outcome = engine.wait(number, Duration::ZERO);
            assert!(outcome.is_some_and(|it| is_lost(it.err())), "{early} {number}");
        }
    }
}

#[test]
fn a_tree_that_fails_for_want_of_who_has_left_leaves_time_to_what_came_before() {
    for left in [1, 2] {
        let (engine, _switches) = engine_of(2);
        assert_eq!(engine.start(&barrier(LONGEST)), Ok(0));
        assert_eq!(engine.start(&barrier(LONGEST)), Ok(1));
        engine.peer_left(1, left);
        let lost = E::Aborted(millstream_inc::Abort::PeerLost { rank: 1 });
        // Before the rest: the device's thread tells of the disconnection, too, and advances trees.
        let mut state = engine.lock();
        // As if the switch of the second tree had missed the other rank.
        engine.links[1].disconnect();
        state.trees[1].worker.fail(lost);
        let over = engine.advance(&mut state, 1);
        drop(state);
        assert!(over);
        if left > 1 {
            // It has called the second collective, too.
            assert!(is_lost(engine.failure()), "{:?}", engine.failure());
            continue;
        }
        assert_eq!((engine.failure(), engine.progress()), (None, (2, true)));
        agree(&engine, 0);
        assert_eq!(engine.wait(0, Duration::ZERO), Some(Ok(())));
        assert!(is_lost(engine.failure()), "{:?}", engine.failure());
    }
}
