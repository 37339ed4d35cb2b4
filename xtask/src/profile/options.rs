//! What the command line asks for.

use anyhow::{Context, Result};

/// The arguments of `cargo xtask profile`.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    pub(super) size: String,
    pub(super) op: String,
    /// For `bench rdma`.
    pub(super) bench: Vec<String>,
}

impl Options {
    /// Samples are one of 5000 in a second: this makes them many.
    const DURATION: [&str; 2] = ["--duration", "3s"];

    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let (mut size, mut op) = ("64KiB".to_owned(), "write".to_owned());
        let mut bench = Vec::new();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value =
                || rest.next().cloned().with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--size" => size = value()?,
                "--op" => op = value()?,
                _ => bench.push(argument.clone()),
            }
        }
        if !bench.iter().any(|argument| argument.starts_with(Self::DURATION[0])) {
            bench.extend(Self::DURATION.map(str::to_owned));
        }
        Ok(Self { size, op, bench })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read() {
        for (text, size, op, bench) in [
            ("", "64KiB", "write", &["--duration", "3s"][..]),
            ("--op read --size 4KiB --duration 1s", "4KiB", "read", &["--duration", "1s"]),
            ("--duration=1s --busy-poll", "64KiB", "write", &["--duration=1s", "--busy-poll"]),
        ] {
            let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
            let options = Options::parse(&words).unwrap();
            let bench = bench.iter().map(|&word| word.to_owned()).collect();
            let expected = Options { size: size.to_owned(), op: op.to_owned(), bench };
            assert_eq!(options, expected, "{text}");
        }
        assert!(Options::parse(&["--size".to_owned()]).is_err());
    }
}
