//! The state in an etcd. Below the prefix: `leader`, whose value is the leader's address and which goes with its lease;
//! `term`, in 16 digits; `controllers/ADDRESS`, one for each controller, which goes with its lease; and
//! `communicators/IDENTITY`, a record of each communicator.

use std::net::SocketAddr;
use std::time::Duration;

use millstream_inc::controllers::MAX_CONTROLLERS;
use millstream_inc::election::{Change, Reply, Request};
use millstream_metadata::{
    EtcdEntry, EtcdOperation, EtcdTransactions, KeyValueConfig, KeyValueError, LeaderKey, TlsFiles,
};

use super::{StateError, Store};

/// How long a lease lasts.
const LEASE_SECONDS: u32 = 5;

/// A request that takes longer has failed: a lease is renewed before it ends though one was in vain.
const CALL_TIMEOUT: Duration = Duration::from_millis(1200);

/// Records that are read at a time: their bytes fit a reply of the client.
const RECORDS: u32 = 4;

const LEADER: &str = "leader";
const TERM: &str = "term";
const CONTROLLERS: &str = "controllers/";
const COMMUNICATORS: &str = "communicators/";

pub(super) struct EtcdStore {
    client: EtcdTransactions,
    address: SocketAddr,
}

impl EtcdStore {
    pub(super) fn new(uri: &str, tls: &TlsFiles, address: SocketAddr) -> Result<Self, StateError> {
        let config = KeyValueConfig {
            connect_timeout: CALL_TIMEOUT,
            call_timeout: CALL_TIMEOUT,
            ..KeyValueConfig::default()
        };
        let client = EtcdTransactions::new(uri, config, tls)?;
        if *tls != TlsFiles::default() && !client.uri().starts_with("etcds://") {
            return Err(StateError::NoTls { state: client.uri().to_owned() });
        }
        Ok(Self { client, address })
    }

    fn try_perform(&self, request: Request) -> Result<Reply, KeyValueError> {
        let address = self.address.to_string();
        Ok(match request {
            Request::Grant => {
                let (lease, time) = self.client.grant(LEASE_SECONDS)?;
                self.client.put(&format!("{CONTROLLERS}{address}"), b"", lease)?;
                Reply::Granted { lease, time }
            }
            Request::Renew { lease } => Reply::Renewed { time: self.client.keep_alive(lease)? },
            Request::List => {
                let found = self.client.list(CONTROLLERS, None, MAX_CONTROLLERS as u32)?;
                let address = |it: &EtcdEntry| it.key.strip_prefix(CONTROLLERS)?.parse().ok();
                Reply::Listed { controllers: found.iter().filter_map(address).collect() }
            }
            Request::Campaign { lease } => {
                let value = address.into_bytes();
                let take = EtcdOperation::Put { key: LEADER.to_owned(), value, lease };
                let found = self.client.transact(&made(0), vec![take, get(TERM)], read())?;
                let leader = find(&found.entries, LEADER);
                let (revision, leader) = match (found.succeeded, leader) {
                    (true, _) => (Some(found.revision), Some(self.address)),
                    (false, Some(it)) => {
                        let revision = (it.lease == lease).then_some(it.create_revision);
                        (
                            revision,
                            std::str::from_utf8(&it.value).ok().and_then(|it| it.parse().ok()),
                        )
                    }
                    (false, None) => (None, None),
                };
                match term(&found.entries) {
                    Ok(term) => Reply::Campaigned { revision, leader, term },
                    Err(what) => self.nonsense(what),
                }
            }
            Request::SetTerm { revision, term } => self.set_term(revision, term)?,
            Request::Load { after } => {
                let after = after.map(|after| format!("{COMMUNICATORS}{after}"));
                let found = self.client.list(COMMUNICATORS, after.as_deref(), RECORDS)?;
                let more = found.len() >= RECORDS as usize;
                let record = |it: EtcdEntry| {
                    let key = it.key.strip_prefix(COMMUNICATORS)?.to_owned();
                    // What is no text is no record.
                    Some((key, String::from_utf8(it.value).unwrap_or_default()))
                };
                Reply::Loaded { records: found.into_iter().filter_map(record).collect(), more }
            }
            Request::Write { revision, changes } => {
                let operations = changes.into_iter().map(|(key, value): Change| {
                    let key = format!("{COMMUNICATORS}{key}");
                    match value {
                        Some(value) => {
                            EtcdOperation::Put { key, value: value.into_bytes(), lease: 0 }
                        }
                        None => EtcdOperation::Delete(key),
                    }
                });
                let operations = operations.collect();
                let written = self.client.transact(&made(revision), operations, Vec::new())?;
                Reply::Written { leads: written.succeeded }
            }
            Request::Release { lease } => {
                self.client.revoke(lease)?;
                Reply::Released
            }
        })
    }

