//! A peer: its flow, which decides, and the connections of its rails, which do it.
//!
//! Each call gives the flow an input under the lock, takes what is to be done, and does it after the
//! lock: posting, and telling tasks that they have ended. What may take longer, as connecting and
//! resetting queue pairs, a thread of the pool does.

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use millstream_metadata::{BufferDesc, Gid, NicPath};
use millstream_transfer_core::{
    Borders, Classic, Ended, Flow, Instant, Output, Piece, Post, Rail, RailId, RailState, Ranges,
    Request, SliceId, SliceResult, TaskId,
};
use millstream_verbs::{Completion, CompletionStatus, PostError};

use super::connection::{Connection, MAX_QUEUE_PAIRS};
use super::device::LocalDevice;
use super::links::{Link, Place};
use super::locations::Pairs;
use super::nics;
use super::runs::Runs;
use super::shared::Shared;
use super::timer::Due;
use super::work::{Posting, Work};
use crate::batch::BatchShared;
use crate::pieces::Shape;
use crate::segment::OpenSegment;
use crate::task::{Task, TaskEnd, TaskHandle, WideSlice};
use crate::transport::{EndTask, Run};
use crate::{FailureReason, Opcode, TransferError, TransferState};

/// When nothing has completed for so long, the peer is asked whether it is there.
const STALL: Duration = Duration::from_millis(300);

/// When it has not answered since it was first asked so long ago, and nothing has completed, then what waits
/// for a connection fails, unless it is to wait for longer.
const SILENT: Duration = Duration::from_secs(4);

/// A process, and the ways to it.
pub(super) struct Peer {
    pub(super) own: Weak<Self>,
    pub(super) shared: Arc<Shared>,
    /// The name that its segment was opened by: where to call it.
    pub(super) name: Arc<str>,
    /// Whether it says which start of its process it is. Others do not know of fences.
    pub(super) has_incarnation: bool,
    pub(super) rails: Box<[Way]>,
    /// The locations that its descriptor has NICs for: the policy knows them by their places here.
    locations: Box<[String]>,
    state: Mutex<State>,
    pub(super) due: Due,
}

/// The two NICs of a rail.
#[derive(Debug)]
pub(super) struct Way {
    /// Index of the device here.
    pub(super) local: usize,
    /// Index of the device in the peer's descriptor.
    pub(super) remote: usize,
    /// The peer's NIC, by the name that the peer gives itself.
    pub(super) nic: NicPath,
    /// Its address, by the peer's descriptor.
    pub(super) gid: Gid,
}

struct State {
    flow: Flow<Classic>,
    runs: Runs,
    pairs: Pairs,
    /// The connection of each rail that is up.
    connections: Vec<Option<Connected>>,
    /// Those that are being reset.
    aborting: Vec<(RailId, u64, Arc<Connection>)>,
    /// Tasks that failed for good, by their numbers: on which rail, and how.
    refused: Vec<(u64, RailId, CompletionStatus)>,
    /// Why a rail failed last.
    last: Option<(RailId, FailureReason)>,
    /// The incarnation before: another one has answered since, and it will not come back.
    dead: Option<u64>,
    segments: Vec<Weak<OpenSegment>>,
    /// Whether it is being asked whether it is there.
    asking: bool,
    ask_at: Option<Instant>,
    /// Since when it has been asked whether it is there without an answer.
    silent_since: Option<Instant>,
    stopped: bool,
}

/// The queue pairs of a rail that is up.
struct Connected {
    epoch: u64,
    connection: Arc<Connection>,
    /// Work requests outstanding on each queue pair.
    outstanding: [u32; MAX_QUEUE_PAIRS],
}

