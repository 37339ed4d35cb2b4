//! The transport `rdma`: one-sided WRITE and READ over the queue pairs of verbs.

mod accepted;
mod connecting;
mod connection;
mod control_addresses;
mod device;
mod links;
mod locations;
mod nics;
mod peer;
mod ports;
mod registration;
mod runs;
mod shared;
mod sieve;
#[cfg(test)]
mod tests;
mod timer;
mod work;

use std::collections::HashMap;
use std::mem;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use millstream_metadata::{
    DEFAULT_CALL_LIMIT, DeviceDesc, HandShakeDesc, HostPort, NicPath, SegmentDesc,
};
use millstream_net::{ends_between_forks, file_table};
use millstream_topology::{Priorities, PriorityMatrix};
use millstream_transfer_core::{
    Access as RailAccess, Affinity, AnyPolicy, Classic, Flow, MAX_RAILS, Order, Priority, RailId,
    RailSpec, Tent, TentConfig,
};
use millstream_verbs::{Access, Device, MemoryRegion, PortAddress, Provider};

use self::accepted::{Accepted, AcceptedConfig, Notices, Refusal};
use self::connection::{MAX_QUEUE_PAIRS, MAX_RETRIES};
use self::device::LocalDevice;
use self::peer::{Peer, Way};
use self::ports::{pairs, port_address};
pub(crate) use self::shared::RdmaContext;
use self::shared::Shared;
use self::timer::{Clock, Timer};
use self::work::Works;
use crate::batch::BatchShared;
use crate::keys::Keys;
use crate::memory::RawMemory;
use crate::metrics::{DeviceMetrics, Metrics};
use crate::segment::OpenSegment;
use crate::terms::Terms;
use crate::transport::{Capabilities, Guard, Registration, Run, Transport};
use crate::workers::{Workers, join};
use crate::{FailureReason, InstallError, Policy, RdmaConfig, SegmentId, TransferError};

/// The most completions that a queue of a device holds.
pub(crate) const MAX_COMPLETIONS: usize = 1 << 21;

/// The least of the longest region: a page.
const LEAST_REGION: usize = 4096;

/// Threads for what takes a while but waits for nobody else, as making and resetting queue pairs.
const WORKERS: usize = 2;

/// So many files and sockets may be open before the kernel makes room for more: as many calls as are made at a
/// time, and what else a process has.
const FILES: usize = DEFAULT_CALL_LIMIT + 1024;

/// What connecting may take longer than the peer's answer.
const CONNECT_MORE: Duration = Duration::from_millis(500);

pub(crate) struct RdmaTransport {
    shared: Arc<Shared>,
    peers: Mutex<Peers>,
    paths: RwLock<HashMap<SegmentId, Path>>,
    accepted: Arc<Accepted>,
    /// Which of its devices are near to which memory.
    matrix: PriorityMatrix,
    /// The locations of the matrix, and their devices, as policies want them.
    locations: Box<[String]>,
    priorities: Vec<Priority>,
    /// Asks those that were accepted whether they are there.
    asking: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Peers {
    known: HashMap<PeerKey, Arc<Peer>>,
    /// There are no more: nobody would stop one that is made now.
    stopped: bool,
}

/// The peer of a segment, by one version of its descriptor.
struct Path {
    descriptor: Arc<SegmentDesc>,
    peer: Arc<Peer>,
}

/// A process: the name that it gives itself, and its devices, since names such as `localhost:12345` are not
/// unique; and whether it knows of fences.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct PeerKey {
    name: String,
    devices: Vec<(String, PortAddress)>,
    has_incarnation: bool,
}

impl RdmaTransport {
    pub(crate) const NAME: &'static str = "rdma";

