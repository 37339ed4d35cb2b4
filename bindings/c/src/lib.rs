//! `libmillstream.so`: Millstream for programs in C, and in whatever else calls C.
//!
//! Handles are numbers that are never used again, so that one which is wrong, freed or of another engine is an error
//! and nothing worse. No panic leaves a function.
#![allow(dead_code, reason = "the functions that need it follow")]

mod boundary;
mod handles;
mod last_error;
