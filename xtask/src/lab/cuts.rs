//! What the cut of one of four links costs, and how soon it is made up for when it is restored.
//!
//! Rates are those of the counters of the receiving NICs, over 100 ms, in parts of what one link
//! carried before the cut.

use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use millstream_lab::Cut;
use serde_json::{Value, json};

use super::bench::{Process, Site};
use super::figures::{self, Sample};

/// How often the counters are read.
const INTERVAL: Duration = Duration::from_millis(20);
/// The time over which a rate is taken: some packets of each link, and less than what is asked about.
const WINDOW: Duration = Duration::from_millis(100);
/// What is copied: all of the node's buffer.
const COPY: u64 = 256 << 20;
/// So much of the copy has come when the link is cut.
const CUT_AFTER: u64 = 64 << 20;
/// All of the copy has come when no more than this follows: the process goes on for a while, with its file, and says that
/// it goes.
const AFTERWARDS: u64 = 64 << 10;

/// Of a stream: before the cut, while it lasts, and after it.
const BEFORE: Duration = Duration::from_secs(2);
const CUT: Duration = Duration::from_secs(6);
const AFTER: Duration = Duration::from_secs(36);

/// The rates that count as recovered, in parts of one link's.
const WITHOUT_ONE: f64 = 2.7;
const WITH_ALL: f64 = 3.6;

/// Cuts a link for good in the middle of a copy of noise, and compares the bytes.
pub(super) fn copy(mut site: Site, op: &str, how: Cut) -> Result<Value> {
    let file = |name: &str| site.lab.folder().join(name);
    let (noise, back) = (file("noise"), file("back"));
    let mut random = std::fs::File::open("/dev/urandom").context("/dev/urandom")?.take(COPY);
    let made = std::fs::File::create(&noise).and_then(|mut to| std::io::copy(&mut random, &mut to));
    made.context("cannot make a file to copy")?;
    let mut put = site.command(&["put", "--timeout=60s"])?;
    put.arg(&noise);
    let mut get = site.command(&["get", "--timeout=60s", &format!("--length={COPY}")])?;
    get.arg(&back);
    let at_initiator = op == "read";
    if at_initiator {
        crate::process::output(&mut put)?;
    }
    let cut_one = if at_initiator { &mut get } else { &mut put };
    cut_one.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut copy = Process(cut_one.spawn().context("cannot start a copy")?);
    let receiver = if at_initiator { copy.0.id() } else { site.node.0.id() };
    let start = Instant::now();
    let mut samples: Vec<Sample> = Vec::new();
    let mut cut_at = None;
    let status = loop {
        if let Some(status) = copy.0.try_wait().context("cannot wait for a copy")? {
            break status;
        }
        if let Some(bytes) = received(receiver) {
            add(&mut samples, start.elapsed(), bytes);
            if cut_at.is_none() && bytes - samples[0].bytes >= CUT_AFTER {
                site.lab.cut("a", "eth3", how)?;
                cut_at = Some(start.elapsed());
            }
        }
        std::thread::sleep(INTERVAL);
    };
    let took = start.elapsed();
    let cut_at = cut_at.context("the copy ended before the cut")?;
    if !status.success() {
        let mut why = String::new();
        let stderr = copy.0.stderr.as_mut().context("a copy's errors")?;
        stderr.read_to_string(&mut why).context("a copy's errors")?;
        bail!("a link was cut ({op}, {how:?}), and the copy failed after {took:?}: {why}");
    }
    site.lab.restore("a", "eth3")?;
    if !at_initiator {
        crate::process::output(&mut get)?;
    }
    ensure!(same(&noise, &back)?, "{op}, {how:?}: wrong bytes");
    let come = figures::all_but(&samples, AFTERWARDS).unwrap_or(took);
    let rates = figures::rates(&samples, WINDOW);
    Ok(json!({
        "what": "copy", "op": op, "how": how, "bytes": COPY, "identical": true,
        "seconds": took.as_secs_f64(),
        "after_cut": recovery(&rates, cut_at, come, WITHOUT_ONE, one(&rates, cut_at)),
    }))
}

