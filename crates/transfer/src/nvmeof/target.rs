//! The side that has files: it answers requests of initiators.
//!
//! Each connection has a thread that reads requests and one that writes replies, and buffers of its own.
//! An initiator that fills all of them is not read from until one is free.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::TcpListener;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use millstream_metadata::{Acceptor, AcceptorConfig, Connection as Accepted, Gate};
use millstream_net::ends_between_forks;
use millstream_net::file_io::AlignedBuffer;
use socket2::SockRef;

use super::connections::Connections;
use super::disk::{Disk, Ended, OpenFile, Owner};
use super::draw_key;
use super::protocol::{Hello, MAX_LENGTH, Outcome, Reply, Request};
use super::requests::Reader;
use super::wire::Wire;
use crate::Opcode;

/// How often an initiator that waits hears that the target is there.
pub(super) const ALIVE_INTERVAL: Duration = Duration::from_millis(500);

/// For how long an initiator may take over the header of a request, and for all else in addition to what
/// the least rate gives it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Bytes a second that an initiator is to send and take at least, once it has begun.
const MIN_RATE: u32 = 64 << 10;

/// By when so many bytes are to have been sent or taken.
pub(super) fn deadline(length: u32) -> Instant {
    Instant::now() + PATIENCE + Duration::from_secs_f64(f64::from(length) / f64::from(MIN_RATE))
}

/// Buffers of a connection: many for small requests, some for large ones.
const SMALL_LENGTH: usize = 16 << 10;
const SMALL_BUFFERS: usize = 64;
const LARGE_LENGTH: usize = MAX_LENGTH as usize;
const LARGE_BUFFERS: usize = 8;

/// Replies that wait for the connection, those without a buffer among them.
const MAX_REPLIES: usize = 256;

/// Fences that an initiator waits for over a connection.
const MAX_FENCES: usize = 16;

/// Files that others may ask for, by their keys.
#[derive(Default)]
pub(super) struct Files {
    by_key: RwLock<HashMap<u128, Arc<OpenFile>>>,
}

impl Files {
    pub(super) fn insert(&self, key: u128, file: Arc<OpenFile>) {
        self.by_key.write().unwrap_or_else(PoisonError::into_inner).insert(key, file);
    }

    /// Takes a file back, and waits for what is being done to it.
    pub(super) fn remove(&self, key: u128) {
        let removed = self.by_key.write().unwrap_or_else(PoisonError::into_inner).remove(&key);
        if let Some(file) = removed {
            file.close();
        }
    }

    pub(super) fn find(&self, request: &Request) -> Result<Arc<OpenFile>, Outcome> {
        let files = self.by_key.read().unwrap_or_else(PoisonError::into_inner);
        let file = files.get(&request.key).ok_or(Outcome::UnknownFile)?;
        if !file.holds(request.offset, request.length.into()) {
            Err(Outcome::OutOfRange)
        } else if request.opcode == Opcode::Write && !file.writable {
            Err(Outcome::ReadOnly)
        } else {
            Ok(Arc::clone(file))
        }
    }
}

/// Answers at a socket. Dropping it closes its connections.
pub(super) struct Target {
    acceptor: Acceptor,
}

impl Target {
    pub(super) fn start(
        listener: TcpListener,
        max_connections: usize,
        files: Arc<Files>,
        disk: Arc<Disk>,
        gate: Option<Gate>,
    ) -> io::Result<Self> {
        let config =
            AcceptorConfig { max_connections, silence_allowed: Duration::from_millis(250) };
        let connections = Connections::default();
        let serve = move |accepted: &Accepted| {
            if let Err(error) = serve(accepted, &connections, &files, &disk, gate.as_ref()) {
                tracing::debug!(client = %accepted.client(), %error, "connection for files ended");
            }
        };
        Ok(Self { acceptor: Acceptor::start(listener, config, serve)? })
    }

    pub(super) const fn port(&self) -> u16 {
        self.acceptor.address().port()
    }
}

/// What the threads of a connection share with those who do its I/O.
pub(super) struct Connection {
    pub(super) wire: Wire,
    /// For fences ([`Connections`]).
    pub(super) name: u128,
    state: Mutex<State>,
    changed: Condvar,
    /// Whether a request has begun to come.
    pub(super) amid: AtomicBool,
}

