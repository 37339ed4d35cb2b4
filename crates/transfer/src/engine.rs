//! The engine: what is registered, open and installed, and the calls on it.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::path::Path;
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
use crate::control_port::{self, ControlPort};
use crate::copier::Copier;
use crate::listen::listen;
use crate::local::LocalTransport;
use crate::memory::Memory;
use crate::metrics::Counters;
use crate::notify::{Inbox, is_taken};
use crate::nvmeof::{self, NvmeofTransport};
use crate::path::{Required, in_order};
use crate::publication::Publication;
use crate::rdma::{RdmaContext, RdmaTransport};
use crate::rpc::Answer;
use crate::segment::{OpenSegment, SegmentTable};
use crate::shm::ShmTransport;
use crate::slicing::Slicing;
use crate::tcp::relay::RelayTransport;
use crate::tcp::{self, TcpTransport};
use crate::transport::Transport;
use crate::{
    ANY_LOCATION, Batch, BatchError, BatchStatus, Buffer, Capabilities, Config, FileError,
    FileOptions, FreeError, InstallError, NewError, Notification, NotifyError, NvmeofConfig,
    PathReport, PiecesRequest, Policy, PolicyFile, RdmaConfig, RegisterError, Segment,
    SegmentError, SegmentId, SubmitAndWaitError, SubmitError, SubmitNewError, SubmitOptions,
    TcpConfig, TransferRequest, TransferState, TransferStatus,
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

    /// Installs the transport `rdma`. At any time: what is registered already is registered with its devices, too.
    pub fn install_rdma(&self, config: RdmaConfig) -> Result<(), InstallError> {
        let inner = &self.inner;
        let installing = inner.installing();
        let context = RdmaContext {
            engine: inner.name.clone(),
            control_address: control_port::without_name(&inner.address, self.address),
            incarnation: inner.incarnation,
            calls: Arc::clone(&inner.calls),
            slice_length: inner.slice_length,
            fragment_ratio: inner.fragment_ratio,
            policy: inner.policy,
            store: Arc::clone(&inner.store),
            elsewhere: (inner.policy == Policy::Tent).then(|| inner.own.clone()),
        };
        inner.check_new(RdmaTransport::NAME)?;
        let transport = RdmaTransport::new(config, context)?;
        *inner.devices.write().unwrap_or_else(PoisonError::into_inner) = transport.devices();
        // Before it is published: peers call at all addresses that they know then.
        if let Some(control) = &self.control {
            let (nics, gate) = (transport.addresses(), || inner.gate(Purpose::Handshake));
            inner.answers_at(control.listen_also(&nics, gate, &inner.answer()));
        }
        let transport: Arc<dyn Transport> = Arc::new(transport);
        let installed = inner.install(Arc::clone(&transport));
        if installed.is_err() {
            if let Some(control) = &self.control {
                control.listen_there_only();
                inner.answers_at(Vec::new());
            }
            *inner.devices.write().unwrap_or_else(PoisonError::into_inner) = Arc::default();
        }
        drop(installing);
        installed.map(|()| inner.prepare_open(&*transport))
    }

    /// Installs the transport `shm`, for processes of the same user on this host. At any time. Where it leads, it
    /// goes before all others but `local`. May wait for the processes of segments that are open, up to some seconds.
    ///
    /// What the engine allocates from then on is memory that those processes map. What
    /// [`TransferEngine::register_memory`] registers they read and write by the kernel, if it lets them; so it is with
    /// what was allocated before.
    pub fn install_shm(&self) -> Result<(), InstallError> {
        let inner = &self.inner;
        let installing = inner.installing();
        inner.check_new(ShmTransport::NAME)?;
        let transport = ShmTransport::new(inner.incarnation, Arc::clone(&inner.copier))?;
        let transport: Arc<dyn Transport> = Arc::new(transport);
        inner.install(Arc::clone(&transport))?;
        drop(installing);
        inner.prepare_open(&*transport);
        Ok(())
    }

    /// Installs the transport `nvmeof`, for segments that are files: those of others, and those that
    /// this engine offers by [`TransferEngine::register_file`]. At any time.
    pub fn install_nvmeof(&self, config: NvmeofConfig) -> Result<(), InstallError> {
        let inner = &self.inner;
        let _installing = inner.installing();
        inner.check_new(nvmeof::NAME)?;
        let server = inner.address.clone();
        let transport = NvmeofTransport::new(
            config,
            server,
            inner.incarnation,
            self.address,
            inner.gate(Purpose::Files),
        )?;
        let transport = Arc::new(transport);
        inner.take_along(&*transport)?;
        let _ = inner.nvmeof.set(Arc::clone(&transport));
        inner.transports.write().unwrap_or_else(PoisonError::into_inner).push(transport);
        Ok(())
    }

    /// Installs the transport `tcp`, for memory of other processes, engines of Mooncake among them. At any time, since
    /// it keeps nothing of registered memory. It goes behind those that were installed before.
    ///
    /// With [`TcpConfig::relay`] the engine is a relay from then on, and allocates what that stages in.
    pub fn install_tcp(&self, config: TcpConfig) -> Result<(), InstallError> {
        let inner = &self.inner;
        inner.check_new(tcp::NAME)?;
        if inner.relays.get().is_some() {
            return Err(InstallError::Relay(
                "it goes behind tcp: install that before it".to_owned(),
            ));
        }
        // Registering waits until nobody installs anything.
        let staging = match &config.relay {
            None => None,
            Some(limits) => {
                limits.check()?;
                let length = TcpTransport::staged(limits);
                Some(self.allocate_buffer(length, ANY_LOCATION, false)?)
            }
        };
        let installing = inner.installing();
        inner.check_new(tcp::NAME)?;
        let (host, incarnation) = (&inner.address.host, inner.incarnation);
        let transport = TcpTransport::new(
            config,
            host,
            incarnation,
            self.address,
            &inner.memory,
            inner.store.is_local(),
            inner.gate(Purpose::Memory),
        )?;
        let elsewhere = (inner.policy == Policy::Tent).then(|| inner.own.clone());
        let address = staging.as_ref().map(Buffer::address);
        let transport = transport.leaving_to(elsewhere).relaying(inner.own.clone(), address);
        let progress = Arc::clone(transport.shared_progress());
        let transport: Arc<dyn Transport> = Arc::new(transport);
        inner.install(Arc::clone(&transport))?;
        // Once only, so not before it stays.
        let _ = inner.streams.set(progress);
        drop(installing);
        if let Some(staging) = staging {
            let _ = self.staging.set(staging);
        }
        inner.prepare_open(&*transport);
        Ok(())
    }

    /// Offers a file or a block device to peers, as a segment of its own; the segment's name, by which
    /// they open it: `nvmeof/host:port/name`. Requests have offsets in the file in place of addresses.
    ///
    /// The file stays open: it may be renamed or removed meanwhile. Who can ask this engine for
    /// descriptors can read the file, and write it if it is offered so.
    pub fn register_file(
        &self,
        path: impl AsRef<Path>,
        options: FileOptions,
    ) -> Result<String, FileError> {
        let _installed = self.inner.installed();
        self.inner.files()?.offer(&*self.inner.store, path.as_ref(), options)
    }

    /// Takes a file back. Returns when nobody reads or writes it any more; requests for it fail.
    pub fn unregister_file(&self, segment: &str) -> Result<(), FileError> {
        let _installed = self.inner.installed();
        self.inner.files()?.take_back(&*self.inner.store, segment)
    }

    /// The names of the segments that are its files.
    pub fn files(&self) -> Vec<String> {
        self.inner.files().map(|files| files.names()).unwrap_or_default()
    }

    /// The transports that are installed, and what they can do, in the order in which they are tried.
    pub fn transports(&self) -> Vec<(&'static str, Capabilities)> {
        let shown =
            |(_, transport): (_, &dyn Transport)| (transport.name(), transport.capabilities());
        self.inner.with_transports(|all| in_order(all).map(shown).collect())
    }

    /// Insists on one of the transports that are installed, or on none any more: a request to a segment
    /// that this one does not reach is refused with [`SubmitError::PathRequired`], whichever else does.
    pub fn require(&self, transport: Option<&str>) -> Result<(), InstallError> {
        let find = |name: &str| {
            let transports = self.inner.transports();
            let found = transports.iter().find(|transport| transport.name() == name);
            found.map(|transport| transport.name())
        };
        let missing = |name: &str| InstallError::Missing(name.to_owned());
        let name = transport.map(|name| find(name).ok_or_else(|| missing(name))).transpose()?;
        self.inner.required.set(name);
        Ok(())
    }

    /// Which transports take requests to an open segment now, and why the others do not, in the order in
    /// which they are tried: `local`, `shm`, then others as they were installed.
    pub fn paths(&self, segment: SegmentId) -> Result<Vec<PathReport>, SegmentError> {
        let open = self.inner.segments.by_id(segment).ok_or(SegmentError::Unknown(segment))?;
        Ok(self.inner.reports(&open, &open.descriptor()))
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

    /// Unregisters the memory that was registered at this address. Returns once no transfer
    /// touches it any more; transfers that still need it fail.
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

    /// Makes a batch that holds up to `capacity` tasks.
    pub fn allocate_batch(&self, capacity: usize) -> Result<Batch, BatchError> {
        self.inner.allocate_batch(capacity)
    }

    /// Adds a task for each request to the batch and begins to do them. All or none: when one
    /// request is bad, none is accepted. Does not wait, except to ask for the descriptor of a
    /// segment that has proven out of date.
    pub fn submit(&self, batch: &Batch, requests: &[TransferRequest]) -> Result<(), SubmitError> {
        self.submit_with(batch, requests, &SubmitOptions::default())
    }

    /// As [`TransferEngine::submit`], with options.
    pub fn submit_with(
        &self,
        batch: &Batch,
        requests: &[TransferRequest],
        options: &SubmitOptions,
    ) -> Result<(), SubmitError> {
        self.inner.submit(&batch.shared, requests, options)
    }

    /// Makes a batch of just these requests, and begins to do them.
    pub fn submit_new(
        &self,
        requests: &[TransferRequest],
        options: &SubmitOptions,
    ) -> Result<Batch, SubmitNewError> {
        let batch = self.allocate_batch(requests.len())?;
        self.submit_with(&batch, requests, options)?;
        Ok(batch)
    }

    /// As [`TransferEngine::submit_with`], with requests of several pieces: each is one task.
    pub fn submit_pieces(
        &self,
        batch: &Batch,
        requests: &[PiecesRequest<'_>],
        options: &SubmitOptions,
    ) -> Result<(), SubmitError> {
        self.inner.submit(&batch.shared, requests, options)
    }

    /// How a task of the batch stands, counted from 0 in the order of submission. Makes progress
    /// while it is unfinished, so that who asks without a pause waits for no other thread.
    pub fn status(&self, batch: &Batch, task: usize) -> Result<TransferStatus, BatchError> {
        let status = batch.status(task)?;
        if status.state.is_final() {
            return Ok(status);
        }
        self.inner.progress();
        batch.status(task)
    }

    /// How all tasks of the batch stand. Makes progress while one is unfinished.
    pub fn statuses(&self, batch: &Batch) -> Vec<TransferStatus> {
        if !batch.is_finished() {
            self.inner.progress();
        }
        batch.statuses().collect()
    }

    /// How all tasks of the batch stand together. Makes progress while one is unfinished. Takes a part of the
    /// time of [`TransferEngine::statuses`], and allocates nothing.
    pub fn batch_status(&self, batch: &Batch) -> BatchStatus {
        if !batch.is_finished() {
            self.inner.progress();
        }
        batch.status_of_all()
    }

    /// How all tasks of the batch have ended, and frees it; gives it back while one is unfinished. Makes
    /// progress then.
    pub fn take_statuses(&self, batch: Batch) -> Result<Vec<TransferStatus>, Batch> {
        let statuses = self.statuses(&batch);
        match statuses.iter().all(|status| status.state.is_final()) {
            true => Ok(statuses),
            false => Err(batch),
        }
    }

    /// Waits until all submitted tasks of the batch are finished, for good or bad; `false` when
    /// that takes longer than `timeout`. The waiting thread sends, receives and handles what comes for
    /// the engine's soft devices meanwhile, where no other thread does, and copies what waits for that.
    pub fn wait(&self, batch: &Batch, timeout: Duration) -> bool {
        self.inner.wait(batch, timeout)
    }

    /// Ends a task; whether it was neither over nor about to end. Local access ends at once. The task
    /// is over, which [`TransferEngine::wait`] waits for, once the peer has confirmed that nothing of
    /// it can arrive any more, after two seconds at most: then its status says that the target's range
    /// is undefined.
    pub fn cancel(&self, batch: &Batch, task: usize) -> Result<bool, BatchError> {
        Ok(batch.task(task)?.cancel())
    }

    /// Frees a batch. Refused while one of its tasks is unfinished.
    pub fn free(&self, batch: Batch) -> Result<(), FreeError> {
        batch.free()
    }

    /// Does these requests and waits for them; returns the bytes moved. When it returns, for good
    /// or bad, nothing of them is under way any more.
    pub fn submit_and_wait(
        &self,
        requests: &[TransferRequest],
        timeout: Duration,
    ) -> Result<u64, SubmitAndWaitError> {
        let batch = self.allocate_batch(requests.len())?;
        self.submit(&batch, requests)?;
        if !self.wait(&batch, timeout) {
            for index in 0..batch.len() {
                batch.task(index)?.cancel();
            }
            // What was sent ends, since queue pairs give up on a peer that does not answer.
            while !self.wait(&batch, Duration::from_secs(60)) {
                tracing::warn!("still waiting for the last slices of canceled tasks");
            }
        }
        let all = batch.status_of_all();
        if all.state == TransferState::Completed {
            return Ok(all.transferred_bytes);
        }
        let mut transferred_bytes = 0;
        let mut canceled = false;
        for (index, status) in batch.statuses().enumerate() {
            if let Some(error) = status.error {
                return Err(SubmitAndWaitError::Failed { index, error: Box::new(error) });
            }
            canceled |= status.state != TransferState::Completed;
            transferred_bytes += status.transferred_bytes;
        }
        if canceled {
            let total_bytes = requests.iter().map(|request| request.length).sum();
            return Err(SubmitAndWaitError::Timeout { timeout, transferred_bytes, total_bytes });
        }
        Ok(transferred_bytes)
    }
}

impl fmt::Debug for TransferEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TransferEngine").field(&self.inner.name).finish()
    }
}

