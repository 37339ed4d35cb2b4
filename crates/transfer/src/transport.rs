//! What the engine asks of a transport.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use millstream_metadata::{HandShakeDesc, SegmentDesc};
use millstream_transfer_core::TaskId;

use crate::SegmentId;
use crate::batch::BatchShared;
use crate::keys::Keys;
use crate::memory::{LocalMemory, RawMemory};
use crate::metrics::Metrics;
use crate::path::Allowed;
use crate::segment::{OpenSegment, View};
use crate::task::TaskHandle;
use crate::terms::Terms;

/// The location of memory when the caller does not say (`kWildcardLocation`).
pub const ANY_LOCATION: &str = "*";

/// The number of a location of which nothing is known: all devices are for it.
pub(crate) const ANYWHERE: u16 = u16::MAX;

/// The names of all transports. Where one is noted in a byte, it is its place here, counted from 1.
pub(crate) const NAMES: [&str; 6] = ["local", "shm", "rdma", "nvmeof", "tcp", "relay"];

/// How often a task may go on over another transport: of `shm`, `rdma` and `tcp` it leaves each once.
pub(crate) const MAX_MOVES: usize = 2;

/// The number of a transport.
pub(crate) fn code_of(name: &str) -> u8 {
    let place = NAMES.iter().position(|known| *known == name);
    debug_assert!(place.is_some(), "{name} is none of the transports that have numbers");
    place.map_or(0, |place| place as u8 + 1)
}

/// The name of the transport that has this number; 0 is none.
pub(crate) fn name_of(code: u8) -> Option<&'static str> {
    NAMES.get(usize::from(code).checked_sub(1)?).copied()
}

/// What a transport can do, and needs, where transports differ. All of them read and write, whole and in pieces, of any
/// length, end tasks by [`crate::TransferEngine::cancel`] and deadlines, and say where a WRITE may still arrive.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Capabilities {
    /// Moves bytes within the engine's own segment.
    pub own_segment: bool,
    /// Moves bytes to and from the segments of other processes.
    pub remote_segments: bool,
    /// Needs a key for each device with the buffers of remote segments.
    pub needs_keys: bool,
    /// Is faster with memory that the engine allocated as shared memory.
    pub shared_memory: bool,
    /// Moves bytes to and from memory of a GPU here.
    pub gpu_memory: bool,
    /// Has the copier of the engine do its tasks, which have no owner then.
    pub copies: bool,
    /// Can let a WRITE count only once it survives a loss of power ([`crate::SubmitOptions::durable`]).
    pub durable: bool,
}

impl Capabilities {
    /// Those of a transport to other processes that does nothing special.
    pub(crate) const REMOTE: Self = Self {
        own_segment: false,
        remote_segments: true,
        needs_keys: false,
        shared_memory: false,
        gpu_memory: true,
        copies: false,
        durable: false,
    };
}

/// Tasks of one batch, one after the other, between the same two pieces of memory, and what the engine
/// has found out about these.
#[derive(Debug)]
pub(crate) struct Run {
    /// Which of the engine's transports does it, and its name.
    pub(crate) transport: usize,
    pub(crate) transport_name: &'static str,
    /// Whether it has the copier do them.
    pub(crate) copies: bool,
    /// Their indexes in the batch.
    pub(crate) tasks: Range<usize>,
    /// Those before this one were claimed for who submits them.
    pub(crate) claimed: usize,
    /// The transports that may do them.
    pub(crate) allowed: Allowed,
    pub(crate) local: Arc<LocalMemory>,
    pub(crate) segment: Arc<OpenSegment>,
    pub(crate) view: View,
    /// Index of the target's buffer in the descriptor: of the first one, where it goes across several.
    pub(crate) buffer: usize,
}

impl Run {
    /// Gives back those of its tasks that were claimed, when nobody has begun to do them.
    pub(crate) fn give_back(&self, batch: &BatchShared) {
        let claimed = self.tasks.start..self.claimed;
        claimed.for_each(|index| batch.tasks.get(index).give_back());
    }

