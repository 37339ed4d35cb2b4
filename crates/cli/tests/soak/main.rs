//! Groups that come and go for minutes, with processes that are killed and one that wants all that there is: everybody is
//! served, and when the last group is gone, nothing of it is left in the controller, the switches and the hosts.
//!
//! `MILLSTREAM_SOAK_SECONDS` says for how long they come and go, after a warm-up of a third of that; without it, it is a minute
//! where `MILLSTREAM_REQUIRE=all`, and else ten seconds.

#[path = "../common/mod.rs"]
mod common;
mod host;
mod usage;

use std::fs;
use std::io::Write;
use std::process::{ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{Folder, Running, address, skip};
use host::{Part, Report};
use usage::{Daemons, Usage};

/// Groups, ranks of each, and processes that all of them are in.
const GROUPS: usize = 64;
const WORLD: usize = 16;
const HOSTS: usize = 32;

const SWITCHES: usize = 4;

/// Two leaves and a root for each group.
const FAN_IN: &str = "--fan-in=8";

/// The first processes are never killed, and looked at for what they use.
const SPARED: usize = 4;

/// Between two kills. Each ends half of all groups.
const KILL_EVERY: Duration = Duration::from_secs(5);

/// Without another word, and in CI.
const SECONDS: u64 = 10;
const SECONDS_OF_CI: u64 = 60;

/// For all ranks to end their last call.
const PATIENCE: Duration = Duration::from_secs(240);

const TOKENS: &str = r#"
[[token]]
name = "good"
kind = "host"
secret = "the token of the good ones"

[[token]]
name = "bad"
kind = "host"
secret = "the token of the bad ones"
connections = 20
groups = 8
communicators = 8

[[token]]
name = "switches"
kind = "switch"
secret = "the token of the switches"
"#;

/// A program that may have as many files open as a connection of each rank takes. What it frees is given back to the system,
/// as the allocator may keep what it had for nodes of trees, 4 MiB of slots each, and so hide what leaks.
fn with_files(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -S -n 4096; exec \"$0\" \"$@\""]).arg(program);
    for (variable, value) in
        [("MMAP_THRESHOLD_", "65536"), ("TRIM_THRESHOLD_", "65536"), ("ARENA_MAX", "1")]
    {
        command.env(format!("MALLOC_{variable}"), value);
    }
    command.env_remove("MILLSTREAM_LOG").env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Whether a process may have so many files open as that takes.
fn may_have_files() -> bool {
    let limits = fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let hard = line.split_whitespace().nth(1).unwrap();
    hard.parse().map_or(hard == "unlimited", |files: u64| files >= 4096)
}

/// Does nothing unless it is started by the other test.
#[test]
fn part_of_the_other_test() {
    if let Ok(part) = std::env::var(host::PART) {
        host::be(&serde_json::from_str(&part).unwrap());
    }
}

/// A process of hosts.
struct Host {
    part: Part,
    process: Running,
    stdin: ChildStdin,
}

impl Host {
    fn start(part: Part) -> Self {
        let mut command = with_files(std::env::current_exe().unwrap());
        command.args(["--exact", "part_of_the_other_test", "--nocapture"]).stdin(Stdio::piped());
        command.env(host::PART, serde_json::to_string(&part).unwrap());
        let mut process = Running::start(&format!("host {:?}", part.host), &mut command);
        let stdin = process.stdin();
        Self { part, process, stdin }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    /// Kills it, and starts another in its place.
    fn kill(&mut self, phase: &str) {
        self.process.signal("KILL");
        // Its address is free then.
        self.process.wait();
        *self = Self::start(self.part.clone());
        self.tell(phase);
    }

    fn report(&mut self) -> Report {
        loop {
            let line = self.process.line_within(PATIENCE);
            if let Some((_, report)) = line.split_once("report ") {
                return serde_json::from_str(report).unwrap();
            }
        }
    }
}

/// All hosts come and go for so long, and then stop. What they report together, and what the hostile one does.
fn phase(
    name: &str,
    hosts: &mut [Host],
    hostile: &mut Host,
    duration: Duration,
) -> (Report, Report) {
    let start = Instant::now();
    hosts.iter_mut().chain([&mut *hostile]).for_each(|host| host.tell(name));
    let mut victims = (SPARED..HOSTS).cycle();
    while start.elapsed() + KILL_EVERY < duration {
        thread::sleep(KILL_EVERY);
        hosts[victims.next().unwrap()].kill(name);
    }
    thread::sleep(duration.saturating_sub(start.elapsed()));
    hosts.iter_mut().chain([&mut *hostile]).for_each(|host| host.tell("stop"));
    let mut all = Report::default();
    for report in hosts.iter_mut().map(Host::report) {
        all.communicators += report.communicators;
        all.wrong += report.wrong;
        all.lost += report.lost;
        all.refused += report.refused;
        all.over_quota += report.over_quota;
        all.said.extend(report.said);
    }
    all.said.sort_unstable();
    all.said.dedup();
    all.said.truncate(8);
    (all, hostile.report())
}

fn duration() -> Duration {
    let seconds = std::env::var("MILLSTREAM_SOAK_SECONDS").ok();
    let required = std::env::var_os("MILLSTREAM_REQUIRE").is_some_and(|value| value == "all");
    let usual = if required { SECONDS_OF_CI } else { SECONDS };
    Duration::from_secs(seconds.map_or(usual, |text| text.parse().unwrap()))
}

#[test]
fn groups_that_come_and_go_leave_nothing_behind() {
    if !may_have_files() {
        return skip("the controller needs 4096 files, and the hard limit is lower (ulimit -H -n)");
    }
    let folder = Folder::new();
    let tokens = folder.file("tokens.toml");
    fs::write(&tokens, TOKENS).unwrap();
    let secret = folder.file("switch.token");
    fs::write(&secret, "the token of the switches").unwrap();
    let daemons = Daemons::start(SWITCHES, &tokens, &secret);
    let part = |host, token: &str| Part {
        host,
        controller: daemons.listen,
        bind: address().parse().unwrap(),
        token: token.to_owned(),
    };
    let mut hosts: Vec<Host> = (0..HOSTS)
        .map(|host| Host::start(part(Some(host), "the token of the good ones")))
        .collect();
    let mut hostile = Host::start(part(None, "the token of the bad ones"));

    let look = |hosts: &[Host]| -> Vec<Usage> {
        let spared = hosts[..SPARED].iter().map(|host| ("host", host.process.id()));
        daemons.processes().chain(spared).map(|(name, id)| Usage::of(name, id)).collect()
    };
    // What is kept for use again is filled.
    let warm_up = (duration() / 3).max(Duration::from_secs(SECONDS));
    let (first, _) = phase("warm-up", &mut hosts, &mut hostile, warm_up);
    daemons.are_at_rest();
    let before = look(&hosts);
    let (all, bad) = phase("soak", &mut hosts, &mut hostile, duration());
    daemons.are_at_rest();
    println!("warm-up: {first:?}\nsoak: {all:?}\nhostile: {bad:?}");
    for (before, after) in before.iter().zip(look(&hosts)) {
        println!("{before:?}\n{after:?}");
        before.check(&after);
    }

    assert_eq!(all.wrong + first.wrong, 0);
    // Whoever wants too much is refused, and takes nothing from others.
    assert!(bad.over_quota > 0, "{bad:?}");
    assert_eq!(all.over_quota + first.over_quota, 0, "{all:?}");
    // The last one of each group, at least, and those before the first kill.
    let ranks = (GROUPS * WORLD) as u64;
    assert!(all.communicators > ranks, "{all:?}");
}
