//! The engine's own segment, and memory that callers bring.

mod common;

use std::time::{Duration, Instant};

use common::{LONG, address, contents, engine, pattern, private, request, shared};
use millstream_transfer::{
    Opcode, SegmentId, SubmitOptions, TransferEngine, TransferRequest, TransferState,
};

fn local_engine() -> TransferEngine {
    TransferEngine::new(common::config("127.0.0.1".parse().unwrap())).unwrap()
}

#[test]
fn an_engine_copies_within_its_own_segment() {
    let engine = local_engine();
    let target = shared(&engine, 1 << 20);
    let source = private(&engine, 1 << 20);
    let bytes = pattern(300_000, 1);
    source.write(5, &bytes).unwrap();
    let segment = engine.open_segment(engine.name()).unwrap();
    assert_eq!(segment.id(), SegmentId::LOCAL);
    assert_eq!(segment.buffers().len(), 1, "what is not remote accessible is not offered");
    let request = |opcode| TransferRequest {
        opcode,
        source: source.address() + 5,
        target: SegmentId::LOCAL,
        target_offset: target.address() + 77,
        length: 300_000,
    };
    assert_eq!(engine.submit_and_wait(&[request(Opcode::Write)], LONG).unwrap(), 300_000);
    assert_eq!(contents(&target, 77, 300_000), bytes);
    source.write(5, &vec![0; 300_000]).unwrap();
    assert_eq!(engine.submit_and_wait(&[request(Opcode::Read)], LONG).unwrap(), 300_000);
    assert_eq!(contents(&source, 5, 300_000), bytes);
    assert_eq!(engine.transports().len(), 1);
}

/// Some of them are copied by who submits, and others later; they go between several pieces of memory.
#[test]
fn many_small_requests_arrive_where_they_should() {
    const LENGTH: usize = 4096;
    const COUNT: usize = 200;
    let engine = local_engine();
    let ends = [1, 2].map(|seed| {
        let source = private(&engine, COUNT * LENGTH);
        source.write(0, &pattern(COUNT * LENGTH, seed)).unwrap();
        (source, shared(&engine, COUNT * LENGTH))
    });
    let request = |index: usize| {
        // Three of the one, three of the other.
        let (source, target) = &ends[index / 3 % 2];
        let at = (index / 6 * 3 + index % 3) * LENGTH;
        let at = at as u64;
        TransferRequest {
            opcode: Opcode::Write,
            source: source.address() + at,
            target: SegmentId::LOCAL,
            target_offset: target.address() + at,
            length: LENGTH as u64,
        }
    };
    let requests: Vec<_> = (0..2 * COUNT / 6 * 6).map(request).collect();
    let batch = engine.allocate_batch(requests.len()).unwrap();
    engine.submit(&batch, &requests).unwrap();
    let first = engine.status(&batch, 0).unwrap();
    assert_eq!(first.state, TransferState::Completed, "the first are copied at once");
    assert!(engine.wait(&batch, LONG));
    for status in engine.statuses(&batch) {
        assert_eq!(status.state, TransferState::Completed);
        assert_eq!((status.transferred_bytes, status.transport), (LENGTH as u64, Some("local")));
    }
    let done = requests.len() / 2 * LENGTH;
    for (source, target) in &ends {
        assert!(contents(source, 0, done) == contents(target, 0, done));
    }
}

#[test]
fn the_own_segment_by_another_name_is_the_own_segment() {
    let engine = local_engine();
    let port = engine.name().rsplit_once(':').unwrap().1.to_owned();
    let segment = engine.open_segment(&format!("localhost:{port}")).unwrap();
    assert_eq!(segment.id(), SegmentId::LOCAL);
}

#[test]
fn registering_has_the_codes_of_the_c_api() {
    let engine = engine(1);
    let buffer = shared(&engine, 8192);
    assert_eq!(engine.allocate_buffer(0, "*", true).unwrap_err().code(), -1);
    assert_eq!(engine.unregister_memory(std::ptr::dangling_mut()).unwrap_err().code(), -3);
    let address = buffer.address();
    let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
    engine.unregister_memory(pointer).unwrap();
    assert_eq!(engine.unregister_memory(pointer).unwrap_err().code(), -3);
    // It is still there, as plain memory.
    buffer.write(0, b"x").unwrap();
}

