//! Protection domains and the memory registered in them.

use std::sync::Arc;

use millstream_roce::{Access, ProtectionDomainId, RegionError};

use crate::completion_queue::CompletionQueue;
use crate::device::{Device, SoftDevice};
use crate::queue_pair::QueuePair;
use crate::{CreateError, QueuePairCapabilities};

/// A protection domain: memory regions serve only the queue pairs made in the same one.
#[derive(Clone, Debug)]
pub struct ProtectionDomain {
    device: Device,
    id: ProtectionDomainId,
}

impl ProtectionDomain {
    pub(crate) fn new(device: Device, id: ProtectionDomainId) -> Self {
        Self { device, id }
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Registers `length` bytes at `address`, so that work requests and, as far as `access`
    /// grants, remotes can use them.
    ///
    /// # Safety
    /// Until the region is dropped, the bytes must stay mapped (and writable, where `access`
    /// grants writing), and Rust code must not hold references to them that conflict with what
    /// remotes and work requests do: remotes write at any time they like. Data that a completion
    /// or a message has announced may be read; data that is being sent must not be changed before
    /// its work request completes.
    pub unsafe fn register_memory(
        &self,
        address: *mut u8,
        length: usize,
        access: Access,
    ) -> Result<MemoryRegion, RegionError> {
        let device = Arc::clone(self.device.soft());
        let address = address.expose_provenance() as u64;
        // SAFETY: the caller's promise is the one asked for, and ends where `MemoryRegion::drop`
        // deregisters and waits.
        let key = unsafe {
            device.lock_regardless().memory_mut().register(
                self.id,
                address,
                length as u64,
                access,
            )?
        };
        Ok(MemoryRegion { device, key, address, length })
    }

    /// Makes a queue pair in state RESET.
    pub fn create_queue_pair(
        &self,
        send_completions: &CompletionQueue,
        receive_completions: &CompletionQueue,
        capabilities: QueuePairCapabilities,
    ) -> Result<QueuePair, CreateError> {
        QueuePair::create(
            &self.device,
            self.id,
            send_completions,
            receive_completions,
            capabilities,
        )
    }
}

/// Registered memory. Dropping it deregisters: its key opens nothing any more, requests that
/// still name it fail, and the drop returns once no packet is being sent from it.
#[derive(Debug)]
pub struct MemoryRegion {
    device: Arc<SoftDevice>,
    key: u32,
    address: u64,
    length: usize,
}

impl MemoryRegion {
    /// Its key: local for work requests here, remote for those of peers.
    pub fn key(&self) -> u32 {
        self.key
    }

    /// Virtual address of its first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        self.length
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // The only error is an unknown key, and this key is known until now.
        let _ = self.device.lock_regardless().memory_mut().deregister(self.key);
        self.device.quiesce();
    }
}
