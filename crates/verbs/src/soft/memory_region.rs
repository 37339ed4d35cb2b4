//! Protection domains of soft devices and the memory registered in them.

use std::sync::Arc;

use millstream_roce::{Access, ProtectionDomainId, RegionError};

use super::device::Device;
use super::host_memory::Invalidation;

#[derive(Clone, Debug)]
pub(crate) struct ProtectionDomain {
    pub(super) device: Arc<Device>,
    pub(super) id: ProtectionDomainId,
}

impl ProtectionDomain {
    pub(crate) fn allocate(device: &Arc<Device>) -> Self {
        Self { device: Arc::clone(device), id: device.allocate_domain() }
    }
}

/// Registered memory. Dropping it deregisters, and returns once no packet is being sent from it.
#[derive(Debug)]
pub(crate) struct MemoryRegion {
    device: Arc<Device>,
    key: u32,
}

impl MemoryRegion {
    /// # Safety
    /// As of [`crate::ProtectionDomain::register_memory`].
    pub(crate) unsafe fn register(
        domain: &ProtectionDomain,
        address: *mut u8,
        length: usize,
        access: Access,
    ) -> Result<Self, RegionError> {
        let device = Arc::clone(&domain.device);
        let address = address.expose_provenance() as u64;
        let invalidation = Invalidation::new(access, device.shards().all().len());
        let key = device.shards().make(|_, endpoint| {
            let (memory, invalidation) = (endpoint.memory_mut(), invalidation.clone());
            // SAFETY: the caller's promise is the one asked for, and ends where `MemoryRegion::drop`
            // deregisters and waits.
            unsafe { memory.register(domain.id, address, length as u64, access, invalidation) }
        })?;
        Ok(Self { device, key })
    }

    /// One key for both uses.
    pub(crate) fn key(&self) -> u32 {
        self.key
    }

    pub(crate) fn remote_key(&self) -> u32 {
        self.key
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        self.device.shards().remove(|endpoint| {
            // The only error is an unknown key, and this key is known until now.
            let _ = endpoint.memory_mut().deregister(self.key);
        });
        self.device.shards().quiesce();
    }
}
