//! Memory that processes of one user on one host read and write directly.

mod copy;
mod host;
mod memory;
mod message;
mod offer;
mod presence;
mod process;
mod table;

pub use copy::copy;
pub use host::Host;
pub use memory::SharedMemory;
pub use offer::{InUse, MAX_USERS, Offer, OfferError, PATIENCE, Registration, TableFull};
pub use process::ProcessError;
pub use table::{Key, MAX_ENTRIES};
