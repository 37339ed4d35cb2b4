//! Queue pairs of the system's devices.

use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use millstream_roce::{
    Attribute, CompletionOperation, CreateError, ModifyError, Piece, PostError,
    QueuePairAttributes, QueuePairCapabilities, QueuePairState, ReceiveRequest, SendOperation,
    SendRequest, Transport,
};
use millstream_wire::{Mtu, Qpn};

use super::completion_queue::CompletionQueue;
use super::device::Device;
use super::ffi::{self, qp_mask};
use super::memory_region::ProtectionDomain;
use super::objects::Errno;
use super::work::{self, Owner, Posted, Work, WorkQueue};
use super::{lock, objects};
use crate::MAX_SCATTER_GATHER;

/// Requests handed to the device at a time.
const BATCH: usize = 16;

/// Routers that a packet may pass.
const HOP_LIMIT: u8 = 64;

/// A reliable-connection queue pair.
pub(crate) struct QueuePair {
    device: Arc<Device>,
    work: Arc<Work>,
    capabilities: QueuePairCapabilities,
    /// The state that it was brought to; it may have failed since.
    state: Mutex<QueuePairState>,
    /// Whether it was connected with room for READs.
    reads: AtomicBool,
    /// Held while requests are handed over, so that they are noted in the order that the device
    /// gets them in. Completing needs neither.
    sending: Mutex<()>,
    receiving: Mutex<()>,
    // Dropped in this order: completions of a queue pair are awaited as long as it exists.
    pair: objects::QueuePair,
    send_owner: Registration,
    receive_owner: Registration,
}

/// A queue's place among those that complete into a completion queue.
struct Registration {
    queue: Arc<CompletionQueue>,
    key: u32,
}

impl Registration {
    fn new(
        queue: &Arc<CompletionQueue>,
        work: &Arc<Work>,
        receives: bool,
    ) -> Result<Self, CreateError> {
        let owner = Owner { work: Arc::clone(work), receives };
        let (what, limit) = ("queues that complete into one completion queue", 1 << 16);
        let key = queue.add_owner(owner).ok_or(CreateError::TooMany { what, limit })?;
        Ok(Self { queue: Arc::clone(queue), key })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.queue.remove_owner(self.key);
    }
}

impl QueuePair {
    pub(crate) fn create(
        domain: &ProtectionDomain,
        send_completions: &Arc<CompletionQueue>,
        receive_completions: &Arc<CompletionQueue>,
        capabilities: QueuePairCapabilities,
    ) -> Result<Self, CreateError> {
        let device = &domain.device;
        for queue in [send_completions, receive_completions] {
            if !Arc::ptr_eq(queue.device(), device) {
                return Err(CreateError::UnknownCompletionQueue(queue.id()));
            }
        }
        if device.failed() {
            return Err(CreateError::DeviceFailed);
        }
        let pd = domain
            .domain
            .as_ref()
            .map_err(|&code| CreateError::System { call: "ibv_alloc_pd", code })?;
        let limits = device.attributes();
        let QueuePairCapabilities { max_send_requests, max_receive_requests, .. } = capabilities;
        for (what, value) in [
            ("max_send_requests", max_send_requests),
            ("max_receive_requests", max_receive_requests),
        ] {
            let limit = limits.max_work_requests;
            if value == 0 || value > limit {
                return Err(CreateError::OutOfRange { what, value, limit });
            }
        }
        let pieces = limits.max_scatter_gather as u32;
        let cap = ffi::QpCap {
            max_send_wr: max_send_requests as u32,
            max_recv_wr: max_receive_requests as u32,
            max_send_sge: pieces,
            max_recv_sge: pieces,
            max_inline_data: 0,
        };
        let pair = objects::QueuePair::create(
            pd,
            send_completions.object(),
            receive_completions.object(),
            cap,
        )
        .map_err(|code| CreateError::System { call: "ibv_create_qp", code })?;
        let qpn = Qpn::new(pair.number());
        let work = Arc::new(Work::new(qpn, max_send_requests, max_receive_requests));
        let send_owner = Registration::new(send_completions, &work, false)?;
        let receive_owner = Registration::new(receive_completions, &work, true)?;
        device.registry().enter_pair(&work);
        Ok(Self {
            device: Arc::clone(device),
            work,
            capabilities,
            state: Mutex::default(),
            reads: AtomicBool::new(false),
            sending: Mutex::default(),
            receiving: Mutex::default(),
            pair,
            send_owner,
            receive_owner,
        })
    }

    pub(crate) fn number(&self) -> Qpn {
        self.work.qpn
    }

