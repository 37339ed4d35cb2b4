//! The TCP connection on which the two peers agree on what comes next: lines of a tag and words.
//!
//! Both run the same code, so one waits for what the other says next. The line `end` breaks that
//! order: who has failed says so at once, and who waits, for the peer or for a completion that now
//! never comes, hears of it.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// What the peer has to say next takes at most this long: some of it is many megabytes of checking
/// on an emulated machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// And how a case ended that has failed here: the peer hears of that at once, unless it is gone.
const CLOSING_PATIENCE: Duration = Duration::from_secs(10);
/// Lines are short.
const LINE_MAX: usize = 4096;
const END: &str = "end";
/// How a case ends when all is well.
pub(crate) const OK: &str = "ok";

pub(crate) struct Control {
    stream: TcpStream,
    /// Since when the two talk: what is said goes to the log with its time.
    start: Instant,
    lines: Receiver<String>,
    /// What the peer has said ahead of time.
    early: VecDeque<String>,
    /// What the peer said of how the case ended, once it has.
    ended: Option<String>,
}

impl Control {
    pub(crate) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        let reader = BufReader::new(stream.try_clone()?);
        let (sender, lines) = mpsc::channel();
        // Ends with the connection.
        std::thread::spawn(move || {
            for line in reader.lines() {
                let Ok(line) = line else { return };
                if line.len() > LINE_MAX || sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { stream, start: Instant::now(), lines, early: VecDeque::new(), ended: None })
    }

    /// Says `text` under `tag`.
    pub(crate) fn say(&mut self, tag: &str, text: &str) -> Result<()> {
        let line = format!("{tag} {}\n", text.replace(['\n', '\r'], " "));
        self.log("says", &line);
        self.stream.write_all(line.as_bytes()).context("the peer is gone")
    }

    /// Waits until the peer says something under `tag`, and returns it.
    pub(crate) fn hear(&mut self, tag: &str) -> Result<String> {
        self.check()?;
        let line = match self.early.pop_front() {
            Some(line) => line,
            None => match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => line,
                Err(error) => bail!("the peer did not say {tag:?}: {error}"),
            },
        };
        self.log("hears", &line);
        match line.split_once(' ') {
            Some((said, text)) if said == tag => Ok(text.to_owned()),
            Some((END, how)) => {
                self.ended = Some(how.to_owned());
                bail!("the peer ended: {how}");
            }
            _ => bail!("the peer said {line:?} in place of {tag:?}"),
        }
    }

    /// Says `text` under `tag` and returns what the peer says under it.
    pub(crate) fn exchange(&mut self, tag: &str, text: &str) -> Result<String> {
        self.say(tag, text)?;
        self.hear(tag)
    }

    /// Waits until the peer is here too.
    pub(crate) fn meet(&mut self, tag: &str) -> Result<()> {
        self.exchange(tag, "").map(drop)
    }

    /// Fails when the peer has ended the case for a reason.
    pub(crate) fn check(&mut self) -> Result<()> {
        while self.ended.is_none() {
            match self.lines.try_recv() {
                Ok(line) => match line.split_once(' ') {
                    Some((END, how)) => self.ended = Some(how.to_owned()),
                    _ => self.early.push_back(line),
                },
                Err(TryRecvError::Empty) => break,
                // What it said before it went is still to be heard.
                Err(TryRecvError::Disconnected) if !self.early.is_empty() => break,
                Err(TryRecvError::Disconnected) => bail!("the peer is gone"),
            }
        }
        match &self.ended {
            Some(how) if how != OK => bail!("the peer ended: {how}"),
            _ => Ok(()),
        }
    }

    /// Tells the log: when a case hangs, it shows how far each side got.
    fn log(&self, verb: &str, line: &str) {
        eprintln!("{:8.3} s  {verb} {}", self.start.elapsed().as_secs_f64(), line.trim_end());
    }

    /// Says how the case ended here, and returns how it ended there. Whatever the two still had to
    /// tell each other is forgotten.
    pub(crate) fn end(&mut self, how: &str) -> Result<String> {
        self.say(END, how)?;
        self.early.clear();
        if let Some(how) = self.ended.take() {
            return Ok(how);
        }
        let patience = if how == OK { PATIENCE } else { CLOSING_PATIENCE };
        loop {
            let line = self.lines.recv_timeout(patience).context("the peer did not end")?;
            self.log("hears", &line);
            if let Some((END, how)) = line.split_once(' ') {
                return Ok(how.to_owned());
            }
        }
    }
}
