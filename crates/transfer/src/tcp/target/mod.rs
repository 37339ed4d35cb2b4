//! The side that has memory: it does the requests of initiators.
//!
//! Each connection has a thread, which looks for a request for a while, and then sleeps in a call that receives: a
//! request costs no hand-off. The first bytes
//! say which framing a connection has.

mod forwarding;
mod input;
mod numbered;
mod old;
mod pace;
mod passage;
mod registry;

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use millstream_metadata::{Acceptor, AcceptorConfig, Connection as Accepted, Gate, begins_tls};
use millstream_net::Polling;
use millstream_net::stream::{Readiness, wait_for_stream};
use socket2::SockRef;

use self::input::Input;
use self::pace::{PATIENCE, Pace};
pub(super) use self::passage::Relay;
use self::registry::Registry;
use super::line::{Layer, Line};
use super::message::Hello;
use super::original::{REQUEST_LENGTH, Request};
use super::pieces::Pieces;
use crate::memory::Memory;

/// How often a thread that waits for an initiator looks whether its time is over.
const LOOK: Duration = Duration::from_millis(500);

/// Answers at a socket. Dropping it closes its connections.
pub(super) struct Target {
    acceptor: Acceptor,
    shared: Arc<Shared>,
}

/// What all connections have.
pub(super) struct Shared {
    memory: Arc<Memory>,
    incarnation: u64,
    registry: Registry,
    gate: Option<Gate>,
    /// Ways to the segments of others, where this process is a relay.
    relay: OnceLock<Relay>,
    polling: Arc<Polling>,
}

impl Shared {
    /// From here on it is a relay.
    pub(super) fn relays(&self, relay: Relay) {
        let _ = self.relay.set(relay);
    }

    /// If it is one.
    pub(super) fn relay(&self) -> Option<&Relay> {
        self.relay.get()
    }

    /// Ends what is under way to the segments of others.
    pub(super) fn end_forwarding(&self) {
        if let Some(relay) = self.relay.get() {
            relay.stop();
            self.registry.end_forwarding();
        }
    }
}

impl Target {
    pub(super) fn start(
        listener: TcpListener,
        max_connections: usize,
        memory: Arc<Memory>,
        incarnation: u64,
        gate: Option<Gate>,
        polling: Arc<Polling>,
    ) -> io::Result<Self> {
        let config =
            AcceptorConfig { max_connections, silence_allowed: Duration::from_millis(250) };
        let (registry, relay) = (Registry::default(), OnceLock::new());
        let shared = Shared { memory, incarnation, registry, gate, relay, polling };
        let shared = Arc::new(shared);
        let all = Arc::clone(&shared);
        let serve = move |accepted: &Accepted| {
            if let Err(error) = serve(accepted, &all) {
                tracing::debug!(client = %accepted.client(), %error, "connection for memory ended");
            }
        };
        Ok(Self { acceptor: Acceptor::start(listener, config, serve)?, shared })
    }

    /// How many connections are being served.
    pub(super) fn served(&self) -> usize {
        self.acceptor.served()
    }

    /// Ends a connection by its number; whether nothing of it is done any more. Waits for that, up to some seconds.
    pub(super) fn fence(shared: &Shared, connection: u128) -> bool {
        shared.registry.fence(connection)
    }

    pub(super) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(super) const fn port(&self) -> u16 {
        self.acceptor.address().port()
    }
}

fn serve(accepted: &Accepted, shared: &Shared) -> io::Result<()> {
    accepted.awaited();
    let stream = accepted.stream();
    stream.set_nodelay(true)?;
    let mut session = None;
    if let Some(gate) = &shared.gate {
        // Until then it makes room for others.
        session = gate.admit(stream, Instant::now() + PATIENCE).map_err(io::Error::other)?;
        stream.set_write_timeout(None)?;
    }
    stream.set_read_timeout(Some(LOOK))?;
    // Who was cut off is forgotten.
    let keep_alive = socket2::TcpKeepalive::new().with_time(PATIENCE).with_interval(PATIENCE);
    SockRef::from(stream).set_tcp_keepalive(&keep_alive)?;
    let layer = session.map(|session| Layer::Tls(Box::new(session)));
    let is_tls = layer.is_some();
    let mut input = Input::new(accepted, layer, &shared.polling);
    let Some(first) = input.header::<REQUEST_LENGTH>()? else { return Ok(()) };
    if Hello::begins(&first) {
        return numbered::serve(input, shared, &first);
    }
    match Request::parse(&first) {
        _ if is_tls => Err(nonsense("over TLS it says no hello")),
        None if begins_tls(&first) => {
            Err(nonsense("it speaks TLS, and no certificate is set here"))
        }
        Some(request) => old::serve(input, shared, request),
        None => Err(nonsense("it begins with no request")),
    }
}

fn nonsense(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// What a connection sends.
struct Output<'a> {
    stream: &'a TcpStream,
    line: &'a mut Line,
}

impl Output<'_> {
    /// Sends all of these.
    fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let mut pace = Pace::later(bytes.len() as u64);
        while !bytes.is_empty() {
            let sent = self.line.send(self.stream, bytes);
            bytes = &bytes[self.moved(sent, &mut pace)?..];
        }
        self.finish(&mut pace)
    }

    /// Sends some of what is left of the pieces, behind the rest of `before` and in front of `after`.
    fn send_pieces(
        &mut self,
        pieces: &mut Pieces,
        before: &[u8],
        after: &[u8],
        pace: &mut Pace,
    ) -> io::Result<usize> {
        let sent = self.line.send_pieces(self.stream, pieces, before, after);
        self.moved(sent, pace)
    }

    /// So many bytes were sent; none where there was no room, which is waited for.
    fn moved(&self, sent: io::Result<usize>, pace: &mut Pace) -> io::Result<usize> {
        match sent {
            Ok(sent) => {
                pace.moved(sent);
                Ok(sent)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait_for_room(self.stream, pace)?;
                Ok(0)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Waits until all is with the kernel.
    fn finish(&mut self, pace: &mut Pace) -> io::Result<()> {
        while self.line.has_unsent() {
            match self.line.flush(self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait_for_room(self.stream, pace)?;
                }
                result => result?,
            }
        }
        Ok(())
    }
}

/// Waits until there is room to send.
fn wait_for_room(stream: &TcpStream, pace: &mut Pace) -> io::Result<()> {
    pace.wait();
    wait_for_stream(stream.as_fd(), Readiness::Writable, LOOK)?;
    pace.check()
}
