//! From lost trees to others: what a rank's own thread does when a switch is lost.

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_inc::failover::{
    FailoverError, Lost, REPORT_BYTES, Repair, Report, Side, first_to_repeat,
};
use millstream_inc::protocol::{self, AbortReason, GroupIdentity, MAX_NAME_BYTES, ToController};
use millstream_inc::{Collective, CollectiveCall, DataType, Mode, ReduceOperation, Stripe};

use super::meeting::{Meeting, PATIENCE, Rejoining};
use super::retained::{Retained, side_of};
use super::state::{Call, Entry, Line, Phase, State, is_loss};
use super::{Failover, FailoverReport};
use crate::CollectiveError;
use crate::communicator::{LINGER, SETTLING};
use crate::control::given_up;
use crate::coordinator::Coordinator;
use crate::engine::Engine;
use crate::join::Joined;
use crate::joining::Cancellation;
use crate::memory::{Domains, Operands, Scratch, Span};
use crate::path::Way;
use crate::tree::Work;

/// Bytes that are made up for at a time, the same on all ranks.
const CHUNK: usize = 2 << 20;

/// What a recovery begins with.
pub(super) struct Loss {
    since: Instant,
    pub(super) error: CollectiveError,
    report: Report,
    pub(super) lost: Lost,
}

impl Failover {
    /// Waits for failures, and recovers from them, until the communicator is over or closed.
    pub(super) fn run(&self) {
        loop {
            let engine = self.engine();
            let Some(error) = engine.await_failure() else { return };
            let since = Instant::now();
            // Whatever follows: nothing that the old trees send arrives from here on.
            engine.disconnect();
            if let Err(error) = self.recover(&engine, error, since) {
                return self.give_up(error);
            }
        }
    }

    fn give_up(&self, error: CollectiveError) {
        let mut state = self.lock();
        if !matches!(state.phase, Phase::Over(_)) {
            let canceled = state.canceled.take();
            state.phase = Phase::Over(canceled.unwrap_or(error));
        }
        state.line.engine.retire();
        // Who comes to rank 0 is not to wait for it.
        let rendezvous = state.line.rendezvous.take();
        let error = match &state.phase {
            Phase::Over(error) => error.clone(),
            _ => unreachable!("it is over"),
        };
        drop((state, rendezvous));
        self.changed.notify_all();
        if let Some(local) = self.local() {
            local.cut_off(error);
        }
    }

    fn recover(
        &self,
        engine: &Arc<Engine>,
        error: CollectiveError,
        since: Instant,
    ) -> Result<(), CollectiveError> {
        let mut state = self.lock();
        if let Phase::Over(error) = &state.phase {
            return Err(error.clone());
        }
        let local = self.local();
        let has_departed =
            local.as_ref().map_or_else(|| engine.has_departed(), |local| local.has_departed());
        if !is_loss(&error) || has_departed {
            return Err(error);
        }
        match state.line.failover {
            protocol::Failover::On => {}
            // Its switches were the ranks' own.
            protocol::Failover::Off => return Err(error),
            protocol::Failover::Reproducible => {
                let reason =
                    "a rank wants reproducible results, and other trees add in another order";
                return Err(not_resumed(&error, reason));
            }
        }
        if let Some(error) = local.as_ref().and_then(|local| local.failure()) {
            return Err(error);
        }
        if local.as_ref().is_some_and(|local| local.recovery().is_none()) {
            return Err(not_resumed(&error, "the ranks of a host did not share memory yet"));
        }
        state.phase = Phase::Joining;
        state.cancellation = Cancellation::default();
        state.awaits_starts = true;
        let mut state = self.wait_while(state, None, |state| state.starting > 0);
        state.awaits_starts = false;
        if let Phase::Over(error) = &state.phase {
            return Err(error.clone());
        }
        // With the state locked nobody is told an end, so all vectors are there.
        let (started, positions, overwritten) = engine.halt();
        state.keep_time(&engine.were_due(), since);
        let generation = state.line.generation + 1;
        let lost = state.line.lost.clone();
        let report = Report { communicator: lost.communicator, started, overwritten, positions };
        let (sender, failed_tree) = (Arc::clone(&state.line.sender), engine.failed_tree());
        state.avoid_lost(&error);
        let place = Meeting {
            name: name(&self.config.group, state.line.identity, generation),
            rendezvous: state.line.rendezvous.take(),
            cancellation: state.cancellation.clone(),
            avoid: state.avoid.clone(),
            learned: sender.learned().clone(),
        };
        drop(state);
        tracing::warn!(group = self.config.group, %error, "going on over other trees");
        if let Some(local) = &local {
            local.begin_recovery(generation, &error);
        }
        let detail = match &error {
            CollectiveError::SwitchLost { detail, .. } => detail.clone(),
            other => other.to_string(),
        };
        sender.say_switch_lost(&error, detail, failed_tree);
        let loss = Loss { since, error, report, lost };
        let is_over = || match &self.lock().phase {
            Phase::Over(error) => Some(error.clone()),
            _ => local.as_ref().and_then(|local| local.failure()),
        };
        let rejoining = Rejoining {
            config: &self.config,
            domains: &self.domains,
            local: local.as_ref(),
            error: &loss.error,
            shape: (loss.lost.segment_bytes, loss.lost.window),
            is_over: &is_over,
        };
        let (joined, mut coordinator) = rejoining.join(place)?;
        let Way::Switch(successor) = joined.way.clone() else {
            return Err(not_resumed(&loss.error, "the ranks share memory now"));
        };
        let mut joined = Some(joined);
        let outcome = self.go_on(&loss, &mut joined, &mut coordinator, &successor);
        if let (Err(error), Some(joined)) = (&outcome, &joined) {
            if let Some(local) = &local {
                // Before others have left, which is not why.
                local.cut_off(error.clone());
            }
            let collectives = match &local {
                Some(local) => local.progress().0,
                None => successor.progress().0,
            };
            let cause = local.as_ref().and_then(|local| local.cause(error));
            abandon(&successor, joined, (error, cause), collectives);
        }
        outcome
    }

