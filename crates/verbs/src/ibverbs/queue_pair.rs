//! Queue pairs of the system's devices.

mod posting;

use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use millstream_roce::{
    Access, Attribute, CreateError, MAX_INLINE, ModifyError, PortAddress, QueuePairAttributes,
    QueuePairCapabilities, QueuePairState, Transport,
};
use millstream_wire::{Mtu, Psn, Qpn};

use self::posting::BATCH;
use super::address_handles::AddressHandles;
use super::completion_queue::CompletionQueue;
use super::device::Device;
use super::ffi::{self, qp_mask};
use super::memory_region::ProtectionDomain;
use super::objects::Errno;
use super::shared_receive_queue::SharedReceiveQueue;
use super::work::{Owner, Work};
use super::{lock, objects};

/// Routers that a packet may pass.
const HOP_LIMIT: u8 = 64;

/// A queue pair.
pub(crate) struct QueuePair {
    device: Arc<Device>,
    capabilities: QueuePairCapabilities,
    /// The state that it was brought to; it may have failed since.
    state: Mutex<QueuePairState>,
    /// Whether it was connected with room for READs.
    reads: AtomicBool,
    // Dropped in this order: completions of a queue pair are awaited as long as it exists.
    pair: Arc<Pair>,
    /// Of datagrams.
    destinations: Mutex<AddressHandles<objects::AddressHandle>>,
    domain: Arc<objects::Domain>,
    send_owner: Registration,
    receive_owner: Registration,
    shared_receives: Option<SharedRegistration>,
}

/// The part of a queue pair that its device's thread knows.
pub(super) struct Pair {
    pub(super) work: Arc<Work>,
    native: objects::QueuePair,
    /// Of sends and of receives.
    completions: [Arc<CompletionQueue>; 2],
    /// The number of the shared receive queue that it takes from.
    shared_receives: Option<u32>,
}

impl Pair {
    pub(super) fn completes_into(&self, queue: &Arc<CompletionQueue>) -> bool {
        self.completions.iter().any(|other| Arc::ptr_eq(other, queue))
    }

    pub(super) fn takes_from(&self, shared_receive_queue: u32) -> bool {
        self.shared_receives == Some(shared_receive_queue)
    }

    /// Makes sure that the device works on no request any more, and has those that are outstanding
    /// flushed. The caller holds no poster and no inbox.
    pub(super) fn stop(&self) {
        self.work.stop(|| {
            // What has completed has; a reset may drop it from the queues. If one of them cannot
            // be polled, what is in it is lost.
            let _ = self.settle();
            // Unlike the error state, which makes the device give up in its own time, a reset is
            // complete when the call returns.
            let native = ffi::QpAttr { qp_state: RESET, ..ffi::QpAttr::default() };
            if let Err(code) = self.native.modify(&native, qp_mask::STATE) {
                // A device that is gone does nothing any more either.
                let error = std::io::Error::from_raw_os_error(code);
                tracing::warn!("queue pair {} cannot be stopped: {error}", self.work.qpn);
            }
        });
        self.queues().for_each(CompletionQueue::flush);
    }

    /// Takes the completions that there are, so that they outlive the queue pair.
    fn settle(&self) -> Result<(), Errno> {
        self.queues().try_for_each(CompletionQueue::settle)
    }

