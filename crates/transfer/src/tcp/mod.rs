//! The transport `tcp`: memory of other processes over TCP, understood by the original transfer engine.
//!
//! An engine says in its descriptor at which port it takes requests for its memory. Two engines of this project use a
//! framing of their own there (`message.rs`), to which one more key of the descriptor belongs; with the original each
//! side uses that of the original (`original.rs`).

mod connection;
mod ended;
mod flow;
mod lane;
mod line;
mod message;
mod original;
mod peer;
mod pieces;
mod progress;
pub(crate) mod relay;
mod stage;
mod target;
#[cfg(test)]
pub(crate) mod testing;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Duration;

use millstream_metadata::{Gate, HandShakeDesc, HostPort, Resolver, SegmentDesc};
use millstream_net::{Polling, Waiters};

use self::flow::Framing;
pub(crate) use self::line::Line;
use self::original::Version;
use self::peer::{Peer, Place};
pub(crate) use self::progress::Progress;
use self::relay::RelayLimits;
use self::target::{Relay, Target};
use crate::batch::BatchShared;
use crate::engine::Inner;
use crate::keys::Keys;
use crate::listen::listen;
use crate::memory::{Memory, RawMemory};
use crate::metrics::Metrics;
use crate::segment::OpenSegment;
use crate::terms::Terms;
use crate::transport::{Capabilities, Registration, Run, Transport};
use crate::{FailureReason, InstallError, SegmentId, TransferError};

/// As in `--protocol` and in descriptors.
pub(crate) const NAME: &str = "tcp";

/// What the transport `tcp` is installed with.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Where initiators are answered. Without, at the engine's address and a free port.
    pub listen: Option<SocketAddr>,
    /// Among which ports to look for a free one, where `listen` has none. Without, the system chooses.
    pub ports: Option<RangeInclusive<u16>>,
    /// Connections that are served at a time, each by a thread.
    pub max_connections: usize,
    /// Connections to a peer: 1 to 16. More than one are made when there is more to do than one takes.
    pub lanes: usize,
    /// Whether version 1 of the original's framing is used in place of all others, which acknowledges no WRITE.
    pub version_one: bool,
    /// Whether the framing with numbered messages is used with peers that have it, and offered.
    pub messages: bool,
    /// Whether all that is sent to and by peers with the framing of numbered messages has checksums, where they know of it:
    /// what was damaged on its way is sent again. It costs a copy at either end.
    pub checksums: bool,
    /// Whether a WRITE in version 1 of the original's framing counts only once a READ behind it was answered. Peers
    /// that serve one request for a connection, as Mooncake before version 0.3.10, do not answer.
    pub confirm_writes: bool,
    /// How long a peer may take to accept a connection.
    pub connect_timeout: Duration,
    /// For how long nothing may move over a connection to a peer with numbered messages while something is under
    /// way.
    pub progress_timeout: Duration,
    /// The same, to a peer of the original.
    pub status_timeout: Duration,
    /// Whether, and how far, it is a relay: others reach memory of processes through it that they do not reach themselves.
    /// It must not ask relays itself.
    pub relay: Option<RelayLimits>,
    /// For how long at most a thread looks at connections before it sleeps, while it waits for an answer, or at a target
    /// for a request: up to 10 ms. It does so where waits are short. Zero: it sleeps at once. Without:
    /// [`TcpConfig::BUSY_POLL`], and zero where a control group gives this process, which may run on several processors, the
    /// time of one.
    pub busy_poll: Option<Duration>,
}

impl TcpConfig {
    /// For how long a thread looks before it sleeps, unless said: to be woken takes about as long.
    pub const BUSY_POLL: Duration = Polling::LONGEST;
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            listen: None,
            ports: None,
            max_connections: 256,
            lanes: 4,
            version_one: false,
            messages: true,
            checksums: false,
            confirm_writes: false,
            connect_timeout: Duration::from_secs(2),
            progress_timeout: Duration::from_secs(5),
            status_timeout: Duration::from_secs(30),
            relay: None,
            busy_poll: None,
        }
    }
}

/// The most lanes to a peer.
const MAX_LANES: usize = 16;

/// How long the end of an engine waits until nothing of its requests can arrive any more. Peers that do not confirm it have
/// 2.3 s.
const END_PATIENCE: Duration = Duration::from_secs(3);

