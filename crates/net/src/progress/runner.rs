//! The progress thread: receive, let the node work, send.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::{hint, io};

use millstream_roce::{Instant, Node};

use super::shared::{Failure, Shared};
use super::socket::Socket;
use crate::DriverCounters;
use crate::batch::SendBatch;
use crate::link::{Incoming, Link};
use crate::wake::OTHER_THREAD;

/// Datagrams collected and sent at once: up to 512 KiB at the largest MTU, which bounds how long
/// the node is held and how long [`Shared::quiesce`] waits.
const SEND_DATAGRAMS: usize = 128;

pub(super) struct Runner<N, F> {
    shared: Arc<Shared<N>>,
    after_round: F,
    busy_poll: Duration,
    counters: DriverCounters,
    /// When the node wants to be called, as of the last round.
    deadline: Option<Instant>,
    /// The node may have more to send than the last round took.
    more: bool,
    /// Since when there has been nothing to do.
    idle_since: Option<Instant>,
}

impl<N: Node, F: FnMut(&Shared<N>)> Runner<N, F> {
    pub(super) fn new(shared: Arc<Shared<N>>, busy_poll: Duration, after_round: F) -> Self {
        Self {
            shared,
            after_round,
            busy_poll,
            counters: DriverCounters::default(),
            deadline: None,
            // The node may have had something to send from the start, or a deadline.
            more: true,
            idle_since: None,
        }
    }

    /// The thread's whole life.
    pub(super) fn run(mut self) {
        self.shared.enter_progress_thread();
        precise_timers();
        let address = self.shared.address();
        // The node that a panic broke is not used again: its lock is poisoned.
        let failure = match panic::catch_unwind(AssertUnwindSafe(|| self.work())) {
            Ok(Ok(())) => Failure::Closed { address },
            Ok(Err(failure)) => failure,
            Err(_panic) => Failure::Panicked { address },
        };
        self.shared.fail(failure);
        self.shared.publish(&self.counters);
        let Self { shared, mut after_round, .. } = self;
        // If the hook was what panicked, it may do so again.
        let _ = panic::catch_unwind(AssertUnwindSafe(|| after_round(&shared)));
    }

    fn work(&mut self) -> Result<(), Failure> {
        let shared = Arc::clone(&self.shared);
        match &shared.socket {
            Socket::Udp(socket) => self.rounds(socket),
            Socket::Packet(socket) => self.rounds(socket),
        }
    }

    fn rounds<L: Link>(&mut self, link: &L) -> Result<(), Failure> {
        let mut incoming = link.incoming();
        let mut outgoing = SendBatch::new(SEND_DATAGRAMS);
        while !self.shared.stop.load(Ordering::SeqCst) {
            let shared = &*self.shared;
            let received = link.receive(&mut incoming, &mut self.counters);
            let received = received.map_err(failed(shared, "recvmmsg"))? > 0;
            let due = self.deadline.is_some_and(|deadline| deadline <= crate::now());
            if received || due || self.more || shared.wake.is_pending() {
                self.idle_since = None;
                self.round(link, &incoming, received, &mut outgoing)?;
            } else {
                self.idle(link)?;
            }
        }
        Ok(())
    }

    /// Lets the node work with the lock held, then sends without it.
    fn round<L: Link>(
        &mut self,
        link: &L,
        incoming: &L::Incoming,
        received: bool,
        outgoing: &mut SendBatch<L::Head>,
    ) -> Result<(), Failure> {
        let shared = &*self.shared;
        let panicked = |_| Failure::Panicked { address: shared.address() };
        let mut node = shared.node.lock().map_err(panicked)?;
        let requests = shared.wake.take();
        // Only now: whoever held the lock before may have given the node a later time.
        let now = crate::now();
        for (meta, datagram) in incoming.datagrams() {
            node.handle_datagram(now, &meta, datagram);
        }
        // Asked for again: the deadline may be younger than the last round.
        let due = node.poll_timeout().is_some_and(|deadline| deadline <= now);
        node.handle_timeout(now);
        // SAFETY: they are sent below, in this function; until then, and until `underway` is
        // dropped, the caller of `Progress::start` promised to keep the bytes.
        self.more = unsafe { outgoing.collect(&mut *node, now, &mut self.counters) };
        self.deadline = node.poll_timeout();
        let underway = shared.sending.begin();
        drop(node);
        let requested = requests & OTHER_THREAD != 0;
        let eventful = received || due || requested || !outgoing.is_empty();
        let sent = outgoing.send(link, &mut self.counters);
        drop(underway);
        sent.map_err(failed(shared, "sendmmsg"))?;
        self.counters.rounds += 1;
        shared.publish(&self.counters);
        if eventful {
            (self.after_round)(shared);
        }
        Ok(())
    }

    /// Spins for a while, if so configured, then sleeps until there is something to do.
    fn idle(&mut self, link: &impl Link) -> Result<(), Failure> {
        let now = crate::now();
        let idle_since = *self.idle_since.get_or_insert(now);
        if now.saturating_duration_since(idle_since) < self.busy_poll {
            hint::spin_loop();
            return Ok(());
        }
        let shared = &*self.shared;
        let timeout = self.deadline.map(|deadline| deadline.saturating_duration_since(now));
        let woken = shared.wake.sleep(link.as_fd(), timeout);
        self.counters.sleeps += 1;
        self.counters.wakes += u64::from(woken.map_err(failed(shared, "ppoll"))?);
        Ok(())
    }
}

fn failed<N>(shared: &Shared<N>, operation: &'static str) -> impl FnOnce(io::Error) -> Failure {
    move |source| Failure::Socket { address: shared.address(), operation, source: Arc::new(source) }
}

/// Lets this thread's sleeps end within a microsecond of their deadline, instead of the usual 50.
fn precise_timers() {
    const NANOSECONDS: libc::c_ulong = 1_000;
    // SAFETY: takes no pointers, and concerns only this thread. Failing, it changes nothing.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, NANOSECONDS) };
}
