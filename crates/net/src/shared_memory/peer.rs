//! The side that reads and writes another process's memory.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};
use thiserror::Error;

use super::copy::{self, Way};
use super::life::Owner;
use super::memory::{Access, Mapping};
use super::message::{self, Message, Refusal};
use super::offer::socket_address;
use super::presence::{Presence, Words};
use super::process::{Process, ProcessError, own_start_time};
use super::table::{Entry, Key, TableView};
use crate::credentials::{Credentials, is_own_user, own_user, why_another};
use crate::guarded::{self, Caching, Fault};
use crate::prefetch::prefetch;
use crate::shared_address::descriptors;
use crate::socket::wait;

/// How long a peer is waited for. It answers at once, unless it is stopped.
const ANSWER_PATIENCE: Duration = Duration::from_secs(1);

/// How long one that did not answer is asked for no memory: whoever wants some of it meanwhile would wait as long in vain.
const SILENCE: Duration = Duration::from_secs(1);

/// Why a process does not share its memory with us.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// Nobody has the socket.
    #[error("no process listens at its socket: it has ended")]
    Nobody,
    /// It does not answer, as one that is stopped.
    #[error("its process does not answer")]
    NoAnswer,
    /// Memory is shared among the processes of one user only.
    #[error("it belongs to another user: ours is {own}, and its is {user}{}", why_another(*user))]
    OtherUser {
        /// Our user's number.
        own: u32,
        /// Its user's number.
        user: u32,
    },
    /// It refused us.
    #[error("it refused: {0}")]
    Refused(&'static str),
    /// Its process is not to be found.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// What it says makes no sense to this version.
    #[error("what it says makes no sense to this version: {0}")]
    Strange(String),
    /// The system refuses something.
    #[error("{operation}: {error}")]
    System {
        /// What.
        operation: &'static str,
        /// Why.
        error: io::Error,
    },
}

/// Why memory of a peer cannot be accessed (any more).
#[derive(Debug, Error)]
pub enum AccessError {
    /// Its process has ended, or runs another program, or has closed the connection.
    #[error("its process has ended, or has closed the connection")]
    Ended,
    /// It is not registered there, or not all of it.
    #[error("the memory is not registered there any more")]
    Unregistered,
    /// It does not send the memory's descriptor.
    #[error("its process does not answer")]
    NoAnswer,
    /// A copy came upon memory that is not there: of this process, if the address is in the range here.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// It cannot be mapped, or copied to or from.
    #[error("{operation}: {error}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        error: io::Error,
    },
}

/// Another process that has let us in.
#[derive(Debug)]
pub struct Peer {
    process: Process,
    table: TableView,
    presence: Presence,
    words: Words,
    socket: Socket,
    /// Held by who asks something, until it is answered. Nothing is asked until this time, after it did not answer.
    asking: Mutex<Option<Instant>>,
    /// Why its user's own memory cannot be accessed, if so.
    obstacle: Option<String>,
    regions: RwLock<HashMap<Key, Arc<Region>>>,
}

/// Memory of a peer that we can access.
#[derive(Debug)]
pub struct Region {
    key: Key,
    entry: Entry,
    mapping: Option<Mapping>,
}

impl Region {
    /// Has the processor load what is at an address of the peer, where it is mapped here: it is accessed soon.
    pub fn prefetch(&self, target: u64, length: usize) {
        let place = target.checked_sub(self.entry.address);
        let place = place.zip(self.mapping.as_ref());
        if let Some(place) = place.and_then(|(offset, mapping)| mapping.range(offset, length)) {
            prefetch(place, length);
        }
    }

    /// How many bytes of our address space it takes.
    fn mapped(&self) -> usize {
        self.mapping.as_ref().map_or(0, Mapping::length)
    }
}

