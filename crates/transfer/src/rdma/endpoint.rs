//! All that goes between one local and one peer NIC: what waits, what is under way, and the
//! connection it goes over.
//!
//! ```text
//!            work            handshake done          a work request failed
//!   Idle ----------> Connecting -----------> Connected -----------> Draining
//!    ^                   |                                             | nothing under way
//!    | failed for good   |             work left, may try again        |
//!    +-------------------+<--------------------------------------------+
//! ```
//!
//! No lock is held while the device or a task is told something: each method decides under the
//! lock and acts after it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use millstream_metadata::{Client, ClientConfig, Frame, FrameType, Gid, HandShakeDesc, NicPath};
use millstream_verbs::{
    Completion, CompletionStatus, Piece, PostError, SendOperation, SendRequest,
};

use super::RdmaContext;
use super::connection::{Connection, Peer, Unconnected};
use super::device::LocalDevice;
use super::queue::{Dropped, InFlight, Pending, SendQueue};
use super::workers::Workers;
use crate::segment::OpenSegment;
use crate::task::{EndedTasks, TaskHandle};
use crate::{FailureReason, Opcode, TransferError};

/// The most work requests handed to a queue pair at a time: as many as the usual send queue holds
/// twice. The device is locked once for all of them.
const POST_BATCH: usize = 256;

/// Between two attempts to connect: some fail at once, as while a link is down.
const CONNECT_PAUSE: Duration = Duration::from_millis(100);

/// What an endpoint is made with.
pub(super) struct EndpointConfig {
    pub(super) context: Arc<RdmaContext>,
    pub(super) workers: Arc<Workers>,
    pub(super) device: Arc<LocalDevice>,
    /// The name that the peer's segment was opened by: where to call it.
    pub(super) peer: Arc<str>,
    /// The peer's NIC, by the name that the peer gives itself.
    pub(super) peer_nic: NicPath,
    /// The peer's address, by its descriptor.
    pub(super) peer_gid: Gid,
    pub(super) queue_pairs: usize,
    pub(super) depth: usize,
    pub(super) retry_count: u32,
    pub(super) patience: Duration,
    pub(super) acknowledge_timeout: u8,
}

pub(super) struct Endpoint {
    own: Weak<Self>,
    number: u32,
    config: EndpointConfig,
    state: Mutex<State>,
    /// Told by `stop`.
    stopped: Condvar,
}

struct State {
    phase: Phase,
    queue: SendQueue,
    /// Connections in a row that broke before a single slice was done.
    breaks: u32,
    /// When a slice was last done, or the first of those that wait was added.
    moved_at: Instant,
    /// Why the last one broke.
    reason: Option<FailureReason>,
    /// Which process was connected to before; `None` inside when it does not say.
    incarnation: Option<Option<u64>>,
    /// The segments that are reached through here.
    segments: Vec<Weak<OpenSegment>>,
    /// Kept for their allocation: who posts takes one. As many as threads have ever posted at once.
    lists: Vec<Vec<SendRequest>>,
}

enum Phase {
    Idle,
    Connecting,
    Connected(Arc<Connection>),
    Draining(Arc<Connection>),
    Stopped,
}

/// A slice that has ended.
pub(super) struct Finished {
    task: TaskHandle,
    result: Result<u32, CompletionStatus>,
}

/// What is to be done once the lock has been released.
enum Next {
    Nothing,
    Post,
    Connect,
    Fail(Dropped, FailureReason),
}

impl Endpoint {
    pub(super) fn new(number: u32, own: Weak<Self>, config: EndpointConfig) -> Self {
        let state = State {
            phase: Phase::Idle,
            queue: SendQueue::new(config.queue_pairs, config.depth),
            breaks: 0,
            moved_at: Instant::now(),
            reason: None,
            incarnation: None,
            segments: Vec::new(),
            lists: Vec::new(),
        };
        Self { own, number, config, state: Mutex::new(state), stopped: Condvar::new() }
    }

    /// Notes that a segment is reached through here.
    pub(super) fn serves(&self, segment: &Arc<OpenSegment>) {
        let mut state = self.lock();
        state.segments.retain(|known| known.strong_count() > 0);
        if !state.segments.iter().any(|known| known.as_ptr() == Arc::as_ptr(segment)) {
            state.segments.push(Arc::downgrade(segment));
        }
    }