/// Cuts a link for a while in the middle of batches, all of one process.
pub(super) fn stream(mut site: Site, op: &str, how: Cut) -> Result<Value> {
    let mut bench = site.command(&["bench", "transfer", "--op", op, "--json"])?;
    bench.args(["--block-size=1MiB", "--batch-size=16", "--threads=2", "--duration"]);
    bench.arg(format!("{}s", (BEFORE + CUT + AFTER).as_secs() + 1));
    bench.stdout(Stdio::null()).stderr(Stdio::inherit());
    let mut stream = Process(bench.spawn().context("cannot start the batches")?);
    let receiver = if op == "read" { stream.0.id() } else { site.node.0.id() };
    let mut samples: Vec<Sample> = Vec::new();
    let (mut cut_at, mut restored_at) = (None, None);
    let start = Instant::now();
    // It allocates and connects first.
    let mut begun = None;
    loop {
        let now = start.elapsed();
        if let Some(status) = stream.0.try_wait().context("cannot wait for the batches")? {
            bail!("a link was cut ({op}, {how:?}), and batches failed after {now:?}: {status}");
        }
        if let Some(bytes) = received(receiver) {
            add(&mut samples, now, bytes);
            if begun.is_none() && bytes - samples[0].bytes >= 1 << 20 {
                begun = Some(now);
            }
        }
        let since = begun.map_or(Duration::ZERO, |begun| now - begun);
        if cut_at.is_none() && since >= BEFORE {
            site.lab.cut("a", "eth3", how)?;
            cut_at = Some(start.elapsed());
        }
        if restored_at.is_none() && since >= BEFORE + CUT {
            site.lab.restore("a", "eth3")?;
            restored_at = Some(start.elapsed());
        }
        if since >= BEFORE + CUT + AFTER {
            break;
        }
        ensure!(now < BEFORE + CUT + AFTER + AFTER, "no batches came ({op}, {how:?})");
        std::thread::sleep(INTERVAL);
    }
    let (Some(cut_at), Some(restored_at)) = (cut_at, restored_at) else {
        bail!("the link was never cut");
    };
    let rates = figures::rates(&samples, WINDOW);
    let one = one(&rates, cut_at);
    Ok(json!({
        "what": "stream", "op": op, "how": how,
        "after_cut": recovery(&rates, cut_at, restored_at, WITHOUT_ONE, one),
        "after_restore": recovery(&rates, restored_at, start.elapsed(), WITH_ALL, one),
    }))
}

/// Adds a sample. Before a process is at its host it is at another, with other counters.
pub(super) fn add(samples: &mut Vec<Sample>, at: Duration, bytes: u64) {
    if samples.last().is_some_and(|last| bytes < last.bytes) {
        samples.clear();
    }
    samples.push(Sample { at, bytes });
}

/// A quarter of what four links carried in the second before the cut, Mbit/s.
fn one(rates: &[(Duration, f64)], cut_at: Duration) -> f64 {
    let from = cut_at.saturating_sub(Duration::from_secs(1)).max(Duration::from_millis(200));
    figures::mean(rates, from, cut_at) / 4.0
}

/// How the rate comes back to so many times one link's.
fn recovery(rates: &[(Duration, f64)], from: Duration, to: Duration, part: f64, one: f64) -> Value {
    let ms = |at: Duration| (at - from).as_millis() as u64;
    let below = |(at, rate): &&(Duration, f64)| (from..to).contains(at) && *rate < part * one;
    json!({
        "reached": part,
        "one_link_mbit_per_s": one,
        "mean_mbit_per_s": figures::mean(rates, from, to),
        "mean_ratio_to_one": figures::mean(rates, from, to) / one,
        "ms_to_reach": figures::first_at(rates, WINDOW, (from, to), part * one).map(ms),
        "windows_below": rates.iter().filter(below).count(),
        "ms_to_last_below": rates.iter().rfind(below).map(|(at, _)| ms(*at)),
        // What it was every 100 ms of the first two seconds.
        "ratios": (1..=20)
            .filter_map(|step| {
                let at = from + Duration::from_millis(100 * step);
                rates.iter().find(|(time, _)| *time >= at && *time < to)
            })
            .map(|(_, rate)| (100.0 * rate / one).round() / 100.0)
            .collect::<Vec<_>>(),
    })
}

fn same(one: &Path, other: &Path) -> Result<bool> {
    let read = |path: &Path| std::fs::read(path).with_context(|| format!("{}", path.display()));
    Ok(read(one)? == read(other)?)
}

/// Bytes that all NICs of the host of a process have received.
pub(super) fn received(process: u32) -> Option<u64> {
    let table = std::fs::read_to_string(format!("/proc/{process}/net/dev")).ok()?;
    Some(figures::received(&table))
}
