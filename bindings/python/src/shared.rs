//! An engine as objects of Python share it: closed once, and not there in a fork.

use std::collections::HashMap;
use std::mem;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use millstream_net::forks;
use millstream_transfer::{Buffer, RegisterError, TransferEngine};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

use crate::failure::Failure;

/// What keeps memory where it is while it is registered.
pub(crate) enum Held {
    /// Exported by the buffer protocol: a bytearray is not resized meanwhile.
    Buffer(#[expect(dead_code, reason = "kept")] PyUntypedBuffer),
    /// Alive, which is all that can be had: a tensor.
    Object(#[expect(dead_code, reason = "kept")] Py<PyAny>),
    /// The engine's own, as long as it is registered.
    Own(#[expect(dead_code, reason = "kept")] Arc<Buffer>),
    /// Nothing: the caller sees to it.
    Nothing,
}

/// An engine, until it is closed.
pub(crate) struct Shared {
    /// Of the process that made it: asking for that one's number is a system call each time.
    forks: u32,
    engine: RwLock<Option<Arc<TransferEngine>>>,
    /// By the address of its first byte.
    held: Mutex<HashMap<u64, Held>>,
    unregistering: Mutex<()>,
}

impl Shared {
    pub(crate) fn new(engine: TransferEngine) -> Self {
        let engine = RwLock::new(Some(Arc::new(engine)));
        Self { forks: forks(), engine, held: Mutex::default(), unregistering: Mutex::default() }
    }

    /// The engine, unless it is closed, or this is another process. The locks may have been held by
    /// threads that a fork does not have: nothing is done before this.
    pub(crate) fn engine(&self) -> Result<Arc<TransferEngine>, Failure> {
        if self.is_forked() {
            return Err(Failure::forked());
        }
        let engine = self.engine.read().unwrap_or_else(PoisonError::into_inner);
        engine.clone().ok_or_else(Failure::closed)
    }

    pub(crate) fn is_forked(&self) -> bool {
        forks() != self.forks
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.engine().is_err()
    }

    fn held(&self) -> MutexGuard<'_, HashMap<u64, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what was registered there alive.
    pub(crate) fn hold(&self, address: u64, held: Held) {
        let before = self.held().insert(address, held);
        drop(before);
    }

    /// Unregisters the memory at this address, and lets go of it then.
    pub(crate) fn unregister(&self, py: Python<'_>, address: u64) -> Result<(), Failure> {
        let engine = self.engine()?;
        // Out of the table before its address is free: what another thread registers there next is held for itself.
        let (outcome, held) = py.detach(|| {
            // Whoever is told that the memory is unknown must not let go of what another thread still unregisters.
            let _alone = self.unregistering.lock().unwrap_or_else(PoisonError::into_inner);
            let mut held = self.held().remove(&address);
            let outcome = engine.unregister_memory(pointer(address));
            if let Err(RegisterError::InUse { .. }) = outcome
                && let Some(held) = held.take()
            {
                // Others may still write to it. It is there again before anybody else tries.
                self.held().insert(address, held);
            }
            (outcome, held)
        });
        drop(held);
        outcome.map_err(Failure::from)
    }

    /// Ends it: transfers that are under way fail, and no memory is touched any more.
    pub(crate) fn close(&self, py: Python<'_>) {
        if self.is_forked() {
            return;
        }
        let engine = self.engine.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(engine) = engine else { return };
        let mut held = mem::take(&mut *self.held());
        let addresses: Vec<u64> = held.keys().copied().collect();
        let in_use = py.detach(|| {
            let engine = engine;
            let _alone = self.unregistering.lock().unwrap_or_else(PoisonError::into_inner);
            let in_use = |address: &u64| {
                matches!(
                    engine.unregister_memory(pointer(*address)),
                    Err(RegisterError::InUse { .. })
                )
            };
            // Others may wait with the engine, and are the last to let go of it then.
            addresses.into_iter().filter(in_use).collect::<Vec<_>>()
        });
        // Another process may still write to it: it is nobody else's.
        in_use.iter().for_each(|address| mem::forget(held.remove(address)));
    }
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.is_forked() {
            // Its threads are not here: nobody could wait for them.
            mem::forget(self.engine.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            mem::forget(mem::take(self.held.get_mut().unwrap_or_else(PoisonError::into_inner)));
            return;
        }
        Python::attach(|py| self.close(py));
    }
}
