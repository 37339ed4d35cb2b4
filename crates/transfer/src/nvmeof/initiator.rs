//! The side that asks for I/O: a link to a target, with a thread that sends and one that receives.
//!
//! The connection is made when there is something to do. When it is lost, what is under way fails. A
//! target that is there says so while it is asked for something, however slow its disk is; so silence
//! means that it is gone.

use std::io;
use std::mem;
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use millstream_net::stream::{Readiness, wait_for_stream};

use super::flow::{Entry, Flow, Part};
use super::protocol::{Hello, Outcome, Request};
use super::receiving::{ReceiveError, Receiving};
use super::sending::{LOOK, send_all, send_write};
use crate::task::EndedTasks;
use crate::{FailureReason, Opcode};

/// Requests that are begun at a time.
const BURST: usize = 16;

/// Bytes that are received at once where a reply may begin.
const STAGE: usize = 64 << 10;

/// How long a target is waited for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) connect: Duration,
    pub(super) silence: Duration,
}

/// A link to a target. Dropping it fails what is under way.
pub(super) struct Link {
    shared: Arc<Shared>,
}

pub(super) struct Shared {
    host: String,
    port: u16,
    patience: Patience,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    flow: Flow,
    /// Since when something is under way.
    busy_since: Option<Instant>,
    stream: Option<Arc<TcpStream>>,
    /// Why the connection has ended.
    lost: Option<String>,
    /// Whether a reply has come over it.
    answered: bool,
    /// Whether the thread that sends waits for more.
    waiting: bool,
    stopping: bool,
    thread: Option<JoinHandle<()>>,
}