    pub(crate) fn state(&self) -> QueuePairState {
        let brought_to = *lock(&self.state);
        self.state_from(brought_to)
    }

    /// The state now, when it was brought to this one.
    fn state_from(&self, brought_to: QueuePairState) -> QueuePairState {
        if self.work.failed() {
            return QueuePairState::Error;
        }
        // It can fail without a completion, as a responder does.
        match self.pair.state() {
            Ok((SQE | ERR, _)) => QueuePairState::Error,
            _ => brought_to,
        }
    }

    /// Whether it is in SQD and still finishes requests.
    fn is_draining(&self) -> bool {
        matches!(self.pair.state(), Ok((_, true)))
    }

    pub(crate) fn modify(&self, attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
        if self.device.failed() {
            return Err(ModifyError::DeviceFailed);
        }
        let mut state = lock(&self.state);
        let from = self.state_from(*state);
        let to = attributes.check(Transport::ReliableConnection, from, self.device.address())?;
        self.check_path_mtu(attributes)?;
        let closes = matches!(to, QueuePairState::Reset | QueuePairState::Error);
        if from == QueuePairState::SendQueueDrained && !closes && self.is_draining() {
            return Err(ModifyError::Draining(self.number()));
        }
        let (native, mask) = self.translate(attributes, from, to);
        match to {
            // Completions that it has had stay; the device may drop them at the reset.
            QueuePairState::Reset => self.settle(),
            QueuePairState::Error => self.work.close(),
            _ => {}
        }
        self.pair
            .modify(&native, mask)
            .map_err(|code| ModifyError::System { call: "ibv_modify_qp", code })?;
        match to {
            QueuePairState::Reset => {
                self.work.reset();
                self.reads.store(false, Ordering::Release);
            }
            QueuePairState::ReadyToSend | QueuePairState::SendQueueDrained => {
                if let Some(depth) = attributes.initiator_depth {
                    self.reads.store(depth > 0, Ordering::Release);
                }
            }
            _ => {}
        }
        *state = to;
        Ok(())
    }

    /// Devices refuse a path MTU beyond the port's without saying why; the kernel's own takes it,
    /// and then drops the packets.
    fn check_path_mtu(&self, attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
        let Some((wanted, peer)) = attributes.path_mtu.zip(attributes.remote_address) else {
            return Ok(());
        };
        match self.device.path_mtu(peer) {
            Ok(limit) if wanted > limit => Err(ModifyError::OutOfRange {
                attribute: Attribute::PathMtu,
                value: wanted.bytes() as u64,
                range: "256 to the port's active MTU, see Device::path_mtu",
            }),
            _ => Ok(()),
        }
    }

    /// As the library takes them. Port, partition and address vector are what is fixed here.
    fn translate(
        &self,
        attributes: &QueuePairAttributes,
        from: QueuePairState,
        to: QueuePairState,
    ) -> (ffi::QpAttr, i32) {
        let mut native = ffi::QpAttr { qp_state: state_number(to), ..ffi::QpAttr::default() };
        let mut mask = qp_mask::STATE;
        if (from, to) == (QueuePairState::Reset, QueuePairState::Initialized) {
            native.port_num = self.device.port();
            mask |= qp_mask::PKEY_INDEX | qp_mask::PORT;
        }
        if let Some(index) = attributes.partition_key_index {
            native.pkey_index = index;
            mask |= qp_mask::PKEY_INDEX;
        }
        if from != to && to == QueuePairState::SendQueueDrained {
            native.en_sqd_async_notify = 1;
            mask |= qp_mask::EN_SQD_ASYNC_NOTIFY;
        }
        if let Some(access) = attributes.access {
            native.qp_access_flags = access.bits();
            mask |= qp_mask::ACCESS_FLAGS;
        }
        if let Some(remote) = attributes.remote_address {
            let grh = ffi::GlobalRoute {
                dgid: ffi::Gid(gid_of(remote)),
                sgid_index: self.device.gid_index(),
                hop_limit: HOP_LIMIT,
                ..ffi::GlobalRoute::default()
            };
            let port_num = self.device.port();
            native.ah_attr = ffi::AhAttr { grh, is_global: 1, port_num, ..ffi::AhAttr::default() };
            mask |= qp_mask::AV;
        }
        if let Some(mtu) = attributes.path_mtu {
            native.path_mtu = mtu_number(mtu);
            mask |= qp_mask::PATH_MTU;
        }
        if let Some(qpn) = attributes.destination_qpn {
            native.dest_qp_num = qpn.value();
            mask |= qp_mask::DEST_QPN;
        }
        if let Some(psn) = attributes.receive_psn {
            native.rq_psn = psn.value();
            mask |= qp_mask::RQ_PSN;
        }
        if let Some(psn) = attributes.send_psn {
            native.sq_psn = psn.value();
            mask |= qp_mask::SQ_PSN;
        }
        for (value, place, bit) in [
            (
                attributes.responder_resources,
                &mut native.max_dest_rd_atomic,
                qp_mask::MAX_DEST_RD_ATOMIC,
            ),
            (attributes.minimum_rnr_timer, &mut native.min_rnr_timer, qp_mask::MIN_RNR_TIMER),
            (attributes.timeout, &mut native.timeout, qp_mask::TIMEOUT),
            (attributes.retry_count, &mut native.retry_cnt, qp_mask::RETRY_CNT),
            (attributes.rnr_retry, &mut native.rnr_retry, qp_mask::RNR_RETRY),
            (attributes.initiator_depth, &mut native.max_rd_atomic, qp_mask::MAX_QP_RD_ATOMIC),
        ] {
            if let Some(value) = value {
                *place = value;
                mask |= bit;
            }
        }
        (native, mask)
    }

