//! Bad input: refused before a byte moves, with an error that says what to look at.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::{LONG, address, contents, engine, pattern, private, request, shared};
use millstream_transfer::{
    Buffer, Config, InstallError, NewError, Opcode, RdmaConfig, SegmentId, SubmitError,
    SubmitOptions, TcpConfig, TransferEngine, TransferRequest, TransferState, TransferStatus,
};

#[test]
fn requests_are_checked_before_any_byte_moves() {
    let (target, initiator) = (engine(1), engine(1));
    let remote = shared(&target, 10_000);
    let local = private(&initiator, 20_000);
    local.write(0, &[1; 20_000]).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    let good = request(Opcode::Write, (&local, 0), &segment, 0, 10_000);
    let batch = initiator.allocate_batch(3).unwrap();
    let refused = |requests: &[TransferRequest]| {
        let error = initiator.submit(&batch, requests).unwrap_err();
        (error.code(), error.to_string())
    };

    let (code, text) = refused(&[good, TransferRequest { length: 0, ..good }]);
    assert_eq!(
        (code, text.as_str()),
        (-1, "request 1: a length of 0 bytes: leave it out, as there is nothing to move")
    );

    let (code, text) = refused(&[good, TransferRequest { length: 10_001, ..good }]);
    let end = remote.address() + 10_000;
    assert_eq!(code, -1);
    assert_eq!(
        text,
        format!(
            "request 1: 10001 bytes at {:#x} do not lie in a buffer of segment {}, which has \
             {:#x}..{end:#x} (10000 bytes)",
            remote.address(),
            target.name(),
            remote.address()
        )
    );
    for target_offset in [remote.address() - 1, end, 0, u64::MAX] {
        assert_eq!(refused(&[TransferRequest { target_offset, length: 1, ..good }]).0, -1);
    }

    let outside = TransferRequest { source: local.address() + 10_001, ..good };
    let (code, text) = refused(&[good, outside]);
    assert_eq!(code, -3, "{text}");
    assert!(text.contains("one piece of registered memory: register it first"), "{text}");

    let (code, text) = refused(&[TransferRequest { target: SegmentId(99), ..good }]);
    assert_eq!(
        (code, text.as_str()),
        (
            -1,
            "request 0: segment SegmentId(99) is not open: open it first, and take the number that it gets"
        )
    );

    let (code, text) = refused(&[good; 4]);
    assert_eq!(code, -2);
    assert!(text.starts_with("Exceed capacity"), "{text}");

    assert!(batch.is_empty(), "nothing was accepted");
    assert!(contents(&remote, 0, 10_000).iter().all(|&byte| byte == 0));

    // The batch is as good as new, and takes up to its capacity in several steps.
    initiator.submit(&batch, &[good]).unwrap();
    initiator.submit(&batch, &[good, good]).unwrap();
    assert_eq!(refused(&[good]).0, -2);
    assert!(initiator.wait(&batch, LONG));
    assert!(initiator.statuses(&batch).iter().all(|s| s.state == TransferState::Completed));
    assert_eq!(initiator.status(&batch, 3).unwrap_err().code(), -1);
    initiator.free(batch).unwrap();
    assert_eq!(initiator.allocate_batch(0).unwrap_err().code(), -1);
}

#[test]
fn segments_that_do_not_exist() {
    let engine = engine(1);
    let error = engine.open_segment("127.0.0.1:1").unwrap_err();
    assert_eq!(error.code(), -102);
    assert_eq!(
        error.to_string(),
        "cannot open segment \"127.0.0.1:1\": peer 127.0.0.1:1: connection to 127.0.0.1:1 \
         refused: no process listens there"
    );
    assert_eq!(engine.open_segment("nowhere.invalid:1").unwrap_err().code(), -101);
    for name in ["", "nowhere", "a:b", "::1:80"] {
        assert_eq!(engine.open_segment(name).unwrap_err().code(), -1, "{name}");
    }
    assert_eq!(engine.close_segment(SegmentId(5)).unwrap_err().code(), -1);
    assert_eq!(engine.refresh_segment(SegmentId(5)).unwrap_err().code(), -1);
}

#[test]
fn a_closed_segment_is_not_open() {
    let (target, initiator) = (engine(1), engine(1));
    let _remote = shared(&target, 100);
    let local = private(&initiator, 100);
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 100);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    initiator.close_segment(segment.id()).unwrap();
    let batch = initiator.allocate_batch(1).unwrap();
    let error = initiator.submit(&batch, &[write]).unwrap_err();
    assert!(matches!(error, SubmitError::UnknownSegment { .. }), "{error}");
    // Opened again, it has a new number.
    let again = initiator.open_segment(target.name()).unwrap();
    assert_ne!(again.id(), segment.id());
    let write = request(Opcode::Write, (&local, 0), &again, 0, 100);
    initiator.submit_and_wait(&[write], LONG).unwrap();
}

