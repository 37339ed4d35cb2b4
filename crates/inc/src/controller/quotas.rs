//! How much one token and one source address may have at a time, so that one hostile host does not keep others out.

use core::net::{IpAddr, Ipv6Addr};
use std::collections::HashMap;

use millstream_roce::Instant;

use super::group::Step;
use super::{Connection, ConnectionId, Controller, ControllerConfig, GroupId};
use crate::plan::Forest;
use crate::protocol::{GroupIdentity, Refusal, TokenProblem};

/// How much one token, or one source address, may have at a time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Quotas {
    /// Connections.
    pub connections: u64,
    /// Groups, also those that are being made. A group counts for its first rank.
    pub groups: u64,
    /// Nodes of trees on all switches, those that are being destroyed included.
    pub communicators: u64,
    /// Bytes of their slots and queues, as they are planned: for the largest path MTU.
    pub slot_bytes: u64,
}

impl Quotas {
    /// As much as there is.
    pub const NONE: Self = Self {
        connections: u64::MAX,
        groups: u64::MAX,
        communicators: u64::MAX,
        slot_bytes: u64::MAX,
    };

    /// For a source address, unless told otherwise: half of the connections and groups that a controller has, so that
    /// all processes of a group may be on one machine, and one machine does not take everything.
    pub const SOURCE: Self =
        Self { connections: 2048, groups: 512, communicators: 1024, slot_bytes: u64::MAX };
}

/// Whom a token is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TokenKind {
    /// Hosts: they join groups.
    Host,
    /// Switches: they register.
    Switch,
}

impl TokenKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Host => "hosts",
            Self::Switch => "switches",
        }
    }
}

/// What a controller knows of a token: whoever carries its messages has it, and looks at proofs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TokenRules {
    /// Its name, for people.
    pub name: String,
    /// Whom it is for.
    pub kind: TokenKind,
    /// How much those who have it may have at a time, together.
    pub quotas: Quotas,
}

/// Whose a connection or a group is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Owner {
    /// Which of the tokens was proved.
    pub(super) token: Option<usize>,
    /// Where the connection comes from, if its carrier has said so.
    pub(super) source: Option<IpAddr>,
}

/// One who has quotas.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Holder {
    Token(usize),
    Source(IpAddr),
}

/// Nodes of trees, and their bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Use {
    nodes: u64,
    bytes: u64,
}

impl Use {
    fn add(&mut self, bytes: u64) {
        self.nodes += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// A node of a tree that a switch was asked for, until nothing is left of it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OwnedNode {
    owner: Owner,
    /// Which it was made for, if this controller knows it.
    group: Option<GroupId>,
    bytes: u64,
}

/// The part of an address that one machine does not choose: of IPv6, the 64 bits of its network.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        address => address,
    }
}

impl Owner {
    pub(super) fn from(address: IpAddr) -> Self {
        Self { token: None, source: Some(source(address)) }
    }

    pub(super) fn holders(self) -> impl Iterator<Item = Holder> {
        let token = self.token.map(Holder::Token);
        token.into_iter().chain(self.source.map(Holder::Source))
    }

    fn is_of(self, holder: Holder) -> bool {
        match holder {
            Holder::Token(token) => self.token == Some(token),
            Holder::Source(source) => self.source == Some(source),
        }
    }
}

impl Controller {
    /// The peer of a connection has proved that it has this of the [`ControllerConfig::tokens`]. `false` when it is
    /// turned away all the same, because those who have that have enough.
    pub fn handle_proved(&mut self, now: Instant, connection: ConnectionId, token: usize) -> bool {
        self.arrive(now);
        let Some(state) = self.connections.get_mut(&connection) else { return false };
        state.unanswered = 0;
        if let Err(refusal) = self.check_connections(Owner { token: Some(token), source: None }) {
            self.turn_away(connection, refusal);
            return false;
        }
        self.connections.set_token(connection, token);
        true
    }

    /// The peer of a connection has not proved that it has a token, for this reason.
    pub fn handle_unproved(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        problem: TokenProblem,
    ) {
        self.arrive(now);
        if self.connections.contains_key(&connection) {
            self.turn_away(connection, Refusal::Token { problem });
        }
    }

    /// Whose a connection is.
    pub(super) fn owner(&self, connection: ConnectionId) -> Owner {
        self.connections.get(&connection).map(Connection::owner).unwrap_or_default()
    }

    /// Whether a connection may say that it is one of these.
    pub(super) fn check_token(
        &self,
        connection: ConnectionId,
        asked: TokenKind,
    ) -> Result<(), Refusal> {
        if self.config.tokens.is_empty() {
            return Ok(());
        }
        let token = self.owner(connection).token.and_then(|token| self.config.tokens.get(token));
        let problem = match token {
            None => TokenProblem::Needed,
            Some(token) if token.kind == asked => return Ok(()),
            Some(TokenRules { name, kind, .. }) => TokenProblem::OtherKind {
                name: name.clone(),
                meant_for: kind.name().to_owned(),
                asked: asked.name().to_owned(),
            },
        };
        Err(Refusal::Token { problem })
    }

    /// Whether its owner may have one more connection.
    pub(super) fn check_connections(&self, owner: Owner) -> Result<(), Refusal> {
        self.check(
            owner,
            "connections",
            1,
            |quotas| quotas.connections,
            |holder| self.connections.count_of(holder),
        )
    }

