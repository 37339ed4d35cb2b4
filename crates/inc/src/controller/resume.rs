//! Ranks that come back, to this controller or from an earlier one, and claim their communicators. Nothing is ended
//! before those that may live had time to come.
//!
//! A group that this controller has not made is made from the first claim of a rank. It has no tree: the nodes that
//! switches name (`inventory.rs`) belong to it by its identity.

use core::net::{IpAddr, Ipv4Addr};
use core::time::Duration;
use std::collections::BTreeSet;

use millstream_roce::Instant;

use super::fallback::HOSTS_INCARNATION;
use super::group::{End, Group};
use super::hosts::check_addresses;
use super::inventory::Held;
use super::members::Member;
use super::{
    CLOSED, ConnectionId, Controller, GroupId, Output, Placement, Role, Switch, TokenKind,
    free_name, is_name,
};
use crate::plan::SwitchId;
use crate::protocol::{
    AbortReason, FallbackOffer, FromController, GroupIdentity, LostSwitch, MAX_TERM, RankList,
    Refusal, Resume, ToController, TokenProblem, shortened,
};

/// Who is called later than this did not run meanwhile.
const LATE: Duration = Duration::from_millis(100);

/// How long what has come meanwhile is read before anyone is given up.
const READING: Duration = Duration::from_millis(100);

/// So many groups that are over are known.
const MAX_ENDED: usize = 1024;

/// A switch that nobody has named.
pub(super) const UNKNOWN: LostSwitch =
    LostSwitch { address: IpAddr::V4(Ipv4Addr::UNSPECIFIED), incarnation: None };

/// What is special of a group without a tree: an earlier controller has made it, or its ranks share memory.
#[derive(Debug)]
pub(super) struct Revived {
    pub(super) communicator: u64,
    /// Until when its other ranks must come back; none when that was judged.
    pub(super) until: Option<Instant>,
    /// Some ranks had left: who does not come back may be one of them.
    pub(super) departed: bool,
    /// Where it is, if that was recorded.
    pub(super) placement: Option<Placement>,
    /// This controller has made it: its ranks share memory, and no switch has a part in it.
    pub(super) made_here: bool,
}

impl Revived {
    /// Whether its root node may have been on this switch, which does not name it. Where that is not recorded, it may
    /// have been on any.
    pub(super) fn may_be_rooted_on(&self, switch: &Switch) -> bool {
        let Some(placement) = &self.placement else { return true };
        let root = placement.nodes.iter().find(|node| node.communicator == self.communicator);
        root.is_some_and(|root| {
            root.name == switch.name && root.edges.iter().all(|edge| edge.my.ip == switch.address)
        })
    }
}

impl Group {
    /// Until when its other ranks must come back, if that was not judged.
    pub(super) fn claimed_by(&self) -> Option<Instant> {
        self.revived.as_ref().and_then(|revived| revived.until)
    }
}

/// A group that is over.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) group: GroupIdentity,
    /// None when all its ranks had left.
    reason: Option<AbortReason>,
}

impl Controller {
    /// Something happens at this time. After a standstill of this process, those that are waited for get the time
    /// again: what they have sent is still to be read.
    pub(super) fn arrive(&mut self, now: Instant) {
        self.now = now;
        let standstill = self.config.standstill;
        if self.armed.take().is_none_or(|at| now <= at + standstill) {
            return;
        }
        self.connections.forgive(now + standstill);
        let until = now + self.config.resume_timeout;
        for (_, id, rank) in core::mem::take(&mut self.away) {
            let member = self.groups.get_mut(&id).and_then(|group| group.members.get_mut(&rank));
            if let Some(member) = member.filter(|member| member.away_until.is_some()) {
                member.away_until = Some(until);
                self.away.insert((until, id, rank));
            }
        }
        for group in self.groups.values_mut() {
            group.deadline = group.deadline.map(|deadline| deadline.max(now + standstill));
            group.fall_back_at = group.fall_back_at.map(|at| at.max(now + standstill));
            if let Some(revived) = &mut group.revived {
                revived.until = revived.until.map(|_| now + self.config.claim_timeout);
            }
            if let Some(further_up) = &mut group.further_up {
                further_up.until = further_up.until.max(now + standstill);
            }
        }
        let until = now + self.config.inventory_grace;
        for switch in self.switches.values_mut() {
            switch.inventory_until = switch.inventory_until.map(|_| until);
        }
        self.unclaimed.iter_mut().for_each(|unclaimed| unclaimed.0 = until);
        self.records.until = self.records.until.map(|_| until);
    }

