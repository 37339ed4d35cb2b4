//! The codes of `inccl.h`, and what errors are which.

use std::ffi::c_int;
use std::fmt;
use std::io::{self, Write};

use millstream_collective::{AbortReason, CollectiveError, JoinError, Refusal, RegistrationError};
use millstream_verbs::RegionError;

use crate::boundary::{self, Failure};
use crate::last_error;

pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 1;
pub(super) const ARGUMENT: c_int = 2;
pub(super) const UNSUPPORTED: c_int = 3;
pub(super) const CONTROLLER: c_int = 4;
pub(super) const TIMEOUT: c_int = 5;
pub(super) const PEER: c_int = 6;
pub(super) const SWITCH: c_int = 7;
pub(super) const MISMATCH: c_int = 8;
pub(super) const DEVICE: c_int = 9;
pub(super) const PROTOCOL: c_int = 10;
pub(super) const BUSY: c_int = 11;
pub(super) const CANCELED: c_int = 12;
pub(super) const INTERNAL: c_int = 13;

/// Runs the body of a function that returns a code.
pub(super) fn code(body: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    boundary::contained(INTERNAL, body).unwrap_or_else(Failure::told)
}

/// Runs the body of a function that returns nothing. When it fails, a line on stderr says so.
pub(super) fn said(function: &str, body: impl FnOnce() -> Result<(), Failure>) {
    if boundary::contained(INTERNAL, body).map_err(Failure::told).is_err() {
        let line = one_line(function, &last_error::text());
        // One call, so that lines of several processes do not mix. Where there is no stderr, there is nobody to tell.
        let _ = io::stderr().write_all(line.as_bytes());
    }
}

/// Texts can have names that others chose.
fn one_line(function: &str, text: &str) -> String {
    let text: String = text.chars().map(|it| if it.is_control() { ' ' } else { it }).collect();
    format!("{function}: {text}\n")
}

pub(super) fn argument(text: impl ToString) -> Failure {
    Failure::new(ARGUMENT, text)
}

/// A failure with the code of an error.
pub(super) fn failure<E: Coded + fmt::Display>(error: E) -> Failure {
    Failure::new(error.code(), error)
}

/// An error that has a code.
pub(super) trait Coded {
    fn code(&self) -> c_int;
}

impl Coded for JoinError {
    fn code(&self) -> c_int {
        match self {
            Self::Refused(refusal) => refusal.code(),
            Self::Unreachable { .. }
            | Self::Lost { .. }
            | Self::Timeout { .. }
            | Self::Tls { .. }
            | Self::Token { .. } => CONTROLLER,
            Self::Protocol { .. } | Self::Plan(_) => PROTOCOL,
            Self::TooManyDevices { .. } => ARGUMENT,
            Self::Fallback { .. } => SWITCH,
            Self::Path { .. } => SWITCH,
            Self::Agreement(error) => error.code(),
            Self::Create(_) | Self::Region(_) | Self::Modify(_) | Self::InfiniBand { .. } => DEVICE,
            Self::SharedMemory { .. } => UNSUPPORTED,
            Self::Thread(_) => INTERNAL,
        }
    }
}

impl Coded for Refusal {
    fn code(&self) -> c_int {
        match self {
            Self::Incomplete { .. } | Self::Unconnected { .. } => PEER,
            Self::NoSwitch { .. } | Self::SwitchFailed { .. } => SWITCH,
            Self::World { .. } | Self::Depth { .. } | Self::Rank { .. } | Self::Name { .. } => {
                ARGUMENT
            }
            Self::RankTaken { .. } | Self::GroupTaken { .. } | Self::WorldDiffers { .. } => BUSY,
            Self::Aborted { reason } => match reason {
                AbortReason::PeerLost { .. } | AbortReason::Overdue { .. } => PEER,
                AbortReason::Mismatch { .. } => MISMATCH,
                AbortReason::Violation { .. } => PROTOCOL,
                AbortReason::SwitchLost { .. } => SWITCH,
            },
            Self::Protocol { .. } => PROTOCOL,
            _ => CONTROLLER,
        }
    }
}

impl Coded for CollectiveError {
    fn code(&self) -> c_int {
        match self {
            Self::Mismatch { .. } => MISMATCH,
            Self::PeerLost { .. } | Self::Overdue { .. } => PEER,
            Self::SwitchLost { .. } => SWITCH,
            Self::Timeout { .. } => TIMEOUT,
            Self::Controller(_) => CONTROLLER,
            Self::Protocol(_) => PROTOCOL,
            Self::Device(_) | Self::Region(_) => DEVICE,
            Self::Unsupported { .. } => UNSUPPORTED,
            Self::Busy(_) | Self::TooMany { .. } => BUSY,
            Self::Canceled { .. } | Self::Closed => CANCELED,
            Self::Lengths { .. }
            | Self::Parts { .. }
            | Self::Root { .. }
            | Self::TooLong { .. }
            | Self::Null { .. }
            | Self::Overlap
            | Self::NotStarted
            | Self::ForeignBuffer => ARGUMENT,
        }
    }
}

impl Coded for RegistrationError {
    fn code(&self) -> c_int {
        match self {
            Self::Empty | Self::Overlap { .. } | Self::Unknown(_) => ARGUMENT,
            Self::TooMany | Self::InUse(_) => BUSY,
            Self::Region(error) => error.code(),
        }
    }
}

impl Coded for RegionError {
    fn code(&self) -> c_int {
        DEVICE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_one_line_whatever_is_in_it() {
        assert_eq!(one_line("f", "a\nb\x1b[2J\r"), "f: a b [2J \n");
    }

    #[test]
    fn a_panic_is_a_code() {
        assert_eq!(code(|| panic!("here")), INTERNAL);
        assert!(last_error::text().ends_with("here"));
    }

    #[test]
    fn who_is_to_blame_is_in_the_code() {
        let detail = String::new();
        let lost = AbortReason::PeerLost { rank: 1, detail: detail.clone() };
        let refused = |refusal| JoinError::Refused(refusal).code();
        assert_eq!(refused(Refusal::Aborted { reason: lost }), PEER);
        assert_eq!(refused(Refusal::NoSwitch { group: detail.clone(), hosts: None }), SWITCH);
        assert_eq!(refused(Refusal::Rank { rank: 2, world: 2 }), ARGUMENT);
        assert_eq!(refused(Refusal::GroupTaken { group: detail.clone() }), BUSY);
        assert_eq!(refused(Refusal::Limit { what: detail.clone(), limit: 1 }), CONTROLLER);
        let error = CollectiveError::PeerLost { rank: 1, detail };
        assert_eq!((error.code(), JoinError::Agreement(error).code()), (PEER, PEER));
        assert_eq!(RegistrationError::InUse(1).code(), BUSY);
        assert_eq!(CollectiveError::Closed.code(), CANCELED, "by the caller");
    }
}
