//! Receive requests that wait for messages: those of one queue pair, or a queue that several share
//! (IBTA 10.2.9.2).

use std::collections::VecDeque;

use millstream_wire::Qpn;

use crate::ProtectionDomainId;
use crate::config::EndpointConfig;
use crate::endpoint::{Endpoint, Shared};
use crate::error::{CreateError, PostError};
use crate::events::AsyncEvent;
use crate::memory::Memory;
use crate::pieces::{PieceList, PieceRing};
use crate::work::{self, Piece, ReceiveRequest, ScatterGather};

/// A shared receive queue of an endpoint.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct SharedReceiveQueueId(pub u32);

/// A receive request that was taken out of its queue. Its pieces are with who took it, see
/// [`Receives::pieces`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Receive {
    pub(crate) id: u64,
    /// Bytes of its pieces.
    pub(crate) length: u64,
    /// The protection domain that its pieces are looked up in.
    pub(crate) domain: ProtectionDomainId,
}

/// A receive request in a queue.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    id: u64,
    length: u64,
    pieces: PieceList,
}

/// Requests in order, bounded.
#[derive(Debug)]
struct Queue {
    domain: ProtectionDomainId,
    requests: VecDeque<Waiting>,
    pieces: PieceRing,
    capacity: usize,
}

impl Queue {
    fn new(domain: ProtectionDomainId, capacity: usize) -> Self {
        let requests = VecDeque::with_capacity(capacity);
        Self { domain, requests, pieces: PieceRing::default(), capacity }
    }

    fn post(&mut self, request: &ReceiveRequest<&[Piece]>) -> Result<(), PostError> {
        request.check_pieces()?;
        if self.requests.len() >= self.capacity {
            return Err(PostError::QueueFull { limit: self.capacity });
        }
        let length = work::length(request.pieces);
        let pieces = self.pieces.keep(request.pieces);
        self.requests.push_back(Waiting { id: request.id, length, pieces });
        Ok(())
    }

    /// The length of the oldest.
    fn next_length(&self) -> Option<u64> {
        self.requests.front().map(|waiting| waiting.length)
    }

    /// Takes the oldest out, and its pieces into `list`.
    fn take(&mut self, list: &mut ScatterGather) -> Option<Receive> {
        let Waiting { id, length, pieces } = self.requests.pop_front()?;
        list.set(self.pieces.get(&pieces));
        self.pieces.release(&pieces);
        Some(Receive { id, length, domain: self.domain })
    }
}

/// Where a queue pair takes its receive requests from.
#[derive(Debug)]
pub(crate) struct Receives {
    own: Queue,
    shared: Option<SharedReceiveQueueId>,
    /// The one of the message that is arriving. It is no longer in its queue: of a shared queue,
    /// another queue pair has the next.
    claimed: Option<Receive>,
    /// The pieces of the one that was taken last.
    pieces: ScatterGather,
}

impl Receives {
    pub(crate) fn new(
        domain: ProtectionDomainId,
        capacity: usize,
        shared: Option<SharedReceiveQueueId>,
    ) -> Self {
        let capacity = if shared.is_some() { 0 } else { capacity };
        let own = Queue::new(domain, capacity);
        Self { own, shared, claimed: None, pieces: ScatterGather::EMPTY }
    }

    /// How many it has, and can have.
    pub(crate) fn usage(&self) -> (usize, usize) {
        let claimed = usize::from(self.claimed.is_some());
        (self.own.requests.len() + claimed, self.own.capacity + 1)
    }

    /// The queue that it shares.
    pub(crate) fn shared(&self) -> Option<SharedReceiveQueueId> {
        self.shared
    }

    /// Appends a request to the queue pair's own queue.
    pub(crate) fn post(
        &mut self,
        qpn: Qpn,
        request: &ReceiveRequest<&[Piece]>,
    ) -> Result<(), PostError> {
        match self.shared {
            Some(_) => Err(PostError::SharedReceives(qpn)),
            None => self.own.post(request),
        }
    }

    /// How much the request for the message that is arriving takes, or that for the next one.
    pub(crate) fn next_length<M>(&self, shared: &Shared<M>) -> Option<u64> {
        match (self.claimed, self.shared) {
            (Some(claimed), _) => Some(claimed.length),
            (None, Some(id)) => shared.receive_queues.get(id)?.queue.next_length(),
            (None, None) => self.own.next_length(),
        }
    }

    /// The request for the message that is arriving, out of its queue: the next message gets
    /// another.
    pub(crate) fn claim<M>(&mut self, shared: &mut Shared<M>) -> Option<Receive> {
        if self.claimed.is_none() {
            self.claimed = match self.shared {
                Some(id) => shared.take_shared(id, &mut self.pieces),
                None => self.own.take(&mut self.pieces),
            };
        }
        self.claimed
    }

    /// The same; the message is complete or has failed.
    pub(crate) fn take<M>(&mut self, shared: &mut Shared<M>) -> Option<Receive> {
        self.claim(shared);
        self.claimed.take()
    }

    /// The pieces of the request that was claimed or taken last.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece> {
        self.pieces.pieces().iter().copied()
    }

    /// Takes what is the queue pair's alone, oldest first: requests in a shared queue stay there.
    pub(crate) fn take_own(&mut self) -> Option<Receive> {
        self.claimed.take().or_else(|| self.own.take(&mut self.pieces))
    }
}

