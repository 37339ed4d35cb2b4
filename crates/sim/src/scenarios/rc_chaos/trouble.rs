//! Disturbances: what goes wrong beside single packets.

use core::time::Duration;

use millstream_roce::{Access, QueuePairAttributes, QueuePairState};

use super::connection::Connection;
use super::director::{Action, Director, Network};
use super::draw::duration;
use super::world::{Disturbance, Lowering, Role};
use crate::NodeId;

impl Director {
    pub(super) fn disturb(&mut self, network: &mut Network<'_>, disturbance: Disturbance) {
        network.note(|| format!("disturb {disturbance:?}"));
        match disturbance {
            Disturbance::Blackout { connection, directions, share_of_patience } => {
                self.blackout(network, connection, directions, share_of_patience);
            }
            Disturbance::Reset { connection, first, lowering } => {
                if self.connections[connection].is_up() {
                    self.plan_lowering(network, connection, first, lowering, Duration::ZERO);
                }
            }
            Disturbance::Fail { connection, end } => {
                if !self.connections[connection].is_up() {
                    return;
                }
                self.connections[connection].excuses.forced = true;
                self.tally.one("queue pairs taken to ERR");
                self.set_state(network, connection, end, QueuePairState::Error);
                self.failed(network, connection, end);
            }
            Disturbance::Crash { host, down } => self.crash(network, host, down),
            Disturbance::Deregister { stream, role, absent } => {
                if self.deregister(network, stream, role) {
                    self.tally.one("regions deregistered");
                    self.pending += 1;
                    self.plan_after(network, absent, Action::Register { stream, role });
                }
            }
            Disturbance::Revoke { connection, end, absent } => {
                if self.connections[connection].is_up() {
                    self.connections[connection].excuses.revoked = true;
                    self.tally.one("access revoked");
                    self.set_access(network, connection, end, Access::LOCAL_WRITE);
                    self.pending += 1;
                    let life = self.connections[connection].life;
                    self.plan_after(network, absent, Action::Grant { connection, end, life });
                }
            }
            Disturbance::Starve { stream, duration } => {
                self.tally.one("receives starved");
                let until = network.after(duration);
                self.streams[stream].starved_until = until;
                self.plan(network, until, Action::PostReceives(stream));
                let host = self.host_of(stream, Role::Inbox);
                if let Some(pool) = &mut self.pools[host] {
                    pool.starved_until = until;
                    self.plan(network, until, Action::FillPool(host));
                }
            }
            Disturbance::Pause { host, duration } => {
                self.tally.one("completion queues left alone");
                let until = network.after(duration);
                network.machine_mut(NodeId(host)).paused_until = until;
            }
            Disturbance::Drain { connection, end } => self.drain(network, connection, end),
            Disturbance::ResetPort { port, lowering } => self.lower_port(network, port, lowering),
            Disturbance::DrainPort { port } => self.drain_port(network, port),
        }
    }

    pub(super) fn set_access(
        &mut self,
        network: &mut Network<'_>,
        index: usize,
        end: usize,
        access: Access,
    ) {
        let Connection { hosts, ends, .. } = self.connections[index];
        let host = NodeId(hosts[end]);
        let Some(qpn) = ends[end].qpn.filter(|_| network.is_up(host) && ends[end].up) else {
            return;
        };
        let state = network.machine(host).endpoint().queue_pair_state(qpn);
        if state != Some(QueuePairState::ReadyToSend) {
            return;
        }
        self.connections[index].ends[end].revoked = access == Access::LOCAL_WRITE;
        let attributes = QueuePairAttributes { access: Some(access), ..Default::default() };
        let result = network.with_machine(host, |host, now| {
            host.endpoint_mut(Some(qpn)).modify_queue_pair(now, qpn, &attributes)
        });
        if let Err(error) = result {
            self.violate(network, 2 * index + end, &error.to_string());
        }
    }

    fn set_state(
        &mut self,
        network: &mut Network<'_>,
        index: usize,
        end: usize,
        state: QueuePairState,
    ) {
        let Connection { hosts, ends, .. } = self.connections[index];
        let Some(qpn) = ends[end].qpn else { return };
        let to = QueuePairAttributes { state: Some(state), ..Default::default() };
        let result = network.with_machine(NodeId(hosts[end]), |host, now| {
            host.endpoint_mut(Some(qpn)).modify_queue_pair(now, qpn, &to)
        });
        if let Err(error) = result {
            self.violate(network, 2 * index + end, &format!("to {state}: {error}"));
        }
    }

    /// Stops an end's send queue. Its event says when it can go on.
    fn drain(&mut self, network: &mut Network<'_>, index: usize, end: usize) {
        let Connection { hosts, ends, .. } = self.connections[index];
        let endpoint = network.machine(NodeId(hosts[end])).endpoint();
        let state = ends[end].qpn.and_then(|qpn| endpoint.queue_pair_state(qpn));
        if self.connections[index].is_up() && state == Some(QueuePairState::ReadyToSend) {
            self.tally.one("send queues drained");
            self.pending += 1;
            self.connections[index].ends[end].draining = true;
            self.streams[2 * index + end].held = Some(self.streams[2 * index + end].next);
            self.set_state(network, index, end, QueuePairState::SendQueueDrained);
        }
    }

