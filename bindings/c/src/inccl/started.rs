//! Collectives that were started, as C knows them.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use millstream_collective::Handle;

use super::codes::{self, argument, failure};
use super::collectives::RawCollective;
use super::communicator::{self, CommunicatorPointer};
use crate::boundary::Failure;
use crate::forked::PerProcess;
use crate::handles::Giver;

static STARTED: PerProcess<Handle> = PerProcess::new();

/// # Safety
///
/// `call` is null or may be read, and `handle` is null or may be written. The vectors have as many elements as the
/// header says, and nobody changes them until the handle has ended.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn inccl_start_v2(
    communicator: CommunicatorPointer,
    call: *const RawCollective,
    handle: *mut u64,
) -> c_int {
    codes::code(|| {
        if handle.is_null() || call.is_null() || !call.is_aligned() {
            return Err(argument("the call is null, or there is no place for the handle"));
        }
        let rank = communicator::find(communicator)?;
        // SAFETY: it is not null, and the caller promises the rest.
        let call = unsafe { call.read() }.parse()?;
        // SAFETY: the caller promises it.
        let started = unsafe { rank.communicator.start_raw(&call) }.map_err(failure)?;
        let number = STARTED.handles().insert(Arc::new(started));
        let number =
            number.ok_or_else(|| Failure::new(codes::BUSY, "there are too many handles"))?;
        // SAFETY: it is not null, and the caller promises the rest.
        unsafe { handle.write(number) };
        Ok(codes::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn inccl_test_v2(handle: u64) -> c_int {
    inccl_wait_v2(handle, 0)
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn inccl_wait_v2(handle: u64, timeout_ms: u64) -> c_int {
    codes::code(|| {
        let started = find(handle)?;
        let Some(outcome) = started.wait(Duration::from_millis(timeout_ms)) else {
            return Ok(codes::IN_PROGRESS);
        };
        // Another thread may have waited for it as well.
        STARTED.handles().remove(handle);
        outcome.map(|()| codes::SUCCESS).map_err(failure)
    })
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn inccl_cancel_v2(handle: u64) -> c_int {
    codes::code(|| {
        find(handle)?.cancel();
        Ok(codes::SUCCESS)
    })
}

fn find(handle: u64) -> Result<Arc<Handle>, Failure> {
    let known = STARTED.handles();
    match known.giver(handle) {
        Giver::This => known.find(handle).ok_or_else(|| {
            argument(format!("{handle:#x} is no collective that was started, or its end was told"))
        }),
        Giver::Other => Err(argument("the handle is of the process that this one was forked off")),
    }
}
