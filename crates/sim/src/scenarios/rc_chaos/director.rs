//! What is done to the hosts of a run, and when: posting, taking down, connecting, disturbing.

use core::cmp::Reverse;
use core::time::Duration;
use std::collections::BinaryHeap;

use millstream_roce::{Instant, ProtectionDomainId, QueuePairState};

use super::connection::{Connection, UsedNumbers};
use super::datagrams::{Message, Port, State};
use super::draw::duration;
use super::host::Host;
use super::operation::{Kind, Operation};
use super::pool::Pool;
use super::stream::Stream;
use super::tally::Tally;
use super::world::{Lowering, Role, StreamPlan, World};
use crate::connection::FULL_ACCESS;
use crate::{LinkId, LinkOptions, NodeId, Rng, Simulation};

pub(super) const DOMAIN: ProtectionDomainId = ProtectionDomainId(1);

pub(super) type Network<'a> = Simulation<'a, Host>;

/// Something that the director is going to do.
#[derive(Clone, Copy, Debug)]
pub(super) enum Action {
    Post(usize),
    PostReceives(usize),
    /// Posts to the shared receive queue of a host.
    FillPool(usize),
    /// The same, of a queue pair for datagrams.
    FillPort(usize),
    PostDatagrams(usize),
    RaisePort {
        port: usize,
        life: u32,
    },
    /// Takes one whose send queue failed back to RTS.
    RecoverPort {
        port: usize,
        life: u32,
    },
    /// The same, of one whose send queue is drained.
    ResumePort {
        port: usize,
        life: u32,
    },
    Disturb(usize),
    /// Takes down an end, then the other.
    Lower {
        connection: usize,
        life: u32,
        end: usize,
        lowering: Lowering,
        last: bool,
    },
    Raise {
        connection: usize,
        end: usize,
        life: u32,
    },
    Heal {
        from: NodeId,
        to: NodeId,
    },
    Start(usize),
    Register {
        stream: usize,
        role: Role,
    },
    /// Gives an invalidated region a new key.
    Revive {
        stream: usize,
        role: Role,
        key: u32,
    },
    Grant {
        connection: usize,
        end: usize,
        life: u32,
    },
    /// Takes a drained send queue back to RTS.
    Resume {
        connection: usize,
        end: usize,
        life: u32,
    },
    /// Silence has lasted longer than this initiator may bear.
    Silence {
        stream: usize,
        life: u32,
        operation: usize,
        /// When this was planned, its next request waited for other requests here to end.
        queued: bool,
    },
    /// By now this request must have ended.
    Bound {
        stream: usize,
        operation: usize,
        life: u32,
    },
    Renew(usize),
    /// No more trouble: what is there must work.
    Recover,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Phase {
    Traffic,
    /// All has ended; what is under way may still arrive.
    Waiting,
    /// Trouble is over, and every connection must work.
    Echo,
    Done,
}

/// A run, apart from its network.
pub(super) struct Director {
    pub(super) world: World,
    pub(super) connections: Vec<Connection>,
    pub(super) streams: Vec<Stream>,
    /// Of the shared receive queues of hosts.
    pub(super) pools: Vec<Option<Pool>>,
    pub(super) ports: Vec<Port>,
    /// Datagrams that a host had no receive requests for.
    pub(super) unreceived: Vec<u64>,
    /// Hosts that lost completions, and have not begun anew.
    pub(super) overrun: Vec<bool>,
    /// Keys of the regions of each host, with whose they are.
    pub(super) keys: Vec<Vec<(u32, usize, Role)>>,
    pub(super) links: Vec<((usize, usize), LinkId, u32)>,
    agenda: BinaryHeap<Reverse<(Instant, u64, usize)>>,
    actions: Vec<Action>,
    /// Disturbances, and ends of such, that are still to come.
    pub(super) pending: usize,
    pub(super) used: UsedNumbers,
    pub(super) rng: Rng,
    pub(super) phase: Phase,
    pub(super) tally: Tally,
}

impl Director {
    pub(super) fn new(world: World, links: Vec<((usize, usize), LinkId)>) -> Self {
        let mut rng = world.rng.clone();
        let pools = world.hosts.iter().enumerate().map(|(host, plan)| {
            let address = ((0x1000 + host as u64) << 32) + 7;
            plan.pool.clone().map(|plan| Pool::new(plan, address, &mut rng))
        });
        let pools = pools.collect();
        let ports = world.ports.iter().enumerate().map(|(index, plan)| {
            let others = world.ports.iter().position(|other| other.host != plan.host);
            let (mut plan, regular) = (plan.clone(), plan.messages.len());
            plan.messages.push(Message::last(&mut rng, others.unwrap_or(index)));
            Port::new(index, plan, regular, &mut rng)
        });
        let ports = ports.collect();
        let connections = world.connections.iter().map(|plan| Connection::new(plan.hosts));
        let streams = world.connections.iter().flat_map(|plan| plan.streams.clone());
        let echoes = |index, mut plan: StreamPlan| {
            let regular = plan.operations.len();
            let mut rng = Rng::new(index as u64);
            plan.operations.extend(
                [(Kind::Write, 300), (Kind::Send, 100), (Kind::Read, 5000), (Kind::FetchAdd, 8)]
                    .map(|(kind, length)| Operation {
                        signaled: true,
                        reckless: false,
                        ..Operation::new(kind, length, &mut rng)
                    }),
            );
            let mut stream = Stream::new(index, plan);
            stream.allow(regular);
            stream
        };
        Self {
            connections: connections.collect(),
            streams: streams.enumerate().map(|(index, plan)| echoes(index, plan)).collect(),
            pools,
            ports,
            unreceived: vec![0; world.hosts.len()],
            overrun: vec![false; world.hosts.len()],
            keys: vec![Vec::new(); world.hosts.len()],
            links: links.into_iter().map(|(pair, link)| (pair, link, 0)).collect(),
            world,
            agenda: BinaryHeap::new(),
            actions: Vec::new(),
            pending: 0,
            used: UsedNumbers::default(),
            rng,
            phase: Phase::Traffic,
            tally: Tally::default(),
        }
    }

