//! Who waits for the connections of all peers.
//!
//! One thread at a time leads: it sleeps on the streams and works on those that are ready. Threads that wait for a
//! batch lead, or follow: they sleep until what they wait for has come about, or the leader leaves. Where nobody waits,
//! a thread of the transport leads. It rests for a while first, so that who submits and waits at once wakes nobody.

use std::cell::RefCell;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use millstream_net::{BusyPoll, PollSet, Polling, Sleeper, Wait, Waiters, ends_between_forks};

use super::message::MAX_DATA;
use super::peer::Peer;

/// How often who leads looks what is to end.
const TICK: Duration = Duration::from_millis(50);

/// For how long the transport's thread leaves it to others when they have led, or may be about to.
const GRACE: Duration = Duration::from_millis(1);

/// When there was nothing to do for so long, its thread sleeps until it is woken.
const REST: Duration = Duration::from_millis(50);

/// Where an answer is to come over one stream, the others are looked at once in so many turns.
const TURNS: u32 = 16;

/// How long a thread sleeps that cannot be woken.
const BLIND: Duration = Duration::from_millis(1);

thread_local! {
    /// What a follower sleeps on. It keeps its memory.
    static FOLLOWING: RefCell<PollSet> = RefCell::default();
}

#[derive(Default)]
pub(crate) struct Progress {
    peers: Mutex<Vec<Arc<Peer>>>,
    /// Changes when what is to be waited for does.
    version: AtomicU64,
    /// Tasks that are not over.
    unfinished: AtomicUsize,
    seat: Mutex<Leader>,
    /// What the leader sleeps on.
    leader: Mutex<Option<Sleeper>>,
    /// Those who would lead if nobody did.
    followers: Waiters,
    /// A thread that waits wants to lead in place of the transport's.
    wanted: AtomicBool,
    /// Counts how often others than the transport's thread have led.
    led: AtomicU64,
    own: Mutex<Own>,
    changed: Condvar,
}

/// The transport's thread.
#[derive(Default)]
struct Own {
    thread: Option<JoinHandle<()>>,
    asleep: bool,
    stopping: bool,
}

/// What the leader has. It keeps its memory.
#[derive(Default)]
struct Leader {
    set: PollSet,
    watched: Vec<(Arc<Peer>, usize)>,
    /// The only one of these over which an answer is to come, if there is one.
    awaited: Option<usize>,
    /// Kept open while they are waited for.
    streams: Vec<Arc<TcpStream>>,
    /// Those that have something to do, while they are looked at.
    busy: Vec<Arc<Peer>>,
    ticked: Option<Instant>,
    /// When something was to end next when they were gathered.
    deadline: Option<Instant>,
    /// For how long the streams are looked at before a sleep.
    busy_poll: BusyPoll,
}

/// How it ended to look at the streams.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Looked {
    /// Something has come.
    Found,
    /// There is something else to do, or the time is over.
    Ended,
    /// Who looks is to sleep.
    InVain,
}

impl Leader {
    fn begin_wait(&self, is_apart: bool) -> Wait {
        self.busy_poll.begin(is_apart, self.streams.iter().map(|stream| &**stream))
    }

    /// Looks at the streams for as long as that may be of use, and receives what comes where an answer is to come over
    /// one of them only.
    fn look(&mut self, wait: &mut Wait, soon: Duration, ends: impl Fn() -> bool) -> Looked {
        let mut turns = 0_u32;
        while self.busy_poll.looks(wait) {
            turns = turns.wrapping_add(1);
            let awaited = self.awaited.filter(|_| !turns.is_multiple_of(TURNS));
            let came = match awaited.map(|index| &self.watched[index]) {
                Some((peer, lane)) => peer.look(*lane),
                None if self.set.look().is_err() => return Looked::InVain,
                None => self.is_any_ready(),
            };
            if came {
                return Looked::Found;
            }
            if ends() || wait.looked() >= soon {
                return Looked::Ended;
            }
        }
        Looked::InVain
    }

    fn is_any_ready(&self) -> bool {
        (0..self.watched.len()).any(|index| self.set.ready(index) != (false, false))
    }
}

impl Progress {
    pub(super) fn new(polling: &Arc<Polling>) -> Self {
        let leader = Leader { busy_poll: BusyPoll::new(polling), ..Leader::default() };
        Self { seat: Mutex::new(leader), ..Self::default() }
    }

