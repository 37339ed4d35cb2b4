//! What a rank joins with beside its configuration: who hears of its waits, and who may end them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millstream_inc::protocol::LostSwitch;

use crate::join::Waiting;
use crate::line::Line;
use crate::local::LocalEngine;

/// How a rank joins.
pub(crate) struct Joining<'a> {
    /// Called with what the rank waits for.
    pub(crate) waiting: &'a mut dyn FnMut(&Waiting),
    pub(crate) cancellation: &'a Cancellation,
    /// A controller that says nothing for so long is given up, though there is no other one.
    pub(crate) silence: Option<Duration>,
    /// Whether the rank may need another place to meet the others later, without a controller.
    pub(crate) prepares: bool,
    /// Switches that are not to serve the group.
    pub(crate) avoid: &'a [LostSwitch],
    /// What this rank shares memory by already, with others that join, too.
    pub(crate) local: Option<&'a Arc<LocalEngine>>,
}

/// Ends an attempt to join, at once where the controller knows of it. A clone is the same one.
#[derive(Clone, Default)]
pub(crate) struct Cancellation(Arc<Mutex<Attempt>>);

#[derive(Default)]
struct Attempt {
    canceled: bool,
    /// The connection to the controller.
    line: Option<Line>,
}

impl Cancellation {
    /// From here on, nothing is waited for on any connection.
    pub(crate) fn cancel(&self) {
        let mut attempt = self.lock();
        attempt.canceled = true;
        if let Some(line) = attempt.line.take() {
            // Closed by the peer already, if this fails.
            let _ = line.shutdown();
        }
    }

    pub(crate) fn is_canceled(&self) -> bool {
        self.lock().canceled
    }

    /// The attempt has this connection now.
    pub(crate) fn watch(&self, line: Option<Line>) {
        let mut attempt = self.lock();
        if attempt.canceled {
            let _ = line.map(|line| line.shutdown());
        } else {
            attempt.line = line;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Attempt> {
        // A panic elsewhere leaves nothing half done that matters more than going on.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{Ipv4Addr, TcpListener};
    use std::thread;

    use millstream_inc::protocol::{Commanded, FromController, encode};
    use millstream_verbs::{Device, SoftConfig};

    use super::*;
    use crate::JoinConfig;
    use crate::join::join_with;
    use crate::memory::Domains;

    /// Where the ranks of a lost tree meet, an attempt keeps others waiting for as long as its connection is there.
    #[test]
    fn a_failed_attempt_closes_its_connection_though_who_may_end_it_is_there() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let controller = listener.local_addr().unwrap();
        let peer = thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            // No answer to one that joins. The rank ends the attempt, and this side does not.
            let message = FromController::Left { rank: 1, collectives: 1 };
            stream.write_all(&encode(&Commanded { term: 1, message }).unwrap()).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let mut heard = [0; 4096];
            loop {
                match stream.read(&mut heard) {
                    Ok(0) => return true,
                    Ok(_) => {}
                    Err(error) => return error.kind() == ErrorKind::ConnectionReset,
                }
            }
        });
        // Which no other test has: those of the engine count from 1.
        let process = std::process::id();
        let own = Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, 254);
        let device = Device::open_soft(&SoftConfig::new(own.into())).unwrap();
        let config = JoinConfig::new(controller, "g", 2, 0, &device);
        let cancellation = Cancellation::default();
        let mut joining = Joining {
            waiting: &mut |_| (),
            cancellation: &cancellation,
            silence: None,
            prepares: false,
            avoid: &[],
            local: None,
        };
        let joined = join_with(&config, &Domains::of([&device]), &mut joining);
        assert!(joined.is_err());
        assert!(peer.join().unwrap(), "the connection stays");
        assert!(!cancellation.is_canceled());
    }
}
