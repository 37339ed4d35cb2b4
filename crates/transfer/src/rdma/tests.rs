//! The transport, when its engine closes and when segments do, and what its flows are made with.

use std::net::{Ipv4Addr, SocketAddr};

use super::*;
use crate::{
    Buffer, Config, Opcode, SubmitOptions, TransferEngine, TransferRequest, TransferState,
};

const LONG: Duration = Duration::from_secs(60);

/// An engine at an address that no other test has.
fn engine(host: u8) -> TransferEngine {
    let at = Ipv4Addr::new(127, 97, std::process::id() as u8, host).into();
    let engine = TransferEngine::new(Config::new(at)).unwrap();
    engine.install_rdma(RdmaConfig::new(&[at])).unwrap();
    engine
}

fn buffer(engine: &TransferEngine) -> Buffer {
    engine.allocate_buffer(4096, "*", true).unwrap()
}

/// A transport that this engine does not know of.
fn transport(engine: &TransferEngine, host: u8) -> RdmaTransport {
    let inner = &engine.inner;
    let at = Ipv4Addr::new(127, 97, std::process::id() as u8, host).into();
    let context = RdmaContext {
        engine: engine.name().to_owned(),
        control_address: SocketAddr::new(at, 9),
        incarnation: 1,
        calls: Arc::clone(&inner.calls),
        lookups: Arc::clone(&inner.lookups),
        slice_length: 64 << 10,
        fragment_ratio: 4,
        policy: inner.policy,
        store: Arc::clone(&inner.store),
        elsewhere: None,
    };
    RdmaTransport::new(RdmaConfig::new(&[at]), context).unwrap()
}

/// Peers that close at the same time tell each other, and each answers the other.
#[test]
fn who_closes_waits_without_the_peers_locked() {
    let engine = engine(6);
    let transport = transport(&engine, 7);
    let asking = transport.asking.lock().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| transport.stop());
        let start = Instant::now();
        while !transport.peers.try_lock().is_ok_and(|peers| peers.stopped) {
            assert!(start.elapsed() < LONG);
            thread::yield_now();
        }
        drop(asking);
    });
}

/// As of a thread that moves tasks to another transport while the engine closes.
#[test]
fn what_is_submitted_after_the_end_ends() {
    let (ours, theirs) = (engine(1), engine(2));
    let (near, far) = (buffer(&ours), buffer(&theirs));
    let segment = ours.open_segment(theirs.name()).unwrap();
    let all = ours.inner.transports();
    let rdma = all.iter().find(|it| it.name() == RdmaTransport::NAME).unwrap();
    rdma.stop();
    let open = ours.inner.segments.by_id(segment.id()).unwrap();
    let refused = rdma.reaches(&open, &open.view().descriptor, 0).unwrap_err();
    assert!(refused.contains("closes"), "{refused}");
    let request = TransferRequest {
        opcode: Opcode::Write,
        source: near.address(),
        target: segment.id(),
        target_offset: far.address(),
        length: 4096,
    };
    let batch = ours.allocate_batch(1).unwrap();
    if ours.submit_with(&batch, &[request], &SubmitOptions::default()).is_ok() {
        assert!(ours.wait(&batch, LONG), "nobody has ended it");
        assert_eq!(ours.status(&batch, 0).unwrap().state, TransferState::Failed);
    }
}

/// Transfers go on after their segment is closed, and may still look for another way.
#[test]
fn nothing_is_kept_of_a_segment_that_is_closed() {
    let (ours, theirs) = (engine(3), engine(4));
    let _far = buffer(&theirs);
    let (transport, inner) = (transport(&ours, 5), &ours.inner);
    let id = ours.open_segment(theirs.name()).unwrap().id();
    let open = inner.segments.by_id(id).unwrap();
    let descriptor = open.view().descriptor;
    let paths = || transport.paths.read().unwrap().len();
    transport.reaches(&open, &descriptor, 0).unwrap();
    assert_eq!(paths(), 1);
    ours.close_segment(id).unwrap();
    transport.forget(id);
    transport.reaches(&open, &descriptor, 0).unwrap();
    assert_eq!(paths(), 0);
    transport.stop();
}

#[test]
fn no_pause_is_longer_than_the_longest() {
    for (longest_ms, expected_ms) in
        [(10, (10, 10)), (1000, (1000, 1000)), (5000, (1000, 5000)), (60_000, (1000, 60_000))]
    {
        let max_pause = Duration::from_millis(longest_ms);
        let config = RdmaConfig { max_pause, ..RdmaConfig::new(&[]) };
        let flow = flow_config(&config, Duration::from_secs(1), Duration::from_millis(100));
        let pauses = (flow.pause.as_millis(), flow.max_pause.as_millis());
        assert_eq!(pauses, expected_ms, "{longest_ms} ms");
    }
    let flow = flow_config(&RdmaConfig::new(&[]), Duration::from_secs(1), Duration::ZERO);
    let defaults = millstream_transfer_core::Config::default();
    assert_eq!((flow.pause, flow.max_pause), (defaults.pause, defaults.max_pause));
}
