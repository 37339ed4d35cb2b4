//! The conformance cases: the example `interop_peer` here, on our stack, and in the guest, on the
//! kernel's.
//!
//! One pair of processes goes through all cases. Ours leads, and prints a line for each.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::guest::Guest;
use super::lab::Lab;
use super::link::OURS;
use super::relay::Relay;
use super::row::{Process, await_that, finish, tail};
use super::{Limit, Outcome, Report, threads};
use crate::process;

/// For one case: more than its own waits may take.
const CASE_LIMIT: Duration = Duration::from_secs(150);
/// For the guest's side, once ours is done.
const CLOSING_LIMIT: Duration = Duration::from_secs(30);

/// The drivers of our side.
pub(super) const DRIVERS: [&str; 2] = ["udp", "packet"];

/// One case, with one side as the requester.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Row {
    /// What the peer calls it: our role, a tab, the case.
    line: String,
    pub(super) name: String,
}

impl Row {
    fn parse(driver: &str, line: &str) -> Option<Self> {
        let mut words = line.split('\t');
        let (role, case) = words.next().zip(words.next())?;
        let requester = match role {
            "requester" => "ours",
            "responder" => "kernel's",
            _ => return None,
        };
        Some(Self {
            line: format!("{role}\t{case}"),
            name: format!("{driver}, {requester}: {case}"),
        })
    }
}

/// All the cases that `peer` has for a driver.
pub(super) fn rows(peer: &Path, driver: &str) -> Result<Vec<Row>> {
    let text = process::output(Command::new(peer).args(["list", driver]))?;
    text.lines()
        .map(|line| Row::parse(driver, line).with_context(|| format!("the peer lists {line:?}")))
        .collect()
}

/// Where the cases run.
pub(super) struct Field<'a> {
    pub(super) lab: &'a Lab,
    pub(super) guest: &'a mut Guest,
    pub(super) relay: &'a Relay,
    /// Of our side.
    pub(super) driver: &'a str,
    /// The folder for what both sides print.
    pub(super) logs: &'a Path,
    /// Of the whole run.
    pub(super) limit: Limit,
}

/// Runs these cases and gives each one's report to `report`, as it ends.
pub(super) fn run(
    field: Field<'_>,
    peer: &Path,
    rows: &[Row],
    mut report: impl FnMut(Report),
) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let Field { lab, guest, relay, driver, logs, limit } = field;
    let stem = logs.join(format!("cases-{driver}"));
    let wanted = lab.scratch().join("rows");
    fs::write(&wanted, rows.iter().map(|row| format!("{}\n", row.line)).collect::<String>())?;
    let (log, state) = (stem.with_extension("ours.log"), stem.with_extension("guest.log"));
    let _ = fs::remove_file(&state);
    let mut command = lab.command(peer);
    command
        .args(["lead", OURS, "--driver", driver, "--relay"])
        .arg(relay.control())
        .arg("--rows")
        .arg(&wanted);
    command.stdout(Stdio::piped()).stderr(File::create(&log)?);
    let mut ours = Process(command.spawn().context("cannot start the peer")?);
    let output = ours.0.stdout.take().context("the peer has no output")?;
    let (sender, lines) = mpsc::channel();
    // Ends with the peer, or with this function.
    std::thread::spawn(move || {
        let lines = BufReader::new(output).lines().map_while(Result::ok);
        lines.take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
    });
    let program = guest.lend(peer)?;
    let theirs = guest.start(&format!("exec ./{program} join {OURS}"))?;

    let mut left = rows.iter();
    let mut failed = false;
    let mut since = Instant::now();
    // Why no more lines came.
    let silence = loop {
        let line = match lines.recv_timeout(CASE_LIMIT.min(limit.left())) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => break None,
            Err(RecvTimeoutError::Timeout) if limit.left().is_zero() => break Some(limit.reason()),
            Err(RecvTimeoutError::Timeout) => {
                break Some(format!("it did not end within {CASE_LIMIT:?}"));
            }
        };
        let Some((row, found)) =
            Row::parse(driver, &line).and_then(|row| Some((row, judge(&line)?)))
        else {
            eprintln!("xtask: the peer says {line:?}");
            continue;
        };
        // Cases run in order; one that was passed over is reported below.
        match left.next() {
            Some(expected) if *expected == row => {}
            other => anyhow::bail!("the peer ran {row:?} where {other:?} is next"),
        }
        let (outcome, time) = found;
        failed |= matches!(outcome, Outcome::Failed(_));
        since = Instant::now();
        report(Report { name: row.name, outcome, time });
    };
    if silence.is_some() {
        eprintln!("ours, which has not ended:\n{}", threads::of(ours.0.id()));
        // It has had its time.
        ours.0.kill()?;
    }
    let ended = await_that(CLOSING_LIMIT, || ours.ended().is_some() && theirs.status().is_some());
    let status = ours.ended();
    let theirs = finish(&theirs, &stem);
    let said = fs::read_to_string(&log).unwrap_or_default();
    let well = silence.is_none() && status.is_some_and(|status| status.success());
    if (failed || !well || left.len() > 0) && !state.exists() {
        let guest = guest.state();
        eprintln!("{}", threads::first_part(&guest));
        fs::write(&state, guest)?;
    }
    let why = silence.unwrap_or_else(|| match status {
        Some(status) => format!("our side ended with {status}"),
        None => "our side did not end".to_owned(),
    });
    if let Some(row) = left.next() {
        // The one that it was at.
        report(Report {
            name: row.name.clone(),
            outcome: Outcome::Failed(format!("{why}: {}", tail(&said))),
            time: since.elapsed(),
        });
    }
    for row in left {
        report(Report {
            name: row.name.clone(),
            outcome: Outcome::Failed("it was not reached: one before it did not end".to_owned()),
            time: Duration::ZERO,
        });
    }
    match well && ended {
        true => theirs,
        false => theirs.and_then(|()| anyhow::bail!("{why}: {}", tail(&said))),
    }
}

/// How a case ended, by the line about it.
fn judge(line: &str) -> Option<(Outcome, Duration)> {
    let mut words = line.split('\t').skip(2);
    let (word, time) = (words.next()?, words.next()?);
    let reason = words.next()?.to_owned();
    let outcome = match word {
        "passed" => Outcome::Passed,
        "failed" => Outcome::Failed(reason),
        "skipped" => Outcome::Skipped(reason),
        _ => return None,
    };
    Some((outcome, Duration::from_millis(time.parse().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peers_lines_become_rows() {
        let line = "requester\tSEND, 16 MiB\tfailed\t1500\tno completion";
        let row = Row::parse("udp", line).unwrap();
        assert_eq!(row.name, "udp, ours: SEND, 16 MiB");
        assert_eq!(row, Row::parse("udp", "requester\tSEND, 16 MiB").unwrap());
        let failed = Outcome::Failed("no completion".to_owned());
        assert_eq!(judge(line), Some((failed, Duration::from_millis(1500))));
        assert_eq!(
            judge("responder\tREAD\tpassed\t7\t"),
            Some((Outcome::Passed, Duration::from_millis(7)))
        );
        for wrong in ["", "thread panicked", "nobody\tREAD\tpassed\t7\t"] {
            assert_eq!(Row::parse("udp", wrong), None);
        }
        assert_eq!(judge("requester\tREAD\tunknown\t7\t"), None);
    }
}
