//! The metadata server as a daemon: values by keys over HTTP, as Mooncake's metadata server has them.

mod log;
mod service;
mod table;

use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::pin::pin;

use thiserror::Error;
use tokio::net::TcpListener;

use self::table::Table;
use crate::http;
use crate::tls::Guard;
pub use crate::tls::ServerTls;

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
    let admit = move |stream| {
        let guard = guard.clone();
        async move { guard.admit(stream).await }
    };
    let answer = move |request| service::answer(table.clone(), limits, request);
    http::serve(listener, limits.connections, admit, answer, shutdown).await;
    Ok(())
}
