//! The clock of all devices of this process.

use std::sync::LazyLock;
use std::time::Instant as SystemInstant;

use millstream_roce::Instant;

/// Monotonic time since this process first asked for it. One clock for all devices, so instants of
/// one can be compared with those of another.
pub fn now() -> Instant {
    static EPOCH: LazyLock<SystemInstant> = LazyLock::new(SystemInstant::now);
    // 2^64 nanoseconds are 584 years.
    Instant::from_nanos(EPOCH.elapsed().as_nanos() as u64)
}
