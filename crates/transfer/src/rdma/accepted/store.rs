//! What is known of those that are connected, under one lock, and what [`Target`] decides about them.
//!
//! Whoever gives the target an input takes all its outputs before the lock is released. Queue pairs are
//! made and reset with the lock released: meanwhile their entry says so.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::net::SocketAddr;
use std::sync::Arc;

use millstream_metadata::Gid;
use millstream_transfer_core::{Initiator, Target, TargetOutput};
use millstream_verbs::{Psn, ReceiveShare};

use super::super::connection::Connection;
use super::super::sieve::Sieve;

/// What bounds connections is their queue pairs. This is more than devices have of them.
const MAX_CONNECTIONS: usize = 1 << 16;

/// How many rails are remembered that are not connected any more.
const MAX_CLOSED: usize = 8192;

/// A connection of a peer: being made, there, or being closed.
pub(super) struct Entry {
    pub(super) epoch: u64,
    /// In the order in which they were accepted; of all that there ever were.
    pub(super) number: u64,
    pub(super) peer: Arc<Sender>,
    /// How many queue pairs of the device are its own.
    pub(super) queue_pairs: usize,
    pub(super) state: State,
}

/// Who asks for a connection, and what it is to be.
#[derive(Debug)]
pub(super) struct Sender {
    /// The peer's NIC, as it calls it.
    pub(super) nic_path: String,
    pub(super) gid: Gid,
    /// The device here.
    pub(super) device: String,
    /// The peer's queue pairs.
    pub(super) queue_pairs: Vec<u32>,
    /// Whether it numbers its connections.
    pub(super) numbered: bool,
    /// Where it is told what becomes of its connection, if it would understand.
    pub(super) told_at: Option<SocketAddr>,
}

pub(super) enum State {
    /// A thread makes its queue pairs.
    Making {
        /// It was closed meanwhile.
        unwanted: bool,
    },
    Open(Open),
    /// A thread resets its queue pairs.
    Closing,
}

pub(super) struct Open {
    pub(super) connection: Arc<Connection>,
    /// What the peer may have in flight to us.
    pub(super) _receive_share: Option<ReceiveShare>,
    /// It was asked whether it is there and has not answered yet.
    pub(super) asked: bool,
    /// What its queue pairs expected when they were last looked at.
    pub(super) receive_psn: Vec<Option<Psn>>,
}

/// A connection whose queue pairs are to be reset. [`Store::closed`] must follow, and before it, of those of
/// [`Store::carry_out`], [`Store::was_reset`].
pub(super) struct Ending {
    pub(super) initiator: Initiator,
    pub(super) epoch: u64,
    pub(super) open: Open,
}

/// A connection that is closed to make room.
pub(super) struct Evicted {
    pub(super) initiator: Initiator,
    pub(super) epoch: u64,
    pub(super) sender: Arc<Sender>,
}

/// Somebody who waits for the answer to a fence.
struct Fence {
    ticket: u64,
    initiator: Initiator,
    epoch: u64,
    confirmed: bool,
}

/// Queue pairs of one device that peers are connected to.
#[derive(Default)]
struct Place {
    used: usize,
    /// How many may be, as was said last.
    limit: usize,
    sieve: Sieve,
    /// Whether it was said that there are as many as may be, since there last were fewer.
    complained: bool,
}

/// Why a connection is not accepted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Denied {
    /// There was one of this number or a higher one, or it was fenced.
    Floor(u64),
    Full,
}

pub(super) struct Store {
    target: Target,
    entries: HashMap<Initiator, Entry>,
    /// Open ones.
    by_number: BTreeMap<u64, Initiator>,
    /// Requests that wait until the connection before is closed.
    wanted: HashMap<Initiator, (u64, Arc<Sender>)>,
    fences: Vec<Fence>,
    places: HashMap<String, Place>,
    /// The last number that was given.
    last: u64,
    pub(super) stopped: bool,
    /// Connections whose queue pairs are being reset by those who were given them.
    resetting: usize,
}