#[test]
fn a_segment_without_a_common_transport() {
    let with_rdma = engine(1);
    let without = TransferEngine::new(common::config("127.0.0.1".parse().unwrap())).unwrap();
    let remote = shared(&with_rdma, 100);
    let other = shared(&without, 100);

    let segment = without.open_segment(with_rdma.name()).unwrap();
    let batch = without.allocate_batch(1).unwrap();
    let write = request(Opcode::Write, (&other, 0), &segment, 0, 100);
    let error = without.submit(&batch, &[write]).unwrap_err();
    assert_eq!(error.code(), -6);
    assert!(error.to_string().contains("no transport for other processes"), "{error}");

    let segment = with_rdma.open_segment(without.name()).unwrap();
    let batch = with_rdma.allocate_batch(1).unwrap();
    let write = request(Opcode::Write, (&remote, 0), &segment, 0, 100);
    let error = with_rdma.submit(&batch, &[write]).unwrap_err();
    assert_eq!(error.code(), -6);
    assert!(error.to_string().contains("it speaks \"local\", not rdma"), "{error}");
}

#[test]
fn memory_registered_after_a_segment_was_opened_is_found() {
    let (target, initiator) = (engine(1), engine(1));
    let local = private(&initiator, 100);
    let segment = initiator.open_segment(target.name()).unwrap();
    assert!(segment.buffers().is_empty());
    let error = segment.address_of(0, 0, 100).unwrap_err();
    assert_eq!(error.to_string(), "the segment has 0 buffers: there is no buffer 0");

    let remote = shared(&target, 100);
    let write = TransferRequest {
        opcode: Opcode::Write,
        source: local.address(),
        target: segment.id(),
        target_offset: remote.address(),
        length: 100,
    };
    initiator.submit_and_wait(&[write], LONG).unwrap();
    assert_eq!(segment.buffers().len(), 1);

    // And memory that was unregistered is gone.
    drop(remote);
    initiator.refresh_segment(segment.id()).unwrap();
    assert!(segment.buffers().is_empty());
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err();
    assert!(error.to_string().ends_with("which has none"), "{error}");
}

#[test]
fn engines_and_transports_with_bad_settings() {
    let listen = "127.0.0.1".parse().unwrap();
    let short = Config { slice_length: 1000, ..common::config(listen) };
    assert!(matches!(TransferEngine::new(short), Err(NewError::OutOfRange { .. })));
    let endless = Config { fragment_ratio: 0, ..common::config(listen) };
    assert!(matches!(TransferEngine::new(endless), Err(NewError::OutOfRange { .. })));
    let anywhere = common::config("0.0.0.0".parse().unwrap());
    assert!(matches!(TransferEngine::new(anywhere.clone()), Err(NewError::HostMissing(_))));
    let named = Config { host: Some("localhost".to_owned()), ..anywhere };
    assert!(TransferEngine::new(named).unwrap().name().starts_with("localhost:"));

    let engine = TransferEngine::new(common::config(listen)).unwrap();
    let port = engine.name().rsplit_once(':').unwrap().1.parse().unwrap();
    let taken = Config { listen: (listen, port).into(), ..common::config(listen) };
    let error = TransferEngine::new(taken).unwrap_err();
    assert_eq!(error.code(), -102);
    assert!(error.to_string().contains("cannot listen at 127.0.0.1:"), "{error}");

    // The same where the port comes from a range.
    let taken = Config { ports: Some(port..=port), ..common::config(listen) };
    let error = TransferEngine::new(taken).unwrap_err();
    let expected =
        format!("cannot listen at 127.0.0.1:0: each port from {port} to {port} is in use");
    assert_eq!(error.to_string(), expected);

    let own = address();
    let good = RdmaConfig::new(&[own]);
    let refused = |config| engine.install_rdma(config).unwrap_err();
    assert!(matches!(refused(RdmaConfig::new(&[])), InstallError::NoAddress));
    assert!(matches!(refused(RdmaConfig::new(&[own, own])), InstallError::DuplicateAddress(_)));
    let deep = RdmaConfig { send_queue_depth: 0, ..good.clone() };
    assert!(matches!(refused(deep), InstallError::OutOfRange { .. }));
    let many = RdmaConfig { send_queue_depth: 4096, ..good.clone() };
    assert!(matches!(refused(many), InstallError::OutOfRange { .. }));
    // RFC 5737: no machine has this address.
    let foreign = RdmaConfig::new(&["192.0.2.1".parse().unwrap()]);
    assert!(matches!(refused(foreign), InstallError::Open(_)));

    engine.install_rdma(good.clone()).unwrap();
    assert!(matches!(refused(good), InstallError::Twice("rdma")));
    let other = TransferEngine::new(common::config(listen)).unwrap();
    let _buffer = private(&other, 100);
    other.install_shm().unwrap();
    assert!(matches!(other.install_shm().unwrap_err(), InstallError::Twice("shm")));
    other.install_tcp(TcpConfig::default()).unwrap();
    let twice = other.install_tcp(TcpConfig::default()).unwrap_err();
    assert!(matches!(twice, InstallError::Twice("tcp")), "{twice}");
}