#[derive(Default)]
pub(super) struct State {
    small: Pool,
    large: Pool,
    replies: VecDeque<Pending>,
    /// Requests whose operation has begun and not ended.
    pub(super) under_way: usize,
    /// Fences of other connections that it waits for.
    fences: usize,
    /// No more requests come.
    finishing: bool,
    /// Nothing is read or written any more.
    closed: bool,
}

/// A reply that was not sent yet, and its data.
struct Pending {
    reply: Reply,
    buffer: AlignedBuffer,
    range: Range<usize>,
}

/// Buffers of one length, made when they are first needed.
#[derive(Default)]
struct Pool {
    free: Vec<AlignedBuffer>,
    made: usize,
}

impl Pool {
    fn take(&mut self, length: usize, most: usize) -> Option<AlignedBuffer> {
        self.free.pop().or_else(|| {
            let more = self.made < most;
            self.made += usize::from(more);
            more.then(|| AlignedBuffer::new(length))
        })
    }
}

impl State {
    fn take(&mut self, length: usize) -> Option<AlignedBuffer> {
        match length <= SMALL_LENGTH {
            true => self.small.take(SMALL_LENGTH, SMALL_BUFFERS),
            false => self.large.take(LARGE_LENGTH, LARGE_BUFFERS),
        }
    }

    fn give(&mut self, buffer: AlignedBuffer) {
        match buffer.length() {
            0 => {}
            SMALL_LENGTH => self.small.free.push(buffer),
            _ => self.large.free.push(buffer),
        }
    }
}

impl Connection {
    pub(super) fn new(wire: Wire, name: u128) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self { wire, name, state, changed, amid: AtomicBool::new(false) }
    }

    /// What it is to say.
    #[cfg(test)]
    pub(super) fn to_say(&self) -> Vec<Reply> {
        self.lock().replies.iter().map(|pending| pending.reply).collect()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer for so many bytes, once there is one; `None` at the end.
    pub(super) fn buffer(&self, length: u32) -> Option<AlignedBuffer> {
        let mut state = self.lock();
        while !state.closed {
            if let Some(buffer) = state.take(length as usize) {
                return Some(buffer);
            }
            state = self.wait(state);
        }
        None
    }

    /// Waits until there is room for a reply.
    fn wait_for_room(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while !state.closed && state.replies.len() >= MAX_REPLIES {
            state = self.wait(state);
        }
        state
    }

    /// Replies, once there is room.
    pub(super) fn refuse(&self, id: u64, outcome: Outcome, buffer: AlignedBuffer) {
        let mut state = self.wait_for_room();
        let reply = Reply::Ended { id, outcome, length: 0 };
        state.replies.push_back(Pending { reply, buffer, range: 0..0 });
        drop(state);
        self.changed.notify_all();
    }

    /// Whether nobody waits for an answer.
    pub(super) fn is_at_rest(&self) -> bool {
        let state = self.lock();
        state.under_way == 0 && state.fences == 0
    }

    /// Says its name.
    pub(super) fn say_name(&self) {
        self.say(Reply::Named { connection: self.name });
    }

    /// Counts a fence, once there is room for the reply, unless it waits for too many.
    pub(super) fn begin_fence(&self) -> bool {
        let mut state = self.wait_for_room();
        let more = state.fences < MAX_FENCES;
        state.fences += usize::from(more);
        more
    }

    /// Says that nothing of the fenced connection comes any more.
    pub(super) fn end_fence(&self, id: u64) {
        self.lock().fences -= 1;
        self.say(Reply::Ended { id, outcome: Outcome::Done, length: 0 });
    }

    /// Says what there is room for.
    fn say(&self, reply: Reply) {
        let (buffer, range) = (AlignedBuffer::default(), 0..0);
        self.lock().replies.push_back(Pending { reply, buffer, range });
        self.changed.notify_all();
    }

    /// Closes once all that has begun is answered, and that was said.
    fn finish(&self) {
        self.lock().finishing = true;
        self.changed.notify_all();
    }

    /// Ends it. What was begun is still at the disk.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.wire.shut_down();
        self.changed.notify_all();
    }

    /// Sends replies until the end.
    fn reply(&self) {
        if let Err(error) = self.try_reply() {
            tracing::debug!(%error, "replies about files are not taken");
        }
        self.close();
    }

    fn try_reply(&self) -> io::Result<()> {
        loop {
            let mut state = self.lock();
            let pending = loop {
                if state.closed {
                    return Ok(());
                }
                if let Some(pending) = state.replies.pop_front() {
                    break pending;
                }
                if state.finishing && state.under_way == 0 && state.fences == 0 {
                    drop(state);
                    return send_all(&self.wire, &Reply::Closing.emit(), &[]);
                }
                let waited = self.changed.wait_timeout(state, ALIVE_INTERVAL);
                let (woken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                state = woken;
                let busy =
                    state.under_way > 0 || state.fences > 0 || self.amid.load(Ordering::Relaxed);
                if timeout.timed_out() && busy && state.replies.is_empty() {
                    let (buffer, range) = (AlignedBuffer::default(), 0..0);
                    break Pending { reply: Reply::Alive, buffer, range };
                }
            };
            drop(state);
            let Pending { reply, buffer, range } = pending;
            let header = reply.emit();
            let data = &buffer.bytes()[range];
            send_all(&self.wire, &header, data)?;
            let mut state = self.lock();
            state.give(buffer);
            drop(state);
            self.changed.notify_all();
        }
    }
}

