//! What the driver says of addresses, and of GPUs.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;

use super::capture::Relaxed;
use super::driver::Driver;
use super::{CudaError, FindError, Gpu, ffi};

/// The driver, if this process has loaded it: it knows what addresses are.
#[derive(Clone, Copy)]
pub struct Finder(&'static Driver);

impl Finder {
    /// `None` when the process has not loaded the driver: then all memory is the host's. Asks the system's
    /// loader each time until it has.
    pub fn loaded() -> Option<Self> {
        Driver::loaded().map(Self)
    }

    /// The GPU whose memory this is; `None` when it is memory of the host: pinned and managed memory are,
    /// since the processor can access them.
    pub fn find(self, address: u64, length: u64) -> Result<Option<Arc<Gpu>>, FindError> {
        find(self.0, address, length)
    }
}

impl fmt::Debug for Finder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Finder").finish_non_exhaustive()
    }
}

fn find(driver: &'static Driver, address: u64, length: u64) -> Result<Option<Arc<Gpu>>, FindError> {
    let _relaxed = Relaxed::begin(&driver.functions);
    let Some(first) = driver.attributes(address)? else { return Ok(None) };
    if first.memory == ffi::ARRAY {
        return Err(FindError::Array);
    }
    if first.memory != ffi::DEVICE || first.managed {
        return Ok(None);
    }
    let (ordinal, outside) = (
        first.ordinal,
        FindError::OtherAllocation {
            ordinal: first.ordinal,
            address: first.start,
            length: first.length,
        },
    );
    let last = address.checked_add(length).map(|end| end - 1);
    let end = first.start.saturating_add(first.length);
    let Some(last) = last.filter(|last| (first.start..end).contains(last)) else {
        return Err(outside);
    };
    // A range of addresses that was reserved need not have memory everywhere.
    let last = driver.attributes(last)?;
    if last.is_none_or(|last| last.memory != ffi::DEVICE || last.ordinal != ordinal) {
        return Err(outside);
    }
    let gpu = driver.gpu(ordinal)?;
    driver.synchronous(address);
    Ok(Some(gpu))
}

/// The version of CUDA that the driver has (13000 is 13.0), and the names of the GPUs. Loads and initialises
/// the driver.
pub fn summary() -> Result<(i32, Vec<String>), CudaError> {
    let driver = Driver::load()?;
    driver.initialize()?;
    let mut version = 0;
    // SAFETY: the pointer is to a number that lives.
    driver.call("cuDriverGetVersion", |f| unsafe { (f.driver_version)(&raw mut version) })?;
    let name = |ordinal| {
        let device = driver.device(ordinal)?;
        let mut name = [0 as c_char; 128];
        driver.call("cuDeviceGetName", |f| {
            // SAFETY: the driver writes no more than it is told, and ends it with a 0.
            unsafe { (f.device_name)(name.as_mut_ptr(), name.len() as c_int, device) }
        })?;
        let bytes: Vec<u8> =
            name.iter().map(|&byte| byte as u8).take_while(|&it| it != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    Ok((version, (0..driver.count()?).map(name).collect::<Result<_, CudaError>>()?))
}

/// What the driver says of an address.
struct Attributes {
    memory: c_uint,
    managed: bool,
    ordinal: u32,
    start: u64,
    length: u64,
}

impl Driver {
    /// Calls of the driver that are said to be done when they return are so from here on for the allocation
    /// at this address: for small copies from memory of the host they are not otherwise. What cannot be set
    /// so, as memory that was mapped by hand, is left as it is.
    pub(super) fn synchronous(&self, address: u64) {
        let yes: c_uint = 1;
        let set = self.call("cuPointerSetAttribute", |f| {
            // SAFETY: the attribute is a flag, and the address one of an allocation.
            unsafe { (f.set_pointer_attribute)((&raw const yes).cast(), ffi::SYNC_MEMOPS, address) }
        });
        if let Err(error) = set {
            tracing::debug!(%error, address, "copies to memory of a GPU may be under way when they are said to be done");
        }
    }

    /// `None` when the driver does not know the address, or nobody has initialised it: then there is no
    /// memory of GPUs.
    fn attributes(&self, address: u64) -> Result<Option<Attributes>, CudaError> {
        let (mut memory, mut managed, mut ordinal): (c_uint, c_uint, c_int) = (0, 0, 0);
        let (mut start, mut length): (u64, usize) = (0, 0);
        let names = [
            ffi::MEMORY_TYPE,
            ffi::IS_MANAGED,
            ffi::DEVICE_ORDINAL,
            ffi::RANGE_START,
            ffi::RANGE_SIZE,
        ];
        let values: [*mut c_void; 5] = [
            (&raw mut memory).cast(),
            (&raw mut managed).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut start).cast(),
            (&raw mut length).cast(),
        ];
        // SAFETY: each value has the type that `cuda.h` gives for its attribute (a flag of one byte or of an
        // int fits `managed`, which is 0), and as many are given as are named. The address is only looked up.
        let status = unsafe {
            let count = names.len() as c_uint;
            (self.functions.pointer_attributes)(count, names.as_ptr(), values.as_ptr(), address)
        };
        match status {
            ffi::SUCCESS if memory == 0 => Ok(None),
            ffi::SUCCESS => Ok(Some(Attributes {
                memory,
                managed: managed != 0,
                ordinal: u32::try_from(ordinal).unwrap_or(0),
                start,
                length: length as u64,
            })),
            ffi::NOT_INITIALIZED | ffi::DEINITIALIZED | ffi::INVALID_CONTEXT => Ok(None),
            code => Err(self.error("cuPointerGetAttributes", code)),
        }
    }
}
