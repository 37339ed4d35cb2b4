//! Queue pairs.

use millstream_roce::{
    ModifyError, PostError, QueuePairAttributes, QueuePairState, ReceiveRequest, SendRequest,
};
use millstream_wire::Qpn;

use crate::provider::{Provided, either};
use crate::{ibverbs, soft};

/// A reliable-connection queue pair. Dropping it closes it: its outstanding requests end without
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

    /// Changes its attributes and state.
    pub fn modify(&self, attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
        either!(&self.pair, pair => pair.modify(attributes))
    }

    /// Appends requests to the send queue, in order. On error, the number that were accepted
    /// before the one that was not.
    ///
    /// On real hardware a request that is not signaled holds its place in the queue until a later
    /// one that is signaled has completed and was polled: signal at least one in as many as the
    /// queue holds.
    pub fn post_send(&self, requests: &[SendRequest]) -> Result<(), (usize, PostError)> {
        either!(&self.pair, pair => pair.post_send(requests))
    }

    /// Appends requests to the receive queue, in order. On error, the number that were accepted
    /// before the one that was not.
    pub fn post_receive(&self, requests: &[ReceiveRequest]) -> Result<(), (usize, PostError)> {
        either!(&self.pair, pair => pair.post_receive(requests))
    }
}
