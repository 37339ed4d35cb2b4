//! The transport `rdma`: one-sided WRITE and READ over the queue pairs of verbs.

mod accepted;
mod connection;
mod device;
mod endpoint;
mod pairs;
mod queue;
mod workers;

use std::collections::HashMap;
use std::mem;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use millstream_metadata::{
    Client, ClientConfig, DeviceDesc, Frame, FrameType, HandShakeDesc, NicPath, SegmentDesc, Store,
};
use millstream_verbs::{Access, Device, MemoryRegion};

use self::accepted::Accepted;
use self::connection::MAX_QUEUE_PAIRS;
use self::device::LocalDevice;
use self::endpoint::{Endpoint, EndpointConfig};
use self::queue::Pending;
use self::workers::Workers;
use crate::batch::BatchShared;
use crate::memory::RawMemory;
use crate::segment::OpenSegment;
use crate::task::TaskHandle;
use crate::transport::{Capabilities, Guard, Registration, Run, Transport};
use crate::{FailureReason, InstallError, RdmaConfig, SegmentId, TransferError};

/// The most completions that a queue of a device holds.
pub(crate) const MAX_COMPLETIONS: usize = 1 << 20;

/// How long telling one peer, and all peers, may take that this engine closes.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(250);
const GOODBYES_TIMEOUT: Duration = Duration::from_secs(1);

/// What the transport knows of its engine.
pub(crate) struct RdmaContext {
    /// The engine's name.
    pub(crate) engine: String,
    pub(crate) incarnation: u64,
    pub(crate) client: Client,
    pub(crate) store: Arc<dyn Store>,
}

pub(crate) struct RdmaTransport {
    config: RdmaConfig,
    context: Arc<RdmaContext>,
    devices: Vec<Arc<LocalDevice>>,
    workers: Arc<Workers>,
    endpoints: Mutex<HashMap<EndpointKey, Arc<Endpoint>>>,
    paths: RwLock<HashMap<SegmentId, Arc<Paths>>>,
    accepted: Arc<Accepted>,
    /// Asks those that were accepted whether they are there.
    asking: Mutex<Option<JoinHandle<()>>>,
}

/// The local device, and the peer's NIC by the name that the peer gives itself.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct EndpointKey {
    device: usize,
    peer_nic: NicPath,
}

/// The ways to a segment, by one version of its descriptor.
struct Paths {
    descriptor: Arc<SegmentDesc>,
    list: Vec<Path>,
    /// Where the next task begins.
    turn: AtomicUsize,
}

struct Path {
    endpoint: Arc<Endpoint>,
    /// Indexes of the devices at both ends, and of their keys.
    local: usize,
    remote: usize,
}

impl RdmaTransport {
    pub(crate) const NAME: &'static str = "rdma";

    pub(crate) fn new(config: RdmaConfig, context: RdmaContext) -> Result<Self, InstallError> {
        let ranges = [
            ("queue_pairs_per_endpoint", config.queue_pairs_per_endpoint, 1, MAX_QUEUE_PAIRS),
            ("send_queue_depth", config.send_queue_depth, 1, 4096),
            ("acknowledge_timeout", config.acknowledge_timeout.into(), 1, 31),
            ("max_endpoints", config.max_endpoints, 1, 4096),
            ("max_accepted", config.max_accepted, 1, 4096),
            ("connecting_threads", config.connecting_threads, 1, 256),
        ];
        for (name, value, min, max) in ranges {
            if !(min..=max).contains(&value) {
                return Err(InstallError::OutOfRange { name, value, min, max });
            }
        }
        let value =
            config.max_endpoints * config.queue_pairs_per_endpoint * config.send_queue_depth;
        if value > MAX_COMPLETIONS {
            let name = "max_endpoints * queue_pairs_per_endpoint * send_queue_depth";
            return Err(InstallError::OutOfRange { name, value, min: 1, max: MAX_COMPLETIONS });
        }
        if config.addresses.is_empty() {
            return Err(InstallError::NoAddress);
        }
        for (index, address) in config.addresses.iter().enumerate() {
            if config.addresses[..index].contains(address) {
                return Err(InstallError::DuplicateAddress(*address));
            }
        }
        let accepted = Arc::new(Accepted::new(
            config.max_accepted,
            config.acknowledge_timeout,
            config.keep_alive_interval,
        ));
        let open = |&address: &IpAddr| {
            LocalDevice::open(address, &config, Arc::downgrade(&accepted)).map(Arc::new)
        };
        let devices = config.addresses.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        // Peers know a device by its name, and one of the system's may have several addresses.
        for (index, device) in devices.iter().enumerate() {
            let name = device.device.name();
            if devices[..index].iter().any(|other| other.device.name() == name) {
                return Err(InstallError::DuplicateDevice(name.to_owned()));
            }
        }
        let asking = thread::Builder::new().name("rdma-keep-alive".to_owned()).spawn({
            let accepted = Arc::clone(&accepted);
            move || accepted.keep_asking()
        });
        let asking = asking.map_err(InstallError::Thread)?;
        Ok(Self {
            accepted,
            asking: Mutex::new(Some(asking)),
            workers: Arc::new(Workers::new(config.connecting_threads)),
            config,
            context: Arc::new(context),
            devices,
            endpoints: Mutex::default(),
            paths: RwLock::default(),
        })
    }

