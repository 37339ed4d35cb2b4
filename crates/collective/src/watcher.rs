//! The thread that listens to the controller, so that bad news ends a call at once.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use millstream_inc::controllers::Search;
use millstream_inc::protocol::{FromController, Refusal, Resume, TermError, ToController};
use millstream_net::ends_between_forks;

use crate::CollectiveError;
use crate::control::{ConnectError, ReceiveError, Receiver, Sender};
use crate::engine::Engine;
use crate::hosted::HostedSwitch;
use crate::local::LocalEngine;
use crate::path::Way;

/// How often the switch is asked whether it is there.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// Between attempts to come back to the controller: doubled each time, and up to half of it is left out by chance,
/// so that many hosts do not come at once.
const BACK_OFF: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// How long a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Where there are other controllers to ask: how long one may be silent before it has taken this rank back, and after. By
/// then the lease of one that stands still is over.
const SILENCE: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(5)];

/// What hears the controller's news.
pub(crate) trait Watched: Send {
    /// Asks the switch, if there is one, whether it is there. In shared memory who waits looks at the others itself.
    fn probe(&self);
    /// Why it is of no more use, if so.
    fn failure(&self) -> Option<CollectiveError>;
    fn fail(&self, error: CollectiveError);
    /// A rank has left after so many collectives.
    fn peer_left(&self, rank: u32, collectives: u64);
    /// Whether some rank has left.
    fn has_departed(&self) -> bool;
    /// Everyone has left, or nobody will say so any more.
    fn close(&self);
}

impl Watched for Arc<Engine> {
    fn probe(&self) {
        Engine::probe(self);
    }

    fn failure(&self) -> Option<CollectiveError> {
        Engine::failure(self)
    }

    fn fail(&self, error: CollectiveError) {
        Engine::fail(self, error);
    }

    fn peer_left(&self, rank: u32, collectives: u64) {
        Engine::peer_left(self, rank, collectives);
    }

    fn has_departed(&self) -> bool {
        Engine::has_departed(self)
    }

    fn close(&self) {
        Engine::close(self);
    }
}

impl Watched for Arc<LocalEngine> {
    fn probe(&self) {
        if let Some(Way::Switch(engine)) = self.wire() {
            engine.probe();
        }
    }

    fn failure(&self) -> Option<CollectiveError> {
        LocalEngine::failure(self)
    }

    fn fail(&self, error: CollectiveError) {
        LocalEngine::fail(self, error);
    }

    fn peer_left(&self, rank: u32, collectives: u64) {
        LocalEngine::peer_left(self, rank, collectives);
    }

    fn has_departed(&self) -> bool {
        LocalEngine::has_departed(self)
    }

    fn close(&self) {
        LocalEngine::close(self);
    }
}

/// The thread. Dropped, it closes the connection and ends.
pub(crate) struct Watcher {
    sender: Arc<Sender>,
    /// Dropped to say that the end is meant.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    pub(crate) fn start(
        way: Box<dyn Watched>,
        (sender, receiver): (Arc<Sender>, Receiver),
        search: Search,
        resume: Resume,
        hosted: Option<Arc<HostedSwitch>>,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let watch = Watch {
            way,
            sender: Arc::clone(&sender),
            receiver,
            stopped,
            search,
            resume,
            attempts: 0,
            probed: Instant::now(),
            hosted,
        };
        let thread = thread::Builder::new().name("controller".to_owned());
        let thread = thread.spawn(ends_between_forks(move || watch.run()))?;
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
    way: Box<dyn Watched>,
    sender: Arc<Sender>,
    receiver: Receiver,
    stopped: mpsc::Receiver<()>,
    search: Search,
    /// What is said to come back.
    resume: Resume,
    /// Attempts to come back since the controller was there.
    attempts: u32,
    /// When the switch was asked last.
    probed: Instant,
    /// The switch of this process, which the controller may ask for something.
    hosted: Option<Arc<HostedSwitch>>,
}

