//! Protection domains of soft devices and the memory registered in them.

use std::sync::Arc;

use millstream_net::cuda::Gpu;
use millstream_roce::{Access, ProtectionDomainId, RegionError};

use super::device::Device;
use super::host_memory::Invalidation;
use super::shards::Shard;
use super::staging::GpuStaging;
use crate::GpuMemoryError;

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

    /// # Safety
    /// As of [`crate::ProtectionDomain::register_gpu_memory`].
    pub(crate) unsafe fn register_gpu(
        domain: &ProtectionDomain,
        gpu: &Arc<Gpu>,
        address: u64,
        length: usize,
        access: Access,
    ) -> Result<Self, GpuMemoryError> {
        let device = Arc::clone(&domain.device);
        let shards = device.shards().all();
        let invalidation = Invalidation::new(access, shards.len());
        // Pinning takes milliseconds, in which nobody is to wait for a lock.
        let open = |shard: &Arc<Shard>| {
            let known = shard.lock_regardless().memory().knows(gpu);
            if known { Ok(None) } else { GpuStaging::open(gpu).map(Some) }
        };
        let mut opened = shards.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let key = device.shards().make(|shard, endpoint| {
            let (memory, invalidation) = (endpoint.memory_mut(), invalidation.clone());
            let (id, length, opened) = (domain.id, length as u64, &mut opened[shard]);
            // SAFETY: as in `register`.
            unsafe { memory.register_gpu(id, address, length, access, invalidation, gpu, opened) }
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
