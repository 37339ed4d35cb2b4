//! Metrics as text that Prometheus reads (its text exposition format, version 0.0.4).

use std::fmt::{Display, Write as _};

use millstream_net::exposition::add_sample;

use super::{DeviceMetrics, Histogram, Metrics, RailMetrics, RailStatus, TransportMetrics};

/// What a metric is to Prometheus.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MetricKind {
    /// It only rises, as long as the process runs.
    Counter,
    /// It rises and falls.
    Gauge,
    /// How often durations fell into each of some buckets.
    Histogram,
}

impl MetricKind {
    /// Its name there.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A metric that [`Metrics::to_prometheus`] prints.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// What it is.
    pub kind: MetricKind,
    /// What tells its values from each other.
    pub labels: &'static [&'static str],
    /// What it means.
    pub help: &'static str,
    values: Values,
}

/// Writes the samples of a metric.
type Values = fn(&Metrics, &mut Samples<'_>);

/// The samples of one metric.
struct Samples<'a> {
    metric: &'a Metric,
    text: &'a mut String,
}

const RAIL: &[&str] = &["transport", "peer", "local_nic", "peer_nic"];

const RAIL_OPCODE: &[&str] = &["transport", "peer", "local_nic", "peer_nic", "opcode"];

const RAIL_STATE: &[&str] = &["transport", "peer", "local_nic", "peer_nic", "state"];

const fn metric(
    kind: MetricKind,
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
    values: Values,
) -> Metric {
    Metric { name, kind, labels, help, values }
}

