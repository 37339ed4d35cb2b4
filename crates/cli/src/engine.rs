//! Transfer engines as commands ask for them: protocols, metadata, local addresses.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;
use millstream_metadata::{
    CallErrorKind, FileName, HostPort, StoreError, is_peer_to_peer, open_store,
};
use millstream_transfer::{
    Config, InstallError, NewError, RdmaConfig, RelayConfig, Segment, SegmentError, Settings,
    TransferEngine, Withdrawal,
};
use millstream_verbs::{DeviceError, Provider};
use thiserror::Error;

use crate::address::{self, ATTEMPTS, LOOKUP_TIME, LookupError, NoneFree, is_one_of_many};
use crate::failure::{self, usage};
use crate::reach::{Patience, Reach, Wishes};
use crate::{output, paths, retry};

/// How often it is tried whether what is waited for is there, and how often that is told.
const WAIT_INTERVAL: Duration = Duration::from_millis(50);
const TELL_INTERVAL: Duration = Duration::from_secs(10);

/// Of the engines of this process. Held while one starts, since its entries are at the metadata server before that is over.
static ENGINES: Mutex<Vec<Withdrawal>> = Mutex::new(Vec::new());

/// A way for bytes to move that this version has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Protocol {
    /// All that there are here: the best one that leads to the peer.
    Auto,
    /// RDMA: over soft devices, over the system's, or over what there is.
    Rdma(Option<Provider>),
    /// Between processes of one user on one host.
    Shm,
    /// Within one process.
    Local,
    /// To and from files.
    Nvmeof,
    /// Over TCP, as the original transfer engine does it.
    Tcp,
}

/// Reads a value of `--protocol`.
pub(crate) fn protocol(name: &str) -> anyhow::Result<Protocol> {
    match name {
        "auto" => Ok(Protocol::Auto),
        "rdma" => Ok(Protocol::Rdma(None)),
        "rdma:soft" => Ok(Protocol::Rdma(Some(Provider::Soft))),
        "rdma:ibverbs" => Ok(Protocol::Rdma(Some(Provider::Ibverbs))),
        "shm" => Ok(Protocol::Shm),
        "local" => Ok(Protocol::Local),
        "nvmeof" => Ok(Protocol::Nvmeof),
        "tcp" => Ok(Protocol::Tcp),
        _ => Err(usage(format!(
            "there is no protocol {name}: it is rdma, rdma:soft, rdma:ibverbs, tcp, local, shm, \
             nvmeof or auto"
        ))),
    }
}

/// Checks a value of `--metadata`.
pub(crate) fn check_metadata(uri: &str, settings: &Settings) -> anyhow::Result<()> {
    let config = settings.engine(Ipv4Addr::LOCALHOST.into()).store();
    open_store(uri, config).map(drop).map_err(|error| usage(format!("--{error}")))
}

/// What an engine is made with.
pub(crate) struct Options<'a> {
    pub(crate) settings: &'a Settings,
    /// Where segments are found.
    pub(crate) metadata: &'a str,
    /// What its own segment is called there, if that is not its address.
    pub(crate) segment_name: Option<&'a str>,
    /// Whatever the settings say.
    pub(crate) no_segmentation_offload: bool,
    /// With peers that do not answer, where the command says it.
    pub(crate) patience: Option<Duration>,
    /// Who is asked for ways to segments to which nothing else leads, whatever the settings say if somebody is.
    pub(crate) relays: &'a [HostPort],
}

