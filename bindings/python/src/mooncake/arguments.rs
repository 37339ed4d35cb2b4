//! What callers of `mooncake.engine` pass: what is of another type raises `TypeError`, as it does there.

use millstream_transfer::Opcode;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

/// A number that is not negative: an address, a length, or the number of a batch.
#[derive(Clone, Copy)]
pub(crate) struct Number(pub(crate) u64);

impl FromPyObject<'_, '_> for Number {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let wrong = |_| {
            PyTypeError::new_err(format!(
                "incompatible function arguments: {object:?} is no address or length"
            ))
        };
        object.extract().map(Self).map_err(wrong)
    }
}

/// Several of them, in a list or whatever else can be gone through.
pub(crate) struct Numbers(pub(crate) Vec<u64>);

impl FromPyObject<'_, '_> for Numbers {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let wrong = || PyTypeError::new_err("incompatible function arguments: not a list of ints");
        if object.is_instance_of::<PyString>() || object.is_instance_of::<PyBytes>() {
            return Err(wrong());
        }
        let items = object.try_iter().map_err(|_| wrong())?;
        items.map(|item| Ok(item?.extract::<Number>()?.0)).collect::<PyResult<_>>().map(Self)
    }
}

/// Which way bytes go.
#[pyclass(eq, frozen, from_py_object, module = "mooncake.engine")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum TransferOpcode {
    /// From the target to here.
    Read = 0,
    /// From here to the target.
    Write = 1,
}

impl From<TransferOpcode> for Opcode {
    fn from(opcode: TransferOpcode) -> Self {
        match opcode {
            TransferOpcode::Read => Self::Read,
            TransferOpcode::Write => Self::Write,
        }
    }
}

#[pymethods]
impl TransferOpcode {
    #[new]
    fn new(value: i64) -> PyResult<Self> {
        match value {
            0 => Ok(Self::Read),
            1 => Ok(Self::Write),
            _ => Err(PyTypeError::new_err(format!("{value} is no TransferOpcode: it is 0 or 1"))),
        }
    }

    #[getter]
    fn name(&self) -> &'static str {
        match self {
            Self::Read => "Read",
            Self::Write => "Write",
        }
    }

    #[getter]
    fn value(&self) -> u8 {
        *self as u8
    }

    fn __hash__(&self) -> u64 {
        *self as u64
    }

    fn __int__(&self) -> u8 {
        *self as u8
    }

    fn __index__(&self) -> u8 {
        *self as u8
    }

    fn __str__(&self) -> String {
        format!("TransferOpcode.{}", self.name())
    }

    fn __repr__(&self) -> String {
        format!("<TransferOpcode.{}: {}>", self.name(), self.value())
    }

    #[classattr]
    fn __members__(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let members = PyDict::new(py);
        for member in [Self::Read, Self::Write] {
            members.set_item(member.name(), Py::new(py, member)?)?;
        }
        Ok(members)
    }
}

/// A message to the application of a target.
#[pyclass(get_all, set_all, from_py_object, module = "mooncake.engine")]
#[derive(Clone)]
pub(crate) struct TransferNotify {
    /// Who sends, or what about.
    pub(crate) name: String,
    /// The text.
    pub(crate) msg: String,
}

#[pymethods]
impl TransferNotify {
    /// Both, or none.
    #[new]
    #[pyo3(signature = (name = None, msg = None))]
    fn new(name: Option<String>, msg: Option<String>) -> PyResult<Self> {
        match (name, msg) {
            (Some(name), Some(msg)) => Ok(Self { name, msg }),
            (None, None) => Ok(Self { name: String::new(), msg: String::new() }),
            _ => Err(PyTypeError::new_err(
                "incompatible constructor arguments: name and msg, or none",
            )),
        }
    }
}
