//! Registered memory that Rust owns or borrows. The other `unsafe` of this crate is in `communicator`, which keeps the
//! borrows as long as its calls, and in `raw` and `registrations`, for memory that is named by its address: there callers
//! promise what borrows promise here.
//!
//! Remotes write at any time they like, as far as regions let them. So here only the destination of a collective
//! that is answered by WRITEs is registered for writing by them, in a protection domain that only its communicator's queue pairs have, as long
//! as the collective runs and until its caller has taken the result; and until then no Rust reference to it is used: a [`Buffer`] was given away, a
//! slice is borrowed by the call that waits.
//!
//! Here is also what keeps the memory that a switch of this process sends from: [`RunningSwitch`].

mod borrowed;
mod buffer;
mod control_block;
mod regions;
mod running_switch;
mod scratch;
mod span;

use millstream_inc::Mode;
use millstream_verbs::Access;

pub(crate) use borrowed::Borrowed;
pub use buffer::Buffer;
pub(crate) use buffer::Pending;
pub(crate) use control_block::ControlBlock;
pub(crate) use regions::{Domains, Operand, Operands, Regions, operand};
pub(crate) use running_switch::RunningSwitch;
pub(crate) use scratch::Scratch;
pub(crate) use span::Span;

const READABLE: Access = Access::empty();

/// What the region of a destination allows: WRITEs of the switch, or receives of our own.
pub(crate) const fn writable(mode: Mode) -> Access {
    match mode {
        Mode::Write => Access::LOCAL_WRITE.union(Access::REMOTE_WRITE),
        Mode::Send => Access::LOCAL_WRITE,
    }
}