impl Peer {
    pub(super) fn new(
        own: Weak<Self>,
        shared: Arc<Shared>,
        name: Arc<str>,
        has_incarnation: bool,
        locations: Box<[String]>,
        rails: Vec<Way>,
        flow: Flow<Classic>,
    ) -> Self {
        let state = State {
            flow,
            runs: Runs::default(),
            pairs: Pairs::new(millstream_transfer_core::Config::default().max_locations),
            connections: rails.iter().map(|_| None).collect(),
            aborting: Vec::new(),
            refused: Vec::new(),
            last: None,
            dead: None,
            segments: Vec::new(),
            asking: false,
            ask_at: None,
            silent_since: None,
            stopped: false,
        };
        Self {
            own,
            shared,
            name,
            has_incarnation,
            rails: rails.into(),
            locations,
            state: Mutex::new(state),
            due: Due::default(),
        }
    }

    /// Tells this segment when its descriptor proves wrong.
    pub(super) fn serves(&self, segment: &Arc<OpenSegment>) {
        let mut state = self.lock();
        if !state.segments.iter().any(|known| known.as_ptr() == Arc::as_ptr(segment)) {
            state.segments.retain(|known| known.strong_count() > 0);
            state.segments.push(Arc::downgrade(segment));
        }
    }

    /// Begins to do these runs.
    pub(super) fn submit(
        &self,
        batch: &Arc<BatchShared>,
        runs: &[Run],
        deadline: Option<std::time::Instant>,
    ) {
        let deadline = deadline.map(|at| self.shared.clock.at(at));
        let mut state = self.lock();
        let now = self.now();
        // Told after the lock.
        let mut failed = Vec::new();
        for run in runs {
            if let Err(reason) = state.admit(now, run, &self.rails) {
                let error = self.error(None, reason);
                let rest = |task: TaskHandle| task.claim_whole().map(|slices| (task, slices));
                failed.extend(run.handles(batch).filter_map(rest).map(|it| (it, error.clone())));
                continue;
            }
            let incarnation = state.flow.incarnation();
            let buffer = &run.view.descriptor.buffers[run.buffer];
            let peer_location = nics::number(&self.locations, &buffer.name);
            let id = state.runs.insert(batch, run);
            for index in run.tasks.clone() {
                let handle = TaskHandle { batch: Arc::clone(batch), index };
                let (task, user) = (&batch.tasks[index], Runs::user(id, index));
                // It may have been canceled meanwhile.
                let Some(slices) = handle.claim_whole() else {
                    state.runs.ended(user);
                    continue;
                };
                let local_location = run.local.location(task.whole().source);
                let (local_location, peer_location) =
                    state.pairs.queue_of((local_location, peer_location));
                let submitted = state.flow.submit(&Request {
                    opcode: core_opcode(task.opcode()),
                    ranges: ranges(task),
                    deadline,
                    incarnation,
                    local_location,
                    peer_location,
                    local_borders: run.local.borders(run.transport),
                    peer_borders: peer_borders(buffer),
                    user,
                });
                match submitted {
                    // Who cancels it from now on finds it.
                    Ok(id) if task.belongs_to(self.own.clone(), id) => {}
                    Ok(id) => _ = state.flow.cancel(now, id),
                    Err(error) => {
                        let error = self.error(None, FailureReason::Limit(error.to_string()));
                        failed.push(((handle, slices), error));
                        state.runs.ended(user);
                    }
                }
            }
        }
        self.act(now, state);
        for ((task, slices), error) in failed {
            task.slices_failed(slices, &error);
        }
    }

    /// Takes the completions of a connection's work requests, in order.
    pub(super) fn completed(&self, link: &Link, completions: &[Completion]) {
        let rail = link.rail;
        let mut state = self.lock();
        let now = self.now();
        let mut stale = false;
        for completion in completions {
            let slice = SliceId::from_bits(completion.id);
            let result = match completion.status {
                CompletionStatus::Success => SliceResult::Done,
                CompletionStatus::Flushed => SliceResult::Flushed,
                status if is_permanent(status) => {
                    stale |= status == CompletionStatus::RemoteAccess;
                    if let Some(user) = state.flow.user(slice) {
                        state.refuse(user, rail, status);
                    }
                    SliceResult::Refused
                }
                status => {
                    state.last = Some((rail, FailureReason::Completion(status)));
                    SliceResult::Broken
                }
            };
            state.completed(now, link, slice, result);
        }
        if stale {
            state.mark_stale();
        }
        self.act(now, state);
    }

