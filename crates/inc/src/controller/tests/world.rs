//! A controller under virtual time, and peers that the test plays.

use millstream_wire::{Mtu, Psn, Qpn};

use super::*;
use crate::protocol::{FallbackOffer, Hello, Presence, SwitchChild, SwitchEdge, SwitchLimits};

/// What a queue pair's peer may have in flight to it.
pub(super) const fn share_of(qpn: Qpn) -> Option<u32> {
    Some(2 * qpn.value())
}

/// A controller, the time, and what everyone was told.
pub(super) struct World {
    pub(super) controller: Controller,
    pub(super) now: Instant,
    pub(super) told: BTreeMap<ConnectionId, Vec<FromController>>,
    pub(super) closed: Vec<ConnectionId>,
    /// The term of what everyone was told last.
    pub(super) terms: BTreeMap<ConnectionId, u64>,
    /// What everyone was last told that it waits for, and how long it still does.
    pub(super) waiting: BTreeMap<ConnectionId, (String, u64)>,
}

impl World {
    pub(super) fn new() -> Self {
        Self::with(ControllerConfig::new(7))
    }

    pub(super) fn with(config: ControllerConfig) -> Self {
        let controller = Controller::new(config);
        Self {
            controller,
            now: Instant::ZERO,
            told: BTreeMap::new(),
            closed: Vec::new(),
            terms: BTreeMap::new(),
            waiting: BTreeMap::new(),
        }
    }

    pub(super) fn settle(&mut self) {
        while let Some(output) = self.controller.poll_output() {
            if let Output::Send { connection, term, .. } = output {
                self.terms.insert(connection, term);
            }
            match output {
                Output::Send { connection, message: FromController::Ping, .. } => {
                    // Everyone in these tests is alive, unless the test says otherwise.
                    self.controller.handle_message(self.now, connection, ToController::Pong);
                }
                // Seen by the test that is about it.
                Output::Send {
                    connection,
                    message: FromController::Waiting { awaited, left_ms },
                    ..
                } => {
                    self.waiting.insert(connection, (awaited.to_string(), left_ms));
                }
                Output::Send { connection, message, .. } => {
                    assert!(!self.closed.contains(&connection), "{connection:?} is closed");
                    self.told.entry(connection).or_default().push(message);
                }
                Output::Close { connection } => self.closed.push(connection),
            }
        }
        self.assert_counted();
    }

    /// What is counted as it changes is what a count of all gives.
    fn assert_counted(&self) {
        self.controller.connections.assert_counted();
        self.controller.groups.assert_known();
        self.controller.groups.values().for_each(Group::assert_counted);
    }

    pub(super) fn connect(&mut self, connection: ConnectionId) {
        self.controller.handle_connected(self.now, connection);
        self.settle();
    }

    pub(super) fn say(&mut self, connection: ConnectionId, message: ToController) {
        self.controller.handle_message(self.now, connection, message);
        self.settle();
    }

    pub(super) fn close(&mut self, connection: ConnectionId) {
        self.controller.handle_closed(self.now, connection);
        self.settle();
    }

    /// Closes a connection whose peer does not come back in time.
    pub(super) fn lose(&mut self, connection: ConnectionId) {
        self.close(connection);
        self.pass(seconds(3.0));
    }

    /// Lets time pass, acting on every deadline on the way.
    pub(super) fn pass(&mut self, duration: Duration) {
        let end = self.now + duration;
        while let Some(deadline) = self.controller.poll_timeout().filter(|&at| at <= end) {
            assert!(deadline >= self.now, "a deadline of the past was not acted on");
            self.now = deadline;
            self.controller.handle_timeout(deadline);
            self.settle();
            assert!(self.controller.poll_timeout().is_none_or(|next| next > deadline));
        }
        self.now = end;
    }

    /// What someone was told since the last call.
    pub(super) fn heard(&mut self, connection: ConnectionId) -> Vec<FromController> {
        self.told.remove(&connection).unwrap_or_default()
    }

