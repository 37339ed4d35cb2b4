//! What the collectives compute, over real sockets.

mod common;

use std::time::{Duration, Instant};

use common::{Cluster, PATIENCE, each, joined, leave, on_both, skip};
use millstream_collective::{
    Call, Collective, CollectiveError, Communicator, DataType, Element, JoinConfig, Mode,
    ReduceOperation,
};
use millstream_verbs::Device;

use ReduceOperation::Sum;

/// An element of a rank's vector, different everywhere and wrapping in the sum.
fn element(rank: u32, index: usize, round: u32) -> i32 {
    let mixed = (index as u32 ^ round << 20).wrapping_mul(0x9e37_79b1).rotate_left(rank);
    mixed.wrapping_add(rank) as i32
}

fn vector(rank: u32, length: usize, round: u32) -> Vec<i32> {
    (0..length).map(|index| element(rank, index, round)).collect()
}

fn sum(world: u32, length: usize, round: u32) -> Vec<i32> {
    let total =
        |index| (0..world).fold(0_i32, |sum, rank| sum.wrapping_add(element(rank, index, round)));
    (0..length).map(total).collect()
}

/// The index of the first difference: a failed assertion should not print a million numbers.
fn first_difference<T: PartialEq>(a: &[T], b: &[T]) -> Option<usize> {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).position(|(a, b)| a != b)
}

/// Numbers whose sum depends on the order.
fn float(rank: u32, index: usize) -> f32 {
    let mixed = (index as u32 ^ rank << 24).wrapping_mul(0x9e37_79b1);
    f32::from_bits(0x3f00_0000 + mixed % (3 << 24))
}

fn floats(rank: u32, length: usize) -> Vec<f32> {
    (0..length).map(|index| float(rank, index)).collect()
}

#[test]
fn sums_of_floats_are_added_in_the_order_of_ranks_if_one_asks_for_it() {
    const WORLD: u32 = 4;
    // Over one tree and over two; the second rank asks.
    for trees in [1, 2] {
        let cluster = Cluster::start(1);
        let configs = (0..WORLD).map(|rank| {
            let config = cluster.config_with("ordered", WORLD, rank, trees);
            JoinConfig { reproducible: rank == 1, ..config }
        });
        let mut ranks = joined(configs);
        for (round, length) in [700, 300_000, 1_000_003, 300_000, 70_000].into_iter().enumerate() {
            let sum = |index| (1..WORLD).fold(float(0, index), |sum, it| sum + float(it, index));
            let wanted: Vec<u32> = (0..length).map(|index| sum(index).to_bits()).collect();
            each(&mut ranks, |communicator| {
                let rank = communicator.rank();
                let source = floats(rank, length);
                let mut result = vec![0.0_f32; length];
                communicator.set_mode(if round % 2 == 0 { Mode::Write } else { Mode::Send });
                // The lowest ranks come last.
                if (rank as usize + round).is_multiple_of(2) {
                    (0..1000 * (WORLD - rank)).for_each(|_| std::thread::yield_now());
                }
                communicator.all_reduce(&source, &mut result, Sum).unwrap();
                let bits: Vec<u32> = result.iter().map(|sum| sum.to_bits()).collect();
                assert_eq!(first_difference(&bits, &wanted), None, "{trees} trees, {length}");
            });
        }
        leave(ranks);
    }
}

/// Lengths around segments (65 536 elements) and windows (8 segments), back and forth.
const LENGTHS: [usize; 10] = [1, 0, 7, 65_535, 1 << 20, 1, 65_537, 524_289, 0, (1 << 20) + 3];

fn sums_of(world: u32) {
    sums_in(&Cluster::start(1), world);
}

fn sums_in(cluster: &Cluster, world: u32) {
    let mut ranks = cluster.group("sums", world);
    for (round, length) in (0..).zip(LENGTHS) {
        let wanted = sum(world, length, round);
        each(&mut ranks, |communicator| {
            let source = vector(communicator.rank(), length, round);
            let mut result = vec![0x5555_5555; length];
            communicator.all_reduce(&source, &mut result, Sum).unwrap();
            assert_eq!(first_difference(&result, &wanted), None, "length {length}");
            let untouched = vector(communicator.rank(), length, round);
            assert_eq!(first_difference(&source, &untouched), None);
            let mut both = source;
            communicator.all_reduce_in_place(&mut both, Sum).unwrap();
            assert_eq!(first_difference(&both, &wanted), None, "length {length} in place");
        });
    }
    leave(ranks);
}

#[test]
fn one_rank_gets_its_own_vector() {
    sums_of(1);
}

#[test]
fn two_ranks_get_exact_sums() {
    sums_of(2);
}

#[test]
fn four_ranks_get_exact_sums() {
    sums_of(4);
}

#[test]
fn seven_ranks_get_exact_sums() {
    sums_of(7);
}