    /// The flow's time has come, or the peer is to be asked whether it is there.
    pub(super) fn handle_timeout(&self) {
        let mut state = self.lock();
        let now = self.now();
        state.flow.handle_timeout(now);
        if state.ask_at.is_some_and(|at| at <= now) {
            let age = state.oldest_age(now);
            // If it has died since it completed something last, this is when it is to be asked.
            let wait = STALL.checked_sub(age).filter(|wait| !wait.is_zero()).unwrap_or(STALL);
            if age >= STALL && self.has_incarnation {
                state.silent_since.get_or_insert(now);
                if !mem::replace(&mut state.asking, true) {
                    self.in_background(Self::ask);
                }
            }
            let silent = state.silent_since.is_some_and(|since| since + SILENT <= now);
            let Shared { config, context, .. } = &*self.shared;
            if silent && config.patience.max(context.calls.timeout()) <= SILENT {
                state.silent_since = None;
                state.flow.give_up();
            }
            let silent_at = state.silent_since.map(|since| since + SILENT);
            let silent_at = silent_at.filter(|&at| at > now);
            let next = silent_at.into_iter().chain([now + wait]).min();
            state.ask_at = next.filter(|_| state.flow.tasks() > 0);
        }
        self.act(now, state);
    }

    /// Whether a rail is being connected with this number still.
    pub(super) fn wants(&self, rail: RailId, epoch: u64) -> bool {
        let state = self.lock();
        let rail = &state.flow.rails()[usize::from(rail.0)];
        !state.stopped && rail.epoch() == epoch && rail.state() == RailState::Connecting
    }

    /// A rail is connected. What is not needed any more is given back.
    pub(super) fn connected(
        &self,
        rail: RailId,
        epoch: u64,
        connection: Connection,
        place: Place,
    ) -> Option<Connection> {
        let mut state = self.lock();
        let now = self.now();
        let found = &state.flow.rails()[usize::from(rail.0)];
        if state.stopped || found.epoch() != epoch || found.state() != RailState::Connecting {
            return Some(connection);
        }
        let (nic, queue_pairs) = (&self.way(rail).nic, connection.queue_pairs.len());
        tracing::info!(peer = &*self.name, nic = nic.nic, queue_pairs, epoch, "connected");
        let connection = Arc::new(connection);
        let link = Link { peer: self.own.clone(), rail, epoch, queue_pair: 0 };
        self.device(rail).links.add(&connection, &link, place);
        let outstanding = [0; MAX_QUEUE_PAIRS];
        state.connections[usize::from(rail.0)] = Some(Connected { epoch, connection, outstanding });
        state.flow.rail_up(now, rail, epoch);
        state.last = None;
        self.act(now, state);
        None
    }

    /// A rail could not be connected.
    pub(super) fn not_connected(&self, rail: RailId, epoch: u64, reason: FailureReason) {
        let mut state = self.lock();
        let now = self.now();
        tracing::info!(error = %self.error(Some(rail), reason.clone()), epoch, "not connected");
        let hopeless = !reason.may_pass();
        state.last = Some((rail, reason));
        state.flow.rail_down(now, rail, epoch);
        let state = self.act_and_keep(now, state);
        let Some(mut state) = state.filter(|_| hopeless) else { return };
        // No patience helps, unless another rail is there or will be.
        let may_come = |rail: &Rail| {
            matches!(rail.state(), RailState::Up | RailState::Connecting | RailState::Fencing)
        };
        if !state.flow.rails().iter().any(may_come) {
            state.flow.give_up();
        }
        self.act(now, state);
    }

    /// The port of one of the devices here has ceased to work, or works again.
    pub(super) fn port_changed(&self, device: usize, works: bool) {
        let mut state = self.lock();
        let now = self.now();
        if works {
            state.flow.nic_works(now, device as u16);
        } else {
            let ways = self.rails.iter().enumerate().filter(|(_, way)| way.local == device);
            for (index, _) in ways {
                let rail = RailId(index as u16);
                let (epoch, up) = {
                    let rail = &state.flow.rails()[index];
                    (rail.epoch(), rail.is_up())
                };
                if up {
                    state.last = Some((rail, self.shared.devices[device].port_down()));
                    state.flow.rail_down(now, rail, epoch);
                }
            }
        }
        self.act(now, state);
    }