    /// Adds tasks. `kick` must follow.
    pub(super) fn push(&self, tasks: impl Iterator<Item = Pending>) {
        let mut broken = None;
        let mut state = self.lock();
        if !state.queue.has_waiting() && state.queue.in_flight() == 0 {
            state.moved_at = Instant::now();
        }
        for pending in tasks {
            // The peer was restarted since the task or the connection was made: connecting again
            // tells which, and nothing is sent before.
            let foreign = matches!((state.incarnation, pending.incarnation),
                (Some(Some(connected)), Some(meant)) if connected != meant);
            if foreign {
                broken = broken.or(state.break_connection(None));
            }
            state.queue.push(pending);
        }
        drop(state);
        if let Some(connection) = broken {
            connection.close();
        }
    }

    /// Begins to do what was added: so many slices of it at most, if it is connected.
    pub(super) fn kick(&self, most: usize) {
        let next = self.lock().next(&self.config);
        match next {
            Next::Post => self.config.device.device.postpone_sending(|| self.post(most)),
            next => self.act(next),
        }
    }

    /// Takes the completions of this endpoint's work requests. `finished` is scratch space.
    pub(super) fn completed(&self, completions: &[Completion], finished: &mut Vec<Finished>) {
        let mut broken = None;
        let mut stale = false;
        let mut state = self.lock();
        for completion in completions {
            // Not found after `stop` only.
            let Some(slice) = state.queue.end(completion.id as u32) else { continue };
            let length = slice.slice.length;
            match completion.status {
                CompletionStatus::Success => {
                    state.breaks = 0;
                    finished.push(Finished { task: slice.task, result: Ok(length) });
                    continue;
                }
                status if is_permanent(status) => {
                    stale |= status == CompletionStatus::RemoteAccess;
                    finished.push(Finished { task: slice.task, result: Err(status) });
                    broken = broken.or(state.break_connection(None));
                }
                status => {
                    state.queue.again(slice);
                    let reason = FailureReason::Completion(status);
                    broken = broken.or(state.break_connection(Some(reason)));
                }
            }
        }
        if !finished.is_empty() {
            state.moved_at = Instant::now();
        }
        let next = state.next(&self.config);
        let segments = if stale { state.segments.clone() } else { Vec::new() };
        drop(state);
        if let Some(connection) = broken {
            connection.close();
        }
        segments.iter().filter_map(Weak::upgrade).for_each(|segment| segment.mark_stale());
        // First the device, so that it has work while the tasks are told.
        self.act(next);
        let mut ended = EndedTasks::default();
        for Finished { task, result } in finished.drain(..) {
            match result {
                Ok(length) => ended.done(task, length),
                Err(status) => task.failed(&self.error(FailureReason::Completion(status))),
            }
        }
    }

    /// Ends everything: what is left fails. Returns the queue pairs that were connected, for the
    /// peer to know.
    pub(super) fn stop(&self) -> Option<HandShakeDesc> {
        let mut state = self.lock();
        self.stopped.notify_all();
        let connection = match std::mem::replace(&mut state.phase, Phase::Stopped) {
            Phase::Connected(connection) | Phase::Draining(connection) => Some(connection),
            _ => None,
        };
        let dropped = state.queue.drop_all();
        // Others would not understand.
        let understands = matches!(state.incarnation, Some(Some(_)));
        drop(state);
        let goodbye = connection.map(|connection| {
            // Before the tasks are told: from here on nothing touches their memory.
            connection.halt();
            HandShakeDesc { qp_num: connection.numbers(), disconnect: true, ..self.greeting() }
        });
        dropped.fail(&self.error(FailureReason::ShutDown));
        goodbye.filter(|_| understands)
    }

    /// Where the peer answers handshakes.
    pub(super) fn peer(&self) -> &str {
        &self.config.peer
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, reason: FailureReason) -> TransferError {
        let nic = self.config.peer_nic.nic.as_str().into();
        TransferError { peer: Arc::clone(&self.config.peer), nic, reason }
    }

    fn act(&self, next: Next) {
        match next {
            Next::Nothing => {}
            // All of it under way before any of it is sent.
            Next::Post => self.config.device.device.postpone_sending(|| self.post(usize::MAX)),
            Next::Fail(dropped, reason) => dropped.fail(&self.error(reason)),
            Next::Connect => {
                let Some(own) = self.own.upgrade() else { return };
                if self.config.workers.run(Box::new(move || own.connect())).is_err() {
                    self.fail_waiting(FailureReason::ShutDown);
                }
            }
        }
    }