impl Owner for Connection {
    fn done(&self, ended: Ended) {
        let Ended { opcode, id, buffer, range, result } = ended;
        let outcome = result.map_or_else(|error| Outcome::of(&error), |()| Outcome::Done);
        let mut state = self.lock();
        let data = opcode == Opcode::Read && outcome == Outcome::Done;
        let length = if data { range.len() as u32 } else { 0 };
        let reply = Reply::Ended { id, outcome, length };
        state.replies.push_back(Pending { reply, buffer, range: 0..length as usize });
        state.under_way -= 1;
        drop(state);
        self.changed.notify_all();
    }
}

fn send_all(wire: &Wire, header: &[u8], data: &[u8]) -> io::Result<()> {
    let mut sent = 0;
    let deadline = deadline(data.len() as u32);
    while sent < header.len() + data.len() {
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let before = header.get(sent..).unwrap_or_default();
        let rest = &data[sent.saturating_sub(header.len())..];
        match wire.write(before, rest, PATIENCE) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => sent += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    wire.finish(PATIENCE)
}

/// Serves a connection until its end.
fn serve(
    accepted: &Accepted,
    connections: &Connections,
    files: &Files,
    disk: &Disk,
    gate: Option<&Gate>,
) -> io::Result<()> {
    let mut session = None;
    if let Some(gate) = gate {
        // Until then it makes room for others.
        let admitted = gate.admit(accepted.stream(), Instant::now() + PATIENCE);
        session = admitted.map_err(io::Error::other)?;
    }
    // It may have asked for something by the time that its place is taken.
    accepted.idle();
    let stream = accepted.stream().try_clone()?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(ALIVE_INTERVAL))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // Who was cut off is forgotten.
    let keep_alive = socket2::TcpKeepalive::new().with_time(PATIENCE).with_interval(PATIENCE);
    SockRef::from(&stream).set_tcp_keepalive(&keep_alive)?;
    let wire = Wire::new(stream, session);
    send_all(&wire, &Hello { wants_name: false }.emit(), &[])?;
    let connection = Arc::new(Connection::new(wire, draw_key()?.0));
    // Until nothing of it is under way any more.
    let served = connections.serve(&connection);
    let replying = Arc::clone(&connection);
    let replier = thread::Builder::new().name("file replies".to_owned());
    let replier = replier.spawn(ends_between_forks(move || replying.reply()))?;
    let ended = Reader::new(accepted, &connection, connections, files, disk).read();
    match ended {
        // The initiator has closed, or is to make room: what it asked for before is answered.
        Ok(()) => connection.finish(),
        Err(_) => connection.close(),
    }
    let _ = replier.join();
    // Their buffers come back, and what the acceptor counts as served is over.
    let mut state = connection.lock();
    while state.under_way > 0 {
        state = connection.wait(state);
    }
    drop(state);
    drop(served);
    ended
}
