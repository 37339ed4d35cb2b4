//! What every exported function does: it keeps panics in, turns failures into codes, and reads what C points to.

use std::any::Any;
use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;

use millstream_transfer::SubmitError;

use crate::last_error;

/// The numbers of the original's C API, without their sign: its functions on transfers return them as they are, and
/// all others negated.
pub(crate) mod code {
    pub(crate) const INVALID_ARGUMENT: i32 = 1;
    pub(crate) const TOO_MANY_REQUESTS: i32 = 2;
    pub(crate) const BATCH_BUSY: i32 = 4;
    pub(crate) const NOT_SUPPORTED_TRANSPORT: i32 = 8;
    pub(crate) const SOCKET: i32 = 102;
    pub(crate) const METADATA: i32 = 200;
    pub(crate) const CONTEXT: i32 = 202;
    pub(crate) const MEMORY: i32 = 302;
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    /// One of [`code`], or of INCCL's.
    code: i32,
    text: String,
}

impl Failure {
    pub(crate) fn new(code: i32, text: impl ToString) -> Self {
        Self { code, text: text.to_string() }
    }

    pub(crate) fn invalid(text: impl ToString) -> Self {
        Self::new(code::INVALID_ARGUMENT, text)
    }

    /// Of an error whose number is negative.
    pub(crate) fn of(code: i32, error: &impl ToString) -> Self {
        Self::new(code.saturating_abs(), error.to_string())
    }

    /// What happened.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Why requests were refused, with a code for each reason: those of `millstream.h`.
    pub(crate) fn of_refusal(error: &SubmitError) -> Self {
        let code = match error {
            SubmitError::ZeroLength { .. } => 1001,
            SubmitError::Overflow { .. } => 1002,
            SubmitError::UnknownSegment { .. } => 1003,
            SubmitError::TargetOutOfRange { .. } => 1004,
            SubmitError::Restarted { .. } => 1005,
            SubmitError::TargetNotAccessible { .. } => 1006,
            SubmitError::NoPath { .. } => 1007,
            SubmitError::PathRequired { .. } | SubmitError::NotServed { .. } => 1008,
            SubmitError::UnknownTransport { .. } => 1009,
            SubmitError::HintNotAllowed { .. } => 1010,
            SubmitError::UnknownPolicy { .. } => 1011,
            SubmitError::DeadlinePassed { .. } => 1012,
            SubmitError::DeadlineInfeasible { .. } => 1013,
            SubmitError::Overloaded { .. } => 1014,
            SubmitError::OverLimit { .. } => 1015,
            SubmitError::UnknownIntent { .. } => 1016,
            SubmitError::NotDurable { .. } => 1017,
            SubmitError::ExceedCapacity { .. }
            | SubmitError::SourceNotRegistered { .. }
            | SubmitError::Refresh(_)
            | SubmitError::ShutDown => return Self::of(error.code(), error),
        };
        Self::new(code, error)
    }

    /// With another code.
    pub(crate) fn with(self, code: i32) -> Self {
        Self { code, ..self }
    }

    /// Keeps the reason, and gives the code.
    pub(crate) fn told(self) -> i32 {
        last_error::set(&self.text);
        self.code
    }
}

/// Runs the body of a function that returns 0 or the negative of a code.
pub(crate) fn negative(body: impl FnOnce() -> Result<(), Failure>) -> c_int {
    match contained(code::CONTEXT, body) {
        Ok(()) => 0,
        Err(failure) => -failure.told(),
    }
}

/// Runs the body of a function that returns 0 or a code.
pub(crate) fn positive(body: impl FnOnce() -> Result<(), Failure>) -> c_int {
    match contained(code::CONTEXT, body) {
        Ok(()) => 0,
        Err(failure) => failure.told(),
    }
}

/// Runs the body of a function that returns something else, and `otherwise` when it fails.
pub(crate) fn value<T>(otherwise: T, body: impl FnOnce() -> Result<T, Failure>) -> T {
    contained(code::CONTEXT, body).unwrap_or_else(|failure| {
        failure.told();
        otherwise
    })
}

/// A panic is a failure, with this code.
pub(crate) fn contained<T>(
    panic_code: i32,
    body: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let explain = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Failure::new(panic_code, format!("a fault of the library, please report it: {text}"))
    };
    // What a body shares with others are locks that are taken whether they are poisoned or not, and counters.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(explain(panic)))
}

