//! Which switches serve a communicator, and who hangs where.
//!
//! A plan is a tree of switches with the hosts as leaves. Today it has one level: one switch and
//! all hosts below it. The types hold deeper ones.

use thiserror::Error;

use crate::slots::MAX_CHILDREN;

/// A switch, by the number that the controller gave it.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SwitchId(pub u64);

/// What hangs below a switch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Child {
    /// A host.
    Host {
        /// Its rank.
        rank: u32,
    },
    /// Another switch of the tree.
    Switch {
        /// Its index in [`Tree::nodes`].
        node: usize,
    },
}

/// A switch's place in the tree.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TreeNode {
    /// Which switch.
    pub switch: SwitchId,
    /// Index of the switch above; `None` at the root.
    pub parent: Option<usize>,
    /// What is below, hosts in the order of their ranks.
    pub children: Vec<Child>,
}

/// A tree of switches. The root is the first node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Tree {
    nodes: Vec<TreeNode>,
}

/// A switch that could serve.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Candidate {
    /// Which.
    pub switch: SwitchId,
    /// How many communicators it serves.
    pub communicators: usize,
}

/// Why there is no plan.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum PlanError {
    /// There is no switch.
    #[error("no switch is registered")]
    NoSwitch,
    /// A switch has no room for so many.
    #[error("a switch serves 1 to {MAX_CHILDREN} hosts, not {0}")]
    World(u32),
}

impl Tree {
    /// A tree for ranks 0 to `world` - 1: below the switch with the fewest communicators, of
    /// equals the one that has been there longest.
    pub fn plan(world: u32, candidates: &[Candidate]) -> Result<Self, PlanError> {
        if world == 0 || world as usize > MAX_CHILDREN {
            return Err(PlanError::World(world));
        }
        let least = candidates.iter().min_by_key(|one| (one.communicators, one.switch));
        let switch = least.ok_or(PlanError::NoSwitch)?.switch;
        let children = (0..world).map(|rank| Child::Host { rank }).collect();
        Ok(Self { nodes: vec![TreeNode { switch, parent: None, children }] })
    }

    /// The switches.
    pub fn nodes(&self) -> &[TreeNode] {
        &self.nodes
    }

    /// The switch that a rank is connected to.
    pub fn switch_of(&self, rank: u32) -> Option<SwitchId> {
        let holds = |node: &&TreeNode| node.children.contains(&Child::Host { rank });
        self.nodes.iter().find(holds).map(|node| node.switch)
    }

    /// Whether a switch is part of it.
    pub fn contains(&self, switch: SwitchId) -> bool {
        self.nodes.iter().any(|node| node.switch == switch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(switch: u64, communicators: usize) -> Candidate {
        Candidate { switch: SwitchId(switch), communicators }
    }

    #[test]
    fn the_switch_with_the_fewest_communicators_serves() {
        let candidates = [candidate(4, 2), candidate(7, 1), candidate(5, 1), candidate(1, 3)];
        let tree = Tree::plan(3, &candidates).unwrap();
        let [root] = tree.nodes() else { panic!("one level") };
        assert_eq!((root.switch, root.parent), (SwitchId(5), None));
        assert_eq!(root.children, [0, 1, 2].map(|rank| Child::Host { rank }));
        assert_eq!(tree.switch_of(2), Some(SwitchId(5)));
        assert_eq!(tree.switch_of(3), None);
        assert!(tree.contains(SwitchId(5)) && !tree.contains(SwitchId(7)));
    }

    #[test]
    fn impossible_plans_are_refused() {
        assert_eq!(Tree::plan(2, &[]), Err(PlanError::NoSwitch));
        assert_eq!(Tree::plan(0, &[candidate(1, 0)]), Err(PlanError::World(0)));
        assert_eq!(Tree::plan(65, &[candidate(1, 0)]), Err(PlanError::World(65)));
        assert!(Tree::plan(64, &[candidate(1, 0)]).is_ok());
    }
}
