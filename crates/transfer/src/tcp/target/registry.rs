//! Connections by their numbers, for fences.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a fence waits for the thread of the connection that it ends: an access to memory takes no longer, unless
/// the machine is very busy.
const PATIENCE: Duration = Duration::from_millis(1500);

/// So many connections are remembered that a fence has ended before they began.
const MAX_FENCED: usize = 16_384;

#[derive(Default)]
pub(super) struct Registry {
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Default)]
struct State {
    open: HashMap<u128, TcpStream>,
    /// A connection may still be on its way here when its fence comes.
    fenced: VecDeque<u128>,
}

/// A connection that is registered as long as this lives.
pub(super) struct Registered<'a> {
    registry: &'a Registry,
    connection: u128,
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
        state.open.insert(connection, stream);
        Ok(Some(Registered { registry: self, connection }))
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
        let Some(stream) = state.open.get(&connection) else { return true };
        let _ = stream.shutdown(Shutdown::Both);
        let until = Instant::now() + PATIENCE;
        while state.open.contains_key(&connection) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.left.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.registry.lock().open.remove(&self.connection);
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
    fn fences_take_bounded_memory() {
        let registry = Registry::default();
        (0..MAX_FENCED as u128 + 10).for_each(|connection| assert!(registry.fence(connection)));
        assert_eq!(registry.lock().fenced.len(), MAX_FENCED);
    }
}
