//! Exact results, whatever the length, the number of ranks, the window and the network.

mod network;

use core::net::{IpAddr, Ipv4Addr};
use core::time::Duration;

use millstream_inc::{
    ChildSpec, CommunicatorSpec, DESCRIPTOR_BYTES, DataType, Ranks, ReduceOperation, SwitchConfig,
    SwitchNode,
};
use millstream_roce::{IcrcCheck, Instant};
use millstream_wire::{Mtu, Psn, Qpn};
use network::{COMMUNICATOR, Faults, Network, NodeShape, Setup};

/// Two leaves of two hosts each.
const TWO_LEAVES: &[NodeShape] = &[
    NodeShape { switch: 0, parent: None, hosts: &[] },
    NodeShape { switch: 1, parent: Some(0), hosts: &[0, 1] },
    NodeShape { switch: 2, parent: Some(0), hosts: &[2, 3] },
];

#[test]
fn any_length() {
    let setup = Setup::default();
    let (segment, window) = (setup.elements(), setup.window as usize);
    let packet = setup.path_mtu.bytes() / 4;
    let mut network = Network::new(setup);
    let mut lengths = vec![0, 1, 2, 3, 0, 0, 5];
    for around in [packet, segment, 2 * segment, window * segment, 5 * window * segment] {
        lengths.extend([around - 1, around, around + 1]);
    }
    for &count in &lengths {
        network.all_reduce(count, false);
    }
    network.check_rest();
    let statistics = network.switch.statistics(COMMUNICATOR).unwrap();
    assert_eq!(statistics.collectives, lengths.len() as u64);
    // What fits a packet behind the descriptor has no segments.
    let small = (4 * packet - DESCRIPTOR_BYTES) / 4;
    let segments: usize =
        lengths.iter().filter(|&&count| count > small).map(|count| count.div_ceil(segment)).sum();
    assert_eq!(statistics.segments, segments as u64);
    assert_eq!(statistics.bytes, lengths.iter().sum::<usize>() as u64 * 4 * 4);
    assert_eq!(statistics.discarded_bytes, 0);
}

#[test]
fn any_number_of_ranks() {
    for hosts in [1, 2, 3, 4, 16, 63, 64] {
        let setup = Setup { hosts, seed: hosts.into(), ..Setup::default() };
        let count = 10 * setup.elements() + 1;
        let mut network = Network::new(setup);
        network.all_reduce(count, false);
        network.all_reduce(0, false);
        network.all_reduce(count, true);
        network.check_rest();
    }
}

#[test]
fn in_place() {
    let faults = Faults { loss: 30, duplication: 30, reordering: 30, ..Faults::default() };
    let mut network = Network::new(Setup { faults, ..Setup::default() });
    for count in [1, 127, 128, 129, 5000] {
        network.all_reduce(count, true);
    }
    network.check_rest();
}

#[test]
fn any_window_and_segment() {
    for (window, segment_bytes, path_mtu) in [
        (1, 256, Mtu::B256),
        (1, 4096, Mtu::B1024),
        (2, 1024, Mtu::B1024),
        (3, 8192, Mtu::B4096),
        (64, 1024, Mtu::B256),
    ] {
        for loss in [0, 50] {
            let faults = Faults { loss, ..Faults::default() };
            let setup = Setup { window, segment_bytes, path_mtu, faults, ..Setup::default() };
            let count = 7 * setup.elements() * window as usize / 2 + 3;
            let mut network = Network::new(setup);
            network.all_reduce(count, false);
            network.all_reduce(count, true);
            network.check_rest();
        }
    }
}

#[test]
fn faulty_networks() {
    for (loss, duplication, reordering) in
        [(1, 0, 0), (10, 0, 0), (100, 0, 0), (0, 200, 0), (0, 0, 200), (100, 100, 100)]
    {
        for seed in 0..8 {
            let faults = Faults { loss, duplication, reordering, ..Faults::default() };
            let setup = Setup { faults, seed, window: 8, ..Setup::default() };
            let count = 40 * setup.elements() + 1;
            let mut network = Network::new(setup);
            network.all_reduce(count, seed % 2 == 1);
            network.all_reduce(3, false);
            network.all_reduce(0, false);
            network.all_reduce(count, false);
            network.check_rest();
        }
    }
}

