//! One node over one socket: threads that ask something of it send, threads that wait for something
//! of it receive, and a thread of its own does both when nobody else does.

mod driver;
mod hook;
mod idle;
mod leader;
#[cfg(millstream_loom)]
mod models;
mod seat;
mod sending;
mod shared;
#[cfg_attr(millstream_loom, path = "../model/socket.rs")]
mod socket;
mod timer;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use millstream_roce::{Node, QueuePairNumbers};
use millstream_wire::ROCE_PORT;

use crate::{Driver, OpenError, Polling, SocketConfig, ends_between_forks};
use driver::Doze;

pub use hook::{AfterRound, Hook, Worker};
pub use leader::wait;
pub use seat::MAX_ROUND_DATAGRAMS;
pub use shared::{Failure, Guard, NodeGuard, Shared};
use socket::Socket;

/// How to run a node.
#[derive(Clone, Debug)]
pub struct ProgressConfig {
    /// The one local address.
    pub address: IpAddr,
    /// What kind of socket.
    pub driver: Driver,
    /// Let other devices, of this or other processes of the same user, have the address too. Then the
    /// node has a part of the queue pair numbers: [`Opened::queue_pair_numbers`]. A packet socket
    /// has its address to itself all the same.
    pub share_address: bool,
    /// UDP port here and at every peer: [`ROCE_PORT`], but for tests. The ICRC is always computed
    /// with [`ROCE_PORT`] as the destination.
    pub port: u16,
    /// Let the kernel segment and coalesce datagrams where it can (UDP_SEGMENT and UDP_GRO, or
    /// PACKET_VNET_HDR). Worth a factor of three or more.
    pub segmentation_offload: bool,
    /// How many bytes to ask for as receive and as send buffer of the socket.
    pub buffer_length: usize,
    /// Let the network mark what is sent when it is congested (ECN), in place of dropping it. The
    /// peers tell of marks, and the node slows down.
    pub congestion_marks: bool,
    /// The traffic class of what is sent: the byte of IPv6's header of that name, or IPv4's type of service. Its
    /// last two bits say whether the network may mark, unless `congestion_marks` does.
    pub traffic_class: u8,
    /// How long at most to look for work before sleeping, where waits are short. Takes a whole core; saves the time of waking up.
    /// Unless it is said, [`Polling::LONGEST_YIELDING`], and the core is offered to other threads at each look ([`Polling::yielding`]).
    pub busy_poll: Option<Duration>,
    /// Name of the thread, of which the system shows 15 bytes.
    pub name: String,
}

impl ProgressConfig {
    /// The defaults: a UDP socket with offload.
    pub fn new(address: IpAddr) -> Self {
        Self {
            address,
            driver: Driver::Udp,
            share_address: false,
            port: ROCE_PORT,
            segmentation_offload: true,
            buffer_length: SocketConfig::DEFAULT_BUFFER_LENGTH,
            congestion_marks: false,
            traffic_class: 0,
            busy_poll: None,
            name: "progress".to_owned(),
        }
    }
}

/// A socket for a node that is still to be made.
pub struct Opened {
    socket: Socket,
    config: ProgressConfig,
}

impl Opened {
    /// Opens the socket.
    pub fn new(config: ProgressConfig) -> Result<Self, OpenError> {
        Ok(Self { socket: Socket::open(&config)?, config })
    }

    /// The queue pair numbers whose datagrams will come.
    pub fn queue_pair_numbers(&self) -> QueuePairNumbers {
        self.socket.queue_pair_numbers()
    }
}

/// A running node. Dropping it stops its thread and waits for the end of it (unless it is dropped
/// on that thread: then the thread ends after the hook that dropped it has returned).
pub struct Progress<N> {
    shared: Arc<Shared<N>>,
    thread: Option<JoinHandle<()>>,
}

impl<N: Node + Send + 'static> Progress<N> {
    /// Opens the socket and starts the thread.
    ///
    /// `after_round` is called on the thread, with no lock held, after each round of any thread in
    /// which something arrived, a deadline passed, something was sent, or a thread asked something of
    /// the node; and once more when the thread ends, whatever the reason, so that it can wake those
    /// who wait for the node ([`Shared::failure`] is set then). When it uses [`Shared::lock`], another
    /// round follows, but no other call of it unless something of the above happens: what it wants
    /// to handle, it must handle to the end, or ask for by [`Shared::call_again`].
    ///
    /// # Safety
    /// The thread reads the memory behind [`Node::bytes`] after it has released the node's lock. All
    /// bytes that `node` ever names must stay where they are, mapped and readable, until
    /// [`Shared::quiesce`] has returned after the node stopped naming them (as by deregistration),
    /// or until this value has been dropped. They may change meanwhile, as memory that is shared
    /// with a device may; what the peer receives is then unspecified.
    pub unsafe fn start(
        config: ProgressConfig,
        node: N,
        after_round: impl FnMut(&Shared<N>) + Send + 'static,
    ) -> Result<Self, OpenError> {
        // SAFETY: the caller's promise is passed on.
        unsafe { Self::start_with(config, node, AfterRound::new(after_round)) }
    }

    /// As [`Progress::start`], for who wants to hear of rounds on the threads that do them.
    ///
    /// # Safety
    /// As of [`Progress::start`].
    pub unsafe fn start_with(
        config: ProgressConfig,
        node: N,
        hook: impl Hook<N> + 'static,
    ) -> Result<Self, OpenError> {
        // SAFETY: the caller's promise is passed on.
        unsafe { Self::run(Opened::new(config)?, node, hook) }
    }

    /// As [`Progress::start_with`], over a socket that is open already.
    ///
    /// # Safety
    /// As of [`Progress::start`].
    pub unsafe fn run(
        opened: Opened,
        node: N,
        hook: impl Hook<N> + 'static,
    ) -> Result<Self, OpenError> {
        crate::crc32::choose();
        let Opened { socket, config } = opened;
        socket.info().tell_of_small_buffer(config.buffer_length);
        let address = socket.info().address;
        let failed =
            |operation| move |source: io::Error| OpenError::System { address, operation, source };
        let polling = config.busy_poll.map_or_else(Polling::yielding, Polling::keeping);
        let doze = Doze::new(polling).map_err(failed("eventfd or timerfd_create"))?;
        let shared = Arc::new(Shared::new(node, socket.seat(), Box::new(hook), doze, socket));
        let driven = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name(config.name)
            .spawn(ends_between_forks(move || driver::run(&driven)))
            .map_err(failed("starting a thread"))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// What it shares with other threads.
    pub const fn shared(&self) -> &Arc<Shared<N>> {
        &self.shared
    }
}

impl<N> Drop for Progress<N> {
    fn drop(&mut self) {
        self.shared.stop();
        let Some(thread) = self.thread.take() else { return };
        if thread.thread().id() != thread::current().id() {
            // The thread catches panics, so this is no error worth reporting.
            let _ = thread.join();
        }
    }
}
