//! Groups whose hosts take the place of switches, because there is none for them.
//!
//! Each host of such a group is known as a switch that serves this group only ([`super::Switch::host`]): it is asked for
//! nodes, and answers, over the connection that it has as a host. So all else is as with switches. There is a tree for
//! each host, up to [`MAX_TREES`], each with its root on another one: long vectors are divided among them, and what a
//! link carries is what it carries in a ring.

use core::net::IpAddr;
use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use millstream_roce::Instant;

use super::group::{End, Group};
use super::members::Member;
use super::{ConnectionId, Controller, GroupId, Role, Switch};
use crate::plan::{Candidate, Forest, PlanOptions, SwitchId, Tree};
use crate::protocol::{
    AbortReason, Failover, FallbackOffer, LostSwitch, MeetingPoint, Refusal, SwitchLimits,
    ToController, shortened,
};
use crate::stripe::MAX_TREES;

/// That of a switch of a host's process. The group ends with it, so there is no other one after it.
pub(super) const HOSTS_INCARNATION: u64 = 0;

/// What is known of a group whose hosts take the place of switches.
#[derive(Debug)]
pub(super) struct Fallback {
    /// Why no switch serves it.
    pub(super) reason: String,
    /// How many addresses of each host its trees use, one after the other: 1 at least.
    pub(super) addresses: u32,
    /// The hosts as switches, by their ranks.
    pub(super) switches: Vec<SwitchId>,
}

/// Whether only switches say this, and hosts in their place.
const fn is_of_switch(message: &ToController) -> bool {
    matches!(
        message,
        ToController::CommunicatorCreated { .. }
            | ToController::ParentConnected { .. }
            | ToController::CommunicatorFailed { .. }
            | ToController::CommunicatorDestroyed { .. }
            | ToController::Report { .. }
    )
}

impl Group {
    /// Whether all of its hosts would take the place of switches, and do not yet. Hosts without descriptors have one
    /// tree, and a group that is under way keeps its own.
    pub(super) fn may_fall_back(&self) -> bool {
        let able =
            |member: &Member| member.fallback == FallbackOffer::Able && !member.options.plain;
        !self.ready && self.fallback.is_none() && self.members.values().all(able)
    }

    /// What becomes of it when one of its switches is lost. Hosts without descriptors cannot go on.
    pub(super) fn failover(&self) -> Failover {
        let wanted = |member: &Member| !member.fallback.is_off() && !member.options.plain;
        match () {
            () if self.fallback.is_some() || !self.members.values().all(wanted) => Failover::Off,
            () if self.options().reproducible => Failover::Reproducible,
            () => Failover::On,
        }
    }

    /// Where its ranks meet when a switch is lost and no controller is there: if they go on then, and each can take the
    /// place of a switch.
    pub(super) fn meeting(&self) -> Option<Box<MeetingPoint>> {
        let able = |member: &Member| member.fallback == FallbackOffer::Able;
        let meets = self.failover() == Failover::On && self.members.values().all(able);
        self.meeting.clone().filter(|_| meets)
    }

    /// The switches that its ranks have lost before.
    pub(super) fn avoided(&self) -> BTreeSet<LostSwitch> {
        self.members.values().flat_map(|member| &member.avoid).copied().collect()
    }

