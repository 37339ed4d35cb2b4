//! Functions of the driver, and memory that an application maps by them.

use std::ffi::{CStr, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;

/// A function of the driver.
pub(crate) fn function<F: Copy>(name: &CStr) -> F {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    // SAFETY: the library is loaded already, and the caller gives the type that `cuda.h` declares.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        let found = libc::dlsym(library, name.as_ptr());
        assert!(!found.is_null(), "{name:?}");
        std::mem::transmute_copy(&found)
    }
}

/// Makes the context of GPU 0 that the CUDA runtime uses current on this thread. It stays retained.
pub(crate) fn use_primary_context() -> *mut c_void {
    let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
        function(c"cuDevicePrimaryCtxRetain");
    let set: unsafe extern "C" fn(*mut c_void) -> c_int = function(c"cuCtxSetCurrent");
    let mut context = ptr::null_mut();
    // SAFETY: as `cuda.h` declares them; the pointer is to what lives.
    unsafe {
        assert_eq!(retain(&raw mut context, 0), 0);
        assert_eq!(set(context), 0);
    }
    context
}

/// `CUmemLocation`: GPU 0.
#[derive(Clone, Copy)]
#[repr(C)]
struct Location {
    kind: c_int,
    ordinal: c_int,
}

const GPU: Location = Location { kind: 1, ordinal: 0 };

/// `CUmemAllocationProp`: pinned, and not shared.
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_kinds: c_int,
    location: Location,
    windows: *mut c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct Access {
    location: Location,
    flags: c_int,
}

/// Addresses that are reserved, and memory at some of them: blocks of one length, which were allocated each for itself. So
/// has PyTorch its memory with `expandable_segments`.
pub(crate) struct Mapped {
    address: u64,
    pub(crate) block: usize,
    handles: Vec<Option<c_ulonglong>>,
}

impl Mapped {
    /// With memory where the list says so.
    pub(crate) fn new(blocks: &[bool]) -> Self {
        let granularity: unsafe extern "C" fn(*mut usize, *const Properties, c_int) -> c_int =
            function(c"cuMemGetAllocationGranularity");
        let reserve: unsafe extern "C" fn(*mut u64, usize, usize, u64, c_ulonglong) -> c_int =
            function(c"cuMemAddressReserve");
        let create: unsafe extern "C" fn(
            *mut c_ulonglong,
            usize,
            *const Properties,
            c_ulonglong,
        ) -> c_int = function(c"cuMemCreate");
        let map: unsafe extern "C" fn(u64, usize, usize, c_ulonglong, c_ulonglong) -> c_int =
            function(c"cuMemMap");
        let allow: unsafe extern "C" fn(u64, usize, *const Access, usize) -> c_int =
            function(c"cuMemSetAccess");
        let properties = Properties {
            kind: 1,
            handle_kinds: 0,
            location: GPU,
            windows: ptr::null_mut(),
            flags: [0; 8],
        };
        let access = Access { location: GPU, flags: 3 };
        let (mut block, mut address) = (0, 0);
        // SAFETY: as `cuda.h` declares them; the pointers are to what lives.
        let handles = unsafe {
            assert_eq!(granularity(&raw mut block, &raw const properties, 0), 0);
            assert_eq!(reserve(&raw mut address, block * blocks.len(), 0, 0, 0), 0);
            let fill = |(index, &is_there): (usize, &bool)| {
                let mut handle = 0;
                let place = address + (index * block) as u64;
                is_there.then(|| {
                    assert_eq!(create(&raw mut handle, block, &raw const properties, 0), 0);
                    assert_eq!(map(place, block, 0, handle, 0), 0);
                    assert_eq!(allow(place, block, &raw const access, 1), 0);
                    handle
                })
            };
            blocks.iter().enumerate().map(fill).collect()
        };
        Self { address, block, handles }
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn length(&self) -> usize {
        self.block * self.handles.len()
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        let copy: unsafe extern "C" fn(u64, *const c_void, usize) -> c_int =
            function(c"cuMemcpyHtoD_v2");
        assert!(offset + bytes.len() <= self.length());
        let to = self.address + offset as u64;
        // SAFETY: both ranges are there.
        assert_eq!(unsafe { copy(to, bytes.as_ptr().cast(), bytes.len()) }, 0);
        settle();
    }

    pub(crate) fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        let copy: unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int =
            function(c"cuMemcpyDtoH_v2");
        assert!(offset + length <= self.length());
        let mut bytes = vec![0; length];
        let from = self.address + offset as u64;
        // SAFETY: as above.
        assert_eq!(unsafe { copy(bytes.as_mut_ptr().cast(), from, length) }, 0);
        bytes
    }
}

/// Small copies to memory that was mapped by hand may be under way when their call returns.
fn settle() {
    let synchronize: unsafe extern "C" fn() -> c_int = function(c"cuCtxSynchronize");
    // SAFETY: as `cuda.h` declares it.
    assert_eq!(unsafe { synchronize() }, 0);
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let unmap: unsafe extern "C" fn(u64, usize) -> c_int = function(c"cuMemUnmap");
        let release: unsafe extern "C" fn(c_ulonglong) -> c_int = function(c"cuMemRelease");
        let free: unsafe extern "C" fn(u64, usize) -> c_int = function(c"cuMemAddressFree");
        for (index, handle) in self.handles.iter().enumerate() {
            let Some(handle) = *handle else { continue };
            // SAFETY: as `cuda.h` declares them; nobody uses the memory any more.
            unsafe {
                unmap(self.address + (index * self.block) as u64, self.block);
                release(handle);
            }
        }
        // SAFETY: as above.
        unsafe { free(self.address, self.length()) };
    }
}

/// Begins to capture what is put on a new stream as a graph, in the mode that refuses most. What ends that: whether the
/// capture is intact.
pub(crate) fn capture() -> impl FnOnce() -> bool {
    let create: unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int =
        function(c"cuStreamCreate");
    let begin: unsafe extern "C" fn(*mut c_void, c_int) -> c_int =
        function(c"cuStreamBeginCapture_v2");
    let end: unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int =
        function(c"cuStreamEndCapture");
    let (mut stream, mut graph) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: as `cuda.h` declares them; the pointers are to what lives. What is created is left.
    unsafe {
        assert_eq!(create(&raw mut stream, 1), 0);
        assert_eq!(begin(stream, 0), 0);
    }
    // SAFETY: as above.
    move || unsafe { end(stream, &raw mut graph) == 0 }
}
