//! The controller's state: who is connected, which groups there are and how far each is.
//!
//! Pure: messages, closed connections and time go in; messages, connections to close and a
//! deadline come out. After every input, take all outputs ([`Controller::poll_output`]), then ask
//! for the deadline ([`Controller::poll_timeout`]).
//!
//! A group's name is taken from the first rank that joins until the first rank that leaves (or
//! until it fails): who has called its last collective may start the next run under the same name,
//! while others are still on their way out.
//!
//! A connection that breaks ends no communicator that is ready: hosts and switches come back, to this controller or
//! to one after it, and say what they have (`resume.rs`, `inventory.rs`).

mod config;
mod connections;
mod counted;
mod fallback;
mod further_up;
mod given;
mod group;
mod groups;
mod hosts;
mod identity_secret;
mod inventory;
mod members;
mod nodes;
mod overview;
mod placement;
mod quotas;
mod rank_set;
mod record;
mod replanning;
mod resume;
mod shared_memory;
mod switches;
#[cfg(test)]
mod tests;
mod timed;

use core::net::{IpAddr, SocketAddr};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use millstream_roce::Instant;

pub use config::ControllerConfig;
use connections::{Connection, Connections, Role};
pub use counted::PortRates;
pub use given::{EdgeEnd, PlacedEdge, PlacedNode, Placement, PlacementChange};
pub use group::GroupState;
use group::{End, Group, Step};
use groups::Groups;
pub use identity_secret::IdentitySecret;
use inventory::{Ending, Held};
pub use overview::{
    CommunicatorOverview, EdgeOverview, EndOverview, GroupOverview, LeadershipOverview,
    MemberOverview, NodeOverview, Overview, SwitchOverview,
};
use quotas::{OwnedNode, Owner};
pub use quotas::{Quotas, TokenKind, TokenRules};
pub use record::{Departed, MAX_RECORD_BYTES, Record, RecordError, StandBy};

use crate::plan::{Forest, SwitchId};
use crate::protocol::{
    AbortReason, Awaited, FrameError, FromController, HostQueuePair, MAX_NAME_BYTES, Refusal,
    SwitchLimits, SwitchReport, ToController, TokenProblem, shortened,
};
use crate::topology::SwitchIndex;
use record::Records;
use replanning::Replanning;
use resume::Ended;
use timed::{HasDeadline, Timed};

/// A connection, by a number that its owner never uses twice.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ConnectionId(pub u64);

/// Something to do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Output {
    /// Send this.
    Send {
        /// To whom.
        connection: ConnectionId,
        /// With this term ([`crate::protocol::Commanded`]): above the one that the peer has obeyed. Of a controller that
        /// does not lead, and commands nobody, that one.
        term: u64,
        /// What.
        message: FromController,
    },
    /// Close the connection once all that was sent is on its way. It is forgotten already.
    Close {
        /// Which.
        connection: ConnectionId,
    },
}

/// How much of everything there is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Census {
    pub connections: usize,
    pub switches: usize,
    pub groups: usize,
    /// Nodes of trees on all switches, those that are being destroyed included.
    pub communicators: usize,
    /// Nodes that an earlier controller has made.
    pub held: usize,
    /// Ranks that are waited for.
    pub away: usize,
    /// Nodes that end by themselves.
    pub ending: usize,
}

/// Groups that nobody has left, by their tokens and names.
type Names = HashMap<(Option<usize>, String), GroupId>;

/// Groups are numbered: a name may belong to one that forms and to others that end.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
struct GroupId(u64);

#[derive(Debug)]
struct Switch {
    /// None while it is away.
    connection: Option<ConnectionId>,
    incarnation: u64,
    /// Nodes that it has and has not named yet.
    unnamed: u32,
    /// It has come back without any, and was asked whether it is there: what it has reported before it answers is read
    /// first.
    unjudged: bool,
    name: String,
    address: IpAddr,
    limits: SwitchLimits,
    /// The rank whose process it is part of, of the only group that it serves.
    host: Option<(GroupId, u32)>,
    /// Which switch of the topology it is.
    place: Option<SwitchIndex>,
    /// Nodes of trees that it has, or was asked for, and whose they are.
    communicators: BTreeMap<u64, OwnedNode>,
    /// By then it must have named what it has, and what it has reported before that is forgotten.
    inventory_until: Option<Instant>,
}

