//! Several hosts with several ranks each: those of a host share memory, and the lowest of them goes over switches.
//!
//! A host is a label here, which divides this machine.

mod common;

use std::collections::HashSet;
use std::sync::Barrier;
use std::time::Duration;

use common::{Cluster, PATIENCE, each, join_all, joined, leave};
use millstream_collective::{
    Call, CollectiveError, Communicator, Float16, JoinConfig, JoinError, Mode, Path, RawCall,
    ReduceOperation, Refusal, Route,
};
use millstream_verbs::Device;

use ReduceOperation::{Average, Sum};

/// Two hosts of two ranks each, which do not follow each other.
const TWO: &[u32] = &[0, 1, 1, 0];

/// The host of each rank: of one, two and three.
const UNEVEN: &[u32] = &[2, 1, 2, 0, 1, 2];

/// Ranks of these hosts.
fn configs(cluster: &Cluster, group: &str, hosts: &[u32], devices: usize) -> Vec<JoinConfig> {
    let config = |(rank, host): (u32, &u32)| {
        let config = cluster.config_with(group, hosts.len() as u32, rank, devices);
        JoinConfig { path: Path::Auto, host_label: format!("host {host}"), ..config }
    };
    (0..).zip(hosts).map(config).collect()
}

fn group(cluster: &Cluster, group: &str, hosts: &[u32]) -> Vec<Communicator> {
    joined(configs(cluster, group, hosts, 1))
}

fn element(rank: u32, index: usize) -> i64 {
    (index as i64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64) ^ i64::from(rank) << 40
}

fn vector(rank: u32, length: usize) -> Vec<i64> {
    (0..length).map(|index| element(rank, index)).collect()
}

fn sums(world: u32, length: usize) -> Vec<i64> {
    let at = |index| (0..world).fold(0_i64, |sum, rank| sum.wrapping_add(element(rank, index)));
    (0..length).map(at).collect()
}

/// Every collective, apart and in place, and what must stay as it was.
fn all_of(communicator: &mut Communicator, count: usize) {
    let (rank, world) = (communicator.rank(), communicator.world());
    let (what, root) = ((rank, count), (count as u32 + 1) % world);
    let all = count * world as usize;
    let (mine, long, total) = (vector(rank, count), vector(rank, all), sums(world, all));
    let part = rank as usize * count..(rank as usize + 1) * count;
    let mut result = vec![7; count];
    communicator.reduce(&mine, &mut result, Sum, root).unwrap();
    let expected = if rank == root { total[..count].to_vec() } else { vec![7; count] };
    assert!(result == expected, "reduce {what:?}");
    communicator.all_reduce(&mine, &mut result, Sum).unwrap();
    assert!(result == total[..count], "all_reduce {what:?}");
    result.copy_from_slice(&mine);
    communicator.all_reduce_in_place(&mut result, Sum).unwrap();
    assert!(result == total[..count], "all_reduce in place {what:?}");
    communicator.broadcast_from(&mine, &mut result, root).unwrap();
    assert!(result == vector(root, count), "broadcast {what:?}");
    communicator.barrier().unwrap();
    communicator.reduce_scatter(&long, &mut result, Sum).unwrap();
    assert!(result == total[part.clone()], "reduce_scatter {what:?}");
    let mut both = long.clone();
    communicator.reduce_scatter_in_place(&mut both, Sum).unwrap();
    assert!(both[part.clone()] == total[part.clone()], "reduce_scatter in place {what:?}");
    assert!(both[..part.start] == long[..part.start] && both[part.end..] == long[part.end..]);
    let gathered: Vec<i64> = (0..world).flat_map(|rank| vector(rank, count)).collect();
    let mut all_parts = vec![7; all];
    communicator.all_gather(&mine, &mut all_parts).unwrap();
    assert!(all_parts == gathered, "all_gather {what:?}");
    all_parts.fill(7);
    all_parts[part].copy_from_slice(&mine);
    communicator.all_gather_in_place(&mut all_parts).unwrap();
    assert!(all_parts == gathered, "all_gather in place {what:?}");
    assert!(mine == vector(rank, count), "sources stay {what:?}");
}

/// Around vectors that fit a packet, and chunks of 512 KiB: 65,536 elements.
const COUNTS: [usize; 7] = [1, 0, 7, 60, 5_000, 65_536, 200_003];

