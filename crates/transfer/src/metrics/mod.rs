//! What an engine has done and is doing, for who watches it.

mod counters;
mod histogram;
mod prometheus;
mod timing;
mod traffic;

use std::time::UNIX_EPOCH;

use millstream_transfer_core::RailCounters;
use millstream_verbs::Device;
use serde::{Deserialize, Serialize};

pub(crate) use self::counters::{Counters, Tally};
pub use self::histogram::Histogram;
pub use self::prometheus::{Metric, MetricKind};
pub(crate) use self::timing::Timing;
pub(crate) use self::traffic::Traffic;
use crate::local::LocalTransport;
use crate::transport::NAMES;
use crate::{SegmentId, TransferEngine};

/// What an engine has done since its start, and is doing: [`TransferEngine::metrics`].
///
/// Numbers are taken one after the other while others count, so they may differ by what happened meanwhile. None of
/// those that count ever falls, but those of a rail end with its peer, when no segment that is open leads there.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Metrics {
    /// The name of the engine's segment.
    pub segment: String,
    /// Drawn at its start.
    pub incarnation: u64,
    /// Seconds since 1970 at its start.
    pub started_at_s: f64,
    /// Seconds since its start.
    pub uptime_s: f64,
    /// Segments that are open, its own not counted.
    pub open_segments: u64,
    /// Pieces of memory that are registered.
    pub registrations: u64,
    /// Their bytes.
    pub registered_bytes: u64,
    /// Those that are installed, in the order in which they are tried.
    pub transports: Vec<TransportMetrics>,
    /// Those on which anything was tried.
    pub rails: Vec<RailMetrics>,
    /// Its RDMA devices.
    pub devices: Vec<DeviceMetrics>,
}

/// Of a transport.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct TransportMetrics {
    /// Its name.
    pub transport: String,
    /// Its requests.
    pub requests: RequestCounts,
    /// Bytes of READs that have arrived, of requests that have ended.
    pub read_bytes: u64,
    /// Bytes of WRITEs that have arrived, of requests that have ended.
    pub written_bytes: u64,
    /// How often its devices have sent or asked for packets again.
    pub retransmissions: u64,
    /// Connections of peers that are served now.
    pub connections_served: u64,
    /// How often threads that waited for its connections looked for a while before they slept, or in place of that: of
    /// `tcp` (`tcp.busy_poll`).
    #[serde(default)]
    pub busy_polls: u64,
    /// How often they slept, or would have if nothing had come by then.
    #[serde(default)]
    pub sleeps: u64,
    /// How long requests took that were COMPLETED.
    pub stages: Stages,
}

/// Requests, by how they stand.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct RequestCounts {
    /// In all.
    pub submitted: u64,
    /// COMPLETED.
    pub completed: u64,
    /// FAILED.
    pub failed: u64,
    /// CANCELED.
    pub canceled: u64,
    /// TIMEOUT.
    pub timeout: u64,
    /// That had to leave it, and went on over another transport.
    #[serde(default)]
    pub moved: u64,
    /// Not over.
    pub in_flight: u64,
}

/// How long the stages of requests took. Not all requests are timed: of each submission one at most, which is any of
/// them, while none of its batch is timed before; and where requests are copied (`local`, `shm`) of one submission in
/// 16.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Stages {
    /// From the submission until its first slice was posted, or began to be copied.
    pub queued: Histogram,
    /// From then until its last byte was acknowledged.
    pub transferring: Histogram,
    /// From then until its state said so.
    pub completing: Histogram,
    /// All of it.
    pub all: Histogram,
}

/// Of a rail: a way to a peer. Over `rdma` it is a pair of NICs, otherwise all that one transport does with a peer.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct RailMetrics {
    /// The transport's name.
    pub transport: String,
    /// The name of the peer's segment, as it was opened.
    pub peer: String,
    /// The NIC here; empty where there is none to speak of.
    pub local_nic: String,
    /// The peer's NIC, or the address that is connected to.
    pub peer_nic: String,
    /// How it stands.
    pub state: RailStatus,
    /// Why it failed last, if nothing was done on it since it was connected again.
    pub reason: Option<String>,
    /// Slices that were posted, each time anew.
    pub posted_slices: u64,
    /// Their bytes.
    pub posted_bytes: u64,
    /// Slices that were done.
    pub completed_slices: u64,
    /// Slices that ended otherwise.
    pub failed_slices: u64,
    /// Slices that were posted on another rail after they were not done on this.
    pub moved_slices: u64,
    /// Bytes of READs that were done.
    pub read_bytes: u64,
    /// Bytes of WRITEs that were done.
    pub written_bytes: u64,
    /// Slices under way.
    pub slices_in_flight: u64,
    /// Bytes under way.
    pub bytes_in_flight: u64,
    /// Bytes that may be under way. `None` where nobody measures.
    pub limit_bytes: Option<u64>,
    /// The highest rate that was measured in the last seconds.
    pub peak_rate_bytes_per_s: Option<u64>,
    /// The shortest time from posting a slice to its completion in the last seconds.
    pub smallest_round_trip_s: Option<f64>,
    /// How long the oldest byte under way has not been acknowledged.
    pub oldest_age_s: Option<f64>,
    /// How often it was connected.
    pub connections: u64,
    /// How often it failed.
    pub failures: u64,
    /// How often it was paused since it failed too often.
    pub pauses: u64,
    /// How often the peer was asked to confirm that nothing can arrive any more.
    pub fences: u64,
    /// How often that was needed and not confirmed.
    pub lost_fences: u64,
}

