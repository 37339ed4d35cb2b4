//! What is shown of a controller and of trees of several levels.

use super::trees::{Answer, Lab, address};
use super::*;

/// Three ranks, on two leaves below a root.
fn lab() -> Lab {
    let fan_in = FanIn::new(2).unwrap();
    Lab::with(ControllerConfig { fan_in, ..ControllerConfig::new(7) }, 2)
}

fn communicator(lab: &Lab) -> CommunicatorOverview {
    let overview = lab.world.controller.overview();
    overview.groups[0].communicator.clone().unwrap()
}

#[test]
fn nodes_are_shown_with_how_far_they_are() {
    for (done, states) in [
        (0, ["waiting", "creating", "creating"]),
        (2, ["creating", "created", "created"]),
        (3, ["ready", "connecting", "connecting"]),
        (5, ["ready"; 3]),
    ] {
        let mut lab = lab();
        lab.join("g", 10, 3);
        lab.run(|number| if number < done { Answer::Done } else { Answer::Silence });
        let nodes = communicator(&lab).nodes;
        assert!(nodes.iter().map(|node| node.state).eq(states), "{done}: {nodes:?}");
    }
}

#[test]
fn both_ends_of_an_edge_are_shown_alike() {
    let mut lab = lab();
    lab.ready("g", 10, 3);
    let shown = communicator(&lab);
    let [root, leaf, _] = &shown.nodes[..] else { panic!("{shown:?}") };
    assert_eq!((shown.trees, shown.path_mtu, shown.communicator), (1, 4096, root.communicator));
    let made = |node: &NodeOverview| &lab.nodes[&node.communicator.unwrap()];
    assert_eq!(leaf.switch, format!("s{}", made(leaf).switch));
    let end = |node: &NodeOverview, qpn| EndOverview { ip: Some(address(made(node).switch)), qpn };
    let edge_to = |node: &NodeOverview, rank: u32| {
        let edge = made(node).edges.iter().find(|edge| edge.rank == rank);
        end(node, edge.map(|edge| edge.qpn.value()))
    };
    let [up, host] = &leaf.edges[..] else { panic!("{leaf:?}") };
    let rank = host.rank.unwrap();
    assert_eq!((up.up, up.rank, up.node), (true, None, Some(0)));
    assert_eq!(up.my, end(leaf, made(leaf).uplink.map(|it| it.qpn.value())));
    assert_eq!(up.peer, edge_to(root, rank));
    let down = root.edges.iter().find(|edge| edge.node == Some(1)).unwrap();
    assert_eq!((down.up, down.rank, down.my, down.peer), (false, None, up.peer, up.my));
    let peer = EndOverview { ip: Some(hello("g", 3, rank).address), qpn: Some(110 + rank) };
    assert_eq!((host.my, host.peer), (edge_to(leaf, rank), peer));
}

#[test]
fn it_is_shown_who_leads() {
    let mut world = World::new();
    let address = |port| SocketAddr::from(([10, 0, 0, 1], port));
    let (leader, trouble) = (Some(address(9)), Some("etcd is down".to_owned()));
    world.controller.stand_by(StandBy { leader, trouble: trouble.clone() });
    world.controller.set_controllers(&[address(1), address(9)]);
    let controllers = vec![address(1), address(9)];
    let stands_by = LeadershipOverview {
        leads: false,
        term: None,
        leader,
        trouble,
        controllers: controllers.clone(),
    };
    assert_eq!(world.controller.overview().leadership, stands_by);
    world.controller.lead(Instant::ZERO, 9, Vec::new());
    let leads =
        LeadershipOverview { leads: true, term: Some(9), leader: None, trouble: None, controllers };
    assert_eq!(world.controller.overview().leadership, leads);
}