    /// The peer takes only connections with higher numbers than `floor`.
    pub(super) fn refused(&self, rail: RailId, epoch: u64, floor: u64, reason: FailureReason) {
        let mut state = self.lock();
        let now = self.now();
        state.last = Some((rail, reason));
        state.flow.rail_refused(now, rail, epoch, floor);
        self.act(now, state);
    }

    /// The peer has closed a connection to make room for others. What comes next connects again.
    pub(super) fn evicted(&self, rail: RailId, epoch: u64) {
        let mut state = self.lock();
        let now = self.now();
        let found = state.flow.rails().get(usize::from(rail.0));
        if found.is_some_and(|found| found.epoch() == epoch && found.is_up()) {
            tracing::info!(peer = &*self.name, epoch, "the peer has closed a connection");
            state.flow.close_rail(now, rail, epoch);
        } else if found.is_some() {
            // It may have been told before the answer to its request.
            state.flow.rail_down(now, rail, epoch);
        }
        self.act(now, state);
    }

    /// Nothing touches memory for a connection here any more.
    fn aborted(&self, rail: RailId, epoch: u64) {
        let mut state = self.lock();
        let now = self.now();
        state.aborting.retain(|(aborting, old, _)| (*aborting, *old) != (rail, epoch));
        state.flow.rail_aborted(now, rail, epoch);
        self.act(now, state);
    }

    /// The peer has confirmed a fence, or does not fence.
    pub(super) fn fenced(&self, rail: RailId, epoch: u64, confirmed: bool) {
        let mut state = self.lock();
        let now = self.now();
        match confirmed {
            true => state.flow.fence_confirmed(now, rail, epoch),
            false => state.flow.fence_refused(now, rail, epoch),
        }
        self.act(now, state);
    }

    /// Another start of the peer's process has answered.
    pub(super) fn restarted(&self, incarnation: u64) {
        let mut state = self.lock();
        let now = self.now();
        // An answer of the one before may be late.
        if state.flow.incarnation() != incarnation && state.dead != Some(incarnation) {
            tracing::info!(peer = &*self.name, "the peer was restarted");
            state.bury();
            state.last = None;
            state.mark_stale();
            state.flow.peer_restarted(now, incarnation);
        }
        self.act(now, state);
    }

    /// Nobody listens where the peer was when it had this incarnation, or it has said that it closes.
    pub(super) fn gone(&self, asked: Option<u64>, reason: FailureReason) {
        let mut state = self.lock();
        let now = self.now();
        // Another one may have come since.
        if asked.unwrap_or(0) == state.flow.incarnation() {
            tracing::info!(peer = &*self.name, %reason, "the peer is gone");
            state.mark_stale();
            state.last = Some((RailId(0), reason));
            state.flow.peer_gone(now);
        }
        self.act(now, state);
    }

    /// Which start of the peer's process it is, if that is known.
    pub(super) fn incarnation(&self) -> Option<u64> {
        let incarnation = self.lock().flow.incarnation();
        (self.has_incarnation && incarnation != 0).then_some(incarnation)
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.lock().flow.is_idle()
    }

    /// Whether it is this start of the peer's process.
    pub(super) fn is(&self, incarnation: u64) -> bool {
        self.has_incarnation && self.lock().flow.incarnation() == incarnation
    }

    /// It has answered something.
    pub(super) fn answered(&self) {
        self.lock().silent_since = None;
    }

    /// It was asked whether it is there.
    pub(super) fn asked(&self) {
        self.lock().asking = false;
    }