    /// There is no switch now: its hosts wait so long for one, or half of the time that is left if that is less.
    pub(super) fn fall_back_after(&mut self, now: Instant, patience: Duration) {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(now) / 2);
        let patience = left.map_or(patience, |left| left.min(patience));
        self.fall_back_at.get_or_insert(now + patience);
    }

    /// A refusal for want of a switch, with what keeps the hosts from taking its place if they would.
    pub(super) fn with_obstacle(&self, refusal: Refusal) -> Refusal {
        let Refusal::NoSwitch { group, hosts: None } = refusal else { return refusal };
        let unwanted = self.members.values().any(|member| member.fallback.is_off());
        let unable = |(rank, member): (&u32, &Member)| match &member.fallback {
            FallbackOffer::Unable { reason } => Some(shortened(format!("rank {rank}: {reason}"))),
            FallbackOffer::Off | FallbackOffer::Able => None,
        };
        let hosts = if unwanted { None } else { self.members.iter().find_map(unable) };
        Refusal::NoSwitch { group, hosts }
    }

    /// Where a tree reaches a member.
    pub(super) fn address_of(&self, member: &Member, tree: usize) -> Option<IpAddr> {
        let addresses = self.fallback.as_ref().map(|fallback| fallback.addresses.max(1) as usize);
        member.address_of(addresses.map_or(tree, |addresses| tree % addresses))
    }
}

impl Switch {
    /// Whether it is one of those that were lost.
    pub(super) fn is_one_of(&self, lost: &BTreeSet<LostSwitch>) -> bool {
        lost.iter().any(|lost| lost.is(self.address, self.incarnation))
    }
}

impl Controller {
    /// The switches that are no hosts.
    pub(super) fn real_switches(&self) -> impl Iterator<Item = &Switch> {
        self.switches.values().filter(|switch| switch.host.is_none())
    }

    /// As what a connection says this: a host in the place of a switch is one.
    pub(super) fn acts_as(&self, role: Role, message: &ToController) -> Role {
        let Role::Host { group, rank } = role else { return role };
        let switch = is_of_switch(message).then(|| self.hosts_switch(group, rank)).flatten();
        switch.map_or(role, Role::Switch)
    }

    /// Whether a host says as a switch what is of a communicator that an earlier controller has made. That is no part of
    /// what this one knows, and the ranks hear it from each other.
    pub(super) fn is_of_before(&self, id: GroupId, message: &ToController) -> bool {
        is_of_switch(message) && self.groups.get(&id).is_some_and(|group| group.revived.is_some())
    }

    fn hosts_switch(&self, id: GroupId, rank: u32) -> Option<SwitchId> {
        let fallback = self.groups.get(&id)?.fallback.as_ref()?;
        let switch = fallback.switches.get(rank as usize)?;
        self.switches.contains_key(switch).then_some(*switch)
    }

    /// A host is connected, or away.
    pub(super) fn connect_hosts_switch(
        &mut self,
        id: GroupId,
        rank: u32,
        connection: Option<ConnectionId>,
    ) {
        let switch = self.hosts_switch(id, rank).and_then(|id| self.switches.get_mut(&id));
        if let Some(switch) = switch {
            switch.connection = connection;
        }
    }

    /// The group is over, and its hosts are no switches any more.
    pub(super) fn forget_hosts_switches(&mut self, group: &Group) {
        for id in group.fallback.iter().flat_map(|fallback| &fallback.switches) {
            self.switches.remove(id);
        }
    }

    /// Groups have waited for a switch for long enough.
    pub(super) fn fall_back_in_time(&mut self, now: Instant) {
        for id in self.groups.due(now, |group| group.fall_back_at) {
            // There may be room that it has not had its turn for.
            self.plan(id);
            let waits = |group: &&mut Group| group.waits_for_trees();
            let Some(group) = self.groups.get_mut(&id).filter(waits) else { continue };
            group.fall_back_at = None;
            let Some(group) = self.groups.get(&id) else { continue };
            let avoided = group.avoided();
            // Only a full group that waits for a switch has such a time, and from then on it gets trees or ends.
            let reason = match &group.missing {
                // With a topology, too, a switch that the group avoids counts as one that is not there.
                _ if self.real_switches().any(|switch| switch.is_one_of(&avoided)) => {
                    "its ranks have lost the switches that have registered".to_owned()
                }
                Some(missing) => {
                    format!("switch {missing} of the controller's topology has not registered")
                }
                None => "no switch has registered at the controller".to_owned(),
            };
            self.fall_back(id, &reason);
        }
    }

