//! A listening socket: one thread accepts, one short-lived thread serves each connection.
//!
//! There is a limit on the connections that are open at a time. While there are so many, one that
//! has said nothing for long is closed for the next, the one that is silent for longest first: silent
//! clients cannot keep others out.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use millstream_net::ends_between_forks;

/// How long the accepting thread rests after an error, such as having no file descriptor left.
const ACCEPT_ERROR_PAUSE: Duration = Duration::from_millis(20);

/// Limits of an [`Acceptor`].
#[derive(Clone, Copy, Debug)]
pub struct AcceptorConfig {
    /// Connections served at a time.
    pub max_connections: usize,
    /// How long a client may say nothing while others wait for a place.
    pub silence_allowed: Duration,
}

/// A socket whose connections are served. Dropping it closes them and waits for its threads.
pub struct Acceptor {
    address: SocketAddr,
    listener: Arc<TcpListener>,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

/// A connection that is being served: it has a place until this value is dropped.
pub struct Connection {
    shared: Arc<Shared>,
    number: u64,
    stream: TcpStream,
    client: SocketAddr,
}

type Serve = dyn Fn(&Connection) + Send + Sync;

struct Shared {
    config: AcceptorConfig,
    serve: Box<Serve>,
    connections: Mutex<Connections>,
    changed: Condvar,
}

#[derive(Default)]
struct Connections {
    stopping: bool,
    /// Whether it was said that there is no place left, since half of them were last free. Not since
    /// one was: where strangers keep all places taken, each of them would be told of.
    complained: bool,
    next: u64,
    /// By number: the smallest is the oldest.
    open: BTreeMap<u64, Open>,
}

struct Open {
    stream: TcpStream,
    /// Since when something is awaited from the client; `None` while nothing is.
    silent_since: Option<Instant>,
    /// Nothing is under way: there is something to say before the end.
    idle: bool,
}

/// So many connections wait to be accepted, as Linux allows since 5.4.
const BACKLOG: i32 = 4096;

impl Acceptor {
    /// Has `serve` called for each connection that comes to a socket that listens, each on a
    /// thread of its own, until this value is dropped.
    pub fn start(
        listener: TcpListener,
        config: AcceptorConfig,
        serve: impl Fn(&Connection) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        // Those who wait for a place are to wait with a connection. Without room their attempts are dropped, and the kernel
        // makes the next one a second later. The system takes down what is more than it allows (`net.core.somaxconn`).
        socket2::SockRef::from(&listener).listen(BACKLOG)?;
        let listener = Arc::new(listener);
        let shared = Arc::new(Shared {
            config,
            serve: Box::new(serve),
            connections: Mutex::default(),
            changed: Condvar::new(),
        });
        let acceptor = thread::Builder::new().name("accept".to_owned()).spawn({
            let (listener, shared) = (Arc::clone(&listener), Arc::clone(&shared));
            ends_between_forks(move || accept_loop(&listener, &shared))
        })?;
        Ok(Self { address: listener.local_addr()?, listener, shared, acceptor: Some(acceptor) })
    }

    /// Where it listens.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections are being served.
    pub fn served(&self) -> usize {
        self.shared.lock().open.len()
    }

    /// Stops accepting, closes what is open, and waits until no connection is being served.
    pub fn stop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.changed.notify_all();
        // Wakes the thread in accept(), which then finds that it must stop.
        let _ = socket2::SockRef::from(&*self.listener).shutdown(Shutdown::Both);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        let mut connections = self.shared.lock();
        for open in connections.open.values() {
            let _ = open.stream.shutdown(Shutdown::Both);
        }
        while !connections.open.is_empty() {
            connections =
                self.shared.changed.wait(connections).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, shared, .. } = self;
        f.debug_struct("Acceptor")
            .field("address", address)
            .field("config", &shared.config)
            .finish()
    }
}

impl Connection {
    /// The connection.
    pub const fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Who has connected.
    pub const fn client(&self) -> SocketAddr {
        self.client
    }

    /// The client has said what was awaited: its place is its own until it is awaited again.
    pub fn heard(&self) {
        self.set(None, false);
    }

    /// From here on the client can be silent again, and must make room if others need it.
    pub fn awaited(&self) {
        self.set(Some(Instant::now()), false);
    }

    /// The same, of a client that waits for nothing. If others need the place, only reading from it ends:
    /// who serves it comes to the end of what was received, and can say so before the connection ends.
    pub fn idle(&self) {
        self.set(Some(Instant::now()), true);
    }

    /// Gives the place back: the connection is no longer the acceptor's to close.
    pub fn release(&self) {
        self.shared.leave(self.number);
    }

