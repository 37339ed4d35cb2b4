//! Who waits for a socket looks at it for a while before it sleeps.
//!
//! To sleep and be woken takes as long as the rest of a short request, at either end. To look takes a processor. So who
//! waits looks only where that was of use: the window, for how long it looks, grows from nothing while waits are
//! short, and shrinks to nothing where they are not, as that of `halt_poll_ns` does in the kernel's KVM.
//!
//! Who looks may keep the processor from whom he waits for. With [`Polling::new`] he does for a moment; with
//! [`Polling::yielding`] he offers it to others first, at each look.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use socket2::SockRef;

use crate::affinity;

/// A wait that is longer than the longest window by no more than this may be short once nobody sleeps: two threads are woken in
/// turn, and each takes some 10 to 50 us.
const SLACK: Duration = Duration::from_micros(100);

/// The first window is this part of the longest.
const FIRST_PART: u32 = 4;

/// So many short waits are slept through at the most before it is tried again to look.
const MAX_RELUCTANCE: u32 = 255;

/// What a wait that was found short adds to the credit, and the most of it, where who looks gives way to others. To look and to sleep by
/// turns is worse than either where there are more threads than processors.
const CREDIT: u32 = 4;
const MAX_CREDIT: u32 = 16;

/// A look that was in vain takes no longer than the window. But on a busy machine, who gives way has the processor back after
/// some milliseconds only. A wait that was longer than the window by so much counts as so many, and this is the most of their reluctance.
const STALL: Duration = Duration::from_micros(500);
const STALL_COUNT: u32 = 16;
const MAX_RELUCTANCE_OF_STALLS: u32 = 4095;

/// Of so many connections at the most is asked where the other end is, before each wait.
const ASKED: usize = 4;

/// Others who want the processor get it once somebody has looked for so long. Not earlier: who gives it up has it back after
/// some milliseconds only, on a busy machine, where one that sleeps is woken at once.
const YIELD_AFTER: Duration = Duration::from_micros(100);

/// For how long to look: a state machine, of which the inputs are how long waits were.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    /// The longest. Zero: nobody ever looks.
    longest: Duration,
    length: Duration,
    /// Who looks gives way to others.
    gives_way: bool,
    /// So many waits may be longer than the longest window before it is made shorter: each that was found short adds to it.
    credit: u32,
    /// How many short waits are slept through before the next try. Grows when it was in vain to look.
    reluctance: u32,
    slept_through: u32,
}

impl Window {
    fn new(longest: Duration) -> Self {
        Self { longest, ..Self::default() }
    }

    /// A wait was over after so long, for `looked` of which somebody looked before sleeping; for all of it, if nobody slept.
    fn waited(&mut self, took: Duration, looked: Duration) {
        if took <= self.length && took <= looked {
            self.reluctance /= 2;
            self.credit = if self.gives_way { (self.credit + CREDIT).min(MAX_CREDIT) } else { 0 };
        } else if self.credit > 0 && took > self.longest && self.was_in_vain(looked) {
            self.credit -= 1;
        } else if took > self.short() {
            self.in_vain(looked);
            let half = self.length / 2;
            self.length = if half < self.first() { Duration::ZERO } else { half };
        } else if self.length == self.longest && !looked.is_zero() {
            // To look for longer is not allowed, and for less is of no use.
            self.in_vain(looked);
            self.length = Duration::ZERO;
        } else if !self.length.is_zero() {
            self.length = self.length.saturating_mul(2).min(self.longest);
        } else if self.slept_through >= self.reluctance {
            (self.length, self.slept_through) = (self.first(), 0);
        } else {
            self.slept_through += 1;
        }
    }

    fn in_vain(&mut self, looked: Duration) {
        if looked.is_zero() {
            return;
        }
        let (more, most) = if self.gives_way && !self.was_in_vain(looked) {
            (STALL_COUNT * (self.reluctance + 1) - 1, MAX_RELUCTANCE_OF_STALLS)
        } else {
            (2 * self.reluctance + 1, MAX_RELUCTANCE)
        };
        self.reluctance = more.min(most).max(self.reluctance);
        self.slept_through = 0;
    }

    /// Whether somebody looked, and did not stand still meanwhile.
    fn was_in_vain(&self, looked: Duration) -> bool {
        !looked.is_zero() && looked <= self.length.saturating_add(STALL)
    }

    /// The longest wait that may be short if nobody sleeps.
    fn short(&self) -> Duration {
        self.longest.saturating_add(SLACK)
    }

    fn first(&self) -> Duration {
        self.longest / FIRST_PART
    }
}

