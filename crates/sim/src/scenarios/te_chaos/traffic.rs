//! Transfers: drawn, submitted, canceled; and the last ones, which must succeed.

use core::time::Duration;

use millstream_transfer_core::{End, Ended, Failure, Opcode, Piece, Ranges, Request, SubmitError};

use super::director::{Director, Event, Network, Phase, core_time};
use super::process::{Peer, Transfer};
use super::world::{PROCESSES, duration, pick};

/// From one burst of transfers to the next, on average half of this.
const BURST_INTERVAL: Duration = Duration::from_millis(1400);
/// Whatever is submitted without a deadline is over in this time.
const LONGEST: Duration = Duration::from_secs(120);
/// A task that is to end does so in the time of a fence, and what a tick and quiescing take.
const END: Duration = Duration::from_millis(2010);

impl Director {
    /// Some transfers at once.
    pub(super) fn burst(&mut self, network: &mut Network<'_>) {}

    pub(super) fn cancel(&mut self, network: &mut Network<'_>, user: u64) {}

    /// Goes on to the next phase when the present one is over.
    pub(super) fn go_on(&mut self, network: &mut Network<'_>) {}

    pub(super) fn last_transfer(
        &mut self,
        network: &mut Network<'_>,
        own: usize,
        peer: usize,
        tries: u32,
    ) {
    }

    pub(super) fn last_ended(
        &mut self,
        network: &mut Network<'_>,
        transfer: &Transfer,
        ended: &Ended,
    ) {
    }
}
