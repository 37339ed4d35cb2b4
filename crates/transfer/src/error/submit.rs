//! Why requests are refused when they are submitted.

use std::time::Duration;

use thiserror::Error;

use super::{SegmentError, code};
use crate::SegmentId;

/// Why requests were refused. None of them was accepted and no byte moved.
#[derive(Debug, Error)]
pub enum SubmitError {
    /// The batch does not hold so many.
    #[error(
        "Exceed capacity: the batch holds {capacity} tasks, {submitted} were submitted before, \
         and {requested} are too many"
    )]
    ExceedCapacity {
        /// What it holds.
        capacity: usize,
        /// How many it has.
        submitted: usize,
        /// How many more were to be added.
        requested: usize,
    },
    /// Nothing to move.
    #[error("request {index}: a length of 0 bytes: leave it out, as there is nothing to move")]
    ZeroLength {
        /// Which request, from 0.
        index: usize,
    },
    /// A piece is beyond the end of the address space.
    #[error("request {index}: a piece goes beyond the end of the address space")]
    Overflow {
        /// Which request, from 0.
        index: usize,
    },
    /// The local memory is not registered.
    #[error(
        "request {index}: the {length} bytes at local address {source_address:#x} do not lie in \
         one piece of registered memory: register it first, or take memory that the engine allocates"
    )]
    SourceNotRegistered {
        /// Which request, from 0.
        index: usize,
        /// First local byte.
        source_address: u64,
        /// Bytes.
        length: u64,
    },
    /// The segment is not open.
    #[error(
        "request {index}: segment {segment:?} is not open: open it first, and take the number that it gets"
    )]
    UnknownSegment {
        /// Which request, from 0.
        index: usize,
        /// The segment.
        segment: SegmentId,
    },
    /// The bytes do not lie in one of the segment's buffers.
    #[error(
        "request {index}: {length} bytes at {target_offset:#x} do not lie in a buffer of segment \
         {segment}, {nearest}"
    )]
    TargetOutOfRange {
        /// Which request, from 0.
        index: usize,
        /// The segment's name.
        segment: String,
        /// First byte in the target's process.
        target_offset: u64,
        /// Bytes.
        length: u64,
        /// The buffers that there are.
        nearest: String,
    },
    /// Another process is there. What comes next is for that one.
    #[error(
        "request {index}: the process of segment {segment} was restarted, and what it held is lost: \
         look up its buffers again"
    )]
    Restarted {
        /// Which request, from 0.
        index: usize,
        /// The segment's name.
        segment: String,
    },
    /// The segment's buffer is for its own process only.
    #[error(
        "request {index}: that buffer of segment {segment} is not accessible for remotes: its process must register \
         it as remotely accessible, with a transport that leads there installed"
    )]
    TargetNotAccessible {
        /// Which request, from 0.
        index: usize,
        /// The segment's name.
        segment: String,
    },
    /// No installed transport reaches the segment.
    #[error("request {index}: no way to segment {segment}: {reason}")]
    NoPath {
        /// Which request, from 0.
        index: usize,
        /// The segment's name.
        segment: String,
        /// Why not.
        reason: String,
    },
    /// The transport that [`crate::TransferEngine::require`] names does not reach the segment.
    #[error(
        "request {index}: {required} is required and does not reach segment {segment}: {reason} ({})",
        otherwise(*instead)
    )]
    PathRequired {
        /// Which request, from 0.
        index: usize,
        /// The segment's name.
        segment: String,
        /// The transport's name.
        required: &'static str,
        /// Why not.
        reason: String,
        /// The transport that would do it otherwise.
        instead: Option<&'static str>,
    },
    /// A transport hint, or a class of the policy file, allows only transports that do not reach the segment.
    #[error(
        "request {index}: only {allowed} may do it, by its transport hint or policy, and does not reach segment \
         {segment}: {reason} ({})",
        otherwise(*instead)
    )]
    NotServed {
        /// Which request, from 0.
        index: usize,
        /// The segment's name.
        segment: String,
        /// The transports that may.
        allowed: String,
        /// Why they do not.
        reason: String,
        /// The transport that would do it otherwise.
        instead: Option<&'static str>,
    },
    /// It was to be durable ([`crate::SubmitOptions::durable`]), and the transport that would do it does not let a
    /// WRITE wait for that.
    #[error(
        "request {index}: it is to be durable, and nothing that goes to segment {segment} by {transport} is: \
         submit it without that, or to a segment that is a file, by nvmeof"
    )]
    NotDurable {
        /// Which request, from 0.
        index: usize,
        /// The segment's name.
        segment: String,
        /// The transport that would do it otherwise.
        transport: &'static str,
    },
    /// A transport hint names no transport.
    #[error("the transport hint {hint:?} names no transport: there are {known}")]
    UnknownTransport {
        /// What was given.
        hint: String,
        /// The names of all transports.
        known: String,
    },
    /// A transport hint names a transport that the class of the policy file does not allow.
    #[error("the transport hint {hint} is none of the transports of policy {policy:?}: {allowed}")]
    HintNotAllowed {
        /// The transport.
        hint: String,
        /// The class.
        policy: String,
        /// Its transports.
        allowed: String,
    },
    /// The policy file has no such class.
    #[error("there is no policy {policy:?}: the policy file has the classes {known}")]
    UnknownPolicy {
        /// What was given.
        policy: String,
        /// The classes that there are.
        known: String,
    },
    /// No rule of the policy file is for such an intent.
    #[error("the intent {intent:?} is in no rule of the policy file, which has rules for {known}")]
    UnknownIntent {
        /// What was given.
        intent: String,
        /// The intents that there are.
        known: String,
    },
    /// The deadline was over before the requests were submitted.
    #[error(
        "request {index}: its deadline passed {late:?} before it was submitted: give it a later one"
    )]
    DeadlinePassed {
        /// Which request, from 0.
        index: usize,
        /// Since when.
        late: Duration,
    },
    /// The rails to the peer cannot carry it in time.
    #[error(
        "request {index}: its deadline is in {left:?}, and with those before it {bytes} bytes are to be moved, \
         over rails that carry {rate} bytes/s at most: give it more time, or submit less"
    )]
    DeadlineInfeasible {
        /// Which request, from 0.
        index: usize,
        /// Bytes of it and of those before it for the same peer.
        bytes: u64,
        /// What was measured lately of all rails to the peer, in bytes per second.
        rate: u64,
        /// The time left.
        left: Duration,
    },
    /// More would be in flight than the policy file allows.
    #[error(
        "request {index}: {} allows {limit} {unit} in flight, and {in_flight} are: submit it again when some \
         have ended, or raise the limit",
        rule(class.as_deref(), unit)
    )]
    Overloaded {
        /// Which request, from 0.
        index: usize,
        /// The class whose limit it is; the engine's, if there is none.
        class: Option<String>,
        /// What is limited: `bytes` or `requests`.
        unit: &'static str,
        /// The limit.
        limit: u64,
        /// What is in flight.
        in_flight: u64,
    },
    /// The requests are more than the policy file ever allows, whatever else is in flight.
    #[error(
        "request {index}: with those before it in its submission it is more than {}, {limit} {unit}, allows \
         even alone: split the submission, or raise the limit",
        rule(class.as_deref(), unit)
    )]
    OverLimit {
        /// Which request, from 0.
        index: usize,
        /// The class whose limit it is; the engine's, if there is none.
        class: Option<String>,
        /// What is limited: `bytes` or `requests`.
        unit: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The segment's descriptor was out of date and could not be had again.
    #[error(transparent)]
    Refresh(#[from] SegmentError),
    /// The engine is gone.
    #[error("the engine has been shut down")]
    ShutDown,
}

impl SubmitError {
    /// The number of the C API.
    pub fn code(&self) -> i32 {
        match self {
            Self::ExceedCapacity { .. } | Self::Overloaded { .. } => code::TOO_MANY_REQUESTS,
            Self::UnknownTransport { .. }
            | Self::HintNotAllowed { .. }
            | Self::UnknownPolicy { .. }
            | Self::UnknownIntent { .. }
            | Self::OverLimit { .. }
            | Self::DeadlinePassed { .. }
            | Self::DeadlineInfeasible { .. }
            | Self::ZeroLength { .. }
            | Self::Overflow { .. }
            | Self::UnknownSegment { .. }
            | Self::TargetOutOfRange { .. }
            | Self::TargetNotAccessible { .. } => code::INVALID_ARGUMENT,
            Self::SourceNotRegistered { .. } => code::ADDRESS_NOT_REGISTERED,
            Self::NoPath { .. }
            | Self::PathRequired { .. }
            | Self::NotServed { .. }
            | Self::NotDurable { .. } => code::DEVICE_NOT_FOUND,
            Self::Refresh(error) => error.code(),
            Self::Restarted { .. } => code::ENDPOINT,
            Self::ShutDown => code::CONTEXT,
        }
    }
}

impl SubmitError {
    /// Which of these it is, in a word that stays: what bindings name it by.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::ExceedCapacity { .. } => "exceed_capacity",
            Self::ZeroLength { .. } => "zero_length",
            Self::Overflow { .. } => "overflow",
            Self::SourceNotRegistered { .. } => "source_not_registered",
            Self::UnknownSegment { .. } => "unknown_segment",
            Self::TargetOutOfRange { .. } => "target_out_of_range",
            Self::Restarted { .. } => "restarted",
            Self::TargetNotAccessible { .. } => "target_not_accessible",
            Self::NoPath { .. } => "no_path",
            Self::PathRequired { .. } => "path_required",
            Self::NotServed { .. } => "not_served",
            Self::NotDurable { .. } => "not_durable",
            Self::UnknownTransport { .. } => "unknown_transport",
            Self::HintNotAllowed { .. } => "hint_not_allowed",
            Self::UnknownPolicy { .. } => "unknown_policy",
            Self::UnknownIntent { .. } => "unknown_intent",
            Self::DeadlinePassed { .. } => "deadline_passed",
            Self::DeadlineInfeasible { .. } => "deadline_infeasible",
            Self::Overloaded { .. } => "overloaded",
            Self::OverLimit { .. } => "over_limit",
            Self::Refresh(_) => "refresh",
            Self::ShutDown => "shut_down",
        }
    }
}

/// Which limit of the policy file is meant.
fn rule(class: Option<&str>, unit: &str) -> String {
    let of = class.map_or("limits".to_owned(), |class| format!("class {class:?}"));
    format!("{unit}_in_flight of {of}")
}

/// What would become of a request if no transport were required.
fn otherwise(instead: Option<&'static str>) -> String {
    match instead {
        Some(name) => format!("it would go by {name}"),
        None => "no other transport reaches it either".to_owned(),
    }
}
