//! What rails carry together, over links of a rate: while one is cut, slow, or held up.

use std::collections::BTreeMap;

use super::*;

/// Bytes per second of a link: 200 Mbit/s.
pub(super) const RATE: u64 = 25_000_000;
/// Bytes that pass at once after a pause.
const BUCKET: u64 = 66 << 10;
/// What an answer takes where nothing else is said, from a NIC or the control port.
const ANSWER: Duration = Duration::from_millis(1);
/// A queue pair gives up when nothing was acknowledged for so long.
const QUEUE_PAIR: Duration = Duration::from_millis(2100);
/// Tasks are as long as the chunks of a copy, and as many of them are under way.
const CHUNK: u64 = 2 << 20;
const CHUNKS: u64 = 4;
/// Tasks with numbers from here on are none of the copy.
pub(super) const OTHERS: u64 = 1 << 20;

#[derive(Clone, Copy, Debug)]
enum Event {
    Up(RailId, u64),
    Tested(RailId, u64),
    Down(RailId, u64),
    Aborted(RailId, u64),
    Confirmed(RailId, u64),
    Done(Post),
}

pub(super) struct Link {
    pub(super) rate: u64,
    free_at: Instant,
    pub(super) cut: bool,
}

/// A copy in order: the next chunk begins when the oldest has ended.
pub(super) struct Copy {
    pub(super) flow: Flow<AnyPolicy>,
    pub(super) now: Instant,
    pub(super) links: Vec<Link>,
    events: BTreeMap<(Instant, u64), Event>,
    sequence: u64,
    /// What is told is told then: a thread is held up until then.
    pub(super) held_up_until: Instant,
    /// The chunk of which the first byte is so slow at the peer that its NIC waits for it.
    pub(super) slow: Option<(u64, Duration)>,
    /// How many of them are under way.
    chunks: u64,
    begun: u64,
    ended: Vec<u64>,
    pub(super) oldest: u64,
    pub(super) breaks: Vec<RailId>,
    /// What an answer takes.
    pub(super) answer: Duration,
    /// The priority of the chunks.
    pub(super) priority: PriorityLevel,
    /// Other tasks that have ended, and when.
    pub(super) others: Vec<(u64, Instant)>,
    /// Bytes that came in each 100 ms.
    pub(super) came: Vec<u64>,
}

impl Copy {
    fn new(links: u16) -> Self {
        let policy = Classic::new(Order::RoundRobin, Vec::new(), Vec::new());
        Self::with(AnyPolicy::Classic(policy), &vec![RATE; usize::from(links)])
    }

    /// With this policy, over links of these rates.
    pub(super) fn with(policy: AnyPolicy, rates: &[u64]) -> Self {
        let links = rates.len() as u16;
        let mut flow = Flow::new(Config::default(), policy, INCARNATION, 0);
        for nic in 0..links {
            flow.add_rail(spec(nic, Access::Connection)).unwrap();
        }
        let link = |&rate| Link { rate, free_at: Instant::ZERO, cut: false };
        Self {
            flow,
            now: Instant::ZERO,
            links: rates.iter().map(link).collect(),
            events: BTreeMap::new(),
            sequence: 0,
            held_up_until: Instant::ZERO,
            slow: None,
            chunks: CHUNKS,
            begun: 0,
            ended: Vec::new(),
            oldest: 0,
            breaks: Vec::new(),
            answer: ANSWER,
            priority: PriorityLevel::Normal,
            others: Vec::new(),
            came: Vec::new(),
        }
    }

    fn plan(&mut self, at: Instant, event: Event) {
        self.sequence += 1;
        self.events.insert((at, self.sequence), event);
    }

    fn link(&mut self, rail: RailId) -> &mut Link {
        &mut self.links[usize::from(rail.0)]
    }

    fn post(&mut self, post: Post) {
        let slow = self.slow.filter(|&(chunk, _)| post.first.local == chunk << 32);
        let (now, answer) = (self.now, self.answer);
        let link = self.link(post.rail);
        if link.cut {
            return self.plan(now + QUEUE_PAIR, Event::Down(post.rail, post.epoch));
        }
        let took = Duration::from_nanos(u64::from(post.length) * 1_000_000_000 / link.rate);
        let waits = slow.map_or(Duration::ZERO, |(_, waits)| waits);
        // A link that has sent nothing for a while lets a slice pass at once.
        let filled =
            Instant::from_nanos(now.nanos().saturating_sub(BUCKET * 1_000_000_000 / link.rate));
        link.free_at = link.free_at.max(filled) + took + waits;
        let at = link.free_at.max(now) + answer;
        self.plan(at, Event::Done(post));
    }

