//! Bytes between a connected stream and memory that others may change meanwhile, so that there are no
//! references to it. None of these calls waits, but for those that are named so.
//!
//! Those that send and receive are system calls without the C library's functions around them, which see to it before and
//! after each that a thread can be canceled there (pthreads(7)). Nobody cancels threads of Rust.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::time::Duration;

/// What a stream is waited for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Readiness {
    /// There is something to receive, or its end.
    Readable,
    /// There is room to send, or nobody to send to.
    Writable,
}

/// Sends `before`, `length` bytes of memory and `after`, or the first so many of them as there is room for.
///
/// # Safety
/// The memory is mapped during the call.
pub unsafe fn send(
    stream: BorrowedFd<'_>,
    before: &[u8],
    pointer: *const u8,
    length: usize,
    after: &[u8],
) -> io::Result<usize> {
    let part = |pointer: *const u8, length| libc::iovec {
        iov_base: pointer.cast_mut().cast(),
        iov_len: length,
    };
    let mut parts = [
        part(before.as_ptr(), before.len()),
        part(pointer, length),
        part(after.as_ptr(), after.len()),
    ];
    // SAFETY: plain old data, of which zeros are a valid value.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: two slices, and memory that the caller vouches for, are read during the call.
    count(unsafe {
        libc::syscall(libc::SYS_sendmsg, stream.as_raw_fd(), &raw const message, flags)
    })
}

/// A piece of memory that is sent from or received into, one of several.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Part(libc::iovec);

/// The most parts of one call, as the kernel has it (`UIO_MAXIOV`).
pub const MAX_PARTS: usize = 1024;

impl Part {
    /// No bytes.
    pub const NONE: Self = Self(libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 });

    /// So many bytes at an address. Nothing is done to them before [`send_parts`] or [`receive_parts`].
    pub const fn new(pointer: *mut u8, length: usize) -> Self {
        Self(libc::iovec { iov_base: pointer.cast(), iov_len: length })
    }

    /// The bytes of a slice, to be sent.
    pub const fn of(bytes: &[u8]) -> Self {
        Self::new(bytes.as_ptr().cast_mut(), bytes.len())
    }

    /// Bytes.
    pub const fn length(&self) -> usize {
        self.0.iov_len
    }

    /// Becomes what both are together, if the other one begins where this one ends; whether it does. Who sends or receives it
    /// vouches for all of its bytes, as ever.
    #[must_use]
    pub fn append(&mut self, other: Self) -> bool {
        let libc::iovec { iov_base, iov_len } = &mut self.0;
        let follows = iov_base.wrapping_byte_add(*iov_len) == other.0.iov_base;
        if follows {
            *iov_len += other.0.iov_len;
        }
        follows
    }
}

/// Sends the first so many bytes of these parts as there is room for.
///
/// # Safety
/// All of them are mapped during the call, or have been registered: where nothing is mapped any more the
/// call sends what is before, or fails with EFAULT.
pub unsafe fn send_parts(stream: BorrowedFd<'_>, parts: &[Part]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    let message = message(parts);
    // SAFETY: the parts are iovecs, alive during the call, of memory that the caller vouches for and that
    // is only read.
    count(unsafe {
        libc::syscall(libc::SYS_sendmsg, stream.as_raw_fd(), &raw const message, flags)
    })
}

/// Receives into these parts; 0 at the end of the stream, or if they have no bytes.
///
/// # Safety
/// As of [`send_parts`], for memory that may be written to.
pub unsafe fn receive_parts(stream: BorrowedFd<'_>, parts: &[Part]) -> io::Result<usize> {
    let mut message = message(parts);
    // SAFETY: as above, and the memory may be written to.
    count(unsafe {
        libc::syscall(libc::SYS_recvmsg, stream.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT)
    })
}

fn message(parts: &[Part]) -> libc::msghdr {
    // SAFETY: plain old data, of which zeros are a valid value.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut().cast();
    message.msg_iovlen = parts.len().min(MAX_PARTS) as _;
    message
}

/// As [`send`], of a slice. The kernel takes one range faster than a list of them.
pub fn send_slice(stream: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: a slice, which is only read.
    count(unsafe {
        libc::syscall(
            libc::SYS_sendto,
            stream.as_raw_fd(),
            bytes.as_ptr(),
            bytes.len(),
            flags,
            ptr::null::<u8>(),
            0_usize,
        )
    })
}

/// Receives up to `length` bytes into memory; 0 at the end of the stream.
///
/// # Safety
/// The memory is mapped and may be written to during the call.
pub unsafe fn receive(
    stream: BorrowedFd<'_>,
    pointer: *mut u8,
    length: usize,
) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT;
    // SAFETY: the caller vouches for the memory.
    count(unsafe {
        let nobody = ptr::null_mut::<u8>();
        let fd = stream.as_raw_fd();
        libc::syscall(libc::SYS_recvfrom, fd, pointer, length, flags, nobody, nobody)
    })
}