    pub(crate) fn new(config: RdmaConfig, context: RdmaContext) -> Result<Self, InstallError> {
        let ranges = [
            ("queue_pairs_per_endpoint", config.queue_pairs_per_endpoint, 1, MAX_QUEUE_PAIRS),
            ("send_queue_depth", config.send_queue_depth, 1, 4096),
            ("acknowledge_timeout", config.acknowledge_timeout.into(), 1, 31),
            ("max_endpoints", config.max_endpoints, 1, 4096),
            ("max_accepted_queue_pairs", config.max_accepted_queue_pairs, 1, 4096),
        ];
        for (name, value, min, max) in ranges {
            if !(min..=max).contains(&value) {
                return Err(InstallError::OutOfRange { name, value, min, max });
            }
        }
        let (name, value) = ("max_region_length", config.max_region_length as usize);
        if value < LEAST_REGION {
            let max = usize::MAX;
            return Err(InstallError::OutOfRange { name, value, min: LEAST_REGION, max });
        }
        let value =
            config.max_endpoints * config.queue_pairs_per_endpoint * config.send_queue_depth;
        if value > MAX_COMPLETIONS {
            let name = "max_endpoints * queue_pairs_per_endpoint * send_queue_depth";
            return Err(InstallError::OutOfRange { name, value, min: 1, max: MAX_COMPLETIONS });
        }
        if config.addresses.is_empty() && config.named_devices().is_none() {
            return Err(InstallError::NoAddress);
        }
        for (index, address) in config.addresses.iter().enumerate() {
            if config.addresses[..index].contains(address) {
                return Err(InstallError::DuplicateAddress(*address));
            }
        }
        // Otherwise those who connect may wait for a second later, when many do.
        if let Err(error) = file_table::make_room(FILES) {
            tracing::debug!(%error, "no room for many files");
        }
        let notices = Notices::new(Arc::clone(&context.calls), context.incarnation);
        let accepted = Accepted::new(AcceptedConfig {
            incarnation: context.incarnation,
            max_queue_pairs: config.max_accepted_queue_pairs,
            own_queue_pairs: config.max_endpoints * config.queue_pairs_per_endpoint,
            acknowledge_timeout: config.acknowledge_timeout,
            interval: config.keep_alive_interval,
        });
        let accepted = Arc::new(accepted.telling(notices));
        let devices = LocalDevice::open_all(&config, &Arc::downgrade(&accepted))?;
        let devices: Vec<_> = devices.into_iter().map(Arc::new).collect();
        // Peers know a device by its name, and one of the system's may have several addresses.
        for (index, device) in devices.iter().enumerate() {
            let name = device.device.name();
            if devices[..index].iter().any(|other| other.device.name() == name) {
                return Err(InstallError::DuplicateDevice(name.to_owned()));
            }
        }
        let all = devices.iter().map(|device| &device.device);
        let matrix = nics::matrix(all, config.topology_file.as_deref());
        let matrix = matrix.map_err(InstallError::Topology)?;
        let names: Vec<_> = devices.iter().map(|it| it.device.name().to_owned()).collect();
        let (locations, priorities) = nics::priorities(&matrix, &names);
        let asking = thread::Builder::new().name("rdma-keep-alive".to_owned()).spawn({
            let accepted = Arc::clone(&accepted);
            ends_between_forks(move || accepted.keep_asking())
        });
        let asking = asking.map_err(InstallError::Thread)?;
        let clock = Clock::start();
        let timer = Timer::start(clock);
        let timer = timer.inspect_err(|_| drop(accepted.stop())).map_err(InstallError::Thread)?;
        let shared = Arc::new(Shared {
            workers: Workers::new("rdma-work", WORKERS),
            config,
            context,
            devices,
            clock,
            timer,
            works: Works::new(),
        });
        for (index, device) in shared.devices.iter().enumerate() {
            let timer = Arc::downgrade(&shared.timer);
            device.device.watch_port(Box::new(move |works| {
                let peers = timer.upgrade().map(|timer| timer.peers());
                peers.iter().flatten().for_each(|peer| peer.port_changed(index, works));
            }));
        }
        Ok(Self {
            shared,
            accepted,
            matrix,
            locations,
            priorities,
            asking: Mutex::new(Some(asking)),
            peers: Mutex::default(),
            paths: RwLock::default(),
        })
    }

