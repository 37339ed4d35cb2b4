//! Submission: every request is checked before the first byte moves.

use std::sync::Arc;
use std::time::Instant;

use millstream_metadata::{CallError, Frame, SegmentDesc};
use millstream_net::prefetch;

use crate::admission::{Admission, Excess};
use crate::batch::BatchShared;
use crate::copier::INLINE;
use crate::engine::Inner;
use crate::memory::LocalMemory;
use crate::notify::{Submission, is_taken};
use crate::path::{Allowed, Place};
use crate::pieces::{Extent, NoExtent, Span};
use crate::segment::{OpenSegment, View};
use crate::slicing::Slicing;
use crate::task::TaskRef;
use crate::terms::Terms;
use crate::transport::{Run, code_of};
use crate::{
    Notification, PiecesRequest, Policy, PriorityLevel, SegmentId, SubmitError, TransferRequest,
};

/// How requests are to be done.
#[derive(Clone, Debug, Default)]
pub struct SubmitOptions {
    /// When those that have not ended end as TIMEOUT.
    pub deadline: Option<Instant>,
    /// A message for the applications of their segments' processes, which is sent once all of them are
    /// COMPLETED. If that fails, the log says so.
    pub notify: Option<Notification>,
    /// How soon they are wanted, where the policy TENT chooses ([`crate::Policy::Tent`]). Without, as their
    /// class of the policy file says, or normal.
    pub priority: Option<PriorityLevel>,
    /// The transport that is to do them, by its name (`rdma`, `tcp`, `shm`, `local`, `nvmeof`). If it cannot,
    /// they are refused.
    pub transport: Option<String>,
    /// Their class of the policy file ([`crate::Config::policy_file`]).
    pub policy: Option<String>,
    /// What they are for, as rules of the policy file name it ([`crate::PolicyRule::intent`]).
    pub intent: Option<String>,
    /// Whether a WRITE counts as COMPLETED only once its bytes survive a loss of power at the target: they are
    /// written, and synced. Of these requests only; others to the same segment are as they ask. For segments that
    /// are files: a request, whichever way, to what no loss of power leaves is refused
    /// ([`SubmitError::NotDurable`]).
    pub durable: bool,
}

/// Something that can be submitted: it becomes a task.
pub(crate) trait Requested {
    /// Whether its bytes are in one piece.
    const WHOLE: bool;

    fn target(&self) -> SegmentId;

    /// Where its bytes are; why nowhere, if so.
    fn extent(&self) -> Result<Extent, NoExtent>;

    /// How many bytes, of what has an extent.
    fn length(&self) -> u64;

    /// Where its bytes begin here, if they are in one piece, and enough that it matters.
    fn starts_at(&self) -> Option<u64> {
        None
    }

    /// Makes a task of it.
    fn start(&self, task: TaskRef<'_>, slicing: &Slicing, terms: &Terms);
}

impl Requested for TransferRequest {
    const WHOLE: bool = true;

    fn target(&self) -> SegmentId {
        self.target
    }

    fn extent(&self) -> Result<Extent, NoExtent> {
        let span = |first| Span { first, length: self.length };
        let (source, target) = (span(self.source), span(self.target_offset));
        match self.length {
            0 => Err(NoExtent::Empty),
            length => Ok(Extent { source, target, length }),
        }
    }

    fn length(&self) -> u64 {
        self.length
    }

    fn starts_at(&self) -> Option<u64> {
        (self.length >= SOON as u64).then_some(self.source)
    }

    fn start(&self, task: TaskRef<'_>, slicing: &Slicing, terms: &Terms) {
        task.start(self, slicing, terms.deadline);
    }
}

impl Requested for PiecesRequest<'_> {
    const WHOLE: bool = false;

    fn target(&self) -> SegmentId {
        self.target
    }

    fn extent(&self) -> Result<Extent, NoExtent> {
        self.pieces.extent()
    }

    fn length(&self) -> u64 {
        self.pieces.length()
    }

    fn start(&self, task: TaskRef<'_>, _slicing: &Slicing, terms: &Terms) {
        task.start_pieces(self, self.length(), terms.deadline);
    }
}

