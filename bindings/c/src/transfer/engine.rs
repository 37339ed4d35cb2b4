//! Engines as C knows them: by a handle, from any thread, until they are destroyed.

use std::collections::HashMap;
use std::net::IpAddr;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millstream_transfer::{SegmentId, Settings, TransferEngine};

use super::batch::Batch;
use super::borrowed::Borrowed;
use super::layout::EnginePointer;
use crate::boundary::{Failure, code};
use crate::calls::{Calls, Counted};
use crate::forked::PerProcess;
use crate::handles::{Giver, Handles, LIMIT};

static ENGINES: PerProcess<Engine> = PerProcess::new();

/// The engines of this process.
pub(super) fn engines() -> &'static Handles<Engine> {
    ENGINES.handles()
}

/// An engine, and what its C API keeps beside it.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) transfer: TransferEngine,
    pub(super) settings: Settings,
    /// By which peers reach it.
    pub(super) host: String,
    /// Where soft devices are, unless it is said.
    pub(super) device_address: IpAddr,
    pub(super) segments: Mutex<HashMap<SegmentId, OpenSegment>>,
    pub(super) batches: Handles<Batch>,
    pub(super) borrowed: Borrowed,
    /// Ends with the process, properly.
    pub(super) graceful: AtomicBool,
    calls: Arc<Calls>,
}

/// A segment that was opened, so many times, by this name.
#[derive(Debug)]
pub(super) struct OpenSegment {
    pub(super) name: String,
    pub(super) times: usize,
}

impl Engine {
    pub(super) fn new(
        transfer: TransferEngine,
        settings: Settings,
        host: String,
        device_address: IpAddr,
    ) -> Self {
        Self {
            transfer,
            settings,
            host,
            device_address,
            segments: Mutex::default(),
            batches: Handles::new(),
            borrowed: Borrowed::default(),
            graceful: AtomicBool::new(false),
            calls: Arc::default(),
        }
    }

    /// Takes it in.
    pub(super) fn published(self) -> Result<EnginePointer, Failure> {
        let handle = engines().insert(Arc::new(self));
        let handle = handle.ok_or_else(|| Failure::new(2, format!("there are {LIMIT} engines")))?;
        Ok(ptr::without_provenance_mut(handle as usize))
    }

    pub(super) fn segments(&self) -> MutexGuard<'_, HashMap<SegmentId, OpenSegment>> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody destroys it, and waits for the calls that are under way.
    pub(super) fn is_closing(&self) -> bool {
        self.calls.is_closing()
    }

    pub(super) fn has_transport(&self, name: &str) -> bool {
        self.transfer.transports().iter().any(|(installed, _)| *installed == name)
    }

    pub(super) fn batch(&self, handle: u64) -> Result<Arc<Batch>, Failure> {
        self.batches.find(handle).ok_or_else(|| {
            Failure::invalid(format!(
                "{handle:#x} is no batch of this engine, or one that was freed"
            ))
        })
    }
}

/// A call of a thread on an engine, which is not destroyed meanwhile.
#[derive(Debug)]
pub(super) struct Call {
    // In this order: nobody has the engine any more once the call does not count.
    engine: Arc<Engine>,
    _counted: Counted,
}

impl Call {
    /// Begins one.
    pub(super) fn on(engine: EnginePointer) -> Result<Self, Failure> {
        let begin = |engine: &Arc<Engine>| {
            let _counted = engine.calls.begin();
            Self { engine: Arc::clone(engine), _counted }
        };
        let handle = engine.addr() as u64;
        if engines().giver(handle) == Giver::Other {
            let text = "the engine is of the process that this one was forked off: create one here";
            return Err(Failure::new(code::CONTEXT, text));
        }
        // Before it can be taken out of the table, so that whoever did that knows of this call.
        engines().find_and(handle, begin).ok_or_else(|| unknown(engine))
    }
}

impl Deref for Call {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

fn unknown(engine: EnginePointer) -> Failure {
    Failure::invalid(format!("{:#x} is no engine, or one that was destroyed", engine.addr()))
}

/// Ends an engine: once calls of other threads have returned, nothing of it is under way any more, and its
/// memory is unregistered.
pub(super) fn destroy(engine: EnginePointer) -> Result<(), Failure> {
    // Whose threads are not here cannot be ended here.
    drop(Call::on(engine)?);
    let taken = engines().remove(engine.addr() as u64);
    close(taken.ok_or_else(|| unknown(engine))?);
    Ok(())
}

/// Destroys those that end properly with the process.
pub(super) fn destroy_graceful() {
    let graceful = engines().filter(|engine| engine.graceful.load(Ordering::Relaxed));
    graceful.into_iter().filter_map(|handle| engines().remove(handle)).for_each(close);
}

/// Ends an engine that was taken out of the table.
fn close(engine: Arc<Engine>) {
    engine.calls.close();
    // The last one: who had a call has given it back.
    drop(engine);
}
