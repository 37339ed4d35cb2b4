//! Segments of peers.

use std::sync::Arc;

use millstream_transfer::{Segment as Opened, SegmentBuffer};
use pyo3::prelude::*;

use crate::failure::Failure;
use crate::region::Range;
use crate::shared::Shared;

/// The registered memory of a peer.
#[pyclass(frozen, module = "millstream", name = "Segment")]
pub(crate) struct Segment {
    shared: Arc<Shared>,
    pub(crate) opened: Opened,
}

impl Segment {
    pub(crate) fn new(shared: Arc<Shared>, opened: Opened) -> Self {
        Self { shared, opened }
    }

    /// What its process has, also when the engine is closed. A fork may find a lock as a thread that it has not got held it.
    fn known(&self) -> Result<Vec<SegmentBuffer>, Failure> {
        if self.shared.is_forked() { Err(Failure::forked()) } else { Ok(self.opened.buffers()) }
    }
}

#[pymethods]
impl Segment {
    /// The name by which it was opened.
    #[getter]
    fn name(&self) -> String {
        self.opened.name().to_owned()
    }

    /// What its process has registered for others, as it was when it was opened or refreshed. One that makes no sense is
    /// among them, and a request to it says what is wrong with it.
    #[getter]
    fn buffers(&self) -> PyResult<Vec<Range>> {
        let known = self.known()?;
        let range =
            |buffer: SegmentBuffer| Range { address: buffer.address, length: buffer.length };
        Ok(known.into_iter().map(range).collect())
    }

    /// Where the memory of each of its buffers is, as `cpu:0`.
    #[getter]
    fn locations(&self) -> PyResult<Vec<String>> {
        Ok(self.known()?.into_iter().map(|buffer| buffer.location).collect())
    }

    /// Which transports lead there, as `(name, whether it is chosen, why it is not or None)`, in the order in which
    /// they are tried.
    fn paths(&self) -> PyResult<Vec<(&'static str, bool, Option<String>)>> {
        let reports = self.shared.engine()?.paths(self.opened.id());
        let reports = reports.map_err(Failure::from)?;
        Ok(reports.into_iter().map(|it| (it.transport, it.chosen, it.reason)).collect())
    }

    /// Asks its process again what it has.
    fn refresh(&self, py: Python<'_>) -> PyResult<()> {
        let id = self.opened.id();
        let outcome = self.shared.detached(py, |engine| engine.refresh_segment(id))?;
        Ok(outcome.map_err(Failure::from)?)
    }

    /// Closes it. Transfers under way go on.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let id = self.opened.id();
        let outcome = self.shared.detached(py, |engine| engine.close_segment(id))?;
        Ok(outcome.map_err(Failure::from)?)
    }

    fn __repr__(&self) -> String {
        format!("Segment({:?})", self.opened.name())
    }
}
