//! A communicator that goes on when a switch is lost, in mid-call too (`docs/fallback.md`).
//!
//! Real are the workers, the switches, what a rank reports, keeps and makes up for (`millstream_inc::failover`), and all
//! packets. What the library does around that (`crates/collective/src/failover`, `engine.rs` and `tree.rs`) is written once
//! more, without threads. In place of the controller somebody tells the ranks, and brings them together again.

mod connect;
mod director;
mod draw;
mod engine;
mod rank;
mod repair;
mod retained;

pub(super) use director::{Step, Watch, is_node};
pub(super) use draw::Group;
pub(super) use rank::Rank;
