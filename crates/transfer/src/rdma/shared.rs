//! What all peers of the transport share.

use std::sync::Arc;
use std::time::Duration;

use millstream_metadata::{CallError, Client, ClientConfig, Frame, HostPort, Store};

use super::device::LocalDevice;
use super::timer::{Clock, Timer};
use super::workers::Workers;
use crate::RdmaConfig;

/// What the transport knows of its engine.
pub(crate) struct RdmaContext {
    /// The engine's name.
    pub(crate) engine: String,
    pub(crate) incarnation: u64,
    pub(crate) client: Client,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) slice_length: usize,
    pub(crate) fragment_ratio: usize,
}

/// What all peers of the transport share.
pub(super) struct Shared {
    pub(super) config: RdmaConfig,
    pub(super) context: RdmaContext,
    pub(super) devices: Vec<Arc<LocalDevice>>,
    pub(super) clock: Clock,
    pub(super) timer: Arc<Timer>,
    /// For what takes a while, but waits for nobody else.
    pub(super) workers: Workers,
    pub(super) calls: Calls,
}

/// What is told of a call.
pub(super) type Done = Box<dyn FnOnce(Result<Frame, CallError>) + Send>;

/// Calls to peers: each takes as long as its peer makes it wait.
pub(super) struct Calls {
    client: Client,
    pool: Workers,
}

impl Calls {
    pub(super) fn new(client: Client, limit: usize) -> Self {
        Self { client, pool: Workers::new(limit) }
    }

    /// Asks a peer. `done` is told by another thread, unless all ends.
    pub(super) fn call(&self, address: &HostPort, frame: Frame, timeout: Duration, done: Done) {
        let limits = *self.client.config();
        let client = Client::new(ClientConfig {
            connect_timeout: limits.connect_timeout.min(timeout),
            call_timeout: limits.call_timeout.min(timeout),
            ..limits
        });
        let address = address.clone();
        let _ = self.pool.run(Box::new(move || done(client.call(&address, &frame))));
    }

    pub(super) fn stop(&self) {
        self.pool.stop();
    }
}
