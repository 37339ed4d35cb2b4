//! Queue pairs.

use std::sync::Arc;

use millstream_roce::{
    CreateError, ModifyError, PostError, ProtectionDomainId, QueuePairAttributes,
    QueuePairCapabilities, QueuePairConfig, QueuePairState, ReceiveRequest, SendRequest,
};
use millstream_wire::Qpn;

use crate::completion_queue::CompletionQueue;
use crate::device::{Device, SoftDevice};

/// A reliable-connection queue pair. Dropping it closes it: its outstanding requests end without
/// completions.
#[derive(Debug)]
pub struct QueuePair {
    device: Arc<SoftDevice>,
    number: Qpn,
    /// Completion queues live as long as a queue pair completes into them.
    _completions: [CompletionQueue; 2],
}

impl QueuePair {
    pub(crate) fn create(
        device: &Device,
        domain: ProtectionDomainId,
        send_completions: &CompletionQueue,
        receive_completions: &CompletionQueue,
        capabilities: QueuePairCapabilities,
    ) -> Result<Self, CreateError> {
        let device = Arc::clone(device.soft());
        for queue in [send_completions, receive_completions] {
            if !Arc::ptr_eq(queue.device(), &device) {
                return Err(CreateError::UnknownCompletionQueue(queue.id()));
            }
        }
        let config = QueuePairConfig {
            domain,
            send_completions: send_completions.id(),
            receive_completions: receive_completions.id(),
            capabilities,
        };
        let number = device.lock().ok_or(CreateError::DeviceFailed)?.create_queue_pair(&config)?;
        let completions = [send_completions.clone(), receive_completions.clone()];
        Ok(Self { device, number, _completions: completions })
    }

    /// Its number.
    pub fn number(&self) -> Qpn {
        self.number
    }

    /// Its state.
    pub fn state(&self) -> QueuePairState {
        // It exists as long as `self` does.
        self.device.lock_regardless().queue_pair_state(self.number).unwrap_or_default()
    }

    /// Changes its attributes and state.
    pub fn modify(&self, attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
        let mut endpoint = self.device.lock().ok_or(ModifyError::DeviceFailed)?;
        endpoint.modify_queue_pair(self.device.now(), self.number, attributes)
    }

    /// Appends requests to the send queue, in order. On error, the number that were accepted
    /// before the one that was not.
    pub fn post_send(&self, requests: &[SendRequest]) -> Result<(), (usize, PostError)> {
        let mut endpoint = self.device.lock().ok_or((0, PostError::DeviceFailed))?;
        let now = self.device.now();
        for (index, request) in requests.iter().enumerate() {
            endpoint.post_send(now, self.number, request).map_err(|error| (index, error))?;
        }
        Ok(())
    }

    /// Appends requests to the receive queue, in order. On error, the number that were accepted
    /// before the one that was not.
    pub fn post_receive(&self, requests: &[ReceiveRequest]) -> Result<(), (usize, PostError)> {
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
