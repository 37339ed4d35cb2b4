//! A rank of a communicator that goes on, as the library has it (`crates/collective/src/failover`): its caller, and what
//! follows when its trees are lost.

use core::ops::Range;
use core::time::Duration;
use std::cell::RefCell;
use std::rc::Rc;

use millstream_inc::Collective;
use millstream_inc::failover::{Lost, Report, Side};
use millstream_roce::{Endpoint, Instant, OwnedMemory};

use super::super::call::{Arena, Shape};
use super::super::member::CALL_LIMIT;
use super::engine::{Engine, Work};
use super::repair::Repairing;
use super::retained::Retained;
use crate::Rng;

/// How long it may take at most from a failure until nothing more arrives.
const CLOSING: u64 = 50_000_000;

/// A call of a rank.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) shape: Shape,
    pub(super) key: u32,
    /// With the region's address.
    pub(super) arena: Arena,
    /// What the result of all ranks may be: what each tree that there may be makes of their vectors.
    pub(super) results: Rc<Vec<Vec<u8>>>,
    /// What the first rank got that was told, where all get the same.
    pub(super) agreed: Rc<RefCell<Option<Vec<u8>>>>,
    /// Its number on the trees that there are.
    pub(super) sequence: u64,
    /// It was made up for.
    pub(super) done: bool,
}

/// How far a rank is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in super::super) enum Phase {
    Serving,
    /// Its trees have failed, and what they send may still arrive, until then.
    Failing(Instant),
    /// Nothing of the old trees arrives any more. It waits for others.
    Joining,
    /// It makes up for what is missing.
    Repairing,
    Over,
}

/// A rank, or the lowest one of a host that has several, for all of them.
#[derive(Debug)]
pub(in super::super) struct Rank {
    pub(super) number: u32,
    /// All that it is there for.
    pub(super) ranks: Vec<u32>,
    pub(super) lost: Lost,
    pub(super) engine: Engine,
    pub(super) phase: Phase,
    pub(super) calls: Vec<Call>,
    pub(super) retained: Vec<Retained>,
    pub(super) report: Option<Report>,
    /// The memory of the calls that were open when it reported.
    reported: Vec<Vec<u8>>,
    pub(super) repairing: Option<Repairing>,
    /// Keys and addresses of the regions that parts of vectors are made up for in.
    pub(super) scratch: [(u32, u64); 2],
    pub(super) chunk: usize,
    /// Calls that were started.
    pub(super) started: usize,
    /// Calls whose end was told.
    pub(super) told: usize,
    /// Calls that may be started and not told.
    ahead: usize,
    /// The caller asks for the end of calls only when it can start no other.
    is_lazy: bool,
    /// When the next call is started, and when the rank begins on new trees.
    pub(super) start_at: Option<Instant>,
    probe_at: Option<Instant>,
    /// How often it asks whether switches live. Who has not asked when others notice has a connection over which
    /// something may still come.
    probe_every: Duration,
    /// When all must be over.
    pub(super) due: Instant,
    pub(super) wrong: Vec<String>,
    pub(super) tally: Vec<&'static str>,
    pub(super) rng: Rng,
}

impl Call {
    /// Its parameters, and where its vectors are.
    pub(super) fn work(&self) -> Work {
        let request = self.arena.request;
        // An agreement touches none.
        let none = self.shape.stripe.is_none();
        let range = |at: u64, bytes: &Range<usize>| {
            if none { 0..0 } else { at..at + bytes.len() as u64 }
        };
        Work {
            call: request,
            source: range(request.source_address, &self.arena.source),
            destination: range(request.destination_address, &self.arena.destination),
        }
    }

    /// Where a vector is in its region.
    pub(super) fn range(&self, side: Side) -> Range<usize> {
        match side {
            Side::Source => self.arena.source.clone(),
            Side::Destination => self.arena.destination.clone(),
        }
    }

    const fn scatters(&self) -> bool {
        matches!(self.shape.collective, Collective::ReduceScatter)
    }

    /// Where the destination of a host with these ranks begins in the result of all.
    fn own(&self, ranks: &[u32]) -> usize {
        match ranks {
            &[only] if self.scatters() => only as usize * self.arena.destination.len(),
            _ => 0,
        }
    }