#[test]
fn results_that_are_not_acknowledged_hold_up_nobody() {
    for acknowledgement_loss in [200, 400, 600] {
        let faults = Faults { acknowledgement_loss, loss: 5, ..Faults::default() };
        let mut network = Network::new(Setup { hosts: 3, window: 2, faults, ..Setup::default() });
        for _ in 0..3 {
            network.all_reduce(4000, true);
            network.all_reduce(0, false);
        }
        network.check_rest();
    }
}

#[test]
fn several_communicators_at_once() {
    let faults = Faults { loss: 10, ..Faults::default() };
    let mut network = Network::new(Setup { groups: 5, hosts: 3, faults, ..Setup::default() });
    for count in [1000, 0, 3000] {
        network.all_reduce(count, false);
    }
    network.check_rest();
}

#[test]
fn many_collectives_on_one_communicator() {
    let faults = Faults { loss: 10, duplication: 10, reordering: 10, ..Faults::default() };
    let mut network = Network::new(Setup { hosts: 3, window: 2, faults, ..Setup::default() });
    for round in 0..400 {
        network.all_reduce(round % 5 * 100, false);
    }
    network.check_rest();
    assert_eq!(network.switch.statistics(COMMUNICATOR).unwrap().collectives, 400);
}

#[test]
fn what_a_rank_announces_counts_for_what_comes_in_the_same_round() {
    let mut network = Network::new(Setup { rounds: true, ..Setup::default() });
    for count in [3000, 64, 1000] {
        network.all_reduce(count, false);
    }
    assert!(network.in_one_round > 0);
    network.check_rest();
}

#[test]
fn ranks_may_come_late() {
    let mut network = Network::new(Setup::default());
    let vector: Vec<i32> = (0..5000).collect();
    let call = |network: &mut Network, rank| {
        let call = network.call(
            rank,
            &vector,
            DataType::Int32,
            ReduceOperation::Sum,
            network::int32,
            false,
        );
        network.start(rank, &call);
        call
    };
    let mut calls = Vec::new();
    for rank in 0..4 {
        network.run_to_rest();
        assert!(network.hosts.iter().all(|host| host.outcome.is_none()));
        // Those who came wait with a window each, and nothing more.
        let in_use = network.switch.statistics(COMMUNICATOR).unwrap().slots_in_use;
        assert_eq!(in_use, if rank == 0 { 0 } else { 4 });
        calls.push(call(&mut network, rank));
    }
    let wanted: Vec<u8> = vector.iter().flat_map(|x| (4 * x).to_le_bytes()).collect();
    for (rank, outcome) in network.outcomes().into_iter().enumerate() {
        outcome.unwrap().unwrap();
        assert_eq!(network.finish(rank, &calls[rank]), wanted);
    }
    network.check_rest();
}

#[test]
fn sequence_numbers_of_hosts_wrap() {
    for before in [1, 2, 3, 7, 50] {
        let faults = Faults { loss: 20, ..Faults::default() };
        let first_psn = Psn::new(Psn::COUNT - before);
        let mut network = Network::new(Setup { first_psn, faults, ..Setup::default() });
        network.all_reduce(6000, false);
        network.all_reduce(6000, false);
        network.check_rest();
    }
}

