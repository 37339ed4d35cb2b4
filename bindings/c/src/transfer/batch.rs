//! Batches as the original's C API has them, over those of the engine.
//!
//! The original takes requests that this engine refuses: of no bytes, and to a range that the peer does not have, whose
//! task fails later. Programs written for it look for that in the status. So tasks of a batch here are numbered by
//! themselves once there is one that the engine has not got.

mod one_by_one;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use millstream_transfer::{
    Batch as Tasks, Notification, RegisterError, SegmentId, SubmitError, SubmitOptions,
    TransferRequest, TransferState,
};

use self::one_by_one::Submission;
use super::engine::Engine;
use super::layout::RawStatus;
use super::notifications;
use crate::boundary::{Failure, code};
use crate::last_error;

/// How often who waits looks whether the engine is destroyed, which ends no task.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// [`Batch::users`] of one that was freed.
const FREED: usize = usize::MAX;

/// A batch.
#[derive(Debug)]
pub(super) struct Batch {
    tasks: Tasks,
    /// Held by who submits, for as long as that takes: so tasks have the numbers that their submitters think. Who asks
    /// for a status does not need it, and the original has no two threads submit to one batch at all.
    submitting: Mutex<Submitted>,
    /// Whether [`Batch::places`] says what the tasks are.
    has_places: AtomicBool,
    places: RwLock<Vec<Place>>,
    /// Threads that submit, or [`FREED`].
    users: AtomicUsize,
}

#[derive(Debug, Default)]
struct Submitted {
    /// What was borrowed for its tasks.
    borrowed: Vec<u64>,
    /// Requests of a call; kept for its room.
    requests: Vec<TransferRequest>,
}

/// What a task is.
#[derive(Clone, Debug)]
enum Place {
    /// The engine's task of this index.
    Task(usize),
    /// Nothing to do.
    Empty,
    /// Refused by the engine, for this reason.
    Refused(Box<str>),
}

impl Batch {
    pub(super) fn new(tasks: Tasks) -> Self {
        Self {
            tasks,
            submitting: Mutex::default(),
            has_places: AtomicBool::new(false),
            places: RwLock::default(),
            users: AtomicUsize::new(0),
        }
    }

    /// How many tasks were submitted.
    fn count(&self) -> usize {
        match self.has_places.load(Ordering::Acquire) {
            true => self.places.read().unwrap_or_else(PoisonError::into_inner).len(),
            false => self.tasks.len(),
        }
    }

    /// Submits `count` requests, each of which `request` gives.
    pub(super) fn submit(
        &self,
        engine: &Engine,
        count: usize,
        request: impl Fn(usize) -> Result<TransferRequest, Failure>,
        notify: Option<Notification>,
    ) -> Result<(), Failure> {
        self.add(count, request, |requests, submitted| {
            self.submit_requests(engine, requests, notify, submitted)
        })
    }

    /// Submits `count` requests on these terms, all or none, and says of each reason why none was accepted.
    pub(super) fn submit_all(
        &self,
        engine: &Engine,
        count: usize,
        request: impl Fn(usize) -> Result<TransferRequest, Failure>,
        options: &SubmitOptions,
    ) -> Result<(), Failure> {
        self.add(count, request, |requests, _| {
            if let Some(index) = engine.borrowed.position(requests) {
                let TransferRequest { source: source_address, length, .. } = requests[index];
                let error = SubmitError::SourceNotRegistered { index, source_address, length };
                return Err(Failure::of_refusal(&error));
            }
            let first = self.tasks.len();
            let submitted = engine.transfer.submit_with(&self.tasks, requests, options);
            submitted.map_err(|error| Failure::of_refusal(&error))?;
            if self.has_places.load(Ordering::Relaxed) {
                let mut places = self.places.write().unwrap_or_else(PoisonError::into_inner);
                places.extend((first..first + count).map(Place::Task));
            }
            Ok(())
        })
    }

    /// Has requests submitted, while nobody else does so.
    fn add(
        &self,
        count: usize,
        request: impl Fn(usize) -> Result<TransferRequest, Failure>,
        submit: impl FnOnce(&[TransferRequest], &mut Submitted) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let user = |users: usize| (users != FREED).then(|| users + 1);
        let used = self.users.fetch_update(Ordering::AcqRel, Ordering::Acquire, user);
        used.map_err(|_| Failure::invalid("the batch was freed"))?;
        let _user = User(self);
        let mut submitted = self.submitting();
        let (capacity, before) = (self.tasks.capacity(), self.count());
        if count > capacity - before {
            let text = format!(
                "Exceed capacity: the batch holds {capacity} tasks, {before} were submitted \
                 before, and {count} are too many"
            );
            return Err(Failure::new(code::TOO_MANY_REQUESTS, text));
        }
        let mut requests = std::mem::take(&mut submitted.requests);
        requests.clear();
        let filled = (0..count).try_for_each(|index| {
            requests.push(request(index)?);
            Ok(())
        });
        let done = filled.and_then(|()| submit(&requests, &mut submitted));
        submitted.requests = requests;
        done
    }

