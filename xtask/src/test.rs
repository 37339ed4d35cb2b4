//! `cargo xtask test`: every check that a change must pass.

mod beside;

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::{campaign, install, interop, licences, mooncake, process, tidy, wheel};

/// One step: its name, and what it does.
type Step = (&'static str, fn() -> Result<()>);

/// What comes first, in the order of what fails fastest. It keeps all processors busy by itself.
const FIRST: &[Step] = &[
    ("install", install_needs),
    ("format", || process::run(process::cargo().args(["fmt", "--all", "--check"]))),
    ("tidy", tidy::run),
    ("licences", licences::run),
    ("clippy", clippy),
    ("documentation", documentation),
    ("build", build),
    ("doc tests", || process::run(process::cargo().args(["test", "--workspace", "--doc"]))),
];

/// What lets processors idle: it waits for guests, which are emulated on one of them, and for others' timers.
const WAITING: &[Step] = &[
    ("interop", interop),
    ("mooncake", || mooncake::run(&mooncake::Options::default())),
    ("power cut", || interop::power_cut::run(&interop::power_cut::Options::default())),
];

/// What only computes, and has no bound of time: it runs [`beside`] those that wait. What it builds is in folders of its
/// own, since cargo builds in one for one process at a time; `wheels` finds there what the first one built.
const COMPUTING: &[Step] =
    &[("wheel build", wheel::build), ("models", models), ("seeds", campaign::run_of_commit)];

/// What needs the machine to itself: it counts allocations, says how long a failure may take, or has peers that fail
/// where others compute, as threads of Mooncake's engine do. The tests come last: what a test runner counted must be the
/// last thing printed.
const ALONE: &[Step] = &[
    ("wheels", wheel::run),
    ("verbs over packet sockets", verbs_over_packet_sockets),
    ("transfers with TENT", transfers_with_tent),
    ("tests", tests),
];

/// What the command line asks for.
#[derive(Debug, Default)]
pub(crate) struct Options {
    only: Option<String>,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        match arguments {
            [] => Ok(Self::default()),
            [option, name] if option == "--only" => {
                step(name)?;
                Ok(Self { only: Some(name.clone()) })
            }
            _ => bail!("test {}: its only option is --only STEP", arguments.join(" ")),
        }
    }
}

/// The step that is called so.
fn step(name: &str) -> Result<Step> {
    let all = || [FIRST, WAITING, COMPUTING, ALONE].into_iter().flatten();
    all().find(|step| step.0 == name).copied().with_context(|| {
        let names: Vec<&str> = all().map(|step| step.0).collect();
        format!("--only {name}: the steps are {}", names.join(", "))
    })
}

/// Runs every step, also after one that has failed: who waits for all of them is to hear of all failures.
pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(name) = &options.only {
        return step(name)?.1();
    }
    let mut record = Record::default();
    record.run_all(FIRST);
    thread::scope(|scope| {
        let computing = scope.spawn(|| beside::run_all(COMPUTING));
        record.run_all(WAITING);
        let computed = computing.join().map_err(|_| anyhow!("the thread beside has panicked"))?;
        record.times.extend(computed.times);
        record.failed.extend(computed.failed);
        anyhow::Ok(())
    })?;
    record.run_all(ALONE);
    if !record.failed.is_empty() {
        bail!("failed: {}", record.failed.join(", "));
    }
    Ok(())
}

/// What became of steps.
#[derive(Default)]
struct Record {
    failed: Vec<&'static str>,
    /// Of those that did not fail.
    times: Vec<(&'static str, Duration)>,
}

impl Record {
    fn run_all(&mut self, steps: &[Step]) {
        for (name, run) in steps {
            if *name == LAST {
                let times = self.times.iter().map(|(name, time)| format!("{name} {time:.1?}"));
                eprintln!("xtask: so far: {}", times.collect::<Vec<_>>().join(", "));
            }
            eprintln!("xtask: {name}");
            let start = Instant::now();
            let outcome = run();
            self.add(name, start.elapsed(), outcome);
        }
    }

