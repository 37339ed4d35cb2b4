//! Which local address to bind.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::AsRawFd;
use std::{fs, io, ptr};

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

/// The addresses of this machine's interfaces, each with the name of its interface.
pub fn local_addresses() -> io::Result<Vec<(String, IpAddr)>> {
    let mut list = ptr::null_mut();
    // SAFETY: fills in a pointer, which is freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut addresses = Vec::new();
    let mut next = list;
    // SAFETY: an entry of the list, or null at its end. Nothing of it is kept.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: the address of an entry is null or complete for its family.
        if let Some(address) = unsafe { ip_address(entry.ifa_addr) } {
            // SAFETY: names end with a zero.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) };
            addresses.push((name.to_string_lossy().into_owned(), address));
        }
        next = entry.ifa_next;
    }
    // SAFETY: it came from `getifaddrs`, and is not used any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(addresses)
}

/// The MTU of the interface that has this address, in bytes of IP packet; `None` when none lists
/// it, as for all of 127/8 but its first.
pub fn interface_mtu(local: IpAddr) -> io::Result<Option<usize>> {
    let Some((name, _)) = local_addresses()?.into_iter().find(|(_, address)| *address == local)
    else {
        return Ok(None);
    };
    let text = fs::read_to_string(format!("/sys/class/net/{name}/mtu"))?;
    let mtu =
        text.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
    mtu.map(Some)
}

/// The IP address in a socket address; `None` when it is of another family.
///
/// # Safety
/// `address` must be null or point to a socket address that is complete for its family.
unsafe fn ip_address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller's promise; every address begins with its family.
    let family = unsafe { address.as_ref() }?.sa_family;
    match libc::c_int::from(family) {
        libc::AF_INET => {
            // SAFETY: it is of this family, so as long as this; perhaps not as aligned.
            let v4 = unsafe { ptr::read_unaligned(address.cast::<libc::sockaddr_in>()) };
            Some(Ipv4Addr::from_bits(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { ptr::read_unaligned(address.cast::<libc::sockaddr_in6>()) };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

/// As [`ip_address`], with the zone where it has one, and port 0.
///
/// # Safety
/// As there.
pub(crate) unsafe fn socket_address(address: *const libc::sockaddr) -> Option<SocketAddr> {
    // SAFETY: the caller's promise.
    match unsafe { ip_address(address) }? {
        IpAddr::V4(v4) => Some((v4, 0).into()),
        IpAddr::V6(v6) => {
            // SAFETY: it is of this family, so as long as this; perhaps not as aligned.
            let whole = unsafe { ptr::read_unaligned(address.cast::<libc::sockaddr_in6>()) };
            Some(SocketAddrV6::new(v6, 0, 0, whole.sin6_scope_id).into())
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_among_the_addresses() {
        let addresses = local_addresses().unwrap();
        let loopback = ("lo".to_owned(), IpAddr::from([127, 0, 0, 1]));
        assert!(addresses.contains(&loopback), "{addresses:?}");
    }

    #[test]
    fn an_interface_tells_its_mtu() {
        let loopback = IpAddr::from([127, 0, 0, 1]);
        // Towards itself the path is the interface, less what an IP packet cannot hold.
        let path = path_mtu(loopback, loopback).unwrap();
        let mtu = interface_mtu(loopback).unwrap().unwrap();
        assert_eq!(mtu.min(usize::from(u16::MAX)), path);
        // TEST-NET-1 is nobody's.
        assert_eq!(interface_mtu(IpAddr::from([192, 0, 2, 1])).unwrap(), None);
    }
}
