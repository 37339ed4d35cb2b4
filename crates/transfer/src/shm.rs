//! The transport `shm`: memory of other processes on this host, of the same user.
//!
//! Processes find each other when a segment is opened. What its engine allocated is mapped here; what its
//! user brought is copied by the kernel, where that is allowed.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use millstream_metadata::{BufferDesc, SegmentDesc, SharedMemoryDesc};
use millstream_net::shared_memory::{
    AccessError, Host, Key, MAX_ENTRIES, Offer, PATIENCE, Peer, Registration as OfferedMemory,
};

use crate::batch::BatchShared;
use crate::copier::{Copier, Other, Way};
use crate::keys::Keys;
use crate::memory::RawMemory;
use crate::metrics::{Metrics, RailMetrics, RailStatus};
use crate::segment::OpenSegment;
use crate::terms::Terms;
use crate::transport::{Capabilities, Guard, Registration, Run, Transport};
use crate::{FailureReason, InstallError, SegmentId};

/// So many of a segment's buffers are mapped when it is opened, others when they are used.
const MAPPED_AT_ONCE: usize = 64;

pub(crate) struct ShmTransport {
    incarnation: u64,
    host: Host,
    /// `None` once it was stopped.
    offer: RwLock<Option<Arc<Offer>>>,
    copier: Arc<Copier>,
    links: RwLock<HashMap<SegmentId, Link>>,
}

/// What came of asking a segment's process to be let in.
#[derive(Clone)]
struct Link {
    segment: Arc<OpenSegment>,
    /// The start of the process that was asked.
    incarnation: Option<u64>,
    peer: Result<Arc<Peer>, String>,
}

impl ShmTransport {
    pub(crate) const NAME: &'static str = "shm";

    pub(crate) fn new(incarnation: u64, copier: Arc<Copier>) -> Result<Self, InstallError> {
        let failed = |reason: String| InstallError::SharedMemory(reason);
        let host = Host::own().map_err(|error| failed(format!("/proc: {error}")))?;
        let offer = Offer::start(incarnation, MAX_ENTRIES);
        let offer = offer.map_err(|error| failed(error.to_string()))?;
        let offer = RwLock::new(Some(Arc::new(offer)));
        Ok(Self { incarnation, host, offer, copier, links: RwLock::default() })
    }

    fn offer(&self) -> Option<Arc<Offer>> {
        self.offer.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks the process to be let in.
    fn connect(&self, descriptor: &SegmentDesc) -> Result<Peer, String> {
        let shm = descriptor.shm.as_ref().ok_or("it does not share its memory")?;
        let host = Host {
            boot_id: shm.boot_id.clone(),
            pid_namespace: shm.pid_namespace,
            network_namespace: shm.network_namespace,
        };
        if let Some(obstacle) = self.host.obstacle(&host) {
            return Err(obstacle.to_owned());
        }
        let incarnation = descriptor.incarnation.ok_or("it does not say which process it is")?;
        Peer::connect(&shm.socket, incarnation).map_err(|error| error.to_string())
    }

    fn peer(&self, segment: &OpenSegment, descriptor: &SegmentDesc) -> Result<Arc<Peer>, String> {
        let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
        match links.get(&segment.id) {
            Some(link) if link.incarnation == descriptor.incarnation => link.peer.clone(),
            _ => Err("its process was not asked".to_owned()),
        }
    }
}

impl Transport for ShmTransport {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { shared_memory: true, copies: true, ..Capabilities::REMOTE }
    }

    fn rank(&self) -> u8 {
        1
    }

    fn register(&self, memory: &RawMemory, remote: bool) -> Result<Registration, String> {
        let (keys, remote_keys) = (Keys::none(), Keys::none());
        // The processor of a peer does not get at memory of a GPU.
        let offer = self.offer().filter(|_| remote && memory.gpu().is_none());
        let Some(offer) = offer else {
            let guard = Box::new(());
            return Ok(Registration { keys, remote_keys, shared_key: None, guard });
        };
        let offered = memory.offer(&offer).map_err(|error| error.to_string())?;
        let shared_key = Some(offered.key().0);
        Ok(Registration { keys, remote_keys, shared_key, guard: Box::new(offered) })
    }

    fn describe(&self, descriptor: &mut SegmentDesc) {
        let Some(offer) = self.offer() else { return };
        // Who knows of no shared memory, as Mooncake, is to see what it can use.
        if descriptor.devices.is_empty() {
            descriptor.protocol = Self::NAME.to_owned();
        }
        descriptor.shm = Some(SharedMemoryDesc {
            boot_id: self.host.boot_id.clone(),
            pid_namespace: self.host.pid_namespace,
            network_namespace: self.host.network_namespace,
            socket: offer.socket().to_owned(),
        });
    }

