//! Three candidates that stand still now and then, at a store whose answers are late or lost, and whose requests are
//! carried out all the same, perhaps much later. And a store that is slow all the time.

use std::collections::BTreeMap;

use super::*;

const TIMEOUT: Duration = Duration::from_millis(1500);
const RUNS: u64 = 300;
/// Of trouble, and then without.
const STEPS: u64 = 4000;
const QUIET: u64 = 640;
/// What happens in a step of 25 ms.
const STEP: Duration = Duration::from_millis(25);

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    /// Mostly short.
    fn delay(&mut self) -> Duration {
        let limit = if self.below(8) == 0 { 8000 } else { 60 };
        Duration::from_millis(self.below(limit))
    }
}

/// What a real one does, by its own clock.
#[derive(Default)]
struct Store {
    leases: BTreeMap<i64, Instant>,
    leader: Option<(i64, i64)>,
    revision: i64,
    term: u64,
    records: BTreeMap<String, String>,
}

impl Store {
    fn expire(&mut self, now: Instant) {
        self.leases.retain(|_, until| *until > now);
        self.leader = self.leader.filter(|(lease, _)| self.leases.contains_key(lease));
    }

    fn perform(&mut self, now: Instant, request: Request) -> Reply {
        self.expire(now);
        self.revision += 1;
        let leads = |revision: i64| self.leader.is_some_and(|(_, ours)| ours == revision);
        match request {
            Request::Grant => {
                self.leases.insert(self.revision, now + TIME);
                Reply::Granted { lease: self.revision, time: TIME }
            }
            Request::Renew { lease } => {
                let time = self.leases.get_mut(&lease).map(|until| {
                    *until = now + TIME;
                    TIME
                });
                Reply::Renewed { time }
            }
            Request::Campaign { lease } => {
                if !self.leases.contains_key(&lease) {
                    return failed(true);
                }
                let (holder, made) = *self.leader.get_or_insert((lease, self.revision));
                let revision = (holder == lease).then_some(made);
                Reply::Campaigned { revision, leader: None, term: self.term }
            }
            Request::SetTerm { revision, term } => {
                let leads = leads(revision);
                if leads {
                    self.term = self.term.max(term);
                }
                Reply::TermSet { leads, term: self.term }
            }
            Request::Load { after } => {
                let rest = self.records.iter().filter(|(key, _)| Some(*key) > after.as_ref());
                let rest: Vec<_> = rest.map(|(key, value)| (key.clone(), value.clone())).collect();
                let more = rest.len() > 2;
                Reply::Loaded { records: rest.into_iter().take(2).collect(), more }
            }
            Request::Write { revision, changes } => {
                let leads = leads(revision);
                for (key, value) in changes.into_iter().filter(|_| leads) {
                    match value {
                        Some(value) => self.records.insert(key, value),
                        None => self.records.remove(&key),
                    };
                }
                Reply::Written { leads }
            }
            Request::Release { lease } => {
                self.leases.remove(&lease);
                Reply::Released
            }
            Request::List => Reply::Listed { controllers: vec![([127, 0, 0, 1], 1).into()] },
        }
    }
}

struct Candidate {
    election: Election,
    /// It stands still until then.
    stopped: Instant,
    /// The answer that it gets, and when.
    answer: Option<(Instant, Reply)>,
    /// Which request it waits for.
    serial: u64,
}

struct World {
    random: Random,
    now: Instant,
    store: Store,
    candidates: Vec<Candidate>,
    /// On their way to the store: when they get there, whose, and when they were sent.
    requests: Vec<(Instant, usize, u64, Instant, Request)>,
    terms: Vec<u64>,
    stood_down: usize,
    troubled: bool,
}

impl World {
    fn new(seed: u64) -> Self {
        let candidate = |_| Candidate {
            election: Election::new(),
            stopped: Instant::ZERO,
            answer: None,
            serial: 0,
        };
        Self {
            random: Random(seed),
            now: Instant::ZERO,
            store: Store::default(),
            candidates: (0..3).map(candidate).collect(),
            requests: Vec::new(),
            terms: Vec::new(),
            stood_down: 0,
            troubled: true,
        }
    }

