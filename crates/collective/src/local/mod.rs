//! Collectives of ranks that are all of one machine: through memory that they share, without a packet.
//!
//! Rank 0 makes the memory and gives it to the others ([`form`]). All that ranks agree on there are *barriers*: each
//! rank arrives at one after the other, and goes on when all have arrived. Between two barriers a rank writes to its own
//! part of the memory only, and reads what others wrote before the barrier (`run.rs`). A rank that waits looks now and then
//! whether those who have not arrived live (`wait.rs`); who finds what is wrong says so in the memory, once, and all ranks
//! end with that (`failure.rs`).
//!
//! What others write there is never believed where it could make this rank touch other memory: lengths and offsets are
//! this rank's own, from its own call.

mod area;
mod cut;
mod engine;
mod failure;
mod form;
mod layout;
mod reduce;
mod run;
mod wait;

pub(crate) use engine::LocalEngine;
pub(crate) use form::{Meeting, form};
