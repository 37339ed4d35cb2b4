//! Memory of a GPU, where there is one. What does not need it is tested beside the code, with one that is
//! not there.

#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;
mod driver;
mod files;
mod kinds;

use std::time::{Duration, Instant};
use std::{ptr, thread};

use common::{LONG, engine, pattern, request, shared};
use millstream_net::cuda::{self, Allocation};
use millstream_transfer::{
    Buffer, Opcode, RegisterError, Segment, SubmitAndWaitError, TransferEngine, TransferRequest,
};

/// Whether there is a GPU. With `cuda` in `MILLSTREAM_REQUIRE` there must be one: `all` does not ask for
/// it, since machines that test everything else have none.
fn has_gpu() -> bool {
    let found = match cuda::summary() {
        Ok((_, names)) if !names.is_empty() => return true,
        Ok(_) => "the CUDA driver sees no GPU".to_owned(),
        Err(error) => format!("no CUDA driver: {error}"),
    };
    let required = std::env::var("MILLSTREAM_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|it| it == "cuda"), "{found}");
    println!("skipped: {found}");
    false
}

/// Memory as an application has it: it knows nothing of the engine.
enum Memory {
    Host(Buffer),
    Gpu(Allocation),
}

impl Memory {
    fn new(engine: &TransferEngine, gpu: bool, length: usize) -> Self {
        if !gpu {
            return Self::Host(shared(engine, length));
        }
        let allocation = Allocation::new(0, length).unwrap();
        register(engine, allocation.address(), length, "*").unwrap();
        Self::Gpu(allocation)
    }

    fn address(&self) -> u64 {
        match self {
            Self::Host(buffer) => buffer.address(),
            Self::Gpu(allocation) => allocation.address(),
        }
    }

    fn write(&self, bytes: &[u8]) {
        match self {
            Self::Host(buffer) => buffer.write(0, bytes).unwrap(),
            Self::Gpu(allocation) => allocation.write(0, bytes).unwrap(),
        }
    }

    fn read(&self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        match self {
            Self::Host(buffer) => buffer.read(0, &mut bytes).unwrap(),
            Self::Gpu(allocation) => allocation.read(0, &mut bytes).unwrap(),
        }
        bytes
    }
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

fn register(
    engine: &TransferEngine,
    address: u64,
    length: usize,
    location: &str,
) -> Result<(), RegisterError> {
    // SAFETY: the tests look at their memory between transfers only, and free it after it was unregistered,
    // or to see what becomes of it.
    unsafe { engine.register_memory(pointer(address), length, location, true) }
}

fn one(
    opcode: Opcode,
    own: (&Memory, usize),
    segment: &Segment,
    other: (&Memory, usize),
    length: usize,
) -> TransferRequest {
    TransferRequest {
        opcode,
        source: own.0.address() + own.1 as u64,
        target: segment.id(),
        target_offset: other.0.address() + other.1 as u64,
        length: length as u64,
    }
}

/// Moves bytes both ways between all kinds of memory, and looks at all of both.
fn exchange(engine: &TransferEngine, peer: &TransferEngine) {
    const LENGTH: usize = 64 << 20;
    for (own, other) in [(false, false), (false, true), (true, false), (true, true)] {
        let kinds = (own, other);
        let own = Memory::new(engine, own, LENGTH);
        let other = Memory::new(peer, other, LENGTH);
        let segment = engine.open_segment(peer.name()).unwrap();
        engine.refresh_segment(segment.id()).unwrap();
        for (here, there, length) in [
            (0, 0, LENGTH),
            (3, 70_001, 1),
            (4095, 1, 4097),
            (77, 8191, 65_535),
            (1, 2, (1 << 20) + 3),
            (LENGTH - 5_000_001, 9, 5_000_001),
        ] {
            for opcode in [Opcode::Write, Opcode::Read] {
                let mine = pattern(LENGTH, length as u64);
                let theirs = pattern(LENGTH, !length as u64);
                own.write(&mine);
                other.write(&theirs);
                let request = one(opcode, (&own, here), &segment, (&other, there), length);
                engine.submit_and_wait(&[request], LONG).unwrap();
                let (mut mine_after, mut theirs_after) = (mine.clone(), theirs.clone());
                match opcode {
                    Opcode::Write => {
                        theirs_after[there..there + length]
                            .copy_from_slice(&mine[here..][..length]);
                    }
                    Opcode::Read => {
                        mine_after[here..here + length].copy_from_slice(&theirs[there..][..length]);
                    }
                }
                assert!(own.read(LENGTH) == mine_after, "{kinds:?} {opcode:?} {length}: here");
                assert!(other.read(LENGTH) == theirs_after, "{kinds:?} {opcode:?} {length}: there");
            }
        }
        for (engine, memory) in [(engine, &own), (peer, &other)] {
            if let Memory::Gpu(allocation) = memory {
                engine.unregister_memory(pointer(allocation.address())).unwrap();
            }
        }
    }
}

#[test]
fn bytes_within_an_engine() {
    if has_gpu() {
        let engine = engine(1);
        exchange(&engine, &engine);
    }
}

#[test]
fn bytes_between_engines() {
    if has_gpu() {
        exchange(&engine(1), &engine(1));
    }
}

#[test]
fn memory_that_was_freed_fails_its_own_requests() {
    if !has_gpu() {
        return;
    }
    const LENGTH: usize = 32 << 20;
    for local in [true, false] {
        let own = engine(1);
        let other = engine(1);
        let peer = if local { &own } else { &other };
        let source = Memory::new(&own, false, LENGTH);
        source.write(&pattern(LENGTH, 1));
        let there = Memory::new(peer, true, LENGTH);
        let Memory::Gpu(freed) = Memory::new(peer, true, LENGTH) else { unreachable!() };
        let address = freed.address();
        let segment = own.open_segment(peer.name()).unwrap();
        drop(freed);
        for _ in 0..3 {
            for opcode in [Opcode::Write, Opcode::Read] {
                let request = TransferRequest {
                    opcode,
                    source: source.address(),
                    target: segment.id(),
                    target_offset: address,
                    length: 1 << 20,
                };
                let error = own.submit_and_wait(&[request], LONG).unwrap_err();
                assert!(matches!(error, SubmitAndWaitError::Failed { .. }), "{error}");
                println!("freed, local {local}, {opcode:?}: {error}");
            }
            let request = one(Opcode::Write, (&source, 0), &segment, (&there, 0), LENGTH);
            own.submit_and_wait(&[request], LONG).unwrap();
            assert!(there.read(LENGTH) == pattern(LENGTH, 1));
        }
    }
}

#[test]
fn memory_can_be_unregistered_while_transfers_run() {
    if !has_gpu() {
        return;
    }
    const LENGTH: usize = 16 << 20;
    for local in [true, false] {
        let (own, other) = (engine(1), engine(1));
        let peer = if local { &own } else { &other };
        let source = Memory::new(&own, false, LENGTH);
        let memory = Memory::new(peer, true, LENGTH);
        let Memory::Gpu(allocation) = &memory else { unreachable!() };
        let segment = own.open_segment(peer.name()).unwrap();
        for round in 0..10_u8 {
            source.write(&vec![round; LENGTH]);
            let request = one(Opcode::Write, (&source, 0), &segment, (&memory, 0), LENGTH);
            let batch = own.allocate_batch(8).unwrap();
            own.submit(&batch, &[request; 8]).unwrap();
            // Some of it, and more each time.
            while own.statuses(&batch)[0].transferred_bytes < u64::from(round) << 16
                && !own.wait(&batch, Duration::ZERO)
            {
                thread::yield_now();
            }
            peer.unregister_memory(pointer(allocation.address())).unwrap();
            allocation.write(0, &vec![0xee; LENGTH]).unwrap();
            assert!(own.wait(&batch, LONG));
            assert!(memory.read(LENGTH).iter().all(|byte| *byte == 0xee), "round {round}");
            drop(batch);
            register(peer, allocation.address(), LENGTH, "*").unwrap();
            own.refresh_segment(segment.id()).unwrap();
        }
    }
}

/// A buffer of the engine's own there.
#[test]
fn buffers_of_gpus() {
    if !has_gpu() {
        let engine = engine(1);
        let error = engine.allocate_gpu_buffer(4096, 0, true).unwrap_err();
        assert!(error.to_string().contains("GPU 0"), "{error}");
        return;
    }
    let (own, peer) = (engine(1), engine(1));
    let buffer = peer.allocate_gpu_buffer(1 << 20, 0, true).unwrap();
    let local = own.allocate_gpu_buffer(1 << 20, 0, false).unwrap();
    let mut bytes = vec![1; 1 << 20];
    buffer.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    local.write(5, &pattern(1000, 3)).unwrap();
    let segment = own.open_segment(peer.name()).unwrap();
    let request = request(Opcode::Write, (&local, 5), &segment, 70, 1000);
    own.submit_and_wait(&[request], LONG).unwrap();
    let mut bytes = vec![0; 1000];
    buffer.read(70, &mut bytes).unwrap();
    assert!(bytes == pattern(1000, 3));
    let error = own.allocate_gpu_buffer(1 << 20, 99, true).unwrap_err();
    assert!(error.to_string().contains("there is no GPU 99"), "{error}");
}

/// Plain copies by the driver, to compare with; prints rates only.
#[test]
fn plain_copies() {
    if !has_gpu() {
        return;
    }
    const LENGTH: usize = 256 << 20;
    let allocation = Allocation::new(0, LENGTH).unwrap();
    let mut bytes = vec![1_u8; LENGTH];
    for block in [64 << 10, 1 << 20, 4 << 20] {
        let mut rate = |name: &str, copy: &mut dyn FnMut(usize, &mut [u8])| {
            let start = Instant::now();
            for _ in 0..4 {
                for (index, bytes) in bytes.chunks_mut(block).enumerate() {
                    copy(index * block, bytes);
                }
            }
            let rate = 4.0 * LENGTH as f64 / start.elapsed().as_secs_f64() / 1e9;
            println!("plain {name} of {block} bytes, pageable: {rate:.2} GB/s");
        };
        rate("cuMemcpyHtoD", &mut |at, bytes| allocation.write(at, bytes).unwrap());
        rate("cuMemcpyDtoH", &mut |at, bytes| allocation.read(at, bytes).unwrap());
    }
}
