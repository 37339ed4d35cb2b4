//! How tasks stand.

use crate::TransferError;

/// The state of a task. The values are those of the C API.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u8)]
pub enum TransferState {
    /// Accepted; nothing has been sent yet.
    Waiting = 0,
    /// Under way.
    Pending = 1,
    /// No such task.
    Invalid = 2,
    /// Canceled before all of it was sent.
    Canceled = 3,
    /// Done: every byte is where it should be, at the target for a WRITE, unless [`TransferStatus::unconfirmed`].
    Completed = 4,
    /// Gave up for want of time.
    Timeout = 5,
    /// Gave up; [`TransferStatus::error`] says why.
    Failed = 6,
}

impl TransferState {
    /// Whether the task is over: its state does not change any more, and local memory is not
    /// touched for it any more.
    ///
    /// After a WRITE that ended otherwise than COMPLETED, the target's range is not changed any more
    /// either, unless [`TransferStatus::target_undefined`].
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Canceled | Self::Completed | Self::Timeout | Self::Failed)
    }
}

/// How the tasks of a batch stand together.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BatchStatus {
    /// COMPLETED when all of them are; PENDING while one is not over; else the state of the first that has ended
    /// otherwise.
    pub state: TransferState,
    /// At least so many bytes have arrived, of all of them.
    pub transferred_bytes: u64,
    /// The index of the first task that is not COMPLETED. [`crate::TransferEngine::status`] says why.
    pub first_incomplete: Option<usize>,
}

/// The state of a task, and how far it is.
#[derive(Clone, Debug)]
pub struct TransferStatus {
    /// Its state.
    pub state: TransferState,
    /// At least so many bytes have arrived.
    pub transferred_bytes: u64,
    /// The peer has not confirmed that nothing of a WRITE can arrive any more: its range may still
    /// change. Only of a task that is over, and not COMPLETED.
    pub target_undefined: bool,
    /// A WRITE that is COMPLETED was sent, and its peer does not say whether it has arrived: so are those to engines
    /// of Mooncake before version 0.3.12, over TCP.
    pub unconfirmed: bool,
    /// The transport that does it.
    pub transport: Option<&'static str>,
    /// Why it failed.
    pub error: Option<TransferError>,
}
