//! What a rank makes up for on new trees, as the library does (`crates/collective/src/failover/recovery.rs`): the ranks
//! tell each other how far they have come, do the same list of collectives, and start the rest anew.

use millstream_inc::failover::{Lost, REPORT_BYTES, Repair, Report, Side, first_to_repeat};
use millstream_inc::{Collective, CollectiveCall, DataType, Mode, ReduceOperation, Stripe};
use millstream_roce::{Endpoint, Instant, OwnedMemory};

use super::engine::Work;
use super::rank::{Phase, Rank};
use super::retained::Retained;

/// How far it is.
#[derive(Debug)]
pub(super) struct Repairing {
    report: Report,
    /// The trees that were lost.
    lost: Lost,
    begin_at: Option<Instant>,
    /// None until the reports of all are there.
    list: Option<Vec<Repair>>,
    /// The first call that is done anew.
    repeat: u64,
    /// The next one of the list, and elements of it that are done.
    next: usize,
    done: u64,
    /// The collective under way.
    pending: Option<u64>,
}

impl Repairing {
    pub(super) const fn new(report: Report, lost: Lost, begin_at: Instant) -> Self {
        Self {
            report,
            lost,
            begin_at: Some(begin_at),
            list: None,
            repeat: 0,
            next: 0,
            done: 0,
            pending: None,
        }
    }

    pub(super) const fn wake(&self) -> Option<Instant> {
        self.begin_at
    }
}

/// Bytes of a scratch region.
pub(super) fn scratch_bytes(chunk: usize, world: u32) -> usize {
    chunk.max(REPORT_BYTES * world as usize)
}

impl Rank {
    /// Goes on with what is made up for.
    pub(super) fn repair(&mut self, now: Instant, endpoint: &mut Endpoint<OwnedMemory>) -> bool {
        let Some(mut repairing) = self.repairing.take() else { return false };
        let outcome = self.step(&mut repairing, now, endpoint);
        if self.phase == Phase::Repairing {
            self.repairing = Some(repairing);
        }
        outcome.unwrap_or_else(|what| {
            self.wrong.push(what);
            false
        })
    }

    fn step(
        &mut self,
        repairing: &mut Repairing,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
    ) -> Result<bool, String> {
        if repairing.begin_at.is_some_and(|at| at > now) {
            return Ok(false);
        }
        repairing.begin_at = None;
        match repairing.pending {
            Some(sequence) if !self.engine.has_result(sequence) => return Ok(false),
            Some(_) => {
                repairing.pending = None;
                self.landed(repairing, now, endpoint)?;
                return Ok(true);
            }
            None => {}
        }
        let Some(list) = &repairing.list else {
            self.fill_reports(endpoint, &repairing.report.to_bytes());
            let what = (DataType::UInt8, ReduceOperation::Sum);
            let bytes = REPORT_BYTES as u64;
            repairing.pending = Some(self.call(Collective::AllGather, 0, what, bytes));
            return Ok(true);
        };
        let Some(&repair) = list.get(repairing.next) else {
            self.begin_anew(now, repairing.repeat);
            return Ok(true);
        };
        let Some(call) = self.known(repair.sequence) else {
            repairing.next += 1;
            return Ok(true);
        };
        let (offset, length, elements) = self.part(repairing, &repair, &call);
        if let Some((side, start)) = repair.read {
            let bytes = self.load(endpoint, repair.sequence, side, start + offset, length)?;
            self.fill(endpoint, &bytes);
        }
        let what = (call.data_type, call.operation);
        repairing.pending = Some(self.call(repair.collective, repair.root, what, elements));
        Ok(true)
    }

    /// The next part of one that is made up for: bytes before it, of it, and its elements.
    fn part(
        &self,
        repairing: &Repairing,
        repair: &Repair,
        call: &CollectiveCall,
    ) -> (u64, usize, u64) {
        let size = u64::from(call.data_type.size());
        let elements = (self.chunk as u64 / size).min(repair.count - repairing.done);
        (repairing.done * size, (elements * size) as usize, elements)
    }

    /// A collective between the scratch regions; its number.
    fn call(
        &mut self,
        collective: Collective,
        root: u32,
        (data_type, operation): (DataType, ReduceOperation),
        count: u64,
    ) -> u64 {
        let [(source_key, source), (destination_key, destination)] = self.scratch;
        let call = CollectiveCall {
            collective,
            data_type,
            operation,
            root,
            count,
            stripe: Stripe::WHOLE,
            mode: Mode::Write,
            source_key,
            source_address: source,
            destination_key,
            destination_address: destination,
        };
        let length = scratch_bytes(self.chunk, self.lost.world) as u64;
        let (source, destination) = (source..source + length, destination..destination + length);
        self.engine.start(&Work { call, source, destination })
    }

    /// What the AllGather of reports reads: a host with several ranks reports for each of them.
    fn fill_reports(&self, endpoint: &mut Endpoint<OwnedMemory>, report: &[u8; REPORT_BYTES]) {
        let [(key, _), _] = self.scratch;
        let Some(region) = endpoint.memory_mut().region_mut(key) else { return };
        let (places, _) = region.as_chunks_mut();
        match &self.ranks[..] {
            [_] => places[0] = *report,
            several => several.iter().for_each(|&rank| places[rank as usize] = *report),
        }
    }

