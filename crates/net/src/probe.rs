//! What the kernel, or who filters its calls, lets this process do: tried, with nothing left behind.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use socket2::{Domain, Protocol, Socket, Type};

/// Whether sockets can have one port, among which a program of ours chooses: what devices need that
/// share an address.
pub fn shared_port() -> io::Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_port(true)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
    crate::shared_address::steer(&socket)
}

/// Whether there may be an io_uring.
pub fn io_uring() -> io::Result<()> {
    // SAFETY: with no entries and no parameters to read, the call makes nothing: it fails, and how is
    // what is asked for.
    unsafe { libc::syscall(libc::SYS_io_uring_setup, 0, std::ptr::null_mut::<libc::c_void>()) };
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // It has looked at the arguments.
        Some(libc::EFAULT | libc::EINVAL) => Ok(()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_tried_can_be_tried_again() {
        for _ in 0..3 {
            shared_port().unwrap();
        }
        // Either answer is right here; the same each time.
        let answer = || io_uring().map_err(|error| error.raw_os_error());
        assert_eq!(answer(), answer());
    }
}
