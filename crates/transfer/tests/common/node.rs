//! Targets that are processes of their own, to be killed and stopped. Each is the test binary again.

use std::fmt::Display;
use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use millstream_transfer::{Config, RdmaConfig, TransferEngine};

use super::{LONG, address, contents, shared};

/// Set in processes that tests start: addresses of devices, port, length of the buffer, and how many queue
/// pairs peers may have.
const ROLE: &str = "MILLSTREAM_TEST_NODE";

/// The test binary again, as a process that says its name first, and answers each line that it is told by one. Dropped,
/// it is killed.
pub(crate) struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pub(crate) name: String,
}

/// Says something to who has started this process, on a line that the test harness has no part in.
pub(crate) fn say(what: impl Display) {
    println!("node: {what}");
}

impl Process {
    /// Does what a test of this binary does where this variable is set.
    pub(crate) fn start(test: &str, variable: &str, role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]).env(variable, role);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut process = Self { child, input, output, name: String::new() };
        process.name = process.hear();
        process
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it says next.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "it ended early");
            if let Some((_, line)) = line.trim().split_once("node: ") {
                return line.to_owned();
            }
        }
    }

    pub(crate) fn ask(&mut self, what: &str) -> String {
        writeln!(self.input, "{what}").unwrap();
        self.hear()
    }

    /// What is in its buffer, as it sees it: see [`sum`].
    pub(crate) fn sum(&mut self) -> u64 {
        self.ask("sum").parse().unwrap()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends it a signal. A process that gets STOP has stopped when this returns.
    pub(crate) fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &id]).status().unwrap().success());
        let limit = Instant::now() + LONG;
        while signal == "STOP" && self.state() != 'T' {
            assert!(Instant::now() < limit);
            std::thread::yield_now();
        }
    }

    /// Its state, as `/proc` has it.
    fn state(&self) -> char {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process with an engine and a buffer that peers can access.
pub(crate) struct Node {
    process: Process,
    devices: Vec<IpAddr>,
    length: usize,
    accepts: usize,
}

impl Deref for Node {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl DerefMut for Node {
    fn deref_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}

impl Node {
    pub(crate) fn start(devices: usize, length: usize) -> Self {
        Self::start_with(devices, length, RdmaConfig::new(&[]).max_accepted_queue_pairs)
    }

    /// A process where peers have so many queue pairs at most.
    pub(crate) fn start_with(devices: usize, length: usize, accepts: usize) -> Self {
        Self::start_at((0..devices).map(|_| address()).collect(), 0, length, accepts)
    }

    /// Kills it and starts it again under the same name.
    pub(crate) fn restart(&mut self) {
        let port = self.name.rsplit_once(':').unwrap().1.parse().unwrap();
        self.kill();
        *self = Self::start_at(self.devices.clone(), port, self.length, self.accepts);
    }

    fn start_at(devices: Vec<IpAddr>, port: u16, length: usize, accepts: usize) -> Self {
        let list: Vec<_> = devices.iter().map(IpAddr::to_string).collect();
        let role = format!("{} {port} {length} {accepts}", list.join(","));
        let process = Process::start("a_node", ROLE, &role);
        Self { process, devices, length, accepts }
    }

    /// Has it close its engine and end. It has begun to when this returns.
    pub(crate) fn close(&mut self) {
        assert_eq!(self.ask("close"), "closing");
    }

    /// Memory of it that is resident, in KiB, and how many files it has open.
    pub(crate) fn resources(&self) -> (u64, usize) {
        let process = format!("/proc/{}", self.id());
        let status = std::fs::read_to_string(format!("{process}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        let resident = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        (resident, std::fs::read_dir(format!("{process}/fd")).unwrap().count())
    }
}

/// Is the process, if it was started as one.
pub(crate) fn run() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let [devices, port, length, accepts] = role.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let devices: Vec<IpAddr> = devices.split(',').map(|one| one.parse().unwrap()).collect();
    let listen = (devices[0], port.parse().unwrap()).into();
    let config = Config { listen, ..super::config(devices[0]) };
    let engine = TransferEngine::new(config).unwrap();
    let max_accepted_queue_pairs = accepts.parse().unwrap();
    let rdma = RdmaConfig { max_accepted_queue_pairs, ..RdmaConfig::new(&devices) };
    engine.install_rdma(rdma).unwrap();
    let length = length.parse().unwrap();
    let buffer = shared(&engine, length);
    say(engine.name());
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "sum" => say(sum(&contents(&buffer, 0, length))),
            "close" => {
                say("closing");
                drop(engine);
                std::process::exit(0);
            }
            line => unreachable!("{line}"),
        }
    }
    std::process::exit(0);
}

pub(crate) fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
}