    /// The peer whose segment this is.
    fn peer(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
    ) -> Result<Arc<Peer>, String> {
        let known = self.paths.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(path) = known.get(&segment.id)
            && Arc::ptr_eq(&path.descriptor, descriptor)
        {
            return Ok(Arc::clone(&path.peer));
        }
        drop(known);
        let peer = self.find_peer(segment, descriptor)?;
        peer.serves(segment);
        let mut known = self.paths.write().unwrap_or_else(PoisonError::into_inner);
        // Of one that is closed `forget` was told, and nobody tells it again.
        if !segment.is_closed() {
            let path = Path { descriptor: Arc::clone(descriptor), peer: Arc::clone(&peer) };
            known.insert(segment.id, path);
        }
        Ok(peer)
    }

    fn find_peer(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
    ) -> Result<Arc<Peer>, String> {
        if !descriptor.speaks(Self::NAME) {
            return Err(format!("it speaks {:?}, not rdma", descriptor.protocol));
        }
        let devices = descriptor.devices.iter().map(|it| (it.name.clone(), port_address(it)));
        let has_incarnation = descriptor.incarnation.is_some();
        let (name, devices) = (descriptor.name.clone(), devices.collect());
        let key = PeerKey { name, devices, has_incarnation };
        let mut peers = self.peers();
        if peers.stopped {
            return Err("this engine closes".to_owned());
        }
        if let Some(peer) = peers.known.get(&key) {
            peer.control.set(&descriptor.control_addresses);
            return Ok(Arc::clone(peer));
        }
        peers.known.retain(|_, peer| is_needed(peer));
        let rails = self.rails(descriptor)?;
        let mut matrix = PriorityMatrix::default();
        for (location, (preferred, available)) in &descriptor.priority_matrix {
            let (preferred, available) = (preferred.clone(), available.clone());
            matrix.insert(location.clone(), Priorities { preferred, available });
        }
        let names: Vec<_> = descriptor.devices.iter().map(|device| device.name.clone()).collect();
        let (locations, priorities) = nics::priorities(&matrix, &names);
        let Shared { config, devices, .. } = &*self.shared;
        let own: Vec<_> = devices.iter().map(|device| device.device.name().to_owned()).collect();
        let affinity = nics::affinity(&config.peer_affinity, &own, &matrix, &names);
        let peer = Arc::new_cyclic(|own| {
            let flow = self.flow(descriptor, &rails, priorities, affinity);
            let (shared, name) = (Arc::clone(&self.shared), segment.name.as_str().into());
            let flow = (flow, segment.view().since);
            Peer::new(own.clone(), shared, name, has_incarnation, locations, rails, flow)
        });
        peer.control.set(&descriptor.control_addresses);
        self.shared.timer.add(&peer);
        peers.known.insert(key, Arc::clone(&peer));
        Ok(peer)
    }

    fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All pairs of a device here and one of the peer that can reach each other.
    fn rails(&self, descriptor: &SegmentDesc) -> Result<Vec<Way>, String> {
        let own: Vec<_> = self.shared.devices.iter().map(|it| it.device.port_address()).collect();
        let theirs: Vec<_> = descriptor.devices.iter().map(port_address).collect();
        let rail = |pair: millstream_topology::Pair| {
            let name = descriptor.devices[pair.peer].name.clone();
            let nic = NicPath { server: descriptor.name.clone(), nic: name };
            Way { local: pair.own, remote: pair.peer, nic, at: theirs[pair.peer] }
        };
        let pairs = pairs(&own, &theirs).into_iter();
        let rails: Vec<_> = pairs.take(MAX_RAILS).map(rail).collect();
        if rails.is_empty() {
            let list = |all: &[PortAddress]| {
                all.iter().map(PortAddress::to_string).collect::<Vec<_>>().join(", ")
            };
            return Err(format!(
                "no local address ({}) can reach one of its addresses ({})",
                list(&own),
                list(&theirs),
            ));
        }
        Ok(rails)
    }

