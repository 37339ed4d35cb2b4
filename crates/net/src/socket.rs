//! What all sockets of devices have in common: configuration, errors, options, waiting.

use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millstream_roce::SLOTS;
use socket2::{SockAddr, Socket};
use thiserror::Error;

use crate::Driver;
use crate::credentials::why_another;

/// The last two bits of the traffic class of packets that may be marked when there is congestion: ECT(0), RFC 3168.
pub(crate) const ECT0: u8 = 0b10;

/// How to open a socket.
#[derive(Clone, Debug)]
pub struct SocketConfig {
    /// The one local address. Not the unspecified one: the ICRC covers the address.
    pub address: IpAddr,
    /// UDP port here and at every peer: [`millstream_wire::ROCE_PORT`], but for tests.
    pub port: u16,
    /// Let the kernel segment and coalesce where it can (UDP_SEGMENT and UDP_GRO). A packet socket
    /// without it sends single datagrams, and still takes what others segment.
    pub segmentation_offload: bool,
    /// How many bytes to ask for as receive and as send buffer. What the system allows may be
    /// less: see [`SocketInfo`].
    pub buffer_length: usize,
}

impl SocketConfig {
    /// What peers may send before this side gets round to receiving, with the kernel's overhead.
    pub const DEFAULT_BUFFER_LENGTH: usize = 16 << 20;

    /// What eight connections can have in flight: with less, several peers at once feel it.
    const ENOUGH: usize = 4 << 20;
}

/// What a socket has got.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SocketInfo {
    /// What kind of socket it is.
    pub driver: Driver,
    /// Its address.
    pub address: IpAddr,
    /// Its port, and that of every peer.
    pub port: u16,
    /// The kernel segments what we send. Becomes `false` when it refuses to.
    pub segmentation: bool,
    /// What we receive may come coalesced, or as a peer on this machine left it to be segmented.
    pub coalescing: bool,
    /// Bytes of receive buffer by the kernel's account (about half of it is payload). An
    /// unprivileged process gets twice `net.core.rmem_max` at most: far less than a fast
    /// peer has in flight where that is at its default of 208 KiB.
    pub receive_buffer: usize,
    /// Bytes of send buffer by the kernel's account.
    pub send_buffer: usize,
}

impl SocketInfo {
    /// Bytes of datagrams that the receive buffer holds, each with the overhead that the kernel
    /// needs for the smallest. A datagram that comes alone costs twice what it takes by the kernel's
    /// account; those that come coalesced cost little beside their bytes, but of a long queue the
    /// kernel gives back a quarter late.
    pub const fn receive_budget(&self) -> u64 {
        let account = self.receive_buffer as u64;
        if self.coalescing { account / 16 * 11 } else { account / 2 }
    }

    /// Says, once in a process, that the kernel gave so much less receive buffer than was asked for
    /// that peers will notice.
    pub(crate) fn tell_of_small_buffer(&self, asked: usize) {
        static TOLD: Once = Once::new();
        if let Some(what) = too_small(asked, self.receive_buffer) {
            TOLD.call_once(|| tracing::warn!(address = %self.address, "{what}"));
        }
    }
}

/// What there is to say of a receive buffer, by the kernel's account, of which this was asked for.
fn too_small(asked: usize, account: usize) -> Option<String> {
    // The kernel doubles what is asked for, to have room for its own.
    let granted = account / 2;
    (granted < asked.min(SocketConfig::ENOUGH)).then(|| {
        format!(
            "the receive buffer is {} KiB of the {} KiB asked for, since the kernel allows an \
             unprivileged process no more: peers may send less at a time, and what exceeds it is \
             lost and sent again. As root, `sysctl -w net.core.rmem_max={asked}` allows it",
            granted >> 10,
            asked >> 10
        )
    })
}

/// What a socket is bound to, and what the kernel does for it.
#[derive(Debug)]
pub(crate) struct Bound {
    driver: Driver,
    address: IpAddr,
    port: u16,
    segmentation: AtomicBool,
    coalescing: bool,
    receive_buffer: usize,
    send_buffer: usize,
}

impl Bound {
    /// Of a socket whose buffers have their final lengths.
    pub(crate) fn new(
        driver: Driver,
        socket: &Socket,
        local: SocketAddr,
        segmentation: bool,
        coalescing: bool,
    ) -> Result<Self, OpenError> {
        let address = local.ip();
        let failed = |operation| move |source| OpenError::System { address, operation, source };
        Ok(Self {
            driver,
            address,
            port: local.port(),
            segmentation: AtomicBool::new(segmentation),
            coalescing,
            receive_buffer: socket.recv_buffer_size().map_err(failed("SO_RCVBUF"))?,
            send_buffer: socket.send_buffer_size().map_err(failed("SO_SNDBUF"))?,
        })
    }

