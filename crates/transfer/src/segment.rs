//! Segments that are open, and the engine's own.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use millstream_metadata::{BufferDesc, SegmentDesc};

use crate::departures::Departures;
use crate::fail_over::Avoided;
use crate::metrics::Traffic;
use crate::path::Told;
use crate::tcp::relay::Way;
use crate::{BufferError, SegmentError};

/// The most segments open at a time.
const MAX_SEGMENTS: usize = 65_536;

/// How long to wait before it is tried again whether a transport reaches a segment.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// The number of an open segment in its engine.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SegmentId(pub u32);

impl SegmentId {
    /// The engine's own segment.
    pub const LOCAL: Self = Self(0);
}

/// An open segment. Clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct Segment {
    pub(crate) open: Arc<OpenSegment>,
}

/// A buffer of a segment.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SegmentBuffer {
    /// Virtual address of its first byte, in its process.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// Where its memory is: `cpu:0`.
    pub location: String,
    /// What is wrong with it in the segment's descriptor, if anything: requests to it are refused.
    pub fault: Option<&'static str>,
}

/// What the engine knows of a segment.
#[derive(Debug)]
pub(crate) struct OpenSegment {
    pub(crate) id: SegmentId,
    pub(crate) name: String,
    view: RwLock<View>,
    /// How often something has happened that the descriptor may not say.
    marks: AtomicU64,
    /// Of how many of these the descriptor knows. If not of all, ask again before the next use.
    seen: AtomicU64,
    /// Held while transports are told of a descriptor; whether they have been.
    preparing: Mutex<bool>,
    silence: Mutex<Silence>,
    /// When it was last tried whether a segment that no transport reached is reached now.
    tried: Mutex<Option<Instant>>,
    pub(crate) told: Told,
    pub(crate) avoided: Avoided,
    pub(crate) departures: Departures,
    /// What was copied to and from it.
    pub(crate) traffic: Traffic,
    /// Its process was found through a relay, and the way there.
    relayed: AtomicBool,
    way: Mutex<Option<Way>>,
    /// It stays that of one start of its process.
    bound: bool,
}

/// A version of a segment's descriptor, and the order of its buffers in memory.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) descriptor: Arc<SegmentDesc>,
    /// Indexes of the buffers that can be used, by their addresses.
    order: Arc<[u32]>,
}

impl View {
    fn new(descriptor: SegmentDesc) -> Self {
        let buffers = &descriptor.buffers;
        let usable = (0..).zip(buffers).filter(|(_, buffer)| buffer.fault.is_none());
        let mut order: Vec<u32> = usable.map(|(index, _)| index).collect();
        order.sort_by_key(|&index| buffers[index as usize].addr);
        Self { order: order.into(), descriptor: Arc::new(descriptor) }
    }

    /// The index of the buffer that holds all of these bytes.
    pub(crate) fn find(&self, address: u64, length: u64) -> Option<usize> {
        let buffers = &self.descriptor.buffers;
        let after = self.order.partition_point(|&index| buffers[index as usize].addr <= address);
        let before = self.order.get(after.checked_sub(1)?).map(|&index| index as usize);
        let holds = |&index: &usize| buffers[index].contains(address, length);
        if let Some(index) = before
            && self.holds_together(after - 1, address, length)
        {
            return Some(index);
        }
        // Buffers of one process do not overlap, but nobody says that a descriptor is true.
        let usable = || (0..buffers.len()).filter(|&index| buffers[index].fault.is_none());
        before.filter(holds).or_else(|| usable().find(holds))
    }

    /// The buffer whose keys the byte at an address has, of a request that begins in this one: of memory
    /// that is several regions, each has its own.
    pub(crate) fn part(&self, buffer: usize, address: u64) -> Option<&BufferDesc> {
        let buffers = &self.descriptor.buffers;
        let first = buffers.get(buffer)?;
        if first.part_of.is_none() || first.contains(address, 1) {
            return Some(first);
        }
        let after = self.order.partition_point(|&index| buffers[index as usize].addr <= address);
        let found = &buffers[*self.order.get(after.checked_sub(1)?)? as usize];
        (found.part_of == first.part_of && found.contains(address, 1)).then_some(found)
    }

