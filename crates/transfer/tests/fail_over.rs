//! With TENT, requests to a target that is a process of its own go on over another transport in the middle of a batch,
//! and no other is tried where the process is not there.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use common::node::{Process, say, sum};
use common::relay::{Between, relayed};
use common::{LONG, address, contents, pattern, private, request, shared, wait_for_first_bytes};
use millstream_lab::Stopwatch;
use millstream_metadata::{Client, Frame, FrameType, SegmentDesc};
use millstream_transfer::{
    Batch, Buffer, Config, Opcode, Policy, RdmaConfig, RequestCounts, Segment, SubmitOptions,
    TcpConfig, TransferEngine, TransferRequest, TransferState,
};

/// Set in processes that tests start: their transports.
const ROLE: &str = "MILLSTREAM_TEST_TRANSPORTS";

const LENGTH: usize = 32 << 20;
const REQUEST: u64 = 1 << 20;

fn engine(transports: &str) -> TransferEngine {
    let address = address();
    let config = Config { policy: Policy::Tent, ..Config::new(address) };
    let engine = TransferEngine::new(config).unwrap();
    for transport in transports.split(',') {
        match transport {
            "rdma" => engine.install_rdma(relayed(address)).unwrap(),
            "two NICs" => {
                let addresses = vec![address, common::address()];
                engine.install_rdma(RdmaConfig { addresses, ..relayed(address) }).unwrap();
            }
            "tcp" => {
                // Who opens the segment by a relay's name looks for it at the relay's address.
                let listen = Some((Ipv4Addr::UNSPECIFIED, 0).into());
                engine.install_tcp(TcpConfig { listen, ..TcpConfig::default() }).unwrap();
            }
            other => unreachable!("{other}"),
        }
    }
    engine
}

/// A process with an engine and a buffer.
fn node(transports: &str) -> Process {
    Process::start("a_node", ROLE, transports)
}

/// Has it fill its buffer with the pattern of this seed.
fn fill(node: &mut Process, seed: u64) {
    assert_eq!(node.ask(&format!("fill {seed}")), "filled");
}

/// The processes that the other tests start. As a test of its own, nothing.
#[test]
fn a_node() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let engine = engine(&role);
    let buffer = shared(&engine, LENGTH);
    say(engine.name());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        if line == "sum" {
            say(sum(&contents(&buffer, 0, LENGTH)));
        } else if let Some(seed) = line.strip_prefix("fill ") {
            buffer.write(0, &pattern(LENGTH, seed.parse().unwrap())).unwrap();
            say("filled");
        }
    }
    std::process::exit(0);
}

