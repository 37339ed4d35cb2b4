//! Protection domains of the system's devices and the memory registered in them.

use std::fmt;
use std::sync::Arc;

use millstream_roce::{Access, RegionError};

use super::device::Device;
use super::ffi;
use super::objects::{self, Errno};

/// A protection domain, or why the system refused one.
pub(crate) struct ProtectionDomain {
    pub(super) device: Arc<Device>,
    pub(super) domain: Result<Arc<objects::Domain>, Errno>,
}

impl ProtectionDomain {
    pub(crate) fn allocate(device: &Arc<Device>) -> Self {
        let domain = objects::Domain::allocate(device.context()).map(Arc::new);
        Self { device: Arc::clone(device), domain }
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ProtectionDomain").field(&self.device.name()).finish()
    }
}

/// Registered memory.
pub(crate) struct MemoryRegion {
    region: objects::Region,
    _device: Arc<Device>,
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
        access.check_region(address.expose_provenance() as u64, length as u64)?;
        if access.contains(Access::REMOTE_INVALIDATE) {
            return Err(RegionError::InvalidationUnsupported);
        }
        let device = &domain.device;
        let pd = domain
            .domain
            .as_ref()
            .map_err(|&code| RegionError::System { call: "ibv_alloc_pd", code })?;
        // The flags have the library's values.
        let relaxed = if device.relaxed_ordering() { ffi::ACCESS_RELAXED_ORDERING } else { 0 };
        // SAFETY: the caller's promise is the one asked for.
        let region =
            unsafe { objects::Region::register(pd, address, length, access.bits() | relaxed) };
        let region = region.map_err(|code| RegionError::System { call: "ibv_reg_mr", code })?;
        Ok(Self { region, _device: Arc::clone(device) })
    }

    pub(crate) fn key(&self) -> u32 {
        self.region.local_key()
    }

    pub(crate) fn remote_key(&self) -> u32 {
        self.region.remote_key()
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion").field("key", &self.key()).finish_non_exhaustive()
    }
}
