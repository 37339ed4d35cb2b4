//! What a switch shows over HTTP: metrics for Prometheus, and the same as JSON.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use millstream_inc::protocol::PortCounters;
use millstream_inc::{CommunicatorCounts, SwitchNode};
use millstream_net::Shared;
use millstream_roce::Counters;
use serde::Serialize;

use crate::api::edge_name;
use crate::prometheus::{self, Kind, Metric, Samples};
use crate::status_server::{Page, Pages};

/// How old what is shown may be. The switch is looked at no more often, whoever asks how often.
const AGE: Duration = Duration::from_millis(250);

/// What a switch shows.
#[derive(Default)]
pub struct SwitchView {
    name: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Nothing before the switch runs, and after.
    shards: Vec<Weak<Shared<SwitchNode>>>,
    latest: Option<(Instant, Arc<Sample>)>,
}

/// `/status`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Sample {
    version: &'static str,
    name: String,
    packets_sent: u64,
    packets_received: u64,
    packets_dropped: u64,
    payload_bytes_sent: u64,
    payload_bytes_received: u64,
    retransmissions: u64,
    timeouts: u64,
    communicators: Vec<Communicator>,
}

#[derive(Clone, Debug, Serialize)]
struct Communicator {
    communicator: u64,
    collectives: u64,
    ports: Vec<PortCounters>,
}

impl std::fmt::Debug for SwitchView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SwitchView").field("name", &self.name).finish_non_exhaustive()
    }
}

impl SwitchView {
    /// A view of a switch of this name that is still to run.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), state: Mutex::default() }
    }

    /// What [`crate::status_server::StatusServer`] serves.
    pub fn pages(self: Arc<Self>) -> Arc<Pages> {
        Arc::new(move |path: &str| self.page(path))
    }

    /// The switch runs.
    pub(crate) fn watch<'a>(&self, shards: impl Iterator<Item = &'a Arc<Shared<SwitchNode>>>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = State { shards: shards.map(Arc::downgrade).collect(), latest: None };
    }

    fn page(&self, path: &str) -> Option<Page> {
        match path {
            "/metrics" => Some(prometheus::page(METRICS, &*self.sample()?)),
            "/status" => Some(Page {
                content_type: "application/json",
                text: serde_json::to_string(&*self.sample()?).ok()? + "\n",
            }),
            "/" => Some(Page {
                content_type: "text/plain; charset=utf-8",
                text: "/metrics for Prometheus\n/status as JSON\n".to_owned(),
            }),
            _ => None,
        }
    }

    fn sample(&self) -> Option<Arc<Sample>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some((at, sample)) = &state.latest
            && now.saturating_duration_since(*at) < AGE
        {
            return Some(Arc::clone(sample));
        }
        if state.shards.is_empty() {
            return None;
        }
        let (mut all, mut counts) = (Vec::new(), Vec::new());
        for shard in &state.shards {
            let shared = shard.upgrade()?;
            // The text is made while the switch goes on.
            let node = shared.lock_without_waking().ok()?;
            all.push(*node.counters());
            counts.extend(node.counts());
        }
        let sample = Arc::new(Sample::new(&self.name, &all, counts));
        state.latest = Some((now, Arc::clone(&sample)));
        Some(sample)
    }
}

impl Sample {
    fn new(name: &str, shards: &[Counters], counts: Vec<CommunicatorCounts>) -> Self {
        let sum = |of: fn(&Counters) -> u64| shards.iter().map(of).sum();
        let communicator = |it: CommunicatorCounts| Communicator {
            communicator: it.communicator,
            collectives: it.statistics.collectives,
            ports: it.ports.iter().map(port_counters).collect(),
        };
        Self {
            version: env!("CARGO_PKG_VERSION"),
            name: name.to_owned(),
            packets_sent: sum(|it| it.packets_sent),
            packets_received: sum(|it| it.packets_received),
            packets_dropped: sum(Counters::dropped),
            payload_bytes_sent: sum(|it| it.payload_bytes_sent),
            payload_bytes_received: sum(|it| it.payload_bytes_received),
            retransmissions: sum(|it| it.retransmissions),
            timeouts: sum(|it| it.timeouts),
            communicators: counts.into_iter().map(communicator).collect(),
        }
    }
}

