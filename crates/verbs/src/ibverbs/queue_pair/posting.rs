//! Posting requests to the queue pairs of the system's devices.

use std::cell::RefCell;
use std::net::IpAddr;
use std::sync::atomic::Ordering;

use millstream_roce::{
    CompletionOperation, DatagramDestination, Piece, PostError, QueuePairState, ReceiveRequest,
    SendOperation, SendRequest, Transport,
};

use super::super::completion_queue::CompletionQueue;
use super::super::ffi::{self, qp_mask};
use super::super::lock;
use super::super::objects::{self, Errno};
use super::super::receive_batch::{self, gather};
use super::super::work::{self, Handover, Posted, Poster};
use super::{ERR, QueuePair};
use crate::Atomicity;

/// The most requests handed to the device at a time.
pub(super) const BATCH: usize = receive_batch::LENGTH;

thread_local! {
    /// Kept for their allocation.
    static LISTS: RefCell<(Vec<ffi::Sge>, Vec<ffi::SendWr>)> = const {
        RefCell::new((Vec::new(), Vec::new()))
    };
}

impl QueuePair {
    pub(crate) fn post_send<P: AsRef<[Piece]>>(
        &self,
        requests: &[SendRequest<P>],
    ) -> Result<(), (usize, PostError)> {
        self.post(requests, None)
    }

    pub(crate) fn post_send_inline<P: AsRef<[Piece]>>(
        &self,
        request: &SendRequest<P>,
        bytes: &[u8],
    ) -> Result<(), PostError> {
        request.check_inline(self.number(), bytes, self.capabilities.max_inline)?;
        self.post(std::slice::from_ref(request), Some(bytes)).map_err(|(_, error)| error)
    }

