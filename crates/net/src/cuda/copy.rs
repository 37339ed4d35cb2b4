//! Copies between memory of a GPU and memory of the host, or within GPUs, that are done when they return.
//!
//! Memory of the host is copied to and from pinned memory first, as any registered memory is copied: it
//! may be gone, and others may access it. The driver would fault.

use thiserror::Error;

use super::pool::Pair;
use super::{CudaError, Gpu};
use crate::guarded::{self, Caching, Fault};

/// Why bytes were not copied, or only some.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum CopyError {
    /// Memory of the host was not there.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The driver refused: as when memory of the GPU was freed.
    #[error(transparent)]
    Driver(#[from] CudaError),
}

impl Gpu {
    /// Copies from memory of the host to memory of the GPU.
    ///
    /// # Safety
    /// `from` as of [`guarded::copy`]; `to` must be memory of this GPU that was registered and is meant.
    pub unsafe fn copy_in(&self, from: *const u8, to: u64, length: usize) -> Result<(), CopyError> {
        let source = |pinned, offset, length| {
            // SAFETY: the caller promises it of `from`; nobody else has the pinned memory.
            unsafe { guarded::copy(from.wrapping_add(offset), pinned, length, Caching::Through) }
                .map_err(CopyError::from)
        };
        // SAFETY: the caller promises it.
        unsafe { self.write_with(to, length, source) }
    }

    /// Copies what `source` puts into pinned memory, which it is given with an offset and a length, to memory
    /// of the GPU.
    ///
    /// # Safety
    /// `to` must be memory of this GPU that was registered and is meant.
    pub unsafe fn write_with<E: From<CudaError>>(
        &self,
        to: u64,
        length: usize,
        mut source: impl FnMut(*mut u8, usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut lanes = self.lanes()?;
        let begun = chunks(&lanes, length).enumerate().try_for_each(|(index, (offset, length))| {
            let lane = &mut lanes[index % 2];
            // What it was used for before.
            lane.wait()?;
            source(lane.buffer(), offset, length)?;
            // SAFETY: the caller promises it of `to`; nobody else has the lane, whose buffer is as long as a
            // chunk. This copy is waited for before the buffer is changed.
            unsafe { lane.write(0, to + offset as u64, length)? };
            Ok(())
        });
        ended(&mut lanes, begun)
    }

    /// Copies from memory of the GPU to memory of the host.
    ///
    /// # Safety
    /// `from` must be memory of this GPU that was registered and is meant; `to` as of [`guarded::copy`].
    pub unsafe fn copy_out(&self, from: u64, to: *mut u8, length: usize) -> Result<(), CopyError> {
        let sink = |pinned, offset, length| {
            // SAFETY: the caller promises it of `to`; nobody else has the pinned memory.
            unsafe { guarded::copy(pinned, to.wrapping_add(offset), length, Caching::Through) }
                .map_err(CopyError::from)
        };
        // SAFETY: the caller promises it.
        unsafe { self.read_with(from, length, sink) }
    }

    /// Copies memory of the GPU into pinned memory, which `sink` is given with an offset and a length.
    ///
    /// # Safety
    /// `from` must be memory of this GPU that was registered and is meant.
    pub unsafe fn read_with<E: From<CudaError>>(
        &self,
        from: u64,
        length: usize,
        mut sink: impl FnMut(*const u8, usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut lanes = self.lanes()?;
        let mut before = None;
        let mut out = |lanes: &mut Pair, (index, offset, length): (usize, usize, usize)| {
            let lane: &mut Box<dyn super::Lane> = &mut lanes[index % 2];
            lane.wait()?;
            sink(lane.buffer(), offset, length)
        };
        let list = chunks(&lanes, length);
        let mut begun = list.enumerate().try_for_each(|(index, (offset, length))| {
            // SAFETY: the caller promises it of `from`; the lane has been emptied.
            unsafe { lanes[index % 2].read(from + offset as u64, 0, length)? };
            // Meanwhile.
            match before.replace((index, offset, length)) {
                Some(before) => out(&mut lanes, before),
                None => Ok(()),
            }
        });
        if let (Ok(()), Some(before)) = (&begun, before) {
            begun = out(&mut lanes, before);
        }
        ended(&mut lanes, begun)
    }

    /// Copies between memory of GPUs, which may overlap.
    ///
    /// # Safety
    /// Both must be memory of GPUs that was registered and is meant.
    pub unsafe fn copy_within(&self, from: u64, to: u64, length: usize) -> Result<(), CopyError> {
        let mut lanes = self.lanes()?;
        if from.abs_diff(to) >= length as u64 {
            // SAFETY: the caller promises it.
            let begun = unsafe { lanes[0].copy(from, to, length) };
            return ended(&mut lanes, begun.map_err(CopyError::from));
        }
        // Each chunk is read before what overlaps it is written.
        let mut list: Vec<_> = chunks(&lanes, length).collect();
        if from < to {
            list.reverse();
        }
        let lane = &mut lanes[0];
        let copied = list.into_iter().try_for_each(|(offset, length)| {
            // SAFETY: as above, and each is waited for before the lane is used again.
            unsafe {
                lane.read(from + offset as u64, 0, length)?;
                lane.wait()?;
                lane.write(0, to + offset as u64, length)?;
                lane.wait()
            }
        });
        ended(&mut lanes, copied.map_err(CopyError::from))
    }
}

/// What fits a lane, one after the other: offset and length.
fn chunks(lanes: &Pair, length: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
    let step = lanes[0].length();
    (0..length).step_by(step).map(move |offset| (offset, step.min(length - offset)))
}

/// Nothing is under way any more: whoever calls may free the memory. The first error counts.
fn ended<E: From<CudaError>>(lanes: &mut Pair, copied: Result<(), E>) -> Result<(), E> {
    let waited = lanes.iter_mut().map(|lane| lane.wait()).fold(Ok(()), Result::and);
    copied.and(waited.map_err(E::from))
}
