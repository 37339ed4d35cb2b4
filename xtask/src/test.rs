//! `cargo xtask test`: every check that a change must pass, in the order of what fails fastest.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::{campaign, install, interop, licences, mooncake, process, tidy, wheel};

/// One step: its name, and what it does.
type Step = (&'static str, fn() -> Result<()>);

/// The tests come last: what a test runner counted must be the last thing printed.
const STEPS: &[Step] = &[
    ("install", install_needs),
    ("format", || process::run(process::cargo().args(["fmt", "--all", "--check"]))),
    ("tidy", tidy::run),
    ("licences", licences::run),
    ("clippy", clippy),
    ("documentation", documentation),
    ("doc tests", || process::run(process::cargo().args(["test", "--workspace", "--doc"]))),
    ("models", models),
    ("interop", interop),
    ("mooncake", || mooncake::run(&mooncake::Options::default())),
    ("wheels", wheel::run),
    ("power cut", || interop::power_cut::run(&interop::power_cut::Options::default())),
    ("verbs over packet sockets", verbs_over_packet_sockets),
    ("transfers with TENT", transfers_with_tent),
    ("seeds", campaign::run_of_commit),
    ("tests", tests),
];

/// Runs every step, also after one that has failed: who waits for all of them is to hear of all failures.
pub(crate) fn run() -> Result<()> {
    let mut failed = Vec::new();
    let mut times: Vec<(&str, Duration)> = Vec::new();
    for (index, (name, step)) in STEPS.iter().enumerate() {
        let last = index + 1 == STEPS.len();
        if last {
            let list: Vec<_> =
                times.iter().map(|(name, time)| format!("{name} {time:.1?}")).collect();
            eprintln!("xtask: so far: {}", list.join(", "));
        }
        eprintln!("xtask: {name}");
        let start = Instant::now();
        if let Err(error) = step() {
            eprintln!("xtask: {name}: FAILED, {:.1?}: {error:#}", start.elapsed());
            failed.push(*name);
        } else if !last {
            // The runner's summary has its own time, and nothing is to follow it.
            eprintln!("xtask: {name}: ok, {:.1?}", start.elapsed());
            times.push((name, start.elapsed()));
        }
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

fn install_needs() -> Result<()> {
    let missing = install::ensure(install::FOR_TESTS);
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = missing.iter().map(|need| need.program).collect();
    if process::everything_required() {
        bail!("missing, and MILLSTREAM_REQUIRE=all: {}", names.join(", "));
    }
    eprintln!("xtask: tests that need {} will be skipped", names.join(", "));
    Ok(())
}

fn clippy() -> Result<()> {
    let arguments = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    process::run(process::cargo().args(arguments))
}

fn documentation() -> Result<()> {
    let mut command = process::cargo();
    process::run(
        command.args(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"),
    )
}

/// The concurrency of `millstream-net`, in all orders in which threads can take their steps.
fn models() -> Result<()> {
    let mut command = process::cargo();
    command.args(["test", "-p", "millstream-net", "--lib", "model"]);
    // Other flags are another build of everything: it does not take the place of the usual one.
    command.env("CARGO_TARGET_DIR", "target/models");
    process::run(command.env("RUSTFLAGS", "--cfg millstream_loom"))
}

fn interop() -> Result<()> {
    interop::run(&interop::Options::default())
}

/// What every provider must do, once more with the other driver of soft devices.
fn verbs_over_packet_sockets() -> Result<()> {
    if !process::is_root() {
        let reason = "packet sockets need CAP_NET_RAW, and this is not root";
        if process::everything_required() {
            bail!("{reason}, and MILLSTREAM_REQUIRE=all");
        }
        eprintln!("xtask: skipped: {reason}");
        return Ok(());
    }
    let mut command = process::cargo();
    command.args(if has_nextest() { &["nextest", "run"][..] } else { &["test"] });
    command.args(["--workspace", "--test", "suite"]);
    process::run(command.env("MILLSTREAM_TEST_DRIVER", "packet"))
}

/// The tests of transfers for which the policy counts, once more with the other one: all but those of files and of
/// `tcp` alone, of metadata servers, and those that choose policies themselves.
const WITH_TENT: [&str; 26] = [
    "allocation",
    "config",
    "cut_links",
    "ending",
    "errors",
    "failures",
    "fences",
    "first",
    "initiators",
    "killed",
    "late",
    "local",
    "many_dead",
    "many_killed",
    "metrics",
    "other_transport",
    "paths",
    "pieces",
    "rdma",
    "regions",
    "registration",
    "relayed",
    "restart",
    "shm",
    "unmapped",
    "waiting",
];

fn transfers_with_tent() -> Result<()> {
    let mut command = process::cargo();
    if has_nextest() {
        // Chosen in the whole workspace, as `programs` says why.
        command.args(["nextest", "run", "--workspace", "-E", "package(millstream-transfer)"]);
    } else {
        command.args(["test", "-p", "millstream-transfer"]);
    }
    for test in WITH_TENT {
        command.args(["--test", test]);
    }
    process::run(command.env("MC_USE_TENT", "1"))
}

fn has_nextest() -> bool {
    process::succeeds(Command::new("cargo-nextest").args(["nextest", "--version"]))
}

fn tests() -> Result<()> {
    if has_nextest() {
        return process::run(process::cargo().args(["nextest", "run", "--workspace"]));
    }
    eprintln!("xtask: cargo-nextest is not installed, so `cargo test` runs the tests");
    let targets = ["--lib", "--bins", "--tests", "--examples"];
    process::run(process::cargo().args(["test", "--workspace"]).args(targets))
}
