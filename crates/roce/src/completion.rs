//! Completions and the queues they wait in.

use std::collections::VecDeque;

use millstream_wire::Qpn;
use thiserror::Error;

/// The most completions that a completion queue of an endpoint holds.
pub const MAX_COMPLETIONS: usize = 1 << 20;

/// A completion queue of an endpoint.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct CompletionQueueId(pub u32);

/// How a work request ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Completion {
    /// The number that the request was posted with.
    pub id: u64,
    /// The local queue pair.
    pub qpn: Qpn,
    /// Success, or what went wrong.
    pub status: CompletionStatus,
    /// What completed. Meaningful on success and on errors alike.
    pub operation: CompletionOperation,
    /// Bytes that a receive got, or that a send-side request moved.
    pub length: u32,
    /// The immediate data of a receive.
    pub immediate: Option<u32>,
    /// The key that a received SEND has invalidated: remotes have no access by it any more.
    pub invalidated: Option<u32>,
    /// The queue pair that a datagram came from. Its device's address is in the header that the
    /// receive buffer starts with, which `length` counts.
    pub source: Option<Qpn>,
}

impl Completion {
    /// A completion of 0 bytes that carries nothing else.
    pub const fn new(
        id: u64,
        qpn: Qpn,
        status: CompletionStatus,
        operation: CompletionOperation,
    ) -> Self {
        Self {
            id,
            qpn,
            status,
            operation,
            length: 0,
            immediate: None,
            invalidated: None,
            source: None,
        }
    }
}

/// What a completion is of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CompletionOperation {
    /// A SEND.
    Send,
    /// A WRITE.
    Write,
    /// A READ.
    Read,
    /// A compare-and-swap.
    CompareSwap,
    /// A fetch-and-add.
    FetchAdd,
    /// A receive that took a SEND.
    Receive,
    /// A receive that was consumed by a WRITE with immediate.
    ReceiveWrite,
}

/// How a work request ended (`ibv_wc_status`).
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum CompletionStatus {
    /// Done; for a SEND or WRITE, applied at the peer.
    #[error("success")]
    Success,
    /// A message was longer than the receive request, or than a message may be.
    #[error("local length error: the message does not fit the buffers of the work request")]
    LocalLength,
    /// A local piece lies outside its region, or the region lacks the right.
    #[error("local protection error: the work request names memory that is not registered for it")]
    LocalProtection,
    /// The queue pair went to the error state before the request was done.
    #[error("flushed: the queue pair failed or was closed before this work request was done")]
    Flushed,
    /// The peer sent something that breaks the protocol.
    #[error("bad response: the peer's answer breaks the protocol")]
    BadResponse,
    /// The peer does not support the request or found it malformed.
    #[error("remote invalid request: the peer refused the request as malformed or unsupported")]
    RemoteInvalidRequest,
    /// Wrong remote key, range or right.
    #[error("remote access error: wrong remote key, address range or access right")]
    RemoteAccess,
    /// The peer failed inside.
    #[error("remote operational error: the peer could not complete the request")]
    RemoteOperational,
    /// The peer did not answer, however often the request was sent.
    #[error("retry count exceeded: the peer does not answer")]
    RetryExceeded,
    /// The peer kept saying that it has no receive request posted.
    #[error("receiver-not-ready retry count exceeded: the peer posts no receive requests")]
    ReceiverNotReadyExceeded,
    /// What a device of the system reports and no other variant says: its `ibv_wc_status`. An
    /// [`crate::Endpoint`] never does.
    #[error("the device reports work completion status {0} (of ibv_wc_status)")]
    Other(u32),
}

/// Completions in order, bounded.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    entries: VecDeque<Completion>,
    capacity: usize,
    /// Completions that were ever taken out.
    taken: u64,
    /// Completions up to the last one that its sender solicited, or that is of a failure.
    solicited: u64,
    /// A completion was lost: the queue and everything on it is in error.
    overrun: bool,
}

impl CompletionQueue {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            entries: VecDeque::with_capacity(capacity),
            capacity,
            taken: 0,
            solicited: 0,
            overrun: false,
        }
    }

    /// Adds a completion; `false` when it was lost for want of room, for the first time.
    pub(crate) fn push(&mut self, completion: Completion, solicited: bool) -> bool {
        if self.entries.len() < self.capacity {
            self.entries.push_back(completion);
            if solicited || completion.status != CompletionStatus::Success {
                self.solicited = self.taken + self.entries.len() as u64;
            }
            return true;
        }
        core::mem::replace(&mut self.overrun, true)
    }

    pub(crate) fn poll(&mut self, out: &mut Vec<Completion>, limit: usize) -> usize {
        let count = limit.min(self.entries.len());
        out.extend(self.entries.drain(..count));
        self.taken += count as u64;
        count
    }

    /// Whether a completion waits that was solicited, or is of a failure.
    pub(crate) fn has_solicited(&self) -> bool {
        self.solicited > self.taken
    }

    pub(crate) fn is_overrun(&self) -> bool {
        self.overrun
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }
}
