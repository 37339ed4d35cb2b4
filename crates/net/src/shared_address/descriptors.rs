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
    let mut control = control_buffer();
    // SAFETY: plain old data, of which zeros are a valid value.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut iovec;
    header.msg_iovlen = 1;
    if !descriptors.is_empty() {
        let length = descriptors.len() * mem::size_of::<RawFd>();
        header.msg_control = control.as_mut_ptr().cast();
        // SAFETY: the macros only compute. The buffer has room for `MOST` descriptors and is aligned
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
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// Receives a message that is there, with its descriptors. Of a longer one, the rest is lost.
pub(crate) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<Message> {
    let mut iovec = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = control_buffer();
    // SAFETY: plain old data, of which zeros are a valid value.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut iovec;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = mem::size_of_val(control.as_slice()) as _;
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
    let descriptors_missing = header.msg_flags & libc::MSG_CTRUNC != 0;
    Ok(Message { length, descriptors_missing, descriptors })
}

/// Room for the most descriptors, and as aligned as a `cmsghdr`.
fn control_buffer() -> Vec<u64> {
    // SAFETY: only computes.
    let length = unsafe { libc::CMSG_SPACE((MOST * mem::size_of::<RawFd>()) as u32) } as usize;
    vec![0; length.div_ceil(mem::size_of::<u64>())]
}
