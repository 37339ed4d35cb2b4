//! What is told of a rail to those who show or count it.

use core::time::Duration;

use crate::{Instant, Rail, RailSpec, RailState};

/// How a rail is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RailView {
    /// What it is.
    pub spec: RailSpec,
    /// Its state; if it pauses, until when.
    pub state: RailState,
    /// The number of its present or last connection, among all of its flow.
    pub epoch: u64,
    /// Bytes that are in flight, or wait for its fence.
    pub bytes_in_flight: u64,
    /// Slices that are in flight, or wait for its fence.
    pub slices_in_flight: u32,
    /// Bytes that may be in flight.
    pub limit_bytes: u64,
    /// How long the oldest byte in flight has not been acknowledged.
    pub oldest_age: Option<Duration>,
    /// The highest rate that was measured recently, in bytes per second.
    pub peak_rate: Option<u64>,
    /// What it carries now, in bytes per second.
    pub present_rate: Option<u64>,
    /// The shortest time recently from posting a slice to its completion.
    pub smallest_round_trip: Option<Duration>,
    /// It has failed, or is new beside others: one slice at a time shows whether it works.
    pub on_trial: bool,
    /// How often it has failed lately.
    pub failures: u32,
    /// How often it was given up as silent since something completed on it.
    pub silences: u32,
}

impl Rail {
    /// How it is doing, for whoever shows or counts that.
    pub fn view(&self, now: Instant) -> RailView {
        RailView {
            spec: self.spec,
            state: self.state,
            epoch: self.epoch,
            bytes_in_flight: self.bytes,
            slices_in_flight: self.slices,
            limit_bytes: self.limit,
            oldest_age: self.oldest_age(now),
            peak_rate: self.peak_rate(),
            present_rate: self.present_rate(),
            smallest_round_trip: self.smallest_round_trip(),
            on_trial: self.probing,
            failures: self.failures,
            silences: self.silences,
        }
    }
}