#[test]
fn ranks_that_share_memory_get_exact_sums() {
    let cluster = Cluster::of_shared_memory();
    for world in [1, 2, 3, 8, 17] {
        sums_in(&cluster, world);
    }
}

#[test]
fn ranks_that_do_not_wait_for_each_other_stay_apart_by_at_most_a_collective() {
    on_both(free_in);
}

fn free_in(cluster: &Cluster) {
    let mut ranks = cluster.group("free", 3);
    // No barrier between rounds but the collective itself.
    each(&mut ranks, |communicator| {
        for round in 0..200 {
            let length = (round as usize * 37) % 5000;
            let mut vector = vector(communicator.rank(), length, round);
            communicator.all_reduce_in_place(&mut vector, Sum).unwrap();
            assert_eq!(first_difference(&vector, &sum(3, length, round)), None, "round {round}");
        }
    });
    leave(ranks);
}

fn combine<T: Element + PartialEq + std::fmt::Debug>(
    ranks: &mut [Communicator],
    operation: ReduceOperation,
    of: [&[T]; 2],
    wanted: &[T],
) {
    for result in each(ranks, |communicator| {
        let mut vector = of[communicator.rank() as usize].to_vec();
        communicator.all_reduce_in_place(&mut vector, operation).unwrap();
        vector
    }) {
        assert_eq!(result, wanted, "{operation} of {}", T::DATA_TYPE);
    }
}

#[test]
fn other_types_and_operations() {
    on_both(types_in);
}

fn types_in(cluster: &Cluster) {
    let mut ranks = cluster.group("types", 2);
    let ranks = &mut ranks[..];
    combine::<u8>(ranks, Sum, [&[250, 1, 2], &[10, 1, 0]], &[4, 2, 2]);
    combine::<i8>(ranks, ReduceOperation::Minimum, [&[-3, 5], &[2, -128]], &[-3, -128]);
    combine::<i16>(ranks, ReduceOperation::Product, [&[-3, 5], &[2, 300]], &[-6, 1500]);
    combine::<u16>(ranks, ReduceOperation::BitXor, [&[0xf0f0], &[0xffff]], &[0x0f0f]);
    combine::<u32>(ranks, ReduceOperation::BitOr, [&[1, 2], &[4, 2]], &[5, 2]);
    combine::<i64>(ranks, Sum, [&[i64::MAX, 1], &[1, -1]], &[i64::MIN, 0]);
    combine::<u64>(ranks, ReduceOperation::BitAnd, [&[u64::MAX], &[1 << 63]], &[1 << 63]);
    combine::<f32>(ranks, ReduceOperation::Maximum, [&[1.5, -0.5], &[-1.0, 2.0]], &[1.5, 2.0]);
    combine::<f64>(ranks, Sum, [&[0.5, 1e300], &[0.25, 1e300]], &[0.75, 2e300]);
}

#[test]
fn buffers_are_used_again_without_registering() {
    let cluster = Cluster::start(1);
    let mut ranks = cluster.group("buffers", 2);
    each(&mut ranks, |communicator| {
        let rank = communicator.rank();
        let mut source = communicator.allocate::<i32>(100_001).unwrap();
        let mut result = communicator.allocate(100_001).unwrap();
        assert!(source.iter().all(|&element| element == 0));
        for round in 0..5 {
            source.copy_from_slice(&vector(rank, 100_001, round));
            communicator.all_reduce_buffers(&source, &mut result, Sum).unwrap();
            assert_eq!(first_difference(&result, &sum(2, 100_001, round)), None);
        }
    });
    leave(ranks);
}

#[test]
fn a_collective_can_be_started_and_waited_for() {
    on_both(start_in);
}

fn start_in(cluster: &Cluster) {
    let mut ranks = cluster.group("start", 2);
    let [first, second] = &mut ranks[..] else { panic!("two ranks") };
    let mut buffer = first.allocate::<i32>(300_000).unwrap();
    buffer.copy_from_slice(&vector(0, 300_000, 0));
    first.start(Call::AllReduce(Sum), buffer).unwrap();
    // The other has not called it, so it cannot have ended.
    assert!(first.test::<i32>().unwrap().is_none());
    assert!(first.wait::<i32>(Duration::from_millis(1)).unwrap().is_none());
    assert_eq!(first.wait::<u8>(PATIENCE).unwrap_err(), CollectiveError::NotStarted);

    let mut vector = vector(1, 300_000, 0);
    second.all_reduce_in_place(&mut vector, Sum).unwrap();
    let result = first.wait::<i32>(PATIENCE).unwrap().expect("it is over for the other");
    assert_eq!(first_difference(&result, &vector), None);
    assert_eq!(first.test::<i32>().unwrap_err(), CollectiveError::NotStarted);
    // An empty one, too.
    let empty = first.allocate::<i32>(0).unwrap();
    first.start(Call::AllReduce(Sum), empty).unwrap();
    second.all_reduce_in_place::<i32>(&mut [], Sum).unwrap();
    assert_eq!(first.wait::<i32>(PATIENCE).unwrap().expect("over").len(), 0);
    leave(ranks);
}

