//! What the engine knows of one segment: its descriptor, whether that is stale, and whether somebody answers who has it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use millstream_metadata::SegmentDesc;

use super::{SegmentId, View};
use crate::SegmentError;
use crate::departures::Departures;
use crate::fail_over::Avoided;
use crate::metrics::Traffic;
use crate::path::Told;
use crate::tcp::relay::Way;

/// How long to wait before it is tried again whether a transport reaches a segment.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// What the engine knows of a segment.
#[derive(Debug)]
pub(crate) struct OpenSegment {
    pub(crate) id: SegmentId,
    pub(crate) name: String,
    pub(super) view: RwLock<View>,
    /// How often something has happened that the descriptor may not say.
    pub(super) marks: AtomicU64,
    /// Of how many of these the descriptor knows. If not of all, ask again before the next use.
    pub(super) seen: AtomicU64,
    /// Held while transports are told of a descriptor; whether they have been.
    pub(super) preparing: Mutex<bool>,
    pub(super) silence: Mutex<Silence>,
    /// When it was last tried whether a segment that no transport reached is reached now.
    pub(super) tried: Mutex<Option<Instant>>,
    pub(crate) told: Told,
    pub(crate) avoided: Avoided,
    pub(crate) departures: Departures,
    /// What was copied to and from it.
    pub(crate) traffic: Traffic,
    /// Its process was found through a relay, and the way there.
    pub(super) relayed: AtomicBool,
    pub(super) way: Mutex<Option<Way>>,
    /// It stays that of one start of its process.
    pub(super) bound: bool,
    /// It is not open any more; transfers under way go on.
    pub(super) closed: AtomicBool,
}

/// Whether somebody who has its descriptor answers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Silence {
    /// When a submission has last waited in vain, and how long, if nobody has answered since.
    waited: Option<(Instant, Duration)>,
    /// How often somebody has.
    answers: u64,
}

impl OpenSegment {
    pub(super) fn new(id: SegmentId, name: &str, descriptor: SegmentDesc) -> Self {
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
            closed: AtomicBool::new(false),
        }
    }

    /// Whether it is not open any more: nothing is kept for it by its number. Transports are told after this is so.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
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