/// A text that C points to.
///
/// # Safety
///
/// `text` is null, or points to bytes up to a zero that nobody changes during the call.
pub(crate) unsafe fn text<'a>(what: &str, text: *const c_char) -> Result<&'a str, Failure> {
    // SAFETY: the caller promises it.
    let text = unsafe { optional(what, text) }?;
    text.ok_or_else(|| Failure::invalid(format!("{what} is null")))
}

/// As [`text`], where null is nothing.
///
/// # Safety
///
/// As there.
pub(crate) unsafe fn optional<'a>(
    what: &str,
    text: *const c_char,
) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: it is not null, and the caller promises the rest.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text.to_str().map_err(|_| Failure::invalid(format!("{what} is no UTF-8")))?;
    Ok(Some(text))
}

/// An array that C points to. Null is as good as any other address for no elements.
///
/// # Safety
///
/// `first` is null, or points to as many elements, which nobody changes during the call.
pub(crate) unsafe fn array<'a, T>(
    what: &str,
    first: *const T,
    count: usize,
) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null() {
        return Err(Failure::invalid(format!("{what} is null")));
    }
    if !first.is_aligned() || count > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(Failure::invalid(format!("{what} is no array of {count} elements")));
    }
    // SAFETY: it is neither null nor misaligned, not longer than an object can be, and the caller promises the
    // rest.
    Ok(unsafe { slice::from_raw_parts(first, count) })
}

/// Writes a text and a zero behind it to where C says; what does not fit is cut off, as `snprintf` does.
///
/// # Safety
///
/// `place` is null, or as many bytes there may be written.
pub(crate) unsafe fn write_text(
    place: *mut c_char,
    length: usize,
    text: &str,
) -> Result<(), Failure> {
    if place.is_null() || length == 0 {
        return Err(Failure::invalid("there is no place for the text"));
    }
    let end = text.floor_char_boundary(length - 1);
    let bytes = &text.as_bytes()[..end];
    // SAFETY: `bytes` and a zero are `length` bytes at most, which the caller lets us write.
    unsafe {
        place.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        place.add(bytes.len()).write(0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    fn last() -> String {
        // SAFETY: the text of this thread, which is copied at once.
        unsafe { CStr::from_ptr(last_error::millstream_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_is_a_code_and_its_text_is_kept() {
        assert_eq!(negative(|| panic!("seen {}", 7)), -code::CONTEXT);
        assert!(last().ends_with("seen 7"), "{}", last());
        assert_eq!(positive(|| panic!("again")), code::CONTEXT);
        assert_eq!(value(5, || panic!("again")), 5);
    }

    #[test]
    fn a_failure_is_kept_by_thread_and_a_zero_does_not_end_it() {
        assert_eq!(negative(|| Err(Failure::invalid("a\0b"))), -1);
        assert_eq!(last(), "a b");
        std::thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
        assert_eq!(positive(|| Ok(())), 0);
        assert_eq!(last(), "a b", "a call that goes well says nothing");
    }

    #[test]
    fn texts_and_arrays_that_are_none_are_refused() {
        // SAFETY: null and constants.
        unsafe {
            assert!(text("it", ptr::null()).is_err());
            assert!(text("it", c"\xff".as_ptr()).is_err());
            assert_eq!(text("it", c"a".as_ptr()).unwrap(), "a");
            assert_eq!(optional("it", ptr::null()).unwrap(), None);
            assert!(array::<u64>("it", ptr::null(), 1).is_err());
            assert!(array::<u64>("it", ptr::null(), 0).unwrap().is_empty());
            assert!(array::<u64>("it", ptr::without_provenance(3), 1).is_err());
            assert!(array::<u64>("it", ptr::without_provenance(8), usize::MAX).is_err());
        }
    }

    #[test]
    fn a_text_is_cut_to_its_place() {
        let written = |length: usize, text: &str| {
            let mut place = [0x7f_u8; 8];
            // SAFETY: `length` is not more than there is.
            unsafe { write_text(place.as_mut_ptr().cast(), length, text) }.unwrap();
            assert!(place[length..].iter().all(|byte| *byte == 0x7f));
            CStr::from_bytes_until_nul(&place).unwrap().to_str().unwrap().to_owned()
        };
        assert_eq!(written(8, "abc"), "abc");
        assert_eq!(written(4, "abcdef"), "abc");
        assert_eq!(written(3, "aéé"), "a", "no half of a character");
        assert_eq!(written(1, "abc"), "");
        // SAFETY: nothing is written.
        assert!(unsafe { write_text(ptr::null_mut(), 8, "a") }.is_err());
    }
}
