//! The trees of one communicator, with one numbering of their nodes.

use std::collections::BTreeMap;

use super::{Child, SwitchId, Tree, TreeNode, ranks};
use crate::ranks::Ranks;
use crate::stripe::MAX_TREES;

/// One tree for each NIC of the hosts: 1 to [`MAX_TREES`], with the same ranks. The nodes of the first come first.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Forest {
    nodes: Vec<TreeNode>,
    /// Of each node.
    trees: Vec<u8>,
    below: Vec<Ranks>,
    /// Of each tree, the node above each rank.
    leaves: Vec<Vec<usize>>,
    /// Where hosts have several ranks: those of each, by the lowest.
    hosts: BTreeMap<u32, Ranks>,
}

impl Forest {
    /// These trees, at most [`MAX_TREES`].
    pub(crate) fn new(trees: Vec<Tree>) -> Self {
        let all: usize = trees.iter().map(|tree| tree.nodes.len()).sum();
        let (nodes, of, below) =
            (Vec::with_capacity(all), Vec::with_capacity(all), Vec::with_capacity(all));
        let (leaves, hosts) = (Vec::with_capacity(trees.len()), BTreeMap::new());
        let mut forest = Self { nodes, trees: of, below, leaves, hosts };
        for (number, tree) in (0..).zip(trees.into_iter().take(MAX_TREES)) {
            let first = forest.nodes.len();
            let shifted = |child: &Child| match *child {
                Child::Host { rank } => Child::Host { rank },
                Child::Switch { node } => Child::Switch { node: node + first },
            };
            forest.trees.resize(first + tree.nodes.len(), number);
            forest.nodes.extend(tree.nodes.iter().map(|node| TreeNode {
                switch: node.switch,
                parent: node.parent.map(|parent| parent + first),
                children: node.children.iter().map(shifted).collect(),
            }));
            forest.below.extend(tree.below);
            forest.leaves.push(tree.leaves.into_iter().map(|leaf| leaf + first).collect());
        }
        forest
    }

    /// The same, planned for hosts that have these ranks, by the lowest of each: what was rank `n` is the `n`th of them.
    pub(crate) fn with_hosts(mut self, hosts: &BTreeMap<u32, Ranks>) -> Self {
        let named: Vec<(u32, &Ranks)> = hosts.iter().map(|(&rank, ranks)| (rank, ranks)).collect();
        let host = |index: u32| named.get(index as usize).copied();
        for child in self.nodes.iter_mut().flat_map(|node| &mut node.children) {
            if let Child::Host { rank } = child
                && let Some((lowest, _)) = host(*rank)
            {
                *rank = lowest;
            }
        }
        for below in &mut self.below {
            let indices = below.ranges().iter().cloned().flatten();
            let ranks = indices.filter_map(host).flat_map(|(_, ranks)| ranks.ranges().to_vec());
            *below = ranks.collect();
        }
        let world = named.iter().map(|(_, ranks)| ranks.len()).sum::<u64>() as usize;
        for leaves in &mut self.leaves {
            let mut all = vec![0; world];
            for (&leaf, (_, ranks)) in leaves.iter().zip(&named) {
                for rank in ranks.ranges().iter().cloned().flatten() {
                    if let Some(of) = all.get_mut(rank as usize) {
                        *of = leaf;
                    }
                }
            }
            *leaves = all;
        }
        self.hosts.clone_from(hosts);
        self
    }

    /// The nodes of all trees.
    pub(crate) fn nodes(&self) -> &[TreeNode] {
        &self.nodes
    }

    /// How many trees there are.
    pub(crate) fn trees(&self) -> usize {
        self.leaves.len()
    }

    /// Which tree a node is of.
    pub(crate) fn tree_of(&self, node: usize) -> usize {
        self.trees.get(node).copied().unwrap_or_default().into()
    }