    /// Fills the send queues, with so many slices at most.
    fn post(&self, mut most: usize) {
        let mut state = self.lock();
        let full = POST_BATCH.min(self.config.depth);
        let mut requests = state.lists.pop().unwrap_or_else(|| Vec::with_capacity(full));
        while let Phase::Connected(connection) = &state.phase {
            let connection = Arc::clone(connection);
            let queue_pair = state.queue.roomiest();
            requests.clear();
            let room = full.min(most);
            while requests.len() < room
                && let Some((slot, slice)) = state.queue.begin(queue_pair)
            {
                requests.push(self.request(slot, slice));
            }
            if requests.is_empty() {
                break;
            }
            most -= requests.len();
            drop(state);
            let posted = connection.queue_pairs[queue_pair].post_send(&requests);
            if let Err((posted, error)) = posted {
                self.not_posted(&requests[posted..], error);
                state = self.lock();
                break;
            }
            state = self.lock();
        }
        state.lists.push(requests);
    }

    fn request(&self, slot: u32, slice: &InFlight) -> SendRequest {
        let InFlight { task, slice, local_key, remote_key, .. } = slice;
        let (remote_address, remote_key) = (slice.target, *remote_key);
        let operation = match task.opcode() {
            Opcode::Read => SendOperation::Read { remote_address, remote_key },
            Opcode::Write => SendOperation::Write { remote_address, remote_key, immediate: None },
        };
        let piece = Piece { key: *local_key, address: slice.source, length: slice.length };
        let id = u64::from(self.number) << 32 | u64::from(slot);
        SendRequest::new(id, operation, [piece])
    }

    /// The queue pair did not take these requests: it has failed meanwhile, or its device has.
    fn not_posted(&self, requests: &[SendRequest], error: PostError) {
        let mut state = self.lock();
        for request in requests {
            if let Some(slice) = state.queue.end(request.id as u32) {
                state.queue.again(slice);
            }
        }
        if error == PostError::DeviceFailed {
            // No other connection will do better.
            state.breaks = u32::MAX - 1;
        }
        let broken = state.break_connection(Some(FailureReason::Post(error)));
        let next = state.next(&self.config);
        drop(state);
        if let Some(connection) = broken {
            connection.close();
        }
        self.act(next);
    }

    /// Connects, and then does what waits, or fails it. On a thread of the pool.
    fn connect(&self) {
        if matches!(self.lock().phase, Phase::Stopped) {
            return;
        }
        let (peer, nic) = (&self.config.peer_nic.server, &self.config.peer_nic.nic);
        let device = self.config.device.device.name();
        tracing::info!(peer, nic, device, "connecting");
        let mut established = self.establish(&self.config.context.client);
        while let Err(reason) = &established
            && reason.may_pass()
            && let Some(left) = self.pause()
        {
            tracing::info!(error = %self.error(reason.clone()), "not connected yet");
            let limits = *self.config.context.client.config();
            established = self.establish(&Client::new(ClientConfig {
                connect_timeout: limits.connect_timeout.min(left),
                call_timeout: limits.call_timeout.min(left),
                ..limits
            }));
        }
        let mut state = self.lock();
        if !matches!(state.phase, Phase::Connecting) {
            return;
        }
        match established {
            Ok((connection, incarnation)) => {
                let before = state.incarnation.replace(incarnation);
                let restarted = before.is_some_and(|before| before != incarnation);
                let queue_pairs = connection.queue_pairs.len();
                tracing::info!(peer, nic, queue_pairs, restarted, "connected");
                state.phase = Phase::Connected(Arc::new(connection));
                // What does not say which process it was meant for was meant for the one before.
                let dropped = state.queue.drop_foreign(|meant| match meant {
                    Some(meant) => Some(meant) != incarnation,
                    None => restarted,
                });
                let segments = if restarted || !dropped.is_empty() {
                    state.segments.clone()
                } else {
                    Vec::new()
                };
                drop(state);
                segments.iter().filter_map(Weak::upgrade).for_each(|segment| segment.mark_stale());
                dropped.fail(&self.error(FailureReason::Restarted));
                self.post(usize::MAX);
            }
            Err(reason) => {
                drop(state);
                tracing::warn!(error = %self.error(reason.clone()), "not connected");
                self.fail_waiting(reason);
            }
        }
    }

