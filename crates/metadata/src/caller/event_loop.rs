//! The thread of a [`Caller`](super::Caller): sockets that do not block, and a timer for each call.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token, Waker};

use super::{Message, Request, Shared};
use crate::CallErrorKind;
use crate::exchange::{Attempt, Attempts, Step};
use crate::resolver::{Addresses, Resolution, Ticket, no_answer};

/// The waker's; calls are numbered upwards from 0.
const WAKER: Token = Token(usize::MAX);
/// Events that are taken at a time.
const EVENTS: usize = 256;
/// Bytes that are read at a time.
const READ_LENGTH: usize = 64 << 10;

pub(super) struct EventLoop {
    shared: Arc<Shared>,
    poll: Poll,
    /// An event of a waker that is gone would be lost.
    _waker: Arc<Waker>,
    calls: HashMap<u64, Call>,
    /// When something about a call is over, by its number: one for each of `calls`.
    timers: BTreeSet<(Instant, u64)>,
    next: u64,
    buffer: Box<[u8]>,
}

/// A call that is under way.
struct Call {
    request: Request,
    phase: Phase,
    /// Its entry among the timers.
    timer: Instant,
}

enum Phase {
    /// Its name is looked up.
    Resolving { _ticket: Ticket },
    /// A connection is being made.
    Connecting { stream: TcpStream, attempt: Attempt, attempts: Attempts },
    /// The request goes out, or the reply comes in.
    Exchanging { stream: TcpStream },
}

