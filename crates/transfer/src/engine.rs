//! The engine: what is registered, open and installed, and the calls on it.

mod batches;
mod install;

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::{Duration, Instant, SystemTime};

use millstream_metadata::{
    Client, Frame, FrameType, Gate, HandShakeDesc, Handler, HostPort, Purpose, RpcMeta,
    SegmentDesc, Store, open_store,
};
use millstream_verbs::Device;

use crate::admission::Admission;
use crate::calls::Calls;
use crate::control_port::ControlPort;
use crate::copier::Copier;
use crate::listen::listen;
use crate::local::LocalTransport;
use crate::lookups::Lookups;
use crate::memory::Memory;
use crate::metrics::Counters;
use crate::notify::{Inbox, is_taken};
use crate::nvmeof::NvmeofTransport;
use crate::path::Required;
use crate::publication::Publication;
use crate::rpc::Answer;
use crate::segment::{OpenSegment, SegmentTable};
use crate::slicing::Slicing;
use crate::tcp;
use crate::tcp::relay::RelayTransport;
use crate::transport::Transport;
use crate::{
    Buffer, Config, NewError, Notification, NotifyError, Policy, PolicyFile, RegisterError,
    Segment, SegmentError, SegmentId, Withdrawal,
};

/// A transfer engine. Dropping it ends its transfers, closes its connections, and unregisters its
/// memory; buffers made by it stay usable as plain memory.
pub struct TransferEngine {
    pub(crate) inner: Arc<Inner>,
    /// `None` when it ends.
    control: Option<ControlPort>,
    address: SocketAddr,
    /// Where a relay stages what is on its way. It goes after all who use it.
    pub(crate) staging: OnceLock<Buffer>,
}

pub(crate) struct Inner {
    pub(crate) own: Weak<Self>,
    name: String,
    /// Where it answers.
    address: HostPort,
    /// Drawn at the start: peers tell by it whether this is still the process they knew.
    incarnation: u64,
    slicing: Slicing,
    slice_length: usize,
    fragment_ratio: usize,
    pub(crate) policy: Policy,
    pub(crate) policy_file: PolicyFile,
    /// What is in flight, where that has limits.
    pub(crate) admission: Arc<Admission>,
    /// Of segments' names that have none.
    pub(crate) default_port: Option<u16>,
    pub(crate) client: Client,
    pub(crate) store: Arc<dyn Store>,
    memory: Arc<Memory>,
    /// Held by who registers or unregisters, all to himself by who changes with what.
    installing: RwLock<()>,
    pub(crate) publication: Publication,
    transports: RwLock<Vec<Arc<dyn Transport>>>,
    /// Those that make no progress by themselves.
    devices: RwLock<Arc<[Device]>>,
    copier: Arc<Copier>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) calls: Arc<Calls>,
    pub(crate) lookups: Arc<Lookups>,
    pub(crate) inbox: Inbox,
    nvmeof: OnceLock<Arc<NvmeofTransport>>,
    /// What those who wait work on, of the transports `tcp` and `relay`.
    pub(crate) streams: OnceLock<Arc<tcp::Progress>>,
    pub(crate) relays: OnceLock<Arc<RelayTransport>>,
    pub(crate) segments: SegmentTable,
    pub(crate) required: Required,
    stopped: AtomicBool,
}

impl TransferEngine {
    /// Starts an engine that answers peers at `config.listen`, with the transport `local`. With a metadata
    /// server it may block, up to the deadlines of the store.
    pub fn new(config: Config) -> Result<Self, NewError> {
        let store = open_store(&config.metadata, config.store())?;
        Self::with_store(config, store)
    }