    /// Its tasks.
    pub(crate) fn handles(&self, batch: &Arc<BatchShared>) -> impl Iterator<Item = TaskHandle> {
        self.tasks.clone().map(|index| TaskHandle { batch: Arc::clone(batch), index })
    }
}

/// What a transport keeps with a piece of registered memory. Dropping it takes the registration
/// back, and returns when the transport does not touch the memory any more.
pub(crate) struct Registration {
    /// For work requests here.
    pub(crate) keys: Keys,
    /// For the requests of peers.
    pub(crate) remote_keys: Keys,
    /// For processes on the same host.
    pub(crate) shared_key: Option<u64>,
    pub(crate) guard: Box<dyn Guard>,
}

/// What ends a registration when it is dropped.
pub(crate) trait Guard: Send + Sync {
    /// Ends it now; why it cannot be ended within some seconds, if so. Called again, it goes on.
    fn revoke(&self) -> Result<(), String> {
        Ok(())
    }
}

impl Guard for () {}

/// Who has tasks under way, and can end one.
pub(crate) trait EndTask: Send + Sync + std::fmt::Debug {
    /// Begins to end it; whether it was neither over nor about to end.
    fn cancel(&self, task: TaskId) -> bool;
}

/// Moves bytes. Errors of transfers are told to their tasks.
pub(crate) trait Transport: Send + Sync {
    /// As in `--protocol` and in descriptors.
    fn name(&self) -> &'static str;

    fn capabilities(&self) -> Capabilities;

    /// When it is tried: 0 first, 3 last. Of equals, those that were installed before.
    fn rank(&self) -> u8 {
        2
    }

    /// Registers memory with all devices.
    fn register(&self, memory: &RawMemory, remote: bool) -> Result<Registration, String>;

    /// Its number of a location, by which it chooses devices for memory there.
    fn location(&self, _name: &str) -> u16 {
        ANYWHERE
    }

    /// Adds its devices to the engine's descriptor.
    fn describe(&self, descriptor: &mut SegmentDesc);

    /// A segment was opened, or its descriptor had again. May wait, up to some seconds.
    fn prepare(&self, _segment: &Arc<OpenSegment>, _descriptor: &Arc<SegmentDesc>) {}

    /// Why it does not reach this buffer of a segment, if so.
    fn reaches(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
        buffer: usize,
    ) -> Result<(), String>;

    /// Whether it reaches this buffer, as each submission asks: does not allocate in steady state.
    fn leads(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
        buffer: usize,
    ) -> bool {
        self.reaches(segment, descriptor, buffer).is_ok()
    }

    /// How often its devices repaired a loss.
    fn retransmissions(&self) -> u64 {
        0
    }

    /// Connections of peers that it serves.
    fn connections_served(&self) -> usize {
        0
    }

    /// How often threads looked before they slept, or in place of that, and how often they slept, while they waited for its
    /// connections.
    fn polls(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Adds its rails and devices.
    fn observe(&self, _metrics: &mut Metrics) {}

    /// Begins to do this work. Does not wait for any of it.
    fn submit(&self, batch: &Arc<BatchShared>, runs: &[Run], terms: &Terms);

    /// The most that it carries to a segment until then, in bytes per second, where that is known well.
    fn peak_rate(
        &self,
        _segment: &Arc<OpenSegment>,
        _descriptor: &Arc<SegmentDesc>,
        _until: Instant,
    ) -> Option<u64> {
        None
    }

    /// Answers a peer that wants to connect, when this transport's devices are meant.
    fn handshake(&self, _request: &HandShakeDesc) -> Option<HandShakeDesc> {
        None
    }

    /// A segment was closed.
    fn forget(&self, _segment: SegmentId) {}

    /// Ends all work: tasks fail, connections close.
    fn stop(&self) {}
}
