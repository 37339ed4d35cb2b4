//! Communicators as C knows them.

use std::ffi::{c_char, c_int, c_void};
use std::ops::Deref;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use millstream_collective::{Communicator, RawCall};

use super::codes::{self, argument, failure};
use super::group::{self, GroupPointer};
use crate::boundary::{self, Failure};
use crate::calls::{Calls, Counted};
use crate::forked::PerProcess;
use crate::handles::Giver;
use crate::last_error;

static COMMUNICATORS: PerProcess<Rank> = PerProcess::new();

/// How long who destroys a communicator waits for calls of other threads that have not begun before he ends them.
const CALL_PATIENCE: Duration = Duration::from_millis(100);

/// What C has for a communicator.
pub(super) type CommunicatorPointer = *mut c_void;

/// A communicator.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) communicator: Communicator,
    calls: Arc<Calls>,
}

/// A call of a thread on a communicator, which is not destroyed meanwhile. None is there while a thread waits for a
/// collective that has begun: who destroys the communicator ends that.
#[derive(Debug)]
pub(super) struct Call {
    // In this order: nobody has the communicator any more once the call does not count.
    rank: Arc<Rank>,
    _counted: Counted,
}

impl Deref for Call {
    type Target = Rank;

    fn deref(&self) -> &Rank {
        &self.rank
    }
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
        let rank = taken.ok_or_else(|| unknown(communicator))?;
        // Most are short, and no reason to end what the other ranks still do. One may wait until other trees are found.
        if !rank.calls.close_within(CALL_PATIENCE) {
            rank.communicator.close();
            rank.calls.close();
        }
        // The last one.
        drop(rank);
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
pub(super) fn find(communicator: CommunicatorPointer) -> Result<Call, Failure> {
    if communicator.is_null() {
        return Err(argument("the communicator is null"));
    }
    let begin = |rank: &Arc<Rank>| {
        let _counted = rank.calls.begin();
        Call { rank: Arc::clone(rank), _counted }
    };
    let (communicators, handle) = (COMMUNICATORS.handles(), communicator.addr() as u64);
    match communicators.giver(handle) {
        // Before it can be taken out of the table, so that whoever did that knows of this call.
        Giver::This => communicators.find_and(handle, begin).ok_or_else(|| unknown(communicator)),
        Giver::Other => Err(argument(
            "the communicator is of the process that this one was forked off: create one here",
        )),
    }
}

fn create(group: GroupPointer) -> Result<CommunicatorPointer, Failure> {
    let ranks = group::find(group)?;
    let rank = Rank { communicator: ranks.communicator()?, calls: Arc::default() };
    let handle = COMMUNICATORS.handles().insert(Arc::new(rank));
    let handle =
        handle.ok_or_else(|| Failure::new(codes::BUSY, "there are too many communicators"))?;
    Ok(ptr::without_provenance_mut(handle as usize))
}

fn unknown(communicator: CommunicatorPointer) -> Failure {
    argument(format!("{:#x} is no communicator, or one that was destroyed", communicator.addr()))
}
