//! One group on its way to a communicator.

use std::collections::{BTreeMap, BTreeSet};

use millstream_roce::Instant;
use millstream_wire::Mtu;

use super::counted::Counted;
use super::fallback::Fallback;
use super::further_up::FurtherUp;
use super::members::{Member, Members};
use super::quotas::Owner;
use super::rank_set::RankSet;
use super::resume::Revived;
use super::timed::Timed;
use crate::plan::{Forest, SwitchId};
use crate::protocol::{
    AbortReason, Awaited, FromController, GroupIdentity, MeetingPoint, Refusal, SwitchEdge,
    SwitchUplink,
};
use crate::ranks::Ranks;
use crate::spec::{CommunicatorOptions, reproducible_segment_bytes};
use crate::topology::LinkIndex;

/// So many ranks that have given up are known.
const MAX_LAPSED: usize = 256;

/// How far a group is. One that does not exist has no state.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum GroupState {
    /// Some ranks have joined.
    CreatingGroup,
    /// All have; they wait for a switch, or are told about it.
    GroupReady,
    /// The ranks, then the switch, make their ends of the connections.
    CreatingCommunicator,
    /// The ranks have the plan.
    CommunicatorReady,
}

#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) identity: GroupIdentity,
    /// Whose it is: of who joined first.
    pub(super) owner: Owner,
    pub(super) world: u32,
    pub(super) members: Members,
    /// When a rank gives up, the first of them. Once all are there, the making of it fails then.
    pub(super) deadline: Option<Instant>,
    /// When each rank gives up.
    pub(super) patience: Timed<u32, Instant>,
    /// Ranks that have come and given up, some of them.
    pub(super) lapsed: BTreeSet<u32>,
    /// Ranks that are not there and are none of these.
    pub(super) never_came: RankSet,
    /// Those of each host, by the lowest, which is connected to switches for all of them. None where hosts have one rank.
    pub(super) hosts: BTreeMap<u32, Ranks>,
    /// Known once switches were found.
    pub(super) trees: Option<Forest>,
    /// The links of the topology that the trees use: one that several use is there several times.
    pub(super) links: Vec<LinkIndex>,
    /// Switches of the topology that it waits for.
    pub(super) missing: Option<String>,
    /// Switches that did not make a node of it.
    pub(super) refused: BTreeSet<SwitchId>,
    /// One for each of the trees', once all ranks have connected.
    pub(super) nodes: Vec<Node>,
    /// How many ranks have connected, of those that do.
    pub(super) connected: u32,
    /// The smallest of those that have.
    pub(super) path_mtu: Mtu,
    /// Those that have not, once it has trees.
    pub(super) unconnected: RankSet,
    pub(super) ready: bool,
    /// When its hosts take the place of switches, unless there are some before.
    pub(super) fall_back_at: Option<Instant>,
    /// They do.
    pub(super) fallback: Option<Fallback>,
    /// Where rank 0 takes the place of the controller.
    pub(super) meeting: Option<Box<MeetingPoint>>,
    /// It has no tree here: made by an earlier controller, or its ranks share memory.
    pub(super) revived: Option<Revived>,
    /// A rank has heard that a switch is lost which it is not connected to.
    pub(super) further_up: Option<FurtherUp>,
}

/// How far a node of the tree is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Step {
    /// It waits for those below.
    Waiting,
    /// Its switch was asked to make it.
    Creating,
    /// It is there, and the node above is not.
    Created,
    /// Its switch was asked to connect it to the node above.
    Connecting,
    /// It is connected to its children, and to the node above where there is one.
    Done,
    /// Its switch has ended it.
    Gone,
}

/// A node of the tree, as its switch has it.
#[derive(Debug)]
pub(super) struct Node {
    /// Its number: no other node of any tree has it.
    pub(super) communicator: u64,
    pub(super) step: Step,
    /// To its children, in their order in the tree.
    pub(super) edges: Vec<SwitchEdge>,
    pub(super) uplink: Option<SwitchUplink>,
    pub(super) counted: Counted,
}