    /// Closes the connection of a rail if nothing is under way on it; whether it did.
    pub(super) fn close_if_idle(&self, rail: RailId, epoch: u64) -> bool {
        let mut state = self.lock();
        let now = self.now();
        let found = &state.flow.rails()[usize::from(rail.0)];
        let idle = found.epoch() == epoch && found.is_up() && found.slices_in_flight() == 0;
        if idle {
            state.flow.close_rail(now, rail, epoch);
        }
        self.act(now, state);
        idle
    }

    /// Ends everything: what is left fails. Returns whether there was a connection.
    pub(super) fn stop(&self) -> bool {
        let mut state = self.lock();
        let now = self.now();
        state.stopped = true;
        // Nothing is posted any more, and what is in flight is held.
        state.flow.shut_down(now);
        let up = state.connections.iter().flatten().map(|connected| &connected.connection);
        let aborting = state.aborting.iter().map(|(_, _, connection)| connection);
        let connections: Vec<_> = up.chain(aborting).cloned().collect();
        drop(state);
        // Before the tasks are told: from here on nothing touches their memory. One that is being reset
        // may be reset twice.
        connections.iter().for_each(|connection| connection.halt());
        let mut state = self.lock();
        for index in 0..self.rails.len() as u16 {
            let epoch = state.flow.rails()[usize::from(index)].epoch();
            state.flow.rail_aborted(now, RailId(index), epoch);
        }
        self.act(now, state);
        !connections.is_empty()
    }

    pub(super) fn way(&self, rail: RailId) -> &Way {
        &self.rails[usize::from(rail.0)]
    }

    pub(super) fn device(&self, rail: RailId) -> &Arc<LocalDevice> {
        &self.shared.devices[self.way(rail).local]
    }

    /// Has a thread of the pool do this.
    pub(super) fn in_background(&self, job: impl FnOnce(&Self) + Send + 'static) {
        let own = self.own.clone();
        let job = move || {
            if let Some(own) = own.upgrade() {
                job(&own);
            }
        };
        // Refused only when all ends.
        let _ = self.shared.workers.run(Box::new(job));
    }

