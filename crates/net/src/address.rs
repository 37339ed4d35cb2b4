//! Which local address to bind.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use millstream_wire::ROCE_PORT;

/// The local address from which this machine reaches `peer`, by its routing table. Sends nothing.
pub fn local_address_for(peer: IpAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match peer {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
    // Connecting a datagram socket only looks up the route.
    socket.connect(SocketAddr::new(peer, ROCE_PORT))?;
    Ok(socket.local_addr()?.ip())
}

/// The MTU of the path from `local` to `peer`, in bytes of IP packet, as far as this machine
/// knows it: that of the interface, or less where a router has said so.
pub fn path_mtu(local: IpAddr, peer: IpAddr) -> io::Result<usize> {
    let socket = UdpSocket::bind(SocketAddr::new(local, 0))?;
    socket.connect(SocketAddr::new(peer, ROCE_PORT))?;
    let (level, name) = match peer {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU),
    };
    let mut mtu: libc::c_int = 0;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the socket is open, and `mtu` and `length` are a `c_int` and its size, which is what
    // these options fill in.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut mtu).cast(), &raw mut length)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(mtu.unsigned_abs() as usize) }
}

/// The first of 127.0.0.1, 127.0.0.2, ... on which UDP `port` is free now; `None` when 254 are
/// taken. Another process may take it before the caller does: then opening fails with
/// [`crate::OpenError::PortInUse`], and the caller asks again.
pub fn first_free_loopback(port: u16) -> Option<Ipv4Addr> {
    (1..=254).map(|host| Ipv4Addr::new(127, 0, 0, host)).find(|&address| is_free(address, port))
}

fn is_free(address: Ipv4Addr, port: u16) -> bool {
    UdpSocket::bind((address, port)).is_ok()
}
