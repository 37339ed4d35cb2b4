//! The side that asks for I/O: a link to a target, with a thread that sends and one that receives.
//!
//! The connection is made when there is something to do; deadlines are kept meanwhile. When it breaks, all that was under
//! way is asked for again over another one, once the target has confirmed that nothing of the first comes any more (a
//! *fence*). A target that is there says so while it is asked for something, however slow its disk is; so silence means that
//! it is gone, and all fails.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use std::{io, mem};

use millstream_metadata::HostPort;
use millstream_net::ends_between_forks;
use millstream_net::stream::Readiness;

use super::connecting::{Connecting, Place};
use super::flow::{Entry, MAX_ATTEMPTS, Part, stuck};
use super::protocol::{Asked, Hello, Outcome, Request};
use super::queue::{Queue, no_thread};
use super::receiving::{ReceiveError, Receiving};
use super::sending::{Staged, send_all, send_write};
use super::wire::Wire;
use crate::metrics::{RailMetrics, RailStatus};
use crate::task::EndedTasks;
use crate::{FailureReason, Opcode};

/// Requests that are begun at a time.
const BURST: usize = 16;

/// How often a target may close connections one after the other without an answer, though properly.
const MAX_CLOSINGS: u32 = 8;

/// How long the target may take to confirm that nothing of a connection that was lost comes any more.
const FENCE_PATIENCE: Duration = Duration::from_secs(2);

/// The number of a fence. No part has it.
const FENCE: u64 = 0xff;

/// How long a target is waited for that has accepted a connection ([`Place`] has how long for that).
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) silence: Duration,
    /// For a device.
    pub(super) io: Duration,
}

/// A link to a target. Dropping it fails what is under way.
pub(super) struct Link {
    shared: Arc<Shared>,
}

pub(super) struct Shared {
    place: Place,
    patience: Patience,
    queue: Queue<Own>,
}

#[derive(Default)]
struct Own {
    /// Since when something is under way.
    busy_since: Option<Instant>,
    wire: Option<Arc<Wire>>,
    /// Whether the target has said that it closes the connection.
    closing: bool,
    /// Whether the connection broke, or the target closed it and did not say so.
    broke: bool,
    /// Why the connection has ended.
    lost: Option<String>,
    /// Whether a reply has come over it.
    answered: bool,
    /// What the target calls it, once that has said so.
    name: Option<u128>,
    /// The connection before that was lost, if something of it may come yet. There is one at most: nothing is begun over the
    /// next one before it is fenced.
    unfenced: Option<u128>,
    fence: Fence,
    /// Why what was under way failed last.
    failure: Option<String>,
}

/// Whether the target was asked, over the connection that there is, to fence the one before.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Fence {
    #[default]
    NotAsked,
    Asked,
    /// It may still say so.
    GivenUp,
}

impl Link {
    pub(super) fn new(place: Place, patience: Patience) -> Self {
        Self { shared: Arc::new(Shared { place, patience, queue: Queue::default() }) }
    }

    /// Begins to do these tasks.
    pub(super) fn submit(&self, entry: Entry) {
        let shared = Arc::clone(&self.shared);
        self.shared.queue.submit(entry, "file requests", move || shared.work());
    }

    /// What is to be seen of it.
    pub(super) fn observe(&self) -> RailMetrics {
        let Shared { place: Place { host, port, .. }, queue, .. } = &*self.shared;
        let mut state = queue.lock();
        let (counters, (requests, bytes)) = state.flow.counters();
        let counters = *counters;
        let address = HostPort { host: host.clone(), port: *port }.to_string();
        let connected = state.own.wire.is_some();
        let observed = RailMetrics {
            transport: super::NAME.to_owned(),
            peer: host.clone(),
            peer_nic: address,
            state: if connected { RailStatus::Up } else { RailStatus::Down },
            reason: state.own.failure.clone().filter(|_| !connected),
            ..RailMetrics::default()
        };
        observed.counted(&counters, requests, bytes)
    }

    /// Whether it has nothing to do.
    pub(super) fn is_at_rest(&self) -> bool {
        self.shared.queue.is_at_rest()
    }

