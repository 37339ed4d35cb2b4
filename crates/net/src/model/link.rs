//! A socket at which datagrams arrive, and from which none is sent.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd};

use millstream_roce::{DatagramMeta, Identification};

use super::kernel::{self, Number};
use crate::DriverCounters;
use crate::batch::{Head, Refusal, Sender};
use crate::link::{Incoming, Link};
use crate::socket::Bound;

pub(crate) struct ModelLink(pub(crate) Number);

/// Perhaps a datagram.
pub(crate) struct Arrived(bool);

/// Of no message.
pub(crate) enum NoHead {}

impl Link for ModelLink {
    type Incoming = Arrived;

    fn incoming(&self) -> Arrived {
        Arrived(false)
    }

    fn receive(&self, batch: &mut Arrived, _counters: &mut DriverCounters) -> io::Result<usize> {
        batch.0 = kernel::drain(self.0);
        Ok(usize::from(batch.0))
    }
}

impl Incoming for Arrived {
    fn datagrams(&self) -> impl Iterator<Item = (DatagramMeta, &[u8])> {
        let nowhere = Ipv4Addr::UNSPECIFIED.into();
        let meta = DatagramMeta {
            source: nowhere,
            source_port: 0,
            destination: nowhere,
            identification: Identification::Guessed(0),
            congestion_experienced: false,
        };
        self.0.then_some((meta, &[][..])).into_iter()
    }
}

impl Sender for ModelLink {
    type Head = NoHead;

    fn bound(&self) -> &Bound {
        unreachable!("nothing is sent")
    }

    fn head(&self, _: IpAddr, _: usize, _: usize, _: usize) -> Result<NoHead, Refusal> {
        unreachable!("nothing is sent")
    }
}

impl AsFd for ModelLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        unreachable!("nothing is sent, and the kernel is a model")
    }
}

impl Head for NoHead {
    fn bytes(&self) -> &[u8] {
        match *self {}
    }

    fn describe(&mut self, _header: &mut libc::msghdr) {
        match *self {}
    }
}