    /// The ranks below a child.
    pub(crate) fn ranks(&self, child: Child) -> Ranks {
        if let Child::Host { rank } = child
            && let Some(ranks) = self.hosts.get(&rank)
        {
            return ranks.clone();
        }
        ranks(child, &self.below)
    }

    /// The lowest of them, which names the edge.
    pub(crate) fn lowest_rank(&self, child: Child) -> u32 {
        match child {
            Child::Host { rank } => rank,
            Child::Switch { node } => self.below[node].first().unwrap_or_default(),
        }
    }

    /// The node that a rank, or the one that is connected for its host, is connected to in a tree.
    pub(crate) fn leaf_of(&self, tree: usize, rank: u32) -> Option<&TreeNode> {
        let &leaf = self.leaves.get(tree)?.get(rank as usize)?;
        self.nodes.get(leaf)
    }

    /// Whether a switch is part of it.
    pub(crate) fn contains(&self, switch: SwitchId) -> bool {
        self.nodes.iter().any(|node| node.switch == switch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_of_later_trees_are_numbered_after_those_before() {
        let node = |switch, parent, children: &[Child]| TreeNode {
            switch: SwitchId(switch),
            parent,
            children: children.to_vec(),
        };
        let host = |rank| Child::Host { rank };
        let below = Child::Switch { node: 1 };
        let deep = vec![node(1, None, &[host(0), below]), node(2, Some(0), &[host(1)])];
        let deep = Tree::new(deep).unwrap();
        let flat = Tree::new(vec![node(3, None, &[host(0), host(1)])]).unwrap();
        let forest = Forest::new(vec![flat, deep]);
        assert_eq!((forest.trees(), forest.nodes().len()), (2, 3));
        assert_eq!((0..3).map(|node| forest.tree_of(node)).collect::<Vec<_>>(), [0, 1, 1]);
        assert_eq!(forest.nodes()[1].children, [host(0), Child::Switch { node: 2 }]);
        assert_eq!(forest.nodes()[2].parent, Some(1));
        assert_eq!(forest.lowest_rank(Child::Switch { node: 2 }), 1);
        assert_eq!(forest.ranks(Child::Switch { node: 2 }), Ranks::one(1));
        let leaf = |tree, rank| forest.leaf_of(tree, rank).map(|node| node.switch.0);
        assert_eq!(
            [leaf(0, 0), leaf(0, 1), leaf(1, 0), leaf(1, 1)].map(Option::unwrap),
            [3, 3, 1, 2]
        );
        assert_eq!((leaf(2, 0), leaf(1, 2)), (None, None));
        assert!(forest.contains(SwitchId(2)) && !forest.contains(SwitchId(4)));
    }

    #[test]
    fn hosts_have_the_ranks_that_they_have() {
        let node = |switch, parent, children: &[Child]| TreeNode {
            switch: SwitchId(switch),
            parent,
            children: children.to_vec(),
        };
        let (host, below) = (|rank| Child::Host { rank }, Child::Switch { node: 1 });
        let tree = vec![node(1, None, &[below, host(1)]), node(2, Some(0), &[host(0), host(2)])];
        let of = |ranks: &[u32]| ranks.iter().copied().collect::<Ranks>();
        let hosts = [(0, of(&[0, 4])), (1, of(&[1, 3, 5])), (2, of(&[2]))].into();
        let forest = Forest::new(vec![Tree::new(tree).unwrap()]).with_hosts(&hosts);
        assert_eq!(forest.nodes()[1].children, [host(0), host(2)]);
        assert_eq!((forest.ranks(host(1)), forest.lowest_rank(host(1))), (of(&[1, 3, 5]), 1));
        assert_eq!((forest.ranks(below), forest.lowest_rank(below)), (of(&[0, 2, 4]), 0));
        let leaf = |rank| forest.leaf_of(0, rank).map(|node| node.switch.0);
        let leaves = [Some(2), Some(1), Some(2), Some(1), Some(2), Some(1), None];
        assert_eq!([0, 1, 2, 3, 4, 5, 6].map(leaf), leaves);
    }
}
