//! From a draft to the nodes of a tree.

use super::{Demand, Draft, PlaceError, Placed, SwitchIndex, SwitchState, Topology};
use crate::plan::{Child, FanIn, MAX_DEPTH, Tree, TreeNode, shares};

/// How many nodes a switch has in each level, from the lowest to the one at the top, to have so many children;
/// `None` when they are too many levels.
pub(super) fn levels(children: usize, fan_in: FanIn) -> Option<Vec<usize>> {
    let mut levels = vec![children.div_ceil(fan_in.get() as usize).max(1)];
    while let Some(&last) = levels.last()
        && last > 1
    {
        if levels.len() == MAX_DEPTH as usize {
            return None;
        }
        levels.push(last.div_ceil(fan_in.get() as usize));
    }
    Some(levels)
}

impl Topology {
    pub(super) fn build(&self, demand: &Demand<'_>, draft: &Draft) -> Result<Placed, PlaceError> {
        let mut nodes = Vec::new();
        // Switches from the root down, each with the node that it hangs from, and its place there.
        let mut next = std::collections::VecDeque::from([(draft.root, None)]);
        while let Some((switch, parent)) = next.pop_front() {
            let share = draft.shares.get(&switch).ok_or(PlaceError::Apart)?;
            let state = demand.switches.get(switch).copied().flatten();
            let SwitchState { switch: id, .. } = state.ok_or(PlaceError::Missing(vec![switch]))?;
            let hosts = share.ranks.iter().map(|&rank| Below::Host(rank));
            let below: Vec<Below> =
                hosts.chain(share.switches.iter().map(|&switch| Below::Switch(switch))).collect();
            let levels =
                levels(below.len(), self.fan_in(demand, switch)).ok_or(PlaceError::Depth)?;
            let mut parents = vec![parent];
            for (number, &count) in levels.iter().enumerate().rev() {
                let first = nodes.len();
                // Each node of the level above has its share of this one's.
                let above: Vec<Option<usize>> = match number + 1 == levels.len() {
                    true => parents,
                    false => {
                        let of = shares(count, parents.len()).zip(parents);
                        of.flat_map(|(share, parent)| share.map(move |_| parent)).collect()
                    }
                };
                for &parent in &above {
                    let index = nodes.len();
                    if let Some(parent) = parent {
                        let parent: &mut TreeNode = &mut nodes[parent];
                        parent.children.push(Child::Switch { node: index });
                    }
                    nodes.push(TreeNode { switch: id, parent, children: Vec::new() });
                }
                parents = (first..first + count).map(Some).collect();
            }
            for (share, leaf) in shares(below.len(), parents.len()).zip(parents) {
                let Some(leaf) = leaf else { continue };
                for &below in &below[share] {
                    match below {
                        Below::Host(rank) => nodes[leaf].children.push(Child::Host { rank }),
                        Below::Switch(switch) => next.push_back((switch, Some(leaf))),
                    }
                }
            }
        }
        Ok(Placed { tree: Tree::new(nodes)?, links: draft.links.clone() })
    }
}

/// What hangs below the nodes of a switch.
#[derive(Clone, Copy)]
enum Below {
    Host(u32),
    Switch(SwitchIndex),
}
