//! What the progress thread shares with others.

use std::cell::Cell;
use std::io;
use std::mem;
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use millstream_roce::Instant;
use thiserror::Error;

use super::sending::Sending;
use super::socket::Socket;
use crate::wake::{OTHER_THREAD, OWN_THREAD, Wake};
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

/// A node and its driver, as all threads see them.
pub struct Shared<N> {
    pub(super) node: Mutex<N>,
    pub(super) wake: Wake,
    pub(super) socket: Socket,
    pub(super) sending: Sending,
    pub(super) stop: AtomicBool,
    counters: Mutex<DriverCounters>,
    failure: OnceLock<Failure>,
}

thread_local! {
    /// The [`Shared`] whose progress thread this is.
    static PROGRESSING: Cell<*const ()> = const { Cell::new(ptr::null()) };
}

impl<N> Shared<N> {
    pub(super) fn new(node: N, wake: Wake, socket: Socket) -> Self {
        Self {
            node: Mutex::new(node),
            wake,
            socket,
            sending: Sending::default(),
            stop: AtomicBool::new(false),
            counters: Mutex::default(),
            failure: OnceLock::new(),
        }
    }

    /// The node, to ask something of it: when the guard is dropped, the progress thread looks after
    /// it, and is woken if it sleeps. Hold it as briefly as you can.
    pub fn lock(&self) -> Result<Guard<'_, N>, Failure> {
        let mut guard = self.lock_without_waking()?;
        guard.request = Some(Request { wake: &self.wake, who: self.who() });
        Ok(guard)
    }

    /// The node, to look at it or to take something out. What is asked of it now may wait for its
    /// next round.
    pub fn lock_without_waking(&self) -> Result<Guard<'_, N>, Failure> {
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        match self.node.lock() {
            // It may have ended while we waited for the lock.
            Ok(node) => match self.failure.get() {
                None => Ok(Guard { node, request: None }),
                Some(failure) => Err(failure.clone()),
            },
            Err(_poisoned) => {
                let failure = Failure::Panicked { address: self.address() };
                let failure = self.failure.get_or_init(|| failure).clone();
                // The progress thread may sleep, and should end.
                self.wake.request(self.who());
                Err(failure)
            }
        }
    }

    /// The node, even after a [`Failure`]: to look at it, or to take it apart. It does nothing any
    /// more then, and after a panic its state is whatever the panic left. Does not wake the
    /// progress thread either.
    pub fn lock_regardless(&self) -> Guard<'_, N> {
        let node = self.node.lock().unwrap_or_else(PoisonError::into_inner);
        Guard { node, request: None }
    }

    /// Asks for a round after which the hook is called, whatever happens in it: for a hook that has
    /// more to do, and lets packets have their turn.
    pub fn call_again(&self) {
        self.wake.request(OTHER_THREAD);
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
        *self.counters.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Whether this is its progress thread: then waiting for progress is waiting for ever.
    pub fn is_progress_thread(&self) -> bool {
        PROGRESSING.get() == ptr::from_ref(self).cast()
    }

    pub(super) fn address(&self) -> IpAddr {
        self.socket.info().address
    }

    pub(super) fn enter_progress_thread(&self) {
        PROGRESSING.set(ptr::from_ref(self).cast());
    }

    /// Records why it ends; the first reason counts. When this returns, nobody holds the node who
    /// does not know.
    pub(super) fn fail(&self, failure: Failure) {
        self.failure.get_or_init(|| failure);
        drop(self.node.lock());
    }

    pub(super) fn publish(&self, counters: &DriverCounters) {
        *self.counters.lock().unwrap_or_else(PoisonError::into_inner) = *counters;
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake.request(OTHER_THREAD);
    }

    fn who(&self) -> u8 {
        if self.is_progress_thread() { OWN_THREAD } else { OTHER_THREAD }
    }
}

/// Exclusive access to a node.
pub struct Guard<'a, N> {
    // Fields are dropped in this order: first the lock is released, then the thread is woken, so
    // that no system call is made with the lock held and the thread does not run into it.
    node: MutexGuard<'a, N>,
    request: Option<Request<'a>>,
}

impl<N> Guard<'_, N> {
    /// Lets the progress thread sleep on, as nothing was asked of the node after all.
    pub fn release_without_waking(mut self) {
        // To drop it is to wake.
        mem::forget(self.request.take());
    }
}

impl<N> Deref for Guard<'_, N> {
    type Target = N;

    fn deref(&self) -> &N {
        &self.node
    }
}

impl<N> DerefMut for Guard<'_, N> {
    fn deref_mut(&mut self) -> &mut N {
        &mut self.node
    }
}

/// Asks for a round when dropped.
struct Request<'a> {
    wake: &'a Wake,
    who: u8,
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        self.wake.request(self.who);
    }
}
