//! Steps beside others: each in a process of its own, which gets the processor time that nobody else wants.
//!
//! A guest that is emulated, or a peer that lets time pass, leaves processors idle. Steps without a bound of time
//! use them.

use std::fs::{self, File};
use std::path::Path;
use std::process::{self, Command};
use std::time::Instant;

use anyhow::{Context, Result};

use super::{Record, Step};
use crate::process::{run, target_directory};

/// Runs these steps one after the other. What each says is printed when it has ended, and lies in
/// `target/beside` meanwhile.
pub(super) fn run_all(steps: &[Step]) -> Record {
    let mut record = Record::default();
    let folder = target_directory().join("beside");
    for (name, _) in steps {
        let log = folder.join(format!("{}.log", name.replace(' ', "-")));
        eprintln!("xtask: {name}: begun beside the others, {}", log.display());
        let start = Instant::now();
        let outcome = run_one(name, &log);
        // In one piece: what another step says stands before or behind it.
        eprint!("xtask: {name}\n{}", said(&log));
        record.add(name, start.elapsed(), outcome);
    }
    record
}

fn run_one(name: &str, log: &Path) -> Result<()> {
    let folder = log.parent().context("a log lies in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let output = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    // By this name it is there though cargo may have put another build in its place. With this policy it
    // runs where a processor is idle, and gives way at once.
    let program = format!("/proc/{}/exe", process::id());
    let mut command = Command::new("chrt");
    command.args(["--idle", "0", &program, "test", "--only", name]);
    run(command.stdout(output.try_clone()?).stderr(output))
}

/// What a step has printed.
fn said(log: &Path) -> String {
    String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned()
}