    /// Does what the flow wants, and keeps the copy going.
    fn poll(&mut self) {
        loop {
            while self.begun < self.oldest + self.chunks {
                self.begun += 1;
                let chunk = Request { priority: self.priority, ..write(self.begun, CHUNK) };
                self.flow.submit(&chunk).unwrap();
            }
            let Some(output) = self.flow.poll_output(self.now) else { break };
            let soon = self.now + self.answer;
            match output {
                Output::Post(post) => self.post(post),
                Output::Connect { rail, epoch } => self.plan(soon, Event::Up(rail, epoch)),
                Output::Test { rail, epoch } if self.link(rail).cut => {
                    self.plan(self.now + QUEUE_PAIR, Event::Down(rail, epoch));
                }
                Output::Test { rail, epoch } => {
                    // Behind what there is.
                    let at = self.link(rail).free_at.max(self.now) + self.answer;
                    self.plan(at, Event::Tested(rail, epoch));
                }
                Output::Abort { rail, epoch } => {
                    self.breaks.push(rail);
                    self.plan(soon, Event::Aborted(rail, epoch));
                }
                Output::Fence { rail, epoch } => self.plan(soon, Event::Confirmed(rail, epoch)),
                Output::Ended(ended) if ended.user >= OTHERS => {
                    self.others.push((ended.user, self.now));
                }
                Output::Ended(ended) => {
                    assert_eq!(ended.end, End::Completed);
                    self.ended.push(ended.user);
                    while self.ended.contains(&(self.oldest + 1)) {
                        self.oldest += 1;
                        self.ended.retain(|&user| user > self.oldest);
                    }
                }
            }
        }
    }

    fn happen(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Up(rail, epoch) => self.flow.rail_up(now, rail, epoch),
            Event::Tested(rail, epoch) if !self.link(rail).cut => {
                self.flow.rail_tested(now, rail, epoch);
            }
            Event::Tested(rail, epoch) => self.plan(now + QUEUE_PAIR, Event::Down(rail, epoch)),
            Event::Down(rail, epoch) => self.flow.rail_down(now, rail, epoch),
            Event::Aborted(rail, epoch) => self.flow.rail_aborted(now, rail, epoch),
            Event::Confirmed(rail, epoch) => self.flow.fence_confirmed(now, rail, epoch),
            Event::Done(post) if self.link(post.rail).cut => {
                self.plan(now + QUEUE_PAIR, Event::Down(post.rail, post.epoch));
            }
            Event::Done(post) => {
                let moved = self.flow.completed(now, post.slice, SliceResult::Done);
                let window = (now.nanos() / 100_000_000) as usize;
                self.came.resize(self.came.len().max(window + 1), 0);
                self.came[window] += moved.map_or(0, |moved| u64::from(moved.length));
            }
        }
    }

    pub(super) fn pass(&mut self, until: Instant) {
        loop {
            self.poll();
            let event = self.events.keys().next().map(|&(at, _)| at.max(self.held_up_until));
            let next = event.into_iter().chain(self.flow.poll_timeout()).min();
            let Some(next) = next.filter(|&next| next.max(self.held_up_until) <= until) else {
                break;
            };
            self.now = self.now.max(next).max(self.held_up_until);
            // As threads do: those that tell, and one that keeps time.
            if event.is_some_and(|at| at <= self.now)
                && let Some((_, event)) = self.events.pop_first()
            {
                self.happen(event);
            } else {
                self.flow.handle_timeout(self.now);
            }
        }
        self.now = until;
    }

    /// The least rate of a whole 100 ms, in parts of a link's, percent.
    pub(super) fn least(&self, from: u64, to: u64) -> u64 {
        let windows = &self.came[(from / 100) as usize..(to / 100) as usize];
        windows.iter().min().unwrap() * 10 * 100 / RATE
    }
}

#[test]
fn several_links_carry_what_they_can() {
    for links in [1, 2, 4] {
        let mut copy = Copy::new(links);
        copy.pass(at(2000));
        assert!(copy.least(100, 1900) >= 97 * u64::from(links), "{:?}", copy.came);
        assert_eq!(copy.breaks, []);
    }
}

