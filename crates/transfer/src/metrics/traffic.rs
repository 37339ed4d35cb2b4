//! What is copied between this process and one segment.

use std::sync::atomic::{AtomicU64, Ordering};

use super::RailMetrics;
use super::counters::add;

/// Copies, each of one slice or several that follow each other, and their bytes.
#[derive(Debug, Default)]
// Who copies writes them, and who submits reads what is beside them.
#[repr(align(128))]
pub(crate) struct Traffic {
    slices: AtomicU64,
    /// Of READs and WRITEs.
    bytes: [AtomicU64; 2],
    failed: AtomicU64,
}

impl Traffic {
    /// So many were copied, with so many bytes by the number of their opcode.
    pub(crate) fn add(&self, slices: u64, bytes: [u64; 2]) {
        add(&self.slices, slices);
        add(&self.bytes[0], bytes[0]);
        add(&self.bytes[1], bytes[1]);
    }

    /// So many were not copied.
    #[cold]
    pub(crate) fn failed(&self, slices: u64) {
        self.failed.fetch_add(slices, Ordering::Relaxed);
    }

    /// Whether anything was to be copied.
    pub(crate) fn is_any(&self) -> bool {
        self.slices.load(Ordering::Relaxed) > 0 || self.failed.load(Ordering::Relaxed) > 0
    }

    /// The same as a rail, on which nothing waits to be acknowledged.
    pub(crate) fn rail(&self, rail: RailMetrics) -> RailMetrics {
        let load = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let [read_bytes, written_bytes] = self.bytes.each_ref().map(load);
        let (completed_slices, failed_slices) = (load(&self.slices), load(&self.failed));
        RailMetrics {
            posted_slices: completed_slices + failed_slices,
            posted_bytes: read_bytes + written_bytes,
            completed_slices,
            failed_slices,
            read_bytes,
            written_bytes,
            ..rail
        }
    }
}
