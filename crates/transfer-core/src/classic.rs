//! The classic policy: NICs near to the memory first.
//!
//! For each location there is a list of preferred NICs and a list of NICs that are available too. A
//! slice goes over rails that are preferred at both ends, by turns or at random. If none of these is
//! connected or can be, it goes over those that are preferred at one end, and then over any. A slice
//! that has failed k times begins at the k-th rail of all, preferred ones first.

use crate::nearness::{Affinity, Nearness, Priority, each_nic_once, is_busy, to_connect};
use crate::{Instant, Pick, Policy, RailId, Rails, SliceInfo};

/// How one of several equally good rails is chosen.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Order {
    /// Each in turn.
    RoundRobin,
    /// At random, from this seed.
    Random(u64),
}

/// The classic policy.
#[derive(Debug)]
pub struct Classic {
    order: Order,
    nearness: Nearness,
    classes: Vec<Class>,
}

/// What was found out for a pair of locations.
#[derive(Debug, Default)]
struct Class {
    /// The rails by how near they are; tier by tier.
    tiers: [Vec<RailId>; 3],
    /// How many rails were known then.
    known: usize,
    /// The version of the rails at which `up` is right.
    version: Option<u64>,
    /// Those of the best tier that are up.
    up: Vec<RailId>,
    turn: usize,
}

impl Classic {
    /// A policy with the NICs of each local and each peer's location, by number. NICs that are in no
    /// list of a location are not for it; of a location without lists all are available.
    pub const fn new(order: Order, local: Vec<Priority>, peer: Vec<Priority>) -> Self {
        Self { order, nearness: Nearness::new(local, peer), classes: Vec::new() }
    }

    /// The same, with other NICs of the peer's locations for each of our NICs, by number.
    #[must_use]
    pub fn with_affinity(self, affinity: Vec<Affinity>) -> Self {
        Self { nearness: self.nearness.with_affinity(affinity), ..self }
    }
}

impl Class {
    /// Finds the rails to use now; or one to connect.
    fn refresh(&mut self, now: Instant, rails: &Rails<'_>) -> Option<RailId> {
        for tier in &self.tiers {
            // Only rails of the first transport that has any.
            let has_any = |id: &&RailId| is_busy(rails, **id) || rails.rail(**id).may_connect(now);
            let transport = tier.iter().find(has_any).map(|id| rails.rail(*id).spec().transport);
            let of_transport = |id: &RailId| Some(rails.rail(*id).spec().transport) == transport;
            let rail = to_connect(now, rails, tier.iter().copied().filter(of_transport));
            if rail.is_some() {
                return rail;
            }
            if transport.is_some() {
                break;
            }
        }
        self.up.clear();
        for tier in &self.tiers {
            let up = tier.iter().copied().filter(|id| rails.rail(*id).is_up());
            let first = up.clone().map(|id| rails.rail(id).spec().transport).next();
            let of_first = |id: &RailId| Some(rails.rail(*id).spec().transport) == first;
            each_nic_once(rails, up.filter(of_first), &mut self.up);
            if !self.up.is_empty() {
                break;
            }
        }
        self.version = Some(rails.version);
        None
    }

    /// Where a slice that has failed `attempt` times goes on: rather over rails on which something has
    /// completed since they failed. But it does not wait for one while another has room, as it holds up
    /// those behind it.
    fn walk(&self, slice: &SliceInfo, rails: &Rails<'_>) -> Option<Pick> {
        let rail = |id: &RailId| &rails.all[usize::from(id.0)];
        let all = self.tiers.iter().flatten();
        let count = self.tiers.iter().map(Vec::len).sum::<usize>().max(1);
        let from = (usize::from(slice.attempt) - 1) % count;
        let order = all.clone().skip(from).chain(all.take(from));
        let mut room = order.filter(|id| rail(id).has_room(slice.room));
        let first = room.next()?;
        let proven = |id: &&RailId| !rail(id).probing;
        Some(Pick::Post(*core::iter::once(first).chain(room).find(proven).unwrap_or(first)))
    }
}