/// Else it is in every round trip, the smallest is forgotten, and what may be in flight doubles: until one rail has
/// all there is, and the others none.
#[test]
fn a_queue_that_is_never_empty_grows_no_longer() {
    let mut copy = Copy::new(4);
    copy.chunks = 16;
    for second in 1..60 {
        copy.pass(at(1000 * second));
        for rail in copy.flow.rails() {
            let limit = rail.limit_bytes();
            assert!(limit <= (RATE / 50) * 11 / 10, "{second} s: {limit} bytes may be in flight");
        }
    }
    assert!(copy.least(100, 59_000) >= 388, "{:?}", copy.came);
}

/// Twice as long as what is in flight lasts: it is found out by emptying the queue.
#[test]
fn a_path_that_becomes_long_is_filled_again() {
    let mut copy = Copy::new(1);
    copy.chunks = 16;
    copy.pass(at(1000));
    copy.answer = Duration::from_millis(40);
    copy.pass(at(25_000));
    assert!(copy.least(23_000, 25_000) >= 95, "{:?}", copy.came);
}

#[test]
fn a_link_that_is_cut_is_made_up_for_and_taken_again() {
    let mut copy = Copy::new(4);
    copy.pass(at(1000));
    copy.links[3].cut = true;
    copy.pass(at(9000));
    assert!(copy.least(1500, 9000) >= 270, "{:?}", copy.came);
    copy.links[3].cut = false;
    copy.pass(at(46_000));
    assert!(copy.least(44_000, 46_000) >= 360, "{:?}", copy.came);
    assert!(copy.breaks.iter().all(|rail| rail.0 == 3), "{:?}", copy.breaks);
}

#[test]
fn links_that_are_cut_one_after_the_other_are_made_up_for() {
    let mut copy = Copy::new(4);
    copy.pass(at(1000));
    copy.links[3].cut = true;
    copy.pass(at(1050));
    copy.links[2].cut = true;
    copy.pass(at(8000));
    assert!(copy.least(2000, 8000) >= 180, "{:?}", copy.came);
}

/// What completes meanwhile is told in one go.
#[test]
fn a_thread_that_is_held_up_leaves_rails_as_they_were() {
    for millis in [20, 90, 1000] {
        let mut copy = Copy::new(4);
        copy.pass(at(1000));
        copy.held_up_until = at(1000 + millis);
        copy.pass(at(4000));
        assert!(copy.least(2500, 4000) >= 388, "{millis} ms: {:?}", copy.came);
        for rail in copy.flow.rails() {
            let limit = rail.limit_bytes();
            assert!(limit <= (RATE / 50) * 11 / 10, "{millis} ms: {limit} bytes may be in flight");
        }
    }
}

#[test]
fn a_slice_that_is_slow_at_the_peer_takes_few_rails_with_it() {
    for (millis, most) in [(90, 0), (500, 2), (2500, 5)] {
        let mut copy = Copy::new(4);
        copy.slow = Some((40, Duration::from_millis(millis)));
        copy.pass(at(20_000));
        assert!(copy.breaks.len() <= most, "{millis} ms: {:?}", copy.breaks);
        assert!(copy.oldest > 600, "it went on: {}", copy.oldest);
        assert!(copy.least(18_000, 20_000) >= 360, "{:?}", copy.came);
    }
}

/// A slice takes it 0.66 s: more than is needed to judge a rail of which nothing is known.
#[test]
fn a_slow_rail_comes_up() {
    let mut copy = Copy::new(2);
    copy.links[1].cut = true;
    copy.pass(at(1000));
    (copy.links[1].cut, copy.links[1].rate) = (false, 100_000);
    copy.pass(at(60_000));
    assert!(copy.flow.rails()[1].peak_rate().is_some_and(|rate| rate > 80_000));
}

/// A time beyond all tests.
const LATER: Instant = Instant::from_nanos(u64::MAX);

