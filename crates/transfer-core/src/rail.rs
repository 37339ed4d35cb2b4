//! Rails: the ways to a peer, each a local NIC, a NIC of the peer and a transport.

use core::time::Duration;

use crate::chain::List;
use crate::counters::RailCounters;
use crate::measure::{COST_PLACES, Mark, Measure, scaled};
use crate::priority::ByLevel;
use crate::{Instant, PriorityLevel};

/// The bytes that may be in flight on any rail.
const LEAST_BYTES: u64 = 256 << 10;
/// What may be in flight is what the rail carries in so many nanoseconds, or in two round trips.
const FLIGHT: u64 = 20_000_000;
/// So often the patience with a rail doubles at most: then it is as long as it may be.
const MOST_DOUBLINGS: u32 = 16;
/// A rail that has just failed is left alone for so long; it doubles with each failure.
const FIRST_DELAY: Duration = Duration::from_millis(10);

/// The number of a rail in its flow.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct RailId(pub u16);

/// Who ends the access of slices that did not complete.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Access {
    /// This process copies by itself, each slice for itself: what has ended, well or not, touches
    /// nothing any more (`local`, `shm`, files). So many slices in a row as are failures that pause a
    /// rail ([`crate::Config::failures`]) are one failure of it.
    Own,
    /// Requests travel over a connection, which breaks with the first error. What was sent may
    /// still arrive: WRITEs have ended when the peer says so (`rdma`, `tcp`).
    Connection,
    /// The same, and what is written outlasts the peer's process (files that it keeps). So WRITEs have
    /// not ended with the process: those of one that is gone leave their target ranges undefined.
    Durable,
}

/// What a rail is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RailSpec {
    /// The policy's number of the local NIC.
    pub local_nic: u16,
    /// The policy's number of the peer's NIC.
    pub peer_nic: u16,
    /// The caller's number of the transport; the policy takes lower ones first.
    pub transport: u16,
    /// Who ends the access of slices.
    pub access: Access,
    /// A slice may be posted while fewer requests than this are in flight, each of which is a piece of a slice. With
    /// its own there may be [`crate::Config::max_slice_pieces`] - 1 more than that, and not more than the send
    /// queues hold. So a slice of many pieces does not wait for longer than others.
    pub max_requests: u32,
}

/// The state of a rail.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RailState {
    /// Not connected.
    Down,
    /// Being connected.
    Connecting,
    /// Connected.
    Up,
    /// It fails too often: not connected until then.
    Paused(Instant),
    /// What was in flight on it is being brought to an end.
    Fencing,
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Cause {
    /// Something that is not the rail's fault.
    Other,
    /// It has failed.
    Failure,
    /// Nothing completed on it while others completed: it has failed, or is slow.
    Silence,
}

/// How far a fence has come.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fence {
    /// Nothing here touches local memory or sends any more.
    pub(crate) aborted: bool,
    /// Nothing can arrive at the peer any more.
    pub(crate) confirmed: bool,
    /// The confirmation is not waited for any more.
    pub(crate) lost: bool,
    /// It was needed and not confirmed, and was counted for that.
    pub(crate) counted: bool,
    /// When the peer was first asked.
    pub(crate) asked_at: Instant,
    /// When it is asked again.
    pub(crate) ask_at: Instant,
    /// How long the confirmation is waited for by tasks that are to go on.
    pub(crate) give_up_at: Instant,
    /// The rail broke by itself, and not since a task was ended.
    pub(crate) guilty: bool,
}

