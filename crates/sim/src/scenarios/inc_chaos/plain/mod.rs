//! Communicators of hosts that send no descriptors: each SEND is a vector of 32-bit integers, answered by a SEND of the sum.
//!
//! All hosts of such a communicator are of that kind, and it has one switch. They hear of nothing by messages: who waits for an
//! answer is told by whoever watches over the communicator, in place of the controller, when it has failed for anyone.

mod build;
mod check;
mod draw;
mod member;

pub(super) use draw::Plain;
pub(super) use member::Member;
