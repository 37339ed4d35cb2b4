//! Loops over elements, compiled for each level of vector instructions.
//!
//! They run over arrays of bytes, so that no alignment is needed, and have no branches, so that the
//! compiler turns them into instructions on whole vectors. Whatever they call must be inlined into
//! them: what stays a function of its own has the baseline's instructions.

use fearless_simd::{Level, Simd, dispatch};

/// Changes each element of the first vector by the one of the second.
#[inline(always)]
pub(super) fn zip<const SLOT: usize, const WIRE: usize>(
    level: Level,
    slot: &mut [u8],
    payload: &[u8],
    operation: impl Fn([u8; SLOT], [u8; WIRE]) -> [u8; SLOT],
) {
    let (slot, _) = slot.as_chunks_mut::<SLOT>();
    let (payload, _) = payload.as_chunks::<WIRE>();
    dispatch!(level, simd => simd.vectorize(
        #[inline(always)]
        move || {
            for (ours, theirs) in slot.iter_mut().zip(payload) {
                *ours = operation(*ours, *theirs);
            }
        }
    ));
}

/// Changes each element.
#[inline(always)]
pub(super) fn map<const SIZE: usize>(
    level: Level,
    slot: &mut [u8],
    operation: impl Fn([u8; SIZE]) -> [u8; SIZE],
) {
    let (slot, _) = slot.as_chunks_mut::<SIZE>();
    dispatch!(level, simd => simd.vectorize(
        #[inline(always)]
        move || {
            for element in slot {
                *element = operation(*element);
            }
        }
    ));
}
