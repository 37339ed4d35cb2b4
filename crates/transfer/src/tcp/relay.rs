//! The transport `relay`: segments to which nothing leads from here, by way of a third node.
//!
//! A relay is asked at its control port for a way to a segment. It answers with a number, which a connection to its port
//! for data names in the place of an incarnation: what is asked over that connection it does with transfers of its own.
//! All else is as for the transport `tcp`, fences among it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::Duration;

use millstream_metadata::{
    Client, Frame, FrameType, Gate, HandShakeDesc, HostPort, RelayedDesc, Resolver, SegmentDesc,
};
use millstream_net::Waiters;

use super::flow::Framing;
use super::peer::{Peer, Place};
use super::{END_PATIENCE, Progress, TcpConfig, lock};
use crate::batch::BatchShared;
use crate::engine::Inner;
use crate::keys::Keys;
use crate::memory::RawMemory;
use crate::metrics::Metrics;
use crate::path;
use crate::segment::OpenSegment;
use crate::terms::Terms;
use crate::transport::{Capabilities, Registration, Run, Transport};
use crate::{FailureReason, InstallError, SegmentId, TransferError};

/// As in reports of paths.
pub(crate) const NAME: &str = "relay";

/// The most relays of an engine.
pub(crate) const MAX_RELAYS: usize = 16;

/// For how long nothing may move over a connection to a relay while something is under way: longer than the transfers of
/// a message may take there ([`RelayLimits::timeout`]) and be waited for at their end.
const SILENCE: Duration = Duration::from_secs(15);

/// What an engine does for others as a relay.
#[derive(Clone, Debug)]
pub struct RelayLimits {
    /// Connections at a time: 1 to 1024. For each of them 1 MiB is allocated and registered from the start, in which
    /// what is on its way is staged. An initiator has up to [`TcpConfig::lanes`] for each segment.
    pub max_connections: usize,
    /// The segments that it has ways to. Of those that nobody uses the oldest goes for another one.
    pub max_segments: usize,
    /// How long the transfers of a message, of 1 MiB at most, may take: 100 ms to 10 s.
    pub timeout: Duration,
    /// A connection over which nothing is asked for so long is closed, and makes room.
    pub idle: Duration,
}

impl Default for RelayLimits {
    fn default() -> Self {
        let ten_seconds = Duration::from_secs(10);
        Self { max_connections: 32, max_segments: 1024, timeout: ten_seconds, idle: ten_seconds }
    }
}

impl RelayLimits {
    /// Whether they are possible.
    pub(crate) fn check(&self) -> Result<(), InstallError> {
        for (name, value, max) in [
            ("relay.max_connections", self.max_connections, 1024),
            ("relay.max_segments", self.max_segments, 65_536),
        ] {
            if !(1..=max).contains(&value) {
                return Err(InstallError::OutOfRange { name, value, min: 1, max });
            }
        }
        let (least, most) = (Duration::from_millis(100), Duration::from_secs(10));
        if !(least..=most).contains(&self.timeout) {
            let what =
                format!("relay.timeout is {:?}, and may be {least:?} to {most:?}", self.timeout);
            return Err(InstallError::Relay(what));
        }
        Ok(())
    }
}

/// What the transport `relay` is installed with.
#[derive(Clone, Debug)]
pub struct RelayConfig {
    /// Where relays answer: `host:port`, 1 to 16. They are asked in this order.
    pub relays: Vec<String>,
    /// Connections to a relay for each segment: 1 to 16. Each has a message of up to 1 MiB staged there.
    pub lanes: usize,
    /// How long a relay may take to accept a connection.
    pub connect_timeout: Duration,
}

impl RelayConfig {
    /// The defaults, with these relays.
    pub fn new(relays: &[&str]) -> Self {
        let TcpConfig { lanes, connect_timeout, .. } = TcpConfig::default();
        let relays = relays.iter().map(|&relay| relay.to_owned()).collect();
        Self { relays, lanes, connect_timeout }
    }
}

/// A way to a segment.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    host: String,
    said: Arc<RelayedDesc>,
    /// Which start of the segment's process it is for.
    incarnation: Option<u64>,
}

/// What came of looking for a way.
enum Found {
    Peer(Arc<Peer>, Option<u64>),
    Refused(String),
}

pub(crate) struct RelayTransport {
    engine: Weak<Inner>,
    relays: Vec<HostPort>,
    client: Client,
    gate: Option<Gate>,
    config: Arc<TcpConfig>,
    routes: RwLock<HashMap<SegmentId, Found>>,
    /// Peers that are for nothing more but what was submitted before.
    retired: Mutex<Vec<Arc<Peer>>>,
    progress: Arc<Progress>,
    /// Nobody else has the progress.
    owns_progress: bool,
}

