//! Peers that die, refuse, are silent, lie, or come back as someone else.

mod common;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{
    LONG, address, contents, devices, engine, engine_with, pattern, private, request, shared,
    wait_for_first_bytes,
};
use millstream_lab::Stopwatch;
use millstream_metadata::{
    BufferDesc, Client, DeviceDesc, Frame, FrameType, Gid, HandShakeDesc, Handler, Notify, Probe,
    SegmentDesc, Server, ServerConfig,
};
use millstream_transfer::{
    Buffer, Config, FailureReason, Opcode, PeerAffinity, RdmaConfig, Segment, SegmentError,
    SubmitAndWaitError, SubmitError, SubmitOptions, TransferEngine, TransferError, TransferRequest,
    TransferState,
};

const MIB: u64 = 1 << 20;

/// The error of a request that fails.
fn failure(engine: &TransferEngine, request: TransferRequest) -> TransferError {
    match engine.submit_and_wait(&[request], LONG).unwrap_err() {
        SubmitAndWaitError::Failed { error, .. } => *error,
        other => panic!("{other}"),
    }
}

/// For peers that answer at once: on a machine that is busy or stands still for a while they are late.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// An engine whose queue pairs give up after 8 * 4 ms: for peers that do not live.
fn impatient() -> TransferEngine {
    with_patience(Duration::ZERO)
}

/// The same, which goes on connecting for so long.
fn with_patience(patience: Duration) -> TransferEngine {
    with_limits(patience, CALL_TIMEOUT)
}

fn with_limits(patience: Duration, call_timeout: Duration) -> TransferEngine {
    let address = address();
    let mut config = common::config(address);
    config.client.call_timeout = call_timeout;
    let engine = TransferEngine::new(config).unwrap();
    let rdma = RdmaConfig { acknowledge_timeout: 10, patience, ..RdmaConfig::new(&[address]) };
    engine.install_rdma(rdma).unwrap();
    engine
}

/// Submits `count` times the whole buffer.
fn submit_all(
    engine: &TransferEngine,
    local: &Buffer,
    segment: &Segment,
    count: usize,
) -> millstream_transfer::Batch {
    let whole = request(Opcode::Write, (local, 0), segment, 0, local.length() as u64);
    let batch = engine.allocate_batch(count).unwrap();
    engine.submit(&batch, &vec![whole; count]).unwrap();
    batch
}

#[test]
fn a_peer_that_dies_half_way_fails_the_task_and_is_named() {
    let (target, initiator) = (engine(1), engine(1));
    let name = target.name().to_owned();
    let nic = target.devices()[0].clone();
    let remote = shared(&target, 16 << 20);
    let local = private(&initiator, 16 << 20);
    let segment = initiator.open_segment(&name).unwrap();
    let batch = submit_all(&initiator, &local, &segment, 64);
    wait_for_first_bytes(&initiator, &batch);
    drop((target, remote));
    assert!(initiator.wait(&batch, LONG));
    let last = initiator.status(&batch, 63).unwrap();
    assert_eq!(last.state, TransferState::Failed);
    let error = last.error.unwrap();
    assert!(error.to_string().starts_with(&format!("peer {name} (nic {nic}): ")), "{error}");
    // It has said so, or nobody listens there any more.
    use FailureReason::{Closed, Unreachable};
    assert!(matches!(error.reason, Closed | Unreachable(_)), "{error}");
    for status in initiator.statuses(&batch) {
        match status.state {
            TransferState::Completed => assert_eq!(status.transferred_bytes, 16 * MIB),
            TransferState::Failed => assert!(status.transferred_bytes < 16 * MIB),
            other => panic!("{other:?}"),
        }
    }
    initiator.free(batch).unwrap();
    // And the next finds out at once.
    let again = request(Opcode::Read, (&local, 0), &segment, 0, 1);
    let error = initiator.submit_and_wait(&[again], LONG).unwrap_err();
    assert!(error.to_string().contains("no process listens there"), "{error}");
}

