//! Soft devices with several shards: what serves queue pairs of all of them.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use millstream_verbs::{
    Access, AsyncEvent, Completion, CompletionQueue, CompletionStatus, CreateError, Device, Driver,
    MemoryRegion, OpenError, Piece, ProtectionDomain, Psn, QueuePair, QueuePairAttributes,
    QueuePairCapabilities, QueuePairOptions, QueuePairState, ReceiveRequest, SendOperation,
    SendRequest, SoftConfig,
};

const PATIENCE: Duration = Duration::from_secs(60);
const DEPTH: usize = 32;
const EMPTY: Piece = Piece { key: 0, address: 0, length: 0 };

fn config(shards: usize) -> SoftConfig {
    static HOST: AtomicU8 = AtomicU8::new(1);
    let (process, host) = (std::process::id(), HOST.fetch_add(1, Ordering::Relaxed));
    let address = Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, host);
    SoftConfig { shards, ..SoftConfig::new(IpAddr::from(address)) }
}

fn open(shards: usize) -> Device {
    Device::open_soft(&config(shards)).unwrap_or_else(|error| panic!("{error}"))
}

/// A device with queue pairs in its shards in turn, which all complete into one queue.
struct End {
    pairs: Vec<QueuePair>,
    completions: CompletionQueue,
    domain: ProtectionDomain,
    device: Device,
}

impl End {
    fn new(device: Device, pairs: usize) -> Self {
        let completions = device.create_completion_queue(2 * DEPTH * pairs.max(1)).unwrap();
        Self::completing(device, completions, pairs)
    }

    fn completing(device: Device, completions: CompletionQueue, pairs: usize) -> Self {
        let domain = device.allocate_protection_domain();
        let capabilities = QueuePairCapabilities::new(DEPTH, DEPTH);
        let pair = |_| domain.create_queue_pair(&completions, &completions, capabilities).unwrap();
        Self { pairs: (0..pairs).map(pair).collect(), completions, domain, device }
    }

    fn register(&self, bytes: &mut [u8]) -> MemoryRegion {
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_INVALIDATE;
        // SAFETY: every test drops the region before the bytes, and looks at them when no request for
        // them is under way any more.
        unsafe { self.domain.register_memory(bytes.as_mut_ptr(), bytes.len(), access).unwrap() }
    }

    fn next(&self, count: usize) -> Vec<Completion> {
        let mut out = Vec::new();
        while out.len() < count {
            assert!(self.completions.wait(PATIENCE), "{} of {count}", out.len());
            let missing = count - out.len();
            self.completions.poll(&mut out, missing);
        }
        out
    }

    fn next_good(&self, count: usize) -> Vec<Completion> {
        let out = self.next(count);
        assert!(out.iter().all(|one| one.status == CompletionStatus::Success), "{out:?}");
        out
    }
}

/// The slot of the address that a queue pair's number is in: each shard has one.
fn slot(pair: &QueuePair) -> u32 {
    pair.number().value() >> 19
}

/// Of a connection whose peer answers.
const RETRIES: u8 = 6;

fn connect_one(
    (pair, device): (&QueuePair, &Device),
    (peer, peer_device): (&QueuePair, &Device),
    retries: u8,
) {
    let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
    pair.modify(&QueuePairAttributes {
        state: Some(QueuePairState::Initialized),
        access: Some(access),
        ..QueuePairAttributes::default()
    })
    .unwrap();
    pair.modify(&QueuePairAttributes {
        state: Some(QueuePairState::ReadyToReceive),
        remote_address: Some(peer_device.address()),
        path_mtu: Some(device.path_mtu(peer_device.address()).unwrap()),
        destination_qpn: Some(peer.number()),
        receive_psn: Some(Psn::new(7)),
        responder_resources: Some(16),
        minimum_rnr_timer: Some(12),
        ..QueuePairAttributes::default()
    })
    .unwrap();
    pair.modify(&QueuePairAttributes {
        state: Some(QueuePairState::ReadyToSend),
        send_psn: Some(Psn::new(7)),
        timeout: Some(14),
        retry_count: Some(retries),
        rnr_retry: Some(7),
        initiator_depth: Some(16),
        ..QueuePairAttributes::default()
    })
    .unwrap();
}

/// Connects each queue pair of one with one of the other.
fn connect(a: &End, b: &End, retries: u8) {
    for (one, other) in a.pairs.iter().zip(&b.pairs) {
        let (one, other) = ((one, &a.device), (other, &b.device));
        connect_one(one, other, retries);
        connect_one(other, one, retries);
    }
}