    /// Bytes from the start of a buffer to the end of the piece of memory that it is of.
    fn length_from(&self, buffer: usize) -> u64 {
        let buffers = &self.descriptor.buffers;
        let Some(first) = buffers.get(buffer).filter(|it| it.fault.is_none()) else { return 0 };
        let place = self.order.partition_point(|&index| buffers[index as usize].addr < first.addr);
        let found = self.order.get(place).is_some_and(|&index| index as usize == buffer);
        let end = found.then(|| self.pieces_from(place).last()).flatten();
        end.map_or(first.length, |end| end - first.addr)
    }

    /// The ends of the buffer at this place in the order, and of those that follow it without a gap and are of
    /// the same piece of memory.
    fn pieces_from(&self, place: usize) -> impl Iterator<Item = u64> {
        let mut parts = self.order[place..].iter().map(|&it| &self.descriptor.buffers[it as usize]);
        let first = parts.next();
        let end = |it: &BufferDesc| it.addr.saturating_add(it.length);
        let keyed = first.is_some_and(|it| !it.rkey.is_empty() || it.shm_key.is_some());
        let mut until = first.map(end);
        let following = parts.map_while(move |next| {
            let goes_on = keyed && until == Some(next.addr) && goes_on(first?, next);
            // One of no bytes ends nowhere.
            until = Some(end(next)).filter(|_| goes_on && next.length > 0);
            until
        });
        first.map(end).into_iter().chain(following)
    }

    /// Whether these bytes lie in the buffer at this place in the order and those that follow it without a
    /// gap, which have the same keys, or are parts of the same: one piece of memory whose pages are on several
    /// NUMA nodes, or that is several regions of each device.
    fn holds_together(&self, place: usize, address: u64, length: u64) -> bool {
        let Some(end) = address.checked_add(length) else { return false };
        let first = &self.descriptor.buffers[self.order[place] as usize];
        let mut ends = self.pieces_from(place);
        // In the first one is a byte at least.
        first.contains(address, 1) && ends.any(|until| until >= end)
    }
}

/// Whether two buffers are of one piece of memory.
fn goes_on(first: &BufferDesc, next: &BufferDesc) -> bool {
    let parts = first.part_of.is_some() && next.part_of == first.part_of;
    next.shm_key == first.shm_key && (parts || next.rkey == first.rkey)
}

impl Segment {
    /// Its number, for requests.
    pub fn id(&self) -> SegmentId {
        self.open.id
    }

    /// The name it was opened by.
    pub fn name(&self) -> &str {
        &self.open.name
    }

    /// How its buffers are reached: `rdma`.
    pub fn protocol(&self) -> String {
        self.open.descriptor().protocol.clone()
    }

    /// Which start of its process this is, as a random number, when it was opened or refreshed.
    /// `None` where the peer does not say, as Mooncake does not.
    pub fn incarnation(&self) -> Option<u64> {
        self.open.descriptor().incarnation
    }

    /// Its buffers, as they were when it was opened or refreshed. One that makes no sense is among them, so that the others
    /// have their places ([`SegmentBuffer::fault`]).
    pub fn buffers(&self) -> Vec<SegmentBuffer> {
        let buffer = |buffer: &BufferDesc| SegmentBuffer {
            address: buffer.addr,
            // A bad one may say that it goes on beyond the last address.
            length: buffer.length.min(u64::MAX - buffer.addr),
            location: buffer.name.clone(),
            fault: buffer.fault,
        };
        self.open.descriptor().buffers.iter().map(buffer).collect()
    }