/// A rail and how it is doing.
#[derive(Debug)]
pub struct Rail {
    pub(crate) spec: RailSpec,
    pub(crate) state: RailState,
    /// Which connection, of all of this flow.
    pub(crate) epoch: u64,
    pub(crate) fence: Fence,
    pub(crate) bytes: u64,
    pub(crate) slices: u32,
    /// Pieces of these.
    pub(crate) requests: u32,
    /// By the level of their tasks: bytes.
    pub(crate) level_bytes: ByLevel<u64>,
    /// In flight, or waiting for the fence; the oldest first.
    pub(crate) posted: List,
    pub(crate) oldest: Option<Instant>,
    /// When something completed last, or it was connected.
    pub(crate) last_completion: Instant,
    /// When something completed last.
    pub(crate) completed_at: Instant,
    /// When it had no room last for something that waited.
    pub(crate) full_at: Option<Instant>,
    /// When it was first found silent while others complete.
    pub(crate) suspected_at: Option<Instant>,
    /// When its oldest byte was first found older than the policy bears.
    pub(crate) overdue_at: Option<Instant>,
    pub(crate) measure: Measure,
    pub(crate) counters: RailCounters,
    /// What it may have in flight by the last measurement.
    pub(crate) limit: u64,
    pub(crate) timer: Option<Instant>,
    /// It may not be connected before.
    pub(crate) retry_at: Instant,
    /// Nothing has completed on it since it failed: one slice at a time shows whether it works.
    pub(crate) probing: bool,
    /// A test is under way: then it is not up before that is answered, or others are judged by the answer.
    pub(crate) testing: bool,
    /// How often it was given up as silent while others completed, since more than a probe completed on it.
    pub(crate) silences: u32,
    /// Slices that failed by themselves since one was done.
    missed: u32,
    pub(crate) failures: u32,
    first_failure: Instant,
    pause: Duration,
}

impl Rail {
    pub(crate) fn new(spec: RailSpec) -> Self {
        Self {
            spec,
            state: RailState::Down,
            epoch: 0,
            fence: Fence::default(),
            bytes: 0,
            slices: 0,
            requests: 0,
            level_bytes: ByLevel::default(),
            posted: List::EMPTY,
            oldest: None,
            last_completion: Instant::ZERO,
            completed_at: Instant::ZERO,
            full_at: None,
            suspected_at: None,
            overdue_at: None,
            measure: Measure::default(),
            counters: RailCounters::default(),
            limit: LEAST_BYTES,
            timer: None,
            retry_at: Instant::ZERO,
            probing: false,
            testing: false,
            silences: 0,
            missed: 0,
            failures: 0,
            first_failure: Instant::ZERO,
            pause: Duration::ZERO,
        }
    }

    /// What it is.
    pub const fn spec(&self) -> &RailSpec {
        &self.spec
    }

    /// Its state.
    pub const fn state(&self) -> RailState {
        self.state
    }

    /// The number of its present or last connection, among all of its flow.
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether its connection has failed, and was not closed for another reason, and may still have work under way.
    pub fn has_failed(&self) -> bool {
        self.state == RailState::Fencing && self.fence.guilty
    }

    /// Whether slices may be posted.
    pub fn is_up(&self) -> bool {
        self.state == RailState::Up
    }

    /// Whether it may be connected now.
    pub fn may_connect(&self, now: Instant) -> bool {
        self.state == RailState::Down && self.retry_at <= now
    }

    /// Bytes that are in flight, or wait for its fence.
    pub const fn bytes_in_flight(&self) -> u64 {
        self.bytes
    }

    /// Slices that are in flight, or wait for its fence.
    pub const fn slices_in_flight(&self) -> u32 {
        self.slices
    }

    /// Bytes of this level and of lower ones that are in flight, or wait for its fence.
    pub(crate) fn bytes_up_to(&self, level: PriorityLevel) -> u64 {
        self.level_bytes[level.index()..].iter().sum()
    }

    /// What it has done since it was added.
    pub const fn counters(&self) -> &RailCounters {
        &self.counters
    }

    /// Slices that were posted on it and ended otherwise than done, since it was added.
    pub const fn failed_slices(&self) -> u64 {
        let RailCounters { posted_slices, completed_slices, .. } = self.counters;
        posted_slices - completed_slices - self.slices as u64
    }

    /// How long the oldest byte in flight has not been acknowledged.
    pub fn oldest_age(&self, now: Instant) -> Option<Duration> {
        self.oldest.map(|oldest| now.saturating_duration_since(oldest))
    }

    /// The highest rate that was measured recently, in bytes per second.
    pub fn peak_rate(&self) -> Option<u64> {
        self.measure.peak_rate()
    }

    /// What it carries now, in bytes per second: over the last tens of milliseconds in which it had
    /// something to do.
    pub fn present_rate(&self) -> Option<u64> {
        let cost = u128::from(self.measure.cost()?);
        Some(((1_000_000_000_u128 << COST_PLACES) / cost).min(u64::MAX.into()) as u64)
    }

    /// The same as what a byte costs: nanoseconds, with as many binary places as measures have.
    pub(crate) const fn cost(&self) -> Option<u64> {
        self.measure.cost()
    }

