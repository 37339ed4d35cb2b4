//! Messages with file descriptors over UNIX sockets (SCM_RIGHTS, unix(7)).

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// The kernel passes no more at once (SCM_MAX_FD).
const MOST: usize = 253;

/// Sends a message with descriptors now, or not at all.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    assert!(descriptors.len() <= MOST, "the kernel takes no more");
    let mut iovec =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = control_buffer(descriptors.len());
    // SAFETY: plain old data, of which zeros are a valid value.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut iovec;
    header.msg_iovlen = 1;
    if !descriptors.is_empty() {
        let length = descriptors.len() * mem::size_of::<RawFd>();
        header.msg_control = control.as_mut_ptr().cast();
        // SAFETY: the macros only compute. The buffer has room for so many descriptors and is aligned
        // for a `cmsghdr`.
        unsafe {
            header.msg_controllen = libc::CMSG_SPACE(length as u32) as _;
            let message = libc::CMSG_FIRSTHDR(&raw const header);
            (*message).cmsg_level = libc::SOL_SOCKET;
            (*message).cmsg_type = libc::SCM_RIGHTS;
            (*message).cmsg_len = libc::CMSG_LEN(length as u32) as _;
            let data = libc::CMSG_DATA(message).cast::<RawFd>();
            for (index, descriptor) in descriptors.iter().enumerate() {
                ptr::write_unaligned(data.add(index), descriptor.as_raw_fd());
            }
        }
    }
    // SAFETY: all that the header points at is alive during the call, which only reads it.
    let sent = unsafe {
        libc::sendmsg(
            socket.as_raw_fd(),
            &raw const header,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// What came.
pub(crate) struct Message {
    /// Bytes of the message; 0 when the other end has closed.
    pub(crate) length: usize,
    /// There were more descriptors than this process may have.
    pub(crate) descriptors_missing: bool,
    /// There were more descriptors than are wanted.
    pub(crate) too_many: bool,
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// Receives a message that is there, with its descriptors. Of a longer one, the rest is lost.
///
/// More descriptors than are wanted do not become this process's: each would have to be closed, which can take as long
/// as the server of its file system likes, and takes away this process's locks on the file (fcntl(2)).
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    wanted: usize,
) -> io::Result<Message> {
    let mut iovec = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = control_buffer(wanted);
    // SAFETY: plain old data, of which zeros are a valid value.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut iovec;
    header.msg_iovlen = 1;
    if wanted > 0 {
        // SAFETY: only computes. What CMSG_SPACE has for alignment could be room for one more.
        let length = unsafe { libc::CMSG_LEN((wanted * mem::size_of::<RawFd>()) as u32) };
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = length as _;
    }
    // SAFETY: all that the header points at is borrowed exclusively and as long as it says.
    let received = unsafe {
        libc::recvmsg(
            socket.as_raw_fd(),
            &raw mut header,
            libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC,
        )
    };
    let Ok(length) = usize::try_from(received) else { return Err(io::Error::last_os_error()) };
    let mut descriptors = Vec::new();
    // SAFETY: the kernel filled the header, whose buffer is alive; so for all that follow.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    // SAFETY: not null, so a whole header within the buffer.
    while let Some(message) = unsafe { next.as_ref() } {
        if (message.cmsg_level, message.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: only computes.
            let start = unsafe { libc::CMSG_LEN(0) as usize };
            let count = message.cmsg_len.saturating_sub(start) / mem::size_of::<RawFd>();
            // SAFETY: only computes.
            let data = unsafe { libc::CMSG_DATA(message) }.cast::<RawFd>();
            for index in 0..count {
                // SAFETY: the kernel put `count` new descriptors here, which are nobody else's.
                descriptors
                    .push(unsafe { OwnedFd::from_raw_fd(ptr::read_unaligned(data.add(index))) });
            }
        }
        // SAFETY: `message` came from this header.
        next = unsafe { libc::CMSG_NXTHDR(&raw const header, message) };
    }
    let truncated = header.msg_flags & libc::MSG_CTRUNC != 0;
    let descriptors_missing = truncated && descriptors.len() < wanted;
    let too_many = truncated && !descriptors_missing;
    Ok(Message { length, descriptors_missing, too_many, descriptors })
}

/// Room for so many descriptors, and as aligned as a `cmsghdr`.
fn control_buffer(count: usize) -> Vec<u64> {
    // SAFETY: only computes.
    let length = unsafe { libc::CMSG_SPACE((count * mem::size_of::<RawFd>()) as u32) } as usize;
    vec![0; length.div_ceil(mem::size_of::<u64>())]
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;

    use socket2::{Domain, Socket, Type};

    use super::*;

    #[test]
    fn no_more_descriptors_come_than_are_wanted() {
        for (sent, wanted) in [
            (0, 0),
            (1, 0),
            (MOST, 0),
            (0, 1),
            (1, 1),
            (2, 1),
            (1, 2),
            (2, 2),
            (3, 2),
            (100, 34),
            (MOST, MOST),
        ] {
            let (one, other) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None).unwrap();
            let (mut reader, writer) = io::pipe().unwrap();
            send(one.as_fd(), b"hello", &vec![writer.as_fd(); sent]).unwrap();
            drop(writer);
            let mut bytes = [0; 8];
            let message = receive(other.as_fd(), &mut bytes, wanted).unwrap();
            assert_eq!(&bytes[..message.length], b"hello", "{sent} {wanted}");
            assert_eq!(message.descriptors.len(), sent.min(wanted), "{sent} {wanted}");
            assert_eq!(message.too_many, sent > wanted, "{sent} {wanted}");
            assert!(!message.descriptors_missing, "{sent} {wanted}");
            drop(message);
            assert_eq!(reader.read(&mut [0]).unwrap(), 0, "nobody can write any more");
        }
    }
}