pub(crate) struct TcpTransport {
    host: String,
    incarnation: u64,
    /// Who finds another transport for what cannot be done, where that is done.
    engine: Option<Weak<Inner>>,
    config: Arc<TcpConfig>,
    port: u16,
    target: Mutex<Option<Target>>,
    /// Segments are called by where their processes answer.
    named_by_address: bool,
    /// Who is admitted, where there is a token or a certificate.
    gate: Option<Gate>,
    routes: RwLock<BTreeMap<SegmentId, Arc<Peer>>>,
    /// Peers that are for nothing more but what was submitted before.
    retired: Mutex<Vec<Arc<Peer>>>,
    polling: Arc<Polling>,
    progress: Arc<Progress>,
}

impl TcpTransport {
    pub(crate) fn new(
        config: TcpConfig,
        host: &str,
        incarnation: u64,
        address: SocketAddr,
        memory: &Arc<Memory>,
        named_by_address: bool,
        gate: Option<Gate>,
    ) -> Result<Self, InstallError> {
        let failed = |what: String| InstallError::Tcp(what);
        let (name, value, min, max) = ("lanes", config.lanes, 1, MAX_LANES);
        if !(min..=max).contains(&value) {
            return Err(InstallError::OutOfRange { name, value, min, max });
        }
        if gate.as_ref().is_some_and(|gate| gate.tls().is_some())
            && (config.version_one || !config.messages)
        {
            let text = "the original has no TLS: with a certificate (security.certificate_file) tcp.framing is best";
            return Err(failed(text.to_owned()));
        }
        let listening = config.listen.unwrap_or_else(|| SocketAddr::new(address.ip(), 0));
        let listener = listen(listening, config.ports.as_ref(), 128)
            .map_err(|error| failed(format!("cannot listen at {listening}: {error}")))?;
        let polling = Polling::new(config.busy_poll);
        let start = Target::start(
            listener,
            config.max_connections,
            Arc::clone(memory),
            incarnation,
            gate.clone(),
            Arc::clone(&polling),
        );
        let target = start.map_err(|error: io::Error| failed(error.to_string()))?;
        Ok(Self {
            host: host.to_owned(),
            incarnation,
            engine: None,
            named_by_address,
            gate,
            config: Arc::new(config),
            port: target.port(),
            target: Mutex::new(Some(target)),
            routes: RwLock::default(),
            retired: Mutex::default(),
            progress: Arc::new(Progress::new(&polling)),
            polling,
        })
    }

    /// The same, whose tasks go on over other transports of this engine.
    pub(crate) fn leaving_to(self, engine: Option<Weak<Inner>>) -> Self {
        Self { engine, ..self }
    }

    /// The same, a relay that does with this engine what others ask, and stages that in memory from this address on.
    pub(crate) fn relaying(self, engine: Weak<Inner>, staging: Option<u64>) -> Self {
        if let (Some(limits), Some(staging)) = (&self.config.relay, staging)
            && let Some(target) = &*lock(&self.target)
        {
            target.shared().relays(Relay::new(engine, limits.clone(), self.port, staging));
        }
        self
    }

    /// Bytes that a relay with these limits stages in.
    pub(crate) const fn staged(limits: &RelayLimits) -> usize {
        limits.max_connections * Relay::STAGED
    }

