//! Priorities under trouble (`tent-chaos`), and what flows say of their rails: what was posted and done there, and
//! how old the oldest byte is.
//!
//! A flood is more of one level than the rails of a flow hold, beside which a transfer of a lower level waits. By
//! the shares of levels that one has a slice after 15 slices' lengths of higher ones, so no more of the flood may be
//! posted than some times that without a slice of its level.

use std::collections::BTreeMap;

use millstream_roce::Instant;
use millstream_transfer_core::{Opcode, Post, PriorityLevel, Rail, RailId, SliceId};

use super::director::{Director, Network, core_time};
use super::process::{Peer, Transfer};
use super::traffic::Wish;
use super::world::pick;

/// Transfers of a flood, and slices of each: twice what nine rails hold.
const FLOOD: u64 = 8;
const FLOOD_SLICES: u64 = 40;
/// Slices of what waits beside it.
const WAITING_SLICES: u64 = 4;
/// So many slices' lengths of a flood may be posted while a lower level waits and has none posted: eight times its
/// share, since what there is room for is asked anew only when something has completed. In 8,000 runs 80 were the most,
/// and a level that is never served sees all 320 pass.
const MOST_PASSED: u64 = 120;

/// A transfer that waits beside a flood.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    user: u64,
    level: PriorityLevel,
    /// Bytes of the flood that were posted since a slice of this level was.
    passed: u64,
}

/// What is in flight on a connection of a rail, by slices: when it was posted.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    epoch: u64,
    posts: BTreeMap<u64, Instant>,
}

/// What was posted and done on a rail.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Counts {
    posted_slices: u64,
    posted_bytes: u64,
    done_slices: u64,
    done_bytes: u64,
}

impl Counts {
    fn of(rail: &Rail) -> Self {
        let counters = rail.counters();
        Self {
            posted_slices: counters.posted_slices,
            posted_bytes: counters.posted_bytes,
            done_slices: counters.completed_slices,
            done_bytes: counters.read_bytes + counters.written_bytes,
        }
    }
}

impl Peer {
    /// A slice was posted; says whether the age of the rail's oldest byte is another one than it is.
    fn posted(&mut self, now: Instant, post: &Post) -> Option<String> {
        let counts = self.counts.entry(post.rail).or_default();
        counts.posted_slices += 1;
        counts.posted_bytes += u64::from(post.length);
        let in_flight = self.in_flight.entry(post.rail).or_default();
        if in_flight.epoch != post.epoch {
            *in_flight = InFlight { epoch: post.epoch, ..InFlight::default() };
        }
        in_flight.posts.insert(post.slice.to_bits(), now);
        self.wrong_age(now, post.rail)
    }

    /// The same for a slice that was done.
    pub(super) fn done(
        &mut self,
        now: Instant,
        rail: RailId,
        slice: SliceId,
        length: u32,
    ) -> Option<String> {
        let counts = self.counts.entry(rail).or_default();
        counts.done_slices += 1;
        counts.done_bytes += u64::from(length);
        self.in_flight.entry(rail).or_default().posts.remove(&slice.to_bits());
        self.wrong_age(now, rail)
    }

    /// While a connection is up, what was posted and is not done is in flight.
    fn wrong_age(&self, now: Instant, id: RailId) -> Option<String> {
        let (rail, in_flight) =
            (self.flow.rails().get(usize::from(id.0))?, self.in_flight.get(&id)?);
        if !rail.is_up() || rail.epoch() != in_flight.epoch {
            return None;
        }
        let oldest = in_flight.posts.values().min();
        let expected = oldest.map(|posted| now.saturating_duration_since(*posted));
        let found = rail.oldest_age(core_time(now));
        (found != expected)
            .then(|| format!("{id:?}: its oldest byte is {expected:?} old, and not {found:?}"))
    }

    /// What its rails have counted otherwise than it was.
    pub(super) fn miscounted(&self) -> impl Iterator<Item = String> {
        (0..).zip(self.flow.rails()).filter_map(|(index, rail)| {
            let id = RailId(index);
            let (seen, counted) =
                (self.counts.get(&id).copied().unwrap_or_default(), Counts::of(rail));
            (seen != counted).then(|| format!("{id:?} has counted {counted:?}: it was {seen:?}"))
        })
    }
}

impl Director {
    /// More of one level than rails hold, and something of a lower one beside it.
    pub(super) fn flood(&mut self, network: &mut Network<'_>, own: usize, peer: usize) {
        let slice = u64::from(self.world.config.slice_length);
        let rng = &mut self.rng;
        let locations = [rng.below(2), rng.below(2)].map(|location| location as u16);
        let (level, lower) = *pick(
            rng,
            &[
                (PriorityLevel::Latency, PriorityLevel::Normal),
                (PriorityLevel::Latency, PriorityLevel::Bulk),
                (PriorityLevel::Normal, PriorityLevel::Bulk),
            ],
        );
        let mut wish = Wish {
            opcode: Opcode::Write,
            count: 1,
            piece: FLOOD_SLICES * slice,
            stride: FLOOD_SLICES * slice,
            listed: false,
            deadline: None,
            cancel: None,
            locations,
            nowhere: false,
            priority: level,
            seed: rng.bits(),
            flood: true,
        };
        self.tally.one("floods of a level");
        // What ends does not wait: nothing of this is taken back.
        let unregister = self.unregister.take();
        for _ in 0..FLOOD {
            self.made += 1;
            self.start(network, own, peer, &wish);
        }
        (wish.piece, wish.priority, wish.flood) = (WAITING_SLICES * slice, lower, false);
        self.made += 1;
        // What is posted of it at once counts as nothing: it has not waited.
        let user = self.made;
        if let Some(found) = self.processes[own].peers.get_mut(&peer) {
            found.waiting = Some(Waiting { user, level: lower, passed: 0 });
        }
        self.start(network, own, peer, &wish);
        self.unregister = unregister;
    }

    /// Counts a slice; says whether a lower level has waited beside a flood for longer than its share.
    pub(super) fn count_passed(
        &mut self,
        now: Instant,
        post: &Post,
        transfer: &Transfer,
    ) -> Option<String> {
        let waits = |user| self.transfers.get(&user).is_some_and(|it| it.posted < it.length);
        let found = self.processes[transfer.initiator].peers.get_mut(&transfer.target)?;
        if let Some(wrong) = found.posted(now, post) {
            return Some(wrong);
        }
        let waiting = found.waiting.as_mut()?;
        if !waits(waiting.user) {
            found.waiting = None;
            return None;
        }
        if transfer.priority == waiting.level {
            waiting.passed = 0;
        } else if transfer.flood && transfer.priority < waiting.level {
            waiting.passed += u64::from(post.length);
        }
        let most = MOST_PASSED * u64::from(self.world.config.slice_length);
        (waiting.passed > most).then(|| format!("{waiting:?} while a flood goes on: {post:?}"))
    }
}
