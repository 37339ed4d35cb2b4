//! The policy TENT: each slice goes where it is expected to be finished first.
//!
//! That is the bytes that a rail has in flight and the slice, by what a byte costs it now, and its round
//! trip; and more for rails that are not near to the memory. If that rail is full, the slice waits for it, and
//! does not take a slower one. A rail that is not chosen is measured now and then by a slice, and one whose
//! oldest byte is older than it should be gets no more.

use core::time::Duration;

use crate::measure::times;
use crate::nearness::{Affinity, Nearness, Priority, each_nic_once, is_busy, to_connect};
use crate::{Instant, Pick, Policy, Rail, RailId, Rails, SliceInfo};

/// What a byte is taken to cost where nothing is known of any rail: nanoseconds with 16 binary places.
const UNKNOWN: u64 = 1 << 16;
/// A rail that is not chosen is measured for no more than one part in so many of the time, but not more seldom
/// than after so many intervals.
const PROBE_TIME: u32 = 8;
/// The oldest byte of a rail may be as old as so many times its patience with silence.
const MOST_AGE: u32 = 4;

/// While a level leaves room for a higher one, once in so long it leaves even that of a round trip, so that the
/// smallest round trip is none behind its own slices.
const DRAIN_PERIOD: Duration = Duration::from_secs(1);
/// That is for two round trips, and at least so long,
const LEAST_DRAIN: Duration = Duration::from_millis(10);
/// and at most.
const MOST_DRAIN: Duration = Duration::from_millis(100);

/// What the policy TENT goes by.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TentConfig {
    /// A rail has as much in flight as it carries in so long by its present rate, or in two round trips.
    pub flight: Duration,
    /// What a priority has in flight on a rail while something of a higher one comes is what the rail carries in
    /// a round trip and so long, by its recent peak rate, or two slices.
    pub reserve: Duration,
    /// So many times slower a rail is taken to be that is preferred at both ends, at one end, and at none.
    pub weights: [u32; 3],
    /// A rail that is not chosen is measured after so long.
    pub probe_interval: Duration,
    /// One slice in so many may be for that.
    pub probe_share: u32,
    /// A rail whose oldest byte is older than this, and than twice what it should take, gets no more.
    pub stall: Duration,
}

impl Default for TentConfig {
    fn default() -> Self {
        Self {
            flight: Duration::from_millis(15),
            reserve: Duration::from_millis(1),
            weights: [1, 3, 9],
            probe_interval: Duration::from_millis(100),
            probe_share: 16,
            stall: Duration::from_millis(25),
        }
    }
}

/// The policy TENT.
#[derive(Debug)]
pub struct Tent {
    config: TentConfig,
    nearness: Nearness,
    classes: Vec<Class>,
    /// Slices since one was for measuring.
    since_probe: u32,
}

/// What was found out for a pair of locations.
#[derive(Debug, Default)]
struct Class {
    /// The rails in order of transports, and within one by how near they are; and how near.
    order: Vec<(RailId, u8)>,
    /// How many rails were known then.
    known: usize,
    /// The version of the rails at which `up` is right.
    version: Option<u64>,
    /// Those that are used.
    up: Vec<RailId>,
    /// By `up`: what they are taken to be slower by.
    weights: Vec<u32>,
    /// By `up`: when a slice would be finished, in nanoseconds from now. Of those that get none, the most.
    scores: Vec<u64>,
    turn: usize,
}

impl Tent {
    /// A policy with the NICs of each local and each peer's location, by number, as
    /// [`crate::Classic::new`] has them.
    pub const fn new(config: TentConfig, local: Vec<Priority>, peer: Vec<Priority>) -> Self {
        let nearness = Nearness::new(local, peer);
        Self { config, nearness, classes: Vec::new(), since_probe: 0 }
    }

    /// The same, with other NICs of the peer's locations for each of our NICs, by number.
    #[must_use]
    pub fn with_affinity(self, affinity: Vec<Affinity>) -> Self {
        Self { nearness: self.nearness.with_affinity(affinity), ..self }
    }
}