    /// The ways to a segment.
    fn paths(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
    ) -> Result<Arc<Paths>, String> {
        let known = self.paths.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(paths) = known.get(&segment.id)
            && Arc::ptr_eq(&paths.descriptor, descriptor)
        {
            return Ok(Arc::clone(paths));
        }
        drop(known);
        let paths = Arc::new(self.find_paths(segment, descriptor)?);
        let mut known = self.paths.write().unwrap_or_else(PoisonError::into_inner);
        known.insert(segment.id, Arc::clone(&paths));
        Ok(paths)
    }

    fn find_paths(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
    ) -> Result<Paths, String> {
        if descriptor.protocol != Self::NAME {
            return Err(format!("it speaks {:?}, not rdma", descriptor.protocol));
        }
        let locals: Vec<IpAddr> =
            self.devices.iter().map(|device| device.device.address()).collect();
        let remotes: Vec<IpAddr> =
            descriptor.devices.iter().map(|device| device.gid.address()).collect();
        let mut list = Vec::new();
        for (local, remote) in pairs::pairs(&locals, &remotes) {
            let endpoint =
                self.endpoint(local, &descriptor.devices[remote], segment, descriptor)?;
            endpoint.serves(segment);
            list.push(Path { endpoint, local, remote });
        }
        if list.is_empty() {
            let addresses =
                |list: &[IpAddr]| list.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
            return Err(format!(
                "no local address ({}) can reach one of its addresses ({})",
                addresses(&locals),
                addresses(&remotes),
            ));
        }
        Ok(Paths { descriptor: Arc::clone(descriptor), list, turn: AtomicUsize::new(0) })
    }

    fn endpoint(
        &self,
        local: usize,
        peer: &DeviceDesc,
        segment: &OpenSegment,
        descriptor: &SegmentDesc,
    ) -> Result<Arc<Endpoint>, String> {
        let peer_nic = NicPath { server: descriptor.name.clone(), nic: peer.name.clone() };
        let key = EndpointKey { device: local, peer_nic: peer_nic.clone() };
        let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(endpoint) = endpoints.get(&key) {
            return Ok(Arc::clone(endpoint));
        }
        let device = &self.devices[local];
        let config = EndpointConfig {
            context: Arc::clone(&self.context),
            workers: Arc::clone(&self.workers),
            device: Arc::clone(device),
            peer: segment.name.as_str().into(),
            peer_nic,
            peer_gid: peer.gid,
            queue_pairs: self.config.queue_pairs_per_endpoint,
            depth: self.config.send_queue_depth,
            retry_count: self.config.retry_count,
            patience: self.config.patience,
            acknowledge_timeout: self.config.acknowledge_timeout,
        };
        let endpoint = device.add(|number, own| Endpoint::new(number, own, config));
        let endpoint = endpoint.ok_or_else(|| {
            format!(
                "device {} is connected to {} NICs already",
                device.device.name(),
                self.config.max_endpoints
            )
        })?;
        endpoints.insert(key, Arc::clone(&endpoint));
        Ok(endpoint)
    }

