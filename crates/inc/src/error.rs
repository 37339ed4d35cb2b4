//! How a collective fails, as its caller sees it.

use millstream_roce::CompletionStatus;
use thiserror::Error;

use crate::abort::Abort;
use crate::{Collective, DataType, ReduceOperation};

/// Why a collective did not end with a result. The communicator is of no more use: its queue pair
/// must be closed before the buffers of the call are used again.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum CollectiveError {
    /// The switch aborted the communicator and said why.
    #[error("{0}")]
    Aborted(#[from] Abort),
    /// The connection to the switch broke.
    #[error("the connection to the switch broke: {0}")]
    Transport(CompletionStatus),
    /// The switch sent something that makes no sense: it speaks another version, or is no switch.
    #[error("the switch broke the protocol: {0}")]
    Protocol(&'static str),
    /// The caller's deadline passed.
    #[error(
        "collective {sequence} did not end in time: {results} of {segments} segments have their \
         result; some rank has not called it, or is slow"
    )]
    TimedOut {
        /// The collective.
        sequence: u64,
        /// Segments whose result has come.
        results: u64,
        /// Segments of the collective.
        segments: u64,
    },
}

/// Why a collective was not started. Nothing was sent.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum StartError {
    /// The one before is not over.
    #[error("the communicator is busy with collective {0}: one at a time")]
    Busy(u64),
    /// An earlier one failed.
    #[error("the communicator has failed before: {0}")]
    Failed(CollectiveError),
    /// Not offered.
    #[error("{collective} with {operation} of {data_type} is not supported")]
    Unsupported {
        /// What was asked for.
        collective: Collective,
        /// What was asked for.
        operation: ReduceOperation,
        /// What was asked for.
        data_type: DataType,
    },
    /// There is no such rank.
    #[error("there is no rank {root} to be the root: the communicator has {world}, from 0 on")]
    Root {
        /// What was asked for.
        root: u32,
        /// How many there are.
        world: u32,
    },
    /// Too long, or beyond the end of the address space.
    #[error("{count} elements of {data_type} are more than a collective can have")]
    TooLong {
        /// What was asked for.
        count: u64,
        /// What was asked for.
        data_type: DataType,
    },
}
