//! An engine that was initialized, and what the module's calls do with it.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use millstream_net::forks;
use millstream_transfer::{
    ANY_LOCATION, Buffer, Notification, Opcode, RegisterError, Segment, SegmentError, SegmentId,
    SubmitError, SubmitNewError, SubmitOptions, TransferEngine, TransferRequest,
};
use pyo3::prelude::*;

use super::bounce::Bounce;
use super::jobs::{End, Job, Jobs};
use super::start::{self, DEFAULT_PORT, Failed, Wanted};
use crate::shared::drop_detached;

/// Codes of the module.
pub(super) const FAILED: i32 = -1;
const NOT_REGISTERED: i32 = -3;
const NO_HOST: i32 = -101;

/// How long signals may go unseen by who waits.
const GLANCE: Duration = Duration::from_millis(100);

/// What is to be moved between here and a peer.
pub(super) struct Moves<'a> {
    pub(super) target: &'a str,
    pub(super) opcode: Opcode,
    pub(super) here: &'a [u64],
    pub(super) there: &'a [u64],
    pub(super) lengths: &'a [u64],
}

pub(super) struct Started {
    /// Of the process that made it.
    forks: u32,
    pub(super) engine: TransferEngine,
    timeout: Duration,
    segments: RwLock<HashMap<String, Segment>>,
    /// What is registered: first bytes, and lengths.
    registered: Mutex<BTreeMap<u64, u64>>,
    managed: Mutex<HashMap<u64, Buffer>>,
    jobs: Jobs,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Started {
    pub(super) fn new(wanted: &Wanted) -> Result<Self, Failed> {
        Ok(Self {
            forks: forks(),
            engine: start::start(wanted)?,
            timeout: start::timeout(),
            segments: RwLock::default(),
            registered: Mutex::default(),
            managed: Mutex::default(),
            jobs: Jobs::default(),
        })
    }

    /// Whether this is a fork of the process that has the engine.
    pub(super) fn is_forked(&self) -> bool {
        forks() != self.forks
    }

    /// Registers memory by its address, all of it or none; the code.
    pub(super) fn register(&self, pieces: &[(u64, u64)], location: &str) -> i32 {
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut(address as usize);
        let memory: Vec<_> =
            pieces.iter().map(|&(address, length)| (pointer(address), length as usize)).collect();
        // SAFETY: the caller of the module means this memory, and unregisters it before it goes: that is the contract of
        // `register_memory`. Accesses recover from faults where it is gone.
        match unsafe { self.engine.register_memory_batch(&memory, location, true) } {
            Ok(()) => {
                lock(&self.registered).extend(pieces.iter().copied());
                0
            }
            Err(error) => complain(error.code(), &error),
        }
    }

    /// Unregisters what can be; the code of the first that cannot.
    pub(super) fn unregister(&self, addresses: &[u64]) -> i32 {
        let mut code = 0;
        for &address in addresses {
            let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
            let outcome = self.engine.unregister_memory(pointer);
            if !matches!(outcome, Err(RegisterError::InUse { .. })) {
                lock(&self.registered).remove(&address);
            }
            if let (Err(error), 0) = (outcome, code) {
                code = complain(error.code(), &error);
            }
        }
        code
    }

    fn is_registered(&self, address: u64, length: u64) -> bool {
        let registered = lock(&self.registered);
        let before = registered.range(..=address).next_back();
        before.is_some_and(|(&first, &many)| {
            address.checked_add(length).is_some_and(|end| end <= first.saturating_add(many))
        })
    }

    /// Allocates registered memory; 0 if there is none.
    pub(super) fn allocate(&self, length: usize) -> u64 {
        match self.engine.allocate_buffer(length.max(1), ANY_LOCATION, true) {
            Ok(buffer) => {
                let address = buffer.address();
                lock(&self.registered).insert(address, buffer.length() as u64);
                lock(&self.managed).insert(address, buffer);
                address
            }
            Err(error) => {
                complain(error.code(), &error);
                0
            }
        }
    }

    /// Frees it. What was not allocated is left alone, as it is by the original.
    pub(super) fn free(&self, address: u64) -> i32 {
        let buffer = lock(&self.managed).remove(&address);
        if buffer.is_some() {
            lock(&self.registered).remove(&address);
        }
        drop(buffer);
        0
    }

    fn segment(&self, name: &str) -> Result<Segment, SegmentError> {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(segment) = segments.get(name) {
            return Ok(segment.clone());
        }
        drop(segments);
        let segment = self.engine.open_segment(name)?;
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        segments.insert(name.to_owned(), segment.clone());
        Ok(segment)
    }

    /// The next one to use a segment asks for it anew. What another thread has opened there since stays.
    fn forget(&self, name: &str, segment: SegmentId) {
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        if segments.get(name).is_some_and(|there| there.id() == segment) {
            segments.remove(name);
        }
        drop(segments);
        // Another thread may have closed it.
        let _ = self.engine.close_segment(segment);
    }

    /// Submits what has bytes, and waits for it; the code. Once more if another process has taken the target's place.
    pub(super) fn sync(
        &self,
        py: Python<'_>,
        moves: &Moves<'_>,
        notify: Option<&Notification>,
    ) -> PyResult<i32> {
        let attempt = || -> PyResult<Option<(Job, End)>> {
            let Some(job) = py.detach(|| self.submit(moves, notify)) else { return Ok(None) };
            let end = self.wait(py, &job)?;
            Ok(Some((job, end)))
        };
        let mut ended = attempt()?;
        if let Some((job, end)) = &ended
            && py.detach(|| self.was_restarted(moves.target, job, end))
        {
            ended = attempt()?;
        }
        Ok(ended.map_or(FAILED, |(_, end)| tell(&end)))
    }

    /// Whether a job has moved nothing and failed, and another process has taken its target's place since it was submitted.
    /// The next one to use that asks for it anew then.
    fn was_restarted(&self, target: &str, job: &Job, end: &End) -> bool {
        let Job::Submitted { batch, segment, incarnation: Some(before), .. } = job else {
            return false;
        };
        let has_failed = matches!(end, End::Failed(_));
        if !has_failed || self.engine.batch_status(batch).transferred_bytes > 0 {
            return false;
        }
        let now = match self.engine.refresh_segment(segment.id()) {
            Ok(()) => Ok(segment.incarnation()),
            // Another thread knows already, and has closed it.
            Err(SegmentError::Unknown(_)) => {
                self.segment(target).map(|segment| segment.incarnation())
            }
            Err(error) => Err(error),
        };
        let is_another = now.is_ok_and(|now| now != Some(*before));
        if is_another {
            self.forget(target, segment.id());
        }
        is_another
    }

    /// Submits what has bytes. `None` when the target cannot be had, or the lists make no sense.
    pub(super) fn submit(&self, moves: &Moves<'_>, notify: Option<&Notification>) -> Option<Job> {
        let Moves { target, opcode, here, there, lengths } = *moves;
        if here.len() != there.len() || here.len() != lengths.len() {
            complain(FAILED, "as many addresses as lengths are needed");
            return None;
        }
        let options = SubmitOptions { notify: notify.cloned(), ..SubmitOptions::default() };
        // Once more if another process answers there now: the addresses may be that one's.
        for is_last in [false, true] {
            let segment = match self.segment(target) {
                Ok(segment) => segment,
                Err(error) => {
                    complain(FAILED, &error);
                    return None;
                }
            };
            let request = |((&source, &target_offset), &length)| TransferRequest {
                opcode,
                source,
                target: segment.id(),
                target_offset,
                length,
            };
            let requests = here.iter().zip(there).zip(lengths).map(request);
            let requests: Vec<_> = requests.filter(|request| request.length > 0).collect();
            if requests.is_empty() {
                if let Some(message) = &options.notify
                    && let Err(error) = self.engine.notify(segment.id(), message)
                {
                    complain(FAILED, &error);
                }
                return Some(Job::Nothing);
            }
            let error = match self.submit_requests(&segment, requests, &options) {
                Ok(job) => return Some(job),
                Err(error) => error,
            };
            let may_be_another = matches!(
                error,
                SubmitNewError::Submit(
                    SubmitError::Restarted { .. }
                        | SubmitError::UnknownSegment { .. }
                        | SubmitError::Refresh(_)
                )
            );
            if may_be_another {
                self.forget(target, segment.id());
            }
            if is_last || !may_be_another {
                complain(error.code(), &error);
                break;
            }
        }
        Some(Job::Refused)
    }

    fn submit_requests(
        &self,
        segment: &Segment,
        mut requests: Vec<TransferRequest>,
        options: &SubmitOptions,
    ) -> Result<Job, SubmitNewError> {
        // Asked before: once they fail, the segment may be another process's.
        let incarnation = segment.incarnation();
        // What is more than there is cannot be right.
        let sum = |all: u64, request: &TransferRequest| all.checked_add(request.length);
        let Some(bytes) = requests.iter().try_fold(0, sum) else {
            complain(FAILED, "these requests have more bytes than there are addresses");
            return Ok(Job::Refused);
        };
        match self.engine.submit_new(&requests, options) {
            Ok(batch) => {
                let segment = segment.clone();
                return Ok(Job::Submitted { batch, bounce: None, bytes, segment, incarnation });
            }
            Err(SubmitNewError::Submit(SubmitError::SourceNotRegistered { .. })) => {}
            Err(error) => return Err(error),
        }
        // Asked once: another thread may unregister meanwhile.
        let is_registered =
            |request: &TransferRequest| self.is_registered(request.source, request.length);
        let bounced: Vec<bool> = requests.iter().map(|request| !is_registered(request)).collect();
        let room: u64 =
            requests.iter().zip(&bounced).filter(|it| *it.1).map(|it| it.0.length).sum();
        let Ok(buffer) = self.engine.allocate_buffer(room as usize, ANY_LOCATION, false) else {
            complain(
                NOT_REGISTERED,
                "the memory here is not registered, and there is no room to copy it",
            );
            return Ok(Job::Refused);
        };
        match Bounce::new(buffer, &mut requests, &bounced) {
            Ok(bounce) => {
                let batch = self.engine.submit_new(&requests, options)?;
                let (bounce, segment) = (Some(bounce), segment.clone());
                Ok(Job::Submitted { batch, bounce, bytes, segment, incarnation })
            }
            Err(fault) => {
                complain(NOT_REGISTERED, &fault);
                Ok(Job::Refused)
            }
        }
    }

    /// Waits for a job; how it ended. What is not over in time is canceled, and so it is when a signal's handler raises.
    pub(super) fn wait(&self, py: Python<'_>, job: &Job) -> PyResult<End> {
        let Job::Submitted { batch, .. } = job else {
            return Ok(job.end(&self.engine).unwrap_or(End::Failed(None)));
        };
        let limit = self.timeout + Duration::from_nanos(job.bytes());
        let begun = Instant::now();
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            if py.detach(|| self.engine.wait(batch, left.min(GLANCE))) {
                return Ok(py.detach(|| job.end(&self.engine)).unwrap_or(End::Failed(None)));
            }
            let signal = py.check_signals();
            if left.is_zero() || signal.is_err() {
                py.detach(|| {
                    for task in 0..batch.len() {
                        let _ = self.engine.cancel(batch, task);
                    }
                    // Ends within seconds, and nobody touches the caller's memory any more then.
                    while !self.engine.wait(batch, GLANCE) {}
                });
                return signal.map(|()| End::Timeout);
            }
        }
    }

