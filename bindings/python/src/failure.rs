//! Exceptions: what went wrong, its code, whom and which bytes it is about, and what to do.

use millstream_transfer::{
    BatchError, BufferError, FailureReason, FileError, InstallError, NewError, NotifyError,
    RegisterError, SegmentError, SettingsError, SubmitError, SubmitNewError, TransferError,
};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Codes of the C API, for what this binding notices itself.
pub(crate) const INVALID_ARGUMENT: i32 = -1;
pub(crate) const CONTEXT: i32 = -202;
pub(crate) const ENDPOINT: i32 = -201;

/// An exception of the package `millstream`, as it is to be raised.
#[derive(Debug)]
pub(crate) struct Failure {
    class: &'static str,
    message: String,
    code: i32,
    peer: Option<Box<str>>,
    range: Option<(u64, u64)>,
    remedy: Option<Box<str>>,
    /// Which refusal of requests it is.
    kind: Option<&'static str>,
}

impl Failure {
    pub(crate) fn new(class: &'static str, code: i32, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { class, message, code, peer: None, range: None, remedy: None, kind: None }
    }

    /// About the bytes at this address.
    pub(crate) fn range(mut self, address: u64, length: u64) -> Self {
        self.range = Some((address, length));
        self
    }

    pub(crate) fn peer(mut self, peer: impl Into<String>) -> Self {
        let peer: String = peer.into();
        self.peer = Some(peer.into_boxed_str());
        self
    }

    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        let remedy: String = remedy.into();
        self.remedy = Some(remedy.into_boxed_str());
        self
    }

    /// The engine was closed.
    pub(crate) fn closed() -> Self {
        Self::new("ClosedError", CONTEXT, "the engine is closed").remedy("make another Engine")
    }

    /// The process is a child of the one that made the engine.
    pub(crate) fn forked() -> Self {
        let message = "this was made by another process, of which this one is a fork: its threads are not here";
        Self::new("ForkError", CONTEXT, message).remedy(
            "make the Engine after the fork, or start processes by multiprocessing's \"spawn\"",
        )
    }

    /// A bad argument.
    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new("ArgumentError", INVALID_ARGUMENT, message)
    }

    fn raise(self, py: Python<'_>) -> PyResult<PyErr> {
        let values = PyDict::new(py);
        values.set_item("code", self.code)?;
        values.set_item("peer", self.peer.as_deref())?;
        values.set_item("range", self.range)?;
        values.set_item("remedy", self.remedy.as_deref())?;
        if let Some(kind) = self.kind {
            values.set_item("kind", kind)?;
        }
        let class = py.import("millstream.errors")?.getattr(self.class)?;
        Ok(PyErr::from_value(class.call((self.message.as_str(),), Some(&values))?))
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        let message = failure.message.clone();
        Python::attach(|py| failure.raise(py))
            // Without its package there is only this module.
            .unwrap_or_else(|_| PyRuntimeError::new_err(message))
    }
}

impl From<NewError> for Failure {
    fn from(error: NewError) -> Self {
        let failure = Self::new("ConfigError", error.code(), error.to_string());
        match error {
            NewError::Listen { .. } => failure
                .remedy("listen at an address of this machine, without a port or at a free one"),
            NewError::HostMissing(_) => failure.remedy("say by host=... how peers reach it"),
            NewError::Publish(_) | NewError::Metadata(_) => {
                failure.remedy("look whether the metadata server is there, and its URI right")
            }
            NewError::Host(_) | NewError::OutOfRange { .. } | NewError::PolicyFile(_) => failure,
        }
    }
}

impl From<SettingsError> for Failure {
    fn from(error: SettingsError) -> Self {
        Self::new("ConfigError", INVALID_ARGUMENT, error.to_string())
    }
}

impl From<InstallError> for Failure {
    fn from(error: InstallError) -> Self {
        Self::new("ConfigError", error.code(), error.to_string())
            .remedy("choose other transports; `millstream doctor` says what this machine has")
    }
}

impl From<RegisterError> for Failure {
    fn from(error: RegisterError) -> Self {
        let failure = Self::new("RegisterError", error.code(), error.to_string());
        match error {
            RegisterError::Overlap { address, length, .. } => failure
                .range(address, length)
                .remedy("unregister what is there, or register the whole of it once"),
            RegisterError::Defective { address, length, .. } => failure
                .range(address, length)
                .remedy("register memory that can be read and written"),
            RegisterError::Invalid { address, length }
            | RegisterError::Gpu { address, length, .. }
            | RegisterError::Transport { address, length, .. } => failure.range(address, length),
            RegisterError::Unknown { address } => failure
                .range(address, 0)
                .remedy("unregister by the first byte of what was registered"),
            RegisterError::InUse { address, .. } => failure.range(address, 0).remedy("try again"),
            RegisterError::Empty => failure.remedy("register a byte at least"),
            RegisterError::ShutDown => Self::closed(),
            _ => failure,
        }
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        let failure = Self::new("RegisterError", error.code(), error.to_string());
        match error {
            FileError::NotInstalled => {
                failure.remedy("make the engine with the transport \"nvmeof\", or with \"auto\"")
            }
            FileError::Name(_) => failure.remedy("call it by one line without slashes: name=..."),
            FileError::Twice(_) => failure.remedy("say name=..., or unregister that one first"),
            FileError::Open { .. } => {
                failure.remedy("name a file or a block device that this process may open so")
            }
            FileError::Unknown(_) => failure.remedy("name one of Engine.files"),
            FileError::TooMany { .. } => failure.remedy("unregister others first"),
            FileError::Publish(_) => failure.remedy("look whether the metadata server is there"),
            FileError::ShutDown => Self::closed(),
        }
    }
}

