//! `cargo xtask profile`: where the processor time of a gigabyte goes, by `perf`, for both ends of
//! `bench rdma` and for the plain UDP stream beside it.
//!
//! It samples by a clock and not by the processor's counters, which virtual machines often lack. Where
//! the kernel has interrupts off, what it does is counted at the place where they are on again; the
//! chain of calls still says for whom.

mod groups;
mod options;
mod owners;
mod samples;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::machine::Machine;
use crate::{install, process, programs};
pub(crate) use options::Options;
use samples::Sample;

/// Samples of a thread in a second.
const FREQUENCY: &str = "4999";
/// What the bench calls its threads, and the columns that they are counted in.
const POSTER: &str = "poster";
const UDP: &str = "plain-udp";
const COLUMNS: [&str; 4] = ["posts", "its driver", "other driver", "plain UDP"];

/// CPU seconds of a GB, by group, in each column.
type Table = BTreeMap<String, [f64; COLUMNS.len()]>;

pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(need) = install::ensure(install::FOR_PROFILE).first() {
        bail!("{} is missing: it {}", need.program, need.reason);
    }
    let program = programs::profiled_millstream()?;
    let program = program.canonicalize().context("cannot find millstream")?;
    let machine = Machine::here()?;
    let folder = process::target_directory().join("profile");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let data = folder.join("perf.data");
    let addresses = addresses(std::process::id());
    let report = record(&program, &data, &addresses, options)?;
    let script = process::output(
        Command::new("perf")
            .args([
                "script",
                "--no-inline",
                "--show-mmap-events",
                "-F",
                "comm,tid,ip,sym,dso",
                "-i",
            ])
            .arg(&data),
    )?;
    let (samples, mappings) = samples::parse(&script, &program);
    let ours = Path::new(&program);
    let leaves = samples.iter().filter_map(|sample| sample.chain.first());
    let leaves = leaves.filter(|frame| Path::new(&frame.object) == ours);
    let owners = owners::owners(&program, &mappings, leaves.map(|frame| frame.address))?;
    let cell = &report["bandwidth"][0];
    let figure = |value: &Value| value.as_f64().context("the bench reports no figure");
    let udp = &report["udp_stream"];
    let cpu = [figure(&cell["cpu_s_per_gb"])?, figure(&udp["cpu_s_per_gb"])?];
    let table = table(&samples, &addresses, cpu, |sample| groups::group(sample, &owners));
    println!("{machine}");
    println!(
        "{} {}, {} outstanding: {:.2} GB/s with {:.3} CPU s/GB; plain UDP: {:.2} GB/s with {:.3}\n",
        options.op.to_uppercase(),
        options.size,
        cell["depth"],
        figure(&cell["gb_per_s"])?,
        cpu[0],
        figure(&udp["gb_per_s"])?,
        cpu[1],
    );
    print!("{}", markdown(&table));
    Ok(())
}

/// Two of loopback whose devices' threads have names of 15 characters, which the kernel does not cut:
/// `soft-127.1.2.34`.
fn addresses(process: u32) -> [String; 2] {
    let (third, fourth) = (process / 40 % 9 + 1, 10 + process % 40 * 2);
    [0, 1].map(|end| format!("127.1.{third}.{}", fourth + end))
}

fn record(
    program: &Path,
    data: &Path,
    addresses: &[String; 2],
    options: &Options,
) -> Result<Value> {
    let mut command = Command::new("perf");
    command.args(["record", "--quiet", "-g", "-e", "cpu-clock", "-F", FREQUENCY, "-o"]).arg(data);
    command.arg("--").arg(program).args(["bench", "rdma", "--json"]);
    command.args(["--bind", &addresses[0], "--peer", &addresses[1]]);
    command.args(["--size", &options.size, "--ops", &options.op]).args(&options.bench);
    let printed = process::output(&mut command).context(
        "perf cannot record: it needs root, or sysctl kernel.perf_event_paranoid=1 and \
         kernel.kptr_restrict=0",
    )?;
    serde_json::from_str(&printed).context("the bench printed no report")
}

