//! Finds the controller that leads, and waits there until the group is complete.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use millstream_inc::controllers::Search;
use millstream_inc::protocol::{FromController, Hello, Refusal, ToController};
use millstream_net::tls;

use super::talk::{ANSWER, SILENCE, Talk, not_received};
use super::{JoinConfig, PAUSE, Waiting};
use crate::control::{self, ConnectError, Proofs, ReceiveError, Receiver, Sender};
use crate::joining::Joining;
use crate::{JoinError, LONGEST};

/// How much longer than its own patience a rank waits for the controller to say what is missing.
const GRACE: Duration = Duration::from_secs(3);

/// The controller that leads is found, and the group complete.
pub(super) struct Opening {
    pub(super) sender: Arc<Sender>,
    pub(super) receiver: Receiver,
    pub(super) deadline: Instant,
    pub(super) limit: Duration,
    pub(super) answer: FromController,
}

/// Joins the group at the controller that leads. Those that do not say so, and all are asked in turns.
pub(super) fn find(
    config: &JoinConfig,
    patience: Duration,
    hello: &Hello,
    search: &mut Search,
    joining: &mut Joining<'_>,
) -> Result<Opening, JoinError> {
    let start = Instant::now();
    // What one has said that is there and does not lead.
    let mut refused = None;
    // The first attempt has all of it, and says so where that does not do.
    let mut left = patience;
    loop {
        let (error, is_mute) = match attempt(config, hello, search, left, joining) {
            Ok(opening) => {
                search.found();
                return Ok(opening);
            }
            Err(failed) => failed,
        };
        let (is_turn_over, error) = match error {
            JoinError::Refused(Refusal::NotLeader { leader, detail }) => {
                let reason = Refusal::NotLeader { leader, detail };
                refused = Some(reason.clone());
                (search.follow(leader), JoinError::Refused(reason))
            }
            error if is_mute && search.has_others() => (search.advance(), error),
            error => return Err(error),
        };
        left = patience.saturating_sub(start.elapsed());
        if is_turn_over {
            // Nobody is there at all.
            let Some(reason) = &refused else { return Err(error) };
            // Somebody will lead soon.
            if !left.is_zero() {
                (joining.waiting)(&Waiting { awaited: None, refused: None, left });
                thread::sleep(PAUSE.min(left));
                if joining.cancellation.is_canceled() {
                    return Err(error);
                }
                left = patience.saturating_sub(start.elapsed());
            }
            if left.is_zero() {
                return Err(JoinError::Refused(reason.clone()));
            }
        }
    }
}

/// Asks one controller. The error says too whether it has said nothing at all.
fn attempt(
    config: &JoinConfig,
    hello: &Hello,
    search: &Search,
    left: Duration,
    joining: &mut Joining<'_>,
) -> Result<Opening, (JoinError, bool)> {
    let (controller, has_others) = (search.current(), search.has_others());
    let silence = joining.silence;
    let hurry = if has_others { Some(ANSWER) } else { silence };
    let patience = hurry.map_or(left, |hurry| left.min(hurry));
    let waiting = &mut *joining.waiting;
    let silent = |left| waiting(&Waiting { awaited: None, refused: None, left });
    let proofs = Proofs { tls: config.tls.clone(), token: config.token };
    let begun = Instant::now();
    let learned = joining.learned;
    let connected = control::connect(controller, &proofs, patience, SILENCE, learned, silent);
    let (sender, receiver) = connected.map_err(|error| {
        // One that stands still proves nothing, and one that begins or ceases to lead closes all connections.
        let is_mute = match &error {
            ConnectError::Io(_) | ConnectError::Receive(ReceiveError::TimedOut) => true,
            ConnectError::Receive(ReceiveError::Io(error)) => tls::reason(error).is_none(),
            _ => false,
        };
        let error = match error {
            ConnectError::Io(source) if has_others => {
                let text = format!("{source} (one of {})", search.known());
                ConnectError::Io(io::Error::new(source.kind(), text))
            }
            error => error,
        };
        (not_connected(controller, patience, error), is_mute)
    })?;
    let now = Instant::now();
    let left = left.saturating_sub(now - begun);
    let limit = left.saturating_add(GRACE).min(LONGEST);
    let answer_by = hurry.map(|hurry| now + hurry);
    let deadline = now + limit;
    let hosted = None;
    joining.cancellation.watch(Some(Arc::clone(&sender)));
    let waiting = &mut *joining.waiting;
    let mut talk =
        Talk { controller, sender, receiver, deadline, limit, answer_by, silence, waiting, hosted };
    let timeout_ms = left.as_millis().try_into().unwrap_or(u64::MAX);
    let hello = ToController::Join(Hello { timeout_ms, ..hello.clone() });
    let answer = talk.send(&hello).and_then(|()| talk.next());
    match answer {
        Ok(answer) => {
            let Talk { sender, receiver, deadline, limit, .. } = talk;
            Ok(Opening { sender, receiver, deadline, limit, answer })
        }
        Err(error) => {
            let is_mute = talk.answer_by.is_some()
                && matches!(error, JoinError::Timeout { .. } | JoinError::Lost { .. });
            joining.cancellation.watch(None);
            Err((error, is_mute))
        }
    }
}

fn not_connected(controller: SocketAddr, limit: Duration, error: ConnectError) -> JoinError {
    match error {
        ConnectError::Io(source) => JoinError::Unreachable { controller, source },
        ConnectError::Refused(reason) => JoinError::Refused(reason),
        ConnectError::Tls(reason) => JoinError::Tls { controller, reason },
        ConnectError::Token(source) => JoinError::Token { controller, source },
        ConnectError::Receive(error) => not_received(controller, limit, error),
    }
}
