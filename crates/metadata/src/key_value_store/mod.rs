//! A store on a server that keeps values by keys: `mooncake/ram/<name>` has a segment's descriptor, and
//! `mooncake/rpc_meta/<name>` says where its engine answers.
//!
//! An engine's entries are what it wants there (`own.rs`). Who publishes waits until the server has it; a
//! thread looks after all of them from then on (`keeper.rs`).

mod claim;
mod extras;
mod keeper;
mod names;
mod own;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use millstream_net::ends_between_forks;

use self::names::Names;
use self::own::{Entry, Kind, Own};
use crate::{
    Client, ClientConfig, FileName, KeyValue, KeyValueError, KeyValueErrorKind, REFRESH_INTERVAL,
    RedisLogin, RpcMeta, SegmentDesc, Store, StoreError, TlsFiles,
};

/// The first pause before a call is tried again, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Addresses that are remembered for times when the server cannot be reached.
const MAX_KNOWN: usize = 4096;

/// For so long after the server has failed, what is remembered is taken without asking it.
const OUTAGE: Duration = Duration::from_secs(1);

/// Limits of a [`KeyValueStore`].
#[derive(Clone, Debug)]
pub struct KeyValueStoreConfig {
    /// Clusters with different names share a server (`MC_METADATA_CLUSTER_ID`). Mostly empty.
    pub cluster: String,
    /// How it is asked whether an engine is there.
    pub client: ClientConfig,
    /// What TLS towards an `https://`, `etcds://`, `rediss://` or `memcacheds://` server is made with.
    pub tls: TlsFiles,
    /// Who it is towards Redis, where the URI does not say so.
    pub redis: RedisLogin,
    /// How often entries are looked after.
    pub refresh_interval: Duration,
    /// For how long a call that fails is tried again.
    pub patience: Duration,
}

impl Default for KeyValueStoreConfig {
    fn default() -> Self {
        Self {
            cluster: String::new(),
            client: ClientConfig {
                connect_timeout: Duration::from_secs(2),
                call_timeout: Duration::from_millis(2500),
                ..ClientConfig::default()
            },
            tls: TlsFiles::default(),
            redis: RedisLogin::default(),
            refresh_interval: REFRESH_INTERVAL,
            patience: Duration::from_secs(3),
        }
    }
}

/// A store on a server. Dropping it ends its thread; entries are taken back before that, or left.
pub struct KeyValueStore<K: KeyValue> {
    shared: Arc<Shared<K>>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

struct Shared<K> {
    server: K,
    config: KeyValueStoreConfig,
    names: Names,
    client: Client,
    own: Mutex<Own>,
    changed: Condvar,
    /// Held by who writes, so that the server gets what is wanted in that order.
    writing: Mutex<()>,
    known: Mutex<HashMap<String, RpcMeta>>,
    failed: Mutex<Option<Instant>>,
}

impl<K: KeyValue> KeyValueStore<K> {
    /// A store on this server. Asks it nothing yet.
    pub fn new(server: K, config: KeyValueStoreConfig) -> Self {
        let shared = Shared {
            server,
            names: Names::new(&config.cluster),
            client: Client::new(config.client.clone()),
            config,
            own: Mutex::default(),
            changed: Condvar::new(),
            writing: Mutex::default(),
            known: Mutex::default(),
            failed: Mutex::default(),
        };
        Self { shared: Arc::new(shared), keeper: Mutex::default() }
    }

    /// Starts the thread that looks after entries, if it does not run.
    fn start_keeper(&self) -> Result<(), StoreError> {
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        if keeper.is_none() {
            let shared = Arc::clone(&self.shared);
            let builder = thread::Builder::new().name("metadata".to_owned());
            let started = builder.spawn(ends_between_forks(move || keeper::run(&shared)));
            *keeper = Some(started.map_err(|error| {
                let what = format!("no thread can be started to look after entries: {error}");
                self.shared.error("", KeyValueErrorKind::Unreachable(what))
            })?);
        }
        Ok(())
    }