impl TentConfig {
    /// Whether the oldest byte of a rail is older than it should be.
    fn is_stalled(&self, now: Instant, rail: &Rail, cost: u64) -> bool {
        let Some(oldest) = rail.oldest.filter(|oldest| *oldest + self.stall < now) else {
            return false;
        };
        let needed = 2 * u128::from(times(rail.bytes_in_flight(), cost));
        let age = u128::from(now.nanos() - oldest.nanos());
        age > needed + 4 * u128::from(rail.measure.round_trip_nanos())
    }

    /// Whether a slice may be posted on a rail now.
    fn has_room(&self, now: Instant, rail: &Rail, slice: &SliceInfo) -> bool {
        rail.has_room(slice.room) && self.is_short_of(rail) && self.leaves_room(now, rail, slice)
    }

    /// Whether a rail has less in flight than it can use.
    fn is_short_of(&self, rail: &Rail) -> bool {
        let fits = |cost| {
            let flight = (self.flight.as_nanos() as u64).max(2 * rail.measure.round_trip_nanos());
            times(rail.bytes_in_flight(), cost) < flight
        };
        rail.slices_in_flight() == 0 || rail.cost().is_none_or(fits)
    }

    /// Whether a slice that is posted on a rail would leave room for higher priorities, where such come.
    fn leaves_room(&self, now: Instant, rail: &Rail, slice: &SliceInfo) -> bool {
        // Mostly nothing of a higher one comes.
        if !slice.yields {
            return true;
        }
        let bytes = rail.bytes_up_to(slice.level);
        // The present rate would be limited by what is allowed by it, and so would become ever less.
        let is_short = |rate: u64| {
            let allowed = u128::from(rate) * self.allowance(now, rail).as_nanos() / 1_000_000_000;
            u128::from(bytes) < allowed
        };
        bytes <= slice.length.into() || rail.peak_rate().is_some_and(is_short)
    }

    /// What a level that leaves room may have in flight on a rail, in time.
    fn allowance(&self, now: Instant, rail: &Rail) -> Duration {
        let round_trip = rail.smallest_round_trip().unwrap_or_default();
        let drain = (2 * round_trip).clamp(LEAST_DRAIN, MOST_DRAIN).as_nanos();
        match u128::from(now.nanos()) % DRAIN_PERIOD.as_nanos() < drain {
            true => self.reserve,
            false => self.reserve + round_trip,
        }
    }

    /// Whether a rail that is not chosen is to be measured.
    fn is_to_be_probed(&self, now: Instant, rail: &Rail) -> bool {
        // Where all rails are busy each slice asks.
        if rail.slices_in_flight() > 0 {
            return false;
        }
        let idle = now.saturating_duration_since(rail.completed_at);
        let last = rail.measure.last();
        idle >= (last * PROBE_TIME).clamp(self.probe_interval, self.probe_interval * PROBE_TIME)
    }
}

impl Class {
    /// Finds the rails to use now; or one to connect.
    fn refresh(&mut self, now: Instant, rails: &Rails<'_>, config: &TentConfig) -> Option<RailId> {
        let transport = |id: RailId| rails.rail(id).spec().transport;
        let all = self.order.iter().map(|(id, _)| *id);
        let usable = |id: &RailId| is_busy(rails, *id) || rails.rail(*id).may_connect(now);
        let first = all.clone().find(usable).map(transport);
        let of_first = |id: &RailId| Some(transport(*id)) == first;
        let rail = to_connect(now, rails, all.clone().filter(of_first));
        if rail.is_some() {
            return rail;
        }
        let up = all.filter(|id| rails.rail(*id).is_up());
        let first = up.clone().next().map(transport);
        let of_first = |id: &RailId| Some(transport(*id)) == first;
        self.up.clear();
        each_nic_once(rails, up.filter(of_first), &mut self.up);
        self.weights.clear();
        let near = |id: &RailId| self.order.iter().find(|(known, _)| known == id);
        let weight = |id| near(id).map_or(1, |(_, tier)| config.weights[usize::from(*tier)]);
        self.weights.extend(self.up.iter().map(weight));
        self.version = Some(rails.version);
        None
    }

