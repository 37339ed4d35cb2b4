//! Segments that are reached by way of a third node.

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::node::{self, Node};
use common::relay::Setup;
use common::{LONG, address, config, contents, engine, pattern, private, request, shared};
use millstream_transfer::{
    Batch, InstallError, Opcode, Pieces, PiecesRequest, RelayConfig, RelayLimits, SegmentError,
    SubmitError, SubmitNewError, SubmitOptions, TcpConfig, TransferEngine, TransferPiece,
    TransferState, TransferStatus,
};

const LENGTH: usize = 1 << 20;

/// Set in processes that are relays.
const ROLE: &str = "MILLSTREAM_TEST_RELAY";

fn relaying(limits: RelayLimits) -> TcpConfig {
    TcpConfig { relay: Some(limits), ..TcpConfig::default() }
}

/// An engine that reaches others over `rdma` and `tcp`, and relays.
fn relay_with(limits: RelayLimits) -> TransferEngine {
    let engine = engine(1);
    engine.install_tcp(relaying(limits)).unwrap();
    engine
}

fn relay() -> TransferEngine {
    relay_with(RelayLimits::default())
}

/// An engine that reaches others by way of these relays, and not at all itself.
fn distant(relays: &[&str]) -> TransferEngine {
    let engine = TransferEngine::new(config(address())).unwrap();
    engine.install_relay(&RelayConfig::new(relays)).unwrap();
    engine
}

/// An engine that is reached over `tcp`.
fn over_tcp() -> TransferEngine {
    let engine = TransferEngine::new(config(address())).unwrap();
    engine.install_tcp(TcpConfig::default()).unwrap();
    engine
}

fn ended(engine: &TransferEngine, batch: &Batch) -> TransferStatus {
    assert!(engine.wait(batch, LONG));
    engine.status(batch, 0).unwrap()
}

/// A node, or nothing if this process is to be none.
#[test]
fn a_node() {
    node::run();
}

/// A process that relays until it is killed.
#[test]
fn a_relay() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let address = address();
    let engine = TransferEngine::new(config(address)).unwrap();
    engine.install_rdma(common::relay::relayed(address)).unwrap();
    engine.install_tcp(relaying(RelayLimits::default())).unwrap();
    engine.require(Some("rdma")).unwrap();
    println!("relay: {}", engine.name());
    // Until the test ends, if it does not kill it before.
    let _ = std::io::stdin().lines().next();
    std::process::exit(0);
}

/// [`a_relay`], killed when it is dropped.
struct Process(Child, String);

impl Process {
    fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "a_relay", "--nocapture"]).env(ROLE, "1");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("relay: ") {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "it ended early");
        }
        let name = line.trim().rsplit_once("relay: ").unwrap().1.to_owned();
        Self(child, name)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn bytes_come_and_go_over_whatever_leads_from_the_relay() {
    for target in [engine(1), over_tcp()] {
        let relay = relay();
        let initiator = distant(&["127.0.0.1:1", relay.name()]);
        let length = 5 * LENGTH + 12_345;
        let remote = shared(&target, length);
        let (local, back) = (private(&initiator, length), private(&initiator, length));
        local.write(0, &pattern(length, 1)).unwrap();
        let segment = initiator.open_segment(target.name()).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, length as u64);
        let batch = initiator.submit_new(&[write], &SubmitOptions::default()).unwrap();
        let status = ended(&initiator, &batch);
        assert_eq!(status.state, TransferState::Completed, "{status:?}");
        assert_eq!((status.transport, status.transferred_bytes), (Some("relay"), length as u64));
        // What is COMPLETED is there, and not on its way.
        assert!(contents(&remote, 0, length) == pattern(length, 1));
        let read = request(Opcode::Read, (&back, 0), &segment, 0, length as u64);
        initiator.submit_and_wait(&[read], LONG).unwrap();
        assert!(contents(&back, 0, length) == pattern(length, 1));
        let reports = initiator.paths(segment.id()).unwrap();
        assert!(reports.iter().any(|it| it.transport == "relay" && it.chosen), "{reports:?}");
        let rails = initiator.metrics().rails;
        assert!(rails.iter().any(|it| it.transport == "relay"), "{rails:?}");
    }
}