    /// The address, as requests want it, of the byte at `offset` from the start of a buffer (0: the
    /// first), from where `length` bytes lie in the buffer, or in it and those that follow it in the same
    /// piece of memory ([`Segment::length_from`]).
    pub fn address_of(&self, buffer: usize, offset: u64, length: u64) -> Result<u64, BufferError> {
        let view = self.open.view();
        let count = view.descriptor.buffers.len();
        let found = view.descriptor.buffers.get(buffer);
        let found = found.ok_or(BufferError::NoBuffer { index: buffer, count })?;
        if let Some(what) = view.descriptor.unusable(buffer) {
            return Err(BufferError::Unusable(what));
        }
        let buffer_length = match offset.checked_add(length) {
            Some(end) if end <= found.length => return Ok(found.addr + offset),
            _ => view.length_from(buffer),
        };
        match offset.checked_add(length) {
            Some(end) if end <= buffer_length => Ok(found.addr + offset),
            _ => Err(BufferError::OutOfRange { offset, length, buffer_length }),
        }
    }

    /// Bytes from the start of a buffer to the end of the piece of memory that it is of, all of which one
    /// request can have: memory whose pages are on several NUMA nodes, or that is several regions of each
    /// device, is as many buffers. 0 when there is no such buffer.
    pub fn length_from(&self, buffer: usize) -> u64 {
        self.open.view().length_from(buffer)
    }
}

/// Whether somebody who has its descriptor answers.
#[derive(Clone, Copy, Debug, Default)]
struct Silence {
    /// When a submission has last waited in vain, and how long, if nobody has answered since.
    waited: Option<(Instant, Duration)>,
    /// How often somebody has.
    answers: u64,
}

impl OpenSegment {
    fn new(id: SegmentId, name: &str, descriptor: SegmentDesc) -> Self {
        Self {
            id,
            name: name.to_owned(),
            view: RwLock::new(View::new(descriptor)),
            marks: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            preparing: Mutex::new(false),
            silence: Mutex::default(),
            tried: Mutex::new(None),
            told: Told::default(),
            avoided: Avoided::default(),
            departures: Departures::default(),
            traffic: Traffic::default(),
            relayed: AtomicBool::new(false),
            way: Mutex::new(None),
            bound: false,
        }
    }

    /// Whether it must not become that of another start of its process.
    pub(crate) const fn is_bound(&self) -> bool {
        self.bound
    }

    /// Whether its process was found through a relay, and not from here: no other transport leads there.
    pub(crate) fn is_relayed(&self) -> bool {
        self.relayed.load(Ordering::Relaxed)
    }