    /// The shortest time from posting a slice to its completion, of the last ten seconds or measured anew after them.
    pub fn smallest_round_trip(&self) -> Option<Duration> {
        self.measure.smallest_round_trip()
    }

    /// Bytes that may be in flight: 256 KiB, or the recent peak rate times 20 ms or times twice the
    /// smallest round trip, whatever is most. It is 256 KiB for a moment when no round trip was as short as the
    /// smallest for ten seconds, and that is measured anew.
    pub const fn limit_bytes(&self) -> u64 {
        self.limit
    }

    /// Whether a slice of so many bytes may be posted now. One may always be in flight, however long it is.
    pub fn has_room(&self, length: u32) -> bool {
        let fits = || !self.probing && self.bytes + u64::from(length) <= self.limit;
        // A test takes a place in the send queue, too.
        self.is_up()
            && self.requests + u32::from(self.testing) < self.spec.max_requests
            && (self.slices == 0 || fits())
    }

    /// How long nothing may complete on it, while other rails complete, before it has failed, if it has not
    /// been silent before. `None` when nothing is known of it. Its peak rate may be that of a burst, and its
    /// smallest round trip that of an empty queue.
    pub(crate) fn patience(&self, config: &crate::Config) -> Option<Duration> {
        if self.spec.access == Access::Own {
            return Some(config.silence);
        }
        let patience = self.needed()?.saturating_mul(4).max(self.eight_round_trips()?);
        Some(patience.max(config.least_silence).min(config.silence))
    }

    /// The same where slices have completed regularly on it: a pause that is several times as long as all of the
    /// last seconds is none of a machine that is busy. It is as long as `patience` at most.
    pub(crate) fn regular_patience(
        &self,
        now: Instant,
        config: &crate::Config,
    ) -> Option<Duration> {
        if self.spec.access == Access::Own {
            return None;
        }
        let longest = self.measure.longest_silence(now)?;
        let patience = self.needed()?.saturating_mul(3).max(self.eight_round_trips()?);
        let patience = patience.max(longest.saturating_mul(4)).max(config.least_regular_silence);
        Some(patience.min(self.patience(config)?))
    }

    /// What it needs for what is in flight, at its peak rate.
    fn needed(&self) -> Option<Duration> {
        let needed = u128::from(self.bytes) * 1_000_000_000 / u128::from(self.peak_rate()?.max(1));
        Some(Duration::from_nanos(needed.min(u64::MAX.into()) as u64))
    }

    fn eight_round_trips(&self) -> Option<Duration> {
        Some(self.smallest_round_trip()?.saturating_mul(8))
    }

    pub(crate) fn completed(
        &mut self,
        now: Instant,
        posted: (Instant, Mark),
        length: u32,
        held_up: Duration,
    ) {
        (self.last_completion, self.completed_at, self.suspected_at) = (now, now, None);
        // The first after a failure may have passed at once, over a link that had sent nothing for a while.
        if !self.probing {
            self.silences = 0;
        }
        (self.probing, self.missed) = (false, 0);
        let little = self.bytes <= LEAST_BYTES;
        self.measure.completed(now, posted, length.into(), held_up, little);
        if self.measure.round_trip_is_old(now) {
            self.limit = LEAST_BYTES;
            return;
        }
        let Some(rate) = self.measure.peak_rate() else { return };
        let flight = FLIGHT.max(2 * self.measure.round_trip_nanos());
        self.limit = LEAST_BYTES.max(scaled(rate, flight, 1_000_000_000));
    }

    /// Since when nothing has completed of what is in flight.
    pub(crate) fn silent_since(&self) -> Instant {
        self.oldest.map_or(self.last_completion, |oldest| oldest.max(self.last_completion))
    }

    /// It was silent for too long. It may be slower than it was measured to be, so what was measured is
    /// forgotten, and it has twice the patience until something completes on it.
    pub(crate) fn was_silent(&mut self) {
        self.silences = self.silences.saturating_add(1);
        self.measure.forget();
        self.limit = LEAST_BYTES;
    }

    /// What its patience is to be multiplied by.
    pub(crate) fn leniency(&self) -> u32 {
        1 << self.silences.min(MOST_DOUBLINGS)
    }

    /// A slice failed, and nothing broke by that. Returns whether the rail has failed.
    pub(crate) const fn missed(&mut self, config: &crate::Config) -> bool {
        self.missed = self.missed.saturating_add(1);
        self.probing || self.missed >= config.failures
    }