    pub(crate) fn shared_progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// The port for data of a segment's process.
    fn data_port(&self, descriptor: &SegmentDesc) -> Result<u16, &'static str> {
        let SegmentDesc { tcp_data_port, tcp_token_port, tcp_tls_port, .. } = *descriptor;
        let has_tls = self.gate.as_ref().is_some_and(|gate| gate.tls().is_some());
        match (has_tls, tcp_tls_port) {
            (true, Some(port)) => return Ok(port),
            (true, None) if tcp_data_port.or(tcp_token_port).is_some() => {
                return Err("its port for data over TCP has no TLS, and a certificate is set here");
            }
            (false, Some(_)) => {
                return Err(
                    "its port for data over TCP is for those only who prove by a certificate who they are, and \
                     none is set here: see security.certificate_file",
                );
            }
            (_, None) => {}
        }
        match (&self.gate, tcp_token_port, tcp_data_port) {
            (Some(_), Some(port), _) | (None, _, Some(port)) => Ok(port),
            (Some(_), None, Some(_)) => {
                Err("its port for data over TCP asks for no token, and one is set here")
            }
            (None, Some(_), None) => Err(
                "its port for data over TCP is for those only who have its token, and none is set here: see \
                 security.token_file",
            ),
            (_, None, None) => Err("it has no port for data over TCP"),
        }
    }

    /// Where a segment's process is, and how it is talked to.
    fn place(&self, segment: &str, descriptor: &SegmentDesc) -> Result<Place, String> {
        let port = self.data_port(descriptor)?;
        // Where its process was found is a better name than the one it has for itself. At a server a segment is
        // called as its user likes.
        let named = || segment.parse::<HostPort>().ok().map(|name| name.host);
        let own = || descriptor.tcp_data_host.clone();
        let host = if self.named_by_address { named().or_else(own) } else { own().or_else(named) };
        let host = host.ok_or("it does not say at which host it is")?;
        let numbered = self.config.messages
            && descriptor.incarnation.is_some()
            && descriptor.tcp_message_version.is_some_and(|version| version >= message::PLAIN);
        let checked = self.config.checksums
            && descriptor.tcp_message_version.is_some_and(|version| version >= message::CHECKED);
        let framing = match descriptor.tcp_proto_version {
            _ if self.config.version_one => Framing::Old(Version::One),
            _ if descriptor.tcp_tls_port.is_some() && !numbered => {
                return Err("it does not understand numbered messages".to_owned());
            }
            _ if numbered => Framing::Numbered,
            Some(2..) => Framing::Old(Version::Two),
            _ => Framing::Old(Version::One),
        };
        let name = descriptor.name.clone();
        let checked = checked && framing == Framing::Numbered;
        let incarnation = descriptor.incarnation;
        Ok(Place { name, host, port, framing, checked, incarnation, relays: false })
    }

    /// Answers who asks for a way to a segment; `None` where this is no relay.
    fn answer_relayed(&self, segment: &str) -> Option<HandShakeDesc> {
        let shared = lock(&self.target).as_ref().map(|target| Arc::clone(target.shared()))?;
        let opened = shared.relay()?.open(segment);
        let incarnation = Some(self.incarnation);
        Some(match opened {
            Ok(relayed) => {
                let relayed = Some(relayed);
                HandShakeDesc { incarnation, relayed, ..HandShakeDesc::default() }
            }
            Err(reason) => HandShakeDesc { incarnation, ..HandShakeDesc::refusal(reason) },
        })
    }

    fn route(&self, segment: SegmentId) -> Option<Arc<Peer>> {
        self.routes.read().unwrap_or_else(PoisonError::into_inner).get(&segment).cloned()
    }

    /// Keeps a peer that nobody finds any more until what was submitted to it has ended.
    fn retire(&self, peer: Option<Arc<Peer>>) {
        let mut retired = lock(&self.retired);
        retired.extend(peer);
        let over: Vec<_> = retired.extract_if(.., |peer| peer.is_at_rest()).collect();
        drop(retired);
        over.iter().for_each(|peer| peer.let_go());
    }
}

/// Whether the port for data takes memory of GPUs.
fn stages(descriptor: &SegmentDesc) -> bool {
    descriptor.tcp_message_version.is_some_and(|version| version >= message::STAGED)
}

