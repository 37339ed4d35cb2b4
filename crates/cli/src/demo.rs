//! `demo`: the main job end to end, as real processes on this machine.
//!
//! A file goes into a node's memory and back over RoCEv2; then four hosts sum their vectors in a
//! tree of three switches, in both modes. Every process is this binary with the command line that a user would type.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use millstream_collective::Collective;
use serde::Serialize;
use serde_json::Value;

use crate::cluster::{Cluster, Job, text};
use crate::collective::{self, Mode, Reduction, Report as HostReport, Work};
use crate::process::{self, Child, Scratch};
use crate::step::Step;
use crate::{output, status_pages, units};

const HOSTS: u32 = 4;

/// A root, and two switches below it with two hosts each.
const SWITCHES: u32 = 3;
const FAN_IN: u32 = 2;

/// Long enough for a slow machine; a process that is still busy then is stuck.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes of the file that are written and compared at a time.
const BLOCK: usize = 1 << 20;

/// Arguments of `demo`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Bytes of the file that is copied
    #[arg(long, value_name = "SIZE", value_parser = units::size, default_value = "256MiB", hide = true)]
    file_size: u64,
    /// Bytes of each host's vector
    #[arg(long, value_name = "SIZE", value_parser = units::size, default_value = "16MiB", hide = true)]
    vector_size: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What one process did.
#[derive(Serialize)]
struct Row {
    process: String,
    did: String,
    bytes: u64,
    seconds: f64,
    gb_per_s: f64,
}

#[derive(Serialize)]
struct Report {
    /// CRC-32C of the file, of what was put and of what came back.
    crc32c: [String; 3],
    /// Elements of all hosts' results that were checked, and how many of them were wrong.
    elements_checked: u64,
    wrong: u64,
    processes: Vec<Row>,
    seconds: f64,
}

/// Runs `demo`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    process::clean_up_when_told_to_stop()?;
    let start = Instant::now();
    let scratch = Scratch::new()?;
    let mut processes = Vec::new();
    let say = |text: &str| if arguments.json { Ok(()) } else { output::line(text) };

    let (original, copy) = (scratch.path().join("original"), scratch.path().join("copy"));
    let step = Step::new("making the file");
    let written = make_file(&original, arguments.file_size)
        .with_context(|| format!("cannot make a file in {}", output::escaped(scratch.path())))?;
    drop(step);
    let size = units::readable(arguments.file_size);
    say(&format!("A file of {size} goes into a node's memory and back, over rdma:soft."))?;
    let [put, got] = transfer(&original, &copy, arguments.file_size, &mut processes)?;
    let step = Step::new("comparing the copy with the file");
    ensure!(
        same_bytes(&original, &copy)? && put == written && got == written,
        "the copy differs: CRC-32C {written} was written, {put} put, {got} got"
    );
    drop((step, scratch));

    let size = units::readable(arguments.vector_size);
    say(&format!("{HOSTS} hosts sum {size} of int32 each, in switches whose memory adds."))?;
    let elements_checked = reduce(arguments.vector_size, &mut processes)?;

    let report = Report {
        crc32c: [written, put, got],
        elements_checked,
        wrong: 0,
        processes,
        seconds: start.elapsed().as_secs_f64(),
    };
    if arguments.json {
        return output::json(&report);
    }
    print(&report)
}

/// Copies the file into a node's memory and back; returns the CRC-32C of both ways.
fn transfer(
    original: &Path,
    copy: &Path,
    size: u64,
    rows: &mut Vec<Row>,
) -> anyhow::Result<[String; 2]> {
    let start = Instant::now();
    let buffer = size.to_string();
    let arguments = ["node", "--name", "demo", "--metadata", "p2p", "--protocol", "rdma:soft"];
    let step = Step::new("starting a node");
    let more = ["--buffer", &buffer].into_iter().chain(status_pages::NOWHERE);
    let mut node = Child::start("the node", arguments.into_iter().chain(more))?;
    let ready = node.ready(PATIENCE)?;
    drop(step);
    let segment = text(&ready, "segment")?;
    let mut checksums = [String::new(), String::new()];
    for (checksum, (command, file, did)) in checksums.iter_mut().zip([
        ("put", original, "copied the file into the node's memory"),
        ("get", copy, "copied it back out"),
    ]) {
        let _step = Step::new(command);
        let common = ["--metadata", "p2p", "--protocol", "rdma:soft", "--segment", segment];
        let child = Child::start(
            command,
            [command]
                .into_iter()
                .chain(common)
                .chain(["--offset", "0", "--length", &buffer, "--json"])
                .map(std::ffi::OsStr::new)
                .chain([file.as_os_str()]),
        )?;
        let report = json(command, &child.finish(PATIENCE)?)?;
        rows.push(Row {
            process: command.to_owned(),
            did: did.to_owned(),
            bytes: number(&report, "bytes")? as u64,
            seconds: number(&report, "seconds")?,
            gb_per_s: number(&report, "gb_per_s")?,
        });
        *checksum = text(&report, "crc32c")?.to_owned();
    }
    node.check(Duration::ZERO)?;
    rows.insert(
        0,
        served("node", format!("served {} as {segment}", units::readable(size)), 2 * size, start),
    );
    Ok(checksums)
}

