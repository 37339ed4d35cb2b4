//! Declarative requests: priorities, transport hints, classes of a policy file, deadlines and limits.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::{LONG, address, private, request, shared};
use millstream_transfer::{
    Config, NewError, Opcode, Policy, PolicyFile, PriorityLevel, RdmaConfig, SubmitError,
    SubmitOptions, TransferEngine, TransferRequest, TransferState,
};

const FILE: &str = r#"
[limits]
requests_in_flight = 1000

[class.two]
requests_in_flight = 2

[class.short]
inherits = "two"
bytes_in_flight = 1000

[class.far]
transports = ["tcp"]

[class.near]
priority = "latency"
transports = ["shm"]
deadline = "1h"
"#;

fn engine(policy: Policy) -> TransferEngine {
    let own = address();
    let policy_file = PolicyFile::parse(Path::new("test.toml"), FILE).unwrap();
    let engine = TransferEngine::new(Config { policy, policy_file, ..Config::new(own) }).unwrap();
    engine.install_shm().unwrap();
    engine.install_rdma(RdmaConfig::new(&[own])).unwrap();
    engine
}

#[test]
fn a_policy_file_of_a_programs_own_making_is_looked_at() {
    let own = PolicyFile::parse(Path::new("test.toml"), FILE).unwrap();
    let refused = |change: fn(&mut PolicyFile)| {
        let mut policy_file = own.clone();
        change(&mut policy_file);
        let error = TransferEngine::new(Config { policy_file, ..Config::new(address()) });
        let error = error.err().unwrap();
        assert!(matches!(error, NewError::PolicyFile(_)));
        error.to_string()
    };
    assert_eq!(
        refused(|file| file.classes[0].transports = vec!["rdna"]),
        "the policy file that the program made: class \"two\": \"rdna\" names no transport: there are local, \
         shm, rdma, nvmeof, tcp, relay"
    );
    let error = refused(|file| file.classes.push(file.classes[1].clone()));
    assert!(error.ends_with("class \"short\": there are two of this name"), "{error}");
}

/// What becomes of requests with these options: the transport that did them, or why not.
fn submit(
    engine: &TransferEngine,
    requests: &[TransferRequest],
    options: &SubmitOptions,
) -> Result<Option<&'static str>, SubmitError> {
    let batch = engine.allocate_batch(requests.len()).unwrap();
    let submitted = engine.submit_with(&batch, requests, options);
    assert_eq!(batch.is_empty(), submitted.is_err(), "all or none");
    submitted?;
    assert!(engine.wait(&batch, LONG));
    let statuses = engine.statuses(&batch);
    assert!(statuses.iter().all(|it| it.state == TransferState::Completed), "{statuses:?}");
    Ok(statuses[0].transport)
}

fn by(transport: &str) -> SubmitOptions {
    SubmitOptions { transport: Some(transport.to_owned()), ..SubmitOptions::default() }
}

fn of(policy: &str) -> SubmitOptions {
    SubmitOptions { policy: Some(policy.to_owned()), ..SubmitOptions::default() }
}

/// Runs with an engine, another one's segment, and a request of this length to it.
fn with_request(policy: Policy, length: usize, run: impl FnOnce(&TransferEngine, TransferRequest)) {
    let (target, initiator) = (engine(policy), engine(policy));
    let _remote = shared(&target, length);
    let local = private(&initiator, length);
    let segment = initiator.open_segment(target.name()).unwrap();
    run(&initiator, request(Opcode::Write, (&local, 0), &segment, 0, length as u64));
}

#[test]
fn hints_and_classes_choose_the_transport() {
    for policy in [Policy::Classic, Policy::Tent] {
        with_request(policy, 100_000, |engine, write| {
            let unhinted = submit(engine, &[write], &SubmitOptions::default()).unwrap();
            assert_eq!(unhinted, Some("shm"));
            assert_eq!(submit(engine, &[write], &by("rdma")).unwrap(), Some("rdma"));
            assert_eq!(submit(engine, &[write], &of("near")).unwrap(), Some("shm"));
            for priority in PriorityLevel::ALL {
                let options = SubmitOptions { priority: Some(priority), ..by("rdma") };
                assert_eq!(submit(engine, &[write], &options).unwrap(), Some("rdma"));
            }
        });
    }
}