    fn set(&self, silent_since: Option<Instant>, idle: bool) {
        if let Some(open) = self.shared.lock().open.get_mut(&self.number) {
            (open.silent_since, open.idle) = (silent_since, idle);
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("client", &self.client).finish_non_exhaustive()
    }
}

/// Gives the place back when the connection's thread ends, however it ends.
impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.leave(self.number);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for one more connection, and enters it. `None` when the acceptor stops.
    fn admit(self: &Arc<Self>, stream: TcpStream, client: SocketAddr) -> Option<Connection> {
        let limit = self.config.max_connections.max(1);
        let mut connections = self.lock();
        while connections.open.len() >= limit {
            if connections.stopping {
                return None;
            }
            if !std::mem::replace(&mut connections.complained, true) {
                tracing::warn!(
                    limit,
                    "as many connections are open as may be: those that say nothing are closed"
                );
            }
            let silence = self.config.silence_allowed;
            let silent = connections.open.values_mut().filter(|open| open.silent_since.is_some());
            let longest = silent.min_by_key(|open| open.silent_since);
            let patience = longest.map_or(silence, |open| {
                let silent_for = open.silent_since.map_or(Duration::ZERO, |since| since.elapsed());
                if silent_for >= silence {
                    // Its thread sees the end of the stream and leaves.
                    open.silent_since = None;
                    let what = if open.idle { Shutdown::Read } else { Shutdown::Both };
                    let _ = open.stream.shutdown(what);
                }
                silence.saturating_sub(silent_for)
            });
            // No patience left: one was just closed and will be gone at any moment.
            let patience = if patience.is_zero() { silence } else { patience };
            (connections, _) = self
                .changed
                .wait_timeout(connections, patience)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if connections.stopping {
            return None;
        }
        let stream_of_place = stream.try_clone().ok()?;
        let silent_since = Some(Instant::now());
        let open = Open { stream: stream_of_place, silent_since, idle: false };
        let number = connections.next;
        connections.next += 1;
        connections.open.insert(number, open);
        drop(connections);
        Some(Connection { shared: Arc::clone(self), number, stream, client })
    }

    fn leave(&self, number: u64) {
        let mut connections = self.lock();
        connections.open.remove(&number);
        if connections.open.len() <= self.config.max_connections / 2 {
            connections.complained = false;
        }
        drop(connections);
        self.changed.notify_all();
    }
}

fn accept_loop(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut failing = false;
    loop {
        let accepted = listener.accept();
        if shared.lock().stopping {
            return;
        }
        let (stream, client) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Once for each time that it begins.
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "cannot accept connections; trying again");
                }
                thread::sleep(ACCEPT_ERROR_PAUSE);
                continue;
            }
        };
        failing = false;
        let Some(connection) = shared.admit(stream, client) else { continue };
        let spawned = thread::Builder::new()
            .name("serve".to_owned())
            .spawn(ends_between_forks(move || (connection.shared.serve)(&connection)));
        if let Err(error) = spawned {
            tracing::warn!(%client, %error, "cannot start a thread for a connection");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    /// Not the one that came first.
    #[test]
    fn who_is_silent_for_longest_makes_room() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let limits =
            AcceptorConfig { max_connections: 2, silence_allowed: Duration::from_millis(10) };
        let acceptor = Acceptor::start(listener, limits, |connection| {
            let mut byte = [0];
            while connection.stream().read(&mut byte).is_ok_and(|count| count > 0) {
                connection.heard();
                connection.idle();
                let _ = connection.stream().write_all(&byte);
            }
            // It may have been asked to make room, and can say so.
            let _ = connection.stream().write_all(b"!");
        })
        .unwrap();
        let connect = || TcpStream::connect(acceptor.address()).unwrap();
        let speak = |mut stream: &TcpStream| {
            stream.write_all(b"?").unwrap();
            stream.read_exact(&mut [0]).unwrap();
        };
        let (first, mut second) = (connect(), connect());
        speak(&first);
        speak(&second);
        // The second is the one of which nothing is heard for longest.
        speak(&first);
        let third = connect();
        speak(&third);
        let mut said = Vec::new();
        second.read_to_end(&mut said).unwrap();
        assert_eq!(said, b"!");
        speak(&first);
    }

    #[test]
    fn each_overload_is_told_of() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let limits =
            AcceptorConfig { max_connections: 4, silence_allowed: Duration::from_millis(10) };
        let acceptor = Acceptor::start(listener, limits, |connection| {
            connection.heard();
            let _ = connection.stream().read(&mut [0]);
        })
        .unwrap();
        let connect = || TcpStream::connect(acceptor.address()).unwrap();
        let wait_until = |condition: &dyn Fn(&Connections) -> bool| {
            let mut connections = acceptor.shared.lock();
            while !condition(&connections) {
                (connections, _) = acceptor
                    .shared
                    .changed
                    .wait_timeout(connections, Duration::from_millis(10))
                    .unwrap();
            }
        };
        let staying = connect();
        for _ in 0..2 {
            let others = [(); 4].map(|()| connect());
            wait_until(&|connections| connections.complained);
            drop(others);
            wait_until(&|connections| connections.open.len() == 1);
            assert!(!acceptor.shared.lock().complained);
        }
        drop(staying);
    }

    #[test]
    fn many_may_wait_for_a_place_with_a_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let limits =
            AcceptorConfig { max_connections: 1, silence_allowed: Duration::from_millis(10) };
        let acceptor = Acceptor::start(listener, limits, |connection| {
            connection.heard();
            let _ = connection.stream().read(&mut [0]);
        })
        .unwrap();
        let long = Duration::from_secs(10);
        let connect = || TcpStream::connect_timeout(&acceptor.address(), long).unwrap();
        let waiting = [(); 300].map(|()| connect());
        // The first has the only place, and nobody is accepted before it goes.
        drop(waiting);
    }
}