/// The first sequence number that a switch with this seed gives to some of 64 children, nearest to
/// the end of the circle.
fn nearest_to_the_end(seed: u64) -> u32 {
    let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let mut switch = SwitchNode::new(SwitchConfig::new(address, seed));
    let child = |rank| ChildSpec {
        ranks: Ranks::one(rank),
        address,
        qpn: Qpn::new(9),
        psn: Psn::new(0),
        is_switch: false,
        receive_share: None,
    };
    let spec = CommunicatorSpec {
        id: 1,
        path_mtu: Mtu::B256,
        segment_bytes: 256,
        window: 1,
        children: (0..64).map(child).collect(),
        world: 64,
        has_parent: false,
        options: millstream_inc::CommunicatorOptions::default(),
    };
    let created = switch.create_communicator(Instant::ZERO, &spec).unwrap();
    created.edges.iter().map(|edge| Psn::COUNT - edge.psn.value()).min().unwrap()
}

#[test]
fn sequence_numbers_of_the_switch_wrap() {
    // The switch chooses at random; some seed makes it start where the numbers end.
    let seed = (0..).find(|&seed| nearest_to_the_end(seed) < 400).unwrap();
    let faults = Faults { loss: 20, ..Faults::default() };
    let mut network = Network::new(Setup { hosts: 64, seed, faults, ..Setup::default() });
    for _ in 0..3 {
        network.all_reduce(10_000, false);
    }
    network.check_rest();
}

#[test]
fn every_operation_of_a_float_and_an_integer() {
    let mut network = Network::new(Setup { hosts: 3, ..Setup::default() });
    let vectors = [[1.5_f64, -2.0, 8.0], [2.5, 4.0, -1.0], [-1.0, 0.5, 3.0]];
    for (operation, wanted) in [
        (ReduceOperation::Sum, [3.0, 2.5, 10.0]),
        (ReduceOperation::Product, [-3.75, -4.0, -24.0]),
        (ReduceOperation::Minimum, [-1.0, -2.0, -1.0]),
        (ReduceOperation::Maximum, [2.5, 4.0, 8.0]),
    ] {
        let calls: Vec<_> = (0..3)
            .map(|rank| {
                let bytes = |x: f64| x.to_le_bytes().to_vec();
                network.call(rank, &vectors[rank], DataType::Float64, operation, bytes, false)
            })
            .collect();
        calls.iter().enumerate().for_each(|(rank, call)| network.start(rank, call));
        for (rank, outcome) in network.outcomes().into_iter().enumerate() {
            outcome.unwrap().unwrap();
            let wanted: Vec<u8> = wanted.iter().flat_map(|x: &f64| x.to_le_bytes()).collect();
            assert_eq!(network.finish(rank, &calls[rank]), wanted, "{operation}");
        }
    }
    let vectors = [[-7_i8; 1000], [3; 1000], [5; 1000]];
    for (operation, wanted) in [
        (ReduceOperation::BitXor, (-7 ^ 3 ^ 5_i8) as u8),
        (ReduceOperation::Product, (-105_i8) as u8),
        (ReduceOperation::Minimum, (-7_i8) as u8),
    ] {
        let calls: Vec<_> = (0..3)
            .map(|rank| {
                let bytes = |x: i8| vec![x as u8];
                network.call(rank, &vectors[rank], DataType::Int8, operation, bytes, false)
            })
            .collect();
        calls.iter().enumerate().for_each(|(rank, call)| network.start(rank, call));
        for (rank, outcome) in network.outcomes().into_iter().enumerate() {
            outcome.unwrap().unwrap();
            assert_eq!(network.finish(rank, &calls[rank]), [wanted; 1000], "{operation}");
        }
    }
    network.check_rest();
}