impl Switch {
    /// Whether it can be asked for nodes.
    const fn serves(&self) -> bool {
        self.connection.is_some() && self.unnamed == 0 && !self.unjudged
    }
}

impl HasDeadline for Switch {
    fn due_at(&self) -> Option<Instant> {
        self.inventory_until
    }
}

/// The controller.
#[derive(Debug)]
pub struct Controller {
    config: ControllerConfig,
    connections: Connections,
    switches: Timed<SwitchId, Switch>,
    groups: Groups,
    names: Names,
    /// The nodes of all groups' trees, by their numbers.
    nodes: HashMap<u64, (GroupId, usize)>,
    /// Nodes of trees that an earlier controller has made, by their numbers.
    held: BTreeMap<u64, Held>,
    /// Until when a rank must claim them, in order.
    unclaimed: VecDeque<(Instant, u64)>,
    /// What switches have reported of nodes whose groups are not known yet, by the nodes' numbers.
    early: BTreeMap<SwitchId, BTreeMap<u64, SwitchReport>>,
    /// Members that are away, by when they are lost. Those that came back are skipped.
    away: BTreeSet<(Instant, GroupId, u32)>,
    /// Groups that are over, the last ones.
    ended: VecDeque<Ended>,
    /// That of this controller. Who has obeyed a higher one is told a higher one, and nobody else: anybody can say
    /// that he has.
    term: u64,
    /// When we wanted to be called next.
    armed: Option<Instant>,
    /// We were called late: what has come meanwhile is read until then.
    reading_until: Option<Instant>,
    /// Nodes that end by themselves, until when, in order.
    ending: VecDeque<Ending>,
    /// The last time that we were told.
    now: Instant,
    outputs: VecDeque<Output>,
    placements: VecDeque<PlacementChange>,
    records: Records,
    /// Why it does not lead, if it does not.
    standby: Option<StandBy>,
    /// Where all controllers are, if there are several.
    controllers: Vec<SocketAddr>,
    /// How far full groups without a tree are planned again.
    replanning: Replanning,
    /// How often trees were chosen.
    #[cfg(test)]
    chosen: core::cell::Cell<usize>,
    next_switch: u64,
    next_group: u64,
    next_communicator: u64,
}

impl Controller {
    /// One that nobody is connected to.
    pub fn new(config: ControllerConfig) -> Self {
        // Some programs read JSON numbers as 64-bit floats, so 53 bits: 21 of them say which run.
        let [run, _] = config.secret.draw("communicators", 0);
        let next_communicator = (run & 0x1f_ffff) << 32;
        Self {
            config,
            connections: Connections::new(),
            switches: Timed::new(),
            groups: Groups::new(),
            names: HashMap::new(),
            nodes: HashMap::new(),
            held: BTreeMap::new(),
            unclaimed: VecDeque::new(),
            early: BTreeMap::new(),
            away: BTreeSet::new(),
            ended: VecDeque::new(),
            term: 1,
            armed: None,
            reading_until: None,
            ending: VecDeque::new(),
            now: Instant::ZERO,
            outputs: VecDeque::new(),
            placements: VecDeque::new(),
            records: Records::default(),
            standby: None,
            controllers: Vec::new(),
            replanning: Replanning::new(),
            #[cfg(test)]
            chosen: core::cell::Cell::new(0),
            next_switch: 0,
            next_group: 0,
            next_communicator,
        }
    }

    /// Someone has connected, from an address that does not count.
    pub fn handle_connected(&mut self, now: Instant, connection: ConnectionId) {
        self.connected(now, connection, Owner::default());
    }

    /// Someone has connected from this address.
    pub fn handle_connected_from(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        address: IpAddr,
    ) {
        self.connected(now, connection, Owner::from(address));
    }

    fn connected(&mut self, now: Instant, connection: ConnectionId, owner: Owner) {
        self.arrive(now);
        let limit = self.config.max_strangers;
        if self.connections.strangers().len() >= limit
            && let Some(oldest) = self.stranger_to_go()
        {
            let what = "connections of peers that have not said what they are".to_owned();
            self.turn_away(oldest, Refusal::Limit { what, limit });
        }
        if let Err(refusal) = self.check_connections(owner) {
            return self.turn_away(connection, refusal);
        }
        let until = now + self.config.introduction_timeout;
        let (term, next_ping) = (self.term_to(connection), now + self.config.keep_alive_interval);
        self.connections.insert(connection, Connection::new(until, owner, term, next_ping));
    }

