//! A connection to a target is made on a thread of its own, and the name of its host is looked up by the resolver's: who
//! waits for it keeps the deadlines of what is to go over it, and can stop at any time.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use millstream_metadata::{
    Addresses, PeerTls, Purpose, Resolution, Resolver, Ticket, TlsSession, Token, prove,
};
use millstream_net::ends_between_forks;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::queue::no_thread;
use super::wire::Wire;

/// Where a target is, and what is proved to it, and by it.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) token: Option<Token>,
    pub(super) tls: Option<PeerTls>,
    /// How long it may take until the target has accepted the connection, the lookup of its name included; and the
    /// proofs as long again.
    pub(super) patience: Duration,
    pub(super) resolver: Resolver,
}

/// A connection that is being made. Dropping it gives it up.
pub(super) struct Connecting {
    place: Place,
    attempt: Arc<Attempt>,
    until: Instant,
    /// The answer of the resolver is awaited.
    _ticket: Option<Ticket>,
}

/// What the threads share that have to do with one connection.
struct Attempt {
    state: Mutex<State>,
    /// Has who waits for the connection look.
    wake: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct State {
    /// What the resolver has said.
    addresses: Option<io::Result<Addresses>>,
    thread: Option<thread::JoinHandle<()>>,
    /// What the thread waits for.
    stream: Option<Arc<TcpStream>>,
    /// Nobody waits for the connection any more.
    given_up: bool,
    made: Option<Result<Wire, String>>,
}

impl Connecting {
    /// Begins to connect. `wake` is called when [`poll`](Self::poll) has something to find, on any thread; no lock is
    /// held then.
    pub(super) fn begin(place: Place, wake: impl Fn() + Send + Sync + 'static) -> Self {
        let attempt = Arc::new(Attempt { state: Mutex::default(), wake: Box::new(wake) });
        let until = Instant::now() + place.patience;
        let told = Arc::clone(&attempt);
        let answer = move |addresses| {
            told.lock().addresses = Some(addresses);
            (told.wake)();
        };
        let (known, ticket) = match place.resolver.resolve(&place.host, Box::new(answer)) {
            Ok(Resolution::Known(addresses)) => (Some(Ok(addresses)), None),
            Ok(Resolution::Asked(ticket)) => (None, Some(ticket)),
            Err(error) => (Some(Err(error)), None),
        };
        if known.is_some() {
            attempt.lock().addresses = known;
        }
        Self { place, attempt, until, _ticket: ticket }
    }

    /// How long it takes until [`poll`](Self::poll) has to be called, unless something wakes before.
    pub(super) fn left(&self, now: Instant) -> Duration {
        // The thread knows when its time is over.
        let connects = self.attempt.lock().thread.is_some();
        if connects { Duration::MAX } else { self.until.saturating_duration_since(now) }
    }

    /// The connection, or why there is none, once that is known. Does not wait.
    pub(super) fn poll(&self) -> Option<Result<Wire, String>> {
        let mut state = self.attempt.lock();
        if state.made.is_some() {
            return state.made.take();
        }
        match state.addresses.take() {
            Some(Ok(addresses)) => {
                let (place, attempt, until) =
                    (self.place.clone(), Arc::clone(&self.attempt), self.until);
                let work = move || {
                    let made = attempt.connect(&place, &addresses, until);
                    attempt.lock().made = Some(made);
                    (attempt.wake)();
                };
                let thread = thread::Builder::new().name("file connection".to_owned());
                match thread.spawn(ends_between_forks(work)) {
                    Ok(thread) => state.thread = Some(thread),
                    Err(error) => return Some(Err(no_thread(&error))),
                }
                None
            }
            Some(Err(error)) => Some(Err(cannot(&error))),
            None if state.thread.is_none() && Instant::now() >= self.until => {
                let silent = "the resolver has not said in time what address its host has";
                Some(Err(cannot(&io::Error::new(io::ErrorKind::TimedOut, silent))))
            }
            None => None,
        }
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        let mut state = self.attempt.lock();
        state.given_up = true;
        if let Some(stream) = &state.stream {
            // Whoever waits for it is woken, be it connected or not.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let thread = state.thread.take();
        drop(state);
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Attempt {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects to the first of these addresses at which somebody answers, and has proved what is to be.
    fn connect(
        &self,
        place: &Place,
        addresses: &[SocketAddr],
        until: Instant,
    ) -> Result<Wire, String> {
        let mut last = None;
        for mut address in addresses.iter().copied() {
            address.set_port(place.port);
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                last.get_or_insert(io::ErrorKind::TimedOut.into());
                break;
            }
            match self.connect_to(place, address, left) {
                Ok(made) => return made,
                Err(error) => last = Some(error),
            }
        }
        // It may have got others.
        place.resolver.forget(&place.host);
        Err(cannot(&last.unwrap_or_else(|| io::ErrorKind::NotFound.into())))
    }

    /// An error only where nobody has accepted the connection, or nobody waits for it any more.
    fn connect_to(
        &self,
        place: &Place,
        address: SocketAddr,
        left: Duration,
    ) -> io::Result<Result<Wire, String>> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        let stream = Arc::new(TcpStream::from(socket));
        self.waits_for(Some(Arc::clone(&stream)))?;
        let made = SockRef::from(&*stream).connect_timeout(&address.into(), left);
        let made = made.map(|()| {
            // Not having it costs time, not correctness.
            let _ = stream.set_nodelay(true);
            proved(place, &stream)
        });
        self.waits_for(None)?;
        // Nobody else has it by now.
        let stream = Arc::into_inner(stream).ok_or(io::ErrorKind::Interrupted)?;
        made.map(|session| session.map(|session| Wire::new(stream, session)))
    }

    /// From here on the thread waits for this; an error where nobody waits for the thread any more.
    fn waits_for(&self, stream: Option<Arc<TcpStream>>) -> io::Result<()> {
        let mut state = self.lock();
        state.stream = stream;
        if state.given_up { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }
}

fn cannot(error: &io::Error) -> String {
    format!("cannot connect to the process that has it: {error}: see whether it runs")
}

/// Has TLS with the target, and proves to it that this side has the token, and has it prove the same, where there are
/// a certificate and a token.
fn proved(place: &Place, stream: &TcpStream) -> Result<Option<TlsSession>, String> {
    let until = Instant::now() + place.patience;
    let tls = place.tls.as_ref().map(|tls| (tls, place.host.as_str()));
    let session = prove(stream, tls, place.token, Purpose::Files, until);
    let session = session.map_err(|error| error.to_string())?;
    let reset = stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(None));
    reset.map(|()| session).map_err(|error| error.to_string())
}
