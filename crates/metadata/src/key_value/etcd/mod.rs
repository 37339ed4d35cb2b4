//! `etcd://`: the values are keys of an etcd with a lease of this client, over etcd's JSON gateway
//! (<https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/>). `etcds://`: the same over TLS.
//!
//! A client has one lease. Its entries go with it, so a node that died is forgotten.

mod gateway;
mod login;
mod message;
mod transaction;

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::config::VALUE_LIMIT;
use super::uri::ServerUri;
use super::{KeyValue, KeyValueConfig, KeyValueError, KeyValueErrorKind, TlsFiles, UriError};
pub use transaction::{EtcdEntry, EtcdOperation, EtcdOutcome, EtcdTransactions, LeaderKey};

use gateway::{EtcdError, Gateway};
use login::Login;
use message::{
    Base64, DeleteRange, Done, Entry, Int64, Lease, LeaseGrant, LeaseKeepAlive, Put, Range,
    RangeReply, StreamReply,
};

const DEFAULT_PORT: u16 = 2379;

/// Its URIs, and those of one that speaks TLS.
const SCHEME: &str = "etcd";
const TLS_SCHEME: &str = "etcds";

/// A client of an etcd: `etcd://[user:password@]host[:port][,host[:port]]`, with as many endpoints as are known, or
/// `etcds://` over TLS.
///
/// Endpoints may be written as etcd's own clients have them, and the original passes them on: `etcd://https://a:1;https://b:1` is
/// `etcds://a:1,b:1`.
pub struct Etcd {
    uri: String,
    gateway: Gateway,
    /// The lease of all entries of this client, when it has put one.
    lease: Mutex<Option<Int64>>,
    seconds: Int64,
}

/// Who a URI says that is calling.
fn login_of(parts: &ServerUri) -> Result<Option<Login>, UriError> {
    match (&parts.user, &parts.password) {
        (Some(user), Some(password)) => Ok(Some(Login::new(user.clone(), password.clone()))),
        (None, None) => Ok(None),
        _ => Err(parts.error("a user and a password go together: USER:PASSWORD@HOST")),
    }
}

impl Etcd {
    /// A client of the endpoints that the URI names. It connects when it is asked something.
    pub fn new(uri: &str, config: KeyValueConfig) -> Result<Self, UriError> {
        Self::with_files(uri, config, &TlsFiles::default())
    }

    /// As [`Etcd::new`], with these files where it speaks TLS, which are read now.
    pub fn with_files(
        uri: &str,
        config: KeyValueConfig,
        files: &TlsFiles,
    ) -> Result<Self, UriError> {
        let (scheme, uri) = without_schemes(uri);
        let parts = ServerUri::parse(&uri, scheme, DEFAULT_PORT)?;
        parts.without_path()?;
        let login = login_of(&parts)?;
        let files = (scheme == TLS_SCHEME).then_some(files);
        let gateway = Gateway::new(parts.hosts.clone(), config, login, files);
        Ok(Self {
            uri: parts.to_string(),
            gateway: gateway.map_err(|what| parts.error(what))?,
            lease: Mutex::new(None),
            seconds: Int64(i64::try_from(config.seconds()).unwrap_or(i64::MAX)),
        })
    }

    fn lease(&self) -> MutexGuard<'_, Option<Int64>> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lease, or a new one. Of two callers that take one at a time, one leaves its own to expire.
    fn lease_or_grant(&self) -> Result<Int64, EtcdError> {
        if let Some(lease) = *self.lease() {
            return Ok(lease);
        }
        let granted: Lease =
            self.gateway.call("lease/grant", &LeaseGrant { seconds: self.seconds })?;
        if granted.id.0 <= 0 || granted.seconds.0 <= 0 {
            return Err(EtcdError::Other(meaning("a lease without number or time")));
        }
        Ok(*self.lease().get_or_insert(granted.id))
    }

    /// Forgets a lease that etcd does not know, unless there is another one already.
    fn forget(&self, gone: Int64) {
        let mut lease = self.lease();
        if *lease == Some(gone) {
            *lease = None;
        }
    }

    fn entry(&self, key: &str, keys_only: bool) -> Result<Option<Entry>, EtcdError> {
        let request = Range { key: base64(key.as_bytes()), keys_only };
        let mut reply: RangeReply = self.gateway.call("kv/range", &request)?;
        match (reply.kvs.pop(), reply.kvs.is_empty()) {
            (None, _) => Ok(None),
            (Some(entry), true) if entry.key == request.key => Ok(Some(entry)),
            _ => Err(EtcdError::Other(meaning("an entry of another key"))),
        }
    }

    fn put_leased(&self, key: &str, value: &[u8]) -> Result<(), EtcdError> {
        let mut request =
            Put { key: base64(key.as_bytes()), value: base64(value), lease: Int64(0) };
        request.lease = self.lease_or_grant()?;
        let mut put = self.gateway.call::<Done>("kv/put", &request);
        if matches!(put, Err(EtcdError::NoLease)) {
            self.forget(request.lease);
            request.lease = self.lease_or_grant()?;
            put = self.gateway.call("kv/put", &request);
        }
        put.map(|_| ())
    }

