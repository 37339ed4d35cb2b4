//! Transports of an engine: how they are installed, and what is asked of them by name.

use std::path::Path;
use std::sync::{Arc, PoisonError};

use millstream_metadata::Purpose;

use super::{Inner, TransferEngine};
use crate::nvmeof::{self, NvmeofTransport};
use crate::path::in_order;
use crate::rdma::{RdmaContext, RdmaTransport};
use crate::shm::ShmTransport;
use crate::tcp::{self, TcpTransport};
use crate::transport::Transport;
use crate::{
    ANY_LOCATION, Buffer, Capabilities, FileError, FileOptions, InstallError, NvmeofConfig,
    PathReport, Policy, RdmaConfig, SegmentError, SegmentId, TcpConfig, control_port,
};

impl TransferEngine {
    /// Installs the transport `rdma`. At any time: what is registered already is registered with its devices, too.
    pub fn install_rdma(&self, config: RdmaConfig) -> Result<(), InstallError> {
        let inner = &self.inner;
        let installing = inner.installing();
        let context = RdmaContext {
            engine: inner.name.clone(),
            control_address: control_port::without_name(&inner.address, self.address),
            incarnation: inner.incarnation,
            calls: Arc::clone(&inner.calls),
            lookups: Arc::clone(&inner.lookups),
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
    /// that this one does not reach is refused with [`SubmitError::PathRequired`](crate::SubmitError::PathRequired), whichever else does.
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
}

impl Inner {
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
}
