//! Address handles: where a datagram goes, as the device has looked it up.

use std::ptr::NonNull;
use std::sync::Arc;

use super::super::ffi;
use super::{Domain, Errno, created, destroyed};

/// An address handle.
pub(in super::super) struct AddressHandle {
    domain: Arc<Domain>,
    handle: NonNull<ffi::Ah>,
}

// SAFETY: as for `Context`.
unsafe impl Send for AddressHandle {}
// SAFETY: as for `Context`.
unsafe impl Sync for AddressHandle {}

impl AddressHandle {
    /// Looks the way up, which may take as long as the system's neighbour resolution.
    pub(in super::super) fn create(
        domain: &Arc<Domain>,
        attributes: &ffi::AhAttr,
    ) -> Result<Self, Errno> {
        let mut attributes = *attributes;
        // SAFETY: live.
        let handle = created(unsafe {
            (domain.context.library.ibv_create_ah)(domain.domain.as_ptr(), &raw mut attributes)
        })?;
        Ok(Self { domain: Arc::clone(domain), handle })
    }

    /// For a request that is complete before this is dropped.
    pub(in super::super) fn as_ptr(&self) -> *mut ffi::Ah {
        self.handle.as_ptr()
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        // SAFETY: live, and nothing uses it any more: the requests with it are complete.
        destroyed("ibv_destroy_ah", unsafe {
            (self.domain.context.library.ibv_destroy_ah)(self.handle.as_ptr())
        });
    }
}