impl Options<'_> {
    /// What the engine is made with.
    fn engine(&self, listen: IpAddr) -> Config {
        Config {
            metadata: self.metadata.to_owned(),
            segment_name: self.segment_name.map(str::to_owned),
            ..self.settings.engine(listen)
        }
    }

    /// What the transport `relay` is installed with, if there are relays to ask.
    fn relay(&self) -> Option<RelayConfig> {
        let given = || self.relays.iter().map(ToString::to_string).collect();
        match self.relays {
            [] => self.settings.relay(),
            _ => Some(RelayConfig { relays: given(), ..RelayConfig::new(&[]) }),
        }
    }

    /// What the transport `rdma` is installed with, but for its addresses.
    fn rdma(&self, provider: Option<Provider>) -> RdmaConfig {
        let mut config = self.settings.rdma(&[]);
        config.provider = provider.or(config.provider);
        config.soft.segmentation_offload &= !self.no_segmentation_offload;
        config.patience = self.patience.unwrap_or(config.patience);
        config
    }
}

/// An engine, and what it lacks.
pub(crate) struct Started {
    pub(crate) engine: Arc<TransferEngine>,
    /// Transports that `auto` could not install, and why.
    pub(crate) missing: Vec<(&'static str, String)>,
}

/// Starts an engine on the first of these addresses, with RDMA devices on all of them if asked
/// for. Without an address, one is found that leads to `peer`.
pub(crate) fn start(
    protocols: &[Protocol],
    bind: &[IpAddr],
    peer: IpAddr,
    options: &Options<'_>,
) -> anyhow::Result<Started> {
    let rdma = provider(protocols)?.map(|provider| options.rdma(provider));
    crate::bind::check(bind)?;
    for _ in 0..ATTEMPTS {
        let found;
        let addresses = match bind {
            [] => {
                found = [match &rdma {
                    Some(rdma) => address::of_provider_towards(rdma.provider, &rdma.ibverbs, peer)?,
                    None => address::towards(peer)?,
                }];
                &found[..]
            }
            given => given,
        };
        let engine = new(options.engine(addresses[0]))?;
        let mut missing = Vec::new();
        if protocols.contains(&Protocol::Shm) {
            engine.install_shm()?;
        } else if protocols.contains(&Protocol::Auto)
            && let Err(error) = engine.install_shm()
        {
            tracing::info!(%error, "no transport shm");
            missing.push(("shm", error.to_string()));
        }
        if protocols.contains(&Protocol::Nvmeof) {
            engine.install_nvmeof(options.settings.nvmeof())?;
        }
        // Behind the others.
        let install_last = || -> Result<(), InstallError> {
            if protocols.contains(&Protocol::Tcp) || protocols.contains(&Protocol::Auto) {
                engine.install_tcp(options.settings.tcp())?;
            }
            options.relay().map_or(Ok(()), |relay| engine.install_relay(&relay))
        };
        let Some(rdma) = &rdma else {
            install_last()?;
            return Ok(Started { engine, missing });
        };
        let rdma = RdmaConfig { addresses: addresses.to_vec(), ..rdma.clone() };
        let named = rdma.devices.is_some();
        match engine.install_rdma(rdma) {
            Ok(()) => {
                install_last()?;
                return Ok(Started { engine, missing });
            }
            Err(InstallError::Open(DeviceError::Soft(error)))
                if error.is_in_use() && bind.is_empty() && is_one_of_many(peer) => {}
            // Devices by name, none of which works.
            Err(InstallError::Open(error)) if named && protocols.contains(&Protocol::Auto) => {
                missing.push(("rdma", error.to_string()));
                install_last()?;
                return Ok(Started { engine, missing });
            }
            Err(error @ InstallError::DuplicateDevice(_)) => {
                return Err(usage(format!("--bind: {error}")));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(NoneFree::Contended.into())
}

/// An engine of which [`withdraw_all`] knows as soon as a metadata server does.
fn new(config: Config) -> Result<Arc<TransferEngine>, NewError> {
    let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
    engines.retain(|engine| !engine.is_over());
    let engine = TransferEngine::new(config)?;
    engines.push(engine.withdrawal());
    Ok(Arc::new(engine))
}

/// Begins to take back what metadata servers have of this process's engines, which is about to end; says when that is
/// done. No other engine starts from here on.
pub(crate) fn withdraw_all() -> Receiver<()> {
    let (done, is_done) = sync_channel(1);
    let withdraw = move || {
        let engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
        engines.iter().for_each(Withdrawal::withdraw);
        // Nobody waits where there was no time for it.
        let _ = done.send(());
        // Who would start another engine is not held up for long.
        loop {
            thread::park();
        }
    };
    // Without a thread it is over at once.
    let _ = thread::Builder::new().name("withdraw".into()).spawn(withdraw);
    is_done
}

/// Whether RDMA is among the protocols, and if so, which provider is asked for.
#[expect(clippy::option_option, reason = "not asked for, any, or one of them")]
fn provider(protocols: &[Protocol]) -> anyhow::Result<Option<Option<Provider>>> {
    let mut found = None;
    let is_named = protocols.iter().any(|protocol| matches!(protocol, Protocol::Rdma(_)));
    if protocols.contains(&Protocol::Auto) && !is_named {
        return Ok(Some(None));
    }
    for protocol in protocols {
        if let Protocol::Rdma(provider) = protocol
            && found.replace(*provider).is_some_and(|other| other != *provider)
        {
            return Err(usage("--protocol: an engine has one provider of rdma".to_owned()));
        }
    }
    Ok(found)
}

/// An engine and the segment that a command works on.
pub(crate) struct Opened {
    pub(crate) engine: Arc<TransferEngine>,
    pub(crate) segment: Segment,
    /// What its requests ask for.
    pub(crate) wishes: Wishes,
    /// Transports that `auto` could not install, and why.
    pub(crate) missing: Vec<(&'static str, String)>,
}

/// A local address or a peer that is not there now, and may be later.
#[derive(Debug, Error)]
#[error("cannot find the address of segment {segment}: {error}")]
struct Unresolved {
    segment: String,
    error: LookupError,
}

/// Starts an engine and opens a segment with it.
pub(crate) fn open(reach: &Reach, segment: &str) -> anyhow::Result<Opened> {
    open_patiently(reach, segment, None)
}

/// Checks the value of `--segment`, as far as that can be done here.
pub(crate) fn check_segment(segment: &str, reach: &Reach) -> anyhow::Result<()> {
    let settings = reach.settings.load()?;
    match is_peer_to_peer(&reach.metadata) {
        true => parse_segment(segment, settings).map(drop),
        // What has a name is for the server to know.
        false => check_metadata(&reach.metadata, settings),
    }
}

/// Where the process of a segment answers.
fn find(segment: &str, reach: &Reach, settings: &Settings) -> anyhow::Result<HostPort> {
    if is_peer_to_peer(&reach.metadata) {
        return parse_segment(segment, settings);
    }
    let config = settings.engine(Ipv4Addr::LOCALHOST.into()).store();
    let store = open_store(&reach.metadata, config)?;
    Ok(store.address(segment)?.address)
}

/// Checks the value of `--segment`, peer to peer; where its process is.
fn parse_segment(segment: &str, settings: &Settings) -> anyhow::Result<HostPort> {
    if segment.starts_with(FileName::PREFIX) {
        let name: Result<FileName, _> = segment.parse();
        return match name {
            Ok(name) => Ok(name.server),
            Err(error) => Err(usage(format!("--segment {error}"))),
        };
    }
    let name = match settings.default_port() {
        Some(port) => HostPort::parse_with_default(segment, port),
        None => segment.parse(),
    };
    name.map_err(|error| usage(format!("--segment {error}")))
}

/// Starts an engine and opens a segment with it, as soon as that is possible, for `patience.wait`.
/// `command` tells what it waits for.
pub(crate) fn open_when_there(
    command: &str,
    reach: &Reach,
    segment: &str,
    patience: &Patience,
) -> anyhow::Result<Opened> {
    let start = Instant::now();
    let moving = patience.limit().unwrap_or(Duration::MAX);
    let mut told: Option<Instant> = None;
    loop {
        let error = match open_patiently(reach, segment, Some(moving)) {
            Err(error) if may_come(&error) => error,
            result => return result,
        };
        let left = patience.wait.saturating_sub(start.elapsed());
        if left.is_zero() {
            let advice = match patience.wait.is_zero() {
                true => "--wait waits for it".to_owned(),
                false => format!("waited {:?} for it", patience.wait),
            };
            bail!("{} ({advice})", failure::sentence(&error));
        }
        if told.is_none_or(|told| told.elapsed() >= TELL_INTERVAL) {
            told = Some(Instant::now());
            let error = failure::sentence(&error);
            output::complain(&format!(
                "{command}: waiting for up to {:.0} s more: {error}",
                left.as_secs_f64()
            ));
        }
        // Nothing tells when a port becomes free, or a peer can be reached.
        thread::sleep(WAIT_INTERVAL.min(left));
    }
}

/// Whether this is about what may be there a moment later.
fn may_come(error: &anyhow::Error) -> bool {
    let at_server = |error: &StoreError| {
        error.is_transient()
            || matches!(error, StoreError::NotFound { .. } | StoreError::Taken { .. })
    };
    let peer = error.chain().any(|cause| {
        let store = match (cause.downcast_ref(), cause.downcast_ref()) {
            (Some(SegmentError::Store { error, .. }), _) => Some(error),
            (_, Some(NewError::Publish(error))) => Some(error),
            _ => cause.downcast_ref::<StoreError>(),
        };
        if store.is_some_and(at_server) {
            return true;
        }
        if let Some(SegmentError::Store { error: StoreError::Call(error), .. }) =
            cause.downcast_ref()
        {
            return matches!(
                error.kind,
                CallErrorKind::Resolve(_)
                    | CallErrorKind::Refused { .. }
                    | CallErrorKind::Unreachable { .. }
                    | CallErrorKind::Connect { .. }
                    | CallErrorKind::NoReply { .. }
                    | CallErrorKind::Closed
                    | CallErrorKind::Io(_)
            );
        }
        cause.is::<Unresolved>()
    });
    peer || retry::is_address_in_use(error)
}

fn open_patiently(
    reach: &Reach,
    segment: &str,
    patience: Option<Duration>,
) -> anyhow::Result<Opened> {
    let settings = reach.settings.load()?;
    check_metadata(&reach.metadata, settings)?;
    reach.wishes.check(&settings.engine(Ipv4Addr::LOCALHOST.into()).policy_file)?;
    let protocol = match reach.protocol.as_str() {
        // Nothing else reaches a file.
        "auto" if segment.starts_with(FileName::PREFIX) => Protocol::Nvmeof,
        name => protocol(name)?,
    };
    // Where the segment is says on which of our addresses it can be reached.
    let peer = match reach.bind.first() {
        Some(address) => *address,
        None => {
            let name = match reach.relay.first() {
                // There may be no way to the segment itself.
                Some(relay) => relay.clone(),
                None => find(segment, reach, settings)?,
            };
            // What takes longer is tried again, with `--wait`.
            let time = patience.map_or(LOOKUP_TIME, |patience| patience.min(LOOKUP_TIME));
            let deadline = address::lookup_deadline(time);
            let unresolved = |error| Unresolved { segment: segment.to_owned(), error };
            address::look_up(&name.host, name.port, deadline).map_err(unresolved)?[0].ip()
        }
    };
    let no_segmentation_offload = reach.no_segmentation_offload;
    let metadata = &reach.metadata;
    let options = Options {
        settings,
        metadata,
        segment_name: None,
        no_segmentation_offload,
        patience,
        relays: &reach.relay,
    };
    let Started { engine, missing } = start(&[protocol], &reach.bind, peer, &options)?;
    let opened = engine.open_segment(segment)?;
    if opened.buffers().is_empty() {
        bail!("segment {segment} has no memory to read or write");
    }
    let opened = Opened { engine, segment: opened, wishes: reach.wishes.clone(), missing };
    if let Some(required) = &reach.require {
        paths::require(&opened, required)?;
    }
    Ok(opened)
}