#[test]
fn many_pieces_and_requests_at_once_are_all_right() {
    const PIECE: usize = 3000;
    let (target, relay) = (over_tcp(), relay());
    let initiator = distant(&[relay.name()]);
    let length = 2 * LENGTH;
    let (remote, local) = (shared(&target, length), private(&initiator, length));
    local.write(0, &pattern(length, 2)).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    // Backwards there, in pieces; more of them than a message takes.
    let count = length / PIECE;
    let pieces: Vec<_> = (0..count)
        .map(|index| TransferPiece {
            source: local.address() + (index * PIECE) as u64,
            target_offset: segment
                .address_of(0, ((count - 1 - index) * PIECE) as u64, PIECE as u64)
                .unwrap(),
            length: PIECE as u64,
        })
        .collect();
    let pieces = Pieces::List(&pieces);
    let request = PiecesRequest { opcode: Opcode::Write, target: segment.id(), pieces };
    let batch = initiator.allocate_batch(1).unwrap();
    initiator.submit_pieces(&batch, &[request], &SubmitOptions::default()).unwrap();
    assert_eq!(ended(&initiator, &batch).state, TransferState::Completed);
    let bytes = pattern(length, 2);
    for index in 0..count {
        let there = contents(&remote, (count - 1 - index) * PIECE, PIECE);
        assert!(there == bytes[index * PIECE..][..PIECE], "piece {index}");
    }
    let each: Vec<_> = (0..256)
        .map(|index| {
            common::request(Opcode::Write, (&local, index * 8192), &segment, index * 8192, 8192)
        })
        .collect();
    initiator.submit_and_wait(&each, LONG).unwrap();
    assert!(contents(&remote, 0, length) == bytes);
}

#[test]
fn what_leads_there_itself_goes_before_a_relay() {
    let (target, relay) = (over_tcp(), relay());
    let _remote = shared(&target, LENGTH);
    let initiator = over_tcp();
    initiator.install_relay(&RelayConfig::new(&[relay.name()])).unwrap();
    let local = private(&initiator, LENGTH);
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    let batch = initiator.submit_new(&[write], &SubmitOptions::default()).unwrap();
    assert_eq!(ended(&initiator, &batch).transport, Some("tcp"));
    // Where the relay is required it is asked, though others lead.
    initiator.require(Some("relay")).unwrap();
    let batch = initiator.submit_new(&[write], &SubmitOptions::default()).unwrap();
    assert_eq!(ended(&initiator, &batch).transport, Some("relay"));
}

#[test]
fn a_relay_says_why_it_does_not_relay() {
    let refused = |initiator: &TransferEngine, target: &TransferEngine| {
        let local = private(initiator, 64);
        let segment = initiator.open_segment(target.name()).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, 64);
        let error = initiator.submit_new(&[write], &SubmitOptions::default()).unwrap_err();
        error.to_string()
    };
    let (target, other, no_relay) = (over_tcp(), over_tcp(), over_tcp());
    let remotes = [&target, &other, &no_relay].map(|engine| shared(engine, 64));
    let said = refused(&distant(&[no_relay.name()]), &target);
    assert!(said.contains("is no relay"), "{said}");
    let limits = RelayLimits { max_segments: 1, ..RelayLimits::default() };
    let relay = relay_with(limits);
    let own = shared(&relay, 64);
    let initiator = distant(&[relay.name()]);
    let said = refused(&initiator, &relay);
    assert!(said.contains("the relay's own segment"), "{said}");
    // Nothing leads there from the relay either.
    let alone = TransferEngine::new(config(address())).unwrap();
    let of_alone = shared(&alone, 64);
    let said = refused(&initiator, &alone);
    assert!(said.contains("it has no way there itself"), "{said}");
    // One whose way is used keeps it.
    let local = private(&initiator, 64);
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 64);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    let said = refused(&initiator, &other);
    assert!(said.contains("it relays to 1 segments already"), "{said}");
    // Nobody has the name: neither from here nor from there.
    let nowhere = common::address();
    let error = initiator.open_segment(&format!("{nowhere}:9")).unwrap_err();
    assert!(matches!(error, SegmentError::NotRelayed { .. }), "{error}");
    assert!(error.to_string().contains("refused"), "{error}");
    drop((remotes, own, of_alone));
}

