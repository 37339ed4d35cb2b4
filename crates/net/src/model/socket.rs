//! The socket of a device, for `loom`.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use millstream_roce::{Node, QueuePairNumbers};

use super::ProgressConfig;
use super::seat::{Buffers, Seat};
use crate::descriptors::Watched;
use crate::model::kernel::{self, Number};
use crate::model::link::ModelLink;
use crate::{Driver, OpenError, SocketInfo};

pub(super) struct Socket(Number);

impl Socket {
    pub(super) fn model() -> Self {
        Self(kernel::open())
    }

    /// What arrives is announced here.
    pub(super) fn number(&self) -> Number {
        self.0
    }

    pub(super) fn open(_: &ProgressConfig) -> Result<Self, OpenError> {
        Ok(Self::model())
    }

    pub(super) fn queue_pair_numbers(&self) -> QueuePairNumbers {
        QueuePairNumbers::All
    }

    pub(super) fn prepare(&self, _: IpAddr, _: Duration) -> bool {
        true
    }

    pub(super) fn introduce(&self, _: IpAddr, _: Duration) {}

    pub(super) fn info(&self) -> SocketInfo {
        SocketInfo {
            driver: Driver::Udp,
            address: Ipv4Addr::LOCALHOST.into(),
            port: 0,
            segmentation: false,
            coalescing: false,
            receive_buffer: 0,
            send_buffer: 0,
        }
    }

    pub(super) fn watched(&self) -> Watched<'_> {
        self.0
    }

    pub(super) fn seat<N: Node + 'static>(&self) -> Box<dyn Seat<N>> {
        Box::new(Buffers::new(Arc::new(ModelLink(self.0))))
    }
}
