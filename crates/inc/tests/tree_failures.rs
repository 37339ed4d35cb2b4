//! Whoever dies at whatever step, and whoever differs in whatever subtree: all ranks that can be reached hear of
//! it in time.

mod network;

use core::time::Duration;

use millstream_inc::{
    Abort, Collective, CollectiveCall, CollectiveError, DataType, Field, Mode, ReduceOperation,
};
use network::{Faults, Network, NodeShape, Setup};

const fn node(switch: usize, parent: Option<usize>, hosts: &'static [u32]) -> NodeShape {
    NodeShape { switch, parent, hosts }
}

/// Hosts at all levels, and a leaf of one host.
const TREE: &[NodeShape] = &[
    node(0, None, &[2]),
    node(1, Some(0), &[0, 5]),
    node(2, Some(0), &[1]),
    node(3, Some(1), &[3, 4]),
];
const WORLD: usize = 6;

/// Within which all must have ended: a second until somebody is asked, eight timeouts of 0.54 s, and as much again
/// for those who wait for a switch that waits.
const BOUND: Duration = Duration::from_secs(11);

fn network(seed: u64) -> Network {
    let probe_interval = Duration::from_secs(1);
    let faults = Faults { loss: 10, reordering: 10, ..Faults::default() };
    Network::new(Setup {
        hosts: WORLD as u32,
        tree: TREE,
        probe_interval,
        faults,
        seed,
        ..Setup::default()
    })
}

/// Calls an int32 sum of so many elements on all ranks, the odd one with one more.
fn start(network: &mut Network, count: usize, mode: Mode, odd: Option<usize>) {
    for rank in 0..WORLD {
        let vector = vec![1; count + usize::from(odd == Some(rank))];
        let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
        let call = network.call(rank, &vector, data_type, operation, network::int32, false);
        network.start(rank, &CollectiveCall { mode, ..call });
    }
}

/// Runs until all living ranks have ended, which ask their switches once a second; how long that took.
fn run_to_end(network: &mut Network) -> Duration {
    run_to_end_of(network, WORLD)
}

fn run_to_end_of(network: &mut Network, world: usize) -> Duration {
    let before = network.now;
    let over =
        |network: &Network| network.hosts.iter().all(|host| host.dead || host.outcome.is_some());
    let mut asked = network.now;
    while !over(network) {
        if network.now >= asked + Duration::from_secs(1) || !network.step() {
            // Where nothing happens, time passes all the same.
            network.now = network.now.max(asked + Duration::from_secs(1));
            asked = network.now;
            for rank in 0..world {
                network.hosts[rank].worker.probe();
                network.service(rank);
            }
        }
        assert!(network.now < before + BOUND, "somebody waits still");
    }
    network.now.saturating_duration_since(before)
}

#[test]
fn a_rank_that_dies_at_any_step_is_named() {
    let mut named = 0;
    for count in [20, 1000] {
        for step in (0..).map(|step| step * 7) {
            let dead = step % WORLD;
            let mut network = network(step as u64);
            start(&mut network, count, Mode::Write, None);
            for _ in 0..step {
                network.step();
            }
            if network.hosts.iter().all(|host| host.outcome.is_some()) {
                break;
            }
            network.hosts[dead].dead = true;
            run_to_end(&mut network);
            for (rank, host) in network.hosts.iter().enumerate().filter(|(_, host)| !host.dead) {
                let lost = CollectiveError::Aborted(Abort::PeerLost { rank: dead as u32 });
                match host.outcome.unwrap() {
                    Ok(_) => {}
                    Err(error) => {
                        assert_eq!(error, lost, "rank {rank}, {dead} died after {step} steps");
                        named += 1;
                    }
                }
            }
        }
    }
    // What is sent before it dies may be all that the others need.
    assert!(named > 20, "{named}");
}

#[test]
fn a_switch_that_dies_at_any_step_ends_all_calls() {
    for count in [20, 1000] {
        // With the lowest rank below each.
        for (dead, rank) in [0, 0, 1, 3].into_iter().enumerate() {
            // Above it, and beside it; below, by the switch below; and to its own hosts it is silent. No rank is taken for lost.
            let told = [Abort::SwitchBelowLost { rank }, Abort::ParentLost];
            let mut ended = 0;
            for step in (0..).map(|step| step * 23) {
                let mut network = network(step as u64);
                start(&mut network, count, Mode::Write, None);
                for _ in 0..step {
                    network.step();
                }
                if network.hosts.iter().all(|host| host.outcome.is_some()) {
                    break;
                }
                network.dead_switches.push(dead);
                run_to_end(&mut network);
                for host in &network.hosts {
                    let Err(error) = host.outcome.unwrap() else { continue };
                    let is_right = match error {
                        CollectiveError::Aborted(abort) => told.contains(&abort),
                        error => matches!(error, CollectiveError::Transport(_)),
                    };
                    assert!(is_right, "switch {dead}, after {step} steps: {error:?}");
                    ended += 1;
                }
            }
            assert!(ended > 0, "switch {dead}, {count}");
        }
    }
}