impl Store {
    pub(super) fn new() -> Self {
        Self {
            target: Target::new(MAX_CONNECTIONS, MAX_CLOSED),
            entries: HashMap::new(),
            by_number: BTreeMap::new(),
            wanted: HashMap::new(),
            fences: Vec::new(),
            places: HashMap::new(),
            last: 0,
            stopped: false,
            resetting: 0,
        }
    }

    /// The queue pairs of one that [`Store::carry_out`] has given are reset.
    pub(super) fn was_reset(&mut self) {
        self.resetting -= 1;
    }

    /// Whether all that were given are.
    pub(super) const fn all_are_reset(&self) -> bool {
        self.resetting == 0
    }

    /// A peer wants to connect. If it may, its entry is there once what was before is closed.
    pub(super) fn connect(
        &mut self,
        initiator: Initiator,
        epoch: u64,
        sender: &Arc<Sender>,
    ) -> Result<(), Denied> {
        if self.target.connect(initiator, epoch) {
            self.wanted.insert(initiator, (epoch, Arc::clone(sender)));
            return Ok(());
        }
        Err(match self.target.poll_output() {
            Some(TargetOutput::Refuse { floor, .. }) => Denied::Floor(floor),
            _ => Denied::Full,
        })
    }

    /// Whether a request still waits for its turn.
    pub(super) fn waits(&self, initiator: Initiator, epoch: u64) -> bool {
        self.wanted.get(&initiator).is_some_and(|&(wanted, _)| wanted == epoch)
    }

    /// A request does not wait any more.
    pub(super) fn gives_up(&mut self, initiator: Initiator, epoch: u64) {
        if self.waits(initiator, epoch) {
            self.wanted.remove(&initiator);
        }
    }

    /// Whether this connection is to be made now.
    pub(super) fn is_being_made(&self, initiator: Initiator, epoch: u64) -> bool {
        let making = |entry: &&Entry| matches!(entry.state, State::Making { unwanted: false });
        self.entry(initiator, epoch).filter(making).is_some()
    }

    /// Takes queue pairs of its device for a connection that is being made, if there are so many.
    pub(super) fn reserve(
        &mut self,
        initiator: Initiator,
        epoch: u64,
        count: usize,
        limit: usize,
    ) -> bool {
        let Some(entry) = self.entries.get_mut(&initiator).filter(|entry| entry.epoch == epoch)
        else {
            return false;
        };
        let place = self.places.entry(entry.peer.device.clone()).or_default();
        place.limit = limit;
        if place.used + count > limit {
            return false;
        }
        place.used += count;
        entry.queue_pairs = count;
        true
    }

    /// The connection on a device that is the next to make room, as far as was noted.
    pub(super) fn candidate(&mut self, device: &str) -> Option<(u64, Arc<Connection>)> {
        let number = self.places.get_mut(device)?.sieve.next_unused()?;
        self.open(number).map(|(.., open)| (number, Arc::clone(&open.connection)))
    }

    /// Whether a connection was used since it was last looked at, by what its queue pairs expect now.
    pub(super) fn was_used(&mut self, number: u64, receive_psn: Vec<Option<Psn>>) -> bool {
        let Some((.., open)) = self.open(number) else { return false };
        mem::replace(&mut open.receive_psn, receive_psn) != open.receive_psn
    }

    /// Closes a connection, to make room, if it is there still.
    pub(super) fn evict(&mut self, number: u64) -> Option<Evicted> {
        let initiator = *self.by_number.get(&number)?;
        let entry = &self.entries[&initiator];
        let device = &entry.peer.device;
        let place = self.places.get_mut(device)?;
        place.sieve.remove(number);
        let (peer, limit) = (&entry.peer.nic_path, place.limit);
        if mem::replace(&mut place.complained, true) {
            tracing::debug!(peer, device, "made room");
        } else {
            tracing::warn!(
                peer,
                device,
                limit,
                "as many queue pairs are connected as may be: made room"
            );
        }
        let (epoch, sender) = (entry.epoch, Arc::clone(&entry.peer));
        self.target.close(initiator, epoch);
        Some(Evicted { initiator, epoch, sender })
    }

