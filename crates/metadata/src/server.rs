//! The side that answers: one thread accepts, one short-lived thread serves each connection.
//!
//! A connection carries one request. Both directions have deadlines, and while as many connections
//! are open as may be, one that keeps its request back for long is closed for the next: silent
//! clients cannot keep others out.

use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::stream::{drain, read_frame, write_frame};
use crate::{DEFAULT_FRAME_LIMIT, Frame};

/// How long the accepting thread rests after an error, such as having no file descriptor left.
const ACCEPT_ERROR_PAUSE: Duration = Duration::from_millis(20);

/// Limits of a [`Server`].
#[derive(Clone, Copy, Debug)]
pub struct ServerConfig {
    /// Connections served at a time.
    pub max_connections: usize,
    /// How long a client may take to send its request, and again to take the reply.
    pub client_timeout: Duration,
    /// How long a client may keep its request back while others wait for a place.
    pub silence_allowed: Duration,
    /// The longest request accepted.
    pub frame_limit: usize,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            max_connections: 32,
            client_timeout: Duration::from_secs(5),
            silence_allowed: Duration::from_millis(250),
            frame_limit: DEFAULT_FRAME_LIMIT,
        }
    }
}

/// What answers requests. Called from several threads at a time.
pub trait Handler: Send + Sync + 'static {
    /// The reply to a request; `None` closes the connection without one.
    fn handle(&self, client: SocketAddr, request: Frame) -> Option<Frame>;
}

/// A running server. Dropping it closes its connections and waits for its threads.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    listener: Arc<TcpListener>,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    config: ServerConfig,
    handler: Arc<dyn Handler>,
    connections: Mutex<Connections>,
    changed: Condvar,
}

#[derive(Default)]
struct Connections {
    stopping: bool,
    next: u64,
    /// By number: the smallest is the oldest.
    open: BTreeMap<u64, Open>,
}

struct Open {
    stream: TcpStream,
    /// Since when its request is awaited; `None` once that is there, or no longer wanted.
    silent_since: Option<Instant>,
}

impl Server {
    /// Listens at `address` (port 0: any free one) and answers with `handler`.
    pub fn start(
        address: SocketAddr,
        config: ServerConfig,
        handler: Arc<dyn Handler>,
    ) -> io::Result<Self> {
        Self::serve(TcpListener::bind(address)?, config, handler)
    }

    /// Answers at a socket that listens already, for those who must know the port first.
    pub fn serve(
        listener: TcpListener,
        config: ServerConfig,
        handler: Arc<dyn Handler>,
    ) -> io::Result<Self> {
        let listener = Arc::new(listener);
        let shared = Arc::new(Shared {
            config,
            handler,
            connections: Mutex::default(),
            changed: Condvar::new(),
        });
        let acceptor = thread::Builder::new().name("metadata-accept".to_owned()).spawn({
            let (listener, shared) = (Arc::clone(&listener), Arc::clone(&shared));
            move || accept_loop(&listener, &shared)
        })?;
        Ok(Self { address: listener.local_addr()?, listener, shared, acceptor: Some(acceptor) })
    }

    /// Where it listens.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting, closes what is open, and waits until no request is being handled.
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

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for one more connection, and enters it. `None` when the server stops.
    fn admit(&self, stream: &TcpStream) -> Option<u64> {
        let mut connections = self.lock();
        while connections.open.len() >= self.config.max_connections.max(1) {
            if connections.stopping {
                return None;
            }
            let silence = self.config.silence_allowed;
            let oldest = connections.open.values_mut().find(|open| open.silent_since.is_some());
            let patience = oldest.map_or(silence, |open| {
                let silent_for = open.silent_since.map_or(Duration::ZERO, |since| since.elapsed());
                if silent_for >= silence {
                    // Its thread sees the end of the stream and leaves.
                    open.silent_since = None;
                    let _ = open.stream.shutdown(Shutdown::Both);
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
        let stream = stream.try_clone().ok()?;
        let number = connections.next;
        connections.next += 1;
        connections.open.insert(number, Open { stream, silent_since: Some(Instant::now()) });
        Some(number)
    }

    fn leave(&self, number: u64) {
        self.lock().open.remove(&number);
        self.changed.notify_all();
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("config", &self.config).finish_non_exhaustive()
    }
}

fn accept_loop(listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        let accepted = listener.accept();
        if shared.lock().stopping {
            return;
        }
        let (stream, client) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                thread::sleep(ACCEPT_ERROR_PAUSE);
                continue;
            }
        };
        let Some(number) = shared.admit(&stream) else { continue };
        let guard = Leave { shared: Arc::clone(shared), number };
        let spawned = thread::Builder::new()
            .name("metadata-serve".to_owned())
            .spawn(move || serve(&guard, &stream, client));
        if let Err(error) = spawned {
            tracing::warn!(%client, %error, "cannot start a thread for a connection");
        }
    }
}

/// Takes a connection off the list when its thread ends, however it ends.
struct Leave {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Leave {
    fn drop(&mut self) {
        self.shared.leave(self.number);
    }
}

fn serve(connection: &Leave, stream: &TcpStream, client: SocketAddr) {
    let shared = &*connection.shared;
    let config = &shared.config;
    // Not having it costs time, not correctness.
    let _ = stream.set_nodelay(true);
    let request =
        match read_frame(stream, config.frame_limit, Instant::now() + config.client_timeout) {
            Ok(request) => request,
            Err(error) => {
                tracing::debug!(%client, ?error, "no request");
                return;
            }
        };
    if let Some(open) = shared.lock().open.get_mut(&connection.number) {
        open.silent_since = None;
    }
    let Some(reply) = shared.handler.handle(client, request) else { return };
    // From here on it can be silent again, and must make room if others need it.
    if let Some(open) = shared.lock().open.get_mut(&connection.number) {
        open.silent_since = Some(Instant::now());
    }
    let deadline = Instant::now() + config.client_timeout;
    if let Err(error) = write_frame(stream, &reply, deadline) {
        tracing::debug!(%client, ?error, "reply not delivered");
        return;
    }
    // The client closes first.
    let _ = stream.shutdown(Shutdown::Write);
    drain(stream, deadline);
}