    /// A message has arrived.
    pub fn handle_message(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        message: ToController,
    ) {
        self.arrive(now);
        // What was read before we closed the connection.
        let Some(state) = self.connections.get_mut(&connection) else { return };
        (state.unanswered, state.doubted) = (0, false);
        let role = state.role();
        if let (Role::New { .. }, Some(term)) = (role, message.obeyed_term())
            && let Err(refusal) = self.exceed(connection, term)
        {
            return self.turn_away(connection, refusal);
        }
        let role = self.acts_as(role, &message);
        if let Some(refusal) = self.not_leader()
            && !matches!(message, ToController::Pong)
        {
            return self.turn_away(connection, refusal);
        }
        match (role, message) {
            (Role::Switch(id), ToController::Pong) => self.has_introduced_itself(id),
            (_, ToController::Pong) => {}
            (Role::New { .. }, ToController::Register { name, address, limits, presence }) => {
                self.register(connection, name, address, limits, presence);
            }
            (Role::New { .. }, ToController::Join(hello)) => self.join(now, connection, &hello),
            (Role::New { .. }, ToController::Resume(resume)) => {
                self.resume(now, connection, resume);
            }
            // Whoever carries messages looks at proofs, where there are tokens.
            (Role::New { .. }, ToController::Token { .. }) if self.config.tokens.is_empty() => {
                let problem = TokenProblem::NoneHere;
                self.turn_away(connection, Refusal::Token { problem });
            }
            // Of a communicator that an earlier controller has made: it goes on without.
            (Role::Host { group, .. }, message) if self.is_of_before(group, &message) => {}
            (Role::Switch(id), ToController::Held { nodes }) => self.holds(id, nodes),
            (Role::Host { group, rank }, message @ ToController::SwitchLost { .. }) => {
                self.hear_of_loss(connection, (group, rank), message);
            }
            (
                Role::Switch(id),
                ToController::CommunicatorCreated { communicator, edges, uplink },
            ) => {
                self.created(id, communicator, &edges, uplink);
            }
            (Role::Switch(id), ToController::ParentConnected { communicator }) => {
                self.parent_connected(id, communicator);
            }
            (
                Role::Switch(id),
                ToController::CommunicatorFailed { communicator, reason, path_mtu },
            ) => {
                self.not_created(id, communicator, reason, path_mtu);
            }
            (Role::Switch(id), ToController::CommunicatorDestroyed { communicator }) => {
                if let Some(switch) = self.switches.get_mut(&id) {
                    let is_news = switch.communicators.remove(&communicator).is_some();
                    self.replanning.has_new_room |= is_news;
                }
            }
            (Role::Switch(id), ToController::Report { communicator, report }) => {
                self.reported(id, communicator, report);
            }
            (
                Role::Switch(id),
                ToController::Counters { communicator, at_ns, collectives, ports },
            ) => {
                self.counted(id, communicator, (at_ns, collectives), &ports);
            }
            (
                Role::Host { group, rank },
                ToController::Connect { qpn, psn, path_mtu, receive_share, more },
            ) => {
                let first = HostQueuePair { qpn, psn, receive_share };
                let ends = [first].into_iter().chain(more).collect();
                self.connect(connection, group, rank, path_mtu, ends);
            }
            (Role::Host { group, rank }, ToController::Leave { collectives }) => {
                self.leave(group, rank, collectives);
            }
            (Role::Host { group, rank }, ToController::Fail { cause: Some(cause), .. })
                if self.may_blame(group, rank, &cause) =>
            {
                self.end_group(group, &End::Aborted(cause.shortened()));
            }
            (Role::Host { .. }, ToController::Fail { reason, .. }) => {
                let term = self.term_to(connection);
                self.lose(connection, &shortened(format!("it gave up: {reason}")), Loss::ForEver);
                // It comes back until it hears that this has arrived.
                self.say_last(connection, term, FromController::Closed);
            }
            (role, message) => {
                let who = match role {
                    Role::New { .. } => "a peer that has not said what it is",
                    Role::Switch(_) => "a switch",
                    Role::Host { .. } => "a host",
                };
                // Not the whole message, which may be long.
                let message = format!("{message:?}");
                let kind = message.split([' ', '(']).next().unwrap_or_default();
                self.misbehaved(connection, format!("{who} cannot send {kind} now"));
            }
        }
        self.use_new_room();
    }