/// What threads share of which only so many look at a time.
#[derive(Debug, Default)]
pub struct Polling {
    /// For how long one looks at the most.
    longest: Duration,
    /// Others who want the processor get it once somebody has looked for so long.
    yield_after: Duration,
    /// It is at once.
    gives_way: bool,
    /// How many may look at a time, and how many do.
    most: usize,
    looking: AtomicUsize,
    /// The only processor of those who look, where nothing is said of that they are to look.
    only: Option<u16>,
    busy_polls: AtomicU64,
    sleeps: AtomicU64,
}

/// The processors that this process may run on, and of how many its control groups let it have the time.
fn processors() -> (Vec<usize>, usize) {
    let places = affinity::processors().unwrap_or_default();
    (places, thread::available_parallelism().map_or(1, usize::from))
}

/// Not where a control group gives a process that may run on several processors the time of one: to look would use that up.
const fn has_time(places: &[usize], processors: usize) -> bool {
    processors > 1 || places.len() == 1
}

impl Polling {
    /// The longest, unless another is said.
    pub const LONGEST: Duration = Duration::from_micros(100);
    /// The longest of those who give way to others.
    pub const LONGEST_YIELDING: Duration = Duration::from_micros(200);

    /// Threads that look keep their processors for a moment: for who waits for a connection that the kernel wakes it for.
    /// `longest`: unless said it is [`Polling::LONGEST`], and nothing where a control group gives this process the time of one
    /// processor only, though it may run on several.
    pub fn new(longest: Option<Duration>) -> Arc<Self> {
        let (places, processors) = processors();
        Self::on(&places, processors, longest)
    }

    /// All but one of the processors are for threads that look.
    fn on(places: &[usize], processors: usize, longest: Option<Duration>) -> Arc<Self> {
        let only = match places {
            [only] if longest.is_none() => u16::try_from(*only).ok(),
            _ => None,
        };
        let unless_said = if has_time(places, processors) { Self::LONGEST } else { Duration::ZERO };
        Arc::new(Self {
            longest: longest.unwrap_or(unless_said),
            yield_after: YIELD_AFTER,
            most: processors.saturating_sub(1).max(1),
            only,
            ..Self::default()
        })
    }

    /// Threads that offer the processor to others before each look, and so look for longer, [`Polling::LONGEST_YIELDING`] at the most, however many they are.
    /// Nobody looks where a control group gives this process, which may run on several processors, the time of one.
    pub fn yielding() -> Arc<Self> {
        let (places, processors) = processors();
        let has_time = has_time(&places, processors);
        let longest = if has_time { Self::LONGEST_YIELDING } else { Duration::ZERO };
        let (gives_way, most) = (true, usize::MAX);
        Arc::new(Self { longest, gives_way, most, ..Self::default() })
    }

    /// Threads that look for so long at the most, however many they are, and leave their processors to nobody meanwhile.
    pub fn keeping(longest: Duration) -> Arc<Self> {
        let (yield_after, most) = (Duration::MAX, usize::MAX);
        Arc::new(Self { longest, yield_after, most, ..Self::default() })
    }

    /// Whether the other end is on this machine, and was on the only processor that there is here when it last sent something:
    /// who looks keeps that from it. Of a connection within the machine the kernel receives where the other end sends.
    fn is_shared(&self, stream: &TcpStream) -> bool {
        let Some(only) = self.only else { return false };
        let received_at = SockRef::from(stream).cpu_affinity();
        let is_within = || {
            let (theirs, own) = (stream.peer_addr().ok()?.ip(), stream.local_addr().ok()?.ip());
            Some(theirs == own || theirs.is_loopback())
        };
        received_at.is_ok_and(|at| at == usize::from(only)) && is_within().unwrap_or(false)
    }

    /// For how long one looks at the most.
    pub const fn longest(&self) -> Duration {
        self.longest
    }

    /// How often somebody looked before sleeping, or instead, and how often somebody slept.
    pub fn counts(&self) -> (u64, u64) {
        (self.busy_polls.load(Ordering::Relaxed), self.sleeps.load(Ordering::Relaxed))
    }
}

/// The place of a thread that looks.
#[derive(Debug)]
struct Looking(Arc<Polling>);

