//! Questions to the kernel about routes and neighbours (rtnetlink(7)).
//!
//! Only two questions and few of their answers' attributes matter here. All others are skipped by
//! their length, so that a kernel may say more than this code knows.

use std::io;
use std::mem;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// Longer than any answer: a route has a few attributes.
const BUFFER_LENGTH: usize = 16 << 10;

/// The kernel answers while it is asked; only a held lock keeps it from doing so.
const PATIENCE: Duration = Duration::from_secs(2);

/// Bytes of `nlmsghdr`, and of the heads of route and neighbour messages (`rtmsg`, `ndmsg`).
const HEADER: usize = 16;
const BODY: usize = 12;

/// Notices of changes to neighbours, links, addresses and routes.
const GROUPS: u32 = (libc::RTMGRP_NEIGH
    | libc::RTMGRP_LINK
    | libc::RTMGRP_IPV4_IFADDR
    | libc::RTMGRP_IPV4_ROUTE
    | libc::RTMGRP_IPV6_IFADDR
    | libc::RTMGRP_IPV6_ROUTE)
    .cast_unsigned();

/// A way out of this machine.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Route {
    /// Number of the interface.
    pub(super) interface: u32,
    /// Whose link address frames need: the destination's or a router's. `None` when the
    /// destination is this machine.
    pub(super) next_hop: Option<IpAddr>,
    /// The longest IP packet, where the route says so.
    pub(super) mtu: Option<usize>,
}

/// What the kernel knows of a neighbour.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Neighbour {
    /// Its link address, and that it is there.
    Confirmed([u8; 6]),
    /// A link address of old, good until somebody else has it.
    Stale([u8; 6]),
    /// Nobody asked for it yet, or there is no answer yet.
    Unknown,
    /// There was no answer.
    Failed,
}

/// A socket for questions.
pub(super) struct Netlink {
    socket: Socket,
    sequence: u32,
    buffer: Box<[u8]>,
}

impl Netlink {
    pub(super) fn open() -> io::Result<Self> {
        let socket = open(0)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { socket, sequence: 0, buffer: vec![0; BUFFER_LENGTH].into() })
    }

    /// How packets of `source` get to `destination`.
    pub(super) fn route(&mut self, source: IpAddr, destination: IpAddr) -> io::Result<Route> {
        let mut request = Request::new(libc::RTM_GETROUTE);
        let bits = (octets(destination).as_ref().len() * 8) as u8;
        // Family, prefix lengths; what the rest says is for the kernel to tell.
        request.bytes[HEADER..HEADER + 3].copy_from_slice(&[family(destination), bits, bits]);
        request.attribute(libc::RTA_DST, octets(destination).as_ref());
        request.attribute(libc::RTA_SRC, octets(source).as_ref());
        let answer = self.ask(request, libc::RTM_NEWROUTE)?;
        parse_route(answer, destination).ok_or_else(|| incomprehensible("route"))
    }

    /// The link address of a neighbour.
    pub(super) fn neighbour(&mut self, interface: u32, address: IpAddr) -> io::Result<Neighbour> {
        let mut request = Request::new(libc::RTM_GETNEIGH);
        request.bytes[HEADER] = family(address);
        request.bytes[HEADER + 4..HEADER + 8].copy_from_slice(&interface.to_ne_bytes());
        request.attribute(NDA_DST, octets(address).as_ref());
        match self.ask(request, libc::RTM_NEWNEIGH) {
            Ok(answer) => parse_neighbour(answer).ok_or_else(|| incomprehensible("neighbour")),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(Neighbour::Unknown),
            Err(error) => Err(error),
        }
    }

    /// Sends a request, and returns the answer behind its header.
    fn ask(&mut self, request: Request, expected: u16) -> io::Result<&[u8]> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = request.finish(self.sequence);
        if self.socket.send(&request)? != request.len() {
            return Err(incomprehensible("request"));
        }
        let length = loop {
            let length = io::Read::read(&mut &self.socket, &mut self.buffer)?;
            match parse_header(&self.buffer[..length]) {
                Some((_, sequence, _)) if sequence == self.sequence => break length,
                // It answers an earlier question, whose patience ran out.
                Some(_) => {}
                None => return Err(incomprehensible("message")),
            }
        };
        match parse_header(&self.buffer[..length]) {
            Some((kind, _, body)) if kind == expected => Ok(body),
            Some((kind, _, body)) if i32::from(kind) == libc::NLMSG_ERROR => Err(error(body)),
            _ => Err(incomprehensible("kind of message")),
        }
    }
}