#[test]
fn the_initiator_may_die_half_way_too() {
    let (target, initiator) = (engine(1), engine(1));
    let remote = shared(&target, 16 << 20);
    let local = private(&initiator, 16 << 20);
    let segment = initiator.open_segment(target.name()).unwrap();
    let batch = submit_all(&initiator, &local, &segment, 16);
    wait_for_first_bytes(&initiator, &batch);
    drop(initiator);
    // What was begun has ended: the batch does not depend on its engine.
    let other = engine(1);
    assert!(other.wait(&batch, LONG));
    let last = other.status(&batch, 15).unwrap();
    assert_eq!(last.state, TransferState::Failed);
    assert!(matches!(last.error.unwrap().reason, FailureReason::ShutDown));
    drop(local);
    // The target serves others.
    let local = private(&other, 100);
    local.write(0, &[7; 100]).unwrap();
    let segment = other.open_segment(target.name()).unwrap();
    other.submit_and_wait(&[request(Opcode::Write, (&local, 0), &segment, 5, 100)], LONG).unwrap();
    assert_eq!(contents(&remote, 5, 100), [7; 100]);
}

#[test]
fn a_restarted_peer_is_not_taken_for_the_one_before() {
    let device = address();
    let start = |port: u16| {
        let config = Config { listen: (device, port).into(), ..common::config(device) };
        let engine = TransferEngine::new(config).unwrap();
        engine.install_rdma(RdmaConfig::new(&[device])).unwrap();
        engine
    };
    let initiator = engine(1);
    let local = private(&initiator, 1000);
    let first = start(0);
    let name = first.name().to_owned();
    let port = name.rsplit_once(':').unwrap().1.parse().unwrap();
    let remote = shared(&first, 1000);
    let segment = initiator.open_segment(&name).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 1000);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    drop(first);

    // The same address in memory even: it is the same process, after all.
    let second = start(port);
    let address = std::ptr::with_exposed_provenance_mut::<u8>(remote.address() as usize);
    assert!(second.unregister_memory(address).is_err());
    // The first has said that it closes. So its segment is asked for again, once in vain.
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err();
    assert!(matches!(error, SubmitAndWaitError::Submit(SubmitError::Restarted { .. })), "{error}");

    // It has other buffers now.
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err();
    assert!(
        matches!(error, SubmitAndWaitError::Submit(SubmitError::TargetOutOfRange { .. })),
        "{error}"
    );
    let remote = shared(&second, 1000);
    local.write(0, &[9; 1000]).unwrap();
    initiator.refresh_segment(segment.id()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 1000);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    assert_eq!(contents(&remote, 0, 1000), [9; 1000]);
}

#[test]
fn memory_that_a_peer_took_back_fails_only_the_tasks_that_use_it() {
    let (target, initiator) = (engine(1), engine(1));
    let kept = shared(&target, 4 << 20);
    let taken = shared(&target, 4 << 20);
    let local = private(&initiator, 4 << 20);
    let bytes = pattern(4 << 20, 4);
    local.write(0, &bytes).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    let to = |buffer: &Buffer| TransferRequest {
        opcode: Opcode::Write,
        source: local.address(),
        target: segment.id(),
        target_offset: buffer.address(),
        length: 4 * MIB,
    };
    let requests = [to(&kept), to(&taken), to(&kept)];
    drop(taken);
    let batch = initiator.allocate_batch(4).unwrap();
    initiator.submit(&batch, &requests).unwrap();
    assert!(initiator.wait(&batch, LONG));
    let states: Vec<_> = initiator.statuses(&batch).iter().map(|status| status.state).collect();
    use TransferState::{Completed, Failed};
    assert_eq!(states, [Completed, Failed, Completed]);
    let error = initiator.status(&batch, 1).unwrap().error.unwrap();
    assert!(error.to_string().contains("remote access error"), "{error}");
    assert!(contents(&kept, 0, 4 << 20) == bytes);
    // The descriptor has proven wrong, so it is asked for again.
    let error = initiator.submit(&batch, &requests[1..2]).unwrap_err();
    assert!(matches!(error, SubmitError::TargetOutOfRange { .. }), "{error}");
}

