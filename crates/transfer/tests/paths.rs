//! Which transport takes requests, what is told of it, and what one that is required changes.

mod common;

use std::sync::Barrier;
use std::thread;

use common::{LONG, address, private, request, shared};
use millstream_transfer::{
    InstallError, Opcode, PathReport, RdmaConfig, SegmentId, SubmitAndWaitError, SubmitError,
    SubmitNewError, SubmitOptions, TransferEngine, TransferRequest, TransferState, TransferStatus,
};

const LENGTH: usize = 4096;

/// An engine with these transports besides `local`.
fn engine(transports: &[&str]) -> TransferEngine {
    let address = address();
    let engine = TransferEngine::new(common::config(address)).unwrap();
    for transport in transports {
        match *transport {
            "shm" => engine.install_shm().unwrap(),
            "rdma" => engine.install_rdma(RdmaConfig::new(&[address])).unwrap(),
            other => unreachable!("{other}"),
        }
    }
    engine
}

fn summary(reports: &[PathReport]) -> Vec<(&'static str, bool, Option<&str>)> {
    reports.iter().map(|it| (it.transport, it.chosen, it.reason.as_deref())).collect()
}

/// The transport of a request that was done.
fn taken(engine: &TransferEngine, request: TransferRequest) -> Option<&'static str> {
    let batch = engine.allocate_batch(1).unwrap();
    engine.submit(&batch, &[request]).unwrap();
    assert!(engine.wait(&batch, LONG));
    let status = engine.status(&batch, 0).unwrap();
    assert_eq!(status.state, TransferState::Completed);
    status.transport
}

#[test]
fn the_best_common_path_is_chosen_and_the_others_say_why_not() {
    let another = Some("it is another process's");
    let own = Some("it is this engine's own");
    for (theirs, expected, reasons) in [
        (
            &["shm", "rdma"][..],
            "shm",
            [
                ("local", false, another),
                ("shm", true, None),
                ("rdma", false, Some("shm goes before it")),
            ],
        ),
        (
            &["rdma"],
            "rdma",
            [
                ("local", false, another),
                ("shm", false, Some("it does not share its memory")),
                ("rdma", true, None),
            ],
        ),
        (
            &["shm"],
            "shm",
            [
                ("local", false, another),
                ("shm", true, None),
                ("rdma", false, Some("shm goes before it")),
            ],
        ),
    ] {
        let (target, initiator) = (engine(theirs), engine(&["shm", "rdma"]));
        let (_remote, local) = (shared(&target, LENGTH), private(&initiator, LENGTH));
        let segment = initiator.open_segment(target.name()).unwrap();
        let reports = initiator.paths(segment.id()).unwrap();
        assert_eq!(summary(&reports), reasons, "{theirs:?}");
        let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
        assert_eq!(taken(&initiator, write), Some(expected), "{theirs:?}");
    }
    let engine = engine(&["shm", "rdma"]);
    let buffer = shared(&engine, LENGTH);
    let segment = engine.open_segment(engine.name()).unwrap();
    let reports = engine.paths(SegmentId::LOCAL).unwrap();
    let expected = [("local", true, None), ("shm", false, own), ("rdma", false, own)];
    assert_eq!(summary(&reports), expected);
    let write = request(Opcode::Write, (&buffer, 0), &segment, 100, 100);
    assert_eq!(taken(&engine, write), Some("local"));
}

#[test]
fn a_segment_without_memory_and_one_that_is_closed() {
    let (target, initiator) = (engine(&["rdma"]), engine(&["rdma"]));
    let segment = initiator.open_segment(target.name()).unwrap();
    let reports = initiator.paths(segment.id()).unwrap();
    let nothing = Some("the segment has no memory");
    assert_eq!(summary(&reports), [("local", false, nothing), ("rdma", false, nothing)]);
    initiator.close_segment(segment.id()).unwrap();
    assert!(initiator.paths(segment.id()).is_err());
}

