//! The transport for the engine's own segment: copies.

use std::sync::Arc;

use millstream_metadata::SegmentDesc;

use crate::batch::BatchShared;
use crate::copier::{Copier, Other, Way};
use crate::keys::Keys;
use crate::memory::{Memory, RawMemory};
use crate::segment::OpenSegment;
use crate::terms::Terms;
use crate::transport::{Capabilities, Registration, Run, Transport};
use crate::{FailureReason, SegmentId};

pub(crate) struct LocalTransport {
    memory: Arc<Memory>,
    copier: Arc<Copier>,
}

impl LocalTransport {
    pub(crate) const NAME: &'static str = "local";

    pub(crate) fn new(memory: Arc<Memory>, copier: Arc<Copier>) -> Self {
        Self { memory, copier }
    }
}

impl Transport for LocalTransport {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            own_segment: true,
            remote_segments: false,
            copies: true,
            ..Capabilities::REMOTE
        }
    }

    fn rank(&self) -> u8 {
        0
    }

    fn register(&self, _memory: &RawMemory, _remote: bool) -> Result<Registration, String> {
        let (keys, remote_keys) = (Keys::none(), Keys::none());
        Ok(Registration { keys, remote_keys, shared_key: None, guard: Box::new(()) })
    }

    fn describe(&self, _descriptor: &mut SegmentDesc) {}

    fn reaches(
        &self,
        segment: &Arc<OpenSegment>,
        _descriptor: &Arc<SegmentDesc>,
        _buffer: usize,
    ) -> Result<(), String> {
        match segment.id {
            SegmentId::LOCAL => Ok(()),
            _ => Err("it is another process's".to_owned()),
        }
    }

    fn submit(&self, batch: &Arc<BatchShared>, runs: &[Run], terms: &Terms) {
        self.copier.submit(batch, runs, terms, |run| {
            let buffer = &run.view.descriptor.buffers[run.buffer];
            let found = self.memory.find(buffer.addr, buffer.length);
            Ok(Way {
                local: Arc::clone(&run.local),
                other: Other::Own(found.ok_or(FailureReason::Unregistered)?),
                segment: Arc::clone(&run.segment),
                incarnation: None,
            })
        });
    }

    fn stop(&self) {
        self.copier.stop();
    }
}