impl Looking {
    fn take(polling: &Arc<Polling>) -> Option<Self> {
        // It counts at once, so that no more look than may.
        let looking = Self(Arc::clone(polling));
        let before = polling.looking.fetch_add(1, Ordering::Relaxed);
        (before < polling.most).then_some(looking)
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        self.0.looking.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Decides for waits of one kind, which come one after the other, as those of a connection. By default nobody looks.
#[derive(Debug, Default)]
pub struct BusyPoll {
    polling: Arc<Polling>,
    window: Window,
}

/// One wait.
#[derive(Debug)]
pub struct Wait {
    /// `None`: it says nothing of others.
    since: Option<Instant>,
    /// Until it was looked for as long as the window was.
    looking: Option<Looking>,
    looked: Duration,
    slept: bool,
}

impl BusyPoll {
    /// For waits of a kind that these threads have.
    pub fn new(polling: &Arc<Polling>) -> Self {
        let Polling { longest, gives_way, .. } = **polling;
        let window = Window { gives_way, ..Window::new(longest) };
        Self { window, polling: Arc::clone(polling) }
    }

    /// A wait for these connections begins. Where it is `apart`, as one of a stream of data, which has something more to do
    /// whenever a thread wakes up, nobody looks, and it says nothing of others.
    pub fn begin<'a>(&self, apart: bool, streams: impl IntoIterator<Item = &'a TcpStream>) -> Wait {
        let learns = !apart && !self.window.longest.is_zero();
        let looks = learns && !self.window.length.is_zero();
        let is_shared = |stream| self.polling.is_shared(stream);
        let looks = looks && !streams.into_iter().take(ASKED).any(is_shared);
        let looking = looks.then(|| Looking::take(&self.polling)).flatten();
        if looking.is_some() {
            self.polling.busy_polls.fetch_add(1, Ordering::Relaxed);
        }
        let since = learns.then(Instant::now);
        Wait { since, looking, looked: Duration::ZERO, slept: false }
    }

    /// Whether to look, perhaps again. If not, the thread is to sleep.
    pub fn looks(&self, wait: &mut Wait) -> bool {
        if wait.looking.is_some() {
            wait.looked = wait.elapsed();
            if wait.looked < self.window.length {
                // Who is to bring about what is waited for may want this processor. Else, each look is a system call,
                // which takes longer than a pause.
                if wait.looked >= self.polling.yield_after {
                    thread::yield_now();
                }
                return true;
            }
            wait.looking = None;
        }
        if !std::mem::replace(&mut wait.slept, true) {
            self.polling.sleeps.fetch_add(1, Ordering::Relaxed);
        }
        false
    }

    /// A wait is over now: what was waited for has come, or, with `came` false, something else ended it.
    pub fn end(&mut self, wait: &Wait, now: Instant, came: bool) {
        let Some(since) = wait.since else { return };
        let took = now.duration_since(since);
        // Who did not sleep may have stood still in between: that is no success.
        let looked = if wait.slept { wait.looked } else { took };
        if came || took > self.window.short() {
            self.window.waited(took, looked);
        }
    }
}

impl Wait {
    /// The thread is to sleep, or has something else to do.
    pub fn stop_looking(&mut self) {
        self.looking = None;
    }

    /// For how long somebody has looked.
    pub const fn looked(&self) -> Duration {
        self.looked
    }

