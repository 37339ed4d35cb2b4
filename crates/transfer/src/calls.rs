//! Calls to peers for which no thread of the caller waits.

use std::time::Duration;

use millstream_metadata::{CallError, Client, ClientConfig, Frame, HostPort};

use crate::workers::Workers;

/// What is told of a call.
pub(crate) type Done = Box<dyn FnOnce(Result<Frame, CallError>) + Send>;

/// Calls to peers: each takes as long as its peer makes it wait.
pub(crate) struct Calls {
    client: Client,
    pool: Workers,
}

impl Calls {
    pub(crate) fn new(client: Client, limit: usize) -> Self {
        Self { client, pool: Workers::new(limit) }
    }

    /// The longest that a call takes.
    pub(crate) fn timeout(&self) -> Duration {
        self.client.config().call_timeout
    }

    /// Asks a peer. `done` is told by another thread, unless all ends.
    pub(crate) fn call(&self, address: &HostPort, frame: Frame, timeout: Duration, done: Done) {
        let limits = *self.client.config();
        let client = Client::new(ClientConfig {
            connect_timeout: limits.connect_timeout.min(timeout),
            call_timeout: limits.call_timeout.min(timeout),
            ..limits
        });
        let address = address.clone();
        let _ = self.pool.run(Box::new(move || done(client.call(&address, &frame))));
    }

    pub(crate) fn stop(&self) {
        self.pool.stop();
    }
}
