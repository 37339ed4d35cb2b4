//! The socket of a device: of one kind or the other.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use crate::packet::PacketSocket;
use crate::udp::UdpSocket;
use crate::{Driver, OpenError, SocketConfig, SocketInfo};

pub(super) enum Socket {
    Udp(UdpSocket),
    Packet(PacketSocket),
}

impl Socket {
    pub(super) fn open(driver: Driver, config: &SocketConfig) -> Result<Self, OpenError> {
        Ok(match driver {
            Driver::Udp => Self::Udp(UdpSocket::open(config)?),
            Driver::Packet => Self::Packet(PacketSocket::open(config)?),
        })
    }

    pub(super) fn set_congestion_marks(&mut self) -> io::Result<()> {
        match self {
            Self::Udp(socket) => socket.set_congestion_marks()?,
            Self::Packet(socket) => socket.set_congestion_marks(),
        }
        Ok(())
    }

    pub(super) fn prepare(&self, peer: IpAddr, patience: Duration) -> bool {
        match self {
            Self::Udp(_) => true,
            Self::Packet(socket) => socket.prepare(peer, patience),
        }
    }

    pub(super) fn introduce(&self, peer: IpAddr, patience: Duration) {
        match self {
            Self::Udp(_) => {}
            Self::Packet(socket) => socket.introduce(peer, patience),
        }
    }

    pub(super) fn info(&self) -> SocketInfo {
        match self {
            Self::Udp(socket) => socket.info(),
            Self::Packet(socket) => socket.info(),
        }
    }
}
