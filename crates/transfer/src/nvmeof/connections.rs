//! A target's connections by their names, for fences.
//!
//! The target draws the names. So who knows one has been served over that connection, and no connection of a name that is
//! not here can begin later.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::protocol::ProtocolError;
use super::target::Connection;

/// Those that are served.
#[derive(Default)]
pub(super) struct Connections {
    open: Mutex<HashMap<u128, Open>>,
}

struct Open {
    connection: Arc<Connection>,
    /// Who waits for its end, and for which reply.
    waiting: Vec<(Weak<Connection>, u64)>,
}

/// A connection that is served as long as this lives. What was begun over it has ended before.
pub(super) struct Served<'a> {
    connections: &'a Connections,
    name: u128,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, HashMap<u128, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn serve(&self, connection: &Arc<Connection>) -> Served<'_> {
        let open = Open { connection: Arc::clone(connection), waiting: Vec::new() };
        self.lock().insert(connection.name, open);
        Served { connections: self, name: connection.name }
    }

    /// Ends the connection of this name, and has `asker` reply to `id` once nothing of that comes any more: it is read no
    /// further, and what it had begun has ended. Does not wait for that. Whether it was there.
    pub(super) fn fence(
        &self,
        asker: &Arc<Connection>,
        id: u64,
        name: u128,
    ) -> Result<bool, ProtocolError> {
        if name == asker.name || !asker.begin_fence() {
            return Err(ProtocolError::Fence);
        }
        let mut open = self.lock();
        let Some(fenced) = open.get_mut(&name) else {
            drop(open);
            asker.end_fence(id);
            return Ok(false);
        };
        fenced.waiting.retain(|(asker, _)| asker.strong_count() > 0);
        fenced.waiting.push((Arc::downgrade(asker), id));
        let fenced = Arc::clone(&fenced.connection);
        drop(open);
        fenced.close();
        Ok(true)
    }
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        let ended = self.connections.lock().remove(&self.name);
        for (asker, id) in ended.into_iter().flat_map(|open| open.waiting) {
            if let Some(asker) = asker.upgrade() {
                asker.end_fence(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::nvmeof::protocol::{Outcome, Reply};
    use crate::nvmeof::wire::Wire;

    fn connection(name: u128) -> Arc<Connection> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        Arc::new(Connection::new(Wire::new(stream, None), name))
    }

    fn confirmed(id: u64) -> Reply {
        Reply::Ended { id, outcome: Outcome::Done, length: 0 }
    }

    #[test]
    fn a_fence_is_confirmed_when_its_connection_has_ended() {
        let connections = Connections::default();
        let [asker, fenced] = [1, 2].map(connection);
        let _served = connections.serve(&asker);
        let served = connections.serve(&fenced);
        connections.fence(&asker, 7, 2).unwrap();
        // Nothing more is read, and what was begun may be written still.
        assert!(fenced.buffer(1).is_none());
        assert_eq!(asker.to_say(), []);
        drop(served);
        assert_eq!(asker.to_say(), [confirmed(7)]);
        connections.fence(&asker, 8, 2).unwrap();
        assert_eq!(asker.to_say(), [confirmed(7), confirmed(8)], "it is not there any more");
    }

    #[test]
    fn who_asks_for_a_fence_and_ends_is_not_waited_for() {
        let connections = Connections::default();
        let both = [1, 2].map(connection);
        let [first, second] = both.each_ref().map(|it| connections.serve(it));
        connections.fence(&both[0], 1, 2).unwrap();
        connections.fence(&both[1], 1, 1).unwrap();
        drop(first);
        assert_eq!(both[1].to_say(), [confirmed(1)]);
        let [ended, _] = both;
        drop((ended, second));
    }

    #[test]
    fn fences_of_its_own_connection_and_too_many_are_refused() {
        let connections = Connections::default();
        let [asker, fenced] = [1, 2].map(connection);
        let _served = connections.serve(&fenced);
        assert_eq!(connections.fence(&asker, 0, 1), Err(ProtocolError::Fence));
        for id in 0..16 {
            connections.fence(&asker, id, 2).unwrap();
        }
        assert_eq!(connections.fence(&asker, 16, 2), Err(ProtocolError::Fence));
    }
}