/// A socket that is readable when something changed.
pub(super) struct Notices(Socket);

impl Notices {
    pub(super) fn open() -> io::Result<Self> {
        let socket = open(GROUPS)?;
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }

    /// Whether something changed since the last call. What it was is not looked at: everything is
    /// asked again.
    pub(super) fn take(&self) -> bool {
        let mut buffer = [0; 4096];
        let mut any = false;
        loop {
            // A notice that is longer is cut, and one that was lost is an error: both are notices.
            match io::Read::read(&mut &self.0, &mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return any,
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => any = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return any,
                Ok(_) => any = true,
            }
        }
    }
}

impl AsFd for Notices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
/// Link addresses that were confirmed or need no confirmation.
const CONFIRMED: u16 = libc::NUD_REACHABLE | libc::NUD_NOARP | libc::NUD_PERMANENT;
/// Link addresses that the kernel would use, too.
const STALE: u16 = libc::NUD_STALE | libc::NUD_DELAY | libc::NUD_PROBE;

fn open(groups: u32) -> io::Result<Socket> {
    let protocol = Protocol::from(libc::NETLINK_ROUTE);
    let socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::RAW, Some(protocol))?;
    // SAFETY: the storage is longer than a `sockaddr_nl` and as aligned, and zeros, but for the
    // family and the groups, are right for it.
    let address = unsafe {
        SockAddr::try_init(|storage, length| {
            let address = storage.cast::<libc::sockaddr_nl>();
            (*address).nl_family = libc::AF_NETLINK as libc::sa_family_t;
            (*address).nl_groups = groups;
            *length = mem::size_of::<libc::sockaddr_nl>() as libc::socklen_t;
            Ok(())
        })
    }?
    .1;
    socket.bind(&address)?;
    Ok(socket)
}

struct Request {
    bytes: Vec<u8>,
}

impl Request {
    fn new(kind: u16) -> Self {
        let mut bytes = vec![0; HEADER + BODY];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
        Self { bytes }
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        let length = (4 + value.len()) as u16;
        self.bytes.extend(length.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }
}

fn parse_header(message: &[u8]) -> Option<(u16, u32, &[u8])> {
    let length = u32_at(message, 0)? as usize;
    let (kind, sequence) = (u16_at(message, 4)?, u32_at(message, 8)?);
    Some((kind, sequence, message.get(HEADER..length)?))
}

fn error(body: &[u8]) -> io::Error {
    match u32_at(body, 0).map(u32::cast_signed) {
        Some(code) if code < 0 => io::Error::from_raw_os_error(-code),
        _ => incomprehensible("error"),
    }
}

fn incomprehensible(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("netlink: an incomprehensible {what}"))
}

fn parse_route(body: &[u8], destination: IpAddr) -> Option<Route> {
    /// Attributes of RTA_METRICS.
    const RTAX_MTU: u16 = 2;
    let own_family = *body.first()?;
    let local = match *body.get(7)? {
        libc::RTN_LOCAL => true,
        libc::RTN_UNICAST => false,
        // To many, or to nobody.
        _ => return None,
    };
    let (mut interface, mut next_hop, mut mtu) = (None, destination, None);
    for (kind, value) in attributes(body.get(BODY..)?) {
        match kind {
            libc::RTA_OIF => interface = u32_at(value, 0),
            libc::RTA_GATEWAY => next_hop = address(own_family, value)?,
            // A router of another family: its family, then its address.
            libc::RTA_VIA => {
                let family = u16_at(value, 0)?;
                next_hop = address(u8::try_from(family).ok()?, value.get(2..)?)?;
            }
            libc::RTA_METRICS => {
                let metric = attributes(value).find(|(kind, _)| *kind == RTAX_MTU);
                mtu = metric.and_then(|(_, value)| u32_at(value, 0)).filter(|&mtu| mtu > 0);
            }
            _ => {}
        }
    }
    Some(Route {
        interface: interface?,
        next_hop: (!local).then_some(next_hop),
        mtu: mtu.map(|mtu| mtu as usize),
    })
}

