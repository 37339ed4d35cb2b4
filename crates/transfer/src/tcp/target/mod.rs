//! The side that has memory: it does the requests of initiators.
//!
//! Each connection has a thread, which sleeps in a call that receives: a request costs no hand-off. The first bytes
//! say which framing a connection has.

mod input;
mod numbered;
mod old;
mod pace;
mod registry;

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_metadata::{Acceptor, AcceptorConfig, Connection as Accepted, Gate};
use millstream_net::stream::{Readiness, send_slice, wait_for_stream};
use socket2::SockRef;

use self::input::Input;
use self::pace::{PATIENCE, Pace};
use self::registry::Registry;
use super::message::Hello;
use super::original::{REQUEST_LENGTH, Request};
use crate::memory::Memory;

/// How often a thread that waits for an initiator looks whether its time is over.
const LOOK: Duration = Duration::from_millis(500);

/// Answers at a socket. Dropping it closes its connections.
pub(super) struct Target {
    acceptor: Acceptor,
}

/// What all connections have.
struct Shared {
    memory: Arc<Memory>,
    incarnation: u64,
    registry: Registry,
    gate: Option<Gate>,
}

impl Target {
    pub(super) fn start(
        listener: TcpListener,
        max_connections: usize,
        memory: Arc<Memory>,
        incarnation: u64,
        gate: Option<Gate>,
    ) -> io::Result<Self> {
        let config =
            AcceptorConfig { max_connections, silence_allowed: Duration::from_millis(250) };
        let shared = Shared { memory, incarnation, registry: Registry::default(), gate };
        let serve = move |accepted: &Accepted| {
            if let Err(error) = serve(accepted, &shared) {
                tracing::debug!(client = %accepted.client(), %error, "connection for memory ended");
            }
        };
        Ok(Self { acceptor: Acceptor::start(listener, config, serve)? })
    }

    pub(super) const fn port(&self) -> u16 {
        self.acceptor.address().port()
    }
}

fn serve(accepted: &Accepted, shared: &Shared) -> io::Result<()> {
    accepted.awaited();
    let stream = accepted.stream();
    stream.set_nodelay(true)?;
    if let Some(gate) = &shared.gate {
        // Until then it makes room for others.
        gate.admit(stream, Instant::now() + PATIENCE).map_err(io::Error::other)?;
        stream.set_write_timeout(None)?;
    }
    stream.set_read_timeout(Some(LOOK))?;
    // Who was cut off is forgotten.
    let keep_alive = socket2::TcpKeepalive::new().with_time(PATIENCE).with_interval(PATIENCE);
    SockRef::from(stream).set_tcp_keepalive(&keep_alive)?;
    let mut input = Input::new(accepted);
    let Some(first) = input.header::<REQUEST_LENGTH>()? else { return Ok(()) };
    if Hello::begins(&first) {
        return numbered::serve(input, shared, &first);
    }
    match Request::parse(&first) {
        Some(request) => old::serve(input, shared, request),
        None => Err(nonsense("it begins with no request")),
    }
}

fn nonsense(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Sends all of these.
fn send_bytes(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let mut pace = Pace::new(bytes.len() as u64);
    while !bytes.is_empty() {
        match send_slice(stream.as_fd(), bytes) {
            Ok(sent) => {
                bytes = &bytes[sent..];
                pace.moved(sent);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait_for_room(stream, &pace)?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until there is room to send.
fn wait_for_room(stream: &TcpStream, pace: &Pace) -> io::Result<()> {
    wait_for_stream(stream.as_fd(), Readiness::Writable, LOOK)?;
    pace.check()
}
