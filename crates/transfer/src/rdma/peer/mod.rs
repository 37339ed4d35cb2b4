//! A peer: its flow, which decides, and the connections of its rails, which do it.
//!
//! Here tasks begin, and what has completed is told. `rails.rs` has the connections, `process.rs` whether the
//! peer is there, `actions.rs` what the flow wants done, and `observed.rs` what is to be seen of it.
//!
//! Each call gives the flow an input under the lock, takes what is to be done, and does it after the
//! lock: posting, and telling tasks that they have ended. What may take longer, as connecting and
//! resetting queue pairs, a thread of the pool does.

mod actions;
mod buried;
mod observed;
mod process;
mod rails;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use millstream_metadata::{BufferDesc, NicPath};
use millstream_transfer_core::{
    AnyPolicy, Borders, Flow, Instant, Piece, Rail, RailId, RailState, Ranges, Request, SliceId,
    SliceResult, TaskId,
};
use millstream_verbs::{Completion, CompletionStatus, PortAddress};

use self::buried::Buried;
use super::LEAST_REGION;
use super::connection::{Connection, Outstanding};
use super::control_addresses::ControlAddresses;
use super::device::LocalDevice;
use super::links::Link;
use super::locations::Pairs;
use super::nics;
use super::runs::Runs;
use super::shared::Shared;
use super::timer::Due;
use super::work::{NotPosted, is_test};
use crate::batch::BatchShared;
use crate::pieces::Shape;
use crate::segment::OpenSegment;
use crate::task::{TaskHandle, TaskRef, WideSlice};
use crate::terms::Terms;
use crate::transport::{EndTask, Run};
use crate::{FailureReason, Opcode, TransferError};

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
    /// Where it is called.
    pub(super) control: ControlAddresses,
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
    /// Where it is, by the peer's descriptor.
    pub(super) at: PortAddress,
}

struct State {
    flow: Flow<AnyPolicy>,
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
    /// The same of each rail, until it is connected again.
    reasons: Box<[Option<FailureReason>]>,
    /// When the incarnation that there is was heard of first.
    since: std::time::Instant,
    /// Those before.
    buried: Buried,
    segments: Vec<Weak<OpenSegment>>,
    /// Whether it is being asked whether it is there.
    asking: bool,
    ask_at: Option<Instant>,
    /// Since when it has been asked whether it is there without an answer.
    silent_since: Option<Instant>,
    /// It was given up since it did not answer, and has not been heard of since.
    given_up: bool,
    stopped: bool,
}

/// The queue pairs of a rail that is up.
struct Connected {
    epoch: u64,
    connection: Arc<Connection>,
    outstanding: Outstanding,
}

