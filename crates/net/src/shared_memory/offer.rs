//! The side whose memory it is: a table of registrations, and a thread that lets peers in.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};
use thiserror::Error;

use super::life::Tenure;
use super::memory::SharedMemory;
use super::message::{self, Message, Refusal};
use super::presence::Presence;
use super::process::{Process, ProcessError, own_start_time};
use super::table::{Entry, Key, Table};
use crate::credentials::{Credentials, is_own_user, why_another};
use crate::ends_between_forks;
use crate::shared_address::descriptors;

/// The most connections of peers that are let in at a time. A process may have several.
pub const MAX_USERS: usize = 256;

/// Connections that have said nothing yet: so many, and for so long.
const MAX_STRANGERS: usize = 64;
const STRANGER_PATIENCE: Duration = Duration::from_secs(1);

/// After a connection could not be accepted, as for want of descriptors. The socket stays readable.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why memory cannot be offered.
#[derive(Debug, Error)]
#[error("{operation}: {error}")]
pub struct OfferError {
    /// What did not work.
    operation: &'static str,
    /// Why.
    error: io::Error,
}

/// The table is full.
#[derive(Clone, Copy, Debug, Error)]
#[error("no more than {capacity} pieces of memory can be registered for other processes")]
pub struct TableFull {
    /// How many entries it has.
    pub capacity: usize,
}

/// A peer has said that it accesses the memory, and has not said that it has ended.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("process {pid} still accesses it: it may be stopped, and must go on or end first")]
pub struct InUse {
    /// Its process number.
    pub pid: i32,
}

/// Registered memory that processes of this user on this host can read and write. Dropping it sends
/// them away; registrations live on until they are dropped.
#[derive(Debug)]
pub struct Offer {
    shared: Arc<Shared>,
    socket: String,
    /// Closed, it ends the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread and registrations have in common.
#[derive(Debug)]
struct Shared {
    incarnation: u64,
    table: Table,
    /// A number that peers read and write, to see whether they may.
    canary: AtomicU64,
    started: u64,
    memories: Mutex<HashMap<u64, Arc<SharedMemory>>>,
    users: Mutex<Vec<Arc<User>>>,
}

/// A process that was let in.
#[derive(Debug)]
struct User {
    process: Process,
    presence: Presence,
    socket: Socket,
    /// We do not talk to it any more. It still has what it has mapped, and is looked at by who revokes.
    sent_away: AtomicBool,
}

impl User {
    /// Whether it may still be accessing something. It closes its end when it does not any more.
    fn is_there(&self) -> bool {
        self.process.is_connected(self.socket.as_fd())
    }

    fn send_away(&self) {
        self.sent_away.store(true, Ordering::Relaxed);
        // Only this direction, so that it is still seen when the other end closes.
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}

impl Offer {
    /// Begins to let peers in. The incarnation is a random number by which they know that they have the
    /// right process. The table has so many entries, up to [`super::MAX_ENTRIES`].
    pub fn start(incarnation: u64, capacity: usize) -> Result<Self, OfferError> {
        let failed = |operation| move |error| OfferError { operation, error };
        let socket = format!("millstream/shm/{incarnation:016x}");
        let listener = Socket::new(Domain::UNIX, Type::SEQPACKET, None)
            .and_then(|listener| {
                listener.set_nonblocking(true)?;
                listener.bind(&socket_address(&socket)?)?;
                listener.listen(libc::SOMAXCONN)?;
                Ok(listener)
            })
            .map_err(failed("listening at a UNIX socket"))?;
        let shared = Arc::new(Shared {
            incarnation,
            table: Table::new(capacity).map_err(failed("making a sealed memfd"))?,
            canary: AtomicU64::new(incarnation.rotate_left(32)),
            started: own_start_time().map_err(failed("reading /proc/self/stat"))?,
            memories: Mutex::default(),
            users: Mutex::default(),
        });
        let (stop, stopped) = UnixStream::pair().map_err(failed("socketpair"))?;
        let thread = thread::Builder::new().name("shm".to_owned()).spawn({
            let shared = Arc::clone(&shared);
            ends_between_forks(move || shared.serve(&listener, &stopped))
        });
        let thread = thread.map_err(failed("starting a thread"))?;
        Ok(Self { shared, socket, stop: Some(stop), thread: Some(thread) })
    }

    /// The name of its socket in the abstract namespace, without the zero in front (unix(7)).
    pub fn socket(&self) -> &str {
        &self.socket
    }