    fn fill(&self, endpoint: &mut Endpoint<OwnedMemory>, bytes: &[u8]) {
        let [(key, _), _] = self.scratch;
        if let Some(region) = endpoint.memory_mut().region_mut(key) {
            region[..bytes.len()].copy_from_slice(bytes);
        }
    }

    /// A collective has its result.
    fn landed(
        &mut self,
        repairing: &mut Repairing,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
    ) -> Result<(), String> {
        let [_, (key, _)] = self.scratch;
        let scratch = endpoint.memory().region(key).unwrap_or_default().to_vec();
        let Some(list) = &repairing.list else {
            let reports: Option<Vec<Report>> = scratch
                .as_chunks::<REPORT_BYTES>()
                .0
                .iter()
                .take(self.lost.world as usize)
                .map(Report::parse)
                .collect();
            let reports = reports.ok_or("a report is not there")?;
            match repairing.lost.repairs(&reports, |sequence| self.known(sequence)) {
                Ok(list) => {
                    self.count(&list);
                    repairing.repeat = first_to_repeat(&reports);
                    repairing.list = Some(list);
                }
                Err(error) => {
                    use millstream_inc::failover::FailoverError;
                    if !matches!(error, FailoverError::Overwritten { .. }) {
                        return Err(error.to_string());
                    }
                    self.tally.push("fail-over: no copy of what was overwritten");
                    self.end(now, endpoint);
                }
            }
            return Ok(());
        };
        let repair = list[repairing.next];
        let Some(call) = self.known(repair.sequence) else { return Ok(()) };
        let (offset, length, elements) = self.part(repairing, &repair, &call);
        if let Some(start) = repair.write {
            let of = |it: &&super::rank::Call| it.sequence == repair.sequence;
            let call = self.open().find(of).ok_or("a result has no place any more")?;
            let to = call.arena.destination.start + (start + offset) as usize;
            let region = endpoint.memory_mut().region_mut(call.key);
            let region = region.and_then(|region| region.get_mut(to..to + length));
            region.ok_or("a result has no place")?.copy_from_slice(&scratch[..length]);
        }
        repairing.done += elements;
        if repairing.done >= repair.count {
            (repairing.next, repairing.done) = (repairing.next + 1, 0);
        }
        Ok(())
    }

    fn count(&mut self, list: &[Repair]) {
        for repair in list {
            self.tally.push(match (repair.read, repair.write) {
                (Some((Side::Destination, _)), _) => "fail-over: results given to others",
                (None, Some(_)) if repair.collective == Collective::Broadcast => {
                    "fail-over: results or sources got from others"
                }
                _ => "fail-over: parts computed anew",
            });
        }
    }

    /// Calls whose vectors are there.
    fn open(&self) -> impl Iterator<Item = &super::rank::Call> {
        self.calls[self.told..self.started].iter().filter(|call| !call.done)
    }

    /// A call of the lost trees whose vectors are there, or kept.
    fn known(&self, sequence: u64) -> Option<CollectiveCall> {
        let open = self.open().find(|call| call.sequence == sequence);
        let kept = || self.retained.iter().filter_map(Retained::call);
        open.map(|call| call.arena.request)
            .or_else(|| kept().find(|(number, _)| *number == sequence).map(|(_, call)| call))
    }

    /// Bytes of a vector of a call.
    fn load(
        &self,
        endpoint: &Endpoint<OwnedMemory>,
        sequence: u64,
        side: Side,
        start: u64,
        length: usize,
    ) -> Result<Vec<u8>, String> {
        let found = match self.open().find(|call| call.sequence == sequence) {
            Some(call) => {
                let from = call.range(side).start + start as usize;
                let region = endpoint.memory().region(call.key);
                region.and_then(|region| region.get(from..from + length)).map(<[u8]>::to_vec)
            }
            None => {
                let of = |it: &&Retained| it.call().is_some_and(|(number, _)| number == sequence);
                let mut kept = self.retained.iter().filter(of);
                kept.find_map(|it| it.fetch(side, start, length))
            }
        };
        found.ok_or_else(|| {
            format!("{length} bytes from {start} on of {side:?} of call {sequence} were not kept")
        })
    }

    /// Starts the calls anew that not all ranks had started, and goes on.
    fn begin_anew(&mut self, now: Instant, repeat: u64) {
        for call in self.calls[self.told..self.started].iter_mut().filter(|call| !call.done) {
            if call.sequence < repeat {
                call.done = true;
                self.tally.push("fail-over: calls made up for");
            } else {
                call.sequence = self.engine.start(&call.work());
                self.tally.push("fail-over: calls done anew");
            }
        }
        let trees = usize::from(self.lost.trees);
        self.retained = (0..trees).map(|_| Retained::default()).collect();
        self.phase = Phase::Serving;
        self.tally.push("fail-over: ranks that went on");
        if self.ranks.len() > 1 {
            self.tally.push("fail-over: hosts with several ranks that went on");
        }
        self.plan_start(now);
    }
}
