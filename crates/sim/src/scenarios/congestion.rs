//! Many connections through one bottleneck, whose queue is as short as that of a switch's port,
//! with and without marks: what rate control is worth, as a table.

use core::fmt::Write;
use core::time::Duration;

use millstream_roce::Counters;
use millstream_wire::Mtu;

use super::transfer::{Transfer, TransferOptions};
use super::{Outputs, Parameters, Report, ScenarioError};
use crate::plan::Kind;
use crate::{ConnectionOptions, LinkOptions};

/// Connections that send at the same time.
const CONNECTIONS: [usize; 5] = [1, 2, 8, 32, 64];
/// Bytes that all of them send together.
const BYTES: usize = 32 << 20;
const MESSAGE_BYTES: usize = 64 << 10;
const RATE: u64 = 10_000_000_000;
const LATENCY: Duration = Duration::from_micros(10);
/// A switch's buffer, shared by its ports, leaves one about so much.
const QUEUE_BYTES: u64 = 256 << 10;
/// Where the marks begin: about two round trips.
const MARK_BYTES: u64 = 64 << 10;

/// The scenario `congestion`. Of the parameters only the seed counts.
pub(super) fn scenario(
    parameters: &Parameters,
    outputs: &Outputs<'_>,
) -> Result<Report, ScenarioError> {
    if outputs.pcap.is_some() || outputs.log.is_some() {
        return Err(ScenarioError::NoOutput("congestion"));
    }
    let what = format!(
        "{} MiB in WRITEs of {} KiB over connections that share one link: {} Gbit/s, {} us, a \
             queue of {} KiB, marks from {} KiB on",
        BYTES >> 20,
        MESSAGE_BYTES >> 10,
        RATE / 1_000_000_000,
        LATENCY.as_micros(),
        QUEUE_BYTES >> 10,
        MARK_BYTES >> 10
    );
    let mut report = Report::of_many("congestion", parameters.seed, what);
    let mut table = String::new();
    for marks in [false, true] {
        let title = if marks { "with marks" } else { "without marks" };
        // Writing to a string does not fail.
        let _ = writeln!(
            table,
            "\n{title}\n{:>12}{:>9}{:>12}{:>10}{:>15}{:>10}",
            "connections", "Mbit/s", "overflowed", "repeats", "notifications", "resent"
        );
        for connections in CONNECTIONS {
            row(&mut table, &mut report, connections, marks);
        }
    }
    report.table = Some(table);
    Ok(report)
}

fn row(table: &mut String, report: &mut Report, connections: usize, marks: bool) {
    let options = TransferOptions {
        seed: report.seed,
        connections,
        operations: BYTES / MESSAGE_BYTES / connections,
        kinds: vec![Kind::Write],
        max_length: MESSAGE_BYTES as u32,
        uniform: true,
        both_ways: false,
        link: LinkOptions {
            queue_bytes: QUEUE_BYTES,
            mark_bytes: marks.then_some(MARK_BYTES),
            ..LinkOptions::new(RATE, LATENCY)
        },
        connection: ConnectionOptions {
            path_mtu: Mtu::B4096,
            timeout: 18,
            ..ConnectionOptions::default()
        },
        time_limit: Duration::from_secs(60),
        ..TransferOptions::default()
    };
    let mut transfer = Transfer::new(&options);
    transfer.run();
    transfer.expect_no_failure();
    let one = transfer.report("congestion", options.seed);
    let counters: Counters = one.devices[0].1;
    let resent = counters.payload_bytes_sent.saturating_sub(one.bytes);
    let _ = writeln!(
        table,
        "{connections:>12}{:>9}{:>12}{:>10}{:>15}{:>8} %",
        one.throughput() / 1_000_000,
        one.network.overflowed,
        counters.retransmissions,
        counters.congestion_notifications,
        resent * 100 / one.bytes.max(1)
    );
    report.absorb(one);
}