    /// Stores a term. Nothing is below a term that is not there yet, so the first one is another transaction.
    fn set_term(&self, revision: i64, wanted: u64) -> Result<Reply, KeyValueError> {
        let value = format!("{wanted:016}").into_bytes();
        let put = || EtcdOperation::Put { key: TERM.to_owned(), value: value.clone(), lease: 0 };
        let below = LeaderKey { below: Some((TERM, &value)), ..made(revision) };
        let mut found = self.client.transact(&below, vec![put()], read())?;
        if !found.succeeded && find(&found.entries, TERM).is_none() {
            let first = LeaderKey { absent: Some(TERM), ..made(revision) };
            found = self.client.transact(&first, vec![put()], read())?;
        }
        if found.succeeded {
            return Ok(Reply::TermSet { leads: true, term: wanted });
        }
        let leader = find(&found.entries, LEADER);
        let leads = leader.is_some_and(|leader| leader.create_revision == revision);
        Ok(match term(&found.entries) {
            Ok(term) => Reply::TermSet { leads, term },
            Err(what) => self.nonsense(what),
        })
    }

    fn nonsense(&self, what: String) -> Reply {
        Reply::Failed { reason: format!("{}: {what}", self.client.uri()), again: true }
    }
}

impl Store for EtcdStore {
    fn perform(&mut self, request: Request) -> Reply {
        self.try_perform(request).unwrap_or_else(|error| {
            let again = error.is_transient();
            Reply::Failed { reason: by_arguments(&error.to_string()), again }
        })
    }
}

/// The client's advice names settings of engines. Here arguments have these files.
fn by_arguments(reason: &str) -> String {
    reason
        .replace("metadata.ca_file", "--state-ca-file")
        .replace("metadata.certificate_file", "--state-certificate-file")
}

/// The leader's key was made in this revision.
const fn made(create_revision: i64) -> LeaderKey<'static> {
    LeaderKey { key: LEADER, create_revision, below: None, absent: None }
}

fn get(key: &str) -> EtcdOperation {
    EtcdOperation::Get(key.to_owned())
}

fn read() -> Vec<EtcdOperation> {
    vec![get(LEADER), get(TERM)]
}

fn find<'a>(entries: &'a [EtcdEntry], key: &str) -> Option<&'a EtcdEntry> {
    entries.iter().find(|entry| entry.key == key)
}

/// The term that is stored.
fn term(entries: &[EtcdEntry]) -> Result<u64, String> {
    let Some(entry) = find(entries, TERM) else { return Ok(0) };
    let text = std::str::from_utf8(&entry.value).ok();
    let digits = text.filter(|text| text.len() == 16 && text.bytes().all(|it| it.is_ascii_digit()));
    digits.and_then(|text| text.parse().ok()).ok_or_else(|| {
        let found = String::from_utf8_lossy(&entry.value).chars().take(40).collect::<String>();
        format!("its key {TERM:?} has {found:?}, which is no term of 16 digits")
    })
}
