//! Registration: what may be registered, all of a batch or nothing, and many pieces of memory.

mod common;

use std::ptr;

use common::{LONG, address, contents, engine, engine_with, pattern, private, request, shared};
use millstream_transfer::{Opcode, RdmaConfig, SegmentId, TransferEngine, TransferRequest};

/// Pages that are nobody else's, in one allocation.
struct Pages(Vec<u8>);

const PAGE: usize = 4096;

impl Pages {
    fn new(count: usize) -> Self {
        Self(vec![0; count * PAGE])
    }

    /// So many bytes from an offset on.
    fn piece(&mut self, offset: usize, length: usize) -> (*mut u8, usize) {
        assert!(offset + length <= self.0.len());
        (self.0.as_mut_ptr().wrapping_add(offset), length)
    }
}

fn register(engine: &TransferEngine, piece: (*mut u8, usize), location: &str) -> i32 {
    register_all(engine, &[piece], location)
}

/// The code of the C API.
fn register_all(engine: &TransferEngine, pieces: &[(*mut u8, usize)], location: &str) -> i32 {
    // SAFETY: what is registered here is of `Pages`, which lives longer than its engine, and is looked at
    // by nobody meanwhile; or it is refused.
    let registered = unsafe { engine.register_memory_batch(pieces, location, true) };
    registered.map_or_else(|error| error.code(), |()| 0)
}

/// What peers see, in the order of addresses.
fn published(engine: &TransferEngine) -> Vec<(u64, u64, String)> {
    let asking = TransferEngine::new(common::config(address())).unwrap();
    let segment = asking.open_segment(engine.name()).unwrap();
    segment.buffers().into_iter().map(|it| (it.address, it.length, it.location)).collect()
}

#[test]
fn a_batch_is_registered_whole_or_not_at_all() {
    let mut pages = Pages::new(8);
    let engine = engine(1);
    let [a, b, c] = [0, 1, 2].map(|page| pages.piece(page * PAGE, PAGE));
    let inside = pages.piece(PAGE + 100, 50);
    for (last, code) in [
        (inside, -7),
        (b, -7),
        ((ptr::null_mut(), 5), -1),
        ((c.0, 0), -1),
        ((ptr::without_provenance_mut(usize::MAX), 2), -1),
    ] {
        assert_eq!(register_all(&engine, &[a, b, last], "cpu:0"), code);
        assert_eq!(published(&engine), []);
        let again = engine.unregister_memory(a.0).unwrap_err();
        assert_eq!(again.code(), -3, "nothing of it stayed: {again}");
    }
    assert_eq!(register_all(&engine, &[a, b, c], "cpu:0"), 0);
    assert_eq!(published(&engine).len(), 3);
    assert_eq!(register_all(&engine, &[pages.piece(4 * PAGE, PAGE), a], "cpu:0"), -7);
    assert_eq!(published(&engine).len(), 3, "those that were there stay");
}

#[test]
fn of_a_batch_to_unregister_what_can_be_is() {
    let mut pages = Pages::new(4);
    let engine = engine(1);
    let [a, b, c] = [0, 1, 2].map(|page| pages.piece(page * PAGE, PAGE));
    assert_eq!(register_all(&engine, &[a, b, c], "cpu:0"), 0);
    let inside = b.0.wrapping_add(1);
    let error = engine.unregister_memory_batch(&[a.0, inside, a.0, c.0]).unwrap_err();
    assert_eq!(error.code(), -3);
    assert!(error.to_string().contains(&format!("{inside:p}")), "the first one: {error}");
    assert_eq!(published(&engine).len(), 1, "b is left");
    engine.unregister_memory_batch(&[b.0]).unwrap();
    engine.unregister_memory_batch(&[]).unwrap();
    assert_eq!(published(&engine), []);
    assert_eq!(register_all(&engine, &[a, b, c], "cpu:0"), 0, "their addresses are free");
}

/// Mooncake, and we, refuse a descriptor that has a buffer without a name.
#[test]
fn no_location_makes_the_others_unreadable() {
    let mut pages = Pages::new(8);
    // Memory without pages is nowhere.
    pages.0.fill(1);
    let engine = engine(1);
    for (index, location) in ["", "*", "cpu:1", "cuda:0"].into_iter().enumerate() {
        assert_eq!(register(&engine, pages.piece(index * PAGE, PAGE), location), 0);
    }
    let long = "x".repeat(65);
    for location in [" ", "cpu 0", "cpu\n", "\u{e9}", &long] {
        assert_eq!(register(&engine, pages.piece(5 * PAGE, PAGE), location), -1, "{location:?}");
    }
    let locations: Vec<_> = published(&engine).into_iter().map(|(_, _, name)| name).collect();
    assert_eq!(locations[2..], ["cpu:1", "cuda:0"]);
    // Where the kernel says that it is, or anywhere where it does not.
    assert_eq!(locations[0], locations[1]);
    assert!(locations[0].starts_with("cpu:") || locations[0] == "*", "{locations:?}");
}

