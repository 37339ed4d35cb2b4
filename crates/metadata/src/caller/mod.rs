//! Many calls to peers at once, on one thread.
//!
//! Peers that do not answer cost a socket and a timer each, until their time-out. So they delay
//! nobody else, however many they are.

mod event_loop;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use millstream_net::ends_between_forks;

use mio::Waker;

use self::event_loop::EventLoop;
use crate::client::deadline;
use crate::exchange::Exchange;
use crate::resolver::{Addresses, Resolver};
use crate::{CallError, CallErrorKind, ClientConfig, Frame, HostPort};

/// How many calls of a [`Caller`] are under way at a time, unless it is told otherwise.
pub const DEFAULT_CALL_LIMIT: usize = 4096;

/// Calls peers, as [`crate::Client`] does, many at once and without waiting.
///
/// Each call is told how it ended, once, on a thread that all calls share: what is told should
/// be short. Replies that have arrived in part hold up to [`ClientConfig::frame_limit`] bytes each.
///
/// Dropping it ends all calls with [`CallErrorKind::Ended`] and waits until all are told, unless
/// it is one of them that drops it.
pub struct Caller {
    shared: Arc<Shared>,
}

type Tell = Box<dyn FnOnce(Result<Frame, CallError>) + Send>;

struct Shared {
    config: ClientConfig,
    limit: usize,
    resolver: Resolver,
    inbox: Mutex<Inbox>,
}

/// What the thread is to do.
#[derive(Default)]
struct Inbox {
    thread: Option<Running>,
    /// Nothing is taken any more.
    closed: bool,
    under_way: usize,
    messages: Vec<Message>,
}

struct Running {
    waker: Arc<Waker>,
    handle: JoinHandle<()>,
}

enum Message {
    Call(Request),
    /// There are too many: tell so.
    Refused(Done),
    /// What the resolver has answered to a call, by its number.
    Resolved(u64, io::Result<Addresses>),
}

/// A call that begins.
struct Request {
    done: Done,
    timeout: Duration,
    deadline: Instant,
    exchange: Exchange,
}

/// Whom to tell how a call has ended. Dropping it tells that it was given up, so that nobody waits
/// for ever.
struct Done {
    shared: Arc<Shared>,
    peer: HostPort,
    /// Whether it is one of [`Inbox::under_way`].
    counted: bool,
    tell: Option<Tell>,
}

impl Caller {
    /// A caller of [`DEFAULT_CALL_LIMIT`] calls at once. Its thread starts with the first one.
    /// Calls have time-outs of their own, so [`ClientConfig::call_timeout`] means nothing here.
    pub fn new(config: ClientConfig) -> Self {
        Self::with_limit(config, DEFAULT_CALL_LIMIT)
    }

    /// A caller of so many calls at once.
    pub fn with_limit(config: ClientConfig, limit: usize) -> Self {
        Self::with_resolver(config, limit, Resolver::system())
    }

    fn with_resolver(config: ClientConfig, limit: usize, resolver: Resolver) -> Self {
        let inbox = Mutex::default();
        Self { shared: Arc::new(Shared { config, limit, resolver, inbox }) }
    }

    /// Sends a request to the peer at `address` and tells `done` the reply, or after `timeout` at
    /// the latest what went wrong. Never waits for anybody.
    ///
    /// `done` runs on the thread of the caller. Only where that thread cannot start or has died,
    /// it is told on this one. What panics in it is logged.
    pub fn call(
        &self,
        address: &HostPort,
        request: Frame,
        timeout: Duration,
        done: Box<dyn FnOnce(Result<Frame, CallError>) + Send>,
    ) {
        let deadline = deadline(timeout);
        let mut done = Done {
            shared: Arc::clone(&self.shared),
            peer: address.clone(),
            counted: false,
            tell: Some(done),
        };
        let mut inbox = self.shared.lock();
        if inbox.thread.is_none() && !inbox.closed {
            match self.start() {
                Ok(thread) => inbox.thread = Some(thread),
                Err(error) => {
                    drop(inbox);
                    let error = io::Error::new(error.kind(), format!("no thread: {error}"));
                    return done.tell(Err(CallErrorKind::Io(error)));
                }
            }
        }
        done.counted = inbox.under_way < self.shared.limit;
        inbox.under_way += usize::from(done.counted);
        drop(inbox);
        self.shared.post(if done.counted {
            let exchange = Exchange::new(&request, self.shared.config.frame_limit);
            Message::Call(Request { done, timeout, deadline, exchange })
        } else {
            Message::Refused(done)
        });
    }

    fn start(&self) -> io::Result<Running> {
        let (event_loop, waker) = EventLoop::new(Arc::clone(&self.shared))?;
        let handle = thread::Builder::new()
            .name("calls".to_owned())
            .spawn(ends_between_forks(move || event_loop.run()))?;
        Ok(Running { waker, handle })
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let mut inbox = self.shared.lock();
        inbox.closed = true;
        let Some(thread) = inbox.thread.take() else { return };
        drop(inbox);
        wake(&thread.waker);
        if thread.handle.thread().id() != thread::current().id() {
            // A panic of it was logged when it happened.
            let _ = thread.handle.join();
        }
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { config, limit, .. } = &*self.shared;
        let under_way = self.shared.lock().under_way;
        f.debug_struct("Caller")
            .field("config", config)
            .field("limit", limit)
            .field("under_way", &under_way)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a message to the thread, or drops it if there is none any more.
    fn post(&self, message: Message) {
        let mut inbox = self.lock();
        let Some(thread) = inbox.thread.as_ref().filter(|_| !inbox.closed) else {
            drop(inbox);
            // It may tell somebody, who may call again.
            drop(message);
            return;
        };
        // Whoever left the first message wakes the thread for all.
        let waker = inbox.messages.is_empty().then(|| Arc::clone(&thread.waker));
        inbox.messages.push(message);
        drop(inbox);
        if let Some(waker) = waker {
            wake(&waker);
        }
    }

    /// What has been posted; `None` once this is closed.
    fn receive(&self) -> Option<Vec<Message>> {
        let mut inbox = self.lock();
        (!inbox.closed).then(|| std::mem::take(&mut inbox.messages))
    }

    /// Takes nothing from now on, and gives up what has been posted.
    fn close(&self) {
        let mut inbox = self.lock();
        inbox.closed = true;
        let messages = std::mem::take(&mut inbox.messages);
        drop(inbox);
        drop(messages);
    }
}

fn wake(waker: &Waker) {
    if let Err(error) = waker.wake() {
        tracing::error!(%error, "the thread of calls to peers cannot be woken");
    }
}

impl Done {
    fn tell(mut self, result: Result<Frame, CallErrorKind>) {
        self.tell_once(result);
    }

    fn refuse(self) {
        let limit = self.shared.limit;
        self.tell(Err(CallErrorKind::TooMany { limit }));
    }

    fn tell_once(&mut self, result: Result<Frame, CallErrorKind>) {
        let Some(tell) = self.tell.take() else { return };
        if self.counted {
            // Before it is told: it may call again.
            self.shared.lock().under_way -= 1;
        }
        let result = result.map_err(|kind| CallError { peer: self.peer.clone(), kind });
        if panic::catch_unwind(AssertUnwindSafe(|| tell(result))).is_err() {
            tracing::error!(peer = %self.peer, "who was told how a call ended has panicked");
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        self.tell_once(Err(CallErrorKind::Ended));
    }
}