/// Small vectors are added in the order of ranks, whatever order they come in and whatever is lost.
#[test]
fn sums_of_short_vectors_of_floats_do_not_depend_on_who_comes_first() {
    let of = |rank: usize, at: usize| {
        let value = ((rank * 31 + at * 17) % 97) as f32;
        (value - 48.3) * 10_f32.powi((rank * 5 + at) as i32 % 9 - 4)
    };
    let mut wanted = None;
    for seed in 0..40 {
        let loss = if seed % 2 == 0 { 0 } else { 100 };
        let faults = Faults { loss, reordering: loss, ..Faults::default() };
        let mut network = Network::new(Setup { hosts: 7, seed, faults, ..Setup::default() });
        let mut order: Vec<usize> = (0..7).collect();
        for last in (1..order.len()).rev() {
            order.swap(last, network.random.next() as usize % (last + 1));
        }
        let calls: Vec<_> = (0..7)
            .map(|rank| {
                let vector: Vec<f32> = (0..52).map(|at| of(rank, at)).collect();
                let bytes = |x: f32| x.to_le_bytes().to_vec();
                let (data_type, operation) = (DataType::Float32, ReduceOperation::Sum);
                network.call(rank, &vector, data_type, operation, bytes, false)
            })
            .collect();
        for &rank in &order {
            network.start(rank, &calls[rank]);
            let until = network.now + Duration::from_micros(50);
            while network.now < until && network.step() {}
        }
        for (rank, outcome) in network.outcomes().into_iter().enumerate() {
            outcome.unwrap().unwrap();
            let result = network.finish(rank, &calls[rank]);
            let wanted = wanted.get_or_insert_with(|| result.clone());
            assert_eq!(result, *wanted, "rank {rank}, who came as {order:?}");
        }
    }
    // The other way round the sums have other bits.
    let backwards = (0..52).map(|at| (0..7).rev().map(|rank| of(rank, at)).reduce(|a, b| a + b));
    let backwards: Vec<u8> = backwards.flat_map(|sum| sum.unwrap().to_le_bytes()).collect();
    assert_ne!(wanted, Some(backwards));
}

#[test]
fn flipped_bits_are_a_loss() {
    let faults = Faults { corruption: 30, loss: 5, ..Faults::default() };
    let icrc = IcrcCheck::Exact;
    let mut network = Network::new(Setup { icrc, faults, ..Setup::default() });
    for _ in 0..5 {
        network.all_reduce(5000, true);
    }
    assert_ne!(network.switch.counters().dropped_icrc, 0);
    network.check_rest();
}

#[test]
fn a_result_leaves_while_the_segment_is_still_on_its_way() {
    let setup = Setup { hosts: 2, segment_bytes: 8192, ..Setup::default() };
    let count = setup.elements();
    let mut network = Network::new(setup);
    let (calls, wanted) = network.start_all(0..2, count, false);
    let contributed = |network: &Network| network.switch.statistics(COMMUNICATOR).unwrap().bytes;
    let sent = |network: &Network| network.switch.counters().payload_bytes_sent;
    network.run_until("bytes of the result", |network| sent(network) > 0);
    assert!(contributed(&network) < 2 * 8192, "before the last packet of the segment");
    let outcomes = network.outcomes();
    for ((host, call), outcome) in (0..2).zip(&calls).zip(outcomes) {
        network.check(host, call, outcome, &wanted);
    }
    network.check_rest();
}

#[test]
fn more_results_may_be_under_way_from_above_than_a_byte_counts() {
    let window = 300;
    let mut network = Network::new(Setup { tree: TWO_LEAVES, window, ..Setup::default() });
    network.all_reduce(window as usize * network.setup.elements(), false);
    network.run_to_rest();
}

/// Others call it at nearly the same time, mostly.
#[test]
fn what_the_first_has_called_is_told_above_when_the_others_had_time_to_call() {
    let mut network = Network::new(Setup { tree: TWO_LEAVES, ..Setup::default() });
    let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
    let call = network.call(0, &[1; 200], data_type, operation, network::int32, false);
    network.start(0, &call);
    let told = |network: &Network| {
        let leaf = &network.switch_number(1).counts()[0];
        leaf.ports.last().is_some_and(|up| up.counters.packets_sent > 0)
    };
    network.run_until("the root is told", told);
    let took = network.now.saturating_duration_since(Instant::ZERO);
    assert!(took >= Duration::from_millis(10) && took < Duration::from_millis(11), "{took:?}");
}
