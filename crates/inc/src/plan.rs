//! Which switches serve a communicator, and who hangs where.
//!
//! A plan is a tree of switches with the hosts as leaves. Each node of it is a communicator on a
//! switch; several nodes can be on one switch. [`Tree::plan`] makes a balanced tree,
//! [`Tree::new`] checks one that somebody wrote down.

mod balanced;
mod forest;

use thiserror::Error;

pub(crate) use balanced::shares;
pub use balanced::{Candidate, PlanError, PlanOptions};
pub(crate) use forest::Forest;

use crate::ranks::Ranks;
use crate::slots::MAX_CHILDREN;
use crate::spec::MAX_WORLD;

/// The most levels of switches between a host and the root, both ends' switches included.
pub const MAX_DEPTH: u32 = 6;

/// A switch, by the number that the controller gave it.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SwitchId(pub u64);

/// What hangs below a node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Child {
    /// A host.
    Host {
        /// Its rank.
        rank: u32,
    },
    /// Another node of the tree.
    Switch {
        /// Its index in [`Tree::nodes`].
        node: usize,
    },
}

/// A place in the tree, and the switch that takes it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TreeNode {
    /// Which switch.
    pub switch: SwitchId,
    /// Index of the node above; `None` at the root.
    pub parent: Option<usize>,
    /// What is below, 1 to 64.
    pub children: Vec<Child>,
}

/// A tree of switches. The root is the first node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Tree {
    nodes: Vec<TreeNode>,
    /// The ranks below each node.
    below: Vec<Ranks>,
    /// The node above each rank.
    leaves: Vec<usize>,
    depth: u32,
}

/// How many children a node has at most: 1 to 64.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FanIn(u32);

impl FanIn {
    /// One child, so that there is one rank.
    pub const MIN: Self = Self(1);

    /// What a switch can do.
    pub const MAX: Self = Self(MAX_CHILDREN as u32);

    /// `None` when it is out of range.
    pub fn new(children: u32) -> Option<Self> {
        (Self::MIN.0..=Self::MAX.0).contains(&children).then_some(Self(children))
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// How many ranks a tree can have.
    pub fn max_world(self) -> u32 {
        self.0.saturating_pow(MAX_DEPTH).min(MAX_WORLD)
    }
}

/// Why nodes are no tree. Nodes are named by their indices.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum TreeError {
    /// The first node is not the root, or another one is too.
    #[error("node {0}: the first node is the root and has no parent, all others have one")]
    Root(usize),
    /// A node has too many children, or none.
    #[error("node {node} has {children} children, not 1 to {MAX_CHILDREN}")]
    FanIn {
        /// Which.
        node: usize,
        /// How many.
        children: usize,
    },
    /// Parent and child do not agree, or there is no such node, or it is a child twice.
    #[error("node {node} is not once the child of its parent")]
    Parent {
        /// The child.
        node: usize,
    },
    /// The nodes above a node are a circle.
    #[error("node {0} is not below the root")]
    Unreachable(usize),
    /// Too many levels.
    #[error("a tree has 1 to {MAX_DEPTH} levels of switches, and node {0} is below that")]
    Depth(usize),
    /// There are no ranks, or too many.
    #[error("a tree has 1 to {MAX_WORLD} ranks, not {0}")]
    World(usize),
    /// A rank occurs twice.
    #[error("rank {0} occurs twice")]
    DuplicateRank(u32),
    /// Ranks count from 0 and leave none out.
    #[error("rank {rank} of {world}: ranks count from 0 and leave none out")]
    Rank {
        /// Which.
        rank: u32,
        /// How many there are.
        world: usize,
    },
}

