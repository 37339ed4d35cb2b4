//! What all threads share of a node that runs.

use std::cell::Cell;
use std::io;
use std::mem;
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use std::sync::{Arc, OnceLock, PoisonError, TryLockError};
use std::time::Duration;

use millstream_roce::{Instant, Node};
use thiserror::Error;

use super::driver::Doze;
use super::hook::{Hook, Worker};
use super::leader::Leadership;
use super::seat::{OTHER_THREAD, OWN_THREAD, Round, Seat};
use super::sending::Sending;
use super::socket::Socket;
use super::timer::NEVER;
use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
use crate::sync::{Mutex, MutexGuard, thread_local};
use crate::{DriverCounters, SocketInfo};

/// Why a node no longer runs.
#[derive(Clone, Debug, Error)]
pub enum Failure {
    /// Its [`super::Progress`] was dropped.
    #[error("the device at {address} was closed")]
    Closed {
        /// The device's address.
        address: IpAddr,
    },
    /// A thread panicked while it held the node, whose state can no longer be trusted.
    #[error("the device at {address} stopped because of a bug: the panic is reported on stderr")]
    Panicked {
        /// The device's address.
        address: IpAddr,
    },
    /// The socket no longer works.
    #[error("the device at {address} stopped: {operation} failed")]
    Socket {
        /// The device's address.
        address: IpAddr,
        /// The system call.
        operation: &'static str,
        /// Its error.
        #[source]
        source: Arc<io::Error>,
    },
}

/// So many rounds a thread that has asked for one does at most for others who ask meanwhile.
const ROUNDS_FOR_OTHERS: usize = 16;

/// A node and its driver, as all threads see them.
pub struct Shared<N> {
    pub(super) node: Mutex<N>,
    seat: Mutex<Box<dyn Seat<N>>>,
    /// What was asked of the node since the last round: [`OTHER_THREAD`], [`OWN_THREAD`].
    requests: AtomicU8,
    /// When the node wants to be called, as of the last round; [`NEVER`] if it does not.
    deadline: AtomicU64,
    pub(super) hook: Box<dyn Hook<N>>,
    /// What was observed, and only the driver may announce.
    pub(super) owed: AtomicU64,
    pub(super) driver: Doze,
    pub(super) leadership: Leadership,
    pub(super) socket: Socket,
    pub(super) sending: Sending,
    pub(super) stop: AtomicBool,
    counters: Mutex<DriverCounters>,
    sleeps: AtomicU64,
    wakes: AtomicU64,
    failure: OnceLock<Failure>,
}

thread_local! {
    /// The [`Shared`] whose progress this thread makes, while it calls the hook; and by that, others
    /// whose progress it makes too, as a hook may wait for another node.
    static PROGRESSING: Cell<*const Progressing> = const { Cell::new(ptr::null()) };
}

/// A node whose progress a thread makes, on the stack of [`Shared::progressing`].
struct Progressing {
    node: *const (),
    outer: *const Self,
}

impl<N> Shared<N> {
    pub(super) fn new(
        node: N,
        seat: Box<dyn Seat<N>>,
        hook: Box<dyn Hook<N>>,
        driver: Doze,
        socket: Socket,
    ) -> Self {
        let leadership = Leadership::new(driver.polling());
        Self {
            node: Mutex::new(node),
            seat: Mutex::new(seat),
            requests: AtomicU8::new(0),
            deadline: AtomicU64::new(NEVER),
            hook,
            owed: AtomicU64::new(0),
            driver,
            leadership,
            socket,
            sending: Sending::default(),
            stop: AtomicBool::new(false),
            counters: Mutex::default(),
            sleeps: AtomicU64::new(0),
            wakes: AtomicU64::new(0),
            failure: OnceLock::new(),
        }
    }

    /// The time, by the clock that the node is given. Take it while holding the node: its time must
    /// not go backwards.
    pub fn now(&self) -> Instant {
        crate::now()
    }