#[test]
fn a_required_transport_is_not_replaced_by_another() {
    let (target, initiator) = (engine(&["rdma"]), engine(&["shm", "rdma"]));
    let (_remote, local) = (shared(&target, LENGTH), private(&initiator, LENGTH));
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 10);
    initiator.require(Some("shm")).unwrap();
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err();
    let SubmitAndWaitError::Submit(SubmitError::PathRequired { required, reason, instead, .. }) =
        &error
    else {
        panic!("{error}");
    };
    assert_eq!((*required, *instead), ("shm", Some("rdma")));
    assert_eq!(reason, "it does not share its memory");
    assert!(error.to_string().contains("(it would go by rdma)"), "{error}");
    let reports = initiator.paths(segment.id()).unwrap();
    assert_eq!(summary(&reports)[2], ("rdma", false, Some("shm is required")));

    initiator.require(Some("local")).unwrap();
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err();
    assert!(error.to_string().contains("it is another process's"), "{error}");

    initiator.require(Some("rdma")).unwrap();
    assert_eq!(taken(&initiator, write), Some("rdma"));
    initiator.require(None).unwrap();
    assert_eq!(taken(&initiator, write), Some("rdma"));
    let missing = initiator.require(Some("tcp")).unwrap_err();
    assert!(matches!(missing, InstallError::Missing(name) if name == "tcp"));
}

/// Where the faster one leads, too.
#[test]
fn a_required_transport_goes_before_those_that_lead_there() {
    let (target, initiator) = (engine(&["shm", "rdma"]), engine(&["shm", "rdma"]));
    let (_remote, local) = (shared(&target, LENGTH), private(&initiator, LENGTH));
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 10);
    initiator.require(Some("rdma")).unwrap();
    assert_eq!(taken(&initiator, write), Some("rdma"));
    let reports = initiator.paths(segment.id()).unwrap();
    assert_eq!(summary(&reports)[1], ("shm", false, Some("rdma is required")));
}

#[test]
fn whoever_opens_a_segment_second_finds_it_ready() {
    let (target, initiator) = (engine(&["shm"]), engine(&["shm"]));
    let (_remote, local) = (shared(&target, LENGTH), private(&initiator, LENGTH));
    let barrier = Barrier::new(2);
    for _ in 0..100 {
        let open = || {
            barrier.wait();
            let segment = initiator.open_segment(target.name()).unwrap();
            let reports = initiator.paths(segment.id()).unwrap();
            assert_eq!(summary(&reports)[1], ("shm", true, None));
            let write = request(Opcode::Write, (&local, 0), &segment, 0, 10);
            assert_eq!(taken(&initiator, write), Some("shm"));
            barrier.wait();
            segment.id()
        };
        let id = thread::scope(|scope| {
            let other = scope.spawn(open);
            let id = open();
            assert_eq!(other.join().unwrap(), id);
            id
        });
        initiator.close_segment(id).unwrap();
    }
}

#[test]
fn a_batch_is_made_with_its_requests_and_goes_with_its_statuses() {
    // Which takes a while: the two connect first.
    let (target, initiator) = (engine(&["rdma"]), engine(&["rdma"]));
    let (_remote, local) = (shared(&target, LENGTH), private(&initiator, LENGTH));
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 1000);
    let options = SubmitOptions::default();
    let mut batch = initiator.submit_new(&[write, write], &options).unwrap();
    assert_eq!((batch.capacity(), batch.len()), (2, 2));
    let statuses = loop {
        match initiator.take_statuses(batch) {
            Ok(statuses) => break statuses,
            Err(unfinished) => batch = unfinished,
        }
        initiator.wait(&batch, LONG);
    };
    let ended =
        |status: &TransferStatus| (status.state, status.transferred_bytes, status.transport);
    let done = (TransferState::Completed, 1000, Some("rdma"));
    assert_eq!(statuses.iter().map(ended).collect::<Vec<_>>(), [done; 2]);
    let empty = TransferRequest { length: 0, ..write };
    assert_eq!(initiator.submit_new(&[write, empty], &options).unwrap_err().code(), -1);
    assert!(matches!(initiator.submit_new(&[], &options), Err(SubmitNewError::Batch(_))));
}