/// As [`receive`], into a slice.
pub fn receive_slice(stream: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<usize> {
    // SAFETY: a slice that is ours alone.
    unsafe { receive(stream, bytes.as_mut_ptr(), bytes.len()) }
}

/// Waits until the stream is ready, or the time has passed; whether it is, or a signal came.
pub fn wait_for_stream(
    stream: BorrowedFd<'_>,
    readiness: Readiness,
    timeout: Duration,
) -> io::Result<bool> {
    let events = match readiness {
        Readiness::Readable => libc::POLLIN,
        Readiness::Writable => libc::POLLOUT,
    };
    let mut poll = libc::pollfd { fd: stream.as_raw_fd(), events, revents: 0 };
    let timeout = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one pollfd, alive during the call.
    match unsafe { libc::poll(&raw mut poll, 1, timeout) } {
        0 => Ok(false),
        1.. => Ok(true),
        _ => {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted { Ok(true) } else { Err(error) }
        }
    }
}

/// From here on the stream is readable only once so many bytes wait in it, or it has ended (`SO_RCVLOWAT`, socket(7)).
/// The kernel sees to it that they have room.
pub fn set_receive_low_water(stream: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let length = mem::size_of_val(&bytes) as libc::socklen_t;
    let value = (&raw const bytes).cast();
    // SAFETY: an integer of that length, alive during the call.
    let result = unsafe {
        libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, value, length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn count(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[test]
    fn three_parts_arrive_as_one() {
        let (near, mut far) = pair();
        let memory = [2; 1000];
        // SAFETY: the memory is an array.
        let sent = unsafe { send(near.as_fd(), b"1", memory.as_ptr(), 1000, b"33") };
        assert_eq!(sent.unwrap(), 1003);
        let mut bytes = [0; 1003];
        far.read_exact(&mut bytes).unwrap();
        assert_eq!((bytes[0], &bytes[1..1001], &bytes[1001..]), (b'1', &memory[..], &b"33"[..]));
    }

    #[test]
    fn parts_are_gathered_and_scattered() {
        let (near, far) = pair();
        let (a, b) = (vec![1; 3000], vec![2; 2000]);
        // SAFETY: vectors.
        let sent = unsafe { send_parts(near.as_fd(), &[Part::of(&a), Part::NONE, Part::of(&b)]) };
        assert_eq!(sent.unwrap(), 5000);
        assert!(wait_for_stream(far.as_fd(), Readiness::Readable, LONG).unwrap());
        let (mut c, mut d) = (vec![0; 1000], vec![0; 4000]);
        let parts = [Part::new(c.as_mut_ptr(), 1000), Part::new(d.as_mut_ptr(), 4000)];
        // SAFETY: vectors that nobody else has.
        assert_eq!(unsafe { receive_parts(far.as_fd(), &parts) }.unwrap(), 5000);
        assert!(c == a[..1000] && d[..2000] == a[1000..] && d[2000..] == b);
    }

    /// Where nothing is mapped the call fails, and the process goes on.
    #[test]
    fn what_is_not_there_is_an_error() {
        let (near, far) = pair();
        let nowhere = Part::new(std::ptr::without_provenance_mut(4096), 4096);
        // SAFETY: the kernel finds nothing there.
        let error = unsafe { send_parts(near.as_fd(), &[nowhere]) }.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        // SAFETY: as above.
        let error = unsafe { receive_parts(far.as_fd(), &[nowhere]) }.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        send_slice(near.as_fd(), b"x").unwrap();
        assert!(wait_for_stream(far.as_fd(), Readiness::Readable, LONG).unwrap());
        // SAFETY: as above.
        let error = unsafe { receive_parts(far.as_fd(), &[nowhere]) }.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }

    #[test]
    fn nothing_waits_that_is_not_to() {
        let (near, mut far) = pair();
        let mut bytes = [0; 10];
        let error = receive_slice(near.as_fd(), &mut bytes).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(!wait_for_stream(near.as_fd(), Readiness::Readable, Duration::ZERO).unwrap());
        far.write_all(b"abc").unwrap();
        assert!(wait_for_stream(near.as_fd(), Readiness::Readable, LONG).unwrap());
        assert_eq!(receive_slice(near.as_fd(), &mut bytes).unwrap(), 3);
        drop(far);
        assert!(wait_for_stream(near.as_fd(), Readiness::Readable, LONG).unwrap());
        assert_eq!(receive_slice(near.as_fd(), &mut bytes).unwrap(), 0);
        // No signal ends the process.
        let memory = vec![0; 1 << 20];
        let error = loop {
            // SAFETY: the memory is a vector.
            match unsafe { send(near.as_fd(), &[], memory.as_ptr(), memory.len(), &[]) } {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait_for_stream(near.as_fd(), Readiness::Writable, LONG).unwrap();
                }
                Err(error) => break error,
            }
        };
        assert!(matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset));
    }
}
