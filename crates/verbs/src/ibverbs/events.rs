//! The thread of a device: it hears of completions and events, wakes who waits, runs handlers.

use std::collections::{HashMap, VecDeque};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use millstream_net::ends_between_forks;
use millstream_roce::{AsyncEvent, Completion, SharedReceiveQueueId};

use super::completion_queue::{CompletionQueue, HANDLER_BATCH};
use super::lock;
use super::objects::{self, Channel, Context, DeviceEvent, Errno};
use super::queue_pair::Pair;
use super::work::{SHARED, Work};
use crate::device::PortHandler;

/// Events kept for an application that does not ask for them.
const MAX_EVENTS: usize = 1024;

/// What the thread and the objects of a device know of each other.
pub(super) struct Registry {
    /// By the number of their identifier.
    queues: Mutex<Vec<Option<Weak<CompletionQueue>>>>,
    pairs: Mutex<HashMap<u32, Weak<Pair>>>,
    /// How many shared receive queues there were. Their numbers are not used again.
    shared: AtomicU32,
    events: Mutex<VecDeque<AsyncEvent>>,
    /// Told when the port of this number begins or ceases to work.
    port: OnceLock<(u8, PortHandler)>,
    /// There is an event, or the device has failed.
    happened: Condvar,
    failure: OnceLock<String>,
    /// It has failed, and touches no request any more.
    quiet: AtomicBool,
    stopping: AtomicBool,
    wake: PipeWriter,
    /// A byte is in the pipe: one at a time, so that writing never blocks.
    waking: AtomicBool,
}

impl Registry {
    /// A number for a completion queue that is about to be made.
    pub(super) fn reserve(&self) -> u32 {
        let mut queues = lock(&self.queues);
        let index = queues.iter().position(Option::is_none).unwrap_or(queues.len());
        if index == queues.len() {
            queues.push(None);
        }
        queues[index] = Some(Weak::new());
        index as u32
    }

    pub(super) fn enter(&self, number: u32, queue: &Arc<CompletionQueue>) {
        lock(&self.queues)[number as usize] = Some(Arc::downgrade(queue));
    }

    pub(super) fn release(&self, number: u32) {
        lock(&self.queues)[number as usize] = None;
    }

    fn queue(&self, number: u32) -> Option<Arc<CompletionQueue>> {
        lock(&self.queues).get(number as usize)?.as_ref()?.upgrade()
    }

    fn all_queues(&self) -> Vec<Arc<CompletionQueue>> {
        lock(&self.queues).iter().flatten().filter_map(Weak::upgrade).collect()
    }

    /// A number for a shared receive queue.
    pub(super) fn next_shared(&self) -> u32 {
        self.shared.fetch_add(1, Ordering::Relaxed) & !SHARED
    }

    /// Knows a queue pair from now on; `false` when the device has failed, and the queue pair
    /// must not be used.
    pub(super) fn enter_pair(&self, pair: &Arc<Pair>) -> bool {
        let mut pairs = lock(&self.pairs);
        // Who fails looks at the pairs after the reason is known.
        if self.failure.get().is_some() {
            return false;
        }
        pairs.insert(pair.work.qpn.value(), Arc::downgrade(pair));
        true
    }

    pub(super) fn release_pair(&self, work: &Work) {
        lock(&self.pairs).remove(&work.qpn.value());
    }

    fn all_pairs(&self) -> Vec<Arc<Pair>> {
        lock(&self.pairs).values().filter_map(Weak::upgrade).collect()
    }

    /// A queue pair failed: the application hears of it, once.
    pub(super) fn pair_failed(&self, work: &Work) {
        self.pair_failed_by(work, AsyncEvent::QueuePairFatal(work.qpn));
    }

    fn pair_failed_by(&self, work: &Work, event: AsyncEvent) {
        work.set_failed();
        if work.to_report() {
            self.event(event);
        }
    }

    fn event(&self, event: AsyncEvent) {
        let mut events = lock(&self.events);
        if events.len() < MAX_EVENTS {
            events.push_back(event);
            self.happened.notify_one();
        }
    }

    pub(super) fn poll_event(&self) -> Option<AsyncEvent> {
        lock(&self.events).pop_front()
    }