    /// A connection is there, unless it was closed while it was made: then it is returned.
    pub(super) fn made(
        &mut self,
        initiator: Initiator,
        epoch: u64,
        open: Open,
    ) -> Result<(), Ending> {
        if self.stopped || !self.is_being_made(initiator, epoch) {
            return Err(Ending { initiator, epoch, open });
        }
        if let Some(entry) = self.entries.get_mut(&initiator) {
            entry.state = State::Open(open);
            self.by_number.insert(entry.number, initiator);
            let place = self.places.entry(entry.peer.device.clone()).or_default();
            place.sieve.insert(entry.number);
        }
        Ok(())
    }

    /// A peer wants that nothing of its rail up to this epoch arrive any more. Returns by what name to
    /// ask for the answer.
    pub(super) fn fence(&mut self, initiator: Initiator, epoch: u64) -> u64 {
        self.target.fence(initiator, epoch);
        // It will not be accepted.
        if self.wanted.get(&initiator).is_some_and(|&(wanted, _)| wanted <= epoch) {
            self.wanted.remove(&initiator);
        }
        self.last += 1;
        self.fences.push(Fence { ticket: self.last, initiator, epoch, confirmed: false });
        self.last
    }

    pub(super) fn is_confirmed(&self, ticket: u64) -> bool {
        self.fences.iter().any(|fence| fence.ticket == ticket && fence.confirmed)
    }

    pub(super) fn forget_fence(&mut self, ticket: u64) {
        self.fences.retain(|fence| fence.ticket != ticket);
    }

    /// A connection is not wanted any more.
    pub(super) fn close(&mut self, initiator: Initiator, epoch: u64) {
        self.target.close(initiator, epoch);
    }

    /// The queue pairs of a connection are gone, or were never made.
    pub(super) fn closed(&mut self, initiator: Initiator, epoch: u64) {
        if self.entry(initiator, epoch).is_some()
            && let Some(entry) = self.entries.remove(&initiator)
        {
            self.by_number.remove(&entry.number);
            if let Some(place) = self.places.get_mut(&entry.peer.device) {
                place.used -= entry.queue_pairs;
                place.sieve.remove(entry.number);
            }
        }
        // Of one that failed while it was made the target has not heard yet.
        self.target.close(initiator, epoch);
        self.target.closed(initiator, epoch);
    }

    /// Does what the target wants. Returns what is to be reset, with the lock released.
    #[must_use]
    pub(super) fn carry_out(&mut self) -> Vec<Ending> {
        let mut endings = Vec::new();
        while let Some(output) = self.target.poll_output() {
            match output {
                TargetOutput::Accept { initiator, epoch } => self.accept(initiator, epoch),
                TargetOutput::Close { initiator, epoch } => {
                    endings.extend(self.end(initiator, epoch));
                }
                TargetOutput::Confirm { initiator, epoch } => {
                    let answered =
                        |fence: &&mut Fence| fence.initiator == initiator && fence.epoch <= epoch;
                    self.fences.iter_mut().filter(answered).for_each(|f| f.confirmed = true);
                }
                // Answers to `connect`, which takes them itself.
                TargetOutput::Refuse { .. } | TargetOutput::Full { .. } => {}
            }
        }
        self.resetting += endings.len();
        endings
    }

    /// It is the turn of a connection. If nobody waits for it any more, it is closed again.
    fn accept(&mut self, initiator: Initiator, epoch: u64) {
        let wanted = self.wanted.remove(&initiator).filter(|&(wanted, _)| wanted == epoch);
        let Some((_, peer)) = wanted else {
            self.target.close(initiator, epoch);
            return;
        };
        self.last += 1;
        let state = State::Making { unwanted: false };
        let entry = Entry { epoch, number: self.last, peer, queue_pairs: 0, state };
        self.entries.insert(initiator, entry);
    }

