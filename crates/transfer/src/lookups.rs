//! Where the processes of segments answer. A metadata server may take seconds to say so, or never do: a thread waits for it,
//! and none that others wait for.

use std::sync::Arc;

use millstream_metadata::{HostPort, Store, StoreError};

use crate::workers::Workers;

/// Questions to a metadata server at a time.
const MAX_QUESTIONS: usize = 4;

/// Asks a store.
pub(crate) struct Lookups {
    store: Arc<dyn Store>,
    workers: Workers,
}

impl Lookups {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, workers: Workers::new("lookup", MAX_QUESTIONS) }
    }

    /// Tells `then` where the engine of this name answers: at once where that is known of this start of it, which keeps its
    /// address as long as it lives, and else on a thread that asks. `then` is dropped once this was stopped, and where the
    /// system has no thread.
    pub(crate) fn address(
        &self,
        name: &str,
        incarnation: Option<u64>,
        then: impl FnOnce(Result<HostPort, StoreError>) + Send + 'static,
    ) {
        if let Some(meta) = self.store.known_address(name, incarnation) {
            return then(Ok(meta.address));
        }
        let (store, name) = (Arc::clone(&self.store), name.to_owned());
        let look_up = move || then(store.address(&name).map(|meta| meta.address));
        if self.store.is_local() {
            return look_up();
        }
        if self.workers.run(Box::new(look_up)).is_err() {
            tracing::debug!("the metadata server is not asked any more");
        }
    }

    /// Asks no more, and waits for the answers that are awaited.
    pub(crate) fn stop(&self) {
        self.workers.stop();
    }
}
