//! Connections come up and go down: each time is a life, with numbers and rules of its own.

use core::time::Duration;

use millstream_roce::{
    QueuePairAttributes, QueuePairCapabilities, QueuePairConfig, QueuePairState,
};
use millstream_wire::Psn;

use super::connection::{Connection, Excuses};
use super::director::{Action, DOMAIN, Director, Network, Phase};
use super::draw::{draw_rules, duration};
use super::world::{Lowering, Role};
use crate::NodeId;
use crate::connection::{Remote, connect};

/// Requests posted to a queue pair in the error state, to see them flushed.
const AFTERTHOUGHTS: usize = 2;

impl Director {
    /// Both ends are down: plans to raise them, under new rules.
    pub(super) fn begin_life(&mut self, network: &mut Network<'_>, index: usize) {
        let loses = self.world.loses();
        let calm = !loses && self.world.disturbances.is_empty();
        let round_trip = self.world.round_trip();
        let mut rules = draw_rules(&mut self.rng);
        let connection = &mut self.connections[index];
        if calm {
            // Nothing may fail, so nobody may be short of patience.
            rules.rnr_retry = 7;
            while Duration::from_nanos(4096 << rules.timeout) < 4 * round_trip {
                rules.timeout += 1;
            }
        }
        connection.rules = rules;
        connection.life += 1;
        connection.going_down = false;
        connection.excuses = Excuses::default();
        // Queues and delays can be longer than some are patient.
        connection.excuses.link = loses || connection.patience() < 4 * round_trip;
        let first = connection.life == 1;
        let mut first_psns = self.world.connections[index].first_psns;
        if !first {
            for psn in &mut first_psns {
                let wraps = Psn::new(Psn::COUNT - self.rng.between(1, 200) as u32);
                *psn = self.used.far_from(wraps, || Psn::new(self.rng.bits() as u32));
            }
        }
        self.connections[index].psns = first_psns;
        for stream in [2 * index, 2 * index + 1] {
            for role in Role::ALL {
                if self.streams[stream].regions[role as usize].dead {
                    self.revive(network, stream, role);
                }
            }
            self.streams[stream].begin(network.now());
            let connection = &mut self.connections[index];
            for role in Role::ALL {
                let region = &self.streams[stream].regions[role as usize];
                connection.excuses.absent[role as usize] |= region.absent.is_some();
            }
        }
        let connection = &mut self.connections[index];
        if self.links.iter().any(|&((from, to), _, cuts)| {
            cuts > 0 && connection.hosts.contains(&from) && connection.hosts.contains(&to)
        }) {
            connection.excuses.link = true;
        }
        let first_end = self.rng.below(2) as usize;
        let pause = if first { Duration::ZERO } else { Duration::from_micros(500) };
        let at = duration(&mut self.rng, pause);
        // One end may be up for a while before the other: that is silence too.
        let skew = duration(&mut self.rng, pause);
        let life = self.connections[index].life;
        for (after, end) in [(at, first_end), (at + skew, 1 - first_end)] {
            self.plan_after(network, after, Action::Raise { connection: index, end, life });
        }
        let connection = &mut self.connections[index];
        connection.excuses.gone |= !first;
        for end in &mut connection.ends {
            end.lowered = false;
        }
    }

    /// Connects one end, when the other has a queue pair too.
    pub(super) fn raise(&mut self, network: &mut Network<'_>, index: usize, end: usize, life: u32) {
        let Connection { hosts, ends, life: now, .. } = self.connections[index];
        if now != life || ends.iter().any(|end| end.lowered) {
            return;
        }
        if !hosts.iter().all(|&host| network.is_up(NodeId(host)) && !self.overrun[host]) {
            let pause = Duration::from_micros(200);
            let again = Action::Raise { connection: index, end, life };
            return self.plan_after(network, pause, again);
        }
        for end in 0..2 {
            self.provide_queue_pair(network, index, end);
        }
        if self.connections[index].ends.iter().all(|end| !end.up) {
            self.part_from_predecessors(index);
        }
        let connection = &self.connections[index];
        let ([Some(own), Some(other)], psns) =
            ([end, 1 - end].map(|end| connection.ends[end].qpn), connection.psns)
        else {
            return;
        };
        let remote = Remote {
            address: self.world.hosts[hosts[1 - end]].address,
            qpn: other,
            send_psn: psns[end],
            receive_psn: psns[1 - end],
            receive_share: None,
        };
        let rules = connection.rules;
        network.forget_queue_pair(NodeId(hosts[end]), own);
        network.with_machine(NodeId(hosts[end]), |host, _| {
            connect(host.endpoint_mut(Some(own)), own, &remote, &rules);
        });
        network.note(|| {
            format!("raise connection {index} end {end} life {life}: {remote:?} {rules:?}")
        });
        let raised = &mut self.connections[index].ends[end];
        raised.up = true;
        raised.peer = Some((hosts[1 - end], other));
        self.post_receives(network, 2 * index + (1 - end));
        self.post(network, 2 * index + end);
    }