impl Watch {
    fn run(mut self) {
        loop {
            let error = match self.receiver.receive(Instant::now() + PROBE_INTERVAL) {
                Ok(FromController::Ping) => {
                    // If it does not get there, receiving fails soon.
                    let _ = self.sender.send(&ToController::Pong);
                    self.probe();
                    continue;
                }
                Ok(FromController::Resumed) => {
                    let controller = self.search.current();
                    tracing::info!(%controller, "the controller is there again");
                    self.attempts = 0;
                    self.search.found();
                    continue;
                }
                Ok(FromController::Controllers { controllers }) => {
                    self.search.learn(&controllers);
                    // It may be found elsewhere than it says.
                    let leader = [self.search.current()];
                    self.sender.learned().set(leader.into_iter().chain(controllers));
                    let controllers = self.search.known();
                    tracing::debug!(%controllers, "these controllers are known");
                    continue;
                }
                Ok(FromController::Left { rank, collectives }) => {
                    self.way.peer_left(rank, collectives);
                    continue;
                }
                // It stands still, perhaps. The communicator does without; the kernel of its machine answers for it.
                Err(ReceiveError::TimedOut) => {
                    self.probe();
                    if !self.is_mute() || self.come_back(&"it says nothing", None) {
                        continue;
                    }
                    return self.way.close();
                }
                Ok(FromController::Closed) => return self.way.close(),
                Ok(FromController::Abort { reason }) => CollectiveError::from_controller(reason),
                Ok(FromController::Refused { reason }) if !reason.is_for_now() => {
                    CollectiveError::Controller(reason.to_string())
                }
                Ok(FromController::Refused { reason }) => {
                    let not_leader = match &reason {
                        Refusal::NotLeader { leader, .. } => Some(*leader),
                        _ => None,
                    };
                    match self.come_back(&reason, not_leader) {
                        true => continue,
                        false => return self.way.close(),
                    }
                }
                Ok(message) => match self.obey(message) {
                    None => continue,
                    Some(message) => {
                        let what = format!("the controller sent {message:?}");
                        if self.is_known() {
                            CollectiveError::Protocol(what)
                        } else if self.come_back(&what, None) {
                            continue;
                        } else {
                            return self.way.close();
                        }
                    }
                },
                Err(error @ ReceiveError::Term(TermError::TooHigh(_))) => {
                    CollectiveError::Protocol(error.to_string())
                }
                Err(ReceiveError::Frame(error)) if self.is_known() => {
                    CollectiveError::Protocol(error.to_string())
                }
                Err(error) => match self.come_back(&error, None) {
                    true => continue,
                    false => return self.way.close(),
                },
            };
            self.way.fail(error);
            return self.way.close();
        }
    }

    /// Whether who is at the other end has this rank among its own. Before, it may be anybody: something else has the port of
    /// a dead controller, or a controller of another version.
    const fn is_known(&self) -> bool {
        self.attempts == 0
    }

    /// Asks the switch whether it is there.
    fn probe(&mut self) {
        self.probed = Instant::now();
        self.way.probe();
    }

    /// Does what the controller asks of a switch; gives back a message that is not for one.
    fn obey(&self, message: FromController) -> Option<FromController> {
        let Some(switch) = &self.hosted else { return Some(message) };
        match switch.obey(message) {
            Ok(answer) => {
                if let Some(answer) = answer {
                    // If it does not get there, receiving fails soon.
                    let _ = self.sender.send(&answer);
                }
                None
            }
            Err(message) => Some(*message),
        }
    }

    /// Whether the controller has been silent for so long that another one is asked.
    fn is_mute(&self) -> bool {
        let silence = SILENCE[usize::from(self.is_known())];
        self.search.has_others() && self.receiver.silence() >= silence
    }

    /// The controller is lost, or does not lead and says who does if it knows: goes to the next one, or back to it. What
    /// works without it goes on. `false` when there is nothing to come back for.
    fn come_back(
        &mut self,
        why: &dyn std::fmt::Display,
        not_leader: Option<Option<SocketAddr>>,
    ) -> bool {
        // Who was taken back pauses, whatever others there are: many are lost at once.
        let was_known = self.is_known();
        let is_turn_over = match not_leader {
            Some(leader) => self.search.follow(leader),
            None => self.search.advance(),
        };
        let mut is_pause = is_turn_over || was_known;
        loop {
            if self.way.failure().is_some() && !self.sender.owes() {
                // Nobody is to hear of it.
                return false;
            }
            let [first, longest] = BACK_OFF;
            let pause = longest.min(first * 2_u32.saturating_pow(self.attempts.min(16)));
            let part = RandomState::new().hash_one(self.attempts) % 1024;
            let pause = match is_pause {
                true => pause - pause * part as u32 / 2048,
                false => Duration::ZERO,
            };
            if self.stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                return false;
            }
            if self.attempts == 1 {
                let controllers = self.search.known();
                tracing::warn!(%controllers, %why, "no controller; the communicator goes on without");
            }
            if is_pause {
                self.attempts = self.attempts.saturating_add(1);
            }
            if self.probed.elapsed() >= PROBE_INTERVAL {
                self.probe();
            }
            self.resume.departed = self.way.has_departed();
            let Self { sender, receiver, search, resume, .. } = self;
            let controller = search.current();
            match sender.come_back(receiver, controller, CONNECT_TIMEOUT, resume) {
                Ok(connected) => return connected.is_some(),
                Err(ConnectError::Refused(Refusal::NotLeader { leader, detail })) => {
                    tracing::debug!(%controller, %detail, "the controller does not lead");
                    is_pause = search.follow(leader);
                }
                Err(
                    error @ (ConnectError::Refused(_)
                    | ConnectError::Tls(_)
                    | ConnectError::Token(_)),
                ) if self.attempts.is_power_of_two() => {
                    tracing::warn!(%controller, %error, "the controller does not take this rank back");
                    is_pause = search.advance();
                }
                Err(error) => {
                    tracing::debug!(%controller, %error, "the controller cannot be reached");
                    is_pause = search.advance();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
