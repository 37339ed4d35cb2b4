//! How the ranks of lost trees meet again: at the controller, or at rank 0 if no controller is there.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use millstream_inc::failover::{Failure, Next, Patience, Place, Succession};
use millstream_inc::protocol::{AbortReason, LostSwitch, MeetingPoint, Refusal};

use super::recovery::not_resumed;
use crate::coordinator::{Coordinator, Expected, Rendezvous};
use crate::join::{self, JoinConfig, Joined, Waiting};
use crate::joining::{Cancellation, Joining, Learned, is_rank_taken};
use crate::local::LocalEngine;
use crate::memory::Domains;
use crate::path::Path;
use crate::{CollectiveError, JoinError};

/// How long the ranks may take to find each other and other trees: for a controller to notice that a switch stands still,
/// for the wait for another switch, and for busy machines.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Between attempts.
const PAUSE: Duration = Duration::from_millis(200);

/// Why the ranks' own switches serve, for people.
const NO_CONTROLLER: &str = "no controller can be reached, and rank 0 has taken its place";

/// Where ranks meet, and by which name, which nobody else has.
pub(super) struct Meeting {
    pub(super) name: String,
    pub(super) rendezvous: Option<Rendezvous>,
    pub(super) cancellation: Cancellation,
    pub(super) avoid: Vec<LostSwitch>,
    /// Controllers that are asked behind those that the rank was given.
    pub(super) learned: Learned,
}

/// A rank that meets the others again.
pub(super) struct Rejoining<'a> {
    pub(super) config: &'a JoinConfig,
    pub(super) domains: &'a Domains,
    /// What it shares memory by, if it does.
    pub(super) local: Option<&'a Arc<LocalEngine>>,
    /// Why.
    pub(super) error: &'a CollectiveError,
    /// Bytes of a segment, and segments of a window, as they were.
    pub(super) shape: (u32, u32),
    /// Why it is not to go on, if so.
    pub(super) is_over: &'a dyn Fn() -> Option<CollectiveError>,
}

impl Rejoining<'_> {
    /// Meets the others. Gives what rank 0 does in the place of the controller, if it has to.
    pub(super) fn join(
        &self,
        mut meeting: Meeting,
    ) -> Result<(Joined, Option<Coordinator>), CollectiveError> {
        let point = meeting.rendezvous.as_ref().map(|rendezvous| rendezvous.point);
        let controllers = self.config.controllers.with_learned(&meeting.learned.all());
        let total = PATIENCE.min(self.config.timeout);
        let patience = Patience::new(total, controllers.as_slice().len());
        let mut way = Succession::new(millstream_net::now(), patience, point.is_some());
        let (mut coordinator, mut at_controller) = (None, None);
        loop {
            let place = way.place();
            let joined = match (place, point) {
                (Place::RankZero, Some(point)) => {
                    self.join_rank_zero(&mut meeting, point, &way, &mut coordinator)
                }
                _ => self.join_controller(&meeting, patience.total / 4, &mut way),
            };
            let error = match joined {
                Ok(joined) => {
                    meeting.cancellation.watch(None);
                    return Ok((joined, coordinator));
                }
                Err(error) => error,
            };
            if let Some(error) = (self.is_over)() {
                return Err(error);
            }
            let reason = said(&error, point.filter(|_| place == Place::RankZero));
            match way.handle_failure(millstream_net::now(), failure(&error, place)) {
                Next::Again if way.place() == place => {
                    tracing::debug!(%reason, "trying again to join for other trees");
                    thread::sleep(PAUSE);
                }
                Next::Again => {
                    tracing::warn!(%reason, "the ranks meet without a controller");
                    at_controller = Some(reason);
                }
                Next::GiveUp => {
                    let before = at_controller.map_or_else(String::new, |it| format!("{it}; "));
                    return Err(not_resumed(self.error, &format!("{before}{reason}")));
                }
            }
        }
    }

    fn join_controller(
        &self,
        meeting: &Meeting,
        silence: Duration,
        way: &mut Succession,
    ) -> Result<Joined, JoinError> {
        let config = JoinConfig { timeout: left(way), ..self.config_of(meeting) };
        let joined = join::join_with(
            &config,
            self.domains,
            &mut Joining {
                waiting: &mut |waiting: &Waiting| {
                    if waiting.awaited.is_some() || waiting.refused.is_some() {
                        way.handle_heard(millstream_net::now());
                    }
                },
                cancellation: &meeting.cancellation,
                is_taken: is_rank_taken,
                silence: meeting.rendezvous.is_some().then_some(silence),
                prepares: true,
                avoid: &meeting.avoid,
                local: self.local,
                learned: &meeting.learned,
            },
        );
        if let Err(JoinError::Refused(reason)) = &joined
            && !matches!(reason, Refusal::NotLeader { .. })
        {
            way.handle_heard(millstream_net::now());
        }
        joined
    }

    /// As above, at rank 0, which this may be.
    fn join_rank_zero(
        &self,
        meeting: &mut Meeting,
        point: MeetingPoint,
        way: &Succession,
        coordinator: &mut Option<Coordinator>,
    ) -> Result<Joined, JoinError> {
        let controller = point.address;
        let failed = |source: io::Error| JoinError::Unreachable { controller, source };
        let token = Rendezvous::token(&point, self.config.token).map_err(failed)?;
        let listener = meeting.rendezvous.as_mut().and_then(|it| it.listener.take());
        if let Some(listener) = listener {
            let expected = Expected {
                group: meeting.name.clone(),
                world: self.config.world,
                shape: self.shape,
                reason: NO_CONTROLLER.to_owned(),
            };
            *coordinator = Some(Coordinator::start(listener, token, expected).map_err(failed)?);
        }
        let config = JoinConfig {
            controllers: point.address.into(),
            token: Some(token),
            tls: None,
            timeout: left(way),
            ..self.config_of(meeting)
        };
        let mut joining = Joining {
            waiting: &mut |_| (),
            cancellation: &meeting.cancellation,
            is_taken: is_rank_taken,
            silence: None,
            prepares: false,
            avoid: &[],
            local: self.local,
            // No controller is asked here.
            learned: &Learned::default(),
        };
        join::join_with(&config, self.domains, &mut joining)
    }

    fn config_of(&self, meeting: &Meeting) -> JoinConfig {
        let group = meeting.name.clone();
        // Those of a host say again that they are of one.
        let path = self.local.map_or(Path::Switch, |_| self.config.path);
        JoinConfig { group, path, ..self.config.clone() }
    }
}

