//! Balanced trees of as few levels as possible.

use core::cmp::Reverse;
use core::net::IpAddr;
use core::ops::Range;
use std::collections::{BTreeMap, BinaryHeap};

use thiserror::Error;

use super::{Child, FanIn, MAX_DEPTH, SwitchId, Tree, TreeError, TreeNode};
use crate::spec::MAX_WORLD;

/// A switch that could serve.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Candidate {
    /// Which.
    pub switch: SwitchId,
    /// How many communicators it serves: nodes of trees.
    pub communicators: usize,
    /// How many more it can.
    pub free: usize,
}

/// What a tree should be like.
#[derive(Clone, Copy, Debug)]
pub struct PlanOptions<'a> {
    /// How many children a node may have.
    pub fan_in: FanIn,
    /// The address of each rank, to place ranks of one address beside each other. Ranks without one
    /// are placed as if they had one of their own.
    pub hosts: &'a [IpAddr],
}

impl Default for PlanOptions<'_> {
    fn default() -> Self {
        Self { fan_in: FanIn::MAX, hosts: &[] }
    }
}

/// Why there is no plan.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum PlanError {
    /// There is no switch, or none has room.
    #[error("no switch is registered that has room")]
    NoSwitch,
    /// There are no ranks, or too many.
    #[error("a tree has 1 to {MAX_WORLD} ranks, not {0}")]
    World(u32),
    /// The tree would be too deep.
    #[error(
        "{world} ranks need more than {MAX_DEPTH} levels of switches that have {fan_in} children \
         each"
    )]
    Depth {
        /// How many ranks.
        world: u32,
        /// How many children a node may have.
        fan_in: u32,
    },
    /// What was planned is no tree: a defect of the planner.
    #[error(transparent)]
    Tree(#[from] TreeError),
}

impl Tree {
    /// A tree for ranks 0 to `world` - 1 of as few levels as possible, whose nodes of one level have
    /// about as many children each. Nodes are taken by the switches with the fewest communicators
    /// that have room, of equals by the one that has been there longest.
    pub fn plan(
        world: u32,
        candidates: &[Candidate],
        options: &PlanOptions<'_>,
    ) -> Result<Self, PlanError> {
        if world == 0 || world > MAX_WORLD {
            return Err(PlanError::World(world));
        }
        let fan_in = options.fan_in;
        if world > fan_in.max_world() {
            return Err(PlanError::Depth { world, fan_in: fan_in.get() });
        }
        let fan_in = fan_in.get() as usize;
        // From the leaves to the root: the children of each node, nodes by their index in their level.
        let mut levels = vec![fill_leaves(groups(world, options.hosts), world as usize, fan_in)];
        while let Some(level) = levels.last().map(Vec::len)
            && level > 1
        {
            let child = |node| Child::Switch { node };
            let above = shares(level, level.div_ceil(fan_in));
            levels.push(above.map(|share| share.map(child).collect()).collect());
        }
        let mut switches: BinaryHeap<_> = candidates
            .iter()
            .filter(|candidate| candidate.free > 0)
            .map(|candidate| Reverse((candidate.communicators, candidate.switch, candidate.free)))
            .collect();
        let mut nodes: Vec<TreeNode> = Vec::new();
        let mut parents = vec![None];
        for level in levels.into_iter().rev() {
            let below = nodes.len() + level.len();
            let mut parents_below = Vec::new();
            for (mut children, parent) in level.into_iter().zip(parents) {
                let Reverse((communicators, switch, free)) =
                    switches.pop().ok_or(PlanError::NoSwitch)?;
                if free > 1 {
                    switches.push(Reverse((communicators + 1, switch, free - 1)));
                }
                for child in &mut children {
                    if let Child::Switch { node } = child {
                        *node += below;
                        parents_below.push(Some(nodes.len()));
                    }
                }
                nodes.push(TreeNode { switch, parent, children });
            }
            parents = parents_below;
        }
        Ok(Self::new(nodes)?)
    }
}

/// `count` things in `parts` ranges, none of which is longer than another by more than one.
pub(crate) fn shares(count: usize, parts: usize) -> impl Iterator<Item = Range<usize>> {
    (0..parts).map(move |part| count * part / parts..count * (part + 1) / parts)
}

/// The ranks of each address: the largest groups first, of equals that with the lowest rank.
fn groups(world: u32, hosts: &[IpAddr]) -> Vec<Vec<u32>> {
    let mut by_address: BTreeMap<IpAddr, Vec<u32>> = BTreeMap::new();
    let mut groups = Vec::new();
    for rank in 0..world {
        match hosts.get(rank as usize) {
            Some(&address) => by_address.entry(address).or_default().push(rank),
            None => groups.push(vec![rank]),
        }
    }
    groups.extend(by_address.into_values());
    groups.sort_unstable_by_key(|group| (Reverse(group.len()), group[0]));
    groups
}

/// The hosts of as few leaves as possible. Groups are kept together where they fit, which is looked
/// for where it leaves all leaves alike first.
fn fill_leaves(groups: Vec<Vec<u32>>, world: usize, fan_in: usize) -> Vec<Vec<Child>> {
    let leaves = world.div_ceil(fan_in);
    let fair: Vec<usize> = shares(world, leaves).map(|share| share.len()).collect();
    let mut filled: Vec<Vec<u32>> = vec![Vec::new(); leaves];
    // Leaves before these have no room for a group of this size, and never get it again.
    let (mut size, mut fair_from, mut from) = (usize::MAX, 0, 0);
    for group in groups {
        if group.len() < size {
            (size, fair_from, from) = (group.len(), 0, 0);
        }
        let fits = |leaf: &Vec<u32>, room: usize| leaf.len() + size <= room;
        while fair_from < leaves && !fits(&filled[fair_from], fair[fair_from]) {
            fair_from += 1;
        }
        while from < leaves && !fits(&filled[from], fan_in) {
            from += 1;
        }
        match [fair_from, from].into_iter().find(|&leaf| leaf < leaves) {
            Some(leaf) => filled[leaf].extend(group),
            None => split(&group, &mut filled, fan_in),
        }
    }
    let children = |mut ranks: Vec<u32>| {
        ranks.sort_unstable();
        ranks.into_iter().map(|rank| Child::Host { rank }).collect()
    };
    filled.into_iter().map(children).collect()
}

/// Puts a group that fits nowhere where most room is.
fn split(mut group: &[u32], filled: &mut [Vec<u32>], fan_in: usize) {
    while let Some(leaf) = filled.iter_mut().min_by_key(|leaf| leaf.len())
        && !group.is_empty()
        && leaf.len() < fan_in
    {
        let (here, rest) = group.split_at(group.len().min(fan_in - leaf.len()));
        leaf.extend(here);
        group = rest;
    }
}