/// How a rail stands.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RailStatus {
    /// Not connected.
    #[default]
    Down,
    /// Being connected.
    Connecting,
    /// Connected, or needs no connection.
    Up,
    /// It fails too often, and is left alone for a while.
    Paused,
    /// What was under way on it is being brought to an end.
    Fencing,
}

impl RailStatus {
    /// All that there are.
    pub const ALL: [Self; 5] =
        [Self::Down, Self::Connecting, Self::Up, Self::Paused, Self::Fencing];

    /// Its name, as in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::Connecting => "connecting",
            Self::Up => "up",
            Self::Paused => "paused",
            Self::Fencing => "fencing",
        }
    }
}

/// Of an RDMA device. One of the system tells some of it only; the rest is 0.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct DeviceMetrics {
    /// Its name.
    pub device: String,
    /// Packets.
    pub packets_sent: u64,
    /// Packets.
    pub packets_received: u64,
    /// Bytes of payload, those of repetitions among them.
    pub payload_bytes_sent: u64,
    /// Bytes of payload that came in order.
    pub payload_bytes_received: u64,
    /// How often it went back to send again.
    pub retransmissions: u64,
    /// Of those, since nobody answered.
    pub timeouts: u64,
    /// Packets that were dropped.
    pub packets_dropped: u64,
    /// Congestion notifications that came.
    pub congestion_notifications: u64,
}

impl RailMetrics {
    /// With what a rail has counted.
    pub(crate) fn counted(self, counters: &RailCounters, slices: u64, bytes: u64) -> Self {
        Self {
            posted_slices: counters.posted_slices,
            posted_bytes: counters.posted_bytes,
            completed_slices: counters.completed_slices,
            failed_slices: counters
                .posted_slices
                .saturating_sub(counters.completed_slices.saturating_add(slices)),
            moved_slices: counters.moved_slices,
            read_bytes: counters.read_bytes,
            written_bytes: counters.written_bytes,
            slices_in_flight: slices,
            bytes_in_flight: bytes,
            connections: counters.connections,
            failures: counters.failures,
            pauses: counters.pauses,
            fences: counters.fences,
            lost_fences: counters.lost_fences,
            ..self
        }
    }
}

impl DeviceMetrics {
    pub(crate) fn of(device: &Device) -> Self {
        let counters = device.counters();
        Self {
            device: device.name().to_owned(),
            packets_sent: counters.packets_sent,
            packets_received: counters.packets_received,
            payload_bytes_sent: counters.payload_bytes_sent,
            payload_bytes_received: counters.payload_bytes_received,
            retransmissions: counters.retransmissions,
            timeouts: counters.timeouts,
            packets_dropped: counters.dropped(),
            congestion_notifications: counters.congestion_notifications,
        }
    }
}

impl TransferEngine {
    /// What it has done and is doing. Takes the lock of each peer for a moment.
    pub fn metrics(&self) -> Metrics {
        let inner = &self.inner;
        let counters = &inner.counters;
        let started_at = counters.started_at.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (registrations, registered_bytes) = inner.memory().registered();
        let mut metrics = Metrics {
            segment: inner.name().to_owned(),
            incarnation: inner.incarnation(),
            started_at_s: started_at.as_secs_f64(),
            uptime_s: counters.uptime().as_secs_f64(),
            open_segments: inner.segments.count_of_others() as u64,
            registrations,
            registered_bytes,
            ..Metrics::default()
        };
        if let Some(own) = inner.segments.by_id(SegmentId::LOCAL)
            && own.traffic.is_any()
        {
            metrics.rails.push(own.traffic.rail(RailMetrics {
                transport: LocalTransport::NAME.to_owned(),
                peer: own.name.clone(),
                state: RailStatus::Up,
                ..RailMetrics::default()
            }));
        }
        for transport in inner.transports() {
            let index = NAMES.iter().position(|name| *name == transport.name());
            let Some(index) = index else { continue };
            let (busy_polls, sleeps) = transport.polls();
            metrics.transports.push(TransportMetrics {
                retransmissions: transport.retransmissions(),
                connections_served: transport.connections_served() as u64,
                busy_polls,
                sleeps,
                ..counters.transport(index)
            });
            transport.observe(&mut metrics);
        }
        metrics
    }
}
