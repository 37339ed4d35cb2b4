//! The kinds of memory that the driver knows, and what an application does with it meanwhile.

use std::ffi::{c_int, c_uint, c_void};
use std::{ptr, thread};

use millstream_net::cuda::Allocation;
use millstream_transfer::{Opcode, TransferEngine, TransferRequest};

use crate::common::{LONG, contents, engine, pattern, private};
use crate::driver::{Mapped, capture, function, use_primary_context};
use crate::{Memory, has_gpu, one, pointer, register};

#[test]
fn memory_of_a_gpu_is_recognised() {
    if !has_gpu() {
        return;
    }
    let (own, peer) = (engine(1), engine(1));
    let allocation = Allocation::new(0, 1 << 20).unwrap();
    let address = allocation.address();
    register(&peer, address, 1 << 20, "*").unwrap();
    let segment = own.open_segment(peer.name()).unwrap();
    assert_eq!(segment.buffers()[0].location, "cuda:0");
    peer.unregister_memory(pointer(address)).unwrap();
    // A part of it, and with a location that says so.
    register(&peer, address + 1000, 5000, "cuda:0").unwrap();
    peer.unregister_memory(pointer(address + 1000)).unwrap();
    let error = register(&peer, address + 1, 1 << 30, "*").unwrap_err();
    assert_eq!(error.code(), -1);
    assert!(error.to_string().contains("the allocation of GPU 0"), "{error}");
    drop(allocation);
    let error = register(&peer, address, 1 << 20, "*").unwrap_err();
    assert_eq!(error.code(), -1);
    assert!(error.to_string().contains("no memory of a GPU"), "{error}");
    // Memory of the host may have such a location, too.
    let buffer = peer.allocate_buffer(4096, "cuda:0", true).unwrap();
    buffer.write(0, &[1; 4096]).unwrap();
    let mut bytes = vec![7_u8; 4096];
    let address = bytes.as_mut_ptr().expose_provenance() as u64;
    register(&peer, address, 4096, "cuda:0").unwrap();
    peer.unregister_memory(pointer(address)).unwrap();
}

/// The processor gets at managed and at pinned memory, so they are as the host's.
#[test]
fn managed_and_pinned_memory_is_the_hosts() {
    if !has_gpu() {
        return;
    }
    const LENGTH: usize = 1 << 20;
    let _retained = Allocation::new(0, 1).unwrap();
    let context = use_primary_context();
    let current: unsafe extern "C" fn(*mut *mut c_void) -> c_int = function(c"cuCtxGetCurrent");
    let managed: unsafe extern "C" fn(*mut u64, usize, c_uint) -> c_int =
        function(c"cuMemAllocManaged");
    let pinned: unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> c_int =
        function(c"cuMemHostAlloc");
    let mut seen = ptr::null_mut();
    let (mut first, mut second) = (0_u64, ptr::null_mut());
    // SAFETY: as `cuda.h` declares them; the pointers are to what lives. The test leaves what it allocates.
    unsafe {
        assert_eq!(managed(&raw mut first, LENGTH, 1), 0);
        assert_eq!(pinned(&raw mut second, LENGTH, 0), 0);
    }
    let second = second.expose_provenance() as u64;
    let (own, peer) = (engine(1), engine(1));
    let source = private(&own, LENGTH);
    source.write(0, &pattern(LENGTH, 8)).unwrap();
    for address in [first, second] {
        register(&peer, address, LENGTH, "*").unwrap();
        let segment = own.open_segment(peer.name()).unwrap();
        own.refresh_segment(segment.id()).unwrap();
        assert!(!segment.buffers()[0].location.starts_with("cuda"), "{:?}", segment.buffers());
        let request = TransferRequest {
            opcode: Opcode::Write,
            source: source.address(),
            target: segment.id(),
            target_offset: address,
            length: LENGTH as u64,
        };
        own.submit_and_wait(&[request], LONG).unwrap();
        let mut found = vec![0; LENGTH];
        // SAFETY: it is memory of the host, which nobody writes now.
        unsafe { pointer(address).copy_to_nonoverlapping(found.as_mut_ptr(), LENGTH) };
        assert!(found == pattern(LENGTH, 8));
        peer.unregister_memory(pointer(address)).unwrap();
    }
    // What is current here is left as it was.
    exchange_a_little(&own, &peer);
    // SAFETY: as above.
    unsafe { assert_eq!(current(&raw mut seen), 0) };
    assert_eq!(seen, context);
}

fn exchange_a_little(engine: &TransferEngine, peer: &TransferEngine) {
    let (own, other) = (Memory::new(engine, true, 1000), Memory::new(peer, true, 1000));
    own.write(&pattern(1000, 4));
    let segment = engine.open_segment(peer.name()).unwrap();
    engine.refresh_segment(segment.id()).unwrap();
    let request = one(Opcode::Write, (&own, 0), &segment, (&other, 0), 1000);
    engine.submit_and_wait(&[request], LONG).unwrap();
    assert!(other.read(1000) == pattern(1000, 4));
}