fn parse_neighbour(body: &[u8]) -> Option<Neighbour> {
    let state = u16_at(body, 8)?;
    let link_address = attributes(body.get(BODY..)?)
        .find(|(kind, _)| *kind == NDA_LLADDR)
        .and_then(|(_, value)| value.try_into().ok());
    Some(match link_address {
        Some(link_address) if state & CONFIRMED != 0 => Neighbour::Confirmed(link_address),
        Some(link_address) if state & STALE != 0 => Neighbour::Stale(link_address),
        _ if state & libc::NUD_FAILED != 0 => Neighbour::Failed,
        _ => Neighbour::Unknown,
    })
}

/// Kinds and values, up to the first that does not fit.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    /// Nested, and in network byte order: flags in the kind.
    const FLAGS: u16 = 0xc000;
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let kind = u16_at(bytes, 2)? & !FLAGS;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    })
}

fn family(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

fn octets(address: IpAddr) -> Octets {
    match address {
        IpAddr::V4(address) => Octets::V4(address.octets()),
        IpAddr::V6(address) => Octets::V6(address.octets()),
    }
}

enum Octets {
    V4([u8; 4]),
    V6([u8; 16]),
}

impl AsRef<[u8]> for Octets {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::V4(octets) => octets,
            Self::V6(octets) => octets,
        }
    }
}