/// Requests within the engine go by what is registered now, too.
#[test]
fn the_own_segment_is_always_up_to_date() {
    let mut pages = Pages::new(2);
    let engine = engine(1);
    let own = engine.open_segment(engine.name()).unwrap();
    assert_eq!(own.buffers(), []);
    let (a, b) = (pages.piece(0, PAGE), pages.piece(PAGE, PAGE));
    assert_eq!(register_all(&engine, &[a, b], "*"), 0);
    let request = TransferRequest {
        opcode: Opcode::Write,
        source: a.0.expose_provenance() as u64,
        target: SegmentId::LOCAL,
        target_offset: b.0.expose_provenance() as u64,
        length: PAGE as u64,
    };
    engine.submit_and_wait(&[request], LONG).unwrap();
    engine.refresh_segment(own.id()).unwrap();
    assert_eq!(own.buffers().len(), 2);
    engine.unregister_memory(b.0).unwrap();
    let error = engine.submit_and_wait(&[request], LONG).unwrap_err();
    assert_eq!(error.code(), -1, "no such buffer: {error}");
    assert_eq!(engine.open_segment(engine.name()).unwrap().buffers().len(), 1);
}

/// As many as there may be, in two ways; the last one is as good as the first.
#[test]
fn many_pieces_of_memory_are_registered_and_used() {
    const COUNT: usize = 65_536;
    const STEP: usize = 64;
    let mut pages = Pages::new(COUNT * STEP / PAGE + 1);
    let all: Vec<_> = (0..COUNT).map(|index| pages.piece(index * STEP, STEP - 1)).collect();
    let extra = pages.piece(COUNT * STEP, STEP);
    let (target, initiator) = (engine(1), engine(1));
    let (one_by_one, batch) = all.split_at(COUNT / 2);
    for &piece in one_by_one {
        assert_eq!(register(&target, piece, "cpu:0"), 0);
    }
    assert_eq!(register_all(&target, batch, "cpu:0"), 0);
    assert_eq!(register(&target, extra, "cpu:0"), -2, "that is the limit");

    let segment = initiator.open_segment(target.name()).unwrap();
    let last = COUNT - 1;
    let (place, length) = all[last];
    let source = private(&initiator, STEP);
    source.write(0, &[7; STEP]).unwrap();
    let write = TransferRequest {
        target_offset: segment.address_of(last, 0, length as u64).unwrap(),
        ..request(Opcode::Write, (&source, 0), &segment, 0, length as u64)
    };
    assert_eq!(write.target_offset, place.addr() as u64);
    initiator.submit_and_wait(&[write], LONG).unwrap();

    let addresses: Vec<_> = all.iter().map(|(address, _)| *address).collect();
    let (one_by_one, batch) = addresses.split_at(COUNT / 2);
    target.unregister_memory_batch(batch).unwrap();
    for &address in one_by_one {
        target.unregister_memory(address).unwrap();
    }
    drop((target, initiator));
    assert_eq!(pages.0[last * STEP..][..STEP - 1], [7; STEP - 1]);
    assert_eq!(pages.0.iter().filter(|&&byte| byte != 0).count(), STEP - 1);
}

/// All of them are used, in either way.
#[test]
fn each_device_has_a_key_of_its_own() {
    const LENGTH: usize = 1 << 20;
    for parallel_registration in [Some(true), Some(false), None] {
        let engine = || {
            let addresses: Vec<_> = (0..4).map(|_| address()).collect();
            engine_with(RdmaConfig { parallel_registration, ..RdmaConfig::new(&addresses) })
        };
        let (target, initiator) = (engine(), engine());
        let (remote, local) = (shared(&target, LENGTH), private(&initiator, LENGTH));
        let bytes = pattern(LENGTH, 3);
        local.write(0, &bytes).unwrap();
        let segment = initiator.open_segment(target.name()).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
        initiator.submit_and_wait(&[write], LONG).unwrap();
        assert!(contents(&remote, 0, LENGTH) == bytes);
    }
}

/// Two pieces of memory are not one, though each is several regions and they are neighbours.
#[test]
fn neighbours_of_several_regions_are_not_one_piece() {
    const HALF: usize = 64 * PAGE;
    let mut pages = Pages::new(128);
    let few = || {
        let addresses = [address()];
        engine_with(RdmaConfig { max_region_length: 65_536, ..RdmaConfig::new(&addresses) })
    };
    let (target, initiator) = (few(), few());
    for half in [0, HALF] {
        assert_eq!(register(&target, pages.piece(half, HALF), "cpu:0"), 0);
    }
    let local = private(&initiator, 2 * HALF);
    let segment = initiator.open_segment(target.name()).unwrap();
    assert_eq!(segment.buffers().len(), 8);
    assert!(segment.address_of(0, 0, HALF as u64 + 1).is_err());
    let all = request(Opcode::Write, (&local, 0), &segment, 0, HALF as u64);
    initiator.submit_and_wait(&[all], LONG).unwrap();
    let across = TransferRequest { length: HALF as u64 + 1, ..all };
    let error = initiator.submit_and_wait(&[across], LONG).unwrap_err();
    assert_eq!(error.code(), -1, "{error}");
    drop((initiator, target));
}
