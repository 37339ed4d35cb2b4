//! Memory of GPUs: how it is recognised, and copies of which one end is there.

#![allow(unsafe_code)]

use std::sync::Arc;

use millstream_net::cuda::{self, CopyError, FindError, Finder, Gpu};
use millstream_net::guarded::Caching;
use millstream_net::shared_memory::{AccessError, Visit};

use crate::memory::{Inside, RawMemory};
use crate::{FailureReason, Opcode, RegisterError};

/// Says of what callers bring which is memory of a GPU.
pub(crate) fn recognise(wanted: &mut [RawMemory]) -> Result<(), RegisterError> {
    let finder = Finder::loaded();
    for memory in wanted.iter_mut().filter(|memory| memory.is_brought()) {
        let (address, length) = (memory.address(), memory.length());
        let found = find(finder, address, length);
        let refused = |reason| RegisterError::Gpu { address, length, reason };
        if let Some(gpu) = found.map_err(refused)? {
            memory.set_gpu(gpu);
        }
    }
    Ok(())
}

fn find(finder: Option<Finder>, address: u64, length: u64) -> Result<Option<Arc<Gpu>>, FindError> {
    #[cfg(test)]
    if let Some(gpu) = pretended::find(address) {
        return Ok(Some(gpu));
    }
    finder.map_or(Ok(None), |finder| finder.find(address, length))
}

/// Copies `length` bytes from one memory to the other, of which one is a GPU's at least, or both. They may
/// overlap.
pub(crate) fn copy(
    (from, from_address): (&Inside<'_>, u64),
    (to, to_address): (&Inside<'_>, u64),
    length: u64,
) -> Result<(), FailureReason> {
    if !(from.contains(from_address, length) && to.contains(to_address, length)) {
        return Err(FailureReason::Unregistered);
    }
    let length = length as usize;
    let unregistered = || FailureReason::Unregistered;
    // SAFETY: both ranges are in registered memory, which stays so while it is entered.
    let copied = unsafe {
        match (from.gpu(), to.gpu()) {
            (Some(gpu), Some(_)) => gpu.copy_within(from_address, to_address, length),
            (Some(gpu), None) => {
                let to = to.pointer(to_address, length as u64).ok_or_else(unregistered)?;
                gpu.copy_out(from_address, to, length)
            }
            (None, Some(gpu)) => {
                let from = from.pointer(from_address, length as u64).ok_or_else(unregistered)?;
                gpu.copy_in(from, to_address, length)
            }
            (None, None) => return Err(unregistered()),
        }
    };
    copied.map_err(FailureReason::from)
}

/// Bytes of memory of a GPU that are staged at a time.
pub(crate) const STAGED: usize = 256 << 10;

/// Why bytes of memory of a GPU here were not staged.
pub(crate) fn not_staged() -> FailureReason {
    let text = "memory of a GPU here cannot be copied: it was freed, or its driver failed";
    FailureReason::Access(text.to_owned())
}

/// Copies memory of a GPU to a buffer of the host; whether it could be.
pub(crate) fn stage_out((from, gpu): (&Inside<'_>, &Gpu), address: u64, bytes: &mut [u8]) -> bool {
    let (to, length) = (bytes.as_mut_ptr(), bytes.len());
    // SAFETY: the range is in registered memory, which stays so while it is entered; nobody else has `bytes`.
    from.contains(address, length as u64)
        && unsafe { gpu.copy_out(address, to, length) }
            .inspect_err(|error| tracing::debug!(%error, address, "memory of a GPU"))
            .is_ok()
}

/// Copies a buffer of the host to memory of a GPU; whether it could be.
pub(crate) fn stage_in((to, gpu): (&Inside<'_>, &Gpu), address: u64, bytes: &[u8]) -> bool {
    let (from, length) = (bytes.as_ptr(), bytes.len());
    // SAFETY: as above; nobody writes to `bytes`.
    to.contains(address, length as u64)
        && unsafe { gpu.copy_in(from, address, length) }
            .inspect_err(|error| tracing::debug!(%error, address, "memory of a GPU"))
            .is_ok()
}

/// Copies `length` bytes between memory of a GPU here and an address of a peer on this host.
pub(crate) fn exchange(
    (local, gpu): (&Inside<'_>, &Gpu),
    opcode: Opcode,
    address: u64,
    (visit, target): (&Visit<'_>, u64),
    length: u64,
) -> Result<(), Exchanged> {
    if !local.contains(address, length) {
        return Err(Exchanged::Access(AccessError::Unregistered));
    }
    let length = length as usize;
    let through = Caching::Through;
    // SAFETY: the range is in registered memory, which stays so while it is entered; what the peer's end is
    // copied to or from is pinned memory that nobody else has.
    unsafe {
        match opcode {
            Opcode::Write => gpu.read_with(address, length, |pinned, offset, length| {
                let target = target + offset as u64;
                visit.write(pinned, target, length, through).map_err(Exchanged::Access)
            }),
            Opcode::Read => gpu.write_with(address, length, |pinned, offset, length| {
                let target = target + offset as u64;
                visit.read(pinned, target, length, through).map_err(Exchanged::Access)
            }),
        }
    }
}

/// Why bytes were not exchanged with a peer.
pub(crate) enum Exchanged {
    Access(AccessError),
    Gpu(cuda::CudaError),
}

impl From<cuda::CudaError> for Exchanged {
    fn from(error: cuda::CudaError) -> Self {
        Self::Gpu(error)
    }
}

impl From<CopyError> for FailureReason {
    fn from(error: CopyError) -> Self {
        match error {
            CopyError::Fault(fault) => Self::MemoryGone { address: fault.address },
            CopyError::Driver(error) => Self::Gpu(error),
        }
    }
}

/// A GPU that is not there, for tests.
#[cfg(test)]
pub(crate) mod pretended {
    use std::cell::RefCell;
    use std::sync::Arc;

    use millstream_net::cuda::Gpu;
    use millstream_net::cuda::pretended::{FIRST, Pretended};

    type Known = (Pretended, Arc<Gpu>);

    thread_local!(static GPU: RefCell<Option<Known>> = const { RefCell::new(None) });

    /// Whose memory there is on this thread from here on.
    pub(crate) fn set(pretended: &Pretended) {
        GPU.set(Some((pretended.clone(), pretended.gpu())));
    }

    pub(super) fn find(address: u64) -> Option<Arc<Gpu>> {
        let found = GPU.with_borrow(|known| known.as_ref().map(|(_, gpu)| Arc::clone(gpu)));
        found.filter(|_| address >= FIRST)
    }
}

#[cfg(test)]
pub(crate) mod tests;
