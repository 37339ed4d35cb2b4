//! What threads share, as the rest of the crate uses it. The model checks replace it by
//! `model/sync.rs`.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};
pub(crate) use std::thread_local;