#[test]
fn memory_taken_back_here_fails_what_still_needs_it() {
    let (target, initiator) = (engine(1), engine(1));
    let _remote = shared(&target, 16 << 20);
    let local = private(&initiator, 16 << 20);
    let segment = initiator.open_segment(target.name()).unwrap();
    let batch = submit_all(&initiator, &local, &segment, 16);
    wait_for_first_bytes(&initiator, &batch);
    drop(local);
    assert!(initiator.wait(&batch, LONG));
    let last = initiator.status(&batch, 15).unwrap();
    assert_eq!(last.state, TransferState::Failed);
    let text = last.error.unwrap().to_string();
    // The kernel's soft-RoCE calls it a "local QP operation error", 2.
    let rxe = devices::are_of_the_system() && text.contains("work completion status 2");
    assert!(text.contains("local protection error") || rxe, "{text}");
}

#[test]
fn what_is_canceled_stops() {
    let (target, initiator) = (engine(1), engine(1));
    let _remote = shared(&target, 16 << 20);
    let local = private(&initiator, 16 << 20);
    let segment = initiator.open_segment(target.name()).unwrap();
    let batch = submit_all(&initiator, &local, &segment, 16);
    wait_for_first_bytes(&initiator, &batch);
    assert!(initiator.cancel(&batch, 15).unwrap());
    assert!(!initiator.cancel(&batch, 15).unwrap());
    assert!(initiator.cancel(&batch, 16).is_err());
    assert!(initiator.wait(&batch, LONG));
    assert_eq!(initiator.status(&batch, 15).unwrap().state, TransferState::Canceled);
    assert_eq!(initiator.status(&batch, 0).unwrap().state, TransferState::Completed);

    // Running out of time is the same, for all of them.
    let whole = request(Opcode::Write, (&local, 0), &segment, 0, 16 * MIB);
    let error = initiator.submit_and_wait(&[whole; 16], Duration::ZERO).unwrap_err();
    assert!(matches!(error, SubmitAndWaitError::Timeout { .. }), "{error}");
    initiator.submit_and_wait(&[whole], LONG).unwrap();
}

#[test]
fn at_the_limit_the_oldest_connection_makes_room() {
    let limited = RdmaConfig { max_accepted_queue_pairs: 1, ..RdmaConfig::new(&[address()]) };
    let target = engine_with(limited);
    let remote = shared(&target, 100);
    let (first, second) = (engine(1), engine(1));
    let write = |engine: &TransferEngine, byte| {
        let local = private(engine, 100);
        local.write(0, &[byte; 100]).unwrap();
        let segment = engine.open_segment(target.name()).unwrap();
        engine.submit_and_wait(&[request(Opcode::Write, (&local, 0), &segment, 0, 100)], LONG)
    };
    write(&first, 1).unwrap();
    // Whoever was killed does not say goodbye, so the oldest makes room.
    write(&second, 2).unwrap();
    assert_eq!(contents(&remote, 0, 100), [2; 100]);
    // If it was still there, it connects again.
    write(&first, 3).unwrap();
    assert_eq!(contents(&remote, 0, 100), [3; 100]);
}

/// By silence, an engine would learn after so long that its connection is gone.
const SILENT: Duration = Duration::from_secs(2);

