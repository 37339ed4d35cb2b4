use core::net::IpAddr;

use proptest::prelude::*;

use super::*;

fn candidate(switch: u64, communicators: usize) -> Candidate {
    Candidate { switch: SwitchId(switch), communicators, free: usize::MAX }
}

fn candidates(count: u64) -> Vec<Candidate> {
    (0..count).map(|switch| candidate(switch, 0)).collect()
}

fn fan_in(children: u32) -> PlanOptions<'static> {
    PlanOptions { fan_in: FanIn::new(children).unwrap(), hosts: &[] }
}

fn node(switch: u64, parent: Option<usize>, children: &[Child]) -> TreeNode {
    TreeNode { switch: SwitchId(switch), parent, children: children.to_vec() }
}

fn host(rank: u32) -> Child {
    Child::Host { rank }
}

fn switch(node: usize) -> Child {
    Child::Switch { node }
}

/// The ranks directly below each node.
fn hosts_below(tree: &Tree) -> Vec<Vec<u32>> {
    let rank = |child: &Child| match *child {
        Child::Host { rank } => Some(rank),
        Child::Switch { .. } => None,
    };
    tree.nodes().iter().map(|node| node.children.iter().filter_map(rank).collect()).collect()
}

#[test]
fn the_switch_with_the_fewest_communicators_serves() {
    let candidates = [candidate(4, 2), candidate(7, 1), candidate(5, 1), candidate(1, 3)];
    let tree = Tree::plan(3, &candidates, &PlanOptions::default()).unwrap();
    assert_eq!(tree.nodes(), [node(5, None, &[host(0), host(1), host(2)])]);
    assert_eq!((tree.leaf_of(2), tree.leaf_of(3)), (Some(0), None));
    assert!(tree.contains(SwitchId(5)) && !tree.contains(SwitchId(7)));
    assert_eq!((tree.world(), tree.depth()), (3, 1));
}

#[test]
fn what_does_not_fit_one_node_has_several_alike() {
    let spread = [candidate(1, 5), candidate(2, 0), candidate(3, 1)];
    let tree = Tree::plan(7, &spread, &fan_in(3)).unwrap();
    assert_eq!(
        tree.nodes(),
        [
            node(2, None, &[switch(1), switch(2), switch(3)]),
            node(2, Some(0), &[host(0), host(1)]),
            node(3, Some(0), &[host(2), host(3)]),
            node(2, Some(0), &[host(4), host(5), host(6)]),
        ]
    );
    assert_eq!(tree.leaf_of(3), Some(2));
    assert_eq!(tree.ranks(switch(0)), (0..7).collect::<Ranks>());
    assert_eq!(tree.ranks(switch(3)), (4..7).collect::<Ranks>());
    assert_eq!((tree.lowest_rank(switch(2)), tree.lowest_rank(host(3))), (2, 3));
    // One switch alone takes all nodes.
    let alone = Tree::plan(7, &candidates(1), &fan_in(3)).unwrap();
    assert_eq!(hosts_below(&alone), hosts_below(&tree));
    assert!(alone.nodes().iter().all(|node| node.switch == SwitchId(0)));
}

#[test]
fn switches_take_no_more_nodes_than_they_have_room_for() {
    let room = |switch, free| Candidate { free, ..candidate(switch, 0) };
    let switches = |candidates: &[Candidate]| {
        let tree = Tree::plan(7, candidates, &fan_in(3))?;
        Ok(tree.nodes().iter().map(|node| node.switch.0).collect::<Vec<_>>())
    };
    assert_eq!(switches(&[room(1, 1), room(2, 0), room(3, 9)]), Ok(vec![1, 3, 3, 3]));
    assert_eq!(switches(&[room(1, 2), room(2, 2)]), Ok(vec![1, 2, 1, 2]));
    assert_eq!(switches(&[room(1, 1), room(2, 2)]), Err(PlanError::NoSwitch));
}

#[test]
fn ranks_of_one_address_are_below_one_node() {
    let place = |fan_in: u32, hosts: &[u8]| {
        let hosts: Vec<IpAddr> = hosts.iter().map(|&host| [10, 0, 0, host].into()).collect();
        let options = PlanOptions { fan_in: FanIn::new(fan_in).unwrap(), hosts: &hosts };
        hosts_below(&Tree::plan(hosts.len() as u32, &candidates(1), &options).unwrap())
    };
    for (fan_in, hosts, leaves) in [
        // As they would be without addresses.
        (2, &[1, 2, 3, 4][..], &[&[0, 1][..], &[2, 3]][..]),
        (2, &[1, 2, 1, 2], &[&[0, 2], &[1, 3]]),
        // 3 + 1 and 2 + 2, and not 2 + 2 and 3 + 1 with the 3 cut.
        (4, &[1, 1, 2, 2, 2, 3, 3, 4], &[&[2, 3, 4, 7], &[0, 1, 5, 6]]),
        // Together, though shares of 3 would be fair.
        (4, &[1, 2, 2, 2, 2, 3], &[&[1, 2, 3, 4], &[0, 5]]),
        // They do not fit: as many as possible.
        (3, &[1, 1, 1, 1, 2], &[&[0, 1, 2], &[3, 4]]),
        (3, &[1, 1, 2, 2, 3, 3], &[&[0, 1, 4], &[2, 3, 5]]),
    ] {
        assert_eq!(place(fan_in, hosts)[1..], *leaves, "{hosts:?}");
    }
}