impl Peer {
    /// Asks the process that listens at this socket, whose incarnation must be this, to let us in. Waits
    /// for a second at most.
    pub fn connect(socket: &str, incarnation: u64) -> Result<Self, ConnectError> {
        let failed = |operation| move |error| ConnectError::System { operation, error };
        let name = socket_address(socket).map_err(failed("its socket's name"))?;
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None)
            .and_then(|socket| socket.set_nonblocking(true).map(|()| socket))
            .map_err(failed("socket(AF_UNIX)"))?;
        socket.connect(&name).map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionRefused => ConnectError::Nobody,
            io::ErrorKind::WouldBlock => ConnectError::NoAnswer,
            _ => ConnectError::System { operation: "connect", error },
        })?;
        // Of the process that listens: an abstract name can be taken by anybody.
        let credentials = Credentials::of_peer(socket.as_fd()).map_err(failed("SO_PEERCRED"))?;
        if !is_own_user(credentials.user) {
            return Err(ConnectError::OtherUser { own: own_user(), user: credentials.user });
        }
        let started = own_start_time().map_err(failed("reading /proc/self/stat"))?;
        let hello = Message::Hello { incarnation, started };
        descriptors::send(socket.as_fd(), &hello.emit(), &[]).map_err(failed("sendmsg"))?;
        let (answer, files) =
            match receive(&socket, Instant::now() + ANSWER_PATIENCE, WELCOME_FILES) {
                Ok(Some(received)) => received,
                Ok(None) => return Err(ConnectError::NoAnswer),
                Err(error) if is_its_fault(&error) => {
                    return Err(ConnectError::Strange(error.to_string()));
                }
                Err(error) => return Err(failed("recvmsg")(error)),
            };
        let (started, canary, canary_address) = match answer {
            Message::Welcome { incarnation: its, started, canary, canary_address }
                if its == incarnation =>
            {
                (started, canary, canary_address)
            }
            Message::Refusal(refusal) => return Err(refused(refusal)),
            _ => return Err(ConnectError::Strange("no welcome".to_owned())),
        };
        let process = Process::open(credentials.pid, started)?;
        let [table, presence] = files.as_slice() else {
            return Err(ConnectError::Strange(format!("{} descriptors", files.len())));
        };
        let strange = |error: io::Error| ConnectError::Strange(error.to_string());
        let mut peer = Self {
            table: TableView::adopt(table.as_fd()).map_err(strange)?,
            presence: Presence::adopt(presence.as_fd()).map_err(strange)?,
            process,
            words: Words::default(),
            socket,
            asking: Mutex::default(),
            obstacle: None,
            regions: RwLock::default(),
        };
        peer.obstacle = peer.try_canary(canary, canary_address).err();
        Ok(peer)
    }

    /// Reads and writes a number of it by process_vm_readv(2) and process_vm_writev(2); why that does
    /// not work, if so.
    fn try_canary(&self, canary: u64, address: u64) -> Result<(), String> {
        let found = AtomicU64::new(!canary);
        for way in [Way::Read, Way::Write] {
            let local = found.as_ptr().cast();
            // SAFETY: the eight bytes of `found`.
            let copied = unsafe {
                copy::process_copy(way, self.process.pid(), local, address, size_of::<u64>())
            };
            copied.map_err(|error| forbidden(&error))?;
            if found.load(Ordering::Relaxed) != canary {
                return Err("what was read of its memory is not what it has there".to_owned());
            }
        }
        Ok(())
    }

    /// Its process number.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Whether its process is still there, and runs the program that let us in.
    pub fn is_alive(&self) -> bool {
        self.process.is_connected(self.socket.as_fd())
    }

    /// Why memory registered by this key cannot be accessed, as far as can be said without asking.
    pub fn obstacle(&self, key: Key) -> Option<String> {
        // Where there is none, the table need not be asked.
        let obstacle = self.obstacle.as_ref()?;
        let entry = self.table.entry(key)?;
        if entry.mappable { None } else { Some(obstacle.clone()) }
    }

    /// The memory registered by this key, if it was opened before.
    pub fn region(&self, key: Key) -> Option<Arc<Region>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned()
    }

    /// Whether the memory registered by this key is open.
    pub fn is_open(&self, key: Key) -> bool {
        self.regions.read().unwrap_or_else(PoisonError::into_inner).contains_key(&key)
    }

    /// Opens the memory registered by this key. Asks for its descriptor, and waits for a second at most. For a second after
    /// that was in vain, nothing is asked unless something has come meanwhile.
    pub fn open(&self, key: Key) -> Result<Arc<Region>, AccessError> {
        // One at a time asks.
        let mut silent_until = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(region) = self.region(key) {
            return Ok(region);
        }
        let entry = self.table.entry(key).ok_or_else(|| self.gone(key))?;
        // Those that were unregistered since need not stay mapped.
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        regions.retain(|&key, _| self.table.is_registered(key));
        let mapped: usize = regions.values().map(|region| region.mapped()).sum();
        drop(regions);
        let most = most_mapped().saturating_sub(mapped);
        let mapping = match entry.mappable {
            true if silent_until.is_some_and(|until| Instant::now() < until)
                && !self.has_come() =>
            {
                let alive = self.is_alive();
                return Err(if alive { AccessError::NoAnswer } else { self.gone(key) });
            }
            true => {
                let mapped = self.map(key, entry.length, most);
                let silent = matches!(mapped, Err(AccessError::NoAnswer));
                *silent_until = silent.then(|| Instant::now() + SILENCE);
                Some(mapped?)
            }
            false => None,
        };
        if mapping.as_ref().is_some_and(|mapping| (mapping.length() as u64) < entry.length) {
            return Err(AccessError::Unregistered);
        }
        let region = Arc::new(Region { key, entry, mapping });
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        regions.insert(key, Arc::clone(&region));
        drop((regions, silent_until));
        Ok(region)
    }

    /// Whether it has said something, or closed the connection.
    fn has_come(&self) -> bool {
        wait(self.socket.as_fd(), libc::POLLIN, Duration::ZERO).unwrap_or(true)
    }

    /// Asks for the memory of this key, and maps so many bytes of it, if they are not more than `most`.
    fn map(&self, key: Key, length: u64, most: usize) -> Result<Mapping, AccessError> {
        let failed = |error| AccessError::System { operation: "mapping its memory", error };
        let length = usize::try_from(length).ok().filter(|&length| length <= most);
        let too_much = "it has more memory mapped here than this host can have";
        let length = length.ok_or_else(|| failed(io::Error::other(too_much)))?;
        let ask = Message::Map { key: key.0 };
        descriptors::send(self.socket.as_fd(), &ask.emit(), &[])
            .map_err(|error| self.unanswered(key, error))?;
        let deadline = Instant::now() + ANSWER_PATIENCE;
        loop {
            let received = receive(&self.socket, deadline, MAPPED_FILES)
                .map_err(|error| self.unanswered(key, error))?;
            let (answer, files) = received.ok_or(AccessError::NoAnswer)?;
            match answer {
                Message::Mapped { key: its, found } if its == key.0 => {
                    let file = files.first().filter(|_| found).ok_or(AccessError::Unregistered)?;
                    return Mapping::adopt(file.as_fd(), length.max(1), Access::ReadWrite)
                        .map_err(failed);
                }
                // To a question that was given up. More such answers must not keep us here.
                _ if Instant::now() >= deadline => return Err(AccessError::NoAnswer),
                _ => {}
            }
        }
    }

    /// Why it was not asked, or did not answer.
    fn unanswered(&self, key: Key, error: io::Error) -> AccessError {
        match error.kind() {
            _ if is_its_fault(&error) => self.gone(key),
            // It takes no more questions.
            io::ErrorKind::WouldBlock => AccessError::NoAnswer,
            _ => AccessError::System { operation: "asking for its memory", error },
        }
    }

    /// Why something is not there. A table in which it still is, is that of a program that has ended.
    fn gone(&self, key: Key) -> AccessError {
        let ended = self.table.owner() == Owner::Ended || !self.process.is_alive();
        match ended || (self.table.is_registered(key) && !self.is_alive()) {
            true => AccessError::Ended,
            false => AccessError::Unregistered,
        }
    }

    /// Begins to access memory: until the result is dropped, its owner waits if it takes the memory
    /// back. `Ok(None)` when too many threads are at it already.
    pub fn enter<'a>(&'a self, region: &'a Region) -> Result<Option<Visit<'a>>, AccessError> {
        // Of memory that is mapped, the number of the process does not matter.
        if region.mapping.is_none() && !self.is_alive() {
            return Err(self.gone(region.key));
        }
        let Some(word) = self.words.take() else { return Ok(None) };
        if self.presence.enter(word, region.key, &self.table) {
            return Ok(Some(Visit { peer: self, region, word }));
        }
        self.words.give_back(word);
        Err(self.gone(region.key))
    }
}

