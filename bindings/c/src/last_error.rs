//! Why the last call of a thread failed, as text.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

thread_local! {
    static TEXT: RefCell<CString> = RefCell::default();
}

/// Keeps the reason of a failure for this thread.
pub(crate) fn set(text: &str) {
    // A zero within, as a peer's text may have, would end it.
    let text: Vec<u8> = text.bytes().map(|byte| if byte == 0 { b' ' } else { byte }).collect();
    let text = CString::new(text).unwrap_or_default();
    // A thread that ends may have no place for it any more.
    let _ = TEXT.try_with(|place| place.replace(text));
}

/// The reason of this thread's last failure, as it is kept; empty if there was none.
pub(crate) fn text() -> String {
    TEXT.try_with(|text| text.borrow().to_string_lossy().into_owned()).unwrap_or_default()
}

/// The reason of this thread's last failure; empty if there was none. Valid until the thread's next failure.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn millstream_last_error() -> *const c_char {
    TEXT.try_with(|text| text.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The version of the library.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn millstream_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
