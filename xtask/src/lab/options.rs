//! Arguments of `cargo xtask lab`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use millstream_lab::{Cut, Rate};

#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    /// Which lab.
    pub(super) name: String,
    pub(super) task: Task,
}

#[derive(Debug, PartialEq)]
pub(super) enum Task {
    Up(PathBuf),
    Hold(PathBuf),
    Down,
    Exec { host: String, command: Vec<String> },
    Cut { host: String, nic: String, how: Cut },
    Restore { host: String, nic: String },
    Rate { host: String, nic: String, rate: Option<Rate> },
    Status,
    Bench(BenchOptions),
    BenchPolicies(BenchOptions),
    BenchCollectives(BenchOptions),
}

/// What is measured.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BenchOptions {
    /// Rounds of all rows, by turns.
    pub(super) runs: usize,
    /// Whether links are cut, too.
    pub(super) cuts: bool,
    /// Nothing but small requests beside a stream.
    pub(super) only_mixed: bool,
    /// On this machine alone, without links.
    pub(super) loopback: bool,
    pub(super) json: bool,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let mut name = "lab".to_owned();
        let mut bench =
            BenchOptions { runs: 3, cuts: true, only_mixed: false, loopback: false, json: false };
        let mut how = Cut::Down;
        let mut words: Vec<&str> = Vec::new();
        let mut command = None;
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value =
                || rest.next().with_context(|| format!("{argument} needs a value")).cloned();
            match argument.as_str() {
                "--name" => name = value()?,
                "--silent" => how = Cut::Silent,
                "--runs" => bench.runs = value()?.parse().context("--runs")?,
                "--no-cuts" => bench.cuts = false,
                "--mixed" => bench.only_mixed = true,
                "--loopback" => bench.loopback = true,
                "--json" => bench.json = true,
                "--" => {
                    command = Some(rest.by_ref().cloned().collect::<Vec<_>>());
                }
                option if option.starts_with('-') => bail!("lab has no option {option}"),
                word => words.push(word),
            }
        }
        let task = match (words.as_slice(), command) {
            (["up", file], None) => Task::Up(file.into()),
            (["hold", file], None) => Task::Hold(file.into()),
            (["down"], None) => Task::Down,
            (["status"], None) => Task::Status,
            (["bench-collectives"], None) if bench.runs > 0 && !bench.only_mixed && bench.cuts => {
                Task::BenchCollectives(bench)
            }
            (["bench" | "bench-policies", ..], _) if bench.loopback => {
                bail!("lab {}: --loopback is for bench-collectives", arguments.join(" "))
            }
            (["bench"], None) if bench.runs > 0 && !bench.only_mixed => Task::Bench(bench),
            (["bench-policies"], None) if bench.runs > 0 => Task::BenchPolicies(bench),
            (["exec", host], Some(command)) if !command.is_empty() => {
                Task::Exec { host: (*host).to_owned(), command }
            }
            (["cut", place], None) => {
                let (host, nic) = nic(place)?;
                Task::Cut { host, nic, how }
            }
            (["restore", place], None) => {
                let (host, nic) = nic(place)?;
                Task::Restore { host, nic }
            }
            (["rate", place, rate], None) => {
                let (host, nic) = nic(place)?;
                let rate = if *rate == "none" { None } else { Some(rate.parse()?) };
                Task::Rate { host, nic, rate }
            }
            _ => bail!("lab {}: that is no task of a lab", arguments.join(" ")),
        };
        Ok(Self { name, task })
    }
}

fn nic(place: &str) -> Result<(String, String)> {
    let (host, nic) = place.split_once(':').with_context(|| format!("{place}: write HOST:NIC"))?;
    Ok((host.to_owned(), nic.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Options::parse(&words)
    }

    #[test]
    fn tasks_are_told_apart() {
        let nic = || ("a".to_owned(), "eth0".to_owned());
        let cut = |how| Task::Cut { host: nic().0, nic: nic().1, how };
        for (line, name, task) in [
            ("up x.toml", "lab", Task::Up("x.toml".into())),
            ("down --name two", "two", Task::Down),
            ("cut a:eth0", "lab", cut(Cut::Down)),
            ("cut --silent a:eth0", "lab", cut(Cut::Silent)),
            ("restore a:eth0", "lab", Task::Restore { host: nic().0, nic: nic().1 }),
            (
                "rate a:eth0 20mbit",
                "lab",
                Task::Rate { host: nic().0, nic: nic().1, rate: Some(Rate::from_mbit(20)) },
            ),
            ("rate a:eth0 none", "lab", Task::Rate { host: nic().0, nic: nic().1, rate: None }),
            (
                "exec a -- ls --name -x",
                "lab",
                Task::Exec {
                    host: "a".to_owned(),
                    command: ["ls", "--name", "-x"].map(str::to_owned).to_vec(),
                },
            ),
            (
                "bench --runs 5 --no-cuts",
                "lab",
                Task::Bench(BenchOptions {
                    runs: 5,
                    cuts: false,
                    only_mixed: false,
                    loopback: false,
                    json: false,
                }),
            ),
            (
                "bench-policies --mixed --json",
                "lab",
                Task::BenchPolicies(BenchOptions {
                    runs: 3,
                    cuts: true,
                    only_mixed: true,
                    loopback: false,
                    json: true,
                }),
            ),
        ] {
            assert_eq!(parse(line).unwrap(), Options { name: name.to_owned(), task }, "{line}");
        }
    }

    #[test]
    fn what_is_no_task_is_refused() {
        for line in [
            "",
            "up",
            "up a b",
            "cut a",
            "rate a:eth0 20",
            "exec a",
            "exec a --",
            "exec -- ls",
            "bench --runs 0",
            "bench --mixed",
            "bench --loopback",
            "bench-collectives --no-cuts",
            "down --name",
            "status --fast",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
