//! A controller, a switch and hosts as processes on this machine.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::address::towards;
use crate::allreduce::{Report, Vector};
use crate::process::Child;

/// For a daemon to serve.
const READY: Duration = Duration::from_secs(20);
/// How often another address is tried when a process takes the one just found.
const ATTEMPTS: usize = 8;

/// Daemons that serve AllReduce. Dropping it stops them.
pub(crate) struct Cluster {
    switch: Child,
    controller: Child,
    /// Where the controller listens.
    pub(crate) listen: String,
    /// The switch's address.
    pub(crate) address: String,
}

impl Cluster {
    pub(crate) fn start() -> anyhow::Result<Self> {
        let mut controller =
            Child::start("the controller", ["controller", "--listen", "127.0.0.1:0"])?;
        let ready = controller.ready(READY)?;
        let listen = text(&ready, "listen")?.to_owned();
        let mut attempt = 1;
        loop {
            let address = towards([127, 0, 0, 1].into())?.to_string();
            let arguments = ["switch", "--controller", &listen, "--name", "s0", "--bind", &address];
            let mut switch = Child::start("the switch", arguments)?;
            match switch.ready(READY) {
                Ok(_) => return Ok(Self { switch, controller, listen, address }),
                // The address was free a moment ago.
                Err(error) if attempt < ATTEMPTS && error.to_string().contains("UDP port") => {}
                Err(error) => return Err(error),
            }
            attempt += 1;
        }
    }

    /// Runs an AllReduce of so many hosts, each a process; returns what each reports.
    pub(crate) fn all_reduce(
        &mut self,
        hosts: u32,
        vector: &Vector,
        iters: u32,
        patience: Duration,
    ) -> anyhow::Result<Vec<Report>> {
        let (world, size, iters) = (hosts.to_string(), vector.size.to_string(), iters.to_string());
        let mut children = Vec::new();
        for rank in 0..hosts {
            let rank = rank.to_string();
            let arguments = [
                ["allreduce", "--json"],
                ["--verify", "--group=local"],
                ["--controller", &self.listen],
                ["--world", &world],
                ["--rank", &rank],
                ["--size", &size],
                ["--dtype", &vector.dtype],
                ["--op", &vector.op],
                ["--iters", &iters],
            ];
            children.push(Child::start(format!("host {rank}"), arguments.as_flattened())?);
        }
        let mut reports = Vec::new();
        for (rank, child) in children.into_iter().enumerate() {
            let printed = child.finish(patience)?;
            let report = serde_json::from_str(&printed)
                .with_context(|| format!("host {rank} printed no report: {printed:?}"))?;
            reports.push(report);
        }
        ensure!(self.controller.is_running(), "the controller ended while it was in use");
        ensure!(self.switch.is_running(), "the switch ended while it was in use");
        Ok(reports)
    }
}

/// A text of a JSON object.
pub(crate) fn text<'a>(value: &'a Value, key: &str) -> anyhow::Result<&'a str> {
    value[key].as_str().with_context(|| format!("{value} has no text {key:?}"))
}
