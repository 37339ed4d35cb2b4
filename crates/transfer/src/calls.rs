//! Calls to peers, for which no thread waits.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use millstream_metadata::{
    CallError, CallErrorKind, Caller, ClientConfig, DEFAULT_FRAME_LIMIT, Frame, HostPort,
};

/// What is told of a call.
pub(crate) type Done = Box<dyn FnOnce(Result<Frame, CallError>) + Send>;

/// Calls to peers, until it is stopped.
pub(crate) struct Calls {
    timeout: Duration,
    caller: Mutex<Option<Arc<Caller>>>,
}

impl Calls {
    pub(crate) fn new(config: ClientConfig) -> Self {
        // What is answered is short, unlike descriptors.
        let frame_limit = DEFAULT_FRAME_LIMIT.min(config.frame_limit);
        let caller = Some(Arc::new(Caller::new(ClientConfig { frame_limit, ..config })));
        Self { timeout: config.call_timeout, caller: Mutex::new(caller) }
    }

    /// The longest that a call takes by the configuration.
    pub(crate) const fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Asks a peer. `done` is told by a thread that all calls share, so it is short; after `stop`, on this
    /// thread.
    pub(crate) fn call(&self, address: &HostPort, frame: Frame, timeout: Duration, done: Done) {
        let caller = self.caller.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match caller {
            Some(caller) => caller.call(address, frame, timeout, done),
            None => done(Err(CallError { peer: address.clone(), kind: CallErrorKind::Ended })),
        }
    }

    /// Ends all calls. Takes no more.
    pub(crate) fn stop(&self) {
        let caller = self.caller.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(caller);
    }
}
