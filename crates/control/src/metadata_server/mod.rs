//! The metadata server as a daemon: values by keys over HTTP, as Mooncake's metadata server has them.

mod log;
mod service;
mod table;
mod tls;

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use self::table::Table;
use self::tls::Guard;
pub use self::tls::ServerTls;

/// How long the head of a request may take to come, also the first byte of the next one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection lives: clients make another. Then requests under way have so long to end.
const CONNECTION_LIFETIME: Duration = Duration::from_secs(60);
const LAST_REQUEST: Duration = Duration::from_secs(15);

/// How long requests have that are under way at the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long nothing is accepted after the system had no room for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The most bytes of the head of a request.
const HEAD_LENGTH: usize = 16 << 10;

/// What clients can make a metadata server hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a key.
    pub key_length: usize,
    /// Bytes of a value.
    pub value_length: usize,
    /// Keys.
    pub keys: usize,
    /// Bytes of all keys and values.
    pub bytes: usize,
    /// Connections at a time.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            key_length: 1024,
            value_length: 1 << 20,
            keys: 65_536,
            bytes: 1 << 30,
            connections: 512,
        }
    }
}

/// What a metadata server is run with.
#[derive(Clone, Debug)]
pub struct MetadataServerConfig {
    /// Where to listen. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where to keep entries. Without, they are in memory.
    pub data_dir: Option<PathBuf>,
    /// What it proves itself with, over TLS. Without, it speaks plain HTTP.
    pub tls: Option<ServerTls>,
    /// What clients can make it hold.
    pub limits: Limits,
}

impl MetadataServerConfig {
    /// Where it listens unless told otherwise: as Mooncake's, port 8080 of every address.
    pub const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 8080);

    /// The defaults, in memory, listening there.
    pub fn new(listen: SocketAddr) -> Self {
        Self { listen, data_dir: None, tls: None, limits: Limits::default() }
    }
}

/// Why a metadata server cannot run.
#[derive(Debug, Error)]
pub enum MetadataServerError {
    /// The runtime did not start.
    #[error("the runtime cannot start")]
    Runtime(#[source] io::Error),
    /// It cannot listen.
    #[error("cannot listen on {address}: {source}{}", crate::listen_advice(source))]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The files for TLS are of no use.
    #[error("TLS: {0}")]
    Tls(String),
    /// The entries cannot be read or written.
    #[error("cannot keep entries in {folder}: {source}")]
    Data {
        /// Where.
        folder: String,
        /// Why.
        source: io::Error,
    },
}

/// Runs a metadata server until `shutdown` is over. `ready` gets the address that it listens on.
pub fn run(
    config: MetadataServerConfig,
    ready: impl FnOnce(SocketAddr),
    shutdown: impl Future<Output = ()>,
) -> Result<(), MetadataServerError> {
    crate::block_on(serve(config, ready, shutdown)).map_err(MetadataServerError::Runtime)?
}

async fn serve(
    config: MetadataServerConfig,
    ready: impl FnOnce(SocketAddr),
    shutdown: impl Future<Output = ()>,
) -> Result<(), MetadataServerError> {
    let mut shutdown = pin!(shutdown);
    if crate::is_over(shutdown.as_mut()).await {
        return Ok(());
    }
    let MetadataServerConfig { listen, data_dir, tls, limits } = config;
    let guard = Guard::new(tls.as_ref()).map_err(MetadataServerError::Tls)?;
    let table = Table::new(limits, data_dir.as_deref()).map_err(|source| {
        let folder = data_dir.unwrap_or_default().display().to_string();
        MetadataServerError::Data { folder, source }
    })?;
    let failed = |source| MetadataServerError::Listen { address: listen, source };
    let listener = TcpListener::bind(listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    tracing::info!(%address, entries = table.len(), "serving metadata");
    ready(address);
    let places = Arc::new(Semaphore::new(limits.connections));
    let (ending, ended) = watch::channel(());
    let mut failing = false;
    let mut full = false;
    let mut connections = VecDeque::new();
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, client)) => {
                failing = false;
                connections.retain(|connection: &AbortHandle| !connection.is_finished());
                // One that asks nothing keeps nobody out: whose connection closes makes another.
                let oldest = (connections.len() >= limits.connections)
                    .then(|| connections.pop_front())
                    .flatten();
                if let Some(oldest) = oldest {
                    oldest.abort();
                    if !std::mem::replace(&mut full, true) {
                        tracing::warn!(%client, "too many connections: the oldest ones are closed");
                    }
                } else {
                    full = false;
                }
                let Ok(place) = Arc::clone(&places).acquire_owned().await else { break };
                let service = (table.clone(), limits);
                let connection = converse(stream, guard.clone(), place, service, ended.clone());
                connections.push_back(tokio::spawn(connection).abort_handle());
            }
            Err(error) => {
                // Out of file descriptors, most likely: some will be closed.
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "cannot accept connections; trying again");
                }
                tokio::select! {
                    () = &mut shutdown => break,
                    () = sleep(ACCEPT_PAUSE) => {}
                }
            }
        }
    }
    drop(ending);
    // All places are free when all connections have ended.
    let all = u32::try_from(limits.connections).unwrap_or(u32::MAX);
    let _ = timeout(CLOSE_TIMEOUT, places.acquire_many(all)).await;
    Ok(())
}

/// One connection, from its first byte to its last.
async fn converse(
    stream: TcpStream,
    guard: Guard,
    place: OwnedSemaphorePermit,
    (table, limits): (Table, Limits),
    mut ended: watch::Receiver<()>,
) {
    // Small replies that someone waits for. Failing, they are late.
    let _ = stream.set_nodelay(true);
    let admitted = tokio::select! {
        admitted = timeout(HEAD_TIMEOUT, guard.admit(stream)) => admitted,
        _ = ended.changed() => return,
    };
    let stream = match admitted.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(stream) => stream,
        Err(error) => {
            tracing::debug!(%error, "a client is not admitted");
            return;
        }
    };
    let service = service_fn(|request| service::answer(table.clone(), limits, request));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_LENGTH)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let result = tokio::select! {
        result = &mut connection => result,
        () = sleep(CONNECTION_LIFETIME) => {
            connection.as_mut().graceful_shutdown();
            timeout(LAST_REQUEST, connection).await.unwrap_or(Ok(()))
        }
        _ = ended.changed() => {
            connection.as_mut().graceful_shutdown();
            timeout(CLOSE_TIMEOUT, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection failed");
    }
    drop(place);
}
