//! What all peers of the transport share.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use millstream_metadata::Store;

use super::device::LocalDevice;
use super::timer::{Clock, Timer};
use super::work::Works;
use crate::calls::Calls;
use crate::engine::Inner;
use crate::lookups::Lookups;
use crate::workers::Workers;
use crate::{Policy, RdmaConfig};

/// What the transport knows of its engine.
pub(crate) struct RdmaContext {
    /// The engine's name.
    pub(crate) engine: String,
    /// Where it answers, as its targets are told.
    pub(crate) control_address: SocketAddr,
    pub(crate) incarnation: u64,
    pub(crate) calls: Arc<Calls>,
    pub(crate) lookups: Arc<Lookups>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) slice_length: usize,
    pub(crate) fragment_ratio: usize,
    pub(crate) policy: Policy,
    /// Who finds another transport for what no rail is left for, where that is done.
    pub(crate) elsewhere: Option<Weak<Inner>>,
}

/// What all peers of the transport share.
pub(super) struct Shared {
    pub(super) config: RdmaConfig,
    pub(super) context: RdmaContext,
    pub(super) devices: Vec<Arc<LocalDevice>>,
    pub(super) clock: Clock,
    pub(super) timer: Arc<Timer>,
    pub(super) works: Works,
    /// For what takes a while, but waits for nobody else.
    pub(super) workers: Workers,
}
