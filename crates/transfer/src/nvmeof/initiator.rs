//! The side that asks for I/O: a link to a target, with a thread that sends and one that receives.
//!
//! The connection is made when there is something to do. When it is lost, what is under way fails. A
//! target that is there says so while it is asked for something, however slow its disk is; so silence
//! means that it is gone.

use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use std::{io, mem};

use millstream_metadata::{Gate, HostPort, PeerTls, Purpose, TlsSession, Token, prove};
use millstream_net::stream::Readiness;
use millstream_net::{ends_between_forks, lookup};

use super::flow::{Entry, Part, stuck};
use super::protocol::{Hello, Outcome, Request};
use super::queue::{Queue, no_thread};
use super::receiving::{ReceiveError, Receiving};
use super::sending::{send_all, send_write};
use super::wire::Wire;
use crate::metrics::{RailMetrics, RailStatus};
use crate::task::EndedTasks;
use crate::{FailureReason, Opcode};

/// Requests that are begun at a time.
const BURST: usize = 16;

/// Bytes that are received at once where a reply may begin.
const STAGE: usize = 64 << 10;

/// How often a target may close connections one after the other without an answer, though properly.
const MAX_CLOSINGS: u32 = 8;

/// How long a target is waited for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) connect: Duration,
    pub(super) silence: Duration,
    /// For a device.
    pub(super) io: Duration,
}

/// A link to a target. Dropping it fails what is under way.
pub(super) struct Link {
    shared: Arc<Shared>,
}

pub(super) struct Shared {
    host: String,
    port: u16,
    /// What is proved to the target, and by it.
    token: Option<Token>,
    tls: Option<PeerTls>,
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
    /// Why the connection has ended.
    lost: Option<String>,
    /// Whether a reply has come over it.
    answered: bool,
    /// Why what was under way failed last.
    failure: Option<String>,
}

impl Link {
    /// `gate`: what this engine asks of callers, which is what it shows and asks of who it calls.
    pub(super) fn new(host: &str, port: u16, gate: Option<&Gate>, patience: Patience) -> Self {
        let (token, tls) = (gate.and_then(Gate::token), gate.and_then(Gate::tls).cloned());
        let (host, queue) = (host.to_owned(), Queue::default());
        Self { shared: Arc::new(Shared { host, port, token, tls, patience, queue }) }
    }

    /// Begins to do these tasks.
    pub(super) fn submit(&self, entry: Entry) {
        let shared = Arc::clone(&self.shared);
        self.shared.queue.submit(entry, "file requests", move || shared.work());
    }

    /// What is to be seen of it.
    pub(super) fn observe(&self) -> RailMetrics {
        let Shared { host, port, queue, .. } = &*self.shared;
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
        let text = format!("{text} (target {}:{})", self.host, self.port);
        let mut state = self.queue.lock();
        state.flow.counters().0.failures += 1;
        state.own.failure = Some(text.clone());
        drop(state);
        self.fail_for(&FailureReason::File(text.into()));
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
                Ok(wire) => Arc::new(wire),
                Err(text) => {
                    self.fail(&text);
                    continue;
                }
            };
            let mut state = self.queue.lock();
            if state.stopping {
                continue;
            }
            state.own.wire = Some(Arc::clone(&wire));
            state.flow.counters().0.connections += 1;
            (state.own.lost, state.own.answered, state.own.busy_since) = (None, false, None);
            drop(state);
            let ended = self.converse(&wire);
            let mut state = self.queue.lock();
            state.own.wire = None;
            let text = state.own.lost.take().unwrap_or(ended);
            // What has not begun is not harmed; but one that never answers is not asked for ever.
            unanswered = if state.own.answered { 0 } else { unanswered + 1 };
            if mem::take(&mut state.own.closing) && unanswered < MAX_CLOSINGS && !state.stopping {
                state.flow.begin_again();
                continue;
            }
            let harmless = state.flow.is_at_rest() && unanswered < 2;
            let stopping = state.stopping;
            if state.flow.is_at_rest() {
                state.flow.forget_given_up();
            }
            drop(state);
            if !harmless && !stopping {
                self.fail(&text);
            }
        }
    }

    fn connect(&self) -> Result<Wire, String> {
        let cannot = |error: io::Error| {
            format!("cannot connect to the process that has it: {error}: see whether it runs")
        };
        let addresses = lookup(&self.host).map_err(cannot)?;
        let mut last = io::ErrorKind::NotFound.into();
        let deadline = Instant::now() + self.patience.connect;
        for mut address in addresses {
            address.set_port(self.port);
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.queue.lock().stopping {
                break;
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => {
                    // Not having it costs time, not correctness.
                    let _ = stream.set_nodelay(true);
                    let session = self.prove(&stream)?;
                    return Ok(Wire::new(stream, session));
                }
                Err(error) => last = error,
            }
        }
        Err(cannot(last))
    }

    /// Has TLS with the target, and proves to it that this side has the token, and has it prove the same, where there are
    /// a certificate and a token.
    fn prove(&self, stream: &TcpStream) -> Result<Option<TlsSession>, String> {
        let deadline = Instant::now() + self.patience.connect;
        let tls = self.tls.as_ref().map(|tls| (tls, self.host.as_str()));
        let session = prove(stream, tls, self.token, Purpose::Files, deadline);
        let session = session.map_err(|error| error.to_string())?;
        let reset = stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(None));
        reset.map(|()| session).map_err(|error| error.to_string())
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
        send_all(wire, &Hello::emit())?;
        let mut parts: Vec<Part> = Vec::with_capacity(BURST);
        let mut headers: Vec<u8> = Vec::with_capacity(BURST * Request::LENGTH);
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
                state = self.queue.wait(state, None);
            }
            state.own.busy_since.get_or_insert_with(Instant::now);
            drop(state);
            for part in parts.drain(..) {
                let Part { id, opcode, durable, key, offset, length, .. } = part;
                let header = Request { opcode, durable, id, key, offset, length }.emit();
                headers.extend_from_slice(&header);
                if opcode == Opcode::Write {
                    // The headers of READs before it go with it.
                    if !self.send_write(wire, &headers, &part)? {
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

    /// Sends a WRITE, as long as it is wanted.
    fn send_write(&self, wire: &Wire, headers: &[u8], part: &Part) -> io::Result<bool> {
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
        let sent = send_write(wire, headers, part, wanted);
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
        tracing::debug!(host = self.host, port = self.port, text, "connection for files ended");
        let mut state = self.queue.lock();
        state.own.lost.get_or_insert(text);
        self.queue.wake(state);
        // The other thread may be sending.
        wire.shut_down();
    }

    fn try_receive(&self, wire: &Wire) -> Result<std::convert::Infallible, String> {
        let mut stage = vec![0; STAGE];
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
                    return Err(receiving.turned_away().unwrap_or_else(|| closed.to_owned()));
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
