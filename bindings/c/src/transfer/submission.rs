//! Batches are allocated, submitted to, asked after and freed.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use millstream_transfer::SubmitOptions;

use super::batch::Batch;
use super::engine::Call;
use super::layout::{EnginePointer, INVALID_BATCH, RawMessage, RawOptions, RawRequest, RawStatus};
use super::notifications;
use crate::boundary::{self, Failure, code};
use crate::handles::LIMIT;

/// The longest wait for a batch, in milliseconds: a year.
const LONGEST_MS: u64 = 365 * 24 * 3600 * 1000;

#[unsafe(no_mangle)]
pub(super) extern "C" fn allocateBatchID(engine: EnginePointer, batch_size: usize) -> u64 {
    boundary::value(INVALID_BATCH, || {
        let engine = Call::on(engine)?;
        let tasks = engine.transfer.allocate_batch(batch_size).map_err(Failure::invalid)?;
        let full = || {
            let text = format!("{LIMIT} batches are allocated: free those that are over");
            Failure::new(code::TOO_MANY_REQUESTS, text)
        };
        engine.batches.insert(Arc::new(Batch::new(tasks))).ok_or_else(full)
    })
}

/// # Safety
///
/// `entries` is null, or there are so many requests there, which nobody changes during the call. The local memory of
/// each is there until the batch is over.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn submitTransfer(
    engine: EnginePointer,
    batch_id: u64,
    entries: *mut RawRequest,
    count: usize,
) -> c_int {
    boundary::positive(|| {
        let engine = Call::on(engine)?;
        let batch = engine.batch(batch_id)?;
        // SAFETY: the caller promises it.
        let entries = unsafe { boundary::array("entries", entries, count) }?;
        batch.submit(&engine, count, |index| entries[index].checked(index), None)
    })
}

/// # Safety
///
/// As of [`submitTransfer`]; the texts of `notify_msg` are null or end with a zero, and nobody changes them during
/// the call.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn submitTransferWithNotify(
    engine: EnginePointer,
    batch_id: u64,
    entries: *mut RawRequest,
    count: usize,
    notify_msg: RawMessage,
) -> c_int {
    boundary::positive(|| {
        let engine = Call::on(engine)?;
        let batch = engine.batch(batch_id)?;
        // SAFETY: the caller promises it.
        let entries = unsafe { boundary::array("entries", entries, count) }?;
        // SAFETY: the caller promises it.
        let message = unsafe { notifications::read(notify_msg) }?;
        batch.submit(&engine, count, |index| entries[index].checked(index), Some(message))
    })
}

/// # Safety
///
/// As of [`submitTransfer`]; `options` is null, or there are such, whose texts are null or end with a zero, and which
/// nobody changes during the call.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn millstream_submit(
    engine: EnginePointer,
    batch_id: u64,
    entries: *const RawRequest,
    count: usize,
    options: *const RawOptions,
) -> c_int {
    boundary::positive(|| {
        let engine = Call::on(engine)?;
        let batch = engine.batch(batch_id)?;
        // SAFETY: the caller promises it.
        let entries = unsafe { boundary::array("entries", entries, count) }?;
        // SAFETY: the caller promises it.
        let given = unsafe { boundary::array("options", options, usize::from(!options.is_null())) };
        let options = match given?.first() {
            // SAFETY: the caller promises it.
            Some(options) => unsafe { options.checked() }?,
            None => SubmitOptions::default(),
        };
        batch.submit_all(&engine, count, |index| entries[index].checked(index), &options)
    })
}

/// # Safety
///
/// `status` is null, or may be written.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn getTransferStatus(
    engine: EnginePointer,
    batch_id: u64,
    task_id: usize,
    status: *mut RawStatus,
) -> c_int {
    boundary::positive(|| {
        if status.is_null() {
            return Err(Failure::invalid("status is null"));
        }
        let engine = Call::on(engine)?;
        let found = engine.batch(batch_id)?.status(&engine, task_id)?;
        // SAFETY: it is not null, and the caller promises the rest.
        unsafe { status.write(found) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn freeBatchID(engine: EnginePointer, batch_id: u64) -> c_int {
    boundary::positive(|| {
        let engine = Call::on(engine)?;
        engine.batch(batch_id)?.free(&engine)?;
        engine.batches.remove(batch_id);
        Ok(())
    })
}

/// Waits until all tasks of a batch have ended, for good or bad: 0, or `STATUS_TIMEOUT` when that takes longer; or the
/// negative of a code.
#[unsafe(no_mangle)]
pub(super) extern "C" fn millstream_wait_batch(
    engine: EnginePointer,
    batch_id: u64,
    timeout_ms: u64,
) -> c_int {
    let mut ended = false;
    let code = boundary::negative(|| {
        let engine = Call::on(engine)?;
        let timeout = Duration::from_millis(timeout_ms.min(LONGEST_MS));
        ended = engine.batch(batch_id)?.wait(&engine, timeout)?;
        Ok(())
    });
    match code {
        0 if !ended => millstream_transfer::TransferState::Timeout as c_int,
        code => code,
    }
}

/// Begins to end a task. Its status says when it has ended.
#[unsafe(no_mangle)]
pub(super) extern "C" fn millstream_cancel_task(
    engine: EnginePointer,
    batch_id: u64,
    task_id: usize,
) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        engine.batch(batch_id)?.cancel(&engine, task_id).map(drop)
    })
}