/// Two at a time keep a rail busy, and it may carry more.
#[test]
fn what_a_rail_carries_that_always_had_room_is_not_all_that_it_can() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    let tasks = |bench: &mut Bench, count: u64| {
        for user in 0..count {
            bench.submit(write(user, SLICE));
        }
    };
    let pass = |bench: &mut Bench| {
        for _ in 0..40 {
            bench.now = bench.now + Duration::from_millis(1);
            let post = bench.posts.remove(0);
            bench.complete(post, SliceResult::Done);
            tasks(bench, 1);
        }
    };
    tasks(&mut bench, 2);
    bench.connect_all();
    pass(&mut bench);
    assert!(bench.flow.rails()[0].measure.is_settled());
    assert_eq!(bench.flow.peak_rate(bench.now, LATER), None);
    tasks(&mut bench, 40);
    pass(&mut bench);
    assert!(bench.flow.peak_rate(bench.now, LATER).is_some());
}

#[test]
fn what_all_carry_is_told_where_it_is_known() {
    let mut copy = Copy::new(2);
    assert_eq!(copy.flow.peak_rate(copy.now, LATER), None, "nothing was measured");
    copy.pass(at(1000));
    let rate = copy.flow.peak_rate(copy.now, LATER).unwrap();
    assert!((2 * RATE..2 * RATE * 11 / 10).contains(&rate), "{rate}");
    assert_eq!(copy.flow.peak_rate(at(3000), LATER), None, "it is long ago");
    // A link that pauses does not count until it is tried again.
    copy.links[1].cut = true;
    copy.pass(at(8000));
    while !matches!(copy.flow.rails()[1].state(), RailState::Paused(until) if until > copy.now) {
        copy.pass(copy.now + Duration::from_millis(1));
    }
    let RailState::Paused(until) = copy.flow.rails()[1].state() else { unreachable!() };
    let rate = copy.flow.peak_rate(copy.now, until).unwrap();
    assert!(rate < RATE * 11 / 10, "{rate}");
    assert_eq!(copy.flow.peak_rate(copy.now, LATER), None, "it may be back by then");
    // One small task at a time says nothing of what is carried.
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    bench.submit(write(1, SLICE));
    bench.connect_all();
    for user in 2..20 {
        bench.now = bench.now + Duration::from_millis(5);
        let post = bench.take_posts()[0];
        bench.complete(post, SliceResult::Done);
        bench.submit(write(user, SLICE));
    }
    assert_eq!(bench.flow.peak_rate(bench.now, LATER), None);
}

/// What makes it known, and each thing by itself that does not.
#[test]
fn the_rate_of_all_rails_is_known_where_that_of_each_is() {
    let known = |rail: &mut Rail| {
        rail.measure.begin(at(0), Duration::ZERO);
        let mark = rail.measure.mark();
        for now in 1..=1000 {
            rail.completed(at(now), (at(0), mark), 64_000, Duration::ZERO);
        }
        (rail.state, rail.full_at) = (RailState::Up, Some(at(1000)));
    };
    let rate = |change: &dyn Fn(&mut Rail), now: u64, until: u64| {
        let mut bench = Bench::new();
        bench.flow.rails.iter_mut().for_each(known);
        change(&mut bench.flow.rails[1]);
        bench.flow.peak_rate(at(now), at(until))
    };
    let one = Some(64_000_000);
    assert_eq!(rate(&|_| {}, 1000, 5000), Some(128_000_000));
    assert_eq!(rate(&|_| {}, 1999, 5000), Some(128_000_000));
    assert_eq!(rate(&|_| {}, 2000, 5000), None);
    assert_eq!(rate(&|rail| rail.full_at = Some(at(0)), 1000, 5000), None);
    assert_eq!(rate(&|rail| rail.full_at = None, 1000, 5000), None);
    assert_eq!(rate(&|rail| rail.completed_at = at(0), 1000, 5000), None);
    let single = |rail: &mut Rail| {
        rail.measure.forget();
        rail.measure.begin(at(998), Duration::ZERO);
        let mark = rail.measure.mark();
        rail.completed(at(1000), (at(998), mark), 64_000, Duration::ZERO);
    };
    assert_eq!(rate(&single, 1000, 5000), None, "one slice is no rate");
    for (state, probing, expected) in [
        (RailState::Connecting, false, None),
        (RailState::Fencing, false, None),
        (RailState::Down, true, None),
        (RailState::Down, false, one),
        (RailState::Paused(at(4999)), true, None),
        (RailState::Paused(at(5000)), true, one),
        (RailState::Paused(at(5001)), true, one),
    ] {
        let change = |rail: &mut Rail| (rail.state, rail.probing) = (state, probing);
        assert_eq!(rate(&change, 1000, 5000), expected, "{state:?} {probing}");
    }
}