    /// Makes the server have this. When that fails, what was wanted before is again.
    fn publish(&self, key: &str, name: &str, kind: Kind, text: Vec<u8>) -> Result<(), StoreError> {
        self.start_keeper()?;
        let wanted: Arc<[u8]> = text.into();
        let before = self.shared.own().want(key, name, kind, Arc::clone(&wanted));
        let result = self.shared.retrying(|| self.shared.write(key));
        if result.is_err() {
            self.shared.own().want_again(key, &wanted, before);
            self.shared.changed.notify_all();
        }
        result
    }

    fn segment_text(&self, descriptor: &SegmentDesc) -> Result<(String, Vec<u8>), StoreError> {
        names::check_own(&descriptor.name)?;
        let key = self.shared.names.segment(&descriptor.name)?;
        let text = descriptor.to_json();
        let (length, limit) = (text.len(), self.segment_limit());
        if length > limit {
            return Err(StoreError::TooLong { name: descriptor.name.clone(), length, limit });
        }
        Ok((key, text))
    }
}

impl<K: KeyValue> Shared<K> {
    fn own(&self) -> MutexGuard<'_, Own> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, key: &str, kind: KeyValueErrorKind) -> StoreError {
        let uri = self.server.uri().to_owned();
        KeyValueError { uri, key: key.to_owned(), kind }.into()
    }

    /// Makes the server have what is wanted under this key.
    fn write(&self, key: &str) -> Result<(), StoreError> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = self.own().entry(key) else { return Ok(()) };
        match entry.due {
            true => self.write_entry(key, entry),
            // The keeper was faster.
            false => Ok(()),
        }
    }

    /// Takes an entry back, if it is this engine's.
    fn withdraw(&self, key: &str) -> Result<(), StoreError> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut own = self.own();
        let Some(entry) = own.entry(key) else { return Ok(()) };
        let lost = own.lost(&entry.name).is_some();
        own.remove(key);
        // Whoever ends does not wait twice for a server that is not there.
        let is_down = own.left.is_some_and(|left| left.elapsed() < OUTAGE);
        drop(own);
        if lost || is_down {
            return Ok(());
        }
        let result = self.note(self.remove(key, &entry).map_err(StoreError::from));
        if result.as_ref().is_err_and(StoreError::is_transient) {
            tracing::warn!(store = self.server.uri(), "entries stay there: it cannot be reached");
            self.own().left = Some(Instant::now());
        }
        result
    }

    fn remove(&self, key: &str, entry: &Entry) -> Result<(), KeyValueError> {
        let Some(now) = self.server.get(key)? else { return Ok(()) };
        // Another engine may have taken the name since it was looked at.
        let is_ours = match entry.kind {
            Kind::Address(_) => *now == *entry.wanted,
            Kind::Segment => extras::same_engine(&now, &entry.wanted),
        };
        if is_ours { self.server.remove(key) } else { Ok(()) }
    }

    /// Tries again while that may help, for as long as there is patience.
    fn retrying<T>(
        &self,
        mut call: impl FnMut() -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let start = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            match self.note(call()) {
                Err(error) if error.is_transient() => {
                    if start.elapsed() + pause >= self.config.patience || !self.pause(pause) {
                        return Err(error);
                    }
                    tracing::debug!(%error, "trying again");
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                result => return result,
            }
        }
    }

    /// Waits so long; `false` when the store ends.
    fn pause(&self, pause: Duration) -> bool {
        let own = self.own();
        let waited = self.changed.wait_timeout_while(own, pause, |own| !own.stopped);
        !waited.unwrap_or_else(PoisonError::into_inner).0.stopped
    }

    /// Takes note of whether the server can be reached.
    fn note<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        let failed = matches!(&result, Err(error) if error.is_transient()).then(Instant::now);
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = failed;
        result
    }

    fn has_just_failed(&self) -> bool {
        let failed = *self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.is_some_and(|failed| failed.elapsed() < OUTAGE)
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, RpcMeta>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask_address(&self, key: &str, name: &str) -> Result<RpcMeta, StoreError> {
        let text = self.server.get(key)?.ok_or_else(|| self.not_found(name))?;
        names::read_address(&text).map_err(|what| {
            self.error(key, KeyValueErrorKind::Meaning(format!("no address of an engine: {what}")))
        })
    }

    fn not_found(&self, name: &str) -> StoreError {
        StoreError::NotFound { name: name.to_owned(), store: self.server.uri().to_owned() }
    }
}