    /// Posts requests, or one with its inline bytes.
    fn post<P: AsRef<[Piece]>>(
        &self,
        requests: &[SendRequest<P>],
        inline: Option<&[u8]>,
    ) -> Result<(), (usize, PostError)> {
        let mut poster = self.work().send.poster();
        let state = self.posting_state(QueuePairState::takes_sends)?;
        let limits = self.device.attributes();
        let datagrams = self.work().transport == Transport::UnreliableDatagram;
        let check = |poster: &Poster<'_>, request: &SendRequest<P>, sequence| {
            request.check_pieces()?;
            let length = request.length();
            if datagrams {
                let to = self.check_datagram(request, length, limits.max_datagram_length)?;
                return self.prepare(to, sequence, poster.oldest());
            }
            if request.datagram.is_some() {
                return Err(PostError::DestinationNotAllowed(self.number()));
            }
            let limit = limits.max_message_length;
            if length > limit.into() {
                return Err(PostError::TooLong { length, limit });
            }
            request.operation.check_atomic(length)?;
            if request.operation.is_atomic() && limits.atomicity == Atomicity::None {
                return Err(PostError::Unsupported { what: "atomic operations" });
            }
            if request.operation.fetches()
                && state != QueuePairState::Error
                && !self.reads.load(Ordering::Acquire)
            {
                return Err(PostError::NoReads(self.number()));
            }
            Ok(())
        };
        let limit = self.capabilities.max_send_requests;
        let posted = in_batches(requests, BATCH, &mut poster, limit, check, |poster, batch| {
            self.hand_over_sends(poster, batch, inline)
        });
        drop(poster);
        self.conclude("ibv_post_send", limit, requests.len(), posted)
    }

    /// Whether it is a datagram, and where to.
    fn check_datagram<P>(
        &self,
        request: &SendRequest<P>,
        length: u64,
        limit: u32,
    ) -> Result<IpAddr, PostError> {
        let destination = request.datagram.ok_or(PostError::DestinationMissing(self.number()))?;
        if !matches!(request.operation, SendOperation::Send { .. }) {
            return Err(PostError::NotADatagram(self.number()));
        }
        if length > limit.into() {
            return Err(PostError::TooLong { length, limit });
        }
        let (local, remote) = (self.device.address(), destination.address);
        if local.is_ipv4() != remote.is_ipv4() {
            return Err(PostError::AddressFamily { local, remote });
        }
        Ok(remote)
    }

    /// Makes sure that there is an address handle for the request with this sequence number.
    fn prepare(&self, to: IpAddr, sequence: u32, oldest: u32) -> Result<(), PostError> {
        let make = || objects::AddressHandle::create(&self.domain, &self.way_to(to.into()));
        lock(&self.destinations)
            .prepare(to, sequence, oldest, make)
            .map_err(|code| PostError::System { call: "ibv_create_ah", code })
    }

    fn hand_over_sends<P: AsRef<[Piece]>>(
        &self,
        poster: &mut Poster<'_>,
        batch: &[SendRequest<P>],
        inline: Option<&[u8]>,
    ) -> Handover {
        let (sequence, _) = poster.next();
        let (mut pieces, mut native) = LISTS.take();
        pieces.clear();
        native.clear();
        let destinations = lock(&self.destinations);
        for (index, request) in batch.iter().enumerate() {
            let mut num_sge = gather(request.pieces.as_ref(), &mut pieces);
            if let Some(bytes) = inline {
                // Read before `ibv_post_send` returns; no key is looked at.
                let (addr, length) = (bytes.as_ptr().expose_provenance() as u64, bytes.len());
                pieces.push(ffi::Sge { addr, length: length as u32, lkey: 0 });
                num_sge = 1;
            }
            let sequence = sequence.wrapping_add(index as u32);
            let mut entry = ffi::SendWr {
                wr_id: work::number(self.send_owner.key, sequence),
                num_sge,
                ..EMPTY_SEND
            };
            let (opcode, immediate) = match request.operation {
                SendOperation::Send { immediate: None } => (ffi::WR_SEND, None),
                SendOperation::Send { immediate } => (ffi::WR_SEND_WITH_IMM, immediate),
                SendOperation::SendInvalidate { .. } => (ffi::WR_SEND_WITH_INV, None),
                SendOperation::Write { remote_address: remote_addr, remote_key, immediate } => {
                    entry.wr.rdma = ffi::Rdma { remote_addr, rkey: remote_key };
                    let opcode = match immediate {
                        None => ffi::WR_RDMA_WRITE,
                        Some(_) => ffi::WR_RDMA_WRITE_WITH_IMM,
                    };
                    (opcode, immediate)
                }
                SendOperation::Read { remote_address: remote_addr, remote_key } => {
                    entry.wr.rdma = ffi::Rdma { remote_addr, rkey: remote_key };
                    (ffi::WR_RDMA_READ, None)
                }
                SendOperation::CompareSwap { remote_address, remote_key, compare, swap } => {
                    entry.wr.atomic = ffi::Atomic {
                        remote_addr: remote_address,
                        compare_add: compare,
                        swap,
                        rkey: remote_key,
                    };
                    (ffi::WR_ATOMIC_CMP_AND_SWP, None)
                }
                SendOperation::FetchAdd { remote_address, remote_key, add } => {
                    entry.wr.atomic = ffi::Atomic {
                        remote_addr: remote_address,
                        compare_add: add,
                        swap: 0,
                        rkey: remote_key,
                    };
                    (ffi::WR_ATOMIC_FETCH_AND_ADD, None)
                }
            };
            if let Some(DatagramDestination { address, qpn, queue_key }) = request.datagram {
                // Prepared when the request was checked.
                let handle = destinations.get(address);
                let ah = handle.map_or(std::ptr::null_mut(), objects::AddressHandle::as_ptr);
                entry.wr.ud = ffi::Ud { ah, remote_qpn: qpn.value(), remote_qkey: queue_key };
            }
            entry.opcode = opcode;
            entry.imm_data = match request.operation {
                SendOperation::SendInvalidate { remote_key } => remote_key,
                _ => immediate.unwrap_or(0).to_be(),
            };
            if inline.is_some() {
                entry.send_flags |= ffi::SEND_INLINE;
            }
            if request.fence {
                entry.send_flags |= ffi::SEND_FENCE;
            }
            if request.signaled {
                entry.send_flags |= ffi::SEND_SIGNALED;
            }
            if request.solicited {
                entry.send_flags |= ffi::SEND_SOLICITED;
            }
            native.push(entry);
        }
        let mut next = pieces.as_mut_ptr();
        for entry in &mut native {
            entry.sg_list = next;
            next = next.wrapping_add(entry.num_sge as usize);
        }
        let noted = batch.iter().map(|request| Posted {
            id: request.id,
            operation: request.operation.completes_as(),
            length: inline.map_or_else(|| request.length(), |bytes| bytes.len() as u64) as u32,
        });
        // SAFETY: each `sg_list` is the place in `pieces` from which `num_sge` of them are its own.
        let posted = poster.hand_over(noted, || unsafe { self.pair.native.post_send(&mut native) });
        LISTS.set((pieces, native));
        posted
    }

    pub(crate) fn post_receive<P: AsRef<[Piece]>>(
        &self,
        requests: &[ReceiveRequest<P>],
    ) -> Result<(), (usize, PostError)> {
        if self.shared_receives.is_some() {
            return Err((0, PostError::SharedReceives(self.number())));
        }
        let mut poster = self.work().receive.poster();
        self.posting_state(|state| state != QueuePairState::Reset)?;
        let limit = self.capabilities.max_receive_requests;
        let posted = in_batches(
            requests,
            BATCH,
            &mut poster,
            limit,
            |_, request, _| request.check_pieces(),
            |poster, batch| self.hand_over_receives(poster, batch),
        );
        // Looked at after posting: one that failed meanwhile may have missed the new requests.
        if !poster.is_shut()
            && (self.work().failed() || *lock(&self.state) == QueuePairState::Error)
        {
            self.flush_receives();
        }
        drop(poster);
        self.conclude("ibv_post_recv", limit, requests.len(), posted)
    }

    /// Receives that are posted in the error state are flushed at once (IBTA 10.8.3.1). Some
    /// devices, rxe among them, do not look at the queue again by themselves; a second transition
    /// to the error state makes them.
    fn flush_receives(&self) {
        let native = ffi::QpAttr { qp_state: ERR, ..ffi::QpAttr::default() };
        if let Err(code) = self.pair.native.modify(&native, qp_mask::STATE) {
            tracing::debug!("{:?}: flushing receives failed with error {code}", self.number());
        }
    }

    /// What the caller, who holds no poster any more, is told of `count` requests.
    fn conclude(
        &self,
        call: &'static str,
        limit: usize,
        count: usize,
        Batches { accepted, shut, ended }: Batches,
    ) -> Result<(), (usize, PostError)> {
        if shut {
            self.pair.queues().for_each(CompletionQueue::flush);
        }
        let error = match ended {
            None => return Ok(()),
            Some(Ended::Refused(error)) => error,
            // The driver's queue is full.
            Some(Ended::Device(libc::ENOMEM)) => PostError::QueueFull { limit },
            Some(Ended::Device(code)) => PostError::System { call, code },
            Some(Ended::Unknown(code)) => {
                // Which of them it has is certain only once it works on none.
                self.device.registry().fail_by(call, code);
                PostError::DeviceFailed
            }
        };
        // Those that the device may have end in a flush: all were accepted.
        if accepted == count { Ok(()) } else { Err((accepted, error)) }
    }

    fn hand_over_receives<P: AsRef<[Piece]>>(
        &self,
        poster: &mut Poster<'_>,
        batch: &[ReceiveRequest<P>],
    ) -> Handover {
        let (sequence, _) = poster.next();
        let noted = batch.iter().map(|request| Posted {
            id: request.id,
            operation: CompletionOperation::Receive,
            length: 0,
        });
        poster.hand_over(noted, || {
            receive_batch::with(
                batch,
                |index| {
                    let sequence = sequence.wrapping_add(index as u32);
                    work::number(self.receive_owner.key, sequence)
                },
                // SAFETY: the lists are those of the batch.
                |native| unsafe { self.pair.native.post_receive(native) },
            )
        })
    }

    /// The state for a request that is posted now, if requests of its kind are `allowed` in it.
    fn posting_state(
        &self,
        allowed: impl Fn(QueuePairState) -> bool,
    ) -> Result<QueuePairState, (usize, PostError)> {
        if self.device.failed() {
            return Err((0, PostError::DeviceFailed));
        }
        let brought_to = *lock(&self.state);
        let state = if self.work().failed() { QueuePairState::Error } else { brought_to };
        if allowed(state) {
            Ok(state)
        } else {
            Err((0, PostError::State { qpn: self.number(), state }))
        }
    }
}

