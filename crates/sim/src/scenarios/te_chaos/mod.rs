//! The transfer engine's decisions under everything at once.
#![allow(
    dead_code,
    unused_imports,
    unused_variables,
    clippy::needless_pass_by_ref_mut,
    clippy::unused_self,
    reason = "the scenario that uses this comes next"
)]

mod ledger;
mod nic;
mod process;
mod world;
