//! Soft devices: an endpoint and its driver.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use millstream_net::{
    Driver, DriverCounters, Guard, NodeGuard, Opened, Progress, ProgressConfig, SocketConfig,
    Waiters,
};
use millstream_roce::{
    AsyncEvent, Counters, Endpoint, EndpointConfig, IcrcCheck, MAX_COMPLETIONS, ProtectionDomainId,
};
use millstream_wire::{DEFAULT_PARTITION_KEY, Mtu};

use super::deliverer::{Deliverer, Notices};
use super::host_memory::HostMemory;
use super::shards::{Shard, Shards};
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
    /// The traffic class of all packets: the byte of IPv6's header of that name, or IPv4's type of service
    /// (`MC_IB_TC`). The first six bits are the DSCP, by which networks choose a queue; the last two say whether
    /// the network may mark packets, unless `congestion_marks` does. The service level of InfiniBand has no place
    /// in packets of RoCEv2 without a VLAN tag, which soft devices do not write.
    pub traffic_class: u8,
    /// How long at most the device's own thread, or one that waits in its place, looks for work before it sleeps, where waits are
    /// short: lower latency for a busy processor. Unless it is said, 200 us, none where a control group gives the process the time of one
    /// processor only, and the processor is offered to other threads at each
    /// look.
    pub busy_poll: Option<Duration>,
    /// How many bytes to ask for as receive and as send buffer of the socket. An unprivileged
    /// process gets `net.core.rmem_max` and `net.core.wmem_max` at most.
    pub buffer_length: usize,
    /// At most so many packets of 4096 bytes in flight on a queue pair.
    pub max_window: u32,
    /// How many threads, locks and sockets share its work: each queue pair is of one of them
    /// ([`crate::QueuePairOptions::shard`]). Each takes one of the 32 places of the address, and has a
    /// buffer of `buffer_length`. The packet driver has one.
    pub shards: usize,
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
            traffic_class: 0,
            busy_poll: None,
            buffer_length: SocketConfig::DEFAULT_BUFFER_LENGTH,
            max_window: EndpointConfig::new(address, 0).max_window,
            shards: 1,
            partition_keys: vec![DEFAULT_PARTITION_KEY],
        }
    }
}

/// How long connecting waits for the way to the peer. A neighbour answers in less than a
/// millisecond; one that does not will be there later, or never.
const RESOLUTION_PATIENCE: Duration = Duration::from_millis(100);

const MAX_MEMORY_REGIONS: usize = 1 << 20;

/// As many as a thread that waits can make the progress of.
const MAX_SHARDS: usize = 16;

pub(crate) struct Device {
    name: String,
    address: IpAddr,
    shards: Arc<Shards>,
    next_domain: AtomicU32,
    /// The end of the device was told.
    told_of_end: AtomicBool,
    notices: Arc<Notices>,
    /// Stops the threads when they are dropped.
    _progress: Vec<Progress<Endpoint<HostMemory>>>,
}

