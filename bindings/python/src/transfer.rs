//! Batches of requests, and waiting for them.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use millstream_transfer::{
    Batch as Submitted, Notification, Opcode, PriorityLevel, SubmitOptions, TransferEngine,
    TransferRequest, TransferState, TransferStatus,
};
use pyo3::prelude::*;

use crate::failure::{ENDPOINT, Failure};
use crate::numbers;
use crate::region::Range;
use crate::segment::Segment;
use crate::shared::Shared;
use crate::wakeup::Wakeup;

/// How long signals may go unseen by who waits: `KeyboardInterrupt` is raised after that.
const GLANCE: Duration = Duration::from_millis(100);

/// Longer than anybody waits: a time of Python that is as long or longer is no limit.
const FOREVER: Duration = Duration::from_secs(1 << 31);

/// A time of Python, in seconds.
pub(crate) fn duration(seconds: Option<f64>) -> Result<Duration, Failure> {
    let Some(seconds) = seconds else { return Ok(FOREVER) };
    if seconds.is_nan() || seconds < 0.0 {
        return Err(Failure::argument(format!("{seconds} is no time to wait, in seconds")));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(FOREVER).min(FOREVER))
}

/// Requests that are submitted together.
#[pyclass(frozen, module = "millstream", name = "Batch")]
pub(crate) struct Batch {
    shared: Arc<Shared>,
    requests: Mutex<Vec<TransferRequest>>,
}

impl Batch {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, requests: Mutex::default() }
    }

    fn requests(&self) -> MutexGuard<'_, Vec<TransferRequest>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was refused is there again, in front of what was added since.
    fn put_back(&self, mut refused: Vec<TransferRequest>) {
        let mut requests = self.requests();
        refused.append(&mut requests);
        *requests = refused;
    }

    /// Adds a request for each of these, or none.
    fn add_many(
        &self,
        opcode: Opcode,
        segment: &Segment,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (local, remote) =
            (numbers::many(local, "addresses")?, numbers::many(remote, "addresses")?);
        let lengths = numbers::one_or_many(lengths, "lengths", local.len())?;
        let counts = (local.len(), remote.len(), lengths.len());
        if counts.0 != counts.1 || counts.0 != counts.2 {
            let (here, there, lengths) = counts;
            let message = format!("{here} addresses here, {there} there and {lengths} lengths");
            return Err(Failure::argument(message).into());
        }
        let target = segment.opened.id();
        let pairs = local.into_iter().zip(remote).zip(lengths);
        self.requests().extend(pairs.map(|((source, target_offset), length)| TransferRequest {
            opcode,
            source,
            target,
            target_offset,
            length,
        }));
        Ok(())
    }
}

#[pymethods]
impl Batch {
    /// Adds a WRITE: bytes from here to the segment.
    #[pyo3(signature = (segment, source, target, length = None))]
    fn write(
        &self,
        segment: &Bound<'_, Segment>,
        source: &Bound<'_, PyAny>,
        target: &Bound<'_, PyAny>,
        length: Option<u64>,
    ) -> PyResult<()> {
        let request = request(Opcode::Write, segment.get(), source, target, length)?;
        self.requests().push(request);
        Ok(())
    }

    /// Adds a READ: bytes from the segment to here.
    #[pyo3(signature = (segment, destination, source, length = None))]
    fn read(
        &self,
        segment: &Bound<'_, Segment>,
        destination: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        length: Option<u64>,
    ) -> PyResult<()> {
        let request = request(Opcode::Read, segment.get(), destination, source, length)?;
        self.requests().push(request);
        Ok(())
    }

    /// Adds a WRITE from each address here to one in the segment.
    fn write_many(
        &self,
        segment: &Bound<'_, Segment>,
        sources: &Bound<'_, PyAny>,
        targets: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.add_many(Opcode::Write, segment.get(), sources, targets, lengths)
    }

    /// Adds a READ to each address here from one in the segment.
    fn read_many(
        &self,
        segment: &Bound<'_, Segment>,
        destinations: &Bound<'_, PyAny>,
        sources: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.add_many(Opcode::Read, segment.get(), destinations, sources, lengths)
    }

