//! Switches that are lost above those that ranks are connected to.

use super::trees::{Answer, Lab, address, connection};
use super::world::{hello, seconds};
use super::*;
use crate::protocol::{FallbackOffer, Hello, LostSwitch, SwitchReport};

/// What rank 0 says of a switch that the one which it is connected to has told of.
fn heard_of_loss(lab: &mut Lab, host: ConnectionId) {
    let (address, detail) = (address(9), "the switch above is lost".to_owned());
    let switch = Some(LostSwitch { address, incarnation: Some(0) });
    lab.world.say(host, ToController::SwitchLost { detail, tree: 0, switch, further_up: true });
}

/// Which switch is lost, as all of these hear at the same time.
fn lost_to(lab: &mut Lab, hosts: &[ConnectionId]) -> String {
    let heard: Vec<_> = hosts.iter().map(|&host| lab.world.heard(host)).collect();
    let [FromController::Abort { reason: AbortReason::SwitchLost { name, .. } }] = &heard[0][..]
    else {
        panic!("{heard:?}")
    };
    assert!(heard.iter().all(|it| *it == heard[0]), "{heard:?}");
    name.clone()
}

#[test]
fn a_switch_that_tells_of_a_loss_further_up_is_not_taken_for_lost() {
    // The rank says it first, and the switch, which lives, has time to say which one is lost.
    let mut lab = Lab::new(2, 3);
    let (hosts, nodes) = lab.ready("g", 1, 4);
    let [root, leaf] = [nodes[0], nodes[1]].map(|node| lab.nodes[&node].switch);
    heard_of_loss(&mut lab, hosts[0]);
    lab.world.pass(seconds(0.9));
    assert!(hosts.iter().all(|&host| lab.world.heard(host).is_empty()));
    let report = SwitchReport::ParentLost { address: address(root), detail: "silent".to_owned() };
    lab.say(leaf, ToController::Report { communicator: nodes[1], report });
    assert_eq!(lost_to(&mut lab, &hosts), format!("s{root}"));
    // It cannot, or does not.
    for is_away in [true, false] {
        let mut lab = Lab::new(2, 3);
        let (hosts, nodes) = lab.ready("g", 1, 4);
        let [root, leaf] = [nodes[0], nodes[1]].map(|node| lab.nodes[&node].switch);
        if is_away {
            lab.world.close(connection(leaf));
        }
        heard_of_loss(&mut lab, hosts[0]);
        lab.world.pass(seconds(1.0));
        assert_eq!(lost_to(&mut lab, &hosts), format!("s{root}"), "{is_away}");
    }
}

#[test]
fn of_several_switches_further_up_the_one_is_lost_that_nobody_connected_is_below() {
    // A leaf, a switch between, and the root; which of them are away, and which is lost then.
    for (away, lost) in [(&[][..], 1), (&[0][..], 1), (&[1][..], 2), (&[0, 1][..], 1)] {
        let mut lab = Lab::new(2, 7);
        let (hosts, nodes) = lab.ready("g", 1, 8);
        let way = [3, 1, 0].map(|node: usize| lab.nodes[&nodes[node]].switch);
        away.iter().for_each(|&at: &usize| lab.world.close(connection(way[at])));
        heard_of_loss(&mut lab, hosts[0]);
        lab.world.pass(seconds(1.0));
        assert_eq!(lost_to(&mut lab, &hosts), format!("s{}", way[lost]), "{away:?}");
    }
}

#[test]
fn ranks_that_go_on_know_which_processes_the_switches_of_deeper_trees_are() {
    let processes = |ranks: u32, fallback: FallbackOffer| {
        let mut lab = Lab::new(2, 3);
        let join = |rank: u32| {
            let connection = ConnectionId(1 + u64::from(rank));
            lab.world.connect(connection);
            let hello = Hello { fallback: fallback.clone(), ..hello("g", ranks, rank) };
            lab.world.say(connection, ToController::Join(hello));
            connection
        };
        let hosts: Vec<ConnectionId> = (0..ranks).map(join).collect();
        hosts.iter().for_each(|&host| lab.world.end(host));
        lab.run(|_| Answer::Done);
        let heard = lab.world.heard(hosts[0]);
        let Some(FromController::Plan(plan)) = heard.last() else { panic!("{heard:?}") };
        plan.processes.clone()
    };
    let all = [0, 1, 2].map(|at| LostSwitch { address: address(at), incarnation: Some(0) });
    assert_eq!(processes(4, FallbackOffer::Able), all);
    assert_eq!(processes(4, FallbackOffer::Off), []);
    assert_eq!(processes(2, FallbackOffer::Able), []);
}