    fn add(&mut self, name: &'static str, time: Duration, outcome: Result<()>) {
        match outcome {
            Err(error) => {
                eprintln!("xtask: {name}: FAILED, {time:.1?}: {error:#}");
                self.failed.push(name);
            }
            // The runner's summary has its own time, and nothing is to follow it.
            Ok(()) if name == LAST => {}
            Ok(()) => {
                eprintln!("xtask: {name}: ok, {time:.1?}");
                self.times.push((name, time));
            }
        }
    }
}

/// The step after which nothing is said.
const LAST: &str = "tests";

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

/// All that the steps after it run, but what has folders of its own: those are not to wait for a compiler.
fn build() -> Result<()> {
    process::run(process::cargo().args(["test", "--workspace", "--no-run"]))
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
    let mut command = nextest().unwrap_or_else(|| cargo_test(&[]));
    command.args(["--workspace", "--test", "suite"]);
    process::run(command.env("MILLSTREAM_TEST_DRIVER", "packet"))
}

/// The tests of transfers for which the policy counts, once more with the other one: all but those of files and of
/// `tcp` alone, of metadata servers, and those that choose policies themselves.
const WITH_TENT: [&str; 27] = [
    "allocation",
    "config",
    "cut_links",
    "descriptors",
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
    let mut command = match nextest() {
        Some(mut command) => {
            // Chosen in the whole workspace, as `programs` says why.
            command.args(["--workspace", "-E", "package(millstream-transfer)"]);
            command
        }
        None => cargo_test(&["-p", "millstream-transfer"]),
    };
    for test in WITH_TENT {
        command.args(["--test", test]);
    }
    process::run(command.env("MC_USE_TENT", "1"))
}

/// Runs tests. Nothing where cargo-nextest is not installed.
fn nextest() -> Option<Command> {
    if !process::succeeds(Command::new("cargo-nextest").args(["nextest", "--version"])) {
        eprintln!("xtask: cargo-nextest is not installed, so `cargo test` runs the tests");
        return None;
    }
    let mut command = process::cargo();
    command.args(["nextest", "run"]);
    Some(command)
}

fn cargo_test(arguments: &[&str]) -> Command {
    let mut command = process::cargo();
    command.arg("test").args(arguments);
    command
}

fn tests() -> Result<()> {
    let mut command = match nextest() {
        Some(command) => command,
        None => cargo_test(&["--lib", "--bins", "--tests", "--examples"]),
    };
    process::run(command.arg("--workspace"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Options> {
        Options::parse(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn one_step_is_chosen_by_its_name() {
        assert_eq!(parse(&[]).unwrap().only, None);
        assert_eq!(parse(&["--only", "seeds"]).unwrap().only.as_deref(), Some("seeds"));
        let error = parse(&["--only", "seed"]).unwrap_err().to_string();
        assert!(error.contains("install, format, ") && error.ends_with(", tests"), "{error}");
        for wrong in [&["--only"][..], &["seeds"], &["--only", "seeds", "models"]] {
            assert!(parse(wrong).unwrap_err().to_string().contains("--only STEP"), "{wrong:?}");
        }
    }

    #[test]
    fn what_failed_is_kept_beside_what_did_not() {
        let mut record = Record::default();
        record.run_all(&[("one", || Ok(())), ("two", || bail!("why")), (LAST, || Ok(()))]);
        assert_eq!(record.failed, ["two"]);
        assert_eq!(record.times.iter().map(|time| time.0).collect::<Vec<_>>(), ["one"]);
    }

    #[test]
    fn steps_have_names_of_their_own() {
        let all = [FIRST, WAITING, COMPUTING, ALONE].concat();
        let names: std::collections::BTreeSet<&str> = all.iter().map(|step| step.0).collect();
        assert_eq!(names.len(), all.len());
        assert_eq!(all.last().map(|step| step.0), Some(LAST));
    }
}
