//! The transfer engine's decisions under everything at once.
#![allow(dead_code, reason = "the scenario that uses this comes next")]

mod ledger;
mod nic;
