//! Leases and transactions of an etcd, for processes that share a state of which one at a time may change it.
//!
//! Each call may be repeated to another endpoint, and carried out though it fails here: callers make requests that may
//! come twice, or late.

use std::fmt;
use std::time::Duration;

use super::super::config::VALUE_LIMIT;
use super::super::uri::ServerUri;
use super::message::{
    Compare, RangeOf, RequestOperation, ResponseOperation, Transaction, TransactionReply,
};
use super::{
    Base64, DEFAULT_PORT, DeleteRange, Done, Entry, EtcdError, Gateway, Int64, KeyValueConfig,
    KeyValueError, KeyValueErrorKind, Lease, LeaseGrant, LeaseKeepAlive, Put, Range, RangeReply,
    StreamReply, TLS_SCHEME, TlsFiles, UriError, base64, login_of, meaning, without_schemes,
};

/// A client of an etcd: `etcd://host[:port][,host[:port]][/prefix]`, or `etcds://` over TLS.
pub struct EtcdTransactions {
    uri: String,
    prefix: String,
    gateway: Gateway,
}

/// A key and what it has.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EtcdEntry {
    /// The key, without the prefix.
    pub key: String,
    /// Its value.
    pub value: Vec<u8>,
    /// Its lease; 0 for none.
    pub lease: i64,
    /// The revision in which it was made.
    pub create_revision: i64,
}

/// A part of a transaction. Keys are below the prefix of the URI.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum EtcdOperation {
    /// Reads a key.
    Get(String),
    /// Gives a key a value.
    Put {
        /// The key.
        key: String,
        /// Its value.
        value: Vec<u8>,
        /// It goes with this lease; 0 for none.
        lease: i64,
    },
    /// Takes a key away.
    Delete(String),
}

/// The condition of a transaction.
#[derive(Clone, Copy, Debug)]
pub struct LeaderKey<'a> {
    /// The key.
    pub key: &'a str,
    /// The revision in which it must have been made: 0 when it must not be there.
    pub create_revision: i64,
    /// Another key whose value must be below this one, byte by byte.
    pub below: Option<(&'a str, &'a [u8])>,
    /// Another key that must not be there.
    pub absent: Option<&'a str>,
}

/// What has become of a transaction.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EtcdOutcome {
    /// Whether the condition was met.
    pub succeeded: bool,
    /// The revision of the store after it.
    pub revision: i64,
    /// What was read.
    pub entries: Vec<EtcdEntry>,
}

impl EtcdTransactions {
    /// A client of the endpoints that the URI names, which connects when it is asked something. With these files where it
    /// speaks TLS, which are read now.
    pub fn new(uri: &str, config: KeyValueConfig, files: &TlsFiles) -> Result<Self, UriError> {
        let (scheme, uri) = without_schemes(uri);
        let mut parts = ServerUri::parse(&uri, scheme, DEFAULT_PORT)?;
        let prefix = parts.path.take().unwrap_or_default();
        let login = login_of(&parts)?;
        let files = (scheme == TLS_SCHEME).then_some(files);
        let gateway = Gateway::new(parts.hosts.clone(), config, login, files);
        let gateway = gateway.map_err(|what| parts.error(what))?;
        parts.path = Some(prefix.clone()).filter(|prefix| !prefix.is_empty());
        let prefix = match prefix.trim_end_matches('/') {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        };
        Ok(Self { uri: parts.to_string(), prefix, gateway })
    }

