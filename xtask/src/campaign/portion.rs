//! A few runs of one scenario, in a process of their own: a run that never ends, or takes the
//! process with it, is a finding like any other.

use std::fmt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// What a portion may take. It is planned to take two seconds.
const LIMIT_S: u32 = 600;
/// The exit status of `timeout` for what it had to kill.
const TIMED_OUT: i32 = 124;

/// Runs of a scenario with seeds in a row.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Portion {
    pub(super) scenario: String,
    pub(super) first: u64,
    pub(super) runs: u64,
}

/// What came of a portion.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Outcome {
    pub(super) failed: u64,
    /// The first few.
    pub(super) findings: Vec<Finding>,
}

/// A run that failed.
#[derive(Debug, PartialEq)]
pub(super) struct Finding {
    pub(super) what: String,
    /// Commands that show it again, the shortest run last.
    pub(super) commands: Vec<String>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "FAILED {}", self.what)?;
        self.commands.iter().try_for_each(|command| writeln!(f, "    {command}"))
    }
}

impl Portion {
    /// Runs it.
    pub(super) fn run(&self, millstream: &Path) -> Outcome {
        let mut command = Command::new("timeout");
        // In our process group, so that Ctrl-C ends it too.
        command
            .args(["--foreground", &LIMIT_S.to_string()])
            .arg(millstream)
            .args(["sim", "--json"]);
        command.args(["--scenario", &self.scenario]);
        command.args(["--seed", &self.first.to_string(), "--runs", &self.runs.to_string()]);
        if self.scenario == "rc-chaos" {
            // The portions are side by side already.
            command.args(["--jobs", "1"]);
        }
        match command.stdin(Stdio::null()).output() {
            Ok(output) => self.read(&output),
            Err(error) => self.broken(format!("cannot start {}: {error}", millstream.display())),
        }
    }

    fn read(&self, output: &Output) -> Outcome {
        if output.status.code() == Some(TIMED_OUT) {
            return self.broken(format!("did not end within {LIMIT_S} s"));
        }
        match serde_json::from_slice(&output.stdout) {
            Ok(report) if output.status.code().is_some_and(|code| code <= 1) => {
                self.outcome(&report)
            }
            _ => {
                let said = String::from_utf8_lossy(&output.stderr);
                let said = said.lines().last().unwrap_or("nothing");
                self.broken(format!("ended with {}, and said: {said}", output.status))
            }
        }
    }

    /// All of its runs count as failed, since nobody knows which did.
    fn broken(&self, what: String) -> Outcome {
        let Self { scenario, first, runs } = self;
        let command = format!("millstream sim --scenario {scenario} --seed {first} --runs {runs}");
        let what = format!("{scenario}, {runs} runs from seed {first}: {what}");
        Outcome { failed: *runs, findings: vec![Finding { what, commands: vec![command] }] }
    }

    /// What `millstream sim --json` says: of rc-chaos the failures, of the others each run.
    fn outcome(&self, report: &Value) -> Outcome {
        let scenario = &self.scenario;
        let list = |key: &str| report[key].as_array().map(Vec::as_slice).unwrap_or_default();
        let failures: Vec<&Value> = match report["failures"].is_array() {
            true => list("failures").iter().collect(),
            false => list("runs").iter().filter(|run| run["passed"] != true).collect(),
        };
        let failed = report["failed"].as_u64().unwrap_or(failures.len() as u64);
        if report["passed"] != (failed == 0) {
            return self.broken(format!("a report that is no report: {report}"));
        }
        let finding = |failure: &&Value| {
            let seed = &failure["seed"];
            let replay = format!("millstream sim --scenario {scenario} --seed {seed}");
            let shrunk = failure["shrunk"].as_str().filter(|shrunk| *shrunk != replay);
            let what = failure["violations"][0].as_str().unwrap_or("failed");
            Finding {
                what: format!("{scenario}, seed {seed}: {what}"),
                commands: [Some(replay.as_str()), shrunk]
                    .map(|c| c.map(str::to_owned))
                    .into_iter()
                    .flatten()
                    .collect(),
            }
        };
        Outcome { failed, findings: failures.iter().map(finding).collect() }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn read(scenario: &str, status: i32, stdout: &str) -> Outcome {
        let portion = Portion { scenario: scenario.into(), first: 5, runs: 3 };
        portion.read(&Output {
            // As wait(2) codes it: an exit status above a signal.
            status: ExitStatus::from_raw(status),
            stdout: stdout.into(),
            stderr: b"one\nmillstream: two\n".into(),
        })
    }

    #[test]
    fn reports_of_either_form_are_read() {
        let good = r#"{"passed":true,"runs":[{"seed":5,"passed":true},{"seed":6,"passed":true}]}"#;
        assert_eq!(read("swarm", 0, good), Outcome::default());
        let good = r#"{"passed":true,"failed":0,"runs":3,"failures":[]}"#;
        assert_eq!(read("rc-chaos", 0, good), Outcome::default());

        let bad = r#"{"passed":false,"runs":[{"seed":5,"passed":true},
                      {"seed":6,"passed":false,"violations":["wrong bytes","more"]}]}"#;
        let outcome = read("swarm", 1 << 8, bad);
        assert_eq!((outcome.failed, outcome.findings.len()), (1, 1));
        assert_eq!(outcome.findings[0].what, "swarm, seed 6: wrong bytes");
        assert_eq!(outcome.findings[0].commands, ["millstream sim --scenario swarm --seed 6"]);

        let bad = r#"{"passed":false,"failed":2,"runs":3,"failures":[{"seed":7,
                      "violations":["a"],"shrunk":"millstream sim --iters 1"}]}"#;
        let outcome = read("rc-chaos", 1 << 8, bad);
        assert_eq!((outcome.failed, outcome.findings[0].commands.len()), (2, 2));
        assert_eq!(outcome.findings[0].commands[1], "millstream sim --iters 1");
    }

    #[test]
    fn a_process_without_a_report_is_a_failure_of_all_its_runs() {
        let good = r#"{"passed":true,"runs":[]}"#;
        for (status, stdout, words) in [
            (TIMED_OUT << 8, "", "600 s"),
            (9, "", "signal: 9"),
            (9, good, "signal: 9"),
            (1 << 8, "", "millstream: two"),
            (2 << 8, good, "millstream: two"),
            (0, "{}", "no report"),
            (0, r#"{"passed":false,"runs":[]}"#, "no report"),
        ] {
            let outcome = read("swarm", status, stdout);
            assert_eq!(outcome.failed, 3, "{words}");
            assert!(outcome.findings[0].what.contains(words), "{outcome:?}");
            assert!(outcome.findings[0].commands[0].ends_with("--seed 5 --runs 3"));
        }
    }
}
