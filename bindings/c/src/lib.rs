//! `libmillstream.so`: Millstream for programs in C, and in whatever else calls C.
//!
//! [`transfer`] is the C API of the original transfer engine: `transfer_engine_c.h`. What is ours alone is
//! declared in `millstream.h`. docs/c.md says how to use them. [`inccl`] is INCCL, the C API of collectives: `inccl.h`,
//! and docs/inccl.md.
//!
//! Handles are numbers that are never used again, so that one which is wrong, freed or of another engine is an error
//! and nothing worse. No panic leaves a function.

mod boundary;
mod calls;
mod forked;
mod handles;
mod inccl;
mod last_error;
mod transfer;