    pub(super) fn add(&self, job: Job) -> u64 {
        self.jobs.add(job)
    }

    /// The state of a job by its number, which is free once it is over: 1, 0 while it is under way, -1, or -2 for
    /// want of time.
    pub(super) fn check(&self, number: u64) -> i32 {
        let Some(job) = self.jobs.find(number) else { return no_batch(number) };
        let Some(end) = job.end(&self.engine) else { return 0 };
        self.jobs.free(number);
        tell(&end);
        match end {
            End::Completed => 1,
            End::Failed(_) => FAILED,
            End::Timeout => -2,
        }
    }

    /// Waits for all of these, which are free then; 0 if all have completed.
    pub(super) fn wait_for(&self, py: Python<'_>, numbers: &[u64]) -> PyResult<i32> {
        let mut code = 0;
        for &number in numbers {
            let Some(job) = self.jobs.find(number) else {
                code = no_batch(number);
                continue;
            };
            code = code.min(tell(&self.wait(py, &job)?));
            self.jobs.free(number);
        }
        Ok(code)
    }

    /// Whether the process of a segment is there: 0, or a code.
    pub(super) fn probe(&self, name: &str) -> i32 {
        let whole =
            if name.contains(':') { name.to_owned() } else { format!("{name}:{DEFAULT_PORT}") };
        match self.engine.probe(&whole) {
            Ok(_) => 0,
            // What is no name has no address.
            Err(error) if error.code() == FAILED => complain(NO_HOST, &error),
            Err(error) => complain(error.code(), &error),
        }
    }

