//! What is kept of communicators that are ready, for the controllers after this one. Ranks and switches claim what they
//! have, records or not: these add what they do not know, such as who has left.

use core::net::{IpAddr, SocketAddr};
use std::collections::{BTreeSet, HashMap};

use millstream_roce::Instant;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::group::Group;
use super::members::Member;
use super::{
    Connection, ConnectionId, Controller, GroupId, Placement, PlacementChange, Role, Switch,
    free_name,
};
use crate::protocol::{FallbackOffer, FromController, GroupIdentity, Refusal, Resume};
use crate::topology::LinkIndex;

/// The longest record, in bytes. One that would be longer is kept without its tree, or not at all.
pub const MAX_RECORD_BYTES: usize = 256 << 10;

/// So many records may wait until somebody asks for them.
const MAX_CHANGED: usize = 4096;

/// A communicator that is ready.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Record {
    /// Its group's name.
    pub group: String,
    /// The group itself.
    pub identity: GroupIdentity,
    /// Its number.
    pub communicator: u64,
    /// How many ranks there are.
    pub world: u32,
    /// Those that have left.
    pub departed: Vec<Departed>,
    /// The links of the topology that its tree uses, by the addresses of their upper and lower ends.
    pub links: Vec<(IpAddr, IpAddr)>,
    /// Where it is, unless that is too long.
    pub placement: Option<Placement>,
}

/// A rank that has left.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Departed {
    /// Which.
    pub rank: u32,
    /// Its address.
    pub address: IpAddr,
    /// How many collectives it has called.
    pub collectives: u64,
}

/// A text that is no record.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("the record {key} makes no sense: {reason}")]
pub struct RecordError {
    /// Its key.
    pub key: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Why a controller does not lead.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct StandBy {
    /// Who does, if that is known.
    pub leader: Option<SocketAddr>,
    /// What is wrong with the store, if something is.
    pub trouble: Option<String>,
}

/// A record of a communicator that no rank has claimed yet.
#[derive(Debug)]
pub(super) struct Stored {
    record: Record,
    pub(super) links: Vec<LinkIndex>,
}

/// Records, and what has become of them.
#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) unclaimed: HashMap<GroupIdentity, Stored>,
    /// Until when they can be claimed.
    pub(super) until: Option<Instant>,
    /// Those that have changed.
    changed: BTreeSet<GroupIdentity>,
}

impl Record {
    /// Its key: that of its group.
    pub fn key(identity: GroupIdentity) -> String {
        format!("{:016x}{:016x}", identity[0], identity[1])
    }

    /// From its key and its text.
    pub fn parse(key: &str, text: &str) -> Result<Self, RecordError> {
        let error = |reason: String| RecordError { key: key.escape_debug().to_string(), reason };
        if text.len() > MAX_RECORD_BYTES {
            return Err(error(format!("{} bytes are too long", text.len())));
        }
        let record: Self = serde_json::from_str(text).map_err(|wrong| error(wrong.to_string()))?;
        match Self::key(record.identity) == key {
            true => Ok(record),
            false => Err(error("it is of another group".to_owned())),
        }
    }

    /// As text; none where that would be too long.
    fn text(mut self) -> Option<String> {
        let fits = |text: &String| text.len() <= MAX_RECORD_BYTES;
        let whole = serde_json::to_string(&self).ok().filter(fits);
        whole.or_else(|| {
            self.placement = None;
            serde_json::to_string(&self).ok().filter(fits)
        })
    }
}

impl Controller {
    /// This controller leads from now on, with this term, and knows what those before it have recorded.
    pub fn lead(&mut self, now: Instant, term: u64, records: Vec<Record>) {
        self.arrive(now);
        self.standby = None;
        self.term = self.term.max(term);
        let limit = self.config.max_groups;
        for record in records.into_iter().take(limit) {
            let links = self.links_of(&record);
            self.records.unclaimed.insert(record.identity, Stored { record, links });
        }
        let waits = !self.records.unclaimed.is_empty();
        self.records.until = waits.then(|| now + self.config.inventory_grace);
    }

    /// This controller does not lead: whoever says what it is hears that. It must be one that nobody is connected to,
    /// or has stood by before.
    pub fn stand_by(&mut self, standby: StandBy) {
        self.standby = Some(standby);
    }

    /// Whether it leads.
    pub const fn leads(&self) -> bool {
        self.standby.is_none()
    }

    /// Where all controllers are. Who is known is told when that changes: one that is started later may be the only one
    /// that is left.
    pub fn set_controllers(&mut self, controllers: &[SocketAddr]) {
        if self.controllers == controllers {
            return;
        }
        self.controllers = controllers.to_vec();
        if self.controllers.is_empty() || !self.leads() {
            return;
        }
        let known = |(&id, connection): (&ConnectionId, &Connection)| {
            let is_known = match connection.role() {
                Role::New { .. } => false,
                Role::Switch(switch) => self.switches.get(&switch).is_some_and(Switch::serves),
                // Before, a host waits for something else.
                Role::Host { group, .. } => self.groups.get(&group).is_some_and(|it| it.ready),
            };
            is_known.then_some(id)
        };
        let known: Vec<ConnectionId> = self.connections.iter().filter_map(known).collect();
        for connection in known {
            self.send(
                connection,
                FromController::Controllers { controllers: controllers.to_vec() },
            );
        }
    }

