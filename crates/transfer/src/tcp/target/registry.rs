//! Connections by their numbers, for fences.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::forwarding::Forwarding;

/// How long a fence waits for the thread of the connection that it ends: an access to memory takes no longer, unless
/// the machine is very busy.
const PATIENCE: Duration = Duration::from_millis(1500);

/// So many connections are remembered that a fence has ended before they began.
const MAX_FENCED: usize = 16_384;

/// So many connections are remembered that have ended with something that may arrive yet.
const MAX_UNDEFINED: usize = 4096;

/// After so long nobody asks for the fence of a connection that has ended.
const KEPT: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct Registry {
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Default)]
struct State {
    open: HashMap<u128, Open>,
    /// A connection may still be on its way here when its fence comes.
    fenced: VecDeque<u128>,
    /// Connections to a relay that have ended, while something of them may arrive yet.
    undefined: VecDeque<(u128, Instant)>,
    /// There were more of these, of which the last ended then: for a while, of a connection that is not open nobody knows
    /// whether it was one.
    forgotten: Option<Instant>,
}

struct Open {
    stream: TcpStream,
    forwarding: Arc<Forwarding>,
}

/// A connection that is registered as long as this lives.
pub(super) struct Registered<'a> {
    registry: &'a Registry,
    connection: u128,
    forwarding: Arc<Forwarding>,
    undefined: Cell<bool>,
}

impl Registered<'_> {
    /// What is under way of it elsewhere, which a fence ends.
    pub(super) const fn forwarding(&self) -> &Arc<Forwarding> {
        &self.forwarding
    }

    /// Something of it may arrive yet, and nobody knows for how long: no fence of it is confirmed.
    pub(super) fn leaves_undefined(&self) {
        self.undefined.set(true);
    }
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a connection; `None` when a fence has ended it, or another one has its number.
    pub(super) fn enter(
        &self,
        connection: u128,
        stream: &TcpStream,
    ) -> io::Result<Option<Registered<'_>>> {
        let stream = stream.try_clone()?;
        let mut state = self.lock();
        if state.fenced.contains(&connection) || state.open.contains_key(&connection) {
            return Ok(None);
        }
        let forwarding = Arc::<Forwarding>::default();
        state.open.insert(connection, Open { stream, forwarding: Arc::clone(&forwarding) });
        let undefined = Cell::new(false);
        Ok(Some(Registered { registry: self, connection, forwarding, undefined }))
    }

    /// Ends a connection; whether nothing of it is done any more.
    pub(super) fn fence(&self, connection: u128) -> bool {
        let mut state = self.lock();
        if !state.fenced.contains(&connection) {
            if state.fenced.len() >= MAX_FENCED {
                state.fenced.pop_front();
            }
            state.fenced.push_back(connection);
        }
        let Some(open) = state.open.get(&connection) else { return state.is_over(connection) };
        let _ = open.stream.shutdown(Shutdown::Both);
        let forwarding = Arc::clone(&open.forwarding);
        drop(state);
        // It may have to ask others.
        forwarding.end();
        let mut state = self.lock();
        let until = Instant::now() + PATIENCE;
        while state.open.contains_key(&connection) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.left.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_over(connection)
    }

    /// Ends what is under way elsewhere for all connections.
    pub(super) fn end_forwarding(&self) {
        let all: Vec<_> =
            self.lock().open.values().map(|open| Arc::clone(&open.forwarding)).collect();
        all.iter().for_each(|forwarding| forwarding.end());
    }
}

impl State {
    /// Whether nothing of a connection that is not open can arrive any more.
    fn is_over(&self, connection: u128) -> bool {
        self.forgotten.is_none_or(|ended| ended.elapsed() >= KEPT)
            && self.undefined.iter().all(|&(undefined, _)| undefined != connection)
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        let mut state = self.registry.lock();
        if self.undefined.get() {
            if state.undefined.len() >= MAX_UNDEFINED {
                state.forgotten = state.undefined.pop_front().map(|(_, ended)| ended);
            }
            state.undefined.push_back((self.connection, Instant::now()));
        }
        state.open.remove(&self.connection);
        drop(state);
        self.registry.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[test]
    fn a_fence_waits_for_its_connection_and_keeps_it_from_beginning() {
        let (registry, (_far, near)) = (Registry::default(), pair());
        let registered = registry.enter(1, &near).unwrap().unwrap();
        assert!(registry.enter(1, &near).unwrap().is_none(), "a number is one connection's");
        let ended = Mutex::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                // Until the fence shuts it down.
                assert_eq!((&near).read(&mut [0; 10]).unwrap(), 0);
                *ended.lock().unwrap() = true;
                drop(registered);
            });
            assert!(registry.fence(1));
            assert!(*ended.lock().unwrap());
        });
        assert!(registry.fence(2), "there is none");
        assert!(registry.enter(2, &near).unwrap().is_none(), "it comes too late");
    }

    #[test]
    fn a_connection_that_does_not_end_is_not_fenced() {
        let (registry, (_far, near)) = (Registry::default(), pair());
        let _registered = registry.enter(1, &near).unwrap().unwrap();
        assert!(!registry.fence(1));
    }

    #[test]
    fn what_may_arrive_yet_is_not_fenced_when_its_connection_has_ended() {
        let (registry, (_far, near)) = (Registry::default(), pair());
        for connection in 0..=MAX_UNDEFINED as u128 {
            let registered = registry.enter(connection, &near).unwrap().unwrap();
            registered.leaves_undefined();
            drop(registered);
            assert!(!registry.fence(connection), "{connection}");
        }
        assert_eq!(registry.lock().undefined.len(), MAX_UNDEFINED);
        assert!(!registry.fence(0), "it is forgotten, and not confirmed");
        let later = || registry.lock().forgotten.map(|ended| ended.checked_sub(KEPT).unwrap());
        let forgotten = later();
        registry.lock().forgotten = forgotten;
        assert!(registry.fence(0), "nobody asks for its fence so late");
    }

    #[test]
    fn fences_take_bounded_memory() {
        let registry = Registry::default();
        (0..MAX_FENCED as u128 + 10).for_each(|connection| assert!(registry.fence(connection)));
        assert_eq!(registry.lock().fenced.len(), MAX_FENCED);
    }
}
