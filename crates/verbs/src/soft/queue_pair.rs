//! Queue pairs of soft devices.

use std::sync::Arc;

use millstream_roce::{
    CreateError, ModifyError, PostError, QueuePairAttributes, QueuePairCapabilities,
    QueuePairConfig, QueuePairState, ReceiveRequest, SendRequest,
};
use millstream_wire::Qpn;

use super::completion_queue::CompletionQueue;
use super::device::Device;
use super::memory_region::ProtectionDomain;

/// A reliable-connection queue pair.
#[derive(Debug)]
pub(crate) struct QueuePair {
    device: Arc<Device>,
    number: Qpn,
    /// Completion queues live as long as a queue pair completes into them.
    _completions: [Arc<CompletionQueue>; 2],
}

impl QueuePair {
    pub(crate) fn create(
        domain: &ProtectionDomain,
        send_completions: &Arc<CompletionQueue>,
        receive_completions: &Arc<CompletionQueue>,
        capabilities: QueuePairCapabilities,
    ) -> Result<Self, CreateError> {
        let device = Arc::clone(&domain.device);
        for queue in [send_completions, receive_completions] {
            if !Arc::ptr_eq(queue.device(), &device) {
                return Err(CreateError::UnknownCompletionQueue(queue.id()));
            }
        }
        let config = QueuePairConfig {
            receive_completions: receive_completions.id(),
            ..QueuePairConfig::new(domain.id, send_completions.id(), capabilities)
        };
        let number = device.lock().ok_or(CreateError::DeviceFailed)?.create_queue_pair(&config)?;
        let completions = [send_completions, receive_completions].map(Arc::clone);
        Ok(Self { device, number, _completions: completions })
    }

    pub(crate) fn number(&self) -> Qpn {
        self.number
    }

    pub(crate) fn state(&self) -> QueuePairState {
        // It exists as long as `self` does.
        self.device.lock_regardless().queue_pair_state(self.number).unwrap_or_default()
    }

    pub(crate) fn modify(&self, attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
        let mut endpoint = self.device.lock().ok_or(ModifyError::DeviceFailed)?;
        endpoint.modify_queue_pair(self.device.now(), self.number, attributes)
    }

    pub(crate) fn post_send(&self, requests: &[SendRequest]) -> Result<(), (usize, PostError)> {
        let mut endpoint = self.device.lock().ok_or((0, PostError::DeviceFailed))?;
        let now = self.device.now();
        for (index, request) in requests.iter().enumerate() {
            endpoint.post_send(now, self.number, request).map_err(|error| (index, error))?;
        }
        Ok(())
    }

    pub(crate) fn post_receive(
        &self,
        requests: &[ReceiveRequest],
    ) -> Result<(), (usize, PostError)> {
        let mut endpoint = self.device.lock().ok_or((0, PostError::DeviceFailed))?;
        for (index, request) in requests.iter().enumerate() {
            endpoint.post_receive(self.number, request).map_err(|error| (index, error))?;
        }
        Ok(())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.device.lock_regardless().destroy_queue_pair(self.number);
    }
}