impl Metric {
    /// All that there are, in the order in which they are printed.
    pub const ALL: &[Self] = {
        use MetricKind::{Counter, Gauge, Histogram};
        &[
            metric(
                Gauge,
                "millstream_engine_info",
                &["segment", "version"],
                "1, with the name of the engine's segment and its version.",
                |metrics, to| to.add(&[&metrics.segment, env!("CARGO_PKG_VERSION")], 1),
            ),
            metric(
                Gauge,
                "millstream_engine_start_time_seconds",
                &[],
                "When the engine was started, in seconds since 1970.",
                |metrics, to| to.add(&[], metrics.started_at_s),
            ),
            metric(
                Gauge,
                "millstream_open_segments",
                &[],
                "Segments of peers that are open.",
                |metrics, to| to.add(&[], metrics.open_segments),
            ),
            metric(
                Gauge,
                "millstream_memory_registrations",
                &[],
                "Pieces of memory that are registered.",
                |metrics, to| to.add(&[], metrics.registrations),
            ),
            metric(
                Gauge,
                "millstream_memory_registered_bytes",
                &[],
                "Bytes of memory that are registered.",
                |metrics, to| to.add(&[], metrics.registered_bytes),
            ),
            metric(
                Counter,
                "millstream_requests_submitted_total",
                &["transport"],
                "Requests that were submitted.",
                |metrics, to| to.transports(metrics, |it| it.requests.submitted),
            ),
            metric(
                Counter,
                "millstream_requests_total",
                &["transport", "state"],
                "Requests that have ended, by their final state.",
                |metrics, to| {
                    for TransportMetrics { transport, requests, .. } in &metrics.transports {
                        to.add(&[transport, "completed"], requests.completed);
                        to.add(&[transport, "failed"], requests.failed);
                        to.add(&[transport, "canceled"], requests.canceled);
                        to.add(&[transport, "timeout"], requests.timeout);
                    }
                },
            ),
            metric(
                Counter,
                "millstream_request_failovers_total",
                &["transport"],
                "Requests that had to leave this transport, and went on over another one.",
                |metrics, to| to.transports(metrics, |it| it.requests.moved),
            ),
            metric(
                Gauge,
                "millstream_requests_in_flight",
                &["transport"],
                "Requests that are not over.",
                |metrics, to| to.transports(metrics, |it| it.requests.in_flight),
            ),
            metric(
                Counter,
                "millstream_request_bytes_total",
                &["transport", "opcode"],
                "Bytes that have arrived, of requests that have ended.",
                |metrics, to| {
                    for TransportMetrics { transport, read_bytes, written_bytes, .. } in
                        &metrics.transports
                    {
                        to.add(&[transport, "read"], read_bytes);
                        to.add(&[transport, "write"], written_bytes);
                    }
                },
            ),
            metric(
                Counter,
                "millstream_retransmissions_total",
                &["transport"],
                "How often devices have sent or asked for packets again.",
                |metrics, to| to.transports(metrics, |it| it.retransmissions),
            ),
            metric(
                Gauge,
                "millstream_connections_served",
                &["transport"],
                "Connections of peers that are served.",
                |metrics, to| to.transports(metrics, |it| it.connections_served),
            ),
            metric(
                Counter,
                "millstream_busy_polls_total",
                &["transport"],
                "How often threads that waited for connections of tcp looked for a while before they slept, or in place of that.",
                |metrics, to| to.transports(metrics, |it| it.busy_polls),
            ),
            metric(
                Counter,
                "millstream_sleeps_total",
                &["transport"],
                "How often they slept, or would have if nothing had come by then.",
                |metrics, to| to.transports(metrics, |it| it.sleeps),
            ),
            metric(
                Histogram,
                "millstream_request_duration_seconds",
                &["transport"],
                "How long requests took that were completed, of those that were timed.",
                |metrics, to| {
                    for TransportMetrics { transport, stages, .. } in &metrics.transports {
                        to.histogram(&[transport], &stages.all);
                    }
                },
            ),
            metric(
                Histogram,
                "millstream_request_stage_duration_seconds",
                &["transport", "stage"],
                "How long the stages of the same requests took: queued until the first slice was posted, transferring until \
                 the last byte was acknowledged, completing until the state said so.",
                |metrics, to| {
                    for TransportMetrics { transport, stages, .. } in &metrics.transports {
                        to.histogram(&[transport, "queued"], &stages.queued);
                        to.histogram(&[transport, "transferring"], &stages.transferring);
                        to.histogram(&[transport, "completing"], &stages.completing);
                    }
                },
            ),
            metric(
                Gauge,
                "millstream_rail_state",
                RAIL_STATE,
                "1 for the state of a rail, and 0 for the others.",
                |metrics, to| {
                    for rail in &metrics.rails {
                        for state in RailStatus::ALL {
                            let [transport, peer, local_nic, peer_nic] = names(rail);
                            let labels = [transport, peer, local_nic, peer_nic, state.name()];
                            to.add(&labels, u8::from(rail.state == state));
                        }
                    }
                },
            ),
            metric(
                Counter,
                "millstream_rail_bytes_total",
                RAIL_OPCODE,
                "Bytes of slices that were done.",
                |metrics, to| {
                    for rail in &metrics.rails {
                        let [transport, peer, local_nic, peer_nic] = names(rail);
                        to.add(&[transport, peer, local_nic, peer_nic, "read"], rail.read_bytes);
                        let labels = [transport, peer, local_nic, peer_nic, "write"];
                        to.add(&labels, rail.written_bytes);
                    }
                },
            ),
            metric(
                Counter,
                "millstream_rail_posted_bytes_total",
                RAIL,
                "Bytes of slices that were posted, each time anew.",
                |metrics, to| to.rails(metrics, |rail| Some(rail.posted_bytes)),
            ),
            metric(
                Counter,
                "millstream_rail_slices_posted_total",
                RAIL,
                "Slices that were posted, each time anew.",
                |metrics, to| to.rails(metrics, |rail| Some(rail.posted_slices)),
            ),
            metric(
                Counter,
                "millstream_rail_slices_completed_total",
                RAIL,
                "Slices that were done.",
                |metrics, to| to.rails(metrics, |rail| Some(rail.completed_slices)),
            ),
            metric(
                Counter,
                "millstream_rail_slices_failed_total",
                RAIL,
                "Slices that were posted and ended otherwise than done.",
                |metrics, to| to.rails(metrics, |rail| Some(rail.failed_slices)),
            ),
            metric(
                Counter,
                "millstream_rail_failovers_total",
                RAIL,
                "Slices that were not done on this rail, and posted on another one next.",
                |metrics, to| to.rails(metrics, |rail| Some(rail.moved_slices)),
            ),
            metric(
                Gauge,
                "millstream_rail_slices_in_flight",
                RAIL,
                "Slices that are posted, or wait for a fence.",
                |metrics, to| to.rails(metrics, |rail| Some(rail.slices_in_flight)),
            ),
            metric(
                Gauge,
                "millstream_rail_in_flight_bytes",
                RAIL,
                "Bytes of slices that are posted, or wait for a fence.",
                |metrics, to| to.rails(metrics, |rail| Some(rail.bytes_in_flight)),
            ),
            metric(
                Gauge,
                "millstream_rail_in_flight_limit_bytes",
                RAIL,
                "Bytes that may be in flight, by what was measured.",
                |metrics, to| to.rails(metrics, |rail| rail.limit_bytes),
            ),
            metric(
                Gauge,
                "millstream_rail_peak_rate_bytes_per_second",
                RAIL,
                "The highest rate that was measured in the last 5 to 10 seconds.",
                |metrics, to| to.rails(metrics, |rail| rail.peak_rate_bytes_per_s),
            ),
            metric(
                Gauge,
                "millstream_rail_smallest_round_trip_seconds",
                RAIL,
                "The shortest time from posting a slice to its completion in the last 5 to 10 seconds.",
                |metrics, to| to.rails(metrics, |rail| rail.smallest_round_trip_s),
            ),
            metric(
                Gauge,
                "millstream_rail_oldest_unacknowledged_seconds",
                RAIL,
                "How long the oldest slice in flight has waited for its acknowledgement; nothing where none is.",
                |metrics, to| to.rails(metrics, |rail| rail.oldest_age_s),
            ),
            metric(
                Counter,
                "millstream_rail_connections_total",
                RAIL,
                "How often it was connected: all but the first are reconnections.",
                |metrics, to| to.rails(metrics, |rail| Some(rail.connections)),
            ),
            metric(
                Counter,
                "millstream_rail_failures_total",
                RAIL,
                "How often it could not be connected, broke or fell silent.",
                |metrics, to| to.rails(metrics, |rail| Some(rail.failures)),
            ),
            metric(
                Counter,
                "millstream_rail_pauses_total",
                RAIL,
                "How often it was paused since it failed too often.",
                |metrics, to| to.rails(metrics, |rail| Some(rail.pauses)),
            ),
            metric(
                Counter,
                "millstream_rail_fences_total",
                RAIL,
                "How often the peer was asked to confirm that nothing can arrive any more.",
                |metrics, to| to.rails(metrics, |rail| Some(rail.fences)),
            ),
            metric(
                Counter,
                "millstream_rail_fences_lost_total",
                RAIL,
                "How often that was needed and not confirmed, so that target ranges are undefined.",
                |metrics, to| to.rails(metrics, |rail| Some(rail.lost_fences)),
            ),
            metric(
                Counter,
                "millstream_device_packets_sent_total",
                &["device"],
                "Packets that an RDMA device has sent.",
                |metrics, to| to.devices(metrics, |device| device.packets_sent),
            ),
            metric(
                Counter,
                "millstream_device_packets_received_total",
                &["device"],
                "Packets that it has received.",
                |metrics, to| to.devices(metrics, |device| device.packets_received),
            ),
            metric(
                Counter,
                "millstream_device_packets_dropped_total",
                &["device"],
                "Packets that it has dropped, since they were wrong, for nobody, or came at a wrong time.",
                |metrics, to| to.devices(metrics, |device| device.packets_dropped),
            ),
            metric(
                Counter,
                "millstream_device_payload_sent_bytes_total",
                &["device"],
                "Bytes of payload that it has sent, those of repetitions among them.",
                |metrics, to| to.devices(metrics, |device| device.payload_bytes_sent),
            ),
            metric(
                Counter,
                "millstream_device_payload_received_bytes_total",
                &["device"],
                "Bytes of payload that it has received in order.",
                |metrics, to| to.devices(metrics, |device| device.payload_bytes_received),
            ),
            metric(
                Counter,
                "millstream_device_retransmissions_total",
                &["device"],
                "How often it went back to send again.",
                |metrics, to| to.devices(metrics, |device| device.retransmissions),
            ),
            metric(
                Counter,
                "millstream_device_timeouts_total",
                &["device"],
                "How often it did so since nobody answered.",
                |metrics, to| to.devices(metrics, |device| device.timeouts),
            ),
            metric(
                Counter,
                "millstream_device_congestion_notifications_total",
                &["device"],
                "Congestion notifications that it has received.",
                |metrics, to| to.devices(metrics, |device| device.congestion_notifications),
            ),
        ]
    };
}

