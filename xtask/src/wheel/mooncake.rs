//! The wheel `millstream-mooncake`, compared with the original, and beside it.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::Wheels;
use super::environment::Environment;
use crate::mooncake::wheel as original;
use crate::process;

/// Runs the same program with the original and with ours, and with one at each end: what it prints is the same.
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
    let ours = ours.python();
    let original = said(&theirs, &theirs)?;
    let expected = original.lines;
    if !expected.last().is_some_and(|line| line.starts_with(LAST)) {
        eprint!("{}", original.complaints);
        bail!("the original ended after {:?}", expected.last());
    }
    let pairs = [
        ("ours", &ours, &ours),
        ("ours to the original", &ours, &theirs),
        ("the original to ours", &theirs, &ours),
    ];
    for (who, initiator, target) in pairs {
        let found = said(initiator, target)?;
        let wrong = differences(who, &expected, &found.lines);
        if wrong > 0 {
            eprint!("{}", found.complaints);
        }
        ensure!(wrong == 0, "{wrong} lines of bindings/mooncake/tests/contract.py differ: {who}");
    }
    eprintln!("xtask: the original and ours print the same {} lines", expected.len());
    Ok(())
}

/// How many lines differ, each of which is shown.
fn differences(who: &str, expected: &[String], found: &[String]) -> usize {
    let line = |lines: &[String], index: usize| {
        lines.get(index).map_or_else(|| "nothing".to_owned(), String::clone)
    };
    let pairs =
        (0..expected.len().max(found.len())).map(|it| (line(expected, it), line(found, it)));
    let wrong = pairs.filter(|(expected, found)| expected != found);
    wrong
        .inspect(|(expected, found)| {
            eprintln!("xtask: the original says {expected:?}, and {who} {found:?}");
        })
        .count()
}

/// What the program prints at the end.
const LAST: &str = "= batch_unregister_memory";

/// What the program says.
struct Said {
    /// What it prints.
    lines: Vec<String>,
    /// Why there are codes that are not 0, and how it has failed, if it has.
    complaints: String,
}

/// What the program says with this interpreter, and that one for its target.
fn said(python: &Path, target: &Path) -> Result<Said> {
    let script = process::repository_root().join("bindings/mooncake/tests/contract.py");
    let mut command = Command::new(python);
    command.env("CONTRACT_TARGET", target);
    command.args(["-I".as_ref(), script.as_os_str()]).stdin(Stdio::null());
    let output = command.output().context("cannot start python")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter(|line| line.starts_with("= ")).map(str::to_owned).collect();
    let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
    let complaints = format!("{complaints}xtask: it ended with {}\n", output.status);
    Ok(Said { lines, complaints })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_differ_are_counted() {
        let lines = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for (found, wrong) in [("a b c", 0), ("a x c", 1), ("a b", 1), ("a b c d", 1), ("b c", 3)] {
            assert_eq!(differences("ours", &lines("a b c"), &lines(found)), wrong, "{found}");
        }
    }
}
