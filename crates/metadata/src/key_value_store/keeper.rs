//! The thread that looks after an engine's entries: it lets them live on, and puts back those that are
//! gone, because they expired or the server has forgotten them.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::own::{Entry, Kind};
use super::{Shared, extras, names};
use crate::{KeyValue, RpcMeta, StoreError};

/// After so long it is tried again when the server has failed.
const PAUSE: Duration = Duration::from_secs(2);

/// Runs until the store is dropped.
pub(super) fn run<K: KeyValue>(shared: &Arc<Shared<K>>) {
    let interval = shared.config.refresh_interval;
    let mut next = Instant::now() + interval;
    let mut failing = false;
    while let Some(only_due) = shared.wait_for_work(next, failing) {
        let result = shared.keep_all(only_due);
        let now = Instant::now();
        match result {
            Ok(()) => {
                if std::mem::take(&mut failing) {
                    tracing::info!(
                        store = shared.server.uri(),
                        "the metadata server is there again"
                    );
                }
                next = if only_due { next } else { now + interval };
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "entries will be looked after when the server can be reached");
                }
                next = now + PAUSE.min(interval);
            }
        }
    }
}

impl<K: KeyValue> Shared<K> {
    /// Waits until `next`, or until something is due; whether it is only that. `None` at the end.
    fn wait_for_work(&self, next: Instant, failing: bool) -> Option<bool> {
        let mut own = self.own();
        loop {
            if own.stopped {
                return None;
            }
            let left = next.saturating_duration_since(Instant::now());
            // What is due is not to be tried without a pause.
            if left.is_zero() || (own.hurry && !failing) {
                own.hurry = false;
                return Some(!left.is_zero());
            }
            let waited = self.changed.wait_timeout(own, left);
            (own, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Looks after each entry. The error is that the server cannot be reached.
    fn keep_all(&self, only_due: bool) -> Result<(), StoreError> {
        let keys = self.own().keys(only_due);
        for key in keys {
            match self.keep(&key) {
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => tracing::error!(%error, key, "an entry cannot be kept"),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    fn keep(&self, key: &str) -> Result<(), StoreError> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = self.own().entry(key) else { return Ok(()) };
        match &entry.kind {
            Kind::Address(own) => self.keep_address(key, own, &entry),
            Kind::Segment if self.own().lost(&entry.name).is_some() => Ok(()),
            Kind::Segment
                if !entry.due && self.has_ours(key, &entry)? && self.server.refresh(key)? =>
            {
                Ok(())
            }
            Kind::Segment => {
                if !entry.due {
                    tracing::warn!(key, store = self.server.uri(), "it was gone and is put back");
                }
                self.write_entry(key, entry.clone())
            }
        }
    }

    /// Whether the server has what it was given last, and not what another engine has put there since.
    fn has_ours(&self, key: &str, entry: &Entry) -> Result<bool, StoreError> {
        let now = self.server.get(key)?;
        Ok(now
            .zip(entry.written.as_ref())
            .is_some_and(|(now, written)| extras::holds(&now, written)))
    }

    fn keep_address(&self, key: &str, own: &RpcMeta, entry: &Entry) -> Result<(), StoreError> {
        let now = self.server.get(key)?;
        let is_own = now.as_ref().is_some_and(|now| {
            names::read_address(now).is_ok_and(|now| {
                let other = now.incarnation.is_some() && now.incarnation != own.incarnation;
                now.address == own.address && !other
            })
        });
        if is_own && !entry.due && self.server.refresh(key)? {
            return Ok(());
        }
        if now.is_none() && entry.written.is_some() {
            tracing::warn!(key, store = self.server.uri(), "it was gone and is put back");
        }
        match self.write_entry(key, entry.clone()) {
            Err(StoreError::Taken { name, store, holder, sign }) => {
                if self.own().lose(key, holder.clone()) {
                    let error = StoreError::Taken { name, store, holder, sign };
                    tracing::error!(%error, "peers do not find this engine any more");
                }
                Ok(())
            }
            result => result,
        }
    }

    /// Makes the server have what is wanted. `writing` is held.
    pub(super) fn write_entry(&self, key: &str, entry: Entry) -> Result<(), StoreError> {
        if let Kind::Address(own) = &entry.kind {
            self.claim(key, own, &entry)?;
            self.own().written(key, entry.wanted, entry.extras);
            return Ok(());
        }
        if let Some(holder) = self.own().lost(&entry.name) {
            let (name, store) = (entry.name, self.server.uri().to_owned());
            return Err(StoreError::Taken { name, store, holder, sign: "took it over" });
        }
        let mut added = entry.extras;
        if let Some(written) = &entry.written
            && let Some(now) = self.server.get(key)?
            && extras::same_engine(&now, written)
        {
            added = extras::added(&now, written);
        }
        let text = extras::with(&entry.wanted, &added, self.server.limit());
        self.server.put(key, &text)?;
        self.own().written(key, entry.wanted, added);
        Ok(())
    }
}