    /// Whether deadlines that have passed are not looked at yet: they are seen late, and what those have sent who are
    /// waited for may not have been read.
    pub(super) fn reads_first(&mut self, now: Instant, armed: Option<Instant>) -> bool {
        if let Some(until) = self.reading_until {
            // Once: who is always late must give up somebody, too.
            if now >= until {
                self.reading_until = None;
            }
            return now < until;
        }
        let late = armed.is_some_and(|at| now > at + LATE);
        self.reading_until = late.then(|| now + READING);
        late
    }

    /// A peer has obeyed this term: it is told one above.
    pub(super) fn exceed(&mut self, connection: ConnectionId, obeyed: u64) -> Result<(), Refusal> {
        let (leads, own) = (self.leads(), self.term);
        let Some(connection) = self.connections.get_mut(&connection) else { return Ok(()) };
        // There must be one above it.
        if leads && obeyed >= MAX_TERM {
            let detail = format!("term {obeyed} is out of range: below {MAX_TERM}");
            return Err(Refusal::Protocol { detail });
        }
        connection.term = if leads { own.max(obeyed + 1) } else { obeyed.min(MAX_TERM) };
        Ok(())
    }

    /// A number for a group that no other one has, and that nobody can foresee: who says it claims the group.
    pub(super) fn draw_identity(&self) -> GroupIdentity {
        self.config.secret.draw("group", self.next_group)
    }

    /// Keeps in mind how a group has ended, for those that come back later.
    pub(super) fn remember(&mut self, group: GroupIdentity, reason: Option<AbortReason>) {
        if self.ended.len() >= MAX_ENDED {
            self.ended.pop_front();
        }
        self.ended.push_back(Ended { group, reason });
    }

    pub(super) fn group_of(&self, identity: GroupIdentity) -> Option<GroupId> {
        self.groups.of(identity)
    }

    /// A host comes back.
    pub(super) fn resume(&mut self, now: Instant, connection: ConnectionId, resume: Resume) {
        if let Err(refusal) = self.check_token(connection, TokenKind::Host) {
            return self.turn_away(connection, refusal);
        }
        let ended = self.ended.iter().find(|ended| ended.group == resume.identity);
        if let Some(ended) = ended {
            let message = match ended.reason.clone() {
                Some(reason) => FromController::Abort { reason },
                None => FromController::Closed,
            };
            self.dismiss(connection, message);
            return;
        }
        let id = match self.claim(now, connection, &resume) {
            Ok(id) => id,
            Err(refusal) => return self.turn_away(connection, refusal),
        };
        let Some(group) = self.groups.get_mut(&id) else { return };
        if !group.members.contains_key(&resume.rank) {
            let member = Member {
                connection: None,
                address: resume.address,
                more_addresses: resume.more_addresses.clone(),
                ends: Vec::new(),
                same_machine: None,
                options: crate::CommunicatorOptions::default(),
                fallback: FallbackOffer::Off,
                avoid: Vec::new(),
                left: None,
                away_until: None,
            };
            group.members.insert(resume.rank, member);
        }
        let Some(member) = group.members.get_mut(&resume.rank) else { return };
        if let Some(until) = member.away_until.take() {
            self.away.remove(&(until, id, resume.rank));
        }
        // One that is half open, most likely.
        let old = member.connection.replace(connection);
        let all = group.is_full();
        if let Some(revived) = &mut group.revived {
            revived.departed |= resume.departed;
            revived.until = revived.until.filter(|_| !all);
        }
        if resume.departed {
            // It was free before, for who wants it next.
            free_name(&mut self.names, id, group);
        }
        // The first to have left says all: no later collective can end.
        let left = group.members.first_left();
        self.connections.set_role(connection, Role::Host { group: id, rank: resume.rank });
        self.connect_hosts_switch(id, resume.rank, Some(connection));
        if let Some(old) = old {
            self.connections.remove(&old);
            self.outputs.push_back(Output::Close { connection: old });
        }
        self.send(connection, FromController::Resumed);
        self.tell_controllers(connection);
        if let Some((collectives, rank)) = left {
            self.send(connection, FromController::Left { rank, collectives });
        }
        self.apply_early_reports();
    }