    fn now(&self) -> Instant {
        self.shared.clock.now()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn error(&self, rail: Option<RailId>, reason: FailureReason) -> TransferError {
        let nic = rail.map_or("none", |rail| self.way(rail).nic.nic.as_str());
        TransferError { peer: Arc::clone(&self.name), nic: nic.into(), reason }
    }

    /// Does what the flow wants, and releases the lock.
    fn act(&self, now: Instant, state: MutexGuard<'_, State>) {
        drop(self.act_and_keep(now, state));
    }

    fn act_and_keep<'a>(
        &'a self,
        now: Instant,
        mut state: MutexGuard<'a, State>,
    ) -> Option<MutexGuard<'a, State>> {
        loop {
            let mut work = self.shared.works.take();
            self.collect(now, &mut state, &mut work);
            if state.flow.tasks() == 0 {
                state.silent_since = None;
            } else if state.ask_at.is_none() {
                state.ask_at = Some(now + STALL);
            }
            let due = state.flow.poll_timeout().into_iter().chain(state.ask_at).min();
            self.shared.timer.set(&self.due, due);
            if work.is_empty() {
                self.shared.works.give_back(work);
                return Some(state);
            }
            drop(state);
            // First the devices, so that they have work while the tasks are told.
            work.post(&self.shared.devices);
            work.tell();
            state = self.lock();
            for (posting, error) in work.not_posted() {
                state.not_posted(now, posting, error);
            }
            let failed = work.has_failed();
            work.clear();
            self.shared.works.give_back(work);
            if !failed {
                return Some(state);
            }
        }
    }

    /// Takes what is to be done out of the flow.
    fn collect(&self, now: Instant, state: &mut State, work: &mut Work) {
        while let Some(output) = state.flow.poll_output(now) {
            match output {
                Output::Post(post) => self.prepare(now, state, &post, work),
                Output::Connect { rail, epoch } => {
                    self.in_background(move |peer| peer.connect(rail, epoch));
                }
                Output::Abort { rail, epoch } => {
                    let place = &mut state.connections[usize::from(rail.0)];
                    let connected = place.take_if(|connected| connected.epoch == epoch);
                    let connection = connected.map(|connected| connected.connection);
                    if let Some(connection) = &connection {
                        self.device(rail).links.remove(connection);
                        state.aborting.push((rail, epoch, Arc::clone(connection)));
                    }
                    // It may be the thread that makes the device's progress, which cannot wait for
                    // itself.
                    self.in_background(move |peer| {
                        if let Some(connection) = connection {
                            connection.halt();
                        }
                        peer.aborted(rail, epoch);
                    });
                }
                Output::Fence { rail, epoch } if self.has_incarnation => {
                    self.in_background(move |peer| peer.fence(rail, epoch));
                }
                Output::Fence { rail, epoch } => state.flow.fence_refused(now, rail, epoch),
                Output::Ended(ended) => self.end(state, &ended, work),
            }
        }
    }

    /// Puts a slice among what is posted.
    fn prepare(&self, now: Instant, state: &mut State, post: &Post, work: &mut Work) {
        let way = self.way(post.rail);
        let keys = state.runs.keys(post.user, &post.first, way);
        let connected = state.connections[usize::from(post.rail.0)].as_mut();
        let (Some(keys), Some(connected)) = (keys, connected) else {
            // A peer's descriptor that lacks keys, and a rail that ended in `stop`.
            state.refuse(post.user, post.rail, CompletionStatus::RemoteAccess);
            state.flow.completed(now, post.slice, SliceResult::Refused);
            return;
        };
        let count = connected.connection.queue_pairs.len();
        let queue_pair =
            (0..count).min_by_key(|&index| connected.outstanding[index]).unwrap_or_default();
        connected.outstanding[queue_pair] += 1;
        if let Some((batch, index)) = state.runs.place(post.user) {
            batch.tasks[index].begin();
        }
        work.add(Posting {
            device: way.local,
            connection: &connected.connection,
            queue_pair,
            post,
            keys,
        });
    }

    fn end(&self, state: &mut State, ended: &Ended, work: &mut Work) {
        use millstream_transfer_core::{End, Failure};
        let found = state.refused.iter().position(|(user, ..)| *user == ended.user);
        let refused = found.map(|index| state.refused.swap_remove(index));
        let (end, failure) = match ended.end {
            End::Completed => (TransferState::Completed, None),
            End::Canceled => (TransferState::Canceled, None),
            End::Timeout => (TransferState::Timeout, None),
            End::Failed(failure) => (TransferState::Failed, Some(failure)),
        };
        let error = failure.map(|failure| {
            if state.stopped {
                return self.error(None, FailureReason::ShutDown);
            }
            if let (Failure::Refused, Some((_, rail, status))) = (failure, refused) {
                return self.error(Some(rail), FailureReason::Completion(status));
            }
            let what = match failure {
                Failure::Attempts => "each way to it has fallen silent too often",
                _ => "no answer",
            };
            let unknown = || (RailId(0), FailureReason::NoPath(what.to_owned()));
            let (rail, last) = state.last.clone().unwrap_or_else(unknown);
            let reason = match failure {
                Failure::PeerRestarted => FailureReason::Restarted,
                Failure::NotFenced => FailureReason::NotFenced(Box::new(last)),
                _ => last,
            };
            self.error(Some(rail), reason)
        });
        if let Some(TaskHandle { batch, index }) = state.runs.task(ended.user) {
            let end = TaskEnd {
                state: end,
                transferred: ended.transferred,
                target_undefined: ended.target_undefined,
                error,
            };
            work.ended.push((batch, index, end));
        }
        state.runs.ended(ended.user);
    }
}

