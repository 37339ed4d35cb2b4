//! Accesses of single bytes, atomic and relaxed: the memory model has no accesses of different sizes to the
//! same bytes. Faults end the process.

use std::sync::atomic::{AtomicU8, Ordering};

use super::Fault;

/// # Safety
/// Both bytes must be there.
unsafe fn byte(from: *const u8, to: *mut u8) {
    // SAFETY: the caller promises it.
    unsafe {
        let value = AtomicU8::from_ptr(from.cast_mut()).load(Ordering::Relaxed);
        AtomicU8::from_ptr(to).store(value, Ordering::Relaxed);
    }
}

/// # Safety
/// As of [`super::copy`], and `to` is not in `from..from + length`.
pub(super) unsafe fn copy_forward(
    from: *const u8,
    to: *mut u8,
    length: usize,
) -> Result<(), Fault> {
    for index in 0..length {
        // SAFETY: within the ranges.
        unsafe { byte(from.add(index), to.add(index)) };
    }
    Ok(())
}

/// # Safety
/// As of [`super::copy`], and `from` is not in `to..to + length`.
pub(super) unsafe fn copy_backward(
    from: *const u8,
    to: *mut u8,
    length: usize,
) -> Result<(), Fault> {
    for index in (0..length).rev() {
        // SAFETY: within the ranges.
        unsafe { byte(from.add(index), to.add(index)) };
    }
    Ok(())
}

/// Copies nothing: all of it goes through the caches.
///
/// # Safety
/// None is needed.
pub(super) unsafe fn copy_around(_: *const u8, _: *mut u8, _: usize) -> Result<usize, Fault> {
    Ok(0)
}

/// Nothing goes around the caches, and orders itself with what follows as ever.
pub(super) const fn fence() {}

/// # Safety
/// As of [`super::copy_together`].
pub(super) unsafe fn copy_together(
    ranges: &[(*const u8, *mut u8)],
    length: usize,
) -> Result<(), Fault> {
    // SAFETY: the caller promises it.
    ranges.iter().try_for_each(|&(from, to)| unsafe { copy_forward(from, to, length) })
}

/// # Safety
/// As for what [`super::copy`] reads.
pub(super) unsafe fn probe(address: *const u8) -> Result<(), Fault> {
    // SAFETY: the caller promises it.
    unsafe { AtomicU8::from_ptr(address.cast_mut()).load(Ordering::Relaxed) };
    Ok(())
}

/// # Safety
/// As for what [`super::copy`] writes.
pub(super) unsafe fn probe_write(address: *mut u8) -> Result<(), Fault> {
    // SAFETY: the caller promises it.
    unsafe { AtomicU8::from_ptr(address).fetch_add(0, Ordering::Relaxed) };
    Ok(())
}
