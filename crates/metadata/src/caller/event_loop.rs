//! The thread of a [`Caller`](super::Caller): sockets that do not block, and a timer for each call.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, Read, Write};
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token, Waker};

use super::{Message, Request, Shared};
use crate::exchange::{Attempt, Attempts, Exchange, Step};
use crate::resolver::{Addresses, Resolution, Ticket, no_answer};
use crate::{CallErrorKind, Frame};

/// The waker's; calls are numbered upwards from 0.
const WAKER: Token = Token(usize::MAX);
/// Events that are taken at a time.
const EVENTS: usize = 256;
/// Bytes that are read at a time.
const READ_LENGTH: usize = 64 << 10;
/// Writes and reads of a call before the others have their turn.
const STEPS: usize = 4;

pub(super) struct EventLoop {
    shared: Arc<Shared>,
    poll: Poll,
    /// An event of a waker that is gone would be lost.
    _waker: Arc<Waker>,
    calls: HashMap<u64, Call>,
    /// When something about a call is over, by its number: one for each of `calls`.
    timers: BTreeSet<(Instant, u64)>,
    next: u64,
    /// Calls whose turn has ended before their sockets blocked: no event comes for these.
    unfinished: BTreeSet<u64>,
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
            unfinished: BTreeSet::new(),
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
            for number in mem::take(&mut self.unfinished) {
                self.ready(number);
            }
            for event in events.iter().filter(|event| event.token() != WAKER) {
                self.ready(event.token().0 as u64);
            }
            self.expire(now);
        }
    }

    /// How long until a timer, or no time while there is work; `None` while there is neither.
    fn patience(&self, now: Instant) -> Option<Duration> {
        if !self.unfinished.is_empty() {
            return Some(Duration::ZERO);
        }
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
                    let mut request = request;
                    if let Err(kind) = self.prove(&mut request, &stream) {
                        return request.done.tell(Err(kind));
                    }
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

    /// Has the exchange go over TLS, and begin with a proof, where there is a certificate and a token.
    fn prove(&self, request: &mut Request, stream: &TcpStream) -> Result<(), CallErrorKind> {
        if let Some(tls) = &self.shared.config.tls {
            request.exchange.encrypt(tls.calling(&request.done.peer.host)?);
        }
        let Some(token) = self.shared.config.token else { return Ok(()) };
        let address = stream.peer_addr().map_err(CallErrorKind::Io)?;
        request.exchange.prove(token, address)
    }

    /// Writes and reads as far as the socket does not block, for one turn.
    fn exchange(&mut self, number: u64, mut request: Request, mut stream: TcpStream) {
        let result = match turn(&mut request.exchange, &mut stream, &mut self.buffer) {
            Ok(Step::Done(reply)) => Ok(reply),
            Err(kind) => Err(kind),
            Ok(step @ (Step::More | Step::Blocked)) => {
                if matches!(step, Step::More) {
                    self.unfinished.insert(number);
                }
                // `expire` looks at it after each turn.
                let timer = request.deadline;
                return self.keep(number, request, Phase::Exchanging { stream }, timer);
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

/// Writes and reads until the stream blocks or the exchange ends; `More` when neither comes soon.
fn turn(
    exchange: &mut Exchange,
    mut stream: impl Read + Write,
    buffer: &mut [u8],
) -> Result<Step<Frame>, CallErrorKind> {
    for _ in 0..STEPS {
        match exchange.step(&mut stream, buffer)? {
            Step::More => {}
            step => return Ok(step),
        }
    }
    Ok(Step::More)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FrameType;

    /// Takes all, and has always more.
    struct Endless {
        read: usize,
    }

    impl Write for Endless {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let long = Frame::new(FrameType::Probe, vec![0; 100 * READ_LENGTH]).encode();
            let rest = &long[self.read.min(long.len())..];
            let count = rest.len().min(buffer.len());
            buffer[..count].copy_from_slice(&rest[..count]);
            self.read += count;
            Ok(count)
        }
    }

    #[test]
    fn a_peer_that_sends_on_and_on_has_its_turn_only() {
        let mut exchange =
            Exchange::new(&Frame::new(FrameType::Probe, "{}"), 100 * READ_LENGTH + 1);
        let mut stream = Endless { read: 0 };
        let mut buffer = vec![0; READ_LENGTH];
        let mut turns = 0;
        loop {
            let before = stream.read;
            let step = turn(&mut exchange, &mut stream, &mut buffer).unwrap();
            turns += 1;
            assert!(stream.read - before <= STEPS * READ_LENGTH);
            match step {
                Step::More => {}
                Step::Blocked => panic!("it does not block"),
                Step::Done(reply) => break assert_eq!(reply.body.len(), 100 * READ_LENGTH),
            }
        }
        assert!(turns > 100 / STEPS);
    }
}