    /// When each rail would have finished a slice; the soonest.
    fn score(
        &mut self,
        now: Instant,
        slice: &SliceInfo,
        rails: &Rails<'_>,
        config: &TentConfig,
    ) -> u64 {
        let costs = self.up.iter().filter_map(|id| rails.rail(*id).cost());
        let assumed = costs.min().unwrap_or(UNKNOWN);
        let cost = |rail: &Rail| rail.cost().unwrap_or(assumed);
        let stalled = |id: &RailId| config.is_stalled(now, rails.rail(*id), cost(rails.rail(*id)));
        // If all are, it is this process that was held up, or the peer.
        let all_stalled = self.up.iter().all(stalled);
        let score = |(id, weight): (&RailId, &u32)| {
            let rail = rails.rail(*id);
            // One of which nothing is known, or that is on trial, is not waited for.
            let is_waited_for = rail.cost().is_some() && !rail.probing;
            if (!all_stalled && stalled(id))
                || (!is_waited_for && !config.has_room(now, rail, slice))
            {
                return u64::MAX;
            }
            let bytes = rail.bytes_in_flight() + u64::from(slice.length);
            let finished = times(bytes, cost(rail)).saturating_mul(u64::from(*weight));
            finished.saturating_add(rail.measure.round_trip_nanos())
        };
        self.scores.clear();
        self.scores.extend(self.up.iter().zip(&self.weights).map(score));
        self.scores.iter().copied().min().unwrap_or(u64::MAX)
    }

    /// The first of the rails from the turn on that is wanted.
    fn next(&mut self, wanted: impl Fn(usize, RailId) -> bool) -> Option<RailId> {
        let count = self.up.len();
        let from = self.turn.min(count);
        let at = (from..count).chain(0..from).find(|&at| wanted(at, self.up[at]))?;
        self.turn = at + 1;
        Some(self.up[at])
    }
}

impl Policy for Tent {
    fn pick(&mut self, now: Instant, slice: &SliceInfo, rails: &Rails<'_>) -> Pick {
        let index = usize::from(slice.class);
        if index >= self.classes.len() {
            self.classes.resize_with(index + 1, Class::default);
        }
        let class = &mut self.classes[index];
        if class.known != rails.all.len() {
            let tiers = self.nearness.tiers(slice, rails);
            let near = |(tier, ids): (u8, &Vec<RailId>)| {
                ids.iter().map(move |&id| (id, tier)).collect::<Vec<_>>()
            };
            class.order = (0..).zip(&tiers).flat_map(near).collect();
            class.order.sort_by_key(|(id, _)| rails.rail(*id).spec().transport);
            class.known = rails.all.len();
        }
        let config = &self.config;
        if class.version != Some(rails.version)
            && let Some(rail) = class.refresh(now, rails, config)
        {
            return Pick::Connect(rail);
        }
        match class.up[..] {
            [] => return Pick::NoRail,
            [only]
                if rails.rail(only).has_room(slice.room)
                    && config.leaves_room(now, rails.rail(only), slice) =>
            {
                return Pick::Post(only);
            }
            [_] => return Pick::Wait,
            _ => {}
        }
        let room = |id: RailId| config.has_room(now, rails.rail(id), slice);
        // What has failed goes on with each in turn, rather over those that have shown that they work.
        if slice.attempt > 0 {
            let proven = |_, id| room(id) && !rails.rail(id).probing;
            if let Some(rail) = class.next(proven).or_else(|| class.next(|_, id| room(id))) {
                return Pick::Post(rail);
            }
        } else if self.since_probe >= config.probe_share {
            let probe = |_, id| config.is_to_be_probed(now, rails.rail(id)) && room(id);
            if let Some(rail) = class.next(probe) {
                self.since_probe = 0;
                return Pick::Post(rail);
            }
        }
        let best = class.score(now, slice, rails, config);
        // Those that are about as good take turns.
        let good = best.saturating_add(best / 8);
        let scores = core::mem::take(&mut class.scores);
        let found = class.next(|at, id| scores[at] <= good && room(id));
        class.scores = scores;
        if let Some(rail) = found {
            self.since_probe = self.since_probe.saturating_add(1);
            return Pick::Post(rail);
        }
        // The best may stall; then another one is.
        match class.up.iter().any(|id| room(*id)) {
            true => Pick::WaitUntil(now + config.stall),
            false => Pick::Wait,
        }
    }