#[test]
fn what_no_transport_serves_is_told_with_what_there_is() {
    with_request(Policy::Tent, 1000, |engine, write| {
        let told = |options| submit(engine, &[write], &options).unwrap_err().to_string();
        for options in [by("tcp"), of("far")] {
            let error = told(options);
            let expected = "request 0: only tcp may do it, by its transport hint or policy, and does not reach";
            assert!(error.starts_with(expected), "{error}");
            let end = ": installed are local, shm, rdma (it would go by shm)";
            assert!(error.ends_with(end), "{error}");
        }
        let error = told(by("local"));
        assert!(error.contains("local: it is another process's"), "{error}");
        assert_eq!(
            told(by("rdna")),
            "the transport hint \"rdna\" names no transport: there are local, shm, rdma, nvmeof, tcp, relay"
        );
        assert_eq!(
            told(SubmitOptions { transport: Some("rdma".into()), ..of("near") }),
            "the transport hint rdma is none of the transports of policy \"near\": shm"
        );
        assert_eq!(
            told(of("neat")),
            "there is no policy \"neat\": the policy file has the classes two, short, far, near"
        );
        assert_eq!(submit(engine, &[write], &by("tcp")).unwrap_err().code(), -6);
        // A transport that is required is not what is hinted at.
        engine.require(Some("rdma")).unwrap();
        let error = told(by("shm"));
        assert!(error.starts_with("request 0: only shm may do it"), "{error}");
        assert!(
            error.contains(": rdma is required of all requests, and is not allowed"),
            "{error}"
        );
    });
}

#[test]
fn limits_are_of_what_is_in_flight_and_refuse_at_once() {
    with_request(Policy::Tent, 600, |engine, write| {
        for round in 0..100 {
            // Whether it goes by the copier or by rails, and however it ends, its room comes back.
            let transport = ["shm", "rdma"][round % 2];
            let options =
                |policy| SubmitOptions { transport: Some(transport.into()), ..of(policy) };
            submit(engine, &[write; 2], &options("two")).unwrap();
            let error = submit(engine, &[write; 3], &options("two")).unwrap_err();
            let SubmitError::OverLimit { index, class, unit, limit } = &error else {
                panic!("{error}");
            };
            assert_eq!((*index, *limit), (2, 2));
            assert_eq!((class.as_deref(), *unit), (Some("two"), "requests"));
            let error = submit(engine, &[write; 2], &options("short")).unwrap_err();
            assert_eq!(
                error.to_string(),
                "request 1: with those before it in its submission it is more than bytes_in_flight of class \
                 \"short\", 1000 bytes, allows even alone: split the submission, or raise the limit"
            );
            let batch = engine.allocate_batch(2).unwrap();
            engine.submit_with(&batch, &[write; 2], &options("two")).unwrap();
            engine.cancel(&batch, 0).unwrap();
            assert!(engine.wait(&batch, LONG));
        }
        // Without a class there is the engine's.
        let error = submit(engine, &vec![write; 1001], &SubmitOptions::default()).unwrap_err();
        let expected = "more than requests_in_flight of limits, 1000 requests, allows even alone";
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(error.code(), -1);
        submit(engine, &vec![write; 1000], &SubmitOptions::default()).unwrap();
    });
}

#[test]
fn a_deadline_that_is_over_is_refused_with_tent() {
    let options = || SubmitOptions {
        deadline: Some(Instant::now() - Duration::from_millis(5)),
        ..by("rdma")
    };
    with_request(Policy::Tent, 1000, |engine, write| {
        let error = submit(engine, &[write], &options()).unwrap_err();
        let SubmitError::DeadlinePassed { index: 0, late } = error else { panic!("{error}") };
        assert!(late >= Duration::from_millis(5));
    });
    with_request(Policy::Classic, 1000, |engine, write| {
        let batch = engine.submit_new(&[write], &options()).unwrap();
        assert!(engine.wait(&batch, LONG));
        assert_eq!(engine.status(&batch, 0).unwrap().state, TransferState::Timeout);
    });
}

