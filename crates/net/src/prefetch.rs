//! Loading memory into the cache before it is needed.

/// Bytes of a cache line.
const LINE: usize = 64;

/// How far ahead: the rest the processor loads by itself, once the first lines are asked for.
const BYTES: usize = 1024;

/// Has the processor load what lies at `address`, where a payload of `length` bytes will soon be read
/// or written. Processors do so themselves within a page of 4 KiB, and a payload is often a page: at
/// each, they would begin anew. Any address will do, also one that is not mapped.
#[inline]
pub fn prefetch(address: *const u8, length: usize) {
    if length >= BYTES {
        prefetch_all(address, BYTES);
    }
}

/// The same of all of these bytes, where there is something else to wait for meanwhile.
#[inline]
pub fn prefetch_all(address: *const u8, length: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..length).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let line = address.wrapping_add(offset);
        // SAFETY: all x86-64 processors have the instruction, which changes nothing but caches, and
        // does nothing where an address is not mapped.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    // Other architectures have no stable intrinsic.
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (address, length, LINE);
}
