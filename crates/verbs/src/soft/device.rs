//! Soft devices: an endpoint and its driver.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use millstream_net::{
    Driver, DriverCounters, Guard, NodeGuard, Opened, Progress, ProgressConfig, Shared,
    SocketConfig, Waiters,
};
use millstream_roce::{
    AsyncEvent, Counters, Endpoint, EndpointConfig, IcrcCheck, MAX_COMPLETIONS, ProtectionDomainId,
};
use millstream_wire::{DEFAULT_PARTITION_KEY, Mtu};

use super::deliverer::{Deliverer, Notices};
use super::host_memory::HostMemory;
use crate::{Atomicity, DeviceAttributes, OpenError};

/// What a soft device is opened with.
#[derive(Clone, Debug)]
pub struct SoftConfig {
    /// The local address. Several devices can have it, of one process or of several of one user, up
    /// to 32: each has a part of the queue pair numbers. A device of the packet driver has its address
    /// to itself.
    pub address: IpAddr,
    /// What kind of socket carries it.
    pub driver: Driver,
    /// Use the kernel's segmentation offload where it has it. Off, every packet is its own
    /// datagram, as a capture or a middlebox may want.
    pub segmentation_offload: bool,
    /// How the ICRC of arriving packets is checked.
    pub icrc: IcrcCheck,
    /// Let the network mark what is sent when it is congested (ECN), in place of dropping it. Off by
    /// default: it pays where many connections share a link, and costs where few do
    /// (docs/congestion.md). Marks and notifications of peers are answered either way.
    pub congestion_marks: bool,
    /// How long the device's own thread, or one that waits in its place, looks for work before it sleeps. Lower latency for a busy
    /// processor.
    pub busy_poll: Duration,
    /// How many bytes to ask for as receive and as send buffer of the socket. An unprivileged
    /// process gets `net.core.rmem_max` and `net.core.wmem_max` at most.
    pub buffer_length: usize,
    /// At most so many packets of 4096 bytes in flight on a queue pair.
    pub max_window: u32,
    /// The partitions that it is in: queue pairs name one by its index. The top bit of a key is set
    /// for full members.
    pub partition_keys: Vec<u16>,
}

impl SoftConfig {
    /// The defaults for this address.
    pub fn new(address: IpAddr) -> Self {
        Self {
            address,
            driver: Driver::Udp,
            segmentation_offload: true,
            icrc: IcrcCheck::AnyIdentification,
            congestion_marks: false,
            busy_poll: Duration::ZERO,
            buffer_length: SocketConfig::DEFAULT_BUFFER_LENGTH,
            max_window: EndpointConfig::new(address, 0).max_window,
            partition_keys: vec![DEFAULT_PARTITION_KEY],
        }
    }
}

/// How long connecting waits for the way to the peer. A neighbour answers in less than a
/// millisecond; one that does not will be there later, or never.
const RESOLUTION_PATIENCE: Duration = Duration::from_millis(100);

const MAX_MEMORY_REGIONS: usize = 1 << 20;

pub(crate) struct Device {
    name: String,
    address: IpAddr,
    shared: Arc<Shared<Endpoint<HostMemory>>>,
    next_domain: AtomicU32,
    notices: Arc<Notices>,
    /// Stops the thread when it is dropped.
    _progress: Progress<Endpoint<HostMemory>>,
}

impl Device {
    /// Opens a soft device on a local address.
    pub(crate) fn open(config: &SoftConfig) -> Result<Self, OpenError> {
        let name = format!("soft-{}", config.address);
        let opened = Opened::new(ProgressConfig {
            driver: config.driver,
            share_address: true,
            segmentation_offload: config.segmentation_offload,
            congestion_marks: config.congestion_marks,
            busy_poll: config.busy_poll,
            buffer_length: config.buffer_length,
            name: name.clone(),
            ..ProgressConfig::new(config.address)
        })?;
        let endpoint_config = EndpointConfig {
            queue_pair_numbers: opened.queue_pair_numbers(),
            icrc: config.icrc,
            max_window: config.max_window,
            partition_keys: config.partition_keys.clone(),
            max_datagram_length: max_datagram_length(config.address),
            ..EndpointConfig::new(config.address, seed())
        };
        let memory = HostMemory::new(MAX_MEMORY_REGIONS, endpoint_config.seed);
        let endpoint = Endpoint::new(endpoint_config, memory);
        let notices = Arc::new(Notices::default());
        let deliverer = Deliverer::new(Arc::downgrade(&notices));
        // SAFETY: the endpoint names only bytes of registered regions. Those stay mapped until
        // their `MemoryRegion` is dropped, which deregisters them and then quiesces.
        let progress = unsafe { Progress::run(opened, endpoint, deliverer)? };
        let budget = progress.shared().socket_info().receive_budget();
        progress.shared().lock_regardless().set_receive_budget(budget);
        Ok(Self {
            name,
            address: config.address,
            shared: Arc::clone(progress.shared()),
            next_domain: AtomicU32::new(1),
            notices,
            _progress: progress,
        })
    }

