//! How a process gets the sockets of an address that others use already.
//!
//! They listen on a UNIX socket with a name in the abstract namespace (unix(7)), which belongs to the
//! network namespace, as the address does, and goes with the last process that has it open. Whoever
//! connects is sent one message with all descriptors, among them the listener's own: so each process
//! admits the next. Nobody is waited for: the message fits into an empty socket buffer, and is all that
//! is ever said.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use millstream_roce::SLOTS;
use socket2::{Domain, SockAddr, Socket, Type};

use super::descriptors;
use crate::credentials::{Credentials, is_own_user, own_user};
use crate::socket::{OpenError, wait};

/// What this version says and understands.
const VERSION: u32 = 1;

/// How many may wait to be admitted.
const BACKLOG: libc::c_int = 128;

/// How long an answer may take before another process is asked, if there is one: the one that took the
/// connection may be stopped, or may have ended.
const ANSWER_PATIENCE: Duration = Duration::from_secs(1);

const GREETING: [u8; 8] = *b"RoCEslot";
const GREETING_LENGTH: usize = GREETING.len() + 12;

/// A socket for each slot, the table and the listener.
const DESCRIPTORS: usize = SLOTS + 2;

/// What the one that is admitted gets.
pub(super) struct Welcome {
    /// One for each slot.
    pub(super) sockets: Vec<Socket>,
    pub(super) table: OwnedFd,
    pub(super) listener: Socket,
}

/// The result of asking.
pub(super) enum Answer {
    Welcome(Welcome),
    /// Nobody is there any more or not yet, or who was there has ended, or does not answer in time.
    Nobody,
}

/// A listener that has the address's name, but does not listen yet. `None` when another has it.
pub(super) fn reserve(address: SocketAddr) -> io::Result<Option<Socket>> {
    let socket = socket()?;
    match socket.bind(&name(address)?) {
        Ok(()) => Ok(Some(socket)),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
        Err(error) => Err(error),
    }
}

/// Lets others come.
pub(super) fn listen(listener: &Socket) -> io::Result<()> {
    listener.listen(BACKLOG)
}

/// Asks those who have the address.
pub(super) fn ask(address: SocketAddr, deadline: Instant) -> Result<Answer, OpenError> {
    let failed =
        |operation| move |source| OpenError::System { address: address.ip(), operation, source };
    let socket = socket().map_err(failed("socket(AF_UNIX)"))?;
    if socket.connect(&name(address).map_err(failed("socket(AF_UNIX)"))?).is_err() {
        // Its last owner has ended; it does not listen yet; too many are waiting.
        return Ok(Answer::Nobody);
    }
    // Of the process that called listen(2), which may have ended since.
    let user = Credentials::of_peer(socket.as_fd()).map_err(failed("SO_PEERCRED"))?.user;
    if !is_own_user(user) {
        return Err(OpenError::OtherUser { address: address.ip(), port: address.port(), user });
    }
    let left = deadline.saturating_duration_since(Instant::now());
    if !wait(socket.as_fd(), libc::POLLIN, left.min(ANSWER_PATIENCE)).map_err(failed("poll"))? {
        return Ok(Answer::Nobody);
    }
    // One byte more, to see that there is none.
    let mut bytes = [0; GREETING_LENGTH + 1];
    match descriptors::receive(socket.as_fd(), &mut bytes, DESCRIPTORS) {
        Err(_) => Ok(Answer::Nobody),
        Ok(message) if message.length == 0 => Ok(Answer::Nobody),
        Ok(message) => understand(address, &bytes, message).map(Answer::Welcome),
    }
}

/// Admits one that waits, if there is one.
pub(super) fn admit(
    listener: &Socket,
    sockets: &[Socket],
    table: &OwnedFd,
) -> io::Result<Option<()>> {
    let (peer, _) = match listener.accept() {
        Ok(accepted) => accepted,
        // Another process was faster, or it has gone.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ECONNABORTED | libc::EINTR)) => {
            return Ok(Some(()));
        }
        Err(error) => return Err(error),
    };
    // It refuses us, too, and knows why. No word that it could wait for.
    if is_own_user(Credentials::of_peer(peer.as_fd())?.user) {
        let all = sockets.iter().map(AsFd::as_fd);
        let all: Vec<_> = all.chain([table.as_fd(), listener.as_fd()]).collect();
        // Into an empty buffer. If it fails, the other one asks again.
        let _ = descriptors::send(peer.as_fd(), &greeting(), &all);
    }
    Ok(Some(()))
}

/// What is said, of which the numbers are little-endian.
fn greeting() -> [u8; GREETING_LENGTH] {
    let mut bytes = [0; GREETING_LENGTH];
    bytes[..8].copy_from_slice(&GREETING);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&(SLOTS as u32).to_le_bytes());
    bytes[16..].copy_from_slice(&own_user().to_le_bytes());
    bytes
}

/// Believes nothing.
fn understand(
    address: SocketAddr,
    bytes: &[u8],
    message: descriptors::Message,
) -> Result<Welcome, OpenError> {
    let ip = address.ip();
    if message.descriptors_missing {
        let source = io::Error::from_raw_os_error(libc::EMFILE);
        let operation = "receiving the descriptors of its sockets";
        return Err(OpenError::System { address: ip, operation, source });
    }
    let strange = || OpenError::OtherVersion { address: ip, port: address.port() };
    if message.too_many
        || bytes.get(..message.length) != Some(&greeting()[..])
        || message.descriptors.len() != DESCRIPTORS
    {
        return Err(strange());
    }
    let mut rest = message.descriptors.into_iter();
    let sockets: Vec<Socket> = rest.by_ref().take(SLOTS).map(Socket::from).collect();
    let (Some(table), Some(listener)) = (rest.next(), rest.next().map(Socket::from)) else {
        return Err(strange());
    };
    let is_ours = |socket: &Socket| {
        socket.r#type().is_ok_and(|kind| kind == Type::DGRAM)
            && socket.local_addr().is_ok_and(|local| local.as_socket() == Some(address))
    };
    let listens = listener.is_listener().unwrap_or(false);
    if !listens || !sockets.iter().all(is_ours) {
        return Err(strange());
    }
    Ok(Welcome { sockets, table, listener })
}

fn socket() -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// The name of an address. The zero in front makes it one of the abstract namespace.
fn name(address: SocketAddr) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0millstream/{}/{}", address.ip(), address.port()))
}