impl Metrics {
    /// As text that Prometheus reads: [`Metric::ALL`].
    pub fn to_prometheus(&self) -> String {
        let mut text = String::new();
        for metric in Metric::ALL {
            let (name, kind) = (metric.name, metric.kind.name());
            // Writing to a string cannot fail.
            let _ = writeln!(text, "# HELP {name} {}\n# TYPE {name} {kind}", metric.help);
            (metric.values)(self, &mut Samples { metric, text: &mut text });
        }
        text
    }
}

fn names(rail: &RailMetrics) -> [&str; 4] {
    [&rail.transport, &rail.peer, &rail.local_nic, &rail.peer_nic]
}

impl Samples<'_> {
    fn add(&mut self, labels: &[&str], value: impl Display) {
        self.line("", labels, None, value);
    }

    fn line(&mut self, suffix: &str, labels: &[&str], bound: Option<&str>, value: impl Display) {
        let names = self.metric.labels;
        debug_assert_eq!(labels.len(), names.len());
        let pairs = names.iter().copied().zip(labels.iter().copied());
        let pairs = pairs.chain(bound.map(|bound| ("le", bound)));
        add_sample(self.text, format_args!("{}{suffix}", self.metric.name), pairs, value);
    }

    fn transports(&mut self, metrics: &Metrics, value: impl Fn(&TransportMetrics) -> u64) {
        for transport in &metrics.transports {
            self.add(&[&transport.transport], value(transport));
        }
    }

    fn rails<T: Display>(&mut self, metrics: &Metrics, value: impl Fn(&RailMetrics) -> Option<T>) {
        for rail in &metrics.rails {
            if let Some(value) = value(rail) {
                self.add(&names(rail), value);
            }
        }
    }

    fn devices(&mut self, metrics: &Metrics, value: impl Fn(&DeviceMetrics) -> u64) {
        for device in &metrics.devices {
            self.add(&[&device.device], value(device));
        }
    }

    /// Each bucket has what those before it have, too.
    fn histogram(&mut self, labels: &[&str], histogram: &Histogram) {
        let mut below = 0;
        let mut counts = histogram.counts.iter();
        for bound_ns in Histogram::bounds_ns() {
            below += counts.next().unwrap_or(&0);
            let bound = (bound_ns as f64 / 1e9).to_string();
            self.line("_bucket", labels, Some(&bound), below);
        }
        let count = histogram.count();
        self.line("_bucket", labels, Some("+Inf"), count);
        self.line("_sum", labels, None, histogram.sum_ns as f64 / 1e9);
        self.line("_count", labels, None, count);
    }
}
