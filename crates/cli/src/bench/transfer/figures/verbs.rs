//! The engine beside the verbs that it uses: WRITEs of one engine to another one of this process, and of
//! one soft device to another one.
//!
//! Both have each end on a processor of its own: where the scheduler puts the ends on one or on two, a WRITE takes
//! twice as long in one case, and threads that are begun anew are put elsewhere than those that wait. And the ends
//! of both wait in one way: asleep, as they do by default, or looking for what comes without a pause.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use millstream_net::affinity;
use millstream_transfer::{Buffer, TransferEngine};
use millstream_verbs::SoftConfig;

use super::super::row::{self, Shape};
use super::super::{Operation, allocate};
use super::report::Aim;
use super::{COLD, LEAST, SHORT, SHORT_TURNS, TURNS, median, median_of};
use crate::bench::rdma::RawWrites;
use crate::engine::{self, Opened, Started};
use crate::memory::MemoryKind;
use crate::reach::Reach;

/// Requests of a batch where rates are compared.
const BATCH: u32 = 128;

/// How those who wait do it, and for how long they look before they sleep, if that is said.
const WAYS: [(&str, Option<&str>); 3] =
    [("asleep", Some("0s")), ("by default", None), ("busy polling", Some("1s"))];

pub(super) fn measure(reach: &Reach, turn: Duration, aims: &mut Vec<Aim>) -> anyhow::Result<()> {
    let processors = affinity::processors().context("cannot ask which processors there are")?;
    let (near, far) = (processors[0], processors.get(1).copied());
    // With one processor, who looks without a pause keeps the other end from working.
    let ways = if far.is_some() { &WAYS[..] } else { &WAYS[..1] };
    for (index, &(way, busy_poll)) in ways.iter().enumerate() {
        let settings = match busy_poll {
            Some(longest) => reach.settings.with(format!("soft.busy_poll={longest}")),
            None => reach.settings.clone(),
        };
        let protocol = "rdma:soft".to_owned();
        let reach = Reach { protocol, settings, ..reach.clone() };
        let ends = Ends::open(&reach, [near, far.unwrap_or(near)])?;
        ends.measure(turn, (index == 0, way), aims)?;
    }
    Ok(())
}

/// Both pairs.
struct Ends {
    buffer: Buffer,
    opened: Opened,
    _remote: Buffer,
    _target: Arc<TransferEngine>,
    raw: RawWrites,
    /// Where who posts runs.
    near: usize,
}

impl Ends {
    fn open(reach: &Reach, processors: [usize; 2]) -> anyhow::Result<Self> {
        let settings = reach.settings.load()?;
        let mut soft: SoftConfig = settings.rdma(&[]).soft;
        soft.segmentation_offload &= !reach.no_segmentation_offload;
        let raw =
            RawWrites::new(COLD, processors, &soft).context("cannot open two soft devices")?;
        let options = engine::Options {
            settings,
            metadata: &reach.metadata,
            segment_name: None,
            no_segmentation_offload: reach.no_segmentation_offload,
            patience: None,
            relays: &[],
        };
        let loopback = std::net::Ipv4Addr::LOCALHOST.into();
        let protocols = [engine::protocol(&reach.protocol)?];
        let [near, far] = processors;
        let pinned = affinity::pin(far).context("cannot pin a thread")?;
        let Started { engine: target, .. } = engine::start(&protocols, &[], loopback, &options)?;
        let remote = target.allocate_buffer(COLD, "*", true)?;
        drop(pinned);
        let _pinned = affinity::pin(near).context("cannot pin a thread")?;
        let opened = engine::open(reach, target.name())?;
        let buffer = allocate(&opened, COLD, MemoryKind::Host)?;
        Ok(Self { buffer, opened, _remote: remote, _target: target, raw, near })
    }

    /// Single WRITEs, and rates if so asked, by turns.
    fn measure(
        &self,
        turn: Duration,
        (with_rates, way): (bool, &str),
        aims: &mut Vec<Aim>,
    ) -> anyhow::Result<()> {
        let Self { raw, opened, buffer, .. } = self;
        // Threads that are begun here stay here, too.
        let _pinned = affinity::pin(self.near).context("cannot pin a thread")?;
        let (mut rates, mut latencies) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        let shape = |block_size, batch_size, duration| Shape {
            op: Operation::Write,
            block_size,
            batch_size,
            threads: 1,
            duration,
        };
        let short = (turn / SHORT).max(LEAST);
        let (rate, latency) = (shape(64 << 10, BATCH, turn), shape(4 << 10, 1, short));
        // One more of each, which opens windows.
        if with_rates {
            for round in 0..=TURNS {
                let plain = raw.measure(64 << 10, BATCH as usize, turn)?;
                let ours = row::measure(opened, buffer, COLD, &rate)?;
                if round > 0 {
                    rates[0].push(plain.bytes as f64 / 1e9 / plain.elapsed.as_secs_f64());
                    rates[1].push(ours.bytes as f64 / 1e9 / ours.elapsed.as_secs_f64());
                }
            }
        }
        for round in 0..=SHORT_TURNS {
            let plain = raw.measure(4 << 10, 1, short)?;
            let ours = row::measure(opened, buffer, COLD, &latency)?;
            if round > 0 {
                latencies[0].push(plain.latencies.value_at_quantile(0.5) as f64 / 1e3);
                latencies[1].push(ours.latencies.value_at_quantile(0.5) as f64 / 1e3);
            }
        }
        if with_rates {
            let more = median_of(&rates[0], &rates[1], |plain, ours| (plain / ours - 1.0) * 100.0);
            let [plain, ours] = rates.map(|mut all| median(&mut all));
            let what = format!(
                "engine over plain verbs, WRITE 64 KiB x {BATCH}, more time in % ({ours:.2} and \
                 {plain:.2} GB/s)"
            );
            aims.push(Aim::at_most(what, more, 10.0));
        }
        let more = median_of(&latencies[1], &latencies[0], |ours, plain| ours - plain);
        let [plain, ours] = latencies.map(|mut all| median(&mut all));
        let what = format!(
            "engine over plain verbs, one WRITE of 4 KiB, {way}, us more (p50 {ours:.1} and {plain:.1})"
        );
        aims.push(Aim::at_most(what, more, 3.0));
        Ok(())
    }
}