    pub(super) fn wait_event(&self, timeout: Duration) -> Option<AsyncEvent> {
        let nothing = |events: &mut VecDeque<_>| events.is_empty() && self.failure.get().is_none();
        let waited = self.happened.wait_timeout_while(lock(&self.events), timeout, nothing);
        waited.unwrap_or_else(PoisonError::into_inner).0.pop_front()
    }

    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// The device failed, and whatever it was given is completed or will be flushed.
    pub(super) fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::Acquire)
    }

    /// The device does not work any more: its queue pairs are stopped, so that what they were given
    /// can be handed back, and whoever waits for it is told. The first reason counts.
    ///
    /// The caller holds no poster and no inbox.
    pub(super) fn fail(&self, reason: String) {
        if self.failure.set(reason).is_err() {
            return;
        }
        self.event(AsyncEvent::DeviceFatal);
        self.happened.notify_all();
        for pair in self.all_pairs() {
            pair.stop();
        }
        self.quiet.store(true, Ordering::Release);
        for queue in self.all_queues() {
            queue.announce();
        }
        self.wake();
    }

    /// As [`Registry::fail`], when a call failed that should not.
    pub(super) fn fail_by(&self, call: &str, code: Errno) {
        self.fail(format!("{call} failed: {}", io::Error::from_raw_os_error(code)));
    }

    /// Has the thread look what there is to do besides the device's announcements.
    pub(super) fn wake(&self) {
        if !self.waking.swap(true, Ordering::AcqRel) {
            // A pipe that is gone has no thread any more.
            let _ = (&self.wake).write(&[0]);
        }
    }

    /// What an event is of, while that surely exists.
    fn look_up(&self, event: DeviceEvent) -> Happened {
        match event {
            DeviceEvent::QueuePair(event) => {
                let Some(qpn) = event.failed_queue_pair() else { return Happened::Told(event) };
                let pair = lock(&self.pairs).get(&qpn.value()).and_then(Weak::upgrade);
                pair.map_or(Happened::Nothing, |pair| Happened::PairFailed(pair, event))
            }
            DeviceEvent::CompletionQueueError(number) => {
                self.queue(number).map_or(Happened::Nothing, Happened::QueueFailed)
            }
            // These numbers are not used again.
            DeviceEvent::SharedReceivesError(number) => Happened::SharedReceivesFailed(number),
            DeviceEvent::SharedReceivesLimit(number) => {
                let queue = SharedReceiveQueueId(number);
                Happened::Told(AsyncEvent::SharedReceiveLimit(queue))
            }
            DeviceEvent::DeviceFatal => Happened::DeviceFailed,
            DeviceEvent::Port(number, works) => Happened::PortChanged(number, works),
            DeviceEvent::Other(kind) => {
                tracing::debug!("event {kind} (of ibv_event_type)");
                Happened::Nothing
            }
        }
    }

    fn react(&self, happened: Happened) {
        match happened {
            Happened::PairFailed(pair, event) => self.pair_failed_by(&pair.work, event),
            Happened::Told(event) => self.event(event),
            Happened::QueueFailed(queue) => {
                self.event(AsyncEvent::CompletionQueueOverrun(queue.id()));
                // It may have lost completions and, on real hardware, gets none any more.
                self.stop_pairs(|pair| pair.completes_into(&queue));
            }
            Happened::SharedReceivesFailed(queue) => {
                self.stop_pairs(|pair| pair.takes_from(queue));
            }
            Happened::DeviceFailed => self.fail("the device reported a fatal error".into()),
            Happened::PortChanged(number, works) => self.port_changed(number, works),
            Happened::Nothing => {}
        }
    }

    /// The handler is told of this port's changes from now on. The first one counts.
    pub(super) fn watch_port(&self, number: u8, handler: PortHandler) {
        let _ = self.port.set((number, handler));
    }

    fn port_changed(&self, number: u8, works: bool) {
        tracing::info!(port = number, works, "a port has changed");
        if let Some((watched, handler)) = self.port.get()
            && *watched == number
            && catch_unwind(AssertUnwindSafe(|| handler(works))).is_err()
        {
            self.fail("a port's handler panicked".into());
        }
    }

    /// Ends the queue pairs that cannot go on.
    fn stop_pairs(&self, hit: impl Fn(&Pair) -> bool) {
        for pair in self.all_pairs().into_iter().filter(|pair| hit(pair)) {
            self.pair_failed(&pair.work);
            pair.stop();
        }
    }
}

/// What an event of the device was of.
enum Happened {
    PairFailed(Arc<Pair>, AsyncEvent),
    /// Something that only the application has to know.
    Told(AsyncEvent),
    QueueFailed(Arc<CompletionQueue>),
    /// By its number.
    SharedReceivesFailed(u32),
    DeviceFailed,
    /// By its number; whether it works.
    PortChanged(u8, bool),
    Nothing,
}