    /// It is not connected any more; `guilty` if by its own failure. Says when it may be again, by
    /// state and `timer`.
    pub(crate) fn rest(&mut self, now: Instant, guilty: bool, config: &crate::Config) {
        self.state = RailState::Down;
        self.timer = None;
        self.retry_at = now;
        self.missed = 0;
        self.testing = false;
        if !guilty {
            return;
        }
        self.counters.failures += 1;
        // What failed before the pause has completed something since, or not: then the pause
        // doubles at once.
        if self.probing && !self.pause.is_zero() {
            return self.start_pause(now, config);
        }
        let window = now.saturating_duration_since(self.first_failure);
        if self.failures == 0 || window > config.failure_window {
            self.first_failure = now;
            self.failures = 0;
            self.pause = Duration::ZERO;
        }
        self.failures += 1;
        if self.failures >= config.failures {
            return self.start_pause(now, config);
        }
        self.probing = true;
        self.retry_at = now + FIRST_DELAY * (1 << (self.failures - 1).min(10));
        self.timer = Some(self.retry_at);
    }

    fn start_pause(&mut self, now: Instant, config: &crate::Config) {
        self.pause = (2 * self.pause).clamp(config.pause, config.max_pause);
        self.failures = 0;
        self.counters.pauses += 1;
        self.probing = true;
        let until = now + self.pause;
        self.state = RailState::Paused(until);
        self.timer = Some(until);
    }

