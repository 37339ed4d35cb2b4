//! Opening the socket: options, buffers, what the kernel can do.

use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use thiserror::Error;

/// How to open a [`UdpSocket`].
#[derive(Clone, Debug)]
pub struct SocketConfig {
    /// The one local address. Not the unspecified one: the ICRC covers the address.
    pub address: IpAddr,
    /// UDP port here and at every peer: [`millstream_wire::ROCE_PORT`], but for tests.
    pub port: u16,
    /// Use UDP_SEGMENT and UDP_GRO where the kernel has them.
    pub segmentation_offload: bool,
    /// How many bytes to ask for as receive and as send buffer. What the system allows may be
    /// less: see [`SocketInfo`].
    pub buffer_length: usize,
}

impl SocketConfig {
    /// What a peer may send before this side gets round to receiving, with the kernel's overhead.
    pub const DEFAULT_BUFFER_LENGTH: usize = 16 << 20;
}

/// What a socket has got.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SocketInfo {
    /// Its address.
    pub address: IpAddr,
    /// Its port, and that of every peer.
    pub port: u16,
    /// The kernel segments what we send (UDP_SEGMENT). Becomes `false` when it refuses to.
    pub segmentation: bool,
    /// The kernel coalesces what we receive (UDP_GRO).
    pub coalescing: bool,
    /// Bytes of receive buffer by the kernel's account (about half of it is payload). An
    /// unprivileged process gets twice `net.core.rmem_max` at most: far less than a fast
    /// peer has in flight where that is at its default of 208 KiB.
    pub receive_buffer: usize,
    /// Bytes of send buffer by the kernel's account.
    pub send_buffer: usize,
}

/// Why a device could not be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The port is taken.
    #[error(
        "another process already has UDP port {port} of {address} (one device per address; the \
         kernel's own RoCE takes all): use another address with --bind, such as 127.0.0.2"
    )]
    PortInUse {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
    },
    /// The address is none of this machine's.
    #[error("no interface of this machine has the address {address}: see `ip address` for those")]
    NotLocal {
        /// The address.
        address: IpAddr,
    },
    /// The address does not name one interface's address.
    #[error(
        "a device needs one address of one interface, and {address} is {what}: use another with \
         --bind"
    )]
    Unsuitable {
        /// The address.
        address: IpAddr,
        /// What it is.
        what: &'static str,
    },
    /// A system call failed.
    #[error("cannot open a device at {address}: {operation} failed")]
    System {
        /// The address.
        address: IpAddr,
        /// The call.
        operation: &'static str,
        /// Its error.
        #[source]
        source: io::Error,
    },
}

/// An unconnected, non-blocking UDP socket bound to one address, that sets don't-fragment.
#[derive(Debug)]
pub struct UdpSocket {
    socket: Socket,
    address: IpAddr,
    port: u16,
    segmentation: AtomicBool,
    coalescing: bool,
    receive_buffer: usize,
    send_buffer: usize,
}

