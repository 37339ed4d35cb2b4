//! Shared receive queues.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::super::ffi;
use super::super::work::Refused;
use super::queue_pair::{NOT_THERE, accepted, link};
use super::{Domain, Errno, check, created, destroyed};

/// A shared receive queue.
pub(in super::super) struct SharedReceiveQueue {
    domain: Arc<Domain>,
    pub(super) queue: NonNull<ffi::Srq>,
}

// SAFETY: as for `Context`.
unsafe impl Send for SharedReceiveQueue {}
// SAFETY: as for `Context`.
unsafe impl Sync for SharedReceiveQueue {}

impl SharedReceiveQueue {
    /// Makes a queue that events know by `number`.
    pub(in super::super) fn create(
        domain: &Arc<Domain>,
        capacity: u32,
        pieces: u32,
        number: u32,
    ) -> Result<Self, Errno> {
        let mut attributes = ffi::SrqInitAttr {
            srq_context: ptr::without_provenance_mut(number as usize),
            attr: ffi::SrqAttr { max_wr: capacity, max_sge: pieces, srq_limit: 0 },
        };
        // SAFETY: live; the number is not a pointer to the library, only handed back.
        let queue = created(unsafe {
            (domain.context.library.ibv_create_srq)(domain.domain.as_ptr(), &raw mut attributes)
        })?;
        Ok(Self { domain: Arc::clone(domain), queue })
    }

    pub(in super::super) fn set_limit(&self, limit: u32) -> Result<(), Errno> {
        let mut attributes = ffi::SrqAttr { srq_limit: limit, ..ffi::SrqAttr::default() };
        // SAFETY: live.
        check(unsafe {
            (self.domain.context.library.ibv_modify_srq)(
                self.queue.as_ptr(),
                &raw mut attributes,
                ffi::SRQ_LIMIT,
            )
        })
    }

    /// Posts requests, and links them to that end.
    ///
    /// # Safety
    /// Each request's `sg_list` points to `num_sge` pieces, or `num_sge` is 0.
    pub(in super::super) unsafe fn post(
        &self,
        requests: &mut [ffi::RecvWr],
    ) -> Result<(), Refused> {
        // SAFETY: live, as the domain holds the context. Drivers fill the table when the device
        // is opened.
        let ops = unsafe { &(*self.domain.context.context.as_ptr()).ops };
        let post = ops.post_srq_recv.ok_or(NOT_THERE)?;
        let (first, count) = (link(requests), requests.len());
        let mut bad = ptr::null_mut();
        // SAFETY: live; the requests are linked, and drivers copy them before they return.
        let result = check(unsafe { post(self.queue.as_ptr(), first, &raw mut bad) });
        result.map_err(|code| Refused { accepted: accepted(first, bad, count), code })
    }
}

impl Drop for SharedReceiveQueue {
    fn drop(&mut self) {
        // SAFETY: live, and nothing uses it any more: queue pairs hold it, and events were
        // acknowledged when they were taken.
        destroyed("ibv_destroy_srq", unsafe {
            (self.domain.context.library.ibv_destroy_srq)(self.queue.as_ptr())
        });
    }
}
