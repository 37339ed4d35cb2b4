//! Files are offered as segments, and taken back.

use std::ffi::{c_char, c_int};

use millstream_transfer::{FileError, FileOptions};

use super::engine::Call;
use super::layout::{EnginePointer, RawFileOptions};
use crate::boundary::{self, Failure};

/// Offers a file or a block device, and writes the name of its segment.
///
/// # Safety
///
/// `path` is null or ends with a zero; `options` is null, or there are such, whose texts are null or end with a zero, and
/// which have as many local paths as they say. Nobody changes them during the call. `segment_out` is null, or
/// `segment_len` bytes may be written there.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn millstream_register_file(
    engine: EnginePointer,
    path: *const c_char,
    options: *const RawFileOptions,
    segment_out: *mut c_char,
    segment_len: usize,
) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        // SAFETY: the caller promises it.
        let path = unsafe { boundary::text("path", path) }?;
        // SAFETY: the caller promises it.
        let given = unsafe { boundary::array("options", options, usize::from(!options.is_null())) };
        let options = match given?.first() {
            // SAFETY: the caller promises it.
            Some(options) => unsafe { options.checked() }?,
            None => FileOptions::default(),
        };
        if segment_out.is_null() {
            return Err(Failure::invalid("segment_out is null"));
        }
        let name = engine.transfer.register_file(path, options).map_err(failure)?;
        // Half of a name names another file, or none.
        if name.len() >= segment_len {
            engine.transfer.unregister_file(&name).map_err(failure)?;
            let needed = name.len() + 1;
            let text = format!("segment_len is {segment_len}: the segment's name takes {needed}");
            return Err(Failure::invalid(text));
        }
        // SAFETY: the caller promises it.
        unsafe { boundary::write_text(segment_out, segment_len, &name) }
    })
}

/// Takes a file back, once nobody reads or writes it any more.
///
/// # Safety
///
/// `segment_name` is null or ends with a zero, and nobody changes it during the call.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn millstream_unregister_file(
    engine: EnginePointer,
    segment_name: *const c_char,
) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        // SAFETY: the caller promises it.
        let name = unsafe { boundary::text("segment_name", segment_name) }?;
        engine.transfer.unregister_file(name).map_err(failure)
    })
}

fn failure(error: FileError) -> Failure {
    Failure::of(error.code(), &error)
}