    pub(crate) fn info(&self) -> SocketInfo {
        SocketInfo {
            driver: self.driver,
            address: self.address,
            port: self.port,
            segmentation: self.segments(),
            coalescing: self.coalescing,
            receive_buffer: self.receive_buffer,
            send_buffer: self.send_buffer,
        }
    }

    pub(crate) const fn address(&self) -> IpAddr {
        self.address
    }

    /// The UDP port, here and at every peer.
    pub(crate) const fn port(&self) -> u16 {
        self.port
    }

    /// Whether the kernel segments messages.
    pub(crate) fn segments(&self) -> bool {
        self.segmentation.load(Ordering::Relaxed)
    }

    /// The kernel refuses to segment: not to be asked again.
    pub(crate) fn stop_segmenting(&self) {
        self.segmentation.store(false, Ordering::Relaxed);
    }
}

/// Why a device could not be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The port is taken.
    #[error(
        "UDP port {port} of {address} is in use, and not to be shared: a switch, a device of the \
         packet driver, the kernel's own RoCE (which takes all addresses) and other programs have \
         an address to themselves: wait until it has ended, or give another address with --bind{}",
        if address.is_loopback() && address.is_ipv4() { ", such as 127.0.0.2" } else { "" }
    )]
    PortInUse {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
    },
    /// The packet driver wants the address for itself.
    #[error(
        "UDP port {port} of {address} is in use, and the packet driver has an address to itself \
         (a packet socket is shown what the kernel coalesced as one frame, for all queue pairs): use \
         the udp driver, which shares an address, or give another address with --bind"
    )]
    PacketDriverAlone {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
    },
    /// Processes of another user share the port.
    #[error(
        "UDP port {port} of {address} is in use by processes of another user (whose number is \
         {user}): only those of one user share an address: run as that user, or give another \
         address with --bind{}",
        why_another(*user)
    )]
    OtherUser {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
        /// The other user's number.
        user: u32,
    },
    /// As many devices as possible share the address.
    #[error(
        "{SLOTS} devices have UDP port {port} of {address}, and no more can share an address: wait \
         until one of them has been closed, or give another address with --bind"
    )]
    NoSlotFree {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
    },
    /// Those who have the address do not let us in.
    #[error(
        "another process has UDP port {port} of {address} and does not answer: is it stopped? Let \
         it go on or end it, or give another address with --bind"
    )]
    NotAdmitted {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
    },
    /// Those who have the address speak another language.
    #[error(
        "another process has UDP port {port} of {address} and shares it in a way that this version \
         does not understand: use one version of millstream for all processes of an address, or \
         give another address with --bind"
    )]
    OtherVersion {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
    },
    /// So many shards are too few or too many.
    #[error("a soft device has 1 to {limit} shards, not {shards}")]
    Shards {
        /// How many were asked for.
        shards: usize,
        /// The most.
        limit: usize,
    },
    /// The packet driver has no shards.
    #[error(
        "{shards} shards for {address}: a device of the packet driver has one (a packet socket is shown \
         what the kernel coalesced as one frame, for all queue pairs): use the udp driver"
    )]
    PacketDriverShards {
        /// The address.
        address: IpAddr,
        /// How many were asked for.
        shards: usize,
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
    /// A packet socket needs a capability that this process does not have.
    #[error(
        "the packet driver at {address} needs the capability CAP_NET_RAW, which this process does \
         not have: run as root, give the program the capability (setcap cap_net_raw+ep), or use \
         the udp driver, which needs none"
    )]
    NotPrivileged {
        /// The address.
        address: IpAddr,
    },
    /// The packet driver writes Ethernet headers.
    #[error(
        "the packet driver needs an Ethernet interface, and {interface}, which has {address}, is \
         none: use the udp driver"
    )]
    NotEthernet {
        /// The address.
        address: IpAddr,
        /// The interface's name.
        interface: String,
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

impl OpenError {
    /// Whether others have the address, who may go.
    pub const fn is_in_use(&self) -> bool {
        use OpenError::{
            NoSlotFree, NotAdmitted, OtherUser, OtherVersion, PacketDriverAlone, PortInUse,
        };
        matches!(
            self,
            PortInUse { .. }
                | PacketDriverAlone { .. }
                | OtherUser { .. }
                | NoSlotFree { .. }
                | NotAdmitted { .. }
                | OtherVersion { .. }
        )
    }
}

/// Why this is no address for a device, if so.
pub(crate) fn unsuitable(address: IpAddr) -> Option<&'static str> {
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

/// Binds, and says what is wrong.
pub(crate) fn bind(socket: &Socket, local: SocketAddr) -> Result<(), OpenError> {
    let address = local.ip();
    socket.bind(&SockAddr::from(local)).map_err(|source| match source.raw_os_error() {
        Some(libc::EADDRINUSE) => OpenError::PortInUse { address, port: local.port() },
        Some(libc::EADDRNOTAVAIL) => OpenError::NotLocal { address },
        _ => OpenError::System { address, operation: "bind", source },
    })
}

/// The address and port that a socket has got, of which the port may have been left to the system.
pub(crate) fn local(socket: &Socket, asked: SocketAddr) -> Result<SocketAddr, OpenError> {
    let address = asked.ip();
    let bound = socket.local_addr().map_err(|source| OpenError::System {
        address,
        operation: "getsockname",
        source,
    })?;
    Ok(SocketAddr::new(address, bound.as_socket().map_or(asked.port(), |bound| bound.port())))
}

/// Asks for buffers of this many bytes, and takes what there is.
pub(crate) fn set_buffers(
    socket: &impl AsFd,
    length: usize,
) -> Result<(), (&'static str, io::Error)> {
    let wanted = libc::c_int::try_from(length).unwrap_or(libc::c_int::MAX);
    let set = |option| set_option(socket, libc::SOL_SOCKET, option, wanted);
    // The first needs CAP_NET_ADMIN, the second is capped by net.core.{r,w}mem_max.
    if set(libc::SO_RCVBUFFORCE).is_err() {
        set(libc::SO_RCVBUF).map_err(|error| ("SO_RCVBUF", error))?;
    }
    if set(libc::SO_SNDBUFFORCE).is_err() {
        set(libc::SO_SNDBUF).map_err(|error| ("SO_SNDBUF", error))?;
    }
    Ok(())
}

/// Sets an option that is an integer.
pub(crate) fn set_option(
    socket: &impl AsFd,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: `value` is an integer of the length that is passed, alive during the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            mem::size_of_val(&value) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Waits until one of `events` (of poll) is there; `false` when `timeout` passed first. A signal that comes meanwhile
/// changes nothing.
pub(crate) fn wait(
    socket: BorrowedFd<'_>,
    events: libc::c_short,
    timeout: Duration,
) -> io::Result<bool> {
    // None is some centuries away.
    let deadline = Instant::now().checked_add(timeout);
    let mut left = timeout;
    loop {
        let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 };
        // Rounded up: what is left of the time is waited for, too.
        let milliseconds = left.as_nanos().div_ceil(1_000_000);
        let milliseconds = libc::c_int::try_from(milliseconds).unwrap_or(libc::c_int::MAX);
        // SAFETY: one pollfd, alive during the call.
        let found = unsafe { libc::poll(&raw mut poll, 1, milliseconds) };
        if found >= 0 {
            return Ok(found > 0);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
        let until = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
        left = deadline.map_or(timeout, until);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::ptr;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_signal_does_not_end_a_wait() {
        extern "C" fn nothing(_: libc::c_int) {}
        // SAFETY: plain old data, of which zeros are a valid value.
        let mut action: libc::sigaction = unsafe { mem::zeroed() };
        action.sa_sigaction = nothing as *const () as libc::sighandler_t;
        // SAFETY: alive during the call, and the handler does nothing.
        let set = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut()) };
        assert_eq!(set, 0);
        let (near, mut far) = UnixStream::pair().unwrap();
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                // SAFETY: no arguments.
                tell.send(unsafe { libc::pthread_self() }).unwrap();
                wait(near.as_fd(), libc::POLLIN, Duration::from_secs(20)).unwrap()
            });
            let waiter = told.recv().unwrap();
            for _ in 0..50 {
                // SAFETY: nobody has joined the thread yet.
                unsafe { libc::pthread_kill(waiter, libc::SIGUSR1) };
                thread::sleep(Duration::from_millis(1));
            }
            far.write_all(&[1]).unwrap();
            assert!(waiting.join().unwrap(), "it was ended by a signal");
        });
        // What is there is found without a wait.
        assert!(wait(near.as_fd(), libc::POLLIN, Duration::ZERO).unwrap());
        assert!(!wait(far.as_fd(), libc::POLLIN, Duration::from_millis(2)).unwrap());
    }

    #[test]
    fn a_buffer_is_too_small_when_the_kernel_says_so_and_peers_notice() {
        let default = SocketConfig::DEFAULT_BUFFER_LENGTH;
        // The kernel's default limit.
        let said = too_small(default, 2 * 212_992).unwrap();
        assert!(said.starts_with("the receive buffer is 208 KiB of the 16384 KiB"), "{said}");
        assert!(said.contains("net.core.rmem_max=16777216"), "{said}");
        for (asked, account) in [
            (default, 2 * default),
            // Less than was asked for, but enough.
            (default, 8 << 20),
            // A test wants it so.
            (1 << 16, 1 << 17),
        ] {
            assert_eq!(too_small(asked, account), None, "{asked} {account}");
        }
        assert!(too_small(1 << 20, 416 << 10).is_some());
    }
}
