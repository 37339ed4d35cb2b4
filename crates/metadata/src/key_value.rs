//! Servers that keep values by keys: what all of them can do, and how they fail.

pub(crate) mod http;

mod agent;
mod config;
mod connection;
mod etcd;
mod last_words;
mod memcached;
mod redis;
mod securing;
mod tls;
mod uri;

use std::time::Duration;

use thiserror::Error;

pub use config::KeyValueConfig;
pub use etcd::{Etcd, EtcdEntry, EtcdOperation, EtcdOutcome, EtcdTransactions, LeaderKey};
pub use memcached::Memcached;
pub use redis::{Redis, RedisLogin};
pub use tls::TlsFiles;
pub use uri::{Secret, UriError};

/// How long an entry lives after it was put or refreshed, where the server has times to live.
pub const TIME_TO_LIVE: Duration = Duration::from_secs(30);

/// How often entries are refreshed: two refreshes may fail before an entry is gone.
pub const REFRESH_INTERVAL: Duration = Duration::from_secs(10);

/// A server that keeps values by keys. Calls may block, up to a deadline of the client.
pub trait KeyValue: Send + Sync + 'static {
    /// The value of a key, if it has one.
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, KeyValueError>;

    /// In place of what was there. Where the server has that, the entry goes [`TIME_TO_LIVE`] after the
    /// last `put` or `refresh`.
    fn put(&self, key: &str, value: &[u8]) -> Result<(), KeyValueError>;

    /// Lets an entry live on. `false` where it is gone: then it is to be put again. A server without times
    /// to live looks whether it is there.
    fn refresh(&self, key: &str) -> Result<bool, KeyValueError>;

    /// Takes a key and its value away. A key that is not there is no error.
    fn remove(&self, key: &str) -> Result<(), KeyValueError>;

    /// Most bytes of a value.
    fn limit(&self) -> usize;

    /// As users write it, without password.
    fn uri(&self) -> &str;
}

/// A call that failed: of which server, for which key, and how.
#[derive(Debug, Error)]
#[error("metadata server {uri}, key {key:?}: {kind}")]
pub struct KeyValueError {
    /// The server, without password.
    pub uri: String,
    /// The key that was asked for.
    pub key: String,
    /// What happened.
    #[source]
    pub kind: KeyValueErrorKind,
}

/// How a call failed.
#[derive(Debug, Error)]
pub enum KeyValueErrorKind {
    /// No connection, or no reply in time.
    #[error("{0}")]
    Unreachable(String),
    /// TLS with it failed: it is not who it should be, or does not take us for who we are.
    #[error("{0}")]
    Untrusted(String),
    /// It understood and did not do it.
    #[error("it refused: {}{message}", status_text(status))]
    Refused {
        /// The status of HTTP, where the server speaks that.
        status: Option<u16>,
        /// What it said.
        message: String,
    },
    /// A reply that makes no sense.
    #[error("its reply makes no sense: {0}")]
    Meaning(String),
    /// The value is too long for the server.
    #[error("the value takes {length} bytes, more than the {limit} that fit")]
    TooLong {
        /// Bytes of the value.
        length: usize,
        /// The most that the server takes.
        limit: usize,
    },
}

fn status_text(status: &Option<u16>) -> String {
    status.map(|status| format!("status {status}, ")).unwrap_or_default()
}

impl KeyValueError {
    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        match &self.kind {
            KeyValueErrorKind::Unreachable(_) => true,
            // Request Timeout, Too Many Requests, and the server's own failures.
            KeyValueErrorKind::Refused { status, .. } => {
                status.is_some_and(|status| matches!(status, 408 | 429 | 500..=599))
            }
            KeyValueErrorKind::Untrusted(_)
            | KeyValueErrorKind::Meaning(_)
            | KeyValueErrorKind::TooLong { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_server_key_and_reason_and_say_whether_to_try_again() {
        let refused = |status, message: &str| KeyValueErrorKind::Refused {
            status,
            message: message.to_owned(),
        };
        let cases = [
            (KeyValueErrorKind::Unreachable("nobody listens".to_owned()), "nobody listens", true),
            (refused(Some(500), "disk full"), "it refused: status 500, disk full", true),
            (refused(Some(429), "slowly"), "it refused: status 429, slowly", true),
            (refused(Some(400), "no"), "it refused: status 400, no", false),
            (refused(None, "NOAUTH"), "it refused: NOAUTH", false),
            (
                KeyValueErrorKind::Meaning("no number".to_owned()),
                "its reply makes no sense: no number",
                false,
            ),
            (
                KeyValueErrorKind::TooLong { length: 11, limit: 10 },
                "the value takes 11 bytes, more than the 10 that fit",
                false,
            ),
        ];
        for (kind, text, transient) in cases {
            let (uri, key) = ("http://a:1/metadata".to_owned(), "mooncake/ram/b".to_owned());
            let error = KeyValueError { uri, key, kind };
            let expected =
                format!("metadata server http://a:1/metadata, key \"mooncake/ram/b\": {text}");
            assert_eq!(error.to_string(), expected);
            assert_eq!(error.is_transient(), transient, "{text}");
        }
    }
}
