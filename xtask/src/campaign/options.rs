//! What the command line asks for.

use std::time::Duration;

use anyhow::{Context, Result, bail};

/// The arguments of `cargo xtask campaign`.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    pub(super) until: Until,
    /// The first seed of each scenario, in place of those that were not tried.
    pub(super) first: Option<u64>,
    /// One scenario in place of all.
    pub(super) only: Option<String>,
}

/// When a campaign ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Until {
    Time(Duration),
    /// Of each scenario.
    Runs(u64),
}

impl Options {
    /// Ten minutes.
    const DEFAULT: Until = Until::Time(Duration::from_secs(600));
    /// About two years.
    const MAX_MINUTES: u64 = 1_000_000;

    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let mut until = None;
        let (mut first, mut only) = (None, None);
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let value = rest.next().with_context(|| format!("{argument} needs a value"));
            let number = || -> Result<u64> {
                let value = value.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?;
                let explain = || format!("{argument} {value}: it is a whole number below 2^64");
                value.parse().with_context(explain)
            };
            let given = match argument.as_str() {
                "--minutes" => match number()? {
                    minutes @ 1..=Self::MAX_MINUTES => {
                        Until::Time(Duration::from_secs(minutes * 60))
                    }
                    minutes => bail!("--minutes {minutes}: it is 1 to {}", Self::MAX_MINUTES),
                },
                "--runs" => match number()? {
                    0 => bail!("--runs 0: it is 1 or more"),
                    runs => Until::Runs(runs),
                },
                "--seed" => {
                    first = Some(number()?);
                    continue;
                }
                "--only" => {
                    only = Some(value?.clone());
                    continue;
                }
                _ => bail!("campaign has no option {argument}"),
            };
            if until.replace(given).is_some() {
                bail!("a campaign ends after --minutes or after --runs: give one of them, once");
            }
        }
        Ok(Self { until: until.unwrap_or(Self::DEFAULT), first, only })
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
    fn options_are_read() {
        let time = |minutes: u64| Until::Time(Duration::from_secs(60 * minutes));
        let of = |until, first, only: Option<&str>| Options {
            until,
            first,
            only: only.map(str::to_owned),
        };
        for (text, expected) in [
            ("", of(time(10), None, None)),
            ("--minutes 3", of(time(3), None, None)),
            ("--seed 7 --runs 5", of(Until::Runs(5), Some(7), None)),
            ("--only swarm --minutes 1", of(time(1), None, Some("swarm"))),
        ] {
            assert_eq!(parse(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn bad_options_are_told() {
        for (text, words) in [
            ("--minutes 0", "1 to 1000000"),
            ("--minutes 18446744073709551616", "below 2^64"),
            ("--minutes -1", "below 2^64"),
            ("--runs 0", "1 or more"),
            ("--seed 18446744073709551616", "below 2^64"),
            ("--seed", "--seed needs a value"),
            ("--minutes 1 --runs 2", "give one of them"),
            ("--hours 1", "no option --hours"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