impl Peer {
    pub(super) fn new(
        own: Weak<Self>,
        shared: Arc<Shared>,
        name: Arc<str>,
        has_incarnation: bool,
        locations: Box<[String]>,
        rails: Vec<Way>,
        (flow, since): (Flow<AnyPolicy>, std::time::Instant),
    ) -> Self {
        let state = State {
            flow,
            runs: Runs::default(),
            pairs: Pairs::new(millstream_transfer_core::Config::default().max_locations),
            connections: rails.iter().map(|_| None).collect(),
            aborting: Vec::new(),
            refused: Vec::new(),
            last: None,
            reasons: rails.iter().map(|_| None).collect(),
            since,
            buried: Buried::default(),
            segments: Vec::new(),
            asking: false,
            ask_at: None,
            silent_since: None,
            given_up: false,
            stopped: false,
        };
        Self {
            own,
            shared,
            name,
            has_incarnation,
            control: ControlAddresses::default(),
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
    pub(super) fn submit(&self, batch: &Arc<BatchShared>, runs: &[Run], terms: &Terms) {
        let deadline = terms.deadline.map(|at| self.shared.clock.at(at));
        let mut state = self.lock();
        let now = self.now();
        state.try_all_again(now);
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
            let id = state.runs.insert(batch, run, terms);
            let owner: Weak<dyn EndTask> = self.own.clone();
            let owner = batch.tasks.owner(&owner);
            for index in run.tasks.clone() {
                let (task, user) = (batch.tasks.get(index), Runs::user(id, index));
                // It may have been canceled meanwhile.
                let Some(slices) = task.claim_whole() else {
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
                    priority: terms.priority,
                    incarnation,
                    local_location,
                    peer_location,
                    local_borders: run.local.borders(run.transport),
                    peer_borders: peer_borders(buffer),
                    user,
                });
                match submitted {
                    // Who cancels it from now on finds it.
                    Ok(id) if task.belongs_to(owner, id) => {}
                    Ok(id) => _ = state.flow.cancel(now, id),
                    Err(error) => {
                        let error = self.error(None, FailureReason::Limit(error.to_string()));
                        let handle = TaskHandle { batch: Arc::clone(batch), index };
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
            if is_test(completion.id) {
                state.returned(link, 1);
                match completion.status {
                    CompletionStatus::Success => {
                        state.heard();
                        state.flow.rail_tested(now, rail, link.epoch);
                    }
                    status => {
                        state.failed(rail, FailureReason::Completion(status));
                        state.flow.rail_down(now, rail, link.epoch);
                    }
                }
                continue;
            }
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
                    state.failed(rail, FailureReason::Completion(status));
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

    /// The most that its rails carry together until then, in bytes per second, where that is known well.
    pub(super) fn peak_rate(&self, until: std::time::Instant) -> Option<u64> {
        self.lock().flow.peak_rate(self.now(), self.shared.clock.at(until))
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.lock().flow.is_idle()
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

    pub(super) fn now(&self) -> Instant {
        self.shared.clock.now()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn error(&self, rail: Option<RailId>, reason: FailureReason) -> TransferError {
        let nic = rail.map_or("none", |rail| self.way(rail).nic.nic.as_str());
        let local_nic = rail.map(|rail| self.device(rail).device.name().into());
        TransferError { local_nic, ..TransferError::new(Arc::clone(&self.name), nic, reason) }
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
        let before = self.flow.incarnation();
        // Of two starts of a process the one that was heard of later is the later one.
        let is_before = before != 0 && before != incarnation && run.view.since < self.since;
        if is_before || self.buried.has(incarnation) {
            run.segment.mark_stale();
            return Err(FailureReason::Restarted);
        }
        if before != incarnation {
            // What other segments of the process have is of before.
            self.bury();
            self.mark_stale();
            self.since = run.view.since;
            self.flow.peer_restarted(now, incarnation);
        }
        Ok(())
    }

    /// If all rails pause, since the peer was away for long, and nothing is under way, then what comes next
    /// does not wait for the end of their pauses.
    fn try_all_again(&mut self, now: Instant) {
        let paused = |rail: &Rail| matches!(rail.state(), RailState::Paused(_));
        if self.flow.rails().iter().all(paused) && self.flow.is_idle() {
            let incarnation = self.flow.incarnation();
            // To the flow it is a peer that comes back.
            self.flow.peer_gone(now);
            self.flow.peer_restarted(now, incarnation);
        }
    }

    /// The incarnation that there was is over for good.
    fn bury(&mut self) {
        self.buried.bury(self.flow.incarnation());
    }

    /// A task has failed for good. The first reason is the one to tell.
    fn refuse(&mut self, user: u64, rail: RailId, status: CompletionStatus) {
        if !self.refused.iter().any(|(known, ..)| *known == user) {
            self.refused.push((user, rail, status));
        }
    }

    /// A rail has failed.
    fn failed(&mut self, rail: RailId, reason: FailureReason) {
        if let Some(place) = self.reasons.get_mut(usize::from(rail.0)) {
            *place = Some(reason.clone());
        }
        self.last = Some((rail, reason));
    }

    /// A connection is given up. If that is a failure of which nobody has said why, it was silent.
    fn blame(&mut self, rail: RailId) {
        let (index, reason) = (usize::from(rail.0), "nothing completed on it for too long");
        if self.flow.rails()[index].has_failed() && self.reasons[index].is_none() {
            self.reasons[index] = Some(FailureReason::Connection(reason.into()));
        }
    }

    /// A queue pair has places for so many more work requests, if it is of the connection that there is.
    fn returned(&mut self, link: &Link, requests: u32) {
        if let Some(connected) = &mut self.connections[usize::from(link.rail.0)]
            && connected.epoch == link.epoch
        {
            connected.outstanding.remove(link.queue_pair, requests);
        }
    }

    fn completed(&mut self, now: Instant, link: &Link, slice: SliceId, result: SliceResult) {
        // A number of a queue pair may have been used before.
        if let Some(requests) = self.flow.requests(slice) {
            self.returned(link, requests);
        }
        if result == SliceResult::Done {
            self.heard();
        }
        if let Some(moved) = self.flow.completed(now, slice, result)
            && let Some((batch, index)) = self.runs.place(moved.user)
            && batch.tasks.get(index).moved(moved.length.into())
        {
            batch.acknowledged(index);
        }
    }

    /// The queue pair did not take a request: it has failed meanwhile, or its device has.
    fn not_posted(&mut self, now: Instant, posting: NotPosted) {
        let NotPosted { rail, epoch, slice, error } = posting;
        self.failed(rail, FailureReason::Post(error));
        if is_test(slice.to_bits()) {
            // Another connection may be there meanwhile.
            return self.flow.rail_down(now, rail, epoch);
        }
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

/// Where a region of the peer ends and the next one begins. Whatever its descriptor says, slices are not
/// cut smaller than the regions that there are.
fn peer_borders(buffer: &BufferDesc) -> Borders {
    buffer.part_of.map_or(Borders::NONE, |whole| Borders {
        first: whole.addr,
        distance: whole.region_length.get().max(LEAST_REGION as u64),
    })
}

fn ranges(task: TaskRef<'_>) -> Ranges<'_> {
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

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use millstream_metadata::WholeDesc;

    use super::*;

    #[test]
    fn no_descriptor_has_slices_cut_small() {
        for (told, expected) in [(1, 4096), (4095, 4096), (4096, 4096), (1 << 30, 1 << 30)] {
            let region_length = NonZeroU64::new(told).unwrap();
            let part_of = Some(WholeDesc { addr: 0x1000, region_length });
            let buffer = BufferDesc { part_of, ..BufferDesc::default() };
            let Borders { first, distance } = peer_borders(&buffer);
            assert_eq!((first, distance), (0x1000, expected));
        }
    }
}
