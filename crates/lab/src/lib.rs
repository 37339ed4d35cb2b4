//! Hosts and links on one machine, for tests and measurements: network namespaces joined by veth
//! links that have a rate and an MTU, and that can be cut.
//!
//! A [`Plan`] says what there is, in Rust or as a TOML file.

#![forbid(unsafe_code)]

mod error;
mod layout;
mod plan;
mod rate;

pub use error::{LabError, PlanError};
pub use layout::{Host, Layout, Nic};
pub use plan::{Family, Link, Plan};
pub use rate::{ParseRateError, Rate};
