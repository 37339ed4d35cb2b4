//! Hosts and links on one machine, for tests and measurements: network namespaces joined by veth
//! links that have a rate and an MTU, and that can be cut.
//!
//! A [`Plan`] says what there is, in Rust or as a TOML file. [`Lab::up`] builds it, as root or, where
//! users may make user namespaces, as anyone. `ip`, `tc`, `unshare` and `nsenter` do the work.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use millstream_lab::{Cut, Lab, Link, Plan, Rate};
//!
//! let link = Link { rate: Some(Rate::from_mbit(200)), ..Link::default() };
//! let mut lab = Lab::up(&Plan::new().hosts(["a", "b"]).links("a", "b", 4, &link))?;
//! let mut ping = lab.command("a", "ping")?;
//! ping.args(["-c1", &lab.host("b")?.addresses()[0].to_string()]).status()?;
//! lab.cut("b", "eth3", Cut::Silent)?;
//! lab.restore("b", "eth3")?;
//! # Ok(())
//! # }
//! ```
//!
//! A [`Stopwatch`] measures for tests what is promised to be over in time, on a machine that is busy or
//! stands still now and then. An [`RdmaLibrary`] shows which RDMA devices a program looks for, on a machine without.

#![forbid(unsafe_code)]

mod error;
mod handle;
mod keeper;
mod lab;
mod layout;
mod plan;
mod rate;
mod rdma_library;
mod record;
mod routes;
mod script;
mod stopwatch;

pub use error::{LabError, PlanError};
pub use handle::Handle;
pub use lab::Lab;
pub use layout::{Host, Layout, Nic};
pub use plan::{Family, Link, Plan};
pub use rate::{ParseRateError, Rate};
pub use rdma_library::RdmaLibrary;
pub use record::{Labs, Process, Record};
pub use script::Cut;
pub use stopwatch::{Stopwatch, Took};
