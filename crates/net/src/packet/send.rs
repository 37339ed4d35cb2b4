//! Sending: the headers before the datagrams, and the interface.

use std::mem;
use std::net::IpAddr;

use super::frame::{MAX_HEADERS, Outline, packet_length};
use super::socket::PacketSocket;
use crate::batch::{Head, Refusal, Sender};
use crate::socket::Bound;

/// The headers of a message, and where it goes.
pub(crate) struct PacketHead {
    headers: [u8; MAX_HEADERS],
    length: usize,
    address: libc::sockaddr_ll,
}

impl Head for PacketHead {
    fn bytes(&self) -> &[u8] {
        &self.headers[..self.length]
    }

    fn describe(&mut self, header: &mut libc::msghdr) {
        header.msg_name = (&raw mut self.address).cast();
        header.msg_namelen = mem::size_of_val(&self.address) as libc::socklen_t;
    }
}

impl Sender for PacketSocket {
    type Head = PacketHead;

    fn bound(&self) -> &Bound {
        Self::bound(self)
    }

    fn head(
        &self,
        destination: IpAddr,
        _count: usize,
        segment: usize,
        length: usize,
    ) -> Result<PacketHead, Refusal> {
        let way = self.resolver().look_up(destination).ok_or(Refusal::Unresolved)?;
        // The kernel does not look at the length of each segment.
        if packet_length(destination, segment).is_none_or(|length| length > way.mtu) {
            return Err(Refusal::TooLong);
        }
        let outline = Outline {
            link_destination: way.link_destination,
            link_source: way.link_source,
            source: self.bound().address(),
            destination,
            port: self.bound().port(),
            traffic_class: self.traffic_class(),
            segment,
            length,
        };
        let mut headers = [0; MAX_HEADERS];
        let header_length = outline.write(&mut headers).ok_or(Refusal::TooLong)?;
        // SAFETY: plain old data, of which zeros are a valid value.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        address.sll_family = libc::AF_PACKET as libc::c_ushort;
        address.sll_protocol = super::socket::ether_type(destination).to_be();
        address.sll_ifindex = way.interface.cast_signed();
        Ok(PacketHead { headers, length: header_length, address })
    }
}