/// Of a request that has so many bytes, the first are asked for before it is checked.
const SOON: usize = 1024;

/// How many buffers an error lists.
const BUFFERS_LISTED: usize = 3;

impl Inner {
    pub(crate) fn submit(
        &self,
        batch: &Arc<BatchShared>,
        requests: &[impl Requested],
        options: &SubmitOptions,
    ) -> Result<(), SubmitError> {
        let terms = Terms::of(options, &self.policy_file, self.policy, Instant::now)?;
        // A small request is often copied at once: its bytes come while it is checked.
        if let Some(source) = requests.first().and_then(Requested::starts_at) {
            prefetch(std::ptr::without_provenance(source as usize), SOON);
        }
        let mut adding = batch.add();
        // A batch that is reused in several steps keeps its room here: nothing is allocated.
        let mut runs = std::mem::take(&mut *adding);
        let checked = self
            .check(batch, requests, &mut runs, &terms)
            .and_then(|()| self.check_deadline(batch, requests, &runs, &terms))
            .and_then(|()| self.admit(requests, &terms));
        if checked.is_ok() {
            let submission = self.submission(requests, options);
            let admission = Some(&self.admission).filter(|it| it.concerns(terms.class));
            let with = (submission.as_ref(), admission);
            start(batch, requests, &terms, &mut runs, with);
            batch.added(requests.len());
        }
        drop(adding);
        if checked.is_ok() {
            for runs in runs.chunk_by(|a, b| a.transport == b.transport) {
                let index = runs[0].transport;
                let transport = self.with_transports(|all| all.get(index).cloned());
                match transport {
                    Some(transport) => transport.submit(batch, runs, &terms),
                    None => runs.iter().for_each(|run| fail_stopped(batch, run)),
                }
            }
        }
        runs.clear();
        *batch.add() = runs;
        checked
    }

    /// Whether the rails of these runs can have done them by their deadline, by what is measured of them.
    fn check_deadline(
        &self,
        batch: &BatchShared,
        requests: &[impl Requested],
        runs: &[Run],
        terms: &Terms,
    ) -> Result<(), SubmitError> {
        let Some(deadline) = terms.deadline.filter(|_| self.policy == Policy::Tent) else {
            return Ok(());
        };
        let submitted = batch.submitted();
        let left = deadline.saturating_duration_since(Instant::now());
        let same = |a: &Run, b: &Run| {
            a.transport == b.transport && Arc::ptr_eq(&a.view.descriptor, &b.view.descriptor)
        };
        for runs in runs.chunk_by(same) {
            let rate = self.with_transports(|all| {
                let Run { segment, view, transport, .. } = &runs[0];
                all.get(*transport)?.peak_rate(segment, &view.descriptor, deadline)
            });
            let Some(rate) = rate else { continue };
            let can = u128::from(rate) * left.as_nanos() / 1_000_000_000;
            let mut bytes = 0;
            for task in runs.iter().flat_map(|run| run.tasks.clone()) {
                let index = task - submitted;
                bytes += u128::from(requests[index].length());
                if bytes > can {
                    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
                    return Err(SubmitError::DeadlineInfeasible { index, bytes, rate, left });
                }
            }
        }
        Ok(())
    }

    /// Takes room for requests that are to be submitted now, for all or none.
    fn admit(&self, requests: &[impl Requested], terms: &Terms) -> Result<(), SubmitError> {
        if !self.admission.concerns(terms.class) {
            return Ok(());
        }
        let lengths = requests.iter().map(Requested::length);
        self.admission.admit(terms.class, lengths).map_err(|excess| {
            let class = terms.class.filter(|_| excess.of_class);
            let class = class.map(|class| self.policy_file.classes[class].name.clone());
            let Excess { index, of_bytes, alone, limit, in_flight, .. } = excess;
            let unit = if of_bytes { "bytes" } else { "requests" };
            match alone {
                true => SubmitError::OverLimit { index, class, unit, limit },
                false => SubmitError::Overloaded { index, class, unit, limit, in_flight },
            }
        })
    }

