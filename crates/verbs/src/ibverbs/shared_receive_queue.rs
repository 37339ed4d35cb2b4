//! Shared receive queues of the system's devices.

use std::fmt;
use std::sync::{Arc, Mutex};

use millstream_roce::{
    CompletionOperation, CreateError, Piece, PostError, ReceiveRequest, SharedReceiveQueueId,
};

use super::device::Device;
use super::memory_region::ProtectionDomain;
use super::work::{Posted, SHARED, number};
use super::{lock, objects, receive_batch};

/// A receive queue that several queue pairs take from.
pub(crate) struct SharedReceiveQueue {
    device: Arc<Device>,
    capacity: usize,
    native: Arc<objects::SharedReceiveQueue>,
    work: Arc<SharedWork>,
    /// Held while requests are handed over, so that a batch is noted as one.
    posting: Mutex<()>,
}

impl SharedReceiveQueue {
    pub(crate) fn create(domain: &ProtectionDomain, capacity: usize) -> Result<Self, CreateError> {
        let device = Arc::clone(&domain.device);
        if device.failed() {
            return Err(CreateError::DeviceFailed);
        }
        let limit = device.max_shared_receives();
        if limit == 0 {
            return Err(CreateError::Unsupported("shared receive queues"));
        }
        if capacity == 0 || capacity > limit {
            let what = "shared receive queue capacity";
            return Err(CreateError::OutOfRange { what, value: capacity, limit });
        }
        let pd = domain
            .domain
            .as_ref()
            .map_err(|&code| CreateError::System { call: "ibv_alloc_pd", code })?;
        let number = device.registry().next_shared();
        let pieces = device.attributes().max_scatter_gather as u32;
        let native = objects::SharedReceiveQueue::create(pd, capacity as u32, pieces, number)
            .map_err(|code| CreateError::System { call: "ibv_create_srq", code })?;
        Ok(Self {
            device,
            capacity,
            native: Arc::new(native),
            work: Arc::new(SharedWork::new(number, capacity)),
            posting: Mutex::default(),
        })
    }

    pub(crate) fn id(&self) -> SharedReceiveQueueId {
        SharedReceiveQueueId(self.work.number)
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn object(&self) -> &Arc<objects::SharedReceiveQueue> {
        &self.native
    }

    pub(super) fn work(&self) -> &Arc<SharedWork> {
        &self.work
    }

    pub(crate) fn post_receive<P: AsRef<[Piece]>>(
        &self,
        requests: &[ReceiveRequest<P>],
    ) -> Result<(), (usize, PostError)> {
        let posting = lock(&self.posting);
        if self.device.failed() {
            return Err((0, PostError::DeviceFailed));
        }
        let refused = requests
            .iter()
            .enumerate()
            .find_map(|(index, request)| Some((index, request.check_pieces().err()?)));
        let good = &requests[..refused.map_or(requests.len(), |(index, _)| index)];
        let (mut done, mut ended) = (0, None);
        for wanted in good.chunks(receive_batch::LENGTH) {
            let mut slots = [0; receive_batch::LENGTH];
            let count = self.work.note(wanted, &mut slots);
            let (batch, slots) = (&wanted[..count], &slots[..count]);
            if count > 0 {
                let posted = receive_batch::with(
                    batch,
                    |index| number(SHARED | self.work.number, slots[index]),
                    // SAFETY: the lists are those of the batch.
                    |native| unsafe { self.native.post(native) },
                );
                if let Err(refused) = posted {
                    // What the device may have counts as accepted.
                    let accepted = refused.accepted.unwrap_or(count).min(count);
                    for &slot in &slots[accepted..] {
                        self.work.complete(slot);
                    }
                    done += accepted;
                    ended = Some(refused);
                    break;
                }
            }
            done += count;
            if count < wanted.len() {
                break;
            }
        }
        drop(posting);
        let limit = self.capacity;
        let error = match ended {
            None if done == requests.len() => return Ok(()),
            None => match refused {
                Some((index, error)) if index == done => error,
                _ => PostError::QueueFull { limit },
            },
            Some(refused) if refused.accepted.is_none() => {
                self.device.registry().fail_by("ibv_post_srq_recv", refused.code);
                PostError::DeviceFailed
            }
            Some(refused) if refused.code == libc::ENOMEM => PostError::QueueFull { limit },
            Some(refused) => PostError::System { call: "ibv_post_srq_recv", code: refused.code },
        };
        if done == requests.len() { Ok(()) } else { Err((done, error)) }
    }

    pub(crate) fn set_limit(&self, limit: usize) -> Result<(), CreateError> {
        if self.device.failed() {
            return Err(CreateError::DeviceFailed);
        }
        if limit > self.capacity {
            let what = "shared receive limit";
            return Err(CreateError::OutOfRange { what, value: limit, limit: self.capacity });
        }
        self.native
            .set_limit(limit as u32)
            .map_err(|code| CreateError::System { call: "ibv_modify_srq", code })
    }
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedReceiveQueue").field(&self.id()).finish()
    }
}

/// The requests of a shared receive queue. They complete in any order, so each has a slot of its
/// own until then.
///
/// A request that a queue pair has begun to fill, and that never completes because the queue pair
/// is reset or destroyed meanwhile, keeps its slot: devices lose its place in the queue too, which
/// is why the specification has one wait for [`millstream_roce::AsyncEvent::LastReceiveRequest`].
pub(super) struct SharedWork {
    pub(super) number: u32,
    slots: Mutex<Slots>,
}

struct Slots {
    /// The caller's numbers of those that are outstanding.
    ids: Box<[Option<u64>]>,
    free: Vec<u32>,
}

impl SharedWork {
    fn new(number: u32, capacity: usize) -> Self {
        let free = (0..capacity as u32).rev().collect();
        let slots = Slots { ids: vec![None; capacity].into(), free };
        Self { number, slots: Mutex::new(slots) }
    }

    /// Notes as many of the requests as there is room for, and returns how many. They are found
    /// again by `slots`.
    fn note<P>(&self, requests: &[ReceiveRequest<P>], slots: &mut [u32]) -> usize {
        let Slots { ids, free } = &mut *lock(&self.slots);
        let count = requests.len().min(slots.len()).min(free.len());
        for (request, slot) in requests.iter().zip(slots).take(count) {
            *slot = free.pop().unwrap_or_default();
            ids[*slot as usize] = Some(request.id);
        }
        count
    }

    /// The request in this slot, which is free thereby; `None` when none is.
    pub(super) fn complete(&self, slot: u32) -> Option<Posted> {
        let Slots { ids, free } = &mut *lock(&self.slots);
        let id = ids.get_mut(slot as usize)?.take()?;
        free.push(slot);
        Some(Posted { id, operation: CompletionOperation::Receive, length: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_complete_once_in_any_order() {
        let work = SharedWork::new(7, 3);
        let requests: Vec<_> = (10..14).map(|id| ReceiveRequest { id, pieces: () }).collect();
        let mut slots = [0; 4];
        assert_eq!(work.note(&requests, &mut slots), 3);
        let id = |slot| work.complete(slot).map(|posted| posted.id);
        assert_eq!([id(slots[1]), id(slots[1]), id(77)], [Some(11), None, None]);
        // Its slot is the only one that is free.
        let mut more = [0; 4];
        assert_eq!(work.note(&requests[3..], &mut more), 1);
        assert_eq!(work.note(&requests[3..], &mut more[1..]), 0);
        assert_eq!([id(slots[2]), id(more[0]), id(slots[0])], [Some(12), Some(13), Some(10)]);
    }
}