    /// Whether such a host gets the result of this byte of its destination.
    fn gets(&self, ranks: &[u32], at: usize) -> bool {
        let is_own = |part: usize| ranks.contains(&((at / part) as u32));
        match self.shape.part_bytes() {
            _ if self.shape.stripe.is_none() => false,
            part if self.scatters() && ranks.len() > 1 => is_own(part),
            _ => true,
        }
    }

    /// What is wrong with a result.
    fn check(&self, ranks: &[u32], region: &[u8]) -> Option<String> {
        let target = self.arena.destination.clone();
        let around = |at: &usize| !target.contains(at);
        if let Some(at) =
            (0..region.len()).filter(around).find(|&at| region[at] != self.arena.bytes[at])
        {
            return Some(format!("it wrote at {at}; result at {target:?}"));
        }
        let size = self.shape.data_type.size() as usize;
        let (own, result) = (self.own(ranks), &region[target.clone()]);
        for (at, element) in (0..).step_by(size).zip(result.chunks(size)) {
            let right = |it: &Vec<u8>| it.get(own + at..own + at + size) == Some(element);
            let is_left = || self.arena.bytes[target.clone()][at..at + size] == *element;
            let is_right = match self.gets(ranks, at) {
                true => self.results.iter().any(right),
                false => is_left(),
            };
            if !is_right {
                return Some(format!("wrong from {at} on, of {}", result.len()));
            }
        }
        if self.shape.collective != Collective::AllReduce || self.shape.stripe.is_none() {
            return None;
        }
        let mut agreed = self.agreed.borrow_mut();
        let agreed = agreed.get_or_insert_with(|| result.to_vec());
        let differs = agreed.iter().zip(result).position(|(a, b)| a != b);
        differs.map(|at| format!("from {at} on it is not what another rank has"))
    }

    /// What is wrong with what is there though the call has failed.
    fn check_failed(&self, ranks: &[u32], region: &[u8]) -> Option<String> {
        let (target, own) = (self.arena.destination.clone(), self.own(ranks));
        let right = |at: usize| {
            let byte = region[at];
            let of_result = |it: &Vec<u8>| it.get(own + at - target.start) == Some(&byte);
            let gets = || target.contains(&at) && self.gets(ranks, at - target.start);
            byte == self.arena.bytes[at] || gets() && self.results.iter().any(of_result)
        };
        let at = (0..region.len()).find(|&at| !right(at))?;
        Some(format!("it failed, and wrote at {at}; result at {target:?}"))
    }
}

impl Rank {
    #[expect(clippy::too_many_arguments, reason = "all that a rank is made of")]
    pub(super) fn new(
        ranks: Vec<u32>,
        lost: Lost,
        engine: Engine,
        calls: Vec<Call>,
        scratch: [(u32, u64); 2],
        chunk: usize,
        now: Instant,
        mut rng: Rng,
    ) -> Self {
        let retained = (0..lost.trees).map(|_| Retained::default()).collect();
        let start_at = Some(now + pause(&mut rng)).filter(|_| !calls.is_empty());
        Self {
            number: ranks[0],
            ranks,
            lost,
            engine,
            phase: Phase::Serving,
            calls,
            retained,
            report: None,
            reported: Vec::new(),
            repairing: None,
            scratch,
            chunk,
            started: 0,
            told: 0,
            ahead: rng.between(1, 3) as usize,
            is_lazy: rng.below(2) == 0,
            start_at,
            probe_at: None,
            probe_every: Duration::from_millis([100, 1000, 4000][rng.below(3) as usize]),
            due: now + CALL_LIMIT,
            wrong: Vec::new(),
            tally: Vec::new(),
            rng,
        }
    }

    /// What is wrong with it, with its name.
    pub(in super::super) fn take_wrong(&mut self) -> Vec<String> {
        let name = format!("communicator that goes on, rank {}", self.number);
        let wrong = core::mem::take(&mut self.wrong);
        wrong.into_iter().map(|what| format!("{name}: {what}")).collect()
    }