    /// What is to follow these requests.
    fn submission(
        &self,
        requests: &[impl Requested],
        options: &SubmitOptions,
    ) -> Option<Arc<Submission>> {
        let message = options.notify.clone().filter(|_| !requests.is_empty())?;
        let mut targets: Vec<_> = requests.iter().map(Requested::target).collect();
        targets.sort_unstable();
        targets.dedup();
        let own = self.own.clone();
        let then = move || {
            if let Some(own) = own.upgrade() {
                targets.iter().for_each(|&target| own.send(target, &message));
            }
        };
        Some(Arc::new(Submission::new(requests.len(), then)))
    }

    /// Sends a message without waiting for its reply.
    fn send(&self, target: SegmentId, message: &Notification) {
        if target == SegmentId::LOCAL {
            if !self.inbox.push(message.clone()) {
                tracing::warn!("too many messages wait to be taken: one is lost");
            }
            return;
        }
        let Some(open) = self.segments.by_id(target) else {
            return tracing::warn!(?target, "a message is lost: its segment was closed");
        };
        let done = |reply: Result<Frame, CallError>| match reply {
            Ok(reply) if is_taken(&reply) => {}
            Ok(_) => tracing::warn!("a message is lost: its peer refused it"),
            Err(error) => tracing::warn!(%error, "a message is lost"),
        };
        let (frame, counted, calls) =
            (message.frame(), self.calls.message(), Arc::clone(&self.calls));
        // Others wait for this thread: it waits for no metadata server.
        self.lookups.address(&open.name, open.descriptor().incarnation, move |found| match found {
            Ok(address) => calls.deliver(counted, &address, frame, Box::new(done)),
            Err(error) => tracing::warn!(%error, "a message is lost"),
        });
    }

    /// Finds both ends of each request. Those that lie in the same memory as the one before, as most do,
    /// make one run, and cost a comparison each.
    fn check(
        &self,
        batch: &Arc<BatchShared>,
        requests: &[impl Requested],
        runs: &mut Vec<Run>,
        terms: &Terms,
    ) -> Result<(), SubmitError> {
        if self.is_stopped() {
            return Err(SubmitError::ShutDown);
        }
        let (capacity, submitted) = (batch.tasks.len(), batch.submitted());
        if requests.len() > capacity - submitted {
            let requested = requests.len();
            return Err(SubmitError::ExceedCapacity { capacity, submitted, requested });
        }
        let mut target: Option<Target> = None;
        let mut local: Option<Arc<LocalMemory>> = None;
        let mut ends: Option<Ends> = None;
        for (index, request) in requests.iter().enumerate() {
            let extent = request.extent().map_err(|error| match error {
                NoExtent::Empty => SubmitError::ZeroLength { index },
                NoExtent::Overflow => SubmitError::Overflow { index },
            })?;
            let (source, segment) = (extent.source, request.target());
            let task = submitted + index;
            // Mostly there are none.
            let rules = match terms.rules {
                0 => 0,
                rules => rules & self.policy_file.rules_of_length(request.length()),
            };
            if let (Some(ends), Some(run)) = (&ends, runs.last_mut())
                && ends.rules == rules
                && ends.hold(segment, &extent)
            {
                run.tasks.end = task + 1;
                continue;
            }
            let same_local =
                local.as_ref().is_some_and(|local| local.contains(source.first, source.length));
            let mut found = match same_local {
                true => None,
                false => self.memory().find(source.first, source.length),
            };
            let known = if same_local { local.as_ref() } else { found.as_ref() };
            let gpu = known.is_some_and(|local| local.is_gpu());
            let same_target = target.as_ref().is_some_and(|it| {
                it.holds(segment, extent.target) && it.rules == rules && it.gpu == gpu
            }) && (rules == 0 || same_local);
            if !same_target {
                let (allowed, durable) = (terms.allowed, terms.durable);
                let wanted = Wanted { index, allowed, durable, rules, gpu };
                target = Some(self.target(wanted, segment, extent.target, target)?);
            }
            // What was found before may be of before a transport was installed.
            let transport = target.as_ref().map_or(0, |target| target.transport);
            let known = if same_local { local.as_ref() } else { found.as_ref() };
            let is_known = known.is_some_and(|local| local.is_known_to(transport));
            if !is_known {
                found = self.memory().find(source.first, source.length);
            }
            let same_local = same_local && is_known;
            if !same_local {
                local = Some(found.ok_or(SubmitError::SourceNotRegistered {
                    index,
                    source_address: source.first,
                    length: source.length,
                })?);
            }
            let (Some(target), Some(local)) = (&target, &local) else { continue };
            ends = Some(Ends { segment, target: target.span(), source: local.span(), rules });
            runs.push(Run {
                transport: target.transport,
                transport_name: target.transport_name,
                copies: self.with_transports(|all| {
                    all.get(target.transport).is_some_and(|it| it.capabilities().copies)
                }),
                tasks: task..task + 1,
                claimed: task,
                allowed: target.allowed,
                local: Arc::clone(local),
                segment: Arc::clone(&target.segment),
                view: target.view.clone(),
                buffer: target.buffer,
            });
        }
        Ok(())
    }