#[test]
fn buffers_have_bounds() {
    let engine = local_engine();
    let buffer = private(&engine, 100);
    assert!(buffer.write(0, &[1; 100]).is_ok());
    assert!(buffer.write(1, &[1; 100]).is_err());
    assert!(buffer.read(100, &mut []).is_ok());
    assert!(buffer.read(101, &mut []).is_err());
    let error = buffer.read(usize::MAX, &mut [0; 2]).unwrap_err();
    assert_eq!(error.code(), -1);
    assert_eq!(buffer.address() % 4096, 0);
}

#[test]
fn a_buffer_outlives_its_engine() {
    let engine = engine(1);
    let buffer = shared(&engine, 100);
    buffer.write(0, b"still here").unwrap();
    drop(engine);
    assert_eq!(contents(&buffer, 0, 10), b"still here");
}

/// As memmove does, whichever way the ranges lie, and whatever the slices.
#[test]
fn overlapping_ranges_are_copied_as_they_were() {
    const LENGTH: usize = 11 << 20;
    let engine = local_engine();
    let buffer = shared(&engine, LENGTH);
    let bytes = pattern(LENGTH, 9);
    for (from, to, length) in [
        (0, 1, 100),
        (1, 0, 100),
        (0, 1, 2 << 20),
        (1, 0, 2 << 20),
        (0, 70_000, 2 << 20),
        (70_000, 0, 2 << 20),
        (5, 1 << 20, (1 << 20) + 17),
        (7, 7, 2 << 20),
        // In several steps.
        (0, 1, 10 << 20),
        (1, 0, 10 << 20),
        (0, 1 << 20, 9 << 20),
        (1 << 20, 0, 9 << 20),
    ] {
        for opcode in [Opcode::Write, Opcode::Read] {
            buffer.write(0, &bytes).unwrap();
            let (near, far) = if opcode == Opcode::Write { (from, to) } else { (to, from) };
            let request = TransferRequest {
                opcode,
                source: buffer.address() + near as u64,
                target: SegmentId::LOCAL,
                target_offset: buffer.address() + far as u64,
                length: length as u64,
            };
            engine.submit_and_wait(&[request], LONG).unwrap();
            let mut expected = bytes.clone();
            expected.copy_within(from..from + length, to);
            assert!(contents(&buffer, 0, LENGTH) == expected, "{from} {to} {length} {opcode:?}");
        }
    }
}

/// What is long is not copied by who submits, and can be canceled.
#[test]
fn submission_does_not_wait_for_long_copies() {
    const LENGTH: u64 = 64 << 20;
    let engine = local_engine();
    let (source, target) = (private(&engine, LENGTH as usize), shared(&engine, LENGTH as usize));
    let request = TransferRequest {
        opcode: Opcode::Write,
        source: source.address(),
        target: SegmentId::LOCAL,
        target_offset: target.address(),
        length: LENGTH,
    };
    let batch = engine.allocate_batch(100).unwrap();
    engine.submit(&batch, &[request; 100]).unwrap();
    // 6 GiB take longer than a look at the last of them.
    assert!(engine.cancel(&batch, 99).unwrap());
    for task in 0..99 {
        engine.cancel(&batch, task).unwrap();
    }
    assert!(engine.wait(&batch, LONG));
    let statuses = engine.statuses(&batch);
    let last = &statuses[99];
    assert_eq!((last.state, last.transferred_bytes), (TransferState::Canceled, 0));
    assert!(statuses.iter().all(|status| status.state.is_final() && status.error.is_none()));
    engine.free(batch).unwrap();
}