    /// Returns once no datagram is being sent that was collected before this call: then memory that
    /// the node no longer names can be freed. It waits for one `sendmmsg` at most, needs no lock,
    /// and may be called on any thread.
    pub fn quiesce(&self) {
        self.sending.wait();
    }

    /// What the driver has done, up to its last round.
    pub fn driver_counters(&self) -> DriverCounters {
        let counters = *self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let sleeps = self.sleeps.load(Ordering::Relaxed);
        DriverCounters { sleeps, wakes: self.wakes.load(Ordering::Relaxed), ..counters }
    }

    /// What the socket has got.
    pub fn socket_info(&self) -> SocketInfo {
        self.socket.info()
    }

    /// Waits until datagrams to `peer` can be sent, for this long at most; whether they can. A packet
    /// socket has to find the way first, and does not keep datagrams meanwhile: the first of them
    /// would be lost. With a UDP socket it is always so: there the kernel keeps them.
    pub fn prepare(&self, peer: IpAddr, patience: Duration) -> bool {
        self.socket.prepare(peer, patience)
    }

    /// As [`Shared::prepare`], but waits for a peer only once: for who sends without a connection, and
    /// to somebody who may not be there.
    pub fn introduce(&self, peer: IpAddr, patience: Duration) {
        self.socket.introduce(peer, patience);
    }

    /// Why the node no longer runs; `None` while it does.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Whether this thread makes the node's progress now, and has called the hook in which this is
    /// asked: then waiting for progress is waiting for ever.
    pub fn is_progress_thread(&self) -> bool {
        let this = ptr::from_ref(self).cast();
        let mut next = PROGRESSING.with(Cell::get);
        // SAFETY: each is on this thread's stack, in a call of `progressing` that has not returned: it
        // takes the pointer out of here before it does. Nobody changes it.
        while let Some(progressing) = unsafe { next.as_ref() } {
            if progressing.node == this {
                return true;
            }
            next = progressing.outer;
        }
        false
    }

    /// The node, even after a [`Failure`]: to look at it, or to take it apart. It does nothing any
    /// more then, and after a panic its state is whatever the panic left. Asks for no round either.
    pub fn lock_regardless(&self) -> NodeGuard<'_, N> {
        NodeGuard(self.node.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The node, to look at it or to take something out. What is asked of it now may wait for its
    /// next round.
    pub fn lock_without_waking(&self) -> Result<NodeGuard<'_, N>, Failure> {
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        match self.node.lock() {
            // It may have ended while we waited for the lock.
            Ok(node) => match self.failure.get() {
                None => Ok(NodeGuard(node)),
                Some(failure) => Err(failure.clone()),
            },
            Err(_poisoned) => Err(self.give_up(Failure::Panicked { address: self.address() })),
        }
    }

    /// Ends it, as dropping its [`super::Progress`] does, but waits for nothing: for who may be on one of
    /// its threads. The hook is told when it has ended.
    pub fn close(&self) {
        self.stop();
    }

    /// Asks for a round after which the hook is called, whatever happens in it: for a hook that has
    /// more to do, and lets packets have their turn.
    pub fn call_again(&self) {
        self.requests.fetch_or(OTHER_THREAD, Ordering::SeqCst);
        self.driver.wake();
    }

    pub(super) fn address(&self) -> IpAddr {
        self.socket.info().address
    }

    /// Whether a round was asked for.
    pub(super) fn is_requested(&self) -> bool {
        self.requests.load(Ordering::SeqCst) != 0
    }

    /// What was asked for since the last call. To be called with the node's lock held: then all
    /// that was asked for is visible in the node.
    pub(super) fn take_requests(&self) -> u8 {
        self.requests.swap(0, Ordering::SeqCst)
    }

    pub(super) fn deadline(&self) -> Instant {
        Instant::from_nanos(self.deadline.load(Ordering::SeqCst))
    }