    pub(crate) fn post_send(&self, requests: &[SendRequest]) -> Result<(), (usize, PostError)> {
        let _alone = lock(&self.sending);
        let state = self.posting_state(|state| state.takes_sends())?;
        let longest = self.device.attributes().max_message_length;
        let check = |request: &SendRequest| {
            let length = request.pieces.length();
            if length > longest.into() {
                return Err(PostError::TooLong { length, limit: longest });
            }
            let read = matches!(request.operation, SendOperation::Read { .. });
            if read && state != QueuePairState::Error && !self.reads.load(Ordering::Acquire) {
                return Err(PostError::NoReads(self.number()));
            }
            Ok(())
        };
        let limit = self.capabilities.max_send_requests;
        in_batches(requests, &self.work.send, limit, check, |batch, sequence| {
            self.hand_over_sends(batch, sequence)
        })
    }

    fn hand_over_sends(
        &self,
        batch: &[SendRequest],
        sequence: u32,
    ) -> Result<(), (usize, PostError)> {
        let mut pieces = [[ffi::Sge::default(); MAX_SCATTER_GATHER]; BATCH];
        let mut native = [EMPTY_SEND; BATCH];
        let native = &mut native[..batch.len()];
        for (index, request) in batch.iter().enumerate() {
            let list = &mut pieces[index];
            let num_sge = gather(request.pieces.pieces(), list);
            let sequence = sequence.wrapping_add(index as u32);
            let entry = &mut native[index];
            entry.wr_id = work::number(self.send_owner.key, sequence);
            entry.sg_list = list.as_mut_ptr();
            entry.num_sge = num_sge;
            let (opcode, remote, immediate) = match request.operation {
                SendOperation::Send { immediate: None } => (ffi::WR_SEND, None, None),
                SendOperation::Send { immediate } => (ffi::WR_SEND_WITH_IMM, None, immediate),
                SendOperation::Write { remote_address, remote_key, immediate } => {
                    let opcode = match immediate {
                        None => ffi::WR_RDMA_WRITE,
                        Some(_) => ffi::WR_RDMA_WRITE_WITH_IMM,
                    };
                    (opcode, Some((remote_address, remote_key)), immediate)
                }
                SendOperation::Read { remote_address, remote_key } => {
                    (ffi::WR_RDMA_READ, Some((remote_address, remote_key)), None)
                }
            };
            entry.opcode = opcode;
            if let Some((remote_addr, rkey)) = remote {
                entry.rdma = ffi::Rdma { remote_addr, rkey };
            }
            entry.imm_data = immediate.unwrap_or(0).to_be();
            if request.signaled {
                entry.send_flags |= ffi::SEND_SIGNALED;
            }
            if request.solicited {
                entry.send_flags |= ffi::SEND_SOLICITED;
            }
        }
        self.work.send.post(batch.iter().map(|request| Posted {
            id: request.id,
            operation: match request.operation {
                SendOperation::Send { .. } => CompletionOperation::Send,
                SendOperation::Write { .. } => CompletionOperation::Write,
                SendOperation::Read { .. } => CompletionOperation::Read,
            },
            length: request.pieces.length() as u32,
        }));
        // SAFETY: each `sg_list` is the entry of `pieces` with `num_sge` of them.
        let result = unsafe { self.pair.post_send(native) };
        result.map_err(|(accepted, code)| {
            self.work.send.retract((batch.len() - accepted) as u32);
            let limit = self.capabilities.max_send_requests;
            (accepted, post_error("ibv_post_send", code, limit))
        })
    }

