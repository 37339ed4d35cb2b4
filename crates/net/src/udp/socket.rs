//! Opening the socket: options, buffers, what the kernel can do.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use crate::Driver;
use crate::socket::{
    Bound, ECT0, OpenError, SocketConfig, SocketInfo, bind, local, set_buffers, set_option,
    unsuitable, wait,
};

/// An unconnected, non-blocking UDP socket bound to one address, that sets don't-fragment.
#[derive(Debug)]
pub struct UdpSocket {
    socket: Socket,
    bound: Bound,
}

impl UdpSocket {
    /// Opens and binds.
    pub fn open(config: &SocketConfig) -> Result<Self, OpenError> {
        let address = config.address.to_canonical();
        if let Some(what) = unsuitable(address) {
            return Err(OpenError::Unsuitable { address, what });
        }
        let failed = |operation| move |source| OpenError::System { address, operation, source };
        let asked = SocketAddr::new(address, config.port);
        // socket2 sets close-on-exec. Neither SO_REUSEADDR nor SO_REUSEPORT: two processes on one
        // port would take each other's packets.
        let socket = Socket::new(Domain::for_address(asked), Type::DGRAM, Some(Protocol::UDP))
            .map_err(failed("socket"))?;
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
        set_buffers(&socket, config.buffer_length)
            .map_err(|(operation, source)| failed(operation)(source))?;
        // Setting the default segment to 0 (none) changes nothing, but fails where it is unknown.
        let segmentation =
            config.segmentation_offload && set(libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok();
        let coalescing =
            config.segmentation_offload && set(libc::SOL_UDP, libc::UDP_GRO, 1).is_ok();
        bind(&socket, asked)?;
        let local = local(&socket, asked)?;
        let bound = Bound::new(Driver::Udp, &socket, local, segmentation, coalescing)?;
        Ok(Self { socket, bound })
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

    /// Marks all that is sent from now on as able to carry congestion marks: ECT(0), RFC 3168.
    pub fn set_congestion_marks(&self) -> io::Result<()> {
        let class = libc::c_int::from(ECT0);
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

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
