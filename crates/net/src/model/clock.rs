//! The clock, for `loom`: it goes on when the model says so.

use millstream_roce::Instant;

/// The model's time.
pub fn now() -> Instant {
    Instant::from_nanos(crate::model::kernel::now())
}