    fn prepare(&self, segment: &Arc<OpenSegment>, descriptor: &Arc<SegmentDesc>) {
        let known = self.peer(segment, descriptor).ok().filter(|peer| peer.is_alive());
        let peer = match known {
            Some(peer) => Ok(peer),
            None => self.connect(descriptor).map(Arc::new),
        };
        match &peer {
            Ok(peer) => {
                let usable = descriptor.buffers.iter().filter(|buffer| buffer.fault.is_none());
                let keys = usable.filter_map(|buffer| buffer.shm_key);
                for key in keys.take(MAPPED_AT_ONCE) {
                    if let Err(error) = peer.open(Key(key)) {
                        tracing::debug!(segment = segment.name, %error, "memory is not mapped");
                        // The others would wait as long.
                        if matches!(error, AccessError::NoAnswer) {
                            break;
                        }
                    }
                }
                tracing::info!(segment = segment.name, pid = peer.pid(), "memory is shared");
            }
            Err(reason) => {
                tracing::info!(segment = segment.name, reason, "memory is not shared");
            }
        }
        let incarnation = descriptor.incarnation;
        let link = Link { segment: Arc::clone(segment), incarnation, peer };
        let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
        let before = links.insert(segment.id, link);
        drop(links);
        // Unmaps what nobody uses any more.
        drop(before);
    }

    fn reaches(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
        buffer: usize,
    ) -> Result<(), String> {
        let peer = self.peer(segment, descriptor)?;
        is_accessible(&peer, &descriptor.buffers[buffer])
    }

    fn leads(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
        buffer: usize,
    ) -> bool {
        let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
        // A reason is not copied.
        links.get(&segment.id).is_some_and(|link| {
            let known = link.incarnation == descriptor.incarnation;
            let peer = link.peer.as_ref().ok().filter(|_| known);
            peer.is_some_and(|peer| is_accessible(peer, &descriptor.buffers[buffer]).is_ok())
        })
    }

    fn observe(&self, metrics: &mut Metrics) {
        let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
        metrics.rails.extend(links.values().map(|Link { segment, peer, .. }| {
            let alive = peer.as_ref().is_ok_and(|peer| peer.is_alive());
            let ended = (!alive).then(|| "its process has ended".to_owned());
            segment.traffic.rail(RailMetrics {
                transport: Self::NAME.to_owned(),
                peer: segment.name.clone(),
                state: if alive { RailStatus::Up } else { RailStatus::Down },
                reason: peer.as_ref().err().cloned().or(ended),
                ..RailMetrics::default()
            })
        }));
    }

    fn submit(&self, batch: &Arc<BatchShared>, runs: &[Run], terms: &Terms) {
        self.copier.submit(batch, runs, terms, |run| {
            let peer =
                self.peer(&run.segment, &run.view.descriptor).map_err(FailureReason::NoPath)?;
            let key = run.view.descriptor.buffers[run.buffer].shm_key;
            let key = Key(key.ok_or(FailureReason::Unregistered)?);
            let (local, segment) = (Arc::clone(&run.local), Arc::clone(&run.segment));
            let incarnation = run.view.descriptor.incarnation;
            Ok(Way { local, other: Other::Peer(peer, key), segment, incarnation })
        });
    }

    fn forget(&self, segment: SegmentId) {
        let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
        let link = links.remove(&segment);
        drop(links);
        drop(link);
    }

    fn stop(&self) {
        tracing::debug!(incarnation = self.incarnation, "shared memory is not offered any more");
        // The copier is the engine's: `local` stops it, before. Where this one could not be installed, it goes on.
        let offer = self.offer.write().unwrap_or_else(PoisonError::into_inner).take();
        drop(offer);
        let links =
            std::mem::take(&mut *self.links.write().unwrap_or_else(PoisonError::into_inner));
        drop(links);
    }
}

/// Why a peer's buffer cannot be accessed, if so.
fn is_accessible(peer: &Peer, buffer: &BufferDesc) -> Result<(), String> {
    let key = buffer.shm_key.ok_or(match buffer.name.starts_with("cuda:") {
        true => "this buffer is not shared, as memory of GPUs is not",
        false => "this buffer is not shared",
    })?;
    peer.obstacle(Key(key)).map_or(Ok(()), Err)
}

impl Guard for OfferedMemory {
    fn revoke(&self) -> Result<(), String> {
        Self::revoke(self, PATIENCE).map_err(|error| error.to_string())
    }
}