impl UdpSocket {
    /// Opens and binds.
    pub fn open(config: &SocketConfig) -> Result<Self, OpenError> {
        let address = config.address.to_canonical();
        if let Some(what) = unsuitable(address) {
            return Err(OpenError::Unsuitable { address, what });
        }
        let failed = |operation| move |source| OpenError::System { address, operation, source };
        let domain = Domain::for_address(SocketAddr::new(address, config.port));
        // socket2 sets close-on-exec. Neither SO_REUSEADDR nor SO_REUSEPORT: two processes on one
        // port would take each other's packets.
        let socket =
            Socket::new(domain, Type::DGRAM, Some(Protocol::UDP)).map_err(failed("socket"))?;
        socket.set_nonblocking(true).map_err(failed("O_NONBLOCK"))?;
        let set = |level, option, value| set_option(&socket, level, option, value);
        match address {
            IpAddr::V4(_) => {
                set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)
                    .map_err(failed("IP_MTU_DISCOVER"))?;
                set(libc::IPPROTO_IP, libc::IP_RECVTOS, 1).map_err(failed("IP_RECVTOS"))?;
            }
            IpAddr::V6(_) => {
                socket.set_only_v6(true).map_err(failed("IPV6_V6ONLY"))?;
                set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)
                    .map_err(failed("IPV6_MTU_DISCOVER"))?;
                set(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)
                    .map_err(failed("IPV6_RECVTCLASS"))?;
            }
        }
        // Counts what the kernel drops; without it, losses are only harder to explain.
        let _ = set(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1);
        let wanted = libc::c_int::try_from(config.buffer_length).unwrap_or(libc::c_int::MAX);
        // The first needs CAP_NET_ADMIN, the second is capped by net.core.{r,w}mem_max.
        if set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, wanted).is_err() {
            set(libc::SOL_SOCKET, libc::SO_RCVBUF, wanted).map_err(failed("SO_RCVBUF"))?;
        }
        if set(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, wanted).is_err() {
            set(libc::SOL_SOCKET, libc::SO_SNDBUF, wanted).map_err(failed("SO_SNDBUF"))?;
        }
        // Setting the default segment to 0 (none) changes nothing, but fails where it is unknown.
        let segmentation =
            config.segmentation_offload && set(libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok();
        let coalescing =
            config.segmentation_offload && set(libc::SOL_UDP, libc::UDP_GRO, 1).is_ok();
        let local = SockAddr::from(SocketAddr::new(address, config.port));
        socket.bind(&local).map_err(|source| match source.raw_os_error() {
            Some(libc::EADDRINUSE) => OpenError::PortInUse { address, port: config.port },
            Some(libc::EADDRNOTAVAIL) => OpenError::NotLocal { address },
            _ => OpenError::System { address, operation: "bind", source },
        })?;
        let bound = socket.local_addr().map_err(failed("getsockname"))?;
        let receive_buffer = socket.recv_buffer_size().map_err(failed("SO_RCVBUF"))?;
        let send_buffer = socket.send_buffer_size().map_err(failed("SO_SNDBUF"))?;
        Ok(Self {
            address,
            port: bound.as_socket().map_or(config.port, |bound| bound.port()),
            segmentation: AtomicBool::new(segmentation),
            coalescing,
            receive_buffer,
            send_buffer,
            socket,
        })
    }

    /// What it has got.
    pub fn info(&self) -> SocketInfo {
        SocketInfo {
            address: self.address,
            port: self.port,
            segmentation: self.segmentation(),
            coalescing: self.coalescing,
            receive_buffer: self.receive_buffer,
            send_buffer: self.send_buffer,
        }
    }

    /// Waits until something can be received; `false` when `timeout` passed first.
    pub fn wait_readable(&self, timeout: Duration) -> io::Result<bool> {
        self.wait(libc::POLLIN, timeout)
    }

    /// Waits until something can be sent; `false` when `timeout` passed first.
    pub fn wait_writable(&self, timeout: Duration) -> io::Result<bool> {
        self.wait(libc::POLLOUT, timeout)
    }

    pub(super) fn segmentation(&self) -> bool {
        self.segmentation.load(Ordering::Relaxed)
    }

    pub(super) fn give_up_segmentation(&self) {
        self.segmentation.store(false, Ordering::Relaxed);
    }

    pub(super) const fn address(&self) -> IpAddr {
        self.address
    }

    pub(super) const fn port(&self) -> u16 {
        self.port
    }

    pub(super) const fn socket(&self) -> &Socket {
        &self.socket
    }

    pub(super) fn raw(&self) -> libc::c_int {
        self.socket.as_raw_fd()
    }

    #[cfg(test)]
    pub(super) fn set_no_checksum(&self) {
        set_option(&self.socket, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
    }

    fn wait(&self, events: libc::c_short, timeout: Duration) -> io::Result<bool> {
        let mut poll = libc::pollfd { fd: self.raw(), events, revents: 0 };
        let milliseconds = libc::c_int::try_from(timeout.as_millis()).unwrap_or(libc::c_int::MAX);
        // SAFETY: one pollfd, alive during the call.
        match unsafe { libc::poll(&raw mut poll, 1, milliseconds) } {
            0 => Ok(false),
            1 => Ok(true),
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => Ok(false),
                error => Err(error),
            },
        }
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn unsuitable(address: IpAddr) -> Option<&'static str> {
    if address.is_unspecified() {
        return Some("the unspecified address");
    }
    if address.is_multicast() {
        return Some("a multicast address");
    }
    match address {
        IpAddr::V4(v4) if v4.is_broadcast() => Some("the broadcast address"),
        // It would need the name of its interface, which packets cannot carry.
        IpAddr::V6(v6) if v6.is_unicast_link_local() => Some("a link-local address"),
        _ => None,
    }
}

fn set_option(
    socket: &Socket,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: `value` is an integer of the length that is passed, alive during the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            mem::size_of_val(&value) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
