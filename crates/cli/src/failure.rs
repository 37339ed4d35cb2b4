//! How commands fail: one sentence on stderr, and exit status 1 or 2.

use std::fmt;

/// The command line asks for something that cannot be: exit status 2.
///
/// Every other error is exit status 1.
#[derive(Debug)]
pub(crate) struct UsageError(pub(crate) String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// Ends a command with exit status 2.
pub(crate) fn usage(message: impl Into<String>) -> anyhow::Error {
    UsageError(message.into()).into()
}

/// For what the contract promises and this version does not do.
pub(crate) fn not_yet(what: &str) -> anyhow::Error {
    usage(format!("not yet: {what}"))
}

/// The exit status that this error stands for.
pub(crate) fn exit_status(error: &anyhow::Error) -> u8 {
    if error.chain().any(|cause| cause.is::<UsageError>()) { 2 } else { 1 }
}

/// An error and its causes as one line.
pub(crate) fn sentence(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        // Libraries repeat what caused them, or do not: here it stands once.
        if !text.contains(&cause) {
            if !text.is_empty() {
                text.push_str(": ");
            }
            text.push_str(&cause);
        }
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What clap says, without its usage text: one line.
pub(crate) fn clap_sentence(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let first: Vec<&str> = text.lines().take_while(|line| !line.trim().is_empty()).collect();
    let mut sentence = first.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
    for tip in text.lines().filter_map(|line| line.trim().strip_prefix("tip: ")) {
        sentence.push_str("; ");
        sentence.push_str(tip);
    }
    sentence
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn causes_are_told_once_and_in_one_line() {
        let error = anyhow!("no route\nto host").context("cannot reach x: no route\nto host");
        assert_eq!(sentence(&error), "cannot reach x: no route to host");
        assert_eq!(sentence(&anyhow!("b").context("a")), "a: b");
    }

    #[test]
    fn usage_errors_keep_their_status_below_context() {
        let error = Err::<(), _>(usage("bad size")).context("cannot start").unwrap_err();
        assert_eq!(exit_status(&error), 2);
        assert_eq!(exit_status(&anyhow!("x")), 1);
    }
}
