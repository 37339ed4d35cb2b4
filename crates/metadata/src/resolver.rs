//! Addresses of host names, asked for on threads of their own: the system's resolver blocks, for as
//! long as it likes.
//!
//! There are few of these threads, and one name takes no more than one of them, however many ask for
//! it. Who gives up waiting leaves nothing behind. An address in place of a name takes no thread.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use millstream_net::{ends_between_forks, forks};

/// How long an answer is used again.
const KEPT: Duration = Duration::from_secs(30);
/// How many answers are kept.
const KEPT_NAMES: usize = 1024;
/// How many addresses of a name are used.
const MAX_ADDRESSES: usize = 64;
/// How many names are looked up at a time.
const MAX_THREADS: usize = 4;
/// How long a thread waits for another name before it ends.
const IDLE: Duration = Duration::from_secs(10);

/// The resolver of a process, and those of processes that are forked off it: these have none of its threads, and
/// perhaps its lock as somebody held it.
struct OfProcess {
    /// See [`forks`].
    forks: u32,
    resolver: Resolver,
    next: OnceLock<Box<Self>>,
}

static FIRST: OnceLock<Box<OfProcess>> = OnceLock::new();

/// The addresses of a host, with ports that mean nothing.
pub type Addresses = Arc<[SocketAddr]>;
/// Takes the addresses, on a thread of the resolver.
pub type Answer = Box<dyn FnOnce(io::Result<Addresses>) + Send>;
type Lookup = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Looks host names up.
#[derive(Clone)]
pub struct Resolver {
    shared: Arc<Shared>,
}

/// What a resolver says at once.
#[derive(Debug)]
pub enum Resolution {
    /// It needs no lookup.
    Known(Addresses),
    /// The answer follows, unless this is dropped before.
    Asked(Ticket),
}

/// A place among those who wait for the addresses of a name. Dropping it gives it up.
pub struct Ticket {
    shared: Arc<Shared>,
    host: String,
    number: u64,
}

struct Shared {
    lookup: Box<Lookup>,
    state: Mutex<State>,
    /// There is a name to look up.
    work: Condvar,
}

#[derive(Default)]
struct State {
    kept: HashMap<String, Kept>,
    asked: HashMap<String, Asked>,
    /// The names that no thread looks up yet, by their `Asked::place`: the smallest is the oldest.
    queue: BTreeMap<u64, String>,
    /// For places and tickets.
    next: u64,
    threads: usize,
    idle_threads: usize,
}

struct Kept {
    addresses: Addresses,
    since: Instant,
}

/// A name that is looked up, or waits for a thread.
struct Asked {
    place: u64,
    waiting: BTreeMap<u64, Answer>,
}

impl Resolver {
    /// The process's: a lookup cannot be ended, so what bounds their number must be one.
    pub fn system() -> Self {
        let forks = forks();
        let mut place = &FIRST;
        loop {
            let of_process = place.get().unwrap_or_else(|| {
                let resolver = Self::new(millstream_net::lookup);
                let new = Box::new(OfProcess { forks, resolver, next: OnceLock::new() });
                // No longer than this is it held by a thread that a fork may not have.
                place.get_or_init(|| new)
            });
            if of_process.forks == forks {
                return of_process.resolver.clone();
            }
            place = &of_process.next;
        }
    }

    /// With a lookup of its own, as tests need it.
    pub fn new(
        lookup: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                lookup: Box::new(lookup),
                state: Mutex::default(),
                work: Condvar::new(),
            }),
        }
    }

    /// The addresses of a host, now or by `answer`. Does not wait.
    pub fn resolve(&self, host: &str, answer: Answer) -> io::Result<Resolution> {
        if let Some(address) = literal(host) {
            return Ok(Resolution::Known([address].into()));
        }
        let mut state = self.shared.lock();
        if let Some(kept) = state.kept.get(host)
            && kept.since.elapsed() < KEPT
        {
            return Ok(Resolution::Known(Arc::clone(&kept.addresses)));
        }
        let (place, number) = (state.number(), state.number());
        if !state.asked.contains_key(host) {
            // One thread for each name in the queue, as far as there may be so many.
            if state.queue.len() >= state.idle_threads && state.threads < MAX_THREADS {
                match self.shared.start_thread() {
                    Ok(()) => state.threads += 1,
                    // Those that there are will come to it.
                    Err(_) if state.threads > 0 => {}
                    Err(error) => return Err(error),
                }
            }
            state.queue.insert(place, host.to_owned());
            state.asked.insert(host.to_owned(), Asked { place, waiting: BTreeMap::new() });
            self.shared.work.notify_one();
        }
        if let Some(asked) = state.asked.get_mut(host) {
            asked.waiting.insert(number, answer);
        }
        let shared = Arc::clone(&self.shared);
        Ok(Resolution::Asked(Ticket { shared, host: host.to_owned(), number }))
    }

    /// The addresses of a host, waited for until `deadline`.
    pub fn resolve_until(&self, host: &str, deadline: Instant) -> io::Result<Addresses> {
        let (tell, told) = mpsc::sync_channel(1);
        let answer = Box::new(move |addresses| {
            // Nobody may wait any more.
            let _ = tell.send(addresses);
        });
        match self.resolve(host, answer)? {
            Resolution::Known(addresses) => Ok(addresses),
            Resolution::Asked(_ticket) => told
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
                .unwrap_or_else(|_| Err(no_answer())),
        }
    }

    /// Forgets the addresses of a host at which nobody answers: it may have got others.
    pub fn forget(&self, host: &str) {
        self.shared.lock().kept.remove(host);
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("host", &self.host).finish_non_exhaustive()
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.lock();
        f.debug_struct("Resolver")
            .field("kept", &state.kept.len())
            .field("asked", &state.asked.len())
            .finish_non_exhaustive()
    }
}