#[test]
fn who_relays_asks_no_relay() {
    let relay = relay();
    let refused = relay.install_relay(&RelayConfig::new(&["127.0.0.1:1"])).unwrap_err();
    assert!(matches!(refused, InstallError::Relay(_)), "{refused}");
    let initiator = distant(&[relay.name()]);
    let refused = initiator.install_tcp(relaying(RelayLimits::default())).unwrap_err();
    assert!(matches!(refused, InstallError::Relay(_)), "{refused}");
    for relays in [&[][..], &["nonsense"], &["127.0.0.1:1"; 17]] {
        let engine = TransferEngine::new(config(address())).unwrap();
        assert!(engine.install_relay(&RelayConfig::new(relays)).is_err(), "{relays:?}");
    }
    let limits = RelayLimits { max_connections: 0, ..RelayLimits::default() };
    let engine = TransferEngine::new(config(address())).unwrap();
    assert!(matches!(engine.install_tcp(relaying(limits)), Err(InstallError::OutOfRange { .. })));
    for timeout in [Duration::from_millis(99), Duration::MAX] {
        let limits = RelayLimits { timeout, ..RelayLimits::default() };
        assert!(matches!(engine.install_tcp(relaying(limits)), Err(InstallError::Relay(_))));
    }
}

#[test]
fn a_relay_serves_no_more_connections_than_it_has_room_for() {
    let idle = Duration::from_secs(3600);
    let limits = RelayLimits { max_connections: 1, idle, ..RelayLimits::default() };
    let (target, relay) = (over_tcp(), relay_with(limits));
    let length = 8 * LENGTH;
    let remote = shared(&target, length);
    let initiators = [(); 2].map(|()| distant(&[relay.name()]));
    let locals = initiators.each_ref().map(|engine| private(engine, length));
    locals[0].write(0, &pattern(length, 3)).unwrap();
    let segments = initiators.each_ref().map(|it| it.open_segment(target.name()).unwrap());
    let write = |of: usize| {
        let write = request(Opcode::Write, (&locals[of], 0), &segments[of], 0, length as u64);
        initiators[of].submit_new(&[write], &SubmitOptions::default()).unwrap()
    };
    // It would have more connections, and makes do with one.
    assert_eq!(ended(&initiators[0], &write(0)).state, TransferState::Completed);
    assert!(contents(&remote, 0, length) == pattern(length, 3));
    let status = ended(&initiators[1], &write(1));
    let said = status.error.as_ref().unwrap().to_string();
    assert!(
        status.state == TransferState::Failed && said.contains("tcp.relay_connections"),
        "{said}"
    );
    assert!(!status.target_undefined);
    // When the first one leaves there is room.
    let [first, second] = initiators;
    let ([first_local, _second_local], [_, segment]) = (locals, segments);
    drop((first_local, first));
    let start = Instant::now();
    let local = private(&second, LENGTH);
    loop {
        let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
        let batch = second.submit_new(&[write], &SubmitOptions::default()).unwrap();
        if ended(&second, &batch).state == TransferState::Completed {
            return;
        }
        assert!(start.elapsed() < LONG);
    }
}