/// In the mode that refuses most, on all threads: neither disturbs the other. The first transfers open what
/// copies are made through.
#[test]
fn transfers_run_while_the_application_captures_a_graph() {
    if !has_gpu() {
        return;
    }
    const LENGTH: usize = 3 << 20;
    let (own, peer) = (engine(1), engine(1));
    let (here, there) = (Memory::new(&own, true, LENGTH), Memory::new(&peer, true, LENGTH));
    let near = Memory::new(&own, false, LENGTH);
    here.write(&pattern(LENGTH, 6));
    let (far, itself) =
        (own.open_segment(peer.name()).unwrap(), own.open_segment(own.name()).unwrap());
    use_primary_context();
    let end = capture();
    let transfer = || {
        for (segment, memory) in [(&far, &there), (&itself, &near)] {
            let request = one(Opcode::Write, (&here, 0), segment, (memory, 0), LENGTH);
            own.submit_and_wait(&[request], LONG).map_err(|error| error.to_string())?;
        }
        Ok::<_, String>(())
    };
    let elsewhere = thread::scope(|scope| scope.spawn(transfer).join().unwrap());
    let captures = transfer();
    assert_eq!((elsewhere, captures, end()), (Ok(()), Ok(()), true));
    assert!(there.read(LENGTH) == pattern(LENGTH, 6));
    assert!(near.read(LENGTH) == pattern(LENGTH, 6));
}

/// Blocks that were allocated each for itself and mapped side by side are one piece of memory.
#[test]
fn memory_that_was_mapped_by_hand() {
    if !has_gpu() {
        return;
    }
    let _retained = Allocation::new(0, 1).unwrap();
    use_primary_context();
    let mapped = Mapped::new(&[true, true, true, false]);
    let (block, address) = (mapped.block, mapped.address());
    let length = 3 * block;
    let (own, peer) = (engine(1), engine(1));
    let error = register(&peer, address, mapped.length(), "*").unwrap_err();
    assert_eq!(error.code(), -1, "its last block is not there: {error}");
    assert!(error.to_string().contains("GPU 0"), "{error}");
    for engine in [&own, &peer] {
        register(engine, address, length, "*").unwrap();
    }
    let source = private(&own, length);
    for peer in [&own, &peer] {
        let segment = own.open_segment(peer.name()).unwrap();
        own.refresh_segment(segment.id()).unwrap();
        // Across both borders, and neither from one nor to one.
        let (from, to, count) = (5, block - 70_001, length - block);
        mapped.write(0, &pattern(length, 1));
        source.write(0, &pattern(length, 2)).unwrap();
        let there = |opcode| TransferRequest {
            opcode,
            source: source.address() + from as u64,
            target: segment.id(),
            target_offset: address + to as u64,
            length: count as u64,
        };
        own.submit_and_wait(&[there(Opcode::Write)], LONG).unwrap();
        let mut expected = pattern(length, 1);
        expected[to..to + count].copy_from_slice(&pattern(length, 2)[from..from + count]);
        assert!(mapped.read(0, length) == expected);
        source.write(0, &pattern(length, 3)).unwrap();
        own.submit_and_wait(&[there(Opcode::Read)], LONG).unwrap();
        assert!(contents(&source, from, count) == expected[to..to + count]);
    }
    for engine in [&own, &peer] {
        engine.unregister_memory(pointer(address)).unwrap();
    }
}

/// Where it has no memory, requests fail, and others go on.
#[test]
fn a_hole_in_memory_that_was_mapped_by_hand() {
    if !has_gpu() {
        return;
    }
    let _retained = Allocation::new(0, 1).unwrap();
    use_primary_context();
    let mapped = Mapped::new(&[true, false, true]);
    let (block, address) = (mapped.block, mapped.address());
    let (own, peer) = (engine(1), engine(1));
    register(&peer, address, mapped.length(), "*").unwrap();
    let segment = own.open_segment(peer.name()).unwrap();
    let source = private(&own, mapped.length());
    let request = |at: usize, length: usize| TransferRequest {
        opcode: Opcode::Write,
        source: source.address(),
        target: segment.id(),
        target_offset: address + at as u64,
        length: length as u64,
    };
    for (seed, (at, length)) in (1..).zip([(block, 4096), (0, mapped.length()), (block - 5, 10)]) {
        source.write(0, &pattern(mapped.length(), seed)).unwrap();
        own.submit_and_wait(&[request(at, length)], LONG).unwrap_err();
        own.submit_and_wait(&[request(2 * block, block)], LONG).unwrap();
        assert!(mapped.read(2 * block, block) == pattern(mapped.length(), seed)[..block]);
    }
    peer.unregister_memory(pointer(address)).unwrap();
}