    /// The group of a rank that comes back, made if an earlier controller has made it.
    fn claim(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        resume: &Resume,
    ) -> Result<GroupId, Refusal> {
        let owner = self.owner(connection);
        let &Resume { ref group, identity, communicator, world, rank, .. } = resume;
        if !is_name(group) {
            return Err(Refusal::Name { what: "group".to_owned() });
        }
        let limit = self.config.max_world();
        if world == 0 || world > limit {
            return Err(Refusal::World { world, limit });
        }
        if rank >= world {
            return Err(Refusal::Rank { rank, world });
        }
        check_addresses(&resume.more_addresses)?;
        let id = self.group_of(identity);
        let member = id.and_then(|id| self.groups[&id].members.get(&rank));
        // Otherwise it takes the place of its connection of before.
        if member.is_none_or(|member| member.connection.is_none()) {
            self.check_ranks()?;
        }
        if let Some(id) = id {
            let known = &self.groups[&id];
            if known.owner.token != owner.token {
                return Err(Refusal::Token { problem: TokenProblem::OtherGroup });
            }
            let revived = known.revived.as_ref().map(|revived| revived.communicator);
            let root = known.nodes.first().map(|node| node.communicator);
            let same = (&known.name, known.world, revived.or(root), known.ready);
            if same != (group, world, Some(communicator), true) {
                let detail = format!(
                    "rank {rank} says that it has communicator {communicator} of group {group:?} with {world} \
                     ranks, and that group has another one"
                );
                return Err(Refusal::Protocol { detail: shortened(detail) });
            }
            return Ok(id);
        }
        let limit = self.config.max_groups;
        if self.groups.len() >= limit {
            return Err(Refusal::Limit { what: "groups".to_owned(), limit });
        }
        self.check_groups(owner)?;
        let id = GroupId(self.next_group);
        self.next_group += 1;
        let until = Some(now + self.config.claim_timeout);
        let (placement, made_here) = (None, false);
        let revived = Revived { communicator, until, departed: false, placement, made_here };
        let revived = Group {
            ready: true,
            deadline: None,
            revived: Some(revived),
            ..Group::new(group, identity, owner, world, now)
        };
        self.groups.insert(id, revived);
        if !resume.departed {
            self.names.entry((owner.token, group.clone())).or_insert(id);
        }
        self.restore(id, resume);
        Ok(id)
    }

