//! How an event loop hears of transfers that are over: a descriptor becomes readable.
//!
//! Threads of the engine never wait for the interpreter, which may be busy.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Wake;

use pyo3::prelude::*;

/// Both ends, and what is over.
struct Ends {
    read: UnixStream,
    write: UnixStream,
    over: Mutex<Vec<u64>>,
}

/// Numbers of transfers that are over, for an event loop.
#[pyclass(frozen, module = "millstream._native")]
pub(crate) struct Wakeup(Arc<Ends>);

impl Wakeup {
    /// What says that the transfer with this number is over.
    pub(crate) fn waker(&self, number: u64) -> Arc<Tell> {
        Arc::new(Tell { ends: Arc::clone(&self.0), number })
    }
}

#[pymethods]
impl Wakeup {
    #[new]
    fn new() -> PyResult<Self> {
        let (read, write) = UnixStream::pair()?;
        read.set_nonblocking(true)?;
        write.set_nonblocking(true)?;
        Ok(Self(Arc::new(Ends { read, write, over: Mutex::default() })))
    }

    fn fileno(&self) -> i32 {
        self.0.read.as_raw_fd()
    }

    /// The numbers since it was asked before.
    fn take(&self) -> Vec<u64> {
        let mut bytes = [0; 512];
        // First the bytes: whoever adds a number afterwards writes one more.
        while matches!((&self.0.read).read(&mut bytes), Ok(length) if length > 0) {}
        std::mem::take(&mut *self.0.over.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

pub(crate) struct Tell {
    ends: Arc<Ends>,
    number: u64,
}

impl Wake for Tell {
    fn wake(self: Arc<Self>) {
        self.ends.over.lock().unwrap_or_else(PoisonError::into_inner).push(self.number);
        // When it is full, it is readable.
        let _ = (&self.ends.write).write(&[1]);
    }
}
