//! Memory that callers bring: where it is, by one of the protocols by which objects of Python say so.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::failure::Failure;
use crate::shared::Held;

/// Memory of an object, and what keeps it there.
pub(crate) struct Brought {
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) held: Held,
}

/// Finds an object's memory: by the buffer protocol; or as arrays and tensors have it, in memory of a GPU too.
///
/// It must be writable, since peers may write it, and in one piece.
pub(crate) fn find(object: &Bound<'_, PyAny>) -> PyResult<Brought> {
    if let Ok(buffer) = PyUntypedBuffer::get(object) {
        return of_buffer(buffer);
    }
    for name in ["__cuda_array_interface__", "__array_interface__"] {
        if let Some(interface) = object.getattr_opt(name)? {
            return of_interface(object, interface.cast::<PyDict>()?);
        }
    }
    if object.hasattr("data_ptr")? {
        return of_tensor(object);
    }
    let kind = object.get_type().name()?;
    Err(PyTypeError::new_err(format!(
        "{kind} has no memory to register: it is an object with the buffer protocol, an array interface or data_ptr()"
    )))
}

fn of_buffer(buffer: PyUntypedBuffer) -> PyResult<Brought> {
    let address = buffer.buf_ptr().expose_provenance() as u64;
    let length = buffer.len_bytes() as u64;
    if buffer.readonly() {
        return Err(read_only(address, length).into());
    }
    if !buffer.is_c_contiguous() && !buffer.is_fortran_contiguous() {
        return Err(scattered().range(address, length).into());
    }
    Ok(Brought { address, length, held: Held::Buffer(buffer) })
}

fn of_interface(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyDict>) -> PyResult<Brought> {
    let item = |name: &str| {
        let item = interface.get_item(name)?;
        item.ok_or_else(|| PyTypeError::new_err(format!("the array interface has no {name}")))
    };
    let (address, is_read_only): (u64, bool) = item("data")?.extract()?;
    let kind: String = item("typestr")?.extract()?;
    let size = item_length(&kind).ok_or_else(|| {
        Failure::argument(format!("an array of {kind:?}, whose items have no known length"))
    })?;
    let shape: Vec<u64> = item("shape")?.extract()?;
    let length = shape.iter().try_fold(size, |length, &many| length.checked_mul(many));
    let length =
        length.ok_or_else(|| Failure::argument("an array of more bytes than there can be"))?;
    if is_read_only {
        return Err(read_only(address, length).into());
    }
    let strides = interface.get_item("strides")?.filter(|strides| !strides.is_none());
    if let Some(strides) = strides {
        let strides: Vec<i64> = strides.cast::<PyTuple>()?.extract()?;
        if !is_contiguous(&shape, &strides, size) {
            return Err(scattered().range(address, length).into());
        }
    }
    Ok(Brought { address, length, held: Held::Object(object.clone().unbind()) })
}

/// Bytes of an item of this `typestr`: a byte order, a letter, and how many bytes; for times a unit follows, as
/// `<M8[ns]`; and text has 4 bytes for each of the characters that are counted there.
fn item_length(kind: &str) -> Option<u64> {
    let mut letters = kind.chars();
    letters.next().filter(|order| "<>|=".contains(*order))?;
    let letter = letters.next()?;
    let rest = letters.as_str();
    let digits = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
    let (count, unit) = rest.split_at(digits);
    let is_time = matches!(letter, 'M' | 'm');
    let is_unit = is_time && unit.starts_with('[') && unit.ends_with(']');
    if !(unit.is_empty() || is_unit) {
        return None;
    }
    let count: u64 = count.parse().ok()?;
    // Objects are pointers, which mean nothing elsewhere; of bits the number is told.
    (!matches!(letter, 'O' | 't')).then_some(())?;
    count.checked_mul(if letter == 'U' { 4 } else { 1 })
}

fn of_tensor(object: &Bound<'_, PyAny>) -> PyResult<Brought> {
    let address = object.call_method0("data_ptr")?.extract()?;
    let count: u64 = object.call_method0("numel")?.extract()?;
    let size: u64 = object.call_method0("element_size")?.extract()?;
    let length = count.checked_mul(size);
    let length =
        length.ok_or_else(|| Failure::argument("a tensor of more bytes than there can be"))?;
    if !object.call_method0("is_contiguous")?.is_truthy()? {
        return Err(scattered().range(address, length).into());
    }
    Ok(Brought { address, length, held: Held::Object(object.clone().unbind()) })
}

/// Whether items of so many bytes follow each other, the last dimension first.
fn is_contiguous(shape: &[u64], strides: &[i64], size: u64) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = size;
    shape.len() == strides.len()
        && shape.iter().zip(strides).rev().all(|(&many, &stride)| {
            let fits = many == 1 || u64::try_from(stride) == Ok(expected);
            expected = expected.saturating_mul(many);
            fits
        })
}

fn read_only(address: u64, length: u64) -> Failure {
    Failure::argument("the buffer is read-only, and peers may write what is registered")
        .range(address, length)
        .remedy("register a bytearray, or an array that can be written")
}

fn scattered() -> Failure {
    Failure::argument("the buffer is not in one piece")
        .remedy("register the array of which it is a view")
}