    /// How long a rail may be silent at least before others are preferred to it: longer than its device
    /// takes to send again what was lost. Soft devices do so after about a round trip. A peer that does
    /// not know of fences has all the time there is, since its WRITEs cannot go another way.
    fn least_silence(&self, descriptor: &SegmentDesc) -> Duration {
        let defaults = millstream_transfer_core::Config::default();
        let Shared { devices, config, .. } = &*self.shared;
        let system = devices.iter().any(|it| it.device.provider() == Provider::Ibverbs);
        // Of which there may be several.
        let retry = retry_time(config);
        match descriptor.incarnation {
            None => defaults.silence,
            Some(_) if system => (4 * retry).clamp(defaults.least_silence, defaults.silence),
            Some(_) => defaults.least_silence,
        }
    }

    fn flow(
        &self,
        descriptor: &SegmentDesc,
        rails: &[Way],
        priorities: Vec<Priority>,
        affinity: Vec<Affinity>,
    ) -> Flow<AnyPolicy> {
        let Shared { config, clock, context, .. } = &*self.shared;
        let call_timeout = context.calls.timeout();
        let flow = millstream_transfer_core::Config {
            slice_length: context.slice_length as u32,
            fragment_ratio: context.fragment_ratio as u32,
            ..flow_config(config, call_timeout, self.least_silence(descriptor))
        };
        let order = match config.path_round_robin {
            true => Order::RoundRobin,
            false => Order::Random(context.incarnation),
        };
        let own = self.priorities.clone();
        let policy = match context.policy {
            Policy::Classic => {
                let classic = Classic::new(order, own, priorities);
                AnyPolicy::Classic(classic.with_affinity(affinity))
            }
            Policy::Tent => {
                let tent = Tent::new(TentConfig::default(), own, priorities);
                AnyPolicy::Tent(tent.with_affinity(affinity))
            }
        };
        // Above all that this process has used with this peer, since time passes faster.
        let epoch = clock.now().nanos();
        let mut flow = Flow::new(flow, policy, descriptor.incarnation.unwrap_or(0), epoch);
        for way in rails {
            let rail = flow.add_rail(RailSpec {
                local_nic: way.local as u16,
                peer_nic: way.remote as u16,
                transport: 0,
                access: RailAccess::Connection,
                max_requests: connection::max_requests(config) as u32,
            });
            debug_assert!(rail.is_some(), "there are no more than MAX_RAILS");
        }
        flow
    }

    /// What is known of the process of this incarnation.
    fn peers_of(&self, incarnation: u64) -> Vec<Arc<Peer>> {
        self.peers().known.values().filter(|peer| peer.is(incarnation)).cloned().collect()
    }

    /// Answers a peer, or says why not.
    fn answer(&self, request: &HandShakeDesc) -> Result<HandShakeDesc, Refusal> {
        if request.closing {
            if let Some(incarnation) = request.incarnation {
                self.accepted.peer_closes(incarnation);
                for peer in self.peers_of(incarnation) {
                    peer.gone(Some(incarnation), FailureReason::Closed);
                }
            }
            return Ok(HandShakeDesc::default());
        }
        if request.evicted {
            if let (Some(incarnation), Some(rail), Some(epoch)) =
                (request.incarnation, request.rail, request.epoch)
            {
                for peer in self.peers_of(incarnation) {
                    peer.evicted(RailId(rail), epoch);
                }
            }
            return Ok(HandShakeDesc::default());
        }
        // Which start of an engine is meant says more than its name.
        if request.fence && request.peer_incarnation.is_some() {
            return self.accepted.fence(request);
        }
        let path = request.peer_nic_path.parse::<NicPath>();
        let NicPath { server, nic } = path.map_err(|error| error.to_string())?;
        if server != self.shared.context.engine {
            return Err(format!("this is {}, not {server}", self.shared.context.engine).into());
        }
        if request.fence {
            return self.accepted.fence(request);
        }
        let device = self.shared.devices.iter().find(|device| device.device.name() == nic);
        let device =
            device.ok_or_else(|| format!("{} has no NIC {nic:?}", self.shared.context.engine))?;
        self.accepted.accept(device, request).map(|reply| HandShakeDesc {
            local_nic_path: request.peer_nic_path.clone(),
            local_lid: device.device.lid(),
            local_gid: Some(device.gid()),
            peer_nic_path: request.local_nic_path.clone(),
            ..reply
        })
    }

