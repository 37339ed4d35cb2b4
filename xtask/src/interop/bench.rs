//! `cargo xtask interop --bench`: our stack beside the kernel's, on the same links in one run. These
//! are figures and no test: they depend on the machine, and the guest is emulated.
//!
//! The same command, `millstream rdma`, does the same work through the kernel's soft-RoCE (rxe) and
//! through soft devices. Of the two, one at a time can have the guest's UDP port, so rxe's module is
//! unloaded for the other. They take turns, and the best of each counts: what else the machine does
//! takes time from one or the other.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::guest::Guest;
use super::lab::Lab;
use super::link::{GUEST, MTU};
use super::row::{Row, await_that, finish};
use crate::machine::Machine;

const LIMIT: Duration = Duration::from_secs(120);
const TESTS: [&str; 3] = ["send-bw", "write-bw", "read-bw"];
/// Bytes of a message, and how many messages: 32 MiB and more, which takes half a second.
const SIZES: [(u32, u32); 3] = [(4 << 10, 8000), (64 << 10, 600), (1 << 20, 40)];
const PATH_MTU: u32 = 4096;
const ROUNDS: usize = 3;

/// A link within the guest: a pair of interfaces, each with an address. The kernel keeps what goes
/// from one of its addresses to another to itself, and rxe works in the first namespace only; so
/// rules send what goes from one end's address to the other's through the link, and what comes out
/// of it is taken for the machine's own.
const VETH: &str = include_str!("veth.sh");
/// The ends' addresses, as the script has them.
const ENDS: [&str; 2] = ["10.92.0.1", "10.92.0.2"];

const UNLOAD: &str = "rmmod rdma_rxe";
/// Does nothing where it is loaded.
const LOAD: &str = "[ -e /sys/class/infiniband/rxe0 ] && exit 0
insmod /modules/rdma_rxe.ko || exit 1
for pair in rxe0:eth0 rxe1:veth1 rxe2:veth2; do
    rdma link add ${pair%:*} type rxe netdev ${pair#*:} || exit 1
    until grep -q ACTIVE /sys/class/infiniband/${pair%:*}/ports/1/state; do usleep 20000; done
done";

/// Where both ends are.
#[derive(Clone, Copy, PartialEq)]
enum Ends {
    /// One in the guest, and a soft device here.
    Cable,
    /// Both in the guest, at the ends of its own link.
    Veth,
}

/// Whose devices.
#[derive(Clone, Copy, PartialEq)]
enum Stack {
    Kernel,
    Udp,
    Packet,
}

const STACKS: [Stack; 3] = [Stack::Kernel, Stack::Udp, Stack::Packet];

/// What is measured of each stack, and the best figure of each.
struct Work {
    ends: Ends,
    test: &'static str,
    size: u32,
    messages: u32,
    best: [f64; STACKS.len()],
}

/// What a measurement needs.
pub(super) struct Bench<'a> {
    pub(super) lab: &'a Lab,
    pub(super) guest: &'a mut Guest,
    /// `millstream`, optimized.
    pub(super) ours: &'a Path,
    /// A folder for what is printed.
    pub(super) logs: &'a Path,
}