    fn peers(&self) -> MutexGuard<'_, Vec<Arc<Peer>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn own(&self) -> MutexGuard<'_, Own> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, peer: &Arc<Peer>) {
        self.peers().push(Arc::clone(peer));
    }

    pub(super) fn remove(&self, peer: &Arc<Peer>) {
        self.peers().retain(|known| !Arc::ptr_eq(known, peer));
        self.interests_changed();
    }

    /// Whether there is something under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.unfinished.load(Ordering::SeqCst) > 0
    }

    pub(super) fn more(&self, count: usize) {
        self.unfinished.fetch_add(count, Ordering::SeqCst);
    }

    pub(super) fn fewer(&self, count: usize) {
        self.unfinished.fetch_sub(count, Ordering::SeqCst);
    }

    /// A stream is to be waited for that was not, or in another way.
    pub(super) fn interests_changed(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
        let leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(leader) = &*leader {
            leader.wake();
        }
    }

    /// Something was submitted, by who may wait for it in a moment, or not.
    pub(super) fn submitted(self: &Arc<Self>) {
        let mut own = self.own();
        if own.stopping || !self.is_busy() {
            return;
        }
        if own.thread.is_none() {
            let progress = Arc::clone(self);
            let thread = thread::Builder::new().name("tcp".to_owned());
            // Without it, who waits does all.
            own.thread = thread.spawn(ends_between_forks(move || progress.run())).ok();
        } else if own.asleep {
            own.asleep = false;
            self.changed.notify_all();
        }
    }

    pub(super) fn stop(&self) {
        let mut own = self.own();
        own.stopping = true;
        let thread = own.thread.take();
        drop(own);
        self.changed.notify_all();
        self.wanted.store(true, Ordering::SeqCst);
        self.interests_changed();
        if let Some(thread) = thread
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
    }

    /// Does what can be done without a wait, unless somebody leads.
    pub(crate) fn progress(&self) {
        if !self.is_busy() {
            return;
        }
        let Some(mut seat) = self.seat() else { return };
        self.led.fetch_add(1, Ordering::SeqCst);
        self.gather(&mut seat);
        if seat.set.look().is_ok() {
            self.work(&mut seat, Instant::now());
        }
        self.leave(seat);
    }

    /// Waits until `look` finds something, at most `timeout`, and leads meanwhile where nobody else does. Returns also
    /// once nothing is under way.
    pub(crate) fn wait(&self, waiters: &Waiters, timeout: Duration, look: impl Fn() -> bool) {
        let deadline = Instant::now().checked_add(timeout);
        let left =
            || deadline.map_or(Duration::MAX, |it| it.saturating_duration_since(Instant::now()));
        let over = || look() || !self.is_busy();
        let Some(sleeper) = Sleeper::own() else {
            while !over() && !left().is_zero() {
                self.progress();
                thread::sleep(BLIND.min(left()));
            }
            return;
        };
        let _waiting = sleeper.enter(waiters);
        loop {
            sleeper.take();
            if over() || left().is_zero() {
                return;
            }
            if let Some(seat) = self.seat() {
                self.led.fetch_add(1, Ordering::SeqCst);
                self.lead(seat, &sleeper, true, over, left);
                continue;
            }
            let following = sleeper.enter(&self.followers);
            self.want();
            // The leader may have left before it could see us.
            let is_free = self.seat().is_some();
            if !is_free && !over() {
                FOLLOWING.with_borrow_mut(|set| {
                    set.clear();
                    let _ = sleeper.sleep(set, left().min(TICK), || false);
                });
            }
            drop(following);
        }
    }

    /// Has the transport's thread leave.
    fn want(&self) {
        if self.wanted.swap(true, Ordering::SeqCst) {
            return;
        }
        let leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(leader) = &*leader {
            leader.wake();
        }
    }

    fn seat(&self) -> Option<MutexGuard<'_, Leader>> {
        match self.seat.try_lock() {
            Ok(seat) => Some(seat),
            Err(TryLockError::Poisoned(seat)) => Some(seat.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Sleeps and works until it is `over`. Where a thread of the application waits for that, it looks before it sleeps.
    fn lead(
        &self,
        mut seat: MutexGuard<'_, Leader>,
        sleeper: &Sleeper,
        is_awaited: bool,
        over: impl Fn() -> bool,
        left: impl Fn() -> Duration,
    ) {
        *self.leader.lock().unwrap_or_else(PoisonError::into_inner) = Some(sleeper.clone());
        loop {
            sleeper.take();
            let version = self.version.load(Ordering::SeqCst);
            if over() {
                break;
            }
            let left = left();
            if left.is_zero() {
                break;
            }
            let (soon, is_apart) = self.gather(&mut seat);
            let soon = left.min(soon);
            let changed = || self.version.load(Ordering::SeqCst) != version;
            let mut wait = is_awaited.then(|| seat.begin_wait(is_apart));
            let ends = || over() || changed();
            let looked = wait.as_mut().map_or(Looked::InVain, |wait| seat.look(wait, soon, ends));
            if looked == Looked::InVain {
                let soon = wait.as_ref().map_or(soon, |wait| wait.left_of(soon));
                if sleeper.sleep(&mut seat.set, soon, changed).is_err() {
                    // The kernel lacks memory.
                    thread::sleep(BLIND);
                }
            }
            let now = Instant::now();
            if let Some(wait) = wait {
                let came = looked == Looked::Found || seat.is_any_ready();
                seat.busy_poll.end(&wait, now, came);
            }
            self.work(&mut seat, now);
        }
        *self.leader.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.leave(seat);
    }

    fn leave(&self, mut seat: MutexGuard<'_, Leader>) {
        seat.streams.clear();
        seat.watched.clear();
        drop(seat);
        self.followers.wake();
    }

    /// Finds what is to be waited for; how long at the most, and whether for a stream of data, of which as much is under way
    /// as a message can have, or for no stream of bytes at all.
    fn gather(&self, leader: &mut Leader) -> (Duration, bool) {
        let Leader { set, watched, awaited, streams, deadline: earliest, .. } = leader;
        set.clear();
        watched.clear();
        streams.clear();
        (*awaited, *earliest) = (None, None);
        let (mut under_way, mut awaiting) = (0, 0);
        for peer in self.peers().iter() {
            let flow = peer.flow();
            let deadline = flow.next_deadline();
            under_way += flow.bytes_under_way();
            drop(flow);
            *earliest = [*earliest, deadline].into_iter().flatten().min();
            for (index, lane) in peer.lanes().iter().enumerate() {
                if let Some(stream) = lane.watch(set) {
                    if lane.awaits_answer() {
                        (*awaited, awaiting) = (Some(watched.len()), awaiting + 1);
                    }
                    watched.push((Arc::clone(peer), index));
                    streams.push(stream);
                }
            }
        }
        *awaited = awaited.filter(|_| awaiting == 1);
        let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
        let soon = earliest.map_or(TICK, |deadline| left(deadline).min(TICK));
        (soon, under_way >= MAX_DATA || watched.is_empty())
    }

    /// Works on what is ready, now.
    fn work(&self, leader: &mut Leader, now: Instant) {
        for index in 0..leader.watched.len() {
            let (readable, writable) = leader.set.ready(index);
            if readable || writable {
                let (peer, lane) = &leader.watched[index];
                peer.ready(*lane, readable, writable);
            }
        }
        let is_due = |at: Instant| now.duration_since(at) >= TICK;
        if leader.ticked.is_none_or(is_due) || leader.deadline.is_some_and(|at| at <= now) {
            leader.ticked = Some(now);
            leader.busy.extend(self.peers().iter().filter(|peer| !peer.is_at_rest()).cloned());
            leader.busy.drain(..).for_each(|peer| peer.tick(now));
        }
    }

    /// What the transport's thread does.
    fn run(&self) {
        let mut idle_since: Option<Instant> = None;
        loop {
            let mut own = self.own();
            if own.stopping {
                return;
            }
            if !self.is_busy() && idle_since.get_or_insert_with(Instant::now).elapsed() >= REST {
                own.asleep = true;
                while own.asleep && !own.stopping {
                    own = self.changed.wait(own).unwrap_or_else(PoisonError::into_inner);
                }
                idle_since = None;
            }
            // Others may lead.
            let led = self.led.load(Ordering::SeqCst);
            let waited = self.changed.wait_timeout(own, GRACE);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            self.wanted.store(false, Ordering::SeqCst);
            if !self.is_busy() {
                continue;
            }
            idle_since = None;
            if self.led.load(Ordering::SeqCst) != led {
                continue;
            }
            let Some(sleeper) = Sleeper::own() else {
                self.progress();
                continue;
            };
            if let Some(seat) = self.seat() {
                let over =
                    || self.wanted.load(Ordering::SeqCst) || !self.is_busy() || self.own().stopping;
                self.lead(seat, &sleeper, false, over, || Duration::MAX);
            }
        }
    }
}
