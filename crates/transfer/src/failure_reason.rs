//! How a task failed.

use std::sync::Arc;

use millstream_metadata::CallErrorKind;
use millstream_net::cuda::CudaError;
use millstream_verbs::{CompletionStatus, CreateError, ModifyError, PostError};
use thiserror::Error;

/// How a task failed.
#[derive(Clone, Debug, Error)]
pub enum FailureReason {
    /// A work request ended with an error.
    #[error("{status}{}", remedy(*.0), status = .0)]
    Completion(CompletionStatus),
    /// The peer could not be asked to connect queue pairs.
    #[error("cannot connect: {0}")]
    Unreachable(Arc<CallErrorKind>),
    /// The peer refused to connect queue pairs.
    #[error("it refused to connect: {0}")]
    Refused(String),
    /// The peer's answer to the handshake makes no sense.
    #[error("its answer to the handshake makes no sense: {0}")]
    Handshake(String),
    /// A queue pair could not be made here.
    #[error("cannot make a queue pair: {0}")]
    Create(CreateError),
    /// A queue pair could not be connected.
    #[error("cannot connect a queue pair: {0}")]
    Modify(ModifyError),
    /// A work request was not accepted.
    #[error("cannot post a work request: {0}")]
    Post(PostError),
    /// Another process answers in its place.
    #[error("it was restarted, and what it held is lost: open its segment again")]
    Restarted,
    /// The peer's process was on this host, and has ended.
    #[error("its process has ended, and what it held is lost")]
    ProcessEnded,
    /// The peer's memory could not be accessed.
    #[error("its memory cannot be accessed: {0}")]
    Access(String),
    /// Registered memory of this process was unmapped, or protected.
    #[error(
        "registered memory is gone: at {address:#x} of this process nothing is mapped any more, or it \
         cannot be accessed so; unregister memory before it is unmapped"
    )]
    MemoryGone {
        /// Where a byte was not there.
        address: u64,
    },
    /// Memory of a GPU was freed, or its driver has failed.
    #[error("memory of a GPU cannot be accessed: {0}; unregister memory before it is freed")]
    Gpu(CudaError),
    /// The memory was unregistered meanwhile.
    #[error("the memory was unregistered before the transfer was done")]
    Unregistered,
    /// The engine was dropped.
    #[error("the engine was shut down before the transfer was done")]
    ShutDown,
    /// No pair of NICs leads there.
    #[error("no way there: {0}")]
    NoPath(String),
    /// A file could not be read or written: which, where, why, and what to do.
    #[error("{0}")]
    File(Arc<str>),
    /// A connection for data, or what the peer said over it: what was wrong, and where.
    #[error("{0}")]
    Connection(Arc<str>),
    /// What crossed a connection for data was not as it was sent (`tcp.checksums`). Nothing of it was used.
    #[error("checksum mismatch: {}{}", damage(*here), under_way(*range))]
    Checksum {
        /// What the peer sent was damaged on its way here; otherwise, what was sent to it.
        here: bool,
        /// What was under way of the request, where that is known: an address in the peer's memory, and bytes.
        range: Option<(u64, u64)>,
    },
    /// The peer has said that it closes.
    #[error("it was shut down, and what it held is lost")]
    Closed,
    /// A connection broke, and the peer did not confirm in time that nothing of it can arrive any more.
    /// So the target's range is undefined, and nothing was tried again.
    #[error("{0}; and it did not confirm that nothing sent before can arrive any more")]
    NotFenced(Box<Self>),
    /// More than there may be at a time.
    #[error("{0}")]
    Limit(String),
    /// There is no path MTU that fits.
    #[error("no path MTU: {0}")]
    PathMtu(String),
    /// The port of this device here does not work.
    #[error("the port of {0} here is down: is its link cut?")]
    PortDown(String),
}

/// What to do where one end's memory is not what the other was told.
const fn remedy(status: CompletionStatus) -> &'static str {
    match status {
        CompletionStatus::RemoteAccess => {
            "; its descriptor says of that memory what is not so, or not any more: refresh its segment and look \
             up its buffers again, or have it register the memory anew"
        }
        CompletionStatus::LocalProtection => {
            "; keep memory registered until its requests have ended"
        }
        _ => "",
    }
}

fn damage(here: bool) -> &'static str {
    match here {
        true => "what it sent was damaged on its way here",
        false => "what was sent to it was damaged on its way",
    }
}

fn under_way(range: Option<(u64, u64)>) -> String {
    range.map_or_else(String::new, |(address, length)| {
        format!(", with {length} bytes at {address:#x} of its memory under way")
    })
}

impl FailureReason {
    /// The same, of a request of which so many bytes at this address of the peer were under way.
    pub(crate) fn with_range(&self, address: u64, length: u64) -> Self {
        match self {
            Self::Checksum { here, range: None } => {
                Self::Checksum { here: *here, range: Some((address, length)) }
            }
            Self::NotFenced(reason) => {
                Self::NotFenced(Box::new(reason.with_range(address, length)))
            }
            other => other.clone(),
        }
    }

    /// Whether its text says which bytes it was about.
    pub(crate) fn says_where(&self) -> bool {
        match self {
            Self::File(_) | Self::Checksum { range: Some(_), .. } => true,
            Self::NotFenced(reason) => reason.says_where(),
            _ => false,
        }
    }

    /// Whether connecting again may well go better: the peer, or the way to it, did not answer.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::PathMtu(_) | Self::Limit(_) | Self::PortDown(_) => true,
            Self::Unreachable(kind) => matches!(
                **kind,
                CallErrorKind::Resolve(_)
                    | CallErrorKind::Unreachable { .. }
                    | CallErrorKind::Connect { .. }
                    | CallErrorKind::NoReply { .. }
                    | CallErrorKind::Closed
                    | CallErrorKind::TooMany { .. }
                    | CallErrorKind::Io(_)
            ),
            _ => false,
        }
    }
}
