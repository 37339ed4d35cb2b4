//! Network interfaces: what their frames look like.

use std::ffi::CStr;
use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

/// Interface types (`ARPHRD_` in the kernel's `if_arp.h`) whose frames have Ethernet headers.
pub(super) const ETHERNET: u16 = 1;
pub(super) const LOOPBACK: u16 = 772;

/// What the kernel says of an interface.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Interface {
    /// `ARPHRD_`.
    pub(super) kind: u16,
    /// Its own link address.
    pub(super) link_address: [u8; 6],
    /// The longest IP packet.
    pub(super) mtu: usize,
}

impl Interface {
    /// Whether its frames have Ethernet headers.
    pub(super) const fn has_ethernet_headers(&self) -> bool {
        matches!(self.kind, ETHERNET | LOOPBACK)
    }

    /// Asks for the interface of this number, by way of any socket.
    pub(super) fn query(socket: &impl AsFd, index: u32) -> io::Result<Self> {
        let mut name = [0; libc::IFNAMSIZ];
        // SAFETY: the buffer has the length that the function is documented to need.
        if unsafe { libc::if_indextoname(index, name.as_mut_ptr()) }.is_null() {
            return Err(io::Error::last_os_error());
        }
        Self::by_name(socket, name)
    }

    fn by_name(socket: &impl AsFd, name: [libc::c_char; libc::IFNAMSIZ]) -> io::Result<Self> {
        let ask = |request: libc::c_ulong| {
            // SAFETY: plain old data, of which zeros are a valid value.
            let mut about: libc::ifreq = unsafe { mem::zeroed() };
            about.ifr_name = name;
            // SAFETY: these requests read the name from an `ifreq` and write the rest of it.
            let result =
                unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), request as _, &raw mut about) };
            if result < 0 { Err(io::Error::last_os_error()) } else { Ok(about.ifr_ifru) }
        };
        // SAFETY: the kernel filled in that part of the union for which it was asked.
        let (address, mtu) =
            unsafe { (ask(libc::SIOCGIFHWADDR)?.ifru_hwaddr, ask(libc::SIOCGIFMTU)?.ifru_mtu) };
        let mut link_address = [0; 6];
        for (to, from) in link_address.iter_mut().zip(address.sa_data) {
            *to = from as u8;
        }
        Ok(Self { kind: address.sa_family, link_address, mtu: usize::try_from(mtu).unwrap_or(0) })
    }
}

/// The name and the properties of the interface that has this address; `None` when none has it by
/// itself: all of 127/8 belongs to the loopback interface, which has one of them.
pub(super) fn owner(
    socket: &impl AsFd,
    address: IpAddr,
) -> io::Result<Option<(String, Interface)>> {
    let mut list = ptr::null_mut();
    // SAFETY: fills in a pointer, which is freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = None;
    let mut next = list;
    // SAFETY: the list that the kernel's answer was made into; each entry points to the next one or
    // nowhere, and nothing of it is kept.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: an address of the list, which is complete for its family, or null.
        if unsafe { ip_address(entry.ifa_addr) } == Some(address) {
            // SAFETY: names end with a zero.
            found = Some(unsafe { CStr::from_ptr(entry.ifa_name) }.to_owned());
            break;
        }
        next = entry.ifa_next;
    }
    // SAFETY: it came from `getifaddrs`, and is not used any more.
    unsafe { libc::freeifaddrs(list) };
    let Some(name) = found else { return Ok(None) };
    let mut padded = [0; libc::IFNAMSIZ];
    // An alias ("eth0:1") has a longer label at most; the kernel takes it for the interface.
    for (to, from) in padded.iter_mut().zip(name.to_bytes()) {
        *to = *from as libc::c_char;
    }
    let interface = Interface::by_name(socket, padded)?;
    Ok(Some((name.to_string_lossy().into_owned(), interface)))
}

/// # Safety
/// `address` must be null or point to a socket address that is complete for its family.
unsafe fn ip_address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller's promise; every address starts with its family.
    let family = unsafe { address.as_ref() }?.sa_family;
    // SAFETY: of that family, so of that length; perhaps not of that alignment.
    unsafe {
        match libc::c_int::from(family) {
            libc::AF_INET => {
                let v4 = ptr::read_unaligned(address.cast::<libc::sockaddr_in>());
                Some(Ipv4Addr::from_bits(u32::from_be(v4.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let v6 = ptr::read_unaligned(address.cast::<libc::sockaddr_in6>());
                Some(Ipv6Addr::from_octets(v6.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn the_loopback_interface_has_the_loopback_address() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (name, interface) = owner(&socket, Ipv4Addr::LOCALHOST.into()).unwrap().unwrap();
        assert_eq!(interface.kind, LOOPBACK);
        assert!(interface.has_ethernet_headers());
        assert_eq!(interface.link_address, [0; 6]);
        // SAFETY: a name that ends with a zero.
        let index = unsafe { libc::if_nametoindex(std::ffi::CString::new(name).unwrap().as_ptr()) };
        assert_eq!(Interface::query(&socket, index).unwrap(), interface);
    }

    #[test]
    fn what_is_not_there_is_not_found() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(owner(&socket, Ipv4Addr::new(203, 0, 113, 7).into()).unwrap(), None);
        let error = Interface::query(&socket, u32::MAX >> 1).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENXIO));
    }
}
