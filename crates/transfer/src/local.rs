//! The transport for the engine's own segment: copies.

use std::sync::Arc;

use millstream_metadata::{HandShakeDesc, SegmentDesc};

use crate::memory::{Memory, RawMemory};
use crate::segment::OpenSegment;
use crate::transport::{Capabilities, Registration, Transport, Work};
use crate::{FailureReason, SegmentId, TransferError};

pub(crate) struct LocalTransport {
    memory: Arc<Memory>,
}

impl LocalTransport {
    pub(crate) fn new(memory: Arc<Memory>) -> Self {
        Self { memory }
    }
}

impl Transport for LocalTransport {
    fn name(&self) -> &'static str {
        "local"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { own_segment: true, remote_segments: false, needs_keys: false }
    }

    fn register(&self, _memory: &RawMemory, _remote: bool) -> Result<Registration, String> {
        let (keys, remote_keys) = (Arc::new([]), Arc::new([]));
        Ok(Registration { keys, remote_keys, _guard: Box::new(()) })
    }

    fn describe(&self, _descriptor: &mut SegmentDesc) {}

    fn reaches(
        &self,
        segment: &Arc<OpenSegment>,
        _descriptor: &Arc<SegmentDesc>,
    ) -> Result<(), String> {
        match segment.id {
            SegmentId::LOCAL => Ok(()),
            _ => Err("it is another process's".to_owned()),
        }
    }

    /// Copies at once: the caller's thread is as good as another.
    fn submit(&self, work: &[Work]) {
        for Work { task, segment, .. } in work {
            while let Some(slice) = task.claim() {
                if self.memory.copy(task.opcode(), slice.source, slice.target, slice.length) {
                    task.done(slice.length);
                } else {
                    task.failed(&TransferError {
                        peer: segment.name.as_str().into(),
                        nic: self.name().into(),
                        reason: FailureReason::Unregistered,
                    });
                }
            }
        }
    }

    fn handshake(&self, _request: &HandShakeDesc) -> Option<HandShakeDesc> {
        None
    }

    fn forget(&self, _segment: SegmentId) {}

    fn stop(&self) {}
}