    /// As [`TransferEngine::new`], with a store that is there already, whatever `config.metadata` says.
    pub fn with_store(config: Config, store: Arc<dyn Store>) -> Result<Self, NewError> {
        let (min, max) = (Slicing::MIN_SLICE_LENGTH, Slicing::MAX_SLICE_LENGTH);
        let ranges = [
            ("slice_length", config.slice_length, min, max),
            ("fragment_ratio", config.fragment_ratio, 1, max),
        ];
        for (name, value, min, max) in ranges {
            if !(min..=max).contains(&value) {
                return Err(NewError::OutOfRange { name, value, min, max });
            }
        }
        config.policy_file.check()?;
        let failed = |error| NewError::Listen { address: config.listen, error };
        let listener = listen(config.listen, config.ports.as_ref(), config.listen_backlog);
        let listener = listener.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let reached_at = match &config.host {
            Some(host) => HostPort::parse_with_default(host, address.port())?,
            None if address.ip().is_unspecified() => {
                return Err(NewError::HostMissing(config.listen));
            }
            None => HostPort::from_address(address.ip(), address.port()),
        };
        let name = match config.segment_name {
            // Peer to peer, the name says where.
            Some(name) if !store.is_local() => name,
            _ => reached_at.to_string(),
        };
        let client = Client::new(config.client.clone());
        let memory = Arc::new(Memory::default());
        let copier = Arc::new(Copier::default());
        let copies = Arc::clone(&copier);
        let local = LocalTransport::new(Arc::clone(&memory), Arc::clone(&copier));
        let local: Arc<dyn Transport> = Arc::new(local);
        let inner = Arc::new_cyclic(|own| Inner {
            own: own.clone(),
            name: name.clone(),
            address: reached_at.clone(),
            incarnation: RandomState::new().hash_one(SystemTime::now()),
            slicing: Slicing::new(config.slice_length, config.fragment_ratio),
            slice_length: config.slice_length,
            fragment_ratio: config.fragment_ratio,
            policy: config.policy,
            admission: Arc::new(Admission::new(&config.policy_file)),
            policy_file: config.policy_file,
            default_port: config.default_port.filter(|_| store.is_local()),
            client,
            lookups: Arc::new(Lookups::new(Arc::clone(&store))),
            store,
            memory,
            installing: RwLock::default(),
            publication: Publication::default(),
            transports: RwLock::new(vec![local]),
            devices: RwLock::default(),
            copier,
            counters: Arc::default(),
            calls: Arc::new(Calls::new(config.client.clone())),
            inbox: Inbox::default(),
            nvmeof: OnceLock::new(),
            streams: OnceLock::new(),
            relays: OnceLock::new(),
            segments: SegmentTable::new(SegmentDesc { name, ..SegmentDesc::default() }),
            required: Required::default(),
            stopped: AtomicBool::new(false),
        });
        if inner.policy == Policy::Tent {
            copies.leave_to(inner.own.clone());
        }
        let gate = inner.gate(Purpose::Handshake);
        let sockets = (config.ports, config.listen_backlog);
        let control = ControlPort::new(listener, config.server, sockets, gate, inner.answer());
        let control = control.map_err(failed)?;
        let address = control.address();
        let staging = OnceLock::new();
        let engine = Self { inner, control: Some(control), address, staging };
        // It answers already: whoever has its name may be asked who that is.
        let meta = RpcMeta { address: reached_at, incarnation: Some(engine.inner.incarnation) };
        engine.inner.store.publish_address(&engine.inner.name, &meta)?;
        engine.inner.changed().and_then(|()| engine.inner.publish())?;
        Ok(engine)
    }

    /// The name of its segment, by which peers open it: `host:port`, or what it is called at the metadata
    /// server.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Where it answers its peers.
    pub fn listening_at(&self) -> SocketAddr {
        self.address
    }

    /// Who chooses the pair of NICs of each slice.
    pub fn policy(&self) -> Policy {
        self.inner.policy
    }