impl Drop for TransferEngine {
    fn drop(&mut self) {
        // First those who could begin something new, then what was begun, then the memory.
        self.control = None;
        self.inner.stop();
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

    /// [`TransferEngine::allocate_batch`].
    pub(crate) fn allocate_batch(&self, capacity: usize) -> Result<Batch, BatchError> {
        let owned = self.with_transports(|all| all.iter().any(|each| !each.capabilities().copies));
        Batch::new(capacity, self.slicing, owned, &self.counters)
    }

    /// [`TransferEngine::wait`].
    pub(crate) fn wait(&self, batch: &Batch, timeout: Duration) -> bool {
        if batch.is_finished() {
            return true;
        }
        let start = Instant::now();
        while start.elapsed() < timeout && self.copier.help() {
            if batch.is_finished() {
                return true;
            }
        }
        let left = || timeout.saturating_sub(start.elapsed());
        if let Some(streams) = self.streams.get() {
            batch.wait_for_streams(left(), streams);
            if batch.is_finished() {
                return true;
            }
        }
        batch.wait(left(), &self.devices())
    }

    /// Does a little of what is under way.
    fn progress(&self) {
        self.devices().iter().for_each(Device::progress);
        if let Some(streams) = self.streams.get() {
            streams.progress();
        }
        self.copier.help();
    }

    /// What serves files.
    fn files(&self) -> Result<&NvmeofTransport, FileError> {
        match self.nvmeof.get() {
            _ if self.is_stopped() => Err(FileError::ShutDown),
            Some(files) => Ok(files),
            None => Err(FileError::NotInstalled),
        }
    }

    /// The names of the segments that are its files, also when it ends.
    pub(crate) fn file_names(&self) -> Vec<String> {
        self.nvmeof.get().map(|files| files.names()).unwrap_or_default()
    }

    /// Installs a transport, has it register what is registered, and publishes what there is to say then. When that
    /// fails, it is not installed.
    pub(crate) fn install(&self, transport: Arc<dyn Transport>) -> Result<(), InstallError> {
        let change = || self.transports.write().unwrap_or_else(PoisonError::into_inner);
        // First: who chooses it finds memory that knows it.
        self.take_along(&*transport).inspect_err(|_| transport.stop())?;
        change().push(Arc::clone(&transport));
        let publish = || -> Result<(), InstallError> {
            self.recount()?;
            Ok(self.changed().and_then(|()| self.publish())?)
        };
        let published = publish();
        if published.is_err() {
            change().retain(|known| !Arc::ptr_eq(known, &transport));
            transport.stop();
            self.leave_behind();
            // It has been less before.
            let _ = self.recount();
            self.changed_back();
        }
        published
    }

    /// Tells a transport that was installed of the segments that are open.
    pub(crate) fn prepare_open(&self, transport: &dyn Transport) {
        for open in self.segments.others() {
            open.prepare_more(|descriptor| transport.prepare(&open, descriptor));
        }
    }

    /// Whether no transport of this name is installed.
    pub(crate) fn check_new(&self, name: &'static str) -> Result<(), InstallError> {
        let is_known = self.with_transports(|all| all.iter().any(|each| each.name() == name));
        if is_known { Err(InstallError::Twice(name)) } else { Ok(()) }
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

    /// As long as the result lives, transports are neither installed nor stopped.
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

    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let _installing = self.installing();
        self.withdraw();
        self.transports().iter().for_each(|transport| transport.stop());
        self.calls.stop();
        let mut regions = self.memory.regions.write().unwrap_or_else(PoisonError::into_inner);
        let ended = std::mem::take(&mut *regions);
        // Their ends wait for others, which may ask for one.
        drop(regions);
        drop(ended);
        // Devices close with their transport, once no buffer is left that is registered there.
        *self.devices.write().unwrap_or_else(PoisonError::into_inner) = Arc::default();
        self.transports.write().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
