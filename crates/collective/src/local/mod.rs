//! Collectives of ranks that share memory: all ranks of a group, without a packet, or those of one of its hosts, of which
//! the first is on the wire for all of them (`hosts.rs`, `wire.rs`).
//!
//! The first of them makes the memory and gives it to the others (`form.rs`). All that ranks agree on there are *barriers*: each
//! rank arrives at one after the other, and goes on when all have arrived. Between two barriers a rank writes to its own
//! part of the memory only, and reads what others wrote before the barrier (`run.rs`). A rank that waits looks now and then
//! whether those who have not arrived live (`wait.rs`); who finds what is wrong says so in the memory, once, and all ranks
//! end with that (`failure.rs`). When the first one looks for other trees, the others hear it there, too (`recovery.rs`).
//!
//! What others write there is never believed where it could make this rank touch other memory: lengths and offsets are
//! this rank's own, from its own call.

mod area;
mod cut;
mod engine;
mod failure;
mod form;
mod hosts;
mod layout;
mod members;
mod recovery;
mod reduce;
mod run;
mod wait;
mod wire;

pub(crate) use engine::LocalEngine;
pub(crate) use form::{Forming, Meeting};
pub(crate) use members::Members;
pub(crate) use recovery::Recovery;
