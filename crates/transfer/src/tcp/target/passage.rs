//! What a relay has: ways to the segments of other processes, and memory to stage in.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use millstream_metadata::RelayedDesc;

use crate::SegmentError;
use crate::engine::Inner;
use crate::memory::LocalMemory;
use crate::path::Place;
use crate::segment::OpenSegment;
use crate::tcp::message::{MAX_DATA, Welcome};
use crate::tcp::relay::RelayLimits;

/// The longest name of a segment.
const MAX_NAME: usize = 1024;

/// So many segments are looked for at a time: the control port has threads for others, too.
const MAX_LOOKING: usize = 8;

/// Bytes of the descriptors of all segments that there are ways to.
const MAX_DESCRIPTORS: usize = 64 << 20;

/// Ways to the segments of other processes, which their numbers name. What is under way over them is staged in memory that
/// was allocated before: a message for each connection.
pub(in crate::tcp) struct Relay {
    engine: Weak<Inner>,
    limits: RelayLimits,
    /// The port for data here.
    port: u16,
    /// Where the memory begins.
    staging: u64,
    /// The places in it that no connection has.
    free: Mutex<Vec<usize>>,
    ways: Mutex<HashMap<u64, Arc<Way>>>,
    looking: AtomicUsize,
    is_stopped: AtomicBool,
}

/// A way to a segment.
struct Way {
    engine: Weak<Inner>,
    segment: Arc<OpenSegment>,
    connections: AtomicUsize,
    /// When it was asked for last.
    asked: Mutex<Instant>,
    /// Bytes of the descriptor.
    length: AtomicUsize,
}

/// Who looks for a segment.
struct Looking<'a>(&'a AtomicUsize);

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.upgrade() {
            engine.close_aside(&self.segment);
        }
    }
}

/// A connection that a relay serves: its place, and where it leads.
pub(super) struct Passage<'a> {
    relay: &'a Relay,
    number: u64,
    way: Arc<Way>,
    place: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Relay {
    /// Bytes that are staged for a connection.
    pub(in crate::tcp) const STAGED: usize = MAX_DATA as usize;

    /// With [`Relay::STAGED`] bytes of registered memory for each connection, from this address on.
    pub(in crate::tcp) fn new(
        engine: Weak<Inner>,
        limits: RelayLimits,
        port: u16,
        staging: u64,
    ) -> Self {
        Self {
            engine,
            port,
            staging,
            free: Mutex::new((0..limits.max_connections).collect()),
            limits,
            ways: Mutex::default(),
            looking: AtomicUsize::new(0),
            is_stopped: AtomicBool::new(false),
        }
    }

    /// Nobody gets a way any more.
    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Ordering::SeqCst);
        let ways = std::mem::take(&mut *lock(&self.ways));
        drop(ways);
    }

    /// The way to the segment of this name, or why there is none. May wait for its process.
    pub(in crate::tcp) fn open(&self, name: &str) -> Result<RelayedDesc, String> {
        if name.len() > MAX_NAME {
            return Err(format!("a segment's name has {MAX_NAME} bytes at most"));
        }
        let ending = || "it is shutting down".to_owned();
        let engine = self.engine.upgrade().ok_or_else(ending)?;
        if name == engine.name() {
            return Err("that is the relay's own segment, which it does not relay to".to_owned());
        }
        let looking = Looking(&self.looking);
        if self.looking.fetch_add(1, Ordering::SeqCst) >= MAX_LOOKING {
            return Err(format!("it looks for {MAX_LOOKING} segments already: ask again"));
        }
        let known = match self.known(name) {
            None => None,
            Some((number, way)) => {
                // What was asked of the one before is nothing to another process.
                let is_same = match engine.refresh(&way.segment) {
                    Ok(()) => true,
                    Err(SegmentError::Restarted { .. }) => false,
                    Err(error) => return Err(error.to_string()),
                };
                if !is_same {
                    let gone = lock(&self.ways).remove(&number);
                    drop(gone);
                }
                is_same.then_some((number, way))
            }
        };
        let (number, way) = match known {
            Some(known) => known,
            None => self.make(&engine, name)?,
        };
        *lock(&way.asked) = Instant::now();
        let descriptor = String::from_utf8(way.segment.descriptor().to_json());
        let descriptor = descriptor.map_err(|_| "its descriptor is no text".to_owned())?;
        way.length.store(descriptor.len(), Ordering::SeqCst);
        self.make_room(number)?;
        drop(looking);
        let (name, port) = (engine.name().to_owned(), self.port);
        Ok(RelayedDesc { number, name, port, descriptor })
    }

    fn known(&self, name: &str) -> Option<(u64, Arc<Way>)> {
        let ways = lock(&self.ways);
        let (number, way) = ways.iter().find(|(_, way)| way.segment.name == name)?;
        Some((*number, Arc::clone(way)))
    }

    fn make(&self, engine: &Arc<Inner>, name: &str) -> Result<(u64, Arc<Way>), String> {
        let segment = engine.open_aside(name).map_err(|error| error.to_string())?;
        let way = Way {
            engine: self.engine.clone(),
            segment,
            connections: AtomicUsize::new(0),
            asked: Mutex::new(Instant::now()),
            length: AtomicUsize::new(0),
        };
        let way = Arc::new(way);
        check(engine, &way.segment)?;
        let number = RandomState::new().hash_one(Instant::now());
        let mut ways = lock(&self.ways);
        if self.is_stopped.load(Ordering::SeqCst) {
            return Err("it is shutting down".to_owned());
        }
        ways.insert(number, Arc::clone(&way));
        Ok((number, way))
    }

    /// Gives up ways that nobody uses, the oldest first, until there are no more than there may be. If that cannot be, this
    /// one goes.
    fn make_room(&self, wanted: u64) -> Result<(), String> {
        let (mut given_up, mut result) = (Vec::new(), Ok(()));
        let mut ways = lock(&self.ways);
        loop {
            let bytes: usize = ways.values().map(|way| way.length.load(Ordering::SeqCst)).sum();
            let (count, limit) = (ways.len(), self.limits.max_segments);
            if count <= limit && bytes <= MAX_DESCRIPTORS {
                break;
            }
            let is_idle = |way: &Way| way.connections.load(Ordering::SeqCst) == 0;
            let idle = ways.iter().filter(|(number, way)| **number != wanted && is_idle(way));
            let oldest = idle.min_by_key(|(_, way)| *lock(&way.asked)).map(|(number, _)| *number);
            if oldest.is_none() {
                result = Err(format!(
                    "it relays to {} segments already, as many as it may (tcp.relay_segments), or as long descriptors",
                    count - 1
                ));
            }
            given_up.extend(ways.remove(&oldest.unwrap_or(wanted)));
            if result.is_err() {
                break;
            }
        }
        drop(ways);
        // Closing them takes locks.
        drop(given_up);
        result
    }

    /// Begins to serve a connection for the way of this number; what it is told, if not.
    pub(super) fn enter(&self, number: u64) -> Result<Passage<'_>, Welcome> {
        // With the lock: a way with connections stays.
        let ways = lock(&self.ways);
        let way = ways.get(&number).ok_or(Welcome::OtherIncarnation)?;
        let place = lock(&self.free).pop().ok_or(Welcome::Full)?;
        way.connections.fetch_add(1, Ordering::SeqCst);
        Ok(Passage { relay: self, number, way: Arc::clone(way), place })
    }
}

