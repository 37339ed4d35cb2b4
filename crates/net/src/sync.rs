//! What threads share, as the rest of the crate uses it.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};
pub(crate) use std::thread_local;
