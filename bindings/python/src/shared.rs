//! An engine as objects of Python share it: closed once, and not there in a fork.

use std::collections::HashMap;
use std::mem;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use millstream_net::forks;
use millstream_transfer::{Buffer, RegisterError, TransferEngine};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

use crate::failure::Failure;

/// How long who closes an engine waits for calls that have it: longer than most of them take. Not for ever, since he may be in
/// such a call, where an object ends that closes the engine.
const PATIENCE: Duration = Duration::from_secs(10);

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

/// What is registered by objects of Python.
#[derive(Default)]
struct Registered {
    /// The number of the last registration.
    last: u64,
    /// What keeps the memory there, by the address of its first byte, with the number of its registration.
    held: HashMap<u64, (u64, Held)>,
}

impl Registered {
    /// Takes out what this registration holds, if it is there: the memory may have been registered anew.
    fn remove(&mut self, address: u64, registration: u64) -> Option<Held> {
        self.held.get(&address).filter(|(number, _)| *number == registration)?;
        self.held.remove(&address).map(|(_, held)| held)
    }
}

/// An engine, until it is closed.
pub(crate) struct Shared {
    /// Of the process that made it: asking for that one's number is a system call each time.
    forks: u32,
    engine: RwLock<Option<Arc<TransferEngine>>>,
    registered: Mutex<Registered>,
    unregistering: Mutex<()>,
    /// Held by who closes it: others who do wait until that is done.
    closing: Mutex<()>,
    /// Somebody closes it, and is told when a call lets go of it.
    awaited: AtomicBool,
    waiting: Mutex<()>,
    let_go: Condvar,
}

/// An engine as a call has it. Who closes the engine waits until this is gone.
pub(crate) struct Guard<'a> {
    shared: &'a Shared,
    /// `None` when it goes.
    engine: Option<Arc<TransferEngine>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends what may take long to end, with the interpreter let go of.
pub(crate) fn drop_detached<T: Send>(thing: T) {
    Python::attach(|py| py.detach(move || drop(thing)));
}

impl Shared {
    pub(crate) fn new(engine: TransferEngine) -> Self {
        Self {
            forks: forks(),
            engine: RwLock::new(Some(Arc::new(engine))),
            registered: Mutex::default(),
            unregistering: Mutex::default(),
            closing: Mutex::default(),
            awaited: AtomicBool::new(false),
            waiting: Mutex::default(),
            let_go: Condvar::new(),
        }
    }

    /// The engine, unless it is closed, or this is another process. The locks may have been held by
    /// threads that a fork does not have: nothing is done before this.
    pub(crate) fn engine(&self) -> Result<Guard<'_>, Failure> {
        if self.is_forked() {
            return Err(Failure::forked());
        }
        let engine = self.engine.read().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(Guard { shared: self, engine: Some(engine.ok_or_else(Failure::closed)?) })
    }

    /// Does with the engine what may take long: the interpreter is let go of meanwhile, and the engine before it is there
    /// again.
    pub(crate) fn detached<R: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&TransferEngine) -> R + Send,
    ) -> Result<R, Failure> {
        let engine = self.engine()?;
        Ok(py.detach(move || run(&engine)))
    }

    pub(crate) fn is_forked(&self) -> bool {
        forks() != self.forks
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.engine().is_err()
    }

    /// Keeps what was registered there alive; the number of the registration. Who calls this has the engine: what is held is
    /// let go of when it is closed.
    pub(crate) fn hold(&self, address: u64, held: Held) -> u64 {
        let mut registered = lock(&self.registered);
        registered.last += 1;
        let registration = registered.last;
        let before = registered.held.insert(address, (registration, held));
        // Its end may run what wants the lock.
        drop(registered);
        drop(before);
        registration
    }

    /// Unregisters the memory that was registered at this address by this registration, and lets go of it then.
    pub(crate) fn unregister(
        &self,
        py: Python<'_>,
        address: u64,
        registration: u64,
    ) -> Result<(), Failure> {
        // Out of the table before its address is free: what another thread registers there next is held for itself.
        let (outcome, held) = self.detached(py, |engine| {
            // Whoever is told that the memory is unknown must not let go of what another thread still unregisters.
            let _alone = lock(&self.unregistering);
            let Some(held) = lock(&self.registered).remove(address, registration) else {
                return (Err(RegisterError::Unknown { address }), None);
            };
            let outcome = engine.unregister_memory(pointer(address));
            if let Err(RegisterError::InUse { .. }) = outcome {
                // Others may still write to it. It is there again before anybody else tries.
                lock(&self.registered).held.insert(address, (registration, held));
                return (outcome, None);
            }
            (outcome, Some(held))
        })?;
        drop(held);
        outcome.map_err(Failure::from)
    }

    /// Ends it: transfers that are under way fail, and no memory is touched any more.
    pub(crate) fn close(&self, py: Python<'_>) {
        if self.is_forked() {
            return;
        }
        let held = py.detach(|| self.end());
        drop(held);
    }

    /// Ends it, without the interpreter; what is to be let go of with it.
    fn end(&self) -> HashMap<u64, (u64, Held)> {
        let _alone = lock(&self.closing);
        let engine = self.engine.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(engine) = engine else { return HashMap::new() };
        self.wait_for_calls(&engine);
        let mut held = mem::take(&mut lock(&self.registered).held);
        let unregistering = lock(&self.unregistering);
        let is_in_use = |address: &u64| {
            let outcome = engine.unregister_memory(pointer(*address));
            matches!(outcome, Err(RegisterError::InUse { .. }))
        };
        let in_use: Vec<u64> = held.keys().copied().filter(is_in_use).collect();
        drop(unregistering);
        // Another process may still write to it: it is nobody else's.
        in_use.iter().for_each(|address| mem::forget(held.remove(address)));
        drop(engine);
        held
    }

    /// Waits until no call has the engine any more, which new ones do not get.
    fn wait_for_calls(&self, engine: &Arc<TransferEngine>) {
        self.awaited.store(true, Ordering::Relaxed);
        // Either this sees that a call has let go, or the call sees that it is awaited.
        fence(Ordering::SeqCst);
        let is_had = |_: &mut ()| Arc::strong_count(engine) > 1;
        drop(self.let_go.wait_timeout_while(lock(&self.waiting), PATIENCE, is_had));
    }

    /// A call has let go of the engine.
    fn tell(&self) {
        fence(Ordering::SeqCst);
        if self.awaited.load(Ordering::Relaxed) {
            // Not between the look of who waits and his sleep.
            drop(lock(&self.waiting));
            self.let_go.notify_all();
        }
    }
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

impl Deref for Guard<'_> {
    type Target = TransferEngine;

    fn deref(&self) -> &TransferEngine {
        self.engine.as_deref().expect("it is there until the guard goes")
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let Some(engine) = self.engine.take() else { return };
        if self.shared.is_forked() {
            // Its threads are not here: nobody could wait for them.
            mem::forget(engine);
            return;
        }
        match Arc::into_inner(engine) {
            // Who has closed it waited no longer.
            Some(engine) => drop_detached(engine),
            None => self.shared.tell(),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.is_forked() {
            // Its threads are not here: nobody could wait for them.
            mem::forget(self.engine.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            let registered = self.registered.get_mut().unwrap_or_else(PoisonError::into_inner);
            mem::forget(mem::take(registered));
            return;
        }
        Python::attach(|py| self.close(py));
    }
}