fn all_of_a_group(ranks: &mut [Communicator]) {
    each(ranks, |communicator| {
        for mode in [Mode::Write, Mode::Send, Mode::Write] {
            communicator.set_mode(mode);
            for count in COUNTS {
                all_of(communicator, count);
            }
        }
    });
}

#[test]
fn two_hosts_with_two_ranks_each_call_all() {
    let cluster = Cluster::start(1);
    let mut ranks = group(&cluster, "two", TWO);
    let switches: Vec<bool> = ranks.iter().map(|rank| rank.switch().is_some()).collect();
    assert_eq!(switches, [true, true, false, false], "the lowest of each host has one");
    let sharing: Vec<&[u32]> = ranks.iter().map(Communicator::sharing).collect();
    assert_eq!(sharing, [&[0, 3][..], &[1, 2], &[1, 2], &[0, 3]]);
    assert!(ranks.iter().all(|rank| rank.route() == Route::Hosts));
    all_of_a_group(&mut ranks);
    leave(ranks);
}

#[test]
fn two_hosts_with_three_ranks_each_call_all() {
    let cluster = Cluster::start(1);
    let mut ranks = group(&cluster, "three", &[0, 0, 0, 1, 1, 1]);
    all_of_a_group(&mut ranks);
    leave(ranks);
}

#[test]
fn hosts_with_one_two_and_three_ranks_call_all() {
    let cluster = Cluster::start(1);
    let mut ranks = group(&cluster, "uneven", UNEVEN);
    all_of_a_group(&mut ranks);
    leave(ranks);
}

#[test]
fn hosts_with_several_devices_have_several_trees() {
    let cluster = Cluster::start(2);
    let mut ranks = joined(configs(&cluster, "devices", &[0, 0, 1], 2));
    let trees: Vec<usize> = ranks.iter().map(|rank| rank.switches().count()).collect();
    assert_eq!(trees, [2, 0, 2]);
    all_of_a_group(&mut ranks);
    leave(ranks);
}

#[test]
fn hosts_take_the_place_of_switches_for_all_of_their_ranks() {
    let cluster = Cluster::of_hosts();
    let mut ranks = group(&cluster, "no switch", TWO);
    assert_eq!(ranks[0].switches().count(), 2, "a tree for each host");
    assert!(ranks[1].fallback().is_some());
    each(&mut ranks, |communicator| COUNTS.iter().for_each(|&count| all_of(communicator, count)));
    leave(ranks);
}

#[test]
fn the_lowest_rank_of_a_host_has_its_vector_on_the_wire_once_and_others_nothing() {
    const BYTES: u64 = 8 << 20;
    let cluster = Cluster::start(1);
    let configs = configs(&cluster, "once", &[0, 0, 0, 0, 1], 1);
    let devices: Vec<Device> = configs.iter().map(|config| config.device.clone()).collect();
    let mut ranks = joined(configs);
    let bytes = |rank: usize| {
        let counters = devices[rank].driver_counters();
        [counters.sent_bytes, counters.received_bytes]
    };
    // What is lost on a busy machine is sent again: that does not happen each time.
    let least = (0..5).map(|_| {
        let before = [0, 4].map(bytes);
        each(&mut ranks, |communicator| {
            let mut vector = vec![communicator.rank(); BYTES as usize / 4];
            communicator.all_reduce_in_place(&mut vector, Sum).unwrap();
            assert!(vector.iter().all(|&sum| sum == 10));
        });
        let after = [0, 4].map(bytes);
        let moved = after.as_flattened().iter().zip(before.as_flattened());
        let moved: Vec<u64> = moved.map(|(after, before)| after - before).collect();
        assert!(moved.iter().all(|&bytes| bytes >= BYTES), "{moved:?}");
        moved.into_iter().max().unwrap()
    });
    let least = least.min().unwrap();
    assert!(least < BYTES * 12 / 10, "{least} for {BYTES}");
    for rank in [1, 2, 3] {
        assert_eq!(bytes(rank), [0, 0], "rank {rank}");
    }
    leave(ranks);
}

