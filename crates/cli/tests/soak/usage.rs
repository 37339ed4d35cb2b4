//! What processes use, and what daemons say that they have.

use std::fs;
use std::net::SocketAddr;

use super::common::{PROGRAM, Running, address, eventually};
use super::{FAN_IN, with_files};

/// What a process may have more of than at most until the end of the warm-up: what lies between things that live stays with the
/// allocator. What it had at that moment says less: a controller that had 28.5 MiB for a while has 25 or 28 of them when it is at
/// rest. Slots count where they were touched, so some ten nodes of trees that are not given back may be less than that.
const GROWTH_KIB: i64 = 4 << 10;

/// What a process uses.
#[derive(Debug)]
pub(super) struct Usage {
    name: String,
    process: u32,
    resident_kib: i64,
    most_resident_kib: i64,
    descriptors: usize,
    threads: usize,
}

fn entries(process: u32, of: &str) -> usize {
    fs::read_dir(format!("/proc/{process}/{of}")).unwrap().count()
}

impl Usage {
    pub(super) fn of(name: impl Into<String>, process: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let kib = |name| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse().unwrap()
        };
        Self {
            name: name.into(),
            process,
            resident_kib: kib("VmRSS:"),
            most_resident_kib: kib("VmHWM:"),
            descriptors: entries(process, "fd"),
            threads: entries(process, "task"),
        }
    }

    /// Another look finds no more than there was until this one, but for some memory.
    pub(super) fn check(&self, after: &Self) {
        let growth = after.resident_kib - self.most_resident_kib;
        assert!(growth <= GROWTH_KIB, "{} KiB more: {self:?} {after:?}", growth);
        // Who was served over HTTP, or ends just now, may be there for a moment.
        eventually(&format!("{} gives back descriptors and threads: {self:?}", self.name), || {
            entries(self.process, "fd") <= self.descriptors
                && entries(self.process, "task") <= self.threads
        });
    }
}

/// A controller and its switches.
pub(super) struct Daemons {
    pub(super) listen: SocketAddr,
    controller: (Running, String),
    switches: Vec<(Running, String)>,
}

impl Daemons {
    pub(super) fn start(switches: usize, tokens: &str, secret: &str) -> Self {
        let listen = format!("{}:0", address());
        let mut command = with_files(PROGRAM);
        command.args(["controller", "--listen", &listen, "--tokens", tokens, FAN_IN, "--http=0"]);
        let mut controller = Running::start("controller", &mut command);
        let ready = controller.ready();
        let listen = ready["listen"].as_str().unwrap().to_owned();
        let http = ready["http"].as_str().unwrap().to_owned();
        let switch = |number| {
            let (name, bind) = (format!("s{number}"), address());
            let mut command = with_files(PROGRAM);
            command.args(["switch", "--controller", &listen, "--name", &name, "--bind", &bind]);
            command.args(["--token-file", secret, "--http=0"]);
            let mut switch = Running::start(&name, &mut command);
            let http = switch.ready()["http"].as_str().unwrap().to_owned();
            (switch, http)
        };
        let switches = (0..switches).map(switch).collect();
        Self { listen: listen.parse().unwrap(), controller: (controller, http), switches }
    }

    /// Their names and process ids.
    pub(super) fn processes(&self) -> impl Iterator<Item = (&'static str, u32)> {
        let switches = self.switches.iter().map(|(switch, _)| ("switch", switch.id()));
        [("controller", self.controller.0.id())].into_iter().chain(switches)
    }

    /// Waits until no group is left, no node of a tree with its slots, and no connection but those of switches.
    pub(super) fn are_at_rest(&self) {
        let switches = self.switches.len() as u64;
        eventually("the controller is at rest", || {
            let metrics = metrics(&self.controller.1);
            sum(&metrics, "millstream_controller_groups") == 0
                && sum(&metrics, "millstream_controller_switch_nodes") == 0
                && sum(&metrics, "millstream_controller_connections") == switches
        });
        for (_, http) in &self.switches {
            eventually("a switch is at rest", || {
                sum(&metrics(http), "millstream_switch_communicators") == 0
            });
        }
    }
}

fn metrics(http: &str) -> String {
    let request = ureq::get(format!("http://{http}/metrics")).header("Connection", "close");
    request.call().unwrap().body_mut().read_to_string().unwrap()
}

/// All samples of a metric together.
fn sum(metrics: &str, name: &str) -> u64 {
    let samples = metrics.lines().filter_map(|line| line.strip_prefix(name));
    let values = samples.filter(|rest| rest.starts_with(['{', ' ']));
    values.map(|rest| rest.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}