#[test]
fn connections_that_nobody_uses_make_room_for_others() {
    let idle = Duration::from_millis(100);
    let limits = RelayLimits { max_connections: 1, idle, ..RelayLimits::default() };
    let (target, relay) = (over_tcp(), relay_with(limits));
    let _remote = shared(&target, LENGTH);
    let initiators = [(); 2].map(|()| distant(&[relay.name()]));
    let start = Instant::now();
    // Each of them as often as it takes, and the first one once more.
    for initiator in initiators.iter().chain(&initiators[..1]) {
        let local = private(initiator, LENGTH);
        let segment = initiator.open_segment(target.name()).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
        loop {
            let batch = initiator.submit_new(&[write], &SubmitOptions::default()).unwrap();
            if ended(initiator, &batch).state == TransferState::Completed {
                break;
            }
            assert!(start.elapsed() < LONG);
        }
    }
}

#[test]
fn memory_that_the_target_took_back_is_told_and_what_follows_goes_on() {
    let (target, relay) = (over_tcp(), relay());
    let (gone, kept) = (shared(&target, LENGTH), shared(&target, LENGTH));
    let initiator = distant(&[relay.name()]);
    let local = private(&initiator, LENGTH);
    let segment = initiator.open_segment(target.name()).unwrap();
    let of = |address| {
        let index = segment.buffers().iter().position(|it| it.address == address).unwrap();
        segment.address_of(index, 0, LENGTH as u64).unwrap()
    };
    let mut write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    write.target_offset = of(gone.address());
    initiator.submit_and_wait(&[write], LONG).unwrap();
    drop(gone);
    let batch = initiator.submit_new(&[write], &SubmitOptions::default()).unwrap();
    let status = ended(&initiator, &batch);
    assert!(status.state == TransferState::Failed && !status.target_undefined, "{status:?}");
    let refused = initiator.submit_new(&[write], &SubmitOptions::default());
    assert!(refused.is_err(), "the descriptor was asked for again, of the relay or the target");
    write.target_offset = of(kept.address());
    initiator.submit_and_wait(&[write], LONG).unwrap();
}

/// A relay between which and the target packets are kept back, and an initiator.
fn held() -> (Setup, TransferEngine) {
    let setup = Setup::with(&config, |engine| {
        engine.install_tcp(relaying(RelayLimits::default())).unwrap();
    });
    setup.initiator.require(Some("rdma")).unwrap();
    let initiator = distant(&[setup.initiator.name()]);
    (setup, initiator)
}

#[test]
fn what_is_canceled_or_late_ends_behind_the_fence_of_the_relay() {
    for is_late in [false, true] {
        let (setup, initiator) = held();
        let Setup { target, relay, name, .. } = &setup;
        let (remote, local) = (shared(target, LENGTH), private(&initiator, LENGTH));
        let segment = initiator.open_segment(name).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
        local.write(0, &pattern(LENGTH, 1)).unwrap();
        initiator.submit_and_wait(&[write], LONG).unwrap();
        relay.hold();
        local.write(0, &pattern(LENGTH, 2)).unwrap();
        let fenced = relay.fenced.load(Ordering::SeqCst);
        let deadline = is_late.then(|| Instant::now() + Duration::from_secs(1));
        let options = SubmitOptions { deadline, ..SubmitOptions::default() };
        let batch = initiator.submit_new(&[write], &options).unwrap();
        relay.wait_for_held(1);
        if !is_late {
            assert!(initiator.cancel(&batch, 0).unwrap());
        }
        let status = ended(&initiator, &batch);
        let state = if is_late { TransferState::Timeout } else { TransferState::Canceled };
        assert_eq!((status.state, status.target_undefined), (state, false), "{status:?}");
        assert!(relay.fenced.load(Ordering::SeqCst) > fenced, "the target was not asked");
        // What was on its way comes late, and is nothing any more.
        remote.write(0, &pattern(LENGTH, 3)).unwrap();
        relay.release();
        let mut done = false;
        for _ in 0..100 {
            let read = request(Opcode::Read, (&local, 0), &segment, 0, LENGTH as u64);
            let batch = initiator.submit_new(&[read], &SubmitOptions::default()).unwrap();
            done |= ended(&initiator, &batch).state == TransferState::Completed;
            if done {
                break;
            }
        }
        assert!(done && contents(&local, 0, LENGTH) == pattern(LENGTH, 3), "a late WRITE came");
        assert!(contents(&remote, 0, LENGTH) == pattern(LENGTH, 3));
    }
}