    /// Ends it. What is under way fails.
    pub(super) fn stop(&self) {
        self.shared.queue.stop(|own| {
            if let Some(wire) = &own.wire {
                wire.shut_down();
            }
        });
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn fail(&self, text: &str) {
        let reason = self.failed(text);
        self.fail_for(&reason);
    }

    /// What can begins again over the next connection, and all else fails.
    fn fail_lost(&self, text: &str, can_be_fenced: bool) {
        let reason = self.failed(text);
        let rest = self.queue.lock().flow.take_lost(can_be_fenced);
        rest.mark_stale();
        rest.fail(&reason);
    }

    /// Counts a failure, for this reason.
    fn failed(&self, text: &str) -> FailureReason {
        let text = format!("{text} (target {}:{})", self.place.host, self.place.port);
        let mut state = self.queue.lock();
        state.flow.counters().0.failures += 1;
        state.own.failure = Some(text.clone());
        drop(state);
        FailureReason::File(text.into())
    }

    fn fail_for(&self, reason: &FailureReason) {
        let rest = self.queue.lock().flow.take();
        rest.mark_stale();
        rest.fail(reason);
    }

    /// What the thread that sends does.
    fn work(self: Arc<Self>) {
        let mut unanswered = 0;
        loop {
            let mut state = self.queue.lock();
            while state.flow.has_nothing_to_begin() && !state.stopping {
                state = self.queue.wait(state, None);
            }
            let stopping = state.stopping;
            drop(state);
            if stopping {
                return self.fail_for(&FailureReason::ShutDown);
            }
            let wire = match self.connect() {
                Some(Ok(wire)) => Arc::new(wire),
                Some(Err(text)) => {
                    self.fail(&text);
                    continue;
                }
                None => continue,
            };
            let mut state = self.queue.lock();
            if state.stopping {
                continue;
            }
            state.own.wire = Some(Arc::clone(&wire));
            state.flow.counters().0.connections += 1;
            (state.own.lost, state.own.answered, state.own.busy_since) = (None, false, None);
            (state.own.broke, state.own.name, state.own.fence) = (false, None, Fence::NotAsked);
            drop(state);
            let ended = self.converse(&wire);
            let mut state = self.queue.lock();
            state.own.wire = None;
            let has_writes = state.flow.has_writes();
            let can_be_fenced = !has_writes || state.own.name.is_some();
            if has_writes && !state.own.closing {
                debug_assert_eq!(state.own.unfenced, None, "nothing is begun before the fence");
                state.own.unfenced = state.own.name;
            }
            let text = state.own.lost.take().unwrap_or(ended);
            // What has not begun is not harmed; but one that never answers is not asked for ever.
            unanswered = if state.own.answered { 0 } else { unanswered + 1 };
            if mem::take(&mut state.own.closing) && unanswered < MAX_CLOSINGS && !state.stopping {
                state.flow.begin_again();
                continue;
            }
            let harmless = state.flow.is_at_rest() && unanswered < 2;
            let stopping = state.stopping;
            // A READ that was begun counts how often this happens to it.
            let again = state.own.broke && unanswered <= MAX_ATTEMPTS;
            if state.flow.is_at_rest() {
                state.flow.forget_given_up();
            }
            if state.own.fence == Fence::Asked && !again {
                // All of it fails, or has: the target is not asked for ever.
                state.own.unfenced = None;
            }
            drop(state);
            match again {
                _ if harmless || stopping => {}
                true => self.fail_lost(&text, can_be_fenced),
                false => self.fail(&text),
            }
        }
    }

    /// Connects, and meanwhile ends what is not to be waited for any more. None when the link stops.
    fn connect(self: &Arc<Self>) -> Option<Result<Wire, String>> {
        let shared = Arc::clone(self);
        let wake = move || shared.queue.wake(shared.queue.lock());
        let connecting = Connecting::begin(self.place.clone(), wake);
        // Dropped before `connecting`, whose end waits for a thread that may want this lock.
        let mut state = self.queue.lock();
        loop {
            if state.stopping {
                return None;
            }
            // Who wakes has told before, and the lock is held until this waits.
            if let Some(made) = connecting.poll() {
                return Some(made);
            }
            let now = Instant::now();
            let overdue = state.flow.look_after_unconnected(now);
            if !overdue.is_empty() {
                drop(state);
                overdue.tell();
                state = self.queue.lock();
                continue;
            }
            let timeout = state.flow.next_look(now).min(connecting.left(now));
            state = self.queue.wait(state, Some(timeout));
        }
    }

    /// Does what there is to do over a connection, until its end; why that came, unless the receiving
    /// thread knows better.
    fn converse(self: &Arc<Self>, wire: &Arc<Wire>) -> String {
        let receiver = {
            let (shared, wire) = (Arc::clone(self), Arc::clone(wire));
            let thread = thread::Builder::new().name("file replies".to_owned());
            thread.spawn(ends_between_forks(move || shared.receive(&wire)))
        };
        let receiver = match receiver {
            Ok(receiver) => receiver,
            Err(error) => return no_thread(&error),
        };
        let ended = self.send(wire);
        wire.shut_down();
        let _ = receiver.join();
        match ended {
            Ok(()) => "the engine was shut down".to_owned(),
            Err(error) => format!("the process that has it has closed the connection: {error}"),
        }
    }

    /// Sends requests until the connection is lost or the link stops.
    fn send(&self, wire: &Wire) -> io::Result<()> {
        send_all(wire, &Hello { wants_name: true }.emit())?;
        if !self.fence(wire)? {
            return Ok(());
        }
        let mut parts: Vec<Part> = Vec::with_capacity(BURST);
        let mut headers: Vec<u8> = Vec::with_capacity(BURST * Request::LENGTH);
        let mut staged = Staged::default();
        loop {
            let mut state = self.queue.lock();
            loop {
                if state.stopping || state.own.lost.is_some() {
                    return Ok(());
                }
                while parts.len() < BURST
                    && let Some(part) = state.flow.begin(usize::MAX)
                {
                    parts.push(part);
                }
                if !parts.is_empty() {
                    break;
                }
                let late = state.flow.take_late();
                if late.is_empty() {
                    state = self.queue.wait(state, None);
                } else {
                    drop(state);
                    late.tell();
                    state = self.queue.lock();
                }
            }
            state.own.busy_since.get_or_insert_with(Instant::now);
            let late = state.flow.take_late();
            drop(state);
            late.tell();
            for part in parts.drain(..) {
                let Part { id, opcode, durable, key, offset, length, .. } = part;
                let header = Request { opcode, durable, id, key, offset, length }.emit();
                headers.extend_from_slice(&header);
                if opcode == Opcode::Write {
                    // The headers of READs before it go with it.
                    if !self.send_write(wire, &headers, &part, &mut staged)? {
                        headers.truncate(headers.len() - Request::LENGTH);
                        self.end(id, Outcome::Abandoned, &mut EndedTasks::default());
                        continue;
                    }
                    headers.clear();
                }
            }
            send_all(wire, &headers)?;
            headers.clear();
        }
    }

    /// Waits until the target has confirmed that nothing of a connection that was lost comes any more. If it does not, the
    /// WRITEs that were sent over that fail. False when the connection is lost meanwhile, or the link stops.
    fn fence(&self, wire: &Wire) -> io::Result<bool> {
        let mut state = self.queue.lock();
        let Some(unfenced) = state.own.unfenced else { return Ok(true) };
        state.own.fence = Fence::Asked;
        state.flow.counters().0.fences += 1;
        drop(state);
        send_all(wire, &Asked::fence(FENCE, unfenced))?;
        let until = Instant::now() + FENCE_PATIENCE;
        let mut state = self.queue.lock();
        while state.own.fence == Fence::Asked {
            let left = until.saturating_duration_since(Instant::now());
            if state.stopping || state.own.lost.is_some() {
                return Ok(false);
            }
            if left.is_zero() {
                state.own.fence = Fence::GivenUp;
                let rest = state.flow.take_unconfirmed();
                state.flow.counters().0.lost_fences += 1;
                drop(state);
                let reason = self.failed(
                    "a connection to the process that has it was lost, and the process has not \
                     confirmed that nothing sent over that can arrive any more: see whether its device \
                     is well",
                );
                rest.mark_stale();
                rest.fail(&reason);
                state = self.queue.lock();
                break;
            }
            state = self.queue.wait(state, Some(left));
        }
        state.own.unfenced = None;
        Ok(true)
    }

    /// The target has said what it calls the connection.
    pub(super) fn named(&self, connection: u128) {
        self.queue.lock().own.name = Some(connection);
    }

    /// Whether this is the number of a fence that was asked for, which is confirmed so.
    pub(super) fn confirmed(&self, id: u64) -> bool {
        if id != FENCE {
            return false;
        }
        let mut state = self.queue.lock();
        let asked = mem::take(&mut state.own.fence) != Fence::NotAsked;
        self.queue.wake(state);
        asked
    }

    /// Sends a WRITE, as long as it is wanted.
    fn send_write(
        &self,
        wire: &Wire,
        headers: &[u8],
        part: &Part,
        staged: &mut Staged,
    ) -> io::Result<bool> {
        if !self.queue.lock().flow.enter(part.id) {
            return Ok(false);
        }
        let wanted = || {
            let mut state = self.queue.lock();
            let wanted = state.flow.is_wanted(part.id);
            if !wanted {
                // The rest may never find room: its task ends before.
                state.flow.leave(part.id);
            }
            wanted
        };
        let sent = send_write(wire, (headers, part), staged, wanted);
        self.queue.lock().flow.leave(part.id);
        sent
    }

    /// The part that a reply is to, if it is under way.
    pub(super) fn answered(&self, id: u64) -> Option<Part> {
        let mut state = self.queue.lock();
        state.own.answered = true;
        state.flow.part(id).cloned()
    }

    /// A part has ended.
    pub(super) fn end(&self, id: u64, outcome: Outcome, tasks: &mut EndedTasks) {
        let mut state = self.queue.lock();
        let ended = state.flow.end(id, outcome);
        if state.flow.is_at_rest() {
            state.own.busy_since = None;
        }
        self.queue.wake(state);
        if let Some(group) = ended {
            group.tell(tasks);
        }
    }

    /// What the thread that receives does.
    fn receive(&self, wire: &Wire) {
        let Err(text) = self.try_receive(wire);
        tracing::debug!(
            host = self.place.host,
            port = self.place.port,
            text,
            "connection for files ended"
        );
        let mut state = self.queue.lock();
        state.own.lost.get_or_insert(text);
        self.queue.wake(state);
        // The other thread may be sending.
        wire.shut_down();
    }

    fn try_receive(&self, wire: &Wire) -> Result<std::convert::Infallible, String> {
        let mut stage = Receiving::stage();
        let mut receiving = Receiving::new(self);
        let mut heard = Instant::now();
        let mut next_look = heard;
        loop {
            let now = Instant::now();
            if now >= next_look {
                next_look = now + self.look_after(&mut receiving, now)?;
            }
            match receiving.receive(wire, &mut stage) {
                Ok(0) => {
                    let closed = "the process that has it has ended or closed the connection";
                    if let Some(text) = receiving.turned_away() {
                        return Err(text);
                    }
                    self.queue.lock().own.broke = true;
                    return Err(closed.to_owned());
                }
                Ok(_) => heard = Instant::now(),
                Err(ReceiveError::Nonsense(text)) => return Err(text),
                Err(ReceiveError::Closing) => {
                    self.queue.lock().own.closing = true;
                    return Err("the process that has it has closed the connection".to_owned());
                }
                Err(ReceiveError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    // Whoever waits for these is told before we sleep.
                    receiving.tell();
                    let left = next_look.saturating_duration_since(Instant::now());
                    let ready = wire.wait(Readiness::Readable, left);
                    if !ready.map_err(|error| error.to_string())? {
                        self.check_silence(heard)?;
                    }
                }
                Err(ReceiveError::Io(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(ReceiveError::Io(error)) => {
                    self.queue.lock().own.broke = true;
                    return Err(format!(
                        "the connection to the process that has it broke: {error}"
                    ));
                }
            }
        }
    }

    /// Ends what is not to be waited for any more, and says when to look again.
    fn look_after(&self, receiving: &mut Receiving<'_>, now: Instant) -> Result<Duration, String> {
        let mut state = self.queue.lock();
        let overdue = state.flow.look_after(now, self.patience.io);
        let is_stuck = state.flow.is_stuck(now, self.patience.io);
        let next = state.flow.next_look(now);
        drop(state);
        // Before their tasks are told.
        receiving.look();
        overdue.tell();
        if is_stuck { Err(stuck(self.patience.io)) } else { Ok(next) }
    }

    /// Whether the data that comes for a part is to be kept.
    pub(super) fn is_wanted(&self, id: u64) -> bool {
        self.queue.lock().flow.is_wanted(id)
    }

    fn check_silence(&self, heard: Instant) -> Result<(), String> {
        let Some(since) = self.queue.lock().own.busy_since else { return Ok(()) };
        if since.max(heard).elapsed() < self.patience.silence {
            return Ok(());
        }
        Err(format!(
            "the process that has it has not answered for {:?}: see whether it, its host and the \
             network are well",
            self.patience.silence
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use millstream_metadata::{Resolver, SegmentDesc};

    use super::*;
    use crate::batch::Batch;
    use crate::segment::{OpenSegment, SegmentTable};
    use crate::tcp::testing::{Room, with_deadline};
    use crate::transport::Run;
    use crate::{SegmentId, TransferState};

    /// A bound on failures.
    const LONG: Duration = Duration::from_secs(60);

    /// A resolver that says nothing before this is dropped, and when it is asked.
    fn silent() -> (Resolver, Sender<()>, Receiver<String>) {
        let (end, ended) = channel::<()>();
        let (ask, asked) = channel();
        let ended = Mutex::new(ended);
        let resolver = Resolver::new(move |host| {
            let _ = ask.send(host.to_owned());
            let _ = ended.lock().unwrap().recv();
            Err(io::ErrorKind::NotFound.into())
        });
        (resolver, end, asked)
    }

    fn link(connect: Duration, resolver: Resolver) -> Link {
        let host = "some.host".to_owned();
        let place = Place { host, port: 7, token: None, tls: None, patience: connect, resolver };
        Link::new(place, Patience { silence: LONG, io: LONG })
    }

    fn segment() -> Arc<OpenSegment> {
        let text = r#"{"name":"nvmeof/a:1/f","protocol":"nvmeof","buffers":[{"length":4096,"file_path":"/f"}]}"#;
        let descriptor = SegmentDesc::from_json(text.as_bytes()).unwrap();
        SegmentTable::new(descriptor).by_id(SegmentId::LOCAL).unwrap()
    }

    /// Has a link read a file.
    fn submit(link: &Link, room: &Room, deadline: Option<Instant>) -> Batch {
        let (batch, _) = with_deadline(Opcode::Read, room.address(), &[100], deadline);
        let segment = segment();
        let run = Run {
            transport: 0,
            transport_name: super::super::NAME,
            copies: false,
            tasks: 0..1,
            claimed: 0,
            allowed: crate::path::Allowed::default(),
            local: Arc::clone(&room.local),
            view: segment.view(),
            segment,
            buffer: 0,
        };
        link.submit(Entry::new(&batch.shared, &run, false));
        batch
    }

    fn ended(batch: &Batch) -> (TransferState, String) {
        assert!(batch.wait(LONG, &[]), "it has not ended");
        let status = batch.status(0).unwrap();
        (status.state, status.error.map(|error| error.to_string()).unwrap_or_default())
    }

    #[test]
    fn nobody_waits_for_a_resolver() {
        let (resolver, _end, asked) = silent();
        let (link, room) = (link(LONG, resolver), Room::new(100));
        let patient = submit(&link, &room, None);
        assert_eq!(asked.recv_timeout(LONG).unwrap(), "some.host");
        // Both of its deadlines are earlier than the one before.
        for time in [Duration::from_millis(100), Duration::ZERO] {
            let late = submit(&link, &room, Some(Instant::now() + time));
            assert_eq!(ended(&late).0, TransferState::Timeout);
        }
        let canceled = submit(&link, &room, None);
        assert!(canceled.task(0).unwrap().cancel());
        assert_eq!(ended(&canceled).0, TransferState::Canceled);
        assert_eq!(patient.status(0).unwrap().state, TransferState::Waiting);
        // The resolver is as silent as before.
        drop(link);
        let (state, error) = ended(&patient);
        assert_eq!(state, TransferState::Failed);
        assert!(error.contains("shut down"), "{error}");
    }

    #[test]
    fn a_resolver_is_not_waited_for_longer_than_for_a_connection() {
        let (resolver, _end, _asked) = silent();
        let (link, room) = (link(Duration::from_millis(50), resolver), Room::new(100));
        let (state, error) = ended(&submit(&link, &room, None));
        assert_eq!(state, TransferState::Failed);
        let text = "the resolver has not said in time what address its host has";
        assert!(error.contains(text) && error.contains("target some.host:7"), "{error}");
    }
}
