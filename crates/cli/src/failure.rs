//! How commands fail: one sentence on stderr, exit status 1 or 2, and with `--json` an object.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::process::ExitCode;

use serde::Serialize;

use crate::{output, process};

/// The exit status of what failed, and of what cannot be.
const FAILED: u8 = 1;
pub(crate) const USAGE: u8 = 2;

/// Every exit status and what it stands for: the contract.
pub(crate) const EXIT_STATUSES: [(u8, &str); 3] = [
    (0, "It is done; of a daemon, it was told to stop"),
    (FAILED, "It failed: a sentence on stderr says what and why"),
    (USAGE, "The command line asks for something that cannot be, or that this version cannot do"),
];

/// The end of `--help`.
pub(crate) fn exit_statuses() -> String {
    let row = |(status, meaning)| format!("\n  {status}  {meaning}");
    let rows: String = EXIT_STATUSES.map(row).concat();
    format!("Exit status:{rows}\n\nWith --json, a failure is a JSON object on stdout too.")
}

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
    if error.chain().any(|cause| cause.is::<UsageError>()) { USAGE } else { FAILED }
}

/// Says what failed, as the contract has it, and with which status to end.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if output::is_closed_pipe(error) {
        // As `head` and its like expect of those who write to them.
        process::die_of(libc::SIGPIPE);
    }
    output::complain(&format!("millstream: {}", sentence(error)));
    let exit_status = exit_status(error);
    if json_is_wanted(std::env::args_os().skip(1)) && !output::has_answered() {
        let mut causes = causes(error);
        let message = causes.remove(0);
        let failed = Failed { error: Failure { message, causes, exit_status } };
        // If stdout does not take it, the sentence was said.
        let _ = output::json(&failed);
    }
    ExitCode::from(exit_status)
}

/// What `--json` prints of a failure, unless the command has printed its object already.
#[derive(Serialize)]
struct Failed {
    error: Failure,
}

#[derive(Serialize)]
struct Failure {
    /// What failed.
    message: String,
    /// Why, and why that, each told once. With colons between, all are the sentence on stderr.
    causes: Vec<String>,
    exit_status: u8,
}

/// Whether `--json` is among the arguments, which may be too wrong to be parsed.
fn json_is_wanted(arguments: impl IntoIterator<Item = OsString>) -> bool {
    let mut options = arguments.into_iter().take_while(|argument| argument != OsStr::new("--"));
    options.any(|argument| argument == OsStr::new("--json"))
}

/// Whether the arguments, which are too wrong to be parsed, look like those of `get ... -`.
pub(crate) fn stdout_is_for_bytes(arguments: impl IntoIterator<Item = OsString>) -> bool {
    // No option before the command has a value.
    let is_option = |argument: &OsString| argument.as_encoded_bytes().starts_with(b"-");
    let mut words = arguments.into_iter().skip_while(is_option);
    words.next().is_some_and(|command| command == "get") && words.any(|word| word == "-")
}

/// An error and its causes as one line.
pub(crate) fn sentence(error: &anyhow::Error) -> String {
    output::escaped(causes(error).join(": "))
}

/// An error and its causes, each in one line. There is one at least.
fn causes(error: &anyhow::Error) -> Vec<String> {
    let mut said = String::new();
    let mut causes = Vec::new();
    for cause in error.chain() {
        let cause = cause.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        // Libraries repeat what caused them, or do not: here it stands once.
        if causes.is_empty() || !said.contains(&cause) {
            said.push_str(&cause);
            said.push('\n');
            causes.push(cause);
        }
    }
    causes
}

/// What clap says, without its usage text: one line.
pub(crate) fn clap_sentence(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let first: Vec<&str> = text.lines().take_while(|line| !line.trim().is_empty()).collect();
    let mut sentence = first.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
    let tips = text.lines().filter_map(|line| line.trim().strip_prefix("tip: "));
    // A value of an option is not what follows `--`.
    for tip in tips.filter(|tip| !tip.contains("as a value, use '--")) {
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
    fn the_documents_have_the_same_exit_statuses() {
        let document = include_str!("../../../docs/command-line.md");
        for (status, meaning) in EXIT_STATUSES {
            let row = format!("\n| {status} | {meaning} |\n");
            assert!(document.contains(&row), "{row}");
        }
    }

    #[test]
    fn a_sentence_does_nothing_to_a_terminal() {
        let error = anyhow!("no such file").context("cannot read \u{1b}[31m\u{202e}x");
        assert_eq!(sentence(&error), "cannot read \\x1b[31m\\u{202e}x: no such file");
    }

    #[test]
    fn json_is_asked_for_before_the_names_of_files() {
        let wanted = |words: &str| json_is_wanted(words.split(' ').map(OsString::from));
        assert!(wanted("put --json x") && wanted("frobnicate --json"));
        assert!(!wanted("put -- --json") && !wanted("put json"));
    }

    #[test]
    fn only_get_has_bytes_for_stdout() {
        let bytes = |words: &str| stdout_is_for_bytes(words.split(' ').map(OsString::from));
        assert!(bytes("-v get --bogus -") && bytes("get -- -"));
        assert!(!bytes("put --bogus -") && !bytes("put get -") && !bytes("get --bogus x"));
    }

    #[test]
    fn usage_errors_keep_their_status_below_context() {
        let error = Err::<(), _>(usage("bad size")).context("cannot start").unwrap_err();
        assert_eq!(exit_status(&error), 2);
        assert_eq!(exit_status(&anyhow!("x")), 1);
    }
}