    /// Lets peers access this memory. With a `memory` they map it; without, it is read and written by
    /// process_vm_readv(2) and process_vm_writev(2).
    pub fn register(
        &self,
        address: u64,
        length: u64,
        memory: Option<&Arc<SharedMemory>>,
    ) -> Result<Registration, TableFull> {
        let (shared, mappable) = (Arc::clone(&self.shared), memory.is_some());
        let capacity = shared.table.capacity();
        let entry = Entry { address, length, mappable };
        let mut memories = shared.memories();
        let key = shared.table.insert(entry).ok_or(TableFull { capacity })?;
        if let Some(memory) = memory {
            memories.insert(key.0, Arc::clone(memory));
        }
        drop(memories);
        Ok(Registration { shared, key, mappable, over: AtomicBool::new(false) })
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Memory that peers can access. Dropping it ends that, and returns when nobody accesses it any more:
/// memory that peers have mapped is theirs too, and is waited for no longer than [`PATIENCE`]; the
/// user's own is waited for as long as it takes.
#[derive(Debug)]
pub struct Registration {
    shared: Arc<Shared>,
    key: Key,
    mappable: bool,
    over: AtomicBool,
}

/// How long a peer that does not go on is waited for.
pub const PATIENCE: Duration = Duration::from_secs(2);

impl Registration {
    /// By which peers ask for it.
    pub fn key(&self) -> Key {
        self.key
    }

    /// Lets nobody in any more, and waits for those who are inside, for so long.
    pub fn revoke(&self, patience: Duration) -> Result<(), InUse> {
        if self.over.load(Ordering::Acquire) {
            return Ok(());
        }
        let deadline = Instant::now() + patience;
        self.shared.memories().remove(&self.key.0);
        self.shared.table.revoke(self.key);
        // Who is let in from here on sees the table as it is now.
        let users = self.shared.users().clone();
        for user in users {
            if !user.presence.wait_until_left(self.key, deadline, || user.is_there()) {
                return Err(InUse { pid: user.process.pid() });
            }
        }
        if !self.over.swap(true, Ordering::AcqRel) {
            self.shared.table.free(self.key);
        }
        Ok(())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        while let Err(error) = self.revoke(PATIENCE) {
            tracing::warn!(%error, "shared memory is unregistered");
            if self.mappable {
                return;
            }
        }
    }
}

impl Shared {
    fn memories(&self) -> MutexGuard<'_, HashMap<u64, Arc<SharedMemory>>> {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn users(&self) -> MutexGuard<'_, Vec<Arc<User>>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the thread does.
    fn serve(&self, listener: &Socket, stop: &UnixStream) {
        // Without, peers ask the kernel each time.
        let _tenure = self.table.life().and_then(|word| {
            let begun = Tenure::begin(word);
            begun.inspect_err(|error| tracing::debug!(%error, "no robust list")).ok()
        });
        let mut strangers: Vec<(Socket, Instant)> = Vec::new();
        let mut ready: Vec<libc::pollfd> = Vec::new();
        let mut failed: Option<Instant> = None;
        loop {
            let users = self.users().clone();
            let paused = failed.is_some_and(|failed| failed.elapsed() < ACCEPT_PAUSE);
            let accepting = !paused && strangers.len() < MAX_STRANGERS;
            ready.clear();
            ready.extend([poll_for(stop.as_fd()), poll_if(accepting, listener.as_fd())]);
            ready.extend(strangers.iter().map(|(socket, _)| poll_for(socket.as_fd())));
            for user in &users {
                let socket = poll_for(user.socket.as_fd());
                // That it has hung up is told in any case.
                let silent = user.sent_away.load(Ordering::Relaxed);
                ready.push(if silent { libc::pollfd { events: 0, ..socket } } else { socket });
                ready.push(poll_for(user.process.descriptor()));
            }
            let patience: i32 = match (paused, strangers.is_empty()) {
                (true, _) => ACCEPT_PAUSE.as_millis() as i32,
                (false, true) => -1,
                (false, false) => STRANGER_PATIENCE.as_millis() as i32,
            };
            // SAFETY: so many pollfds, alive during the call.
            let found =
                unsafe { libc::poll(ready.as_mut_ptr(), ready.len() as libc::nfds_t, patience) };
            if found < 0 {
                let error = io::Error::last_os_error();
                if error.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                tracing::error!(%error, "shared memory: no peer is let in any more");
                return;
            }
            if ready[0].revents != 0 {
                return;
            }
            let of_users = 2 + strangers.len();
            for (user, ready) in users.iter().zip(ready[of_users..].chunks_exact(2)) {
                if ready[0].revents & libc::POLLIN != 0 && !self.answer(user) {
                    user.send_away();
                }
            }
            self.users().retain(|user| user.is_there());
            let mut index = 2;
            strangers.retain(|(socket, since)| {
                let heard = ready[index].revents != 0;
                index += 1;
                if heard {
                    self.greet(socket);
                }
                !heard && since.elapsed() < STRANGER_PATIENCE
            });
            if ready[1].revents != 0 {
                match listener.accept() {
                    Ok((socket, _)) if is_ours(&socket) => {
                        strangers.push((socket, Instant::now()));
                    }
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => {
                        tracing::debug!(%error, "a peer was not let in");
                        failed = Some(Instant::now());
                    }
                }
            }
        }
    }

    /// Hears who it is, and lets it in or not.
    fn greet(&self, socket: &Socket) {
        let mut bytes = [0; message::LENGTH + 1];
        let Ok(message) = descriptors::receive(socket.as_fd(), &mut bytes, 0) else { return };
        let hello = bytes.get(..message.length).and_then(Message::parse);
        // Of another version, or none of us.
        let Some(Message::Hello { incarnation, started }) = hello else { return };
        if let Err(refusal) = self.admit(socket, incarnation, started) {
            let _ = descriptors::send(socket.as_fd(), &Message::Refusal(refusal).emit(), &[]);
        }
    }

    fn admit(&self, socket: &Socket, incarnation: u64, started: u64) -> Result<(), Refusal> {
        let credentials = Credentials::of_peer(socket.as_fd()).map_err(|_| Refusal::NoProcess)?;
        if incarnation != self.incarnation {
            return Err(Refusal::OtherIncarnation);
        }
        let no_means = |error: io::Error| {
            tracing::warn!(%error, pid = credentials.pid, "shared memory: a peer was not let in");
            Refusal::NoMeans
        };
        let process = Process::open(credentials.pid, started);
        let process = process.map_err(|error| match error {
            ProcessError::Open { error, .. } => no_means(error),
            _ => Refusal::NoProcess,
        })?;
        let (presence, file) = Presence::new().map_err(no_means)?;
        let socket = socket.try_clone().map_err(no_means)?;
        let sent_away = AtomicBool::new(false);
        let user = Arc::new(User { process, presence, socket, sent_away });
        let mut users = self.users();
        if users.len() >= MAX_USERS {
            return Err(Refusal::TooMany);
        }
        // Before it has the table: whoever revokes an entry from now on looks at its presence.
        users.push(Arc::clone(&user));
        drop(users);
        let welcome = Message::Welcome {
            incarnation,
            started: self.started,
            canary: self.canary.load(Ordering::Relaxed),
            canary_address: self.canary.as_ptr().expose_provenance() as u64,
        };
        let files = [self.table.file(), file.as_fd()];
        if descriptors::send(user.socket.as_fd(), &welcome.emit(), &files).is_err() {
            user.send_away();
        }
        Ok(())
    }

    /// Answers one that was let in; whether it is there and makes sense.
    fn answer(&self, user: &User) -> bool {
        let mut bytes = [0; message::LENGTH + 1];
        let message = match descriptors::receive(user.socket.as_fd(), &mut bytes, 0) {
            Ok(message) => message,
            Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
        };
        let Some(Message::Map { key }) = bytes.get(..message.length).and_then(Message::parse)
        else {
            return false;
        };
        let memory = self.memories().get(&key).cloned();
        let answer = Message::Mapped { key, found: memory.is_some() }.emit();
        let file: Option<BorrowedFd<'_>> = memory.as_ref().map(|memory| memory.file());
        // Who does not take its answers is sent away.
        descriptors::send(user.socket.as_fd(), &answer, file.as_slice()).is_ok()
    }
}

/// Whether a process of our user connected. What another user sends is not received: to close a
/// descriptor that came with it can take as long as the server of its file system likes.
fn is_ours(socket: &Socket) -> bool {
    let Ok(credentials) = Credentials::of_peer(socket.as_fd()) else { return false };
    let ours = is_own_user(credentials.user);
    if !ours {
        let (user, why) = (credentials.user, why_another(credentials.user));
        tracing::debug!(user, "shared memory: another user was refused{why}");
        let refusal = Message::Refusal(Refusal::OtherUser).emit();
        let _ = descriptors::send(socket.as_fd(), &refusal, &[]);
    }
    ours
}

/// The name in the abstract namespace, which the zero in front means.
pub(super) fn socket_address(name: &str) -> io::Result<SockAddr> {
    SockAddr::unix(format!("\0{name}"))
}

fn poll_for(descriptor: BorrowedFd<'_>) -> libc::pollfd {
    libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 }
}

/// Of a negative number, poll takes no notice.
fn poll_if(wanted: bool, descriptor: BorrowedFd<'_>) -> libc::pollfd {
    let poll = poll_for(descriptor);
    if wanted { poll } else { libc::pollfd { fd: -1, ..poll } }
}
