//! The control port: requests to connect and to fence, and their answers. Messages are lost, late,
//! doubled and out of order.

use core::time::Duration;

use millstream_transfer_core::{AnyPolicy, Flow, Initiator, RailId, TargetOutput};
use millstream_wire::Psn;

use super::checks::{check_target, tell_again};
use super::director::{Director, Event, Network, Phase, core_time};
use super::process::{End, Peer, Wanted, incarnation, life_of};
use super::world::{address, duration};
use crate::connection::Remote;

/// A message. `target` is the incarnation that its sender takes the peer for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Message {
    Connect {
        initiator: Initiator,
        epoch: u64,
        target: u64,
        nic: u16,
        end: End,
    },
    Accepted {
        initiator: Initiator,
        epoch: u64,
        target: u64,
        end: End,
    },
    Refused {
        initiator: Initiator,
        epoch: u64,
        target: u64,
        floor: u64,
    },
    Unable {
        initiator: Initiator,
        epoch: u64,
        target: u64,
    },
    Fence {
        initiator: Initiator,
        epoch: u64,
        target: u64,
    },
    Confirmed {
        initiator: Initiator,
        epoch: u64,
        target: u64,
    },
    /// The peer is not the one that was meant.
    Restarted {
        initiator: Initiator,
        target: u64,
        present: u64,
    },
}

impl Message {
    /// The two processes that it is between.
    const fn ends(&self) -> [usize; 2] {
        let (Self::Connect { initiator, target, .. }
        | Self::Accepted { initiator, target, .. }
        | Self::Refused { initiator, target, .. }
        | Self::Unable { initiator, target, .. }
        | Self::Fence { initiator, target, .. }
        | Self::Confirmed { initiator, target, .. }
        | Self::Restarted { initiator, target, .. }) = self;
        [life_of(initiator.incarnation).0, life_of(*target).0]
    }
}

impl Director {
    /// Sends a message, perhaps.
    pub(super) fn send(&mut self, network: &mut Network<'_>, message: Message) {
        let trouble = self.phase == Phase::Traffic;
        for copy in 0..2 {
            let lost = self.world.control_loss.happens(&mut self.rng);
            let doubled = self.world.control_doubled.happens(&mut self.rng);
            let late = self.world.control_late.happens(&mut self.rng);
            let limit = Duration::from_millis(if late && trouble { 3000 } else { 5 });
            let delay = duration(&mut self.rng, limit);
            let silent = {
                let controls = &self.outages.borrow().controls;
                message.ends().iter().any(|end| controls.contains(end))
            };
            if (copy > 0 && !doubled) || (lost && trouble) || silent {
                continue;
            }
            self.plan(network, delay, Event::Message(message));
        }
    }

    pub(super) fn receive(&mut self, network: &mut Network<'_>, message: Message) {
        network.note(|| format!("control {message:?}"));
        match message {
            Message::Connect { initiator, epoch, target, nic, end } => {
                let Some(own) = self.addressee(network, initiator, target) else { return };
                let process = &mut self.processes[own];
                let nic = process.nics[usize::from(nic)];
                if process.target.connect(initiator, epoch) {
                    process.wanted.insert(initiator, Wanted { epoch, end, nic });
                }
                self.pump_target(network, own);
            }
            Message::Fence { initiator, epoch, target } => {
                let Some(own) = self.addressee(network, initiator, target) else { return };
                self.processes[own].target.fence(initiator, epoch);
                self.pump_target(network, own);
            }
            Message::Accepted { initiator, epoch, target, end } => {
                self.accepted(network, initiator, epoch, target, end);
            }
            Message::Refused { initiator, epoch, target, floor } => {
                let now = core_time(network.now());
                self.tally.one("connections refused");
                self.answer(network, initiator, target, epoch, |flow, rail| {
                    flow.rail_refused(now, rail, epoch, floor);
                });
            }
            Message::Unable { initiator, epoch, target } => {
                let now = core_time(network.now());
                self.tally.one("connections for which there was no room");
                self.answer(network, initiator, target, epoch, |flow, rail| {
                    flow.rail_down(now, rail, epoch);
                });
            }
            Message::Confirmed { initiator, epoch, target } => {
                let now = core_time(network.now());
                self.tally.one("fences confirmed");
                if let Some((found, rail)) = self.asker(initiator, target) {
                    found.asked.remove(&(rail, epoch));
                }
                self.answer(network, initiator, target, epoch, |flow, rail| {
                    flow.fence_confirmed(now, rail, epoch);
                });
            }
            Message::Restarted { initiator, target, present } => {
                let now = core_time(network.now());
                self.tally.one("restarts noticed");
                let Some((found, _)) = self.asker(initiator, target) else { return };
                // Lives only rise: an answer that was late says nothing new.
                if present > found.known {
                    found.known = present;
                    found.flow.peer_restarted(now, present);
                    let ((own, _), (peer, _)) = (life_of(initiator.incarnation), life_of(target));
                    self.pump(network, own, peer);
                }
            }
        }
    }

    /// The process that a request is for, if it is up; who meant another is told.
    fn addressee(
        &mut self,
        network: &mut Network<'_>,
        initiator: Initiator,
        target: u64,
    ) -> Option<usize> {
        let (own, _) = life_of(target);
        let process = &self.processes[own];
        if !process.up {
            return None;
        }
        let present = incarnation(own, process.life);
        if present != target {
            self.send(network, Message::Restarted { initiator, target, present });
            return None;
        }
        Some(own)
    }

