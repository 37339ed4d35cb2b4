//! Why a segment is not opened, or bytes of a buffer are not reached.

use std::time::Duration;

use millstream_metadata::{CallError, CallErrorKind, StoreError};
use millstream_net::cuda::CudaError;
use millstream_net::guarded::Fault;
use thiserror::Error;

use super::{code, store_code};
use crate::SegmentId;

/// An access to a [`crate::Buffer`] or a segment's buffer beyond its end.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum BufferError {
    /// The range does not fit.
    #[error("{length} bytes at offset {offset} do not fit a buffer of {buffer_length} bytes")]
    OutOfRange {
        /// First byte, from the start of the buffer.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Bytes of the buffer.
        buffer_length: u64,
    },
    /// The system has no memory for it, as for want of huge pages.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// It is memory of a GPU, whose driver does not copy.
    #[error(transparent)]
    Gpu(#[from] CudaError),
    /// There are not so many buffers.
    #[error("the segment has {count} buffers: there is no buffer {index}")]
    NoBuffer {
        /// Which was asked for, from 0.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// The segment's descriptor says of the buffer what cannot be: which buffer, and what.
    #[error("{0}: its process must register that memory anew")]
    Unusable(String),
}

impl BufferError {
    /// The number of the C API.
    pub const fn code(&self) -> i32 {
        match self {
            Self::OutOfRange { .. } | Self::NoBuffer { .. } | Self::Unusable(_) => {
                code::INVALID_ARGUMENT
            }
            Self::Fault(_) | Self::Gpu(_) => code::MEMORY,
        }
    }
}

/// Why a segment could not be opened or refreshed.
#[derive(Debug, Error)]
pub enum SegmentError {
    /// Its descriptor could not be had.
    #[error("cannot open segment {name:?}: {error}")]
    Store {
        /// The segment's name.
        name: String,
        /// Why.
        error: StoreError,
    },
    /// Its descriptor could not be had, from here or through a relay.
    #[error("cannot open segment {name:?}: {error}; and there is no way through a relay: {relays}")]
    NotRelayed {
        /// The segment's name.
        name: String,
        /// Why not from here.
        error: Box<StoreError>,
        /// What each relay has said.
        relays: String,
    },
    /// Another process has its name now. A relay's way to a segment is for one start of its process.
    #[error("the process of segment {name:?} was restarted, and what it held is lost")]
    Restarted {
        /// The segment's name.
        name: String,
    },
    /// A submission was about to ask for its descriptor, for which another one has just waited in vain.
    /// [`crate::TransferEngine::refresh_segment`] asks at any time.
    #[error(
        "segment {name:?} did not answer {ago:.1?} ago, for which a submission has waited {waited:.1?}: one will ask again \
         in {left:.1?}, and a refresh of the segment asks at once"
    )]
    Silent {
        /// The segment's name.
        name: String,
        /// When that ended.
        ago: Duration,
        /// How long it was waited for.
        waited: Duration,
        /// How long submissions will not ask.
        left: Duration,
    },
    /// There is no open segment of this number.
    #[error("segment {0:?} is not open")]
    Unknown(SegmentId),
    /// Too many open segments.
    #[error("no more than {limit} segments can be open")]
    TooMany {
        /// The limit.
        limit: usize,
    },
}

impl SegmentError {
    /// Whether it was waited for an answer that did not come.
    pub(crate) fn is_silence(&self) -> bool {
        let error = match self {
            Self::Store { error, .. } => error,
            Self::NotRelayed { error, .. } => error,
            _ => return false,
        };
        let error = match error {
            StoreError::Shared(error) => error,
            error => error,
        };
        matches!(
            error,
            StoreError::Call(CallError {
                kind: CallErrorKind::Unreachable { .. } | CallErrorKind::NoReply { .. },
                ..
            })
        )
    }

    /// The number of the C API.
    pub fn code(&self) -> i32 {
        match self {
            Self::Store { error, .. } => store_code(error),
            Self::NotRelayed { error, .. } => store_code(error),
            Self::Restarted { .. } => code::METADATA,
            Self::Silent { .. } => code::SOCKET,
            Self::Unknown(_) => code::INVALID_ARGUMENT,
            Self::TooMany { .. } => code::TOO_MANY_REQUESTS,
        }
    }
}
