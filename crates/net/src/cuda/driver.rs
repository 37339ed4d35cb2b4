//! The driver of this process.

use std::collections::HashMap;
use std::ffi::{CStr, c_int};
use std::ptr;
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError, Weak};

use super::context::Primary;
use super::ffi::{self, Functions, Status};
use super::{CudaError, Gpu};
use crate::forks::loading;

static DRIVER: OnceLock<Driver> = OnceLock::new();

pub(super) struct Driver {
    pub(super) functions: Functions,
    /// Those in use, by their numbers.
    gpus: Mutex<HashMap<u32, Weak<Gpu>>>,
}

/// The GPU with this number. Loads and initialises the driver if need be.
pub fn open(ordinal: u32) -> Result<Arc<Gpu>, CudaError> {
    let driver = Driver::load()?;
    driver.initialize()?;
    let count = driver.count()?;
    if ordinal >= count {
        return Err(CudaError::NoDevice { ordinal, count });
    }
    driver.gpu(ordinal)
}

impl Driver {
    /// `None` when the process has not loaded it, or it is one that we cannot use: of which it warns once.
    pub(super) fn loaded() -> Option<&'static Self> {
        if let Some(driver) = DRIVER.get() {
            return Some(driver);
        }
        let functions = loading(Functions::loaded)?;
        let unusable = |error: &_| {
            static WARNED: Once = Once::new();
            WARNED.call_once(|| tracing::warn!(%error, "memory of GPUs is not recognised"));
        };
        functions.inspect_err(unusable).ok().map(Self::keep)
    }

    pub(super) fn load() -> Result<&'static Self, CudaError> {
        match DRIVER.get() {
            Some(driver) => Ok(driver),
            None => loading(Functions::load).map(Self::keep),
        }
    }

    fn keep(functions: Functions) -> &'static Self {
        DRIVER.get_or_init(|| Self { functions, gpus: Mutex::default() })
    }

    pub(super) fn call(
        &self,
        call: &'static str,
        function: impl FnOnce(&Functions) -> Status,
    ) -> Result<(), CudaError> {
        match function(&self.functions) {
            ffi::SUCCESS => Ok(()),
            code => Err(self.error(call, code)),
        }
    }

    pub(super) fn error(&self, call: &'static str, code: Status) -> CudaError {
        let mut name = ptr::null();
        // SAFETY: the driver writes the pointer, to text that stays, or leaves it null.
        let status = unsafe { (self.functions.error_name)(code, &raw mut name) };
        let name = match status == ffi::SUCCESS && !name.is_null() {
            // SAFETY: as above.
            true => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            false => "an error without a name".to_owned(),
        };
        CudaError::Call { call, code, name }
    }

    pub(super) fn initialize(&self) -> Result<(), CudaError> {
        // SAFETY: no flags are defined; it may be called again.
        self.call("cuInit", |f| unsafe { (f.init)(0) })
    }

    pub(super) fn count(&self) -> Result<u32, CudaError> {
        let mut count = 0;
        // SAFETY: the pointer is to a number that lives.
        self.call("cuDeviceGetCount", |f| unsafe { (f.device_count)(&raw mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    pub(super) fn device(&self, ordinal: u32) -> Result<c_int, CudaError> {
        let mut device = 0;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: as in `count`.
        self.call("cuDeviceGet", |f| unsafe { (f.device)(&raw mut device, number) })?;
        Ok(device)
    }

    pub(super) fn gpu(&'static self, ordinal: u32) -> Result<Arc<Gpu>, CudaError> {
        let mut gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = gpus.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(gpu);
        }
        let primary = Primary::retain(self, ordinal)?;
        let gpu = Gpu::new(ordinal, Box::new(primary));
        gpus.insert(ordinal, Arc::downgrade(&gpu));
        Ok(gpu)
    }
}
