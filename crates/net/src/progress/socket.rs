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
use crate::socket::ECT0;
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
        let traffic_class = traffic_class(config);
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
                if traffic_class != 0 {
                    socket.set_traffic_class(traffic_class).map_err(failed)?;
                }
                Self::Udp(Arc::new(socket))
            }
            Driver::Packet => {
                let mut socket = PacketSocket::open(&socket_config)?;
                socket.set_traffic_class(traffic_class);
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

/// The traffic class of what is sent: with congestion marks, the last two bits say that it may be marked.
fn traffic_class(config: &ProgressConfig) -> u8 {
    match config.congestion_marks {
        true => config.traffic_class & !0b11 | ECT0,
        false => config.traffic_class,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_take_the_last_bits_of_the_traffic_class() {
        for (class, congestion_marks, expected) in [
            (0, false, 0),
            (0, true, 0b10),
            (0xb8, false, 0xb8),
            (0xb8, true, 0xba),
            (0xff, false, 0xff),
            (0xff, true, 0xfe),
        ] {
            let new = ProgressConfig::new([127, 0, 0, 1].into());
            let config = ProgressConfig { traffic_class: class, congestion_marks, ..new };
            assert_eq!(traffic_class(&config), expected, "{class:#x} {congestion_marks}");
        }
    }
}
