//! Descriptors that threads sleep on, for `loom`.

use std::io;
use std::time::Duration;

use crate::model::kernel::{self, Number};

pub(crate) type Watched<'a> = Number;

pub(crate) const MAX_WATCHED: usize = 2;

#[derive(Debug)]
pub(crate) struct EventDescriptor(Number);

impl EventDescriptor {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(kernel::open()))
    }

    pub(crate) fn write(&self) {
        kernel::write(self.0);
    }
}

#[derive(Debug)]
pub(crate) struct TimerDescriptor(Number);

impl TimerDescriptor {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(kernel::open()))
    }

    pub(crate) fn set(&self, left: Duration) {
        kernel::set(self.0, left.as_nanos() as u64);
    }

    pub(crate) fn watched(&self) -> Watched<'_> {
        self.0
    }
}

pub(crate) fn poll<'a>(
    event: &EventDescriptor,
    watched: impl IntoIterator<Item = Watched<'a>>,
    timeout: Option<Duration>,
) -> io::Result<bool> {
    let watched: Vec<Number> = watched.into_iter().collect();
    Ok(kernel::poll(event.0, &watched, timeout.map(|timeout| timeout.as_nanos() as u64)))
}