    /// Where the first registered memory of a segment is; 0 if there is none.
    pub(super) fn first_buffer(&self, name: &str) -> u64 {
        let segment = self.segment(name).and_then(|segment| {
            self.engine.refresh_segment(segment.id())?;
            Ok(segment)
        });
        match segment {
            Ok(segment) => {
                let buffers = segment.buffers();
                let first = buffers.iter().find(|buffer| buffer.fault.is_none());
                first.map_or(0, |buffer| buffer.address)
            }
            Err(error) => {
                complain(error.code(), &error);
                0
            }
        }
    }
}

/// Says why a job has not completed, unless that was said before; the code of a call that waited for it.
fn tell(end: &End) -> i32 {
    match end {
        End::Completed => 0,
        End::Failed(None) => FAILED,
        End::Failed(Some(why)) => complain(FAILED, why),
        End::Timeout => complain(FAILED, "a transfer was not done in time"),
    }
}

fn no_batch(number: u64) -> i32 {
    complain(FAILED, &format!("there is no batch {number}, or it is over and was asked for before"))
}

/// Says why there is a code, as the original's log does. `MC_LOG_LEVEL` is not asked for errors there either.
pub(super) fn complain(code: i32, error: &(impl std::fmt::Display + ?Sized)) -> i32 {
    say(&format!("{code}: {error}"));
    code
}