#[test]
fn impossible_plans_are_refused() {
    let plan = |world, candidates: &[Candidate], children| {
        Tree::plan(world, candidates, &fan_in(children)).map(|tree| tree.depth())
    };
    assert_eq!(plan(2, &[], 64), Err(PlanError::NoSwitch));
    let one = [candidate(1, 0)];
    for world in [0, MAX_WORLD + 1] {
        assert_eq!(plan(world, &one, 64), Err(PlanError::World(world)));
    }
    for (world, children, depth) in
        [(64, 64, 1), (65, 64, 2), (4096, 64, 2), (MAX_WORLD, 64, 3), (64, 2, 6), (1, 1, 1)]
    {
        assert_eq!(plan(world, &one, children), Ok(depth));
    }
    for (world, fan_in) in [(65, 2), (2, 1), (MAX_WORLD, 6)] {
        assert_eq!(plan(world, &one, fan_in), Err(PlanError::Depth { world, fan_in }));
    }
    assert_eq!((FanIn::new(0), FanIn::new(65)), (None, None));
}

#[test]
fn a_tree_that_was_written_down_is_taken() {
    // Uneven, with a node that has a node alone below it, and switch 1 in three places.
    let nodes = vec![
        node(1, None, &[switch(3), host(2), switch(1)]),
        node(2, Some(0), &[switch(2)]),
        node(1, Some(1), &[host(0), host(4)]),
        node(1, Some(0), &[host(3), host(1)]),
    ];
    let tree = Tree::new(nodes.clone()).unwrap();
    assert_eq!(tree.nodes(), nodes);
    assert_eq!((tree.world(), tree.depth()), (5, 3));
    assert_eq!(tree.ranks(switch(1)).ranges(), [0..1, 4..5]);
    assert_eq!(tree.ranks(switch(3)).ranges(), [1..2, 3..4]);
    assert_eq!(
        (0..6).map(|rank| tree.leaf_of(rank)).collect::<Vec<_>>(),
        [Some(2), Some(3), Some(0), Some(3), Some(2), None]
    );
}

/// Nodes that have one child each, the last a host.
fn chain(length: usize) -> Vec<TreeNode> {
    let child = |index| if index + 1 == length { host(0) } else { switch(index + 1) };
    let parent = |index: usize| index.checked_sub(1);
    (0..length).map(|index| node(1, parent(index), &[child(index)])).collect()
}

#[test]
fn what_is_no_tree_is_refused() {
    let hosts = |count: u32| (0..count).map(host).collect::<Vec<_>>();
    let circle = vec![
        node(1, None, &[host(0)]),
        node(1, Some(2), &[switch(2)]),
        node(1, Some(1), &[switch(1)]),
    ];
    for (nodes, error) in [
        (vec![], TreeError::World(0)),
        (vec![node(1, Some(0), &[switch(0)])], TreeError::Root(0)),
        (vec![node(1, None, &[host(0)]), node(1, None, &[host(1)])], TreeError::Root(1)),
        (vec![node(1, None, &[])], TreeError::FanIn { node: 0, children: 0 }),
        (vec![node(1, None, &hosts(65))], TreeError::FanIn { node: 0, children: 65 }),
        (vec![node(1, None, &[switch(1)])], TreeError::Parent { node: 1 }),
        (vec![node(1, None, &[switch(0)])], TreeError::Parent { node: 0 }),
        (
            vec![node(1, None, &[switch(1), switch(1)]), node(1, Some(0), &[host(0)])],
            TreeError::Parent { node: 1 },
        ),
        (
            vec![node(1, None, &[host(0)]), node(1, Some(0), &[host(1)])],
            TreeError::Parent { node: 1 },
        ),
        (
            vec![node(1, None, &[host(0)]), node(1, Some(9), &[host(1)])],
            TreeError::Parent { node: 1 },
        ),
        (circle, TreeError::Unreachable(1)),
        (chain(7), TreeError::Depth(6)),
        (vec![node(1, None, &[host(0), host(0)])], TreeError::DuplicateRank(0)),
        (vec![node(1, None, &[host(0), host(2)])], TreeError::Rank { rank: 2, world: 2 }),
        (vec![node(1, None, &[host(u32::MAX)])], TreeError::Rank { rank: u32::MAX, world: 1 }),
    ] {
        assert_eq!(Tree::new(nodes).unwrap_err(), error);
    }
    assert_eq!(Tree::new(chain(6)).unwrap().depth(), 6);
}