/// Whether this engine itself reaches a segment, which is memory.
fn check(engine: &Inner, segment: &Arc<OpenSegment>) -> Result<(), String> {
    let descriptor = segment.descriptor();
    if descriptor.incarnation == Some(engine.incarnation()) {
        return Err("that is the relay's own segment, which it does not relay to".to_owned());
    }
    let usable = || (0..).zip(&descriptor.buffers).filter(|(_, buffer)| buffer.fault.is_none());
    if usable().any(|(_, buffer)| buffer.file_path.is_some()) {
        return Err("it relays to memory, and that segment is a file".to_owned());
    }
    let mut places = usable().map(|(buffer, _)| Place { segment, descriptor: &descriptor, buffer });
    if usable().next().is_none()
        || places.any(|place| engine.choose(place, crate::path::Allowed::default(), &[]).is_some())
    {
        return Ok(());
    }
    let reports = engine.reports(segment, &descriptor);
    let reasons = reports.iter().filter_map(|report| {
        report.reason.as_ref().map(|reason| format!("{}: {reason}", report.transport))
    });
    let reasons: Vec<_> = reasons.collect();
    Err(format!("it has no way there itself: {}", reasons.join("; ")))
}

impl Passage<'_> {
    /// The address of its memory.
    pub(super) fn address(&self) -> u64 {
        self.relay.staging + (self.place * Relay::STAGED) as u64
    }

    /// The engine, and what it knows of that memory; `None` when it ends.
    pub(super) fn staging(&self) -> Option<(Arc<Inner>, Arc<LocalMemory>)> {
        let is_stopped = self.relay.is_stopped.load(Ordering::SeqCst);
        let engine = self.relay.engine.upgrade().filter(|_| !is_stopped)?;
        let memory = engine.memory().find(self.address(), Relay::STAGED as u64)?;
        Some((engine, memory))
    }

    pub(super) fn segment(&self) -> &OpenSegment {
        &self.way.segment
    }

    /// How long the transfers of a message may take.
    pub(super) fn timeout(&self) -> Duration {
        self.relay.limits.timeout
    }

    /// How long it may stay without a message.
    pub(super) fn idle(&self) -> Duration {
        self.relay.limits.idle
    }

    /// Nobody gets this way any more: who asks for the segment gets another one.
    pub(super) fn target_is_gone(&self) {
        let gone = lock(&self.relay.ways).remove(&self.number);
        drop(gone);
    }
}

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        lock(&self.relay.free).push(self.place);
        self.way.connections.fetch_sub(1, Ordering::SeqCst);
    }
}
