//! Many numbers at once: arrays of 64 bits by the buffer protocol, or sequences of ints.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::failure::Failure;

/// Numbers of an object, which an error calls `name`.
pub(crate) fn many(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<u64>> {
    // Lists are most frequent, and to find out that one is no array takes longer than to read a short one.
    if let Ok(list) = object.cast_exact::<PyList>() {
        let mut numbers = Vec::with_capacity(list.len());
        for item in list {
            numbers.push(item.extract().map_err(|error| wrong(object.py(), name, error))?);
        }
        return Ok(numbers);
    }
    if let Some(numbers) = array::<u64>(object, name)? {
        return Ok(numbers);
    }
    if let Some(numbers) = array::<i64>(object, name)? {
        let number = |number: i64| u64::try_from(number).map_err(|_| negative(name, number));
        return numbers.into_iter().map(number).collect();
    }
    object.extract().map_err(|error| wrong(object.py(), name, error))
}

fn wrong(py: Python<'_>, name: &str, cause: PyErr) -> PyErr {
    let message = format!("{name} are an array of 64-bit integers, or a sequence of ints");
    let reason = PyTypeError::new_err(message);
    reason.set_cause(py, Some(cause));
    reason
}

/// One number for all, or as many as `count`.
pub(crate) fn one_or_many(
    object: &Bound<'_, PyAny>,
    name: &str,
    count: usize,
) -> PyResult<Vec<u64>> {
    match object.extract() {
        Ok(number) => Ok(vec![number; count]),
        Err(_) => many(object, name),
    }
}

/// Items of a buffer of one dimension, if its items are of this type.
fn array<T: Element>(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<Vec<T>>> {
    let Ok(buffer) = PyBuffer::<T>::get(object) else { return Ok(None) };
    if buffer.dimensions() != 1 {
        let message = format!("{name} have {} dimensions, and not one", buffer.dimensions());
        return Err(Failure::argument(message).into());
    }
    buffer.to_vec(object.py()).map(Some)
}

fn negative(name: &str, number: i64) -> PyErr {
    Failure::argument(format!("{number} is none of what {name} can be")).into()
}
