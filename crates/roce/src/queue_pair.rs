//! One queue pair: its path, its two halves, and what both share.

use core::net::IpAddr;
use core::time::Duration;

use millstream_wire::{Bth, ExtendedHeaders, MAX_HEADER_LENGTH, Mtu, Opcode, Psn, Qpn};

use crate::attributes::{QueuePairAttributes, QueuePairState};
use crate::budget::ReceiveBudget;
use crate::completion::{Completion, CompletionQueueId, CompletionStatus};
use crate::config::{QueuePairCapabilities, QueuePairConfig};
use crate::congestion::Congestion;
use crate::counters::QueuePairCounters;
use crate::datagrams::Datagrams;
use crate::endpoint::{BURST, Shared, index_of};
use crate::events::AsyncEvent;
use crate::memory::Memory;
use crate::receives::Receives;
use crate::requester::Requester;
use crate::responder::Responder;
use crate::{Access, EndpointConfig, Instant, Piece, ProtectionDomainId, Transmit, Transport};

/// Where packets go, and the rules that both ends agreed on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    pub(crate) remote_address: IpAddr,
    pub(crate) destination_qpn: Qpn,
    pub(crate) mtu: Mtu,
    pub(crate) partition_key: u16,
}

impl Path {
    /// The path of a queue pair that has none yet.
    fn nowhere(endpoint: &EndpointConfig) -> Self {
        Self {
            remote_address: endpoint.address,
            destination_qpn: Qpn::default(),
            mtu: Mtu::default(),
            partition_key: endpoint.partition_key(0).unwrap_or_default(),
        }
    }

    /// Writes a packet to the other end.
    pub(crate) fn write(
        &self,
        bth: &Bth,
        extended: &ExtendedHeaders,
        payload: impl Iterator<Item = Piece>,
        transmit: &mut Transmit,
    ) {
        let mut headers = [0; MAX_HEADER_LENGTH];
        headers[..Bth::LENGTH].copy_from_slice(&bth.to_bytes());
        let length = Bth::LENGTH + extended.emit(&mut headers[Bth::LENGTH..]);
        transmit.gather(self.remote_address, &headers[..length], payload, bth.pad_count);
    }
}

#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(crate) qpn: Qpn,
    pub(crate) transport: Transport,
    pub(crate) domain: ProtectionDomainId,
    pub(crate) send_completions: CompletionQueueId,
    pub(crate) receive_completions: CompletionQueueId,
    pub(crate) capabilities: QueuePairCapabilities,
    pub(crate) state: QueuePairState,
    pub(crate) access: Access,
    pub(crate) path: Path,
    pub(crate) requester: Requester,
    pub(crate) responder: Responder,
    /// [`QueuePairConfig::acknowledgement_delay`].
    pub(crate) acknowledgement_delay: Duration,
    /// Of a queue pair for datagrams, in place of the requester.
    pub(crate) datagrams: Option<Datagrams>,
    pub(crate) congestion: Congestion,
    /// Answers sent since the last request, up to [`BURST`].
    answers_in_a_row: u32,
    /// Requests that may then go out before the next answer.
    requests_owed: u32,
    /// The application knows that the peer talks to it.
    established: bool,
    /// The application knows that the send queue is drained.
    drained: bool,
    /// In the endpoint's list of queue pairs that may have something to send.
    pub(crate) ready: bool,
    pub(crate) counters: QueuePairCounters,
}

impl QueuePair {
    pub(crate) fn new(qpn: Qpn, config: &QueuePairConfig, endpoint: &EndpointConfig) -> Self {
        Self {
            qpn,
            transport: config.transport,
            domain: config.domain,
            send_completions: config.send_completions,
            receive_completions: config.receive_completions,
            capabilities: config.capabilities,
            state: QueuePairState::Reset,
            access: Access::empty(),
            path: Path::nowhere(endpoint),
            requester: new_requester(
                config.transport,
                &config.capabilities,
                config.split_writes,
                config.acknowledgement_delay,
            ),
            acknowledgement_delay: config.acknowledgement_delay,
            datagrams: new_datagrams(config.transport, &config.capabilities),
            responder: Responder::new(Receives::new(
                config.domain,
                config.capabilities.max_receive_requests,
                config.shared_receive_queue,
            )),
            congestion: Congestion::default(),
            answers_in_a_row: 0,
            requests_owed: 0,
            established: false,
            drained: false,
            ready: false,
            counters: QueuePairCounters::default(),
        }
    }