    fn submit_requests(
        &self,
        engine: &Engine,
        requests: &[TransferRequest],
        notify: Option<Notification>,
        submitted: &mut Submitted,
    ) -> Result<(), Failure> {
        let options = SubmitOptions { notify, ..SubmitOptions::default() };
        let plain = requests.iter().all(|request| request.length > 0);
        let mut known = None;
        if plain && !self.has_places.load(Ordering::Relaxed) {
            let (before, ever) = (submitted.borrowed.len(), engine.borrowed.ever());
            engine.borrowed.share(requests, &mut submitted.borrowed);
            let outcome = engine.transfer.submit_with(&self.tasks, requests, &options);
            if outcome.is_err() {
                // What is borrowed for others must not be in the way of what is to be borrowed.
                for first in submitted.borrowed.drain(before..) {
                    engine.borrowed.give_back(first, |first| engine.is_unregistered(first));
                }
            }
            match outcome {
                Ok(()) => {
                    // Some of it may have been borrowed just now.
                    if engine.borrowed.ever() != ever {
                        engine.borrowed.share(requests, &mut submitted.borrowed);
                    }
                    return Ok(());
                }
                Err(error) if !is_single(&error) && !may_borrow(engine, &error) => {
                    return Err(refusal(&error));
                }
                // A restart is said once: asked again, the engine writes to the process of now. And who does not answer
                // is waited for once.
                Err(error @ (SubmitError::Restarted { .. } | SubmitError::Refresh(_))) => {
                    known = Some(error);
                }
                Err(_) => {}
            }
        }
        let is_open = |id: SegmentId| id == SegmentId::LOCAL || engine.segments().contains_key(&id);
        if let Some(index) = requests.iter().position(|request| !is_open(request.target)) {
            let target = requests[index].target.0;
            return Err(Failure::invalid(format!("request {index}: segment {target} is not open")));
        }
        let message = options.notify.clone();
        let submission = Submission { engine, batch: self, requests, submitted };
        let places = submission.run(options, known);
        // All is done of requests of no bytes. A message that cannot be sent is no failure of theirs.
        if let Some(message) = message
            && places.iter().all(|place| matches!(place, Place::Empty))
        {
            let targets: BTreeSet<SegmentId> = requests.iter().map(|it| it.target).collect();
            for target in targets {
                if let Err(failure) = notifications::notify(engine, target, &message) {
                    last_error::set(failure.text());
                }
            }
        }
        let mut all = self.places.write().unwrap_or_else(PoisonError::into_inner);
        if !self.has_places.load(Ordering::Relaxed) {
            // Those of before were all the engine's.
            let new = places.iter().filter(|place| matches!(place, Place::Task(_))).count();
            *all = (0..self.tasks.len() - new).map(Place::Task).collect();
        }
        all.extend(places);
        self.has_places.store(true, Ordering::Release);
        Ok(())
    }

    /// How a task stands.
    pub(super) fn status(&self, engine: &Engine, task: usize) -> Result<RawStatus, Failure> {
        let index = match self.place(task)? {
            Place::Task(index) => index,
            Place::Empty => return Ok(RawStatus::without_transfer(TransferState::Completed)),
            Place::Refused(reason) => {
                last_error::set(&reason);
                return Ok(RawStatus::without_transfer(TransferState::Failed));
            }
        };
        let status = engine.transfer.status(&self.tasks, index);
        let status = status.map_err(Failure::invalid)?;
        if status.state.is_final() {
            if status.state != TransferState::Completed {
                let error = status.error.as_ref().map(ToString::to_string);
                last_error::set(
                    &error.unwrap_or_else(|| format!("the task ended as {:?}", status.state)),
                );
            }
            self.end(engine, false);
        }
        Ok(RawStatus::new(&status))
    }

    fn place(&self, task: usize) -> Result<Place, Failure> {
        let missing = || {
            let count = self.count();
            Failure::invalid(format!("the batch has {count} tasks: there is no task {task}"))
        };
        if !self.has_places.load(Ordering::Acquire) {
            return (task < self.tasks.len()).then_some(Place::Task(task)).ok_or_else(missing);
        }
        let places = self.places.read().unwrap_or_else(PoisonError::into_inner);
        let place = places.get(task).cloned();
        drop(places);
        place.ok_or_else(missing)
    }