    /// What has arrived is no message.
    pub fn handle_bad_frame(&mut self, now: Instant, connection: ConnectionId, error: &FrameError) {
        self.arrive(now);
        self.misbehaved(connection, error.to_string());
        self.use_new_room();
    }

    /// The connection is closed, by the peer or by an error.
    pub fn handle_closed(&mut self, now: Instant, connection: ConnectionId) {
        self.arrive(now);
        self.lose(connection, CLOSED, Loss::Connection);
        self.use_new_room();
    }

    /// Acts on deadlines that have passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        let armed = self.armed;
        self.arrive(now);
        if self.reads_first(now, armed) {
            return;
        }
        self.keep_alive(now);
        self.give_up_on_the_absent(now);
        self.end_inventories(now);
        self.forget_unclaimed_records(now);
        self.destroy_overdue(now);
        self.fall_back_in_time(now);
        for id in self.groups.due(now, |group| group.deadline) {
            let Some(group) = self.groups.get(&id) else { continue };
            if !group.is_full() {
                self.give_up(now, id);
                continue;
            }
            // All are there, and without the least patient one the group cannot be.
            let refusal = self.awaited(group).refusal(group.name.clone(), group.world);
            let refusal = group.with_obstacle(refusal);
            self.end_group(id, &End::Refused(refusal));
        }
        self.use_new_room();
    }

    /// When [`Controller::handle_timeout`] must be called next.
    pub fn poll_timeout(&mut self) -> Option<Instant> {
        let of_each = [self.connections.first(), self.groups.first(), self.switches.first()];
        debug_assert!(self.connections.agrees() && self.groups.agrees() && self.switches.agrees());
        let ending = self.ending.front().map(|ending| ending.until);
        let away = self.away.first().map(|&(until, ..)| until);
        let unclaimed = self.unclaimed.front().map(|&(until, _)| until);
        let others = [ending, away, unclaimed, self.records.until, self.replanning.at()];
        let earliest = of_each.into_iter().chain(others).flatten().min();
        self.armed = earliest.max(self.reading_until.filter(|_| earliest.is_some()));
        self.armed
    }

    /// The term that it leads with: that of messages to all who have obeyed none or a lower one.
    pub const fn term(&self) -> u64 {
        self.term
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// How much of everything there is.
    pub fn census(&self) -> Census {
        Census {
            connections: self.connections.len(),
            switches: self.real_switches().count(),
            groups: self.groups.len(),
            communicators: self.real_switches().map(|switch| switch.communicators.len()).sum(),
            held: self.held.len(),
            away: self.away.len(),
            ending: self.ending.len(),
        }
    }

    /// How far the group of this name is, of those without a token; `None` when there is none that nobody has left.
    pub fn group_state(&self, name: &str) -> Option<GroupState> {
        Some(self.groups.get(self.names.get(&(None, name.to_owned()))?)?.state())
    }

    /// The term of what a connection is told.
    fn term_to(&self, connection: ConnectionId) -> u64 {
        let known = self.connections.get(&connection).map(|connection| connection.term);
        known.unwrap_or(if self.leads() { self.term } else { 0 })
    }

    fn send(&mut self, connection: ConnectionId, message: FromController) {
        let term = self.term_to(connection);
        self.outputs.push_back(Output::Send { connection, term, message });
    }

    /// Sends to a connection that is forgotten, and closes it.
    fn say_last(&mut self, connection: ConnectionId, term: u64, message: FromController) {
        self.outputs.push_back(Output::Send { connection, term, message });
        self.outputs.push_back(Output::Close { connection });
    }

    /// Sends to whoever may be away. What it misses it hears of when it comes back.
    fn send_to(&mut self, connection: Option<ConnectionId>, message: FromController) {
        if let Some(connection) = connection {
            self.send(connection, message);
        }
    }

    /// Asks who has a place whether it is there: once, however many want it meanwhile.
    fn ask_whether_there(&mut self, connection: Option<ConnectionId>) {
        let asked = connection.and_then(|id| self.connections.get_mut(&id));
        if asked.is_some_and(|connection| !std::mem::replace(&mut connection.doubted, true)) {
            self.send_to(connection, FromController::Ping);
        }
    }

    /// Says why, and closes. For connections that are part of nothing (any more).
    fn turn_away(&mut self, connection: ConnectionId, reason: Refusal) {
        let term = self.term_to(connection);
        self.connections.remove(&connection);
        self.say_last(connection, term, FromController::Refused { reason });
    }

    /// The peer broke the protocol: it is as good as dead.
    fn misbehaved(&mut self, connection: ConnectionId, detail: String) {
        if self.connections.contains_key(&connection) {
            let (term, detail) = (self.term_to(connection), shortened(detail));
            self.lose(connection, &detail, Loss::ForEver);
            let reason = Refusal::Protocol { detail };
            self.say_last(connection, term, FromController::Refused { reason });
        }
    }

    /// Forgets a connection and draws the consequences.
    fn lose(&mut self, connection: ConnectionId, detail: &str, loss: Loss) {
        let Some(lost) = self.connections.remove(&connection) else { return };
        match (lost.role(), loss) {
            (Role::New { .. }, _) => {}
            (Role::Switch(id), Loss::ForEver) => self.switch_lost(id, detail),
            (Role::Switch(id), Loss::Connection) => self.switch_away(id, detail),
            (Role::Host { group, rank }, Loss::ForEver) => self.host_lost(group, rank, detail),
            (Role::Host { group, rank }, Loss::Connection) => self.host_away(group, rank, detail),
        }
    }

    fn keep_alive(&mut self, now: Instant) {
        let misses = self.config.keep_alive_misses;
        let (mut silent, mut asked) = (Vec::new(), Vec::new());
        for id in self.connections.due(now) {
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            let role = connection.role();
            match role {
                Role::New { until } if until <= now => {
                    silent.push((id, "it did not say what it is"));
                    continue;
                }
                _ if connection.unanswered >= misses => {
                    silent
                        .push((id, "it does not answer: its process or its network stands still"));
                    continue;
                }
                _ => {}
            }
            connection.unanswered += 1;
            // From now, not from when it was due: if it was we who stood still, nobody else did.
            connection.next_ping = now + self.config.keep_alive_interval;
            let (term, message) = (connection.term, FromController::Ping);
            self.outputs.push_back(Output::Send { connection: id, term, message });
            if let Role::Host { group, .. } = role {
                asked.push((id, group));
            }
        }
        self.tell_what_is_awaited(now, &asked);
        for (connection, detail) in silent {
            let role = self.connections.get(&connection).map(Connection::role);
            if let Some(Role::Switch(_)) = role {
                // Its ranks notice when it is more than the way to it that is broken.
                self.lose(connection, detail, Loss::Connection);
                self.outputs.push_back(Output::Close { connection });
            } else {
                self.misbehaved(connection, detail.to_owned());
            }
        }
    }

    /// What a group that is being made waits for.
    fn awaited(&self, group: &Group) -> Awaited {
        let switch = group.busy_switch().and_then(|id| self.switches.get(&id));
        group.awaited(switch.map(|switch| switch.name.as_str()))
    }

    /// Says to hosts what their groups wait for, if they do.
    fn tell_what_is_awaited(&mut self, now: Instant, hosts: &[(ConnectionId, GroupId)]) {
        // Looked up once for each group, which may have many hosts.
        let mut known: HashMap<GroupId, Option<FromController>> = HashMap::new();
        for &(connection, id) in hosts {
            let message = known.entry(id).or_insert_with(|| {
                let group = self.groups.get(&id)?;
                let left = group.deadline?.saturating_duration_since(now);
                let left_ms = left.as_millis().try_into().unwrap_or(u64::MAX);
                Some(FromController::Waiting { awaited: self.awaited(group), left_ms })
            });
            if let Some(message) = message.clone() {
                let term = self.connections.get(&connection).map_or(self.term, |it| it.term);
                self.outputs.push_back(Output::Send { connection, term, message });
            }
        }
    }

    /// Whether one more rank may be connected: others keep their places for switches.
    fn check_ranks(&self) -> Result<(), Refusal> {
        check_count("ranks", self.connections.hosts(), self.config.max_ranks)
    }

    /// Whether one more switch may be.
    fn check_switches(&self) -> Result<(), Refusal> {
        check_count("switches", self.connections.switches(), self.config.max_switches)
    }

    /// Tells a host the last thing it hears.
    fn dismiss(&mut self, connection: ConnectionId, message: FromController) {
        if let Some(Connection { term, .. }) = self.connections.remove(&connection) {
            self.say_last(connection, term, message);
        }
    }

    /// Ends a group before all ranks have left: tells everyone, and the switches that must know.
    fn end_group(&mut self, id: GroupId, end: &End) {
        let Some(group) = self.groups.remove(&id) else { return };
        free_name(&mut self.names, id, &group);
        let blamed = self.blame_host(&group, end);
        let end = blamed.as_ref().unwrap_or(end);
        self.report_over(&group);
        if let End::Aborted(reason) = end
            && group.ready
        {
            self.remember(group.identity, Some(reason.clone()));
        }
        // A rank may have found it, and not a node.
        let of_node = group.nodes.iter().any(|it| it.step == Step::Gone)
            || self.has_held_gone(group.identity);
        let mut elsewhere = group.nodes_elsewhere();
        elsewhere.extend(self.held_elsewhere(group.identity));
        self.end_nodes(&group, |communicator| match *end {
            End::Aborted(AbortReason::PeerLost { rank, .. }) if group.ready => {
                Some(FromController::AbortCommunicator { communicator, rank })
            }
            // The node that has found it tells the others of its tree.
            End::Aborted(
                AbortReason::Mismatch { .. }
                | AbortReason::Violation { .. }
                | AbortReason::Overdue { .. },
            ) if group.ready && of_node && !elsewhere.contains(&communicator) => None,
            _ => Some(FromController::DestroyCommunicator { communicator }),
        });
        self.forget_hosts_switches(&group);
        for member in group.members.values() {
            if let Some(connection) = member.connection {
                self.dismiss(connection, group.farewell(member, end));
            }
        }
        self.forget_switches();
    }

    /// Has the switches end the nodes of a group that is over, by a message or by themselves. What is
    /// not gone in time is destroyed.
    fn end_nodes(&mut self, group: &Group, message: impl Fn(u64) -> Option<FromController>) {
        self.replanning.has_new_room |= group.trees.is_some();
        for (place, node) in group.trees.iter().flat_map(Forest::nodes).zip(&group.nodes) {
            let communicator = node.communicator;
            self.nodes.remove(&communicator);
            let Some(switch) = self.switches.get(&place.switch) else { continue };
            let message = match node.step {
                Step::Waiting => continue,
                Step::Gone => None,
                _ => message(communicator),
            };
            if !matches!(message, Some(FromController::DestroyCommunicator { .. })) {
                let until = self.now + self.config.abort_timeout;
                let (switch, children) = (place.switch, place.children.len());
                self.ending.push_back(Ending { until, switch, communicator, children });
            }
            if let Some(message) = message {
                let connection = switch.connection;
                self.send_to(connection, message);
            }
        }
        self.end_held(group.identity, message);
    }

    /// Destroys what should have ended by itself.
    fn destroy_overdue(&mut self, now: Instant) {
        while let Some(&Ending { switch, communicator, .. }) =
            self.ending.front().filter(|ending| ending.until <= now)
        {
            self.ending.pop_front();
            self.replanning.has_new_room = true;
            let switch = self.switches.get(&switch);
            if let Some(switch) = switch
                && switch.communicators.contains_key(&communicator)
            {
                let connection = switch.connection;
                self.send_to(connection, FromController::DestroyCommunicator { communicator });
            }
        }
    }
}

/// Why a connection is not there any more.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Loss {
    /// The peer may live, and come back.
    Connection,
    /// It is of no more use.
    ForEver,
}

/// The name of a group is free for the next one, unless it was so before.
fn free_name(names: &mut Names, id: GroupId, group: &Group) {
    let name = (group.owner.token, group.name.clone());
    if names.get(&name) == Some(&id) {
        names.remove(&name);
    }
}

/// Whether there may be one more.
fn check_count(what: &str, count: usize, limit: usize) -> Result<(), Refusal> {
    if count < limit { Ok(()) } else { Err(Refusal::Limit { what: what.to_owned(), limit }) }
}

const CLOSED: &str = "its control connection was closed";

fn is_name(name: &str) -> bool {
    let fits = (1..=MAX_NAME_BYTES).contains(&name.len()) && !matches!(name, "." | "..");
    fits && !name.chars().any(char::is_control)
}
