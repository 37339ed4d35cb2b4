//! Requests whose local memory is not registered go through memory that is: the original's TCP asks for no more.

use std::ptr;
use std::sync::{Mutex, PoisonError};

use millstream_net::guarded::{self, Caching, Fault};
use millstream_transfer::{Buffer, Opcode, TransferRequest};

/// Memory in the place of what callers named.
pub(crate) struct Bounce {
    /// Lives as long as requests name it.
    _buffer: Buffer,
    /// What READs bring: to, from, length. None any more once it was copied.
    copies: Mutex<Vec<(u64, u64, u64)>>,
}

impl Bounce {
    /// Has those requests use `buffer` for which `bounced` says so. It has room for all of them.
    pub(crate) fn new(
        buffer: Buffer,
        requests: &mut [TransferRequest],
        bounced: &[bool],
    ) -> Result<Self, Fault> {
        let mut at = buffer.address();
        let end = at + buffer.length() as u64;
        let mut copies = Vec::new();
        for (request, _) in requests.iter_mut().zip(bounced).filter(|(_, bounced)| **bounced) {
            assert!(request.length <= end - at, "there is room for all");
            match request.opcode {
                Opcode::Write => copy(request.source, at, request.length)?,
                Opcode::Read => copies.push((request.source, at, request.length)),
            }
            request.source = at;
            at += request.length;
        }
        Ok(Self { _buffer: buffer, copies: Mutex::new(copies) })
    }

    /// Gives the caller what READs have brought, once: who is told that they are over may use the memory for something
    /// else, though another thread asks then, too. Who asks meanwhile waits.
    pub(crate) fn finish(&self) -> Result<(), Fault> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(&(to, from, length)) = copies.last() {
            copy(from, to, length)?;
            copies.pop();
        }
        Ok(())
    }
}

/// Copies between addresses that callers named, or an error if nothing is there.
pub(crate) fn copy(from: u64, to: u64, length: u64) -> Result<(), Fault> {
    let from = ptr::with_exposed_provenance(from as usize);
    let to = ptr::with_exposed_provenance_mut(to as usize);
    // SAFETY: the caller of the module means this memory. Faults are recovered from since an engine was started
    // (`start.rs`). Nothing in Rust has references there.
    unsafe { guarded::copy(from, to, length as usize, Caching::Through) }
}
