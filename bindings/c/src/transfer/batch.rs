//! Batches as the C API of the original has them.

/// A batch.
#[derive(Debug)]
pub(super) struct Batch;