    /// As users write it.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    fn error(&self, key: &str, error: EtcdError) -> KeyValueError {
        let key = format!("{}{key}", self.prefix);
        KeyValueError { uri: self.uri.clone(), key, kind: error.into() }
    }

    fn key(&self, key: &str) -> Base64 {
        base64(format!("{}{key}", self.prefix).as_bytes())
    }

    /// Takes a lease of so many seconds; gives its number and its time.
    pub fn grant(&self, seconds: u32) -> Result<(i64, Duration), KeyValueError> {
        let request = LeaseGrant { seconds: Int64(seconds.into()) };
        let granted: Result<Lease, EtcdError> = self.gateway.call("lease/grant", &request);
        let granted = granted.map_err(|error| self.error("", error))?;
        match (granted.id.0, u64::try_from(granted.seconds.0)) {
            (id @ 1.., Ok(seconds @ 1..)) => Ok((id, Duration::from_secs(seconds))),
            _ => Err(self.nonsense("a lease without number or time")),
        }
    }

    /// Lets a lease live on; gives its time, none when it is over.
    pub fn keep_alive(&self, lease: i64) -> Result<Option<Duration>, KeyValueError> {
        let request = LeaseKeepAlive { id: Int64(lease) };
        let reply: Result<StreamReply<Lease>, EtcdError> =
            self.gateway.call("lease/keepalive", &request);
        let reply = match reply {
            Err(EtcdError::NoLease) => return Ok(None),
            reply => reply.map_err(|error| self.error("", error))?,
        };
        match reply.result.filter(|reply| reply.id.0 == lease) {
            Some(reply) => {
                let seconds = u64::try_from(reply.seconds.0).unwrap_or_default();
                Ok((seconds > 0).then(|| Duration::from_secs(seconds)))
            }
            None => Err(self.nonsense("no lease, or one of another number")),
        }
    }

    /// Ends a lease, and what goes with it.
    pub fn revoke(&self, lease: i64) -> Result<(), KeyValueError> {
        let request = LeaseKeepAlive { id: Int64(lease) };
        match self.gateway.call::<Done>("lease/revoke", &request) {
            Ok(_) | Err(EtcdError::NoLease) => Ok(()),
            Err(error) => Err(self.error("", error)),
        }
    }

    /// Gives a key a value that goes with a lease.
    pub fn put(&self, key: &str, value: &[u8], lease: i64) -> Result<(), KeyValueError> {
        let request = Put { key: self.key(key), value: base64(value), lease: Int64(lease) };
        let put = self.gateway.call::<Done>("kv/put", &request);
        put.map(|_| ()).map_err(|error| self.error(key, error))
    }

    /// Up to so many entries whose keys begin with this text, in the order of their keys, those after a key only if one is
    /// given.
    pub fn list(
        &self,
        begin: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<EtcdEntry>, KeyValueError> {
        let mut first = self.key(after.unwrap_or(begin));
        if after.is_some() {
            // The next one that there can be.
            first.0.push(0);
        }
        let mut end = self.key(begin);
        // Text in UTF-8 has no byte 255. Without a prefix and a text, all keys are meant.
        match end.0.last_mut() {
            Some(last) => *last += 1,
            None => end.0.push(0),
        }
        let request = RangeOf { key: first, range_end: end, limit: Int64(limit.into()) };
        let reply: Result<RangeReply, EtcdError> = self.gateway.call("kv/range", &request);
        let reply = reply.map_err(|error| self.error(begin, error))?;
        reply.kvs.into_iter().map(|entry| self.entry(entry)).collect()
    }

    /// Carries out `then` if the condition is met, and `otherwise` if not, at once or not at all.
    pub fn transact(
        &self,
        condition: &LeaderKey<'_>,
        then: Vec<EtcdOperation>,
        otherwise: Vec<EtcdOperation>,
    ) -> Result<EtcdOutcome, KeyValueError> {
        let made = Compare {
            key: self.key(condition.key),
            target: "CREATE",
            result: "EQUAL",
            create_revision: Some(Int64(condition.create_revision)),
            value: None,
        };
        let below = condition.below.map(|(key, value)| Compare {
            key: self.key(key),
            target: "VALUE",
            result: "LESS",
            create_revision: None,
            value: Some(base64(value)),
        });
        let absent = condition.absent.map(|key| Compare {
            key: self.key(key),
            target: "CREATE",
            result: "EQUAL",
            create_revision: Some(Int64(0)),
            value: None,
        });
        let operations = |all: Vec<EtcdOperation>| all.into_iter().map(|it| self.operation(it));
        let request = Transaction {
            compare: [made].into_iter().chain(below).chain(absent).collect(),
            success: operations(then).collect(),
            failure: operations(otherwise).collect(),
        };
        let reply: Result<TransactionReply, EtcdError> = self.gateway.call("kv/txn", &request);
        let reply = reply.map_err(|error| self.error(condition.key, error))?;
        let read = |operation: ResponseOperation| operation.response_range;
        let entries = reply.responses.into_iter().filter_map(read).flat_map(|range| range.kvs);
        Ok(EtcdOutcome {
            succeeded: reply.succeeded,
            revision: reply.header.revision.0,
            entries: entries.map(|entry| self.entry(entry)).collect::<Result<_, _>>()?,
        })
    }

    fn operation(&self, operation: EtcdOperation) -> RequestOperation {
        match operation {
            EtcdOperation::Get(key) => {
                RequestOperation::RequestRange(Range { key: self.key(&key), keys_only: false })
            }
            EtcdOperation::Put { key, value, lease } => RequestOperation::RequestPut(Put {
                key: self.key(&key),
                value: Base64(value),
                lease: Int64(lease),
            }),
            EtcdOperation::Delete(key) => {
                RequestOperation::RequestDeleteRange(DeleteRange { key: self.key(&key) })
            }
        }
    }

    fn entry(&self, entry: Entry) -> Result<EtcdEntry, KeyValueError> {
        let key = String::from_utf8(entry.key.0).ok();
        let key = key.and_then(|key| key.strip_prefix(&self.prefix).map(str::to_owned));
        let key = key.ok_or_else(|| self.nonsense("an entry of another key"))?;
        if entry.value.0.len() > VALUE_LIMIT {
            let (length, limit) = (entry.value.0.len(), VALUE_LIMIT);
            let kind = KeyValueErrorKind::TooLong { length, limit };
            return Err(self.error(&key, EtcdError::Other(kind)));
        }
        let (lease, create_revision) = (entry.lease.0, entry.create_revision.0);
        Ok(EtcdEntry { key, value: entry.value.0, lease, create_revision })
    }

    fn nonsense(&self, what: &str) -> KeyValueError {
        self.error("", EtcdError::Other(meaning(what)))
    }
}

