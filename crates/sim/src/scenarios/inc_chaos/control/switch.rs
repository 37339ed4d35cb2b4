//! A switch's side of the control connection, as the daemon has it (`crates/control/src/switch.rs`).

use core::net::IpAddr;
use core::time::Duration;

use millstream_inc::protocol::{Commanded, FromController, SwitchLimits, ToController};
use millstream_inc::{
    Abort, CommunicatorSpec, HeldNodes, MAX_QUEUE_PAIRS, ParentSpec, SwitchConfig, SwitchEvent,
    SwitchNode,
};
use millstream_roce::{IcrcCheck, Instant};

use super::super::build::Network;
use super::super::machine::{Kind, Participant};
use super::super::world::address;
use super::agent::{Agent, Link};
use super::director::{Director, Event};
use crate::NodeId;

/// The code that hosts get when none of them has come back.
const UNCLAIMED: u32 = 1;

/// The process.
#[derive(Debug)]
pub(super) struct Switch {
    pub(super) agent: Agent,
    pub(super) up: bool,
    nodes: HeldNodes,
    registered: bool,
    /// It was registered once.
    ready: bool,
}

impl Switch {
    pub(super) const fn new() -> Self {
        Self {
            agent: Agent::new(),
            up: false,
            nodes: HeldNodes::new(0),
            registered: false,
            ready: false,
        }
    }

    fn introduction(&self, name: String, address: IpAddr) -> Vec<ToController> {
        let limits =
            SwitchLimits { communicators: 64, memory_bytes: 1 << 30, queue_pairs: MAX_QUEUE_PAIRS };
        self.nodes.introduction(name, address, limits)
    }
}

/// So long after a moment that is always the same.
fn time(now: Instant) -> Duration {
    Duration::from_nanos(now.nanos())
}

impl Director {
    pub(super) fn start_switch(&mut self, network: &mut Network<'_>, machine: usize) {
        let config = SwitchConfig {
            icrc: IcrcCheck::Exact,
            ..SwitchConfig::new(address(machine), self.rng.bits())
        };
        let node = NodeId(machine);
        *network.machine_mut(node) =
            Participant::new(Kind::Switch(Box::new(SwitchNode::new(config))));
        network.set_up(node, true);
        let life = self.switch(machine).agent.life + 1;
        let nodes = HeldNodes::new(self.rng.bits());
        *self.switch(machine) = Switch { nodes, up: true, ..Switch::new() };
        self.switch(machine).agent.life = life;
        self.connect(network, machine);
    }

    pub(super) fn kill_switch(&mut self, network: &mut Network<'_>, machine: usize) {
        network.set_up(NodeId(machine), false);
        network.forget_connections(NodeId(machine));
        self.switch(machine).up = false;
        self.close_link(network, machine);
        self.switch(machine).agent.link = Link::Off;
    }

    /// The connection is there.
    pub(super) fn introduce(&mut self, network: &mut Network<'_>, machine: usize, stream: u64) {
        let name = format!("s{}", machine - self.world.hosts);
        let switch = self.switch(machine);
        switch.registered = false;
        for message in switch.introduction(name, address(machine)) {
            self.send_up(network, stream, Some(message));
        }
    }

    /// The session with the controller is over.
    pub(super) fn switch_alone(&mut self, network: &mut Network<'_>, machine: usize) {
        self.close_link(network, machine);
        let now = network.now();
        let Self { switches, rng, world, .. } = self;
        let switch = &mut switches[machine - world.hosts];
        switch.nodes.recall(time(now));
        if switch.registered {
            switch.agent.attempts = 0;
        }
        switch.registered = false;
        let until = switch.agent.come_back(now, rng);
        self.plan_at(network, until, Event::Client { machine });
    }