/// What asks nothing of memory may come after it, at both ends.
#[test]
fn tcp_reaches_memory_that_was_registered_before_it_was_installed() {
    let [target, initiator] =
        [(), ()].map(|()| TransferEngine::new(common::config(address())).unwrap());
    let (remote, local) = (shared(&target, 4096), private(&initiator, 4096));
    local.write(0, &[7; 4096]).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    target.install_tcp(TcpConfig::default()).unwrap();
    initiator.install_tcp(TcpConfig::default()).unwrap();
    initiator.refresh_segment(segment.id()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 4096);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    assert_eq!(contents(&remote, 0, 4096), [7; 4096]);
    // Keys of what is registered now are found by the place of each transport.
    let other = private(&initiator, 100);
    other.write(0, &[8; 100]).unwrap();
    let write = request(Opcode::Write, (&other, 0), &segment, 0, 100);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    assert_eq!(contents(&remote, 0, 101), [[8; 100].as_slice(), &[7]].concat());
}

/// So may what keeps something with each registration, in segments that are open and with requests under way.
#[test]
fn shm_and_rdma_reach_memory_that_was_registered_before_they_were_installed() {
    const LENGTH: usize = 300_000;
    let engines = [(), ()].map(|()| TransferEngine::new(Config::new(address())).unwrap());
    let [target, initiator] = &engines;
    engines.iter().for_each(|engine| engine.install_tcp(TcpConfig::default()).unwrap());
    let (remote, local) = (shared(target, LENGTH), private(initiator, LENGTH));
    let other = (shared(target, 4096), private(initiator, 4096));
    let segment = initiator.open_segment(target.name()).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let busy = scope.spawn(|| {
            let local = private(initiator, 4096);
            let mut count = 0_u64;
            while !done.load(Ordering::Relaxed) {
                let (source, target_offset) = (local.address(), remote.address() + 100);
                let (opcode, target, length) = (Opcode::Read, segment.id(), 4096);
                let read = TransferRequest { opcode, source, target, target_offset, length };
                initiator.submit_and_wait(&[read], LONG).unwrap();
                count += 1;
            }
            count
        });
        let move_by = |name: &str, seed: u64, from: &Buffer, to: &Buffer, length: usize| {
            let bytes = pattern(length, seed);
            from.write(0, &bytes).unwrap();
            let write = TransferRequest {
                opcode: Opcode::Write,
                source: from.address(),
                target: segment.id(),
                target_offset: to.address(),
                length: length as u64,
            };
            let by = Some(name.to_owned());
            let options = SubmitOptions { transport: by, ..SubmitOptions::default() };
            let batch = initiator.submit_new(&[write], &options).unwrap();
            assert!(initiator.wait(&batch, LONG), "{name}");
            let status = initiator.status(&batch, 0).unwrap();
            let TransferStatus { state, transport, error, .. } = status;
            assert_eq!(state, TransferState::Completed, "{name}: {error:?}");
            assert_eq!(transport, Some(name));
            assert!(contents(to, 0, length) == bytes, "{name}");
        };
        for (seed, name) in (0..).zip(["shm", "rdma"]) {
            for engine in &engines {
                match name {
                    "shm" => engine.install_shm().unwrap(),
                    _ => {
                        engine
                            .install_rdma(RdmaConfig::new(&[engine.listening_at().ip()]))
                            .unwrap();
                    }
                }
            }
            initiator.refresh_segment(segment.id()).unwrap();
            move_by(name, seed, &local, &remote, LENGTH);
            move_by(name, seed + 10, &other.1, &other.0, 4096);
            move_by("tcp", seed + 20, &local, &remote, LENGTH);
        }
        done.store(true, Ordering::Relaxed);
        assert!(busy.join().unwrap() > 0);
    });
    let names: Vec<_> = initiator.transports().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["local", "shm", "tcp", "rdma"]);
    // All of it can be unregistered again.
    drop((remote, local, other));
}

#[test]
fn an_address_that_another_has_to_itself_is_no_soft_device() {
    // That of an engine would be shared.
    let taken = address();
    let _taken = std::net::UdpSocket::bind((taken, 4791)).unwrap();
    let engine = TransferEngine::new(common::config(taken)).unwrap();
    let error = engine.install_rdma(RdmaConfig::new(&[taken])).unwrap_err();
    assert!(error.to_string().contains("4791"), "{error}");
}

#[test]
fn clients_that_keep_their_connection_do_not_keep_others_out() {
    use millstream_metadata::{Frame, FrameType};
    use std::io::{Read, Write};

    let target = engine(1);
    let address: std::net::SocketAddr = target.name().parse().unwrap();
    let probe = Frame::new(FrameType::Probe, b"{}".to_vec()).encode();
    let held: Vec<_> = (0..64)
        .map(|_| {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.write_all(&probe).unwrap();
            // Answered, and from now on silent.
            stream.read_exact(&mut [0; 8]).unwrap();
            stream
        })
        .collect();
    engine(1).open_segment(target.name()).unwrap();
    drop(held);
}