    pub(crate) fn post_receive(
        &self,
        requests: &[ReceiveRequest],
    ) -> Result<(), (usize, PostError)> {
        let _alone = lock(&self.receiving);
        self.posting_state(|state| state != QueuePairState::Reset)?;
        let limit = self.capabilities.max_receive_requests;
        let posted = in_batches(
            requests,
            &self.work.receive,
            limit,
            |_| Ok(()),
            |batch, sequence| self.hand_over_receives(batch, sequence),
        );
        // Looked at after posting: one that failed meanwhile may have missed the new requests.
        if self.work.failed() || *lock(&self.state) == QueuePairState::Error {
            self.flush_receives();
        }
        posted
    }

    /// Receives that are posted in the error state are flushed at once (IBTA 10.8.3.1). Some
    /// devices, rxe among them, do not look at the queue again by themselves; a second transition
    /// to the error state makes them.
    fn flush_receives(&self) {
        let native = ffi::QpAttr { qp_state: ERR, ..ffi::QpAttr::default() };
        if let Err(code) = self.pair.modify(&native, qp_mask::STATE) {
            tracing::debug!("{:?}: flushing receives failed with error {code}", self.number());
        }
    }

    fn hand_over_receives(
        &self,
        batch: &[ReceiveRequest],
        sequence: u32,
    ) -> Result<(), (usize, PostError)> {
        let mut pieces = [[ffi::Sge::default(); MAX_SCATTER_GATHER]; BATCH];
        let mut native = [EMPTY_RECEIVE; BATCH];
        let native = &mut native[..batch.len()];
        for (index, request) in batch.iter().enumerate() {
            let list = &mut pieces[index];
            let num_sge = gather(request.pieces.pieces(), list);
            let sequence = sequence.wrapping_add(index as u32);
            let entry = &mut native[index];
            entry.wr_id = work::number(self.receive_owner.key, sequence);
            entry.sg_list = list.as_mut_ptr();
            entry.num_sge = num_sge;
        }
        self.work.receive.post(batch.iter().map(|request| Posted {
            id: request.id,
            operation: CompletionOperation::Receive,
            length: 0,
        }));
        // SAFETY: each `sg_list` is the entry of `pieces` with `num_sge` of them.
        let result = unsafe { self.pair.post_receive(native) };
        result.map_err(|(accepted, code)| {
            self.work.receive.retract((batch.len() - accepted) as u32);
            let limit = self.capabilities.max_receive_requests;
            (accepted, post_error("ibv_post_recv", code, limit))
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
        let state = if self.work.failed() { QueuePairState::Error } else { brought_to };
        if allowed(state) {
            Ok(state)
        } else {
            Err((0, PostError::State { qpn: self.number(), state }))
        }
    }

    fn settle(&self) {
        self.send_owner.queue.settle();
        if !Arc::ptr_eq(&self.send_owner.queue, &self.receive_owner.queue) {
            self.receive_owner.queue.settle();
        }
    }
}

/// Posts requests in batches, as long as they pass `check` and `queue` has room; on error says how
/// many were accepted before.
fn in_batches<R>(
    requests: &[R],
    queue: &WorkQueue,
    limit: usize,
    check: impl Fn(&R) -> Result<(), PostError>,
    mut post: impl FnMut(&[R], u32) -> Result<(), (usize, PostError)>,
) -> Result<(), (usize, PostError)> {
    let mut done = 0;
    for batch in requests.chunks(BATCH) {
        let (sequence, room) = queue.next();
        let mut refused = batch.iter().enumerate().find_map(|(i, r)| Some((i, check(r).err()?)));
        if refused.map_or(batch.len(), |(index, _)| index) > room {
            refused = Some((room, PostError::QueueFull { limit }));
        }
        let good = &batch[..refused.map_or(batch.len(), |(index, _)| index)];
        if !good.is_empty() {
            post(good, sequence).map_err(|(accepted, error)| (done + accepted, error))?;
        }
        if let Some((index, error)) = refused {
            return Err((done + index, error));
        }
        done += batch.len();
    }
    Ok(())
}

/// Copies the pieces that have bytes; returns how many. To some devices a length of 0 means 2^31.
fn gather(pieces: &[Piece], list: &mut [ffi::Sge; MAX_SCATTER_GATHER]) -> i32 {
    let mut count = 0;
    for (piece, entry) in pieces.iter().filter(|piece| piece.length > 0).zip(list) {
        *entry = ffi::Sge { addr: piece.address, length: piece.length, lkey: piece.key };
        count += 1;
    }
    count
}

fn post_error(call: &'static str, code: Errno, limit: usize) -> PostError {
    match code {
        // The driver's queue is full.
        libc::ENOMEM => PostError::QueueFull { limit },
        _ => PostError::System { call, code },
    }
}

const EMPTY_SEND: ffi::SendWr = ffi::SendWr {
    wr_id: 0,
    next: std::ptr::null_mut(),
    sg_list: std::ptr::null_mut(),
    num_sge: 0,
    opcode: 0,
    send_flags: 0,
    imm_data: 0,
    rdma: ffi::Rdma { remote_addr: 0, rkey: 0 },
    _rest: [0; 9],
};

const EMPTY_RECEIVE: ffi::RecvWr =
    ffi::RecvWr { wr_id: 0, next: std::ptr::null_mut(), sg_list: std::ptr::null_mut(), num_sge: 0 };

/// Of `ibv_qp_state`.
const SQE: i32 = 5;
const ERR: i32 = 6;

const fn state_number(state: QueuePairState) -> i32 {
    match state {
        QueuePairState::Reset => 0,
        QueuePairState::Initialized => 1,
        QueuePairState::ReadyToReceive => 2,
        QueuePairState::ReadyToSend => 3,
        QueuePairState::SendQueueDrained => 4,
        QueuePairState::SendQueueError => SQE,
        QueuePairState::Error => ERR,
    }
}

/// Of `ibv_mtu`.
const fn mtu_number(mtu: Mtu) -> i32 {
    match mtu {
        Mtu::B256 => 1,
        Mtu::B512 => 2,
        Mtu::B1024 => 3,
        Mtu::B2048 => 4,
        Mtu::B4096 => 5,
    }
}

fn gid_of(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("QueuePair").field(&self.number()).finish()
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // Completions that it has had stay.
        self.settle();
        self.device.registry().release_pair(&self.work);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_stop_at_the_first_refusal_and_count_what_was_accepted() {
        let requests: Vec<u32> = (0..40).collect();
        let (limit, bad_request) = (64, PostError::NoReads(Qpn::new(1)));
        for bad in [0, 1, 15, 16, 33, 39, 40] {
            let work = Work::new(Qpn::new(7), limit, 1);
            let check = |&request: &u32| if request == bad { Err(bad_request) } else { Ok(()) };
            let mut posted = Vec::new();
            let result = in_batches(&requests, &work.send, limit, check, |batch, _| {
                assert!(!batch.is_empty() && batch.len() <= BATCH);
                posted.extend_from_slice(batch);
                Ok(())
            });
            assert_eq!(posted, (0..bad).collect::<Vec<_>>());
            assert_eq!(result, if bad == 40 { Ok(()) } else { Err((bad as usize, bad_request)) });
        }
        let work = Work::new(Qpn::new(7), limit, 1);
        let refuse_third =
            |batch: &[u32], _| if batch[0] == 16 { Err((3, bad_request)) } else { Ok(()) };
        let result = in_batches(&requests, &work.send, limit, |_| Ok(()), refuse_third);
        assert_eq!(result, Err((19, bad_request)));
    }

    #[test]
    fn batches_stop_when_the_queue_is_full() {
        for limit in [1, 16, 33, 40] {
            let work = Work::new(Qpn::new(7), limit, 1);
            let post = |batch: &[u32], sequence| {
                assert_eq!((sequence, sequence), (batch[0], work.send.next().0));
                let operation = CompletionOperation::Send;
                work.send.post(batch.iter().map(|_| Posted { id: 0, operation, length: 0 }));
                Ok(())
            };
            let requests: Vec<u32> = (0..40).collect();
            let result = in_batches(&requests, &work.send, limit, |_| Ok(()), post);
            let full = Err((limit, PostError::QueueFull { limit }));
            assert_eq!(result, if limit == 40 { Ok(()) } else { full });
            assert_eq!(work.send.next(), (limit as u32, 0));
            // A batch that nothing of is accepted is not handed over at all.
            let full = Err((0, PostError::QueueFull { limit }));
            let never = |_: &[u32], _| unreachable!();
            assert_eq!(in_batches(&[1], &work.send, limit, |_| Ok(()), never), full);
        }
    }

    #[test]
    fn pieces_without_bytes_are_left_out() {
        let piece = |key, length| Piece { key, address: 0x1000, length };
        let mut list = [ffi::Sge::default(); MAX_SCATTER_GATHER];
        let count = gather(&[piece(1, 0), piece(2, 5), piece(3, 0), piece(4, 6)], &mut list);
        assert_eq!((count, list[0].lkey, list[1].lkey, list[1].length), (2, 2, 4, 6));
    }
}