    /// The IP addresses of its devices: none of ports of InfiniBand, which have GIDs.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        let all = self.shared.devices.iter().map(|device| device.device.port_address());
        all.filter(|at| !at.is_infiniband()).map(|at| at.ip).collect()
    }

    /// The devices, which threads that wait for batches drive.
    pub(crate) fn devices(&self) -> Arc<[Device]> {
        self.shared.devices.iter().map(|device| device.device.clone()).collect()
    }
}

impl Transport for RdmaTransport {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { needs_keys: true, ..Capabilities::REMOTE }
    }

    fn register(&self, memory: &RawMemory, remote: bool) -> Result<Registration, String> {
        let mut access = Access::LOCAL_WRITE;
        if remote {
            access |= Access::REMOTE_READ | Access::REMOTE_WRITE;
        }
        let Shared { config, devices, .. } = &*self.shared;
        let longest = registration::longest_region(devices, config.max_region_length);
        let parallel = config.parallel_registration;
        let regions = registration::register(devices, memory, access, parallel, longest)?;
        let count = regions.first().map_or(0, Vec::len);
        let by_region = || (0..count).flat_map(|part| regions.iter().map(move |of| &of[part]));
        let keys = Keys::new(by_region().map(MemoryRegion::key), devices.len(), longest);
        let remote_keys = by_region().map(MemoryRegion::remote_key);
        let remote_keys = Keys::new(remote_keys, devices.len(), longest);
        let guard = Box::new(Regions(Mutex::new(regions.into_iter().flatten().collect())));
        Ok(Registration { keys, remote_keys, shared_key: None, guard })
    }

    fn location(&self, name: &str) -> u16 {
        nics::number(&self.locations, name)
    }

    fn describe(&self, descriptor: &mut SegmentDesc) {
        descriptor.protocol = Self::NAME.to_owned();
        for device in &self.shared.devices {
            let name = device.device.name().to_owned();
            let lid = device.device.lid();
            descriptor.devices.push(DeviceDesc { name, lid, gid: device.gid() });
        }
        let matrix = self.matrix.entries().iter();
        descriptor.priority_matrix.extend(matrix.map(|(location, it)| {
            (location.clone(), (it.preferred.clone(), it.available.clone()))
        }));
    }

    fn reaches(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
        _buffer: usize,
    ) -> Result<(), String> {
        self.peer(segment, descriptor).map(drop)
    }

    fn retransmissions(&self) -> u64 {
        // A device of the system counts the causes and not what it did about them.
        let of = |device: &Arc<LocalDevice>| {
            let counters = device.device.counters();
            counters.retransmissions.max(counters.naks_received + counters.timeouts)
        };
        self.shared.devices.iter().map(of).sum()
    }

    fn connections_served(&self) -> usize {
        self.accepted.connections()
    }

    fn observe(&self, metrics: &mut Metrics) {
        let all = self.peers();
        let peers: Vec<_> = all.known.values().filter(|peer| is_needed(peer)).cloned().collect();
        drop(all);
        peers.iter().for_each(|peer| peer.observe(&mut metrics.rails));
        let devices = self.shared.devices.iter();
        metrics.devices.extend(devices.map(|device| DeviceMetrics::of(&device.device)));
    }

    fn submit(&self, batch: &Arc<BatchShared>, runs: &[Run], terms: &Terms) {
        for runs in runs.chunk_by(|a, b| Arc::ptr_eq(&a.view.descriptor, &b.view.descriptor)) {
            let Run { segment, view, .. } = &runs[0];
            match self.peer(segment, &view.descriptor) {
                Ok(peer) => peer.submit(batch, runs, terms),
                // `reaches` has found one, before this was stopped.
                Err(reason) => {
                    let peer = segment.name.as_str().into();
                    let reason = match self.peers().stopped {
                        true => FailureReason::ShutDown,
                        false => FailureReason::NoPath(reason),
                    };
                    let error = TransferError::new(peer, "none", reason);
                    let handles = runs.iter().flat_map(|run| run.handles(batch));
                    handles.for_each(|task| task.fail_whole(&error));
                }
            }
        }
    }

    fn peak_rate(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
        until: Instant,
    ) -> Option<u64> {
        self.peer(segment, descriptor).ok()?.peak_rate(until)
    }

    fn handshake(&self, request: &HandShakeDesc) -> Option<HandShakeDesc> {
        // It is about a connection of the transport `tcp`.
        if request.stream.is_some() || request.relay.is_some() {
            return None;
        }
        let reply = self.answer(request).unwrap_or_else(Refusal::into_reply);
        // Whoever meant another start of this engine learns that it is over.
        Some(HandShakeDesc { incarnation: Some(self.shared.context.incarnation), ..reply })
    }

    fn forget(&self, segment: SegmentId) {
        self.paths.write().unwrap_or_else(PoisonError::into_inner).remove(&segment);
    }

    fn stop(&self) {
        let mut all = self.peers();
        all.stopped = true;
        let peers = mem::take(&mut all.known);
        // What follows waits, for others that take it too, and tells wakers.
        drop(all);
        let connected = peers.values().filter(|peer| peer.stop() && peer.has_incarnation);
        let context = &self.shared.context;
        let others: Vec<_> = connected.filter(|peer| *peer.name != *context.engine).collect();
        // A peer may have connections both ways: where some are still being reset, none is told.
        if let Some(initiators) = self.accepted.stop() {
            let initiators = initiators.into_iter();
            let initiators = initiators.map(|at| HostPort::from_address(at.ip(), at.port()));
            // A server may have to be asked, which those do not wait for who are told first.
            let known = others.into_iter().filter_map(|peer| {
                let known = context.store.known_address(&peer.name, peer.incarnation());
                known.or_else(|| context.store.address(&peer.name).ok())
            });
            let addresses = initiators.chain(known.map(|meta| meta.address));
            accepted::tell(&context.calls, context.incarnation, addresses);
        }
        let asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner).take();
        join(asking);
        self.shared.timer.stop();
        self.shared.workers.stop();
        self.paths.write().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Whether an open segment leads to a peer, or it has something to do. Others stay connected until another one is
