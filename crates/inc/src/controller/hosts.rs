//! What hosts say, from joining to leaving.

use core::net::IpAddr;
use core::time::Duration;

use millstream_roce::Instant;
use millstream_wire::Mtu;

use super::group::{End, Group};
use super::members::Member;
use super::{ConnectionId, Controller, GroupId, Role, TokenKind, free_name, is_name};
use crate::protocol::{
    AbortReason, FallbackOffer, FromController, Hello, HostQueuePair, MAX_AVOIDED, MAX_HOST_BYTES,
    MAX_TEXT_BYTES, Refusal,
};
use crate::stripe::MAX_TREES;

/// Whether a host can have so many further addresses.
pub(super) fn check_addresses(more: &[IpAddr]) -> Result<(), Refusal> {
    if more.len() < MAX_TREES {
        return Ok(());
    }
    let detail = format!("a host has up to {MAX_TREES} addresses, not {}", more.len() + 1);
    Err(Refusal::Protocol { detail })
}

impl Controller {
    pub(super) fn join(&mut self, now: Instant, connection: ConnectionId, hello: &Hello) {
        let id = match self.admit(now, connection, hello) {
            Ok(id) => id,
            Err(refusal) => {
                self.turn_away(connection, refusal);
                return;
            }
        };
        self.connections.set_role(connection, Role::Host { group: id, rank: hello.rank });
        let deadline = now + self.group_timeout(hello);
        let Some(group) = self.groups.get_mut(&id) else { return };
        let (connection, address) = (Some(connection), hello.address);
        let member = Member {
            connection,
            address,
            more_addresses: hello.more_addresses.clone(),
            same_machine: hello.same_machine.clone(),
            options: hello.options,
            fallback: hello.fallback.clone(),
            avoid: hello.avoid.clone(),
            ends: Vec::new(),
            left: None,
            away_until: None,
        };
        group.members.insert(hello.rank, member);
        if hello.rank == 0 {
            group.meeting.clone_from(&hello.meeting);
        }
        group.arrived(hello.rank, deadline);
        if group.is_full() {
            self.place(id);
        }
    }

    fn group_timeout(&self, hello: &Hello) -> Duration {
        Duration::from_millis(hello.timeout_ms).min(self.config.max_group_timeout)
    }

    /// The group that a host belongs to, made if it is the first.
    fn admit(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        hello: &Hello,
    ) -> Result<GroupId, Refusal> {
        self.check_token(connection, TokenKind::Host)?;
        let owner = self.owner(connection);
        let &Hello { ref group, world, rank, address, .. } = hello;
        if !is_name(group) {
            return Err(Refusal::Name { what: "group".to_owned() });
        }
        let limit = self.config.max_world();
        if world == 0 || world > limit {
            return Err(Refusal::World { world, limit });
        }
        let fan_in = self.config.fan_in;
        if world > fan_in.max_world() {
            return Err(Refusal::Depth { world, fan_in: fan_in.get() });
        }
        if rank >= world {
            return Err(Refusal::Rank { rank, world });
        }
        self.check_ranks()?;
        check_addresses(&hello.more_addresses)?;
        if let Some(topology) = &self.config.topology {
            let mut all = [address].into_iter().chain(hello.more_addresses.iter().copied());
            if let Some(address) = all.find(|&address| !topology.has_host(address)) {
                return Err(Refusal::UnknownHost { rank, address });
            }
        }
        if let Some(same) = &hello.same_machine
            && same.host.len().max(same.socket.len()) > MAX_HOST_BYTES
        {
            let detail =
                format!("a host or a socket has a name of more than {MAX_HOST_BYTES} bytes");
            return Err(Refusal::Protocol { detail });
        }
        if let FallbackOffer::Unable { reason } = &hello.fallback
            && reason.len() > MAX_TEXT_BYTES
        {
            let detail = format!("a reason has more than {MAX_TEXT_BYTES} bytes");
            return Err(Refusal::Protocol { detail });
        }
        if hello.avoid.len() > MAX_AVOIDED {
            let count = hello.avoid.len();
            let detail = format!("{count} switches to avoid are more than {MAX_AVOIDED}");
            return Err(Refusal::Protocol { detail });
        }
        // Who has another token has another group by the same name.
        let key = (owner.token, group.clone());
        if let Some((&id, known)) =
            self.names.get(&key).and_then(|id| self.groups.get_key_value(id))
        {
            let taken = known.members.get(&rank);
            let replaced = match taken {
                Some(member) => member.connection.is_none(),
                None => known.members.values().all(|member| member.connection.is_none()),
            };
            if known.ready && replaced {
                // Its process was killed and started again, most likely.
                let detail = "another process has joined in its place".to_owned();
                self.end_group(id, &End::Aborted(AbortReason::PeerLost { rank, detail }));
            } else {
                let group = group.clone();
                if known.world != world {
                    let (found, expected) = (world, known.world);
                    return Err(Refusal::WorldDiffers { group, rank, found, expected });
                }
                // One of them stands for all: each was held against those before it.
                let other = known.members.values().next().map(|member| member.options.plain);
                if other.is_some_and(|plain| plain != hello.options.plain) {
                    let which = |plain| if plain { "sends none" } else { "sends them" };
                    let (ours, theirs) = (which(hello.options.plain), which(!hello.options.plain));
                    let detail = format!(
                        "some hosts of group {group:?} would send descriptors and others none: rank {rank} {ours}, who came \
                         before it {theirs}"
                    );
                    return Err(Refusal::Protocol { detail });
                }
                return match taken {
                    Some(member) => {
                        let (connection, holder) = (member.connection, member.address);
                        // It may be this rank, of before its machine was reset. If nobody is there, this closes the connection.
                        self.ask_whether_there(connection);
                        Err(Refusal::RankTaken { group, rank, holder })
                    }
                    None if known.ready => Err(Refusal::GroupTaken { group }),
                    None => Ok(id),
                };
            }
        }
        let limit = self.config.max_groups;
        if self.groups.len() >= limit {
            return Err(Refusal::Limit { what: "groups".to_owned(), limit });
        }
        self.check_groups(owner)?;
        let id = GroupId(self.next_group);
        self.next_group += 1;
        let deadline = now + self.group_timeout(hello);
        let identity = self.draw_identity();
        self.groups.insert(id, Group::new(group, identity, owner, world, deadline));
        self.names.insert(key, id);
        Ok(id)
    }

