//! A connection to a peer, made when there is something to send.
//!
//! Whoever finds it idle works on it, on his own thread: who submits sends, who waits receives. Nobody waits for his
//! turn: who finds it taken leaves a note, and who has it looks for notes when he is done. No call here waits.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use millstream_net::PollSet;

use super::connection::{Connection, Did};
use super::peer::Peer;

/// How a lane was left.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Left {
    /// Somebody else works on it, and sees what is new.
    Taken,
    /// There is nothing more to send.
    Idle,
    /// It takes no more now.
    Full,
    /// It is not connected yet.
    Connecting,
}

#[derive(Default)]
pub(super) struct Lane {
    seat: Mutex<Connection>,
    /// Somebody found the seat taken.
    requested: AtomicBool,
    readable: AtomicBool,
    writable: AtomicBool,
    /// It waits for room to send, or to be connected.
    wants_room: AtomicBool,
    /// It waits for the answer to a numbered message, and for nothing else.
    awaits_answer: AtomicBool,
    stream: Mutex<Option<Arc<TcpStream>>>,
}

impl Lane {
    fn seat(&self) -> Option<MutexGuard<'_, Connection>> {
        match self.seat.try_lock() {
            Ok(seat) => Some(seat),
            Err(TryLockError::Poisoned(seat)) => Some(seat.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Does what there is to do, and can be done without a wait.
    pub(super) fn work(&self, peer: &Arc<Peer>) -> Left {
        loop {
            let seat = self.seat().or_else(|| {
                self.requested.store(true, Ordering::SeqCst);
                // Who had it may have looked for notes before.
                self.seat()
            });
            let Some(mut seat) = seat else { return Left::Taken };
            if self.requested.load(Ordering::SeqCst) {
                self.requested.store(false, Ordering::SeqCst);
            }
            let [readable, writable] = [&self.readable, &self.writable]
                .map(|is| is.load(Ordering::SeqCst) && is.swap(false, Ordering::SeqCst));
            let did = seat.work(peer, readable, writable);
            self.show(peer, &mut seat);
            drop(seat);
            if self.requested.swap(false, Ordering::SeqCst) || did == Did::Again {
                continue;
            }
            return match did {
                Did::Full => Left::Full,
                Did::Connecting => Left::Connecting,
                Did::Idle | Did::Again => Left::Idle,
            };
        }
    }

    /// Whether nothing but the answer to a numbered message is waited for, which [`Lane::look`] looks for.
    pub(super) fn awaits_answer(&self) -> bool {
        self.awaits_answer.load(Ordering::Relaxed)
    }

    /// Receives that answer if it has come, and does what follows from it; whether there was something to do. It takes one
    /// system call, where to ask whether something has come and to receive it are two.
    pub(super) fn look(&self, peer: &Arc<Peer>) -> bool {
        // Who has the seat receives.
        let Some(mut seat) = self.seat() else { return false };
        let did = seat.look(peer);
        if did.is_some() {
            self.show(peer, &mut seat);
        }
        drop(seat);
        let is_asked = self.requested.swap(false, Ordering::SeqCst);
        if is_asked || did == Some(Did::Again) {
            self.work(peer);
        }
        is_asked || did.is_some()
    }

    /// Looks whether its time is over.
    pub(super) fn check(&self, peer: &Arc<Peer>, now: Instant) {
        // Whoever works on it makes progress.
        let Some(mut seat) = self.seat() else { return };
        let broke = seat.check(peer, now);
        self.show(peer, &mut seat);
        drop(seat);
        if broke || self.requested.load(Ordering::SeqCst) {
            self.work(peer);
        }
    }

    /// Closes it: what is under way fails.
    pub(super) fn stop(&self, peer: &Arc<Peer>) {
        let mut seat = self.seat.lock().unwrap_or_else(PoisonError::into_inner);
        seat.stop(peer);
        self.show(peer, &mut seat);
    }

    /// Shows those who wait what to wait for.
    fn show(&self, peer: &Arc<Peer>, connection: &mut Connection) {
        let wants_room = connection.wants_room();
        // Nobody else sets it: who shows has the seat.
        let wanted = self.wants_room.load(Ordering::SeqCst);
        if wants_room != wanted {
            self.wants_room.store(wants_room, Ordering::SeqCst);
        }
        self.awaits_answer.store(connection.awaits_answer(peer), Ordering::Relaxed);
        let changed = connection.has_changed();
        if changed {
            let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
            *stream = connection.stream().cloned();
        }
        if changed || (wants_room && !wanted) {
            peer.progress().interests_changed();
        }
    }

    /// Whether it has a connection, or is about to have one.
    pub(super) fn is_connected(&self) -> bool {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Adds it to what is waited for, if it is connected.
    pub(super) fn watch(&self, set: &mut PollSet) -> Option<Arc<TcpStream>> {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        set.add(stream.as_fd(), true, self.wants_room.load(Ordering::SeqCst));
        Some(stream)
    }

    /// A wait has found it ready.
    pub(super) fn is_ready(&self, readable: bool, writable: bool) {
        self.readable.fetch_or(readable, Ordering::SeqCst);
        self.writable.fetch_or(writable, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::testing::peer;

    #[test]
    fn who_finds_a_lane_taken_leaves_a_note_that_is_seen() {
        let (lane, peer) = (Lane::default(), peer());
        let seat = lane.seat().unwrap();
        assert_eq!(lane.work(&peer), Left::Taken);
        // Nor does who looks whether its time is over wait for the seat.
        lane.check(&peer, Instant::now());
        // And who looks for an answer leaves that to who has it.
        assert!(!lane.look(&peer));
        drop(seat);
        assert!(lane.requested.load(Ordering::SeqCst));
        lane.check(&peer, Instant::now());
        assert!(!lane.requested.load(Ordering::SeqCst));
        lane.requested.store(true, Ordering::SeqCst);
        assert!(lane.look(&peer) && !lane.look(&peer));
        assert!(!lane.requested.load(Ordering::SeqCst));
        assert_eq!(lane.work(&peer), Left::Idle);
        assert!(!lane.is_connected() && lane.watch(&mut PollSet::default()).is_none());
        lane.stop(&peer);
        assert_eq!(lane.work(&peer), Left::Idle);
    }
}
