//! A round: receive, let the node work, send. What it takes is one thread's at a time.

use std::io;
use std::sync::Arc;

use millstream_roce::{Instant, Node};

use super::shared::{Failure, Shared};
use super::timer::NEVER;
use crate::DriverCounters;
use crate::batch::SendBatch;
use crate::link::{Incoming, Link};

/// Datagrams collected and sent at once: up to 512 KiB at the largest MTU, which bounds how long
/// the node is held and how long [`Shared::quiesce`] waits.
pub const MAX_ROUND_DATAGRAMS: usize = 128;

/// Something was asked of the node by another thread.
pub(super) const OTHER_THREAD: u8 = 1;
/// Something was asked of the node by a thread that makes progress, in what it was called with.
pub(super) const OWN_THREAD: u8 = 2;

/// What a round has done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Round {
    /// Something was received: there may be more.
    pub(super) received: bool,
    /// The node may have more to send than one round takes.
    pub(super) more: bool,
    /// What somebody should hear of.
    pub(super) observed: u64,
}

/// The right to do rounds, and what they take. Whoever asks for one and finds another thread at it
/// leaves the request to that thread, which looks for requests after it has given up the seat.
pub(super) trait Seat<N>: Send {
    /// Receives if so asked, lets the node work with its lock held, then sends without it. Without
    /// anything to do it leaves the node alone.
    fn round(&mut self, shared: &Shared<N>, receive: bool) -> Result<Round, Failure>;
}

/// The seat at a socket of one kind.
pub(super) struct Buffers<L: Link> {
    link: Arc<L>,
    incoming: L::Incoming,
    outgoing: SendBatch<L::Head>,
    counters: DriverCounters,
    /// The node may have more to send than the last round took.
    more: bool,
}

// SAFETY: the pointers in both batches point into memory that the batches own, or, only during
// `round`, at what the node names; no thread keeps one. They are set anew before each use.
unsafe impl<L: Link + Send + Sync> Send for Buffers<L> {}

impl<L: Link> Buffers<L> {
    pub(super) fn new(link: Arc<L>) -> Self {
        Self {
            incoming: link.incoming(),
            outgoing: SendBatch::new(MAX_ROUND_DATAGRAMS),
            link,
            counters: DriverCounters::default(),
            // The node may have had something to send from the start, or a deadline.
            more: true,
        }
    }
}

impl<N: Node, L: Link + Send + Sync> Seat<N> for Buffers<L> {
    fn round(&mut self, shared: &Shared<N>, receive: bool) -> Result<Round, Failure> {
        let Self { link, incoming, outgoing, counters, more } = self;
        let link = &**link;
        let received = if receive {
            let received = link.receive(incoming, counters);
            received.map_err(failed(shared, "recvmmsg"))? > 0
        } else {
            false
        };
        let is_due = |deadline: Instant| deadline <= crate::now();
        if !(received || *more || shared.is_requested() || is_due(shared.deadline())) {
            return Ok(Round::default());
        }
        let panicked = |_| Failure::Panicked { address: shared.address() };
        let mut node = shared.node.lock().map_err(panicked)?;
        // Once it has ended its memory may go.
        if let Some(failure) = shared.failure() {
            return Err(failure.clone());
        }
        // All that was asked for before is visible in the node.
        let requests = shared.take_requests();
        // Only now: whoever held the lock before may have given the node a later time.
        let now = crate::now();
        if received {
            let mut datagrams = incoming.datagrams().peekable();
            while let Some((meta, datagram)) = datagrams.next() {
                if let Some((_, next)) = datagrams.peek() {
                    node.expect(next);
                }
                node.handle_datagram(now, &meta, datagram);
            }
        }
        // Asked for again: the deadline may be younger than the last round.
        let due = node.poll_timeout().is_some_and(|deadline| deadline <= now);
        node.handle_timeout(now);
        // SAFETY: they are sent below, in this function; until then, and until `underway` is
        // dropped, the caller of `Progress::start` promised to keep the bytes.
        *more = unsafe { outgoing.collect(&mut *node, now, counters) };
        shared.set_deadline(node.poll_timeout().map_or(NEVER, Instant::nanos));
        let requested = requests & OTHER_THREAD != 0;
        let eventful = received || due || requested || !outgoing.is_empty();
        let observed = shared.hook.observe(&mut node, eventful);
        let underway = shared.sending.begin();
        drop(node);
        let sent = outgoing.send(link, counters);
        drop(underway);
        sent.map_err(failed(shared, "sendmmsg"))?;
        counters.rounds += 1;
        shared.publish(counters);
        Ok(Round { received, more: *more, observed })
    }
}

pub(super) fn failed<N>(
    shared: &Shared<N>,
    operation: &'static str,
) -> impl FnOnce(io::Error) -> Failure {
    move |source| Failure::Socket { address: shared.address(), operation, source: Arc::new(source) }
}