impl Device {
    /// Opens a soft device on a local address.
    pub(crate) fn open(config: &SoftConfig) -> Result<Self, OpenError> {
        let &SoftConfig { address, shards: count, .. } = config;
        if count == 0 || count > MAX_SHARDS {
            return Err(OpenError::Shards { shards: count, limit: MAX_SHARDS });
        }
        if count > 1 && config.driver == Driver::Packet {
            return Err(OpenError::PacketDriverShards { address, shards: count });
        }
        let name = format!("soft-{address}");
        let notices = Arc::new(Notices::default());
        // The same for all: regions have the same keys.
        let seed = seed();
        let mut progress = Vec::with_capacity(count);
        for index in 0..count {
            let name = if count == 1 { name.clone() } else { format!("{index}-{name}") };
            progress.push(open_shard(
                config,
                name,
                seed,
                Deliverer::new(Arc::downgrade(&notices)),
            )?);
        }
        let shards = progress.iter().map(|one| Arc::clone(one.shared())).collect();
        let shards = Arc::new(Shards::new(shards));
        notices.set_shards(&shards);
        // One that has failed by now could not tell.
        for failed in shards.all().iter().filter(|shard| shard.failure().is_some()) {
            failed.lock_regardless().fail_all();
            shards.close_others(failed);
        }
        Ok(Self {
            name,
            address,
            shards,
            next_domain: AtomicU32::new(1),
            told_of_end: AtomicBool::new(false),
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
        self.shards.all()[0].socket_info().driver
    }

    /// Looks for the way to a peer that will be sent to, as adapters do when a queue pair becomes
    /// ready to receive. If it is not found in time, the first packets are lost and sent again;
    /// but the refusal of a request is sent once only.
    pub(super) fn prepare(&self, shard: usize, peer: IpAddr) {
        let _ = self.shards.all()[shard].prepare(peer.to_canonical(), self.resolution_patience());
    }

    /// The same for who gets a datagram, which nobody sends again: as adapters do when an address
    /// handle is made.
    pub(super) fn introduce(&self, shard: usize, peer: IpAddr) {
        self.shards.all()[shard].introduce(peer.to_canonical(), self.resolution_patience());
    }

    /// A thread that makes progress, or will send afterwards, waits for nothing.
    fn resolution_patience(&self) -> Duration {
        if self.shards.is_progress_thread() { Duration::ZERO } else { RESOLUTION_PATIENCE }
    }

    pub(crate) fn attributes(&self) -> DeviceAttributes {
        let endpoint = self.lock_regardless(0);
        let config = endpoint.config();
        DeviceAttributes {
            max_queue_pairs: config.max_queue_pairs * self.shards.all().len(),
            max_completion_queues: config.max_completion_queues,
            max_work_requests: config.max_work_requests,
            max_scatter_gather: crate::MAX_SCATTER_GATHER,
            max_completions: MAX_COMPLETIONS,
            max_inline: millstream_roce::MAX_INLINE,
            max_memory_regions: MAX_MEMORY_REGIONS,
            max_memory_region_length: u64::MAX,
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
        let each = self.shards.all().iter().map(|shard| *shard.lock_regardless().counters());
        each.fold(Counters::default(), Counters::plus)
    }

    pub(crate) fn driver_counters(&self) -> DriverCounters {
        let each = self.shards.all().iter().map(|shard| shard.driver_counters());
        each.fold(DriverCounters::default(), DriverCounters::plus)
    }

    /// What a peer may send to each shard, whose buffers these are: its queue pairs are spread over
    /// them.
    pub(crate) fn grant_receive_share(&self, queue_pairs: usize) -> Option<Vec<u64>> {
        let shards = self.shards.all();
        let each = queue_pairs.div_ceil(shards.len());
        shards.iter().map(|shard| shard.lock_regardless().grant_receive_share(each)).collect()
    }

    pub(crate) fn withdraw_receive_share(&self, each: &[u64]) {
        for (shard, &bytes) in self.shards.all().iter().zip(each) {
            shard.lock_regardless().withdraw_receive_share(bytes);
        }
    }

    pub(crate) fn poll_event(&self) -> Option<AsyncEvent> {
        self.shards.all().iter().find_map(|shard| {
            let mut endpoint = shard.lock_regardless();
            loop {
                match endpoint.poll_event()? {
                    // Each shard has one, and the device ends once.
                    AsyncEvent::DeviceFatal if self.told_of_end.swap(true, Ordering::Relaxed) => {}
                    event => return Some(event),
                }
            }
        })
    }

    pub(crate) fn wait_event(&self, timeout: Duration) -> Option<AsyncEvent> {
        self.wait(|_| true, &self.notices.events, timeout, || self.poll_event())
    }

    /// Waits until `look` finds something, and makes progress meanwhile of the shards that `concerned`
    /// names. Gives up when the device has failed.
    pub(super) fn wait<T>(
        &self,
        concerned: impl Fn(usize) -> bool,
        waiters: &Waiters,
        timeout: Duration,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let look = || match look() {
            // Then nothing comes any more.
            None if self.shards.have_ended() => Some(None),
            None => None,
            found => Some(found),
        };
        let nodes = self.led_shards().filter(|(index, _)| concerned(*index));
        millstream_net::wait(nodes.map(|(_, shard)| shard), waiters, timeout, look).flatten()
    }

    /// Makes progress once of the shards that `concerned` names, unless other threads do.
    pub(crate) fn progress(&self, concerned: impl Fn(usize) -> bool) {
        let nodes = self.led_shards().filter(|(index, _)| concerned(*index));
        nodes.for_each(|(_, shard)| shard.progress());
    }

    /// What it runs on, for who waits, and their indexes: nothing for a handler of its own, which
    /// others wait for.
    pub(crate) fn led_shards(&self) -> impl Iterator<Item = (usize, &Shard)> {
        let all = if self.shards.is_progress_thread() { &[] } else { self.shards.all() };
        all.iter().map(|shard| &**shard).enumerate()
    }

    pub(crate) fn postpone_sending<T>(&self, post: impl FnOnce() -> T) -> T {
        self.shards.postpone(post)
    }

    pub(crate) fn shard_count(&self) -> usize {
        self.shards.all().len()
    }

    pub(super) fn shards(&self) -> &Shards {
        &self.shards
    }

    pub(crate) fn allocate_domain(&self) -> ProtectionDomainId {
        ProtectionDomainId(self.next_domain.fetch_add(1, Ordering::Relaxed))
    }

    /// A shard's endpoint, to give it work, which is sent when the guard is dropped. `None` when it has
    /// failed.
    pub(super) fn lock(&self, shard: usize) -> Option<Guard<'_, Endpoint<HostMemory>>> {
        self.shards.all()[shard].lock().ok()
    }

    /// A shard's endpoint, to change what needs no sending; works on a failed device too.
    pub(super) fn lock_regardless(&self, shard: usize) -> NodeGuard<'_, Endpoint<HostMemory>> {
        self.shards.all()[shard].lock_regardless()
    }

    pub(super) fn now(&self) -> millstream_roce::Instant {
        millstream_net::now()
    }

    pub(crate) fn failure(&self) -> Option<String> {
        self.shards.failure().map(ToString::to_string)
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

/// Opens a socket and starts an endpoint over it.
fn open_shard(
    config: &SoftConfig,
    name: String,
    seed: u64,
    deliverer: Deliverer,
) -> Result<Progress<Endpoint<HostMemory>>, OpenError> {
    let opened = Opened::new(ProgressConfig {
        driver: config.driver,
        share_address: true,
        segmentation_offload: config.segmentation_offload,
        congestion_marks: config.congestion_marks,
        traffic_class: config.traffic_class,
        busy_poll: config.busy_poll,
        buffer_length: config.buffer_length,
        name,
        ..ProgressConfig::new(config.address)
    })?;
    let endpoint_config = EndpointConfig {
        queue_pair_numbers: opened.queue_pair_numbers(),
        icrc: config.icrc,
        max_window: config.max_window,
        partition_keys: config.partition_keys.clone(),
        max_datagram_length: max_datagram_length(config.address),
        ..EndpointConfig::new(config.address, seed)
    };
    let endpoint = Endpoint::new(endpoint_config, HostMemory::new(MAX_MEMORY_REGIONS, seed));
    // SAFETY: the endpoint names only bytes of registered regions. Those stay mapped until
    // their `MemoryRegion` is dropped, which deregisters them and then quiesces.
    let progress = unsafe { Progress::run(opened, endpoint, deliverer)? };
    let budget = progress.shared().socket_info().receive_budget();
    progress.shared().lock_regardless().set_receive_budget(budget);
    Ok(progress)
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
