//! Memory that all members of a group map, each for reading and writing.
//!
//! One member makes it and gives it to the others by a UNIX socket in the abstract namespace. It is a sealed memfd,
//! so nobody can take pages away. Whatever members write there, accesses here stay inside the mapping: there are no
//! references to it but to atomics, and bytes are copied in and out as those that others may be changing.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use super::memory::{Access, Mapping, memfd, seal};
use super::offer::socket_address;
use crate::credentials::{Credentials, is_own_user, why_another};
use crate::guarded::{self, Caching};
use crate::shared_address::descriptors;
use crate::socket::wait;

/// What comes with the descriptor.
const GREETING: &[u8; 8] = b"MSgroup\x01";

/// Between attempts to connect to a socket whose queue is full.
const RETRY: Duration = Duration::from_millis(10);

/// Memory of a group, mapped here.
#[derive(Debug)]
pub struct GroupMemory {
    mapping: Mapping,
}

impl GroupMemory {
    /// How many bytes there are.
    pub fn length(&self) -> usize {
        self.mapping.length()
    }

    /// The number at an offset that is a multiple of 4. `None` outside.
    pub fn word(&self, offset: usize) -> Option<&AtomicU32> {
        let pointer = self.mapping.range(offset as u64, 4).filter(|_| offset.is_multiple_of(4))?;
        // SAFETY: inside the mapping, which lives as long as the reference, and aligned, since mappings begin at
        // pages. Others may change it, as atomics may be.
        Some(unsafe { &*pointer.cast::<AtomicU32>() })
    }

    /// The number at an offset that is a multiple of 8. `None` outside.
    pub fn long(&self, offset: usize) -> Option<&AtomicU64> {
        let pointer = self.mapping.range(offset as u64, 8).filter(|_| offset.is_multiple_of(8))?;
        // SAFETY: as above.
        Some(unsafe { &*pointer.cast::<AtomicU64>() })
    }

    /// Copies bytes out of it; whether they are all in it.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> bool {
        // SAFETY: borrowed exclusively.
        unsafe { self.read_to(offset, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Copies bytes into it; whether there is room.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        // SAFETY: borrowed.
        unsafe { self.write_from(offset, bytes.as_ptr(), bytes.len()) }
    }

    /// As [`GroupMemory::read`], to memory that is named by its address.
    ///
    /// # Safety
    /// So many bytes can be written there, and nobody refers to them.
    pub unsafe fn read_to(&self, offset: usize, to: *mut u8, length: usize) -> bool {
        let Some(from) = self.mapping.range(offset as u64, length) else { return false };
        // SAFETY: the one is inside the mapping, whose pages stay, and the caller promises the other.
        unsafe { copy(from, to, length) };
        true
    }

    /// As [`GroupMemory::write`], from memory that is named by its address.
    ///
    /// # Safety
    /// So many bytes can be read there.
    pub unsafe fn write_from(&self, offset: usize, from: *const u8, length: usize) -> bool {
        let Some(to) = self.mapping.range(offset as u64, length) else { return false };
        // SAFETY: as above.
        unsafe { copy(from, to, length) };
        true
    }
}

/// Copies. Memory that is not there ends the process, as it does where nobody recovers from such faults: the others
/// would take for a vector what was there before.
///
/// # Safety
/// As of [`guarded::copy`].
unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller promises it.
    if unsafe { guarded::copy(from, to, length, Caching::Through) }.is_err() {
        std::process::abort();
    }
}

/// Memory of a group that this process has made, and gives to the others.
#[derive(Debug)]
pub struct GroupOwner {
    file: OwnedFd,
}

impl GroupOwner {
    /// Makes so many bytes, all 0.
    pub fn create(length: usize) -> io::Result<(Self, GroupMemory)> {
        let file = memfd(c"millstream-group", length)?;
        let mapping = Mapping::new(file.as_fd(), length, Access::ReadWrite)?;
        mapping.ask_for_huge_pages();
        seal(file.as_fd(), libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL)?;
        Ok((Self { file }, GroupMemory { mapping }))
    }

    /// Gives it to a process of our user that asks for it, if one does in so long.
    pub fn give(&self, door: &GroupDoor, patience: Duration) -> io::Result<()> {
        if !wait(door.socket.as_fd(), libc::POLLIN, patience)? {
            return Ok(());
        }
        let (socket, _) = match door.socket.accept() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            accepted => accepted?,
        };
        let user = Credentials::of_peer(socket.as_fd())?.user;
        if !is_own_user(user) {
            let why = why_another(user);
            tracing::warn!(
                user,
                "another user asked for the memory of a group, and did not get it{why}"
            );
            return Ok(());
        }
        // One that does not take it may have ended.
        let _ = descriptors::send(socket.as_fd(), GREETING, &[self.file.as_fd()]);
        Ok(())
    }
}

/// Where others ask for memory.
#[derive(Debug)]
pub struct GroupDoor {
    socket: Socket,
    name: String,
}