fn address(family: u8, bytes: &[u8]) -> Option<IpAddr> {
    match i32::from(family) {
        libc::AF_INET => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        libc::AF_INET6 => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        _ => None,
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn the_way_to_oneself_is_the_loopback_interface() {
        let mut netlink = Netlink::open().unwrap();
        let here = Ipv4Addr::LOCALHOST.into();
        let there = Ipv4Addr::new(127, 7, 8, 9).into();
        let route = netlink.route(here, there).unwrap();
        assert_eq!((route.next_hop, route.mtu), (None, None));
        let lo = c"lo";
        // SAFETY: a name that ends with a zero.
        assert_eq!(route.interface, unsafe { libc::if_nametoindex(lo.as_ptr()) });
        // Nobody is a neighbour there, by an address that no neighbour has.
        let nobody = netlink.neighbour(route.interface, Ipv4Addr::new(203, 0, 113, 7).into());
        assert_eq!(nobody.unwrap(), Neighbour::Unknown);
    }

    #[test]
    fn what_cannot_be_reached_from_there_is_an_error() {
        let mut netlink = Netlink::open().unwrap();
        let foreign = Ipv4Addr::new(203, 0, 113, 7).into();
        assert!(netlink.route(foreign, Ipv4Addr::LOCALHOST.into()).is_err());
        // The socket is good for more.
        assert!(netlink.route(Ipv4Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()).is_ok());
    }

    fn message(head: [u8; BODY], attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut request = Request::new(0);
        request.bytes[HEADER..].copy_from_slice(&head);
        for (kind, value) in attributes {
            request.attribute(*kind, value);
        }
        request.bytes.split_off(HEADER)
    }

    fn route(kind: u8, attributes: &[(u16, &[u8])]) -> Option<Route> {
        let mut head = [0; BODY];
        head[0] = libc::AF_INET as u8;
        head[7] = kind;
        parse_route(&message(head, attributes), Ipv4Addr::new(10, 0, 0, 2).into())
    }

    #[test]
    fn routes_lead_to_the_destination_or_to_a_router() {
        let oif = (libc::RTA_OIF, &3_u32.to_ne_bytes()[..]);
        let to = |next_hop: Option<IpAddr>| Some(Route { interface: 3, next_hop, mtu: None });
        let destination = Ipv4Addr::new(10, 0, 0, 2).into();
        assert_eq!(route(libc::RTN_UNICAST, &[oif]), to(Some(destination)));
        assert_eq!(route(libc::RTN_LOCAL, &[oif]), to(None));
        let gateway = (libc::RTA_GATEWAY, &[10, 0, 0, 1][..]);
        let router = Ipv4Addr::new(10, 0, 0, 1).into();
        // Attributes that nobody knows are skipped.
        let unknown = (0x3fff, &[1, 2, 3][..]);
        assert_eq!(route(libc::RTN_UNICAST, &[unknown, oif, gateway]), to(Some(router)));
        let v6 = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
        let via = [&(libc::AF_INET6 as u16).to_ne_bytes()[..], &v6.octets()].concat();
        assert_eq!(route(libc::RTN_UNICAST, &[oif, (libc::RTA_VIA, &via)]), to(Some(v6.into())));
        let mtu = message([0; BODY], &[(2, &1400_u32.to_ne_bytes())]).split_off(BODY);
        let with_mtu = route(libc::RTN_UNICAST, &[(libc::RTA_METRICS, &mtu), oif]).unwrap();
        assert_eq!(with_mtu.mtu, Some(1400));
    }

    #[test]
    fn routes_that_lead_nowhere_are_none() {
        let oif = (libc::RTA_OIF, &3_u32.to_ne_bytes()[..]);
        assert_eq!(route(libc::RTN_BROADCAST, &[oif]), None);
        assert_eq!(route(libc::RTN_UNICAST, &[]), None);
        assert_eq!(route(libc::RTN_UNICAST, &[oif, (libc::RTA_GATEWAY, &[1, 2, 3])]), None);
        assert_eq!(parse_route(&[0; 5], Ipv4Addr::LOCALHOST.into()), None);
    }

    #[test]
    fn the_state_of_a_neighbour_says_what_its_address_is_worth() {
        let link_address = [2, 0, 0, 0, 0, 1];
        let neighbour = |state: u16, attributes: &[(u16, &[u8])]| {
            let mut head = [0; BODY];
            head[8..10].copy_from_slice(&state.to_ne_bytes());
            parse_neighbour(&message(head, attributes)).unwrap()
        };
        let known: &[(u16, &[u8])] = &[(NDA_DST, &[10, 0, 0, 2]), (NDA_LLADDR, &link_address)];
        for state in [libc::NUD_REACHABLE, libc::NUD_NOARP, libc::NUD_PERMANENT] {
            assert_eq!(neighbour(state, known), Neighbour::Confirmed(link_address));
        }
        for state in [libc::NUD_STALE, libc::NUD_DELAY, libc::NUD_PROBE] {
            assert_eq!(neighbour(state, known), Neighbour::Stale(link_address));
        }
        for state in [libc::NUD_NONE, libc::NUD_INCOMPLETE] {
            assert_eq!(neighbour(state, known), Neighbour::Unknown);
        }
        assert_eq!(neighbour(libc::NUD_FAILED, known), Neighbour::Failed);
        // Not an Ethernet address.
        let long: &[(u16, &[u8])] = &[(NDA_LLADDR, &[0; 20])];
        assert_eq!(neighbour(libc::NUD_REACHABLE, long), Neighbour::Unknown);
    }

    #[test]
    fn cut_messages_end_where_they_end() {
        let whole = message([0; BODY], &[(1, &[1, 2, 3, 4]), (2, &[5])]).split_off(BODY);
        assert_eq!(attributes(&whole).count(), 2);
        for length in 0..whole.len() - 3 {
            assert!(attributes(&whole[..length]).count() < 2, "{length}");
        }
        assert_eq!(attributes(&[3, 0, 0, 0]).count(), 0, "shorter than its own head");
        assert_eq!(parse_header(&[0; 15]), None);
        assert_eq!(parse_header(&[0; 16]), None);
    }
}
