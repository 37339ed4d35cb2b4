//! What the model checks put in place of threads' primitives, of the kernel and of the clock.
//!
//! With `--cfg millstream_loom` the crate's own code runs on these: `loom` then tries the orders in
//! which threads may take their steps, and the values that a weak memory may show them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) mod kernel;
pub(crate) mod link;
mod primitives;

/// Checks all executions of `model` with so many preemptions at most.
pub(crate) fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    // LOOM_MAX_PREEMPTIONS can ask for more.
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.max_branches = builder.max_branches.max(5_000);
    let executions = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&executions);
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    eprintln!("{} executions", executions.load(Ordering::Relaxed));
}
