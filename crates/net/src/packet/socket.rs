//! Opening the sockets: that for packets, and that which holds the port.

use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use millstream_wire::ethernet;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::resolver::Resolver;
use super::{filter, interface, offload};
use crate::Driver;
use crate::socket::{
    Bound, OpenError, SocketConfig, SocketInfo, bind, local, set_buffers, set_option, unsuitable,
};

/// A packet socket that sends and receives the RoCEv2 packets of one address.
pub(crate) struct PacketSocket {
    socket: Socket,
    bound: Bound,
    resolver: Resolver,
    traffic_class: u8,
}

impl PacketSocket {
    pub(crate) fn open(config: &SocketConfig) -> Result<Self, OpenError> {
        let address = config.address.to_canonical();
        if let Some(what) = unsuitable(address) {
            return Err(OpenError::Unsuitable { address, what });
        }
        let failed = |operation| move |source| OpenError::System { address, operation, source };
        // Whether the kernel tells how a frame is segmented.
        let described = offload::kernel_has_udp_segments();
        // First, as the less privileged: who can have none of it hears of that.
        let asked = SocketAddr::new(address, config.port);
        let holder = hold_port(asked, described)?;
        let local = local(&holder, asked)?;
        let owner = interface::owner(&holder, address).map_err(failed("getifaddrs"))?;
        if let Some((interface, _)) = owner.filter(|(_, owner)| !owner.has_ethernet_headers()) {
            return Err(OpenError::NotEthernet { address, interface });
        }
        let socket = packet_socket(local, config.buffer_length)?;
        let segmentation = described && config.segmentation_offload;
        let bound = Bound::new(Driver::Packet, &socket, local, segmentation, described)?;
        let resolver = Resolver::start(address, local.port(), holder)
            .map_err(failed("looking for neighbours"))?;
        Ok(Self { socket, bound, resolver, traffic_class: 0 })
    }

    pub(crate) fn info(&self) -> SocketInfo {
        self.bound.info()
    }

    /// What is sent from now on has this traffic class.
    pub(crate) fn set_traffic_class(&mut self, class: u8) {
        self.traffic_class = class;
    }

    pub(super) const fn traffic_class(&self) -> u8 {
        self.traffic_class
    }

    /// Whether the way to `peer` is known within this time.
    pub(crate) fn prepare(&self, peer: IpAddr, patience: Duration) -> bool {
        self.resolver.wait_for(peer, patience)
    }

    /// Waits for the way to `peer`, if it is new.
    pub(crate) fn introduce(&self, peer: IpAddr, patience: Duration) {
        self.resolver.introduce(peer, patience);
    }

    pub(super) const fn bound(&self) -> &Bound {
        &self.bound
    }

    pub(super) const fn resolver(&self) -> &Resolver {
        &self.resolver
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// What frames hold that go to this address.
pub(super) const fn ether_type(address: IpAddr) -> u16 {
    match address {
        IpAddr::V4(_) => ethernet::IPV4,
        IpAddr::V6(_) => ethernet::IPV6,
    }
}

/// A UDP socket that has the port and takes nothing.
fn hold_port(local: SocketAddr, coalesced: bool) -> Result<Socket, OpenError> {
    let address = local.ip();
    let failed = |operation| move |source| OpenError::System { address, operation, source };
    let socket = Socket::new(Domain::for_address(local), Type::DGRAM, Some(Protocol::UDP))
        .map_err(failed("socket"))?;
    socket.set_nonblocking(true).map_err(failed("O_NONBLOCK"))?;
    if address.is_ipv6() {
        socket.set_only_v6(true).map_err(failed("IPV6_V6ONLY"))?;
    }
    socket.attach_filter(&filter::nothing()).map_err(failed("SO_ATTACH_FILTER"))?;
    socket.set_recv_buffer_size(0).map_err(failed("SO_RCVBUF"))?;
    if coalesced {
        // Where it is unknown, the kernel only works more.
        let _ = set_option(&socket, libc::SOL_UDP, libc::UDP_GRO, 1);
    }
    bind(&socket, local).map_err(|error| match error {
        OpenError::PortInUse { address, port } => OpenError::PacketDriverAlone { address, port },
        other => other,
    })?;
    Ok(socket)
}

fn packet_socket(local: SocketAddr, buffer_length: usize) -> Result<Socket, OpenError> {
    let address = local.ip();
    let failed = |operation| move |source| OpenError::System { address, operation, source };
    // Of no protocol until it is bound: nothing comes before the filter is there.
    let socket = Socket::new(Domain::PACKET, Type::RAW, None).map_err(|source| {
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => OpenError::NotPrivileged { address },
            _ => OpenError::System { address, operation: "socket(AF_PACKET)", source },
        }
    })?;
    socket.set_nonblocking(true).map_err(failed("O_NONBLOCK"))?;
    socket
        .attach_filter(&filter::ours(address, local.port()))
        .map_err(failed("SO_ATTACH_FILTER"))?;
    set_option(&socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)
        .map_err(failed("PACKET_VNET_HDR"))?;
    // Counts what the kernel drops; without it, losses are only harder to explain.
    let _ = set_option(&socket, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1);
    set_buffers(&socket, buffer_length).map_err(|(operation, source)| failed(operation)(source))?;
    // SAFETY: a name that ends with a zero.
    let loopback = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
    // Whoever is next to this machine must not reach what is only for itself.
    let interface = if address.is_loopback() { loopback.cast_signed() } else { 0 };
    // SAFETY: the storage is longer than a `sockaddr_ll` and as aligned, and zeros, but for what is
    // set, are right for it.
    let place = unsafe {
        SockAddr::try_init(|storage, length| {
            let place = storage.cast::<libc::sockaddr_ll>();
            (*place).sll_family = libc::AF_PACKET as libc::c_ushort;
            (*place).sll_protocol = ether_type(address).to_be();
            (*place).sll_ifindex = interface;
            *length = mem::size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            io::Result::Ok(())
        })
    };
    let ((), place) = place.map_err(failed("bind"))?;
    socket.bind(&place).map_err(failed("bind"))?;
    Ok(socket)
}
