//! Waiting for what handlers bring about.

use std::time::Duration;

use millstream_net::Waiters;

use crate::Device;
use crate::provider::Provided;

/// Waits until `look` finds something, at most `timeout`; for what handlers bring about
/// ([`Device::create_completion_queue_with_progress_handler`]), on any of several devices. This thread
/// makes the progress of soft devices meanwhile where no other does: receives, sends, and calls
/// handlers.
///
/// Whoever makes `look` find something calls [`Waiters::wake`] of `waiters` then, on whatever thread.
pub fn wait<'a, T>(
    devices: impl IntoIterator<Item = &'a Device>,
    waiters: &Waiters,
    timeout: Duration,
    look: impl FnMut() -> Option<T>,
) -> Option<T> {
    let soft = devices.into_iter().filter_map(|device| match &device.device {
        Provided::Soft(device) => Some(device.led_shards().map(|(_, shard)| shard)),
        Provided::Ibverbs(_) => None,
    });
    millstream_net::wait(soft.flatten(), waiters, timeout, look)
}
