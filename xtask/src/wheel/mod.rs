//! `cargo xtask wheel`: the wheels for Python, what must be true of them, and their tests in fresh environments.

mod build;
mod check;
mod environment;
mod mooncake;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use self::build::Wheels;
use self::environment::Environment;
use crate::mooncake::wheel as original;
use crate::{install, process, programs};

/// Builds the wheels into `target/wheels`, checks and tests them.
pub(crate) fn run() -> Result<()> {
    if !everything_is_there()? {
        return Ok(());
    }
    let wheels = timed("built", build::wheels)?;
    check::native(&wheels.native)?;
    let environment = timed("installed", || {
        let environment = Environment::fresh("test")?;
        environment.install(&[original::NUMPY])?;
        environment.install_wheels(&[&wheels.native, &wheels.mooncake])?;
        Ok(environment)
    })?;
    // The peer of tests with certificates.
    let command = std::path::absolute(timed("command built", programs::millstream)?)?;
    timed("tested", || {
        unit_tests(&environment, "bindings/python/tests", &command)?;
        unit_tests(&environment, "bindings/mooncake/tests", &command)
    })?;
    timed("compared with the original", || mooncake::compare(&environment))?;
    timed("installed beside the original", || mooncake::beside(&wheels))
}

/// Builds the wheels and no more: whoever does so next finds what the compiler made.
pub(crate) fn build() -> Result<()> {
    if everything_is_there()? {
        timed("built", build::wheels)?;
    }
    Ok(())
}

/// Installs what wheels need. Where that cannot be, says so.
fn everything_is_there() -> Result<bool> {
    let missing = install::ensure(install::FOR_WHEELS);
    if missing.is_empty() {
        return Ok(true);
    }
    let names: Vec<&str> = missing.iter().map(|need| need.program).collect();
    let reason = format!("wheels need {}", names.join(", "));
    if process::everything_required() {
        bail!("{reason}, and MILLSTREAM_REQUIRE=all");
    }
    eprintln!("xtask: skipped: {reason}");
    Ok(false)
}

/// Does something, and says how long it took.
fn timed<R>(what: &str, run: impl FnOnce() -> Result<R>) -> Result<R> {
    let begun = Instant::now();
    let done = run()?;
    eprintln!("xtask: wheels {what}: {:.1?}", begun.elapsed());
    Ok(done)
}

/// Runs the tests in a folder with what is installed, and not with what lies beside them.
fn unit_tests(environment: &Environment, folder: &str, command: &Path) -> Result<()> {
    let folder = process::repository_root().join(folder);
    // What hangs is a failure.
    let mut python = Command::new("timeout");
    python.args(["--kill-after=10", "600"]).arg(environment.python());
    python.args(["-I", "-B", "-W", "always::ResourceWarning", "-m", "unittest", "discover", "-s"]);
    python.env("MILLSTREAM_TEST_COMMAND", command);
    python.arg(&folder).current_dir(Path::new("/")).stdin(Stdio::null()).stderr(Stdio::piped());
    let output = python.output().context("cannot start the tests in Python")?;
    let said = String::from_utf8_lossy(&output.stderr);
    eprint!("{said}");
    ensure!(
        output.status.success(),
        "the tests in {} ended with {}",
        folder.display(),
        output.status
    );
    judge(&said).with_context(|| format!("the tests in {}", folder.display()))
}

/// What tests must not have said, though they have passed: an interpreter ends with 0 when there are none, and whatever
/// is raised where an object ends is told and forgotten.
fn judge(said: &str) -> Result<()> {
    let ran = said.lines().find_map(|line| line.strip_prefix("Ran "));
    let count = ran.and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok());
    ensure!(count.is_some_and(|count| count > 0), "no test has run");
    for wrong in ["ResourceWarning", "Exception ignored in"] {
        ensure!(!said.contains(wrong), "there is a {wrong:?} in what they say");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_do_not_run_or_leave_things_open_have_failed() {
        judge("..\n-----\nRan 2 tests in 0.1s\n\nOK\n").unwrap();
        let wrong = [
            "",
            "\nRan 0 tests in 0.000s\n\nNO TESTS RAN\n",
            "Exception ignored in: <function A.__del__>\nRan 2 tests in 0.1s\n\nOK\n",
            "a.py:7: ResourceWarning: unclosed file\nRan 2 tests in 0.1s\n\nOK\n",
        ];
        for said in wrong {
            assert!(judge(said).is_err(), "{said}");
        }
    }
}