    /// Tells peers that their ends of our connections are not needed any more, as far as that is
    /// quick.
    fn say_goodbye(&self, goodbyes: &[(String, HandShakeDesc)]) {
        let client = Client::new(ClientConfig {
            connect_timeout: GOODBYE_TIMEOUT,
            call_timeout: GOODBYE_TIMEOUT,
            ..*self.context.client.config()
        });
        let start = Instant::now();
        for (peer, goodbye) in goodbyes {
            if start.elapsed() > GOODBYES_TIMEOUT {
                return;
            }
            if let Ok(meta) = self.context.store.address(peer) {
                let frame = Frame::new(FrameType::Connection, goodbye.to_json());
                if let Err(error) = client.call(&meta.address, &frame) {
                    tracing::debug!(%error, "a peer was not told that this engine closes");
                }
            }
        }
    }

    /// The devices, which threads that wait for batches drive.
    pub(crate) fn devices(&self) -> Arc<[Device]> {
        self.devices.iter().map(|device| device.device.clone()).collect()
    }
}

impl Transport for RdmaTransport {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            own_segment: false,
            remote_segments: true,
            needs_keys: true,
            shared_memory: false,
        }
    }

    fn register(&self, memory: &RawMemory, remote: bool) -> Result<Registration, String> {
        let mut access = Access::LOCAL_WRITE;
        if remote {
            access |= Access::REMOTE_READ | Access::REMOTE_WRITE;
        }
        let register = |device: &Arc<LocalDevice>| {
            let failed = |error| format!("device {}: {error}", device.device.name());
            memory.register(&device.domain, access).map_err(failed)
        };
        let regions = self.devices.iter().map(register).collect::<Result<Vec<_>, _>>()?;
        let keys = regions.iter().map(MemoryRegion::key).collect();
        let remote_keys = regions.iter().map(MemoryRegion::remote_key).collect();
        let guard = Box::new(Regions(Mutex::new(regions)));
        Ok(Registration { keys, remote_keys, shared_key: None, guard })
    }

    fn describe(&self, descriptor: &mut SegmentDesc) {
        descriptor.protocol = Self::NAME.to_owned();
        for device in &self.devices {
            let name = device.device.name().to_owned();
            descriptor.devices.push(DeviceDesc { name, lid: 0, gid: device.gid() });
        }
        // All are taken to be as near to all memory.
        let names = descriptor.devices.iter().map(|device| device.name.clone()).collect();
        descriptor.priority_matrix.insert("cpu:0".to_owned(), (names, Vec::new()));
    }

    fn reaches(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
        _buffer: usize,
    ) -> Result<(), String> {
        self.paths(segment, descriptor).map(drop)
    }

    fn retransmissions(&self) -> u64 {
        // A device of the system counts the causes and not what it did about them.
        let of = |device: &Arc<LocalDevice>| {
            let counters = device.device.counters();
            counters.retransmissions.max(counters.naks_received + counters.timeouts)
        };
        self.devices.iter().map(of).sum()
    }

    fn submit(&self, batch: &Arc<BatchShared>, runs: &[Run]) {
        for runs in runs.chunk_by(|a, b| Arc::ptr_eq(&a.descriptor, &b.descriptor)) {
            let Run { segment, descriptor, .. } = &runs[0];
            let paths = match self.paths(segment, descriptor) {
                Ok(paths) => paths,
                // `reaches` has found some, so this is rare: the table of endpoints is full now.
                Err(reason) => {
                    let peer = segment.name.as_str().into();
                    let reason = FailureReason::NoPath(reason);
                    let error = TransferError { peer, nic: "none".into(), reason };
                    let handles = runs.iter().flat_map(|run| run.handles(batch));
                    handles.for_each(|task| task.fail_rest(&error));
                    continue;
                }
            };
            // Each task goes as many ways as it has slices, one after the other in turn.
            let count = paths.list.len();
            let ways = |task: usize| {
                count.min(usize::try_from(batch.tasks[task].slices()).unwrap_or(usize::MAX))
            };
            let tasks =
                || runs.iter().flat_map(|run| run.tasks.clone().map(move |task| (run, task)));
            let all = tasks().map(|(_, task)| ways(task)).sum();
            let first = paths.turn.fetch_add(all, Ordering::Relaxed);
            for (index, path) in paths.list.iter().enumerate() {
                let mut next = first;
                path.endpoint.push(tasks().filter_map(|(run, task)| {
                    let (turn, ways) = (next, ways(task));
                    next = turn.wrapping_add(ways);
                    let begin = if self.config.path_round_robin { turn } else { mix(turn) };
                    let way = (index + count - begin % count) % count;
                    let remote_keys = &run.descriptor.buffers[run.buffer].rkey;
                    (way < ways).then(|| Pending {
                        task: TaskHandle { batch: Arc::clone(batch), index: task },
                        local_key: run.local.keys[run.transport][path.local],
                        remote_key: remote_keys[path.remote],
                        incarnation: run.descriptor.incarnation,
                    })
                }));
            }
            // First each takes its share: who is asked first would take all that it has room for.
            if count > 1 {
                let slices: u64 = tasks().map(|(_, task)| batch.tasks[task].slices()).sum();
                let share = usize::try_from(slices).unwrap_or(usize::MAX).div_ceil(count);
                paths.list.iter().for_each(|path| path.endpoint.kick(share));
            }
            paths.list.iter().for_each(|path| path.endpoint.kick(usize::MAX));
        }
    }

    fn handshake(&self, request: &HandShakeDesc) -> Option<HandShakeDesc> {
        let reply = match request.peer_nic_path.parse::<NicPath>() {
            Err(error) => Err(error.to_string()),
            Ok(NicPath { server, nic }) => {
                let device = self.devices.iter().find(|device| device.device.name() == nic);
                match device {
                    Some(_) if server != self.context.engine => {
                        Err(format!("this is {}, not {server}", self.context.engine))
                    }
                    Some(device) => {
                        self.accepted.accept(device, request).map(|reply| HandShakeDesc {
                            local_nic_path: request.peer_nic_path.clone(),
                            local_gid: Some(device.gid()),
                            peer_nic_path: request.local_nic_path.clone(),
                            incarnation: Some(self.context.incarnation),
                            ..reply
                        })
                    }
                    None => Err(format!("{} has no NIC {nic:?}", self.context.engine)),
                }
            }
        };
        Some(reply.unwrap_or_else(HandShakeDesc::refusal))
    }

    fn forget(&self, segment: SegmentId) {
        self.paths.write().unwrap_or_else(PoisonError::into_inner).remove(&segment);
    }

    fn stop(&self) {
        let locked = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        let endpoints: Vec<_> = locked.values().cloned().collect();
        drop(locked);
        let goodbyes: Vec<_> = endpoints
            .iter()
            .filter_map(|endpoint| Some((endpoint.peer().to_owned(), endpoint.stop()?)))
            .collect();
        self.accepted.stop();
        let asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(asking) = asking {
            let _ = asking.join();
        }
        self.workers.stop();
        self.say_goodbye(&goodbyes);
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.paths.write().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// What ends registrations with devices: each waits for its device.
struct Regions(Mutex<Vec<MemoryRegion>>);

impl Guard for Regions {
    fn revoke(&self) -> Result<(), String> {
        drop(mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)));
        Ok(())
    }
}

/// A number that looks random for each number: the finalizer of splitmix64.
fn mix(number: usize) -> usize {
    let mut mixed = (number as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_without_an_order_are_taken_equally_often() {
        const COUNT: usize = 4;
        let mut taken = [0; COUNT];
        let mut in_turn = 0;
        for turn in 0..1000 {
            let way = mix(turn) % COUNT;
            taken[way] += 1;
            in_turn += usize::from(mix(turn + 1) % COUNT == (way + 1) % COUNT);
        }
        assert!(taken.iter().all(|count| (200..300).contains(count)), "{taken:?}");
        assert!((200..300).contains(&in_turn), "{in_turn}");
    }
}
