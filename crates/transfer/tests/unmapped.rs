//! Registered memory that is not there: never mapped, or taken away meanwhile.
#![cfg(target_arch = "x86_64")]
#![expect(unsafe_code, reason = "memory that a caller brings, and takes away")]

mod common;

use std::ptr;

use common::{LONG, address, engine, private};
use millstream_transfer::{
    FailureReason, Opcode, Pieces, PiecesRequest, SubmitAndWaitError, SubmitOptions, TcpConfig,
    TransferEngine, TransferPiece, TransferRequest, TransferState,
};

const PAGE: usize = 4096;
const PAGES: usize = 64;

/// Pages of its own mapping.
struct Mapped(*mut u8);

impl Mapped {
    fn new() -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping.
        let address = unsafe { libc::mmap(ptr::null_mut(), PAGES * PAGE, access, flags, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        Self(address.cast())
    }

    fn page(&self, page: usize) -> *mut u8 {
        self.0.wrapping_add(page * PAGE)
    }

    fn address(&self, page: usize) -> u64 {
        self.page(page).expose_provenance() as u64
    }

    /// As if it was not mapped, but nothing else is ever mapped there.
    fn take_away(&self, page: usize, access: libc::c_int) {
        // SAFETY: memory of ours, without references to it.
        assert_eq!(unsafe { libc::mprotect(self.page(page).cast(), PAGE, access) }, 0);
    }

    fn register(&self, engine: &TransferEngine) {
        // SAFETY: nothing else is mapped there before it is unregistered, and nobody has references to it.
        unsafe { engine.register_memory(self.0, PAGES * PAGE, "cpu:0", true) }.unwrap();
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: nobody uses it any more.
        unsafe { libc::munmap(self.0.cast(), PAGES * PAGE) };
    }
}

fn shm_engine() -> TransferEngine {
    let engine = TransferEngine::new(common::config(address())).unwrap();
    engine.install_shm().unwrap();
    engine
}

fn tcp_engine() -> TransferEngine {
    let engine = TransferEngine::new(common::config(address())).unwrap();
    engine.install_tcp(TcpConfig::default()).unwrap();
    engine
}

/// Why a request failed, if it did.
fn outcome(engine: &TransferEngine, request: TransferRequest) -> Option<FailureReason> {
    match engine.submit_and_wait(&[request], LONG) {
        Ok(moved) => {
            assert_eq!(moved, request.length);
            None
        }
        Err(SubmitAndWaitError::Failed { error, .. }) => Some(error.reason),
        Err(error) => panic!("{error}"),
    }
}

/// Page 8 cannot be accessed, and page 9 cannot be written. What touches them fails, and all else is as
/// ever.
fn take_away_and_try(target: &TransferEngine, initiator: &TransferEngine, named: bool) {
    let (theirs, ours) = (Mapped::new(), Mapped::new());
    theirs.register(target);
    ours.register(initiator);
    let good = private(initiator, PAGES * PAGE);
    let segment = initiator.open_segment(target.name()).unwrap();
    let request = |opcode, source, target_offset, pages: usize| TransferRequest {
        opcode,
        source,
        target: segment.id(),
        target_offset,
        length: (pages * PAGE) as u64,
    };
    use Opcode::{Read, Write};
    for opcode in [Write, Read] {
        let whole = request(opcode, ours.address(0), theirs.address(0), PAGES);
        assert_eq!(outcome(initiator, whole).map(|it| it.to_string()), None);
    }
    for memory in [&ours, &theirs] {
        memory.take_away(8, libc::PROT_NONE);
        memory.take_away(9, libc::PROT_READ);
    }
    let all = good.address();
    for (what, fails) in [
        (request(Write, ours.address(0), theirs.address(16), 16), Some(ours.address(8))),
        (request(Write, ours.address(9), theirs.address(16), 16), None),
        (request(Read, ours.address(8), theirs.address(16), 1), Some(ours.address(8))),
        (request(Read, ours.address(9), theirs.address(16), 1), Some(ours.address(9))),
        (request(Read, ours.address(10), theirs.address(16), 16), None),
    ] {
        let reason = outcome(initiator, what);
        assert_eq!(reason.is_some(), fails.is_some(), "{reason:?}");
        if let (true, Some(place), Some(reason)) = (named, fails, reason) {
            let FailureReason::MemoryGone { address } = reason else { panic!("{reason}") };
            assert_eq!(address & !0xfff, place, "{reason}");
        }
    }
    for (what, fails) in [
        (request(Write, all, theirs.address(0), 16), true),
        (request(Write, all, theirs.address(9), 1), true),
        (request(Write, all, theirs.address(10), 32), false),
        (request(Read, all, theirs.address(0), 16), true),
        (request(Read, all, theirs.address(9), 32), false),
        (request(Read, all, theirs.address(0), 8), false),
    ] {
        let reason = outcome(initiator, what);
        assert_eq!(reason.is_some(), fails, "{reason:?}");
    }
    target.unregister_memory(theirs.0).unwrap();
    initiator.unregister_memory(ours.0).unwrap();
}

#[test]
fn copies_within_an_engine_fail_alone() {
    let engine = TransferEngine::new(common::config(address())).unwrap();
    take_away_and_try(&engine, &engine, true);
}

#[test]
fn copies_between_processes_fail_alone() {
    let (target, initiator) = (shm_engine(), shm_engine());
    take_away_and_try(&target, &initiator, true);
}

#[test]
fn work_requests_of_soft_devices_fail_alone() {
    let (target, initiator) = (engine(1), engine(1));
    take_away_and_try(&target, &initiator, false);
}

/// Many requests of a page each, of which one fails.
fn take_away_one_of_many(target: &TransferEngine, initiator: &TransferEngine) {
    let theirs = Mapped::new();
    theirs.register(target);
    let good = private(initiator, PAGES * PAGE);
    let segment = initiator.open_segment(target.name()).unwrap();
    good.write(0, &[3; PAGES * PAGE]).unwrap();
    let request = |opcode, page: usize| TransferRequest {
        opcode,
        source: good.address() + (page * PAGE) as u64,
        target: segment.id(),
        target_offset: theirs.address(page),
        length: PAGE as u64,
    };
    let requests = |opcode| (0..PAGES).map(|page| request(opcode, page)).collect::<Vec<_>>();
    initiator.submit_and_wait(&requests(Opcode::Write), LONG).unwrap();
    good.write(0, &[4; PAGES * PAGE]).unwrap();
    theirs.take_away(8, libc::PROT_NONE);
    for opcode in [Opcode::Read, Opcode::Write] {
        let batch = initiator.allocate_batch(PAGES).unwrap();
        initiator.submit(&batch, &requests(opcode)).unwrap();
        assert!(initiator.wait(&batch, LONG));
        for (page, status) in initiator.statuses(&batch).into_iter().enumerate() {
            let expected = match page {
                8 => (TransferState::Failed, 0, true),
                _ => (TransferState::Completed, PAGE as u64, false),
            };
            let found = (status.state, status.transferred_bytes, status.error.is_some());
            assert_eq!(found, expected, "{opcode:?} {page}");
        }
        initiator.free(batch).unwrap();
    }
    let mut bytes = vec![0; PAGES * PAGE];
    good.read(0, &mut bytes).unwrap();
    let read = |page: usize| bytes[page * PAGE..][..PAGE].iter().all(|&byte| byte == 3);
    assert!((0..PAGES).all(|page| page == 8 || read(page)));
    target.unregister_memory(theirs.0).unwrap();
}

#[test]
fn one_of_many_small_requests_fails_alone() {
    let engine = TransferEngine::new(common::config(address())).unwrap();
    take_away_one_of_many(&engine, &engine);
    take_away_one_of_many(&shm_engine(), &shm_engine());
    take_away_one_of_many(&tcp_engine(), &tcp_engine());
}

/// Several pieces are posted at once, and the last of them completes for all. A fault is told of any.
#[test]
fn requests_of_pieces_fail_with_any_of_them() {
    const COUNT: usize = 20;
    for gone in [0, 4, 11, 19] {
        let (target, initiator) = (engine(1), engine(1));
        let theirs = Mapped::new();
        theirs.register(&target);
        let good = private(&initiator, PAGES * PAGE);
        let segment = initiator.open_segment(target.name()).unwrap();
        let piece = |page: usize| TransferPiece {
            source: good.address() + (page * PAGE) as u64,
            target_offset: theirs.address(page),
            length: PAGE as u64,
        };
        let lists: Vec<Vec<_>> = (0..3)
            .map(|part| (0..COUNT).map(|at| piece(part * COUNT + at)).rev().collect())
            .collect();
        let requests = |opcode| {
            let request =
                |list| PiecesRequest { opcode, target: segment.id(), pieces: Pieces::List(list) };
            lists.iter().map(|list| request(list)).collect::<Vec<_>>()
        };
        let options = SubmitOptions::default();
        good.write(0, &[3; PAGES * PAGE]).unwrap();
        let batch = initiator.allocate_batch(3).unwrap();
        initiator.submit_pieces(&batch, &requests(Opcode::Write), &options).unwrap();
        assert!(initiator.wait(&batch, LONG));
        assert!(initiator.statuses(&batch).iter().all(|it| it.state == TransferState::Completed));
        good.write(0, &[4; PAGES * PAGE]).unwrap();
        theirs.take_away(COUNT + gone, libc::PROT_NONE);
        for opcode in [Opcode::Read, Opcode::Write] {
            let batch = initiator.allocate_batch(3).unwrap();
            initiator.submit_pieces(&batch, &requests(opcode), &options).unwrap();
            assert!(initiator.wait(&batch, LONG));
            for (part, status) in initiator.statuses(&batch).into_iter().enumerate() {
                let expected =
                    if part == 1 { TransferState::Failed } else { TransferState::Completed };
                assert_eq!(status.state, expected, "{opcode:?} {part}: {status:?}");
                let (moved, all) = (status.transferred_bytes, (COUNT * PAGE) as u64);
                assert!(if part == 1 { moved < all } else { moved == all }, "{opcode:?}: {moved}");
            }
        }
        let bytes = common::contents(&good, 0, 3 * COUNT * PAGE);
        let read =
            |part: usize| bytes[part * COUNT * PAGE..][..COUNT * PAGE].iter().all(|&it| it == 3);
        assert!(read(0) && read(2));
        target.unregister_memory(theirs.0).unwrap();
    }
}

#[test]
fn what_is_not_there_is_not_registered() {
    let target = engine(1);
    let memory = Mapped::new();
    memory.take_away(8, libc::PROT_NONE);
    memory.take_away(9, libc::PROT_READ);
    let register = |first: usize, pages: usize| {
        // SAFETY: as in `Mapped::register`.
        unsafe { target.register_memory(memory.page(first), pages * PAGE, "cpu:0", true) }
    };
    register(0, 8).unwrap();
    for (first, pages, bad, why) in
        [(8, 1, 8, "must not be read"), (9, 3, 9, "must not be written"), (8, 30, 8, "read")]
    {
        let error = register(first, pages).unwrap_err();
        assert_eq!(error.code(), -1);
        let text = error.to_string();
        assert!(text.contains(&format!("at {:#x}, ", memory.address(bad))), "{text}");
        assert!(text.contains(why), "{text}");
    }
    register(10, 4).unwrap();
    let gone = Mapped::new();
    let (first, length) = (gone.page(0), PAGES * PAGE);
    drop(gone);
    // SAFETY: nothing is there, or if another thread was faster, it is only looked at.
    if let Err(error) = unsafe { target.register_memory(first, length, "cpu:0", false) } {
        assert!(error.to_string().contains(&format!("at {first:p}")), "{error}");
    }

    // Those that were registered are as good as without the others.
    let initiator = engine(1);
    let source = private(&initiator, PAGE);
    source.write(0, &[5; PAGE]).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    assert_eq!(segment.buffers().len(), 2);
    for page in [0, 13] {
        let request = TransferRequest {
            opcode: Opcode::Write,
            source: source.address(),
            target: segment.id(),
            target_offset: memory.address(page),
            length: PAGE as u64,
        };
        assert!(outcome(&initiator, request).is_none());
    }
    target.unregister_memory_batch(&[memory.page(0), memory.page(10)]).unwrap();
}
