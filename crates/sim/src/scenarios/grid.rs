//! Throughput by loss and window, as a table. A change in how the requester recovers or paces
//! itself shows as a change of the table.

use core::fmt::Write;
use core::time::Duration;

use millstream_wire::Mtu;

use super::transfer::{Transfer, TransferOptions};
use super::{Outputs, Parameters, Report, ScenarioError};
use crate::plan::Kind;
use crate::{ConnectionOptions, LinkOptions, Probability};

/// Packets lost, in a thousand.
const LOSSES_PER_MILLE: [u32; 7] = [0, 1, 3, 10, 30, 100, 200];
/// Packets of 4096 bytes in flight.
const WINDOWS: [u32; 5] = [1, 4, 16, 64, 256];
/// Each cell is the mean of this many seeds.
const SEEDS: u64 = 3;
const MESSAGES: usize = 48;
const MESSAGE_BYTES: u32 = 64 << 10;
/// Sent faster than they can be lost: 10 Gbit/s and 100 us there and back make 30 packets.
const RATE: u64 = 10_000_000_000;
const LATENCY: Duration = Duration::from_micros(50);

/// The scenario `grid`. Of the parameters only the seed counts.
pub(super) fn scenario(
    parameters: &Parameters,
    outputs: &Outputs<'_>,
) -> Result<Report, ScenarioError> {
    if outputs.pcap.is_some() || outputs.log.is_some() {
        return Err(ScenarioError::NoOutput("grid"));
    }
    let what = format!(
        "one connection, {MESSAGES} messages of {} KiB, path MTU 4096, {} Gbit/s, {} us each way",
        MESSAGE_BYTES >> 10,
        RATE / 1_000_000_000,
        LATENCY.as_micros()
    );
    let mut report = Report::of_many("grid", parameters.seed, what);
    let table = [Kind::Write, Kind::Read].map(|kind| table(&mut report, kind));
    report.table = Some(table.concat());
    Ok(report)
}

fn table(report: &mut Report, kind: Kind) -> String {
    let mut table = format!("\n{kind:?}: Mbit/s of virtual time\n{:>10}", "loss");
    for window in WINDOWS {
        // Writing to a string does not fail.
        let _ = write!(table, "{:>12}", format!("window {window}"));
    }
    table.push('\n');
    for per_mille in LOSSES_PER_MILLE {
        let loss = Probability::per_mille(per_mille);
        let _ = write!(table, "{:>10}", loss.to_string());
        for window in WINDOWS {
            let throughput = cell(report, kind, loss, window);
            let _ = write!(table, "{:>12}", throughput / 1_000_000);
        }
        table.push('\n');
    }
    table
}

/// Mean throughput in bits per second.
fn cell(report: &mut Report, kind: Kind, loss: Probability, window: u32) -> u64 {
    let mut throughput = 0;
    for seed in 0..SEEDS {
        let options = TransferOptions {
            seed: report.seed.wrapping_mul(1000).wrapping_add(seed),
            operations: MESSAGES,
            kinds: vec![kind],
            max_length: MESSAGE_BYTES,
            uniform: true,
            both_ways: false,
            link: LinkOptions::new(RATE, LATENCY).loss(loss),
            connection: ConnectionOptions {
                path_mtu: Mtu::B4096,
                // Hours of silence, more than a run lasts: at a loss of 20 % a third of all round trips fail, so
                // any small number of them in a row comes up among enough seeds (2868903995839110128 had
                // eight, after the timer had backed off to its limit).
                timeout: 31,
                reads: 16,
                ..ConnectionOptions::default()
            },
            max_window: window,
            time_limit: Duration::from_secs(3600),
            ..TransferOptions::default()
        };
        let mut transfer = Transfer::new(&options);
        transfer.run();
        transfer.expect_no_failure();
        let one = transfer.report("grid", options.seed);
        throughput += one.throughput() / SEEDS;
        report.absorb(one);
    }
    throughput
}
