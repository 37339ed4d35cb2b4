//! The figures of one run, by name, whatever fields that build of `millstream` reports.

use serde_json::Value;

/// One figure of one run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Figure {
    /// What was measured: `WRITE 4 KiB x 128`, `plain UDP`.
    pub(super) of: String,
    /// `GB/s`.
    pub(super) name: &'static str,
    pub(super) value: f64,
}

/// Fields of a bandwidth, and what they are called here.
const BANDWIDTH: [(&str, &str); 7] = [
    ("gb_per_s", "GB/s"),
    ("ratio_to_udp", "of UDP's GB/s"),
    ("cpu_s_per_gb", "CPU s/GB"),
    (CPU_RATIO, "of UDP's CPU s/GB"),
    ("retransmissions", "retransmissions"),
    ("system_calls_per_packet", "system calls/packet"),
    ("packets_per_gb", "packets/GB"),
];
/// A field that we add.
const CPU_RATIO: &str = "cpu ratio to udp";
const MESSAGES: [(&str, &str); 2] = [
    ("sent_messages_per_packet", "messages sent/packet"),
    ("received_messages_per_packet", "messages received/packet"),
];
const STREAMS: [(&str, &str); 3] =
    [("udp_stream", "plain UDP"), ("tcp_stream", "TCP"), ("memory_copy", "memory copy")];

/// All of a report of `bench rdma --json`, in its order.
pub(super) fn of_report(report: &Value) -> Vec<Figure> {
    let mut figures = Vec::new();
    let mut add = |of: &str, name: &'static str, value: &Value| {
        if let Some(value) = value.as_f64() {
            figures.push(Figure { of: of.to_owned(), name, value });
        }
    };
    let udp_cpu = &report["udp_stream"]["cpu_s_per_gb"];
    for one in items(&report["bandwidth"]) {
        let of = cell(one);
        for (field, name) in BANDWIDTH.into_iter().chain(MESSAGES) {
            match field {
                CPU_RATIO => add(&of, name, &ratio(&one["cpu_s_per_gb"], udp_cpu)),
                _ => add(&of, name, &one[field]),
            }
        }
    }
    for one in items(&report["latency"]) {
        let how = if one["busy_poll"] == true { "busy polling" } else { "asleep" };
        let of = format!("WRITE 4 KiB latency, {how}");
        add(&of, "p50 us", &one["write"]["p50_us"]);
        add(&of, "p99 us", &one["write"]["p99_us"]);
        add(&of, "of TCP's p50", &one["ratio_to_tcp"]);
        add(&of, "TCP's p50 us", &one["tcp_ping_pong"]["p50_us"]);
    }
    for (field, of) in STREAMS {
        add(of, "GB/s", &report[field]["gb_per_s"]);
        add(of, "CPU s/GB", &report[field]["cpu_s_per_gb"]);
    }
    figures
}

fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// An operation, a size, and how many are outstanding.
fn cell(one: &Value) -> String {
    let op = one["op"].as_str().unwrap_or("?").to_uppercase();
    let size = match one["size"].as_u64().unwrap_or(0) {
        size if size > 0 && size % (1 << 20) == 0 => format!("{} MiB", size >> 20),
        size if size > 0 && size % (1 << 10) == 0 => format!("{} KiB", size >> 10),
        size => format!("{size} B"),
    };
    format!("{op} {size} x {}", one["depth"])
}

fn ratio(figure: &Value, of: &Value) -> Value {
    match (figure.as_f64(), of.as_f64()) {
        (Some(figure), Some(of)) if of > 0.0 => Value::from(figure / of),
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_figure_has_a_name() {
        let report = json!({
            "bandwidth": [{
                "op": "write", "size": 4096, "depth": 128, "gb_per_s": 1.5, "cpu_s_per_gb": 0.6,
                "ratio_to_udp": 0.5, "retransmissions": 7, "system_calls_per_packet": 0.25,
            }],
            "latency": [
                { "busy_poll": true, "ratio_to_tcp": 1.5, "write": { "p50_us": 9.0 } },
            ],
            "udp_stream": { "gb_per_s": 3.0, "cpu_s_per_gb": 0.4 },
            "unknown": 1,
        });
        let is = |of: &str, name, value| Figure { of: of.to_owned(), name, value };
        let (write, latency) = ("WRITE 4 KiB x 128", "WRITE 4 KiB latency, busy polling");
        let expected = [
            is(write, "GB/s", 1.5),
            is(write, "of UDP's GB/s", 0.5),
            is(write, "CPU s/GB", 0.6),
            is(write, "of UDP's CPU s/GB", 0.6 / 0.4),
            is(write, "retransmissions", 7.0),
            is(write, "system calls/packet", 0.25),
            is(latency, "p50 us", 9.0),
            is(latency, "of TCP's p50", 1.5),
            is("plain UDP", "GB/s", 3.0),
            is("plain UDP", "CPU s/GB", 0.4),
        ];
        assert_eq!(of_report(&report), expected);
        assert_eq!(of_report(&json!({})), []);
    }

    #[test]
    fn cells_name_sizes_as_the_bench_does() {
        for (size, text) in [(1000, "1000 B"), (65_536, "64 KiB"), (1 << 20, "1 MiB")] {
            let one = json!({ "op": "read", "size": size, "depth": 4 });
            assert_eq!(cell(&one), format!("READ {text} x 4"));
        }
    }
}