/// Writes a line to stderr without the lock of the standard library, which a thread may have had that a fork has not
/// got.
pub(super) fn say(text: &str) {
    let line = format!("millstream: {text}\n");
    if let Ok(stderr) = std::io::stderr().as_fd().try_clone_to_owned() {
        // Nobody is told that nobody reads it.
        let _ = std::fs::File::from(stderr).write_all(line.as_bytes());
    }
}

/// An engine as several calls have it at a time. The last of them ends it. A fork has none that could be ended.
pub(super) struct Handle(
    /// `None` when it goes.
    Option<Arc<Started>>,
);

impl Handle {
    pub(super) fn new(started: Started) -> Self {
        Self(Some(Arc::new(started)))
    }

    /// The same engine for a call.
    pub(super) fn another(&self) -> Option<Self> {
        let started = self.0.as_ref().filter(|started| !started.is_forked())?;
        Some(Self(Some(Arc::clone(started))))
    }
}

impl Deref for Handle {
    type Target = Started;

    fn deref(&self) -> &Started {
        self.0.as_deref().expect("it is there until the handle goes")
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Some(started) = self.0.take() else { return };
        if started.is_forked() {
            std::mem::forget(started);
        } else if let Some(started) = Arc::into_inner(started) {
            // It may wait for a metadata server, perhaps one in a thread of this interpreter.
            drop_detached(started);
        }
    }
}