    /// The connection of a host was closed. A rank of a communicator that is ready may come back.
    pub(super) fn host_away(&mut self, id: GroupId, rank: u32, detail: &str) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(member) = group.members.get_mut(&rank).filter(|_| group.ready) else {
            return self.host_lost(id, rank, detail);
        };
        member.connection = None;
        if member.left.is_none() {
            let until = self.now + self.config.resume_timeout;
            member.away_until = Some(until);
            self.away.insert((until, id, rank));
        }
        self.connect_hosts_switch(id, rank, None);
    }

    /// Acts on what was away for too long.
    pub(super) fn give_up_on_the_absent(&mut self, now: Instant) {
        while let Some(&(until, id, rank)) = self.away.first().filter(|&&(at, ..)| at <= now) {
            self.away.pop_first();
            let member = self.groups.get(&id).and_then(|group| group.members.get(&rank));
            if member.is_some_and(|member| member.away_until == Some(until)) {
                self.host_lost(id, rank, CLOSED);
            }
        }
        for id in self.groups.due(now, Group::claimed_by) {
            self.judge_claims(id);
        }
        self.name_lost_further_up(now);
        while let Some(&(_, communicator)) = self.unclaimed.front().filter(|&&(at, _)| at <= now) {
            self.unclaimed.pop_front();
            if self.held.get(&communicator).is_some_and(|held| self.group_of(held.group).is_none())
                && let Some(held) = self.held.remove(&communicator)
            {
                self.end_node(
                    &held,
                    communicator,
                    FromController::EndCommunicator { communicator },
                );
            }
        }
    }

    /// The other ranks of a group had time to come back.
    fn judge_claims(&mut self, id: GroupId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(revived) = &mut group.revived else { return };
        revived.until = None;
        let departed = revived.departed || group.members.first_left().is_some();
        let absent: RankList =
            (0..group.world).filter(|rank| !group.members.contains_key(rank)).collect();
        let first = (0..group.world).find(|rank| !group.members.contains_key(rank));
        match first {
            Some(rank) if !departed => {
                let detail = match absent.count() {
                    1 => "it did not come back to a controller that was restarted".to_owned(),
                    _ => format!(
                        "it did not come back to a controller that was restarted, as ranks {absent}"
                    ),
                };
                let detail = shortened(detail);
                self.end_group(id, &End::Aborted(AbortReason::PeerLost { rank, detail }));
            }
            _ if group.members.all_have_left() => self.close_group(id),
            _ => {}
        }
    }

    /// A rank says that a switch is lost.
    pub(super) fn hear_of_loss(
        &mut self,
        connection: ConnectionId,
        (id, rank): (GroupId, u32),
        message: ToController,
    ) {
        let ToController::SwitchLost { detail, tree, switch, further_up } = message else { return };
        let Some(group) = self.groups.get(&id) else { return };
        let member = group.members.get(&rank).filter(|it| it.connection == Some(connection));
        if member.is_none() || !group.ready {
            let detail = "a host cannot send SwitchLost now".to_owned();
            return self.misbehaved(connection, detail);
        }
        match further_up {
            true => self.lost_further_up(id, rank, (tree.into(), switch), &detail),
            false => self.switch_lost_to(id, rank, (tree.into(), switch), &detail),
        }
    }

    /// A rank says that its switch in a tree is lost, and which that is.
    fn switch_lost_to(
        &mut self,
        id: GroupId,
        rank: u32,
        (tree, named): (usize, Option<LostSwitch>),
        detail: &str,
    ) {
        let Some(group) = self.groups.get(&id) else { return };
        let detail = shortened(format!("rank {rank} cannot reach it: {detail}"));
        let leaf = group.trees.as_ref().and_then(|trees| trees.leaf_of(tree, rank));
        let known = leaf.and_then(|leaf| self.switches.get(&leaf.switch));
        let reason = match (known, named) {
            (Some(switch), _) => switch.lost(detail),
            // One of before. It may not have come back here.
            (None, Some(lost)) => match self.host_of_before(id, rank, lost) {
                Some(rank) => of_host(rank, &detail),
                None => self.lost_of_before(lost, detail),
            },
            (None, None) => match self.only_held(group.identity, tree) {
                Some(switch) => switch.lost(detail),
                // Where hosts take the place of switches, the host that is away was perhaps that one.
                None => match self.away_beside(id, rank) {
                    Some(rank) => of_host(rank, &detail),
                    None => self.lost_of_before(UNKNOWN, detail),
                },
            },
        };
        self.end_group(id, &End::Aborted(reason));
    }

    /// That a switch is lost of which a rank has said this, and no more is known.
    pub(super) fn lost_of_before(
        &self,
        LostSwitch { address, incarnation }: LostSwitch,
        detail: String,
    ) -> AbortReason {
        let name = self.name_of(address, incarnation);
        AbortReason::SwitchLost { name, address, detail, incarnation }
    }

    /// The rank whose process this switch is part of, which this rank misses, of a group of before whose hosts take the place of
    /// switches: theirs have incarnation 0. None where ranks share the address, and while not all are back.
    pub(super) fn host_of_before(&self, id: GroupId, rank: u32, switch: LostSwitch) -> Option<u32> {
        let group = self.groups.get(&id).filter(|it| it.revived.is_some() && it.is_full())?;
        let mut there = group.members.iter().filter(|(_, it)| it.address == switch.address);
        let (&host, _) = there.next().filter(|_| switch.incarnation == Some(HOSTS_INCARNATION))?;
        (there.next().is_none() && host != rank).then_some(host)
    }

    /// A rank that is away, other than this one, which has missed somebody.
    pub(super) fn away_beside(&self, id: GroupId, rank: u32) -> Option<u32> {
        let members = &self.groups.get(&id)?.members;
        let away = members.iter().filter(|(_, member)| member.away_until.is_some());
        away.map(|(&other, _)| other).find(|&other| other != rank)
    }

    /// The switch that has the nodes of a group's tree from before, if it is one: of several it is not known which a rank
    /// is connected to.
    fn only_held(&self, group: GroupIdentity, tree: usize) -> Option<&Switch> {
        let ours = |held: &&Held| held.group == group && held.tree == tree;
        let all: BTreeSet<SwitchId> =
            self.held.values().filter(ours).map(|held| held.switch).collect();
        let only = all.first().filter(|_| all.len() == 1)?;
        self.switches.get(only)
    }
}

/// That a rank is lost whose process took the place of a switch, as is said of that.
fn of_host(rank: u32, detail: &str) -> AbortReason {
    AbortReason::PeerLost { rank, detail: shortened(format!("its switch: {detail}")) }
}