    /// A connection is to be closed.
    fn end(&mut self, initiator: Initiator, epoch: u64) -> Option<Ending> {
        let entry = self.entries.get_mut(&initiator).filter(|entry| entry.epoch == epoch);
        let Some(entry) = entry else {
            self.target.closed(initiator, epoch);
            return None;
        };
        match mem::replace(&mut entry.state, State::Closing) {
            State::Open(open) => {
                let number = entry.number;
                self.by_number.remove(&number);
                if let Some(place) = self.places.get_mut(&entry.peer.device) {
                    place.sieve.remove(number);
                }
                Some(Ending { initiator, epoch, open })
            }
            // Whoever makes it finds that.
            State::Making { .. } => {
                entry.state = State::Making { unwanted: true };
                None
            }
            State::Closing => None,
        }
    }

    /// Ends everything: returns all that is open.
    pub(super) fn stop(&mut self) -> Vec<(Initiator, Arc<Sender>, Open)> {
        self.stopped = true;
        self.wanted.clear();
        self.by_number.clear();
        self.places.clear();
        let open = |(initiator, entry): (Initiator, Entry)| match entry.state {
            State::Open(open) => Some((initiator, entry.peer, open)),
            _ => None,
        };
        self.entries.drain().filter_map(open).collect()
    }

    pub(super) fn entry(&self, initiator: Initiator, epoch: u64) -> Option<&Entry> {
        self.entries.get(&initiator).filter(|entry| entry.epoch == epoch)
    }

    /// The connection of a rail, whatever becomes of it.
    pub(super) fn of(&self, initiator: Initiator) -> Option<&Entry> {
        self.entries.get(&initiator)
    }

    /// Rails of an incarnation that numbers its connections.
    pub(super) fn of_incarnation(&self, incarnation: u64) -> Vec<(Initiator, u64)> {
        let of = |(initiator, entry): (&Initiator, &Entry)| {
            let is = initiator.incarnation == incarnation && entry.peer.numbered;
            is.then_some((*initiator, entry.epoch))
        };
        self.entries.iter().filter_map(of).collect()
    }

    /// The open ones, by their numbers.
    pub(super) fn numbers(&self) -> Vec<u64> {
        self.by_number.keys().copied().collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_number.is_empty()
    }

    /// The open connection of this number.
    pub(super) fn open(&mut self, number: u64) -> Option<(Initiator, u64, &Sender, &mut Open)> {
        let initiator = *self.by_number.get(&number)?;
        let entry = self.entries.get_mut(&initiator)?;
        match &mut entry.state {
            State::Open(open) => Some((initiator, entry.epoch, &entry.peer, open)),
            _ => None,
        }
    }

    /// Notes what the queue pairs of a connection expect now: whether it was used since they were last
    /// looked at.
    pub(super) fn note(&mut self, number: u64, receive_psn: Vec<Option<Psn>>) {
        let Some((_, _, sender, open)) = self.open(number) else { return };
        let (used, device) = (open.receive_psn != receive_psn, sender.device.clone());
        open.receive_psn = receive_psn;
        if let Some(place) = self.places.get_mut(&device) {
            place.sieve.note(number, used);
        }
    }

    /// A look at all has ended.
    pub(super) fn looked(&mut self) {
        for place in self.places.values_mut().filter(|place| place.used < place.limit) {
            place.complained = false;
        }
    }

    /// How many there are.
    pub(super) fn connections(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
impl Store {
    /// Queue pairs of a device that are taken.
    pub(super) fn used(&self, device: &str) -> usize {
        self.places.get(device).map_or(0, |place| place.used)
    }

    pub(super) fn fences_waiting(&self) -> usize {
        self.fences.len()
    }

    /// Rails that are remembered.
    pub(super) fn remembered(&self) -> usize {
        self.target.remembered()
    }
}
