//! The transfer engine for Python: the module `millstream._native`. What users import, with types and
//! documentation, is the package in `python/millstream`.
//!
//! Whatever may take long runs detached from the interpreter, so that other threads of Python go on meanwhile.

// The attribute macros of pyo3 make items public that nobody can name.
#![allow(unreachable_pub)]

mod engine;
mod failure;
mod files;
mod memory;
mod mooncake;
mod numbers;
mod region;
mod segment;
mod shared;
mod transfer;
mod wakeup;

use pyo3::prelude::*;

/// The native part of the package `millstream`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::engine::Engine;
    #[pymodule_export]
    use super::mooncake::{MooncakeEngine, TransferNotify, TransferOpcode};
    #[pymodule_export]
    use super::region::{Range, Region};
    #[pymodule_export]
    use super::segment::Segment;
    #[pymodule_export]
    use super::transfer::{Batch, Status, Transfer};
    #[pymodule_export]
    use super::wakeup::Wakeup;
}
