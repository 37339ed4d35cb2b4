//! Why a call on a batch is refused, and why a task of it fails.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::{SubmitError, code};
use crate::{Batch, FailureReason};

/// Why a call on a batch was refused.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum BatchError {
    /// The capacity is out of range.
    #[error("a batch holds 1 to {max} tasks, not {capacity}")]
    Capacity {
        /// What was asked for.
        capacity: usize,
        /// The most.
        max: usize,
    },
    /// There are not so many tasks.
    #[error("the batch has {count} tasks: there is no task {index}")]
    NoTask {
        /// Which was asked for, from 0.
        index: usize,
        /// How many were submitted.
        count: usize,
    },
}

impl BatchError {
    /// The number of the C API.
    pub const fn code(&self) -> i32 {
        code::INVALID_ARGUMENT
    }
}

/// A batch that could not be freed because tasks of it are unfinished.
#[derive(Debug, Error)]
#[error("{unfinished} tasks of the batch are unfinished: wait for them, or cancel them and wait")]
pub struct FreeError {
    /// The batch.
    pub batch: Batch,
    /// How many tasks are unfinished.
    pub unfinished: usize,
}

impl FreeError {
    /// The number of the C API.
    pub const fn code(&self) -> i32 {
        code::BATCH_BUSY
    }
}

/// Why a task failed: which peer, and how.
#[derive(Clone, Debug, Error)]
#[error("peer {peer} (nic {nic}): {}{reason}", place(*range, local_nic.as_deref(), reason))]
pub struct TransferError {
    /// The peer's name: `host:port`.
    pub peer: Arc<str>,
    /// The peer's NIC.
    pub nic: Arc<str>,
    /// The NIC here, where it is known which one it was.
    pub local_nic: Option<Arc<str>>,
    /// What the request was for, as its `target_offset` says it: the first address in the peer's process, in segments of files
    /// the first offset; and bytes. Of several pieces, the smallest range that has all of them.
    pub range: Option<(u64, u64)>,
    /// What happened.
    pub reason: FailureReason,
}

/// The range, unless the reason says where it was, and the NIC here, as a message has them.
fn place(range: Option<(u64, u64)>, local_nic: Option<&str>, reason: &FailureReason) -> String {
    let from = local_nic.map_or_else(String::new, |nic| format!("by nic {nic} here: "));
    match range.filter(|_| !reason.says_where()) {
        Some((address, length)) if from.is_empty() => format!("{length} bytes at {address:#x}: "),
        Some((address, length)) => format!("{length} bytes at {address:#x} {from}"),
        None => from,
    }
}

impl TransferError {
    /// Of a request whose range is not known yet.
    pub(crate) fn new(peer: Arc<str>, nic: &str, reason: FailureReason) -> Self {
        Self { peer, nic: nic.into(), local_nic: None, range: None, reason }
    }

    /// The number of the C API.
    pub const fn code(&self) -> i32 {
        code::ENDPOINT
    }
}

/// Why [`crate::TransferEngine::submit_and_wait`] failed.
#[derive(Debug, Error)]
pub enum SubmitAndWaitError {
    /// The requests are too many or too few for a batch.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The requests were refused.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// A request failed.
    #[error("request {index}: {error}")]
    Failed {
        /// Which request, from 0.
        index: usize,
        /// Why.
        error: Box<TransferError>,
    },
    /// Time ran out. What was not sent by then was canceled, and nothing is under way any more.
    #[error("not done within {timeout:?}: {transferred_bytes} of {total_bytes} bytes arrived")]
    Timeout {
        /// The time given.
        timeout: Duration,
        /// At least so many bytes arrived.
        transferred_bytes: u64,
        /// Bytes of all requests.
        total_bytes: u64,
    },
}

/// Why [`crate::TransferEngine::submit_new`] did nothing.
#[derive(Debug, Error)]
pub enum SubmitNewError {
    /// The requests are too many or too few for a batch.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The requests were refused.
    #[error(transparent)]
    Submit(#[from] SubmitError),
}

impl SubmitNewError {
    /// The number of the C API.
    pub fn code(&self) -> i32 {
        match self {
            Self::Batch(error) => error.code(),
            Self::Submit(error) => error.code(),
        }
    }
}

impl SubmitAndWaitError {
    /// The number of the C API.
    pub fn code(&self) -> i32 {
        match self {
            Self::Batch(error) => error.code(),
            Self::Submit(error) => error.code(),
            Self::Failed { error, .. } => error.code(),
            Self::Timeout { .. } => code::ENDPOINT,
        }
    }
}
