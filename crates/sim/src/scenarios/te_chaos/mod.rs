//! The transfer engine's decisions under everything at once.
#![allow(
    dead_code,
    unused_imports,
    unused_variables,
    clippy::needless_pass_by_ref_mut,
    clippy::unused_self,
    reason = "the scenario that uses this comes next"
)]

mod control;
mod director;
mod ledger;
mod nic;
mod process;
mod traffic;
mod trouble;
mod world;

use millstream_transfer_core::{End, Ended, Failure};

/// The name of how a task ended.
const fn name_of_end(ended: &Ended) -> &'static str {
    match (ended.end, ended.target_undefined) {
        (End::Completed, _) => "ended: completed",
        (End::Canceled, false) => "ended: canceled",
        (End::Canceled, true) => "ended: canceled, undefined",
        (End::Timeout, false) => "ended: timeout",
        (End::Timeout, true) => "ended: timeout, undefined",
        (End::Failed(Failure::NotFenced), _) => "ended: not fenced, undefined",
        (End::Failed(_), true) => "ended: failed, undefined",
        (End::Failed(Failure::Refused), _) => "ended: refused",
        (End::Failed(Failure::Attempts), _) => "ended: attempts",
        (End::Failed(Failure::NoRail), _) => "ended: no rail",
        (End::Failed(Failure::PeerRestarted), _) => "ended: peer restarted",
    }
}