    /// Begins to do what was added, all or nothing, and is empty then. What is refused stays.
    #[pyo3(signature = (
        notify = None, timeout = None, *, priority = None, transport = None, policy = None, intent = None,
        durable = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "arguments with names")]
    fn submit(
        &self,
        py: Python<'_>,
        notify: Option<(String, String)>,
        timeout: Option<f64>,
        priority: Option<&str>,
        transport: Option<String>,
        policy: Option<String>,
        intent: Option<String>,
        durable: bool,
    ) -> PyResult<Transfer> {
        let mut requests = std::mem::take(&mut *self.requests());
        let terms = Terms { notify, timeout, priority, transport, policy, intent, durable };
        let submitted = submit(py, &self.shared, &mut requests, terms);
        submitted.inspect_err(|_| self.put_back(requests))
    }

    fn __len__(&self) -> usize {
        self.requests().len()
    }
}

/// A request between these two ranges. One may be an address alone, and both with a length beside them.
pub(crate) fn request(
    opcode: Opcode,
    segment: &Segment,
    local: &Bound<'_, PyAny>,
    remote: &Bound<'_, PyAny>,
    length: Option<u64>,
) -> PyResult<TransferRequest> {
    let (source, here) = Range::of(local, length)?;
    let (target_offset, there) = Range::of(remote, length)?;
    let length = match (here, there) {
        (Some(here), Some(there)) if here == there => here,
        (Some(here), Some(there)) => {
            let message =
                format!("{here} bytes here and {there} there: say how many by length=...");
            return Err(Failure::argument(message).range(target_offset, there).into());
        }
        (Some(length), None) | (None, Some(length)) => length,
        (None, None) => {
            let message = "two addresses do not say how many bytes: say it by length=...";
            return Err(Failure::argument(message).into());
        }
    };
    Ok(TransferRequest { opcode, source, target: segment.opened.id(), target_offset, length })
}

/// How requests are to be done, as Python says it.
#[derive(Default)]
pub(crate) struct Terms<'a> {
    pub(crate) notify: Option<(String, String)>,
    pub(crate) timeout: Option<f64>,
    pub(crate) priority: Option<&'a str>,
    pub(crate) transport: Option<String>,
    pub(crate) policy: Option<String>,
    pub(crate) intent: Option<String>,
    pub(crate) durable: bool,
}

impl Terms<'_> {
    fn options(self) -> Result<SubmitOptions, Failure> {
        let Self { notify, timeout, priority, transport, policy, intent, durable } = self;
        let deadline = match timeout {
            Some(_) => Instant::now().checked_add(duration(timeout)?),
            None => None,
        };
        let level = |name| {
            let none = || format!("there is no priority {name:?}: latency, normal or bulk");
            PriorityLevel::from_name(name).ok_or_else(|| Failure::argument(none()))
        };
        let priority = priority.map(level).transpose()?;
        let notify = notify.map(|(name, text)| Notification { name, text });
        Ok(SubmitOptions { deadline, notify, priority, transport, policy, intent, durable })
    }
}

/// Begins to do these requests, and takes them. What is refused is left there.
pub(crate) fn submit(
    py: Python<'_>,
    shared: &Arc<Shared>,
    requests: &mut Vec<TransferRequest>,
    terms: Terms<'_>,
) -> PyResult<Transfer> {
    let options = terms.options()?;
    let all = requests.as_slice();
    let submitted = shared.detached(py, |engine| engine.submit_new(all, &options))?;
    let submitted = submitted.map_err(Failure::from)?;
    let requests = std::mem::take(requests);
    Ok(Transfer { shared: Arc::clone(shared), requests, submitted })
}

/// Requests under way.
#[pyclass(frozen, module = "millstream", name = "Transfer")]
pub(crate) struct Transfer {
    shared: Arc<Shared>,
    requests: Vec<TransferRequest>,
    submitted: Submitted,
}

impl Transfer {
    fn statuses(&self) -> PyResult<Vec<TransferStatus>> {
        Ok(self.shared.engine()?.statuses(&self.submitted))
    }

    /// Whether all is over, once that or the time is.
    fn wait_until_over(&self, py: Python<'_>, timeout: Duration) -> PyResult<bool> {
        // Many are over by now: for those the interpreter is kept.
        if self.shared.engine().map(|_| self.submitted.is_finished())? {
            return Ok(true);
        }
        let begun = Instant::now();
        loop {
            let left = timeout.saturating_sub(begun.elapsed());
            // For so long at most, since closing the engine ends what is under way.
            let wait = |engine: &TransferEngine| engine.wait(&self.submitted, left.min(GLANCE));
            let over = self.shared.detached(py, wait)?;
            if over || left.is_zero() {
                return Ok(over);
            }
            py.check_signals()?;
        }
    }

