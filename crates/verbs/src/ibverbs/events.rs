//! The thread of a device: it hears of completions and events, wakes who waits, runs handlers.

use std::collections::{HashMap, VecDeque};
use std::io::{self, PipeReader, PipeWriter, Write};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::{self, JoinHandle};

use millstream_roce::{AsyncEvent, CompletionQueueId};

use super::completion_queue::{CompletionQueue, HANDLER_BATCH};
use super::lock;
use super::objects::{self, Channel, Context, DeviceEvent, Errno};
use super::work::Work;

/// Events kept for an application that does not ask for them.
const MAX_EVENTS: usize = 1024;

/// What the thread and the objects of a device know of each other.
pub(super) struct Registry {
    /// By the number of their identifier.
    queues: Mutex<Vec<Option<Weak<CompletionQueue>>>>,
    pairs: Mutex<HashMap<u32, Weak<Work>>>,
    events: Mutex<VecDeque<AsyncEvent>>,
    failure: OnceLock<String>,
    stopping: AtomicBool,
    wake: PipeWriter,
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

    pub(super) fn enter_pair(&self, work: &Arc<Work>) {
        lock(&self.pairs).insert(work.qpn.value(), Arc::downgrade(work));
    }

    pub(super) fn release_pair(&self, work: &Work) {
        lock(&self.pairs).remove(&work.qpn.value());
    }

    /// A queue pair failed: the application hears of it, once.
    pub(super) fn pair_failed(&self, work: &Work) {
        work.set_failed();
        if work.to_report() {
            self.event(AsyncEvent::QueuePairFatal(work.qpn));
        }
    }

    fn event(&self, event: AsyncEvent) {
        let mut events = lock(&self.events);
        if events.len() < MAX_EVENTS {
            events.push_back(event);
        }
    }

    pub(super) fn poll_event(&self) -> Option<AsyncEvent> {
        lock(&self.events).pop_front()
    }

    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// The device does not work any more: whoever waits for it is told. The first reason counts.
    pub(super) fn fail(&self, reason: String) {
        if self.failure.set(reason).is_ok() {
            for queue in self.all_queues() {
                queue.announce();
            }
            self.wake();
        }
    }

    /// As [`Registry::fail`], when a call failed that should not.
    pub(super) fn fail_by(&self, call: &str, code: Errno) {
        self.fail(format!("{call} failed: {}", io::Error::from_raw_os_error(code)));
    }

    fn wake(&self) {
        // The thread reads it only to end, and a pipe that is gone has no thread any more.
        let _ = (&self.wake).write(&[0]);
    }

    fn handle(&self, event: DeviceEvent) {
        match event {
            DeviceEvent::QueuePair(number) => {
                let work = lock(&self.pairs).get(&number).and_then(Weak::upgrade);
                if let Some(work) = work {
                    self.pair_failed(&work);
                }
            }
            DeviceEvent::CompletionQueue(number) => {
                self.event(AsyncEvent::CompletionQueueOverrun(CompletionQueueId(number)));
            }
            DeviceEvent::DeviceFatal => self.fail("the device reported a fatal error".into()),
            DeviceEvent::Other(kind) => tracing::debug!("event {kind} (of ibv_event_type)"),
        }
    }
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
            events: Mutex::default(),
            failure: OnceLock::new(),
            stopping: AtomicBool::new(false),
            wake,
        });
        let listener = Listener { context, channel, registry: Arc::clone(&registry), woken };
        let thread = thread::Builder::new().name(name).spawn(move || listener.run())?;
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
    fn run(self) {
        let mut completions = Vec::with_capacity(HANDLER_BATCH);
        let ended = catch_unwind(AssertUnwindSafe(|| {
            if let Err((call, code)) = self.listen(&mut completions) {
                self.registry.fail_by(call, code);
            }
            if self.registry.failure().is_some() {
                // The last that handlers hear: what will never complete.
                for queue in self.registry.all_queues() {
                    while queue.handle(&mut completions) {}
                }
            }
        }));
        if ended.is_err() {
            self.registry.fail("a completion handler panicked".into());
        }
    }

    fn listen(
        &self,
        completions: &mut Vec<millstream_roce::Completion>,
    ) -> Result<(), (&'static str, Errno)> {
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
            if woken
                && (self.registry.stopping.load(Ordering::Acquire)
                    || self.registry.failure().is_some())
            {
                return Ok(());
            }
            if happened {
                let next = || self.context.next_event();
                while let Some(event) = next().map_err(|code| ("ibv_get_async_event", code))? {
                    self.registry.handle(event);
                }
            }
            if announced {
                let next = || self.channel.next();
                while let Some(number) = next().map_err(|code| ("ibv_get_cq_event", code))? {
                    let Some(queue) = self.registry.queue(number) else { continue };
                    queue.announce();
                    if !busy.iter().any(|other| Arc::ptr_eq(other, &queue)) {
                        busy.push(queue);
                    }
                }
            }
            // Each in turn, so that one that is always busy does not keep the others waiting.
            busy.retain(|queue| queue.handle(completions));
        }
    }
}
