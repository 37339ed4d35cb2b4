//! What a rank joins with beside its configuration: who hears of its waits, and who may end them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millstream_inc::protocol::LostSwitch;

use crate::join::Waiting;
use crate::line::Line;

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
