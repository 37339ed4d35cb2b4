//! The connections that this engine has made with a device: whose completions are whose, and which
//! of them is closed to make room for another.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use millstream_transfer_core::RailId;
use millstream_verbs::Qpn;

use super::connection::Connection;
use super::peer::Peer;
use super::sieve::Sieve;
use crate::FailureReason;

/// A queue pair of a connection.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) peer: Weak<Peer>,
    pub(super) rail: RailId,
    pub(super) epoch: u64,
    /// Its index in its connection.
    pub(super) queue_pair: usize,
}

/// The connections of a device, at most so many.
#[derive(Debug)]
pub(super) struct Links {
    limit: usize,
    count: Arc<AtomicUsize>,
    table: RwLock<Table>,
}

/// Room for one connection. Dropping it gives it back.
#[derive(Debug)]
pub(super) struct Place(Arc<AtomicUsize>);

#[derive(Debug, Default)]
struct Table {
    by_number: HashMap<Qpn, Pair>,
    /// All connections, by the order in which they were made.
    connections: HashMap<u64, Entry>,
    sieve: Sieve,
    /// The last number of a connection.
    last: u64,
}

/// A queue pair of a connection.
#[derive(Debug)]
struct Pair {
    link: Link,
    /// The number of its connection.
    connection: u64,
    /// Something has completed since the sieve looked.
    used: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Entry {
    link: Link,
    _place: Place,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Links {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, count: Arc::default(), table: RwLock::default() }
    }

    /// Finds room for one more, if need be by closing one that is idle: the first that was not used
    /// since the search was last there (`sieve.rs`). Not under a peer's lock.
    pub(super) fn make_room(&self, device: &str) -> Result<Place, FailureReason> {
        let mut closed = 0;
        loop {
            let limit = self.limit;
            let one_more = |count: usize| (count < limit).then_some(count + 1);
            if self.count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).is_ok() {
                return Ok(Place(Arc::clone(&self.count)));
            }
            // Each that is closed may be taken by another thread.
            if closed == limit || !self.close_one() {
                return Err(FailureReason::Limit(format!(
                    "device {device} is connected to {limit} NICs already, and all are in use"
                )));
            }
            closed += 1;
        }
    }

    /// Closes an idle connection; whether there was one.
    fn close_one(&self) -> bool {
        // Those that are not idle are passed, and perhaps come once more. The lock is not held meanwhile.
        let connections = self.read().connections.len();
        for _ in 0..2 * connections {
            let mut table = self.write();
            let Some(number) = table.sieve.next_unused() else { return false };
            let Some(link) = table.connections.get(&number).map(|entry| entry.link.clone()) else {
                continue;
            };
            drop(table);
            if let Some(peer) = link.peer.upgrade()
                && peer.close_if_idle(link.rail, link.epoch)
            {
                return true;
            }
        }
        false
    }

    /// Completions of the connection's queue pairs are for this link from now on.
    pub(super) fn add(&self, connection: &Connection, link: &Link, place: Place) {
        let mut table = self.write();
        table.last += 1;
        let number = table.last;
        let used = table.sieve.insert(number);
        for (queue_pair, pair) in connection.queue_pairs.iter().enumerate() {
            let link = Link { queue_pair, ..link.clone() };
            let used = Arc::clone(&used);
            table.by_number.insert(pair.number(), Pair { link, connection: number, used });
        }
        table.connections.insert(number, Entry { link: link.clone(), _place: place });
    }

    /// Completions of the connection's queue pairs are for nobody any more.
    pub(super) fn remove(&self, connection: &Connection) {
        let mut table = self.write();
        for pair in &connection.queue_pairs {
            if let Some(pair) = table.by_number.remove(&pair.number()) {
                table.connections.remove(&pair.connection);
                table.sieve.remove(pair.connection);
            }
        }
    }

    /// Whose a queue pair is.
    pub(super) fn find(&self, number: Qpn) -> Option<(Arc<Peer>, Link)> {
        let table = self.read();
        let Pair { link, used, .. } = table.by_number.get(&number)?;
        used.store(true, Ordering::Relaxed);
        Some((link.peer.upgrade()?, link.clone()))
    }

    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}