    /// The names of its RDMA devices.
    pub fn devices(&self) -> Vec<String> {
        let own = self.inner.segments.by_id(SegmentId::LOCAL).map(|open| open.descriptor());
        let names = |own: Arc<SegmentDesc>| own.devices.iter().map(|d| d.name.clone()).collect();
        own.map(names).unwrap_or_default()
    }

    /// How often its devices have sent or asked for packets again, because a peer reported a loss
    /// or was silent: a measure of how bad the ways to peers are.
    pub fn retransmissions(&self) -> u64 {
        self.inner.transports().iter().map(|transport| transport.retransmissions()).sum()
    }

    /// For a process that is about to end without dropping the engine, as by a signal: takes back what a metadata server has of
    /// it.
    pub fn withdrawal(&self) -> Withdrawal {
        Withdrawal::new(Weak::clone(&self.inner.own))
    }

    /// Unregisters the memory that was registered at this address. Returns once no transfer
    /// touches it any more; transfers that still need it fail. Where another thread registers or
    /// unregisters it, it waits for that first, and [`RegisterError::Unknown`] says that it was unregistered.
    pub fn unregister_memory(&self, address: *mut u8) -> Result<(), RegisterError> {
        self.inner.unregister(&[address.addr() as u64])
    }

    /// Unregisters the memory that was registered at each of these addresses, as
    /// [`TransferEngine::unregister_memory`] does, and tells peers once. What can be unregistered is,
    /// also when others cannot; the first error is returned.
    pub fn unregister_memory_batch(&self, addresses: &[*mut u8]) -> Result<(), RegisterError> {
        let addresses: Vec<u64> = addresses.iter().map(|address| address.addr() as u64).collect();
        self.inner.unregister(&addresses)
    }

    /// Opens the segment of this name: asks its process for its descriptor, unless it is open
    /// already. May block, up to the deadlines of [`Config::client`].
    ///
    /// A name without a port is that of an engine at [`Config::default_port`].
    pub fn open_segment(&self, name: &str) -> Result<Segment, SegmentError> {
        self.inner.open_segment(name)
    }

    /// Asks for the descriptor of an open segment again.
    pub fn refresh_segment(&self, segment: SegmentId) -> Result<(), SegmentError> {
        let open = self.inner.segments.by_id(segment).ok_or(SegmentError::Unknown(segment))?;
        self.inner.refresh(&open)
    }

    /// Closes a segment. Transfers under way go on.
    pub fn close_segment(&self, segment: SegmentId) -> Result<(), SegmentError> {
        self.inner.segments.remove(segment)?;
        self.inner.transports().iter().for_each(|transport| transport.forget(segment));
        Ok(())
    }

    /// Sends a message to the application of a segment's process. May block, up to the deadlines of
    /// [`Config::client`].
    pub fn notify(&self, segment: SegmentId, message: &Notification) -> Result<(), NotifyError> {
        let open = self.inner.segments.by_id(segment).ok_or(NotifyError::Unknown(segment))?;
        let refused = || NotifyError::Refused { segment: open.name.clone() };
        if segment == SegmentId::LOCAL {
            return if self.inner.inbox.push(message.clone()) { Ok(()) } else { Err(refused()) };
        }
        let address = self.inner.address_of(&open)?;
        let reply = self.inner.client.call(&address, &message.frame())?;
        if is_taken(&reply) { Ok(()) } else { Err(refused()) }
    }

    /// Takes the messages that have come, in the order in which they came. At most 65,536 of 16 MiB
    /// wait; more are refused.
    pub fn take_notifications(&self) -> Vec<Notification> {
        self.inner.inbox.take()
    }

    /// Asks whether the process of a segment is there; how long the answer took. May block, up to the
    /// deadlines of [`Config::client`].
    pub fn probe(&self, name: &str) -> Result<Duration, SegmentError> {
        let failed = |error| SegmentError::Store { name: name.to_owned(), error };
        let meta = self.inner.store.address(name).map_err(failed)?;
        let start = Instant::now();
        let probe = Frame::new(FrameType::Probe, b"{}".to_vec());
        let call = self.inner.client.call(&meta.address, &probe);
        call.map_err(|error| failed(error.into()))?;
        Ok(start.elapsed())
    }
}