impl RelayTransport {
    /// With the progress of the transport `tcp`, if that is there.
    pub(crate) fn new(
        config: &RelayConfig,
        engine: Weak<Inner>,
        client: Client,
        gate: Option<Gate>,
        progress: Option<Arc<Progress>>,
    ) -> Result<Self, InstallError> {
        let count = config.relays.len();
        for (name, value) in [("relays", count), ("lanes", config.lanes)] {
            if !(1..=MAX_RELAYS).contains(&value) {
                let (min, max) = (1, MAX_RELAYS);
                return Err(InstallError::OutOfRange { name, value, min, max });
            }
        }
        let parse = |relay: &String| {
            relay.parse().map_err(|error| InstallError::Relay(format!("a relay: {error}")))
        };
        let relays = config.relays.iter().map(parse).collect::<Result<_, _>>()?;
        let config = TcpConfig {
            lanes: config.lanes,
            connect_timeout: config.connect_timeout,
            progress_timeout: SILENCE,
            ..TcpConfig::default()
        };
        Ok(Self {
            engine,
            relays,
            client,
            gate,
            config: Arc::new(config),
            routes: RwLock::default(),
            retired: Mutex::default(),
            owns_progress: progress.is_none(),
            progress: progress.unwrap_or_default(),
        })
    }

    pub(crate) fn shared_progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// A way to the segment of this name, and its descriptor; or what each relay has said. Waits for their answers.
    pub(crate) fn find(&self, segment: &str) -> Result<(SegmentDesc, Way), String> {
        let mut refusals = Vec::new();
        for relay in &self.relays {
            match self.ask(relay, segment) {
                Ok(found) => return Ok(found),
                Err(reason) => refusals.push(format!("the relay {relay}: {reason}")),
            }
        }
        Err(refusals.join("; "))
    }

    fn ask(&self, relay: &HostPort, segment: &str) -> Result<(SegmentDesc, Way), String> {
        let request = HandShakeDesc { relay: Some(segment.to_owned()), ..HandShakeDesc::default() };
        let frame = Frame::new(FrameType::Connection, request.to_json());
        let reply = self.client.call(relay, &frame).map_err(|error| error.kind.to_string())?;
        let reply = HandShakeDesc::from_json(&reply.body)
            .map_err(|error| format!("its answer makes no sense: {error}"))?;
        let said = match reply.relayed {
            Some(said) => said,
            None if reply.reply_msg.is_empty() => return Err("it is no relay".to_owned()),
            None => return Err(reply.reply_msg),
        };
        let descriptor = SegmentDesc::from_json(said.descriptor.as_bytes())
            .map_err(|error| format!("the descriptor that it has: {error}"))?;
        // It is long, and no more needed.
        let said = RelayedDesc { descriptor: String::new(), ..said };
        let (host, incarnation) = (relay.host.clone(), descriptor.incarnation);
        Ok((descriptor, Way { host, said: Arc::new(said), incarnation }))
    }

    /// The way to a segment, whose process is reached otherwise, too, but where no other transport leads.
    fn look_for(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
    ) -> Result<Way, String> {
        let engine = self.engine.upgrade().ok_or("the engine is shutting down")?;
        let usable = (0..).zip(&descriptor.buffers).filter(|(_, buffer)| buffer.fault.is_none());
        let mut places =
            usable.map(|(buffer, _)| path::Place { segment, descriptor, buffer }).peekable();
        if places.peek().is_none() {
            return Err("the segment has no memory".to_owned());
        }
        if engine.leads_without(NAME, places) {
            return Err("others lead there".to_owned());
        }
        let (seen, way) = self.find(&segment.name)?;
        if seen.incarnation != descriptor.incarnation {
            return Err("the relay sees another start of its process".to_owned());
        }
        Ok(way)
    }

    fn retire(&self, before: Option<Found>) {
        let mut retired = lock(&self.retired);
        if let Some(Found::Peer(peer, _)) = before {
            retired.push(peer);
        }
        let over: Vec<_> = retired.extract_if(.., |peer| peer.is_at_rest()).collect();
        drop(retired);
        over.iter().for_each(|peer| peer.let_go());
    }

    /// Runs `with` on what is known of the way to a segment.
    fn with_route<R>(&self, segment: SegmentId, with: impl FnOnce(Option<&Found>) -> R) -> R {
        with(self.routes.read().unwrap_or_else(PoisonError::into_inner).get(&segment))
    }

