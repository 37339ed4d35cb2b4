//! Hosts and links on one machine, for tests and measurements: network namespaces joined by veth
//! links that have a rate and an MTU, and that can be cut.
//!
//! A [`Plan`] says what there is, in Rust or as a TOML file. [`Lab::up`] builds it, as root or, where
//! users may make user namespaces, as anyone. `ip`, `tc`, `unshare` and `nsenter` do the work.

#![forbid(unsafe_code)]

mod error;
mod handle;
mod keeper;
mod lab;
mod layout;
mod plan;
mod rate;

pub use error::{LabError, PlanError};
pub use handle::Handle;
pub use lab::Lab;
pub use layout::{Host, Layout, Nic};
pub use plan::{Family, Link, Plan};
pub use rate::{ParseRateError, Rate};
