//! Opening the socket: options, buffers, what the kernel can do.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use millstream_roce::QueuePairNumbers;
use socket2::{Domain, Protocol, Socket, Type};

use crate::Driver;
use crate::shared_address::{HandOver, Membership};
use crate::socket::{
    Bound, OpenError, SocketConfig, SocketInfo, bind, local, set_buffers, set_option, unsuitable,
    wait,
};

/// An unconnected, non-blocking UDP socket bound to one address, that sets don't-fragment.
#[derive(Debug)]
pub struct UdpSocket {
    socket: Socket,
    bound: Bound,
    sharing: Option<Box<Sharing>>,
}

/// What a socket has that shares its address.
#[derive(Debug)]
struct Sharing {
    hand_over: HandOver,
    member: Membership,
}

impl UdpSocket {
    /// Opens and binds, and has the address to itself.
    pub fn open(config: &SocketConfig) -> Result<Self, OpenError> {
        let asked = check(config)?;
        let failed = failed(asked);
        // socket2 sets close-on-exec. Neither SO_REUSEADDR nor SO_REUSEPORT: two processes on one
        // port would take each other's packets.
        let socket = Socket::new(Domain::for_address(asked), Type::DGRAM, Some(Protocol::UDP))
            .map_err(|source| failed("socket", source))?;
        socket.set_nonblocking(true).map_err(|source| failed("O_NONBLOCK", source))?;
        if asked.is_ipv6() {
            socket.set_only_v6(true).map_err(|source| failed("IPV6_V6ONLY", source))?;
        }
        let options = set_options(&socket, asked, config)?;
        bind(&socket, asked)?;
        let local = local(&socket, asked)?;
        let bound = options.bound(&socket, local)?;
        Ok(Self { socket, bound, sharing: None })
    }

    /// Opens a socket that shares its address with other devices, which open theirs in this way too. It
    /// gets the datagrams for some of the queue pair numbers: [`UdpSocket::queue_pair_numbers`].
    pub fn open_shared(config: &SocketConfig) -> Result<Self, OpenError> {
        let asked = check(config)?;
        let failed = failed(asked);
        let member = Membership::claim(asked)?;
        let socket = member.socket().map_err(|source| failed("dup", source))?;
        let options = set_options(&socket, asked, config)?;
        let bound = options.bound(&socket, asked)?;
        let hand_over = member.hand_over(asked);
        member.open().map_err(|source| failed("SO_DETACH_FILTER", source))?;
        Ok(Self { socket, bound, sharing: Some(Box::new(Sharing { hand_over, member })) })
    }

    /// The queue pair numbers whose datagrams it gets.
    pub fn queue_pair_numbers(&self) -> QueuePairNumbers {
        self.sharing.as_ref().map_or(QueuePairNumbers::All, |sharing| sharing.member.numbers())
    }

    /// How datagrams get to other devices of the address, if there are any.
    pub(super) fn hand_over(&self) -> Option<&HandOver> {
        self.sharing.as_ref().map(|sharing| &sharing.hand_over)
    }

    /// What it has got.
    pub fn info(&self) -> SocketInfo {
        self.bound.info()
    }

    /// Waits until something can be received; `false` when `timeout` passed first.
    pub fn wait_readable(&self, timeout: Duration) -> io::Result<bool> {
        wait(self.as_fd(), libc::POLLIN, timeout)
    }

    /// Waits until something can be sent; `false` when `timeout` passed first.
    pub fn wait_writable(&self, timeout: Duration) -> io::Result<bool> {
        wait(self.as_fd(), libc::POLLOUT, timeout)
    }

    pub(super) const fn bound(&self) -> &Bound {
        &self.bound
    }

    pub(super) const fn socket(&self) -> &Socket {
        &self.socket
    }

    /// What is sent from now on has this traffic class: the byte of IPv6's header of that name, or IPv4's type of
    /// service. Its last two bits are those of congestion marks (RFC 3168).
    pub fn set_traffic_class(&self, class: u8) -> io::Result<()> {
        let class = libc::c_int::from(class);
        match self.bound.address() {
            IpAddr::V4(_) => set_option(&self.socket, libc::IPPROTO_IP, libc::IP_TOS, class),
            IpAddr::V6(_) => set_option(&self.socket, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, class),
        }
    }

    #[cfg(test)]
    pub(super) fn set_no_checksum(&self) {
        set_option(&self.socket, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
    }
}

/// The address and port, if they are fit for a device.
fn check(config: &SocketConfig) -> Result<SocketAddr, OpenError> {
    let address = config.address.to_canonical();
    match unsuitable(address) {
        Some(what) => Err(OpenError::Unsuitable { address, what }),
        None => Ok(SocketAddr::new(address, config.port)),
    }
}

fn failed(local: SocketAddr) -> impl Fn(&'static str, io::Error) -> OpenError + Copy {
    move |operation, source| OpenError::System { address: local.ip(), operation, source }
}

/// What the kernel does for a socket.
struct Options {
    segmentation: bool,
    coalescing: bool,
}

impl Options {
    fn bound(&self, socket: &Socket, local: SocketAddr) -> Result<Bound, OpenError> {
        Bound::new(Driver::Udp, socket, local, self.segmentation, self.coalescing)
    }
}

/// Sets all options: a socket that another device has used before may have others.
fn set_options(
    socket: &Socket,
    local: SocketAddr,
    config: &SocketConfig,
) -> Result<Options, OpenError> {
    let failed = |operation| move |source| failed(local)(operation, source);
    let set = |level, option, value| set_option(socket, level, option, value);
    match local.ip() {
        IpAddr::V4(_) => {
            set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)
                .map_err(failed("IP_MTU_DISCOVER"))?;
            set(libc::IPPROTO_IP, libc::IP_RECVTOS, 1).map_err(failed("IP_RECVTOS"))?;
            set(libc::IPPROTO_IP, libc::IP_TOS, 0).map_err(failed("IP_TOS"))?;
        }
        IpAddr::V6(_) => {
            set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)
                .map_err(failed("IPV6_MTU_DISCOVER"))?;
            set(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1).map_err(failed("IPV6_RECVTCLASS"))?;
            set(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, 0).map_err(failed("IPV6_TCLASS"))?;
        }
    }
    // Counts what the kernel drops; without it, losses are only harder to explain.
    let _ = set(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1);
    set_buffers(socket, config.buffer_length)
        .map_err(|(operation, source)| failed(operation)(source))?;
    // Setting the default segment to 0 (none) changes nothing, but fails where it is unknown.
    let segmentation =
        config.segmentation_offload && set(libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok();
    let wanted = config.segmentation_offload;
    let coalescing = set(libc::SOL_UDP, libc::UDP_GRO, wanted.into()).is_ok() && wanted;
    Ok(Options { segmentation, coalescing })
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
