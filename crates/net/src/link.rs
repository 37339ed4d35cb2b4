//! What rounds of progress need of a socket, whichever it is.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

use millstream_roce::DatagramMeta;

use crate::DriverCounters;
use crate::batch::Sender;

/// A socket that a node runs over. What a round does is compiled for each kind of socket, so
/// the choice costs nothing for each datagram.
pub(crate) trait Link: Sender {
    /// Buffers for what is received.
    type Incoming: Incoming;

    /// Room for what one call receives.
    fn incoming(&self) -> Self::Incoming;

    /// Receives what is there into `batch`, in place of what was in it; returns how many messages.
    /// Errors of the network are counted, not returned: those returned are the socket's end.
    fn receive(
        &self,
        batch: &mut Self::Incoming,
        counters: &mut DriverCounters,
    ) -> io::Result<usize>;
}

/// Receives what is there, as many messages as there are headers at most; returns how many. An error
/// of the network is counted and is no message: it is reported once, and the socket goes on. Those
/// that are returned are the socket's end.
///
/// # Safety
/// All that the headers point at is theirs alone during the call, and as long as they say.
pub(crate) unsafe fn receive_messages(
    socket: &impl AsFd,
    headers: &mut [libc::mmsghdr],
    counters: &mut DriverCounters,
) -> io::Result<usize> {
    counters.receive_calls += 1;
    // SAFETY: the headers are borrowed exclusively, and the caller answers for what they point at.
    let count = unsafe {
        libc::recvmmsg(
            socket.as_fd().as_raw_fd(),
            headers.as_mut_ptr(),
            headers.len() as libc::c_uint,
            libc::MSG_DONTWAIT,
            ptr::null_mut(),
        )
    };
    if let Ok(count) = usize::try_from(count) {
        return Ok(count);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EINTR) => Ok(0),
        Some(libc::EBADF | libc::ENOTSOCK | libc::EFAULT | libc::ENOSYS) => Err(error),
        // An ICMP message came for a UDP socket; a packet socket's interface went down (ENETDOWN),
        // or a frame is segmented in a way that the kernel cannot describe (EINVAL).
        _ => {
            counters.receive_errors += 1;
            Ok(0)
        }
    }
}

/// What was received.
pub(crate) trait Incoming {
    /// The datagrams, in order, with what is known of each.
    fn datagrams(&self) -> impl Iterator<Item = (DatagramMeta, &[u8])>;
}
