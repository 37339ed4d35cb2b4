//! Submission: every request is checked before the first byte moves.

use std::sync::{Arc, PoisonError};

use millstream_metadata::SegmentDesc;

use crate::batch::BatchShared;
use crate::engine::Inner;
use crate::segment::OpenSegment;
use crate::task::TaskHandle;
use crate::transport::Work;
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
        let mut work = std::mem::take(&mut *adding);
        let checked = self.check(batch, requests, &mut work);
        if checked.is_ok() {
            for (work, request) in work.iter().zip(requests) {
                batch.tasks[work.task.index].start(request, &batch.slicing);
            }
            batch.added(requests.len());
        }
        drop(adding);
        if checked.is_ok() {
            for run in work.chunk_by(|a, b| a.transport == b.transport) {
                let index = run[0].transport;
                let transport = self.with_transports(|all| all.get(index).cloned());
                match transport {
                    Some(transport) => transport.submit(run),
                    None => run.iter().for_each(fail_stopped),
                }
            }
        }
        work.clear();
        *batch.add() = work;
        checked
    }

    /// Finds both ends of each request.
    fn check(
        &self,
        batch: &Arc<BatchShared>,
        requests: &[TransferRequest],
        work: &mut Vec<Work>,
    ) -> Result<(), SubmitError> {
        if self.is_stopped() {
            return Err(SubmitError::ShutDown);
        }
        let (capacity, submitted) = (batch.tasks.len(), batch.submitted());
        if requests.len() > capacity - submitted {
            let requested = requests.len();
            return Err(SubmitError::ExceedCapacity { capacity, submitted, requested });
        }
        // What was found for the request before: the next one mostly goes the same way.
        let mut last: Option<Way> = None;
        for (index, request) in requests.iter().enumerate() {
            if request.length == 0 {
                return Err(SubmitError::ZeroLength { index });
            }
            let segment = match &last {
                Some(way) if way.segment.id == request.target => Arc::clone(&way.segment),
                _ => self
                    .segments
                    .by_id(request.target)
                    .ok_or(SubmitError::UnknownSegment { index, segment: request.target })?,
            };
            let (descriptor, buffer) = self.target(index, request, &segment)?;
            let way = match &last {
                Some(way) if way.leads_to(&segment, &descriptor) => way,
                _ => last.insert(self.way(index, &segment, &descriptor)?),
            };
            let (transport, needs_keys) = (way.transport, way.needs_keys);
            if needs_keys && descriptor.buffers[buffer].rkey.is_empty() {
                let segment = segment.name.clone();
                return Err(SubmitError::TargetNotAccessible { index, segment });
            }
            let regions = self.memory().regions.read().unwrap_or_else(PoisonError::into_inner);
            let registered = regions
                .find(request.source, request.length)
                .and_then(|(_, region)| region.registrations.get(transport));
            let local_keys = registered.map(|found| Arc::clone(&found.keys)).ok_or(
                SubmitError::SourceNotRegistered {
                    index,
                    source_address: request.source,
                    length: request.length,
                },
            )?;
            drop(regions);
            work.push(Work {
                transport,
                task: TaskHandle { batch: Arc::clone(batch), index: submitted + index },
                local_keys,
                segment,
                descriptor,
                buffer,
            });
        }
        Ok(())
    }

    /// The descriptor of the target's segment, and which of its buffers holds the target.
    fn target(
        &self,
        index: usize,
        request: &TransferRequest,
        segment: &OpenSegment,
    ) -> Result<(Arc<SegmentDesc>, usize), SubmitError> {
        let find = |descriptor: &SegmentDesc| {
            let holds = |buffer: &millstream_metadata::BufferDesc| {
                buffer.contains(request.target_offset, request.length)
            };
            descriptor.buffers.iter().position(holds)
        };
        let mut descriptor = segment.descriptor();
        let mut found = if segment.is_stale() { None } else { find(&descriptor) };
        if found.is_none() && segment.id != SegmentId::LOCAL {
            // The peer may have registered more since, or have been restarted.
            segment.set_descriptor(self.descriptor(&segment.name)?);
            descriptor = segment.descriptor();
            found = find(&descriptor);
        }
        match found {
            Some(buffer) => Ok((descriptor, buffer)),
            None => Err(SubmitError::TargetOutOfRange {
                index,
                segment: segment.name.clone(),
                target_offset: request.target_offset,
                length: request.length,
                nearest: list_buffers(&descriptor),
            }),
        }
    }

    /// The first transport that reaches the segment.
    fn way(
        &self,
        index: usize,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
    ) -> Result<Way, SubmitError> {
        self.with_transports(|transports| {
            let own = segment.id == SegmentId::LOCAL;
            let mut reason = None;
            for (position, transport) in transports.iter().enumerate() {
                let capabilities = transport.capabilities();
                let able =
                    if own { capabilities.own_segment } else { capabilities.remote_segments };
                if !able {
                    continue;
                }
                match transport.reaches(segment, descriptor) {
                    Ok(()) => {
                        return Ok(Way {
                            segment: Arc::clone(segment),
                            descriptor: Arc::clone(descriptor),
                            transport: position,
                            needs_keys: capabilities.needs_keys,
                        });
                    }
                    Err(why) => reason = Some(why),
                }
            }
            let reason = reason
                .unwrap_or_else(|| "no transport for other processes is installed".to_owned());
            Err(SubmitError::NoPath { index, segment: segment.name.clone(), reason })
        })
    }
}

/// A segment and the transport that reaches it.
struct Way {
    segment: Arc<OpenSegment>,
    descriptor: Arc<SegmentDesc>,
    transport: usize,
    needs_keys: bool,
}

impl Way {
    /// Whether it is to this segment, by this version of its descriptor.
    fn leads_to(&self, segment: &Arc<OpenSegment>, descriptor: &Arc<SegmentDesc>) -> bool {
        Arc::ptr_eq(&self.segment, segment) && Arc::ptr_eq(&self.descriptor, descriptor)
    }
}

fn fail_stopped(work: &Work) {
    work.task.fail_rest(&crate::TransferError {
        peer: work.segment.name.as_str().into(),
        nic: "none".into(),
        reason: crate::FailureReason::ShutDown,
    });
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
