//! Memory that processes of one user on one host read and write directly.
//!
//! An [`Offer`] is the side whose memory it is, a [`Peer`] the other one. They find each other by a UNIX
//! socket in the abstract namespace, and pass descriptors over it: of a table of what is registered,
//! of a page on which the peer says what it is accessing (`presence.rs`), and of each [`SharedMemory`] that the
//! peer asks for. That is mapped on both sides. Other memory, which the user brought, is read and
//! written by process_vm_readv(2) and process_vm_writev(2).
//!
//! Members of a group map one memory, all of them ([`GroupMemory`]), sleep at numbers in it ([`futex`]), and see which
//! members have ended ([`MemberProcesses`]).
//!
//! **Whom we trust.** The kernel keeps other users out: both ends check whose the other is. A process
//! of our own user could as well attach a debugger to us; still nothing that it writes into
//! shared pages makes us touch memory that is not meant: what is mapped is checked to stay there, ranges
//! are held against what is mapped here, the table cannot be written by peers, and each peer has a
//! page of its own. What a peer can do is to fail its own requests, to write what it may write at any
//! time, and to hold up the unregistration of memory that it says it is accessing.

mod copy;
pub mod futex;
mod group;
mod host;
mod life;
mod members;
mod memory;
mod message;
mod offer;
mod peer;
mod presence;
mod process;
mod table;

pub use group::{GroupDoor, GroupGuest, GroupMemory, GroupOwner};
pub use host::Host;
pub use members::{MemberProcesses, own_process};
pub use memory::SharedMemory;
pub use offer::{InUse, MAX_USERS, Offer, OfferError, PATIENCE, Registration, TableFull};
pub use peer::{AccessError, ConnectError, Peer, Region, Visit};
pub use process::ProcessError;
pub use table::{Key, MAX_ENTRIES};
