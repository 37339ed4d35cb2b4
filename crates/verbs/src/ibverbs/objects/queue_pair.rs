//! Queue pairs, and how requests are posted.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::super::ffi;
use super::super::work::Refused;
use super::{CompletionQueue, Domain, Errno, SharedReceiveQueue, check, created, destroyed};

/// A queue pair.
pub(in super::super) struct QueuePair {
    domain: Arc<Domain>,
    pair: NonNull<ffi::Qp>,
    _completions: [Arc<CompletionQueue>; 2],
    _shared_receives: Option<Arc<SharedReceiveQueue>>,
}

// SAFETY: as for `Context`.
unsafe impl Send for QueuePair {}
// SAFETY: as for `Context`.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    pub(in super::super) fn create(
        domain: &Arc<Domain>,
        send: &Arc<CompletionQueue>,
        receive: &Arc<CompletionQueue>,
        shared_receives: Option<&Arc<SharedReceiveQueue>>,
        qp_type: c_int,
        capabilities: ffi::QpCap,
    ) -> Result<Self, Errno> {
        let mut attributes = ffi::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: send.queue.as_ptr(),
            recv_cq: receive.queue.as_ptr(),
            srq: shared_receives.map_or(ptr::null_mut(), |shared| shared.queue.as_ptr()),
            cap: capabilities,
            qp_type,
            sq_sig_all: 0,
        };
        // SAFETY: live, the queues too.
        let pair = created(unsafe {
            let library = domain.context.library;
            (library.ibv_create_qp)(domain.domain.as_ptr(), &raw mut attributes)
        })?;
        let completions = [send, receive].map(Arc::clone);
        Ok(Self {
            domain: Arc::clone(domain),
            pair,
            _completions: completions,
            _shared_receives: shared_receives.cloned(),
        })
    }

    pub(in super::super) fn number(&self) -> u32 {
        // SAFETY: live; set once, at creation.
        unsafe { (*self.pair.as_ptr()).qp_num }
    }

    pub(in super::super) fn modify(
        &self,
        attributes: &ffi::QpAttr,
        mask: c_int,
    ) -> Result<(), Errno> {
        let mut attributes = *attributes;
        // SAFETY: live.
        check(unsafe {
            let library = self.domain.context.library;
            (library.ibv_modify_qp)(self.pair.as_ptr(), &raw mut attributes, mask)
        })
    }

    /// The state, as a number of `ibv_qp_state`, and whether its send queue is draining.
    pub(in super::super) fn state(&self) -> Result<(c_int, bool), Errno> {
        let attributes = self.query(ffi::qp_mask::STATE)?;
        Ok((attributes.qp_state, attributes.sq_draining != 0))
    }

    /// The packet sequence number that it expects next.
    pub(in super::super) fn receive_psn(&self) -> Result<u32, Errno> {
        Ok(self.query(ffi::qp_mask::RQ_PSN)?.rq_psn)
    }

    fn query(&self, mask: c_int) -> Result<ffi::QpAttr, Errno> {
        let mut attributes = ffi::QpAttr::default();
        let mut initial = MaybeUninit::<ffi::QpInitAttr>::zeroed();
        // SAFETY: live; the others are places for the results.
        check(unsafe {
            (self.domain.context.library.ibv_query_qp)(
                self.pair.as_ptr(),
                &raw mut attributes,
                mask,
                initial.as_mut_ptr(),
            )
        })?;
        Ok(attributes)
    }

    /// Posts requests, and links them to that end.
    ///
    /// # Safety
    /// Each request's `sg_list` points to `num_sge` pieces, or `num_sge` is 0.
    pub(in super::super) unsafe fn post_send(
        &self,
        requests: &mut [ffi::SendWr],
    ) -> Result<(), Refused> {
        let post = self.ops().post_send.ok_or(NOT_THERE)?;
        let (first, count) = (link(requests), requests.len());
        let mut bad = ptr::null_mut();
        // SAFETY: live; the requests are linked, and drivers copy them before they return.
        let result = check(unsafe { post(self.pair.as_ptr(), first, &raw mut bad) });
        result.map_err(|code| Refused { accepted: accepted(first, bad, count), code })
    }

    /// Posts requests, and links them to that end.
    ///
    /// # Safety
    /// Each request's `sg_list` points to `num_sge` pieces, or `num_sge` is 0.
    pub(in super::super) unsafe fn post_receive(
        &self,
        requests: &mut [ffi::RecvWr],
    ) -> Result<(), Refused> {
        let post = self.ops().post_recv.ok_or(NOT_THERE)?;
        let (first, count) = (link(requests), requests.len());
        let mut bad = ptr::null_mut();
        // SAFETY: live; the requests are linked, and drivers copy them before they return.
        let result = check(unsafe { post(self.pair.as_ptr(), first, &raw mut bad) });
        result.map_err(|code| Refused { accepted: accepted(first, bad, count), code })
    }

    fn ops(&self) -> &ffi::ContextOps {
        // SAFETY: live, as the domain holds the context. Drivers fill the table when the device
        // is opened.
        unsafe { &(*self.domain.context.context.as_ptr()).ops }
    }
}

/// A work request as the library takes it: one of a list.
pub(super) trait Listed {
    fn next(&mut self) -> &mut *mut Self;
}

impl Listed for ffi::SendWr {
    fn next(&mut self) -> &mut *mut Self {
        &mut self.next
    }
}

impl Listed for ffi::RecvWr {
    fn next(&mut self) -> &mut *mut Self {
        &mut self.next
    }
}

/// Makes a list of the requests, in their order; returns the first.
pub(super) fn link<R: Listed>(requests: &mut [R]) -> *mut R {
    let first = requests.as_mut_ptr();
    let mut next = ptr::null_mut();
    for index in (0..requests.len()).rev() {
        // SAFETY: the pointer is to an element of `requests`, which is borrowed here alone.
        unsafe {
            let request = first.add(index);
            *(*request).next() = next;
            next = request;
        }
    }
    next
}

/// A driver without the function.
pub(super) const NOT_THERE: Refused = Refused { accepted: Some(0), code: libc::ENOSYS };

/// How many of `count` requests from `first` on come before `bad`, the one that was refused.
/// `None` when that is none of them: rxe's driver has put all of them into the queue when ringing
/// the doorbell fails, and names none.
pub(super) fn accepted<T>(first: *mut T, bad: *mut T, count: usize) -> Option<usize> {
    let distance = bad.addr().wrapping_sub(first.addr()) / size_of::<T>();
    (distance < count).then_some(distance)
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: live, and not used after this.
        destroyed("ibv_destroy_qp", unsafe {
            (self.domain.context.library.ibv_destroy_qp)(self.pair.as_ptr())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_before_the_refused_one_were_accepted() {
        let mut requests = [0_u64; 4];
        let first = requests.as_mut_ptr();
        assert_eq!(accepted(first, &raw mut requests[0], 4), Some(0));
        assert_eq!(accepted(first, &raw mut requests[3], 4), Some(3));
        assert_eq!(accepted(first, ptr::null_mut(), 4), None);
    }
}
