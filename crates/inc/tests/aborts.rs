//! An abort is over in time, whatever children acknowledge, and there is no controller to see to it.

mod network;

use core::time::Duration;

use millstream_inc::{Abort, CollectiveError, SwitchEvent};
use network::{COMMUNICATOR, Network, NodeShape, Setup};

const BOUND: Duration = Duration::from_secs(5);
const ABORT: Abort = Abort::Requested { code: 7 };

/// A root with a host, and a leaf with three.
const TREE: &[NodeShape] = &[
    NodeShape { switch: 0, parent: None, hosts: &[3] },
    NodeShape { switch: 1, parent: Some(0), hosts: &[0, 1, 2] },
];

/// How rank 1 behaves from some moment on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Conduct {
    /// It takes nothing, and acknowledges nothing.
    StopsReading,
    /// It acknowledges one more packet every 4 s, so that its connection never breaks.
    Drips,
}

/// Amid a call rank 1 begins to behave so.
fn network(tree: &'static [NodeShape], conduct: Conduct) -> Network {
    let mut network = Network::new(Setup { tree, ..Setup::default() });
    network.start_all(0..4, 20_000, false);
    for _ in 0..1000 {
        network.step();
    }
    assert!(network.hosts.iter().all(|host| host.outcome.is_none()), "it is amid the call");
    network.hosts[1].dead = true;
    // What is on its way arrives, and results for it.
    let later = network.now + Duration::from_millis(10);
    network.run_until("the others wait for it", |network| network.now >= later);
    if conduct == Conduct::Drips {
        let leaf = usize::from(!tree.is_empty());
        let (host, switch) =
            (network.hosts[1].address, network.switch_number(leaf).config().address);
        for number in 0..5 {
            let acknowledgement = network.next_acknowledgement(1, number + 1);
            let delay = Duration::from_secs(1 + 4 * u64::from(number));
            network.inject(delay, host, switch, acknowledgement);
        }
    }
    network
}

#[test]
fn an_abort_ends_in_time_whatever_a_child_acknowledges() {
    for tree in [&[][..], TREE] {
        for conduct in [Conduct::StopsReading, Conduct::Drips] {
            let mut network = network(tree, conduct);
            let nodes = tree.len().max(1);
            assert!(network.switch.abort_communicator(network.now, COMMUNICATOR, ABORT));
            network.service(4);
            let began = network.now;
            let ended = |network: &Network| {
                let is_end = |it: &&SwitchEvent| matches!(it, SwitchEvent::Aborted { .. });
                network.events.iter().filter(is_end).count() == nodes
            };
            if conduct == Conduct::Drips {
                let between = began + Duration::from_secs(2);
                network.run_until("it has acknowledged once", |network| network.now >= between);
                assert!(!ended(&network), "there is more that it has not acknowledged");
            }
            network.run_until("the end of all nodes", ended);
            let time = network.now.saturating_duration_since(began);
            assert!(time < BOUND, "{conduct:?}, {nodes} nodes: {time:?}");
            for rank in [0, 2, 3] {
                let told = network.hosts[rank].outcome;
                assert_eq!(told, Some(Err(CollectiveError::Aborted(ABORT))), "rank {rank}");
            }
            // What is left is to remove it, as a switch does then, and nothing is left of it.
            for node in 0..nodes {
                let id = COMMUNICATOR + node as u64;
                let over = SwitchEvent::Aborted { communicator: id, abort: ABORT };
                assert!(network.events.contains(&over));
                let now = network.now;
                let switch = network.switch_number_mut(node);
                assert!(switch.is_settled());
                assert!(switch.destroy_communicator(now, id));
                assert_eq!((switch.communicators(), switch.memory_used()), (0, 0));
            }
        }
    }
}

/// The time is that of an abort: who is removed before has none, and what takes its place begins anew.
#[test]
fn a_communicator_that_is_removed_leaves_no_end_behind() {
    let mut network = network(&[], Conduct::StopsReading);
    assert!(network.switch.abort_communicator(network.now, COMMUNICATOR, ABORT));
    network.service(4);
    assert!(network.switch.destroy_communicator(network.now, COMMUNICATOR));
    let later = network.now + Duration::from_secs(20);
    while network.now < later && network.step() {}
    let is_end = |it: &SwitchEvent| matches!(it, SwitchEvent::Aborted { .. });
    assert!(!network.events.iter().any(is_end), "{:?}", network.events);
}