#[test]
fn who_made_room_for_another_connects_again_at_once() {
    let limited = RdmaConfig { max_accepted_queue_pairs: 1, ..RdmaConfig::new(&[address()]) };
    let target = engine_with(limited);
    let remote = shared(&target, 2 << 20);
    let device = address();
    let config = Config { host: Some("localhost".to_owned()), ..common::config(device) };
    let named = TransferEngine::new(config).unwrap();
    named.install_rdma(RdmaConfig::new(&[device])).unwrap();
    // The name of the second is no address.
    let initiators = [engine(1), named];
    let locals = [0, 1].map(|index: usize| private(&initiators[index], 1 << 20));
    let write = |index: usize, round: u64| {
        let bytes = pattern(1 << 20, 2 * round + index as u64);
        locals[index].write(0, &bytes).unwrap();
        let segment = initiators[index].open_segment(target.name()).unwrap();
        let offset = index as u64 * MIB;
        let write = request(Opcode::Write, (&locals[index], 0), &segment, offset, MIB);
        initiators[index].submit_and_wait(&[write], LONG).unwrap();
        assert!(contents(&remote, index << 20, 1 << 20) == bytes, "{index} {round}");
    };
    let mut all: Vec<Duration> = (0..20)
        .map(|turn| {
            let stopwatch = Stopwatch::start();
            write(turn % 2, turn as u64 / 2);
            stopwatch.took().own()
        })
        .collect();
    println!("20 by turns: {all:?}");
    // Each of them would take so long, wherever it runs. Emulated processors need a while for the bytes, too.
    all.sort_unstable();
    assert!(all[15] < SILENT / if devices::are_of_the_system() { 2 } else { 20 }, "{all:?}");
    // And so do those that drive out each other in the middle of it.
    std::thread::scope(|scope| {
        for index in [0, 1] {
            let write = &write;
            scope.spawn(move || (10..20).for_each(|round| write(index, round)));
        }
    });
}

/// The connection to the one is closed to make room for that to the other.
#[test]
fn an_initiator_with_room_for_one_connection_writes_to_two_targets_by_turns() {
    let initiator = engine_with(RdmaConfig { max_endpoints: 1, ..RdmaConfig::new(&[address()]) });
    let local = private(&initiator, 100);
    let targets = [engine(1), engine(1)];
    let remotes = targets.each_ref().map(|target| shared(target, 100));
    let segments = targets.each_ref().map(|target| initiator.open_segment(target.name()).unwrap());
    for round in 0..10 {
        let (index, byte) = (round % 2, round as u8);
        local.write(0, &[byte; 100]).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segments[index], 0, 100);
        initiator.submit_and_wait(&[write], LONG).unwrap();
        assert_eq!(contents(&remotes[index], 0, 100), [byte; 100]);
    }
}

/// A peer that offers a segment, and answers handshakes as it likes.
struct FakePeer {
    devices: Vec<std::net::IpAddr>,
    name: std::sync::OnceLock<String>,
    answer: fn(&HandShakeDesc, u32) -> Option<HandShakeDesc>,
    handshakes: AtomicU32,
}

impl Handler for FakePeer {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        let body = if request.frame_type == FrameType::Metadata {
            let device = |(index, &address)| DeviceDesc {
                name: format!("fake_{index}"),
                lid: 0,
                gid: Gid::from_address(address),
            };
            let keys = vec![1; self.devices.len()];
            let buffer = BufferDesc {
                name: "cpu:0".to_owned(),
                addr: 4096,
                length: 4096,
                rkey: keys.clone(),
                lkey: keys,
                ..BufferDesc::default()
            };
            let descriptor = SegmentDesc {
                name: self.name.get()?.clone(),
                protocol: "rdma".to_owned(),
                devices: self.devices.iter().enumerate().map(device).collect(),
                buffers: vec![buffer],
                ..SegmentDesc::default()
            };
            descriptor.to_json()
        } else {
            let before = self.handshakes.fetch_add(1, Ordering::Relaxed);
            (self.answer)(&HandShakeDesc::from_json(&request.body).ok()?, before)?.to_json()
        };
        Some(Frame::new(request.frame_type, body))
    }
}

/// The failure of writing to a peer that answers like this. It is told how many handshakes came
/// before.
fn against(answer: fn(&HandShakeDesc, u32) -> Option<HandShakeDesc>) -> TransferError {
    failure_of(&impatient(), Opcode::Write, answer)
}

fn failure_of(
    initiator: &TransferEngine,
    opcode: Opcode,
    answer: fn(&HandShakeDesc, u32) -> Option<HandShakeDesc>,
) -> TransferError {
    failure_with(initiator, opcode, &fake_peer(answer))
}

fn failure_with(initiator: &TransferEngine, opcode: Opcode, server: &Server) -> TransferError {
    let local = private(initiator, 4096);
    let segment = initiator.open_segment(&server.address().to_string()).unwrap();
    failure(initiator, request(opcode, (&local, 0), &segment, 0, 4096))
}