#[test]
fn a_deadline_that_rails_cannot_meet_is_refused() {
    const LENGTH: usize = 64 << 20;
    with_request(Policy::Tent, LENGTH, |engine, write| {
        let within = |time| SubmitOptions { deadline: Some(Instant::now() + time), ..by("rdma") };
        let start = Instant::now();
        loop {
            submit(engine, &[write], &by("rdma")).unwrap();
            // 64 GB/s are more than there is.
            let batch = engine.allocate_batch(2).unwrap();
            let small = TransferRequest { length: 1, ..write };
            let late =
                engine.submit_with(&batch, &[small, write], &within(Duration::from_millis(1)));
            match late {
                Err(SubmitError::DeadlineInfeasible { index, bytes, rate, left }) => {
                    assert_eq!((index, bytes), (1, LENGTH as u64 + 1));
                    assert!(rate < 64_000_000_000 && left <= Duration::from_millis(1));
                    break;
                }
                // This thread was held up until then, or for so long that the rate is of the past.
                Err(SubmitError::DeadlinePassed { .. }) => {}
                Err(error) => panic!("{error}"),
                Ok(()) => assert!(engine.wait(&batch, LONG)),
            }
            assert!(start.elapsed() < LONG, "it is never refused");
        }
        // With time enough it is done.
        submit(engine, &[write], &within(LONG)).unwrap();
    });
}

/// What was submitted before goes first where all have one priority: then it has almost ended.
#[test]
fn a_request_of_a_higher_priority_goes_before_what_was_submitted_earlier() {
    const LENGTH: u64 = 128 << 20;
    with_request(Policy::Tent, LENGTH as usize, |engine, write| {
        let of = |priority| SubmitOptions { priority: Some(priority), ..by("rdma") };
        let small = TransferRequest { length: 1000, ..write };
        let start = Instant::now();
        loop {
            let stream = engine.submit_new(&[write], &of(PriorityLevel::Bulk)).unwrap();
            submit(engine, &[small], &of(PriorityLevel::Latency)).unwrap();
            let moved = engine.status(&stream, 0).unwrap().transferred_bytes;
            assert!(engine.wait(&stream, LONG));
            // This thread may have been held up meanwhile.
            if moved < LENGTH / 2 {
                break;
            }
            assert!(start.elapsed() < LONG, "{moved} bytes went before it");
        }
    });
}

const RULES: &str = r#"
[rule.prefetch]
intent = "prefetch"
transports = ["rdma"]

[rule.large-bulk]
priority = "bulk"
length_from = "64KiB"
same_machine = true
transports = ["rdma", "shm"]

[rule.not-for-memory]
segment = "file"
transports = ["local"]

[rule.not-for-the-host]
peer_memory = "gpu"
transports = ["local"]
"#;

#[test]
fn rules_choose_by_what_a_request_is() {
    const LENGTH: u64 = 100_000;
    let policy_file = PolicyFile::parse(Path::new("test.toml"), RULES).unwrap();
    let engine = || {
        let own = address();
        let policy_file = policy_file.clone();
        let engine = TransferEngine::new(Config { policy_file, ..Config::new(own) }).unwrap();
        engine.install_shm().unwrap();
        engine.install_rdma(RdmaConfig::new(&[own])).unwrap();
        engine
    };
    let (target, initiator) = (engine(), engine());
    let _remote = shared(&target, LENGTH as usize);
    let local = private(&initiator, LENGTH as usize);
    let segment = initiator.open_segment(target.name()).unwrap();
    let large = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH);
    let small = TransferRequest { length: 1000, ..large };
    let intent = |name: &str| SubmitOptions { intent: Some(name.into()), ..Default::default() };
    let bulk = SubmitOptions { priority: Some(PriorityLevel::Bulk), ..Default::default() };
    let taken = |requests: &[TransferRequest], options: &SubmitOptions| -> Vec<_> {
        let batch = initiator.submit_new(requests, options).unwrap();
        assert!(initiator.wait(&batch, LONG));
        initiator.statuses(&batch).iter().map(|it| it.transport.unwrap()).collect()
    };
    assert_eq!(taken(&[large, small], &SubmitOptions::default()), ["shm", "shm"]);
    assert_eq!(taken(&[large, small], &intent("prefetch")), ["rdma", "rdma"]);
    // Requests of one submission, between the same buffers.
    assert_eq!(taken(&[small, large, large, small], &bulk), ["shm", "rdma", "rdma", "shm"]);
    // A hint says more.
    assert_eq!(taken(&[large], &SubmitOptions { transport: Some("shm".into()), ..bulk }), ["shm"]);
    let error = initiator.submit_new(&[large], &intent("prefetsch")).unwrap_err().to_string();
    let expected =
        "the intent \"prefetsch\" is in no rule of the policy file, which has rules for prefetch";
    assert!(error.contains(expected), "{error}");
}