/// A port's counters as they are said to a controller.
pub(crate) fn port_counters(port: &millstream_inc::PortCounts) -> PortCounters {
    let millstream_inc::PortCounts { rank, counters, .. } = *port;
    PortCounters {
        rank,
        packets_sent: counters.packets_sent,
        packets_received: counters.packets_received,
        payload_bytes_sent: counters.payload_bytes_sent,
        payload_bytes_received: counters.payload_bytes_received,
        retransmissions: counters.retransmissions,
    }
}

const EDGE: &[&str] = &["communicator", "edge"];

const fn counter(
    name: &'static str,
    help: &'static str,
    values: fn(&Sample, &mut Samples<'_>),
) -> Metric<Sample> {
    Metric { name, kind: Kind::Counter, labels: &[], help, values }
}

const fn edge(
    name: &'static str,
    help: &'static str,
    values: fn(&Sample, &mut Samples<'_>),
) -> Metric<Sample> {
    Metric { name, kind: Kind::Counter, labels: EDGE, help, values }
}

/// All that there are.
pub(crate) const METRICS: &[Metric<Sample>] = &[
    Metric {
        name: "millstream_switch_info",
        kind: Kind::Gauge,
        labels: &["switch", "version"],
        help: "1, with the name of the switch and its version.",
        values: |it, to| to.add(&[&it.name, it.version], 1),
    },
    Metric {
        name: "millstream_switch_communicators",
        kind: Kind::Gauge,
        labels: &[],
        help: "Nodes of trees that the switch serves.",
        values: |it, to| to.add(&[], it.communicators.len()),
    },
    counter("millstream_switch_packets_sent_total", "Packets that it has sent.", |it, to| {
        to.add(&[], it.packets_sent);
    }),
    counter(
        "millstream_switch_packets_received_total",
        "Packets that it has received.",
        |it, to| {
            to.add(&[], it.packets_received);
        },
    ),
    counter(
        "millstream_switch_packets_dropped_total",
        "Packets that it has dropped, since they were wrong, for nobody, or came at a wrong time.",
        |it, to| to.add(&[], it.packets_dropped),
    ),
    counter(
        "millstream_switch_payload_sent_bytes_total",
        "Bytes of payload that it has sent, those of repetitions among them.",
        |it, to| to.add(&[], it.payload_bytes_sent),
    ),
    counter(
        "millstream_switch_payload_received_bytes_total",
        "Bytes of payload that it has received in order.",
        |it, to| to.add(&[], it.payload_bytes_received),
    ),
    counter(
        "millstream_switch_retransmissions_total",
        "How often it went back to send again.",
        |it, to| to.add(&[], it.retransmissions),
    ),
    counter(
        "millstream_switch_timeouts_total",
        "How often it did so since nobody answered.",
        |it, to| to.add(&[], it.timeouts),
    ),
    Metric {
        name: "millstream_switch_collectives_total",
        kind: Kind::Counter,
        labels: &["communicator"],
        help: "Collectives that a node has taken part in.",
        values: |it, to| {
            for node in &it.communicators {
                to.add(&[&node.communicator.to_string()], node.collectives);
            }
        },
    },
    edge(
        "millstream_switch_edge_packets_sent_total",
        "Packets that it has sent on an edge of a tree.",
        |it, to| edges(it, to, |port| port.packets_sent),
    ),
    edge(
        "millstream_switch_edge_packets_received_total",
        "Packets that it has received there.",
        |it, to| edges(it, to, |port| port.packets_received),
    ),
    edge(
        "millstream_switch_edge_payload_sent_bytes_total",
        "Bytes of payload that it has sent there, those of repetitions among them.",
        |it, to| edges(it, to, |port| port.payload_bytes_sent),
    ),
    edge(
        "millstream_switch_edge_payload_received_bytes_total",
        "Bytes of payload that it has received there in order.",
        |it, to| edges(it, to, |port| port.payload_bytes_received),
    ),
    edge(
        "millstream_switch_edge_retransmissions_total",
        "How often it went back to send again there.",
        |it, to| edges(it, to, |port| port.retransmissions),
    ),
];

fn edges(sample: &Sample, to: &mut Samples<'_>, value: fn(&PortCounters) -> u64) {
    for node in &sample.communicators {
        let number = node.communicator.to_string();
        for port in &node.ports {
            to.add(&[&number, &edge_name(port.rank)], value(port));
        }
    }
}