#[test]
fn one_rank_decides_for_switches_and_one_that_needs_shared_memory_alone_is_refused() {
    let cluster = Cluster::start(1);
    let mut some = configs(&cluster, "path", TWO, 1);
    some[2].path = Path::Switch;
    let mut ranks = joined(some);
    assert!(ranks.iter().all(|rank| rank.route() == Route::Switch && rank.switch().is_some()));
    each(&mut ranks, |communicator| all_of(communicator, 100));
    leave(ranks);
    let mut some = configs(&cluster, "alone", TWO, 1);
    some[3].path = Path::SharedMemory;
    for outcome in join_all(some) {
        let error = outcome.unwrap_err();
        let is_it = matches!(&error, JoinError::Refused(Refusal::NotShared { rank: 3, .. }));
        assert!(is_it, "{error}");
    }
}

/// What all ranks get for what each contributes.
fn combined(ranks: &mut [Communicator], operation: ReduceOperation, of: &[f32]) -> Vec<f32> {
    each(ranks, |communicator| {
        let mut vector = [Float16::from_f32(of[communicator.rank() as usize])];
        communicator.all_reduce_in_place(&mut vector, operation).unwrap();
        vector[0].to_f32()
    })
}

#[test]
fn sixteen_bit_floats_are_rounded_once_a_host_and_once_a_switch() {
    let cluster = Cluster::start(1);
    let mut ranks = group(&cluster, "halves", TWO);
    // Beyond 2048 they are two apart, and of two that are equally near the even one is taken.
    assert_eq!(combined(&mut ranks, Sum, &[2048.0, 0.5, 0.5, 0.0]), [2048.0; 4], "a tie");
    assert_eq!(combined(&mut ranks, Sum, &[2048.0, 1.0, 0.0, 1.0]), [2048.0; 4], "two ties");
    assert_eq!(combined(&mut ranks, Sum, &[2048.0, 1.0, 1.0, 0.0]), [2050.0; 4]);
    // The sum of all is beyond the largest, that of each host is not, and neither is the average.
    assert_eq!(combined(&mut ranks, Average, &[30_000.0; 4]), [30_000.0; 4]);
    let nan = combined(&mut ranks, Average, &[1.0, 2.0, f32::NAN, 3.0]);
    assert!(nan.iter().all(|result| result.is_nan()), "{nan:?}");
    leave(ranks);
}

#[test]
fn averages_are_of_all_ranks_also_where_hosts_are_uneven() {
    let cluster = Cluster::start(1);
    let mut ranks = group(&cluster, "average", UNEVEN);
    for count in [3, 3_000, 300_000] {
        each(&mut ranks, |communicator| {
            let (rank, world) = (communicator.rank() as i32, communicator.world() as i32);
            let mine: Vec<i32> = (0..count).map(|index| index * rank - 7).collect();
            let mut result = vec![0; mine.len()];
            communicator.all_reduce(&mine, &mut result, Average).unwrap();
            let wanted = |index: i32| (index * (0..world).sum::<i32>() - 7 * world) / world;
            assert!((0..count).all(|index| result[index as usize] == wanted(index)), "{count}");
        });
    }
    leave(ranks);
}

/// How many different results the same sum of floats has, when another rank begins last each time.
fn different_sums(cluster: &Cluster, reproducible: bool) -> usize {
    let mut all = configs(cluster, "order", UNEVEN, 1);
    all[4].reproducible = reproducible;
    let mut ranks: Vec<_> = join_all(all).into_iter().map(Result::unwrap).collect();
    let value = |rank: u32, index: usize| {
        // The lower half of an element is the same on all ranks.
        let bits = element(rank, index + 1_000_003 * rank as usize) as u32;
        f32::from_bits(bits & 0x8fff_ffff | 0x3000_0000)
    };
    let mut different = HashSet::new();
    let started = Barrier::new(ranks.len());
    for turn in 0..8 {
        let mut results = each(&mut ranks, |communicator| {
            let rank = communicator.rank();
            let mut buffer = communicator.allocate(70_001).unwrap();
            (0..).zip(buffer.iter_mut()).for_each(|(index, it)| *it = value(rank, index));
            let is_last = turn % 6 == rank;
            if is_last {
                started.wait();
            }
            communicator.start(Call::AllReduce(Sum), buffer).unwrap();
            if !is_last {
                started.wait();
            }
            let sum = communicator.wait::<f32>(PATIENCE).unwrap().expect("it ends in time");
            sum.iter().map(|value| value.to_bits()).collect::<Vec<u32>>()
        });
        let first = results.remove(0);
        assert!(results.iter().all(|result| *result == first), "turn {turn}");
        different.insert(first);
    }
    leave(ranks);
    different.len()
}