#[test]
fn wrong_arguments_are_refused_and_change_nothing() {
    let cluster = Cluster::start(1);
    let mut other = cluster.group("other", 1);
    let mut ranks = cluster.group("arguments", 1);
    let (one, stranger) = (&mut ranks[0], &mut other[0]);
    assert_eq!(
        one.all_reduce(&[1, 2], &mut [0], Sum).unwrap_err(),
        CollectiveError::Lengths {
            collective: Collective::AllReduce,
            world: 1,
            source_length: 2,
            destination_length: 1
        }
    );
    let operation = ReduceOperation::BitOr;
    assert_eq!(
        one.all_reduce_in_place(&mut [1_f32], operation).unwrap_err(),
        CollectiveError::Unsupported {
            collective: Collective::AllReduce,
            operation,
            data_type: DataType::Float32
        }
    );
    let mut foreign = stranger.allocate::<i32>(4).unwrap();
    let own = one.allocate::<i32>(4).unwrap();
    assert_eq!(
        one.all_reduce_buffers(&own, &mut foreign, Sum).unwrap_err(),
        CollectiveError::ForeignBuffer
    );
    let (foreign, error) = one.start(Call::AllReduce(Sum), foreign).unwrap_err();
    assert_eq!((foreign.len(), error), (4, CollectiveError::ForeignBuffer));
    assert_eq!(one.test::<i32>().unwrap_err(), CollectiveError::NotStarted);
    // Busy: what was started must be waited for.
    one.start(Call::AllReduce(Sum), own).unwrap();
    assert_eq!(one.all_reduce_in_place(&mut [1], Sum).unwrap_err(), CollectiveError::Busy(0));
    assert!(one.wait::<i32>(PATIENCE).unwrap().is_some());
    let mut vector = [7];
    one.all_reduce_in_place(&mut vector, Sum).unwrap();
    assert_eq!((vector, one.failure()), ([7], None));
}

#[test]
fn two_groups_at_once_do_not_mix() {
    let cluster = Cluster::start(1);
    let mut a = cluster.group("a", 2);
    let mut b = cluster.group("b", 3);
    std::thread::scope(|scope| {
        for (ranks, world) in [(&mut a, 2), (&mut b, 3)] {
            scope.spawn(move || {
                each(ranks, |communicator| {
                    for round in 0..10 {
                        let mut vector = vector(communicator.rank(), 200_003, round);
                        communicator.all_reduce_in_place(&mut vector, Sum).unwrap();
                        let wanted = sum(world, 200_003, round);
                        assert_eq!(first_difference(&vector, &wanted), None);
                    }
                });
            });
        }
    });
    leave(a);
    leave(b);
}

#[test]
fn who_sets_no_limit_waits_for_ever_and_not_beyond_the_clock() {
    let cluster = Cluster::start(1);
    let device = common::device();
    let config = JoinConfig {
        timeout: Duration::MAX,
        call_timeout: Duration::MAX,
        path: cluster.path,
        ..JoinConfig::new(cluster.controller, "endless", 1, 0, &device)
    };
    let mut communicator = Communicator::join(&config).unwrap();
    let mut vector = [7_i32];
    communicator.all_reduce_in_place(&mut vector, Sum).unwrap();
    assert_eq!(vector, [7]);
}

/// More peers than any receive buffer has room for.
const MANY: usize = 1000;

/// How many peers more a device would tell that it has room for as much as the first.
fn room(device: &Device) -> usize {
    let grant = || device.grant_receive_share(1).unwrap();
    let first = grant().bytes_of_one();
    let shares = std::iter::repeat_with(grant).take(MANY);
    // They are there until all are counted.
    let full: Vec<_> = shares.take_while(|it| it.bytes_of_one() == first).collect();
    full.len()
}

/// What a rank has told its switch, which sends it no more, nobody else is told as long as that may come.
#[test]
fn a_rank_has_its_share_of_the_receive_buffer_until_it_leaves() {
    let cluster = Cluster::start(1);
    let config = cluster.config("share", 1, 0);
    let before = room(&config.device);
    if before == MANY {
        return skip(
            "the receive buffer is so small that all get the least: raise net.core.rmem_max",
        );
    }
    let mut rank = Communicator::join(&config).unwrap();
    assert_eq!(room(&config.device), before - 1);
    rank.all_reduce_in_place(&mut vec![1_i32; 1000], Sum).unwrap();
    drop(rank);
    // The thread of the device may be the last to let go of it.
    let until = Instant::now() + PATIENCE;
    while room(&config.device) != before {
        assert!(Instant::now() < until, "it is never given back");
        std::thread::yield_now();
    }
}
