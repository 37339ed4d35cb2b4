//! With TENT, requests for which there is no rail any more go on over another transport.

mod common;

use std::net::Ipv4Addr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::relay::Setup;
use common::{LONG, contents, pattern, private, request, shared};
use millstream_transfer::{
    Config, Opcode, Policy, RequestCounts, SubmitOptions, TcpConfig, TransferEngine,
    TransferRequest, TransferState, TransferStatus,
};

const LENGTH: usize = 1 << 20;

/// Engines with `rdma` through a relay, and `tcp` without.
fn setup(policy: Policy) -> Setup {
    let config = |listen| Config { policy, ..common::config(listen) };
    Setup::with(&config, |engine| {
        // The initiator takes the relay's address for the target's.
        let listen = Some((Ipv4Addr::UNSPECIFIED, 0).into());
        engine.install_tcp(TcpConfig { listen, ..TcpConfig::default() }).unwrap();
    })
}

fn done(
    engine: &TransferEngine,
    request: TransferRequest,
    options: &SubmitOptions,
) -> TransferStatus {
    let batch = engine.submit_new(&[request], options).unwrap();
    assert!(engine.wait(&batch, LONG));
    engine.status(&batch, 0).unwrap()
}

fn by_rdma() -> SubmitOptions {
    SubmitOptions { transport: Some("rdma".to_owned()), ..SubmitOptions::default() }
}

fn requests(engine: &TransferEngine, transport: &str) -> RequestCounts {
    let metrics = engine.metrics();
    metrics.transports.iter().find(|it| it.transport == transport).unwrap().requests
}

#[test]
fn requests_go_on_over_tcp_behind_a_fence_and_come_back() {
    let setup = setup(Policy::Tent);
    let Setup { target, initiator, relay, name, .. } = &setup;
    let remote = shared(target, LENGTH);
    let local = private(initiator, LENGTH);
    let into = private(initiator, LENGTH);
    let segment = initiator.open_segment(name).unwrap();
    let any = SubmitOptions::default();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    let read = request(Opcode::Read, (&into, 0), &segment, 0, LENGTH as u64);
    local.write(0, &pattern(LENGTH, 1)).unwrap();
    assert_eq!(done(initiator, write, &any).transport, Some("rdma"));

    relay.hold();
    local.write(0, &pattern(LENGTH, 2)).unwrap();
    let start = Instant::now();
    let status = done(initiator, write, &any);
    println!("went on over another transport, and was done, after {:?}", start.elapsed());
    assert_eq!(status.state, TransferState::Completed, "{status:?}");
    assert_eq!((status.transport, status.transferred_bytes), (Some("tcp"), LENGTH as u64));
    assert!(contents(&remote, 0, LENGTH) == pattern(LENGTH, 2));
    assert!(relay.fenced.load(Ordering::SeqCst) > 0, "the target has confirmed the fence");
    let counts = [requests(initiator, "rdma"), requests(initiator, "tcp")];
    assert_eq!(counts.map(|it| (it.submitted, it.moved, it.in_flight)), [(2, 1, 0), (1, 0, 0)]);
    // The next one does not try what has just failed, and the report says so.
    let status = done(initiator, read, &any);
    assert_eq!((status.state, status.transport), (TransferState::Completed, Some("tcp")));
    let reports = initiator.paths(segment.id()).unwrap();
    let of = |name: &str| reports.iter().find(|it| it.transport == name).unwrap();
    assert!(of("tcp").chosen && !of("rdma").chosen);
    let reason = of("rdma").reason.as_deref().unwrap();
    assert!(reason.starts_with("requests had to go on over another transport"), "{reason}");

    // What was kept back comes now, behind the fence.
    remote.write(0, &pattern(LENGTH, 3)).unwrap();
    assert!(relay.release() >= 8);
    // One submission tries it, and then others follow. On a busy machine it may be given up once more.
    let mut in_a_row = 0;
    while in_a_row < 2 {
        in_a_row = match done(initiator, read, &any).transport {
            Some("rdma") => in_a_row + 1,
            _ => 0,
        };
        assert!(start.elapsed() < LONG, "it never comes back");
    }
    assert!(contents(&into, 0, LENGTH) == pattern(LENGTH, 3), "a late WRITE was written");
}

#[test]
fn what_may_only_go_by_rdma_or_is_not_fenced_fails() {
    let setup = setup(Policy::Tent);
    let Setup { target, initiator, relay, name, .. } = &setup;
    let _remote = shared(target, LENGTH);
    let local = private(initiator, LENGTH);
    let segment = initiator.open_segment(name).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    assert_eq!(done(initiator, write, &by_rdma()).state, TransferState::Completed);
    relay.hold();
    let status = done(initiator, write, &by_rdma());
    assert_eq!((status.state, status.transport), (TransferState::Failed, Some("rdma")));
    assert!(!status.target_undefined);
    relay.release();
    while done(initiator, write, &by_rdma()).state != TransferState::Completed {}
    // The target is not heard of: what was sent may arrive yet.
    relay.hold();
    relay.passes_control.store(false, Ordering::SeqCst);
    let start = Instant::now();
    let status = done(initiator, write, &SubmitOptions::default());
    assert_eq!((status.state, status.transport), (TransferState::Failed, Some("rdma")));
    assert!(status.target_undefined && start.elapsed() < Duration::from_secs(10), "{status:?}");
    assert_eq!(requests(initiator, "rdma").moved, 0);
}

#[test]
fn the_classic_policy_keeps_to_the_transport_that_was_chosen() {
    let setup = setup(Policy::Classic);
    let Setup { target, initiator, relay, name, .. } = &setup;
    let _remote = shared(target, LENGTH);
    let local = private(initiator, LENGTH);
    let segment = initiator.open_segment(name).unwrap();
    let read = request(Opcode::Read, (&local, 0), &segment, 0, LENGTH as u64);
    let any = SubmitOptions::default();
    assert_eq!(done(initiator, read, &any).transport, Some("rdma"));
    relay.hold();
    let status = done(initiator, read, &any);
    assert_eq!((status.state, status.transport), (TransferState::Failed, Some("rdma")));
}