impl Node {
    pub(super) fn new(communicator: u64) -> Self {
        let (step, edges, counted) = (Step::Waiting, Vec::new(), Counted::default());
        Self { communicator, step, edges, uplink: None, counted }
    }
}

/// Why a group ends.
#[derive(Debug)]
pub(super) enum End {
    /// It was never made.
    Refused(Refusal),
    /// It was, or nearly.
    Aborted(AbortReason),
}

impl Group {
    pub(super) fn new(
        name: &str,
        identity: GroupIdentity,
        owner: Owner,
        world: u32,
        deadline: Instant,
    ) -> Self {
        Self {
            name: name.to_owned(),
            identity,
            owner,
            world,
            members: Members::new(world),
            deadline: Some(deadline),
            patience: Timed::new(),
            lapsed: BTreeSet::new(),
            never_came: RankSet::all(world),
            hosts: BTreeMap::new(),
            trees: None,
            links: Vec::new(),
            missing: None,
            refused: BTreeSet::new(),
            nodes: Vec::new(),
            connected: 0,
            path_mtu: Mtu::B4096,
            unconnected: RankSet::default(),
            ready: false,
            fall_back_at: None,
            fallback: None,
            meeting: None,
            revived: None,
            further_up: None,
        }
    }

    pub(super) fn state(&self) -> GroupState {
        match () {
            () if self.ready => GroupState::CommunicatorReady,
            () if self.connected > 0 => GroupState::CreatingCommunicator,
            () if self.is_full() => GroupState::GroupReady,
            () => GroupState::CreatingGroup,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.members.len() == self.world as usize
    }

    /// Whether it is full, and has no trees yet.
    pub(super) fn waits_for_trees(&self) -> bool {
        self.is_full() && self.trees.is_none() && !self.ready
    }

    /// Whether a rank is connected to switches.
    pub(super) fn is_wired(&self, rank: u32) -> bool {
        self.hosts.is_empty() || self.hosts.contains_key(&rank)
    }

    /// The ranks that are connected to switches, in their order.
    pub(super) fn wired(&self) -> impl Iterator<Item = (u32, &Member)> {
        let all = self.members.iter().map(|(&rank, member)| (rank, member));
        all.filter(|&(rank, _)| self.is_wired(rank))
    }

    /// How many these are of all, once it is full.
    pub(super) fn wired_count(&self) -> usize {
        if self.hosts.is_empty() { self.world as usize } else { self.hosts.len() }
    }

    /// Whether it is on a switch, or about to be.
    pub(super) fn uses(&self, switch: SwitchId) -> bool {
        self.trees.as_ref().is_some_and(|trees| trees.contains(switch))
    }

    /// What any of its ranks asks for, once it is full.
    pub(super) const fn options(&self) -> CommunicatorOptions {
        self.members.options()
    }

    /// Bytes of a segment on these trees, where those of other groups have so many: nodes take no more memory than
    /// theirs.
    pub(super) fn segment_bytes(&self, trees: &Forest, of_others: u32) -> u32 {
        let children = trees.nodes().iter().map(|node| node.children.len()).max();
        let children = children.unwrap_or_default();
        match self.options().reproducible {
            true => reproducible_segment_bytes(of_others, children),
            false => of_others,
        }
    }

    /// Forgets its trees, whose nodes were ended: the ranks connect anew.
    pub(super) fn start_over(&mut self) {
        self.trees = None;
        self.links.clear();
        self.nodes.clear();
        self.connected = 0;
        self.path_mtu = Mtu::B4096;
        self.members.values_mut().for_each(|member| member.ends.clear());
    }

    /// The nodes of trees without one that its switch has ended: nobody there tells the others.
    pub(super) fn nodes_elsewhere(&self) -> BTreeSet<u64> {
        let Some(trees) = &self.trees else { return BTreeSet::new() };
        let gone = |(_, node): &(usize, &Node)| node.step == Step::Gone;
        let ended = self.nodes.iter().enumerate().filter(gone).map(|(at, _)| trees.tree_of(at));
        let ended: BTreeSet<usize> = ended.collect();
        if ended.is_empty() {
            return BTreeSet::new();
        }
        let elsewhere = |(at, node): (usize, &Node)| {
            (!ended.contains(&trees.tree_of(at))).then_some(node.communicator)
        };
        self.nodes.iter().enumerate().filter_map(elsewhere).collect()
    }

    /// A switch that has not done yet what it was asked for.
    pub(super) fn busy_switch(&self) -> Option<SwitchId> {
        let busy = |node: &Node| matches!(node.step, Step::Creating | Step::Connecting);
        Some(self.trees.as_ref()?.nodes()[self.nodes.iter().position(busy)?].switch)
    }

    /// A rank is there that gives up then.
    pub(super) fn arrived(&mut self, rank: u32, deadline: Instant) {
        self.lapsed.remove(&rank);
        self.never_came.remove(rank);
        self.patience.insert(rank, deadline);
        self.deadline = self.deadline.map(|earlier| earlier.min(deadline));
    }

    /// A rank of a group that is not full is gone; it was one that gave up.
    pub(super) fn departed(&mut self, rank: u32, gave_up: bool) -> Option<Member> {
        if gave_up && self.lapsed.len() < MAX_LAPSED {
            self.lapsed.insert(rank);
        } else if !self.lapsed.contains(&rank) {
            self.never_came.insert(rank);
        }
        self.patience.remove(&rank);
        self.deadline = self.patience.first();
        self.members.remove(&rank)
    }

    /// What a rank is told that gives up before the group is full: who has never come, unless all have.
    pub(super) fn incomplete(&self) -> Refusal {
        let all_came = self.never_came.is_empty();
        let missing = if all_came { self.members.absent() } else { &self.never_came };
        let missing = missing.list();
        Awaited::Ranks { missing }.refusal(self.name.clone(), self.world)
    }

    /// What it waits for. `switch` is the name of its busy switch.
    pub(super) fn awaited(&self, switch: Option<&str>) -> Awaited {
        if !self.is_full() {
            return Awaited::Ranks { missing: self.members.absent().list() };
        }
        if self.trees.is_none() {
            return match &self.missing {
                Some(switches) => Awaited::Switches { switches: switches.clone() },
                None => Awaited::Switch,
            };
        }
        if self.nodes.is_empty() {
            return Awaited::Connections { ranks: self.unconnected.list() };
        }
        Awaited::Communicator { switch: switch.unwrap_or_default().to_owned() }
    }

    /// What a member is told at the end.
    pub(super) fn farewell(&self, member: &Member, end: &End) -> FromController {
        match end {
            _ if member.left.is_some() => FromController::Closed,
            End::Aborted(reason) if self.ready => FromController::Abort { reason: reason.clone() },
            End::Aborted(reason) => {
                FromController::Refused { reason: Refusal::Aborted { reason: reason.clone() } }
            }
            End::Refused(reason) => FromController::Refused { reason: reason.clone() },
        }
    }

    /// What is known of all ranks is what a look at each gives.
    #[cfg(test)]
    pub(super) fn assert_counted(&self) {
        self.members.assert_counted(self.world);
        if self.ready {
            return;
        }
        let is_there = |rank: &u32| self.members.contains_key(rank);
        let is_known = |rank: &u32| is_there(rank) || self.lapsed.contains(rank);
        let never_came = (0..self.world).filter(|rank| !is_known(rank));
        assert_eq!(self.never_came, never_came.collect::<RankSet>());
        if self.trees.is_some() {
            let unconnected = self.wired().filter(|(_, member)| member.ends.is_empty());
            let unconnected: RankSet = unconnected.map(|(rank, _)| rank).collect();
            assert_eq!(self.unconnected, unconnected);
        }
    }
}