impl fmt::Debug for EtcdTransactions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdTransactions").field("uri", &self.uri).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_the_port_is_a_prefix() {
        for (uri, shown, prefix) in [
            ("etcd://a:1", "etcd://a:1", ""),
            ("etcd://a:1,b/", "etcd://a:1,b:2379", ""),
            ("etcd://a:1/inc/one/", "etcd://a:1/inc/one/", "inc/one/"),
            ("etcd://a:1/inc", "etcd://a:1/inc", "inc/"),
        ] {
            let client =
                EtcdTransactions::new(uri, KeyValueConfig::default(), &TlsFiles::default());
            let client = client.unwrap();
            assert_eq!((client.uri(), client.prefix.as_str()), (shown, prefix), "{uri}");
        }
        for wrong in ["http://a:1", "etcd://:secret@a:1/x", "etcd://"] {
            let error =
                EtcdTransactions::new(wrong, KeyValueConfig::default(), &TlsFiles::default());
            let error = error.unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn transactions_as_etcd_documents_them() {
        let compare = Compare {
            key: base64(b"foo"),
            target: "CREATE",
            result: "EQUAL",
            create_revision: Some(Int64(2)),
            value: None,
        };
        let put = Put { key: base64(b"foo"), value: base64(b"bar"), lease: Int64(0) };
        let request = Transaction {
            compare: vec![compare],
            success: vec![RequestOperation::RequestPut(put)],
            failure: Vec::new(),
        };
        let json = r#"{"compare":[{"key":"Zm9v","target":"CREATE","result":"EQUAL","create_revision":"2"}],"success":[{"request_put":{"key":"Zm9v","value":"YmFy","lease":"0"}}],"failure":[]}"#;
        assert_eq!(serde_json::to_string(&request).unwrap(), json);
        let reply = r#"{"header":{"revision":"3"},"succeeded":true,"responses":[{"response_put":{"header":{"revision":"3"}}},{"response_range":{"kvs":[{"key":"Zm9v","create_revision":"2"}]}}]}"#;
        let reply: TransactionReply = serde_json::from_str(reply).unwrap();
        assert_eq!((reply.header.revision, reply.succeeded), (Int64(3), true));
        let range = reply.responses[1].response_range.as_ref().unwrap();
        assert_eq!(range.kvs[0].create_revision, Int64(2));
    }
}
