//! The transfer engine's decisions as pure state machines.
//!
//! A [`Flow`] is all that is under way between this process and one peer. Requests become tasks; of
//! tasks slices are cut, one after the other, when there is room for them; a [`Policy`] picks a rail
//! for each, which is a local NIC, a NIC of the peer and a transport. Time, randomness and what
//! happened go in; what to do comes out. It has no threads, sockets or clock, so the same code runs
//! under the engine's threads and in the simulator.
//!
//! - inputs: [`Flow::submit`], [`Flow::cancel`], [`Flow::completed`], [`Flow::rail_up`],
//!   [`Flow::rail_tested`], [`Flow::rail_down`], [`Flow::rail_refused`], [`Flow::rail_aborted`],
//!   [`Flow::close_rail`], [`Flow::fence_confirmed`], [`Flow::fence_refused`],
//!   [`Flow::peer_restarted`], [`Flow::peer_gone`], [`Flow::give_up`], [`Flow::shut_down`],
//!   [`Flow::handle_timeout`];
//! - outputs: [`Flow::poll_output`] until it returns `None`, then [`Flow::poll_timeout`].
//!
//! # Fences
//!
//! A packet of a WRITE can be late by any time. If the WRITE was posted on another rail meanwhile, or
//! its task ended and the target's memory is in use for something else, the late packet overwrites
//! what must stay. So when a connection breaks, or is broken to end a task, what was in flight on it
//! is held, and two things are asked for at once:
//!
//! - [`Output::Abort`]: local access ends. READs are free after it.
//! - [`Output::Fence`]: the peer confirms that nothing of the connection can arrive any more: its
//!   queue pair is gone, and nobody writes for it ([`Target`] is that side). WRITEs are free after
//!   both.
//!
//! Then slices are posted again, or their tasks end. If the peer does not confirm in time
//! ([`Config::fence_timeout`] where tasks are to end, [`Config::patience`] where not), the tasks end and say that their target range is undefined
//! ([`Ended::target_undefined`]). So a task that ended otherwise than [`End::Completed`], and does
//! not say so, changes nothing at the target any more.
//!
//! A rail has at most one connection. Each has a number, the epoch, which rises over all connections
//! of a flow. The peer closes the connection before when it accepts a new one of the same rail, and
//! accepts none up to an epoch that it has fenced.
//!
//! A rail whose slices this process copies by itself ([`Access::Own`]) needs no peer: a slice that has
//! ended touches nothing any more. When the peer's process has ended, so has all that could arrive in its
//! memory; but not in files that it kept ([`Access::Durable`]).
//!
//! # Priorities
//!
//! Where the policy has priorities ([`Policy::has_priorities`]; [`Tent`] has), slices that wait for room go by the
//! [`PriorityLevel`] of their task, and within a level by the earliest deadline. No level starves: after 15 slices'
//! lengths of higher levels a slice of one that waits goes first. One slice in eight of a level is of the task
//! that came first, whatever its deadline. While something of a higher level comes, and a second after that, a
//! lower one leaves room on each rail: of it there is in flight what a rail carries in 1 ms, or two slices.
//!
//! # Bounds
//!
//! What a rail has in flight is bounded by bytes: 256 KiB, or what it carried recently in 20 ms or two
//! round trips. Tasks, pieces of lists and pairs of locations have limits. Slices exist from when they
//! are posted, so there are no more than the rails hold. All of it is in slabs that grow to the
//! most there was and are used again: in a steady state nothing is allocated. Every call takes a
//! short time whatever there is, but for those that break a rail, which take time for each slice on it,
//! and for a task that is ended, which takes time for each of its slices.
//!
//! Every task ends: its slices complete or their rail breaks ([`Config::silence`]); a fence is waited
//! for so long; a slice is tried so often ([`Config::max_attempts`]); without a rail there is
//! [`Config::patience`].

#![forbid(unsafe_code)]

mod chain;
mod classic;
mod config;
mod counters;
mod earliest;
mod flow;
mod measure;
mod nearness;
mod output;
mod pieces;
mod policy;
mod priority;
mod rail;
mod request;
mod slab;
mod target;
mod tent;
mod time;
mod view;
mod wheel;

pub use classic::{Classic, Order};
pub use config::Config;
pub use counters::RailCounters;
pub use flow::{Flow, MAX_RAILS};
pub use nearness::{Affinity, Priority};
pub use output::{End, Ended, Failure, Moved, Output, Post, Progress, SliceResult};
pub use policy::{AnyPolicy, Pick, Policy, Rails, SliceInfo};
pub use priority::PriorityLevel;
pub use rail::{Access, Rail, RailId, RailSpec, RailState};
pub use request::{Borders, Opcode, Piece, Ranges, Request, SliceId, SubmitError, TaskId};
pub use target::{Initiator, Target, TargetOutput};
pub use tent::{Tent, TentConfig};
pub use time::Instant;
pub use view::RailView;