fn two(shards: [usize; 2], pairs: usize) -> [End; 2] {
    let [a, b] = shards.map(|shards| End::new(open(shards), pairs));
    connect(&a, &b, RETRIES);
    [a, b]
}

fn piece(region: &MemoryRegion, offset: usize, length: usize) -> Piece {
    Piece { key: region.key(), address: region.address() + offset as u64, length: length as u32 }
}

fn write(region: &MemoryRegion, offset: usize) -> SendOperation {
    let remote_address = region.address() + offset as u64;
    SendOperation::Write { remote_address, remote_key: region.remote_key(), immediate: None }
}

fn read(region: &MemoryRegion, offset: usize) -> SendOperation {
    let remote_address = region.address() + offset as u64;
    SendOperation::Read { remote_address, remote_key: region.remote_key() }
}

const SEND: SendOperation = SendOperation::Send { immediate: None };

fn receive(id: u64) -> ReceiveRequest<[Piece; 0]> {
    ReceiveRequest { id, pieces: [] }
}

#[test]
fn eight_queue_pairs_over_two_shards_move_their_own_bytes() {
    const PAIRS: usize = 8;
    const LENGTH: usize = 100_000;
    const ROUNDS: usize = 10;
    let [a, b] = two([2, 2], PAIRS);
    for end in [&a, &b] {
        let slots: HashMap<u32, usize> =
            end.pairs.iter().fold(HashMap::new(), |mut slots, pair| {
                *slots.entry(slot(pair)).or_default() += 1;
                slots
            });
        assert_eq!(slots.values().collect::<Vec<_>>(), [&4, &4], "in turn");
    }
    let mut source: Vec<u8> =
        (0..PAIRS * LENGTH).map(|i| ((i as u64 * 0x9e37_79b9) >> 11) as u8).collect();
    let (mut there, mut back) = (vec![0; PAIRS * LENGTH], vec![0; PAIRS * LENGTH]);
    let (source_region, back_region) = (a.register(&mut source), a.register(&mut back));
    let there_region = b.register(&mut there);
    for round in 0..ROUNDS as u64 {
        for (index, pair) in a.pairs.iter().enumerate() {
            let at = index * LENGTH;
            // The READ answers after the WRITE before it is there (IBTA 9.5).
            let requests = [
                SendRequest::new(
                    round,
                    write(&there_region, at),
                    [piece(&source_region, at, LENGTH)],
                ),
                SendRequest::new(round, read(&there_region, at), [piece(&back_region, at, LENGTH)]),
            ];
            pair.post_send(&requests).unwrap();
        }
        let done = a.next_good(2 * PAIRS);
        let pairs: HashSet<_> = done.iter().map(|one| one.qpn).collect();
        assert_eq!(pairs.len(), PAIRS, "one completion queue has those of all");
    }
    drop((source_region, back_region, there_region));
    assert!(source == there && source == back);
    // Those of both shards together.
    let received = b.device.counters().payload_bytes_received;
    assert!(received >= (PAIRS * LENGTH * ROUNDS) as u64, "{received}");
    let sent = a.device.driver_counters().sent_bytes;
    assert!(sent >= received, "{sent}");
}

#[test]
fn devices_with_and_without_shards_talk() {
    for shards in [[1, 3], [3, 1]] {
        let [a, b] = two(shards, 6);
        assert_eq!([a.device.shards(), b.device.shards()], shards);
        for pair in &b.pairs {
            pair.post_receive(&[receive(1), receive(2)]).unwrap();
        }
        for pair in &a.pairs {
            pair.post_send(&[1, 2].map(|id| SendRequest::new(id, SEND, [EMPTY]))).unwrap();
        }
        a.next_good(12);
        b.next_good(12);
    }
}

