//! The socket of a device: of one kind or the other.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use millstream_roce::{Node, QueuePairNumbers};

use super::ProgressConfig;
use super::seat::{Buffers, Seat};
use crate::descriptors::Watched;
use crate::packet::PacketSocket;
use crate::udp::UdpSocket;
use crate::{Driver, OpenError, SocketConfig, SocketInfo};

pub(super) enum Socket {
    Udp(Arc<UdpSocket>),
    Packet(Arc<PacketSocket>),
}

impl Socket {
    pub(super) fn open(config: &ProgressConfig) -> Result<Self, OpenError> {
        let address = config.address;
        let failed = |source: io::Error| OpenError::System {
            address,
            operation: "setting the traffic class",
            source,
        };
        let socket_config = SocketConfig {
            address,
            port: config.port,
            segmentation_offload: config.segmentation_offload,
            buffer_length: config.buffer_length,
        };
        Ok(match config.driver {
            Driver::Udp => {
                let socket = match config.share_address {
                    true => UdpSocket::open_shared(&socket_config)?,
                    false => UdpSocket::open(&socket_config)?,
                };
                if config.congestion_marks {
                    socket.set_congestion_marks().map_err(failed)?;
                }
                Self::Udp(Arc::new(socket))
            }
            Driver::Packet => {
                let mut socket = PacketSocket::open(&socket_config)?;
                if config.congestion_marks {
                    socket.set_congestion_marks();
                }
                Self::Packet(Arc::new(socket))
            }
        })
    }

    pub(super) fn queue_pair_numbers(&self) -> QueuePairNumbers {
        match self {
            Self::Udp(socket) => socket.queue_pair_numbers(),
            Self::Packet(_) => QueuePairNumbers::All,
        }
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

    /// What a thread that waits for datagrams watches.
    pub(super) fn watched(&self) -> Watched<'_> {
        match self {
            Self::Udp(socket) => socket.as_fd(),
            Self::Packet(socket) => socket.as_fd(),
        }
    }

    /// The right to do rounds at this socket.
    pub(super) fn seat<N: Node + 'static>(&self) -> Box<dyn Seat<N>> {
        match self {
            Self::Udp(socket) => Box::new(Buffers::new(Arc::clone(socket))),
            Self::Packet(socket) => Box::new(Buffers::new(Arc::clone(socket))),
        }
    }
}