#[test]
fn where_the_target_confirms_no_fence_the_range_is_undefined() {
    let (setup, initiator) = held();
    let Setup { target, relay, name, .. } = &setup;
    let (_remote, local) = (shared(target, LENGTH), private(&initiator, LENGTH));
    let segment = initiator.open_segment(name).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    relay.hold();
    relay.passes_control.store(false, Ordering::SeqCst);
    let batch = initiator.submit_new(&[write], &SubmitOptions::default()).unwrap();
    relay.wait_for_held(1);
    assert!(initiator.cancel(&batch, 0).unwrap());
    let status = ended(&initiator, &batch);
    assert_eq!((status.state, status.target_undefined), (TransferState::Canceled, true));
}

#[test]
fn a_relay_that_is_killed_leaves_ranges_undefined_and_nobody_waiting() {
    let mut relay = Process::start();
    let (setup, _) = held();
    let Setup { target, relay: between, name, .. } = &setup;
    let _remote = shared(target, LENGTH);
    let initiator = distant(&[&relay.1]);
    let local = private(&initiator, LENGTH);
    let segment = initiator.open_segment(name).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    between.hold();
    let batch = initiator.submit_new(&[write], &SubmitOptions::default()).unwrap();
    between.wait_for_held(1);
    relay.0.kill().unwrap();
    relay.0.wait().unwrap();
    let status = ended(&initiator, &batch);
    assert_eq!(
        (status.state, status.target_undefined),
        (TransferState::Failed, true),
        "{status:?}"
    );
    // What was not begun is not undefined.
    let result = initiator.submit_new(&[write], &SubmitOptions::default());
    if let Ok(batch) = result {
        let status = ended(&initiator, &batch);
        assert!(status.state == TransferState::Failed && !status.target_undefined, "{status:?}");
    }
}

#[test]
fn a_target_that_was_restarted_is_told_as_without_a_relay() {
    let mut target = Node::start(1, LENGTH);
    let relay = relay();
    let initiator = distant(&[relay.name()]);
    let local = private(&initiator, LENGTH);
    local.write(0, &pattern(LENGTH, 4)).unwrap();
    let segment = initiator.open_segment(&target.name).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    assert_eq!(target.sum(), node::sum(&pattern(LENGTH, 4)));
    target.restart();
    let start = Instant::now();
    // It is found out by a request that fails, and the next one is told.
    loop {
        match initiator.submit_new(&[write], &SubmitOptions::default()) {
            Err(SubmitNewError::Submit(SubmitError::Restarted { .. })) => break,
            Err(error) => println!("{error}"),
            Ok(batch) => assert_eq!(ended(&initiator, &batch).state, TransferState::Failed),
        }
        assert!(start.elapsed() < LONG);
    }
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    loop {
        let batch = initiator.submit_new(&[write], &SubmitOptions::default());
        if batch.is_ok_and(|batch| ended(&initiator, &batch).state == TransferState::Completed) {
            break;
        }
        assert!(start.elapsed() < LONG);
    }
    assert_eq!(target.sum(), node::sum(&pattern(LENGTH, 4)));
}

#[test]
fn a_relay_ends_with_requests_under_way() {
    let (setup, initiator) = held();
    let Setup { target, relay, name, .. } = &setup;
    let _remote = shared(target, LENGTH);
    let local = private(&initiator, LENGTH);
    let segment = initiator.open_segment(name).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    relay.hold();
    let batch = initiator.submit_new(&[write], &SubmitOptions::default()).unwrap();
    relay.wait_for_held(1);
    let Setup { initiator: third, .. } = setup;
    drop(third);
    let status = ended(&initiator, &batch);
    assert_eq!(status.state, TransferState::Failed, "{status:?}");
}