impl State {
    /// Whether a run is for the peer's process that there is.
    fn admit(&mut self, now: Instant, run: &Run, rails: &[Way]) -> Result<(), FailureReason> {
        if self.stopped {
            return Err(FailureReason::ShutDown);
        }
        // A descriptor may say anything.
        let keys = run.view.descriptor.buffers[run.buffer].rkey.len();
        if rails.iter().any(|way| way.remote >= keys) {
            let what = format!("its descriptor has {keys} keys for a buffer, and more devices");
            return Err(FailureReason::NoPath(what));
        }
        let Some(incarnation) = run.view.descriptor.incarnation else { return Ok(()) };
        if self.dead == Some(incarnation) {
            run.segment.mark_stale();
            return Err(FailureReason::Restarted);
        }
        let before = self.flow.incarnation();
        if before != incarnation {
            // Its descriptor is newer than what we know.
            self.bury();
            self.flow.peer_restarted(now, incarnation);
        }
        Ok(())
    }

    /// The incarnation that there was is over for good.
    fn bury(&mut self) {
        self.dead = Some(self.flow.incarnation()).filter(|&before| before != 0).or(self.dead);
    }

    /// A task has failed for good. The first reason is the one to tell.
    fn refuse(&mut self, user: u64, rail: RailId, status: CompletionStatus) {
        if !self.refused.iter().any(|(known, ..)| *known == user) {
            self.refused.push((user, rail, status));
        }
    }

    fn completed(&mut self, now: Instant, link: &Link, slice: SliceId, result: SliceResult) {
        if let Some(connected) = &mut self.connections[usize::from(link.rail.0)]
            && connected.epoch == link.epoch
            // A number of a queue pair may have been used before.
            && self.flow.user(slice).is_some()
        {
            let outstanding = &mut connected.outstanding[link.queue_pair];
            *outstanding = outstanding.saturating_sub(1);
        }
        if result == SliceResult::Done {
            self.silent_since = None;
        }
        if let Some(moved) = self.flow.completed(now, slice, result)
            && let Some((batch, index)) = self.runs.place(moved.user)
        {
            batch.tasks[index].moved(moved.length);
        }
    }

    /// The queue pair did not take a request: it has failed meanwhile, or its device has.
    fn not_posted(&mut self, now: Instant, posting: (RailId, SliceId), error: PostError) {
        let (rail, slice) = posting;
        self.last = Some((rail, FailureReason::Post(error)));
        self.flow.completed(now, slice, SliceResult::Broken);
    }

    /// For how long at most something has been under way.
    fn oldest_age(&self, now: Instant) -> Duration {
        let ages = self.flow.rails().iter().filter_map(|rail| rail.oldest_age(now));
        ages.max().unwrap_or_default()
    }

    fn mark_stale(&self) {
        self.segments.iter().filter_map(Weak::upgrade).for_each(|segment| segment.mark_stale());
    }
}

impl EndTask for Peer {
    fn cancel(&self, task: TaskId) -> bool {
        let mut state = self.lock();
        let now = self.now();
        let canceled = state.flow.cancel(now, task);
        self.act(now, state);
        canceled
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (connected, way) in state.connections.iter().zip(&self.rails) {
            if let Some(connected) = connected {
                self.shared.devices[way.local].links.remove(&connected.connection);
            }
        }
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Peer").field(&self.name).finish()
    }
}

/// Where a region of the peer ends and the next one begins.
fn peer_borders(buffer: &BufferDesc) -> Borders {
    buffer.part_of.map_or(Borders::NONE, |whole| Borders {
        first: whole.addr,
        distance: whole.region_length.get(),
    })
}

fn ranges(task: &Task) -> Ranges<'_> {
    let WideSlice { source: local, target: remote, length } = task.whole();
    let contiguous = Ranges::Contiguous(Piece { local, remote, length });
    task.shape().map_or(contiguous, Shape::ranges)
}

fn core_opcode(opcode: Opcode) -> millstream_transfer_core::Opcode {
    match opcode {
        Opcode::Read => millstream_transfer_core::Opcode::Read,
        Opcode::Write => millstream_transfer_core::Opcode::Write,
    }
}

/// Whether doing a slice again would end the same way.
fn is_permanent(status: CompletionStatus) -> bool {
    matches!(
        status,
        CompletionStatus::LocalLength
            | CompletionStatus::LocalProtection
            | CompletionStatus::RemoteInvalidRequest
            | CompletionStatus::RemoteAccess
    )
}