/// Has the hosts sum their vectors, in each mode; returns how many elements were checked, and were all right.
fn reduce(size: u64, rows: &mut Vec<Row>) -> anyhow::Result<u64> {
    let start = Instant::now();
    let step = Step::new("starting a controller and three switches");
    let mut cluster = Cluster::start(SWITCHES, FAN_IN)?;
    drop(step);
    let mut reports = Vec::new();
    for mode in [Mode::Write, Mode::Send] {
        let reduction = Reduction { mode, ..Reduction::default() };
        let work = Work::new(Collective::AllReduce, reduction, 0, false, HOSTS)?;
        work.count(size, HOSTS)?;
        let job = Job {
            trees: 1,
            hosts: HOSTS,
            sizes: &[size],
            work,
            path: collective::Path::Switch,
            iters: 1,
            warmup_iters: 0,
            patience: Some(PATIENCE),
        };
        let step = Step::new("hosts sum their vectors");
        cluster.run(&job, |all| {
            reports.extend(all.into_iter().map(|report| (mode, report)));
            Ok(())
        })?;
        drop(step);
    }
    let Cluster { listen, addresses, .. } = &cluster;
    let did = format!("made the group, on TCP {listen}");
    rows.push(served("controller", did, 0, start));
    let did = format!("added {HOSTS} vectors, twice, on {}", addresses.join(" "));
    rows.push(served("switches", did, 2 * size * u64::from(HOSTS), start));
    let mut checked = 0;
    for (mode, report) in &reports {
        let HostReport { rank, bytes, wrong, .. } = *report;
        ensure!(wrong == 0, "host {rank} found {wrong} wrong elements in its result");
        ensure!(report.checked == size / 4, "host {rank} did not check its whole result");
        checked += report.checked;
        rows.push(Row {
            process: format!("host {rank}"),
            did: format!(
                "contributed its vector by {}, checked {} sums",
                mode.name().to_uppercase(),
                report.checked
            ),
            bytes,
            seconds: report.latency_us.p50 / 1e6,
            gb_per_s: report.algbw_mb_per_s / 1e3,
        });
    }
    Ok(checked)
}

/// A daemon's row: its time is its whole life, so it has no rate of its own.
fn served(process: &str, did: String, bytes: u64, start: Instant) -> Row {
    let seconds = start.elapsed().as_secs_f64();
    Row { process: process.to_owned(), did, bytes, seconds, gb_per_s: 0.0 }
}

/// Makes a file of real bytes, those of this program over and over, with a number in each block so
/// that no two blocks are the same; returns its CRC-32C.
fn make_file(path: &Path, size: u64) -> anyhow::Result<String> {
    let program = std::fs::read(std::env::current_exe()?)?;
    ensure!(!program.is_empty(), "our own executable is empty");
    let mut rest: &[u8] = &[];
    let mut file = BufWriter::with_capacity(BLOCK, File::create(path)?);
    let mut block = Vec::with_capacity(BLOCK);
    let (mut checksum, mut left, mut number) = (0, size, 0_u64);
    while left > 0 {
        let length = left.min(BLOCK as u64) as usize;
        block.clear();
        block.extend_from_slice(&number.to_le_bytes());
        while block.len() < BLOCK {
            if rest.is_empty() {
                rest = &program;
            }
            let (now, later) = rest.split_at(rest.len().min(BLOCK - block.len()));
            block.extend_from_slice(now);
            rest = later;
        }
        block.truncate(length);
        checksum = crc32c::crc32c_append(checksum, &block);
        file.write_all(&block)?;
        left -= length as u64;
        number += 1;
    }
    file.flush()?;
    Ok(format!("{checksum:08x}"))
}

fn same_bytes(left: &Path, right: &Path) -> anyhow::Result<bool> {
    let open = |path: &Path| {
        let file =
            File::open(path).with_context(|| format!("cannot read {}", output::escaped(path)))?;
        anyhow::Ok(BufReader::with_capacity(BLOCK, file))
    };
    let (mut left, mut right) = (open(left)?, open(right)?);
    let mut blocks = [vec![0; BLOCK], vec![0; BLOCK]];
    loop {
        let [a, b] = &mut blocks;
        let a = read_block(&mut left, a)?;
        let b = read_block(&mut right, b)?;
        if a != b || a.is_empty() {
            return Ok(a == b);
        }
    }
}

/// Fills `block` as far as the file goes.
fn read_block<'a>(file: &mut impl Read, block: &'a mut [u8]) -> std::io::Result<&'a [u8]> {
    let mut length = 0;
    while length < block.len() {
        match file.read(&mut block[length..])? {
            0 => break,
            count => length += count,
        }
    }
    Ok(&block[..length])
}

fn json(process: &str, output: &str) -> anyhow::Result<Value> {
    serde_json::from_str(output).with_context(|| format!("{process} printed no JSON: {output:?}"))
}

fn number(value: &Value, key: &str) -> anyhow::Result<f64> {
    value[key].as_f64().with_context(|| format!("{value} has no number {key:?}"))
}

fn print(report: &Report) -> anyhow::Result<()> {
    output::line("")?;
    output::line(&format!(
        "{:<11} {:<52} {:>9} {:>8} {:>10}",
        "process", "what it did", "bytes", "seconds", "rate"
    ))?;
    for row in &report.processes {
        let Row { process, did, bytes, seconds, gb_per_s } = row;
        let bytes = if *bytes == 0 { "-".to_owned() } else { units::readable(*bytes) };
        let rate = if *gb_per_s == 0.0 { "-".to_owned() } else { units::rate(gb_per_s * 1e9) };
        output::line(&format!("{process:<11} {did:<52} {bytes:>9} {seconds:>8.2} {rate:>10}"))?;
    }
    output::line("")?;
    output::line(&format!(
        "CRC-32C of the file: {} written, {} put, {} got: the same.",
        report.crc32c[0], report.crc32c[1], report.crc32c[2]
    ))?;
    output::line(&format!(
        "{} sums checked on {HOSTS} hosts: none wrong. All done in {:.1} s.",
        report.elements_checked, report.seconds
    ))
}
