//! `cargo xtask wheel`: the wheels for Python, what must be true of them, and their tests in fresh environments.

mod build;
mod check;
mod environment;
mod mooncake;

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};

use self::build::Wheels;
use self::environment::Environment;
use crate::{install, process};

/// Builds the wheels into `target/wheels`, checks and tests them.
pub(crate) fn run() -> Result<()> {
    let missing = install::ensure(install::FOR_WHEELS);
    if !missing.is_empty() {
        let names: Vec<&str> = missing.iter().map(|need| need.program).collect();
        let reason = format!("wheels need {}", names.join(", "));
        if process::everything_required() {
            bail!("{reason}, and MILLSTREAM_REQUIRE=all");
        }
        eprintln!("xtask: skipped: {reason}");
        return Ok(());
    }
    let wheels = timed("built", build::wheels)?;
    check::native(&wheels.native)?;
    let environment = timed("installed", || {
        let environment = Environment::fresh("test")?;
        environment.install(&["numpy"])?;
        environment.install_wheels(&[&wheels.native, &wheels.mooncake])?;
        Ok(environment)
    })?;
    timed("tested", || {
        unit_tests(&environment, "bindings/python/tests")?;
        unit_tests(&environment, "bindings/mooncake/tests")
    })?;
    timed("compared with the original", || mooncake::compare(&environment))?;
    timed("installed beside the original", || mooncake::beside(&wheels))
}

/// Does something, and says how long it took.
fn timed<R>(what: &str, run: impl FnOnce() -> Result<R>) -> Result<R> {
    let begun = Instant::now();
    let done = run()?;
    eprintln!("xtask: wheels {what}: {:.1?}", begun.elapsed());
    Ok(done)
}

/// Runs the tests in a folder with what is installed, and not with what lies beside them.
fn unit_tests(environment: &Environment, folder: &str) -> Result<()> {
    let folder = process::repository_root().join(folder);
    // What hangs is a failure.
    let mut python = Command::new("timeout");
    python.args(["--kill-after=10", "600"]).arg(environment.python());
    python.args(["-I", "-B", "-W", "error::ResourceWarning", "-m", "unittest", "discover", "-s"]);
    process::run(python.arg(folder).current_dir(Path::new("/")))
}