    /// Makes up for what is missing, starts the rest anew and lets callers go on.
    fn go_on(
        &self,
        loss: &Loss,
        joined: &mut Option<Joined>,
        coordinator: &mut Option<Coordinator>,
        successor: &Arc<Engine>,
    ) -> Result<(), CollectiveError> {
        let mut state = self.lock();
        if let Phase::Over(error) = &state.phase {
            return Err(error.clone());
        }
        state.phase = Phase::Repairing(Arc::clone(successor));
        let works: Vec<(u64, Work)> = state.calls.iter().filter_map(open).collect();
        // They are given back, for their memory.
        let retained = mem::take(&mut state.retained);
        drop(state);
        let repair = Repairs {
            engine: successor,
            lost: &loss.lost,
            error: &loss.error,
            works: &works,
            retained: &retained,
            limit: self.config.call_timeout.max(PATIENCE),
        };
        let repeat = repair.all(&self.domains, &loss.report);
        let mut state = self.lock();
        state.retained = retained;
        if let Some(error) = state.canceled.take() {
            return Err(error);
        }
        let repeat = repeat?;
        let first = (state.line.call_of(repeat), successor.progress().0);
        if let Err(error) = self.begin_anew(&mut state, successor, repeat) {
            // Some have numbers of the new trees, which the old ones must not be asked for.
            state.forget_numbers();
            return Err(error);
        }
        let Some(joined) = joined.take() else { return Ok(()) };
        let (switches, fallback) = (joined.switches.clone(), joined.fallback.clone());
        let generation = state.line.generation + 1;
        let ranks = loss.lost.ranks.clone();
        let Some(mut line) = Line::new(joined, &self.config, ranks, generation, first) else {
            return Err(not_resumed(&loss.error, "there are no trees"));
        };
        line.coordinator = coordinator.take();
        let old = mem::replace(&mut state.line, line);
        old.engine.retire();
        state.retired.push(old.engine);
        let trees = state.line.lost.trees.into();
        state.retained.resize_with(trees, Retained::default);
        state.retained.iter_mut().for_each(Retained::clear);
        let (reason, took) = (loss.error.to_string(), loss.since.elapsed());
        tracing::warn!(group = self.config.group, ?took, "gone on over other trees");
        state.reports.push(FailoverReport { reason, switches, fallback, took });
        state.phase = Phase::Serving;
        if let Some(local) = self.local() {
            // Before the next call, whose time begins after that.
            local.end_recovery(generation, took);
        }
        drop(state);
        self.changed.notify_all();
        // Its thread may be waiting for the controller.
        drop(old.watcher);
        Ok(())
    }