    /// The hosts of a full group take the place of switches, for this reason.
    pub(super) fn fall_back(&mut self, id: GroupId, reason: &str) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let addresses = group.wired().map(|(_, member)| 1 + member.more_addresses.len());
        let addresses = addresses.min().unwrap_or(1) as u32;
        // Roots are on hosts in this order. Ranks of one address share its link, so those of others come first.
        let mut of_address: HashMap<IpAddr, u32> = HashMap::new();
        let mut order: Vec<(u32, u32)> = Vec::with_capacity(group.members.len());
        for (rank, member) in group.wired() {
            let before = of_address.entry(member.address).or_default();
            order.push((*before, rank));
            *before += 1;
        }
        order.sort_unstable();
        let mut switches = vec![SwitchId(u64::MAX); group.members.len()];
        for (_, rank) in order {
            let Some(member) = group.members.get(&rank) else { continue };
            let switch = SwitchId(self.next_switch);
            self.next_switch += 1;
            switches[rank as usize] = switch;
            let host = Switch {
                connection: member.connection,
                incarnation: HOSTS_INCARNATION,
                unnamed: 0,
                unjudged: false,
                name: format!("rank {rank}"),
                address: member.address,
                limits: SwitchLimits::NONE,
                host: Some((id, rank)),
                place: None,
                communicators: BTreeMap::new(),
                inventory_until: None,
            };
            self.switches.insert(switch, host);
        }
        group.fallback = Some(Fallback { reason: shortened(reason), addresses, switches });
        (group.fall_back_at, group.missing) = (None, None);
        group.refused.clear();
        self.plan(id);
    }

    /// Trees with their nodes on the hosts of a group.
    pub(super) fn choose_hosts(
        &self,
        group: &Group,
        fallback: &Fallback,
    ) -> Result<Forest, Refusal> {
        let willing = |id: &&SwitchId| {
            let serves = self.switches.get(id).is_some_and(Switch::serves);
            serves && !group.refused.contains(id)
        };
        let willing: Vec<SwitchId> = fallback.switches.iter().filter(willing).copied().collect();
        let mut nodes: HashMap<SwitchId, usize> = HashMap::new();
        let mut trees = Vec::new();
        let wired = group.wired_count();
        for number in 0..MAX_TREES.min(wired) {
            let members = group.wired();
            let hosts: Vec<IpAddr> =
                members.filter_map(|(_, member)| group.address_of(member, number)).collect();
            let candidate = |&switch: &SwitchId| {
                let communicators = nodes.get(&switch).copied().unwrap_or_default();
                Candidate { switch, communicators, free: usize::MAX }
            };
            let candidates: Vec<Candidate> = willing.iter().map(candidate).collect();
            let options = PlanOptions { fan_in: self.config.fan_in, hosts: &hosts };
            let tree = Tree::plan(wired as u32, &candidates, &options).map_err(|error| {
                let hosts = Some(format!("none of them serves: {error}"));
                Refusal::NoSwitch { group: group.name.clone(), hosts }
            })?;
            for node in tree.nodes() {
                *nodes.entry(node.switch).or_default() += 1;
            }
            trees.push(tree);
        }
        Ok(group.forest(trees))
    }

    /// Where a host in the place of a switch is lost, its rank is.
    pub(super) fn blame_host(&self, group: &Group, end: &End) -> Option<End> {
        let fallback = group.fallback.as_ref()?;
        let End::Aborted(AbortReason::SwitchLost { name, detail, .. }) = end else { return None };
        let rank = |id: &SwitchId| {
            let switch = self.switches.get(id).filter(|switch| switch.name == *name)?;
            switch.host.map(|(_, rank)| rank)
        };
        let rank = fallback.switches.iter().find_map(rank)?;
        Some(End::Aborted(AbortReason::PeerLost { rank, detail: detail.clone() }))
    }
}