    /// A host has made its end of the connection.
    pub(super) fn connect(
        &mut self,
        connection: ConnectionId,
        id: GroupId,
        rank: u32,
        path_mtu: Mtu,
        ends: Vec<HostQueuePair>,
    ) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let planned = group.trees.as_ref().is_some_and(|trees| trees.trees() == ends.len());
        let planned = planned && group.is_wired(rank);
        let member = group.members.get_mut(&rank);
        let member = member.filter(|member| planned && member.ends.is_empty());
        let Some(member) = member else {
            let detail = "a host cannot send Connect now".to_owned();
            self.misbehaved(connection, detail);
            return;
        };
        member.ends = ends;
        group.connected += 1;
        group.unconnected.remove(rank);
        group.path_mtu = group.path_mtu.min(path_mtu);
        if group.connected as usize == group.wired_count() {
            self.begin(id);
        }
    }

    pub(super) fn leave(&mut self, id: GroupId, rank: u32, collectives: u64) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(member) = group.members.get(&rank) else { return };
        if !group.ready {
            if let Some(connection) = member.connection {
                self.dismiss(connection, FromController::Closed);
            }
            self.host_lost(id, rank, "it left before the communicator was ready");
            return;
        }
        if member.left.is_some() {
            return;
        }
        // The one that has done the least says all: no later collective can end. In a large group all may leave at once.
        let is_news = group.members.first_left().is_none_or(|(first, _)| collectives < first);
        group.members.leave(rank, collectives);
        let identity = group.identity;
        free_name(&mut self.names, id, group);
        let mut told: Vec<ConnectionId> = Vec::new();
        if is_news {
            let others = group.members.values().filter(|member| member.left.is_none());
            told.extend(others.filter_map(|member| member.connection));
        }
        if group.members.all_have_left() && group.claimed_by().is_none() {
            self.close_group(id);
        }
        self.record_changed(identity);
        for connection in told {
            self.send(connection, FromController::Left { rank, collectives });
        }
    }

    /// All ranks have left.
    pub(super) fn close_group(&mut self, id: GroupId) {
        let Some(group) = self.groups.remove(&id) else { return };
        self.report_over(&group);
        self.remember(group.identity, None);
        self.end_nodes(&group, |communicator| {
            Some(FromController::DestroyCommunicator { communicator })
        });
        self.forget_hosts_switches(&group);
        for connection in group.members.values().filter_map(|member| member.connection) {
            self.dismiss(connection, FromController::Closed);
        }
        self.forget_switches();
    }

    /// Some ranks of a group that is not full have waited as long as they wanted. The others go on.
    pub(super) fn give_up(&mut self, now: Instant, id: GroupId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let reason = group.incomplete();
        let due = group.patience.due(now);
        let members: Vec<_> = due.iter().filter_map(|&rank| group.departed(rank, true)).collect();
        for connection in members.iter().filter_map(|member| member.connection) {
            self.dismiss(connection, FromController::Refused { reason: reason.clone() });
        }
        self.forget_empty(id);
    }

    fn forget_empty(&mut self, id: GroupId) {
        if let Some(group) = self.groups.get(&id).filter(|group| group.members.is_empty()) {
            free_name(&mut self.names, id, group);
            self.groups.remove(&id);
        }
    }

    pub(super) fn host_lost(&mut self, id: GroupId, rank: u32, detail: &str) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if !group.ready && !group.is_full() {
            // Whoever was that rank, or its successor, may still come.
            group.departed(rank, false);
            return self.forget_empty(id);
        }
        if group.members.get(&rank).is_some_and(|member| member.left.is_none()) {
            let detail = detail.to_owned();
            self.end_group(id, &End::Aborted(AbortReason::PeerLost { rank, detail }));
        }
    }
}