    /// The peer is another process: what the rail did with the one before says nothing.
    pub(crate) fn forgive(&mut self, now: Instant) {
        (self.failures, self.pause, self.probing) = (0, Duration::ZERO, false);
        if matches!(self.state, RailState::Down | RailState::Paused(_)) {
            (self.state, self.retry_at, self.timer) = (RailState::Down, now, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn rail() -> Rail {
        let spec = RailSpec {
            local_nic: 0,
            peer_nic: 0,
            transport: 0,
            access: Access::Connection,
            max_requests: 4,
        };
        Rail { state: RailState::Up, ..Rail::new(spec) }
    }

    /// A slice that was posted when nothing else was in flight.
    fn complete(rail: &mut Rail, posted: u64, now: u64, length: u32) {
        rail.measure.begin(at(posted), Duration::ZERO);
        let mark = rail.measure.mark();
        rail.completed(at(now), (at(posted), mark), length, Duration::ZERO);
    }

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn what_may_be_in_flight_is_bounded_by_bytes_and_requests() {
        let mut rail = rail();
        assert_eq!(rail.limit_bytes(), 256 << 10);
        assert!(rail.has_room(u32::MAX), "one slice always");
        (rail.slices, rail.bytes) = (1, (256 << 10) - 100);
        assert!(rail.has_room(100) && !rail.has_room(101));
        for requests in [4, 5] {
            rail.requests = requests;
            assert!(!rail.has_room(1));
        }
        rail.requests = 3;
        assert!(rail.has_room(1));
        rail.testing = true;
        assert!(!rail.has_room(1), "a test takes a place");
        rail.testing = false;
        rail.probing = true;
        assert!(!rail.has_room(1));
        (rail.slices, rail.bytes) = (0, 0);
        assert!(rail.has_room(1));
        rail.state = RailState::Fencing;
        assert!(!rail.has_room(1));
    }

    #[test]
    fn the_limit_follows_the_rate() {
        let mut rail = rail();
        // 1 MB in 2 ms: 500 MB/s, of which 20 ms may be in flight.
        complete(&mut rail, 0, 2, 1_000_000);
        assert_eq!(rail.limit_bytes(), 10_000_000);
        // With a round trip of 40 ms, what it carries in 80 ms.
        let mut far = self::rail();
        complete(&mut far, 0, 40, 1_000_000);
        assert_eq!(far.limit_bytes(), 2_000_000);
        // A slow one keeps the least.
        let mut slow = self::rail();
        complete(&mut slow, 0, 1000, 1000);
        assert_eq!(slow.limit_bytes(), 256 << 10);
    }

    #[test]
    fn after_silence_nothing_is_known_and_more_patience_is_had() {
        let mut rail = rail();
        complete(&mut rail, 0, 2, 1_000_000);
        assert_eq!((rail.peak_rate(), rail.limit_bytes()), (Some(500_000_000), 10_000_000));
        rail.was_silent();
        rail.rest(at(4), true, &Config::default());
        assert_eq!((rail.peak_rate(), rail.cost(), rail.limit_bytes()), (None, None, 256 << 10));
        assert_eq!(rail.leniency(), 2);
        complete(&mut rail, 10, 12, 1_000_000);
        assert_eq!((rail.leniency(), rail.limit_bytes()), (2, 10_000_000), "it was a probe");
        complete(&mut rail, 12, 14, 1_000_000);
        assert_eq!((rail.leniency(), rail.limit_bytes()), (1, 10_000_000));
    }

    #[test]
    fn patience_follows_what_is_measured() {
        let config = Config::default();
        let mut rail = rail();
        assert_eq!(rail.patience(&config), None);
        // 1 MB in 5 ms.
        complete(&mut rail, 0, 5, 1_000_000);
        assert_eq!(rail.patience(&config), Some(Duration::from_millis(100)));
        // What is in flight takes 40 ms.
        rail.bytes = 8_000_000;
        assert_eq!(rail.patience(&config), Some(Duration::from_millis(160)));
        rail.bytes = u64::MAX;
        assert_eq!(rail.patience(&config), Some(config.silence));
        rail.spec.access = Access::Own;
        rail.bytes = 0;
        assert_eq!(rail.patience(&config), Some(config.silence), "it copies by itself");
        let mut far = self::rail();
        complete(&mut far, 0, 40, 1_000_000);
        assert_eq!(far.patience(&config), Some(Duration::from_millis(320)));
    }

    /// A slice of 500 kB each 5 ms, three in flight, with a pause of so many milliseconds before each hundredth.
    fn regular(pause: u64, slices: u64) -> Rail {
        let mut rail = rail();
        let mut now = 0;
        rail.measure.begin(at(0), Duration::ZERO);
        let mut marks = vec![(0, rail.measure.mark()); 3];
        for slice in 1..=slices {
            now += if slice % 100 == 0 { pause } else { 5 };
            let (posted, mark) = marks.remove(0);
            rail.completed(at(now), (at(posted), mark), 500_000, Duration::ZERO);
            marks.push((now, rail.measure.mark()));
        }
        rail
    }

    #[test]
    fn where_slices_complete_regularly_less_patience_is_had() {
        let config = Config::default();
        let patience = |rail: &Rail| {
            let now = rail.silent_since();
            rail.regular_patience(now, &config).map(|patience| patience.as_millis() as u64)
        };
        // It is known after two seconds.
        assert_eq!([399, 401].map(|slices| patience(&regular(5, slices))), [None, Some(50)]);
        for (pause, expected) in [(12, 50), (13, 52), (24, 96), (26, 100), (90, 100)] {
            assert_eq!(patience(&regular(pause, 1000)), Some(expected), "a pause of {pause} ms");
        }
        // Three times what it needs: at 100 MB/s.
        let mut rail = regular(5, 1000);
        for (bytes, expected) in [(1_500_000, 50), (2_000_000, 60), (10_000_000, 300)] {
            rail.bytes = bytes;
            assert_eq!(patience(&rail), Some(expected), "{bytes} in flight");
        }
        rail.was_silent();
        assert_eq!(patience(&rail), None);
        // After two idle seconds, or where little completes, nothing is known.
        let mut rail = regular(5, 1000);
        assert_eq!(rail.regular_patience(at(10_000), &config), None);
        complete(&mut rail, 10_000, 10_001, 100);
        assert_eq!(patience(&rail), None);
        let mut rail = self::rail();
        (1..100).for_each(|turn| complete(&mut rail, 40 * turn, 40 * turn + 1, 100));
        assert_eq!(patience(&rail), None, "50 in two seconds");
        let mut own = regular(5, 1000);
        own.spec.access = Access::Own;
        assert_eq!(patience(&own), None, "it copies by itself");
    }

    #[test]
    fn failures_in_a_row_delay_and_then_pause() {
        let config = Config::default();
        let mut rail = rail();
        rail.rest(at(0), false, &config);
        assert!(rail.may_connect(at(0)) && !rail.probing, "not its fault");
        rail.rest(at(0), true, &config);
        assert!(!rail.may_connect(at(9)) && rail.may_connect(at(10)));
        rail.rest(at(20), true, &config);
        assert!(!rail.may_connect(at(39)) && rail.may_connect(at(40)));
        rail.rest(at(100), true, &config);
        assert_eq!(rail.state(), RailState::Paused(at(1100)));
        // Each time that its test fails it pauses for twice as long.
        for (now, until) in [
            (1100, 3100),
            (3200, 7200),
            (7200, 15_200),
            (20_000, 36_000),
            (40_000, 70_000),
            (80_000, 110_000),
        ] {
            rail.rest(at(now), true, &config);
            assert_eq!(rail.state(), RailState::Paused(at(until)));
            assert_eq!(rail.timer, Some(at(until)));
        }
        // When its test succeeds it counts anew.
        complete(&mut rail, 110_000, 110_001, 1);
        rail.rest(at(111_000), true, &config);
        assert_eq!((rail.state(), rail.retry_at), (RailState::Down, at(111_010)));
        rail.forgive(at(111_000));
        assert!(rail.may_connect(at(111_000)));
    }

    #[test]
    fn failures_far_apart_do_not_add_up() {
        let config = Config::default();
        for (interval, pauses) in [(5000, true), (5001, false), (11_000, false)] {
            let mut rail = rail();
            let mut paused = false;
            for failure in 0..3 {
                let now = failure * interval;
                rail.rest(at(now), true, &config);
                paused |= rail.state() != RailState::Down;
                complete(&mut rail, now, now + 1, 1);
            }
            assert_eq!(paused, pauses, "each {interval} ms: the window is 10 s");
        }
    }

    #[test]
    fn what_was_measured_is_told() {
        let mut rail = rail();
        assert_eq!((rail.peak_rate(), rail.smallest_round_trip()), (None, None));
        complete(&mut rail, 0, 4, 1_000_000);
        complete(&mut rail, 12, 14, 1000);
        assert_eq!(rail.peak_rate(), Some(250_000_000));
        assert_eq!(rail.smallest_round_trip(), Some(Duration::from_millis(2)));
        let view = rail.view(at(20));
        assert_eq!((view.peak_rate, view.present_rate), (Some(250_000_000), Some(250_000_000)));
        assert_eq!((view.state, view.oldest_age), (RailState::Up, None));
        rail.oldest = Some(at(15));
        assert_eq!(rail.view(at(20)).oldest_age, Some(Duration::from_millis(5)));
    }

    #[test]
    fn a_rail_has_failed_while_what_it_broke_with_is_brought_to_an_end() {
        let mut rail = rail();
        for (state, guilty, expected) in [
            (RailState::Fencing, true, true),
            (RailState::Fencing, false, false),
            (RailState::Up, true, false),
            (RailState::Down, false, false),
        ] {
            (rail.state, rail.fence.guilty) = (state, guilty);
            assert_eq!(rail.has_failed(), expected, "{state:?} {guilty}");
        }
    }

    /// What completed that was posted at this time, behind others.
    fn complete_behind(rail: &mut Rail, posted: u64, now: u64) {
        let mark = rail.measure.mark();
        rail.completed(at(now), (at(posted), mark), 1_000_000, Duration::ZERO);
    }

    #[test]
    fn little_is_in_flight_until_an_old_round_trip_is_measured_anew() {
        let mut rail = rail();
        complete(&mut rail, 0, 2, 1_000_000);
        complete(&mut rail, 8000, 8004, 2_000_000);
        rail.bytes = 10_000_000;
        complete_behind(&mut rail, 9_900, 10_001);
        assert_eq!(rail.limit_bytes(), 10_000_000);
        // Ten seconds later its queue is to be emptied, and is empty when no more than that is left.
        for (posted, now, bytes) in
            [(9_901, 10_002, 10_000_000), (10_003, 10_013, 262_145), (10_004, 10_014, 262_144)]
        {
            rail.bytes = bytes;
            complete_behind(&mut rail, posted, now);
            let (limit, round_trip) = (rail.limit_bytes(), rail.smallest_round_trip());
            assert_eq!((limit, round_trip), (256 << 10, Some(Duration::from_millis(2))), "{now}");
        }
        complete_behind(&mut rail, 10_014, 10_024);
        assert_eq!(rail.smallest_round_trip(), Some(Duration::from_millis(10)));
        assert!(rail.limit_bytes() > 256 << 10);
    }
}