fn is_of_gpu(descriptor: &SegmentDesc, buffer: usize) -> bool {
    descriptor.buffers[buffer].name.starts_with("cuda:")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::REMOTE
    }

    /// Who is at memory is in its gate, which is closed when it is unregistered: there is nothing to keep.
    fn register(&self, _memory: &RawMemory, _remote: bool) -> Result<Registration, String> {
        let (keys, remote_keys) = (Keys::none(), Keys::none());
        Ok(Registration { keys, remote_keys, shared_key: None, guard: Box::new(()) })
    }

    fn describe(&self, descriptor: &mut SegmentDesc) {
        // The original looks for devices where the protocol is another one.
        if descriptor.devices.is_empty() {
            descriptor.protocol = NAME.to_owned();
        }
        let TcpConfig { version_one, messages, .. } = *self.config;
        descriptor.tcp_data_host = Some(self.host.clone());
        let has_tls = self.gate.as_ref().is_some_and(|gate| gate.tls().is_some());
        let port = Some(self.port);
        descriptor.tcp_tls_port = port.filter(|_| has_tls);
        descriptor.tcp_token_port = port.filter(|_| self.gate.is_some() && !has_tls);
        descriptor.tcp_data_port = port.filter(|_| self.gate.is_none());
        descriptor.tcp_proto_version = Some(if version_one { 1 } else { 2 });
        descriptor.tcp_message_version = (messages && !version_one).then_some(message::STAGED);
    }

    fn prepare(&self, segment: &Arc<OpenSegment>, descriptor: &Arc<SegmentDesc>) {
        let place = self.place(&segment.name, descriptor);
        let mut routes = self.routes.write().unwrap_or_else(PoisonError::into_inner);
        let before = match place {
            Ok(place)
                if routes
                    .get(&segment.id)
                    .is_some_and(|peer| peer.place == place && peer.is_unresolved().is_none()) =>
            {
                None
            }
            Ok(place) => {
                let peer = Peer::new(
                    (segment, self.engine.as_ref()),
                    place,
                    self.gate.as_ref(),
                    &self.config,
                    &self.progress,
                    &Resolver::system(),
                );
                routes.insert(segment.id, peer)
            }
            Err(reason) => {
                tracing::debug!(segment = segment.name, reason, "no path over TCP");
                routes.remove(&segment.id)
            }
        };
        drop(routes);
        self.retire(before);
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
        if !stages(descriptor) && is_of_gpu(descriptor, buffer) {
            return Err(
                "this buffer is memory of a GPU, which its port for data does not take".to_owned()
            );
        }
        self.place(&segment.name, descriptor).map(|_| ())?;
        if let Some(reason) = self.route(segment.id).and_then(|peer| peer.is_unresolved()) {
            return Err(reason.to_string());
        }
        Err("its process was not looked for".to_owned())
    }

    fn leads(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
        buffer: usize,
    ) -> bool {
        let routes = self.routes.read().unwrap_or_else(PoisonError::into_inner);
        let route = routes.get(&segment.id);
        route.is_some_and(|peer| peer.place.incarnation == descriptor.incarnation)
            && route.is_some_and(|peer| peer.is_unresolved().is_none())
            && self.data_port(descriptor).is_ok()
            && (stages(descriptor) || !is_of_gpu(descriptor, buffer))
    }

    fn connections_served(&self) -> usize {
        lock(&self.target).as_ref().map_or(0, Target::served)
    }

    fn polls(&self) -> (u64, u64) {
        self.polling.counts()
    }

    fn observe(&self, metrics: &mut Metrics) {
        let routes = self.routes.read().unwrap_or_else(PoisonError::into_inner);
        let peers: Vec<_> = routes.values().cloned().collect();
        drop(routes);
        metrics.rails.extend(peers.iter().map(|peer| peer.observe()));
    }

    fn handshake(&self, request: &HandShakeDesc) -> Option<HandShakeDesc> {
        if let Some(segment) = &request.relay {
            return self.answer_relayed(segment);
        }
        let text = request.stream.as_ref()?;
        let number = u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32);
        if request.peer_incarnation != Some(self.incarnation) {
            return Some(HandShakeDesc::refusal("another start of this process is meant"));
        }
        let shared = lock(&self.target).as_ref().map(|target| Arc::clone(target.shared()));
        let fence = number.zip(shared);
        let stream_fenced = fence.is_some_and(|(number, shared)| Target::fence(&shared, number));
        let incarnation = Some(self.incarnation);
        Some(HandShakeDesc { incarnation, stream_fenced, ..HandShakeDesc::default() })
    }

    fn submit(&self, batch: &Arc<BatchShared>, runs: &[Run], terms: &Terms) {
        batch.goes_over_streams();
        for run in runs {
            let fail = |reason: &str| {
                let reason = FailureReason::NoPath(reason.to_owned());
                let peer = run.segment.name.as_str().into();
                let error = TransferError::new(peer, NAME, reason);
                run.handles(batch).for_each(|task| task.fail_whole(&error));
            };
            match self.route(run.segment.id) {
                // It was closed since it was looked for.
                None => fail("the segment was closed"),
                Some(peer) => peer.submit(batch, run, terms),
            }
        }
    }

    fn forget(&self, segment: SegmentId) {
        let mut routes = self.routes.write().unwrap_or_else(PoisonError::into_inner);
        let peer = routes.remove(&segment);
        drop(routes);
        self.retire(peer);
    }

    fn stop(&self) {
        let shared = lock(&self.target).as_ref().map(|target| Arc::clone(target.shared()));
        if let Some(shared) = shared {
            shared.end_forwarding();
        }
        let routes =
            std::mem::take(&mut *self.routes.write().unwrap_or_else(PoisonError::into_inner));
        let retired = std::mem::take(&mut *lock(&self.retired));
        let peers: Vec<_> = routes.into_values().chain(retired).collect();
        peers.iter().for_each(Peer::end);
        // Returns once nothing is under way.
        self.progress.wait(&Waiters::default(), END_PATIENCE, || false);
        // Somebody who submits may have one still.
        peers.iter().for_each(Peer::stop);
        self.progress.stop();
        let target = lock(&self.target).take();
        drop(target);
    }
}
