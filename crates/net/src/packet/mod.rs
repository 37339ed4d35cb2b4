//! A packet socket (AF_PACKET, packet(7)) that speaks RoCEv2: whole Ethernet frames, with IP headers
//! of our own making, seen whole on arrival. Needs CAP_NET_RAW.
//!
//! What the kernel does:
//! - It decides which frames are for this machine, takes off VLAN tags (frames of a VLAN arrive as
//!   those of its interface; of one that has none, they are nobody's), and copies to us only UDP
//!   datagrams to our address and port ([`filter`]). As for any UDP socket, they may come in by any
//!   interface; for an address of 127/8 or ::1, by the loopback interface only.
//! - It segments what we send and tells how what we receive is segmented (PACKET_VNET_HDR,
//!   [`offload`]), from Linux 6.2 on. Before, every datagram is its own frame, and what a peer on
//!   the same machine sends segmented cannot be understood (it must not use segmentation offload).
//! - It knows routes and link addresses, and finds them out ([`resolver`]).
//!
//! The kernel's own UDP sees the same packets. A socket that takes none of them holds the port, so
//! that it does not answer that the port is unreachable. It lets the kernel's UDP have coalesced
//! packets (UDP_GRO), which it otherwise would segment again only to have each refused.

mod filter;
mod frame;
mod interface;
mod netlink;
mod offload;
mod receive;
mod resolver;
mod send;
mod socket;
mod table;

pub(crate) use socket::PacketSocket;
