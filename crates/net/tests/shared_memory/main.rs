//! Shared memory between processes: who is let in, what they can touch, and what becomes of it when one
//! of them dies, stops or lies.

#![cfg(not(millstream_loom))]

mod access;
mod actor;
mod admission;
mod dying;
mod fake;
mod fixture;
mod lies;
mod signals;
