//! What deciding the rail of a slice costs: in instructions (`cargo xtask bench-instructions`), and of the rate over one
//! rail (`cargo xtask bench-one-rail`).

mod instructions;
mod one_rail;

use anyhow::{Context, Result, bail};

pub(crate) use instructions::run as instructions;
pub(crate) use one_rail::run as one_rail;

/// The arguments of both.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    /// Pairs of runs.
    turns: usize,
    json: bool,
}

impl Options {
    const TURNS: usize = 10;
    const MAX_TURNS: usize = 1000;

    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self { turns: Self::TURNS, json: false };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--turns" => {
                    let value = rest.next().context("--turns needs a value")?;
                    options.turns = match value.parse() {
                        Ok(turns @ 1..=Self::MAX_TURNS) => turns,
                        _ => bail!("--turns {value}: it is 1 to {}", Self::MAX_TURNS),
                    };
                }
                "--json" => options.json = true,
                _ => bail!("there is no option {argument}"),
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<Options> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        Options::parse(&words).ok()
    }

    #[test]
    fn turns_are_counted() {
        assert_eq!(parse(""), Some(Options { turns: 10, json: false }));
        assert_eq!(parse("--json --turns 3"), Some(Options { turns: 3, json: true }));
        for wrong in ["--turns", "--turns 0", "--turns x", "3"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