impl Policy for Classic {
    fn pick(&mut self, now: Instant, slice: &SliceInfo, rails: &Rails<'_>) -> Pick {
        let index = usize::from(slice.class);
        if index >= self.classes.len() {
            self.classes.resize_with(index + 1, Class::default);
        }
        if self.classes[index].known != rails.all.len() {
            let tiers = self.nearness.tiers(slice, rails);
            let class = &mut self.classes[index];
            (class.known, class.tiers) = (rails.all.len(), tiers);
        }
        let class = &mut self.classes[index];
        if class.version != Some(rails.version)
            && let Some(rail) = class.refresh(now, rails)
        {
            return Pick::Connect(rail);
        }
        if slice.attempt > 0
            && let Some(pick) = class.walk(slice, rails)
        {
            return pick;
        }
        let count = class.up.len();
        if count == 0 {
            return Pick::NoRail;
        }
        let first = match &mut self.order {
            Order::RoundRobin => class.turn,
            Order::Random(state) => (next_random(state) % count as u64) as usize,
        };
        // Past the end it begins anew; `turn` may be from when there were more.
        let mut at = if first < count { first } else { 0 };
        for _ in 0..count {
            let rail = class.up[at];
            at = if at + 1 < count { at + 1 } else { 0 };
            if rails.all[usize::from(rail.0)].has_room(slice.room) {
                class.turn = at;
                return Pick::Post(rail);
            }
        }
        Pick::Wait
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
const fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PriorityLevel;
    use crate::rail::{Access, Rail, RailSpec, RailState};
    use crate::{Config, Opcode};

    /// Rails between two NICs here and two of the peer: 0-0, 0-1, 1-0, 1-1.
    fn rails() -> Vec<Rail> {
        let spec = |local_nic, peer_nic| RailSpec {
            local_nic,
            peer_nic,
            transport: 0,
            access: Access::Connection,
            max_requests: 2,
        };
        [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(l, p)| Rail::new(spec(l, p))).into()
    }

    fn priority(preferred: &[u16], available: &[u16]) -> Vec<Priority> {
        vec![Priority { preferred: preferred.to_vec(), available: available.to_vec() }]
    }

    fn slice(attempt: u8) -> SliceInfo {
        SliceInfo {
            opcode: Opcode::Write,
            length: 100,
            room: 100,
            level: PriorityLevel::Normal,
            yields: false,
            attempt,
            class: 0,
            local_location: 0,
            peer_location: 0,
        }
    }

    /// Everything that a policy wants connected at a version of the rails, and then its answer.
    fn settle(policy: &mut Classic, rails: &mut [Rail], version: &mut u64) -> (Vec<u16>, Pick) {
        let mut connected = Vec::new();
        loop {
            *version += 1;
            let view = Rails { all: rails, version: *version };
            match policy.pick(Instant::ZERO, &slice(0), &view) {
                Pick::Connect(id) => {
                    connected.push(id.0);
                    rails[usize::from(id.0)].state = RailState::Connecting;
                }
                pick => return (connected, pick),
            }
        }
    }

    fn post(policy: &mut Classic, rails: &[Rail], version: u64, attempt: u8) -> Pick {
        policy.pick(Instant::ZERO, &slice(attempt), &Rails { all: rails, version })
    }

    #[test]
    fn every_nic_is_connected_once_and_used_in_turn() {
        let all = || priority(&[0, 1], &[]);
        let mut policy = Classic::new(Order::RoundRobin, all(), all());
        let (mut rails, mut version) = (rails(), 0);
        assert_eq!(settle(&mut policy, &mut rails, &mut version), (vec![0, 3], Pick::NoRail));
        rails[0].state = RailState::Up;
        assert_eq!(settle(&mut policy, &mut rails, &mut version), (vec![], Pick::Post(RailId(0))));
        rails[3].state = RailState::Up;
        version += 1;
        let turns = [(); 4].map(|()| post(&mut policy, &rails, version, 0));
        assert_eq!(turns, [0, 3, 0, 3].map(|rail| Pick::Post(RailId(rail))));
        rails[0].requests = 2;
        let turns = [(); 2].map(|()| post(&mut policy, &rails, version, 0));
        assert_eq!(turns, [Pick::Post(RailId(3)); 2]);
        rails[3].requests = 2;
        assert_eq!(post(&mut policy, &rails, version, 0), Pick::Wait);
    }

    #[test]
    fn a_rail_that_failed_is_gone_around_by_its_nics_others() {
        let all = || priority(&[0, 1], &[]);
        let mut policy = Classic::new(Order::RoundRobin, all(), all());
        let (mut rails, mut version) = (rails(), 0);
        settle(&mut policy, &mut rails, &mut version);
        rails[0].rest(Instant::ZERO, true, &Config::default());
        rails[3].state = RailState::Up;
        let (connected, pick) = settle(&mut policy, &mut rails, &mut version);
        assert_eq!((connected, pick), (vec![1, 2], Pick::Post(RailId(3))));
    }

    /// 0-1 and 1-0 have come up while 0-0 was down.
    #[test]
    fn what_took_the_place_of_a_rail_is_not_used_beside_it() {
        let mut policy = Classic::new(Order::RoundRobin, vec![], vec![]);
        let mut rails = rails();
        rails.iter_mut().for_each(|rail| rail.state = RailState::Up);
        rails[0].state = RailState::Fencing;
        let mut posts = |rails: &[Rail], version| {
            let mut posts = [(); 4].map(|()| match post(&mut policy, rails, version, 0) {
                Pick::Post(id) => id.0,
                pick => panic!("{pick:?}"),
            });
            posts.sort_unstable();
            posts
        };
        assert_eq!(posts(&rails, 1), [1, 1, 2, 2]);
        rails[0].state = RailState::Up;
        assert_eq!(posts(&rails, 2), [0, 0, 3, 3]);
        // One of its NICs has no other.
        rails[3].state = RailState::Fencing;
        rails[1].state = RailState::Fencing;
        assert_eq!(posts(&rails, 3), [0, 0, 2, 2]);
    }

    #[test]
    fn near_ones_come_first_and_others_when_there_are_none() {
        let mut policy =
            Classic::new(Order::RoundRobin, priority(&[0], &[1]), priority(&[1], &[0]));
        let (mut rails, mut version) = (rails(), 0);
        assert_eq!(settle(&mut policy, &mut rails, &mut version), (vec![1], Pick::NoRail));
        // All of the middle tier when the first is paused: 0-0 and 1-1.
        rails[1].state = RailState::Paused(Instant::ZERO);
        assert_eq!(settle(&mut policy, &mut rails, &mut version), (vec![0, 3], Pick::NoRail));
        for (id, state) in [(0, RailState::Fencing), (3, RailState::Paused(Instant::ZERO))] {
            rails[id].state = state;
        }
        assert_eq!(settle(&mut policy, &mut rails, &mut version), (vec![2], Pick::NoRail));
        rails[2].state = RailState::Up;
        assert_eq!(settle(&mut policy, &mut rails, &mut version).1, Pick::Post(RailId(2)));
        rails[1].state = RailState::Up;
        assert_eq!(settle(&mut policy, &mut rails, &mut version).1, Pick::Post(RailId(1)));
        // It is full: what is farther is for those that failed.
        rails[1].requests = 2;
        assert_eq!(post(&mut policy, &rails, version, 0), Pick::Wait);
        assert_eq!(post(&mut policy, &rails, version, 1), Pick::Post(RailId(2)));
    }

    #[test]
    fn nics_that_go_together_come_first() {
        let of = |preferred: u16, available: u16| Priority {
            preferred: vec![preferred],
            available: vec![available],
        };
        // Ours with the peer's other one; of memory that is nowhere, with that of its number.
        let affinity = [(1, 0), (0, 1)].map(|(preferred, available)| Affinity {
            locations: vec![of(preferred, available)],
            elsewhere: of(available, preferred),
        });
        for (location, together, apart) in [(0, vec![1, 2], 0), (9, vec![0, 3], 1)] {
            let policy = Classic::new(Order::RoundRobin, vec![], priority(&[0, 1], &[]));
            let mut policy = policy.with_affinity(affinity.to_vec());
            let (mut rails, mut version) = (rails(), 0);
            let slice = SliceInfo { peer_location: location, ..slice(0) };
            let mut connected = Vec::new();
            loop {
                version += 1;
                let view = Rails { all: &rails, version };
                let Pick::Connect(id) = policy.pick(Instant::ZERO, &slice, &view) else { break };
                connected.push(id.0);
                rails[usize::from(id.0)].state = RailState::Connecting;
            }
            assert_eq!(connected, together);
            // The others are there when these are not.
            for id in together {
                rails[usize::from(id)].state = RailState::Paused(Instant::from_nanos(u64::MAX));
            }
            let view = Rails { all: &rails, version: version + 1 };
            let pick = policy.pick(Instant::ZERO, &slice, &view);
            assert_eq!(pick, Pick::Connect(RailId(apart)));
        }
    }

    #[test]
    fn a_retry_walks_through_all_rails() {
        let mut policy =
            Classic::new(Order::RoundRobin, priority(&[1], &[0]), priority(&[1], &[0]));
        let mut rails = rails();
        rails.iter_mut().for_each(|rail| rail.state = RailState::Up);
        let walk: Vec<Pick> =
            (1..=5).map(|attempt| post(&mut policy, &rails, 1, attempt)).collect();
        assert_eq!(walk, [3, 1, 2, 0, 3].map(|rail| Pick::Post(RailId(rail))));
        // Rather over one that works than over those that may not.
        for id in [0, 1, 3] {
            rails[id].probing = true;
        }
        assert_eq!(post(&mut policy, &rails, 1, 1), Pick::Post(RailId(2)));
        // But it does not hold up those behind it while one of these has room.
        rails[2].requests = 2;
        assert_eq!(post(&mut policy, &rails, 1, 1), Pick::Post(RailId(3)));
        rails[3].slices = 1;
        assert_eq!(post(&mut policy, &rails, 1, 1), Pick::Post(RailId(1)));
        rails[2].state = RailState::Fencing;
        for id in [0, 1] {
            rails[id].slices = 1;
        }
        assert_eq!(post(&mut policy, &rails, 1, 1), Pick::Wait);
    }

    #[test]
    fn a_better_transport_comes_first() {
        let mut policy = Classic::new(Order::RoundRobin, vec![], vec![]);
        let (mut rails, mut version) = (rails(), 0);
        for (id, transport) in [(0, 1), (1, 1), (2, 0), (3, 1)] {
            rails[id].spec.transport = transport;
        }
        assert_eq!(settle(&mut policy, &mut rails, &mut version), (vec![2], Pick::NoRail));
        rails[2].rest(Instant::ZERO, true, &Config::default());
        assert_eq!(settle(&mut policy, &mut rails, &mut version).0, [0, 3]);
        rails[0].state = RailState::Up;
        assert_eq!(settle(&mut policy, &mut rails, &mut version).1, Pick::Post(RailId(0)));
        rails[2].state = RailState::Up;
        assert_eq!(settle(&mut policy, &mut rails, &mut version).1, Pick::Post(RailId(2)));
    }

    #[test]
    fn turns_begin_anew_when_there_are_fewer() {
        let mut policy = Classic::new(Order::RoundRobin, vec![], vec![]);
        let mut rails = rails();
        rails.iter_mut().for_each(|rail| rail.state = RailState::Up);
        rails[0].state = RailState::Fencing;
        rails[2].state = RailState::Fencing;
        let turns = [(); 3].map(|()| post(&mut policy, &rails, 1, 0));
        assert_eq!(turns, [1, 3, 1].map(|rail| Pick::Post(RailId(rail))));
        rails[3].state = RailState::Fencing;
        let turns = [(); 2].map(|()| post(&mut policy, &rails, 2, 0));
        assert_eq!(turns, [1, 1].map(|rail| Pick::Post(RailId(rail))));
    }

    #[test]
    fn random_numbers_are_splitmix64() {
        let mut state = 1_234_567;
        let numbers = [(); 3].map(|()| next_random(&mut state));
        let known =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(numbers, known);
    }

    #[test]
    fn at_random_each_is_taken_as_often() {
        let all = || priority(&[0, 1, 2, 3], &[]);
        let mut policy = Classic::new(Order::Random(7), all(), all());
        let mut rails = rails();
        for (nic, rail) in (0..).zip(&mut rails) {
            (rail.spec.local_nic, rail.spec.peer_nic) = (nic, nic);
            rail.state = RailState::Up;
        }
        let mut counts = [0; 4];
        for _ in 0..4000 {
            let Pick::Post(rail) = post(&mut policy, &rails, 1, 0) else { panic!() };
            counts[usize::from(rail.0)] += 1;
        }
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
    }
}
