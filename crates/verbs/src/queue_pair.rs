//! Queue pairs.

use std::time::Duration;

use millstream_roce::{
    ModifyError, Piece, PostError, QueuePairAttributes, QueuePairCapabilities, QueuePairState,
    ReceiveRequest, SendRequest, Transport,
};
use millstream_wire::{Psn, Qpn};

use crate::completion_queue::CompletionQueue;
use crate::provider::{Provided, either};
use crate::shared_receive_queue::SharedReceiveQueue;
use crate::{ibverbs, soft};

/// What a queue pair is made with.
#[derive(Clone, Copy, Debug)]
pub struct QueuePairOptions<'a> {
    /// The service that it offers.
    pub transport: Transport,
    /// Where send requests complete.
    pub send_completions: &'a CompletionQueue,
    /// Where receive requests complete.
    pub receive_completions: &'a CompletionQueue,
    /// How much it can hold.
    pub capabilities: QueuePairCapabilities,
    /// Where receive requests come from, when not from a queue of its own. Then
    /// `max_receive_requests` says nothing.
    pub shared_receives: Option<&'a SharedReceiveQueue>,
    /// Whether a soft device may send a WRITE without immediate data as several messages, where that
    /// is faster. It stays one request with one completion. But when its range at the peer is wrong,
    /// its beginning may be written before the rest is refused: this is for applications that know
    /// the peer's ranges ([`millstream_roce::QueuePairConfig::split_writes`]). Other devices need no
    /// such help, and take no notice.
    pub split_writes: bool,
    /// How long a soft device may keep the acknowledgement of a SEND of one packet, to send it with a request
    /// to the same peer ([`millstream_roce::QueuePairConfig::acknowledgement_delay`]): for protocols that answer
    /// messages by messages. Other devices take no notice.
    pub acknowledgement_delay: Duration,
    /// Which shard of a soft device it is in, below [`crate::Device::shards`]. With `None` it is that of
    /// the shared receive queue, which all its queue pairs are in, or else the next in turn. Threads
    /// that wait for completion queues of different shards do not wait for each other. Other devices
    /// take no notice.
    pub shard: Option<usize>,
}

impl<'a> QueuePairOptions<'a> {
    /// A reliable connection that completes everything into one queue.
    pub const fn new(
        completions: &'a CompletionQueue,
        capabilities: QueuePairCapabilities,
    ) -> Self {
        Self {
            transport: Transport::ReliableConnection,
            send_completions: completions,
            receive_completions: completions,
            capabilities,
            shared_receives: None,
            split_writes: false,
            acknowledgement_delay: Duration::ZERO,
            shard: None,
        }
    }
}

/// A queue pair. Dropping it closes it: its outstanding requests end without
/// completions. Those that it had before can still be polled.
#[derive(Debug)]
pub struct QueuePair {
    pub(crate) pair: Provided<soft::QueuePair, ibverbs::QueuePair>,
}

impl QueuePair {
    /// Its number.
    pub fn number(&self) -> Qpn {
        either!(&self.pair, pair => pair.number())
    }

    /// Its state.
    pub fn state(&self) -> QueuePairState {
        either!(&self.pair, pair => pair.state())
    }

    /// The packet sequence number that it expects next from its peer, as far as the device tells
    /// (`rq_psn` of `ibv_query_qp`). It moves with each request of the peer: who compares it with an
    /// earlier one sees whether the peer has used the connection since. Says nothing in a state
    /// before ready to receive.
    pub fn receive_psn(&self) -> Option<Psn> {
        either!(&self.pair, pair => pair.receive_psn())
    }

    /// Changes its attributes and state.
    ///
    /// When it returns from a change to [`QueuePairState::Reset`], no memory is read or written for
    /// this queue pair any more. In the error state it may be, until the last request is flushed.
    pub fn modify(&self, attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
        either!(&self.pair, pair => pair.modify(attributes))
    }

    /// Appends requests to the send queue, in order. On error, the number that were accepted
    /// before the one that was not.
    ///
    /// On real hardware a request that is not signaled holds its place in the queue until a later
    /// one that is signaled has completed and was polled: signal at least one in as many as the
    /// queue holds.
    pub fn post_send<P: AsRef<[Piece]>>(
        &self,
        requests: &[SendRequest<P>],
    ) -> Result<(), (usize, PostError)> {
        either!(&self.pair, pair => pair.post_send(requests))
    }

    /// Appends a request to the send queue that brings its bytes along, and has no pieces. They are
    /// copied, and need no region: at most [`QueuePairCapabilities::max_inline`] of them, which is 0
    /// unless the queue pair was made with more.
    pub fn post_send_inline<P: AsRef<[Piece]>>(
        &self,
        request: &SendRequest<P>,
        bytes: &[u8],
    ) -> Result<(), PostError> {
        either!(&self.pair, pair => pair.post_send_inline(request, bytes))
    }

    /// Appends requests to the receive queue, in order. On error, the number that were accepted
    /// before the one that was not.
    pub fn post_receive<P: AsRef<[Piece]>>(
        &self,
        requests: &[ReceiveRequest<P>],
    ) -> Result<(), (usize, PostError)> {
        either!(&self.pair, pair => pair.post_receive(requests))
    }
}
