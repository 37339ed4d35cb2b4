//! What the command line asks for.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

/// The arguments of `cargo xtask compare`.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    /// Two builds of `millstream`: before and after.
    pub(super) programs: [PathBuf; 2],
    /// Of each.
    pub(super) runs: u32,
    pub(super) json: bool,
    /// For `bench rdma`.
    pub(super) bench: Vec<String>,
}

impl Options {
    const DEFAULT_RUNS: u32 = 5;
    const MAX_RUNS: u32 = 1000;

    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let [mut before, mut after] = [None, None];
        let (mut runs, mut json, mut bench) = (Self::DEFAULT_RUNS, false, Vec::new());
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value = || rest.next().with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--before" => before = Some(PathBuf::from(value()?)),
                "--after" => after = Some(PathBuf::from(value()?)),
                "--runs" => {
                    let value = value()?;
                    runs = match value.parse() {
                        Ok(runs @ 1..=Self::MAX_RUNS) => runs,
                        _ => bail!("--runs {value}: it is 1 to {}", Self::MAX_RUNS),
                    };
                }
                "--json" => json = true,
                _ => bench.push(argument.clone()),
            }
        }
        let before =
            before.context("compare needs --before: a millstream that was built before")?;
        let after = after.context("compare needs --after: a millstream that was built after")?;
        Ok(Self { programs: [before, after], runs, json, bench })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Options, String> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        Options::parse(&words).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn what_is_not_ours_is_for_the_bench() {
        let options = parse("--size 4KiB --before a --runs 3 --after b --duration 2s --json");
        let bench = ["--size", "4KiB", "--duration", "2s"].map(str::to_owned).to_vec();
        let programs = ["a", "b"].map(PathBuf::from);
        assert_eq!(options, Ok(Options { programs, runs: 3, json: true, bench }));
        assert_eq!(parse("--before a --after b").unwrap().runs, 5);
    }

    #[test]
    fn bad_options_are_told() {
        for (text, words) in [
            ("--before a", "needs --after"),
            ("--after a", "needs --before"),
            ("--before", "--before needs a value"),
            ("--before a --after b --runs 0", "1 to 1000"),
            ("--before a --after b --runs many", "1 to 1000"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