/// How long a rank still has at its place.
fn left(way: &Succession) -> Duration {
    way.until().saturating_duration_since(millstream_net::now())
}

/// What follows from the failure of an attempt to join.
fn failure(error: &JoinError, place: Place) -> Failure {
    match error {
        // Rank 0 listens as long as its process is there.
        JoinError::Unreachable { source, .. }
            if place == Place::RankZero && source.kind() == io::ErrorKind::ConnectionRefused =>
        {
            Failure::Final
        }
        JoinError::Unreachable { .. } | JoinError::Lost { .. } | JoinError::Timeout { .. } => {
            Failure::Passing
        }
        JoinError::Refused(
            Refusal::Aborted { reason: AbortReason::SwitchLost { .. } } | Refusal::NotLeader { .. },
        ) => Failure::Passing,
        // It was refused so all the time that it had there.
        JoinError::Refused(reason) if reason.is_for_load() => Failure::Passing,
        JoinError::Refused(Refusal::Incomplete { .. }) => Failure::Incomplete,
        _ => Failure::Final,
    }
}

/// An error, of an attempt to join at rank 0 if that is there.
fn said(error: &JoinError, rank_zero: Option<MeetingPoint>) -> String {
    let Some(MeetingPoint { address, .. }) = rank_zero else { return error.to_string() };
    let why = match error {
        JoinError::Unreachable { source, .. } | JoinError::Lost { source, .. } => {
            source.to_string()
        }
        JoinError::Timeout { .. } => "it does not answer".to_owned(),
        error => error.to_string(),
    };
    format!("rank 0, which takes the place of the controller at {address}: {why}")
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};

    use millstream_inc::protocol::{Commanded, FrameDecoder, FromController, ToController, encode};
    use millstream_verbs::{Device, SoftConfig};

    use super::*;

    #[test]
    fn ranks_meet_again_at_a_controller_that_was_not_given() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let learned = Learned::default();
        learned.set([listener.local_addr().unwrap()]);
        thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let mut decoder = FrameDecoder::new();
            let hello = loop {
                match decoder.next_message().unwrap() {
                    Some(ToController::Join(hello)) => break hello,
                    Some(message) => panic!("it says {message:?}"),
                    None => {
                        let mut bytes = [0; 4096];
                        let count = stream.read(&mut bytes).unwrap();
                        assert_ne!(count, 0, "it does not join");
                        decoder.extend(&bytes[..count]);
                    }
                }
            };
            // One that is not waited out.
            let reason = Refusal::GroupTaken { group: hello.group };
            let message = FromController::Refused { reason };
            stream.write_all(&encode(&Commanded { term: 1, message }).unwrap()).unwrap();
        });
        let address = |last| IpAddr::from([127, 41, std::process::id() as u8, last]);
        let device = Device::open_soft(&SoftConfig::new(address(1))).unwrap();
        // Nobody listens there.
        let given = SocketAddr::new(address(2), 1);
        let timeout = Duration::from_secs(5);
        let config = JoinConfig { timeout, ..JoinConfig::new(given, "g", 2, 1, &device) };
        let rejoining = Rejoining {
            config: &config,
            domains: &Domains::of([&device]),
            local: None,
            error: &CollectiveError::SwitchLost {
                switch: address(3),
                detail: "silent".to_owned(),
                incarnation: None,
            },
            shape: (0, 0),
            is_over: &|| None,
        };
        let meeting = Meeting {
            name: "g of before".to_owned(),
            rendezvous: None,
            cancellation: Cancellation::default(),
            avoid: Vec::new(),
            learned,
        };
        let error = rejoining.join(meeting).err().unwrap().to_string();
        assert!(error.contains("group \"g of before\" is in use"), "{error}");
    }
}