#[test]
fn sums_of_floats_in_a_fixed_order_are_the_same_each_time() {
    let cluster = Cluster::start(2);
    assert_eq!(different_sums(&cluster, true), 1);
}

/// Has the ranks sum up so many elements, each its own number; what they hear.
fn outcomes(ranks: &mut [Communicator], counts: &[usize]) -> Vec<CollectiveError> {
    each(ranks, |communicator| {
        let mut vector = vec![1_i32; counts[communicator.rank() as usize]];
        communicator.all_reduce_in_place(&mut vector, Sum).unwrap_err()
    })
}

#[test]
fn who_differs_is_named_on_all_hosts_whether_its_host_does_or_the_switch() {
    let cluster = Cluster::start(1);
    // The counts of all, who differs, and from what.
    for (counts, differs, what) in [
        // Beside a rank of its host, which the controller hears from that host.
        ([5, 5, 6, 5], 2, "rank 2 has count 6 where rank 1 has 5"),
        // Host against host: short calls, one in a chunk and one in several, and both in several.
        ([5, 6, 6, 5], 1, "rank 1 has count 6 where rank 0 has 5"),
        ([5, 400_000, 400_000, 5], 1, "rank 1 has count 400000 where rank 0 has 5"),
        (
            [400_000, 400_001, 400_001, 400_000],
            1,
            "rank 1 has count 400001 where rank 0 has 400000",
        ),
    ] {
        let mut ranks = group(&cluster, "differ", TWO);
        for error in outcomes(&mut ranks, &counts) {
            let CollectiveError::Mismatch { rank, what: said } = &error else { panic!("{error}") };
            assert_eq!(*rank, differs, "{error}");
            assert!(said.ends_with(what), "{said}");
        }
        drop(ranks);
    }
}

#[test]
fn who_differs_is_named_by_the_whole_call_over_several_trees_too() {
    let cluster = Cluster::start(2);
    for _ in 0..3 {
        let mut ranks = joined(configs(&cluster, "trees", TWO, 2));
        // The first chunks differ, too.
        for error in outcomes(&mut ranks, &[400_000, 400_001, 400_001, 400_000]) {
            let what = "rank 1 has count 400001 where rank 0 has 400000";
            assert!(error.to_string().ends_with(what), "{error}");
        }
    }
}

/// Rank 2 does not call before the others have heard who is late; what all hear. A host whose time is over first is that of
/// this number.
fn late(cluster: &Cluster, first: u32) -> Vec<CollectiveError> {
    let mut all = configs(cluster, "late", TWO, 1);
    for (config, &host) in all.iter_mut().zip(TWO) {
        config.call_timeout = if host == first { Duration::from_secs(3) } else { PATIENCE };
    }
    let mut ranks = joined(all);
    let heard = Barrier::new(TWO.len());
    each(&mut ranks, |communicator| {
        if communicator.rank() == 2 {
            heard.wait();
            return communicator.barrier().unwrap_err();
        }
        let error = communicator.barrier().unwrap_err();
        heard.wait();
        error
    })
}

#[test]
fn who_does_not_call_is_named_by_its_host_and_the_host_by_others() {
    let cluster = Cluster::start(1);
    for (first, named, note) in [(1, 2, false), (0, 1, true)] {
        for error in late(&cluster, first) {
            let CollectiveError::Overdue { ranks, what } = &error else { panic!("{error}") };
            assert_eq!(**ranks, [named], "{error}");
            assert!(note || !what.contains("stands for all ranks"), "{error}");
        }
    }
}

