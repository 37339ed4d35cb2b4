//! Segments of peers.

use std::sync::Arc;

use millstream_transfer::Segment as Opened;
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
}

#[pymethods]
impl Segment {
    /// The name by which it was opened.
    #[getter]
    fn name(&self) -> String {
        self.opened.name().to_owned()
    }

    /// What its process has registered for others, as it was when it was opened or refreshed.
    #[getter]
    fn buffers(&self) -> Vec<Range> {
        let range = |buffer: millstream_transfer::SegmentBuffer| Range {
            address: buffer.address,
            length: buffer.length,
        };
        self.opened.buffers().into_iter().map(range).collect()
    }

    /// Where the memory of each of its buffers is, as `cpu:0`.
    #[getter]
    fn locations(&self) -> Vec<String> {
        self.opened.buffers().into_iter().map(|buffer| buffer.location).collect()
    }

    /// Which transports lead there, as `(name, whether it is chosen, why it is not or None)`, in the order in which
    /// they are tried.
    fn paths(&self) -> PyResult<Vec<(&'static str, bool, Option<String>)>> {
        let engine = self.shared.engine()?;
        let reports = engine.paths(self.opened.id()).map_err(Failure::from)?;
        Ok(reports.into_iter().map(|it| (it.transport, it.chosen, it.reason)).collect())
    }

    /// Asks its process again what it has.
    fn refresh(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.shared.engine()?;
        let id = self.opened.id();
        Ok(py.detach(|| engine.refresh_segment(id)).map_err(Failure::from)?)
    }

    /// Closes it. Transfers under way go on.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.shared.engine()?;
        let id = self.opened.id();
        Ok(py.detach(|| engine.close_segment(id)).map_err(Failure::from)?)
    }

    fn __repr__(&self) -> String {
        format!("Segment({:?})", self.opened.name())
    }
}