    /// What it has done, for a tally.
    pub(in super::super) fn take_tally(&mut self) -> Vec<&'static str> {
        core::mem::take(&mut self.tally)
    }

    pub(in super::super) const fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether all calls have ended well.
    pub(in super::super) const fn is_done(&self) -> bool {
        self.told == self.calls.len()
    }

    /// Does what can be done now.
    pub(in super::super) fn run(&mut self, now: Instant, endpoint: &mut Endpoint<OwnedMemory>) {
        loop {
            let mut busy = self.keep_time(now, endpoint);
            busy |= self.engine.advance(now, endpoint, &mut self.wrong);
            busy |= self.look_for_failure(now, endpoint);
            busy |= match self.phase {
                Phase::Serving | Phase::Failing(_) => self.tell(now, endpoint),
                Phase::Repairing => self.repair(now, endpoint),
                Phase::Joining | Phase::Over => false,
            };
            if !busy {
                break;
            }
        }
    }

    fn keep_time(&mut self, now: Instant, endpoint: &mut Endpoint<OwnedMemory>) -> bool {
        let mut busy = false;
        if let Phase::Failing(until) = self.phase
            && until <= now
        {
            self.close(now, endpoint);
            busy = true;
        }
        if self.phase == Phase::Serving
            && self.engine.failed.is_none()
            && self.start_at.is_some_and(|at| at <= now)
        {
            self.start_at = None;
            busy = true;
            let call = &mut self.calls[self.started];
            call.sequence = self.engine.start(&call.work());
            self.started += 1;
            self.plan_start(now);
        }
        let waits = matches!(self.phase, Phase::Serving | Phase::Repairing)
            && self.engine.failed.is_none()
            && !self.engine.is_idle();
        if !waits {
            self.probe_at = None;
        } else if self.probe_at.is_none_or(|at| at <= now) {
            if self.probe_at.is_some() {
                self.engine.probe();
                busy = true;
            }
            self.probe_at = Some(now + self.probe_every);
        }
        if self.due <= now && !self.is_done() && self.phase != Phase::Over {
            self.due = now + CALL_LIMIT;
            self.wrong.push(format!("after a minute it is {:?}", self.phase));
        }
        busy
    }

    /// When the next call is started, if one may be.
    pub(super) fn plan_start(&mut self, now: Instant) {
        let open = self.started - self.told;
        if self.start_at.is_none() && self.started < self.calls.len() && open < self.ahead {
            self.start_at = Some(now + pause(&mut self.rng));
        }
    }

    /// Tells the caller the end of calls.
    fn tell(&mut self, now: Instant, endpoint: &mut Endpoint<OwnedMemory>) -> bool {
        let is_over = |it: &Call| it.done || self.engine.has_result(it.sequence);
        let open = &self.calls[self.told..self.started];
        let over = open.iter().take_while(|call| is_over(call)).count();
        let full = open.len() >= self.ahead || self.started == self.calls.len();
        if over == 0 || self.is_lazy && (over < open.len() || !full) {
            return false;
        }
        for index in self.told..self.told + over {
            let call = &mut self.calls[index];
            let Some(region) = endpoint.memory_mut().region_mut(call.key) else { continue };
            if let Some(what) = call.check(&self.ranks, region) {
                self.wrong.push(format!("{:?}: {what}", call.shape));
            }
            if !call.done {
                let (source, destination) =
                    (call.range(Side::Source), call.range(Side::Destination));
                let (source, destination) = (&region[source], &region[destination]);
                let bytes = |side: Side| if side == Side::Source { source } else { destination };
                for (retained, tree) in self.retained.iter_mut().zip(0..) {
                    let request = (call.sequence, &call.arena.request);
                    retained.keep(&self.lost, request, tree, bytes);
                }
            }
            // The caller's again, who changes all of it at once.
            self.rng.fill(&mut call.arena.bytes);
            region.copy_from_slice(&call.arena.bytes);
        }
        self.told += over;
        self.plan_start(now);
        true
    }

    /// Its trees are lost, as others say.
    pub(in super::super) fn lose(&mut self, now: Instant) {
        if self.phase == Phase::Serving {
            self.engine.fail();
            self.fail(now);
        }
    }

    fn look_for_failure(&mut self, now: Instant, endpoint: &mut Endpoint<OwnedMemory>) -> bool {
        match self.phase {
            _ if self.engine.failed.is_none() => return false,
            Phase::Serving => self.fail(now),
            Phase::Repairing => self.end(now, endpoint),
            Phase::Failing(_) | Phase::Joining | Phase::Over => return false,
        }
        true
    }

    fn fail(&mut self, now: Instant) {
        let length = if self.rng.below(2) == 0 { 0 } else { self.rng.below(CLOSING) };
        self.phase = Phase::Failing(now + Duration::from_nanos(length));
    }

    /// Ends the connections of its trees, and says how far it has come.
    fn close(&mut self, now: Instant, endpoint: &mut Endpoint<OwnedMemory>) {
        self.engine.disconnect(now, endpoint, &mut self.wrong);
        let (started, positions, overwritten) = self.engine.halt(endpoint);
        let communicator = self.lost.communicator;
        self.report = Some(Report { communicator, started, overwritten, positions });
        self.reported = self.open_memory(endpoint);
        self.phase = Phase::Joining;
    }

    fn open_memory(&self, endpoint: &Endpoint<OwnedMemory>) -> Vec<Vec<u8>> {
        let open = self.calls[self.told..self.started].iter();
        open.filter_map(|call| endpoint.memory().region(call.key)).map(<[u8]>::to_vec).collect()
    }

    /// Has new trees, on which it begins after some time.
    pub(super) fn connected(
        &mut self,
        engine: Engine,
        lost: Lost,
        begin_at: Instant,
        endpoint: &Endpoint<OwnedMemory>,
    ) {
        if self.reported != self.open_memory(endpoint) {
            self.wrong.push("something was written after it had reported".to_owned());
        }
        self.engine = engine;
        self.start_at = None;
        self.phase = Phase::Repairing;
        let old = core::mem::replace(&mut self.lost, lost);
        self.repairing = self.report.take().map(|report| Repairing::new(report, old, begin_at));
    }

    /// The communicator is of no more use.
    pub(in super::super) fn end(&mut self, now: Instant, endpoint: &mut Endpoint<OwnedMemory>) {
        if self.phase == Phase::Over {
            return;
        }
        self.engine.fail();
        self.engine.disconnect(now, endpoint, &mut self.wrong);
        if !matches!(self.phase, Phase::Joining | Phase::Repairing) {
            self.engine.halt(endpoint);
        }
        self.phase = Phase::Over;
        for call in &mut self.calls[self.told..self.started] {
            let Some(region) = endpoint.memory().region(call.key) else { continue };
            if let Some(what) = call.check_failed(&self.ranks, region) {
                self.wrong.push(format!("{:?}: {what}", call.shape));
            }
            call.arena.bytes.copy_from_slice(region);
        }
    }

    /// What was written after calls had ended.
    pub(in super::super) fn check_memory(&self, endpoint: &Endpoint<OwnedMemory>) -> Vec<String> {
        let changed =
            |call: &&Call| endpoint.memory().region(call.key) != Some(call.arena.bytes.as_slice());
        let changed = self.calls.iter().filter(changed);
        changed
            .map(|call| format!("the memory of {:?} changed outside of the call", call.shape))
            .collect()
    }

    pub(in super::super) fn wake(&self) -> Option<Instant> {
        let until = match self.phase {
            Phase::Failing(until) => Some(until),
            Phase::Repairing => self.repairing.as_ref().and_then(Repairing::wake),
            _ => None,
        };
        let start_at =
            self.start_at.filter(|_| self.phase == Phase::Serving && self.engine.failed.is_none());
        let due = (!self.is_done() && self.phase != Phase::Over).then_some(self.due);
        [until, start_at, self.probe_at, due].into_iter().flatten().min()
    }
}

fn pause(rng: &mut Rng) -> Duration {
    Duration::from_nanos(match rng.below(4) {
        0 | 1 => rng.below(1000),
        2 => rng.below(100_000),
        _ => rng.below(3_000_000),
    })
}