    pub(super) fn command_switch(
        &mut self,
        network: &mut Network<'_>,
        machine: usize,
        stream: u64,
        Commanded { term, message }: Commanded,
    ) {
        if self.switch(machine).nodes.obey(term).is_err() {
            self.tally.one("commands of a lower term");
            return self.switch_alone(network, machine);
        }
        if !self.switch(machine).agent.obeys(term) {
            network.violate(format!("switch {machine} obeys a command of term {term}"));
        }
        let answer = match message {
            FromController::Ping => Some(ToController::Pong),
            FromController::Registered => {
                let switch = self.switch(machine);
                (switch.registered, switch.ready) = (true, true);
                None
            }
            FromController::CreateCommunicator { .. } => self.create(network, machine, &message),
            FromController::ConnectParent { communicator, address, qpn, psn, receive_share } => {
                let parent = ParentSpec { address, qpn, psn, receive_share };
                let connected = network.with_machine(NodeId(machine), |it, now| {
                    it.switch_mut().map(|it| it.connect_parent(now, communicator, &parent))
                });
                if connected == Some(Ok(true)) {
                    self.switch(machine).nodes.connected(communicator, address);
                    Some(ToController::ParentConnected { communicator })
                } else {
                    if self.switch(machine).nodes.remove(communicator) {
                        destroy(network, machine, communicator);
                    }
                    let reason = format!("{connected:?}");
                    Some(ToController::CommunicatorFailed { communicator, reason, path_mtu: None })
                }
            }
            FromController::DestroyCommunicator { communicator } => {
                self.destroy(network, machine, communicator)
            }
            FromController::AbortCommunicator { communicator, rank } => {
                abort(network, machine, communicator, Abort::PeerLost { rank });
                None
            }
            FromController::EndCommunicator { communicator } => {
                self.tally.one("nodes that nobody claims");
                abort(network, machine, communicator, Abort::Requested { code: UNCLAIMED });
                None
            }
            FromController::Refused { reason } => {
                let taken = matches!(reason, millstream_inc::protocol::Refusal::SwitchTaken { .. });
                if !taken && !self.switch(machine).ready && !reason.is_for_load() {
                    network.violate(format!("switch {machine} is refused: {reason}"));
                }
                self.tally.one("switches refused");
                return self.switch_alone(network, machine);
            }
            other => {
                network.violate(format!("a switch is told {other:?}"));
                None
            }
        };
        if let Some(answer) = answer {
            self.send_up(network, stream, Some(answer));
        }
        self.tell(network, machine);
    }

    fn create(
        &mut self,
        network: &mut Network<'_>,
        machine: usize,
        message: &FromController,
    ) -> Option<ToController> {
        let spec = CommunicatorSpec::asked_for(message)?;
        let created = network.with_machine(NodeId(machine), |it, now| {
            it.switch_mut().map(|it| it.create_communicator(now, &spec))
        });
        let Some(Ok(created)) = created else {
            network.violate(format!("switch {machine}: {created:?}"));
            let (communicator, reason) = (spec.id, "full".to_owned());
            return Some(ToController::CommunicatorFailed { communicator, reason, path_mtu: None });
        };
        self.switch(machine).nodes.made(message);
        for edge in &created.edges {
            network.forget_queue_pair(NodeId(machine), edge.qpn);
        }
        Some(created.message(spec.id))
    }

    fn destroy(
        &mut self,
        network: &mut Network<'_>,
        machine: usize,
        communicator: u64,
    ) -> Option<ToController> {
        self.switch(machine).nodes.remove(communicator).then(|| {
            destroy(network, machine, communicator);
            ToController::CommunicatorDestroyed { communicator }
        })
    }

    /// Acts on what its node reports.
    pub(super) fn happened(
        &mut self,
        network: &mut Network<'_>,
        machine: usize,
        event: SwitchEvent,
    ) {
        network.note(|| format!("switch {machine}: {event:?}"));
        if let SwitchEvent::Aborted { communicator, .. } = event {
            let answer = self.destroy(network, machine, communicator);
            if let (Some(answer), Some(stream)) = (answer, self.stream_of(machine)) {
                self.send_up(network, stream, Some(answer));
            }
            return;
        }
        self.switch(machine).nodes.happened(&event);
        self.tell(network, machine);
    }

    /// Tells why communicators end, once the controller knows it.
    fn tell(&mut self, network: &mut Network<'_>, machine: usize) {
        let Some(stream) = self.stream_of(machine) else { return };
        if !self.switch(machine).registered {
            return;
        }
        while let Some((communicator, report)) = self.switch(machine).nodes.next_untold() {
            self.tally.one("reports of switches");
            let now = time(network.now());
            self.switch(machine).nodes.told(communicator, now);
            self.send_up(network, stream, Some(ToController::Report { communicator, report }));
        }
    }
}

fn destroy(network: &mut Network<'_>, machine: usize, communicator: u64) {
    network.with_machine(NodeId(machine), |it, now| {
        it.switch_mut().map(|it| it.destroy_communicator(now, communicator))
    });
}

fn abort(network: &mut Network<'_>, machine: usize, communicator: u64, abort: Abort) {
    network.with_machine(NodeId(machine), |it, now| {
        it.switch_mut().map(|it| it.abort_communicator(now, communicator, abort))
    });
}
