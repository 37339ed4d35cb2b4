//! The entries of a metadata server, in memory and, if asked for, on disk.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::body::Bytes;
use tokio::sync::Mutex as AsyncMutex;

use super::Limits;
use super::log::{Entries, Log};

/// What a key has in it that says where an engine answers: such an entry is not written over.
const ADDRESS: &str = "rpc_meta";

/// What became of a change.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Outcome {
    Done,
    /// The value is there already.
    Unchanged,
    /// An address is not written over.
    Duplicate,
    NotFound,
    /// A limit is reached.
    Full(String),
    /// The disk does not take it.
    Failed(String),
}

/// Entries that changes are made to one after the other. They are read as they are on disk.
#[derive(Clone, Debug)]
pub(super) struct Table {
    entries: Arc<Mutex<Counted>>,
    /// Held by who changes something.
    log: Arc<AsyncMutex<Option<Log>>>,
    limits: Limits,
}

#[derive(Debug)]
struct Counted {
    entries: Entries,
    /// Bytes of all keys and values.
    bytes: usize,
}

fn size(key: &str, value: &[u8]) -> usize {
    key.len() + value.len()
}

impl Table {
    pub(super) fn new(limits: Limits, folder: Option<&Path>) -> io::Result<Self> {
        let longest = limits.key_length + limits.value_length;
        let opened = folder.map(|folder| Log::open(folder, longest)).transpose()?;
        let (log, entries) = opened.map_or((None, Entries::new()), |(log, it)| (Some(log), it));
        let bytes = entries.iter().map(|(key, value)| size(key, value)).sum();
        let entries = Arc::new(Mutex::new(Counted { entries, bytes }));
        Ok(Self { entries, log: Arc::new(AsyncMutex::new(log)), limits })
    }

    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, key: &str) -> Option<Bytes> {
        self.lock().entries.get(key).cloned()
    }

    pub(super) fn len(&self) -> usize {
        self.lock().entries.len()
    }

    /// Puts a value, or takes a key away. It is done when this returns. Who gives up before his turn has changed
    /// nothing; from then on it goes on when nobody waits for it any more. So what waits has a connection.
    pub(super) async fn change(&self, key: String, value: Option<Bytes>) -> Outcome {
        let mut log = Arc::clone(&self.log).lock_owned().await;
        let table = self.clone();
        let changed =
            tokio::task::spawn_blocking(move || table.apply(log.as_mut(), &key, value)).await;
        changed.unwrap_or_else(|error| Outcome::Failed(error.to_string()))
    }

    fn apply(&self, log: Option<&mut Log>, key: &str, value: Option<Bytes>) -> Outcome {
        let before = self.get(key);
        if let Some(refusal) = self.refusal(key, value.as_deref(), before.as_deref()) {
            return refusal;
        }
        let mut log = log;
        if let Some(log) = &mut log
            && let Err(error) = log.append(key, value.as_deref(), before.as_deref())
        {
            tracing::error!(%error, "an entry cannot be written");
            return Outcome::Failed(error.to_string());
        }
        let mut counted = self.lock();
        counted.bytes -= before.map_or(0, |before| size(key, &before));
        match value {
            Some(value) => {
                counted.bytes += size(key, &value);
                counted.entries.insert(key.to_owned(), value);
            }
            None => drop(counted.entries.remove(key)),
        }
        if let Some(log) = log.filter(|log| log.wants_compaction()) {
            let entries = counted.entries.clone();
            drop(counted);
            if let Err(error) = log.compact(&entries) {
                tracing::error!(%error, "the file of entries cannot be written anew");
            }
        }
        Outcome::Done
    }

    fn refusal(&self, key: &str, value: Option<&[u8]>, before: Option<&[u8]>) -> Option<Outcome> {
        let Some(value) = value else {
            return before.is_none().then_some(Outcome::NotFound);
        };
        if let Some(before) = before.filter(|_| key.contains(ADDRESS)) {
            return Some(if before == value { Outcome::Unchanged } else { Outcome::Duplicate });
        }
        let Limits { keys, bytes, .. } = self.limits;
        let counted = self.lock();
        if before.is_none() && counted.entries.len() >= keys {
            return Some(Outcome::Full(format!("there are {keys} keys, as many as may be")));
        }
        let after = counted.bytes - before.map_or(0, |it| size(key, it)) + size(key, value);
        (after > bytes)
            .then(|| Outcome::Full(format!("all values together may have {bytes} bytes")))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const LIMITS: Limits =
        Limits { key_length: 100, value_length: 100, keys: 3, bytes: 60, connections: 1 };

    fn put(table: &Table, key: &str, value: &'static str) -> Outcome {
        table.apply(None, key, Some(Bytes::from_static(value.as_bytes())))
    }

    #[test]
    fn addresses_are_not_written_over_and_others_are() {
        let table = Table::new(LIMITS, None).unwrap();
        assert_eq!(put(&table, "m/rpc_meta/a", "1"), Outcome::Done);
        assert_eq!(put(&table, "m/rpc_meta/a", "1"), Outcome::Unchanged);
        assert_eq!(put(&table, "m/rpc_meta/a", "2"), Outcome::Duplicate);
        assert_eq!(table.apply(None, "m/rpc_meta/a", None), Outcome::Done);
        assert_eq!(table.apply(None, "m/rpc_meta/a", None), Outcome::NotFound);
        assert_eq!(put(&table, "m/rpc_meta/a", "2"), Outcome::Done);
        assert_eq!(put(&table, "m/ram/a", "1"), Outcome::Done);
        assert_eq!(put(&table, "m/ram/a", "2"), Outcome::Done);
        assert_eq!(table.get("m/ram/a").unwrap(), "2");
        assert_eq!(table.len(), 2);
    }

    #[test]
    fn there_is_a_limit_on_keys_and_bytes() {
        let table = Table::new(LIMITS, None).unwrap();
        for key in ["a", "b", "c"] {
            assert_eq!(put(&table, key, "0123456789"), Outcome::Done);
        }
        assert!(matches!(put(&table, "d", ""), Outcome::Full(_)));
        // As much as there is in all: 33 bytes, and 27 more.
        let more = "0123456789012345678901234567890123456";
        assert_eq!(put(&table, "a", more), Outcome::Done);
        assert!(matches!(put(&table, "b", "0123456789x"), Outcome::Full(_)));
        assert_eq!(put(&table, "b", "012345678"), Outcome::Done);
        assert_eq!(table.apply(None, "a", None), Outcome::Done);
        assert_eq!(put(&table, "d", more), Outcome::Done);
    }

    /// Whose connection ends before his turn: what he sent is not kept.
    #[tokio::test]
    async fn who_gives_up_before_his_turn_leaves_nothing() {
        let table = Table::new(LIMITS, None).unwrap();
        let turn = Arc::clone(&table.log).lock_owned().await;
        for key in ["a", "b"] {
            let change = table.change(key.to_owned(), Some(Bytes::from_static(b"1")));
            assert!(timeout(Duration::from_millis(20), change).await.is_err());
        }
        drop(turn);
        let last = table.change("c".to_owned(), Some(Bytes::from_static(b"1"))).await;
        assert_eq!((last, table.len()), (Outcome::Done, 1));
    }
}