    /// Who asked, if its process is still there, and for which rail.
    fn asker(&mut self, initiator: Initiator, target: u64) -> Option<(&mut Peer, RailId)> {
        let ((own, life), (peer, _)) = (life_of(initiator.incarnation), life_of(target));
        Some((self.peer(own, life, peer)?, RailId(initiator.rail)))
    }

    /// Gives an answer to the flow that asked. What is of an earlier connection must change nothing.
    fn answer(
        &mut self,
        network: &mut Network<'_>,
        initiator: Initiator,
        target: u64,
        epoch: u64,
        tell: impl FnOnce(&mut Flow<AnyPolicy>, RailId),
    ) {
        let Some((found, rail)) = self.asker(initiator, target) else { return };
        if found.flow.rails()[usize::from(rail.0)].epoch() == epoch {
            tell(&mut found.flow, rail);
        } else {
            let wrong = tell_again(&mut found.flow, |flow| tell(flow, rail));
            wrong.into_iter().for_each(|what| {
                network.violate(format!("an answer to {initiator:?}, {epoch}: {what}"));
            });
            self.tally.one("answers of earlier connections");
        }
        let ((own, _), (peer, _)) = (life_of(initiator.incarnation), life_of(target));
        self.pump(network, own, peer);
    }

    fn accepted(
        &mut self,
        network: &mut Network<'_>,
        initiator: Initiator,
        epoch: u64,
        target: u64,
        end: End,
    ) {
        let ((own, life), (peer, _)) = (life_of(initiator.incarnation), life_of(target));
        let process = &self.processes[own];
        let rail = RailId(initiator.rail);
        let found = process.peers.get(&peer).filter(|_| process.up && process.life == life);
        // Of an answer that comes twice, or too late, nothing becomes.
        let waits = |link: &&super::process::Link| {
            let state = found.map(|found| found.flow.rails()[usize::from(rail.0)].state());
            let connecting = state == Some(millstream_transfer_core::RailState::Connecting);
            link.epoch == epoch && connecting && !link.connected
        };
        let Some(link) = found.and_then(|found| found.links.get(&rail)).filter(waits) else {
            return;
        };
        let own_end = link.end;
        let remote = remote(&own_end, &end);
        let options = self.world.connection;
        network.with_machine(own_end.nic, |nic, _| nic.connect(own_end.qpn, &remote, &options));
        self.tally.one("connections made");
        let links = self.processes[own].peers.get_mut(&peer).map(|found| &mut found.links);
        if let Some(link) = links.and_then(|links| links.get_mut(&rail)) {
            link.connected = true;
        }
        let now = core_time(network.now());
        self.answer(network, initiator, target, epoch, |flow, rail| flow.rail_up(now, rail, epoch));
    }

    /// Does what the target's side of a process wants.
    pub(super) fn pump_target(&mut self, network: &mut Network<'_>, own: usize) {
        let (life, target) = {
            let process = &self.processes[own];
            (process.life, incarnation(own, process.life))
        };
        while let Some(output) = self.processes[own].target.poll_output() {
            if let Some(what) = check_target(&mut self.processes[own], &output) {
                return network.violate(what);
            }
            match output {
                TargetOutput::Accept { initiator, epoch } => {
                    let wanted = self.processes[own].wanted.remove(&initiator);
                    let wanted = wanted.filter(|wanted| wanted.epoch == epoch);
                    let Some(Wanted { end, nic, .. }) = wanted else {
                        network.violate(format!("{output:?} was not asked for"));
                        return;
                    };
                    let psn = Psn::new(self.rng.bits() as u32);
                    let Some(qpn) = network.with_machine(nic, |nic, _| nic.create()) else {
                        network.violate("a NIC has no queue pair left".into());
                        return;
                    };
                    network.forget_queue_pair(nic, qpn);
                    let own_end = End { nic, qpn, psn };
                    let remote = remote(&own_end, &end);
                    let options = self.world.connection;
                    network.with_machine(nic, |nic, _| nic.connect(qpn, &remote, &options));
                    self.processes[own].accepted.insert((initiator, epoch), own_end);
                    let message = Message::Accepted { initiator, epoch, target, end: own_end };
                    self.send(network, message);
                }
                TargetOutput::Refuse { initiator, epoch, floor } => {
                    self.send(network, Message::Refused { initiator, epoch, target, floor });
                }
                TargetOutput::Full { initiator, epoch } => {
                    self.send(network, Message::Unable { initiator, epoch, target });
                }
                TargetOutput::Close { initiator, epoch } => {
                    let delay = duration(&mut self.rng, Duration::from_millis(20));
                    self.plan(network, delay, Event::Closed { own, life, initiator, epoch });
                }
                TargetOutput::Confirm { initiator, epoch } => {
                    // What waited to be accepted and is fenced will not be.
                    let wanted = &mut self.processes[own].wanted;
                    wanted.retain(|&other, wanted| other != initiator || wanted.epoch > epoch);
                    self.send(network, Message::Confirmed { initiator, epoch, target });
                }
            }
        }
        if !self.processes[own].is_bounded() {
            network.violate(format!("process {own} keeps more connections than it may"));
        }
    }
}

fn remote(own: &End, other: &End) -> Remote {
    Remote {
        address: address(other.nic.0),
        qpn: other.qpn,
        send_psn: own.psn,
        receive_psn: other.psn,
        receive_share: None,
    }
}
