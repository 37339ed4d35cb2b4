//! The six collectives, of slices and registered vectors, in both modes.

mod common;

use common::{Cluster, PATIENCE, each, join_all, leave, on_both};
use millstream_collective::{
    BFloat16, Call, Communicator, Element, Float16, JoinConfig, Mode, ReduceOperation,
};
use millstream_verbs::{Device, DriverCounters};

use ReduceOperation::Sum;

/// What nobody contributes.
const UNTOUCHED: i64 = i64::MIN;

/// An element of a rank's vector, different everywhere.
fn element(rank: u32, index: usize) -> i64 {
    (index as i64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64) ^ i64::from(rank) << 40
}

fn vector(rank: u32, length: usize) -> Vec<i64> {
    (0..length).map(|index| element(rank, index)).collect()
}

fn sum(world: u32, index: usize) -> i64 {
    (0..world).fold(0, |sum: i64, rank| sum.wrapping_add(element(rank, index)))
}

/// The index of the first difference: a failed assertion should not print a million numbers.
fn first_difference(a: &[i64], b: impl Fn(usize) -> i64) -> Option<usize> {
    (0..a.len()).find(|&index| a[index] != b(index))
}

/// Around segments of 64 KiB (8,192 elements) and a window of 8 of them.
const COUNTS: [usize; 6] = [1, 0, 7, 8_193, 65_536, 100_003];

/// Each collective, with a destination of its own and in place, and what must stay as it was.
fn all_of(communicator: &mut Communicator, count: usize) {
    let (rank, world) = (communicator.rank(), communicator.world());
    let what = (communicator.rank(), count);
    let root = count as u32 % world;
    let is_root = rank == root;
    let all = count * world as usize;
    let mine = vector(rank, count);
    let long = vector(rank, all);
    let part = rank as usize * count;

    let mut result = vec![UNTOUCHED; count];
    communicator.reduce(&mine, &mut result, Sum, root).unwrap();
    let expected = |index| if is_root { sum(world, index) } else { UNTOUCHED };
    assert_eq!(first_difference(&result, expected), None, "reduce {what:?}");
    result.copy_from_slice(&mine);
    communicator.reduce_in_place(&mut result, Sum, root).unwrap();
    let expected = |index| if is_root { sum(world, index) } else { mine[index] };
    assert_eq!(first_difference(&result, expected), None, "reduce in place {what:?}");

    result.fill(UNTOUCHED);
    communicator.broadcast_from(&mine, &mut result, root).unwrap();
    let expected = |index| element(root, index);
    assert_eq!(first_difference(&result, expected), None, "broadcast {what:?}");
    result.copy_from_slice(&mine);
    communicator.broadcast(&mut result, root).unwrap();
    assert_eq!(first_difference(&result, expected), None, "broadcast in place {what:?}");

    communicator.barrier().unwrap();

    result.fill(UNTOUCHED);
    communicator.reduce_scatter(&long, &mut result, Sum).unwrap();
    let expected = |index| sum(world, part + index);
    assert_eq!(first_difference(&result, expected), None, "reduce_scatter {what:?}");
    let mut both = long.clone();
    communicator.reduce_scatter_in_place(&mut both, Sum).unwrap();
    let expected = |index: usize| match index.checked_sub(part) {
        Some(within) if within < count => sum(world, index),
        _ => long[index],
    };
    assert_eq!(first_difference(&both, expected), None, "reduce_scatter in place {what:?}");

    let mut gathered = vec![UNTOUCHED; all];
    communicator.all_gather(&mine, &mut gathered).unwrap();
    let expected = |index| element((index / count) as u32, index % count);
    assert_eq!(first_difference(&gathered, expected), None, "all_gather {what:?}");
    gathered.fill(UNTOUCHED);
    gathered[part..part + count].copy_from_slice(&mine);
    communicator.all_gather_in_place(&mut gathered).unwrap();
    assert_eq!(first_difference(&gathered, expected), None, "all_gather in place {what:?}");

    communicator.all_reduce(&mine, &mut result, Sum).unwrap();
    assert_eq!(first_difference(&result, |index| sum(world, index)), None, "all_reduce {what:?}");
    assert_eq!(mine, vector(rank, count), "sources stay {what:?}");
}

fn all_in(world: u32) {
    all_of_a_group(&Cluster::start(1), world);
}

fn all_of_a_group(cluster: &Cluster, world: u32) {
    let mut ranks = cluster.group("all", world);
    each(&mut ranks, |communicator| {
        for mode in [Mode::Write, Mode::Send, Mode::Write] {
            communicator.set_mode(mode);
            for count in COUNTS {
                all_of(communicator, count);
            }
        }
    });
    leave(ranks);
}

#[test]
fn one_rank_calls_all() {
    all_in(1);
}

#[test]
fn two_ranks_call_all() {
    all_in(2);
}

#[test]
fn five_ranks_call_all() {
    all_in(5);
}

#[test]
fn ranks_that_share_memory_call_all() {
    let cluster = Cluster::of_shared_memory();
    for world in [1, 2, 3, 8] {
        all_of_a_group(&cluster, world);
    }
}