    fn peers(&self) -> Vec<Arc<Peer>> {
        let routes = self.routes.read().unwrap_or_else(PoisonError::into_inner);
        let peer = |found: &Found| match found {
            Found::Peer(peer, _) => Some(Arc::clone(peer)),
            Found::Refused(_) => None,
        };
        routes.values().filter_map(peer).collect()
    }
}

impl Transport for RelayTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::REMOTE
    }

    fn rank(&self) -> u8 {
        3
    }

    fn register(&self, _memory: &RawMemory, _remote: bool) -> Result<Registration, String> {
        let (keys, remote_keys) = (Keys::none(), Keys::none());
        Ok(Registration { keys, remote_keys, shared_key: None, guard: Box::new(()) })
    }

    fn describe(&self, _descriptor: &mut SegmentDesc) {}

    fn prepare(&self, segment: &Arc<OpenSegment>, descriptor: &Arc<SegmentDesc>) {
        let way = segment.relayed().map_or_else(|| self.look_for(segment, descriptor), Ok);
        let found = match way {
            Err(reason) => Found::Refused(reason),
            Ok(Way { host, said, incarnation }) => {
                let place = Place {
                    name: said.name.clone(),
                    host,
                    port: said.port,
                    framing: Framing::Numbered,
                    checked: false,
                    incarnation: Some(said.number),
                    relays: true,
                };
                let same = self.with_route(segment.id, |known| match known {
                    Some(Found::Peer(peer, _))
                        if peer.place == place && peer.is_unresolved().is_none() =>
                    {
                        Some(Arc::clone(peer))
                    }
                    _ => None,
                });
                let peer = same.unwrap_or_else(|| {
                    Peer::new(
                        (segment, None),
                        place,
                        self.gate.as_ref(),
                        &self.config,
                        &self.progress,
                        &Resolver::system(),
                    )
                });
                Found::Peer(peer, incarnation)
            }
        };
        let kept = match &found {
            Found::Peer(peer, _) => Some(Arc::clone(peer)),
            Found::Refused(_) => None,
        };
        let mut routes = self.routes.write().unwrap_or_else(PoisonError::into_inner);
        let before = routes.insert(segment.id, found);
        drop(routes);
        let is_kept = |before: &Found| matches!((before, &kept), (Found::Peer(old, _), Some(kept)) if Arc::ptr_eq(old, kept));
        self.retire(before.filter(|before| !is_kept(before)));
    }

    fn reaches(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
        buffer: usize,
    ) -> Result<(), String> {
        if self.leads(segment, descriptor, buffer) {
            return Ok(());
        }
        self.with_route(segment.id, |found| match found {
            None => Err("no relay was asked".to_owned()),
            Some(Found::Refused(reason)) => Err(reason.clone()),
            Some(Found::Peer(peer, _)) => Err(peer.is_unresolved().map_or_else(
                || "the relay's way is to another start of its process".to_owned(),
                |reason| reason.to_string(),
            )),
        })
    }

    fn leads(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
        buffer: usize,
    ) -> bool {
        descriptor.buffers[buffer].file_path.is_none()
            && self.with_route(segment.id, |found| match found {
                Some(Found::Peer(peer, incarnation)) => {
                    *incarnation == descriptor.incarnation && peer.is_unresolved().is_none()
                }
                _ => false,
            })
    }

    fn observe(&self, metrics: &mut Metrics) {
        metrics.rails.extend(self.peers().iter().map(|peer| peer.observe()));
    }

    fn submit(&self, batch: &Arc<BatchShared>, runs: &[Run], terms: &Terms) {
        batch.goes_over_streams();
        for run in runs {
            let peer = self.with_route(run.segment.id, |found| match found {
                Some(Found::Peer(peer, _)) => Some(Arc::clone(peer)),
                _ => None,
            });
            if let Some(peer) = peer {
                peer.submit(batch, run, terms);
                continue;
            }
            // It was closed since it was looked for.
            let reason = FailureReason::NoPath("the way by a relay was closed".to_owned());
            let peer = run.segment.name.as_str().into();
            let error = TransferError::new(peer, NAME, reason);
            run.handles(batch).for_each(|task| task.fail_whole(&error));
        }
    }

    fn forget(&self, segment: SegmentId) {
        let before = self.routes.write().unwrap_or_else(PoisonError::into_inner).remove(&segment);
        self.retire(before);
    }

    fn stop(&self) {
        let mut peers = self.peers();
        self.routes.write().unwrap_or_else(PoisonError::into_inner).clear();
        peers.append(&mut lock(&self.retired));
        peers.iter().for_each(Peer::end);
        // Returns once nothing is under way.
        self.progress.wait(&Waiters::default(), END_PATIENCE, || false);
        peers.iter().for_each(Peer::stop);
        if self.owns_progress {
            self.progress.stop();
        }
    }
}
