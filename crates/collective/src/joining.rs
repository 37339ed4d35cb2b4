//! What a rank joins with beside its configuration: who hears of its waits, who may end them, and what was learned before.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millstream_inc::controllers::MAX_CONTROLLERS;
use millstream_inc::protocol::{LostSwitch, Refusal, ToController};

use crate::control::Sender;
use crate::join::Waiting;
use crate::local::LocalEngine;

/// How a rank joins.
pub(crate) struct Joining<'a> {
    /// Called with what the rank waits for.
    pub(crate) waiting: &'a mut dyn FnMut(&Waiting),
    pub(crate) cancellation: &'a Cancellation,
    /// Which refusals are waited out for some seconds: others have what is asked for, and may be about to end, or dead.
    pub(crate) is_taken: IsTaken,
    /// A controller that says nothing for so long is given up, though there is no other one.
    pub(crate) silence: Option<Duration>,
    /// Whether the rank may need another place to meet the others later, without a controller.
    pub(crate) prepares: bool,
    /// Switches that are not to serve the group.
    pub(crate) avoid: &'a [LostSwitch],
    /// What this rank shares memory by already, with others that join, too.
    pub(crate) local: Option<&'a Arc<LocalEngine>>,
    /// Controllers that are asked behind those of the configuration. What the one that leads says goes here, too.
    pub(crate) learned: &'a Learned,
}

/// Whether a refusal may be over soon, of who has joined with this address.
pub(crate) type IsTaken = fn(&Refusal, IpAddr) -> bool;

/// Another connection from the same address is this rank. It may be the same one, of before its machine was reset.
pub(crate) fn is_rank_taken(refusal: &Refusal, own: IpAddr) -> bool {
    matches!(refusal, Refusal::RankTaken { holder, .. } if *holder == own)
}

/// Where controllers are, as the last one has said that leads, itself included. A clone is the same list, which outlives the
/// connections on which it was heard.
#[derive(Clone, Debug, Default)]
pub(crate) struct Learned(Arc<Mutex<Vec<SocketAddr>>>);

impl Learned {
    /// These, in place of those before.
    pub(crate) fn set(&self, controllers: impl IntoIterator<Item = SocketAddr>) {
        *self.lock() = controllers.into_iter().take(MAX_CONTROLLERS).collect();
    }

    pub(crate) fn all(&self) -> Vec<SocketAddr> {
        self.lock().clone()
    }

    /// Those of another list, as long as nothing was heard for this one.
    pub(crate) fn begin_with(&self, before: &Self) {
        let before = before.all();
        let mut known = self.lock();
        if known.is_empty() {
            *known = before;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<SocketAddr>> {
        // A panic elsewhere leaves nothing half done that matters more than going on.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends an attempt to join, at once where the controller knows of it. A clone is the same one.
#[derive(Clone, Default)]
pub(crate) struct Cancellation(Arc<Mutex<Attempt>>);

#[derive(Default)]
struct Attempt {
    canceled: bool,
    /// To the controller.
    sender: Option<Arc<Sender>>,
}

impl Cancellation {
    /// From here on, nothing is waited for on any connection. An attempt that is under way ends with this word: of a
    /// connection that only closes, the controller would say that its rank is lost.
    pub(crate) fn cancel(&self, last_word: ToController) {
        let mut attempt = self.lock();
        attempt.canceled = true;
        if let Some(sender) = attempt.sender.take() {
            sender.say_last(last_word);
            sender.close();
        }
    }

    pub(crate) fn is_canceled(&self) -> bool {
        self.lock().canceled
    }

    /// The attempt has this connection now.
    pub(crate) fn watch(&self, sender: Option<Arc<Sender>>) {
        let mut attempt = self.lock();
        if !attempt.canceled {
            attempt.sender = sender;
        } else if let Some(sender) = sender {
            sender.close();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Attempt> {
        // A panic elsewhere leaves nothing half done that matters more than going on.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::thread;

    use millstream_inc::protocol::{AbortReason, Commanded, FrameDecoder, FromController, encode};
    use millstream_verbs::{Device, SoftConfig};

    use super::*;
    use crate::JoinConfig;
    use crate::join::join_with;
    use crate::memory::Domains;

    /// Joins at a peer that says nothing of a plan, and gives what that does with the connection.
    fn joins_at<T: Send + 'static>(
        own: u8,
        cancellation: &Cancellation,
        peer: impl FnOnce(TcpStream) -> T + Send + 'static,
    ) -> T {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let controller = listener.local_addr().unwrap();
        let peer = thread::spawn(move || {
            let stream = listener.accept().unwrap().0;
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            peer(stream)
        });
        // Which no other test has: those of the engine count from 1.
        let process = std::process::id();
        let own = Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, own);
        let device = Device::open_soft(&SoftConfig::new(own.into())).unwrap();
        let config = JoinConfig::new(controller, "g", 2, 0, &device);
        let mut joining = Joining {
            waiting: &mut |_| (),
            cancellation,
            is_taken: is_rank_taken,
            silence: None,
            prepares: false,
            avoid: &[],
            local: None,
            learned: &Learned::default(),
        };
        let joined = join_with(&config, &Domains::of([&device]), &mut joining);
        assert!(joined.is_err());
        peer.join().unwrap()
    }

    /// Where the ranks of a lost tree meet, an attempt keeps others waiting for as long as its connection is there.
    #[test]
    fn a_failed_attempt_closes_its_connection_though_who_may_end_it_is_there() {
        let cancellation = Cancellation::default();
        let closed = joins_at(254, &cancellation, |mut stream| {
            // No answer to one that joins. The rank ends the attempt, and this side does not.
            let message = FromController::Left { rank: 1, collectives: 1 };
            stream.write_all(&encode(&Commanded { term: 1, message }).unwrap()).unwrap();
            let mut heard = [0; 4096];
            loop {
                match stream.read(&mut heard) {
                    Ok(0) => return true,
                    Ok(_) => {}
                    Err(error) => return error.kind() == ErrorKind::ConnectionReset,
                }
            }
        });
        assert!(closed, "the connection stays");
        assert!(!cancellation.is_canceled());
    }

    /// The controller is to name who is lost, and not the rank of its host that ends its attempt for that.
    #[test]
    fn an_attempt_that_is_ended_says_why_before_its_connection_closes() {
        let cancellation = Cancellation::default();
        let lost = AbortReason::PeerLost { rank: 1, detail: "gone".to_owned() };
        let word = ToController::Fail { reason: "it is over".to_owned(), cause: Some(lost) };
        let (ends, last) = (cancellation.clone(), word.clone());
        let said = joins_at(253, &cancellation, move |mut stream| {
            let mut decoder = FrameDecoder::new();
            let mut said = Vec::new();
            loop {
                while let Some(message) = decoder.next_message::<ToController>().unwrap() {
                    if let ToController::Join(_) = message {
                        ends.cancel(last.clone());
                    }
                    said.push(message);
                }
                let mut bytes = [0; 4096];
                match stream.read(&mut bytes).unwrap() {
                    0 => return said,
                    count => decoder.extend(&bytes[..count]),
                }
            }
        });
        assert!(matches!(&said[..], [ToController::Join(_), last] if *last == word), "{said:?}");
        assert!(cancellation.is_canceled());
    }
}
