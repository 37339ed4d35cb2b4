//! Devices.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use millstream_net::{Driver, DriverCounters};
use millstream_roce::{AsyncEvent, Counters, CreateError, PortAddress};
use millstream_wire::Mtu;

pub use millstream_net::OpenError;

use crate::completion_queue::{CompletionHandler, CompletionQueue};
use crate::ibverbs::{IbverbsConfig, IbverbsError};
use crate::memory_region::ProtectionDomain;
use crate::provider::{Provided, Provider, either};
use crate::receive_share::ReceiveShare;
use crate::soft::{HandlerThreads, SoftConfig};
use crate::{ibverbs, soft};

/// The limits of a device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DeviceAttributes {
    /// Queue pairs.
    pub max_queue_pairs: usize,
    /// Completion queues.
    pub max_completion_queues: usize,
    /// Work requests in each queue of a queue pair.
    pub max_work_requests: usize,
    /// Pieces in a work request.
    pub max_scatter_gather: usize,
    /// Completions that a completion queue holds.
    pub max_completions: usize,
    /// Bytes that a send request can bring with it, see [`crate::QueuePair::post_send_inline`]. A
    /// device of the system may refuse to make a queue pair that takes so many.
    pub max_inline: usize,
    /// Memory regions.
    pub max_memory_regions: usize,
    /// Bytes in a memory region.
    pub max_memory_region_length: u64,
    /// Bytes in a message of a connection.
    pub max_message_length: u32,
    /// Bytes in an unreliable datagram.
    pub max_datagram_length: u32,
    /// READs and atomic operations outstanding on a queue pair, either way.
    pub max_reads: u8,
    /// Among whom atomic operations are atomic.
    pub atomicity: Atomicity,
}

/// Among whom the atomic operations of remotes on a device's memory are atomic (`ibv_atomic_cap`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Atomicity {
    /// There are no atomic operations: posting one is an error.
    None,
    /// Among those that come through the same device.
    Device,
    /// Among all devices and processors: also with what programs here do by
    /// [`std::sync::atomic::AtomicU64`]. Soft devices offer this; they are processors.
    Global,
}

/// What is told when a port begins or ceases to work. It must not wait for the device.
pub type PortHandler = Box<dyn Fn(bool) + Send + Sync>;

/// An RDMA device. Clones are handles to the same device; it closes with the last handle, region,
/// queue and queue pair.
#[derive(Clone)]
pub struct Device {
    pub(crate) device: Provided<Arc<soft::Device>, Arc<ibverbs::Device>>,
}

impl Device {
    /// Opens a soft device on a local address.
    pub fn open_soft(config: &SoftConfig) -> Result<Self, OpenError> {
        Ok(Self { device: Provided::Soft(Arc::new(soft::Device::open(config)?)) })
    }

    /// Opens an RDMA device of the system, with its own thread for completions and events. A
    /// device can be opened any number of times.
    pub fn open_ibverbs(config: &IbverbsConfig) -> Result<Self, IbverbsError> {
        Ok(Self { device: Provided::Ibverbs(Arc::new(ibverbs::Device::open(config)?)) })
    }

    /// The names of the system's RDMA devices. Empty when the system has libibverbs but no device.
    pub fn list_ibverbs() -> Result<Vec<String>, IbverbsError> {
        ibverbs::list()
    }

    /// What does the work behind it.
    pub fn provider(&self) -> Provider {
        match self.device {
            Provided::Soft(_) => Provider::Soft,
            Provided::Ibverbs(_) => Provider::Ibverbs,
        }
    }

    /// What kind of socket carries a soft device; `None` for a device of the system.
    pub fn driver(&self) -> Option<Driver> {
        match &self.device {
            Provided::Soft(device) => Some(device.driver()),
            Provided::Ibverbs(_) => None,
        }
    }

    /// How many shards a soft device has, see [`SoftConfig::shards`]; 1 for a device of the system.
    pub fn shards(&self) -> usize {
        match &self.device {
            Provided::Soft(device) => device.shard_count(),
            Provided::Ibverbs(_) => 1,
        }
    }

    /// Its name: `soft-` and its address, or the system's name for it, such as `mlx5_0`.
    pub fn name(&self) -> &str {
        either!(&self.device, device => device.name())
    }

    /// Its address. That of a port of InfiniBand is its GID, which no IP packet gets to.
    pub fn address(&self) -> IpAddr {
        either!(&self.device, device => device.address())
    }

    /// The local identifier of its port in the subnet of InfiniBand, as it is now; 0 for a port of Ethernet.
    pub fn lid(&self) -> u16 {
        match &self.device {
            Provided::Soft(_) => 0,
            Provided::Ibverbs(device) => device.lid(),
        }
    }

    /// Where its port is.
    pub fn port_address(&self) -> PortAddress {
        PortAddress { ip: self.address(), lid: self.lid() }
    }

    /// Its GID in the usual notation: in RoCEv2 the IPv6 address, or the IPv4 address mapped into one.
    pub fn gid(&self) -> String {
        let segments = match self.address() {
            IpAddr::V4(address) => address.to_ipv6_mapped().segments(),
            IpAddr::V6(address) => address.segments(),
        };
        segments.map(|segment| format!("{segment:04x}")).join(":")
    }

    /// Its limits.
    pub fn attributes(&self) -> DeviceAttributes {
        either!(&self.device, device => device.attributes())
    }