#[test]
fn a_handler_is_called_for_all_shards_by_one_thread_at_a_time() {
    const PAIRS: usize = 4;
    const MESSAGES: usize = 2000;
    for progress in [false, true] {
        let device = open(2);
        let (running, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (sender, receiver) = mpsc::channel();
        let counted = Arc::clone(&seen);
        let handler = Box::new(move |completions: &[Completion]| {
            assert!(!running.swap(true, Ordering::SeqCst), "two at once");
            assert!(completions.iter().all(|one| one.status == CompletionStatus::Success));
            let before = counted.fetch_add(completions.len(), Ordering::SeqCst);
            if before + completions.len() == PAIRS * MESSAGES {
                sender.send(()).unwrap();
            }
            running.store(false, Ordering::SeqCst);
        });
        // The peer does not wait for the handler.
        let capacity = PAIRS * MESSAGES;
        let queue = match progress {
            false => device.create_completion_queue_with_handler(capacity, handler),
            true => device.create_completion_queue_with_progress_handler(capacity, handler),
        };
        let b = End::completing(device, queue.unwrap(), PAIRS);
        let a = End::new(open(2), PAIRS);
        connect(&a, &b, RETRIES);
        // Threads of the peer, and those that make its progress, at the same time.
        thread::scope(|scope| {
            scope.spawn(|| {
                let start = Instant::now();
                while seen.load(Ordering::SeqCst) < PAIRS * MESSAGES && start.elapsed() < PATIENCE {
                    b.device.progress();
                    thread::yield_now();
                }
            });
            for _ in 0..MESSAGES / DEPTH {
                for (pair, other) in a.pairs.iter().zip(&b.pairs) {
                    other.post_receive(&[receive(0); DEPTH]).unwrap();
                    let request = SendRequest::new(0, SEND, [EMPTY]);
                    pair.post_send(&[request; DEPTH]).unwrap();
                }
                a.next_good(PAIRS * DEPTH);
            }
            for (pair, other) in a.pairs.iter().zip(&b.pairs) {
                let rest = MESSAGES % DEPTH;
                other.post_receive(&vec![receive(0); rest]).unwrap();
                pair.post_send(&vec![SendRequest::new(0, SEND, [EMPTY]); rest]).unwrap();
            }
            a.next_good(PAIRS * (MESSAGES % DEPTH));
            receiver.recv_timeout(PATIENCE).unwrap();
        });
        assert_eq!(seen.load(Ordering::SeqCst), PAIRS * MESSAGES);
    }
}

#[test]
fn threads_that_wait_for_queues_of_all_shards_all_get_theirs() {
    const THREADS: usize = 4;
    let [a, b] = [open(2), open(2)];
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                // Each has queue pairs in both shards.
                let [a, b] = [&a, &b].map(|device| End::new(device.clone(), 2));
                connect(&a, &b, RETRIES);
                for round in 0..200 {
                    for (pair, other) in a.pairs.iter().zip(&b.pairs) {
                        other.post_receive(&[receive(round)]).unwrap();
                        pair.post_send(&[SendRequest::new(round, SEND, [EMPTY])]).unwrap();
                    }
                    a.next_good(2);
                    b.next_good(2);
                }
            });
        }
    });
}

#[test]
fn a_region_is_one_for_all_shards_and_gone_from_all() {
    const LENGTH: usize = 65_536;
    let [a, b] = two([2, 2], 2);
    let (mut here, mut there) = (vec![1; LENGTH], vec![2; LENGTH]);
    let region = a.register(&mut here);
    // Regions come and go in one order everywhere.
    let mut other = [0; 64];
    for _ in 0..10 {
        let (first, second) = (b.register(&mut other[..32]), b.register(&mut there[..64]));
        drop(first);
        drop(second);
    }
    let peers = b.register(&mut there);
    let request = |id| SendRequest::new(id, write(&peers, 0), [piece(&region, 0, LENGTH)]);
    for pair in &a.pairs {
        pair.post_send(&[0; 16].map(request)).unwrap();
    }
    a.next_good(2);
    let last = request(1);
    drop(peers);
    there.fill(0x5e);
    for pair in &a.pairs {
        pair.post_send(&[last]).unwrap();
    }
    let rest = a.next(32);
    for pair in &a.pairs {
        let own = rest.iter().filter(|one| one.qpn == pair.number());
        let failures: Vec<_> =
            own.map(|one| one.status).filter(|&it| it != CompletionStatus::Success).collect();
        assert_eq!(failures[0], CompletionStatus::RemoteAccess, "{failures:?}");
    }
    assert!(there.iter().all(|&byte| byte == 0x5e), "written after it was deregistered");
}