    /// Starts the calls from the one with this number on the old trees on, which others had not started. Those before it
    /// are made up for. What was under way has what was left of its time.
    fn begin_anew(
        &self,
        state: &mut State,
        successor: &Arc<Engine>,
        repeat: u64,
    ) -> Result<(), CollectiveError> {
        for entry in &mut state.calls {
            let Entry::Call(call) = entry else { continue };
            if call.done {
                continue;
            }
            if call.sequence < repeat {
                call.done = true;
                continue;
            }
            // What was registered for it serves on the new trees, too.
            let anew = self.start_on(successor, &call.work)?;
            let regions = mem::take(&mut call.regions);
            *call = match anew.regions {
                [None, None] => Call { regions, ..anew },
                _ => anew,
            };
        }
        Ok(())
    }
}

/// The ranks do not go on over trees that are there.
fn abandon(
    successor: &Engine,
    joined: &Joined,
    (error, cause): (&CollectiveError, Option<AbortReason>),
    collectives: u64,
) {
    if is_loss(error) && successor.failure().is_none() {
        // All have decided so, from the same reports, which some may still need a switch of this process for.
        joined.sender.say_last(ToController::Leave { collectives });
        successor.wait_closed(LINGER);
        if let Some(switch) = &joined.hosted {
            switch.wait_settled(SETTLING);
        }
        successor.disconnect();
    } else {
        successor.fail(error.clone());
        joined.sender.say_last(given_up(error, cause));
        // Rank 0's coordinator is in this process, and ends with what has made it.
        successor.wait_released();
    }
}

/// A call whose memory is here.
fn open(entry: &Entry) -> Option<(u64, Work)> {
    match entry {
        Entry::Call(Call { done: false, sequence, work, .. }) => Some((*sequence, *work)),
        _ => None,
    }
}

/// By which the ranks of lost trees meet for those of this generation: drawn from what only they know of each other.
pub(super) fn name(
    group: &str,
    ([high, low], communicator): (GroupIdentity, u64),
    generation: u32,
) -> String {
    let unique = format!("#{high:016x}{low:016x}.{communicator}+{generation}");
    let end = group.floor_char_boundary(MAX_NAME_BYTES - unique.len());
    format!("{}{unique}", &group[..end])
}

/// The loss, and why the ranks do not go on.
pub(super) fn not_resumed(error: &CollectiveError, reason: &str) -> CollectiveError {
    let mut error = error.clone();
    if let CollectiveError::SwitchLost { detail, .. } = &mut error {
        *detail = format!("{detail}; the ranks do not go on over other trees: {reason}");
    }
    error
}

/// What is made up for, on the new trees.
struct Repairs<'a> {
    engine: &'a Engine,
    lost: &'a Lost,
    error: &'a CollectiveError,
    /// The calls whose vectors are there, by their numbers on the old trees.
    works: &'a [(u64, Work)],
    retained: &'a [Retained],
    limit: Duration,
}

