//! The wheel `millstream-mooncake`, compared with the original, and beside it.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::Wheels;
use super::environment::Environment;
use crate::mooncake::wheel as original;
use crate::process;

/// Runs the same program with the original and with ours: what it prints is the same.
pub(super) fn compare(ours: &Environment) -> Result<()> {
    let theirs = match original::installed() {
        Ok(python) => python,
        Err(error) if process::everything_required() => {
            return Err(error.context("the original is needed, as MILLSTREAM_REQUIRE=all"));
        }
        Err(error) => {
            eprintln!("xtask: skipped: there is no original: {error:#}");
            return Ok(());
        }
    };
    let (expected, found) = (lines(&theirs)?, lines(&ours.python())?);
    let ended = |lines: &[String]| lines.last().is_some_and(|line| line.starts_with(LAST));
    ensure!(ended(&expected), "the original ended after {:?}", expected.last());
    let mut wrong = 0;
    for index in 0..expected.len().max(found.len()) {
        let line = |lines: &[String]| lines.get(index).map_or("nothing", |line| line).to_owned();
        let (expected, found) = (line(&expected), line(&found));
        if expected != found {
            wrong += 1;
            eprintln!("xtask: the original says {expected:?}, and ours {found:?}");
        }
    }
    ensure!(wrong == 0, "{wrong} lines of bindings/mooncake/tests/contract.py differ");
    eprintln!("xtask: the original and ours print the same {} lines", expected.len());
    Ok(())
}

/// What the program prints at the end.
const LAST: &str = "= batch_unregister_memory";

/// What the program prints with this interpreter.
fn lines(python: &Path) -> Result<Vec<String>> {
    let script = process::repository_root().join("bindings/mooncake/tests/contract.py");
    let mut command = Command::new(python);
    // Both say on stderr why there are codes that are not 0.
    command.args(["-I".as_ref(), script.as_os_str()]).stderr(Stdio::null()).stdin(Stdio::null());
    let output = command.output().context("cannot start python")?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter(|line| line.starts_with("= ")).map(str::to_owned).collect())
}

/// Installs and removes both in both orders.
pub(super) fn beside(wheels: &Wheels) -> Result<()> {
    // It is not there on other machines, which are told so by `compare`.
    if original::installed().is_err() {
        return Ok(());
    }
    let environment = Environment::fresh("beside")?;
    let script = process::repository_root().join("bindings/mooncake/tests/beside.py");
    let mut command = Command::new(environment.python());
    command.arg(script).arg(original::PACKAGE).args([&wheels.native, &wheels.mooncake]);
    process::run(&mut command)
}