    fn elapsed(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// What is left of a time that began with the wait.
    pub fn left_of(&self, time: Duration) -> Duration {
        if self.looked.is_zero() { time } else { time.saturating_sub(self.elapsed()) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    const fn us(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    /// A wait that ends after so long; for how long somebody looked.
    fn wait(window: &mut Window, took: Duration) -> Duration {
        let looked = took.min(window.length);
        window.waited(took, looked);
        looked
    }

    /// The windows after waits of these lengths.
    fn windows(longest: u64, waits: &[u64]) -> Vec<u64> {
        let mut window = Window::new(us(longest));
        let mut after = |took: &u64| {
            wait(&mut window, us(*took));
            window.length.as_micros() as u64
        };
        waits.iter().map(&mut after).collect()
    }

    #[test]
    fn the_window_follows_the_waits() {
        for (what, longest, waits, expected) in [
            ("it grows while waits are short", 40, &[30; 5][..], &[10, 20, 40, 40, 40][..]),
            ("and no further than to them", 40, &[15; 5], &[10, 20, 20, 20, 20]),
            ("a wait may take longer while it is slept through", 40, &[130, 130], &[10, 20]),
            ("not much longer", 40, &[141, 141, 9000], &[0, 0, 0]),
            (
                "long waits close it",
                40,
                &[5, 5, 30, 30, 500, 500, 500],
                &[10, 10, 20, 40, 20, 10, 0],
            ),
            ("one of them does not", 40, &[15, 15, 500, 5, 15, 15], &[10, 20, 10, 10, 20, 20]),
            ("it is not longer than allowed", 40, &[30, 30, 30, 60], &[10, 20, 40, 0]),
            ("nor is there one at all", 0, &[1, 0, 30], &[0, 0, 0]),
            ("no time is too long", u64::MAX, &[1, 500], &[u64::MAX / 4, u64::MAX / 4]),
        ] {
            assert_eq!(windows(longest, waits), expected, "{what}");
        }
    }

    #[test]
    fn to_look_in_vain_takes_no_more_than_a_hundredth() {
        // All are a little longer than the window may be; some are; none is.
        for waits in [&[90_u64][..], &[90, 90, 120, 300], &[10_000], &[90, 10_000]] {
            let mut window = Window::new(us(50));
            let (mut looked, mut all) = (Duration::ZERO, Duration::ZERO);
            for took in waits.iter().cycle().take(10_000) {
                looked += wait(&mut window, us(*took));
                all += us(*took);
            }
            assert!(looked < all / 100, "{waits:?}: {looked:?} of {all:?}");
        }
    }

    #[test]
    fn who_asks_and_thinks_now_and_then_is_looked_for() {
        let mut window = Window::new(us(50));
        let found = |took: u64| {
            let looked = wait(&mut window, us(took));
            looked == us(took)
        };
        let waits = (0..1000_u64).map(|index| if index % 10 == 9 { 2000 } else { 20 });
        let count = waits.map(found).filter(|is| *is).count();
        assert!(count >= 700, "{count}");
        // It was in vain for long, and is not any more.
        let mut window = Window::new(us(50));
        (0..1000).for_each(|_| _ = wait(&mut window, us(90)));
        let waits = (0..1000).map(|_| wait(&mut window, us(20)) == us(20));
        assert!(waits.filter(|is| *is).count() >= 600);
    }

    #[test]
    fn what_comes_while_who_looks_stands_still_was_not_found() {
        let mut window = Window { length: us(50), ..Window::new(us(50)) };
        window.waited(us(3000), us(3000));
        assert_eq!((window.length, window.reluctance), (us(25), 1));
        window.waited(us(40), us(40));
        assert_eq!((window.length, window.reluctance), (us(50), 1));
    }

    #[test]
    fn with_credit_some_waits_may_be_long() {
        let mut window = Window { gives_way: true, ..Window::new(us(200)) };
        // Short ones earn it, and one of five is enough.
        (0..20).for_each(|_| _ = wait(&mut window, us(150)));
        assert_eq!((window.length, window.credit), (us(200), MAX_CREDIT));
        for _ in 0..1000 {
            (0..4).for_each(|_| _ = wait(&mut window, us(260)));
            assert_eq!(wait(&mut window, us(20)), us(20));
        }
        // It does not last for ever, and not at all where who looks stands still.
        let mut long = window;
        (0..MAX_CREDIT + 1).for_each(|_| _ = wait(&mut long, us(260)));
        assert_eq!((long.length, long.credit), (us(0), 0));
        window.waited(us(3000), us(3000));
        assert!(window.length < us(200) && window.reluctance >= 15, "{window:?}");
    }

    #[test]
    fn who_stands_still_whenever_he_looks_hardly_ever_does() {
        let mut window = Window { gives_way: true, ..Window::new(us(50)) };
        let (mut stood_still, mut all) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..100_000 {
            // Asleep it would be woken at once. Who looks gives up the processor, and has it back after a slice of the scheduler's.
            let looks = !window.length.is_zero();
            let took = if looks { us(3000) } else { us(30) };
            window.waited(took, if looks { took } else { Duration::ZERO });
            stood_still += if looks { took } else { Duration::ZERO };
            all += took;
        }
        assert!(stood_still < all / 20, "{stood_still:?} of {all:?}");
        // As soon as nobody else wants the processor, he looks again.
        let found = (0..10_000).filter(|_| wait(&mut window, us(30)) == us(30)).count();
        assert!(found > 5_000, "{found}");
    }

    #[test]
    fn who_gives_way_does_so_at_each_look_and_who_keeps_the_processor_never_does() {
        let yielding = Polling::yielding();
        let (places, count) = processors();
        let has_time = has_time(&places, count);
        assert_eq!(!yielding.longest.is_zero(), has_time);
        assert_eq!((yielding.gives_way, yielding.yield_after), (true, Duration::ZERO));
        let keeping = Polling::keeping(Duration::MAX);
        assert_eq!((keeping.gives_way, keeping.yield_after), (false, Duration::MAX));
        for polling in [yielding, keeping] {
            if polling.longest.is_zero() {
                continue;
            }
            let mut busy = BusyPoll::new(&polling);
            // The first short wait is slept through, and however many look then, all may.
            busy.end(&busy.begin(false, []), Instant::now(), true);
            assert!(!busy.window.length.is_zero());
            let waits: Vec<_> = (0..100).map(|_| busy.begin(false, [])).collect();
            assert!(waits.iter().all(|wait| wait.looking.is_some()));
        }
    }

    #[test]
    fn so_many_look_at_a_time_as_may() {
        // This test may stand still for a while.
        let longest = Duration::from_secs(60);
        let polling = Arc::new(Polling { most: 2, longest, ..Polling::default() });
        let mut busy = BusyPoll::new(&polling);
        busy.window.length = longest;
        let (first, second, mut third) =
            (busy.begin(false, []), busy.begin(false, []), busy.begin(false, []));
        assert!(first.looking.is_some() && second.looking.is_some() && third.looking.is_none());
        assert!(!busy.looks(&mut third));
        assert_eq!(polling.counts(), (2, 1));
        // What was not tried was not in vain.
        busy.end(&third, Instant::now(), true);
        assert_eq!((busy.window.length, busy.window.reluctance), (longest, 0));
        drop(first);
        assert!(busy.begin(false, []).looking.is_some());
        assert!(busy.begin(true, []).looking.is_none(), "of a stream");
    }

    #[test]
    fn who_has_the_time_of_one_processor_looks_where_it_is_pinned_to_it_or_where_it_is_said() {
        let on = |places: &[usize], processors, longest| {
            let polling = Polling::on(places, processors, longest);
            (polling.longest, polling.most, polling.only)
        };
        let usual = Polling::LONGEST;
        assert_eq!(on(&[0, 1], 1, None), (Duration::ZERO, 1, None), "a control group says one");
        assert_eq!(on(&[], 1, None), (Duration::ZERO, 1, None), "nobody knows");
        assert_eq!(on(&[3], 1, None), (usual, 1, Some(3)));
        assert_eq!(on(&[3], 1, Some(us(70))), (us(70), 1, None));
        assert_eq!(on(&[0, 1], 2, None), (usual, 1, None));
        assert_eq!(on(&[0, 1], 1, Some(us(70))), (us(70), 1, None));
        let all: Vec<_> = (0..16).collect();
        assert_eq!(on(&all, 16, None), (usual, 15, None));
        assert_eq!(on(&all, 16, Some(Duration::ZERO)).0, Duration::ZERO);
        // Where it is off nobody learns, and nobody looks.
        let mut busy = BusyPoll::new(&Polling::on(&[0, 1], 1, None));
        for _ in 0..10 {
            let mut wait = busy.begin(false, []);
            assert!(!busy.looks(&mut wait));
            busy.end(&wait, Instant::now(), true);
        }
        assert_eq!(busy.polling.counts(), (0, 10));
    }

    #[test]
    fn nobody_looks_for_whom_he_keeps_from_the_only_processor() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        let says_from = |processor| {
            let pinned = affinity::pin(processor).unwrap();
            (&far).write_all(&[1]).unwrap();
            (&near).read_exact(&mut [0]).unwrap();
            drop(pinned);
        };
        let is_shared = |only| Polling { only: Some(only), ..Polling::default() }.is_shared(&near);
        for processor in affinity::processors().unwrap() {
            says_from(processor);
            let number = processor as u16;
            assert!(is_shared(number) && !is_shared(number + 1), "{processor}");
            assert!(!Polling::default().is_shared(&near), "there are more of them");
            let longest = us(50);
            let window = Window { length: longest, ..Window::new(longest) };
            for (only, looks) in [(number, false), (number + 1, true)] {
                let polling = Polling { most: 1, longest, only: Some(only), ..Polling::default() };
                let busy = BusyPoll { polling: Arc::new(polling), window };
                let wait = busy.begin(false, [&near]);
                assert_eq!(wait.looking.is_some(), looks, "{processor}");
            }
        }
    }

    #[test]
    fn one_that_did_not_come_says_little() {
        let polling = Arc::new(Polling { most: 1, longest: us(50), ..Polling::default() });
        let mut busy = BusyPoll::new(&polling);
        let mut wait = busy.begin(false, []);
        assert!(!busy.looks(&mut wait) && !busy.looks(&mut wait));
        assert_eq!(polling.counts(), (0, 1));
        wait.since = Instant::now().checked_sub(us(1));
        busy.end(&wait, Instant::now(), false);
        assert_eq!(busy.window.length, Duration::ZERO);
        busy.window.length = us(50);
        wait.since = Instant::now().checked_sub(us(151));
        busy.end(&wait, Instant::now(), false);
        assert_eq!(busy.window.length, us(25));
    }
}