    /// Registers all memory, connects all, and plans the rest.
    pub(super) fn start(&mut self, network: &mut Network<'_>) {
        for stream in 0..self.streams.len() {
            for role in Role::ALL {
                self.register(network, stream, role);
            }
        }
        for host in 0..self.world.hosts.len() {
            self.start_pool(network, host);
            self.start_ports(network, host);
        }
        for connection in 0..self.connections.len() {
            self.begin_life(network, connection);
        }
        for (index, (after, _)) in self.world.disturbances.clone().into_iter().enumerate() {
            self.pending += 1;
            let at = network.after(after);
            self.plan(network, at, Action::Disturb(index));
        }
    }

    /// The host that has a role's region.
    pub(super) fn host_of(&self, stream: usize, role: Role) -> usize {
        let end = if role.is_local() { stream % 2 } else { 1 - stream % 2 };
        self.connections[stream / 2].hosts[end]
    }

    pub(super) fn plan(&mut self, network: &mut Network<'_>, at: Instant, action: Action) {
        let number = self.actions.len();
        self.actions.push(action);
        self.agenda.push(Reverse((at, number as u64, number)));
        network.alarm(at);
    }

    pub(super) fn plan_after(
        &mut self,
        network: &mut Network<'_>,
        after: Duration,
        action: Action,
    ) {
        let at = network.after(after);
        self.plan(network, at, action);
    }

    /// Does all that is due: looks at what hosts saw, then acts, until nothing is left for now.
    pub(super) fn advance(&mut self, network: &mut Network<'_>) {
        loop {
            self.follow(network);
            self.change_phase(network);
            if !network.violations().is_empty() {
                return;
            }
            let due = self.agenda.peek().is_some_and(|Reverse((at, ..))| *at <= network.now());
            let Some(Reverse((_, _, number))) = due.then(|| self.agenda.pop()).flatten() else {
                return;
            };
            self.act(network, self.actions[number]);
        }
    }