    /// The way that was found last, if it was found through a relay.
    pub(crate) fn relayed(&self) -> Option<Way> {
        self.way.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// It was found this way through a relay, or from here.
    pub(crate) fn set_way(&self, way: Option<Way>) {
        self.relayed.store(way.is_some(), Ordering::Relaxed);
        *self.way.lock().unwrap_or_else(PoisonError::into_inner) = way;
    }

    pub(crate) fn descriptor(&self) -> Arc<SegmentDesc> {
        Arc::clone(&self.view.read().unwrap_or_else(PoisonError::into_inner).descriptor)
    }

    pub(crate) fn view(&self) -> View {
        self.view.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What is known of it, and whether that is stale.
    pub(crate) fn current(&self) -> (View, bool) {
        // In this order: what another thread has asked for meanwhile must not vouch for the view of before.
        let stale = self.is_stale();
        (self.view(), stale)
    }

    /// Takes another descriptor, once `prepare` has told transports of it.
    pub(crate) fn replace_descriptor(
        &self,
        descriptor: SegmentDesc,
        prepare: impl FnOnce(&Arc<SegmentDesc>),
    ) {
        let view = View::new(descriptor);
        let mut prepared = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        // Before others see it: who submits meanwhile finds what belongs to the one of before.
        prepare(&view.descriptor);
        *prepared = true;
        // What marks it stale from here on may have seen the descriptor of before, or this one.
        self.set_view(view, self.marks());
    }

    /// Has `prepare` tell transports of its first descriptor, unless that was done; if another thread
    /// is at it, waits until it has.
    pub(crate) fn prepare(&self, prepare: impl FnOnce(&Arc<SegmentDesc>)) {
        let mut prepared = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        if !*prepared {
            prepare(&self.descriptor());
            *prepared = true;
        }
    }

    /// Prepares again, once nobody else does.
    pub(crate) fn prepare_more(&self, prepare: impl FnOnce(&Arc<SegmentDesc>)) {
        let prepared = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        // Else whoever prepares it at first does so for all transports.
        if *prepared {
            prepare(&self.descriptor());
        }
    }

    /// Has a submission ask for its descriptor, unless one has just waited for that in vain: it is not asked again for as
    /// long as that took. So a thread that submits to a peer that is silent waits half of the time at most.
    pub(crate) fn ask(
        &self,
        ask: impl FnOnce() -> Result<(), SegmentError>,
    ) -> Result<(), SegmentError> {
        let silence = || self.silence.lock().unwrap_or_else(PoisonError::into_inner);
        let Silence { waited, answers } = *silence();
        if let Some((since, waited)) = waited {
            let ago = since.elapsed();
            if let Some(left) = waited.checked_sub(ago).filter(|left| !left.is_zero()) {
                return Err(SegmentError::Silent { name: self.name.clone(), ago, waited, left });
            }
        }
        let begin = Instant::now();
        let asked = ask();
        let mut silence = silence();
        // Meanwhile it may have answered somebody else.
        if asked.as_ref().is_err_and(SegmentError::is_silence) && silence.answers == answers {
            silence.waited = Some((Instant::now(), begin.elapsed()));
        }
        asked
    }

    /// It has answered.
    pub(crate) fn answered(&self) {
        let mut silence = self.silence.lock().unwrap_or_else(PoisonError::into_inner);
        *silence = Silence { waited: None, answers: silence.answers + 1 };
    }

    /// Whether to try again, since no transport reaches it: not more often than each second.
    pub(crate) fn may_be_reached_now(&self) -> bool {
        if self.id == SegmentId::LOCAL {
            return false;
        }
        let mut tried = self.tried.lock().unwrap_or_else(PoisonError::into_inner);
        let due = tried.is_none_or(|tried| tried.elapsed() >= TRY_AGAIN);
        if due {
            *tried = Some(Instant::now());
        }
        due
    }

    /// Takes a descriptor that was written after [`OpenSegment::marks`] had said this.
    pub(crate) fn set_descriptor(&self, descriptor: SegmentDesc, marks: u64) {
        self.set_view(View::new(descriptor), marks);
    }

    fn set_view(&self, view: View, marks: u64) {
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = view;
        self.confirm_descriptor(marks);
    }

    /// The descriptor knows of so many marks.
    pub(crate) fn confirm_descriptor(&self, marks: u64) {
        self.seen.fetch_max(marks, Ordering::Release);
    }

    pub(crate) fn marks(&self) -> u64 {
        self.marks.load(Ordering::SeqCst)
    }

    pub(crate) fn mark_stale(&self) {
        self.marks.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.seen.load(Ordering::Acquire) != self.marks.load(Ordering::Acquire)
    }
}

/// All segments that are open, by number and by name.
#[derive(Debug)]
pub(crate) struct SegmentTable {
    inner: RwLock<Inner>,
}

#[derive(Debug)]
struct Inner {
    next: u32,
    /// Looked up by each submission: to find a small number in a tree takes less than to hash it.
    by_id: BTreeMap<SegmentId, Arc<OpenSegment>>,
    by_name: HashMap<String, SegmentId>,
}

impl SegmentTable {
    /// A table with the engine's own segment.
    pub(crate) fn new(own: SegmentDesc) -> Self {
        let name = own.name.clone();
        let open = Arc::new(OpenSegment::new(SegmentId::LOCAL, &name, own));
        let inner = Inner {
            next: 1,
            by_id: [(SegmentId::LOCAL, open)].into(),
            by_name: [(name, SegmentId::LOCAL)].into(),
        };
        Self { inner: RwLock::new(inner) }
    }

    pub(crate) fn by_id(&self, id: SegmentId) -> Option<Arc<OpenSegment>> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner).by_id.get(&id).cloned()
    }

