//! The relay on the link between the two peers, told what to do with packets.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, bail};

pub(crate) struct Relay {
    stream: BufReader<UnixStream>,
}

impl Relay {
    pub(crate) fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)
            .with_context(|| format!("no relay listens on {}", path.display()))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Gives a command, and returns the answer.
    pub(crate) fn command(&mut self, command: &str) -> Result<String> {
        self.stream.get_mut().write_all(format!("{command}\n").as_bytes())?;
        let mut answer = String::new();
        self.stream.read_line(&mut answer).context("the relay is gone")?;
        match answer.trim().strip_prefix("ok") {
            Some(rest) => Ok(rest.trim().to_owned()),
            None => bail!("the relay answers {answer:?} to {command:?}"),
        }
    }
}