impl Bench<'_> {
    /// Measures the rows whose names contain `only`, and prints a table.
    pub(super) fn run(mut self, only: &str) -> Result<()> {
        let mut table: Vec<Work> = work().filter(|work| work.name().contains(only)).collect();
        if table.is_empty() {
            bail!(
                "no figure's name contains {only:?}: {}",
                work().map(|it| it.name()).collect::<Vec<_>>().join(", ")
            );
        }
        let machine = Machine::here()?;
        self.command(UNLOAD)?;
        self.command(VETH)?;
        // Not to read it through the shared folder while it is measured.
        let program = self.guest.lend(self.ours)?;
        self.command(&format!("cp {program} /tmp/millstream"))?;
        for round in 1..=ROUNDS {
            eprintln!("xtask: round {round} of {ROUNDS}");
            for (index, stack) in STACKS.into_iter().enumerate() {
                match stack {
                    Stack::Kernel => self.command(LOAD)?,
                    Stack::Udp => self.command(UNLOAD)?,
                    Stack::Packet => {}
                }
                for work in &mut table {
                    let rate = self.measure(work, stack)?;
                    work.best[index] = rate.max(work.best[index]);
                }
            }
        }
        println!("{machine}");
        println!("MB/s, best of {ROUNDS}; path MTU {PATH_MTU}, interfaces' MTU {MTU}");
        println!("{:35}      rxe      udp   packet  udp/rxe  packet/rxe", "");
        for work in &table {
            let [kernel, udp, packet] = work.best;
            println!(
                "{:35} {kernel:8.1} {udp:8.1} {packet:8.1} {:8.2} {:11.2}",
                work.name(),
                udp / kernel,
                packet / kernel
            );
        }
        Ok(())
    }

    /// Runs a command in the guest.
    fn command(&mut self, text: &str) -> Result<()> {
        let running = self.guest.start(text)?;
        await_that(LIMIT, || running.status().is_some());
        finish(&running, &self.logs.join("bench"))
    }

    /// Runs one measurement and returns its megabytes (10^6) per second.
    fn measure(&mut self, work: &Work, stack: Stack) -> Result<f64> {
        let stem = self.logs.join("bench");
        let Work { test, size, messages, .. } = work;
        let command = format!("{test} --json --size={size} --iters={messages} --mtu={PATH_MTU}");
        let program = "/tmp/millstream rdma";
        let text = match work.ends {
            Ends::Cable => {
                let server = format!("{program} {command} {}", stack.device(GUEST, "rxe0"));
                Row::measure(self.lab, self.guest, self.ours, &stem, &server, &command)?;
                fs::read_to_string(stem.with_extension("ours.log"))?
            }
            Ends::Veth => {
                let client = stack.device(ENDS[0], "rxe1");
                let server = stack.device(ENDS[1], "rxe2");
                let host = ENDS[1];
                let both = format!(
                    "crossed() {{ cat /sys/class/net/veth1/statistics/[rt]x_bytes; }}\n\
                     before=$(crossed)\n\
                     {program} {command} {server} >/dev/null & server=$!\n\
                     until grep -q ':4853 .* 0A ' /proc/net/tcp /proc/net/tcp6 || \
                     [ ! -e /proc/$server ]; do usleep 20000; done\n\
                     {program} {command} {client} {host} && wait $server || exit 1\n\
                     echo crossed $before $(crossed)"
                );
                let both = self.guest.start(&both)?;
                await_that(LIMIT, || both.status().is_some());
                finish(&both, &stem)?;
                let text = both.output();
                let crossed = crossed(&text).context("the link's counters are missing")?;
                let payload = u64::from(*size) * u64::from(*messages);
                ensure!(
                    crossed >= payload,
                    "of {payload} bytes {crossed} crossed the link: the others found another way"
                );
                text
            }
        };
        let report =
            text.lines().find(|line| line.starts_with('{')).context("there is no result")?;
        let report: Value = serde_json::from_str(report)?;
        let rate = report["results"][0]["gb_per_s"].as_f64().context("the result has no rate")?;
        Ok(rate * 1000.0)
    }
}

impl Work {
    fn name(&self) -> String {
        let ends = match self.ends {
            Ends::Cable => "guest and host",
            Ends::Veth => "guest's veth",
        };
        format!("{ends}, {}, {} KiB", self.test, self.size >> 10)
    }
}

impl Stack {
    /// The arguments that name a device of this stack.
    fn device(self, address: &str, kernel: &str) -> String {
        match self {
            Self::Kernel => format!("--device={kernel}"),
            Self::Udp => format!("--bind={address} --driver=udp"),
            Self::Packet => format!("--bind={address} --driver=packet"),
        }
    }
}

/// Everything that is measured.
fn work() -> impl Iterator<Item = Work> {
    let sizes = |ends, test| {
        let work = move |(size, messages)| Work { ends, test, size, messages, best: [0.0; 3] };
        SIZES.into_iter().map(work)
    };
    let tests = move |ends| TESTS.into_iter().flat_map(move |test| sizes(ends, test));
    [Ends::Veth, Ends::Cable].into_iter().flat_map(tests)
}

/// How many bytes more the link has carried after than before, both ways.
fn crossed(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("crossed "))?;
    let counts = line.split_whitespace().map(|word| word.parse().ok());
    let counts: Vec<u64> = counts.collect::<Option<_>>()?;
    let [received_before, sent_before, received, sent] = counts[..] else { return None };
    (received + sent).checked_sub(received_before + sent_before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_crossed_the_link_is_the_difference_of_its_counters() {
        assert_eq!(crossed("{}\ncrossed 10 200 15 1200\n"), Some(1005));
        assert_eq!(crossed("crossed 10 200 15\n"), None);
        assert_eq!(crossed("crossed 10 200 5 1\n"), None);
        assert_eq!(crossed("{}\n"), None);
    }

    #[test]
    fn figures_have_names_of_their_own() {
        let mut names: Vec<String> = work().map(|work| work.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), work().count());
    }
}