/// How far posting a list of requests came.
#[derive(Debug, Eq, PartialEq)]
struct Batches {
    /// So many end in completions.
    accepted: usize,
    /// Some were only noted.
    shut: bool,
    /// Why it ended early.
    ended: Option<Ended>,
}

#[derive(Debug, Eq, PartialEq)]
enum Ended {
    /// Before the device was asked.
    Refused(PostError),
    /// By the device, with this error number.
    Device(Errno),
    /// By the device, which may work on any of the accepted ones.
    Unknown(Errno),
}

/// Posts requests in batches of up to `length`, as long as they pass `check`, which is told the sequence number that
/// they would get, and the queue, of `limit`, has room.
fn in_batches<R>(
    requests: &[R],
    length: usize,
    poster: &mut Poster<'_>,
    limit: usize,
    mut check: impl FnMut(&Poster<'_>, &R, u32) -> Result<(), PostError>,
    mut post: impl FnMut(&mut Poster<'_>, &[R]) -> Handover,
) -> Batches {
    let (mut accepted, mut shut) = (0, false);
    for batch in requests.chunks(length) {
        let (first, room) = poster.next();
        let mut refused = batch.iter().enumerate().find_map(|(i, request)| {
            let sequence = first.wrapping_add(i as u32);
            Some((i, check(poster, request, sequence).err()?))
        });
        if refused.map_or(batch.len(), |(index, _)| index) > room {
            refused = Some((room, PostError::QueueFull { limit }));
        }
        let good = &batch[..refused.map_or(batch.len(), |(index, _)| index)];
        if !good.is_empty() {
            let ended = match post(poster, good) {
                Handover::Refused(count, code) => {
                    accepted += count;
                    return Batches { accepted, shut, ended: Some(Ended::Device(code)) };
                }
                Handover::Unknown(code) => Some(Ended::Unknown(code)),
                Handover::Taken => None,
                Handover::Shut => {
                    shut = true;
                    None
                }
            };
            accepted += good.len();
            if ended.is_some() {
                return Batches { accepted, shut, ended };
            }
        }
        if let Some((_, error)) = refused {
            return Batches { accepted, shut, ended: Some(Ended::Refused(error)) };
        }
    }
    Batches { accepted, shut, ended: None }
}

const EMPTY_SEND: ffi::SendWr = ffi::SendWr {
    wr_id: 0,
    next: std::ptr::null_mut(),
    sg_list: std::ptr::null_mut(),
    num_sge: 0,
    opcode: 0,
    send_flags: 0,
    imm_data: 0,
    wr: ffi::Wr { atomic: ffi::Atomic { remote_addr: 0, compare_add: 0, swap: 0, rkey: 0 } },
    _rest: [0; 7],
};

#[cfg(test)]
mod tests {
    use millstream_wire::Qpn;

    use super::super::super::work::Work;
    use super::*;

    #[test]
    fn batches_stop_at_the_first_refusal_and_count_what_was_accepted() {
        let requests: Vec<u32> = (0..40).collect();
        let (limit, bad_request) = (64, PostError::NoReads(Qpn::new(1)));
        let result = |accepted, ended| Batches { accepted, shut: false, ended };
        for bad in [0, 1, 15, 16, 33, 39, 40] {
            let work = Work::new(Qpn::new(7), limit, 1);
            let check = |_: &Poster<'_>, &request: &u32, _| {
                if request == bad { Err(bad_request) } else { Ok(()) }
            };
            let mut posted = Vec::new();
            let batches =
                in_batches(&requests, 16, &mut work.send.poster(), limit, check, |_, batch| {
                    assert!(!batch.is_empty() && batch.len() <= 16);
                    posted.extend_from_slice(batch);
                    Handover::Taken
                });
            assert_eq!(posted, (0..bad).collect::<Vec<_>>());
            let ended = (bad < 40).then_some(Ended::Refused(bad_request));
            assert_eq!(batches, result(bad as usize, ended));
        }
        // What the device says in the second batch.
        for (handover, expected) in [
            (Handover::Refused(3, 5), result(19, Some(Ended::Device(5)))),
            (Handover::Unknown(5), result(32, Some(Ended::Unknown(5)))),
            (Handover::Shut, Batches { shut: true, ..result(40, None) }),
        ] {
            let work = Work::new(Qpn::new(7), limit, 1);
            let post = |_: &mut Poster<'_>, batch: &[u32]| {
                if batch[0] == 16 { handover } else { Handover::Taken }
            };
            let batches =
                in_batches(&requests, 16, &mut work.send.poster(), limit, |_, _, _| Ok(()), post);
            assert_eq!(batches, expected);
        }
    }

    #[test]
    fn batches_stop_when_the_queue_is_full() {
        for limit in [1, 16, 33, 40] {
            let work = Work::new(Qpn::new(7), limit, 1);
            let mut poster = work.send.poster();
            let post = |poster: &mut Poster<'_>, batch: &[u32]| {
                assert_eq!(poster.next().0, batch[0]);
                let operation = CompletionOperation::Send;
                let noted = batch.iter().map(|_| Posted { id: 0, operation, length: 0 });
                poster.hand_over(noted, || Ok(()))
            };
            let requests: Vec<u32> = (0..40).collect();
            let batches = in_batches(&requests, 16, &mut poster, limit, |_, _, _| Ok(()), post);
            let full = Some(Ended::Refused(PostError::QueueFull { limit }));
            let ended = if limit == 40 { None } else { full };
            assert_eq!(batches, Batches { accepted: limit, shut: false, ended });
            assert_eq!(poster.next(), (limit as u32, 0));
            // A batch that nothing of is accepted is not handed over at all.
            let never = |_: &mut Poster<'_>, _: &[u32]| unreachable!();
            let full = Some(Ended::Refused(PostError::QueueFull { limit }));
            let batches = in_batches(&[1], 16, &mut poster, limit, |_, _, _| Ok(()), never);
            assert_eq!(batches, Batches { accepted: 0, shut: false, ended: full });
        }
    }
}