    /// Pauses before the next attempt to connect. Returns how much patience is left then; `None`
    /// when that is none, or the endpoint was stopped.
    fn pause(&self) -> Option<Duration> {
        let left = |state: &State| {
            let left = self.config.patience.checked_sub(state.moved_at.elapsed())?;
            (!left.is_zero()).then_some(left)
        };
        let state = self.lock();
        let pause = left(&state)?.min(CONNECT_PAUSE);
        let connecting = |state: &mut State| matches!(state.phase, Phase::Connecting);
        let waited = self.stopped.wait_timeout_while(state, pause, connecting);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if connecting(&mut state) { left(&state) } else { None }
    }

    fn fail_waiting(&self, reason: FailureReason) {
        let mut state = self.lock();
        if matches!(state.phase, Phase::Connecting) {
            state.phase = Phase::Idle;
            state.breaks = 0;
        }
        let dropped = state.queue.drop_waiting();
        drop(state);
        dropped.fail(&self.error(reason));
    }

    /// What every handshake from here says.
    fn greeting(&self) -> HandShakeDesc {
        let device = &self.config.device;
        let nic = device.device.name().to_owned();
        HandShakeDesc {
            local_nic_path: NicPath { server: self.config.context.engine.clone(), nic }.to_string(),
            local_gid: Some(device.gid()),
            peer_nic_path: self.config.peer_nic.to_string(),
            incarnation: Some(self.config.context.incarnation),
            ..HandShakeDesc::default()
        }
    }

    fn establish(&self, client: &Client) -> Result<(Connection, Option<u64>), FailureReason> {
        let config = &self.config;
        let own_mtu = config
            .device
            .path_mtu(config.peer_gid.address())
            .map_err(|error| FailureReason::PathMtu(error.to_string()))?;
        let unconnected = Unconnected::new(&config.device, config.queue_pairs, config.depth)?;
        let request = HandShakeDesc {
            qp_num: unconnected.numbers(),
            start_psn: unconnected.start_psn(),
            path_mtu: Some(own_mtu.bytes() as u32),
            ..self.greeting()
        };
        let nonsense = |what: String| FailureReason::Handshake(what);
        let meta = config
            .context
            .store
            .address(&config.peer)
            .map_err(|error| nonsense(error.to_string()))?;
        let frame = Frame::new(FrameType::Connection, request.to_json());
        let reply = client
            .call(&meta.address, &frame)
            .map_err(|error| FailureReason::Unreachable(Arc::new(error.kind)))?;
        let reply =
            HandShakeDesc::from_json(&reply.body).map_err(|error| nonsense(error.to_string()))?;
        if !reply.reply_msg.is_empty() {
            return Err(FailureReason::Refused(reply.reply_msg.chars().take(200).collect()));
        }
        let address = reply.local_gid.unwrap_or(config.peer_gid).address();
        let peer = Peer::parse(&reply, address, config.queue_pairs, own_mtu).map_err(nonsense)?;
        let connection = unconnected.connect(&peer, config.acknowledge_timeout)?;
        Ok((connection, reply.incarnation))
    }
}

impl State {
    /// Begins to give a connection up, when there is one: no more is sent over it, and what was
    /// completes one way or the other. Returns it, to be closed without the lock, when this is the
    /// first to notice. `reason` is `None` when a slice is to blame and will not come again.
    fn break_connection(&mut self, reason: Option<FailureReason>) -> Option<Arc<Connection>> {
        let Phase::Connected(connection) = &self.phase else { return None };
        let connection = Arc::clone(connection);
        self.phase = Phase::Draining(Arc::clone(&connection));
        if let Some(reason) = reason {
            tracing::info!(%reason, breaks = self.breaks, "a connection broke");
            self.breaks = self.breaks.saturating_add(1);
            self.reason = Some(reason);
        }
        Some(connection)
    }

    fn next(&mut self, config: &EndpointConfig) -> Next {
        match &self.phase {
            Phase::Connected(_) => Next::Post,
            Phase::Draining(_) if self.queue.in_flight() == 0 => {
                self.phase = Phase::Idle;
                let hopeless =
                    self.breaks > config.retry_count && self.moved_at.elapsed() >= config.patience;
                match self.reason.take() {
                    Some(reason) if hopeless => {
                        self.breaks = 0;
                        Next::Fail(self.queue.drop_waiting(), reason)
                    }
                    _ => self.next(config),
                }
            }
            Phase::Idle if self.queue.has_waiting() => {
                self.phase = Phase::Connecting;
                Next::Connect
            }
            Phase::Stopped if self.queue.has_waiting() => {
                Next::Fail(self.queue.drop_waiting(), FailureReason::ShutDown)
            }
            Phase::Idle | Phase::Connecting | Phase::Draining(_) | Phase::Stopped => Next::Nothing,
        }
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