/// Counts samples of the threads that matter. The bench says what a GB cost; samples say in which
/// parts.
fn table(
    samples: &[Sample],
    addresses: &[String; 2],
    cpu_s_per_gb: [f64; 2],
    group: impl Fn(&Sample) -> String,
) -> Table {
    let drivers = addresses.each_ref().map(|address| format!("soft-{address}"));
    let threads = [POSTER, &drivers[0], &drivers[1], UDP];
    let (mut table, mut totals) = (Table::new(), [0.0; 2]);
    // After that the same addresses have the devices by which latency is measured.
    let end = samples.iter().rposition(|sample| sample.thread == POSTER).unwrap_or(0);
    for (index, sample) in samples.iter().enumerate() {
        let column = threads.iter().position(|name| sample.thread == *name);
        let Some(column) = column.filter(|&column| column == 3 || index <= end) else { continue };
        let group = group(sample);
        // The stream makes its memory before the clock starts.
        if column == 3 && (group == groups::PAGE_FAULTS || group == "rest") {
            continue;
        }
        table.entry(group).or_default()[column] += 1.0;
        totals[usize::from(column == 3)] += 1.0;
    }
    for columns in table.values_mut() {
        for (column, count) in columns.iter_mut().enumerate() {
            let which = usize::from(column == 3);
            *count *= cpu_s_per_gb[which] / f64::max(totals[which], 1.0);
        }
    }
    table
}

/// The greatest first; all that do not make a thousandth together at the end.
fn markdown(table: &Table) -> String {
    let both_ends = |columns: &[f64; 4]| columns[..3].iter().sum::<f64>();
    let mut rows: Vec<(&str, [f64; 4])> = table.iter().map(|(name, &row)| (&**name, row)).collect();
    rows.sort_by(|a, b| both_ends(&b.1).total_cmp(&both_ends(&a.1)));
    let all = rows.iter().fold([0.0; 4], |sum, (_, row)| [0, 1, 2, 3].map(|i| sum[i] + row[i]));
    rows.push(("all", all));
    let head = COLUMNS;
    let mut text = format!(
        "| CPU s/GB | {} | {} | {} | both ends | {} |\n| --- | ---: | ---: | ---: | ---: | ---: |\n",
        head[0], head[1], head[2], head[3]
    );
    for (name, row) in rows {
        let cell =
            |figure: f64| if figure < 0.0005 { String::new() } else { format!("{figure:.3}") };
        let [posts, own, other, udp] = row.map(cell);
        let both = cell(both_ends(&row));
        if both.is_empty() && udp.is_empty() {
            continue;
        }
        text.push_str(&format!("| {name} | {posts} | {own} | {other} | {both} | {udp} |\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(thread: &str) -> Sample {
        Sample { thread: thread.to_owned(), chain: Vec::new() }
    }

    #[test]
    fn what_a_gigabyte_cost_is_shared_out_by_samples() {
        let addresses = ["127.1.1.10", "127.1.1.11"].map(str::to_owned);
        let threads = ["soft-127.1.1.10", "soft-127.1.1.11", "soft-127.1.1.11", "poster"];
        // What comes later is of other devices.
        let others = ["millstream", "soft-127.1.1.10", "plain-udp"];
        let samples: Vec<Sample> = threads.iter().chain(&others).map(|name| sample(name)).collect();
        let table = table(&samples, &addresses, [0.8, 0.4], |_| "copy".to_owned());
        assert_eq!(table.len(), 1);
        let expected = [0.2, 0.2, 0.4, 0.4];
        let differs = |(a, b): (&f64, &f64)| (a - b).abs() > 1e-9;
        assert!(!table["copy"].iter().zip(&expected).any(differs), "{table:?}");
        let text = markdown(&table);
        assert!(text.contains("| copy | 0.200 | 0.200 | 0.400 | 0.800 | 0.400 |"), "{text}");
        assert!(text.ends_with("| all | 0.200 | 0.200 | 0.400 | 0.800 | 0.400 |\n"), "{text}");
    }

    #[test]
    fn names_of_threads_are_not_cut() {
        for process in [0, 1, 39, 40, 12_345, u32::MAX] {
            let [near, far] = addresses(process);
            assert!(near != far && format!("soft-{near}").len() == 15, "{near} {far}");
            assert_eq!(format!("soft-{far}").len(), 15, "{far}");
        }
    }
}