#[test]
fn ranks_that_share_memory_send_no_packet_where_those_over_a_switch_do() {
    for (cluster, quiet) in [(Cluster::start(1), false), (Cluster::of_shared_memory(), true)] {
        let configs: Vec<JoinConfig> =
            (0..2).map(|rank| cluster.config("packets", 2, rank)).collect();
        let devices: Vec<Device> = configs.iter().map(|config| config.device.clone()).collect();
        let mut ranks: Vec<_> = join_all(configs).into_iter().map(Result::unwrap).collect();
        each(&mut ranks, |communicator| all_of(communicator, 100_003));
        for device in devices {
            let DriverCounters { sent_datagrams, received_datagrams, .. } =
                device.driver_counters();
            assert_eq!(sent_datagrams + received_datagrams == 0, quiet, "{sent_datagrams}");
        }
        leave(ranks);
    }
}

#[test]
fn registered_vectors_are_called_with_and_started() {
    on_both(buffers_in);
}

fn buffers_in(cluster: &Cluster) {
    let mut ranks = cluster.group("buffers", 3);
    each(&mut ranks, |communicator| {
        let rank = communicator.rank();
        let own = rank as usize * 1001;
        let mut mine = communicator.allocate::<i64>(1001).unwrap();
        let mut all = communicator.allocate::<i64>(3003).unwrap();
        mine.copy_from_slice(&vector(rank, 1001));
        let gathered = |index: usize| element((index / 1001) as u32, index % 1001);
        for mode in [Mode::Send, Mode::Write] {
            communicator.set_mode(mode);
            all.fill(UNTOUCHED);
            communicator.call_buffers(Call::AllGather, &mine, &mut all).unwrap();
            assert_eq!(first_difference(&all, gathered), None);
            let scatter = Call::ReduceScatter(ReduceOperation::Maximum);
            communicator.call_buffer_in_place(scatter, &mut all).unwrap();
            assert_eq!(first_difference(&all, gathered), None);
            all.fill(UNTOUCHED);
            all[own..own + 1001].copy_from_slice(&mine);
            communicator.start(Call::AllGather, all).unwrap();
            all = communicator.wait(PATIENCE).unwrap().expect("all have called it");
            assert_eq!(first_difference(&all, gathered), None);
            let none = communicator.allocate::<u8>(0).unwrap();
            communicator.start(Call::Barrier, none).unwrap();
            assert!(communicator.wait::<u8>(PATIENCE).unwrap().is_some());
        }
    });
    leave(ranks);
}

#[test]
fn nobody_passes_a_barrier_alone() {
    on_both(nobody_passes_alone);
}

fn nobody_passes_alone(cluster: &Cluster) {
    let mut ranks = cluster.group("barrier", 2);
    let [first, second] = &mut ranks[..] else { panic!("two ranks") };
    let none = first.allocate::<u8>(0).unwrap();
    first.start(Call::Barrier, none).unwrap();
    assert!(first.wait::<u8>(std::time::Duration::from_millis(50)).unwrap().is_none());
    second.barrier().unwrap();
    assert!(first.wait::<u8>(PATIENCE).unwrap().is_some());
    leave(ranks);
}

fn combined<T: Element>(ranks: &mut [Communicator], operation: ReduceOperation, of: [T; 2]) -> T {
    let results = each(ranks, |communicator| {
        let mut vector = [of[communicator.rank() as usize]; 5];
        communicator.all_reduce_in_place(&mut vector, operation).unwrap();
        vector[4]
    });
    results[1]
}

#[test]
fn halves_are_added_in_32_bits_and_rounded_once() {
    on_both(halves_in);
}

fn halves_in(cluster: &Cluster) {
    let mut ranks = cluster.group("halves", 2);
    let half = |value| Float16::from_f32(value);
    assert_eq!(combined(&mut ranks, Sum, [half(1.5), half(-4.0)]), half(-2.5));
    // 2049 is between 2048 and 2050: to the even mantissa.
    assert_eq!(combined(&mut ranks, Sum, [half(2048.0), half(1.0)]), half(2048.0));
    // The sum is beyond the largest fp16, and the average is not.
    let large = half(60_000.0);
    assert_eq!(combined(&mut ranks, ReduceOperation::Average, [large, large]), large);
    assert_eq!(combined(&mut ranks, Sum, [large, large]), half(f32::INFINITY));
    let brain = |value| BFloat16::from_f32(value);
    assert_eq!(
        combined(&mut ranks, ReduceOperation::Minimum, [brain(3.0), brain(-2.0)]),
        brain(-2.0)
    );
    assert!(combined(&mut ranks, ReduceOperation::Maximum, [brain(f32::NAN), brain(1.0)]).is_nan());
    assert_eq!(combined(&mut ranks, ReduceOperation::Average, [-4_i32, -3]), -3);
    leave(ranks);
}

#[test]
fn ranks_that_call_different_roots_or_modes_are_told() {
    on_both(differences_in);
}

fn differences_in(cluster: &Cluster) {
    for (name, wrong) in [("roots", "root"), ("modes", "mode"), ("collectives", "collective")] {
        let mut ranks = cluster.group(name, 2);
        let errors = each(&mut ranks, |communicator| {
            let odd = communicator.rank() == 1;
            let mut vector = [1_i32; 10];
            match wrong {
                "root" => communicator.broadcast(&mut vector, odd.into()),
                "mode" => {
                    communicator.set_mode(if odd { Mode::Send } else { Mode::Write });
                    communicator.broadcast(&mut vector, 0)
                }
                _ if odd => communicator.broadcast(&mut vector, 0),
                _ => communicator.reduce_in_place(&mut vector, Sum, 0),
            }
        });
        for error in errors {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("do not agree") && error.contains(wrong), "{wrong}: {error}");
        }
    }
}
