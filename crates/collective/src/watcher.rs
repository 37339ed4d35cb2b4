//! The thread that listens to the controller, so that bad news ends a call at once.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use millstream_inc::protocol::{FromController, ToController};

use crate::CollectiveError;
use crate::control::{ReceiveError, Receiver, Sender};
use crate::engine::Engine;

/// The controller asks every second whether we are alive; after three misses it is dead itself.
const SILENCE: Duration = Duration::from_secs(4);

/// How often the switch is asked whether it is there.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// The thread. Dropped, it closes the connection and ends.
pub(crate) struct Watcher {
    sender: Arc<Sender>,
    /// Dropped to say that the end is meant.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    pub(crate) fn start(
        engine: Arc<Engine>,
        sender: Arc<Sender>,
        receiver: Receiver,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let watch = Watch { engine, sender: Arc::clone(&sender), receiver, stopped };
        let thread = thread::Builder::new().name("controller".to_owned());
        let thread = thread.spawn(move || watch.run())?;
        Ok(Self { sender, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop = None;
        self.sender.close();
        if let Some(thread) = self.thread.take() {
            // It would have reported a panic on stderr.
            let _ = thread.join();
        }
    }
}

struct Watch {
    engine: Arc<Engine>,
    sender: Arc<Sender>,
    receiver: Receiver,
    stopped: mpsc::Receiver<()>,
}

impl Watch {
    fn run(mut self) {
        loop {
            let error = match self.receiver.receive(Instant::now() + SILENCE) {
                Ok(FromController::Ping) => {
                    // If it does not get there, receiving fails soon.
                    let _ = self.sender.send(&ToController::Pong);
                    self.engine.probe();
                    continue;
                }
                Ok(FromController::Left { rank, collectives }) => {
                    self.engine.peer_left(rank, collectives);
                    continue;
                }
                Ok(FromController::Closed) => return self.engine.close(),
                Ok(FromController::Abort { reason }) => CollectiveError::from_controller(reason),
                Ok(FromController::Refused { reason }) => {
                    CollectiveError::Controller(reason.to_string())
                }
                Ok(message) => {
                    CollectiveError::Protocol(format!("the controller sent {message:?}"))
                }
                Err(ReceiveError::Frame(error)) => CollectiveError::Protocol(error.to_string()),
                Err(error @ (ReceiveError::TimedOut | ReceiveError::Io(_))) => {
                    return self.go_on_alone(&error);
                }
            };
            self.engine.fail(error);
            return self.engine.close();
        }
    }

    /// The controller is lost. What works without it goes on; only a rank that dies is noticed
    /// later, by the switch.
    fn go_on_alone(&self, error: &ReceiveError) {
        self.engine.close();
        if self.engine.failure().is_some() {
            // We said so ourselves, and the controller has let go of us.
            return;
        }
        let mut said = false;
        while self.stopped.recv_timeout(PROBE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            if !std::mem::replace(&mut said, true) {
                tracing::warn!(%error, "the controller is lost; the communicator goes on without");
            }
            self.engine.probe();
        }
    }
}
