//! What an engine wants the server to have, and what is known of whether it has.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::extras::Fields;
use crate::{HostPort, RpcMeta};

/// What an entry is of.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    /// Where the engine of this name answers.
    Address(RpcMeta),
    /// A descriptor.
    Segment,
}

/// An entry of this engine.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// What the server is to have.
    pub(super) wanted: Arc<[u8]>,
    /// What it was given last; `None` where it may never have had anything of this engine.
    pub(super) written: Option<Arc<[u8]>>,
    /// Fields that others have added to that.
    pub(super) extras: Fields,
    /// Whether it may not have what it is to have.
    pub(super) due: bool,
    /// The other engine that has taken the name.
    pub(super) lost: Option<HostPort>,
}

/// All entries of this engine, by their keys.
#[derive(Debug, Default)]
pub(super) struct Own {
    entries: BTreeMap<String, Entry>,
    /// Whether the keeper is not to wait for its time.
    pub(super) hurry: bool,
    pub(super) stopped: bool,
    /// When an entry could not be taken back.
    pub(super) left: Option<Instant>,
}

impl Own {
    /// Wants this from now on; what was wanted before.
    pub(super) fn want(
        &mut self,
        key: &str,
        name: &str,
        kind: Kind,
        wanted: Arc<[u8]>,
    ) -> Option<Arc<[u8]>> {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.due = true;
            entry.kind = kind;
            return Some(std::mem::replace(&mut entry.wanted, wanted));
        }
        let entry = Entry {
            name: name.to_owned(),
            kind,
            wanted,
            written: None,
            extras: Fields::new(),
            due: true,
            lost: None,
        };
        self.entries.insert(key.to_owned(), entry);
        None
    }

    /// Wants again what was wanted before, unless something else is wanted by now.
    pub(super) fn want_again(&mut self, key: &str, failed: &Arc<[u8]>, before: Option<Arc<[u8]>>) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        if !Arc::ptr_eq(&entry.wanted, failed) {
            return;
        }
        match before {
            Some(before) => {
                // The server may have the other.
                (entry.wanted, entry.due) = (before, true);
                self.hurry = true;
            }
            None => drop(self.entries.remove(key)),
        }
    }

    pub(super) fn entry(&self, key: &str) -> Option<Entry> {
        self.entries.get(key).cloned()
    }

    pub(super) fn remove(&mut self, key: &str) -> Option<Entry> {
        self.entries.remove(key)
    }

    /// The server has this now.
    pub(super) fn written(&mut self, key: &str, written: Arc<[u8]>, extras: Fields) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.due &= !Arc::ptr_eq(&entry.wanted, &written);
            (entry.written, entry.extras, entry.lost) = (Some(written), extras, None);
        }
    }

    /// Another engine has the name of an address; whether that is news.
    pub(super) fn lose(&mut self, key: &str, holder: HostPort) -> bool {
        let entry = self.entries.get_mut(key);
        entry.is_some_and(|entry| entry.lost.replace(holder).is_none())
    }

    /// The other engine that has taken this name, if one has.
    pub(super) fn lost(&self, name: &str) -> Option<HostPort> {
        let mut of_name = self.entries.values().filter(|entry| entry.name == name);
        of_name.find_map(|entry| entry.lost.clone())
    }

    /// Addresses first: who has no right to its name is to have no descriptor there.
    pub(super) fn keys(&self, only_due: bool) -> Vec<String> {
        let entries = self.entries.iter().filter(|(_, entry)| entry.due || !only_due);
        let mut keys: Vec<_> =
            entries.map(|(key, entry)| (entry.kind == Kind::Segment, key)).collect();
        keys.sort_unstable();
        keys.into_iter().map(|(_, key)| key.clone()).collect()
    }
}
