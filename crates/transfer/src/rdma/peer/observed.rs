//! What is to be seen of a peer's rails.

use millstream_transfer_core::{Instant, Rail, RailCounters, RailState};

use super::super::RdmaTransport;
use super::{Peer, Way};
use crate::metrics::{RailMetrics, RailStatus};

impl Peer {
    /// Adds the rails on which anything was tried.
    pub(in super::super) fn observe(&self, rails: &mut Vec<RailMetrics>) {
        let state = self.lock();
        let now = self.now();
        let found = state.flow.rails().iter().zip(&self.rails).zip(&state.reasons);
        for ((rail, way), reason) in found {
            let untouched =
                rail.state() == RailState::Down && *rail.counters() == RailCounters::default();
            if !untouched {
                let reason = reason.as_ref().map(ToString::to_string);
                rails.push(RailMetrics { reason, ..self.observe_rail(now, rail, way) });
            }
        }
    }

    fn observe_rail(&self, now: Instant, rail: &Rail, way: &Way) -> RailMetrics {
        let observed = RailMetrics {
            transport: RdmaTransport::NAME.to_owned(),
            peer: (*self.name).to_owned(),
            local_nic: self.shared.devices[way.local].device.name().to_owned(),
            peer_nic: way.nic.nic.clone(),
            state: match rail.state() {
                RailState::Down => RailStatus::Down,
                RailState::Connecting => RailStatus::Connecting,
                RailState::Up => RailStatus::Up,
                RailState::Paused(_) => RailStatus::Paused,
                RailState::Fencing => RailStatus::Fencing,
            },
            limit_bytes: Some(rail.limit_bytes()),
            peak_rate_bytes_per_s: rail.peak_rate(),
            smallest_round_trip_s: rail.smallest_round_trip().map(|time| time.as_secs_f64()),
            oldest_age_s: rail.oldest_age(now).map(|time| time.as_secs_f64()),
            ..RailMetrics::default()
        };
        let (slices, bytes) = (rail.slices_in_flight(), rail.bytes_in_flight());
        observed.counted(rail.counters(), slices.into(), bytes)
    }
}
