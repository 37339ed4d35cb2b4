//! Submission: every request is checked before the first byte moves.

use std::sync::Arc;

use millstream_metadata::SegmentDesc;

use crate::batch::BatchShared;
use crate::engine::Inner;
use crate::memory::LocalMemory;
use crate::segment::{OpenSegment, View};
use crate::transport::Run;
use crate::{SegmentId, SubmitError, TransferRequest};

/// How many buffers an error lists.
const BUFFERS_LISTED: usize = 3;

impl Inner {
    pub(crate) fn submit(
        &self,
        batch: &Arc<BatchShared>,
        requests: &[TransferRequest],
    ) -> Result<(), SubmitError> {
        let mut adding = batch.add();
        // A batch that is reused in several steps keeps its room here: nothing is allocated.
        let mut runs = std::mem::take(&mut *adding);
        let checked = self.check(batch, requests, &mut runs);
        if checked.is_ok() {
            for (task, request) in batch.tasks[batch.submitted()..].iter().zip(requests) {
                task.start(request, &batch.slicing);
            }
            batch.added(requests.len());
        }
        drop(adding);
        if checked.is_ok() {
            for runs in runs.chunk_by(|a, b| a.transport == b.transport) {
                let index = runs[0].transport;
                let transport = self.with_transports(|all| all.get(index).cloned());
                match transport {
                    Some(transport) => transport.submit(batch, runs),
                    None => runs.iter().for_each(|run| fail_stopped(batch, run)),
                }
            }
        }
        runs.clear();
        *batch.add() = runs;
        checked
    }

    /// Finds both ends of each request. Those that lie in the same memory as the one before, as most do,
    /// make one run, and cost a comparison each.
    fn check(
        &self,
        batch: &Arc<BatchShared>,
        requests: &[TransferRequest],
        runs: &mut Vec<Run>,
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
        for (index, request) in requests.iter().enumerate() {
            if request.length == 0 {
                return Err(SubmitError::ZeroLength { index });
            }
            let same_target = target.as_ref().is_some_and(|target| target.holds(request));
            if !same_target {
                target = Some(self.target(index, request, target)?);
            }
            let same_local =
                local.as_ref().is_some_and(|local| local.contains(request.source, request.length));
            if !same_local {
                let found = self.memory().find(request.source, request.length);
                local = Some(found.ok_or(SubmitError::SourceNotRegistered {
                    index,
                    source_address: request.source,
                    length: request.length,
                })?);
            }
            let task = submitted + index;
            match runs.last_mut() {
                Some(run) if same_target && same_local => run.tasks.end = task + 1,
                _ => {
                    let (Some(target), Some(local)) = (&target, &local) else { continue };
                    runs.push(Run {
                        transport: target.transport,
                        tasks: task..task + 1,
                        local: Arc::clone(local),
                        segment: Arc::clone(&target.segment),
                        descriptor: Arc::clone(&target.view.descriptor),
                        buffer: target.buffer,
                    });
                }
            }
        }
        Ok(())
    }

    /// Where a request goes. What was found for the one before is looked at first.
    fn target(
        &self,
        index: usize,
        request: &TransferRequest,
        before: Option<Target>,
    ) -> Result<Target, SubmitError> {
        let (segment, mut view) = match before {
            Some(Target { segment, view, .. }) if segment.id == request.target => (segment, view),
            _ => {
                let unknown = SubmitError::UnknownSegment { index, segment: request.target };
                let segment = self.segments.by_id(request.target).ok_or(unknown)?;
                let view = segment.view();
                (segment, view)
            }
        };
        let find = |view: &View| view.find(request.target_offset, request.length);
        let mut found = if segment.is_stale() { None } else { find(&view) };
        if found.is_none() && segment.id != SegmentId::LOCAL {
            // The peer may have registered more since, or have been restarted.
            self.refresh(&segment)?;
            view = segment.view();
            found = find(&view);
        }
        let buffer = found.ok_or_else(|| SubmitError::TargetOutOfRange {
            index,
            segment: segment.name.clone(),
            target_offset: request.target_offset,
            length: request.length,
            nearest: list_buffers(&view.descriptor),
        })?;
        let transport = self.way(index, &segment, &view.descriptor, buffer)?;
        Ok(Target { transport, segment, view, buffer })
    }

    /// The first transport that reaches a buffer of the segment.
    fn way(
        &self,
        index: usize,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
        buffer: usize,
    ) -> Result<usize, SubmitError> {
        self.with_transports(|transports| {
            let own = segment.id == SegmentId::LOCAL;
            let mut reasons = Vec::new();
            let mut keys_missing = false;
            for (position, transport) in transports.iter().enumerate() {
                let capabilities = transport.capabilities();
                let able =
                    if own { capabilities.own_segment } else { capabilities.remote_segments };
                if !able {
                    continue;
                }
                match transport.reaches(segment, descriptor, buffer) {
                    Ok(())
                        if capabilities.needs_keys
                            && descriptor.buffers[buffer].rkey.is_empty() =>
                    {
                        keys_missing = true;
                    }
                    Ok(()) => return Ok(position),
                    Err(why) => reasons.push(format!("{}: {why}", transport.name())),
                }
            }
            let segment = segment.name.clone();
            if keys_missing {
                return Err(SubmitError::TargetNotAccessible { index, segment });
            }
            let reason = match reasons.is_empty() {
                true => "no transport for other processes is installed".to_owned(),
                false => reasons.join("; "),
            };
            Err(SubmitError::NoPath { index, segment, reason })
        })
    }
}

/// A buffer of a segment, and the transport that reaches it.
struct Target {
    transport: usize,
    segment: Arc<OpenSegment>,
    view: View,
    buffer: usize,
}

impl Target {
    fn holds(&self, request: &TransferRequest) -> bool {
        self.segment.id == request.target
            && self.view.descriptor.buffers[self.buffer]
                .contains(request.target_offset, request.length)
    }
}

fn fail_stopped(batch: &Arc<BatchShared>, run: &Run) {
    let error = crate::TransferError {
        peer: run.segment.name.as_str().into(),
        nic: "none".into(),
        reason: crate::FailureReason::ShutDown,
    };
    run.handles(batch).for_each(|task| task.fail_rest(&error));
}

/// The buffers of a segment, for who has missed them.
fn list_buffers(descriptor: &SegmentDesc) -> String {
    let buffers = &descriptor.buffers;
    if buffers.is_empty() {
        return "which has none".to_owned();
    }
    let range = |buffer: &millstream_metadata::BufferDesc| {
        let end = buffer.addr.saturating_add(buffer.length);
        format!("{:#x}..{end:#x} ({} bytes)", buffer.addr, buffer.length)
    };
    let ranges: Vec<_> = buffers.iter().take(BUFFERS_LISTED).map(range).collect();
    let more = match buffers.len() - ranges.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("which has {}{more}", ranges.join(", "))
}