/// Closes the caller, however the thread ends.
struct Closing(Arc<Shared>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl EventLoop {
    pub(super) fn new(shared: Arc<Shared>) -> io::Result<(Self, Arc<Waker>)> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        let event_loop = Self {
            shared,
            poll,
            _waker: Arc::clone(&waker),
            calls: HashMap::new(),
            timers: BTreeSet::new(),
            next: 0,
            buffer: vec![0; READ_LENGTH].into(),
        };
        Ok((event_loop, waker))
    }

    /// Works until the caller is closed.
    pub(super) fn run(mut self) {
        // Dropped before the calls: nobody who is told that they have ended can begin another.
        let _closing = Closing(Arc::clone(&self.shared));
        let mut events = Events::with_capacity(EVENTS);
        loop {
            // What was over before the sockets were looked at has had its chance. So whoever is told
            // something and takes long costs no other call its reply.
            let now = Instant::now();
            if let Err(error) = self.poll.poll(&mut events, self.patience(now))
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::error!(%error, "calls to peers cannot be waited for");
                return;
            }
            let Some(messages) = self.shared.receive() else { return };
            for message in messages {
                self.take(message);
            }
            for event in events.iter().filter(|event| event.token() != WAKER) {
                self.ready(event.token().0 as u64);
            }
            self.expire(now);
        }
    }

    /// How long until a timer; `None` while there is none.
    fn patience(&self, now: Instant) -> Option<Duration> {
        let (first, _) = self.timers.first()?;
        Some(first.saturating_duration_since(now))
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Call(request) => self.begin(request),
            Message::Refused(done) => done.refuse(),
            Message::Resolved(number, result) => {
                // It may have ended since.
                let Some(Call { request, .. }) = self.remove(number) else { return };
                match result {
                    Ok(addresses) => self.connect_to_any(number, request, addresses),
                    Err(error) => request.done.tell(Err(CallErrorKind::Resolve(error))),
                }
            }
        }
    }

    fn begin(&mut self, request: Request) {
        let number = self.next;
        self.next += 1;
        let shared = Arc::clone(&self.shared);
        let answer = Box::new(move |result| shared.post(Message::Resolved(number, result)));
        match self.shared.resolver.resolve(&request.done.peer.host, answer) {
            Ok(Resolution::Known(addresses)) => self.connect_to_any(number, request, addresses),
            Ok(Resolution::Asked(ticket)) => {
                let timer = request.deadline;
                self.keep(number, request, Phase::Resolving { _ticket: ticket }, timer);
            }
            Err(error) => request.done.tell(Err(CallErrorKind::Resolve(error))),
        }
    }

    fn connect_to_any(&mut self, number: u64, request: Request, addresses: Addresses) {
        let connect_timeout = self.shared.config.connect_timeout;
        let attempts = Attempts::new(addresses, request.done.peer.port, connect_timeout);
        self.connect(number, request, attempts);
    }

    /// Begins a connection to the next address.
    fn connect(&mut self, number: u64, request: Request, mut attempts: Attempts) {
        loop {
            let left = request.deadline.saturating_duration_since(Instant::now());
            let attempt = match attempts.next(left) {
                Ok(attempt) => attempt,
                Err(kind) => {
                    self.shared.resolver.forget(&request.done.peer.host);
                    return request.done.tell(Err(kind));
                }
            };
            match self.open(number, attempt) {
                Ok(stream) => {
                    let timer = Instant::now() + attempt.wait;
                    let phase = Phase::Connecting { stream, attempt, attempts };
                    return self.keep(number, request, phase, timer);
                }
                Err(error) => attempts.failed(attempt, error),
            }
        }
    }

    fn open(&self, number: u64, attempt: Attempt) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect(attempt.address)?;
        let token = Token(usize::try_from(number).map_err(io::Error::other)?);
        let both = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut stream, token, both)?;
        Ok(stream)
    }

    /// The socket of a call can do something. It may have been another socket of it that could.
    fn ready(&mut self, number: u64) {
        let Some(Call { request, phase, timer }) = self.remove(number) else { return };
        match phase {
            Phase::Resolving { .. } => self.keep(number, request, phase, timer),
            Phase::Connecting { stream, attempt, mut attempts } => match is_connected(&stream) {
                Ok(false) => {
                    let phase = Phase::Connecting { stream, attempt, attempts };
                    self.keep(number, request, phase, timer);
                }
                Ok(true) => {
                    // Not having it costs time, not correctness.
                    let _ = stream.set_nodelay(true);
                    self.exchange(number, request, stream);
                }
                Err(error) => {
                    attempts.failed(attempt, error);
                    drop(stream);
                    self.connect(number, request, attempts);
                }
            },
            Phase::Exchanging { stream } => self.exchange(number, request, stream),
        }
    }

    /// Writes and reads as far as the socket does not block.
    fn exchange(&mut self, number: u64, mut request: Request, mut stream: TcpStream) {
        let result = loop {
            match request.exchange.step(&mut stream, &mut self.buffer) {
                Ok(Step::More) => {}
                Ok(Step::Blocked) => {
                    let timer = request.deadline;
                    return self.keep(number, request, Phase::Exchanging { stream }, timer);
                }
                Ok(Step::Done(reply)) => break Ok(reply),
                Err(kind) => break Err(kind),
            }
        };
        drop(stream);
        request.done.tell(result);
    }

    /// Ends what was over at this time.
    fn expire(&mut self, now: Instant) {
        while let Some(&(at, number)) = self.timers.first()
            && at <= now
        {
            let Some(Call { request, phase, .. }) = self.remove(number) else { return };
            match phase {
                Phase::Resolving { .. } => {
                    request.done.tell(Err(CallErrorKind::Resolve(no_answer())));
                }
                Phase::Connecting { stream, attempt, mut attempts } => {
                    attempts.failed(attempt, io::ErrorKind::TimedOut.into());
                    drop(stream);
                    self.connect(number, request, attempts);
                }
                Phase::Exchanging { stream } => {
                    drop(stream);
                    let waited = request.timeout;
                    request.done.tell(Err(CallErrorKind::NoReply { waited }));
                }
            }
        }
    }

    fn keep(&mut self, number: u64, request: Request, phase: Phase, timer: Instant) {
        self.timers.insert((timer, number));
        self.calls.insert(number, Call { request, phase, timer });
    }

    fn remove(&mut self, number: u64) -> Option<Call> {
        let call = self.calls.remove(&number)?;
        self.timers.remove(&(call.timer, number));
        Some(call)
    }
}

/// Whether a connection has been made, or why it cannot be.
fn is_connected(stream: &TcpStream) -> io::Result<bool> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    match stream.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}
