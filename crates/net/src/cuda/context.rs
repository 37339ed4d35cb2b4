//! The context in which the driver does something for us.

use std::ffi::c_int;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use super::CudaError;
use super::capture::Relaxed;
use super::driver::Driver;
use super::ffi::{Context, Functions, Status};

/// The primary context of a GPU.
#[derive(Clone)]
pub(super) struct Primary(Arc<Retained>);

struct Retained {
    driver: &'static Driver,
    device: c_int,
    context: Context,
}

// SAFETY: a context may be current on any threads at a time; the driver has its own locks.
unsafe impl Send for Retained {}
// SAFETY: as above.
unsafe impl Sync for Retained {}

impl Primary {
    pub(super) fn retain(driver: &'static Driver, ordinal: u32) -> Result<Self, CudaError> {
        let device = driver.device(ordinal)?;
        let _relaxed = Relaxed::begin(&driver.functions);
        let mut context = ptr::null_mut();
        driver.call("cuDevicePrimaryCtxRetain", |f| {
            // SAFETY: the pointer is to one that lives; `Retained` releases it.
            unsafe { (f.retain_context)(&raw mut context, device) }
        })?;
        Ok(Self(Arc::new(Retained { driver, device, context })))
    }

    /// Calls with the context current, and has the one of before current again.
    pub(super) fn call(
        &self,
        call: &'static str,
        function: impl FnOnce(&Functions) -> Status,
    ) -> Result<(), CudaError> {
        let Retained { driver, context, .. } = *self.0;
        let _relaxed = Relaxed::begin(&driver.functions);
        // SAFETY: the context is retained as long as `self` lives.
        driver.call("cuCtxPushCurrent", |f| unsafe { (f.push_context)(context) })?;
        let result = driver.call(call, function);
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is to one that lives. What is popped is what was pushed.
        let restored =
            driver.call("cuCtxPopCurrent", |f| unsafe { (f.pop_context)(&raw mut popped) });
        result.and(restored)
    }
}

impl fmt::Debug for Primary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Primary").field(&self.0.device).finish()
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        let _relaxed = Relaxed::begin(&self.driver.functions);
        // SAFETY: it was retained once, by this value, and nothing is done in it any more. A process that
        // ends may have lost its driver: then there is nothing to release.
        let _ = self
            .driver
            .call("cuDevicePrimaryCtxRelease", |f| unsafe { (f.release_context)(self.device) });
    }
}