    /// Takes attributes that [`crate::Endpoint::modify_queue_pair`] has checked.
    pub(crate) fn apply(
        &mut self,
        attributes: &QueuePairAttributes,
        endpoint: &EndpointConfig,
        budget: &ReceiveBudget,
    ) {
        let path = &mut self.path;
        if let Some(access) = attributes.access {
            self.access = access;
        }
        if let Some(address) = attributes.remote_address {
            path.remote_address = address;
        }
        if let Some(mtu) = attributes.path_mtu {
            path.mtu = mtu;
        }
        if let Some(qpn) = attributes.destination_qpn {
            path.destination_qpn = qpn;
        }
        if let Some(index) = attributes.partition_key_index {
            path.partition_key = endpoint.partition_key(index).unwrap_or_default();
        }
        if let Some(psn) = attributes.receive_psn {
            self.responder.start(psn);
        }
        if let Some(resources) = attributes.responder_resources {
            self.responder.replies.resources = usize::from(resources);
            self.responder.replies.make_room();
        }
        if let Some(timer) = attributes.minimum_rnr_timer {
            self.responder.minimum_rnr_timer = timer;
        }
        if let Some(psn) = attributes.send_psn {
            self.requester.start(psn, path.mtu, endpoint.max_window, budget);
        }
        if let Some(bytes) = attributes.send_window_bytes {
            self.requester.limit_sends(bytes, path.mtu);
        }
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.next_psn = attributes.send_psn.unwrap_or(datagrams.next_psn);
            datagrams.queue_key = attributes.queue_key.unwrap_or(datagrams.queue_key);
        }
        if let Some(timeout) = attributes.timeout {
            self.requester.timeout =
                (timeout > 0).then(|| Duration::from_nanos(4096 << u64::from(timeout)));
        }
        if let Some(count) = attributes.retry_count {
            self.requester.retry_count = count;
        }
        if let Some(count) = attributes.rnr_retry {
            self.requester.rnr_retry = count;
        }
        if let Some(depth) = attributes.initiator_depth {
            self.requester.initiator_depth = usize::from(depth);
        }
    }

    /// Goes to a state other than RESET and ERR.
    pub(crate) fn enter(&mut self, to: QueuePairState) {
        match to {
            QueuePairState::SendQueueDrained if self.state != to => {
                self.drained = false;
                self.requester.drain();
            }
            QueuePairState::ReadyToReceive => self.established = false,
            QueuePairState::ReadyToSend => self.requester.resume(),
            _ => {}
        }
        self.state = to;
    }

    /// A packet arrived: in RTR the application learns by it that its peer is there, once.
    pub(crate) fn communicate<M>(&mut self, shared: &mut Shared<M>) {
        let connected = self.transport == Transport::ReliableConnection;
        if connected && self.state == QueuePairState::ReadyToReceive && !self.established {
            self.established = true;
            shared.event(AsyncEvent::CommunicationEstablished(self.qpn));
        }
    }

    /// Whether it is in SQD and still finishes requests.
    pub(crate) fn is_draining(&self) -> bool {
        self.state == QueuePairState::SendQueueDrained
            && match &self.datagrams {
                None => !self.requester.is_drained(),
                Some(datagrams) => datagrams.is_sending(),
            }
    }

    /// Tells the application when the send queue is drained, once.
    pub(crate) fn report_drained<M>(&mut self, shared: &mut Shared<M>) {
        if self.state == QueuePairState::SendQueueDrained && !self.drained && !self.is_draining() {
            self.drained = true;
            shared.event(AsyncEvent::SendQueueDrained(self.qpn));
        }
    }

    /// Forgets everything but the configuration.
    pub(crate) fn reset(&mut self, endpoint: &EndpointConfig) {
        self.state = QueuePairState::Reset;
        self.access = Access::empty();
        self.path = Path::nowhere(endpoint);
        let split_writes = self.requester.split_writes;
        let delay = self.acknowledgement_delay;
        self.requester = new_requester(self.transport, &self.capabilities, split_writes, delay);
        self.datagrams = new_datagrams(self.transport, &self.capabilities);
        let (max, shared) =
            (self.capabilities.max_receive_requests, self.responder.receives.shared());
        self.responder = Responder::new(Receives::new(self.domain, max, shared));
        self.congestion = Congestion::default();
    }

    /// Goes to the error state because the application wants it.
    pub(crate) fn close<M: Memory>(&mut self, shared: &mut Shared<M>) {
        self.responder.replies.clear();
        // The application may have taken what came, and this is its answer: the peer is told that it came.
        self.acknowledge_waiting(shared);
        self.fail(shared, None);
    }

    /// Goes to the error state because of a failure: the application hears of it by an event too.
    pub(crate) fn fail_fatally<M: Memory>(
        &mut self,
        shared: &mut Shared<M>,
        status: Option<CompletionStatus>,
    ) {
        self.responder.replies.clear();
        if self.state != QueuePairState::Error {
            self.fail(shared, status);
            shared.event(AsyncEvent::QueuePairFatal(self.qpn));
        }
    }

    /// Like [`QueuePair::fail_fatally`], but what is to be said to the peer is said, and the
    /// application hears `event`.
    pub(crate) fn fail_but_answer<M: Memory>(&mut self, shared: &mut Shared<M>, event: AsyncEvent) {
        if self.state != QueuePairState::Error {
            self.fail(shared, None);
            shared.event(event);
        }
    }

    /// The oldest send request ends with `status` when one is given, all others are flushed (IBTA
    /// 10.3.1).
    fn fail<M: Memory>(&mut self, shared: &mut Shared<M>, status: Option<CompletionStatus>) {
        if self.state == QueuePairState::Error {
            return;
        }
        self.state = QueuePairState::Error;
        self.responder.stop();
        shared.early.forget_pair(index_of(self.qpn));
        let mut status = status.unwrap_or(CompletionStatus::Flushed);
        while let Some(work) = self.requester.take_oldest() {
            shared.complete(self.send_completions, work.completion(self.qpn, status));
            status = CompletionStatus::Flushed;
        }
        self.flush_datagrams(shared, status);
        self.flush_receives(shared);
        self.requester.stop(&mut shared.budget);
        // The queue pair takes no more of the shared queue: whoever destroys it has waited for
        // this (IBTA 11.6.3.1).
        if self.responder.receives.shared().is_some() {
            shared.event(AsyncEvent::LastReceiveRequest(self.qpn));
        }
    }

    pub(crate) fn flush_receives<M: Memory>(&mut self, shared: &mut Shared<M>) {
        while let Some(receive) = self.responder.receives.take_own() {
            let completion = Completion::new(
                receive.id,
                self.qpn,
                CompletionStatus::Flushed,
                crate::CompletionOperation::Receive,
            );
            shared.complete(self.receive_completions, completion);
        }
    }

    /// The next packet: answers first, since the peer may be waiting to send more, but READs
    /// without end do not keep our own requests from going out.
    pub(crate) fn transmit<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
        transmit: &mut Transmit,
    ) -> bool {
        if self.datagrams.is_some() {
            return self.transmit_datagram(now, shared, transmit);
        }
        if self.congestion.take_notification() {
            self.notify(transmit);
            shared.counters.congestion_notifications_sent += 1;
            return true;
        }
        let sent = self.transmit_paced(now, shared, transmit);
        if sent && transmit.has_payload() {
            self.congestion.sent(now, transmit.datagram_length() as u64);
        }
        sent
    }

    /// Tells the peer that its packets meet congestion (RoCEv2, annex A17.9.3): 16 reserved bytes
    /// follow the header.
    fn notify(&self, transmit: &mut Transmit) {
        let opcode = Opcode::CongestionNotification;
        let mut bth = header(&self.path, opcode, Psn::default(), 0);
        bth.becn = true;
        let mut headers = [0; millstream_wire::Bth::LENGTH + 16];
        headers[..millstream_wire::Bth::LENGTH].copy_from_slice(&bth.to_bytes());
        transmit.set(self.path.remote_address, &headers, &[], 0);
    }

    fn transmit_paced<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
        transmit: &mut Transmit,
    ) -> bool {
        let paced = !self.congestion.allows(now);
        // What is no data always may.
        if paced && (self.responder.replies.is_data_next() || !self.respond(shared, transmit)) {
            return false;
        }
        if paced {
            return true;
        }
        if self.answers_in_a_row < BURST {
            // A queue pair that has just failed still says why.
            if self.respond(shared, transmit) {
                self.answers_in_a_row += 1;
                self.requests_owed = BURST;
                return true;
            }
            self.answers_in_a_row = 0;
        }
        if self.state.sends() && self.request(now, shared, transmit) {
            // Behind it: the last packet of a message to the kernel may be shorter than the others.
            self.acknowledge_waiting(shared);
            self.requests_owed = self.requests_owed.saturating_sub(1);
            if self.requests_owed == 0 {
                self.answers_in_a_row = 0;
            }
            return true;
        }
        self.answers_in_a_row = 0;
        self.respond(shared, transmit)
    }

    /// When something must happen without further input.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match &self.datagrams {
            None => {
                let deadlines = [
                    self.requester.deadline(),
                    self.congestion.deadline(),
                    self.responder.deadline(),
                ];
                deadlines.into_iter().flatten().min()
            }
            Some(datagrams) => datagrams.deadline(),
        }
    }
}