    /// Those that are open, but the engine's own.
    pub(crate) fn others(&self) -> Vec<Arc<OpenSegment>> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.by_id.values().filter(|open| open.id != SegmentId::LOCAL).cloned().collect()
    }

    /// How many are open, the engine's own not counted.
    pub(crate) fn count_of_others(&self) -> usize {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.by_id.len().saturating_sub(1)
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<Arc<OpenSegment>> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.by_id.get(inner.by_name.get(name)?).cloned()
    }

    /// Adds a segment, unless another thread was faster.
    pub(crate) fn insert(
        &self,
        name: &str,
        descriptor: SegmentDesc,
        way: Option<Way>,
    ) -> Result<Arc<OpenSegment>, SegmentError> {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = inner.by_name.get(name).and_then(|id| inner.by_id.get(id)) {
            return Ok(Arc::clone(open));
        }
        let open = inner.add(name, descriptor, false)?;
        open.set_way(way);
        inner.by_name.insert(name.to_owned(), open.id);
        Ok(open)
    }

    /// Adds a segment that is not found by its name, beside one that may have it. It stays that of one start of its
    /// process.
    pub(crate) fn insert_aside(
        &self,
        name: &str,
        descriptor: SegmentDesc,
    ) -> Result<Arc<OpenSegment>, SegmentError> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner).add(name, descriptor, true)
    }

    /// Removes a segment other than the engine's own.
    pub(crate) fn remove(&self, id: SegmentId) -> Result<(), SegmentError> {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        if id == SegmentId::LOCAL {
            return Err(SegmentError::Unknown(id));
        }
        let open = inner.by_id.remove(&id).ok_or(SegmentError::Unknown(id))?;
        if inner.by_name.get(&open.name) == Some(&id) {
            inner.by_name.remove(&open.name);
        }
        Ok(())
    }
}

