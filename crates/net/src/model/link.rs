//! A socket at which datagrams arrive, and from which none is sent.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use millstream_roce::DatagramMeta;

use super::kernel::{self, Number};
use crate::DriverCounters;
use crate::batch::{Head, Refusal, Sender};
use crate::link::{Incoming, Link};
use crate::socket::Bound;

pub(crate) struct ModelLink(pub(crate) Number);

/// Datagrams, of which nobody looks at the bytes.
pub(crate) struct Arrived;

/// Of no message.
pub(crate) enum NoHead {}

impl Link for ModelLink {
    type Incoming = Arrived;

    fn incoming(&self) -> Arrived {
        Arrived
    }

    fn receive(&self, _batch: &mut Arrived, _counters: &mut DriverCounters) -> io::Result<usize> {
        Ok(usize::from(kernel::drain(self.0)))
    }
}

impl Incoming for Arrived {
    fn datagrams(&self) -> impl Iterator<Item = (DatagramMeta, &[u8])> {
        std::iter::empty()
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