/// A thread of ours that accesses memory of a peer.
#[derive(Debug)]
pub struct Visit<'a> {
    peer: &'a Peer,
    region: &'a Region,
    word: u32,
}

impl Visit<'_> {
    /// Copies from here to an address of the peer. How it goes about caches, the kernel decides where it
    /// copies.
    ///
    /// # Safety
    /// As of [`guarded::copy`], for the range here.
    pub unsafe fn write(
        &self,
        source: *const u8,
        target: u64,
        length: usize,
        caching: Caching,
    ) -> Result<(), AccessError> {
        match self.place(target, length)? {
            // SAFETY: what is here is the caller's promise. What is there was found in the mapping.
            Some(target) => unsafe { guarded::copy(source, target, length, caching)? },
            // SAFETY: the caller promises it.
            None => unsafe { self.process_copy(Way::Write, source.cast_mut(), target, length)? },
        }
        Ok(())
    }

    /// Copies from an address of the peer to here.
    ///
    /// # Safety
    /// As of [`guarded::copy`], for the range here.
    pub unsafe fn read(
        &self,
        destination: *mut u8,
        target: u64,
        length: usize,
        caching: Caching,
    ) -> Result<(), AccessError> {
        match self.place(target, length)? {
            // SAFETY: as in `write`.
            Some(target) => unsafe { guarded::copy(target, destination, length, caching)? },
            // SAFETY: the caller promises it.
            None => unsafe { self.process_copy(Way::Read, destination, target, length)? },
        }
        Ok(())
    }

    /// Copies ranges of one length, [`guarded::TOGETHER`] at most, to or from the peer, each given by where it is here and
    /// there, around the caches; whether it did. It does not where the peer's memory is not mapped here, and after a
    /// fault, when any part of them may have been copied. A [`guarded::fence`] must follow, before the visit is
    /// confirmed or ends.
    ///
    /// # Safety
    /// As of [`guarded::copy`], for the ranges here.
    pub unsafe fn copy_together(
        &self,
        write: bool,
        ranges: &[(*mut u8, u64)],
        length: usize,
    ) -> bool {
        let mut places = [(ptr::null(), ptr::null_mut()); guarded::TOGETHER];
        for (place, &(here, there)) in places.iter_mut().zip(ranges) {
            let Ok(Some(there)) = self.place(there, length) else { return false };
            *place = match write {
                true => (here.cast_const(), there),
                false => (there.cast_const(), here),
            };
        }
        let Some(places) = places.get(..ranges.len()) else { return false };
        // SAFETY: what is here is the caller's promise, what is there was found in the mapping, and the two are
        // mapped apart.
        unsafe { guarded::copy_together(places, length).is_ok() }
    }

    /// What was copied before this counts: the memory was registered, and its process alive, until now.
    /// An owner that no longer waited for us may have taken the pages away, or used them otherwise.
    pub fn confirm(&self) -> Result<(), AccessError> {
        let registered = self.peer.table.is_registered(self.region.key);
        if registered && self.is_owner_alive() {
            Ok(())
        } else {
            Err(self.peer.gone(self.region.key))
        }
    }

    /// Whether the process lives whose memory it is. Of memory that is mapped here the table is believed: a table
    /// that lies brings bytes into pages that nobody else has. Of the kernel's copies it could bring them into
    /// another process.
    fn is_owner_alive(&self) -> bool {
        match self.peer.table.owner() {
            Owner::Ended => false,
            Owner::Alive if self.region.mapping.is_some() => true,
            Owner::Alive | Owner::Untold => self.peer.is_alive(),
        }
    }

    /// Where an address of the peer is mapped here, or `None` when it is not mapped.
    fn place(&self, target: u64, length: usize) -> Result<Option<*mut u8>, AccessError> {
        let Entry { address, length: all, .. } = self.region.entry;
        let offset = target.checked_sub(address).ok_or(AccessError::Unregistered)?;
        if offset.checked_add(length as u64).is_none_or(|end| end > all) {
            return Err(AccessError::Unregistered);
        }
        let Some(mapping) = &self.region.mapping else { return Ok(None) };
        // Once more, against what is really mapped: the table is another process's word.
        mapping.range(offset, length).map(Some).ok_or(AccessError::Unregistered)
    }

    /// # Safety
    /// As [`copy::process_copy`].
    unsafe fn process_copy(
        &self,
        way: Way,
        local: *mut u8,
        remote: u64,
        length: usize,
    ) -> Result<(), AccessError> {
        // SAFETY: the caller promises it.
        let copied =
            unsafe { copy::process_copy(way, self.peer.process.pid(), local, remote, length) };
        if copied.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EFAULT)) {
            // The kernel does not say at which end.
            // SAFETY: the caller promises it.
            unsafe {
                match way {
                    Way::Write => guarded::probe(local, length)?,
                    Way::Read => guarded::probe_write(local, length)?,
                }
            }
        }
        copied.map_err(|error| match error.raw_os_error() {
            Some(libc::ESRCH) => AccessError::Ended,
            _ if !self.peer.is_alive() => self.peer.gone(self.region.key),
            _ => {
                let operation = match way {
                    Way::Write => "process_vm_writev",
                    Way::Read => "process_vm_readv",
                };
                AccessError::System { operation, error }
            }
        })
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.peer.presence.leave(self.word, self.region.key, &self.peer.table);
        self.peer.words.give_back(self.word);
    }
}