/// The error of who has waited for a resolver for as long as it could.
pub(crate) fn no_answer() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the resolver did not answer in time")
}

/// The address that is written in place of a name.
fn literal(host: &str) -> Option<SocketAddr> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Some((address, 0).into());
    }
    let (address, scope) = host.split_once('%')?;
    let address: Ipv6Addr = address.parse().ok()?;
    let scope = scope.parse().ok().or_else(|| interface_index(scope))?;
    Some(SocketAddrV6::new(address, 0, 0, scope).into())
}

/// The number of an interface, if there is one with this name.
fn interface_index(name: &str) -> Option<u32> {
    if name.contains('/') {
        return None;
    }
    let text = std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex")).ok()?;
    text.trim().parse().ok()
}

impl State {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn keep(&mut self, host: &str, addresses: &Addresses) {
        if self.kept.len() >= KEPT_NAMES {
            self.kept.retain(|_, kept| kept.since.elapsed() < KEPT);
        }
        if self.kept.len() < KEPT_NAMES {
            let kept = Kept { addresses: Arc::clone(addresses), since: Instant::now() };
            self.kept.insert(host.to_owned(), kept);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start_thread(self: &Arc<Self>) -> io::Result<()> {
        let shared = Arc::clone(self);
        thread::Builder::new()
            .name("resolve".to_owned())
            .spawn(ends_between_forks(move || shared.work()))?;
        Ok(())
    }

    /// Looks names up until there has been none for long.
    fn work(&self) {
        let mut state = self.lock();
        loop {
            let Some((_, host)) = state.queue.pop_first() else {
                state.idle_threads += 1;
                let (back, timeout) =
                    self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
                state = back;
                state.idle_threads -= 1;
                if timeout.timed_out() && state.queue.is_empty() {
                    state.threads -= 1;
                    return;
                }
                continue;
            };
            drop(state);
            let result = (self.lookup)(&host).map(|mut addresses| {
                addresses.truncate(MAX_ADDRESSES);
                Addresses::from(addresses)
            });
            state = self.lock();
            if let Ok(addresses) = &result {
                state.keep(&host, addresses);
            }
            let waiting = state.asked.remove(&host).map(|asked| asked.waiting);
            drop(state);
            for answer in waiting.into_iter().flat_map(BTreeMap::into_values) {
                answer(copy(&result));
            }
            state = self.lock();
        }
    }
}

/// The same for each of those who wait: errors cannot be cloned.
fn copy(result: &io::Result<Addresses>) -> io::Result<Addresses> {
    match result {
        Ok(addresses) => Ok(Arc::clone(addresses)),
        Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let State { asked, queue, .. } = &mut *state;
        let Some(name) = asked.get_mut(&self.host) else { return };
        let answer = name.waiting.remove(&self.number);
        // A name that is being looked up stays: who asks for it next need not do so again.
        if name.waiting.is_empty() && queue.remove(&name.place).is_some() {
            asked.remove(&self.host);
        }
        // What it holds may be dropped with no lock held only.
        drop(state);
        drop(answer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    fn soon() -> Instant {
        Instant::now() + LONG
    }

    /// A resolver whose lookups are announced, and end when they are told what to answer.
    fn scripted() -> (Resolver, mpsc::Receiver<String>, mpsc::Sender<io::Result<Vec<SocketAddr>>>) {
        let (announce, asked) = mpsc::channel();
        let (release, released) = mpsc::channel();
        let released = Mutex::new(released);
        let resolver = Resolver::new(move |host| {
            announce.send(host.to_owned()).unwrap();
            released.lock().unwrap().recv().unwrap()
        });
        (resolver, asked, release)
    }

    fn addresses(text: &str) -> Vec<SocketAddr> {
        vec![(text.parse::<IpAddr>().unwrap(), 0).into()]
    }

    /// Asks, and tells what is answered.
    fn ask(resolver: &Resolver, host: &str) -> (Resolution, mpsc::Receiver<io::Result<Addresses>>) {
        let (tell, told) = mpsc::channel();
        let answer = Box::new(move |result| tell.send(result).unwrap());
        (resolver.resolve(host, answer).unwrap(), told)
    }

    #[test]
    fn an_address_is_no_name() {
        let resolver = Resolver::new(|host| panic!("{host} was looked up"));
        for (host, expected) in [
            ("127.0.0.1", "127.0.0.1:0"),
            ("::1", "[::1]:0"),
            ("fe80::1%7", "[fe80::1%7]:0"),
            ("fe80::1%lo", "[fe80::1%1]:0"),
        ] {
            let addresses = resolver.resolve_until(host, soon()).unwrap();
            assert_eq!(addresses[0].to_string(), expected);
        }
        for host in ["fe80::1%../lo", "fe80::1%no-such", "fe80::1%", "localhost", "1.2.3.4%1"] {
            assert_eq!(literal(host), None, "{host}");
        }
    }

    #[test]
    fn many_who_ask_for_a_name_wait_for_one_lookup_and_the_next_need_not_wait() {
        let (resolver, asked, release) = scripted();
        let waiting: Vec<_> = (0..100).map(|_| ask(&resolver, "node")).collect();
        release.send(Ok(addresses("127.0.0.9"))).unwrap();
        for (_, told) in &waiting {
            assert_eq!(told.recv().unwrap().unwrap()[..], addresses("127.0.0.9"));
        }
        assert!(matches!(ask(&resolver, "node").0, Resolution::Known(_)));
        assert_eq!(asked.try_iter().collect::<Vec<_>>(), ["node"]);

        resolver.forget("node");
        let (_ticket, told) = ask(&resolver, "node");
        release.send(Err(io::Error::new(io::ErrorKind::NotFound, "gone"))).unwrap();
        assert_eq!(told.recv().unwrap().unwrap_err().to_string(), "gone");
        assert!(matches!(ask(&resolver, "node").0, Resolution::Asked(_)), "errors are not kept");
        release.send(Ok(Vec::new())).unwrap();
    }

    #[test]
    fn lookups_that_hang_take_few_threads_and_leave_nothing_of_who_gave_up() {
        let (resolver, asked, release) = scripted();
        let hanging: Vec<_> =
            (0..MAX_THREADS).map(|i| ask(&resolver, &format!("hangs-{i}"))).collect();
        for _ in 0..MAX_THREADS {
            asked.recv().unwrap();
        }
        let waiting: Vec<_> = (0..1000).map(|i| ask(&resolver, &format!("waits-{i}"))).collect();
        assert_eq!(resolver.shared.lock().threads, MAX_THREADS);
        drop((hanging, waiting));
        // Names that hang are still known: asking for one again takes no place in the queue.
        let again = ask(&resolver, "hangs-0");
        let state = resolver.shared.lock();
        assert_eq!((state.queue.len(), state.asked.len()), (0, MAX_THREADS));
        assert!(state.asked.values().map(|asked| asked.waiting.len()).sum::<usize>() == 1);
        drop(state);
        // A deadline passes although no thread is free.
        let past = Instant::now() + Duration::from_millis(20);
        let error = resolver.resolve_until("late", past).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        for _ in 0..MAX_THREADS {
            release.send(Ok(addresses("127.0.0.9"))).unwrap();
        }
        assert_eq!(again.1.recv().unwrap().unwrap()[..], addresses("127.0.0.9"));
        assert!(asked.try_recv().is_err(), "nobody waits for it any more");
    }

    #[test]
    fn names_that_are_kept_are_bounded() {
        let resolver = Resolver::new(|_| Ok(vec![([127, 0, 0, 1], 0).into(); MAX_ADDRESSES + 1]));
        for i in 0..KEPT_NAMES + 10 {
            let addresses = resolver.resolve_until(&format!("name-{i}"), soon()).unwrap();
            assert_eq!(addresses.len(), MAX_ADDRESSES);
        }
        assert_eq!(resolver.shared.lock().kept.len(), KEPT_NAMES);
    }
}
