//! What a progress thread needs of a socket, whichever it is.

use std::io;

use millstream_roce::DatagramMeta;

use crate::DriverCounters;
use crate::batch::Sender;

/// A socket that a progress thread runs. The thread's loop is compiled for each kind of socket, so
/// the choice costs nothing for each datagram.
pub(crate) trait Link: Sender {
    /// Buffers for what is received.
    type Incoming: Incoming;

    /// Room for what one call receives.
    fn incoming(&self) -> Self::Incoming;

    /// Receives what is there into `batch`, in place of what was in it; returns how many messages.
    /// Errors of the network are counted, not returned: those returned are the socket's end.
    fn receive(
        &self,
        batch: &mut Self::Incoming,
        counters: &mut DriverCounters,
    ) -> io::Result<usize>;
}

/// What was received.
pub(crate) trait Incoming {
    /// The datagrams, in order, with what is known of each.
    fn datagrams(&self) -> impl Iterator<Item = (DatagramMeta, &[u8])>;
}