    fn change_phase(&mut self, network: &mut Network<'_>) {
        match self.phase {
            Phase::Traffic
                if self.pending == 0
                    && self.streams.iter().all(Stream::is_idle)
                    && self.connections.iter().all(Connection::is_up)
                    && self.ports_are_idle() =>
            {
                // Queues that are too small are trouble too.
                if core::mem::take(&mut self.world.may_overrun) {
                    for host in 0..self.world.hosts.len() {
                        let enough = self.world.hosts[host].enough;
                        network.machine_mut(NodeId(host)).set_capacity(enough);
                        self.plan_after(network, Duration::ZERO, Action::Renew(host));
                    }
                    return;
                }
                self.phase = Phase::Waiting;
                let calm = self.world.round_trip();
                self.plan_after(network, calm, Action::Recover);
            }
            Phase::Echo if self.streams.iter().all(Stream::is_idle) && self.ports_are_idle() => {
                self.phase = Phase::Done;
            }
            _ => {}
        }
    }

    fn ports_are_idle(&self) -> bool {
        self.ports.iter().all(|port| port.is_idle() && port.state == State::Up && !port.send_error)
    }

    fn act(&mut self, network: &mut Network<'_>, action: Action) {
        match action {
            Action::Post(stream) => {
                // In the error state what is posted is lost.
                if !self.connections[stream / 2].ends[stream % 2].broken {
                    self.post(network, stream);
                }
            }
            Action::PostReceives(stream) => self.post_receives(network, stream),
            Action::FillPool(host) => self.fill_pool(network, host),
            Action::FillPort(port) => self.fill_port(network, port),
            Action::PostDatagrams(port) => self.post_datagrams(network, port),
            Action::RaisePort { port, life } => self.raise_port(network, port, life),
            Action::RecoverPort { port, life } => self.recover_port(network, port, life),
            Action::ResumePort { port, life } => self.resume_port(network, port, life),
            Action::Disturb(index) => {
                self.pending -= 1;
                self.disturb(network, self.world.disturbances[index].1);
            }
            Action::Lower { connection, life, end, lowering, last } => {
                if self.connections[connection].life == life {
                    self.lower(network, connection, end, lowering);
                    if last {
                        self.begin_life(network, connection);
                    } else {
                        let skew = duration(&mut self.rng, Duration::from_micros(300));
                        let end = 1 - end;
                        let action = Action::Lower { connection, life, end, lowering, last: true };
                        self.plan_after(network, skew, action);
                    }
                }
            }
            Action::Raise { connection, end, life } => self.raise(network, connection, end, life),
            Action::Heal { from, to } => {
                self.pending -= 1;
                self.cut(network, from.0, to.0, false);
            }
            Action::Start(host) => {
                self.pending -= 1;
                network.set_up(NodeId(host), true);
                self.start_pool(network, host);
                self.start_ports(network, host);
                for stream in 0..self.streams.len() {
                    for role in Role::ALL {
                        if self.host_of(stream, role) == host {
                            self.streams[stream].regions[role as usize].absent = None;
                            self.register(network, stream, role);
                        }
                    }
                }
            }
            Action::Register { stream, role } => {
                self.pending -= 1;
                if self.streams[stream].regions[role as usize].absent.is_some() {
                    self.register(network, stream, role);
                }
            }
            Action::Revive { stream, role, key } => {
                let region = &self.streams[stream].regions[role as usize];
                if region.dead && region.key == key {
                    self.revive(network, stream, role);
                }
            }
            Action::Grant { connection, end, life } => {
                let held = self.streams[2 * connection + end].held.is_some();
                if self.connections[connection].life == life && held {
                    // Some attributes cannot be changed while the send queue is drained.
                    self.plan_after(network, Duration::from_micros(100), action);
                    return;
                }
                self.pending -= 1;
                if self.connections[connection].life == life {
                    self.set_access(network, connection, end, FULL_ACCESS);
                }
            }
            Action::Resume { connection, end, life } => {
                self.pending -= 1;
                if self.connections[connection].life == life {
                    self.resume(network, connection, end);
                }
            }
            Action::Silence { stream, life, operation, queued } => {
                let Connection { life: now, ends, .. } = &self.connections[stream / 2];
                let model = &self.streams[stream];
                let end = ends[stream % 2];
                let waits = end.up && !end.broken && *now == life;
                if waits && model.ended <= operation {
                    let patience = self.connections[stream / 2].patience();
                    // What is not sent is not unanswered: its time begins when those before it ended.
                    let still = self.is_queued(network, stream);
                    if still || queued {
                        let action = Action::Silence { stream, life, operation, queued: still };
                        let slack = self.world.round_trip() + self.slowest_look();
                        return self.plan_after(network, patience + slack, action);
                    }
                    let what = format!("has not failed after more than {patience:?} of silence");
                    self.violate(network, stream, &what);
                }
            }
            Action::Bound { stream, operation, life } => {
                let model = &self.streams[stream];
                if self.connections[stream / 2].life == life && model.ended <= operation {
                    let what = format!("request {operation} has not ended in its time");
                    self.violate(network, stream, &what);
                }
            }
            Action::Renew(host) => self.renew(network, host),
            Action::Recover => self.recover(network),
        }
    }

