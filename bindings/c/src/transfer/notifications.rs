//! Messages between applications.

use std::ffi::{c_char, c_int};
use std::ptr;

use millstream_transfer::{Notification, NotifyError, SegmentId};

use super::engine::{Call, Engine};
use super::layout::{EnginePointer, RawMessage};
use crate::boundary::{self, Failure, code};

/// The messages that have come, which the caller frees; null when there are none.
///
/// # Safety
///
/// `size` is null, or a number may be written there.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn getNotifsFromEngine(
    engine: EnginePointer,
    size: *mut c_int,
) -> *mut RawMessage {
    boundary::value(ptr::null_mut(), || {
        if size.is_null() {
            return Err(Failure::invalid("size is null"));
        }
        // SAFETY: it is not null, and the caller promises the rest.
        unsafe { size.write(0) };
        let engine = Call::on(engine)?;
        let messages = engine.transfer.take_notifications();
        if messages.is_empty() {
            return Ok(ptr::null_mut());
        }
        let lost = || Failure::new(code::MEMORY, "no memory for the messages: they are lost");
        let list = allocate::<RawMessage>(messages.len()).ok_or_else(lost)?;
        for (index, message) in messages.iter().enumerate() {
            let (name, msg) = (copy(&message.name), copy(&message.text));
            let whole = !name.is_null() && !msg.is_null();
            // SAFETY: there is place for as many as there are messages.
            unsafe { list.add(index).write(RawMessage { name, msg }) };
            if !whole {
                // SAFETY: so many were written, by `malloc` each.
                unsafe { free(list, index + 1) };
                return Err(lost());
            }
        }
        // At most 65,536 wait.
        // SAFETY: as above.
        unsafe { size.write(messages.len() as c_int) };
        Ok(list)
    })
}

/// # Safety
///
/// `msg` and `size` are what [`getNotifsFromEngine`] gave, and are not used any more; or null.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn freeNotifsMsgBuf(msg: *mut RawMessage, size: c_int) -> c_int {
    boundary::negative(|| {
        let size = usize::try_from(size).map_err(|_| Failure::invalid("size is negative"))?;
        if !msg.is_null() {
            // SAFETY: the caller promises it.
            unsafe { free(msg, size) };
        }
        Ok(())
    })
}

/// # Safety
///
/// The texts of `notify_msg` are null or end with a zero, and nobody changes them during the call.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn genNotifyInEngine(
    engine: EnginePointer,
    target_id: u64,
    notify_msg: RawMessage,
) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        // SAFETY: the caller promises it.
        let message = unsafe { read(notify_msg) }?;
        let unknown = |_| Failure::new(code::METADATA, format!("segment {target_id} is not open"));
        let target = SegmentId(u32::try_from(target_id).map_err(unknown)?);
        notify(&engine, target, &message)
    })
}

/// Sends a message to the process of a segment.
pub(super) fn notify(
    engine: &Engine,
    target: SegmentId,
    message: &Notification,
) -> Result<(), Failure> {
    engine.transfer.notify(target, message).map_err(|error| {
        let code = match &error {
            NotifyError::Call(_) => code::SOCKET,
            _ => code::METADATA,
        };
        Failure::new(code, error)
    })
}

/// # Safety
///
/// As of [`boundary::text`], for both texts.
pub(super) unsafe fn read(message: RawMessage) -> Result<Notification, Failure> {
    // SAFETY: the caller promises it.
    let (name, text) = unsafe {
        (
            boundary::text("the name of the message", message.name)?,
            boundary::text("the text of the message", message.msg)?,
        )
    };
    Ok(Notification { name: name.to_owned(), text: text.to_owned() })
}

fn allocate<T>(count: usize) -> Option<*mut T> {
    // SAFETY: any sizes are fine; what it gives is aligned for all types of C.
    let memory: *mut T = unsafe { libc::calloc(count, size_of::<T>()) }.cast();
    (!memory.is_null()).then_some(memory)
}

/// A text as C has it, up to its first zero; null when there is no memory.
fn copy(text: &str) -> *mut c_char {
    let length = text.bytes().position(|byte| byte == 0).unwrap_or(text.len());
    let Some(memory) = allocate::<c_char>(length + 1) else { return ptr::null_mut() };
    // SAFETY: one byte more was allocated, which is zero.
    unsafe { memory.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), length) };
    memory
}

/// # Safety
///
/// So many messages are there, and they and their texts came from `malloc` or are null.
unsafe fn free(list: *mut RawMessage, count: usize) {
    for index in 0..count {
        // SAFETY: the caller promises it.
        unsafe {
            let RawMessage { name, msg } = list.add(index).read();
            libc::free(name.cast());
            libc::free(msg.cast());
        }
    }
    // SAFETY: the caller promises it.
    unsafe { libc::free(list.cast()) };
}