    /// Whether its owner may have one more group.
    pub(super) fn check_groups(&self, owner: Owner) -> Result<(), Refusal> {
        self.check(
            owner,
            "groups",
            1,
            |quotas| quotas.groups,
            |holder| self.groups.values().filter(|group| group.owner.is_of(holder)).count() as u64,
        )
    }

    /// Whether its owner may have one more communicator, with these trees.
    pub(super) fn check_trees(&self, id: GroupId, trees: &Forest) -> Result<(), Refusal> {
        let Some(owner) = self.groups.get(&id).map(|group| group.owner) else { return Ok(()) };
        let limited = |quotas: &Quotas| quotas.communicators.min(quotas.slot_bytes) < u64::MAX;
        if !owner.holders().any(|holder| limited(self.quotas(holder))) {
            return Ok(());
        }
        let mut wanted = Use::default();
        for node in trees.nodes() {
            wanted.add(self.node_bytes(node.children.len()));
        }
        let used = self.used_beside(id);
        let sum = |holder: Holder, part: fn(&Use) -> u64| {
            let of = used.iter().filter(|(owner, _)| owner.is_of(holder));
            of.fold(0, |sum: u64, (_, used)| sum.saturating_add(part(used)))
        };
        let nodes = |holder| sum(holder, |used| used.nodes);
        self.check(owner, "nodes of trees", wanted.nodes, |it| it.communicators, nodes)?;
        let bytes = |holder| sum(holder, |used| used.bytes);
        self.check(owner, "bytes of slots", wanted.bytes, |it| it.slot_bytes, bytes)
    }

    /// What all trees take, but for a group that has none: what is left of it was refused, and is being destroyed.
    fn used_beside(&self, id: GroupId) -> Vec<(Owner, Use)> {
        let mut all: Vec<(Owner, Use)> = Vec::new();
        let mut owners: HashMap<GroupIdentity, Owner> = HashMap::new();
        for group in self.groups.values() {
            owners.insert(group.identity, group.owner);
            if group.fallback.is_some() {
                // On its own hosts.
                continue;
            }
            let mut planned = Use::default();
            for (index, place) in group.trees.iter().flat_map(Forest::nodes).enumerate() {
                // Its switch has not been asked for it yet.
                if group.nodes.get(index).is_none_or(|node| node.step == Step::Waiting) {
                    planned.add(self.node_bytes(place.children.len()));
                }
            }
            all.push((group.owner, planned));
        }
        for switch in self.real_switches() {
            let of_others = switch.communicators.values().filter(|node| node.group != Some(id));
            for &OwnedNode { owner, bytes, .. } in of_others {
                all.push((owner, Use { nodes: 1, bytes }));
            }
        }
        for held in self.held.values() {
            if let Some(&owner) = owners.get(&held.group) {
                all.push((owner, Use { nodes: 1, bytes: self.node_bytes(held.children) }));
            }
        }
        all
    }

    /// A node of a group that is known, with so many children, on the switch that was asked for it. Those from before count
    /// by what is held.
    pub(super) fn owned_node(&self, communicator: u64, children: usize) -> OwnedNode {
        let group = self.nodes.get(&communicator).map(|&(id, _)| id);
        let Some(owner) = group.and_then(|id| self.groups.get(&id)).map(|group| group.owner) else {
            return OwnedNode::default();
        };
        OwnedNode { owner, group, bytes: self.node_bytes(children) }
    }

    /// Of the connections that have not said what they are, the oldest of the source that has most of them.
    pub(super) fn stranger_to_go(&self) -> Option<ConnectionId> {
        let strangers = self.connections.strangers();
        let mut strangers = strangers.map(|(id, connection)| (id, connection.owner().source));
        let mut counts: HashMap<Option<IpAddr>, usize> = HashMap::new();
        strangers.clone().for_each(|(_, source)| *counts.entry(source).or_default() += 1);
        let most = counts.values().copied().max()?;
        strangers.find(|(_, source)| counts[source] == most).map(|(id, _)| id)
    }

    fn check(
        &self,
        owner: Owner,
        what: &str,
        wanted: u64,
        limit: impl Fn(&Quotas) -> u64,
        used: impl Fn(Holder) -> u64,
    ) -> Result<(), Refusal> {
        for holder in owner.holders() {
            let limit = limit(self.quotas(holder));
            // Most have none.
            if limit == u64::MAX {
                continue;
            }
            let used = used(holder);
            if used.saturating_add(wanted) > limit {
                let (holder, what) = (self.describe(holder), what.to_owned());
                return Err(Refusal::Quota { holder, what, limit, used, wanted });
            }
        }
        Ok(())
    }

    fn quotas(&self, holder: Holder) -> &Quotas {
        let ControllerConfig { tokens, source_quotas, .. } = &self.config;
        match holder {
            Holder::Token(token) => tokens.get(token).map_or(&Quotas::NONE, |it| &it.quotas),
            Holder::Source(_) => source_quotas,
        }
    }

    fn describe(&self, holder: Holder) -> String {
        match holder {
            Holder::Token(token) => {
                let name = self.config.tokens.get(token).map(|token| token.name.as_str());
                format!("token {:?}", name.unwrap_or_default())
            }
            Holder::Source(address) if address.is_ipv6() => format!("network {address}/64"),
            Holder::Source(address) => format!("address {address}"),
        }
    }
}