    pub(super) fn set_deadline(&self, nanos: u64) {
        self.deadline.store(nanos, Ordering::SeqCst);
    }

    /// Makes this the thread that makes progress, in what it calls now.
    pub(super) fn progressing<T>(&self, call: impl FnOnce() -> T) -> T {
        struct Restore(*const Progressing);
        impl Drop for Restore {
            fn drop(&mut self) {
                PROGRESSING.with(|progressing| progressing.set(self.0));
            }
        }
        let outer = PROGRESSING.with(Cell::get);
        let this = Progressing { node: ptr::from_ref(self).cast(), outer };
        // Dropped before `this`, also if the call panics.
        let _restore = Restore(outer);
        PROGRESSING.with(|progressing| progressing.set(&raw const this));
        call()
    }

    /// The node no longer runs, for this reason or the first one that was given, which is returned.
    /// The driver tells all others.
    pub(super) fn give_up(&self, failure: Failure) -> Failure {
        let failure = self.failure.get_or_init(|| failure).clone();
        self.driver.wake();
        failure
    }

    /// Records why it ends; the first reason counts. When this returns, nobody holds the node who
    /// does not know, and no thread sends for it any more.
    pub(super) fn fail(&self, failure: Failure) {
        self.failure.get_or_init(|| failure);
        drop(self.node.lock());
        self.sending.wait();
    }

    pub(super) fn publish(&self, counters: &DriverCounters) {
        *self.counters.lock().unwrap_or_else(PoisonError::into_inner) = *counters;
    }

    pub(super) fn count_sleep(&self, woken: bool) {
        self.sleeps.fetch_add(1, Ordering::Relaxed);
        self.wakes.fetch_add(u64::from(woken), Ordering::Relaxed);
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.driver.wake();
    }
}

