//! Taking back what a metadata server has, in a process that ends without dropping its engines, as by a signal.

use std::sync::Weak;

use crate::engine::Inner;

/// What a metadata server has of an engine. [`crate::TransferEngine::withdrawal`] gives it.
#[derive(Clone, Debug)]
pub struct Withdrawal(Weak<Inner>);

impl Withdrawal {
    pub(crate) fn new(engine: Weak<Inner>) -> Self {
        Self(engine)
    }

    /// Takes back what the server has of the engine and of its files, and tells it no more of the engine's memory; files that are
    /// registered afterwards are told. Transfers go on. While the engine is dropped on another thread, this returns once it is
    /// taken back, whoever does it; afterwards at once. May block, up to the deadlines of the store.
    pub fn withdraw(&self) {
        if let Some(inner) = self.0.upgrade().filter(|inner| !inner.store.is_local()) {
            inner.withdraw(&inner.file_names());
        }
    }

    /// Whether the engine was dropped, so that there is nothing to take back.
    pub fn is_over(&self) -> bool {
        self.0.strong_count() == 0
    }
}