impl Repairs<'_> {
    /// Makes up for all that is missing of calls that all ranks have started. Gives the number of the first other one.
    fn all(&self, domains: &Domains, report: &Report) -> Result<u64, CollectiveError> {
        let all = REPORT_BYTES * self.lost.world as usize;
        let [from, to] =
            [Scratch::new(domains, CHUNK.max(all))?, Scratch::new(domains, CHUNK.max(all))?];
        let reports = self.exchange(report, &from, &to)?;
        let known = |sequence| {
            let open = self.works.iter().find(|(number, _)| *number == sequence);
            let kept = || self.retained.iter().filter_map(Retained::call);
            open.map(|(_, work)| work.call)
                .or_else(|| kept().find(|(number, _)| *number == sequence).map(|(_, call)| call))
        };
        let repairs = self.lost.repairs(&reports, known).map_err(|error| match error {
            FailoverError::Overwritten { .. } => not_resumed(self.error, &error.to_string()),
            _ => CollectiveError::Protocol(error.to_string()),
        })?;
        for repair in &repairs {
            let Some(call) = known(repair.sequence) else { continue };
            self.one(repair, &call, &from, &to)?;
        }
        Ok(first_to_repeat(&reports))
    }

    /// Every rank's report.
    fn exchange(
        &self,
        report: &Report,
        from: &Scratch,
        to: &Scratch,
    ) -> Result<Vec<Report>, CollectiveError> {
        // A host with several ranks says the same for each of them, where all have theirs.
        let of_host = self.lost.ranks.ranges().iter().cloned().flatten();
        let places = of_host.filter(|_| self.lost.ranks.len() > 1);
        from.span().store(0, &report.to_bytes());
        for rank in places {
            from.span().store(rank as usize * REPORT_BYTES, &report.to_bytes());
        }
        self.call(
            Collective::AllGather,
            0,
            (DataType::UInt8, ReduceOperation::Sum),
            REPORT_BYTES,
            [from, to],
        )?;
        (0..self.lost.world)
            .map(|rank| {
                let mut bytes = [0; REPORT_BYTES];
                to.span().load(rank as usize * REPORT_BYTES, &mut bytes);
                let unknown =
                    || CollectiveError::Protocol(FailoverError::Report { rank }.to_string());
                Report::parse(&bytes).ok_or_else(unknown)
            })
            .collect()
    }

    /// Does a collective between registered bytes, and waits for its end.
    fn call(
        &self,
        collective: Collective,
        root: u32,
        (data_type, operation): (DataType, ReduceOperation),
        count: usize,
        [from, to]: [&Scratch; 2],
    ) -> Result<(), CollectiveError> {
        let operands = Operands { source: from.operand(), destination: to.operand() };
        let call = CollectiveCall {
            collective,
            data_type,
            operation,
            root,
            count: count as u64,
            stripe: Stripe::WHOLE,
            mode: Mode::Write,
            source_key: 0,
            source_address: operands.source.address,
            destination_key: 0,
            destination_address: operands.destination.address,
        };
        let (source, destination) = (from.span(), to.span());
        let (registered, limit) = (true, self.limit);
        let work = Work { call, operands, registered, source, destination, limit };
        let sequence = self.engine.start(&work)?;
        loop {
            if let Some(outcome) = self.engine.wait(sequence, Duration::MAX) {
                return outcome;
            }
        }
    }

    fn one(
        &self,
        repair: &Repair,
        call: &CollectiveCall,
        from: &Scratch,
        to: &Scratch,
    ) -> Result<(), CollectiveError> {
        let &Repair { collective, root, count, read, write, .. } = repair;
        let size = u64::from(call.data_type.size());
        let elements = CHUNK as u64 / size;
        let mut done = 0;
        while done < count {
            let chunk = elements.min(count - done);
            let (offset, length) = (done * size, (chunk * size) as usize);
            if let Some((side, start)) = read {
                self.load(repair.sequence, side, (start + offset) as usize, length, from.span())?;
            }
            let what = (call.data_type, call.operation);
            self.call(collective, root, what, chunk as usize, [from, to])?;
            if let Some(start) = write {
                let destination = self.open(repair.sequence).map(|work| work.destination);
                let start = (start + offset) as usize;
                let fits = |span: &Span| span.length() >= start + length;
                let destination = destination.filter(fits).ok_or_else(|| gone(repair))?;
                destination.copy(start, to.span(), 0, length);
            }
            done += chunk;
        }
        Ok(())
    }

    fn open(&self, sequence: u64) -> Option<&Work> {
        self.works.iter().find(|(number, _)| *number == sequence).map(|(_, work)| work)
    }

    /// Copies bytes of a vector of a call.
    fn load(
        &self,
        sequence: u64,
        side: Side,
        offset: usize,
        length: usize,
        to: Span,
    ) -> Result<(), CollectiveError> {
        let found = match self.open(sequence) {
            Some(work) => {
                let span = side_of(work, side);
                to.copy(0, span, offset, length);
                span.length() >= offset + length
            }
            None => {
                let of_call = |it: &&Retained| it.call().is_some_and(|(it, _)| it == sequence);
                let mut kept = self.retained.iter().filter(of_call);
                kept.any(|retained| retained.fetch(side, offset, length, to))
            }
        };
        match found {
            true => Ok(()),
            false => Err(CollectiveError::Protocol(format!(
                "collective {sequence} cannot be made up for: {length} bytes from {offset} on were not kept"
            ))),
        }
    }
}

fn gone(repair: &Repair) -> CollectiveError {
    let sequence = repair.sequence;
    CollectiveError::Protocol(format!("the result of collective {sequence} has no place any more"))
}