#[test]
fn what_a_peer_invalidates_is_closed_on_all_shards() {
    let [a, b] = two([2, 2], 2);
    let (mut here, mut there) = (vec![1; 64], vec![2; 64]);
    let (region, peers) = (a.register(&mut here), b.register(&mut there));
    assert_ne!(slot(&b.pairs[0]), slot(&b.pairs[1]));
    let request = |id| SendRequest::new(id, write(&peers, 0), [piece(&region, 0, 64)]);
    for pair in &a.pairs {
        pair.post_send(&[request(1)]).unwrap();
    }
    a.next_good(2);
    b.pairs[0].post_receive(&[receive(2)]).unwrap();
    let invalidate = SendOperation::SendInvalidate { remote_key: peers.remote_key() };
    a.pairs[0].post_send(&[SendRequest::new(2, invalidate, [EMPTY])]).unwrap();
    a.next_good(1);
    assert_eq!(b.next_good(1)[0].invalidated, Some(peers.remote_key()));
    a.pairs[1].post_send(&[request(3)]).unwrap();
    assert_eq!(a.next(1)[0].status, CompletionStatus::RemoteAccess);
    // The owner's own requests go on.
    b.pairs[0]
        .post_send(&[SendRequest::new(4, write(&region, 0), [piece(&peers, 0, 64)])])
        .unwrap();
    b.next_good(1);
}

#[test]
fn queue_pairs_of_a_shared_receive_queue_are_in_its_shard() {
    let b = End::new(open(3), 0);
    let a = End::new(open(1), 6);
    let capabilities = QueuePairCapabilities::new(DEPTH, 0);
    let queues: Vec<_> =
        (0..3).map(|_| b.domain.create_shared_receive_queue(DEPTH).unwrap()).collect();
    let ids: HashSet<_> = queues.iter().map(|queue| queue.id()).collect();
    assert_eq!(ids.len(), 3, "events tell them apart");
    let options = QueuePairOptions::new(&b.completions, capabilities);
    let pairs: Vec<_> = (0..6)
        .map(|index| {
            let shared_receives = Some(&queues[index / 2]);
            let options = QueuePairOptions { shared_receives, ..options };
            b.domain.create_queue_pair_with(&options).unwrap()
        })
        .collect();
    let slots: HashSet<_> = pairs.iter().map(slot).collect();
    assert_eq!(slots.len(), 3, "the queues are spread");
    for (pair, other) in a.pairs.iter().zip(&pairs) {
        let (one, other) = ((pair, &a.device), (other, &b.device));
        connect_one(one, other, RETRIES);
        connect_one(other, one, RETRIES);
    }
    for (index, queue) in queues.iter().enumerate() {
        assert_eq!(slot(&pairs[2 * index]), slot(&pairs[2 * index + 1]));
        queue.post_receive(&[0, 1, 2].map(receive)).unwrap();
        // All requests are there for one of the two.
        let request = SendRequest::new(index as u64, SEND, [EMPTY]);
        a.pairs[2 * index].post_send(&[request; 3]).unwrap();
    }
    a.next_good(9);
    b.next_good(9);
    // Where its queue is, or nowhere.
    let refused = (0..3)
        .filter(|&shard| {
            let shared_receives = Some(&queues[0]);
            let options = QueuePairOptions { shared_receives, shard: Some(shard), ..options };
            match b.domain.create_queue_pair_with(&options) {
                Ok(pair) => slot(&pair) != slot(&pairs[0]),
                Err(error) => matches!(error, CreateError::Unsupported(_)),
            }
        })
        .count();
    assert_eq!(refused, 2);
}

#[test]
fn the_caller_may_choose_the_shard() {
    let end = End::new(open(2), 0);
    let options = QueuePairOptions::new(&end.completions, QueuePairCapabilities::new(1, 1));
    let in_shard = |shard| {
        end.domain.create_queue_pair_with(&QueuePairOptions { shard: Some(shard), ..options })
    };
    let [first, second, third] = [0, 1, 1].map(|shard| slot(&in_shard(shard).unwrap()));
    assert_ne!(first, second);
    assert_eq!(second, third);
    assert!(matches!(in_shard(2), Err(CreateError::Unsupported(_))));
}

#[test]
fn the_limits_are_those_of_all_shards() {
    let end = End::new(open(2), 0);
    let limit = end.device.attributes().max_queue_pairs;
    assert_eq!(limit, 2 * open(1).attributes().max_queue_pairs);
    let capabilities = QueuePairCapabilities::new(1, 1);
    let create = || end.domain.create_queue_pair(&end.completions, &end.completions, capabilities);
    let mut pairs: Vec<_> = (0..limit).map(|_| create().unwrap()).collect();
    assert!(matches!(create(), Err(CreateError::TooMany { limit: all, .. }) if all == limit));
    // Where there is room, whosever turn it is.
    for _ in 0..3 {
        pairs.swap_remove(limit / 2);
        pairs.push(create().unwrap());
    }
}