impl fmt::Debug for TransferEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TransferEngine").field(&self.inner.name).finish()
    }
}

impl Drop for TransferEngine {
    fn drop(&mut self) {
        let control = &mut self.control;
        self.inner.stop(|| *control = None);
    }
}

impl Inner {
    /// What answers peers.
    fn answer(&self) -> Arc<dyn Handler> {
        Arc::new(Answer::new(Weak::clone(&self.own)))
    }

    /// Who is admitted to a port for this, where there is a token or a certificate.
    pub(crate) fn gate(&self, purpose: Purpose) -> Option<Gate> {
        let config = self.client.config();
        Gate::with(config.token, config.tls.clone(), purpose, &self.name)
    }

    pub(crate) fn transports(&self) -> Vec<Arc<dyn Transport>> {
        self.transports.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Runs `with` on the transports; it must not block.
    pub(crate) fn with_transports<R>(&self, with: impl FnOnce(&[Arc<dyn Transport>]) -> R) -> R {
        with(&self.transports.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Does a little of what is under way.
    fn progress(&self) {
        self.devices().iter().for_each(Device::progress);
        if let Some(streams) = self.streams.get() {
            streams.progress();
        }
        self.copier.help();
    }

    /// Whether a transport wants memory that other processes can map.
    pub(crate) fn shares_memory(&self) -> bool {
        self.with_transports(|all| all.iter().any(|each| each.capabilities().shared_memory))
    }

    /// Where the process of a segment answers.
    pub(crate) fn address_of(&self, open: &OpenSegment) -> Result<HostPort, NotifyError> {
        let failed = |error| NotifyError::Store { segment: open.name.clone(), error };
        Ok(self.store.address(&open.name).map_err(failed)?.address)
    }

    fn devices(&self) -> Arc<[Device]> {
        Arc::clone(&self.devices.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    pub(crate) fn installing(&self) -> RwLockWriteGuard<'_, ()> {
        self.installing.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// As long as the result lives, transports are not installed. If the engine is not stopped then, they are not stopped
    /// either.
    pub(crate) fn installed(&self) -> RwLockReadGuard<'_, ()> {
        self.installing.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Where peers reach it.
    pub(crate) fn host(&self) -> &str {
        &self.address.host
    }

    pub(crate) fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Answers a peer that wants to connect queue pairs.
    pub(crate) fn handshake(&self, request: &HandShakeDesc) -> HandShakeDesc {
        let answer = self.transports().iter().find_map(|transport| transport.handshake(request));
        answer.unwrap_or_else(|| {
            HandShakeDesc::refusal(match request.relay {
                Some(_) => format!("{} is no relay: it has no tcp.relay", self.name),
                None => format!("{} has no RDMA devices", self.name),
            })
        })
    }

    /// Begins nothing new, and ends what was begun, then the memory. Nobody installs anything meanwhile, which takes the
    /// engine that is being dropped; others may unregister.
    fn stop(&self, close_port: impl FnOnce()) {
        self.stopped.store(true, Ordering::Release);
        // Who registers has done so from here on, or is refused. Not held longer: who is told that a transfer has ended may
        // drop a buffer, on this thread or one that this one waits for.
        drop(self.installing());
        let files = self.file_names();
        self.transports().iter().for_each(|transport| transport.stop());
        // Not before: who is refused there takes this process for dead, and its memory for out of reach.
        close_port();
        self.withdraw(&files);
        self.calls.stop();
        self.lookups.stop();
        self.memory.end();
        // Devices close with their transport, once no buffer is left that is registered there.
        *self.devices.write().unwrap_or_else(PoisonError::into_inner) = Arc::default();
        self.transports.write().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

#[cfg(test)]
mod tests;