/// How many bytes of one peer are mapped at a time: what it says costs it nothing, but us address space.
/// Several times the memory of this host, since memory may be registered more than once, and not all
/// be used.
fn most_mapped() -> usize {
    // SAFETY: no pointers.
    let [pages, length] =
        [libc::_SC_PHYS_PAGES, libc::_SC_PAGESIZE].map(|name| unsafe { libc::sysconf(name) });
    let memory = usize::try_from(pages).unwrap_or(0) * usize::try_from(length).unwrap_or(0);
    memory.max(1 << 30).saturating_mul(4)
}

/// The descriptors that come with a welcome, and with an answer to a question for memory.
const WELCOME_FILES: usize = 2;
const MAPPED_FILES: usize = 1;

type Received = (Message, Vec<std::os::fd::OwnedFd>);

/// The next message, with so many descriptors at most; `None` when none comes in time.
fn receive(socket: &Socket, deadline: Instant, files: usize) -> io::Result<Option<Received>> {
    let left = deadline.saturating_duration_since(Instant::now());
    if !wait(socket.as_fd(), libc::POLLIN, left)? {
        return Ok(None);
    }
    let mut bytes = [0; message::LENGTH + 1];
    let received = descriptors::receive(socket.as_fd(), &mut bytes, files)?;
    if received.descriptors_missing {
        return Err(io::Error::other("this process may have no more descriptors (ulimit -n)"));
    }
    if received.too_many {
        let what = "more descriptors than any message has";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    if received.length == 0 {
        let what = "it closed the connection";
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
    }
    let message = bytes.get(..received.length).and_then(Message::parse);
    message
        .map(|message| Some((message, received.descriptors)))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no message"))
}

/// Whether it is the peer that has closed the connection or makes no sense, and not we who lack something.
fn is_its_fault(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, InvalidData, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | InvalidData | UnexpectedEof)
}

fn refused(refusal: Refusal) -> ConnectError {
    ConnectError::Refused(match refusal {
        Refusal::OtherUser => "we are another user, or one whom its user namespace does not have",
        Refusal::OtherIncarnation => "it is another process than the one that was meant",
        Refusal::TooMany => "it has as many connections of peers as it can",
        Refusal::NoMeans => "it lacks what it needs for one more (descriptors: ulimit -n?)",
        Refusal::NoProcess => "it does not see our process (another PID namespace?)",
    })
}

/// Why the kernel does not let us at another process's memory, and what to do (ptrace(2), "Ptrace access
/// mode checking").
fn forbidden(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "the kernel forbids process_vm_writev on it: kernel.yama.ptrace_scope must be 0, or this \
             process have CAP_SYS_PTRACE, its process be dumpable, and no seccomp filter here refuse it, as \
             those of containers do; memory that its engine allocates needs none of it"
                .to_owned()
        }
        Some(libc::ENOSYS) => "process_vm_writev is forbidden here (seccomp?)".to_owned(),
        _ => format!("process_vm_writev on it: {error}"),
    }
}
