//! The provider `ibverbs`: the system's RDMA devices, by libibverbs.
//!
//! [`ffi`] declares what is used of the library, [`objects`] owns its objects and makes all the
//! calls; the rest is safe code. It adds what the library leaves open, so that both providers are
//! used alike: completions that always say which request they are of ([`work`]), waiting and
//! handlers ([`events`]), the same checks of attributes and requests, and completions for what a
//! device that is gone will never complete.

mod address_handles;
mod completion_queue;
mod device;
mod error;
mod events;
#[cfg(test)]
mod fake;
mod ffi;
mod gid;
mod memory_region;
mod objects;
mod queue_pair;
mod receive_batch;
mod shared_receive_queue;
mod sysfs;
mod work;

pub use device::IbverbsConfig;
pub use error::IbverbsError;

pub(crate) use completion_queue::CompletionQueue;
pub(crate) use device::{Device, list};
pub(crate) use memory_region::{MemoryRegion, ProtectionDomain};
pub(crate) use queue_pair::QueuePair;
pub(crate) use shared_receive_queue::SharedReceiveQueue;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks; a panic of another thread that held it is not this one's affair, as what the locks here
/// guard is whole between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