    /// The bytes moved, or the first request that failed.
    fn outcome(&self) -> PyResult<u64> {
        let engine = self.shared.engine()?;
        let all = engine.batch_status(&self.submitted);
        let Some(index) = all.first_incomplete else { return Ok(all.transferred_bytes) };
        let status = engine.status(&self.submitted, index);
        drop(engine);
        let status = status.map_err(Failure::from)?;
        let failure = match (status.state, status.error) {
            (_, Some(error)) => Failure::from(error),
            (TransferState::Timeout, None) => {
                Failure::new("TransferTimeoutError", ENDPOINT, "it ran out of time")
                    .remedy("give more time, or look whether the peer is there")
            }
            (TransferState::Canceled, None) => {
                Failure::new("TransferError", ENDPOINT, "it was canceled")
            }
            _ => Failure::new("TransferError", ENDPOINT, "it is not over"),
        };
        let request = &self.requests[index];
        Err(failure.range(request.target_offset, request.length).into())
    }
}

#[pymethods]
impl Transfer {
    /// Waits until all is over; the bytes moved.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<u64> {
        let timeout = duration(timeout)?;
        if self.wait_until_over(py, timeout)? {
            return self.outcome();
        }
        Err(Failure::new("TransferTimeoutError", ENDPOINT, format!("not done within {timeout:?}"))
            .remedy("wait again, or cancel it: it goes on")
            .into())
    }

    /// The bytes moved, of what is over; an error if it is not.
    fn result(&self) -> PyResult<u64> {
        self.outcome()
    }

    /// Whether all is over, for good or bad.
    fn done(&self) -> PyResult<bool> {
        Ok(self.shared.engine()?.batch_status(&self.submitted).state.is_final())
    }

    /// Ends what is not over; whether there was something.
    fn cancel(&self, py: Python<'_>) -> PyResult<bool> {
        let cancel = |engine: &TransferEngine| -> Result<bool, Failure> {
            let mut any = false;
            for index in 0..self.submitted.len() {
                any |= engine.cancel(&self.submitted, index)?;
            }
            Ok(any)
        };
        Ok(self.shared.detached(py, cancel)??)
    }

    /// Of each request: its state, at least how many bytes arrived, its transport, whether what its target holds is
    /// undefined, and why it failed.
    #[getter]
    fn status(&self) -> PyResult<Vec<Status>> {
        Ok(self.statuses()?.into_iter().map(Status::from).collect())
    }

    /// Has this number told once all is over; whether it is already.
    fn _tell(&self, wakeup: &Bound<'_, Wakeup>, number: u64) -> PyResult<bool> {
        self.shared.engine()?;
        let waker = Waker::from(wakeup.get().waker(number));
        let mut finished = self.submitted.finished();
        let poll = Future::poll(Pin::new(&mut finished), &mut Context::from_waker(&waker));
        Ok(poll == Poll::Ready(()))
    }

    fn __len__(&self) -> usize {
        self.requests.len()
    }

    /// `await` in asyncio.
    fn __await__<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let waiting = slf.py().import("millstream._asyncio")?.getattr("wait")?.call1((slf,))?;
        waiting.call_method0("__await__")
    }
}

/// How a request stands.
#[pyclass(frozen, get_all, module = "millstream", name = "Status")]
pub(crate) struct Status {
    state: &'static str,
    transferred_bytes: u64,
    transport: Option<&'static str>,
    target_undefined: bool,
    error: Option<String>,
}

impl From<TransferStatus> for Status {
    fn from(status: TransferStatus) -> Self {
        Self {
            state: match status.state {
                TransferState::Waiting => "WAITING",
                TransferState::Pending => "PENDING",
                TransferState::Invalid => "INVALID",
                TransferState::Canceled => "CANCELED",
                TransferState::Completed => "COMPLETED",
                TransferState::Timeout => "TIMEOUT",
                TransferState::Failed => "FAILED",
            },
            transferred_bytes: status.transferred_bytes,
            transport: status.transport,
            target_undefined: status.target_undefined,
            error: status.error.map(|error| error.to_string()),
        }
    }
}

#[pymethods]
impl Status {
    fn __repr__(&self) -> String {
        format!("Status(state={:?}, transferred_bytes={})", self.state, self.transferred_bytes)
    }
}
