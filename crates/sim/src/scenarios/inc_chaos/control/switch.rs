//! A switch's side of the control connection, as the daemon has it (`crates/control/src/switch.rs`).

use core::net::IpAddr;
use core::time::Duration;
use std::collections::BTreeMap;

use millstream_inc::protocol::{
    Commanded, FromController, GroupIdentity, HeldNode, MAX_HELD_AT_ONCE, ObeyedTerm, Presence,
    SwitchBelow, SwitchEdge, SwitchLimits, SwitchReport, SwitchUplink, ToController,
};
use millstream_inc::{
    Abort, ChildSpec, CommunicatorSpec, ParentSpec, SwitchConfig, SwitchEvent, SwitchNode,
};
use millstream_roce::{IcrcCheck, Instant};

use super::super::build::Network;
use super::super::machine::{Kind, Participant};
use super::super::world::address;
use super::agent::{Agent, Link};
use super::director::{Director, Event};
use crate::NodeId;

/// What was written for so long may be lost with the connection.
const UNREAD: Duration = Duration::from_secs(15);

/// The code that hosts get when none of them has come back.
const UNCLAIMED: u32 = 1;

#[derive(Debug)]
struct Made {
    group: GroupIdentity,
    children: u32,
    below: Vec<SwitchBelow>,
    above: Option<IpAddr>,
}

/// The process.
#[derive(Debug)]
pub(super) struct Switch {
    pub(super) agent: Agent,
    pub(super) up: bool,
    incarnation: u64,
    term: ObeyedTerm,
    communicators: BTreeMap<u64, Made>,
    untold: BTreeMap<u64, SwitchReport>,
    told: Vec<(Instant, u64, SwitchReport)>,
    registered: bool,
    /// It was registered once.
    ready: bool,
}

impl Switch {
    pub(super) const fn new() -> Self {
        Self {
            agent: Agent::new(),
            up: false,
            incarnation: 0,
            term: ObeyedTerm::NONE,
            communicators: BTreeMap::new(),
            untold: BTreeMap::new(),
            told: Vec::new(),
            registered: false,
            ready: false,
        }
    }