#[test]
fn who_differs_in_whatever_subtree_is_told_of_to_all() {
    for mode in [Mode::Write, Mode::Send] {
        // With the descriptor, and behind it.
        for count in [20, 51, 1000] {
            for odd in 0..WORLD {
                let mut network = network(odd as u64);
                start(&mut network, count, mode, Some(odd));
                run_to_end(&mut network);
                for (rank, host) in network.hosts.iter().enumerate() {
                    let Some(Err(CollectiveError::Aborted(Abort::Mismatch(mismatch)))) =
                        host.outcome
                    else {
                        panic!("rank {rank}, {odd} differs: {:?}", host.outcome);
                    };
                    assert_eq!(mismatch.field, Field::Count);
                    assert!([mismatch.rank, mismatch.reference].contains(&(odd as u32)));
                }
            }
        }
    }
}

/// Two leaves of two hosts.
const LEAVES: &[NodeShape] =
    &[node(0, None, &[]), node(1, Some(0), &[0, 1]), node(2, Some(0), &[2, 3])];

/// A Broadcast of 2000 bytes, or one that differs from it in one thing.
fn odd(call: CollectiveCall, field: Option<Field>) -> CollectiveCall {
    let call = CollectiveCall { collective: Collective::Broadcast, root: 2, ..call };
    match field {
        Some(Field::Collective) => {
            CollectiveCall { collective: Collective::AllReduce, root: 0, ..call }
        }
        Some(Field::DataType) => CollectiveCall { data_type: DataType::Float32, ..call },
        Some(Field::Root) => CollectiveCall { root: 1, ..call },
        Some(Field::Count) => CollectiveCall { count: 499, ..call },
        Some(Field::Mode) => CollectiveCall { mode: Mode::Send, ..call },
        _ => call,
    }
}

#[test]
fn who_differs_is_told_of_before_the_others_have_called() {
    let fields = [Field::Collective, Field::DataType, Field::Root, Field::Count, Field::Mode];
    for (tree, world) in [(LEAVES, 4), (TREE, 6)] {
        let pairs = (0..world).flat_map(|first| (0..world).map(move |second| (first, second)));
        for ((first, second), field) in pairs
            .filter(|(first, second)| first != second)
            .flat_map(|pair| fields.map(|field| (pair, field)))
        {
            let mut network = Network::new(Setup { hosts: world as u32, tree, ..Setup::default() });
            for (rank, field) in [(first, None), (second, Some(field))] {
                let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
                let call =
                    network.call(rank, &[1; 500], data_type, operation, network::int32, false);
                network.start(rank, &odd(call, field));
                if rank == first {
                    // The second comes when all is quiet.
                    network.run_to_rest();
                }
            }
            let before = network.now;
            network.run_until("all have heard", |network| {
                network.hosts.iter().all(|host| host.worker.failure().is_some())
            });
            let time = network.now.saturating_duration_since(before);
            assert!(time < Duration::from_millis(100), "{first}, {second}, {field:?}: {time:?}");
            for (rank, host) in network.hosts.iter().enumerate() {
                let Some(CollectiveError::Aborted(Abort::Mismatch(mismatch))) =
                    host.worker.failure()
                else {
                    panic!("rank {rank}: {:?}", host.worker.failure());
                };
                assert_eq!(mismatch.field, field);
                let named =
                    [mismatch.reference.min(mismatch.rank), mismatch.reference.max(mismatch.rank)];
                assert_eq!(named, [first.min(second) as u32, first.max(second) as u32]);
            }
        }
    }
}

#[test]
fn what_is_told_early_disturbs_no_call() {
    for (seed, loss) in [(1, 0), (2, 50), (3, 50)] {
        let faults = Faults { loss, reordering: loss, duplication: loss, ..Faults::default() };
        let hosts = WORLD as u32;
        let mut network =
            Network::new(Setup { hosts, tree: TREE, faults, seed, ..Setup::default() });
        // With the descriptor, and behind it.
        for count in [5, 1000, 1, 300, 20] {
            let mut calls = Vec::new();
            for number in 0..WORLD {
                // Some come at once, and some long after the others.
                let rank = (number * 5 + seed as usize) % WORLD;
                let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
                let vector = vec![rank as i32 + 1; count];
                let call = network.call(rank, &vector, data_type, operation, network::int32, false);
                network.start(rank, &call);
                calls.push((rank, call));
                let later = network.now + Duration::from_millis(30 * (number as u64 % 3));
                while network.now < later && network.step() {}
            }
            let outcomes = network.outcomes();
            let wanted: Vec<u8> = (0..count).flat_map(|_| network::int32(21)).collect();
            for (rank, call) in calls {
                network.check(rank, &call, outcomes[rank], &wanted);
            }
        }
        network.check_rest();
        assert_eq!(network.events, []);
    }
}

#[test]
fn a_rank_that_dies_when_it_is_told_what_it_called_is_named() {
    let probe_interval = Duration::from_secs(1);
    let mut network =
        Network::new(Setup { hosts: 4, tree: LEAVES, probe_interval, ..Setup::default() });
    let call = |network: &mut Network, rank| {
        let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
        let call = network.call(rank, &[1; 1000], data_type, operation, network::int32, false);
        network.start(rank, &call);
    };
    call(&mut network, 0);
    let later = network.now + Duration::from_millis(100);
    network.run_until("its call is told", |network| network.now >= later);
    network.hosts[0].dead = true;
    // The same call: nobody differs from it.
    (1..4).for_each(|rank| call(&mut network, rank));
    run_to_end_of(&mut network, 4);
    for (rank, host) in network.hosts.iter().enumerate().skip(1) {
        let lost = CollectiveError::Aborted(Abort::PeerLost { rank: 0 });
        assert_eq!(host.outcome, Some(Err(lost)), "rank {rank}");
    }
}