    /// Says what does not hold on a stream.
    pub(super) fn violate(&self, network: &mut Network<'_>, stream: usize, what: &str) {
        let connection = &self.connections[stream / 2];
        let [from, to] = [stream % 2, 1 - stream % 2];
        let model = &self.streams[stream];
        let end = |end: usize| {
            let qpn = connection.ends[end].qpn.map_or("none".into(), |qpn| qpn.to_string());
            format!("host {} qp {qpn}", connection.hosts[end])
        };
        network.violate(format!(
            "connection {} life {}, {} -> {}, {} of {} requests ended: {what}",
            stream / 2,
            connection.life,
            end(from),
            end(to),
            model.ended,
            model.next,
        ));
    }

    /// Trouble is over: whatever is up must work.
    fn recover(&mut self, network: &mut Network<'_>) {
        let still = self.connections.iter().all(Connection::is_up) && self.pending == 0;
        if !still || !self.streams.iter().all(Stream::is_idle) || !self.ports_are_idle() {
            self.phase = Phase::Traffic;
            return;
        }
        // A responder that refused something has told nobody when its NAK was lost.
        for index in 0..self.connections.len() {
            for end in 0..2 {
                let Connection { hosts, ends, .. } = self.connections[index];
                let endpoint = network.machine(NodeId(hosts[end])).endpoint();
                let state = ends[end].qpn.and_then(|qpn| endpoint.queue_pair_state(qpn));
                if state != Some(QueuePairState::ReadyToSend) {
                    self.phase = Phase::Traffic;
                    self.failed(network, index, end);
                }
            }
        }
        if self.phase == Phase::Traffic {
            return;
        }
        network.note(|| "recover".into());
        self.phase = Phase::Echo;
        for (_, link, _) in &self.links {
            let options = LinkOptions::new(100_000_000_000, Duration::from_micros(1));
            network.set_link(*link, options);
        }
        for host in 0..self.world.hosts.len() {
            network.machine_mut(NodeId(host)).attend();
        }
        self.follow(network);
        for stream in 0..self.streams.len() {
            self.streams[stream].allow(usize::MAX);
            self.streams[stream].starved_until = Instant::ZERO;
            self.streams[stream].plan.receive_lag = Duration::ZERO;
            for pool in self.pools.iter_mut().flatten() {
                pool.open_all();
            }
            self.post_receives(network, stream);
        }
        for stream in 0..self.streams.len() {
            self.post(network, stream);
        }
        for index in 0..self.ports.len() {
            self.ports[index].allowed = self.ports[index].plan.messages.len();
            self.ports[index].pool.open_all();
            self.fill_port(network, index);
        }
        for index in 0..self.ports.len() {
            self.post_datagrams(network, index);
        }
    }

    /// At rest: takes everything down and compares all that there is.
    pub(super) fn close(&mut self, network: &mut Network<'_>) {
        for index in 0..self.connections.len() {
            for end in 0..2 {
                self.lower(network, index, end, Lowering::Flush);
            }
        }
        self.close_ports(network);
        for host in 0..self.world.hosts.len() {
            self.close_host(network, host);
            for (key, stream, role) in self.keys[host].clone() {
                let memory = network.machine(NodeId(host)).endpoint().memory();
                let bytes = memory.regions.region(key).unwrap_or_default();
                let expected = self.streams[stream].content(role);
                if bytes != expected {
                    let at = bytes.iter().zip(&expected).position(|(a, b)| a != b);
                    let what = format!(
                        "the {role:?} region differs from what was done to it, first at {at:?}"
                    );
                    self.violate(network, stream, &what);
                }
            }
        }
    }
}
