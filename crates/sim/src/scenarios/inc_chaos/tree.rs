//! The trees of communicators.

use crate::Rng;

/// The most nodes between a rank and the top, both included.
const LEVELS: u32 = 6;

/// What is below a node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Child {
    Node(usize),
    Rank(u32),
}

/// A node of a communicator's tree.
#[derive(Clone, Debug)]
pub(super) struct TreeNode {
    /// Its switch.
    pub(super) switch: usize,
    /// The number of the node above, which comes before it.
    pub(super) parent: Option<usize>,
    /// The ranks whose hosts are connected to it; of a host with several, the lowest.
    pub(super) ranks: Vec<u32>,
}

/// A tree: the root is the first node.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    pub(super) nodes: Vec<TreeNode>,
}

impl Tree {
    /// One for so many ranks, on some of so many switches, several nodes on one at times.
    pub(super) fn draw(rng: &mut Rng, world: u32, switches: usize) -> Self {
        Self::of(rng, (0..world).collect(), switches)
    }

    /// As [`Tree::draw`], for these ranks.
    pub(super) fn of(rng: &mut Rng, mut ranks: Vec<u32>, switches: usize) -> Self {
        let count = match rng.below(4) {
            0 => 1,
            1 => rng.between(1, 3),
            _ => rng.between(1, 8),
        };
        let chain = rng.below(5) == 0;
        let mut nodes: Vec<TreeNode> = Vec::new();
        let mut levels = Vec::new();
        for number in 0..count as usize {
            let parent = number.checked_sub(1).map(|last| {
                let parent = if chain { last } else { rng.below(number as u64) as usize };
                if levels[parent] < LEVELS { parent } else { 0 }
            });
            levels.push(parent.map_or(1, |parent: usize| levels[parent] + 1));
            let switch = rng.below(switches as u64) as usize;
            nodes.push(TreeNode { switch, parent, ranks: Vec::new() });
        }
        let mut tree = Self { nodes };
        // Nodes without a child take the first ranks; those that get none are no nodes.
        for index in (1..ranks.len()).rev() {
            ranks.swap(index, rng.below(index as u64 + 1) as usize);
        }
        while tree.leaves().count() > ranks.len() {
            tree.nodes.pop();
        }
        for leaf in tree.leaves().collect::<Vec<_>>() {
            tree.nodes[leaf].ranks.extend(ranks.pop());
        }
        for rank in ranks {
            let node = rng.below(tree.nodes.len() as u64) as usize;
            tree.nodes[node].ranks.push(rank);
        }
        tree
    }

    /// The nodes that are nobody's parent.
    fn leaves(&self) -> impl Iterator<Item = usize> {
        (0..self.nodes.len()).filter(|&node| self.below(node).next().is_none())
    }

    /// The nodes right below a node.
    pub(super) fn below(&self, node: usize) -> impl Iterator<Item = usize> {
        let all = self.nodes.iter().enumerate();
        all.filter(move |(_, other)| other.parent == Some(node)).map(|(number, _)| number)
    }

    pub(super) fn children(&self, node: usize) -> impl Iterator<Item = Child> {
        let ranks = self.nodes[node].ranks.iter().map(|&rank| Child::Rank(rank));
        ranks.chain(self.below(node).map(Child::Node))
    }

    /// All ranks below a node.
    pub(super) fn ranks(&self, node: usize) -> Vec<u32> {
        let mut ranks = self.nodes[node].ranks.clone();
        self.below(node).for_each(|below| ranks.extend(self.ranks(below)));
        ranks
    }

    /// Levels of nodes.
    pub(super) fn levels(&self) -> usize {
        let above = |&node: &usize| self.nodes[node].parent;
        let depth = |node| core::iter::successors(Some(node), above).count();
        (0..self.nodes.len()).map(depth).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_below_one_node_and_no_node_is_empty() {
        let mut levels = [0; 1 + LEVELS as usize];
        for seed in 0..500 {
            let mut rng = Rng::new(seed);
            let world = rng.between(1, 12) as u32;
            let tree = Tree::draw(&mut rng, world, 3);
            let mut ranks = tree.ranks(0);
            ranks.sort_unstable();
            assert_eq!(ranks, (0..world).collect::<Vec<_>>());
            assert!((0..tree.nodes.len()).all(|node| tree.children(node).next().is_some()));
            levels[tree.levels()] += 1;
        }
        assert!(levels[1..].iter().all(|&count| count > 0), "{levels:?}");
    }
}