impl<N: Node> Shared<N> {
    /// The node, to ask something of it. When the guard is dropped, this thread sends what there is to
    /// send, unless another thread is at it, which does so then; in the hook, it is sent after the
    /// hook. Hold it as briefly as you can.
    pub fn lock(&self) -> Result<Guard<'_, N>, Failure> {
        let node = self.lock_without_waking()?;
        Ok(Guard { node, request: Some(Request(self)) })
    }

    /// Calls `call`, and sends what it asks of the node afterwards, once: for who asks for several
    /// things, or does so with a lock held.
    pub fn postpone<T>(&self, call: impl FnOnce() -> T) -> T {
        // Also if it panics: nobody else was told of what it has asked for until then.
        struct DoRequests<'a, N: Node>(&'a Shared<N>);
        impl<N: Node> Drop for DoRequests<'_, N> {
            fn drop(&mut self) {
                if self.0.is_requested() {
                    self.0.do_requests(Worker::Poster);
                }
            }
        }
        if self.is_progress_thread() {
            return call();
        }
        let _do_requests = DoRequests(self);
        self.progressing(call)
    }

    /// A round on this thread, if nobody else is at one, and `receive` as told.
    pub(super) fn try_round(&self, receive: bool) -> Option<Result<Round, Failure>> {
        // Requests of others that find the seat taken are seen after it is given up: they ask first
        // and look at the seat then, we give up the seat first and look for requests then.
        fence(Ordering::SeqCst);
        let seat = match self.seat.try_lock() {
            Ok(seat) => seat,
            Err(TryLockError::WouldBlock) => return None,
            Err(TryLockError::Poisoned(_)) => {
                return Some(Err(Failure::Panicked { address: self.address() }));
            }
        };
        Some(self.round_at(seat, receive))
    }

    /// A round on this thread, as soon as no other is at one.
    pub(super) fn round(&self) -> Result<Round, Failure> {
        match self.seat.lock() {
            Ok(seat) => self.round_at(seat, true),
            Err(_poisoned) => Err(Failure::Panicked { address: self.address() }),
        }
    }

    fn round_at(
        &self,
        mut seat: MutexGuard<'_, Box<dyn Seat<N>>>,
        receive: bool,
    ) -> Result<Round, Failure> {
        // The seat is given up in the closure, so that a panic poisons it: nobody sends what a broken
        // round had collected.
        let round = panic::catch_unwind(AssertUnwindSafe(move || seat.round(self, receive)));
        fence(Ordering::SeqCst);
        round.unwrap_or_else(|_panic| Err(Failure::Panicked { address: self.address() }))
    }

    /// Tells who should hear of what a round has brought about.
    pub(super) fn announce(&self, observed: u64, worker: Worker) {
        if observed == 0 {
            return;
        }
        let announce = || self.hook.announce(self, observed, worker);
        let left = match worker {
            Worker::Poster => announce(),
            Worker::Driver => self.progressing(announce),
            Worker::Leader => {
                // It is a thread of the application: a handler's panic is not for it.
                let announced =
                    panic::catch_unwind(AssertUnwindSafe(|| self.progressing(announce)));
                announced.unwrap_or_else(|_panic| {
                    self.give_up(Failure::Panicked { address: self.address() });
                    0
                })
            }
        };
        if left != 0 {
            self.owed.fetch_or(left, Ordering::SeqCst);
            if worker != Worker::Driver {
                self.driver.wake();
            }
        }
    }

    /// Does what was asked for, unless another thread is at it.
    pub(super) fn do_requests(&self, worker: Worker) {
        for _ in 0..ROUNDS_FOR_OTHERS {
            match self.try_round(false) {
                None => return,
                Some(Err(failure)) => {
                    self.give_up(failure);
                    return;
                }
                Some(Ok(round)) => {
                    self.announce(round.observed, worker);
                    self.cover_deadline();
                    if !round.more && !self.is_requested() {
                        self.leadership.posted();
                        return;
                    }
                }
            }
        }
        // Others ask without end: let the driver do it.
        self.call_again();
    }

    /// Sees to it that somebody is awake at the node's deadline.
    fn cover_deadline(&self) {
        let deadline = self.deadline().nanos();
        if !self.leadership.cover(deadline) {
            self.driver.cover(deadline);
        }
    }

    fn request(&self) {
        if self.is_progress_thread() {
            self.requests.fetch_or(OWN_THREAD, Ordering::SeqCst);
        } else {
            self.requests.fetch_or(OTHER_THREAD, Ordering::SeqCst);
            self.do_requests(Worker::Poster);
        }
    }
}

/// Exclusive access to a node.
pub struct NodeGuard<'a, N>(MutexGuard<'a, N>);

impl<N> Deref for NodeGuard<'_, N> {
    type Target = N;

    fn deref(&self) -> &N {
        &self.0
    }
}

impl<N> DerefMut for NodeGuard<'_, N> {
    fn deref_mut(&mut self) -> &mut N {
        &mut self.0
    }
}

/// Exclusive access to a node, of which something is asked.
pub struct Guard<'a, N: Node> {
    // Fields are dropped in this order: first the lock is released, then what was asked for is done,
    // so that no system call is made with the lock held.
    node: NodeGuard<'a, N>,
    request: Option<Request<'a, N>>,
}

impl<N: Node> Guard<'_, N> {
    /// Nothing was asked of the node after all.
    pub fn release_without_waking(mut self) {
        // To drop it is to ask.
        mem::forget(self.request.take());
    }
}

impl<N: Node> Deref for Guard<'_, N> {
    type Target = N;

    fn deref(&self) -> &N {
        &self.node
    }
}

impl<N: Node> DerefMut for Guard<'_, N> {
    fn deref_mut(&mut self) -> &mut N {
        &mut self.node
    }
}

/// Asks for a round when dropped.
struct Request<'a, N: Node>(&'a Shared<N>);

impl<N: Node> Drop for Request<'_, N> {
    fn drop(&mut self) {
        self.0.request();
    }
}