    /// A send queue is drained: it goes on after a while.
    pub(super) fn drained(&mut self, network: &mut Network<'_>, index: usize, end: usize) {
        let connection = &mut self.connections[index];
        if !core::mem::take(&mut connection.ends[end].draining) {
            return self.violate(network, 2 * index + end, "drained without need");
        }
        let life = connection.life;
        let pause = duration(&mut self.rng, Duration::from_micros(500));
        self.plan_after(network, pause, Action::Resume { connection: index, end, life });
    }

    pub(super) fn resume(&mut self, network: &mut Network<'_>, index: usize, end: usize) {
        let Connection { hosts, ends, .. } = self.connections[index];
        let endpoint = network.machine(NodeId(hosts[end])).endpoint();
        let state = ends[end].qpn.and_then(|qpn| endpoint.queue_pair_state(qpn));
        if state == Some(QueuePairState::SendQueueDrained) {
            self.streams[2 * index + end].held = None;
            self.set_state(network, index, end, QueuePairState::ReadyToSend);
        }
    }

    pub(super) fn blackout(
        &mut self,
        network: &mut Network<'_>,
        index: usize,
        directions: [bool; 2],
        share_of_patience: u32,
    ) {
        self.tally.one("blackouts");
        let connection = &self.connections[index];
        let [first, second] = connection.hosts;
        // What was under way still arrives, and may be an RNR NAK: patience counts from the end of
        // its pause.
        let slack = self.world.round_trip() + connection.rnr_wait() + self.slowest_look();
        let long = share_of_patience > 100;
        let duration = connection.patience() * share_of_patience / 100
            + if long { 2 * slack } else { Duration::ZERO };
        for (cut, from, to) in [(directions[0], first, second), (directions[1], second, first)] {
            if cut {
                self.pending += 1;
                self.cut(network, from, to, true);
                let heal = Action::Heal { from: NodeId(from), to: NodeId(to) };
                self.plan_after(network, duration, heal);
            }
        }
        if !long {
            return;
        }
        let (life, after) = (self.connections[index].life, self.connections[index].patience());
        for stream in [2 * index, 2 * index + 1] {
            // What success does not tell of may be done.
            let waits = self.streams[stream].last_signaled();
            if let Some(operation) = waits.filter(|_| self.connections[index].is_up()) {
                let queued = self.is_queued(network, stream);
                let check = Action::Silence { stream, life, operation, queued };
                self.plan_after(network, after + slack, check);
            }
        }
    }

    /// Whether the next request of a stream is a READ that waits for room for its answer.
    pub(super) fn is_queued(&self, network: &mut Network<'_>, stream: usize) -> bool {
        let Connection { hosts, ends, .. } = &self.connections[stream / 2];
        let endpoint = network.machine(NodeId(hosts[stream % 2])).endpoint();
        ends[stream % 2].qpn.is_some_and(|qpn| endpoint.waits_for_receive_buffer(qpn))
    }

    /// The longest that an application takes to see a completion.
    pub(super) fn slowest_look(&self) -> Duration {
        let slowest = self.world.hosts.iter().map(|host| {
            let polling = &host.polling;
            polling.interval * (2 * polling.capacity as u32 + 1)
        });
        // The longest pause comes on top.
        slowest.max().unwrap_or_default() + Duration::from_millis(3)
    }

    pub(super) fn cut(&mut self, network: &mut Network<'_>, from: usize, to: usize, cut: bool) {
        for (pair, link, cuts) in &mut self.links {
            if *pair != (from, to) {
                continue;
            }
            *cuts = if cut { *cuts + 1 } else { *cuts - 1 };
            network.set_cut(*link, *cuts > 0);
        }
        for connection in &mut self.connections {
            if connection.hosts.contains(&from) && connection.hosts.contains(&to) {
                connection.excuses.link = true;
            }
        }
    }

    pub(super) fn crash(&mut self, network: &mut Network<'_>, host: usize, down: Duration) {
        if !network.is_up(NodeId(host)) {
            return;
        }
        self.tally.one("crashes");
        network.set_up(NodeId(host), false);
        self.keys[host].clear();
        if let Some(pool) = &mut self.pools[host] {
            pool.clear();
        }
        for stream in 0..self.streams.len() {
            for role in Role::ALL {
                if self.host_of(stream, role) == host {
                    self.streams[stream].erase(role);
                    self.streams[stream].regions[role as usize].absent = None;
                }
            }
        }
        for index in 0..self.connections.len() {
            for end in 0..2 {
                if self.connections[index].hosts[end] != host {
                    continue;
                }
                self.lower(network, index, end, Lowering::Destroy);
                self.connections[index].ends[end].qpn = None;
                // The other end finds out by silence, or sooner by other means.
                let patience = self.connections[index].patience() * 2;
                let after = duration(&mut self.rng, patience);
                let lowering = self.draw_lowering();
                self.plan_lowering(network, index, 1 - end, lowering, after);
            }
        }
        self.crash_ports(network, host);
        self.overrun[host] = false;
        self.pending += 1;
        self.plan_after(network, down, Action::Start(host));
    }
}