    fn queues(&self) -> impl Iterator<Item = &CompletionQueue> {
        let [send, receive] = &self.completions;
        let other = (!Arc::ptr_eq(send, receive)).then_some(receive);
        std::iter::once(send).chain(other).map(Arc::as_ref)
    }
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

/// The place of a shared receive queue among those that complete into a completion queue.
struct SharedRegistration {
    completions: Arc<CompletionQueue>,
    queue: Arc<SharedReceiveQueue>,
}

impl SharedRegistration {
    fn new(completions: &Arc<CompletionQueue>, queue: Arc<SharedReceiveQueue>) -> Self {
        completions.add_shared(queue.work());
        Self { completions: Arc::clone(completions), queue }
    }
}

impl Drop for SharedRegistration {
    fn drop(&mut self) {
        self.completions.remove_shared(self.queue.work());
    }
}

impl QueuePair {
    /// With the queues where sends and receives complete.
    pub(crate) fn create(
        domain: &ProtectionDomain,
        completions: [Arc<CompletionQueue>; 2],
        shared_receives: Option<Arc<SharedReceiveQueue>>,
        transport: Transport,
        capabilities: QueuePairCapabilities,
    ) -> Result<Self, CreateError> {
        let device = &domain.device;
        if let Some(queue) = completions.iter().find(|queue| !Arc::ptr_eq(queue.device(), device)) {
            return Err(CreateError::UnknownCompletionQueue(queue.id()));
        }
        if let Some(queue) = shared_receives.as_ref()
            && !Arc::ptr_eq(queue.device(), device)
        {
            return Err(CreateError::UnknownSharedReceiveQueue(queue.id()));
        }
        let [send_completions, receive_completions] = &completions;
        if device.failed() {
            return Err(CreateError::DeviceFailed);
        }
        if transport == Transport::UnreliableDatagram && device.is_infiniband() {
            // Destinations of datagrams have no LID.
            return Err(CreateError::Unsupported(
                "unreliable datagrams, as its port is of InfiniBand",
            ));
        }
        let pd = domain
            .domain
            .as_ref()
            .map_err(|&code| CreateError::System { call: "ibv_alloc_pd", code })?;
        let limits = device.attributes();
        let max_send_requests = capabilities.max_send_requests;
        // With a shared queue it has none of its own.
        let own_receives = shared_receives.is_none();
        let max_receive_requests = if own_receives { capabilities.max_receive_requests } else { 0 };
        for (what, value, least) in [
            ("max_send_requests", max_send_requests, 1),
            ("max_receive_requests", max_receive_requests, usize::from(own_receives)),
        ] {
            let limit = limits.max_work_requests;
            if value < least || value > limit {
                return Err(CreateError::OutOfRange { what, value, limit });
            }
        }
        let (value, limit) = (capabilities.max_inline, MAX_INLINE);
        if value > limit {
            return Err(CreateError::OutOfRange { what: "max_inline", value, limit });
        }
        let pieces = limits.max_scatter_gather as u32;
        let cap = ffi::QpCap {
            max_send_wr: max_send_requests as u32,
            max_recv_wr: max_receive_requests as u32,
            max_send_sge: pieces,
            max_recv_sge: pieces,
            max_inline_data: capabilities.max_inline as u32,
        };
        let native = objects::QueuePair::create(
            pd,
            send_completions.object(),
            receive_completions.object(),
            shared_receives.as_ref().map(|queue| queue.object()),
            match transport {
                Transport::ReliableConnection => ffi::QP_TYPE_RC,
                Transport::UnreliableDatagram => ffi::QP_TYPE_UD,
            },
            cap,
        )
        .map_err(|code| CreateError::System { call: "ibv_create_qp", code })?;
        let qpn = Qpn::new(native.number());
        let work = Work::new(qpn, max_send_requests, max_receive_requests);
        let work = Arc::new(work.of(transport));
        let send_owner = Registration::new(send_completions, &work, false)?;
        let receive_owner = Registration::new(receive_completions, &work, true)?;
        let number = shared_receives.as_ref().map(|queue| queue.id().0);
        let shared_receives =
            shared_receives.map(|queue| SharedRegistration::new(receive_completions, queue));
        let pair = Arc::new(Pair { work, native, completions, shared_receives: number });
        if !device.registry().enter_pair(&pair) {
            return Err(CreateError::DeviceFailed);
        }
        Ok(Self {
            device: Arc::clone(device),
            capabilities,
            state: Mutex::default(),
            reads: AtomicBool::new(false),
            pair,
            destinations: Mutex::new(AddressHandles::new(max_send_requests + BATCH)),
            domain: Arc::clone(pd),
            send_owner,
            receive_owner,
            shared_receives,
        })
    }

    pub(crate) fn number(&self) -> Qpn {
        self.work().qpn
    }

    fn work(&self) -> &Work {
        &self.pair.work
    }

    pub(crate) fn state(&self) -> QueuePairState {
        let brought_to = *lock(&self.state);
        self.state_from(brought_to)
    }

    pub(crate) fn receive_psn(&self) -> Option<Psn> {
        self.pair.native.receive_psn().ok().map(Psn::new)
    }

    /// The state now, when it was brought to this one.
    fn state_from(&self, brought_to: QueuePairState) -> QueuePairState {
        if self.work().failed() {
            return QueuePairState::Error;
        }
        // It can fail without a completion, as a responder does.
        match self.pair.native.state() {
            Ok((SQE, _)) if self.work().transport == Transport::UnreliableDatagram => {
                QueuePairState::SendQueueError
            }
            Ok((SQE | ERR, _)) => QueuePairState::Error,
            _ => brought_to,
        }
    }

