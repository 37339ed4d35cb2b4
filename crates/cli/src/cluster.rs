//! A controller, switches and hosts as processes on this machine.

use std::iter;
use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::Value;

use crate::collective::{Path, Report, Work};
use crate::process::{Child, SEEN_TO_END};

/// For a daemon to serve.
const READY: Duration = Duration::from_secs(20);
/// For a host to end once it has reported its last size.
const END: Duration = Duration::from_secs(20);

/// How the object begins that a host prints when it fails.
const FAILURE: &str = "{\"error\":";

/// Daemons that serve collectives. Dropping it stops them.
pub(crate) struct Cluster {
    switches: Vec<Child>,
    controller: Child,
    /// Where the controller listens.
    pub(crate) listen: String,
    /// The switches' addresses.
    pub(crate) addresses: Vec<String>,
}

/// What the hosts do.
pub(crate) struct Job<'a> {
    /// How many hosts there are.
    pub(crate) hosts: u32,
    /// How many addresses each has, and so trees. With one, it finds its own.
    pub(crate) trees: u8,
    /// Bytes of the vectors, one after the other.
    pub(crate) sizes: &'a [u64],
    pub(crate) work: Work,
    pub(crate) path: Path,
    pub(crate) iters: u32,
    pub(crate) warmup_iters: u32,
    /// How long a host may print no report. `None`: as long as it lives. It gives up by itself on
    /// other hosts and a switch that do not answer.
    pub(crate) patience: Option<Duration>,
}

impl Cluster {
    /// With so many switches, which have so many children each at most.
    pub(crate) fn start(switches: u32, fan_in: u32) -> anyhow::Result<Self> {
        let fan_in = fan_in.to_string();
        let arguments = ["controller", "--listen", "127.0.0.1:0", "--fan-in", &fan_in];
        let mut controller = Child::start("the controller", arguments)?;
        let ready = controller.ready(READY)?;
        let listen = text(&ready, "listen")?.to_owned();
        let (mut started, mut addresses) = (Vec::new(), Vec::new());
        // One after the other, as each looks for an address that nobody has.
        for number in 0..switches {
            let name = format!("s{number}");
            let what = if switches == 1 { "the switch".into() } else { format!("switch {name}") };
            let arguments = ["switch", "--controller", &listen, "--name", &name];
            let mut switch = Child::start(what, arguments)?;
            addresses.push(text(&switch.ready(READY)?, "address")?.to_owned());
            started.push(switch);
        }
        Ok(Self { switches: started, controller, listen, addresses })
    }

    /// Runs the hosts, each a process, and calls `done` with their reports of each size.
    pub(crate) fn run(
        &mut self,
        job: &Job<'_>,
        done: impl FnMut(Vec<Report>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let outcome = self.run_hosts(job, done);
        // When a daemon has ended, that is why hosts fail.
        let patience = if outcome.is_err() { SEEN_TO_END } else { Duration::ZERO };
        let deadline = Instant::now() + patience;
        for daemon in iter::once(&mut self.controller).chain(&mut self.switches) {
            daemon.check(deadline.saturating_duration_since(Instant::now()))?;
        }
        outcome
    }

    fn run_hosts(
        &self,
        job: &Job<'_>,
        mut done: impl FnMut(Vec<Report>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut hosts = self.start_hosts(job)?;
        let mut wrong = vec![0; hosts.len()];
        for _ in job.sizes {
            let mut reports = Vec::new();
            for (rank, host) in hosts.iter_mut().enumerate() {
                let mut line = host.line(job.patience)?;
                if line.starts_with(FAILURE) {
                    // It ends now, and has said the same on stderr, which is told.
                    line = host.line(job.patience)?;
                }
                let report: Report = serde_json::from_str(&line)
                    .with_context(|| format!("host {rank} printed no report: {line:?}"))?;
                wrong[rank] += report.wrong;
                reports.push(report);
            }
            done(reports)?;
        }
        for (host, wrong) in hosts.into_iter().zip(wrong) {
            host.finish_as(END, |status| ended_as_reported(status, wrong))?;
        }
        Ok(())
    }

    fn start_hosts(&self, job: &Job<'_>) -> anyhow::Result<Vec<Child>> {
        let [world, iters, warmup_iters] =
            [job.hosts, job.iters, job.warmup_iters].map(|number| number.to_string());
        let sizes: Vec<String> = job.sizes.iter().map(u64::to_string).collect();
        let sizes = sizes.join(",");
        let Work { call, reduction, .. } = job.work;
        let collective = call.collective().name();
        let root = call.root().unwrap_or(0).to_string();
        let start = |number: u32| {
            let rank = number.to_string();
            let mut arguments = vec!["collective", "--collective", collective, "--json"];
            arguments.extend(["--verify", "--group=local", "--controller", &self.listen]);
            arguments.extend(["--world", &world, "--rank", &rank, "--size", &sizes]);
            arguments.extend(["--dtype", reduction.dtype.name(), "--op", reduction.op.name()]);
            arguments.extend(["--mode", reduction.mode.name(), "--root", &root]);
            // What is measured is a switch.
            arguments.extend(["--path", job.path.name(), "--fallback", "off"]);
            arguments.extend(["--iters", &iters, "--warmup-iters", &warmup_iters]);
            if job.work.in_place {
                arguments.push("--in-place");
            }
            let several = if job.trees > 1 { 0..u32::from(job.trees) } else { 0..0 };
            let addresses = several.map(|tree| address(number + tree * job.hosts).to_string());
            let addresses: Vec<String> = addresses.collect();
            arguments.extend(addresses.iter().flat_map(|address| ["--bind", address]));
            Child::start(format!("host {rank}"), &arguments)
        };
        (0..job.hosts).map(start).collect()
    }
}

/// Addresses that the hosts of a process may have together.
pub(crate) const MAX_ADDRESSES: u32 = 254;

/// One of them, which no other such process uses.
fn address(number: u32) -> IpAddr {
    let process = std::process::id();
    let last = number.min(MAX_ADDRESSES - 1) as u8 + 1;
    Ipv4Addr::new(127, 192 | (process >> 8) as u8 & 63, process as u8, last).into()
}

/// Whether a host that found so many wrong elements ended as it should: it fails if there are any.
/// It has reported them, and whoever gets the reports judges.
fn ended_as_reported(status: ExitStatus, wrong: u64) -> bool {
    status.success() || wrong > 0 && status.code() == Some(1)
}

/// A text of a JSON object.
pub(crate) fn text<'a>(value: &'a Value, key: &str) -> anyhow::Result<&'a str> {
    value[key].as_str().with_context(|| format!("{value} has no text {key:?}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_host_that_found_wrong_elements_may_fail() {
        let exit = |code: i32| ExitStatus::from_raw(code << 8);
        let killed = ExitStatus::from_raw(9);
        for (status, wrong, good) in [
            (exit(0), 0, true),
            (exit(1), 0, false),
            (exit(1), 7, true),
            (exit(2), 7, false),
            (exit(101), 7, false),
            (killed, 7, false),
        ] {
            assert_eq!(ended_as_reported(status, wrong), good, "{status}, {wrong} wrong");
        }
    }
}
