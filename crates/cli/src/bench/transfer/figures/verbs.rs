//! The engine beside the verbs that it uses: WRITEs of one engine to another one of this process, and of
//! one soft device to another one.

use std::time::Duration;

use anyhow::Context;

use super::super::row::{self, Shape};
use super::super::{Operation, allocate};
use super::report::Aim;
use super::{COLD, TURNS, median};
use crate::bench::rdma::RawWrites;
use crate::engine::{self, Started};
use crate::memory::MemoryKind;
use crate::reach::Reach;

/// Requests of a batch where rates are compared.
const BATCH: u32 = 128;

pub(super) fn measure(reach: &Reach, turn: Duration, aims: &mut Vec<Aim>) -> anyhow::Result<()> {
    let raw = RawWrites::new(COLD).context("cannot open two soft devices")?;
    let reach = Reach { protocol: "rdma:soft".to_owned(), ..reach.clone() };
    let options = engine::Options {
        settings: reach.settings.load()?,
        metadata: &reach.metadata,
        segment_name: None,
        no_segmentation_offload: reach.no_segmentation_offload,
        patience: None,
        relays: &[],
    };
    let loopback = std::net::Ipv4Addr::LOCALHOST.into();
    let protocols = [engine::protocol(&reach.protocol)?];
    let Started { engine: target, .. } = engine::start(&protocols, &[], loopback, &options)?;
    let _remote = target.allocate_buffer(COLD, "*", true)?;
    let opened = engine::open(&reach, target.name())?;
    let buffer = allocate(&opened, COLD, MemoryKind::Host)?;
    let (mut rates, mut latencies) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let shape = |block_size, batch_size| Shape {
        op: Operation::Write,
        block_size,
        batch_size,
        threads: 1,
        duration: turn,
    };
    let (rate, latency) = (shape(64 << 10, BATCH), shape(4 << 10, 1));
    // One more, which opens windows.
    for round in 0..=TURNS {
        let plain = raw.measure(64 << 10, BATCH as usize, turn)?;
        let ours = row::measure(&opened, &buffer, COLD, &rate)?;
        let plain_one = raw.measure(4 << 10, 1, turn)?;
        let our_one = row::measure(&opened, &buffer, COLD, &latency)?;
        if round == 0 {
            continue;
        }
        rates[0].push(plain.bytes as f64 / 1e9 / plain.elapsed.as_secs_f64());
        rates[1].push(ours.bytes as f64 / 1e9 / ours.elapsed.as_secs_f64());
        latencies[0].push(plain_one.latencies.value_at_quantile(0.5) as f64 / 1e3);
        latencies[1].push(our_one.latencies.value_at_quantile(0.5) as f64 / 1e3);
    }
    let [plain, ours] = rates.map(|mut all| median(&mut all));
    let what = format!(
        "engine over plain verbs, WRITE 64 KiB x {BATCH}, more time in % ({ours:.2} and {plain:.2} GB/s)"
    );
    aims.push(Aim::at_most(what, (plain / ours - 1.0) * 100.0, 10.0));
    let [plain, ours] = latencies.map(|mut all| median(&mut all));
    let what = format!(
        "engine over plain verbs, one WRITE of 4 KiB, us more (p50 {ours:.1} and {plain:.1})"
    );
    aims.push(Aim::at_most(what, ours - plain, 3.0));
    Ok(())
}