    /// Waits until all tasks have ended; whether they have.
    pub(super) fn wait(&self, engine: &Engine, timeout: Duration) -> Result<bool, Failure> {
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            if engine.transfer.wait(&self.tasks, left.min(LOOK_INTERVAL)) {
                self.end(engine, true);
                return Ok(true);
            }
            if engine.is_closing() {
                return Err(Failure::new(code::CONTEXT, "the engine is being destroyed"));
            }
            if left <= LOOK_INTERVAL {
                return Ok(false);
            }
        }
    }

    /// Begins to end a task; whether it was neither over nor about to end.
    pub(super) fn cancel(&self, engine: &Engine, task: usize) -> Result<bool, Failure> {
        match self.place(task)? {
            Place::Task(index) => {
                engine.transfer.cancel(&self.tasks, index).map_err(Failure::invalid)
            }
            Place::Empty | Place::Refused(_) => Ok(false),
        }
    }

    /// Frees it, once all its tasks have ended, and nobody submits to it.
    pub(super) fn free(&self, engine: &Engine) -> Result<(), Failure> {
        let busy = |text: &str| Failure::new(code::BATCH_BUSY, text);
        if !self.is_over(engine) {
            return Err(busy("tasks of the batch are unfinished: wait for them"));
        }
        let freed = self.users.compare_exchange(0, FREED, Ordering::AcqRel, Ordering::Acquire);
        match freed {
            // One may have been submitted meanwhile.
            Ok(_) if !self.is_over(engine) => {
                self.users.store(0, Ordering::Release);
                return Err(busy("tasks of the batch are unfinished: wait for them"));
            }
            Ok(_) => {}
            Err(FREED) => return Err(Failure::invalid("the batch was freed")),
            Err(_) => return Err(busy("a thread submits to the batch")),
        }
        // Nobody submits any more: who has the lock, to look whether all is over, has it for a moment. Later nobody
        // finds this batch to give anything back.
        engine.give_back(&mut self.submitting());
        Ok(())
    }

    /// By the states of the tasks, too: these are seen a moment before the batch knows.
    fn is_over(&self, engine: &Engine) -> bool {
        let is_final = |index| {
            engine.transfer.status(&self.tasks, index).is_ok_and(|status| status.state.is_final())
        };
        engine.transfer.wait(&self.tasks, Duration::ZERO) || (0..self.tasks.len()).all(is_final)
    }

    /// Gives back what was borrowed, once all tasks have ended; whether there was something. Looks at each task if it
    /// is to be `sure`.
    fn end(&self, engine: &Engine, sure: bool) -> bool {
        // Who submits now may have borrowed for tasks that are still to come.
        let Ok(mut submitted) = self.submitting.try_lock() else { return false };
        let is_over = || match sure {
            true => self.is_over(engine),
            false => engine.transfer.wait(&self.tasks, Duration::ZERO),
        };
        if submitted.borrowed.is_empty() || !is_over() {
            return false;
        }
        engine.give_back(&mut submitted);
        true
    }

    fn submitting(&self) -> MutexGuard<'_, Submitted> {
        self.submitting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine {
    /// Gives back what was borrowed for tasks that have ended; whether there was something.
    pub(super) fn give_back_borrowed(&self) -> bool {
        let batches = self.batches.filter(|_| true);
        let batches = batches.into_iter().filter_map(|handle| self.batches.find(handle));
        let ended = batches.filter(|batch| batch.end(self, true)).count() > 0;
        let was_in_use = self.borrowed.try_again(|first| self.is_unregistered(first));
        ended || was_in_use
    }

    /// Gives back what was borrowed for a batch.
    fn give_back(&self, submitted: &mut Submitted) {
        for first in submitted.borrowed.drain(..) {
            self.borrowed.give_back(first, |first| self.is_unregistered(first));
        }
    }

    /// Unregisters what was borrowed; whether that is done, and not to be tried again.
    fn is_unregistered(&self, first: u64) -> bool {
        let pointer = std::ptr::with_exposed_provenance_mut(first as usize);
        !matches!(self.transfer.unregister_memory(pointer), Err(RegisterError::InUse { .. }))
    }
}

/// A thread that submits.
struct User<'a>(&'a Batch);

impl Drop for User<'_> {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Whether requests of a call are refused one by one, rather than all of it.
fn is_single(error: &SubmitError) -> bool {
    matches!(
        error,
        SubmitError::TargetOutOfRange { .. }
            | SubmitError::TargetNotAccessible { .. }
            | SubmitError::Overflow { .. }
            | SubmitError::Restarted { .. }
            | SubmitError::Refresh(_)
    )
}

fn may_borrow(engine: &Engine, error: &SubmitError) -> bool {
    matches!(error, SubmitError::SourceNotRegistered { .. }) && !engine.has_transport("rdma")
}

/// Why none of the requests was accepted.
fn refusal(error: &SubmitError) -> Failure {
    match error {
        SubmitError::NoPath { .. } => Failure::new(code::NOT_SUPPORTED_TRANSPORT, error),
        _ => Failure::of(error.code(), error),
    }
}