/// A copy within overlapping memory is one, and still ends in time; so does one that waits behind it.
#[test]
fn deadlines_are_kept_while_much_is_copied() {
    const LENGTH: u64 = 512 << 20;
    let engine = local_engine();
    let buffer = shared(&engine, LENGTH as usize + 1);
    let copy = |from: u64, to: u64, length| TransferRequest {
        opcode: Opcode::Write,
        source: buffer.address() + from,
        target: SegmentId::LOCAL,
        target_offset: buffer.address() + to,
        length,
    };
    let submit = |request, within: Option<Duration>| {
        let deadline = within.map(|within| Instant::now() + within);
        let batch = engine.allocate_batch(1).unwrap();
        let options = SubmitOptions { deadline, ..SubmitOptions::default() };
        engine.submit_with(&batch, &[request], &options).unwrap();
        batch
    };
    let status = |batch: &_| engine.status(batch, 0).unwrap();
    for (from, to) in [(0, 1), (1, 0)] {
        let late = submit(copy(from, to, LENGTH), Some(Duration::from_millis(10)));
        assert!(engine.wait(&late, LONG));
        let status = status(&late);
        assert_eq!(status.state, TransferState::Timeout);
        assert!(status.transferred_bytes < LENGTH, "{status:?}");
        assert!(!status.target_undefined, "nobody touches it any more");
    }
    let first = submit(copy(0, 1, LENGTH), None);
    // The next one is for another thread.
    let second = submit(copy(1, 0, LENGTH), None);
    let behind = submit(copy(0, 1 << 20, 1 << 20), Some(Duration::from_millis(10)));
    assert!(engine.wait(&behind, LONG));
    assert_eq!(status(&behind).state, TransferState::Timeout);
    assert!(engine.wait(&first, LONG) && engine.wait(&second, LONG));
    assert_eq!(status(&first).state, TransferState::Completed);
}

/// Another engine can have our name where it is. It is not us.
#[test]
fn a_remote_of_our_own_name_is_not_us() {
    let named = || {
        let mut config = common::config("127.0.0.1".parse().unwrap());
        config.host = Some("same.example:1".to_owned());
        TransferEngine::new(config).unwrap()
    };
    let (own, other) = (named(), named());
    assert_eq!(own.name(), other.name());
    let port = |engine: &TransferEngine| engine.listening_at().port();
    assert_ne!(port(&own), port(&other));
    let segment = own.open_segment(&format!("127.0.0.1:{}", port(&other))).unwrap();
    assert_ne!(segment.id(), SegmentId::LOCAL);
    let segment = own.open_segment(&format!("127.0.0.1:{}", port(&own))).unwrap();
    assert_eq!(segment.id(), SegmentId::LOCAL);
}

/// Threads write the same bytes at once, with calls and with transfers: what is read is what one of them
/// wrote, byte by byte, and only within the buffer.
#[test]
fn a_buffer_is_used_by_many_threads_at_a_time() {
    const LENGTH: usize = 100_000;
    let engine = TransferEngine::new(common::config(address())).unwrap();
    let (buffer, source) = (shared(&engine, LENGTH + 64), private(&engine, LENGTH));
    source.write(0, &[3; LENGTH]).unwrap();
    let own = engine.open_segment(engine.name()).unwrap();
    let offset = own.address_of(0, 0, 1).unwrap().abs_diff(buffer.address());
    assert_eq!(offset, 0, "one buffer can be accessed by peers");
    let write = request(Opcode::Write, (&source, 0), &own, 32, LENGTH as u64);
    std::thread::scope(|scope| {
        for value in [1, 2] {
            let buffer = &buffer;
            scope.spawn(move || {
                for _ in 0..200 {
                    buffer.write(32, &[value; LENGTH]).unwrap();
                }
            });
        }
        for _ in 0..200 {
            let found = contents(&buffer, 0, LENGTH + 64);
            assert!(found.iter().all(|&byte| byte <= 3));
            assert!(found[..32].iter().chain(&found[32 + LENGTH..]).all(|&byte| byte == 0));
            engine.submit_and_wait(&[write], LONG).unwrap();
        }
    });
}