fn fake_peer(answer: fn(&HandShakeDesc, u32) -> Option<HandShakeDesc>) -> Server {
    fake_peer_with(1, answer)
}

fn fake_peer_with(
    devices: usize,
    answer: fn(&HandShakeDesc, u32) -> Option<HandShakeDesc>,
) -> Server {
    let device = address();
    let others = (1..devices).map(|_| address());
    let peer = Arc::new(FakePeer {
        devices: std::iter::once(device).chain(others).collect(),
        name: Default::default(),
        answer,
        handshakes: AtomicU32::new(0),
    });
    let config = ServerConfig::default();
    let server =
        Server::start((device, 0).into(), config, Arc::clone(&peer) as Arc<dyn Handler>).unwrap();
    peer.name.set(server.address().to_string()).unwrap();
    server
}

#[test]
fn a_deadline_that_has_passed_ends_a_task_that_cannot_go_on() {
    let initiator = with_patience(LONG);
    let server = fake_peer(|_, _| None);
    let local = private(&initiator, 4096);
    let segment = initiator.open_segment(&server.address().to_string()).unwrap();
    for opcode in [Opcode::Read, Opcode::Write] {
        let batch = initiator.allocate_batch(1).unwrap();
        let late = Instant::now() + Duration::from_millis(50);
        let options = SubmitOptions { deadline: Some(late), ..SubmitOptions::default() };
        let work = request(opcode, (&local, 0), &segment, 0, 4096);
        initiator.submit_with(&batch, &[work], &options).unwrap();
        assert!(initiator.wait(&batch, LONG));
        let status = initiator.status(&batch, 0).unwrap();
        assert_eq!(status.state, TransferState::Timeout, "{status:?}");
        // Nothing was sent.
        assert_eq!((status.transferred_bytes, status.target_undefined), (0, false));
        assert!(Instant::now() >= late);
    }
}

#[test]
fn without_a_fence_the_target_is_undefined() {
    let initiator = impatient();
    // It promises a queue pair where there is none, and does not know of fences.
    let server = fake_peer(|request, _| {
        Some(HandShakeDesc { qp_num: vec![7], incarnation: None, ..request.clone() })
    });
    let local = private(&initiator, 4096);
    let segment = initiator.open_segment(&server.address().to_string()).unwrap();
    for (opcode, undefined) in [(Opcode::Write, true), (Opcode::Read, false)] {
        let batch = initiator.allocate_batch(1).unwrap();
        initiator.submit(&batch, &[request(opcode, (&local, 0), &segment, 0, 4096)]).unwrap();
        assert!(initiator.wait(&batch, LONG));
        let status = initiator.status(&batch, 0).unwrap();
        assert_eq!(status.state, TransferState::Failed, "{status:?}");
        assert_eq!(status.target_undefined, undefined, "{status:?}");
    }
}

#[test]
fn handshakes_that_go_wrong() {
    let error = against(|_, _| None);
    assert!(matches!(error.reason, FailureReason::Unreachable(_)), "{error}");
    let error = against(|_, _| Some(HandShakeDesc::refusal("no")));
    let text = error.to_string();
    assert!(text.contains("(nic fake_0): 4096 bytes at 0x1000 by nic "), "{text}");
    assert!(text.ends_with(" here: it refused to connect: no"), "{text}");
    assert!(error.local_nic.is_some() && error.range == Some((4096, 4096)), "{error:?}");
    let error = against(|_, _| Some(HandShakeDesc::default()));
    assert!(error.to_string().contains("0 queue pairs where 1 were expected"), "{error}");
    let error = against(|request, _| {
        Some(HandShakeDesc { qp_num: vec![7], path_mtu: Some(3), ..request.clone() })
    });
    assert!(error.to_string().contains("3 bytes are no path MTU"), "{error}");
}

/// An engine with the policy that connects NICs that are near first, and others only if need be.
fn classic_with(config: RdmaConfig) -> TransferEngine {
    let engine = TransferEngine::new(Config::new(config.addresses[0])).unwrap();
    engine.install_rdma(config).unwrap();
    engine
}

