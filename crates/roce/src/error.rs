//! Why an endpoint did not do what it was asked.

use core::net::IpAddr;

use millstream_wire::Qpn;
use thiserror::Error;

use crate::{CompletionQueueId, QueuePairState, SharedReceiveQueueId};

/// Why a queue could not be made, changed or removed.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum CreateError {
    /// The device has as many as it can.
    #[error("the device has its {limit} {what} already")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        limit: usize,
    },
    /// A capability is 0 or too large.
    #[error("{what} = {value} is out of range: 1 to {limit}")]
    OutOfRange {
        /// Which capability.
        what: &'static str,
        /// What was asked for.
        value: usize,
        /// The most there is.
        limit: usize,
    },
    /// There is no such completion queue.
    #[error("there is no completion queue {0:?}")]
    UnknownCompletionQueue(CompletionQueueId),
    /// There is no such shared receive queue.
    #[error("there is no shared receive queue {0:?}")]
    UnknownSharedReceiveQueue(SharedReceiveQueueId),
    /// The shared receive queue has queue pairs.
    #[error("shared receive queue {0:?} still serves queue pairs")]
    SharedReceiveQueueInUse(SharedReceiveQueueId),
    /// The device does not offer it; an [`crate::Endpoint`] offers everything.
    #[error("the device does not offer {0}")]
    Unsupported(&'static str),
    /// The device no longer works.
    #[error("the device no longer works")]
    DeviceFailed,
    /// The completion queue has queue pairs.
    #[error("completion queue {0:?} still serves queue pairs")]
    InUse(CompletionQueueId),
    /// A device of the system refused; an [`crate::Endpoint`] never does.
    #[error("{call} failed: {}", std::io::Error::from_raw_os_error(*code))]
    System {
        /// The call.
        call: &'static str,
        /// Its error number.
        code: i32,
    },
}

/// Why a work request was not accepted.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum PostError {
    /// There is no such queue pair.
    #[error("there is no queue pair {0}")]
    Unknown(Qpn),
    /// The queue pair is in a state that takes no such requests.
    #[error("queue pair {qpn} is in state {state}: connect it first")]
    State {
        /// The queue pair.
        qpn: Qpn,
        /// Its state.
        state: QueuePairState,
    },
    /// The queue is full: poll completions first.
    #[error("the queue holds its {limit} work requests already: wait for completions")]
    QueueFull {
        /// How many it holds.
        limit: usize,
    },
    /// The queue pair takes its receive requests from a shared queue.
    #[error("queue pair {0} has no receive queue of its own: post to its shared receive queue")]
    SharedReceives(Qpn),
    /// There is no such shared receive queue.
    #[error("there is no shared receive queue {0:?}")]
    UnknownSharedReceiveQueue(SharedReceiveQueueId),
    /// A queue pair for datagrams sends messages, and nothing else.
    #[error("queue pair {0} is for unreliable datagrams: it can SEND, and nothing else")]
    NotADatagram(Qpn),
    /// A datagram has to say who it is for.
    #[error("queue pair {0} is for unreliable datagrams: a request must say who it is for")]
    DestinationMissing(Qpn),
    /// A connection has one peer.
    #[error("queue pair {0} is connected: a request cannot be for someone else")]
    DestinationNotAllowed(Qpn),
    /// The destination's address is of another family than the device's.
    #[error("the address {remote} is not of the same family as the device's {local}")]
    AddressFamily {
        /// The device's address.
        local: IpAddr,
        /// The address given.
        remote: IpAddr,
    },
    /// There are more pieces than a work request may have.
    #[error("{count} pieces are more than the {limit} that a work request may have")]
    TooManyPieces {
        /// What was posted.
        count: usize,
        /// The most there may be.
        limit: usize,
    },
    /// The message is too long.
    #[error("a message of {length} bytes is longer than the {limit} bytes that a message may have")]
    TooLong {
        /// What was posted.
        length: u64,
        /// The most there is.
        limit: u32,
    },
    /// The result of an atomic operation does not fit its pieces.
    #[error(
        "an atomic operation has a result of 8 bytes, and the pieces of the work request hold \
         {length}"
    )]
    AtomicLength {
        /// Bytes of the pieces.
        length: u64,
    },
    /// The remote address of an atomic operation is not naturally aligned. The peer would refuse it
    /// (IBTA 9.4.5), and some devices do at once.
    #[error("the remote address {address:#x} of an atomic operation is no multiple of 8")]
    AtomicAlignment {
        /// The remote address.
        address: u64,
    },
    /// There are more inline bytes than the queue pair was made for.
    #[error(
        "{length} inline bytes are more than the {limit} (max_inline) that the queue pair takes"
    )]
    InlineTooLong {
        /// What was posted.
        length: usize,
        /// The most there may be.
        limit: usize,
    },
    /// Inline bytes were posted with pieces too, or with a request that brings bytes here.
    #[error("queue pair {0}: only SEND and WRITE can be inline, and have no other pieces then")]
    NotInline(Qpn),
    /// The device no longer works.
    #[error("the device no longer works")]
    DeviceFailed,
    /// READs or atomic operations were posted on a queue pair connected with `initiator_depth` 0.
    #[error(
        "queue pair {0} was connected with initiator_depth 0: it can do no READs and no atomic \
         operations"
    )]
    NoReads(Qpn),
    /// The device does not do this; an [`crate::Endpoint`] does all.
    #[error("the device does not offer {what}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
    },
    /// A device of the system refused; an [`crate::Endpoint`] never does.
    #[error("{call} failed: {}", std::io::Error::from_raw_os_error(*code))]
    System {
        /// The call.
        call: &'static str,
        /// Its error number.
        code: i32,
    },
}
