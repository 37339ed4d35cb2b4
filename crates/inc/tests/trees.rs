//! Trees of switches: every collective, in both modes, is exact on all of them, whatever the network loses.

mod network;

use core::time::Duration;

use millstream_inc::{
    Abort, Collective, CollectiveCall, CollectiveError, CommunicatorOptions, DataType, Mode,
    ReduceOperation, Stripe, SwitchEvent,
};
use millstream_roce::{Access, CompletionStatus, Instant, ProtectionDomainId};
use network::{COMMUNICATOR, Faults, Network, NodeShape, Setup, vector_address};

const fn node(switch: usize, parent: Option<usize>, hosts: &'static [u32]) -> NodeShape {
    NodeShape { switch, parent, hosts }
}

/// World, nodes.
type Shape = (u32, &'static [NodeShape]);

const ONE: Shape = (1, &[node(0, None, &[0])]);
const FLAT: Shape = (3, &[node(0, None, &[0, 1, 2])]);
const TWO_LEVELS: Shape =
    (5, &[node(0, None, &[]), node(1, Some(0), &[0, 3]), node(2, Some(0), &[1, 2, 4])]);
/// Hosts at all levels, and leaves of one host.
const UNEVEN: Shape = (
    6,
    &[
        node(0, None, &[2]),
        node(1, Some(0), &[5]),
        node(2, Some(0), &[0]),
        node(3, Some(1), &[1, 3]),
        node(4, Some(3), &[4]),
    ],
);
/// Six levels, most with one child, and all but the root on one switch.
const CHAIN: Shape = (
    2,
    &[
        node(0, None, &[]),
        node(1, Some(0), &[]),
        node(1, Some(1), &[]),
        node(1, Some(2), &[1]),
        node(1, Some(3), &[]),
        node(1, Some(4), &[0]),
    ],
);
const SHAPES: [Shape; 5] = [ONE, FLAT, TWO_LEVELS, UNEVEN, CHAIN];

fn network((hosts, tree): Shape, seed: u64, faults: Faults) -> Network {
    Network::new(Setup { hosts, tree, seed, faults, ..Setup::default() })
}

fn bytes(vector: &[i32]) -> Vec<u8> {
    vector.iter().flat_map(|element| element.to_le_bytes()).collect()
}

/// Calls an int32 sum on all hosts and checks every result.
fn run(network: &mut Network, collective: Collective, mode: Mode, root: u32, count: usize) {
    run_stripe(network, collective, mode, root, count, Stripe::WHOLE);
}

/// As above, of the elements that are on one of several trees. The rest of a result is as it was.
fn run_stripe(
    network: &mut Network,
    collective: Collective,
    mode: Mode,
    root: u32,
    count: usize,
    stripe: Stripe,
) {
    let world = network.hosts.len();
    let parts = |each: bool| if each { world } else { 1 };
    let source_parts = parts(collective == Collective::ReduceScatter);
    let target_parts = parts(collective == Collective::AllGather);
    let mut sources = Vec::new();
    for _ in 0..world {
        let length = source_parts * count;
        sources.push((0..length).map(|_| network.random.next() as i32).collect::<Vec<_>>());
    }
    let mut sum = sources[0].clone();
    for source in &sources[1..] {
        sum.iter_mut().zip(source).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
    }
    let untouched = vec![0x5a5a_5a5a_u32 as i32; target_parts * count];
    let wanted = |rank: usize| match collective {
        Collective::AllReduce => sum.clone(),
        Collective::Reduce if rank == root as usize => sum.clone(),
        Collective::Reduce | Collective::Barrier => untouched.clone(),
        Collective::Broadcast => sources[root as usize].clone(),
        Collective::ReduceScatter => sum[rank * count..(rank + 1) * count].to_vec(),
        Collective::AllGather => sources.concat(),
    };
    let mut calls = Vec::new();
    for (rank, source) in sources.iter().enumerate() {
        let memory = network.hosts[rank].endpoint.memory_mut();
        let mut register = |address, vector: &[i32]| {
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            let mut region = bytes(vector);
            region.push(0xa5);
            memory.register(ProtectionDomainId(1), address, access, region).unwrap()
        };
        let addresses = [false, true].map(|target| vector_address(rank as u32, target));
        calls.push(CollectiveCall {
            collective,
            data_type: DataType::Int32,
            operation: ReduceOperation::Sum,
            root,
            stripe,
            count: if collective == Collective::Barrier { 0 } else { count as u64 },
            mode,
            source_key: register(addresses[0], source),
            source_address: addresses[0],
            destination_key: register(addresses[1], &untouched),
            destination_address: addresses[1],
        });
    }
    for (rank, call) in calls.iter().enumerate() {
        network.start(rank, call);
    }
    for (rank, outcome) in network.outcomes().into_iter().enumerate() {
        let what = format!("{collective} {mode:?} of {count} from {root} of {world}, rank {rank}");
        assert!(matches!(outcome, Some(Ok(_))), "{what}: {outcome:?}");
        let memory = network.hosts[rank].endpoint.memory_mut();
        let call = &calls[rank];
        memory.deregister(call.source_key).unwrap();
        let mut result = memory.deregister(call.destination_key).unwrap();
        assert_eq!(result.pop(), Some(0xa5), "{what}");
        let mut wanted = wanted(rank);
        for part in wanted.chunks_mut(count.max(1)) {
            let ours = stripe.elements(part.len() as u64);
            let others = (0..).zip(part).filter(|(index, _)| !ours.contains(index));
            others.for_each(|(_, element)| *element = untouched[0]);
        }
        assert!(result == bytes(&wanted), "{what}: wrong");
    }
}

/// All collectives, one after the other, on one communicator.
fn all(network: &mut Network, counts: &[usize]) {
    let world = network.hosts.len() as u32;
    for &count in counts {
        for &collective in Collective::ALL {
            for mode in [Mode::Write, Mode::Send] {
                let root = network.random.next() as u32 % world;
                run(network, collective, mode, root, count);
            }
        }
    }
}

#[test]
fn every_collective_is_exact_on_every_tree() {
    // A segment has 128 elements, a window 4 segments; 52 elements fit a packet behind the descriptor.
    for shape in SHAPES {
        let mut network = network(shape, 1, Faults::default());
        all(&mut network, &[0, 1, 8, 10, 26, 52, 53, 63, 128, 129, 1500]);
        network.run_to_rest();
        for number in 0..=network.others.len() {
            let statistics = (0..shape.1.len() as u64).filter_map(|node| {
                network.switch_number(number).statistics(network::COMMUNICATOR + node)
            });
            statistics.for_each(|it| assert_eq!((it.slots_in_use, it.abort), (0, None)));
        }
    }
}

#[test]
fn each_of_several_trees_computes_its_stripe_and_touches_nothing_else() {
    for shape in SHAPES {
        for (tree, trees) in [(0, 2), (1, 2), (1, 3), (7, 8)] {
            let mut network = network(shape, 1, Faults::default());
            let stripe = Stripe::new(tree, trees).unwrap();
            for count in [0, 1, 7, 52, 300, 1501] {
                for &collective in Collective::ALL {
                    for mode in [Mode::Write, Mode::Send] {
                        let root = network.random.next() as u32 % shape.0;
                        run_stripe(&mut network, collective, mode, root, count, stripe);
                    }
                }
            }
            network.run_to_rest();
        }
    }
}

#[test]
fn losses_duplicates_and_disorder_change_nothing() {
    let faults = Faults {
        loss: 20,
        duplication: 20,
        reordering: 20,
        corruption: 0,
        acknowledgement_loss: 50,
    };
    for seed in 0..10 {
        for shape in SHAPES {
            all(&mut network(shape, seed, faults), &[1, 52, 700]);
        }
    }
}

/// A small whole number as an element. Powers of two are exact in every type.
fn element(data_type: DataType, value: u64) -> Vec<u8> {
    let float = (value as f32).to_bits();
    match data_type {
        DataType::Float64 => (value as f64).to_le_bytes().to_vec(),
        DataType::Float32 => float.to_le_bytes().to_vec(),
        DataType::BFloat16 => ((float >> 16) as u16).to_le_bytes().to_vec(),
        // Another bias of the exponent, and fewer bits of the fraction.
        DataType::Float16 if value > 0 => {
            (((float - (112 << 23)) >> 13) as u16).to_le_bytes().to_vec()
        }
        integer => value.to_le_bytes()[..integer.size() as usize].to_vec(),
    }
}

#[test]
fn every_type_and_operation_on_trees() {
    use ReduceOperation as Op;
    for (world, tree) in [TWO_LEVELS, UNEVEN] {
        let mut network = network((world, tree), 3, Faults::default());
        for &data_type in DataType::ALL {
            for &operation in ReduceOperation::ALL {
                if millstream_inc::Kernel::of(data_type, operation).is_none() {
                    continue;
                }
                let same = operation == Op::Average;
                let value = |rank: u32, at: u64| {
                    1 << if same { at % 3 } else { (at + u64::from(rank)) % 3 }
                };
                let result = |at| {
                    let values = (0..world).map(|rank| value(rank, at));
                    values.reduce(|a, b| match operation {
                        Op::Sum => a + b,
                        Op::Product => a * b,
                        Op::Minimum | Op::Average => a.min(b),
                        Op::Maximum => a.max(b),
                        Op::BitAnd => a & b,
                        Op::BitOr => a | b,
                        Op::BitXor => a ^ b,
                    })
                };
                // A part of a packet, or two segments and a bit.
                for bytes in [200, 1030] {
                    let count = bytes / u64::from(data_type.size());
                    let wanted: Vec<u8> =
                        (0..count).flat_map(|at| element(data_type, result(at).unwrap())).collect();
                    let calls: Vec<_> = (0..world)
                        .map(|rank| {
                            let vector: Vec<u64> = (0..count).map(|at| value(rank, at)).collect();
                            let bytes = |value| element(data_type, value);
                            network.call(rank as usize, &vector, data_type, operation, bytes, false)
                        })
                        .collect();
                    calls.iter().enumerate().for_each(|(rank, call)| network.start(rank, call));
                    for (rank, outcome) in network.outcomes().into_iter().enumerate() {
                        assert!(
                            matches!(outcome, Some(Ok(_))),
                            "{data_type} {operation}: {outcome:?}"
                        );
                        let result = network.finish(rank, &calls[rank]);
                        assert!(result == wanted, "{data_type} {operation}: wrong on rank {rank}");
                    }
                }
            }
        }
    }
}

/// What a node of a tree sends up: what is below it, in the order of the lowest ranks.
fn sum_below(tree: &[NodeShape], node: usize, of_rank: &dyn Fn(u32) -> f32) -> (u32, f32) {
    let hosts = tree[node].hosts.iter().map(|&rank| (rank, of_rank(rank)));
    let below = (0..tree.len()).filter(|&below| tree[below].parent == Some(node));
    let mut all: Vec<_> = hosts.chain(below.map(|it| sum_below(tree, it, of_rank))).collect();
    all.sort_unstable_by_key(|&(rank, _)| rank);
    (all[0].0, all[1..].iter().fold(all[0].1, |sum, (_, it)| sum + it))
}

#[test]
fn a_reproducible_sum_of_floats_has_the_same_bits_whoever_comes_first() {
    let faults = Faults {
        loss: 20,
        duplication: 20,
        reordering: 50,
        corruption: 0,
        acknowledgement_loss: 50,
    };
    let element = |rank: u32, at: usize| {
        f32::from_bits(
            0x3f00_0000 + (rank * 7919 + at as u32).wrapping_mul(0x9e37_79b9) % (3 << 24),
        )
    };
    let mut differed = 0;
    for (reproducible, seed) in
        [true, false].into_iter().flat_map(|it| (0..8).map(move |s| (it, s)))
    {
        for shape in SHAPES {
            let (hosts, tree) = shape;
            let options = CommunicatorOptions { reproducible, plain: false };
            let mut network =
                Network::new(Setup { hosts, tree, seed, faults, options, ..Setup::default() });
            // A window and a half, and the same by SEND.
            for (count, mode) in [(900, Mode::Write), (900, Mode::Send), (40, Mode::Write)] {
                let mut calls: Vec<_> = (0..hosts)
                    .map(|rank| {
                        let vector: Vec<f32> = (0..count).map(|at| element(rank, at)).collect();
                        let bytes = |value: f32| value.to_le_bytes().to_vec();
                        let (data_type, operation) = (DataType::Float32, ReduceOperation::Sum);
                        let call = network.call(
                            rank as usize,
                            &vector,
                            data_type,
                            operation,
                            bytes,
                            false,
                        );
                        (rank as usize, CollectiveCall { mode, ..call })
                    })
                    .collect();
                // Nobody knows who comes first.
                let mut started = Vec::new();
                while !calls.is_empty() {
                    let next = network.random.next() as usize % calls.len();
                    let (rank, call) = calls.swap_remove(next);
                    network.start(rank, &call);
                    let pause = Duration::from_micros(network.random.next() % 100);
                    let until = network.now + pause;
                    while network.now < until && network.step() {}
                    started.push((rank, call));
                }
                let wanted: Vec<u8> = (0..count)
                    .flat_map(|at| sum_below(tree, 0, &|rank| element(rank, at)).1.to_le_bytes())
                    .collect();
                let outcomes = network.outcomes();
                for (rank, call) in started {
                    let what = format!("rank {rank} of {hosts}, seed {seed}: {:?}", outcomes[rank]);
                    assert!(matches!(outcomes[rank], Some(Ok(_))), "{what}");
                    let result = network.finish(rank, &call);
                    assert!(!reproducible || result == wanted, "{count} elements, {what}");
                    differed += usize::from(result != wanted);
                }
            }
            network.run_to_rest();
        }
    }
    assert!(differed > 0, "these numbers do not show the order");
}

/// Calls an int32 sum on some hosts only.
fn start(network: &mut Network, hosts: &[usize], count: usize) {
    for &rank in hosts {
        let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
        let call = network.call(rank, &vec![1; count], data_type, operation, network::int32, false);
        network.start(rank, &call);
    }
}

#[test]
fn a_switch_above_that_is_gone_is_noticed_by_those_who_wait() {
    let ((hosts, tree), probe_interval) = (TWO_LEVELS, Duration::from_secs(1));
    let mut network = Network::new(Setup { hosts, tree, probe_interval, ..Setup::default() });
    // All below the first leaf, and nobody else.
    start(&mut network, &[0, 3], 100);
    let quiet = network.now + Duration::from_millis(100);
    network.run_until("a while has passed", |network| network.now >= quiet);
    network.dead_switches.push(0);
    network.run_until("both have ended", |network| {
        [0, 3].iter().all(|&rank| network.hosts[rank].outcome.is_some())
    });
    for rank in [0, 3] {
        let outcome = network.hosts[rank].outcome.take();
        assert_eq!(outcome, Some(Err(Abort::ParentLost.into())), "rank {rank}");
    }
}

/// Its ranks may live, and are not named. The node above tells its owner of the edge, which has the name of the lowest of them.
#[test]
fn a_switch_below_that_is_gone_is_told_of_as_a_switch() {
    let probe_interval = Duration::from_secs(1);
    for (shape, dead, lowest, above, heard) in [
        (TWO_LEVELS, 1, 0, 0, &[1, 2, 4][..]),
        (TWO_LEVELS, 2, 1, 0, &[0, 3]),
        // With hosts beside it and above, and with a leaf below it.
        (UNEVEN, 2, 0, 0, &[1, 2, 3, 4, 5]),
        (UNEVEN, 3, 1, 1, &[0, 2, 5]),
        // The lowest rank below it is the only one.
        (UNEVEN, 4, 4, 3, &[0, 1, 2, 3, 5]),
    ] {
        let (hosts, tree) = shape;
        let mut network = Network::new(Setup { hosts, tree, probe_interval, ..Setup::default() });
        network.dead_switches.push(dead);
        start(&mut network, heard, 100);
        network.run_until("those who can have heard", |network| {
            heard.iter().all(|&rank| network.hosts[rank].outcome.is_some())
        });
        for &rank in heard {
            let outcome = network.hosts[rank].outcome.take();
            let lost = Abort::SwitchBelowLost { rank: lowest };
            assert_eq!(outcome, Some(Err(lost.into())), "rank {rank}, switch {dead}");
        }
        let status = CompletionStatus::RetryExceeded;
        let communicator = COMMUNICATOR + above;
        let event = SwitchEvent::ChildLost { communicator, rank: lowest, is_switch: true, status };
        assert!(network.events.contains(&event), "switch {dead}: {:?}", network.events);
    }
}

/// Nobody below its switch has called, so only those above know that it is awaited.
#[test]
fn a_rank_that_is_gone_below_a_switch_where_nobody_has_called_is_noticed() {
    let probe_interval = Duration::from_secs(1);
    for (shape, called, dead) in [(TWO_LEVELS, &[0, 3][..], 2), (UNEVEN, &[0, 1, 2, 3, 5], 4)] {
        let (hosts, tree) = shape;
        let mut network = Network::new(Setup { hosts, tree, probe_interval, ..Setup::default() });
        start(&mut network, called, 100);
        network.hosts[dead].dead = true;
        let died = network.now;
        network.run_until("those who called have ended", |network| {
            called.iter().all(|&rank| network.hosts[rank].outcome.is_some())
        });
        for &rank in called {
            let outcome = network.hosts[rank].outcome.take();
            let lost = Abort::PeerLost { rank: dead as u32 };
            assert_eq!(outcome, Some(Err(lost.into())), "rank {rank}");
        }
        let time = network.now.saturating_duration_since(died);
        assert!(time < Duration::from_secs(9), "{time:?}");
    }
}

#[test]
fn who_has_not_called_is_named_when_a_rank_waits_no_longer() {
    for (shape, silent) in [
        (FLAT, &[1][..]),
        (TWO_LEVELS, &[4]),
        (TWO_LEVELS, &[0, 1, 2, 4]),
        (UNEVEN, &[0, 4]),
        (UNEVEN, &[0, 1, 2, 4, 5]),
        (CHAIN, &[0]),
        (CHAIN, &[1]),
    ] {
        // Long vectors, short ones, and none.
        for (count, loss) in [(3000, 0), (100, 50), (5, 50), (0, 0)] {
            let faults = Faults { loss, ..Faults::default() };
            let mut network = network(shape, 1, faults);
            all(&mut network, &[1, 300]);
            let called: Vec<usize> =
                (0..network.hosts.len()).filter(|rank| !silent.contains(rank)).collect();
            start(&mut network, &called, count);
            // What was lost is sent again by then.
            let until = network.now + Duration::from_millis(20);
            let asker = *called.last().unwrap();
            while network.now < until && network.step() {}
            network.hosts[asker].worker.give_up();
            network.service(asker);
            let asked = network.now;
            network.run_until("all have heard", |network| {
                network.hosts.iter().all(|host| host.worker.failure().is_some())
            });
            for rank in 0..network.hosts.len() {
                let failure = network.hosts[rank].worker.failure();
                let Some(CollectiveError::Aborted(Abort::Overdue(overdue))) = failure else {
                    panic!("rank {rank}, without {silent:?}: {failure:?}");
                };
                assert_eq!((overdue.sequence, overdue.count), (24, silent.len() as u32));
                let mut named = overdue.named().to_vec();
                named.sort_unstable();
                assert_eq!(named.len(), silent.len().min(4), "{overdue}");
                assert!(named.iter().all(|&rank| silent.contains(&(rank as usize))), "{overdue}");
                assert_eq!(network.hosts[rank].outcome.is_some(), called.contains(&rank));
            }
            assert!(network.now.saturating_duration_since(asked) < Duration::from_secs(5));
        }
    }
}

/// As on one of several trees, which has not all of the collectives.
#[test]
fn an_overdue_collective_is_told_by_the_number_that_its_ranks_know_it_by() {
    for (shape, called) in [(FLAT, &[0][..]), (TWO_LEVELS, &[1]), (UNEVEN, &[4]), (CHAIN, &[0])] {
        let mut network = network(shape, 1, Faults::default());
        all(&mut network, &[300]);
        for &rank in called {
            let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
            let call = network.call(rank, &[1; 900], data_type, operation, network::int32, false);
            assert_eq!(network.hosts[rank].worker.start_as(100, &call), Ok(100));
            network.service(rank);
        }
        network.run_to_rest();
        network.hosts[called[0]].worker.give_up();
        network.service(called[0]);
        network.run_to_rest();
        for host in &network.hosts {
            let failure = host.worker.failure();
            let Some(CollectiveError::Aborted(Abort::Overdue(overdue))) = failure else {
                panic!("{failure:?}");
            };
            assert_eq!(overdue.sequence, 100, "{overdue}");
        }
    }
}

#[test]
fn several_ranks_that_wait_no_longer_at_once_hear_the_same() {
    let mut network = network(UNEVEN, 1, Faults::default());
    start(&mut network, &[0, 1, 2, 3, 5], 1000);
    network.run_to_rest();
    for asker in [0, 2, 5, 3] {
        network.hosts[asker].worker.give_up();
        network.service(asker);
    }
    network.run_to_rest();
    for host in &network.hosts {
        let Some(CollectiveError::Aborted(Abort::Overdue(overdue))) = host.worker.failure() else {
            panic!("{:?}", host.worker.failure());
        };
        assert_eq!(overdue.named(), [4]);
    }
    // Nothing is left to be said.
    let aborted = |event: &&SwitchEvent| matches!(event, SwitchEvent::Aborted { .. });
    assert_eq!(network.events.iter().filter(aborted).count(), UNEVEN.1.len());
}

/// Who has a receive for a result finds its connection closed; all others hear who it was.
#[test]
fn who_is_awaited_is_known_in_send_mode_too() {
    let mut network = network(TWO_LEVELS, 1, Faults::default());
    for rank in 0..4 {
        let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
        let call = network.call(rank, &[1; 1000], data_type, operation, network::int32, false);
        network.start(rank, &CollectiveCall { mode: Mode::Send, ..call });
    }
    network.run_to_rest();
    network.hosts[0].worker.give_up();
    network.service(0);
    network.run_to_rest();
    let overdue = network.events.iter().find_map(|event| match event {
        SwitchEvent::Overdue { overdue, .. } => Some(*overdue),
        _ => None,
    });
    assert_eq!(overdue.map(|it| (it.count, it.ranks[0])), Some((1, 4)));
    let failures: Vec<_> = network.hosts.iter().map(|host| host.worker.failure()).collect();
    assert!(failures.iter().all(Option::is_some), "{failures:?}");
    assert_eq!(failures[4], overdue.map(|it| Abort::Overdue(it).into()));
}

#[test]
fn a_mismatch_is_told_in_every_subtree_in_either_mode() {
    for shape in [FLAT, TWO_LEVELS, UNEVEN] {
        for mode in [Mode::Write, Mode::Send] {
            let mut network = network(shape, 1, Faults::default());
            let world = network.hosts.len();
            for rank in 0..world {
                let vector = vec![1; if rank == world - 1 { 700 } else { 600 }];
                let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
                let call = network.call(rank, &vector, data_type, operation, network::int32, false);
                network.start(rank, &CollectiveCall { mode, ..call });
            }
            for (rank, outcome) in network.outcomes().into_iter().enumerate() {
                let told =
                    matches!(outcome, Some(Err(CollectiveError::Aborted(Abort::Mismatch(_)))));
                assert!(told, "{mode:?}, rank {rank} of {world}: {outcome:?}");
            }
            // No end waits for an acknowledgement of what the other knows.
            let ended = |network: &Network| {
                let ended = |event: &&SwitchEvent| matches!(event, SwitchEvent::Aborted { .. });
                network.events.iter().filter(ended).count() == shape.1.len()
            };
            network.run_until("all nodes have ended", ended);
            assert!(network.now < Instant::ZERO + Duration::from_secs(1), "{:?}", network.now);
        }
    }
}

#[test]
fn nodes_are_settled_once_all_hosts_have_their_results_and_not_before() {
    let faults = Faults { loss: 100, ..Faults::default() };
    let settled =
        |it: &Network| it.switch.is_settled() && it.others.iter().all(|it| it.is_settled());
    let mut early = 0;
    for seed in 0..20 {
        let mut network = network(TWO_LEVELS, seed, faults);
        assert!(settled(&network), "nothing was called");
        network.start_all(0..5, 5000, false);
        network.run_until("all hosts have their results", |it| {
            let done = it.hosts.iter().filter(|host| host.outcome.is_some()).count();
            early += u32::from((1..5).contains(&done));
            // Who has its result has seen that all have contributed. Others may lack an acknowledgement only.
            let lacks = |host: &network::Host| {
                let progress = host.worker.progress();
                progress.is_some_and(|(_, results, segments)| results < segments)
            };
            let lacking = it.hosts.iter().any(lacks);
            assert!(done == 0 || !lacking || !settled(it), "{done} of 5, seed {seed}");
            done == 5
        });
        network.run_to_rest();
        assert!(settled(&network), "seed {seed}");
    }
    assert!(early > 0, "all had their results at the same time");
}