    /// The largest path MTU to a peer, by the MTU of the interface that leads there.
    pub fn path_mtu(&self, peer: IpAddr) -> std::io::Result<Mtu> {
        either!(&self.device, device => device.path_mtu(peer))
    }

    /// What its endpoint has counted. Of a device of the system, what its driver tells of these;
    /// the rest is 0.
    pub fn counters(&self) -> Counters {
        either!(&self.device, device => device.counters())
    }

    /// What its driver has counted; all 0 for a device of the system.
    pub fn driver_counters(&self) -> DriverCounters {
        either!(&self.device, device => device.driver_counters())
    }

    /// The next event that nobody asked for: a queue pair that failed, a queue that overran. A
    /// device keeps 1024 of them for who does not look, and counts the rest as lost.
    pub fn poll_event(&self) -> Option<AsyncEvent> {
        either!(&self.device, device => device.poll_event())
    }

    /// Waits for the next event, at most `timeout`. Returns `None` at once when there is none and
    /// the device has failed.
    pub fn wait_event(&self, timeout: Duration) -> Option<AsyncEvent> {
        either!(&self.device, device => device.wait_event(timeout))
    }

    /// Has `handler` told, on the device's own thread, when its port ceases to work (`false`), as when
    /// its link is cut, and when it works again. The first handler counts. A soft device has no port.
    ///
    /// What is under way when a port ceases to work is not lost yet: the device tries again until its
    /// queue pairs give up.
    pub fn watch_port(&self, handler: PortHandler) {
        if let Provided::Ibverbs(device) = &self.device {
            device.watch_port(handler);
        }
    }

    /// Whether its port works. That of a soft device always does.
    pub fn port_works(&self) -> bool {
        match &self.device {
            Provided::Soft(_) => true,
            Provided::Ibverbs(device) => device.port_works(),
        }
    }

    /// Why the device does not work any more, if so.
    pub fn failure(&self) -> Option<String> {
        either!(&self.device, device => device.failure())
    }

    /// A share of its receive buffer for one more peer with so many queue pairs, which is to be told
    /// how much it is. `None` for a device of the system, which needs none.
    ///
    /// As long as the shares of all peers fit, nothing that they send within them is lost for want
    /// of room. A share is never less than a fast connection needs, so with many peers at once, or a
    /// small buffer, they may not fit: then congestion control has to find out how much does.
    pub fn grant_receive_share(&self, queue_pairs: usize) -> Option<ReceiveShare> {
        ReceiveShare::of(self, queue_pairs)
    }

    /// Makes a protection domain. If the system refuses one, its registrations and queue pairs
    /// say so.
    pub fn allocate_protection_domain(&self) -> ProtectionDomain {
        ProtectionDomain::allocate(self)
    }

    /// Makes a completion queue of so many entries, to be polled. Of a soft device with several shards,
    /// so many for the queue pairs of each.
    pub fn create_completion_queue(&self, capacity: usize) -> Result<CompletionQueue, CreateError> {
        self.completion_queue(capacity, None)
    }

    /// Makes a completion queue of so many entries whose completions go to `handler`.
    pub fn create_completion_queue_with_handler(
        &self,
        capacity: usize,
        handler: CompletionHandler,
    ) -> Result<CompletionQueue, CreateError> {
        self.completion_queue(capacity, Some((handler, HandlerThreads::Driver)))
    }

    /// As [`Device::create_completion_queue_with_handler`], for a handler that is called by threads that
    /// make the device's progress too: those in [`crate::wait`], [`CompletionQueue::wait`],
    /// [`Device::wait_event`], [`CompletionQueue::poll`] and [`Device::progress`]. It is never called by two
    /// at once, nor within a post. It must not take a lock that one of those threads may hold.
    pub fn create_completion_queue_with_progress_handler(
        &self,
        capacity: usize,
        handler: CompletionHandler,
    ) -> Result<CompletionQueue, CreateError> {
        self.completion_queue(capacity, Some((handler, HandlerThreads::Waiting)))
    }

    /// Receives, handles and sends what there is, unless another thread does. For who looks now and
    /// then for what a handler brings about; [`CompletionQueue::poll`] does the same. Does nothing
    /// for devices of the system: they need no thread to make progress.
    pub fn progress(&self) {
        if let Provided::Soft(device) = &self.device {
            device.progress(|_| true);
        }
    }

    /// Calls `post`, and sends afterwards what it has posted, on any queue pair of this device: for
    /// who posts to several, or holds a lock that should not be held over system calls. Devices of
    /// the system send at once.
    pub fn postpone_sending<T>(&self, post: impl FnOnce() -> T) -> T {
        match &self.device {
            Provided::Soft(device) => device.postpone_sending(post),
            Provided::Ibverbs(_) => post(),
        }
    }

    fn completion_queue(
        &self,
        capacity: usize,
        handler: Option<(CompletionHandler, HandlerThreads)>,
    ) -> Result<CompletionQueue, CreateError> {
        let queue = match &self.device {
            Provided::Soft(device) => {
                let queue = soft::CompletionQueue::create(device, capacity, handler)?;
                Provided::Soft(Arc::new(queue))
            }
            Provided::Ibverbs(device) => {
                let handler = handler.map(|(handler, _threads)| handler);
                Provided::Ibverbs(ibverbs::CompletionQueue::create(device, capacity, handler)?)
            }
        };
        Ok(CompletionQueue { queue })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.name()).finish()
    }
}
