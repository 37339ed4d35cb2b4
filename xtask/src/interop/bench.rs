//! `cargo xtask interop --bench`: our stack beside the kernel's, on the same guest and link in one
//! run. These are figures and no test: they depend on the machine, and the guest is emulated.
//!
//! The same command, `millstream rdma`, does the same work through the kernel's soft-RoCE (rxe) and
//! through a soft device. Of the two, one at a time can have the guest's UDP port, so rxe's module is
//! unloaded for the other. They take turns, and the best of each counts: what else the machine does
//! takes time from one or the other.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::guest::{GUEST, Guest};
use super::row::{Row, await_that, finish};
use crate::lab::Lab;

const LIMIT: Duration = Duration::from_secs(120);
const TESTS: [&str; 3] = ["send-bw", "write-bw", "read-bw"];
/// Bytes of a message, and how many messages: 16 MiB and more.
const SIZES: [(u32, u32); 3] = [(4 << 10, 4000), (64 << 10, 500), (1 << 20, 40)];
/// A second address of the guest, for a soft device that talks to another in the guest.
const SECOND: &str = "10.91.0.3";

const WORK: usize = 2 * TESTS.len() * SIZES.len();
const ROUNDS: usize = 3;
const UNLOAD: &str = "rmmod rdma_rxe";
/// Does nothing where it is loaded.
const LOAD: &str = "[ -e /sys/class/infiniband/rxe0 ] && exit 0
insmod /modules/rdma_rxe.ko && rdma link add rxe0 type rxe netdev eth0 || exit 1
until grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state; do usleep 20000; done";

/// Where both ends are.
#[derive(Clone, Copy)]
enum Ends {
    /// One in the guest, and a soft device here.
    Link,
    /// Both in the guest.
    Guest,
}

/// Measures, and prints a table.
pub(super) fn run(lab: &Lab, guest: &mut Guest, ours: &Path, logs: &Path) -> Result<()> {
    let stem = logs.join("bench");
    let (mut kernel, mut soft) = (vec![0.0; WORK], vec![0.0; WORK]);
    command(guest, &stem, &format!("ip address add {SECOND}/24 dev eth0"))?;
    for round in 1..=ROUNDS {
        eprintln!("xtask: round {round} of {ROUNDS}");
        for (is_soft, best) in [(false, &mut kernel), (true, &mut soft)] {
            command(guest, &stem, if is_soft { UNLOAD } else { LOAD })?;
            for (best, (ends, test, (size, messages))) in best.iter_mut().zip(work()) {
                let command = format!("{test} --json --size={size} --iters={messages}");
                let rate = measure(lab, guest, ours, &stem, ends, is_soft, &command)?;
                *best = rate.max(*best);
            }
        }
    }
    println!("MB/s                                     rxe      soft   soft/rxe");
    for ((kernel, soft), (ends, test, (size, _))) in kernel.iter().zip(&soft).zip(work()) {
        let ends = match ends {
            Ends::Link => "guest and host",
            Ends::Guest => "within guest",
        };
        let ratio = soft / kernel;
        println!("{ends:14}  {test:8}  {size:8} B  {kernel:8.1}  {soft:8.1}  {ratio:9.2}");
    }
    Ok(())
}

/// Everything that is measured of each.
fn work() -> impl Iterator<Item = (Ends, &'static str, (u32, u32))> {
    let sizes = |ends, test| SIZES.into_iter().map(move |size| (ends, test, size));
    let tests = move |ends| TESTS.into_iter().flat_map(move |test| sizes(ends, test));
    [Ends::Link, Ends::Guest].into_iter().flat_map(tests)
}

/// Runs a command in the guest.
fn command(guest: &mut Guest, stem: &Path, text: &str) -> Result<()> {
    let running = guest.start(text)?;
    await_that(LIMIT, || running.status().is_some());
    finish(&running, stem)
}

/// Runs one measurement and returns its megabytes (10^6) per second.
fn measure(
    lab: &Lab,
    guest: &mut Guest,
    ours: &Path,
    stem: &Path,
    ends: Ends,
    soft: bool,
    command: &str,
) -> Result<f64> {
    let device = |address| match soft {
        true => format!("--bind={address}"),
        false => "--device=rxe0".to_owned(),
    };
    let text = match ends {
        Ends::Link => {
            Row::measure(lab, guest, ours, stem, &device(GUEST), command)?;
            fs::read_to_string(stem.with_extension("ours.log"))?
        }
        Ends::Guest => {
            let program = guest.lend(ours)?;
            let (server, client) = (device(GUEST), device(SECOND));
            let both = format!(
                "./{program} rdma {command} {server} >/dev/null & server=$!\n\
                 until grep -q ':4853 .* 0A ' /proc/net/tcp /proc/net/tcp6 || \
                 [ ! -e /proc/$server ]; do usleep 20000; done\n\
                 ./{program} rdma {command} {client} {GUEST} && wait $server"
            );
            let both = guest.start(&both)?;
            await_that(LIMIT, || both.status().is_some());
            finish(&both, stem)?;
            both.output()
        }
    };
    let report = text.lines().find(|line| line.starts_with('{')).context("there is no result")?;
    let report: Value = serde_json::from_str(report)?;
    let rate = report["results"][0]["gb_per_s"].as_f64().context("the result has no rate")?;
    Ok(rate * 1000.0)
}