    pub(super) fn switch(&mut self, connection: ConnectionId, name: &str, address: u8) {
        self.switch_with(connection, name, address, Presence::default());
    }

    pub(super) fn switch_with(
        &mut self,
        connection: ConnectionId,
        name: &str,
        address: u8,
        presence: Presence,
    ) {
        self.connect(connection);
        let (name, address) = (name.to_owned(), IpAddr::from([127, 0, 1, address]));
        let limits = SwitchLimits::NONE;
        self.say(connection, ToController::Register { name, address, limits, presence });
    }

    pub(super) fn join(
        &mut self,
        connection: u64,
        group: &str,
        world: u32,
        rank: u32,
    ) -> ConnectionId {
        let connection = ConnectionId(connection);
        self.connect(connection);
        self.say(connection, ToController::Join(hello(group, world, rank)));
        connection
    }

    pub(super) fn end(&mut self, connection: ConnectionId) {
        let number = connection.0 as u32;
        let (qpn, psn) = (Qpn::new(100 + number), Psn::new(number));
        self.say(
            connection,
            ToController::Connect {
                qpn,
                psn,
                path_mtu: Mtu::B4096,
                more: Vec::new(),
                receive_share: share_of(qpn),
            },
        );
    }

    /// A group that is ready, on the switch that is there.
    pub(super) fn ready(
        &mut self,
        first: u64,
        group: &str,
        world: u32,
    ) -> (Vec<ConnectionId>, u64) {
        let hosts: Vec<ConnectionId> =
            (0..world).map(|rank| self.join(first + u64::from(rank), group, world, rank)).collect();
        for &host in &hosts {
            self.end(host);
        }
        let communicator = self.create();
        for &host in &hosts {
            let heard = self.heard(host);
            assert!(
                matches!(heard[..], [FromController::GroupReady { .. }, FromController::Plan(_)]),
                "{heard:?}"
            );
        }
        assert_eq!(self.controller.group_state(group), Some(GroupState::CommunicatorReady));
        (hosts, communicator)
    }

    /// Plays the switch: makes the communicator that it was asked for last.
    pub(super) fn create(&mut self) -> u64 {
        let heard = self.heard(SWITCH);
        let Some(FromController::CreateCommunicator { communicator, children, .. }) = heard.last()
        else {
            panic!("{heard:?}");
        };
        let edge = |child: &SwitchChild| {
            let rank = child.ranks.first().unwrap();
            SwitchEdge { rank, qpn: Qpn::new(500 + rank), psn: Psn::new(rank), receive_share: None }
        };
        let (communicator, edges) = (*communicator, children.iter().map(edge).collect());
        self.say(SWITCH, ToController::CommunicatorCreated { communicator, edges, uplink: None });
        communicator
    }

    pub(super) fn refusal(&mut self, connection: ConnectionId) -> Refusal {
        let mut heard = self.heard(connection);
        let Some(FromController::Refused { reason }) = heard.pop() else { panic!("{heard:?}") };
        assert!(self.closed.contains(&connection));
        reason
    }

    /// Nothing of any group is left.
    pub(super) fn assert_quiet(&self) {
        assert_eq!(self.controller.census().groups, 0);
        assert!(self.controller.names.is_empty());
    }
}

pub(super) fn hello(group: &str, world: u32, rank: u32) -> Hello {
    Hello {
        group: group.to_owned(),
        world,
        rank,
        address: IpAddr::from([127, 0, 0, rank as u8 + 1]),
        timeout_ms: 30_000,
        more_addresses: Vec::new(),
        same_machine: None,
        options: crate::CommunicatorOptions::default(),
        fallback: FallbackOffer::Off,
        meeting: None,
        avoid: Vec::new(),
    }
}

pub(super) fn group_ready(switch_address: IpAddr) -> FromController {
    let (segment_bytes, window, more_switches) = (256 << 10, 8, Vec::new());
    FromController::GroupReady { switch_address, segment_bytes, window, more_switches, hosts: None }
}

pub(super) fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}
