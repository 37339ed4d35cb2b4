//! Shared receive queues of soft devices.

use std::sync::Arc;

use millstream_roce::{CreateError, Piece, PostError, ReceiveRequest, SharedReceiveQueueId};

use super::device::Device;
use super::memory_region::ProtectionDomain;

#[derive(Debug)]
pub(crate) struct SharedReceiveQueue {
    device: Arc<Device>,
    id: SharedReceiveQueueId,
}

impl SharedReceiveQueue {
    pub(crate) fn create(domain: &ProtectionDomain, capacity: usize) -> Result<Self, CreateError> {
        let device = Arc::clone(&domain.device);
        let mut endpoint = device.lock().ok_or(CreateError::DeviceFailed)?;
        let id = endpoint.create_shared_receive_queue(domain.id, capacity)?;
        endpoint.release_without_waking();
        Ok(Self { device, id })
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
        let mut endpoint = self.device.lock().ok_or((0, PostError::DeviceFailed))?;
        let mut posted = requests.iter().enumerate().map(|(index, request)| {
            endpoint.post_shared_receive(self.id, request).map_err(|error| (index, error))
        });
        let result = posted.try_for_each(|posted| posted);
        // Nothing is sent because of it: who found the queue empty asks again.
        endpoint.release_without_waking();
        result
    }

    pub(crate) fn set_limit(&self, limit: usize) -> Result<(), CreateError> {
        let mut endpoint = self.device.lock().ok_or(CreateError::DeviceFailed)?;
        let result = endpoint.set_shared_receive_limit(self.id, limit);
        endpoint.release_without_waking();
        result
    }
}

impl Drop for SharedReceiveQueue {
    fn drop(&mut self) {
        // No queue pair is left that uses it: they hold clones of the handle.
        let _ = self.device.lock_regardless().destroy_shared_receive_queue(self.id);
    }
}