/// The thread, which ends when this is dropped.
pub(super) struct Events {
    registry: Arc<Registry>,
    thread: Option<JoinHandle<()>>,
}

impl Events {
    /// Starts it. Both sources must not block.
    pub(super) fn start(
        name: String,
        context: Arc<Context>,
        channel: Arc<Channel>,
    ) -> io::Result<(Self, Arc<Registry>)> {
        let (woken, wake) = io::pipe()?;
        let registry = Arc::new(Registry {
            queues: Mutex::default(),
            pairs: Mutex::default(),
            shared: AtomicU32::new(0),
            events: Mutex::default(),
            port: OnceLock::new(),
            happened: Condvar::new(),
            failure: OnceLock::new(),
            quiet: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            wake,
            waking: AtomicBool::new(false),
        });
        let listener = Listener { context, channel, registry: Arc::clone(&registry), woken };
        let thread =
            thread::Builder::new().name(name).spawn(ends_between_forks(move || listener.run()))?;
        Ok((Self { registry: Arc::clone(&registry), thread: Some(thread) }, registry))
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.registry.stopping.store(true, Ordering::Release);
        self.registry.wake();
        let Some(thread) = self.thread.take() else { return };
        // A handler may drop the last handle of its own device: the thread ends after it.
        if thread.thread().id() != thread::current().id() {
            // The thread catches panics, so this is no error worth reporting.
            let _ = thread.join();
        }
    }
}

struct Listener {
    context: Arc<Context>,
    channel: Arc<Channel>,
    registry: Arc<Registry>,
    woken: PipeReader,
}

impl Listener {
    fn run(mut self) {
        let mut completions = Vec::with_capacity(HANDLER_BATCH);
        // Handlers catch their panics themselves: this is for ours.
        let ended = catch_unwind(AssertUnwindSafe(|| self.listen(&mut completions)));
        match ended {
            Ok(Ok(())) => {}
            Ok(Err((call, code))) => self.registry.fail_by(call, code),
            Err(_) => self.registry.fail("the device's thread panicked".into()),
        }
        if self.registry.is_quiet() {
            // The last that handlers hear: what will never complete.
            for queue in self.registry.all_queues() {
                while queue.handle(&mut completions) {}
            }
        }
    }

    fn listen(&mut self, completions: &mut Vec<Completion>) -> Result<(), (&'static str, Errno)> {
        let sources = [
            self.channel.descriptor().as_raw_fd(),
            self.context.event_descriptor().as_raw_fd(),
            self.woken.as_raw_fd(),
        ];
        // Queues whose handlers have more to do.
        let mut busy: Vec<Arc<CompletionQueue>> = Vec::new();
        loop {
            let [announced, happened, woken] = objects::readable(sources, busy.is_empty())
                .map_err(|code| ("poll of a device's descriptors", code))?;
            if woken {
                self.awake();
                if self.registry.stopping.load(Ordering::Acquire) || self.registry.is_quiet() {
                    return Ok(());
                }
                let all = self.registry.all_queues();
                all.into_iter().filter(|queue| queue.is_handler_due()).for_each(|queue| {
                    add(&mut busy, queue);
                });
            }
            if happened {
                let look_up = |event| self.registry.look_up(event);
                let next = || self.context.next_event(look_up);
                while let Some(event) = next().map_err(|code| ("ibv_get_async_event", code))? {
                    self.registry.react(event);
                }
            }
            if announced {
                let next = || self.channel.next();
                while let Some(number) = next().map_err(|code| ("ibv_get_cq_event", code))? {
                    let Some(queue) = self.registry.queue(number) else { continue };
                    queue.announce();
                    add(&mut busy, queue);
                }
            }
            // Each in turn, so that one that is always busy does not keep the others waiting.
            busy.retain(|queue| queue.handle(completions));
        }
    }

    /// Takes the byte out of the pipe. What was asked for before the next is written is looked for
    /// after this.
    fn awake(&mut self) {
        // There is one: the pipe was readable. A pipe that cannot be read wakes for ever, which
        // ends when the device is closed.
        let _ = self.woken.read(&mut [0]);
        self.registry.waking.store(false, Ordering::Release);
    }
}

fn add(busy: &mut Vec<Arc<CompletionQueue>>, queue: Arc<CompletionQueue>) {
    if !busy.iter().any(|other| Arc::ptr_eq(other, &queue)) {
        busy.push(queue);
    }
}