    /// Lets the lease live on, and looks whether the key is one of its entries still.
    fn refresh_leased(&self, key: &str) -> Result<bool, EtcdError> {
        let Some(id) = *self.lease() else { return Ok(false) };
        let reply: StreamReply<Lease> =
            self.gateway.call("lease/keepalive", &LeaseKeepAlive { id })?;
        let is_alive = match (reply.result, reply.error) {
            (Some(lease), None) if lease.id == id => lease.seconds.0 > 0,
            (_, Some(error)) => {
                let message = super::connection::excerpt(error.text().as_bytes());
                return Err(EtcdError::Other(KeyValueErrorKind::Refused { status: None, message }));
            }
            _ => return Err(EtcdError::Other(meaning("a lease of another number"))),
        };
        if !is_alive {
            self.forget(id);
            return Ok(false);
        }
        // An entry with another lease ends with that.
        Ok(self.entry(key, true)?.is_some_and(|entry| entry.lease == id))
    }

    fn error(&self, key: &str, error: EtcdError) -> KeyValueError {
        KeyValueError { uri: self.uri.clone(), key: key.to_owned(), kind: error.into() }
    }
}

impl KeyValue for Etcd {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, KeyValueError> {
        match self.entry(key, false) {
            Ok(Some(entry)) if entry.value.0.len() > VALUE_LIMIT => {
                let (length, limit) = (entry.value.0.len(), VALUE_LIMIT);
                let error = EtcdError::Other(KeyValueErrorKind::TooLong { length, limit });
                Err(self.error(key, error))
            }
            Ok(entry) => Ok(entry.map(|entry| entry.value.0)),
            Err(error) => Err(self.error(key, error)),
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), KeyValueError> {
        let (length, limit) = (value.len(), VALUE_LIMIT);
        if length > limit {
            let error = EtcdError::Other(KeyValueErrorKind::TooLong { length, limit });
            return Err(self.error(key, error));
        }
        self.put_leased(key, value).map_err(|error| self.error(key, error))
    }

    fn refresh(&self, key: &str) -> Result<bool, KeyValueError> {
        self.refresh_leased(key).map_err(|error| self.error(key, error))
    }

    fn remove(&self, key: &str) -> Result<(), KeyValueError> {
        let request = DeleteRange { key: base64(key.as_bytes()) };
        match self.gateway.call::<Done>("kv/deleterange", &request) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.error(key, error)),
        }
    }

    fn limit(&self) -> usize {
        VALUE_LIMIT
    }

    fn uri(&self) -> &str {
        &self.uri
    }
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd").field("uri", &self.uri).finish_non_exhaustive()
    }
}

/// A URI whose endpoints have no schemes of their own, and its scheme. Where endpoints have several, they stay, and are no hosts.
fn without_schemes(uri: &str) -> (&'static str, String) {
    let given = uri.split_once("://").map_or(uri, |(scheme, _)| scheme);
    let given = if given == TLS_SCHEME { TLS_SCHEME } else { SCHEME };
    let Some(rest) = uri.strip_prefix(given).and_then(|rest| rest.strip_prefix("://")) else {
        return (given, uri.to_owned());
    };
    // A password may have any of the characters that endpoints are parted by.
    let (login, endpoints) = rest.rsplit_once('@').map_or(("", rest), |(login, places)| {
        let end = login.len() + 1;
        (&rest[..end], places)
    });
    let endpoints: Vec<&str> = endpoints.split([',', ';']).collect();
    let of = |own: &str| -> Option<Vec<&str>> {
        endpoints.iter().map(|endpoint| endpoint.strip_prefix(own)).collect()
    };
    let (scheme, endpoints) = match (given, of("http://"), of("https://")) {
        (SCHEME, Some(plain), _) => (SCHEME, plain),
        (_, _, Some(secure)) => (TLS_SCHEME, secure),
        _ => (given, endpoints),
    };
    (scheme, format!("{scheme}://{login}{}", endpoints.join(",")))
}

fn base64(bytes: &[u8]) -> Base64 {
    Base64(bytes.to_vec())
}

fn meaning(text: &str) -> KeyValueErrorKind {
    KeyValueErrorKind::Meaning(format!("{text}: is it an etcd server?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_may_be_as_those_of_etcds_own_clients() {
        for (uri, scheme, expected) in [
            ("etcd://a:1", SCHEME, "etcd://a:1"),
            ("etcd://a:1;b:2,c", SCHEME, "etcd://a:1,b:2,c"),
            ("etcd://http://a:1;http://b:2", SCHEME, "etcd://a:1,b:2"),
            ("etcds://a:1,b:2", TLS_SCHEME, "etcds://a:1,b:2"),
            ("etcd://https://a:1,https://b:2", TLS_SCHEME, "etcds://a:1,b:2"),
            ("etcds://https://a:1", TLS_SCHEME, "etcds://a:1"),
            ("etcd://me:p;w,@https://a:1;https://b", TLS_SCHEME, "etcds://me:p;w,@a:1,b"),
            ("other://a:1", SCHEME, "other://a:1"),
        ] {
            assert_eq!(without_schemes(uri), (scheme, expected.to_owned()), "{uri}");
        }
        // One without TLS among others with it is none that was meant.
        for wrong in
            ["etcd://https://a:1,http://b:2", "etcd://https://a:1,b:2", "etcds://http://a:1"]
        {
            let error = Etcd::new(wrong, KeyValueConfig::default()).unwrap_err();
            assert!(error.reason.contains("port must be"), "{wrong}: {error}");
        }
        for half in ["etcd://:secret@a", "etcd://secret@a", "etcd://secret:@a"] {
            let error = Etcd::new(half, KeyValueConfig::default()).unwrap_err();
            assert!(!error.to_string().contains("secret"), "{error}");
            assert!(error.reason.contains("a user and a password go together"), "{error}");
        }
        let etcd = Etcd::new("etcd://me:secret@a", KeyValueConfig::default()).unwrap();
        assert_eq!(etcd.uri(), "etcd://a:2379");
        assert!(!format!("{etcd:?}").contains("secret"));
    }
}
