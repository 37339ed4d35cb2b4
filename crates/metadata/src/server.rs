//! The side that answers requests.
//!
//! A connection carries one request, and both directions have deadlines.

use std::fmt;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::acceptor::{Acceptor, AcceptorConfig, Connection};
use crate::exchange::StreamError;
use crate::stream::{drain, over, read_frame, write_frame};
use crate::token::verdict;
use crate::{DEFAULT_FRAME_LIMIT, Frame, FrameError, FrameType, Gate, TokenError, begins_tls};

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
pub struct Server {
    acceptor: Acceptor,
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
        Self::guarded(listener, config, None, handler)
    }

    /// As [`Server::serve`], and answers those only whom the gate admits, where there is one.
    pub fn guarded(
        listener: TcpListener,
        config: ServerConfig,
        gate: Option<Gate>,
        handler: Arc<dyn Handler>,
    ) -> io::Result<Self> {
        let limits = AcceptorConfig {
            max_connections: config.max_connections,
            silence_allowed: config.silence_allowed,
        };
        let serve = move |connection: &Connection| {
            serve(connection, &config, gate.as_ref(), &*handler);
        };
        Ok(Self { acceptor: Acceptor::start(listener, limits, serve)? })
    }

    /// Where it listens.
    pub const fn address(&self) -> SocketAddr {
        self.acceptor.address()
    }

    /// Stops accepting, closes what is open, and waits until no request is being handled.
    pub fn stop(&mut self) {
        self.acceptor.stop();
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Server").field(&self.acceptor).finish()
    }
}

fn serve(
    connection: &Connection,
    config: &ServerConfig,
    gate: Option<&Gate>,
    handler: &dyn Handler,
) {
    let (stream, client) = (connection.stream(), connection.client());
    // Not having it costs time, not correctness.
    let _ = stream.set_nodelay(true);
    let in_time = || Instant::now() + config.client_timeout;
    let mut session = match gate.map(|gate| gate.admit(stream, in_time())).transpose() {
        Ok(session) => session.flatten(),
        Err(error) => {
            tracing::debug!(%client, %error, "a caller is not admitted");
            return;
        }
    };
    let request = match read_frame(over(&mut session, stream, in_time()), config.frame_limit) {
        Ok(request) => request,
        Err(StreamError::Frame(FrameError::TooLong { length, .. }))
            if begins_tls(&length.to_le_bytes()) =>
        {
            tracing::debug!(%client, "a caller speaks TLS, and no certificate is set here");
            return;
        }
        Err(error) => {
            tracing::debug!(%client, ?error, "no request");
            return;
        }
    };
    connection.heard();
    let reply = match request.frame_type {
        FrameType::Token => Some(verdict(&TokenError::NoneThere)),
        _ => handler.handle(client, request),
    };
    let Some(reply) = reply else { return };
    connection.awaited();
    let deadline = Instant::now() + config.client_timeout;
    if let Err(error) = write_frame(over(&mut session, stream, deadline), &reply) {
        tracing::debug!(%client, ?error, "reply not delivered");
        return;
    }
    // The client closes first.
    let _ = stream.shutdown(Shutdown::Write);
    drain(stream, deadline);
}