    /// Where a request goes. The segment of the one before is looked at first.
    fn target(
        &self,
        wanted: Wanted,
        segment: SegmentId,
        span: Span,
        before: Option<Target>,
    ) -> Result<Target, SubmitError> {
        let index = wanted.index;
        let segment = match before {
            Some(Target { segment: known, .. }) if known.id == segment => known,
            _ => {
                let unknown = SubmitError::UnknownSegment { index, segment };
                self.segments.by_id(segment).ok_or(unknown)?
            }
        };
        // If it is stale, it may have registered more since, or have been restarted.
        let (mut view, mut refresh) = segment.current();
        let mut refreshed = false;
        loop {
            if refresh {
                let before = view.descriptor.incarnation;
                segment.ask(|| self.refresh(&segment))?;
                view = segment.view();
                refreshed = true;
                // Its addresses were asked of another process, which may have had other things there.
                if before.is_some() && view.descriptor.incarnation != before {
                    return Err(SubmitError::Restarted { index, segment: segment.name.clone() });
                }
            }
            let Some(buffer) = view.find(span.first, span.length) else {
                if !refreshed {
                    refresh = true;
                    continue;
                }
                return Err(SubmitError::TargetOutOfRange {
                    index,
                    segment: segment.name.clone(),
                    target_offset: span.first,
                    length: span.length,
                    nearest: list_buffers(&view.descriptor, span.first),
                });
            };
            let place = Place { segment: &segment, descriptor: &view.descriptor, buffer };
            let rule = match wanted.rules {
                0 => None,
                rules => self.policy_file.first_rule(rules, self.seen(place, wanted.gpu)),
            };
            let order = rule.map_or(&[][..], |rule| &rule.transports);
            let allowed = match order {
                [] => wanted.allowed,
                order => wanted.allowed.and(Allowed::these(order)),
            };
            // Also where it has to go on over another one.
            let may = match wanted.durable {
                true => allowed.and(self.durable_transports()),
                false => allowed,
            };
            let chosen = self.choose(place, may, order);
            if let Some((transport, transport_name)) = chosen {
                self.tell_path(place, transport_name);
                let terms = (may, wanted.rules, wanted.gpu);
                let names = (transport, transport_name);
                return Ok(Target::new(names, terms, segment, view, buffer));
            }
            // What was in the way when the segment was opened need not be there any more.
            refresh = !refreshed && segment.may_be_reached_now();
            if !refresh {
                return Err(self.refusal(index, place, allowed, may));
            }
        }
    }
}

/// By what a request has its transport.
#[derive(Clone, Copy)]
struct Wanted {
    index: usize,
    allowed: Allowed,
    durable: bool,
    /// The rules that may be for it.
    rules: u64,
    /// The memory here is a GPU's.
    gpu: bool,
}

/// A buffer of a segment, and the transport that reaches it.
struct Target {
    transport: usize,
    transport_name: &'static str,
    /// The transports that may.
    allowed: Allowed,
    /// The rules that might have been for the request.
    rules: u64,
    /// It is for memory of a GPU here.
    gpu: bool,
    segment: Arc<OpenSegment>,
    view: View,
    buffer: usize,
}