/// Anything that has the form of a tree.
fn any_node() -> impl Strategy<Value = TreeNode> {
    let child = prop_oneof![(0_u32..6).prop_map(host), (0_usize..5).prop_map(switch),];
    let children = prop::collection::vec(child, 0..4);
    (0_u64..3, prop::option::of(0_usize..5), children)
        .prop_map(|(switch, parent, children)| node(switch, parent, &children))
}

proptest! {
    #[test]
    fn plans_are_shallow_balanced_and_spread(
        world in 1_u32..600,
        children in 2_u32..=64,
        loads in prop::collection::vec(0_usize..20, 1..9),
        hosts in prop::option::of(prop::collection::vec(0_u8..40, 600)),
    ) {
        let candidates: Vec<Candidate> =
            loads.iter().zip(0..).map(|(&load, switch)| candidate(switch, load)).collect();
        let hosts: Vec<IpAddr> =
            hosts.iter().flatten().map(|&host| [10, 0, 0, host].into()).collect();
        let options = PlanOptions { fan_in: FanIn::new(children).unwrap(), hosts: &hosts };
        let plan = Tree::plan(world, &candidates, &options);
        let levels = (1..).find(|&level| children.pow(level) >= world).unwrap();
        if levels > MAX_DEPTH {
            prop_assert_eq!(plan, Err(PlanError::Depth { world, fan_in: children }));
            return Ok(());
        }
        let tree = plan.unwrap();
        prop_assert_eq!(tree.depth(), levels);
        prop_assert_eq!(tree.world(), world);
        prop_assert_eq!(Tree::new(tree.nodes().to_vec()).unwrap(), tree.clone());
        let counts: Vec<usize> = tree.nodes().iter().map(|node| node.children.len()).collect();
        prop_assert!(counts.iter().all(|&count| count <= children as usize));
        let leaves: Vec<&TreeNode> = tree
            .nodes()
            .iter()
            .filter(|node| matches!(node.children[0], Child::Host { .. }))
            .collect();
        prop_assert_eq!(leaves.len(), world.div_ceil(children) as usize);
        if hosts.is_empty() {
            let sizes = || leaves.iter().map(|leaf| leaf.children.len());
            prop_assert!(sizes().max().unwrap() - sizes().min().unwrap() <= 1);
        }
        // Every node went to a switch that had the fewest then.
        let mut loads = loads;
        for node in tree.nodes() {
            let least = *loads.iter().min().unwrap();
            prop_assert_eq!(loads[node.switch.0 as usize], least);
            loads[node.switch.0 as usize] += 1;
        }
    }

    #[test]
    fn arbitrary_nodes_are_a_tree_or_refused(nodes in prop::collection::vec(any_node(), 0..6)) {
        if let Ok(tree) = Tree::new(nodes.clone()) {
            prop_assert_eq!(tree.nodes(), &nodes[..]);
        }
    }

    #[test]
    fn uneven_trees_are_taken(
        parents in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        hosts in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let mut nodes = vec![node(0, None, &[])];
        let mut levels = vec![1];
        for parent in parents {
            let (parent, index) = (parent.index(nodes.len()), nodes.len());
            nodes[parent].children.push(switch(index));
            nodes.push(node(index as u64 % 3, Some(parent), &[]));
            levels.push(levels[parent] + 1);
        }
        let mut ranks = 0..;
        for index in hosts {
            let count = nodes.len();
            nodes[index.index(count)].children.push(host(ranks.next().unwrap()));
        }
        for node in nodes.iter_mut().filter(|node| node.children.is_empty()) {
            node.children.push(host(ranks.next().unwrap()));
        }
        let depth = levels.into_iter().max().unwrap();
        let tree = match Tree::new(nodes.clone()) {
            Ok(tree) if depth <= MAX_DEPTH => tree,
            result => {
                prop_assert!(matches!(result, Err(TreeError::Depth(_))) && depth > MAX_DEPTH);
                return Ok(());
            }
        };
        prop_assert_eq!((tree.world(), tree.depth()), (ranks.next().unwrap(), depth));
        for rank in 0..tree.world() {
            let leaf = tree.leaf_of(rank).unwrap();
            prop_assert!(nodes[leaf].children.contains(&host(rank)));
            // Exactly those above it have it below.
            let mut above = vec![leaf];
            while let Some(parent) = above.last().and_then(|&node| nodes[node].parent) {
                above.push(parent);
            }
            for index in 0..nodes.len() {
                prop_assert_eq!(tree.ranks(switch(index)).contains(rank), above.contains(&index));
            }
        }
    }
}
