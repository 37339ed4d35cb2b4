//! Communicators as C knows them.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use millstream_collective::{Communicator, RawCall};

use super::codes::{self, argument, failure};
use super::group::{self, GroupPointer};
use crate::boundary::{self, Failure};
use crate::forked::PerProcess;
use crate::handles::Giver;
use crate::last_error;

static COMMUNICATORS: PerProcess<Rank> = PerProcess::new();

/// What C has for a communicator.
pub(super) type CommunicatorPointer = *mut c_void;

/// A communicator.
///
/// Nobody holds one while it waits for a collective, so that who destroys it ends that.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) communicator: Communicator,
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn inccl_communicator_create(group: GroupPointer) -> CommunicatorPointer {
    if group.is_null() && !last_error::text().is_empty() {
        // Why there is no group is what its caller looks for.
        return ptr::null_mut();
    }
    boundary::value(ptr::null_mut(), || create(group))
}

/// # Safety
///
/// `communicator` is null or may be written.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn inccl_communicator_create_v2(
    group: GroupPointer,
    communicator: *mut CommunicatorPointer,
) -> c_int {
    codes::code(|| {
        if communicator.is_null() {
            return Err(argument("there is no place for the communicator"));
        }
        let made = create(group)?;
        // SAFETY: it is not null, and the caller promises the rest.
        unsafe { communicator.write(made) };
        Ok(codes::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn inccl_communicator_destroy(communicator: CommunicatorPointer) {
    if communicator.is_null() {
        return;
    }
    codes::said("inccl_communicator_destroy", || {
        drop(find(communicator)?);
        let taken = COMMUNICATORS.handles().remove(communicator.addr() as u64);
        drop(taken.ok_or_else(|| unknown(communicator))?);
        Ok(())
    });
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn inccl_communicator_error_v2(communicator: CommunicatorPointer) -> c_int {
    codes::code(|| match find(communicator)?.communicator.failure() {
        None => Ok(codes::SUCCESS),
        Some(error) => Err(failure(error)),
    })
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn inccl_last_error() -> *const c_char {
    last_error::millstream_last_error()
}

/// # Safety
///
/// The bytes may be read and written until they are deregistered, or the communicator is destroyed.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn inccl_register_v2(
    communicator: CommunicatorPointer,
    address: *mut c_void,
    bytes: usize,
) -> c_int {
    codes::code(|| {
        let rank = find(communicator)?;
        // SAFETY: the caller promises it.
        unsafe { rank.communicator.register_raw(address.cast(), bytes) }.map_err(failure)?;
        Ok(codes::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn inccl_deregister_v2(
    communicator: CommunicatorPointer,
    address: *mut c_void,
) -> c_int {
    codes::code(|| {
        find(communicator)?.communicator.deregister_raw(address.cast()).map_err(failure)?;
        Ok(codes::SUCCESS)
    })
}

/// Calls a collective, and waits for its end.
///
/// # Safety
///
/// As of [`Communicator::call_raw`].
pub(super) unsafe fn call(
    communicator: CommunicatorPointer,
    what: impl FnOnce() -> Result<RawCall, Failure>,
) -> Result<(), Failure> {
    let rank = find(communicator)?;
    // SAFETY: the caller promises it.
    let handle = unsafe { rank.communicator.start_raw(&what()?) }.map_err(failure)?;
    drop(rank);
    handle.finish().map_err(failure)
}

/// The communicator that a pointer of this process means.
pub(super) fn find(communicator: CommunicatorPointer) -> Result<Arc<Rank>, Failure> {
    if communicator.is_null() {
        return Err(argument("the communicator is null"));
    }
    let (communicators, handle) = (COMMUNICATORS.handles(), communicator.addr() as u64);
    match communicators.giver(handle) {
        Giver::This => communicators.find(handle).ok_or_else(|| unknown(communicator)),
        Giver::Other => Err(argument(
            "the communicator is of the process that this one was forked off: create one here",
        )),
    }
}

fn create(group: GroupPointer) -> Result<CommunicatorPointer, Failure> {
    let ranks = group::find(group)?;
    let rank = Rank { communicator: ranks.communicator()? };
    let handle = COMMUNICATORS.handles().insert(Arc::new(rank));
    let handle =
        handle.ok_or_else(|| Failure::new(codes::BUSY, "there are too many communicators"))?;
    Ok(ptr::without_provenance_mut(handle as usize))
}

fn unknown(communicator: CommunicatorPointer) -> Failure {
    argument(format!("{:#x} is no communicator, or one that was destroyed", communicator.addr()))
}
