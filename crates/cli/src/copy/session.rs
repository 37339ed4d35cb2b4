//! The segment that is copied to or from, and coming back to it after a failure.

use std::thread;
use std::time::Duration;

use crate::engine::{self, Opened};
use crate::failure;
use crate::output;
use crate::reach::{Patience, Reach};

/// Between a failure and the next attempt.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// What ended a copy.
pub(super) enum Trouble {
    /// The peer or the way to it: trying again may help.
    Remote(anyhow::Error),
    /// Something here.
    Local(anyhow::Error),
}

impl From<anyhow::Error> for Trouble {
    fn from(error: anyhow::Error) -> Self {
        Self::Local(error)
    }
}

/// Opens one segment, as often as needed.
pub(super) struct Session<'a> {
    command: &'static str,
    reach: &'a Reach,
    pub(super) segment: &'a str,
    patience: Patience,
    retries_left: u32,
    /// Which start of its process was opened last, if it says.
    incarnation: Option<u64>,
}

/// A segment that was opened again.
pub(super) struct Reopened {
    pub(super) opened: Opened,
    /// Its process is another one, or may be: what was in its memory is lost.
    pub(super) restarted: bool,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        command: &'static str,
        reach: &'a Reach,
        segment: &'a str,
        patience: Patience,
    ) -> anyhow::Result<Self> {
        engine::check_segment(segment, reach)?;
        let retries_left = patience.retry;
        Ok(Self { command, reach, segment, patience, retries_left, incarnation: None })
    }

    pub(super) fn open(&mut self) -> anyhow::Result<Opened> {
        let opened =
            engine::open_when_there(self.command, self.reach, self.segment, &self.patience)?;
        self.incarnation = opened.segment.incarnation();
        Ok(opened)
    }

    /// Opens it again after this failure, unless it was tried as often as it may be. The engine
    /// from before must be gone: there is one for each address.
    pub(super) fn open_again(&mut self, mut error: anyhow::Error) -> anyhow::Result<Reopened> {
        let before = self.incarnation;
        while self.retries_left > 0 {
            self.retries_left -= 1;
            let Self { command, segment, patience: Patience { retry, .. }, .. } = *self;
            let number = retry - self.retries_left;
            output::complain(&format!(
                "{command}: segment {segment} failed: {}; trying again (retry {number} of {retry})",
                failure::sentence(&error)
            ));
            // What has just failed is given the time to come back.
            thread::sleep(RETRY_PAUSE);
            match self.open() {
                Ok(opened) => {
                    let restarted = before.is_none() || self.incarnation != before;
                    return Ok(Reopened { opened, restarted });
                }
                Err(again) => error = again,
            }
        }
        Err(error)
    }
}