impl GroupDoor {
    /// With a name that nobody guesses.
    pub fn open() -> io::Result<Self> {
        let [high, low] = [(); 2].map(|()| RandomState::new().hash_one(std::process::id()));
        let name = format!("millstream/group/{high:016x}{low:016x}");
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;
        socket.set_nonblocking(true)?;
        socket.bind(&socket_address(&name)?)?;
        socket.listen(libc::SOMAXCONN)?;
        Ok(Self { socket, name })
    }

    /// Its name in the abstract namespace, without the zero in front (unix(7)).
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Asks for the memory of a group at its door.
#[derive(Debug)]
pub struct GroupGuest {
    socket: Socket,
    length: usize,
}

impl GroupGuest {
    /// For memory of so many bytes. Retries for so long while too many ask at once.
    pub fn ask(door: &str, length: usize, patience: Duration) -> io::Result<Self> {
        let deadline = Instant::now() + patience;
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;
        socket.set_nonblocking(true)?;
        let name = socket_address(door)?;
        loop {
            match socket.connect(&name) {
                Ok(()) => break,
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline =>
                {
                    std::thread::sleep(RETRY);
                }
                Err(error) => return Err(error),
            }
        }
        // Anybody can take a name that is free.
        let user = Credentials::of_peer(socket.as_fd())?.user;
        if !is_own_user(user) {
            let why = why_another(user);
            return Err(strange(format!(
                "user {user} has the socket, and this process is of another one{why}"
            )));
        }
        Ok(Self { socket, length })
    }

    /// The memory, if it comes in so long.
    pub fn take(&self, patience: Duration) -> io::Result<Option<GroupMemory>> {
        if !wait(self.socket.as_fd(), libc::POLLIN, patience)? {
            return Ok(None);
        }
        let mut bytes = [0; GREETING.len() + 1];
        let message = match descriptors::receive(self.socket.as_fd(), &mut bytes, 1) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            received => received?,
        };
        if message.length == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection"));
        }
        if message.too_many {
            return Err(strange("more than one descriptor came".to_owned()));
        }
        let [file] = &message.descriptors[..] else {
            return Err(strange(format!(
                "{} descriptors came, not one",
                message.descriptors.len()
            )));
        };
        if bytes[..message.length] != GREETING[..] {
            return Err(strange("it is of another version".to_owned()));
        }
        // One byte more shows that there are more.
        let mapping = Mapping::adopt(file.as_fd(), self.length + 1, Access::ReadWrite)?;
        let (found, wanted) = (mapping.length(), self.length);
        if found != wanted {
            return Err(strange(format!("the memory has {found} bytes or more, not {wanted}")));
        }
        mapping.ask_for_huge_pages();
        Ok(Some(GroupMemory { mapping }))
    }
}

fn strange(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn a_guest_gets_the_same_memory_and_only_of_the_length_that_it_wants() {
        let door = GroupDoor::open().unwrap();
        let (owner, memory) = GroupOwner::create(8192).unwrap();
        for length in [8192, 8191, 8193, 4096] {
            let guest = GroupGuest::ask(door.name(), length, PATIENCE).unwrap();
            assert!(guest.take(Duration::ZERO).unwrap().is_none());
            owner.give(&door, PATIENCE).unwrap();
            let taken = guest.take(PATIENCE);
            if length != 8192 {
                assert_eq!(taken.unwrap_err().kind(), io::ErrorKind::InvalidData, "{length}");
                continue;
            }
            let theirs = taken.unwrap().unwrap();
            memory.word(8188).unwrap().store(7, Ordering::Relaxed);
            assert_eq!(theirs.word(8188).unwrap().load(Ordering::Relaxed), 7);
            assert!(theirs.write(4000, b"bytes"));
            let mut bytes = [0; 5];
            assert!(memory.read(4000, &mut bytes));
            assert_eq!(&bytes, b"bytes");
            // Who leaves takes nothing away from the others.
            drop(theirs);
            assert!(memory.read(4000, &mut bytes));
            assert_eq!(&bytes, b"bytes");
        }
    }

    #[test]
    fn what_is_outside_is_not_touched() {
        let (_owner, memory) = GroupOwner::create(4096).unwrap();
        assert_eq!(memory.length(), 4096);
        assert!(memory.word(4092).is_some() && memory.word(4096).is_none());
        assert!(memory.word(2).is_none() && memory.long(4).is_none());
        assert!(memory.long(4088).is_some() && memory.long(4092).is_none());
        assert!(memory.word(usize::MAX - 3).is_none());
        let mut bytes = [0; 2];
        assert!(!memory.read(4095, &mut bytes) && !memory.write(usize::MAX, &bytes));
        assert!(memory.read(4096, &mut []));
    }

    #[test]
    fn a_door_that_is_gone_is_an_error_and_so_is_one_who_gives_nothing() {
        let door = GroupDoor::open().unwrap();
        let guest = GroupGuest::ask(door.name(), 4096, PATIENCE).unwrap();
        let (accepted, _) = door.socket.accept().unwrap();
        drop(accepted);
        assert_eq!(guest.take(PATIENCE).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let name = door.name().to_owned();
        drop(door);
        let error = GroupGuest::ask(&name, 4096, PATIENCE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