    /// Whether it is in SQD and still finishes requests.
    fn is_draining(&self) -> bool {
        matches!(self.pair.native.state(), Ok((_, true)))
    }

    pub(crate) fn modify(&self, attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
        if self.device.failed() {
            // What is under way ends here at the latest, which is what an error state and a reset
            // are for.
            self.pair.stop();
            return match attributes.state {
                Some(QueuePairState::Error) => Ok(()),
                _ => Err(ModifyError::DeviceFailed),
            };
        }
        // Nothing is posted meanwhile: a device that is given a request in the middle of a
        // transition may neither refuse nor complete it.
        let (mut send, mut receive) = (self.work().send.poster(), self.work().receive.poster());
        let mut state = lock(&self.state);
        let from = self.state_from(*state);
        let to = attributes.check(self.work().transport, from, self.device.port_address())?;
        self.check_path_mtu(attributes)?;
        let closes = matches!(to, QueuePairState::Reset | QueuePairState::Error);
        if from == QueuePairState::SendQueueDrained && !closes && self.is_draining() {
            return Err(ModifyError::Draining(self.number()));
        }
        let (native, mask) = self.translate(attributes, from, to);
        if to == QueuePairState::Reset {
            // Completions that it has had stay; the device may drop them at the reset.
            let settled = self.pair.settle();
            settled.map_err(|code| ModifyError::System { call: "ibv_poll_cq", code })?;
        }
        if (from, to) == (QueuePairState::Reset, QueuePairState::Error) {
            // Possible by the specification, and not by the kernel's table.
            let closed = match self.work().transport {
                Transport::ReliableConnection => QueuePairAttributes {
                    access: Some(Access::empty()),
                    ..QueuePairAttributes::default()
                },
                Transport::UnreliableDatagram => {
                    QueuePairAttributes { queue_key: Some(0), ..QueuePairAttributes::default() }
                }
            };
            let (native, mask) = self.translate(&closed, from, QueuePairState::Initialized);
            self.modify_native(&native, mask)?;
        }
        let told_before = to == QueuePairState::Error && self.work().close();
        self.modify_native(&native, mask).inspect_err(|_| {
            if to == QueuePairState::Error && !told_before {
                self.work().reopen();
            }
        })?;
        match to {
            QueuePairState::Reset => {
                self.work().reset(&mut send, &mut receive);
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

    fn modify_native(&self, native: &ffi::QpAttr, mask: i32) -> Result<(), ModifyError> {
        let call = "ibv_modify_qp";
        self.pair.native.modify(native, mask).map_err(|code| ModifyError::System { call, code })
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

    /// The way to a port. Packets have a global route header also in a subnet of InfiniBand, where it is not needed to
    /// get there: both ends of a connection must have said the same of it (devices drop what does not agree, as
    /// `qib_ruc_check_hdr` in Linux), and other transfer engines say that they have one.
    fn way_to(&self, remote: PortAddress) -> ffi::AhAttr {
        let grh = ffi::GlobalRoute {
            dgid: ffi::Gid(gid_of(remote.ip)),
            sgid_index: self.device.gid_index(),
            hop_limit: HOP_LIMIT,
            traffic_class: self.device.traffic_class(),
            ..ffi::GlobalRoute::default()
        };
        ffi::AhAttr {
            grh,
            dlid: if self.device.is_infiniband() { remote.lid } else { 0 },
            sl: self.device.service_level(),
            is_global: 1,
            port_num: self.device.port(),
            ..ffi::AhAttr::default()
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
        if let Some(key) = attributes.queue_key {
            native.qkey = key;
            mask |= qp_mask::QKEY;
        }
        if let Some(access) = attributes.access {
            native.qp_access_flags = access.difference(Access::REMOTE_INVALIDATE).bits();
            mask |= qp_mask::ACCESS_FLAGS;
        }
        if let Some(remote) = attributes.remote_port() {
            native.ah_attr = self.way_to(remote);
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
}

/// Of `ibv_qp_state`.
const RESET: i32 = 0;
const SQE: i32 = 5;
const ERR: i32 = 6;

const fn state_number(state: QueuePairState) -> i32 {
    match state {
        QueuePairState::Reset => RESET,
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
        if let Err(code) = self.pair.settle() {
            self.device.registry().fail_by("ibv_poll_cq", code);
        }
        self.device.registry().release_pair(self.work());
    }
}