/// Then the other one, since the first is refused.
#[test]
fn the_nic_that_is_near_to_the_memory_is_taken() {
    let addresses = [address(), address()];
    let names = addresses.map(|address| devices::open(address).name().to_owned());
    let folder = std::env::temp_dir().join(format!("millstream-nics-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (near, far) in [(0, 1), (1, 0)] {
        let file = folder.join(format!("{near}.json"));
        let json = format!(r#"{{"cpu:0":[["{}"],["{}"]]}}"#, names[near], names[far]);
        std::fs::write(&file, json).unwrap();
        let initiator =
            classic_with(RdmaConfig { topology_file: Some(file), ..RdmaConfig::new(&addresses) });
        static ASKED: Mutex<Vec<String>> = Mutex::new(Vec::new());
        failure_of(&initiator, Opcode::Write, |request, _| {
            ASKED.lock().unwrap().push(request.local_nic_path.clone());
            Some(HandShakeDesc::refusal("no"))
        });
        let asked = std::mem::take(&mut *ASKED.lock().unwrap());
        assert!(asked[0].ends_with(&names[near]), "{asked:?}");
        // The first may be asked again before, after 10 ms.
        assert!(asked.iter().any(|asked| asked.ends_with(&names[far])), "{asked:?}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
    let none = RdmaConfig { topology_file: Some(folder), ..RdmaConfig::new(&[address()]) };
    let engine = TransferEngine::new(common::config(address())).unwrap();
    let error = engine.install_rdma(none).unwrap_err().to_string();
    assert!(error.contains("topology_file"), "{error}");
}

/// Then the others.
#[test]
fn the_nic_that_goes_with_ours_is_taken() {
    static ASKED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let own = address();
    let name = devices::open(own).name().to_owned();
    for goes_with in ["fake_0", "fake_1", "fake_2"] {
        let peer_affinity = PeerAffinity::parse(&format!("{name}={goes_with}")).unwrap();
        let initiator = classic_with(RdmaConfig { peer_affinity, ..RdmaConfig::new(&[own]) });
        let server = fake_peer_with(3, |request, _| {
            ASKED.lock().unwrap().push(request.peer_nic_path.clone());
            Some(HandShakeDesc::refusal("no"))
        });
        failure_with(&initiator, Opcode::Write, &server);
        let asked = std::mem::take(&mut *ASKED.lock().unwrap());
        assert!(asked[0].ends_with(goes_with), "{asked:?}");
        assert!(!asked[1].ends_with(goes_with), "{asked:?}");
    }
}

/// More than a flow has queues for.
#[test]
fn memory_at_any_number_of_locations_is_sent_from() {
    const LOCATIONS: usize = 300;
    let address = address();
    let near = |index| format!(r#""numa:{index}":[["soft-{address}"],[]]"#);
    let entries: Vec<_> = (0..LOCATIONS).map(near).collect();
    let file = std::env::temp_dir().join(format!("millstream-many-{}.json", std::process::id()));
    std::fs::write(&file, format!("{{{}}}", entries.join(","))).unwrap();
    let config = RdmaConfig { topology_file: Some(file.clone()), ..RdmaConfig::new(&[address]) };
    let (target, initiator) = (engine(1), engine_with(config));
    std::fs::remove_file(file).unwrap();
    let remote = shared(&target, 2 * LOCATIONS);
    let segment = initiator.open_segment(target.name()).unwrap();
    // The second time the first ones have their queues still.
    for round in 0..2 {
        for index in 0..LOCATIONS {
            let name = format!("numa:{index}");
            let local = initiator.allocate_buffer(2, &name, false).unwrap();
            let bytes = [index as u8, (index >> 8) as u8 + round];
            local.write(0, &bytes).unwrap();
            let offset = 2 * index;
            let write = request(Opcode::Write, (&local, 0), &segment, offset as u64, 2);
            initiator.submit_and_wait(&[write], LONG).unwrap();
            assert_eq!(contents(&remote, offset, 2), bytes, "{index}");
        }
    }
}

#[test]
fn a_peer_whose_queue_pair_does_not_answer_is_gone() {
    // It promises a queue pair where there is none, and does not know of fences.
    let error = against(|request, _| {
        Some(HandShakeDesc { qp_num: vec![7], local_gid: None, ..request.clone() })
    });
    assert!(
        error.to_string().contains("retry count exceeded: the peer does not answer;"),
        "{error}"
    );
}

#[test]
fn patience_outlasts_handshakes_without_a_reply_and_connections_that_break() {
    // The last answer is one that no patience helps against: it shows that all before were tried.
    let answer: fn(&HandShakeDesc, u32) -> Option<HandShakeDesc> = |request, before| match before {
        0..2 => None,
        2 => Some(HandShakeDesc { qp_num: vec![7], local_gid: None, ..request.clone() }),
        _ => Some(HandShakeDesc::refusal("enough")),
    };
    let error = failure_of(&with_patience(LONG), Opcode::Read, answer);
    assert!(error.to_string().ends_with("it refused to connect: enough"), "{error}");
}

/// Three failures pause a rail, here the only one, for a second.
#[test]
fn what_comes_after_a_failure_does_not_wait_for_the_end_of_a_pause() {
    // How often it is asked until the first request has failed is a matter of time.
    static ANSWERS: AtomicBool = AtomicBool::new(false);
    let initiator = impatient();
    let server =
        fake_peer(|_, _| ANSWERS.load(Ordering::Relaxed).then(|| HandShakeDesc::refusal("enough")));
    let local = private(&initiator, 4096);
    let segment = initiator.open_segment(&server.address().to_string()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 4096);
    let error = failure(&initiator, write);
    assert!(matches!(error.reason, FailureReason::Unreachable(_)), "{error}");
    ANSWERS.store(true, Ordering::Relaxed);
    let error = failure(&initiator, write);
    assert!(error.to_string().ends_with("it refused to connect: enough"), "{error}");
}

#[test]
fn patience_comes_to_an_end() {
    let error = failure_of(&with_patience(Duration::from_millis(300)), Opcode::Read, |_, _| None);
    assert!(matches!(error.reason, FailureReason::Unreachable(_)), "{error}");
}

#[test]
fn a_patient_engine_stops_at_once() {
    let initiator = with_patience(Duration::MAX);
    let local = private(&initiator, 100);
    let peer = engine(1);
    let _remote = shared(&peer, 100);
    // A handshake that is never answered: the port of a listener that accepts nothing.
    let segment = initiator.open_segment(peer.name()).unwrap();
    let address: SocketAddr = peer.name().parse().unwrap();
    drop(peer);
    let _silent = std::net::TcpListener::bind(address).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 100);
    let batch = initiator.allocate_batch(1).unwrap();
    initiator.submit(&batch, &[write]).unwrap();
    drop(initiator);
    let other = engine(1);
    let error = other.status(&batch, 0).unwrap().error.unwrap();
    assert!(matches!(error.reason, FailureReason::ShutDown), "{error}");
}

#[test]
fn a_peer_that_is_silent_is_not_waited_for_long() {
    let silent = std::net::TcpListener::bind((address(), 0)).unwrap();
    let initiator = with_limits(Duration::ZERO, Duration::from_millis(200));
    let error = initiator.open_segment(&silent.local_addr().unwrap().to_string()).unwrap_err();
    assert!(error.to_string().contains("gave no whole reply within 200ms"), "{error}");
}

/// Submissions to it: one waits, the next does not. A refresh asks again at any time.
#[test]
fn submissions_do_not_all_wait_for_a_peer_that_is_silent() {
    let initiator = impatient();
    let local = private(&initiator, 1000);
    let target = engine(1);
    let listen = target.listening_at();
    let remote = shared(&target, 1000);
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 1000);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    drop((remote, target));
    let refused = || match initiator.submit_and_wait(&[write], LONG) {
        Err(SubmitAndWaitError::Submit(SubmitError::Refresh(error))) => error,
        other => panic!("{other:?}"),
    };
    // It has said that it closes. What is refused at once is asked for by each submission.
    for _ in 0..2 {
        let error = refused();
        assert!(matches!(error, SegmentError::Store { .. }), "{error}");
    }
    let silent = std::net::TcpListener::bind(listen).unwrap();
    let error = refused();
    assert!(matches!(error, SegmentError::Store { .. }), "{error}");
    let error = refused();
    assert!(matches!(error, SegmentError::Silent { .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with(&format!("segment \"{}\" did not answer ", segment.name())), "{text}");
    let error = initiator.refresh_segment(segment.id()).unwrap_err();
    assert!(matches!(error, SegmentError::Store { .. }), "{error}");
    // Another one answers: it is asked again, and what it says holds.
    drop(silent);
    let config = Config { listen, ..common::config(listen.ip()) };
    let again = TransferEngine::new(config).unwrap();
    initiator.refresh_segment(segment.id()).unwrap();
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err();
    assert!(
        matches!(error, SubmitAndWaitError::Submit(SubmitError::TargetOutOfRange { .. })),
        "{error}"
    );
    drop(again);
}

#[test]
fn handshakes_that_make_no_sense_are_refused() {
    let target = engine(1);
    let peer = target.name().parse().unwrap();
    let call = |frame_type, body: Vec<u8>| {
        Client::default().call(&peer, &Frame::new(frame_type, body)).unwrap().body
    };
    let good = HandShakeDesc {
        local_nic_path: "somebody:1@nic".to_owned(),
        local_gid: Some(Gid::from_address(address())),
        peer_nic_path: format!("{}@{}", target.name(), target.devices()[0]),
        qp_num: vec![17],
        ..HandShakeDesc::default()
    };
    let reply = |request: &HandShakeDesc| {
        HandShakeDesc::from_json(&call(FrameType::Connection, request.to_json())).unwrap()
    };
    let accepted = reply(&good);
    assert_eq!((accepted.reply_msg.as_str(), accepted.qp_num.len()), ("", 1));
    assert_eq!(accepted.local_nic_path, good.peer_nic_path);
    assert_eq!(accepted.start_psn.len(), 1);

    for (bad, why) in [
        (HandShakeDesc { peer_nic_path: "x".to_owned(), ..good.clone() }, "not a NIC path"),
        (
            HandShakeDesc { peer_nic_path: format!("{}@x", target.name()), ..good.clone() },
            "has no NIC \"x\"",
        ),
        (
            HandShakeDesc {
                peer_nic_path: format!("other:1@{}", target.devices()[0]),
                ..good.clone()
            },
            "not other:1",
        ),
        (HandShakeDesc { local_gid: None, ..good.clone() }, "does not say the GID"),
        (HandShakeDesc { qp_num: vec![], ..good.clone() }, "0 queue pairs"),
        (HandShakeDesc { qp_num: vec![1; 17], ..good.clone() }, "17 queue pairs"),
        (HandShakeDesc { qp_num: vec![1 << 24], ..good.clone() }, "no queue pair number"),
        (HandShakeDesc { local_nic_path: "x".repeat(600), ..good.clone() }, "more than 512 bytes"),
        (
            HandShakeDesc {
                local_gid: Some(Gid::from_address("::1".parse().unwrap())),
                ..good.clone()
            },
            "",
        ),
    ] {
        let refusal = reply(&bad).reply_msg;
        assert!(!refusal.is_empty() && refusal.contains(why), "{refusal:?}: {why}");
    }
    let reply = call(FrameType::Connection, b"nonsense".to_vec());
    let refusal = HandShakeDesc::from_json(&reply).unwrap().reply_msg;
    assert!(refusal.starts_with("malformed handshake"), "{refusal}");

    // What came before there were types, and the small messages.
    let reply = call(FrameType::OldProtocol, good.to_json());
    assert_eq!(HandShakeDesc::from_json(&reply).unwrap().qp_num.len(), 1);
    let probe: Probe = serde_json::from_slice(&call(FrameType::Probe, b"{}".to_vec())).unwrap();
    assert_eq!(probe.status, "success");
    let notify: Notify = serde_json::from_slice(&call(FrameType::Notify, b"{}".to_vec())).unwrap();
    assert_eq!(notify.notify_msg, "success");
}