#[test]
fn who_has_called_late_is_not_named_where_another_host_has_not_called() {
    const LIMIT: Duration = Duration::from_secs(8);
    let cluster = Cluster::start(1);
    let mut all = configs(&cluster, "later", TWO, 1);
    for rank in [0, 3] {
        all[rank].call_timeout = LIMIT;
    }
    let mut ranks = joined(all);
    let heard = Barrier::new(TWO.len());
    let errors = each(&mut ranks, |communicator| {
        match communicator.rank() {
            // In time for rank 3, whose time is over long before its own is.
            0 => std::thread::sleep(LIMIT - Duration::from_secs(3)),
            3 => {}
            _ => {
                heard.wait();
            }
        }
        let error = communicator.barrier().unwrap_err();
        if TWO[communicator.rank() as usize] == 0 {
            heard.wait();
        }
        error
    });
    for error in errors {
        let CollectiveError::Overdue { ranks, .. } = &error else { panic!("{error}") };
        assert_eq!(**ranks, [1], "{error}");
    }
}

#[test]
fn a_switch_that_dies_is_named_to_all_ranks_of_all_hosts() {
    let mut cluster = Cluster::start(1);
    let mut ranks = group(&cluster, "switch", TWO);
    each(&mut ranks, |communicator| all_of(communicator, 10));
    let switch = ranks[0].switch().unwrap().1;
    cluster.switches.clear();
    for error in each(&mut ranks, |communicator| communicator.barrier().unwrap_err()) {
        let CollectiveError::SwitchLost { switch: lost, detail, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(lost, switch);
        // They want no fall-back.
        assert!(!detail.contains("other trees"), "{detail}");
    }
}

/// What has been sent is acknowledged: nothing but a question would show it.
#[test]
fn a_switch_that_dies_while_ranks_wait_for_a_host_is_named() {
    let mut cluster = Cluster::start(1);
    let configs = configs(&cluster, "waits", TWO, 1);
    let device = configs[0].device.clone();
    let mut ranks = joined(configs);
    each(&mut ranks, |communicator| all_of(communicator, 10));
    let received = || device.driver_counters().received_datagrams;
    let before = received();
    for rank in [0, 3] {
        let buffer = ranks[rank].allocate::<i64>(10).unwrap();
        ranks[rank].start(Call::AllReduce(Sum), buffer).unwrap();
    }
    while received() == before {
        std::thread::yield_now();
    }
    let switch = ranks[0].switch().unwrap().1;
    cluster.switches.clear();
    for rank in [0, 3] {
        let error = ranks[rank].wait::<i64>(Duration::from_secs(10)).unwrap_err();
        let is_it =
            matches!(&error, CollectiveError::SwitchLost { switch: lost, .. } if *lost == switch);
        assert!(is_it, "{error}");
    }
}

#[test]
fn calls_that_are_started_together_end_in_their_order() {
    let cluster = Cluster::start(1);
    let mut ranks = group(&cluster, "started", UNEVEN);
    each(&mut ranks, |communicator| {
        let (rank, world) = (communicator.rank(), communicator.world());
        let counts = [300_000, 1, 5_000, 150_000];
        let mut vectors: Vec<Vec<i64>> = counts.iter().map(|&count| vector(rank, count)).collect();
        let start = |vector: &mut Vec<i64>| {
            let call = RawCall {
                call: Call::AllReduce(Sum),
                data_type: millstream_collective::DataType::Int64,
                mode: Mode::Write,
                count: vector.len(),
                source: vector.as_ptr().cast(),
                destination: vector.as_mut_ptr().cast(),
            };
            // SAFETY: the vectors are left alone until the handles have told the end.
            unsafe { communicator.start_raw(&call).unwrap() }
        };
        let handles: Vec<_> = vectors.iter_mut().map(start).collect();
        handles.iter().rev().for_each(|handle| handle.finish().unwrap());
        for (vector, count) in vectors.iter().zip(counts) {
            assert!(*vector == sums(world, count), "{count} at rank {rank}");
        }
    });
    leave(ranks);
}

#[test]
fn who_leaves_before_a_call_is_named_on_all_hosts() {
    let cluster = Cluster::start(1);
    for victim in [3, 1] {
        let mut ranks = group(&cluster, "leaves", TWO);
        each(&mut ranks, |communicator| all_of(communicator, 10));
        let left = ranks.remove(victim);
        let leaving = std::thread::spawn(move || drop(left));
        for error in each(&mut ranks, |communicator| communicator.barrier().unwrap_err()) {
            let CollectiveError::PeerLost { rank, .. } = error else { panic!("{error}") };
            assert_eq!(rank as usize, victim, "{error}");
        }
        leaving.join().unwrap();
    }
}