#[test]
fn a_device_closes_while_its_shards_are_at_work() {
    const LENGTH: usize = 1 << 20;
    for _ in 0..5 {
        let [a, b] = [2, 2].map(|shards| End::new(open(shards), 4));
        // Silence has no other reason than that the peer has gone.
        connect(&a, &b, 1);
        let (mut here, mut there) = (vec![1; LENGTH], vec![2; LENGTH]);
        let (region, peers) = (a.register(&mut here), b.register(&mut there));
        let request = SendRequest::new(1, write(&peers, 0), [piece(&region, 0, LENGTH)]);
        for pair in &a.pairs {
            pair.post_send(&[request; 8]).unwrap();
        }
        a.next_good(1);
        drop(peers);
        drop(b);
        // Whatever has not completed by then fails: the peer refuses, or is not there.
        a.next(31);
        there.fill(0);
        // One may have had all of its requests completed.
        for pair in &a.pairs {
            pair.post_send(&[request]).unwrap();
        }
        a.next(4);
        for pair in &a.pairs {
            assert_eq!(pair.state(), QueuePairState::Error);
        }
        drop(region);
    }
}

#[test]
fn when_one_shard_fails_the_device_has_failed() {
    let device = open(2);
    let panicking = device
        .create_completion_queue_with_handler(4, Box::new(|_| panic!("the test wants a panic")))
        .unwrap();
    let b = End::new(device, 2);
    let capabilities = QueuePairCapabilities::new(1, 1);
    let pair = b.domain.create_queue_pair(&panicking, &panicking, capabilities).unwrap();
    let a = End::new(open(1), 2);
    connect(&a, &b, RETRIES);
    for pair in &b.pairs {
        pair.post_receive(&[receive(1), receive(2)]).unwrap();
    }
    // Flushed at once, which the handler hears of.
    for state in [QueuePairState::Initialized, QueuePairState::Error] {
        let access = (state == QueuePairState::Initialized).then_some(Access::empty());
        let attributes =
            QueuePairAttributes { state: Some(state), access, ..QueuePairAttributes::default() };
        pair.modify(&attributes).unwrap();
    }
    pair.post_receive(&[receive(3)]).unwrap();
    // Those of the other shard, too.
    let flushed = b.next(4);
    assert!(flushed.iter().all(|one| one.status == CompletionStatus::Flushed), "{flushed:?}");
    let failure = b.device.failure().unwrap();
    assert!(failure.contains("a bug"), "the reason, not what followed from it: {failure}");
    let mut ends = 0;
    while let Some(event) = b.device.wait_event(PATIENCE) {
        ends += usize::from(event == AsyncEvent::DeviceFatal);
    }
    assert_eq!(ends, 1);
    assert!(!b.completions.wait(PATIENCE));
    assert!(matches!(b.device.create_completion_queue(1), Err(CreateError::DeviceFailed)));
}

#[test]
fn shares_of_the_receive_buffers_are_given_back() {
    let device = open(2);
    let share = |queue_pairs| device.grant_receive_share(queue_pairs).unwrap();
    let first = share(2).bytes();
    assert!(first >= 2 * open(1).grant_receive_share(1).unwrap().bytes(), "of both buffers");
    let many: Vec<_> = (0..64).map(|_| share(8)).collect();
    assert!(share(2).bytes() < first);
    drop(many);
    assert_eq!(share(2).bytes(), first);
}

#[test]
fn shards_have_bounds_and_take_places_of_the_address() {
    for shards in [0, 17] {
        let error = Device::open_soft(&config(shards)).unwrap_err();
        assert!(matches!(error, OpenError::Shards { limit: 16, .. }), "{error}");
    }
    let packet = SoftConfig { driver: Driver::Packet, ..config(2) };
    let error = Device::open_soft(&packet).unwrap_err();
    assert!(matches!(error, OpenError::PacketDriverShards { shards: 2, .. }), "{error}");
    let all = config(16);
    let first = Device::open_soft(&all).unwrap();
    let second = Device::open_soft(&all).unwrap();
    let error = Device::open_soft(&SoftConfig { shards: 1, ..all.clone() }).unwrap_err();
    assert!(matches!(error, OpenError::NoSlotFree { .. }), "{error}");
    drop(first);
    let error = Device::open_soft(&SoftConfig { shards: 16, ..all.clone() });
    drop((error.unwrap(), second));
}