impl Tree {
    /// The tree of these nodes, of which the first is the root.
    pub fn new(nodes: Vec<TreeNode>) -> Result<Self, TreeError> {
        let order = order(&nodes)?;
        let hosts = |node: &TreeNode| {
            node.children.iter().filter(|child| matches!(child, Child::Host { .. })).count()
        };
        let world: usize = nodes.iter().map(hosts).sum();
        if world == 0 || world > MAX_WORLD as usize {
            return Err(TreeError::World(world));
        }
        let mut leaves = vec![None; world];
        for (index, node) in nodes.iter().enumerate() {
            for child in &node.children {
                let &Child::Host { rank } = child else { continue };
                let leaf = leaves.get_mut(rank as usize).ok_or(TreeError::Rank { rank, world })?;
                if leaf.replace(index).is_some() {
                    return Err(TreeError::DuplicateRank(rank));
                }
            }
        }
        // Each rank is in range and none occurs twice, so none is left out.
        let leaves = leaves.into_iter().flatten().collect();
        let mut below = vec![Ranks::default(); nodes.len()];
        for &(index, _) in order.iter().rev() {
            let ranges = nodes[index].children.iter().flat_map(|&child| {
                let ranks = ranks(child, &below);
                ranks.ranges().to_vec()
            });
            below[index] = ranges.collect();
        }
        let depth = order.iter().map(|&(_, level)| level).max().unwrap_or_default();
        Ok(Self { nodes, below, leaves, depth })
    }

    /// The nodes.
    pub fn nodes(&self) -> &[TreeNode] {
        &self.nodes
    }

    /// How many ranks there are.
    pub fn world(&self) -> u32 {
        self.leaves.len() as u32
    }

    /// How many levels of switches there are.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// The ranks below a child.
    pub fn ranks(&self, child: Child) -> Ranks {
        ranks(child, &self.below)
    }

    /// The lowest of them, which names the edge.
    pub fn lowest_rank(&self, child: Child) -> u32 {
        match child {
            Child::Host { rank } => rank,
            Child::Switch { node } => self.below[node].first().unwrap_or_default(),
        }
    }

    /// The node that a rank is connected to.
    pub fn leaf_of(&self, rank: u32) -> Option<usize> {
        self.leaves.get(rank as usize).copied()
    }

    /// Whether a switch is part of it.
    pub fn contains(&self, switch: SwitchId) -> bool {
        self.nodes.iter().any(|node| node.switch == switch)
    }
}

fn ranks(child: Child, below: &[Ranks]) -> Ranks {
    match child {
        Child::Host { rank } => Ranks::one(rank),
        Child::Switch { node } => below[node].clone(),
    }
}

/// The nodes from the root down, each with its level, from 1.
fn order(nodes: &[TreeNode]) -> Result<Vec<(usize, u32)>, TreeError> {
    let mut is_child = vec![false; nodes.len()];
    for (index, node) in nodes.iter().enumerate() {
        if node.parent.is_none() != (index == 0) {
            return Err(TreeError::Root(index));
        }
        let children = node.children.len();
        if children == 0 || children > MAX_CHILDREN {
            return Err(TreeError::FanIn { node: index, children });
        }
        for child in &node.children {
            let &Child::Switch { node } = child else { continue };
            let agreed = nodes.get(node).is_some_and(|child| child.parent == Some(index));
            if !agreed || core::mem::replace(&mut is_child[node], true) {
                return Err(TreeError::Parent { node });
            }
        }
    }
    if let Some(node) = (1..nodes.len()).find(|&node| !is_child[node]) {
        return Err(TreeError::Parent { node });
    }
    let mut order = Vec::with_capacity(nodes.len());
    order.extend(nodes.first().map(|_| (0, 1)));
    let mut next = 0;
    while let Some(&(index, level)) = order.get(next) {
        next += 1;
        if level > MAX_DEPTH {
            return Err(TreeError::Depth(index));
        }
        order.extend(nodes[index].children.iter().filter_map(|child| match *child {
            Child::Host { .. } => None,
            Child::Switch { node } => Some((node, level + 1)),
        }));
    }
    // A node is a child once at most, so nothing was visited twice: what is missing are circles.
    let mut reached = vec![false; nodes.len()];
    order.iter().for_each(|&(index, _)| reached[index] = true);
    match reached.iter().position(|reached| !reached) {
        Some(node) => Err(TreeError::Unreachable(node)),
        None => Ok(order),
    }
}

#[cfg(test)]
mod tests;
