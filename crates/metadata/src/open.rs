//! Stores by their URIs.

use std::sync::Arc;

use thiserror::Error;

use crate::{
    Client, Etcd, HttpKeyValue, KeyValueConfig, KeyValueStore, KeyValueStoreConfig, Memcached,
    P2P_HANDSHAKE, PeerToPeer, Redis, Store, UriError,
};

/// [`P2P_HANDSHAKE`], as commands have it.
const P2P: &str = "p2p";

/// What stores there are.
const FORMS: &str = "p2p, http://HOST:PORT/PATH, https://HOST:PORT/PATH, etcd://HOST:PORT, etcds://HOST:PORT, redis://HOST:PORT, rediss://HOST:PORT, memcached://HOST:PORT or memcacheds://HOST:PORT";

/// Why there is no store of this URI.
#[derive(Debug, Error)]
#[error("metadata {uri}: {kind}")]
pub struct OpenStoreError {
    /// The URI, without password.
    pub uri: String,
    /// Why.
    #[source]
    pub kind: OpenStoreErrorKind,
}

/// Why a URI is none of a store.
#[derive(Debug, Error)]
pub enum OpenStoreErrorKind {
    /// There is no such kind.
    #[error("it is {FORMS}")]
    Unknown,
    /// The URI is none.
    #[error("{0}")]
    Malformed(String),
}

/// The store with this URI. Does not connect: what is wrong with its server is told by the first call.
///
/// Metadata servers are asked with `config`; peers with its `client`, if there is no server.
pub fn open_store(
    uri: &str,
    config: KeyValueStoreConfig,
) -> Result<Arc<dyn Store>, OpenStoreError> {
    let failed = |kind| OpenStoreError { uri: without_password(uri), kind };
    if is_peer_to_peer(uri) {
        return Ok(Arc::new(PeerToPeer::new(Client::new(config.client))));
    }
    let scheme = uri.split_once("://").map_or("", |(scheme, _)| scheme);
    let malformed = |what| failed(OpenStoreErrorKind::Malformed(what));
    let server = KeyValueConfig::default();
    match scheme {
        "http" | "https" => {
            let server = HttpKeyValue::with_files(uri, &config.tls).map_err(malformed)?;
            Ok(Arc::new(KeyValueStore::new(server, config)))
        }
        "etcd" | "etcds" => {
            let server = Etcd::with_files(uri, server, &config.tls)?;
            Ok(Arc::new(KeyValueStore::new(server, config)))
        }
        "redis" | "rediss" => {
            let server = Redis::with(uri, server, &config.redis, &config.tls)?;
            Ok(Arc::new(KeyValueStore::new(server, config)))
        }
        "memcached" | "memcacheds" => {
            let server = Memcached::with_files(uri, server, &config.tls)?;
            Ok(Arc::new(KeyValueStore::new(server, config)))
        }
        _ => Err(failed(OpenStoreErrorKind::Unknown)),
    }
}

/// Whether this means that segments are named by where their processes answer.
pub fn is_peer_to_peer(uri: &str) -> bool {
    uri == P2P || uri == P2P_HANDSHAKE
}

impl From<UriError> for OpenStoreError {
    fn from(error: UriError) -> Self {
        Self { uri: error.uri, kind: OpenStoreErrorKind::Malformed(error.reason) }
    }
}

/// A URI as it may be shown: without user and password. A password may have slashes and at signs that nobody
/// has encoded.
pub fn without_password(uri: &str) -> String {
    let scheme = uri.split_once("://").map_or("", |(scheme, _)| scheme);
    match uri.rsplit_once('@') {
        Some(_) if scheme.contains('@') => "***".to_owned(),
        Some((_, place)) => format!("{scheme}://***@{place}"),
        None => uri.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(uri: &str) -> String {
        match open_store(uri, KeyValueStoreConfig::default()) {
            Ok(_) => panic!("{uri} was opened"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn stores_have_uris() {
        let all = [
            ("p2p", true),
            (P2P_HANDSHAKE, true),
            ("http://a:1/metadata", false),
            ("etcd://a:1,b:2", false),
            ("etcd://http://a:1;http://b:2", false),
            ("redis://:secret@a:1/2", false),
            ("memcached://a", false),
        ];
        for (uri, local) in all {
            let store = open_store(uri, KeyValueStoreConfig::default()).unwrap();
            assert_eq!((store.is_local(), is_peer_to_peer(uri)), (local, local), "{uri}");
        }
    }

    #[test]
    fn what_is_no_store_is_told_without_passwords() {
        for uri in ["", "P2P", "a:1", "ftp://a:1", "://a"] {
            assert_eq!(error(uri), format!("metadata {uri}: it is {FORMS}"));
        }
        assert_eq!(
            error("ftp://:secret@a:1/3"),
            format!("metadata ftp://***@a:1/3: it is {FORMS}")
        );
        let slash = error("ftp://:sec/ret@a:1");
        assert_eq!(slash, format!("metadata ftp://***@a:1: it is {FORMS}"));
        let number = error("redis://:secret@a:1/x");
        assert!(number.starts_with("metadata redis://a:1/x: what follows the port"), "{number}");
        let user = error("http://me:secret@a:1/metadata");
        assert!(user.starts_with("metadata http://***@a:1/metadata: it names a user"), "{user}");
        let user = error("https://me:secret@a:1/metadata");
        assert!(user.starts_with("metadata https://***@a:1/metadata: it names a user"), "{user}");
    }
}