/// The shared receive queues of an endpoint.
#[derive(Debug, Default)]
pub(crate) struct SharedReceiveQueues {
    queues: Vec<Option<SharedReceiveQueue>>,
}

#[derive(Debug)]
struct SharedReceiveQueue {
    queue: Queue,
    /// With fewer requests than this there is an event, once; 0 = none.
    limit: usize,
}

impl SharedReceiveQueues {
    fn get(&self, id: SharedReceiveQueueId) -> Option<&SharedReceiveQueue> {
        self.queues.get(id.0 as usize)?.as_ref()
    }

    fn get_mut(&mut self, id: SharedReceiveQueueId) -> Option<&mut SharedReceiveQueue> {
        self.queues.get_mut(id.0 as usize)?.as_mut()
    }

    /// How many requests they have, and can have.
    pub(crate) fn usage(&self) -> (usize, usize) {
        let queues = || self.queues.iter().flatten().map(|entry| &entry.queue);
        (
            queues().map(|queue| queue.requests.len()).sum(),
            queues().map(|queue| queue.capacity).sum(),
        )
    }

    pub(crate) fn contains(&self, id: SharedReceiveQueueId) -> bool {
        self.get(id).is_some()
    }

    fn add(
        &mut self,
        queue: Queue,
        config: &EndpointConfig,
    ) -> Result<SharedReceiveQueueId, CreateError> {
        let limit = config.max_shared_receive_queues;
        let index = match self.queues.iter().position(Option::is_none) {
            Some(index) => index,
            None if self.queues.len() < limit => {
                self.queues.push(None);
                self.queues.len() - 1
            }
            None => return Err(CreateError::TooMany { what: "shared receive queues", limit }),
        };
        self.queues[index] = Some(SharedReceiveQueue { queue, limit: 0 });
        Ok(SharedReceiveQueueId(index as u32))
    }
}

impl<M> Shared<M> {
    /// Takes the next request of a shared queue, and its pieces into `list`.
    fn take_shared(
        &mut self,
        id: SharedReceiveQueueId,
        list: &mut ScatterGather,
    ) -> Option<Receive> {
        let entry = self.receive_queues.get_mut(id)?;
        let taken = entry.queue.take(list)?;
        if entry.queue.requests.len() < entry.limit {
            entry.limit = 0;
            self.event(AsyncEvent::SharedReceiveLimit(id));
        }
        Some(taken)
    }
}

impl<M: Memory> Endpoint<M> {
    /// Makes a queue of at most `capacity` receive requests for several queue pairs. The pieces of
    /// its requests are of regions of `domain`, whatever domain the queue pairs are of.
    pub fn create_shared_receive_queue(
        &mut self,
        domain: ProtectionDomainId,
        capacity: usize,
    ) -> Result<SharedReceiveQueueId, CreateError> {
        let limit = self.shared.config.max_work_requests;
        if capacity == 0 || capacity > limit {
            let what = "shared receive queue capacity";
            return Err(CreateError::OutOfRange { what, value: capacity, limit });
        }
        self.shared.receive_queues.add(Queue::new(domain, capacity), &self.shared.config)
    }

    /// Removes a queue that no queue pair uses. Its requests end without completions.
    pub fn destroy_shared_receive_queue(
        &mut self,
        id: SharedReceiveQueueId,
    ) -> Result<(), CreateError> {
        if self.receives_of_queue_pairs().any(|receives| receives.shared == Some(id)) {
            return Err(CreateError::SharedReceiveQueueInUse(id));
        }
        let entry = self.shared.receive_queues.queues.get_mut(id.0 as usize);
        let removed = entry.and_then(Option::take).map(drop);
        removed.ok_or(CreateError::UnknownSharedReceiveQueue(id))
    }

    /// Asks for one [`AsyncEvent::SharedReceiveLimit`], when a request is taken and fewer than
    /// `limit` are left. 0 asks for none.
    pub fn set_shared_receive_limit(
        &mut self,
        id: SharedReceiveQueueId,
        limit: usize,
    ) -> Result<(), CreateError> {
        let unknown = CreateError::UnknownSharedReceiveQueue(id);
        let entry = self.shared.receive_queues.get_mut(id).ok_or(unknown)?;
        let capacity = entry.queue.capacity;
        if limit > capacity {
            let what = "shared receive limit";
            return Err(CreateError::OutOfRange { what, value: limit, limit: capacity });
        }
        entry.limit = limit;
        Ok(())
    }

    /// How many requests wait in a shared receive queue.
    pub fn shared_receives_waiting(&self, id: SharedReceiveQueueId) -> usize {
        self.shared.receive_queues.get(id).map_or(0, |entry| entry.queue.requests.len())
    }

    /// Appends a request to a shared receive queue.
    pub fn post_shared_receive<P: AsRef<[Piece]>>(
        &mut self,
        id: SharedReceiveQueueId,
        request: &ReceiveRequest<P>,
    ) -> Result<(), PostError> {
        let entry = self.shared.receive_queues.get_mut(id);
        entry.ok_or(PostError::UnknownSharedReceiveQueue(id))?.queue.post(&request.borrowed())
    }
}
