//! What the network connects.

use millstream_roce::{Instant, Node};

/// A node and the application beside it.
///
/// After everything that happens to a machine the network calls [`Machine::run`], then sends what
/// [`Node::poll_transmit`] gives, until neither has anything left to do at this point in time. A
/// bare node is a machine whose application does nothing.
pub trait Machine: Node {
    /// Lets the application act: poll completions, post work.
    fn run(&mut self, now: Instant) {
        let _ = now;
    }

    /// When the application wants [`Machine::run`] to be called, if nothing else happens. Must be
    /// later than the time of the last call.
    fn poll_wake(&mut self) -> Option<Instant> {
        None
    }

    /// Starts again after a crash: everything not kept on stable storage is gone.
    fn restart(&mut self, now: Instant) {
        let _ = now;
    }
}