impl<K: KeyValue> Store for KeyValueStore<K> {
    fn publish_segment(&self, descriptor: &SegmentDesc) -> Result<(), StoreError> {
        let (key, text) = self.segment_text(descriptor)?;
        self.publish(&key, &descriptor.name, Kind::Segment, text)
    }

    fn publish_segment_later(&self, descriptor: &SegmentDesc) {
        let prepared = self.start_keeper().and_then(|()| self.segment_text(descriptor));
        match prepared {
            Ok((key, text)) => {
                let mut own = self.shared.own();
                own.want(&key, &descriptor.name, Kind::Segment, text.into());
                own.hurry = true;
                drop(own);
                self.shared.changed.notify_all();
            }
            Err(error) => tracing::error!(%error, "the descriptor is not published"),
        }
    }

    fn withdraw_segment(&self, name: &str) -> Result<(), StoreError> {
        self.shared.withdraw(&self.shared.names.segment(name)?)
    }

    fn segment(&self, name: &str) -> Result<SegmentDesc, StoreError> {
        let shared = &self.shared;
        let key = shared.names.segment(name)?;
        let text = shared.retrying(|| Ok(shared.server.get(&key)?))?;
        let text = text.ok_or_else(|| shared.not_found(name))?;
        let descriptor = SegmentDesc::from_json(&text).map_err(|error| {
            let origin = format!("metadata server {}, key {key:?}", shared.server.uri());
            StoreError::Descriptor { origin, error }
        })?;
        if descriptor.name != name {
            let other: String = descriptor.name.chars().take(80).collect();
            let what = format!("the descriptor of another segment, {other:?}");
            return Err(shared.error(&key, KeyValueErrorKind::Meaning(what)));
        }
        Ok(descriptor)
    }

    fn publish_address(&self, name: &str, meta: &RpcMeta) -> Result<(), StoreError> {
        names::check_own(name)?;
        let key = self.shared.names.address(name)?;
        self.publish(&key, name, Kind::Address(meta.clone()), names::write_address(meta))
    }

    fn withdraw_address(&self, name: &str) -> Result<(), StoreError> {
        self.shared.withdraw(&self.shared.names.address(name)?)
    }

    fn address(&self, name: &str) -> Result<RpcMeta, StoreError> {
        if name.starts_with(FileName::PREFIX) {
            let FileName { server, .. } = name.parse()?;
            return Ok(RpcMeta { address: server, incarnation: None });
        }
        let shared = &self.shared;
        let key = shared.names.address(name)?;
        let known = shared.known().get(name).cloned();
        let asked = match &known {
            Some(known) if shared.has_just_failed() => return Ok(known.clone()),
            // Once is enough, where there is something else.
            Some(_) => shared.note(shared.ask_address(&key, name)),
            None => shared.retrying(|| shared.ask_address(&key, name)),
        };
        match (asked, known) {
            (Ok(meta), _) => {
                let mut known = shared.known();
                if known.len() >= MAX_KNOWN && !known.contains_key(name) {
                    known.clear();
                }
                known.insert(name.to_owned(), meta.clone());
                Ok(meta)
            }
            (Err(error), Some(known)) if error.is_transient() => {
                tracing::debug!(%error, name, "its last known address is taken");
                Ok(known)
            }
            (Err(error), _) => {
                shared.known().remove(name);
                Err(error)
            }
        }
    }

    fn known_address(&self, name: &str, incarnation: Option<u64>) -> Option<RpcMeta> {
        let known = self.shared.known().get(name).cloned()?;
        // Another start of it may answer elsewhere. Mooncake does not say which it is.
        (known.incarnation.is_some() && known.incarnation == incarnation).then_some(known)
    }

    fn local_segment(&self) -> Option<Arc<[u8]>> {
        None
    }

    fn segment_limit(&self) -> usize {
        self.shared.server.limit()
    }
}

impl<K: KeyValue> Drop for KeyValueStore<K> {
    fn drop(&mut self) {
        self.shared.own().stopped = true;
        self.shared.changed.notify_all();
        if let Some(keeper) = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = keeper.join();
        }
    }
}

impl<K: KeyValue> fmt::Debug for KeyValueStore<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KeyValueStore").field(&self.shared.server.uri()).finish()
    }
}
