//! Calls of ours while the application captures a graph.
//!
//! While a stream is captured, the driver refuses calls that might touch what is captured (to allocate, to wait),
//! and the capture fails with them: on all threads where it has the mode of `cuStreamBeginCapture`'s default.
//! Ours have nothing to do with it: threads say so by their own mode.

use std::ffi::c_int;
use std::marker::PhantomData;

use super::ffi::{self, Functions};

/// As long as it lives, calls of this thread and captures of the application do not disturb each other.
#[must_use]
pub(super) struct Relaxed<'a> {
    functions: &'a Functions,
    /// The thread's mode of before, if it was changed.
    before: Option<c_int>,
    /// The mode is the thread's.
    _here: PhantomData<*const ()>,
}

impl<'a> Relaxed<'a> {
    pub(super) fn begin(functions: &'a Functions) -> Self {
        let before = exchange(functions, ffi::CAPTURE_RELAXED);
        Self { functions, before, _here: PhantomData }
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            exchange(self.functions, before);
        }
    }
}

/// Sets the thread's mode; the one of before. `None` where the driver does not do it: then nothing has
/// changed.
fn exchange(functions: &Functions, mut mode: c_int) -> Option<c_int> {
    let exchange = functions.exchange_capture_mode?;
    // SAFETY: the pointer is to a number that lives.
    let status = unsafe { exchange(&raw mut mode) };
    (status == ffi::SUCCESS).then_some(mode)
}