    /// A host that came back may have given a queue pair the number of one that was connected to
    /// another queue pair of our peer, which does not know yet and still sends. By their sequence
    /// numbers alone are its packets told from ours, so ours must be far from those.
    fn part_from_predecessors(&mut self, index: usize) {
        let Connection { hosts, ends, mut psns, .. } = self.connections[index];
        let mut near = false;
        for end in 0..2 {
            let peer = ends[1 - end].qpn.map(|qpn| (hosts[1 - end], qpn));
            for (other, connection) in self.connections.iter().enumerate() {
                let sends = |from: usize| {
                    peer.is_some()
                        && connection.hosts[from] == hosts[end]
                        && connection.ends[from].peer == peer
                };
                if other != index && (0..2).any(sends) {
                    connection.psns.iter().for_each(|&psn| self.used.add(psn, 0));
                    near = true;
                }
            }
        }
        if near {
            for psn in &mut psns {
                *psn = self.used.far_from(*psn, || Psn::new(self.rng.bits() as u32));
            }
            self.connections[index].psns = psns;
        }
    }

    pub(super) fn provide_queue_pair(
        &mut self,
        network: &mut Network<'_>,
        index: usize,
        end: usize,
    ) {
        let connection = &mut self.connections[index];
        if connection.ends[end].qpn.is_some() {
            return;
        }
        let [own, other] = [end, 1 - end].map(|end| &self.streams[2 * index + end].plan);
        let host = network.machine_mut(NodeId(connection.hosts[end]));
        let [send_completions, receive_completions] = host.queues();
        let brought = own.operations.iter().filter(|operation| operation.inline);
        let capabilities = QueuePairCapabilities {
            max_inline: brought.map(|operation| operation.length as usize).max().unwrap_or(0),
            ..QueuePairCapabilities::new(own.send_depth, other.receive_depth)
        };
        let config = QueuePairConfig {
            receive_completions,
            shared_receive_queue: host.shared_receives().filter(|_| other.shares),
            split_writes: own.splits,
            ..QueuePairConfig::new(DOMAIN, send_completions, capabilities)
        };
        match host.create(&config) {
            Ok(qpn) => connection.ends[end].qpn = Some(qpn),
            Err(error) => {
                self.violate(network, 2 * index + end, &format!("create_queue_pair: {error}"));
            }
        }
    }

    /// Plans to take a connection down, this end first.
    pub(super) fn plan_lowering(
        &mut self,
        network: &mut Network<'_>,
        index: usize,
        end: usize,
        lowering: Lowering,
        after: Duration,
    ) {
        let connection = &mut self.connections[index];
        connection.excuses.gone = true;
        if core::mem::replace(&mut connection.going_down, true) {
            return;
        }
        let life = connection.life;
        let action = Action::Lower { connection: index, life, end, lowering, last: false };
        self.plan_after(network, after, action);
    }

    /// An end failed: its application finds out, tries a little more, and takes it down.
    pub(super) fn failed(&mut self, network: &mut Network<'_>, index: usize, end: usize) {
        let connection = &mut self.connections[index];
        if core::mem::replace(&mut connection.ends[end].broken, true) {
            return;
        }
        connection.excuses.gone = true;
        if self.phase != Phase::Traffic {
            let what = "a queue pair failed after all trouble";
            return self.violate(network, 2 * index + end, what);
        }
        let lowering = self.draw_lowering();
        let after = duration(&mut self.rng, Duration::from_millis(2));
        self.plan_lowering(network, index, end, lowering, after);
    }

    pub(super) fn draw_lowering(&mut self) -> Lowering {
        Lowering::ALL[self.rng.below(3) as usize]
    }