    fn has_priorities(&self) -> bool {
        true
    }

    fn is_full(&self, rail: &Rail, slice: &SliceInfo) -> bool {
        !rail.has_room(slice.length) || !self.config.is_short_of(rail)
    }

    fn most_age(&self, patience: Duration) -> Option<Duration> {
        Some(patience.saturating_mul(MOST_AGE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rail::{Access, RailSpec, RailState};
    use crate::{Config, Opcode, PriorityLevel};

    const SLICE: u32 = 64_000;

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    /// A rail that is up, between NICs of this number.
    fn rail(nic: u16) -> Rail {
        let (access, max_requests) = (Access::Connection, 100);
        let spec = RailSpec { local_nic: nic, peer_nic: nic, transport: 0, access, max_requests };
        let mut rail = Rail::new(spec);
        rail.state = RailState::Up;
        rail
    }

    /// The same, which has taken so many milliseconds for each of some slices, until 1000.
    fn measured(nic: u16, each: u64) -> Rail {
        let mut rail = rail(nic);
        let mut now = 1000 - 20 * each;
        rail.measure.begin(at(now), Duration::ZERO);
        let mut marks = vec![(now, rail.measure.mark()); 2];
        for _ in 0..20 {
            now += each;
            let (posted, mark) = marks.remove(0);
            rail.completed(at(now), (at(posted), mark), SLICE, Duration::ZERO);
            marks.push((now, rail.measure.mark()));
        }
        rail
    }

    fn hold(rail: &mut Rail, slices: u32, since: u64) {
        rail.slices = slices;
        rail.bytes = u64::from(slices * SLICE);
        rail.oldest = (slices > 0).then_some(at(since));
    }

    fn slice(attempt: u8) -> SliceInfo {
        let (class, local_location, peer_location) = (0, 0, 0);
        SliceInfo {
            opcode: Opcode::Write,
            length: SLICE,
            room: SLICE,
            level: PriorityLevel::Normal,
            yields: false,
            attempt,
            class,
            local_location,
            peer_location,
        }
    }

    fn tent() -> Tent {
        Tent::new(TentConfig::default(), vec![], vec![])
    }

    fn pick(tent: &mut Tent, now: u64, rails: &[Rail]) -> Pick {
        tent.pick(at(now), &slice(0), &Rails { all: rails, version: 1 })
    }

    #[test]
    fn a_slice_goes_where_it_is_finished_first() {
        // 1 and 4 ms a slice.
        let mut rails = [measured(0, 1), measured(1, 4)];
        let mut tent = tent();
        let mut posts = [0; 2];
        while let Pick::Post(id) = pick(&mut tent, 1000, &rails) {
            posts[usize::from(id.0)] += 1;
            let rail = &mut rails[usize::from(id.0)];
            let slices = rail.slices + 1;
            hold(rail, slices, 1000);
        }
        // 15 ms each, and a slice more.
        assert_eq!(posts, [15, 4]);
        // It is waited for rather than for one that is slower.
        let mut rails = [measured(0, 1), measured(1, 40)];
        hold(&mut rails[0], 15, 1000);
        let stall = TentConfig::default().stall;
        assert_eq!(pick(&mut tent, 1000, &rails), Pick::WaitUntil(at(1000) + stall));
        hold(&mut rails[1], 5, 1000);
        assert_eq!(pick(&mut tent, 1000, &rails), Pick::Wait, "no other has room");
    }

    /// How many slices a rail gets until no more go, where there are so many like it.
    fn in_flight(rails: &mut [Rail], level: PriorityLevel, yields: bool) -> u32 {
        let reserve = Duration::from_millis(5);
        let config = TentConfig { reserve, ..TentConfig::default() };
        let mut tent = Tent::new(config, vec![], vec![]);
        let slice = SliceInfo { level, yields, ..slice(0) };
        let mut posts = 0;
        while posts < 100 {
            let view = Rails { all: rails, version: 1 };
            let Pick::Post(id) = tent.pick(at(1000), &slice, &view) else { break };
            let rail = &mut rails[usize::from(id.0)];
            hold(rail, rail.slices + 1, 1000);
            rail.level_bytes[level.index()] = rail.bytes;
            posts += 1;
        }
        posts / rails.len() as u32
    }

    #[test]
    fn a_lower_priority_leaves_room_while_a_higher_one_comes() {
        for count in 1..3 {
            let known = || -> Vec<_> { (0..count).map(|nic| measured(nic, 1)).collect() };
            assert_eq!(in_flight(&mut known(), PriorityLevel::Bulk, true), 5, "of 1 ms each");
            assert!(in_flight(&mut known(), PriorityLevel::Bulk, false) >= 15);
            let mut unknown: Vec<_> = (0..count).map(rail).collect();
            assert_eq!(in_flight(&mut unknown, PriorityLevel::Normal, true), 2);
        }
        // What is higher does not count.
        let mut rail = measured(0, 1);
        rail.level_bytes = [1 << 20, 0, 0];
        let slice = SliceInfo { level: PriorityLevel::Bulk, yields: true, ..slice(0) };
        assert!(TentConfig::default().leaves_room(at(0), &rail, &slice));
        rail.level_bytes = [0, 1 << 20, 0];
        assert!(TentConfig::default().leaves_room(at(0), &rail, &slice), "nothing of it or below");
        rail.level_bytes = [0, 0, 1 << 20];
        assert!(!TentConfig::default().leaves_room(at(0), &rail, &slice));
    }

    #[test]
    fn equal_rails_take_turns() {
        let rails = [0, 1, 2].map(|nic| measured(nic, 1));
        let mut tent = tent();
        let turns = [(); 6].map(|()| pick(&mut tent, 1000, &rails));
        assert_eq!(turns, [0, 1, 2, 0, 1, 2].map(|rail| Pick::Post(RailId(rail))));
    }

    #[test]
    fn far_rails_count_as_slower() {
        let near = || vec![Priority { preferred: vec![0], available: vec![1] }];
        let mut tent = Tent::new(TentConfig::default(), near(), near());
        let mut rails = [measured(0, 1), measured(1, 1)];
        let mut before_far = 0;
        while pick(&mut tent, 1000, &rails) == Pick::Post(RailId(0)) {
            before_far += 1;
            hold(&mut rails[0], before_far, 1000);
        }
        // By 9, as it is preferred at neither end; and about as good is good enough.
        assert!((7..=9).contains(&before_far), "{before_far}");
        // NICs in no list are not used.
        let only = || vec![Priority { preferred: vec![0], available: vec![] }];
        let mut tent = Tent::new(TentConfig::default(), only(), only());
        hold(&mut rails[0], 100, 1000);
        assert_eq!(pick(&mut tent, 1000, &rails), Pick::Wait);
    }

    #[test]
    fn the_peers_nics_may_be_others_for_each_of_ours() {
        let only = |nic| {
            let elsewhere = Priority { preferred: vec![nic], available: vec![] };
            Affinity { locations: vec![], elsewhere }
        };
        // The second rail leads from our NIC 1 to the peer's NIC 1.
        let mut tent = tent().with_affinity(vec![only(0), only(2)]);
        let rails = [measured(0, 1), measured(1, 1)];
        let picks = [(); 3].map(|()| pick(&mut tent, 1000, &rails));
        assert_eq!(picks, [Pick::Post(RailId(0)); 3]);
    }

    #[test]
    fn a_rail_whose_oldest_byte_is_too_old_gets_no_more() {
        let mut rails = [measured(0, 1), measured(1, 4)];
        hold(&mut rails[0], 1, 1000);
        let mut tent = tent();
        assert_eq!(pick(&mut tent, 1025, &rails), Pick::Post(RailId(0)));
        assert_eq!(pick(&mut tent, 1026, &rails), Pick::Post(RailId(1)));
        // Unless that is so of all: then it is not the rail.
        hold(&mut rails[1], 1, 900);
        for _ in 0..3 {
            assert_eq!(pick(&mut tent, 1026, &rails), Pick::Post(RailId(0)));
        }
        // It may be old where much is in flight: twice the 12 ms that it needs, and four round trips.
        let mut rails = [measured(0, 1), measured(1, 40)];
        for (age, expected) in [(28, 0), (29, 1)] {
            hold(&mut rails[0], 12, 1000 - age);
            assert_eq!(pick(&mut tent, 1000, &rails), Pick::Post(RailId(expected)), "{age} ms");
        }
    }

    #[test]
    fn a_rail_has_in_flight_what_it_carries_in_15_ms_or_two_round_trips() {
        let config = TentConfig::default();
        // 40 ms a slice, and a round trip.
        let mut rail = measured(0, 40);
        rail.slices = 2;
        for (bytes, expected) in [(100_000, true), (127_999, true), (128_000, false)] {
            rail.bytes = bytes;
            assert_eq!(config.is_short_of(&rail), expected, "{bytes} in flight");
        }
        // One that is full has no room, or as much as it can use.
        let tent = tent();
        let mut rail = measured(0, 1);
        assert!(!tent.is_full(&rail, &slice(0)));
        hold(&mut rail, 14, 1000);
        assert!(!tent.is_full(&rail, &slice(0)));
        hold(&mut rail, 15, 1000);
        assert!(rail.has_room(SLICE) && tent.is_full(&rail, &slice(0)));
        hold(&mut rail, 1, 1000);
        rail.probing = true;
        assert!(config.is_short_of(&rail) && tent.is_full(&rail, &slice(0)));
    }

    /// Once a second a lower level leaves even the room of a round trip.
    #[test]
    fn the_smallest_round_trip_is_none_behind_own_slices() {
        let config = TentConfig::default();
        for (each, drain) in [(1, 10), (40, 80), (50, 100)] {
            let rail = measured(0, each);
            let longer = config.reserve + Duration::from_millis(each);
            for (now, expected) in [(drain - 1, config.reserve), (drain, longer), (999, longer)] {
                assert_eq!(config.allowance(at(5000 + now), &rail), expected, "{each} ms at {now}");
            }
        }
    }

    #[test]
    fn rails_of_another_transport_are_for_when_there_are_none_of_the_first() {
        let mut rails = [rail(0), rail(1), rail(2)];
        rails[0].spec.transport = 1;
        rails.iter_mut().for_each(|rail| rail.state = RailState::Down);
        let (mut tent, mut version) = (tent(), 0);
        let mut picks = |now, rails: &[Rail]| {
            version += 1;
            let view = Rails { all: rails, version };
            [(); 2].map(|()| tent.pick(at(now), &slice(0), &view))
        };
        assert_eq!(picks(0, &rails), [Pick::Connect(RailId(1)); 2]);
        rails[1].state = RailState::Up;
        assert_eq!(picks(0, &rails), [Pick::Connect(RailId(2)); 2]);
        rails[2].state = RailState::Up;
        assert_eq!(picks(0, &rails), [1, 2].map(|rail| Pick::Post(RailId(rail))));
        rails[1].rest(at(0), true, &Config::default());
        assert_eq!(picks(5, &rails), [Pick::Post(RailId(2)); 2]);
        rails[2].rest(at(0), true, &Config::default());
        assert_eq!(picks(5, &rails), [Pick::Connect(RailId(0)); 2]);
        rails[0].state = RailState::Up;
        assert_eq!(picks(5, &rails), [Pick::Post(RailId(0)); 2]);
        rails[1].state = RailState::Connecting;
        assert_eq!(picks(5, &rails), [Pick::Post(RailId(0)); 2], "meanwhile");
        rails[1].state = RailState::Up;
        assert_eq!(picks(5, &rails), [Pick::Post(RailId(1)); 2]);
    }

    #[test]
    fn a_rail_that_is_not_chosen_is_measured_now_and_then() {
        let rails = [measured(0, 1), measured(1, 40)];
        let mut tent = tent();
        let mut probes = Vec::new();
        for turn in 0..100 {
            // 2000 ms: longer than 8 times what its last slice took, which was two in flight.
            if pick(&mut tent, 2000, &rails) == Pick::Post(RailId(1)) {
                probes.push(turn);
            }
        }
        assert_eq!(probes, [16, 33, 50, 67, 84], "one in 17, since it stays idle here");
        let mut rails = rails;
        let mut after_16 = |now, rails: &[Rail]| {
            tent.since_probe = 16;
            pick(&mut tent, now, rails)
        };
        for (now, expected) in [(1600, 0), (1639, 0), (1640, 1)] {
            assert_eq!(after_16(now, &rails), Pick::Post(RailId(expected)), "{now}");
        }
        // It is asked after 100 ms at the soonest, and 800 at the latest.
        rails[1] = measured(1, 5);
        rails[0] = measured(0, 50);
        for (now, expected) in [(1099, 1), (1399, 1), (1799, 1), (1800, 0)] {
            assert_eq!(after_16(now, &rails), Pick::Post(RailId(expected)), "{now}");
        }
        // One that has something to do is measured by that.
        hold(&mut rails[0], 1, 1999);
        for _ in 0..2 {
            assert_eq!(after_16(2000, &rails), Pick::Post(RailId(1)));
        }
    }

    #[test]
    fn one_of_which_nothing_is_known_gets_a_slice_and_is_not_waited_for() {
        let mut rails = [measured(0, 1), rail(1)];
        hold(&mut rails[0], 3, 1000);
        rails[1].probing = true;
        let mut tent = tent();
        assert_eq!(pick(&mut tent, 1000, &rails), Pick::Post(RailId(1)));
        hold(&mut rails[1], 1, 1000);
        assert_eq!(pick(&mut tent, 1000, &rails), Pick::Post(RailId(0)));
        // Where nothing is known of any, all get some.
        let rails = [rail(0), rail(1)];
        let turns = [(); 2].map(|()| pick(&mut tent, 1000, &rails));
        assert!(turns.contains(&Pick::Post(RailId(0))) && turns.contains(&Pick::Post(RailId(1))));
        // The one with less to do.
        let mut rails = rails;
        hold(&mut rails[0], 1, 1000);
        assert_eq!(pick(&mut self::tent(), 1000, &rails), Pick::Post(RailId(1)));
    }

    #[test]
    fn one_on_trial_is_not_waited_for_though_it_was_fast() {
        let mut rails = [measured(0, 4), measured(1, 1)];
        rails[1].probing = true;
        let mut tent = tent();
        assert_eq!(pick(&mut tent, 1000, &rails), Pick::Post(RailId(1)));
        // It has room for one slice, until that is done.
        hold(&mut rails[1], 1, 1000);
        assert_eq!(pick(&mut tent, 1000, &rails), Pick::Post(RailId(0)));
        rails[1].probing = false;
        assert_eq!(pick(&mut tent, 1000, &rails), Pick::Post(RailId(1)));
    }

    #[test]
    fn what_has_failed_goes_on_with_another() {
        let mut rails = [measured(0, 1), measured(1, 4), measured(2, 40)];
        rails[2].probing = true;
        let mut tent = tent();
        let again = |tent: &mut Tent, rails: &[Rail]| {
            tent.pick(at(1000), &slice(1), &Rails { all: rails, version: 1 })
        };
        let turns = [(); 3].map(|()| again(&mut tent, &rails));
        assert_eq!(turns, [0, 1, 0].map(|rail| Pick::Post(RailId(rail))));
        for id in [0, 1] {
            rails[id].requests = 100;
        }
        assert_eq!(again(&mut tent, &rails), Pick::Post(RailId(2)), "if no other has room");
    }

    #[test]
    fn rails_are_connected_and_one_alone_is_as_full_as_it_may_be() {
        let mut tent = tent();
        let mut rails = [rail(0), rail(1)];
        rails[0].state = RailState::Down;
        rails[1].state = RailState::Down;
        assert_eq!(pick(&mut tent, 0, &rails), Pick::Connect(RailId(0)));
        rails[0].state = RailState::Connecting;
        assert_eq!(pick(&mut tent, 0, &rails), Pick::Connect(RailId(1)));
        rails[1].rest(at(0), true, &Config::default());
        assert_eq!(pick(&mut tent, 0, &rails), Pick::NoRail);
        let mut one = [measured(0, 40)];
        let mut tent = self::tent();
        hold(&mut one[0], 3, 1000);
        assert_eq!(pick(&mut tent, 1000, &one), Pick::Post(RailId(0)));
        hold(&mut one[0], 4, 1000);
        assert_eq!(pick(&mut tent, 1000, &one), Pick::Wait);
    }
}
