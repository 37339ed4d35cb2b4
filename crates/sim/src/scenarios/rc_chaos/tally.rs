//! What runs did, counted: whether the trouble that was meant to happen did happen.

use core::fmt;
use std::collections::BTreeMap;

use millstream_roce::CompletionStatus;

/// Counts by name, of one run or of many.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    /// Counts one more.
    pub(in crate::scenarios) fn one(&mut self, name: &'static str) {
        self.add(name, 1);
    }

    /// Counts `count` more.
    pub(in crate::scenarios) fn add(&mut self, name: &'static str, count: u64) {
        *self.0.entry(name).or_default() += count;
    }

    /// Counts all that the other counted.
    pub fn merge(&mut self, other: &Self) {
        for (name, count) in &other.0 {
            self.add(name, *count);
        }
    }

    /// How often it happened.
    pub fn count(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// All that happened, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().map(|(name, count)| (*name, *count))
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in self.iter() {
            writeln!(f, "{name:<36} {count:>12}")?;
        }
        Ok(())
    }
}

/// The name of how a send request ended.
pub(super) const fn send_status(status: CompletionStatus) -> &'static str {
    match status {
        CompletionStatus::Success => "send: success",
        CompletionStatus::Flushed => "send: flushed",
        CompletionStatus::RetryExceeded => "send: retry count exceeded",
        CompletionStatus::ReceiverNotReadyExceeded => "send: receiver not ready exceeded",
        CompletionStatus::RemoteAccess => "send: remote access error",
        CompletionStatus::RemoteOperational => "send: remote operational error",
        CompletionStatus::RemoteInvalidRequest => "send: remote invalid request",
        CompletionStatus::LocalProtection => "send: local protection error",
        CompletionStatus::LocalLength => "send: local length error",
        _ => "send: other",
    }
}

/// The name of how a receive request ended.
pub(super) const fn receive_status(status: CompletionStatus) -> &'static str {
    match status {
        CompletionStatus::Success => "receive: success",
        CompletionStatus::Flushed => "receive: flushed",
        CompletionStatus::LocalLength => "receive: local length error",
        CompletionStatus::LocalProtection => "receive: local protection error",
        _ => "receive: other",
    }
}
