//! One request to a peer, one reply, one deadline.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::exchange::{Attempts, Exchange, Step};
use crate::resolver::Resolver;
use crate::stream::Until;
use crate::{
    DEFAULT_FRAME_LIMIT, Frame, FrameError, FrameType, HostPort, PeerTls, TlsError, Token,
    TokenError,
};

/// Limits of a [`Client`].
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// The longest wait for one address of the peer to accept (`MC_HANDSHAKE_CONNECT_TIMEOUT`).
    pub connect_timeout: Duration,
    /// The longest that a whole call takes.
    pub call_timeout: Duration,
    /// The longest reply accepted.
    pub frame_limit: usize,
    /// What a peer must prove to have, and is proved to. With one, peers without it are not asked.
    pub token: Option<Token>,
    /// TLS with peers. With it, those without are not asked.
    pub tls: Option<PeerTls>,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(10),
            frame_limit: DEFAULT_FRAME_LIMIT,
            token: None,
            tls: None,
        }
    }
}

/// Calls peers. Every call is a connection of its own.
#[derive(Clone, Debug, Default)]
pub struct Client {
    config: ClientConfig,
}

/// A call that failed: which peer, and how.
#[derive(Debug, Error)]
#[error("peer {peer}: {kind}")]
pub struct CallError {
    /// The peer's name.
    pub peer: HostPort,
    /// What happened.
    #[source]
    pub kind: CallErrorKind,
}

/// How a call failed.
#[derive(Debug, Error)]
pub enum CallErrorKind {
    /// The name has no address.
    #[error("its host name does not resolve ({0}): {advice}", advice = name_advice(_0))]
    Resolve(io::Error),
    /// Nobody listens there, nor at any other address of the name to which there is a way: a peer that was there has ended.
    #[error("connection to {address} refused: no process listens there")]
    Refused {
        /// The address tried last.
        address: SocketAddr,
    },
    /// No answer to the connection attempt.
    #[error(
        "no answer from {address} within {waited:?}: is its machine up, and does a firewall let the \
         connection through?"
    )]
    Unreachable {
        /// The address tried last.
        address: SocketAddr,
        /// How long was waited for it.
        waited: Duration,
    },
    /// Connecting failed in another way.
    #[error("cannot connect to {address}: {error}{}", way_advice(error))]
    Connect {
        /// The address tried last.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// It accepted the connection but did not answer.
    #[error(
        "it accepted the connection but gave no whole reply within {waited:?}: has it stopped, or is \
         it something else than a node?"
    )]
    NoReply {
        /// How long was waited.
        waited: Duration,
    },
    /// It closed the connection instead of answering.
    #[error("it closed the connection without a whole reply: is it a node?")]
    Closed,
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Io(io::Error),
    /// The reply is no frame of this protocol.
    #[error("its reply is malformed ({0}): is it a node?")]
    Frame(FrameError),
    /// The reply is to another kind of request.
    #[error("it answered a {asked:?} request with a {got:?} reply")]
    WrongType {
        /// What was asked.
        asked: FrameType,
        /// What was answered.
        got: FrameType,
    },
    /// The peer's token and ours do not go together.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// There is no TLS with the peer.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// As many calls are under way as may be at a time.
    #[error("{limit} calls to peers are under way already, as many as may be: try again later")]
    TooMany {
        /// How many may be.
        limit: usize,
    },
    /// The [`crate::Caller`] was dropped before there was a reply.
    #[error("the call was given up, since this side closes")]
    Ended,
    /// The reply's JSON does not say what it should.
    #[error("its reply makes no sense: {0}")]
    Meaning(String),
}

/// What to do about a name that has no address.
fn name_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::TimedOut => "is the name server up? (`getent hosts NAME` asks it)",
        _ => "is it spelled right?",
    }
}

/// What to do about a way that is not there.
fn way_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable => {
            ": is the interface up? (`ip route get ADDRESS` shows the way)"
        }
        _ => "",
    }
}

impl Client {
    /// A client with these limits.
    pub const fn new(config: ClientConfig) -> Self {
        Self { config }
    }

    /// Its limits.
    pub const fn config(&self) -> &ClientConfig {
        &self.config
    }

    /// Sends a request and waits for the reply to it.
    pub fn call(&self, peer: &HostPort, request: &Frame) -> Result<Frame, CallError> {
        self.exchange(peer, request).map_err(|kind| CallError { peer: peer.clone(), kind })
    }

    fn exchange(&self, peer: &HostPort, request: &Frame) -> Result<Frame, CallErrorKind> {
        let deadline = deadline(self.config.call_timeout);
        let addresses = Resolver::system()
            .resolve_until(&peer.host, deadline)
            .map_err(CallErrorKind::Resolve)?;
        let attempts = Attempts::new(addresses, peer.port, self.config.connect_timeout);
        let stream =
            connect(attempts, deadline).inspect_err(|_| Resolver::system().forget(&peer.host))?;
        // Not having it costs time, not correctness.
        let _ = stream.set_nodelay(true);
        let mut exchange = Exchange::new(request, self.config.frame_limit);
        if let Some(tls) = &self.config.tls {
            exchange.encrypt(tls.calling(&peer.host)?);
        }
        if let Some(token) = self.config.token {
            exchange.prove(token, stream.peer_addr().map_err(CallErrorKind::Io)?)?;
        }
        let mut buffer = [0; 4096];
        loop {
            match exchange.step(Until::new(&stream, deadline), &mut buffer)? {
                Step::Done(reply) => return Ok(reply),
                Step::More => {}
                Step::Blocked => {
                    return Err(CallErrorKind::NoReply { waited: self.config.call_timeout });
                }
            }
        }
    }
}

/// When a time-out that begins now is over. None is longer than a year, since the clock ends somewhere.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(Duration::from_secs(365 * 24 * 3600))
}

/// A connection to the first address that accepts one.
fn connect(mut attempts: Attempts, deadline: Instant) -> Result<TcpStream, CallErrorKind> {
    loop {
        let attempt = attempts.next(deadline.saturating_duration_since(Instant::now()))?;
        match TcpStream::connect_timeout(&attempt.address, attempt.wait) {
            Ok(stream) => return Ok(stream),
            Err(error) => attempts.failed(attempt, error),
        }
    }
}