impl Link {
    pub(super) fn new(host: &str, port: u16, patience: Patience) -> Self {
        let shared = Shared {
            host: host.to_owned(),
            port,
            patience,
            state: Mutex::default(),
            changed: Condvar::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Begins to do these tasks.
    pub(super) fn submit(&self, entry: Entry) {
        let mut state = self.shared.lock();
        if state.stopping {
            drop(state);
            return entry.fail(&FailureReason::ShutDown);
        }
        if state.thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new().name("file requests".to_owned());
            match thread.spawn(move || shared.work()) {
                Ok(thread) => state.thread = Some(thread),
                Err(error) => {
                    drop(state);
                    let text = format!("cannot start a thread: {error}: raise its limit");
                    return entry.fail(&FailureReason::File(text.into()));
                }
            }
        }
        state.flow.push(entry);
        self.shared.wake(state);
    }

    /// Whether it has nothing to do.
    pub(super) fn is_at_rest(&self) -> bool {
        let state = self.shared.lock();
        state.flow.has_nothing_to_begin() && state.flow.is_at_rest()
    }

    /// Ends it. What is under way fails.
    pub(super) fn stop(&self) {
        let mut state = self.shared.lock();
        state.stopping = true;
        if let Some(stream) = &state.stream {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let thread = state.thread.take();
        self.shared.wake(state);
        if let Some(thread) = thread
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the thread that sends look, if it waits.
    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let waiting = mem::take(&mut state.waiting);
        drop(state);
        if waiting {
            self.changed.notify_all();
        }
    }

    fn wait<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.waiting = true;
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, text: &str) {
        let text = format!("{text} (target {}:{})", self.host, self.port);
        self.fail_for(&FailureReason::File(text.into()));
    }

    fn fail_for(&self, reason: &FailureReason) {
        let rest = self.lock().flow.take();
        rest.fail(reason);
    }

    /// What the thread that sends does.
    fn work(self: Arc<Self>) {
        let mut unanswered = 0;
        loop {
            let mut state = self.lock();
            while state.flow.has_nothing_to_begin() && !state.stopping {
                state = self.wait(state);
            }
            let stopping = state.stopping;
            drop(state);
            if stopping {
                return self.fail_for(&FailureReason::ShutDown);
            }
            let stream = match self.connect() {
                Ok(stream) => Arc::new(stream),
                Err(text) => {
                    self.fail(&text);
                    continue;
                }
            };
            let mut state = self.lock();
            if state.stopping {
                continue;
            }
            state.stream = Some(Arc::clone(&stream));
            (state.lost, state.answered, state.busy_since) = (None, false, None);
            drop(state);
            let ended = self.converse(&stream);
            let mut state = self.lock();
            state.stream = None;
            let text = state.lost.take().unwrap_or(ended);
            // What has not begun is not harmed; but one that never answers is not asked for ever.
            unanswered = if state.answered { 0 } else { unanswered + 1 };
            let harmless = state.flow.is_at_rest() && unanswered < 2;
            let stopping = state.stopping;
            drop(state);
            if !harmless && !stopping {
                self.fail(&text);
            }
        }
    }

    fn connect(&self) -> Result<TcpStream, String> {
        let cannot = |error: io::Error| {
            format!("cannot connect to the process that has it: {error}: see whether it runs")
        };
        let addresses: Vec<SocketAddr> =
            (self.host.as_str(), self.port).to_socket_addrs().map_err(cannot)?.collect();
        let mut last = io::ErrorKind::NotFound.into();
        let deadline = Instant::now() + self.patience.connect;
        for address in addresses {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.lock().stopping {
                break;
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => {
                    // Not having it costs time, not correctness.
                    let _ = stream.set_nodelay(true);
                    return Ok(stream);
                }
                Err(error) => last = error,
            }
        }
        Err(cannot(last))
    }

    /// Does what there is to do over a connection, until its end; why that came, unless the receiving
    /// thread knows better.
    fn converse(self: &Arc<Self>, stream: &Arc<TcpStream>) -> String {
        let receiver = {
            let (shared, stream) = (Arc::clone(self), Arc::clone(stream));
            let thread = thread::Builder::new().name("file replies".to_owned());
            thread.spawn(move || shared.receive(&stream))
        };
        let receiver = match receiver {
            Ok(receiver) => receiver,
            Err(error) => return format!("cannot start a thread: {error}: raise its limit"),
        };
        let ended = self.send(stream);
        let _ = stream.shutdown(Shutdown::Both);
        let _ = receiver.join();
        match ended {
            Ok(()) => "the engine was shut down".to_owned(),
            Err(error) => format!("the process that has it has closed the connection: {error}"),
        }
    }

    /// Sends requests until the connection is lost or the link stops.
    fn send(&self, stream: &TcpStream) -> io::Result<()> {
        send_all(stream, &Hello::emit())?;
        let mut parts: Vec<Part> = Vec::with_capacity(BURST);
        let mut headers: Vec<u8> = Vec::with_capacity(BURST * Request::LENGTH);
        loop {
            let mut state = self.lock();
            loop {
                if state.stopping || state.lost.is_some() {
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
                state = self.wait(state);
            }
            state.busy_since.get_or_insert_with(Instant::now);
            drop(state);
            for part in parts.drain(..) {
                let Part { id, opcode, durable, key, offset, length, .. } = part;
                let header = Request { opcode, durable, id, key, offset, length }.emit();
                headers.extend_from_slice(&header);
                if opcode == Opcode::Write {
                    // The headers of READs before it go with it.
                    if !send_write(stream, &headers, &part)? {
                        headers.truncate(headers.len() - Request::LENGTH);
                        self.end(id, Outcome::Abandoned, &mut EndedTasks::default());
                        continue;
                    }
                    headers.clear();
                }
            }
            send_all(stream, &headers)?;
            headers.clear();
        }
    }

    /// The part that a reply is to, if it is under way.
    pub(super) fn answered(&self, id: u64) -> Option<Part> {
        let mut state = self.lock();
        state.answered = true;
        state.flow.part(id).cloned()
    }

    /// A part has ended.
    pub(super) fn end(&self, id: u64, outcome: Outcome, tasks: &mut EndedTasks) {
        let mut state = self.lock();
        let ended = state.flow.end(id, outcome);
        if state.flow.is_at_rest() {
            state.busy_since = None;
        }
        self.wake(state);
        if let Some(group) = ended {
            group.tell(tasks);
        }
    }

    /// What the thread that receives does.
    fn receive(&self, stream: &TcpStream) {
        let Err(text) = self.try_receive(stream);
        tracing::debug!(host = self.host, port = self.port, text, "connection for files ended");
        let mut state = self.lock();
        state.lost.get_or_insert(text);
        self.wake(state);
        // The other thread may be sending.
        let _ = stream.shutdown(Shutdown::Both);
    }

    fn try_receive(&self, stream: &TcpStream) -> Result<std::convert::Infallible, String> {
        let mut stage = vec![0; STAGE];
        let mut receiving = Receiving::new(self);
        let mut heard = Instant::now();
        loop {
            match receiving.receive(stream, &mut stage) {
                Ok(0) => {
                    return Err(
                        "the process that has it has ended or closed the connection".to_owned()
                    );
                }
                Ok(_) => heard = Instant::now(),
                Err(ReceiveError::Nonsense(text)) => return Err(text),
                Err(ReceiveError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    // Whoever waits for these is told before we sleep.
                    receiving.tell();
                    let ready = wait_for_stream(stream.as_fd(), Readiness::Readable, LOOK);
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

    fn check_silence(&self, heard: Instant) -> Result<(), String> {
        let Some(since) = self.lock().busy_since else { return Ok(()) };
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