/// The queue of requests that are acknowledged.
fn new_requester(
    transport: Transport,
    capabilities: &QueuePairCapabilities,
    split_writes: bool,
    answer_delay: Duration,
) -> Requester {
    let QueuePairCapabilities { max_send_requests, max_inline, .. } = *capabilities;
    match transport {
        Transport::ReliableConnection => {
            Requester::new(max_send_requests, max_inline, split_writes, answer_delay)
        }
        Transport::UnreliableDatagram => Requester::new(0, 0, false, answer_delay),
    }
}

/// The queue of those that are not.
fn new_datagrams(transport: Transport, capabilities: &QueuePairCapabilities) -> Option<Datagrams> {
    match transport {
        Transport::ReliableConnection => None,
        Transport::UnreliableDatagram => {
            Some(Datagrams::new(capabilities.max_send_requests, capabilities.max_inline))
        }
    }
}

/// The header that starts a packet of `payload` bytes, with the pad count it needs.
pub(crate) fn header(path: &Path, opcode: Opcode, psn: Psn, payload: u64) -> Bth {
    let mut bth = Bth::new(opcode as u8, path.destination_qpn, psn);
    bth.pad_count = (payload.wrapping_neg() & 3) as u8;
    bth.partition_key = path.partition_key;
    // "Migrated": the state of a path that no alternate path is armed for (IBTA 17.2.8.1), and what
    // adapters send. The kernel's soft-RoCE sends 0; nobody who has no alternate path looks at it.
    bth.migration_request = true;
    bth
}
