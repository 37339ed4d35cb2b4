//! Shared receive queues of soft devices.

use std::sync::Arc;

use millstream_roce::{CreateError, Piece, PostError, ReceiveRequest, SharedReceiveQueueId};

use super::device::Device;
use super::memory_region::ProtectionDomain;

/// A shared receive queue. Its requests, and all queue pairs that take from it, are in one shard:
/// wherever a message comes, all requests must be there for it, in their order.
#[derive(Debug)]
pub(crate) struct SharedReceiveQueue {
    device: Arc<Device>,
    id: SharedReceiveQueueId,
    shard: usize,
}

impl SharedReceiveQueue {
    pub(crate) fn create(domain: &ProtectionDomain, capacity: usize) -> Result<Self, CreateError> {
        let device = Arc::clone(&domain.device);
        let shards = device.shards();
        shards.check()?;
        let shard = shards.in_turn().next().unwrap_or(0);
        // The first shard has an opinion of the capacity; all have its number, which nobody else gets.
        let id = shards.make(|index, endpoint| {
            let capacity = if index == 0 || index == shard { capacity } else { 1 };
            endpoint.create_shared_receive_queue(domain.id, capacity)
        })?;
        Ok(Self { device, id, shard })
    }

    /// The one that its queue pairs are in.
    pub(super) fn shard(&self) -> usize {
        self.shard
    }

    pub(crate) fn id(&self) -> SharedReceiveQueueId {
        self.id
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn post_receive<P: AsRef<[Piece]>>(
        &self,
        requests: &[ReceiveRequest<P>],
    ) -> Result<(), (usize, PostError)> {
        let mut endpoint = self.device.lock(self.shard).ok_or((0, PostError::DeviceFailed))?;
        let mut posted = requests.iter().enumerate().map(|(index, request)| {
            endpoint.post_shared_receive(self.id, request).map_err(|error| (index, error))
        });
        let result = posted.try_for_each(|posted| posted);
        // Nothing is sent because of it: who found the queue empty asks again.
        endpoint.release_without_waking();
        result
    }

    pub(crate) fn set_limit(&self, limit: usize) -> Result<(), CreateError> {
        let mut endpoint = self.device.lock(self.shard).ok_or(CreateError::DeviceFailed)?;
        let result = endpoint.set_shared_receive_limit(self.id, limit);
        endpoint.release_without_waking();
        result
    }
}

impl Drop for SharedReceiveQueue {
    fn drop(&mut self) {
        self.device.shards().remove(|endpoint| {
            // No queue pair is left that uses it: they hold clones of the handle.
            let _ = endpoint.destroy_shared_receive_queue(self.id);
        });
    }
}
