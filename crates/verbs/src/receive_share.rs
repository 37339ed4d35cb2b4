//! What a peer is told that it may send.

use std::fmt;
use std::sync::Arc;

use crate::device::Device;
use crate::provider::Provided;
use crate::soft;

/// A part of a device's receive buffer that one peer was granted. Dropped, it is free for others.
pub struct ReceiveShare {
    device: Arc<soft::Device>,
    /// Of each shard.
    each: Vec<u64>,
}

impl ReceiveShare {
    pub(crate) fn of(device: &Device, queue_pairs: usize) -> Option<Self> {
        let Provided::Soft(device) = &device.device else { return None };
        let each = device.grant_receive_share(queue_pairs)?;
        Some(Self { device: Arc::clone(device), each })
    }

    /// How much it is: what [`crate::QueuePairAttributes::send_window_bytes`] of all of the peer's
    /// queue pairs to this device may be together.
    pub fn bytes(&self) -> u64 {
        self.each.iter().sum()
    }

    /// How much of it is for a single queue pair, which is of one shard.
    pub fn bytes_of_one(&self) -> u64 {
        self.each.iter().copied().min().unwrap_or_default()
    }
}

impl Drop for ReceiveShare {
    fn drop(&mut self) {
        self.device.withdraw_receive_share(&self.each);
    }
}

impl fmt::Debug for ReceiveShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReceiveShare").field(&self.each).finish()
    }
}