    /// What to say to a peer that says what it is, if this controller does not lead.
    pub(super) fn not_leader(&self) -> Option<Refusal> {
        let StandBy { leader, trouble } = self.standby.clone()?;
        let detail = match (leader, trouble) {
            (Some(leader), None) => format!("the one at {leader} does"),
            (_, Some(trouble)) => {
                format!("the state that controllers share cannot be used: {trouble}")
            }
            (None, None) => "another one is being elected".to_owned(),
        };
        Some(Refusal::NotLeader { leader, detail: crate::protocol::shortened(detail) })
    }

    /// Tells who is known now where all controllers are.
    pub(super) fn tell_controllers(&mut self, connection: ConnectionId) {
        if self.controllers.len() > 1 {
            let controllers = self.controllers.clone();
            self.send(connection, FromController::Controllers { controllers });
        }
    }

    /// The next record that has changed: its key, and its text unless it is to be removed. Only with
    /// [`super::ControllerConfig::keep_records`] are there any.
    pub fn poll_record(&mut self) -> Option<(String, Option<String>)> {
        let identity = self.records.changed.pop_first()?;
        let group = self.group_of(identity).and_then(|id| self.groups.get(&id));
        let record = group.filter(|group| group.ready).and_then(|group| self.record(group));
        Some((Record::key(identity), record.and_then(Record::text)))
    }

    /// The record of this group has changed.
    pub(super) fn record_changed(&mut self, identity: GroupIdentity) {
        if self.config.keep_records {
            if self.records.changed.len() >= MAX_CHANGED {
                // The store takes nothing. What it has too much the next controller takes away.
                self.records.changed.pop_first();
            }
            self.records.changed.insert(identity);
        }
    }

    fn record(&self, group: &Group) -> Option<Record> {
        let departed = group.members.iter().filter_map(|(&rank, member)| {
            Some(Departed { rank, address: member.address, collectives: member.left? })
        });
        let links = self.config.topology.as_ref().map(|topology| {
            let ends = |&link: &LinkIndex| topology.links().get(link);
            let links = group.links.iter().filter_map(ends);
            links.map(|link| (link.upper_address, link.lower_address)).collect()
        });
        let revived = group.revived.as_ref();
        let root = group.nodes.first().map(|node| node.communicator);
        let known = revived.and_then(|revived| revived.placement.clone());
        Some(Record {
            group: group.name.clone(),
            identity: group.identity,
            communicator: revived.map(|revived| revived.communicator).or(root)?,
            world: group.world,
            departed: departed.collect(),
            links: links.unwrap_or_default(),
            placement: known.or_else(|| self.placement(group)),
        })
    }

    /// The links of a record that this controller's topology has.
    fn links_of(&self, record: &Record) -> Vec<LinkIndex> {
        let Some(topology) = &self.config.topology else { return Vec::new() };
        let ends = topology.links().iter().map(|link| (link.upper_address, link.lower_address));
        let index: HashMap<(IpAddr, IpAddr), LinkIndex> =
            ends.enumerate().map(|(index, ends)| (ends, index)).collect();
        record.links.iter().filter_map(|ends| index.get(ends).copied()).collect()
    }

    /// The first rank of a communicator has come back: what is recorded of it is so.
    pub(super) fn restore(&mut self, id: GroupId, resume: &Resume) {
        let Some(Stored { record, links }) = self.records.unclaimed.remove(&resume.identity) else {
            // The store has lost it, perhaps.
            return self.record_changed(resume.identity);
        };
        let claimed = (resume.group.as_str(), resume.world, resume.communicator);
        let Some(group) = self.groups.get_mut(&id) else { return };
        let is_over = record.departed.len() >= record.world as usize;
        if is_over || claimed != (record.group.as_str(), record.world, record.communicator) {
            return self.record_changed(resume.identity);
        }
        group.links = links;
        for Departed { rank, address, collectives } in record.departed {
            if rank < group.world {
                let member = Member {
                    connection: None,
                    address,
                    more_addresses: Vec::new(),
                    same_machine: None,
                    options: crate::CommunicatorOptions::default(),
                    fallback: FallbackOffer::Off,
                    avoid: Vec::new(),
                    ends: Vec::new(),
                    left: Some(collectives),
                    away_until: None,
                };
                group.members.insert(rank, member);
            }
        }
        if group.members.first_left().is_some() {
            free_name(&mut self.names, id, group);
        }
        if let Some(revived) = &mut group.revived {
            revived.placement.clone_from(&record.placement);
        }
        if let Some(placement) = record.placement.filter(|_| self.config.report_placements) {
            self.placements.push_back(PlacementChange::Ready(placement));
        }
    }

    /// Nobody has claimed these in time.
    pub(super) fn forget_unclaimed_records(&mut self, now: Instant) {
        if self.records.until.is_some_and(|until| until <= now) {
            self.records.until = None;
            for (identity, _) in core::mem::take(&mut self.records.unclaimed) {
                self.record_changed(identity);
            }
        }
    }
}