/// Passes on what goes to a target's port for data, each way as much as it is let: what is more is under way for ever.
/// Once it is closed, nobody listens there.
struct Port {
    address: SocketAddr,
    passes: Arc<[AtomicUsize; 2]>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Port {
    fn open(at: IpAddr, target: &str) -> Self {
        let frame = Frame::new(FrameType::Metadata, b"{}".to_vec());
        let reply = Client::default().call(&target.parse().unwrap(), &frame).unwrap();
        let port = SegmentDesc::from_json(&reply.body).unwrap().tcp_data_port.unwrap();
        let host = target.rsplit_once(':').unwrap().0.parse::<IpAddr>().unwrap();
        let listener = TcpListener::bind((at, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (streams, ends) = (Arc::<Mutex<Vec<_>>>::default(), Arc::new(AtomicBool::new(false)));
        let passes = Arc::new([usize::MAX; 2].map(AtomicUsize::new));
        let thread = thread::spawn({
            let (streams, ends, passes) =
                (Arc::clone(&streams), Arc::clone(&ends), Arc::clone(&passes));
            move || {
                while !ends.load(Ordering::SeqCst) {
                    match listener.accept() {
                        Ok((near, _)) => pass(near, (host, port).into(), &streams, &passes),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {
                            thread::sleep(Duration::from_millis(1));
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        });
        Self { address, passes, streams, ends, thread: Some(thread) }
    }

    /// Passes so many bytes more each way.
    fn limit(&self, bytes: usize) {
        self.passes.iter().for_each(|passes| passes.store(bytes, Ordering::SeqCst));
    }

    fn close(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn pass(
    near: TcpStream,
    target: SocketAddr,
    streams: &Mutex<Vec<TcpStream>>,
    passes: &Arc<[AtomicUsize; 2]>,
) {
    near.set_nonblocking(false).unwrap();
    let far = TcpStream::connect(target).unwrap();
    let clone = |stream: &TcpStream| stream.try_clone().unwrap();
    streams.lock().unwrap().extend([clone(&near), clone(&far)]);
    for (way, (mut from, mut to)) in
        [(clone(&near), clone(&far)), (far, near)].into_iter().enumerate()
    {
        let passes = Arc::clone(passes);
        thread::spawn(move || {
            let mut bytes = [0; 64 << 10];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                let take = |left: usize| left.checked_sub(count);
                let order = Ordering::SeqCst;
                if passes[way].fetch_update(order, order, take).is_err() {
                    // Both ends stay as they are.
                    return;
                }
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Write);
        });
    }
}

fn requests(opcode: Opcode, local: &Buffer, segment: &Segment) -> Vec<TransferRequest> {
    let all = (0..LENGTH as u64 / REQUEST).map(|index| index * REQUEST);
    all.map(|at| request(opcode, (local, at), segment, at, REQUEST)).collect()
}

fn submit(engine: &TransferEngine, requests: &[TransferRequest]) -> Batch {
    let batch = engine.allocate_batch(requests.len()).unwrap();
    engine.submit(&batch, requests).unwrap();
    batch
}

/// Waits for a batch, whose counts of transferred bytes are looked at meanwhile.
fn wait(engine: &TransferEngine, batch: &Batch) {
    let mut before = vec![0; batch.len()];
    let start = Instant::now();
    while !engine.wait(batch, Duration::from_millis(1)) {
        for (status, before) in engine.statuses(batch).iter().zip(&mut before) {
            assert!(status.transferred_bytes >= *before, "{status:?}, before {before}");
            assert!(status.transferred_bytes <= REQUEST, "{status:?}");
            *before = status.transferred_bytes;
        }
        assert!(start.elapsed() < LONG, "{:?}", engine.statuses(batch));
    }
}

fn counts(engine: &TransferEngine, transport: &str) -> RequestCounts {
    let metrics = engine.metrics();
    metrics.transports.iter().find(|it| it.transport == transport).unwrap().requests
}

/// Does batches until some requests of one have gone on over another transport: `harm` is done once bytes have moved
/// in the first one. All are to complete, with these bytes at the target or here.
fn go_on(
    (engine, node): (&TransferEngine, &mut Process),
    (local, segment): (&Buffer, &Segment),
    (opcode, first, then): (Opcode, &str, &str),
    harm: impl FnOnce(),
) {
    let (before, mut harm) = (counts(engine, first).moved, Some(harm));
    for seed in 0.. {
        match opcode {
            Opcode::Write => local.write(0, &pattern(LENGTH, seed)).unwrap(),
            Opcode::Read => fill(node, seed),
        }
        let batch = submit(engine, &requests(opcode, local, segment));
        if let Some(harm) = harm.take() {
            wait_for_first_bytes(engine, &batch);
            harm();
        }
        wait(engine, &batch);
        let statuses = engine.statuses(&batch);
        for status in &statuses {
            assert_eq!(status.state, TransferState::Completed, "{opcode:?}: {status:?}");
            assert_eq!(status.transferred_bytes, REQUEST, "{opcode:?}: {status:?}");
        }
        let expected = pattern(LENGTH, seed);
        match opcode {
            Opcode::Write => assert_eq!(node.sum(), sum(&expected), "{opcode:?} {seed}"),
            Opcode::Read => assert!(contents(local, 0, LENGTH) == expected, "{opcode:?} {seed}"),
        }
        if statuses.iter().any(|status| status.transport == Some(then)) {
            break;
        }
    }
    let moved = counts(engine, first).moved - before;
    println!("{opcode:?}: {moved} requests went on over {then}");
    assert!(moved > 0);
    assert_eq!(counts(engine, first).in_flight + counts(engine, then).in_flight, 0);
}

#[test]
fn a_batch_goes_on_over_tcp_when_the_device_of_its_target_is_cut_off() {
    for opcode in [Opcode::Write, Opcode::Read] {
        let (mut node, initiator) = (self::node("rdma,tcp"), engine("rdma,tcp"));
        let between = Between::new(&node.name);
        let local = private(&initiator, LENGTH);
        let segment = initiator.open_segment(&between.name).unwrap();
        let names = (opcode, "rdma", "tcp");
        go_on((&initiator, &mut node), (&local, &segment), names, || between.relay.hold());
        if opcode == Opcode::Write {
            assert!(between.relay.fenced.load(Ordering::SeqCst) > 0, "behind a fence");
            // What was kept back comes now.
            fill(&mut node, 77);
            between.relay.release();
            let into = private(&initiator, LENGTH);
            let start = Instant::now();
            loop {
                let batch = submit(&initiator, &requests(Opcode::Read, &into, &segment)[..1]);
                assert!(initiator.wait(&batch, LONG) && start.elapsed() < LONG);
                if initiator.status(&batch, 0).unwrap().transport == Some("rdma") {
                    break;
                }
            }
            assert_eq!(node.sum(), sum(&pattern(LENGTH, 77)), "a late WRITE was written");
        }
    }
}

#[test]
fn a_batch_goes_on_over_rdma_when_the_port_for_data_of_its_target_is_gone() {
    for opcode in [Opcode::Write, Opcode::Read] {
        let (mut node, initiator) = (self::node("tcp,rdma"), engine("tcp,rdma"));
        let between = Between::new(&node.name);
        let at = between.name.rsplit_once(':').unwrap().0.parse().unwrap();
        let mut port = Port::open(at, &node.name);
        between.relay.data_port.set(port.address.port()).unwrap();
        let local = private(&initiator, LENGTH);
        let segment = initiator.open_segment(&between.name).unwrap();
        let names = (opcode, "tcp", "rdma");
        // The first batch cannot end before that.
        port.limit(LENGTH / 2);
        go_on((&initiator, &mut node), (&local, &segment), names, || port.close());
        let reports = initiator.paths(segment.id()).unwrap();
        let of = |name: &str| reports.iter().find(|it| it.transport == name).unwrap();
        assert!(of("rdma").chosen && !of("tcp").chosen, "{reports:?}");
        let fenced = between.relay.streams_fenced.load(Ordering::SeqCst);
        assert!(fenced > 0 || opcode == Opcode::Read, "the control port has confirmed it");
    }
}

/// The NIC is cut off that the target's name leads to: what it is asked before requests go on, it is asked at another.
#[test]
fn a_batch_goes_on_over_rdma_when_its_target_is_silent_where_its_name_leads() {
    for opcode in [Opcode::Write, Opcode::Read] {
        let (mut node, initiator) = (self::node("tcp,two NICs"), engine("tcp,rdma"));
        let between = Between::new(&node.name);
        let at = between.name.rsplit_once(':').unwrap().0.parse().unwrap();
        let mut port = Port::open(at, &node.name);
        between.relay.data_port.set(port.address.port()).unwrap();
        let local = private(&initiator, LENGTH);
        let segment = initiator.open_segment(&between.name).unwrap();
        // It is connected before: that is asked for elsewhere.
        let by_rdma =
            SubmitOptions { transport: Some("rdma".to_owned()), ..SubmitOptions::default() };
        let all = requests(opcode, &local, &segment);
        let batch = initiator.submit_new(&all, &by_rdma).unwrap();
        assert!(initiator.wait(&batch, LONG));
        assert!(initiator.statuses(&batch).iter().all(|it| it.state == TransferState::Completed));
        port.limit(LENGTH / 2);
        let names = (opcode, "tcp", "rdma");
        go_on((&initiator, &mut node), (&local, &segment), names, || {
            between.relay.is_silent.store(true, Ordering::SeqCst);
            port.close();
        });
        let fenced = between.relay.streams_fenced.load(Ordering::SeqCst);
        assert_eq!(fenced, 0, "it was silent there");
    }
}

/// A process that is gone fails its requests soon, whatever is installed: the error is the one of the transport that
/// had them.
#[test]
fn no_other_transport_is_tried_where_the_process_is_gone() {
    for transports in ["rdma,tcp", "tcp,rdma"] {
        for opcode in [Opcode::Write, Opcode::Read] {
            let (mut node, initiator) = (self::node(transports), engine(transports));
            let local = private(&initiator, LENGTH);
            let segment = initiator.open_segment(&node.name).unwrap();
            let all = requests(opcode, &local, &segment);
            let all: Vec<_> = std::iter::repeat_n(all, 8).flatten().collect();
            let batch = submit(&initiator, &all);
            wait_for_first_bytes(&initiator, &batch);
            node.kill();
            let stopwatch = Stopwatch::start();
            assert!(initiator.wait(&batch, LONG));
            let took = stopwatch.took();
            assert!(took.own() < Duration::from_secs(1), "{transports} {opcode:?}: {took}");
            let first = transports.split(',').next();
            let statuses = initiator.statuses(&batch);
            let failed = statuses.iter().filter(|it| it.state == TransferState::Failed);
            for status in failed {
                assert_eq!(status.transport, first, "{status:?}");
            }
            let error = statuses.last().unwrap().error.as_ref();
            println!("{transports} {opcode:?}: {took}: {error:?}");
            assert_eq!(counts(&initiator, first.unwrap()).moved, 0);
        }
    }
}

#[test]
fn no_other_transport_is_tried_where_the_process_is_silent() {
    let (node, initiator) = (self::node("rdma,tcp"), engine("rdma,tcp"));
    let local = private(&initiator, LENGTH);
    let segment = initiator.open_segment(&node.name).unwrap();
    let all = requests(Opcode::Read, &local, &segment);
    initiator.submit_and_wait(&all, LONG).unwrap();
    node.signal("STOP");
    let stopwatch = Stopwatch::start();
    let batch = submit(&initiator, &all);
    assert!(initiator.wait(&batch, LONG));
    let took = stopwatch.took();
    let status = initiator.status(&batch, 0).unwrap();
    println!("silent: {took}: {}", status.error.as_ref().unwrap());
    assert!(took.own() < Duration::from_secs(5), "{took}");
    assert_eq!((status.state, status.transport), (TransferState::Failed, Some("rdma")));
    assert_eq!(counts(&initiator, "rdma").moved, 0);
}