impl From<SegmentError> for Failure {
    fn from(error: SegmentError) -> Self {
        let failure = Self::new("SegmentError", error.code(), error.to_string());
        match error {
            SegmentError::Store { name, .. } => failure.peer(name).remedy(
                "look whether its process runs, and whether its name is right: Engine.name there",
            ),
            SegmentError::Silent { name, .. } => {
                failure.peer(name).remedy("submit again later, or have Segment.refresh ask at once")
            }
            _ => failure,
        }
    }
}

impl From<NotifyError> for Failure {
    fn from(error: NotifyError) -> Self {
        let failure = Self::new("SegmentError", ENDPOINT, error.to_string());
        match error {
            NotifyError::Store { segment, .. } => failure.peer(segment),
            NotifyError::Refused { segment } => {
                failure.peer(segment).remedy("have it take its notifications")
            }
            _ => failure,
        }
    }
}

impl From<BatchError> for Failure {
    fn from(error: BatchError) -> Self {
        Self::new("SubmitError", error.code(), error.to_string())
    }
}

impl From<BufferError> for Failure {
    fn from(error: BufferError) -> Self {
        Self::new("RegisterError", error.code(), error.to_string())
    }
}

impl From<SubmitNewError> for Failure {
    fn from(error: SubmitNewError) -> Self {
        match error {
            SubmitNewError::Batch(error) => error.into(),
            SubmitNewError::Submit(error) => error.into(),
        }
    }
}

impl From<SubmitError> for Failure {
    fn from(error: SubmitError) -> Self {
        let class = match error {
            SubmitError::Overloaded { .. } => "OverloadedError",
            SubmitError::DeadlinePassed { .. } | SubmitError::DeadlineInfeasible { .. } => {
                "DeadlineError"
            }
            SubmitError::Restarted { .. } => "RestartedError",
            SubmitError::NoPath { .. }
            | SubmitError::PathRequired { .. }
            | SubmitError::NotServed { .. }
            | SubmitError::NotDurable { .. } => "PathError",
            _ => "SubmitError",
        };
        let kind = Some(error.kind());
        let failure = Self { kind, ..Self::new(class, error.code(), error.to_string()) };
        match error {
            SubmitError::SourceNotRegistered { source_address, length, .. } => failure
                .range(source_address, length)
                .remedy("register the memory here first: Engine.register"),
            SubmitError::TargetOutOfRange { segment, target_offset, length, .. } => {
                failure.peer(segment).range(target_offset, length).remedy(
                    "take addresses of Segment.buffers, after Segment.refresh if it has changed",
                )
            }
            SubmitError::TargetNotAccessible { segment, .. } => {
                failure.peer(segment).remedy("have it registered there with remote=True")
            }
            SubmitError::Restarted { segment, .. } => {
                failure.peer(segment).remedy("look up its buffers again, and submit again")
            }
            SubmitError::NoPath { segment, .. } | SubmitError::PathRequired { segment, .. } => {
                failure
                    .peer(segment)
                    .remedy("make both engines with a transport that leads there, such as \"tcp\"")
            }
            SubmitError::NotServed { segment, .. } => failure.peer(segment).remedy(
                "allow another transport, or make both engines with one of those that may do it",
            ),
            SubmitError::NotDurable { segment, .. } => failure
                .peer(segment)
                .remedy("leave durable=... out: only segments that are files can be so"),
            SubmitError::UnknownPolicy { .. } => {
                failure.remedy("name a class of the file of the setting transfer.policy_file")
            }
            SubmitError::UnknownIntent { .. } => {
                failure.remedy("name an intent of a rule of that file, or leave intent=... out")
            }
            SubmitError::UnknownTransport { .. } | SubmitError::HintNotAllowed { .. } => {
                failure.remedy("take one of these, or leave transport=... out")
            }
            SubmitError::DeadlinePassed { .. } | SubmitError::DeadlineInfeasible { .. } => {
                failure.remedy("give it more time, or submit less at once")
            }
            SubmitError::OverLimit { .. } => {
                failure.remedy("submit it in parts, or raise the limit")
            }
            SubmitError::Overloaded { .. } => {
                failure.remedy("submit again when transfers have ended, or raise the limit")
            }
            SubmitError::Refresh(error) => error.into(),
            SubmitError::ZeroLength { .. } => {
                failure.remedy("leave it out: there is nothing to move")
            }
            SubmitError::ShutDown => Self::closed(),
            _ => failure,
        }
    }
}

impl From<TransferError> for Failure {
    fn from(error: TransferError) -> Self {
        let failure = Self::new("TransferError", error.code(), error.to_string());
        let remedy = match &error.reason {
            FailureReason::Restarted | FailureReason::Closed | FailureReason::ProcessEnded => {
                "open its segment again, and look up its buffers"
            }
            FailureReason::MemoryGone { .. } | FailureReason::Unregistered => {
                "keep memory registered, and where it is, until its transfers have ended"
            }
            FailureReason::ShutDown => "wait for transfers before the engine is closed",
            FailureReason::NotFenced(_) => {
                "write the range again once the peer can be reached: what it holds is undefined"
            }
            _ => "look whether the peer's process runs and can be reached, and submit again",
        };
        let failure = match error.range {
            Some((address, length)) => failure.range(address, length),
            None => failure,
        };
        failure.peer(error.peer.to_string()).remedy(remedy)
    }
}
