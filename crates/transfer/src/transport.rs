//! What the engine asks of a transport.

use std::sync::Arc;

use millstream_metadata::{HandShakeDesc, SegmentDesc};

use crate::SegmentId;
use crate::memory::RawMemory;
use crate::segment::OpenSegment;
use crate::task::TaskHandle;

/// The location of memory when the caller does not say (`kWildcardLocation`).
pub const ANY_LOCATION: &str = "*";

/// What a transport can do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Capabilities {
    /// Moves bytes within the engine's own segment.
    pub own_segment: bool,
    /// Moves bytes to and from the segments of other processes.
    pub remote_segments: bool,
    /// Needs a key for each device with the buffers of remote segments.
    pub needs_keys: bool,
}

/// A task and what the engine has found out about its ends.
#[derive(Debug)]
pub(crate) struct Work {
    /// Which of the engine's transports does it.
    pub(crate) transport: usize,
    pub(crate) task: TaskHandle,
    /// The transport's keys of the local memory.
    pub(crate) local_keys: Arc<[u32]>,
    pub(crate) segment: Arc<OpenSegment>,
    pub(crate) descriptor: Arc<SegmentDesc>,
    /// Index of the target's buffer in the descriptor.
    pub(crate) buffer: usize,
}

/// What a transport keeps with a piece of registered memory. Dropping it takes the registration
/// back, and returns when the transport does not touch the memory any more.
pub(crate) struct Registration {
    /// For work requests here, one for each of the transport's devices.
    pub(crate) keys: Arc<[u32]>,
    /// For the requests of peers.
    pub(crate) remote_keys: Arc<[u32]>,
    pub(crate) _guard: Box<dyn Send + Sync>,
}

/// Moves bytes. Errors of transfers are told to their tasks.
pub(crate) trait Transport: Send + Sync {
    /// As in `--protocol` and in descriptors.
    fn name(&self) -> &'static str;

    fn capabilities(&self) -> Capabilities;

    /// Registers memory with all devices.
    fn register(&self, memory: &RawMemory, remote: bool) -> Result<Registration, String>;

    /// Adds its devices to the engine's descriptor.
    fn describe(&self, descriptor: &mut SegmentDesc);

    /// Why it does not reach a segment, if so.
    fn reaches(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
    ) -> Result<(), String>;

    /// How often its devices repaired a loss.
    fn retransmissions(&self) -> u64 {
        0
    }

    /// Begins to do this work. Does not wait for any of it.
    fn submit(&self, work: &[Work]);

    /// Answers a peer that wants to connect, when this transport's devices are meant.
    fn handshake(&self, request: &HandShakeDesc) -> Option<HandShakeDesc>;

    /// A segment was closed.
    fn forget(&self, segment: SegmentId);

    /// Ends all work: tasks fail, connections close.
    fn stop(&self);
}
