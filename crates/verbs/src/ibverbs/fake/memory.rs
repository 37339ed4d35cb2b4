//! Protection domains and memory regions of the fake library.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use super::{Registered, ffi, lock, script_of};

#[repr(C)]
struct Domain {
    context: *mut ffi::Context,
}

pub(super) unsafe extern "C" fn allocate_domain(context: *mut ffi::Context) -> *mut ffi::Pd {
    Box::into_raw(Box::new(Domain { context })).cast()
}

pub(super) unsafe extern "C" fn deallocate_domain(domain: *mut ffi::Pd) -> c_int {
    // SAFETY: made above, and the last use.
    drop(unsafe { Box::from_raw(domain.cast::<Domain>()) });
    0
}

/// `ibv_reg_mr`.
pub(super) unsafe extern "C" fn register(
    domain: *mut ffi::Pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ffi::Mr {
    // SAFETY: as this function's.
    unsafe { region(domain, address, length, Registered::Plain(access as c_uint)) }
}

/// `ibv_reg_mr_iova2`.
pub(super) unsafe extern "C" fn register_with_optional(
    domain: *mut ffi::Pd,
    address: *mut c_void,
    length: usize,
    remote_address: u64,
    access: c_uint,
) -> *mut ffi::Mr {
    assert_eq!(remote_address, address.addr() as u64, "peers use the address that is here");
    // SAFETY: as this function's.
    unsafe { region(domain, address, length, Registered::WithOptional(access)) }
}

/// # Safety
/// The domain is live.
unsafe fn region(
    domain: *mut ffi::Pd,
    addr: *mut c_void,
    length: usize,
    how: Registered,
) -> *mut ffi::Mr {
    // SAFETY: all domains are of this kind.
    let context = unsafe { (*domain.cast::<Domain>()).context };
    // SAFETY: a domain holds its device.
    let mut registered = lock(unsafe { &script_of(context).registered });
    registered.push(how);
    let key = registered.len() as u32;
    let region = ffi::Mr { context, pd: domain, addr, length, handle: 0, lkey: key, rkey: key };
    Box::into_raw(Box::new(region))
}

pub(super) unsafe extern "C" fn deregister(region: *mut ffi::Mr) -> c_int {
    assert_ne!(region, ptr::null_mut());
    // SAFETY: made above, and the last use.
    drop(unsafe { Box::from_raw(region) });
    0
}
