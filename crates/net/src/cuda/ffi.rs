//! What is used of libcuda: its functions, found when it is loaded.
//!
//! Written by hand after `cuda.h`. The names with `_v2` are what that header makes of those without, since
//! CUDA 4.0 (`cuMemcpyHtoDAsync`) or 11.0 (`cuDevicePrimaryCtxRelease`); they do not change any more.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::os::unix::Library;

use super::CudaError;

const FILE: &str = "libcuda.so.1";

/// `CUresult`.
pub(super) type Status = c_int;
pub(super) const SUCCESS: Status = 0;
pub(super) const NOT_INITIALIZED: Status = 3;
pub(super) const DEINITIALIZED: Status = 4;
pub(super) const INVALID_CONTEXT: Status = 201;

/// `CUcontext`, `CUstream`.
pub(super) type Context = *mut c_void;
pub(super) type Stream = *mut c_void;

/// `CUpointer_attribute`.
pub(super) const MEMORY_TYPE: c_uint = 2;
pub(super) const SYNC_MEMOPS: c_uint = 6;
pub(super) const IS_MANAGED: c_uint = 8;
pub(super) const DEVICE_ORDINAL: c_uint = 9;
pub(super) const RANGE_START: c_uint = 11;
pub(super) const RANGE_SIZE: c_uint = 12;

/// `CUmemorytype`; 0 is memory that the driver does not know.
pub(super) const DEVICE: c_uint = 2;
pub(super) const ARRAY: c_uint = 3;

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for all contexts.
pub(super) const PORTABLE: c_uint = 1;
/// `CU_STREAM_NON_BLOCKING`: does not wait for the default stream, nor that for it.
pub(super) const NON_BLOCKING: c_uint = 1;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(super) const CAPTURE_RELAXED: c_int = 2;

type ExchangeCaptureMode = unsafe extern "C" fn(*mut c_int) -> Status;

/// The functions.
macro_rules! functions {
    ($($name:ident as $symbol:literal ($($argument:ty),*);)*) => {
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> Status,)*
            /// `cuThreadExchangeStreamCaptureMode`, since CUDA 10.1.
            pub(super) exchange_capture_mode: Option<ExchangeCaptureMode>,
        }

        impl Functions {
            /// Those of a library that stays loaded.
            fn of(library: Library) -> Result<Self, CudaError> {
                let functions = Self {
                    $($name: {
                        // SAFETY: the type is the one that `cuda.h` declares.
                        let found = unsafe { library.get($symbol.as_bytes()) };
                        *found.map_err(|_| CudaError::Symbol($symbol))?
                    },)*
                    exchange_capture_mode: {
                        // SAFETY: as above.
                        let found = unsafe { library.get(b"cuThreadExchangeStreamCaptureMode") };
                        found.ok().map(|found| *found)
                    },
                };
                // It has threads and handlers of its own, which an unloading would pull the ground from.
                std::mem::forget(library);
                Ok(functions)
            }
        }
    };
}

functions! {
    init as "cuInit" (c_uint);
    error_name as "cuGetErrorName" (Status, *mut *const c_char);
    driver_version as "cuDriverGetVersion" (*mut c_int);
    device_count as "cuDeviceGetCount" (*mut c_int);
    device as "cuDeviceGet" (*mut c_int, c_int);
    device_name as "cuDeviceGetName" (*mut c_char, c_int, c_int);
    retain_context as "cuDevicePrimaryCtxRetain" (*mut Context, c_int);
    release_context as "cuDevicePrimaryCtxRelease_v2" (c_int);
    push_context as "cuCtxPushCurrent_v2" (Context);
    pop_context as "cuCtxPopCurrent_v2" (*mut Context);
    pointer_attributes as "cuPointerGetAttributes" (c_uint, *const c_uint, *const *mut c_void, u64);
    set_pointer_attribute as "cuPointerSetAttribute" (*const c_void, c_uint, u64);
    allocate as "cuMemAlloc_v2" (*mut u64, usize);
    free as "cuMemFree_v2" (u64);
    fill as "cuMemsetD8_v2" (u64, u8, usize);
    allocate_host as "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    free_host as "cuMemFreeHost" (*mut c_void);
    copy_in as "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Stream);
    copy_out as "cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, Stream);
    copy_within as "cuMemcpyDtoDAsync_v2" (u64, u64, usize, Stream);
    copy_in_now as "cuMemcpyHtoD_v2" (u64, *const c_void, usize);
    copy_out_now as "cuMemcpyDtoH_v2" (*mut c_void, u64, usize);
    create_stream as "cuStreamCreate" (*mut Stream, c_uint);
    destroy_stream as "cuStreamDestroy_v2" (Stream);
    synchronize as "cuStreamSynchronize" (Stream);
}

impl Functions {
    /// Of the library that this process has loaded; `None` when it has not.
    pub(super) fn loaded() -> Option<Result<Self, CudaError>> {
        let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD;
        // SAFETY: nothing is loaded, so no initialiser runs.
        let library = unsafe { Library::open(Some(FILE), flags) }.ok()?;
        Some(Self::of(library))
    }

    /// Loads the library.
    pub(super) fn load() -> Result<Self, CudaError> {
        // SAFETY: loading runs the library's initialisers, which are those of the system's own
        // GPU driver and have no demands.
        let library = unsafe { Library::open(Some(FILE), libc::RTLD_NOW) }.map_err(|error| {
            // The loader's words come after libloading's own.
            let source = std::error::Error::source(&error);
            CudaError::DriverMissing(source.map_or_else(|| error.to_string(), ToString::to_string))
        })?;
        Self::of(library)
    }
}
