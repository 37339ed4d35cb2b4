//! A process with a transfer engine that does what it is told, ours or the original.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process;

/// Longer than any command takes, unless it hangs: the original waits for up to half a minute.
const LIMIT: Duration = Duration::from_secs(90);

/// A setting of the environment.
pub(super) type Setting = (&'static str, &'static str);

/// Bytes of memory that each has: the largest request, and room beside it.
pub(super) const LENGTH: u64 = 72 << 20;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Ours,
    Original,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours => "millstream",
            Self::Original => "mooncake",
        })
    }
}

pub(super) struct Peer {
    pub(super) kind: Kind,
    child: Child,
    input: ChildStdin,
    output: Receiver<String>,
    /// Its segment, as others open it.
    pub(super) segment: String,
    /// Where its memory begins.
    pub(super) address: u64,
}

/// What a process is started with.
#[derive(Clone, Copy)]
pub(super) struct Start<'a> {
    /// Our program, and the interpreter that has the original.
    pub(super) ours: &'a Path,
    pub(super) python: &'a Path,
    /// The store, as engines are given it.
    pub(super) store: &'a str,
    /// Of the original's framing.
    pub(super) version: u32,
    pub(super) setting: Option<Setting>,
}

impl Peer {
    /// Starts an engine that has this name, where its store has names.
    pub(super) fn start(kind: Kind, name: &str, start: &Start<'_>) -> Result<Self> {
        let mut command = match kind {
            Kind::Ours => Command::new(start.ours),
            Kind::Original => {
                let script = process::repository_root().join("xtask/src/mooncake/peer.py");
                let mut command = Command::new(start.python);
                command.arg(script);
                command
            }
        };
        let length = LENGTH.to_string();
        command.args([&length, start.store, name]).env("MC_TCP_BIND_ADDRESS", "127.0.0.1");
        if start.version == 1 {
            command.env("MC_TCP_PROTO", "1");
        }
        if let Some((name, value)) = start.setting.filter(|_| kind == Kind::Ours) {
            command.env(name, value);
        }
        // The original logs errors in the best of cases.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().with_context(|| format!("cannot start {kind}"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("{kind} has no streams");
        };
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            // What its libraries print is no answer.
            let is_answer = |line: &String| {
                ["ready ", "ok", "failed"].iter().any(|word| line.starts_with(word))
            };
            let _ = lines.filter(is_answer).try_for_each(|line| sender.send(line));
        });
        let (segment, address) = (String::new(), 0);
        let mut peer = Self { kind, child, input, output: receiver, segment, address };
        let ready = peer.answer()?;
        let mut words = ready.split_whitespace().skip(1);
        peer.segment = words.next().context("it does not say its segment")?.to_owned();
        peer.address = words.next().context("it does not say its address")?.parse()?;
        Ok(peer)
    }

    fn answer(&self) -> Result<String> {
        let kind = self.kind;
        self.output.recv_timeout(LIMIT).with_context(|| format!("{kind} does not answer"))
    }

    /// What it answers to a command.
    pub(super) fn tell(&mut self, command: &str) -> Result<String> {
        writeln!(self.input, "{command}").and_then(|()| self.input.flush())?;
        self.answer().with_context(|| format!("told to {command}"))
    }

    /// The value that it answers, if all is well.
    pub(super) fn must(&mut self, command: &str) -> Result<String> {
        let kind = self.kind;
        let answer = self.tell(command)?;
        match answer.strip_prefix("ok") {
            Some(value) => Ok(value.trim().to_owned()),
            None => bail!("{kind}, told to {command}: {answer}"),
        }
    }

    /// Ends it at once.
    pub(super) fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