/// opened: who opens a segment for each transfer connects once.
fn is_needed(peer: &Arc<Peer>) -> bool {
    Arc::strong_count(peer) > 1 || !peer.is_idle()
}

/// What ends registrations with devices: each waits for its device.
struct Regions(Mutex<Vec<MemoryRegion>>);

impl Guard for Regions {
    fn revoke(&self) -> Result<(), String> {
        drop(mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)));
        Ok(())
    }
}

/// What a flow is made with, but for the lengths of its slices.
fn flow_config(
    config: &RdmaConfig,
    call_timeout: Duration,
    least_silence: Duration,
) -> millstream_transfer_core::Config {
    let defaults = millstream_transfer_core::Config::default();
    // A device that takes its time to send again does so, too, where it had nothing to send again for seconds.
    let is_usual = least_silence <= defaults.least_silence;
    millstream_transfer_core::Config {
        max_slice_pieces: connection::slice_pieces(config) as u32,
        // The first attempt is none of the retries.
        max_attempts: u8::try_from(config.retry_count.saturating_add(1)).unwrap_or(u8::MAX),
        connect_timeout: call_timeout + CONNECT_MORE,
        least_silence,
        least_regular_silence: if is_usual {
            defaults.least_regular_silence
        } else {
            least_silence
        },
        connection_silence: retry_time(config) * (u32::from(MAX_RETRIES) + 1),
        // Long enough for one attempt to connect.
        patience: config.patience.max(call_timeout + CONNECT_MORE / 5),
        pause: defaults.pause.min(config.max_pause),
        max_pause: config.max_pause,
        ..defaults
    }
}

/// After how long a queue pair sends again what was not acknowledged: 4.096 us * 2^n (IBTA 9.7.6.1.3).
fn retry_time(config: &RdmaConfig) -> Duration {
    Duration::from_nanos(4096 << config.acknowledge_timeout.min(31))
}