    /// Takes an end down.
    pub(super) fn lower(
        &mut self,
        network: &mut Network<'_>,
        index: usize,
        end: usize,
        lowering: Lowering,
    ) {
        let Connection { hosts, ends, psns, .. } = self.connections[index];
        if core::mem::replace(&mut self.connections[index].ends[end].lowered, true) {
            return;
        }
        let from = NodeId(hosts[end]);
        let [sending, receiving] = [2 * index + end, 2 * index + 1 - end];
        if let Some(qpn) = ends[end].qpn.filter(|_| network.is_up(from)) {
            let set = |network: &mut Network<'_>, state| {
                let to = QueuePairAttributes { state: Some(state), ..Default::default() };
                let result = network.with_machine(from, |host, now| {
                    let result = host.endpoint_mut(Some(qpn)).modify_queue_pair(now, qpn, &to);
                    host.drain();
                    result
                });
                result.map_err(|error| format!("modify_queue_pair to {state}: {error}"))
            };
            network.note(|| format!("lower connection {index} end {end}: {lowering:?}"));
            network.with_machine(from, |host, _| host.drain());
            self.follow(network);
            if ends[end].broken && lowering != Lowering::Reset {
                self.afterthoughts(network, sending);
            }
            let mut result = Ok(());
            if lowering == Lowering::Flush {
                self.connections[index].excuses.forced = true;
                self.connections[index].ends[end].broken = true;
                result = set(network, QueuePairState::Error);
                self.follow(network);
            }
            let Connection { ends, excuses, .. } = &self.connections[index];
            if ends[end].broken && !excuses.overrun {
                result = result.and(self.streams[sending].flushed());
                let stream = &self.streams[receiving];
                if stream.plan.shares && !ends[end].took_last {
                    result = Err("no event of the last receive request of a shared queue".into());
                }
                let receives = stream.receives + stream.claims.len();
                if receives > 0 {
                    result = Err(format!("{receives} receives not flushed in the error state"));
                }
            }
            if lowering == Lowering::Destroy {
                let host = network.machine_mut(from);
                if !host.destroy(qpn) {
                    result = Err("destroy_queue_pair: unknown".into());
                }
                self.connections[index].ends[end].qpn = None;
            } else {
                result = result.and(set(network, QueuePairState::Reset));
            }
            if let Err(what) = result {
                self.violate(network, sending, &what);
            }
        }
        let posted = &self.streams[sending].plan.operations[..self.streams[sending].next];
        let connection = &self.connections[index];
        let life = posted.iter().filter(|operation| operation.life + 1 == connection.life);
        let packets: u64 = life.map(|operation| connection.packets(operation.length)).sum();
        self.used.add(psns[end], packets);
        if u64::from(psns[end].value()) + packets > u64::from(Psn::COUNT) {
            self.tally.one("packet sequence numbers wrapped");
        }
        let end = &mut self.connections[index].ends[end];
        if core::mem::take(&mut end.draining) {
            self.pending -= 1;
        }
        end.up = false;
        end.peer = None;
        end.broken = false;
        end.reported = false;
        end.took_last = false;
        end.revoked = false;
        self.streams[sending].lower_initiator();
        while let Some((_, slot)) = self.streams[receiving].next_claim() {
            self.release(network, from.0, slot);
        }
        self.streams[receiving].lower_responder();
        self.tally.one(match lowering {
            Lowering::Reset => "queue pairs reset",
            Lowering::Flush => "queue pairs flushed and reset",
            Lowering::Destroy => "queue pairs destroyed",
        });
    }

    /// What is posted in the error state is flushed at once.
    pub(super) fn afterthoughts(&mut self, network: &mut Network<'_>, stream: usize) {
        let pace = core::mem::take(&mut self.streams[stream].plan.pace);
        let allowed = self.streams[stream].allowed;
        let some = self.streams[stream].next + AFTERTHOUGHTS;
        self.streams[stream].allow(allowed.min(some));
        self.post(network, stream);
        self.streams[stream].allow(allowed);
        self.streams[stream].plan.pace = pace;
        let host = NodeId(self.connections[stream / 2].hosts[stream % 2]);
        network.with_machine(host, |host, _| host.drain());
        self.follow(network);
    }

    /// A host lost completions: nobody knows what became of its requests, so all starts anew.
    pub(super) fn renew(&mut self, network: &mut Network<'_>, host: usize) {
        for index in 0..self.connections.len() {
            for end in 0..2 {
                let Connection { hosts, life, .. } = self.connections[index];
                if hosts[end] != host {
                    continue;
                }
                self.lower(network, index, end, Lowering::Destroy);
                // It may be down, and wait for its next life.
                if let Some(qpn) = self.connections[index].ends[end].qpn.take() {
                    let host = network.machine_mut(NodeId(host));
                    host.destroy(qpn);
                }
                let connection = &mut self.connections[index];
                if !core::mem::replace(&mut connection.going_down, true) {
                    let (end, lowering) = (1 - end, Lowering::Destroy);
                    let action =
                        Action::Lower { connection: index, life, end, lowering, last: true };
                    self.plan_after(network, Duration::from_micros(100), action);
                }
            }
        }
        self.renew_ports(network, host);
        let result = network.with_machine(NodeId(host), |host, _| host.renew_queues());
        self.overrun[host] = false;
        if let Err(what) = result {
            network.violate(format!("host {host}: {what}"));
        }
        self.follow(network);
    }
}
