//! Copies through lanes, with a GPU that is not there.

use std::thread;

use super::pretended::{Copied, Pretended};
use super::*;

const CHUNK: usize = 512 << 10;

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ (i >> 16) as u8).collect()
}

#[test]
fn copies_in_and_out_have_the_same_bytes() {
    for length in [1, 5, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 77] {
        let pretended = Pretended::default();
        let gpu = pretended.gpu();
        let (address, bytes) = (pretended.allocate(length + 10), pattern(length));
        // SAFETY: the vector lives; the other memory is of the GPU.
        unsafe { gpu.copy_in(bytes.as_ptr(), address + 3, length) }.unwrap();
        assert_eq!(pretended.read(address, 3), [0; 3]);
        assert_eq!(pretended.read(address + 3, length), bytes);
        assert_eq!(pretended.read(address + 3 + length as u64, 7), [0; 7]);
        let mut back = vec![0; length];
        // SAFETY: as above.
        unsafe { gpu.copy_out(address + 3, back.as_mut_ptr(), length) }.unwrap();
        assert!(back == bytes, "{length}");
        let copies = 2 * length.div_ceil(CHUNK);
        assert_eq!(pretended.copied().len(), copies);
    }
}

#[test]
fn copies_within_may_overlap() {
    let length = 3 * CHUNK + 5;
    for (from, to) in [(0, 100), (100, 0), (0, CHUNK as u64), (7, 7), (0, length as u64)] {
        let pretended = Pretended::default();
        let gpu = pretended.gpu();
        let address = pretended.allocate(2 * length);
        let bytes = pattern(length);
        pretended.write(address + from, &bytes);
        // SAFETY: it is memory of the GPU.
        unsafe { gpu.copy_within(address + from, address + to, length) }.unwrap();
        assert!(pretended.read(address + to, length) == bytes, "{from} to {to}");
    }
}

#[test]
fn memory_that_was_freed_is_an_error_and_nothing_is_under_way_then() {
    let pretended = Pretended::default();
    let gpu = pretended.gpu();
    let (freed, there) = (pretended.allocate(4 * CHUNK), pretended.allocate(4 * CHUNK));
    pretended.free(freed);
    let mut bytes = pattern(4 * CHUNK);
    for _ in 0..10 {
        // SAFETY: the vector lives; the other memory was of the GPU.
        let copied = unsafe { gpu.copy_in(bytes.as_ptr(), freed, bytes.len()) };
        assert!(matches!(copied, Err(CopyError::Driver(_))), "{copied:?}");
        // SAFETY: as above.
        let copied = unsafe { gpu.copy_out(freed, bytes.as_mut_ptr(), bytes.len()) };
        assert!(matches!(copied, Err(CopyError::Driver(_))), "{copied:?}");
        // SAFETY: as above.
        let copied = unsafe { gpu.copy_within(freed, there, 100) };
        assert!(matches!(copied, Err(CopyError::Driver(_))), "{copied:?}");
    }
    assert_eq!(pretended.copied(), []);
    // SAFETY: as above.
    unsafe { gpu.copy_in(bytes.as_ptr(), there, 100) }.unwrap();
    assert_eq!(pretended.copied(), [Copied::In(there, 100)], "nothing is left of before");
}

#[test]
fn memory_of_the_host_that_is_gone_is_an_error() {
    crate::guarded::recover().unwrap();
    if !crate::guarded::RECOVERS {
        return;
    }
    let pretended = Pretended::default();
    let gpu = pretended.gpu();
    let address = pretended.allocate(100);
    // SAFETY: nothing is mapped at the first page, and faults are recovered from.
    let copied = unsafe { gpu.copy_in(std::ptr::without_provenance(64), address, 100) };
    assert!(matches!(copied, Err(CopyError::Fault(_))), "{copied:?}");
    // SAFETY: as above.
    let copied = unsafe { gpu.copy_out(address, std::ptr::without_provenance_mut(64), 100) };
    assert!(matches!(copied, Err(CopyError::Fault(_))), "{copied:?}");
}

#[test]
fn no_more_than_a_few_lanes_are_pinned() {
    let pretended = Pretended::default();
    let gpu = pretended.gpu();
    let address = pretended.allocate(32 * CHUNK);
    let bytes = pattern(2 * CHUNK);
    thread::scope(|scope| {
        for index in 0..16 {
            let (gpu, bytes) = (&gpu, &bytes);
            scope.spawn(move || {
                let to = address + (index * bytes.len()) as u64;
                // SAFETY: the vector lives; the other memory is of the GPU.
                unsafe { gpu.copy_in(bytes.as_ptr(), to, bytes.len()) }.unwrap();
            });
        }
    });
    assert!(pretended.lanes() <= 8, "{}", pretended.lanes());
    for index in 0..16 {
        assert!(pretended.read(address + (index * bytes.len()) as u64, bytes.len()) == bytes);
    }
    drop(gpu);
    assert_eq!(pretended.lanes(), 0);
}

/// Where there is no driver, this is what is said; where there is one, it has not been loaded by this
/// process unless another test has asked for a GPU, and no memory of the host is taken for a GPU's.
#[test]
fn memory_of_the_host_is_not_taken_for_a_gpu() {
    let bytes = pattern(100);
    if let Some(finder) = Finder::loaded() {
        let found = finder.find(bytes.as_ptr().expose_provenance() as u64, 100).unwrap();
        assert!(found.is_none());
    }
    match summary() {
        Err(CudaError::DriverMissing(reason)) => {
            assert!(reason.contains("libcuda.so.1"), "{reason}");
            let error = Allocation::new(0, 100).unwrap_err();
            assert!(error.to_string().contains("install the NVIDIA driver"), "{error}");
        }
        other => println!("there is a driver: {other:?}"),
    }
}
