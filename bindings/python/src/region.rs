//! Registered memory, and ranges of memory, here or at a peer.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use millstream_transfer::Buffer;
use pyo3::exceptions::{PyIndexError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PySlice};

use crate::failure::Failure;
use crate::shared::Shared;

/// Bytes of memory: where, and how many.
#[pyclass(frozen, module = "millstream", name = "Range")]
#[derive(Clone, Copy)]
pub(crate) struct Range {
    /// The address of the first byte, in its process.
    #[pyo3(get)]
    pub(crate) address: u64,
    /// Bytes.
    #[pyo3(get)]
    pub(crate) length: u64,
}

impl Range {
    /// What a slice of it is.
    fn slice(self, slice: &Bound<'_, PyAny>) -> PyResult<Self> {
        let slice = slice.cast::<PySlice>().map_err(|_| {
            PyTypeError::new_err("memory is sliced, as [0:4096]; a byte of it is [n:n + 1]")
        })?;
        let length = isize::try_from(self.length).map_err(|_| {
            Failure::argument(format!("{} bytes are more than can be", self.length))
        })?;
        let indices = slice.indices(length)?;
        if indices.step != 1 {
            return Err(PyIndexError::new_err("a slice of memory has no step"));
        }
        let (start, length) = (indices.start as u64, indices.slicelength as u64);
        let address = self.address.checked_add(start).ok_or_else(|| {
            Failure::argument("the slice begins beyond the end of addresses")
                .range(self.address, self.length)
        })?;
        Ok(Self { address, length })
    }

    /// What an argument means: its first byte, and how many bytes. A range and a region have as many as they have, which may
    /// be none; an address alone has those that are given beside it, and `None` without.
    pub(crate) fn of(
        object: &Bound<'_, PyAny>,
        length: Option<u64>,
    ) -> PyResult<(u64, Option<u64>)> {
        let whole = if let Ok(range) = object.cast::<Self>() {
            *range.get()
        } else if let Ok(region) = object.cast::<Region>() {
            region.get().range()
        } else {
            let address: u64 = object.extract().map_err(|_| {
                PyTypeError::new_err("memory is a Region, a Range, or an address as an int")
            })?;
            return Ok((address, length));
        };
        match length {
            Some(length) if length > whole.length => {
                let message = format!("{length} bytes of memory that has {}", whole.length);
                Err(Failure::argument(message).range(whole.address, whole.length).into())
            }
            _ => Ok((whole.address, Some(length.unwrap_or(whole.length)))),
        }
    }
}

#[pymethods]
impl Range {
    #[new]
    fn new(address: u64, length: u64) -> PyResult<Self> {
        // Up to the last address, and no longer than Python can say.
        if address.checked_add(length.saturating_sub(1)).is_none()
            || isize::try_from(length).is_err()
        {
            let message = format!("{length} bytes at {address:#x} are more than there can be");
            return Err(Failure::argument(message).into());
        }
        Ok(Self { address, length })
    }

    fn __len__(&self) -> usize {
        self.length as usize
    }

    fn __getitem__(&self, slice: &Bound<'_, PyAny>) -> PyResult<Self> {
        self.slice(slice)
    }

    fn __repr__(&self) -> String {
        format!("Range(address={:#x}, length={})", self.address, self.length)
    }
}

/// Whose memory a region is.
pub(crate) enum Owner {
    /// The caller's.
    Brought,
    /// The engine's. Dropped by hand: a fork has no engine that could unregister it.
    Engine(ManuallyDrop<Arc<Buffer>>),
}

/// Memory that is registered with an engine.
#[pyclass(frozen, module = "millstream", name = "Region")]
pub(crate) struct Region {
    shared: Arc<Shared>,
    range: Range,
    /// The number of its registration.
    registration: u64,
    owner: Owner,
}

impl Region {
    pub(crate) fn new(
        shared: Arc<Shared>,
        (address, length): (u64, u64),
        registration: u64,
        owner: Owner,
    ) -> Self {
        Self { shared, range: Range { address, length }, registration, owner }
    }

    pub(crate) fn range(&self) -> Range {
        self.range
    }

    fn buffer(&self) -> Result<&Buffer, Failure> {
        if self.shared.is_forked() {
            return Err(Failure::forked());
        }
        match &self.owner {
            Owner::Engine(buffer) => Ok(buffer),
            Owner::Brought => Err(Failure::argument("the memory is the caller's own")
                .remedy("use the object that was registered")),
        }
    }
}

#[pymethods]
impl Region {
    /// The address of its first byte.
    #[getter]
    fn address(&self) -> u64 {
        self.range.address
    }

    /// Bytes.
    #[getter]
    fn length(&self) -> u64 {
        self.range.length
    }

    /// Unregisters it: waits until no transfer touches it any more, and lets go of what was registered.
    fn unregister(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.shared.unregister(py, self.range.address, self.registration)?)
    }

    /// Copies bytes out of memory that the engine allocated.
    #[pyo3(signature = (offset = 0, length = None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        offset: usize,
        length: Option<usize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let buffer = self.buffer()?;
        let length = length.unwrap_or_else(|| buffer.length().saturating_sub(offset));
        if offset.checked_add(length).is_none_or(|end| end > buffer.length()) {
            let message = format!("{length} bytes at offset {offset} of {}", buffer.length());
            return Err(Failure::argument(message).into());
        }
        PyBytes::new_with(py, length, |bytes| {
            Ok(buffer.read(offset, bytes).map_err(Failure::from)?)
        })
    }

    /// Copies bytes into memory that the engine allocated.
    fn write(&self, offset: usize, data: &[u8]) -> PyResult<()> {
        Ok(self.buffer()?.write(offset, data).map_err(Failure::from)?)
    }

    fn __len__(&self) -> usize {
        self.range.length as usize
    }

    fn __getitem__(&self, slice: &Bound<'_, PyAny>) -> PyResult<Range> {
        self.range.slice(slice)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        // The engine may have been closed within.
        if self.shared.is_closed() { Ok(()) } else { self.unregister(py) }
    }

    fn __repr__(&self) -> String {
        format!("Region(address={:#x}, length={})", self.range.address, self.range.length)
    }

    /// Memory that the engine allocated is there as long as this object, which the view keeps.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let region = slf.get();
        region.buffer()?;
        let pointer: *mut u8 = std::ptr::with_exposed_provenance_mut(region.range.address as usize);
        let length = region.range.length as ffi::Py_ssize_t;
        // SAFETY: Python passes a view to fill. The memory has so many bytes as long as the object is there,
        // also when it is unregistered, and is shared with who writes it as memory of Python always is.
        let done =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), pointer.cast(), length, 0, flags) };
        if done == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Owner::Engine(buffer) = &mut self.owner
            && !self.shared.is_forked()
        {
            // SAFETY: once, here.
            unsafe { ManuallyDrop::drop(buffer) };
        }
    }
}