    /// `soft-` and its address.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn address(&self) -> IpAddr {
        self.address
    }

    pub(crate) fn driver(&self) -> Driver {
        self.shared.socket_info().driver
    }

    /// Looks for the way to a peer that will be sent to, as adapters do when a queue pair becomes
    /// ready to receive. If it is not found in time, the first packets are lost and sent again;
    /// but the refusal of a request is sent once only.
    pub(super) fn prepare(&self, peer: IpAddr) {
        let _ = self.shared.prepare(peer.to_canonical(), self.resolution_patience());
    }

    /// The same for who gets a datagram, which nobody sends again: as adapters do when an address
    /// handle is made.
    pub(super) fn introduce(&self, peer: IpAddr) {
        self.shared.introduce(peer.to_canonical(), self.resolution_patience());
    }

    /// A thread that makes progress, or will send afterwards, waits for nothing.
    fn resolution_patience(&self) -> Duration {
        if self.shared.is_progress_thread() { Duration::ZERO } else { RESOLUTION_PATIENCE }
    }

    pub(crate) fn attributes(&self) -> DeviceAttributes {
        let endpoint = self.lock_regardless();
        let config = endpoint.config();
        DeviceAttributes {
            max_queue_pairs: config.max_queue_pairs,
            max_completion_queues: config.max_completion_queues,
            max_work_requests: config.max_work_requests,
            max_scatter_gather: crate::MAX_SCATTER_GATHER,
            max_completions: MAX_COMPLETIONS,
            max_inline: millstream_roce::MAX_INLINE,
            max_memory_regions: MAX_MEMORY_REGIONS,
            max_message_length: config.max_message_length,
            max_datagram_length: config.max_datagram_length,
            max_reads: 128,
            atomicity: Atomicity::Global,
        }
    }

    pub(crate) fn path_mtu(&self, peer: IpAddr) -> std::io::Result<Mtu> {
        let link = millstream_net::address::path_mtu(self.address, peer)?;
        Mtu::fitting(link).ok_or_else(|| {
            let text = format!(
                "the interface towards {peer} has an MTU of {link} bytes: RoCE needs at least 348"
            );
            std::io::Error::new(std::io::ErrorKind::Unsupported, text)
        })
    }

    pub(crate) fn counters(&self) -> Counters {
        *self.lock_regardless().counters()
    }

    pub(crate) fn driver_counters(&self) -> DriverCounters {
        self.shared.driver_counters()
    }

    pub(crate) fn grant_receive_share(&self, queue_pairs: usize) -> Option<u64> {
        self.lock_regardless().grant_receive_share(queue_pairs)
    }

    pub(crate) fn withdraw_receive_share(&self, bytes: u64) {
        self.lock_regardless().withdraw_receive_share(bytes);
    }

    pub(crate) fn poll_event(&self) -> Option<AsyncEvent> {
        self.lock_regardless().poll_event()
    }

    pub(crate) fn wait_event(&self, timeout: Duration) -> Option<AsyncEvent> {
        self.wait(&self.notices.events, timeout, || self.poll_event())
    }

    /// Waits until `look` finds something, and makes progress meanwhile. Gives up when the device has
    /// failed.
    pub(super) fn wait<T>(
        &self,
        waiters: &Waiters,
        timeout: Duration,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let look = || match look() {
            None if self.shared.failure().is_some() => Some(None),
            None => None,
            found => Some(found),
        };
        millstream_net::wait([&*self.shared], waiters, timeout, look).flatten()
    }

    /// What it runs on, for who waits for several devices.
    pub(crate) fn shared(&self) -> &Shared<Endpoint<HostMemory>> {
        &self.shared
    }

    pub(crate) fn allocate_domain(&self) -> ProtectionDomainId {
        ProtectionDomainId(self.next_domain.fetch_add(1, Ordering::Relaxed))
    }

    /// The endpoint, to give it work, which is sent when the guard is dropped. `None` when the device
    /// has failed.
    pub(super) fn lock(&self) -> Option<Guard<'_, Endpoint<HostMemory>>> {
        self.shared.lock().ok()
    }

    /// The endpoint, to change what needs no sending; works on a failed device too.
    pub(super) fn lock_regardless(&self) -> NodeGuard<'_, Endpoint<HostMemory>> {
        self.shared.lock_regardless()
    }

    pub(super) fn now(&self) -> millstream_roce::Instant {
        self.shared.now()
    }

    pub(super) fn quiesce(&self) {
        self.shared.quiesce();
    }

    pub(crate) fn failure(&self) -> Option<String> {
        self.shared.failure().map(|failure| failure.to_string())
    }

    pub(super) fn notices(&self) -> &Notices {
        &self.notices
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.name).finish()
    }
}

/// What one packet of the address's interface holds; 4096 bytes when that is not known.
fn max_datagram_length(address: IpAddr) -> u32 {
    let link = millstream_net::address::interface_mtu(address).ok().flatten();
    link.map_or(Some(Mtu::B4096), Mtu::fitting).map_or(0, |mtu| mtu.bytes() as u32)
}

/// A seed for queue pair numbers and keys: different for each device and start.
fn seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // RandomState takes its keys from the operating system.
    RandomState::new().hash_one(since_epoch)
}