    fn step(&mut self) {
        self.now = self.now + STEP;
        let now = self.now;
        let due: Vec<usize> =
            (0..self.requests.len()).filter(|&it| self.requests[it].0 <= now).collect();
        for index in due.into_iter().rev() {
            let (_, whose, serial, sent, request) = self.requests.swap_remove(index);
            let reply = self.store.perform(now, request);
            let back = now + if self.troubled { self.random.delay() } else { Duration::ZERO };
            let candidate = &mut self.candidates[whose];
            if candidate.serial == serial && back < sent + TIMEOUT {
                candidate.answer = Some((back, reply));
            }
        }
        for index in 0..self.candidates.len() {
            if self.troubled && self.random.below(400) == 0 {
                let time = Duration::from_millis(self.random.below(12_000));
                self.candidates[index].stopped = now + time;
            }
            if self.candidates[index].stopped <= now || !self.troubled {
                self.run(index);
            }
        }
        let leading = |it: &&Candidate| it.election.leads_until().is_some_and(|until| until > now);
        assert!(self.candidates.iter().filter(leading).count() <= 1, "two lead at {now:?}");
    }

    fn run(&mut self, index: usize) {
        let now = self.now;
        let (coin, delay) = (self.random.below(40) == 0, self.random.delay());
        let candidate = &mut self.candidates[index];
        if let Some((_, reply)) = candidate.answer.take_if(|(at, _)| *at <= now) {
            candidate.serial += 1;
            candidate.election.handle_reply(now, reply);
        }
        if coin {
            candidate.election.change((self.random.below(9).to_string(), Some(String::new())));
        }
        if let Some(request) = candidate.election.poll_request(now) {
            let arrives = now + if self.troubled { delay } else { Duration::ZERO };
            self.requests.push((arrives, index, candidate.serial, now, request));
            // Unless there is one before.
            candidate.answer = Some((now + TIMEOUT, failed(true)));
        }
        while let Some(event) = candidate.election.poll_event() {
            match event {
                Event::Lead { term, .. } => {
                    assert!(
                        self.terms.iter().all(|&it| it < term),
                        "{term} after {:?}",
                        self.terms
                    );
                    assert!(self.store.term >= term, "{term} is not stored");
                    self.terms.push(term);
                }
                Event::StandDown { .. } => self.stood_down += 1,
            }
        }
    }
}

#[test]
fn at_most_one_leads_whatever_is_late_and_one_does_when_nothing_is() {
    let (mut leaders, mut stood_down) = (0, 0);
    for seed in 0..RUNS {
        let mut world = World::new(seed);
        for _ in 0..STEPS {
            world.step();
        }
        world.troubled = false;
        for _ in 0..QUIET {
            world.step();
        }
        let now = world.now;
        let leads = |it: &&Candidate| it.election.leads_until().is_some_and(|until| until > now);
        assert_eq!(world.candidates.iter().filter(leads).count(), 1, "seed {seed}");
        leaders += world.terms.len();
        stood_down += world.stood_down;
    }
    // The trouble is enough to matter.
    assert!(leaders as u64 > 5 * RUNS && stood_down as u64 > 4 * RUNS, "{leaders} {stood_down}");
}

#[test]
fn where_the_store_is_slow_one_leads_and_its_changes_are_written() {
    for milliseconds in [300, 600, 1000, 1100] {
        let took = Duration::from_millis(milliseconds);
        let (mut store, mut election) = (Store::default(), Election::new());
        let (mut now, mut lists) = (Instant::ZERO, 0);
        while now < at(60.0) {
            let Some(request) = election.poll_request(now) else {
                now = now + STEP;
                continue;
            };
            lists += usize::from(request == Request::List);
            let reply = store.perform(now + took / 2, request);
            now = now + took;
            election.handle_reply(now, reply);
            while let Some(event) = election.poll_event() {
                let Event::Lead { .. } = event else { panic!("{took:?}: {event:?} at {now:?}") };
                assert!(now < at(15.0), "{took:?}: it leads at {now:?}");
                for key in 0..40 {
                    election.change((key.to_string(), Some(String::new())));
                }
            }
        }
        assert!(election.leads_until().is_some_and(|until| until > now), "{took:?}");
        assert_eq!(store.records.len(), 40, "{took:?}");
        assert!(lists > 5, "{took:?}: {lists}");
    }
}