    fn introduction(&self, name: String, address: IpAddr) -> Vec<ToController> {
        let limits = SwitchLimits { communicators: 64, memory_bytes: 1 << 30 };
        let held = self.communicators.len() as u32;
        let presence = Presence { incarnation: self.incarnation, term: self.term.get(), held };
        let node = |(&communicator, made): (&u64, &Made)| {
            let &Made { group, children, ref below, .. } = made;
            // Hosts have one address, so communicators have one tree.
            HeldNode { group, communicator, children, below: below.clone(), tree: 0 }
        };
        let nodes: Vec<HeldNode> = self.communicators.iter().map(node).collect();
        let report = |(&communicator, report): (&u64, &SwitchReport)| ToController::Report {
            communicator,
            report: report.clone(),
        };
        [ToController::Register { name, address, limits, presence }]
            .into_iter()
            .chain(self.untold.iter().map(report))
            .chain(
                nodes
                    .chunks(MAX_HELD_AT_ONCE)
                    .map(|nodes| ToController::Held { nodes: nodes.to_vec() }),
            )
            .collect()
    }
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
        let incarnation = self.rng.bits();
        *self.switch(machine) = Switch { incarnation, up: true, ..Switch::new() };
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
        for (at, communicator, report) in switch.told.drain(..) {
            if now < at + UNREAD {
                switch.untold.entry(communicator).or_insert(report);
            }
        }
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
        if self.switch(machine).term.obey(term).is_err() {
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
            FromController::CreateCommunicator { .. } => {
                Some(self.create(network, machine, message))
            }
            FromController::ConnectParent { communicator, address, qpn, psn } => {
                let parent = ParentSpec { address, qpn, psn };
                let connected = network.with_machine(NodeId(machine), |it, now| {
                    it.switch_mut().map(|it| it.connect_parent(now, communicator, &parent))
                });
                if connected == Some(Ok(true)) {
                    if let Some(made) = self.switch(machine).communicators.get_mut(&communicator) {
                        made.above = Some(address);
                    }
                    Some(ToController::ParentConnected { communicator })
                } else {
                    if self.switch(machine).communicators.remove(&communicator).is_some() {
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
        message: FromController,
    ) -> ToController {
        let FromController::CreateCommunicator {
            communicator,
            group,
            path_mtu,
            segment_bytes,
            window,
            world,
            has_parent,
            children,
            tree: _,
            options,
        } = message
        else {
            return ToController::Pong;
        };
        let below = children.iter().filter(|child| child.is_switch).map(|child| SwitchBelow {
            rank: child.ranks.first().unwrap_or_default(),
            address: child.address,
        });
        let (below, count) = (below.collect(), children.len() as u32);
        let children = children.into_iter().map(|child| ChildSpec {
            ranks: child.ranks,
            address: child.address,
            qpn: child.qpn,
            psn: child.psn,
            is_switch: child.is_switch,
        });
        let spec = CommunicatorSpec {
            id: communicator,
            path_mtu,
            segment_bytes,
            window,
            world,
            has_parent,
            children: children.collect(),
            options,
        };
        let created = network.with_machine(NodeId(machine), |it, now| {
            it.switch_mut().map(|it| it.create_communicator(now, &spec))
        });
        match created {
            Some(Ok(created)) => {
                let made = Made { group, children: count, below, above: None };
                self.switch(machine).communicators.insert(communicator, made);
                let edge = |it: millstream_inc::Edge| SwitchEdge {
                    rank: it.rank,
                    qpn: it.qpn,
                    psn: it.psn,
                };
                for edge in &created.edges {
                    network.forget_queue_pair(NodeId(machine), edge.qpn);
                }
                let uplink = created.uplink.map(|it| SwitchUplink { qpn: it.qpn, psn: it.psn });
                let edges = created.edges.into_iter().map(edge).collect();
                ToController::CommunicatorCreated { communicator, edges, uplink }
            }
            failed => {
                network.violate(format!("switch {machine}: {failed:?}"));
                ToController::CommunicatorFailed {
                    communicator,
                    reason: "full".to_owned(),
                    path_mtu: None,
                }
            }
        }
    }

    fn destroy(
        &mut self,
        network: &mut Network<'_>,
        machine: usize,
        communicator: u64,
    ) -> Option<ToController> {
        self.switch(machine).communicators.remove(&communicator)?;
        destroy(network, machine, communicator);
        Some(ToController::CommunicatorDestroyed { communicator })
    }

    /// Acts on what its node reports.
    pub(super) fn happened(
        &mut self,
        network: &mut Network<'_>,
        machine: usize,
        event: SwitchEvent,
    ) {
        network.note(|| format!("switch {machine}: {event:?}"));
        let made = &self.switch(machine).communicators;
        let (communicator, report) = match event {
            SwitchEvent::ChildLost { communicator, rank, status } => {
                let detail = format!("it does not answer the switch: {status}");
                (communicator, SwitchReport::PeerLost { rank, detail })
            }
            SwitchEvent::Mismatch { communicator, mismatch } => {
                let detail = mismatch.to_string();
                (communicator, SwitchReport::Mismatch { rank: mismatch.rank, detail })
            }
            SwitchEvent::Violation { communicator, rank, violation } => {
                (communicator, SwitchReport::Violation { rank, detail: violation.to_string() })
            }
            SwitchEvent::Overdue { communicator, overdue } => {
                let Some(&rank) = overdue.named().first() else { return };
                (communicator, SwitchReport::Overdue { rank, detail: overdue.to_string() })
            }
            SwitchEvent::ParentLost { communicator, status } => {
                let Some(address) = made.get(&communicator).and_then(|made| made.above) else {
                    return;
                };
                let detail = format!("it does not answer the switch below: {status}");
                (communicator, SwitchReport::ParentLost { address, detail })
            }
            SwitchEvent::Aborted { communicator, .. } => {
                let answer = self.destroy(network, machine, communicator);
                if let (Some(answer), Some(stream)) = (answer, self.stream_of(machine)) {
                    self.send_up(network, stream, Some(answer));
                }
                return;
            }
        };
        if made.contains_key(&communicator) {
            self.switch(machine).untold.entry(communicator).or_insert(report);
        }
        self.tell(network, machine);
    }

    /// Tells why communicators end, once the controller knows it.
    fn tell(&mut self, network: &mut Network<'_>, machine: usize) {
        let Some(stream) = self.stream_of(machine) else { return };
        if !self.switch(machine).registered {
            return;
        }
        while let Some((communicator, report)) = self.switch(machine).untold.pop_first() {
            self.tally.one("reports of switches");
            let now = network.now();
            let told = &mut self.switch(machine).told;
            told.retain(|&(at, ..)| now < at + UNREAD);
            told.push((now, communicator, report.clone()));
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
