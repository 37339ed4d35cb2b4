//! Both ends of a connection as the other one sees them, which say and send what a test wants.

use std::ffi::CStr;
use std::fs::File;
use std::io::{Read, Write};
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::ptr;

use socket2::{Domain, SockAddr, Socket, Type};

/// Kinds of messages.
pub(crate) const HELLO: u8 = 1;
pub(crate) const WELCOME: u8 = 2;
pub(crate) const REFUSAL: u8 = 3;
pub(crate) const MAP: u8 = 4;
pub(crate) const MAPPED: u8 = 5;

const PRESENCE_LENGTH: u64 = 4096;

pub(crate) struct FakeOwner {
    name: String,
    listener: Socket,
    table: File,
    presence: File,
}

impl FakeOwner {
    /// Its table has entries of these lengths, all of memory that can be mapped. Their keys are
    /// [`key`] of their index.
    pub(crate) fn new(incarnation: u64, lengths: &[u64]) -> Self {
        let name = format!("millstream/shm/fake-{incarnation:016x}");
        let listener = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        listener.bind(&SockAddr::unix(format!("\0{name}")).unwrap()).unwrap();
        listener.listen(1).unwrap();
        // Behind the entries it says nothing of its life.
        let table = sealed(c"fake-table", lengths.len() as u64 * 32 + 64);
        for (index, &length) in lengths.iter().enumerate() {
            let entry = numbers([key(index), 4096, length, 1]);
            table.write_all_at(&entry, index as u64 * 32).unwrap();
        }
        Self { name, listener, table, presence: sealed(c"fake-presence", PRESENCE_LENGTH) }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Lets one peer in.
    pub(crate) fn welcome(&self) -> Socket {
        self.welcome_after(|| ())
    }

    /// Lets one peer in, once it has asked and this is done.
    pub(crate) fn welcome_after(&self, meanwhile: impl FnOnce()) -> Socket {
        let (socket, _) = self.listener.accept().unwrap();
        let mut hello = [0; 40];
        assert_eq!((&socket).read(&mut hello).unwrap(), hello.len());
        meanwhile();
        let incarnation = u64::from_le_bytes(hello[8..16].try_into().unwrap());
        let welcome = message(WELCOME, [incarnation, own_start_time(), 0, 0]);
        send(&socket, &welcome, &[&self.table, &self.presence]);
        socket
    }
}

/// A peer that an offer has let in: its connection, and its presence.
pub(crate) fn user(name: &str, incarnation: u64) -> (Socket, File) {
    user_with(name, incarnation, &[])
}

/// One that says who it is with these files.
pub(crate) fn user_with(name: &str, incarnation: u64, files: &[&File]) -> (Socket, File) {
    let socket = connect(name);
    send(&socket, &message(HELLO, [incarnation, own_start_time(), 0, 0]), files);
    let [table, presence] = receive_two(&socket);
    drop(table);
    (socket, presence)
}

/// A bare connection to an offer's socket.
pub(crate) fn connect(name: &str) -> Socket {
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
    socket.connect(&SockAddr::unix(format!("\0{name}")).unwrap()).unwrap();
    socket
}

/// Of the entry with this index.
pub(crate) const fn key(index: usize) -> u64 {
    1 << 16 | index as u64
}

pub(crate) fn message(kind: u8, arguments: [u64; 4]) -> Vec<u8> {
    let mut bytes = b"MSshm\0\x02".to_vec();
    bytes.push(kind);
    bytes.extend(numbers(arguments));
    bytes
}

fn numbers(numbers: [u64; 4]) -> Vec<u8> {
    numbers.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// A file in memory that keeps its length.
pub(crate) fn sealed(name: &CStr, length: u64) -> File {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a C string, and a descriptor that is nobody else's.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(name.as_ptr(), flags)) };
    file.set_len(length).unwrap();
    // SAFETY: no pointers.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
    assert_eq!(result, 0);
    file
}

/// Sends a message with descriptors (SCM_RIGHTS, unix(7)).
pub(crate) fn send(mut socket: &Socket, bytes: &[u8], files: &[&File]) {
    if files.is_empty() {
        return socket.write_all(bytes).unwrap();
    }
    let mut iovec =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = [0_u64; 64];
    // SAFETY: zeros are a valid value.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut iovec;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    assert!(files.len() <= 100, "there is room for no more");
    let length = (files.len() * mem::size_of::<i32>()) as u32;
    // SAFETY: the buffer has room for the descriptors, is aligned, and alive during the call.
    unsafe {
        header.msg_controllen = libc::CMSG_SPACE(length) as _;
        let message = libc::CMSG_FIRSTHDR(&raw const header);
        (*message).cmsg_level = libc::SOL_SOCKET;
        (*message).cmsg_type = libc::SCM_RIGHTS;
        (*message).cmsg_len = libc::CMSG_LEN(length) as _;
        let data = libc::CMSG_DATA(message).cast::<i32>();
        for (index, file) in files.iter().enumerate() {
            ptr::write_unaligned(data.add(index), file.as_raw_fd());
        }
        let sent = libc::sendmsg(socket.as_raw_fd(), &raw const header, 0);
        assert_eq!(sent, bytes.len() as isize);
    }
}

/// Receives a message with two descriptors.
fn receive_two(socket: &Socket) -> [File; 2] {
    let mut bytes = [0_u8; 64];
    let mut iovec = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = [0_u64; 16];
    // SAFETY: zeros are a valid value.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut iovec;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = mem::size_of_val(&control) as _;
    // SAFETY: what the header points at is alive during the call. If there are two descriptors,
    // as the length says, they are new ones.
    unsafe {
        assert!(libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) > 0);
        let message = libc::CMSG_FIRSTHDR(&raw const header).as_ref().unwrap();
        assert_eq!(message.cmsg_len as u64, u64::from(libc::CMSG_LEN(8)));
        let data = libc::CMSG_DATA(message).cast::<i32>();
        [0, 1].map(|index| File::from_raw_fd(ptr::read_unaligned(data.add(index))))
    }
}

/// Field 22 of /proc/self/stat (proc_pid_stat(5)).
fn own_start_time() -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, rest) = text.rsplit_once(')').unwrap();
    rest.split_ascii_whitespace().nth(19).unwrap().parse().unwrap()
}