impl Target {
    const fn new(
        (transport, transport_name): (usize, &'static str),
        (allowed, rules, gpu): (Allowed, u64, bool),
        segment: Arc<OpenSegment>,
        view: View,
        buffer: usize,
    ) -> Self {
        Self { transport, transport_name, allowed, rules, gpu, segment, view, buffer }
    }

    /// The buffer.
    fn span(&self) -> Span {
        let buffer = &self.view.descriptor.buffers[self.buffer];
        Span { first: buffer.addr, length: buffer.length }
    }

    fn holds(&self, segment: SegmentId, span: Span) -> bool {
        self.segment.id == segment && self.span().holds(span)
    }
}

/// The two pieces of memory of a run.
struct Ends {
    segment: SegmentId,
    target: Span,
    source: Span,
    /// The rules that might have been for the requests.
    rules: u64,
}

impl Ends {
    fn hold(&self, segment: SegmentId, extent: &Extent) -> bool {
        self.segment == segment
            && self.source.holds(extent.source)
            && self.target.holds(extent.target)
    }
}

/// Makes tasks of requests, of which nobody else knows yet. The first ones that are to be copied are claimed for
/// this thread.
fn start<R: Requested>(
    batch: &BatchShared,
    requests: &[R],
    terms: &Terms,
    runs: &mut [Run],
    (submission, admission): (Option<&Arc<Submission>>, Option<&Arc<Admission>>),
) {
    let submitted = batch.submitted();
    // What is sent after them may wait for a server, and is not to do so inside of memory.
    let alone = terms.deadline.is_none() && submission.is_none();
    let mut left = if R::WHOLE && alone { INLINE } else { 0 };
    let copies = runs.iter().all(|run| run.copies);
    batch.time_one(submitted, requests.len(), copies);
    for run in runs {
        let transport = code_of(run.transport_name);
        batch.counters.submitted(transport, run.tasks.len());
        for index in run.tasks.clone() {
            let (task, request) = (batch.tasks.get(index), &requests[index - submitted]);
            request.start(task, &batch.slicing, terms);
            task.goes_by(transport);
            if let Some(submission) = submission {
                task.belongs_with(submission);
            }
            let length = request.length();
            if let Some(admission) = admission {
                task.is_admitted(admission.hold(terms.class, length));
            }
            if run.copies && run.claimed == index && length <= left {
                left -= length;
                run.claimed += 1;
                task.claim_early();
            }
        }
    }
}

fn fail_stopped(batch: &Arc<BatchShared>, run: &Run) {
    let peer = run.segment.name.as_str().into();
    let error = crate::TransferError::new(peer, "none", crate::FailureReason::ShutDown);
    run.give_back(batch);
    run.handles(batch).for_each(|task| task.fail_rest(&error));
}

/// The buffers of a segment, for who has missed them at this address.
fn list_buffers(descriptor: &SegmentDesc, address: u64) -> String {
    let range = |buffer: &millstream_metadata::BufferDesc| {
        let end = buffer.addr.saturating_add(buffer.length);
        format!("{:#x}..{end:#x} ({} bytes)", buffer.addr, buffer.length)
    };
    let mut usable = descriptor.buffers.iter().filter(|buffer| buffer.fault.is_none());
    let ranges: Vec<_> = usable.by_ref().take(BUFFERS_LISTED).map(range).collect();
    let mut told = match (ranges.len(), usable.count()) {
        (0, _) => "which has none".to_owned(),
        (_, 0) => format!("which has {}", ranges.join(", ")),
        (_, more) => format!("which has {} and {more} more", ranges.join(", ")),
    };
    if let Some(bad) = descriptor.unusable_at(address) {
        told += &format!("; {bad}: its process must register that memory anew");
    }
    if descriptor.buffers_left_out > 0 {
        let (left_out, most) = (descriptor.buffers_left_out, millstream_metadata::MAX_BUFFERS);
        told += &format!(
            "; its descriptor has {left_out} more, which are left out, as it may have {most}: its \
             process must register fewer"
        );
    }
    told
}
