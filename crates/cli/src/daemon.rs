//! What daemons have in common: a `ready` line that must reach somebody.

use std::cell::OnceCell;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use millstream_control::terminated;
use millstream_net::file_table;
use serde::Serialize;

use crate::output;

/// Lets a daemon have a connection for each peer that the system admits.
pub(crate) fn open_many_files() {
    if let Err(error) = file_table::raise_limit() {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

/// Whether the `ready` line could be printed.
#[derive(Default)]
pub(crate) struct ReadyLine {
    failure: OnceCell<anyhow::Error>,
}

impl ReadyLine {
    /// Prints the line.
    pub(crate) fn print(&self, ready: &impl Serialize) {
        if let Err(error) = output::ready(ready) {
            // It is printed once.
            let _ = self.failure.set(error);
        }
    }

    /// Is over when the daemon is told to stop, or the line could not be printed. It is awaited by
    /// the task that prints the line, which looks here whenever it has done something.
    pub(crate) async fn shutdown(&self) {
        let mut terminated = pin!(terminated());
        poll_fn(|context| match self.failure.get() {
            Some(_) => Poll::Ready(()),
            None => terminated.as_mut().poll(context),
        })
        .await;
    }

    /// Why the daemon ended, if not because it was told to.
    pub(crate) fn outcome(self) -> anyhow::Result<()> {
        self.failure.into_inner().map_or(Ok(()), Err)
    }
}
