//! Queue pairs of soft devices.

use std::sync::Arc;

use millstream_roce::{
    CreateError, ModifyError, Piece, PostError, QueuePairAttributes, QueuePairConfig,
    QueuePairState, ReceiveRequest, SendRequest, Transport,
};
use millstream_wire::{Psn, Qpn};

use super::completion_queue::CompletionQueue;
use super::device::Device;
use super::memory_region::ProtectionDomain;
use super::shared_receive_queue::SharedReceiveQueue;
use crate::QueuePairOptions;

/// A queue pair.
#[derive(Debug)]
pub(crate) struct QueuePair {
    device: Arc<Device>,
    /// Of the device.
    shard: usize,
    number: Qpn,
    transport: Transport,
    /// Completion queues live as long as a queue pair completes into them.
    completions: [Arc<CompletionQueue>; 2],
    /// And shared receive queues as long as one takes from them.
    _shared_receives: Option<Arc<SharedReceiveQueue>>,
}

impl QueuePair {
    /// The queues are those of the options: send and receive completions, shared receives.
    pub(crate) fn create(
        domain: &ProtectionDomain,
        completions: [Arc<CompletionQueue>; 2],
        shared_receives: Option<Arc<SharedReceiveQueue>>,
        options: &QueuePairOptions<'_>,
    ) -> Result<Self, CreateError> {
        let device = Arc::clone(&domain.device);
        if let Some(queue) = completions.iter().find(|queue| !Arc::ptr_eq(queue.device(), &device))
        {
            return Err(CreateError::UnknownCompletionQueue(queue.id()));
        }
        if let Some(queue) = shared_receives.as_ref()
            && !Arc::ptr_eq(queue.device(), &device)
        {
            return Err(CreateError::UnknownSharedReceiveQueue(queue.id()));
        }
        let [send_completions, receive_completions] = completions.each_ref().map(|q| q.id());
        let config = QueuePairConfig {
            domain: domain.id,
            transport: options.transport,
            send_completions,
            receive_completions,
            capabilities: options.capabilities,
            shared_receive_queue: shared_receives.as_ref().map(|queue| queue.id()),
            split_writes: options.split_writes,
            acknowledgement_delay: options.acknowledgement_delay,
        };
        let shared_shard = shared_receives.as_ref().map(|queue| queue.shard());
        let (shard, number) = create_somewhere(&device, options.shard, shared_shard, |shard| {
            let mut endpoint = device.lock(shard).ok_or(CreateError::DeviceFailed)?;
            endpoint.create_queue_pair(&config)
        })?;
        completions.iter().for_each(|queue| queue.enter(shard));
        Ok(Self {
            device,
            shard,
            number,
            transport: options.transport,
            completions,
            _shared_receives: shared_receives,
        })
    }

    pub(crate) fn number(&self) -> Qpn {
        self.number
    }

    pub(crate) fn state(&self) -> QueuePairState {
        // It exists as long as `self` does.
        self.device.lock_regardless(self.shard).queue_pair_state(self.number).unwrap_or_default()
    }

    pub(crate) fn receive_psn(&self) -> Option<Psn> {
        self.device.lock_regardless(self.shard).receive_psn(self.number)
    }

    pub(crate) fn modify(&self, attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
        let mut endpoint = self.device.lock(self.shard).ok_or(ModifyError::DeviceFailed)?;
        endpoint.modify_queue_pair(self.device.now(), self.number, attributes)?;
        drop(endpoint);
        if attributes.state == Some(QueuePairState::Reset) {
            // What arrives is written with the device locked, so nothing is any more. But what was
            // collected to be sent may be read until now.
            self.device.shards().all()[self.shard].quiesce();
        }
        if let Some(peer) = attributes.remote_address {
            self.device.prepare(self.shard, peer);
        }
        Ok(())
    }

    pub(crate) fn post_send<P: AsRef<[Piece]>>(
        &self,
        requests: &[SendRequest<P>],
    ) -> Result<(), (usize, PostError)> {
        self.introduce(requests);
        let mut endpoint = self.device.lock(self.shard).ok_or((0, PostError::DeviceFailed))?;
        endpoint.post_sends(self.device.now(), self.number, requests)
    }

    pub(crate) fn post_send_inline<P: AsRef<[Piece]>>(
        &self,
        request: &SendRequest<P>,
        bytes: &[u8],
    ) -> Result<(), PostError> {
        self.introduce(std::slice::from_ref(request));
        let mut endpoint = self.device.lock(self.shard).ok_or(PostError::DeviceFailed)?;
        endpoint.post_send_inline(self.device.now(), self.number, request, bytes)
    }

    /// Before the device is locked: it may take a while.
    fn introduce<P>(&self, requests: &[SendRequest<P>]) {
        if self.transport != Transport::UnreliableDatagram {
            return;
        }
        for destination in requests.iter().filter_map(|request| request.datagram) {
            self.device.introduce(self.shard, destination.address);
        }
    }

    pub(crate) fn post_receive<P: AsRef<[Piece]>>(
        &self,
        requests: &[ReceiveRequest<P>],
    ) -> Result<(), (usize, PostError)> {
        let mut endpoint = self.device.lock(self.shard).ok_or((0, PostError::DeviceFailed))?;
        let mut posted = requests.iter().enumerate().map(|(index, request)| {
            endpoint.post_receive(self.number, request).map_err(|error| (index, error))
        });
        let result = posted.try_for_each(|posted| posted);
        // Nothing is sent because of it: who found the queue empty asks again. But in the error state
        // they are flushed at once.
        if !endpoint.has_notifications() {
            endpoint.release_without_waking();
        }
        result
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        match self.device.lock(self.shard) {
            // Others may have waited for what it had asked for: room for the answers to their READs.
            Some(mut endpoint) => endpoint.destroy_queue_pair(self.number),
            None => self.device.lock_regardless(self.shard).destroy_queue_pair(self.number),
        };
        self.completions.iter().for_each(|queue| queue.leave(self.shard));
    }
}

/// Creates in the shard that was chosen, in that of the shared receive queue, or in the next one that has
/// room; returns which it was.
fn create_somewhere(
    device: &Device,
    chosen: Option<usize>,
    shared: Option<usize>,
    create: impl Fn(usize) -> Result<Qpn, CreateError>,
) -> Result<(usize, Qpn), CreateError> {
    let shards = device.shards();
    if chosen.is_some_and(|chosen| chosen >= shards.all().len()) {
        return Err(CreateError::Unsupported("a shard of that number"));
    }
    if let (Some(chosen), Some(shared)) = (chosen, shared)
        && chosen != shared
    {
        let what = "queue pairs in another shard than that of their shared receive queue";
        return Err(CreateError::Unsupported(what));
    }
    if let Some(shard) = chosen.or(shared) {
        return Ok((shard, create(shard)?));
    }
    let (mut in_turn, mut limit) = (shards.in_turn(), 0);
    loop {
        let Some(shard) = in_turn.next() else {
            return Err(CreateError::TooMany { what: "queue pairs", limit });
        };
        match create(shard) {
            Err(CreateError::TooMany { limit: each, .. }) => limit += each,
            result => return Ok((shard, result?)),
        }
    }
}