impl Inner {
    fn add(
        &mut self,
        name: &str,
        descriptor: SegmentDesc,
        bound: bool,
    ) -> Result<Arc<OpenSegment>, SegmentError> {
        if self.by_id.len() >= MAX_SEGMENTS || self.next == u32::MAX {
            return Err(SegmentError::TooMany { limit: MAX_SEGMENTS });
        }
        let id = SegmentId(self.next);
        self.next += 1;
        let open = Arc::new(OpenSegment { bound, ..OpenSegment::new(id, name, descriptor) });
        self.by_id.insert(id, Arc::clone(&open));
        Ok(open)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use millstream_metadata::{CallError, CallErrorKind, StoreError, WholeDesc};

    use super::*;

    fn descriptor(name: &str) -> SegmentDesc {
        let buffer = BufferDesc {
            name: "cpu:0".to_owned(),
            addr: 1000,
            length: 100,
            ..BufferDesc::default()
        };
        SegmentDesc { name: name.to_owned(), buffers: vec![buffer], ..SegmentDesc::default() }
    }

    #[test]
    fn a_descriptor_that_was_begun_before_a_mark_is_stale() {
        let open = OpenSegment::new(SegmentId(1), "a", SegmentDesc::default());
        assert!(!open.is_stale());
        open.mark_stale();
        let marks = open.marks();
        open.mark_stale();
        open.set_descriptor(SegmentDesc::default(), marks);
        assert!(open.is_stale());
        open.replace_descriptor(SegmentDesc::default(), |_| {});
        assert!(!open.is_stale());
    }

    #[test]
    fn a_view_from_before_a_refresh_is_stale() {
        const ROUNDS: u64 = 1_000_000;
        let open = OpenSegment::new(SegmentId(1), "a", SegmentDesc::default());
        let of = |round| SegmentDesc { incarnation: Some(round), ..SegmentDesc::default() };
        let marked = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    open.mark_stale();
                    marked.store(round, Ordering::SeqCst);
                    open.set_descriptor(of(round), open.marks());
                }
            });
            loop {
                let before = marked.load(Ordering::SeqCst);
                let (view, stale) = open.current();
                let seen = view.descriptor.incarnation.unwrap_or(0);
                assert!(stale || seen >= before, "{seen} for {before}");
                if before == ROUNDS {
                    break;
                }
            }
        });
    }

    /// How long a question takes: so long the next one would not be asked after silence.
    const SLOW: Duration = Duration::from_millis(200);

    /// What a submission hears whose question nobody has answered in time, or else one that was refused.
    fn unanswered(silent: bool) -> Result<(), SegmentError> {
        let kind = match silent {
            true => CallErrorKind::NoReply { waited: Duration::from_secs(1) },
            false => CallErrorKind::Closed,
        };
        let error = StoreError::Call(CallError { peer: "a:1".parse().unwrap(), kind });
        Err(SegmentError::Store { name: "a:1".to_owned(), error })
    }

    #[test]
    fn an_answer_that_came_while_it_was_asked_in_vain_is_not_forgotten() {
        let open = OpenSegment::new(SegmentId(1), "a:1", SegmentDesc::default());
        let asked = open.ask(|| {
            std::thread::sleep(SLOW);
            // Somebody else.
            open.answered();
            unanswered(true)
        });
        assert!(matches!(asked, Err(SegmentError::Store { .. })), "{asked:?}");
        let asked = open.ask(|| Ok(()));
        assert!(asked.is_ok(), "{asked:?}");
    }

    #[test]
    fn a_slow_refusal_is_not_silence() {
        let open = OpenSegment::new(SegmentId(1), "a:1", SegmentDesc::default());
        let refused = open.ask(|| {
            std::thread::sleep(SLOW);
            unanswered(false)
        });
        assert!(matches!(refused, Err(SegmentError::Store { .. })));
        let asked = open.ask(|| Ok(()));
        assert!(asked.is_ok(), "{asked:?}");
    }

    #[test]
    fn offsets_become_addresses() {
        let table = SegmentTable::new(descriptor("a:1"));
        let segment = Segment { open: table.by_id(SegmentId::LOCAL).unwrap() };
        assert_eq!(segment.address_of(0, 0, 100), Ok(1000));
        assert_eq!(segment.address_of(0, 99, 1), Ok(1099));
        assert_eq!(
            segment.address_of(0, 99, 2).unwrap_err().to_string(),
            "2 bytes at offset 99 do not fit a buffer of 100 bytes"
        );
        assert!(segment.address_of(0, u64::MAX, 2).is_err());
        assert_eq!(segment.address_of(1, 0, 1).unwrap_err().code(), -1);
    }

    #[test]
    fn buffers_are_found_in_any_order() {
        let buffer = |addr, length| BufferDesc { addr, length, ..BufferDesc::default() };
        let buffers = vec![buffer(300, 50), buffer(100, 100), buffer(200, 100), buffer(120, 10)];
        let view = View::new(SegmentDesc { buffers, ..SegmentDesc::default() });
        for (address, length, found) in [
            (100, 1, Some(1)),
            (199, 1, Some(1)),
            (199, 2, None),
            (200, 100, Some(2)),
            (349, 1, Some(0)),
            (350, 1, None),
            (99, 1, None),
            (300, u64::MAX, None),
            // They lie on each other.
            (125, 5, Some(3)),
            (125, 6, Some(1)),
            (150, 1, Some(1)),
        ] {
            assert_eq!(view.find(address, length), found, "{address} {length}");
        }
    }

    #[test]
    fn a_bad_buffer_is_not_found_and_hides_no_other() {
        let buffer = |addr, length, fault| BufferDesc { addr, length, fault, ..Default::default() };
        let buffers = vec![
            buffer(100, 100, None),
            buffer(150, u64::MAX, Some("exceeds the address space")),
            buffer(200, 100, None),
        ];
        let table = SegmentTable::new(SegmentDesc { buffers, ..SegmentDesc::default() });
        let segment = Segment { open: table.by_id(SegmentId::LOCAL).unwrap() };
        let view = segment.open.view();
        let found = [(160, 40), (200, 100), (150, 51), (300, 1)].map(|(at, n)| view.find(at, n));
        assert_eq!(found, [Some(0), Some(2), None, None]);
        let told = segment.address_of(1, 0, 1).unwrap_err();
        assert!(told.to_string().contains("since it exceeds the address space"), "{told}");
        assert_eq!((told.code(), segment.address_of(2, 0, 1)), (-1, Ok(200)));
        assert_eq!([0, 1, 2].map(|index| view.length_from(index)), [100, 0, 100]);
        let [_, bad, _] = &segment.buffers()[..] else { panic!("{segment:?}") };
        assert_eq!((bad.length, bad.fault), (u64::MAX - 150, Some("exceeds the address space")));
    }

    /// As of memory whose pages are on several nodes.
    #[test]
    fn buffers_with_the_same_keys_are_one_piece() {
        let buffer = |addr, length, key: Option<u32>, shm_key| BufferDesc {
            addr,
            length,
            rkey: key.into_iter().collect(),
            shm_key,
            ..BufferDesc::default()
        };
        // Regions of one piece of memory, with keys of their own.
        let part = |address, length, whole| BufferDesc {
            part_of: Some(WholeDesc { addr: whole, region_length: NonZeroU64::new(10).unwrap() }),
            ..buffer(address, length, Some(address as u32), None)
        };
        let buffers = vec![
            buffer(100, 100, Some(1), Some(5)),
            buffer(200, 100, Some(1), Some(5)),
            buffer(300, 100, Some(1), Some(5)),
            buffer(400, 100, Some(2), Some(5)),
            buffer(500, 100, Some(2), None),
            buffer(700, 100, None, None),
            buffer(800, 100, None, None),
            buffer(900, 10, None, Some(7)),
            buffer(910, 10, None, Some(7)),
            buffer(921, 10, None, Some(7)),
            part(1000, 10, 1000),
            part(1010, 10, 1000),
            part(1020, 10, 1000),
            part(1030, 10, 1030),
        ];
        let view = View::new(SegmentDesc { buffers, ..SegmentDesc::default() });
        for (address, length, found) in [
            (100, 300, Some(0)),
            (199, 2, Some(0)),
            (250, 150, Some(1)),
            (100, 301, None),
            (399, 2, None),
            (499, 2, None),
            (599, 2, None),
            (650, 100, None),
            (799, 2, None),
            (1000, 30, Some(10)),
            (1015, 10, Some(11)),
            (1015, 20, None),
            (900, 20, Some(7)),
            (900, 22, None),
            (100, u64::MAX, None),
        ] {
            assert_eq!(view.find(address, length), found, "{address} {length}");
        }
    }

    #[test]
    fn a_slice_has_the_keys_of_the_region_where_it_begins() {
        let part = |addr, whole: Option<u64>| BufferDesc {
            addr,
            length: 10,
            rkey: vec![addr as u32],
            part_of: whole
                .map(|addr| WholeDesc { addr, region_length: NonZeroU64::new(10).unwrap() }),
            ..BufferDesc::default()
        };
        let buffers =
            vec![part(110, Some(100)), part(100, Some(100)), part(120, Some(120)), part(130, None)];
        let view = View::new(SegmentDesc { buffers, ..SegmentDesc::default() });
        let key = |buffer, address| view.part(buffer, address).map(|it| it.rkey[0]);
        assert_eq!([100, 109, 110, 119].map(|it| key(1, it)), [100, 100, 110, 110].map(Some));
        assert_eq!([99, 120, 130, u64::MAX].map(|it| key(1, it)), [None; 4]);
        assert_eq!(key(3, 5), Some(130), "of no parts there is one key");
        assert_eq!(key(4, 100), None);
        assert_eq!([0, 1, 2, 3, 4].map(|it| view.length_from(it)), [10, 20, 10, 10, 0]);
    }

    #[test]
    fn a_name_has_one_number_until_it_is_closed() {
        let table = SegmentTable::new(descriptor("a:1"));
        let first = table.insert("b:2", descriptor("b:2"), None).unwrap().id;
        assert_eq!(table.insert("b:2", descriptor("b:2"), None).unwrap().id, first);
        assert_ne!(table.insert("c:3", descriptor("c:3"), None).unwrap().id, first);
        table.remove(first).unwrap();
        assert!(table.by_id(first).is_none());
        assert_ne!(
            table.insert("b:2", descriptor("b:2"), None).unwrap().id,
            first,
            "never used again"
        );
        assert!(matches!(table.remove(first), Err(SegmentError::Unknown(_))));
        assert!(table.remove(SegmentId::LOCAL).is_err());
        assert_eq!(table.by_name("a:1").unwrap().id, SegmentId::LOCAL);
    }
}
