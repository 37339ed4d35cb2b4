//! Ranks with several devices: a tree for each.

mod common;

use std::time::Duration;

use common::{Cluster, each, joined, leave};
use millstream_collective::{
    Call, CollectiveError, Communicator, DataType, JoinConfig, JoinError, Mode, RawCall,
    ReduceOperation::Sum,
};

fn group(cluster: &Cluster, group: &str, world: u32, devices: usize) -> Vec<Communicator> {
    joined((0..world).map(|rank| cluster.config_with(group, world, rank, devices)))
}

fn element(rank: u32, index: usize) -> u32 {
    (index as u32 + 1).wrapping_mul(0x9e37_79b9) ^ rank << 24
}

fn vector(rank: u32, length: usize) -> Vec<u32> {
    (0..length).map(|index| element(rank, index)).collect()
}

fn sum(world: u32, length: usize) -> Vec<u32> {
    let at = |index| (0..world).fold(0_u32, |sum, rank| sum.wrapping_add(element(rank, index)));
    (0..length).map(at).collect()
}

/// Every collective, and what must stay as it was.
fn all_of(communicator: &mut Communicator, count: usize) {
    let (rank, world) = (communicator.rank(), communicator.world());
    let (what, root) = ((rank, count), count as u32 % world);
    let all = count * world as usize;
    let (mine, long, total) = (vector(rank, count), vector(rank, all), sum(world, all));
    let part = rank as usize * count..(rank as usize + 1) * count;
    let mut result = vec![7; count];
    communicator.all_reduce(&mine, &mut result, Sum).unwrap();
    assert!(result == total[..count], "all_reduce {what:?}");
    communicator.reduce_in_place(&mut result, Sum, root).unwrap();
    assert!(rank == root || result == total[..count], "reduce {what:?}");
    communicator.broadcast_from(&mine, &mut result, root).unwrap();
    assert!(result == vector(root, count), "broadcast {what:?}");
    communicator.barrier().unwrap();
    communicator.reduce_scatter(&long, &mut result, Sum).unwrap();
    assert!(result == total[part.clone()], "reduce_scatter {what:?}");
    let mut both = long.clone();
    communicator.reduce_scatter_in_place(&mut both, Sum).unwrap();
    assert!(both[part.clone()] == total[part.clone()], "reduce_scatter in place {what:?}");
    assert!(both[..part.start] == long[..part.start] && both[part.end..] == long[part.end..]);
    let gathered: Vec<u32> = (0..world).flat_map(|rank| vector(rank, count)).collect();
    let mut all_parts = vec![7; all];
    communicator.all_gather(&mine, &mut all_parts).unwrap();
    assert!(all_parts == gathered, "all_gather {what:?}");
    all_parts.fill(7);
    all_parts[part].copy_from_slice(&mine);
    communicator.all_gather_in_place(&mut all_parts).unwrap();
    assert!(all_parts == gathered, "all_gather in place {what:?}");
}

#[test]
fn every_collective_is_exact_over_several_trees() {
    let cluster = Cluster::start(2);
    for (world, devices) in [(1, 2), (3, 2), (2, 3)] {
        let mut ranks = group(&cluster, "several", world, devices);
        assert!(ranks.iter().all(|rank| rank.switches().count() == devices));
        each(&mut ranks, |communicator| {
            for mode in [Mode::Write, Mode::Send] {
                communicator.set_mode(mode);
                for count in [0, 1, 900, 4_097, 12_289, 100_003] {
                    all_of(communicator, count);
                }
            }
        });
        leave(ranks);
    }
}

#[test]
fn there_are_as_many_trees_as_the_rank_with_the_fewest_devices_has() {
    let cluster = Cluster::start(1);
    let of = |(rank, devices)| cluster.config_with("few", 2, rank, devices);
    let mut ranks = joined([(0, 3), (1, 2)].map(of));
    assert_eq!([&ranks[0], &ranks[1]].map(|rank| rank.switches().count()), [2, 2]);
    each(&mut ranks, |communicator| all_of(communicator, 20_000));
    leave(ranks);
    let error = Communicator::join(&cluster.config_with("many", 1, 0, 9)).unwrap_err();
    assert!(matches!(error, JoinError::TooManyDevices { count: 9 }), "{error}");
}

#[test]
fn short_and_long_calls_that_are_started_together_end_in_their_order() {
    let cluster = Cluster::start(2);
    let mut ranks = group(&cluster, "order", 2, 2);
    each(&mut ranks, |communicator| {
        let (rank, world) = (communicator.rank(), communicator.world());
        let counts: Vec<usize> = (0..40).map(|at| [3, 20_000, 700, 9_000][at % 4] + at).collect();
        let sources: Vec<Vec<u32>> = counts.iter().map(|&count| vector(rank, count)).collect();
        let mut results: Vec<Vec<u32>> = counts.iter().map(|&count| vec![0; count]).collect();
        let mut handles = Vec::new();
        for (source, result) in sources.iter().zip(&mut results) {
            let call = RawCall {
                call: Call::AllReduce(Sum),
                data_type: DataType::UInt32,
                mode: Mode::Write,
                count: source.len(),
                source: source.as_ptr().cast(),
                destination: result.as_mut_ptr().cast(),
            };
            // SAFETY: the vectors outlive the handles, and are not used meanwhile.
            handles.push(unsafe { communicator.start_raw(&call) }.unwrap());
        }
        // When one is over, so are those before it.
        handles[30].finish().unwrap();
        assert!(handles[..30].iter().all(|handle| handle.test() == Some(Ok(()))));
        handles.iter().for_each(|handle| handle.finish().unwrap());
        drop(handles);
        assert!(counts.iter().zip(&results).all(|(&count, result)| *result == sum(world, count)));
    });
    leave(ranks);
}

#[test]
fn ranks_that_disagree_learn_it_on_all_trees_once() {
    let cluster = Cluster::start(2);
    // A stripe that is as long as the other's, a short call where the other has a long one, and one number later.
    for (number, counts) in [(0, [40_000, 40_001]), (1, [100, 100_000]), (2, [4_000, 8_000])] {
        let mut ranks = group(&cluster, "odd", 2, 2);
        let errors = each(&mut ranks, |communicator| {
            for _ in 0..number {
                communicator.barrier().unwrap();
            }
            let mine = vector(0, counts[communicator.rank() as usize]);
            let mut result = mine.clone();
            communicator.all_reduce(&mine, &mut result, Sum).unwrap_err()
        });
        for error in &errors {
            let CollectiveError::Mismatch { what, .. } = error else { panic!("{error:?}") };
            assert!(what.contains(&format!("collective {number}: rank")), "{what}");
            let names = |count: usize| what.contains(&format!(" {count}"));
            assert!(what.contains("count") && names(counts[0]) && names(counts[1]), "{what}");
        }
        assert_eq!(errors[0], errors[1]);
        leave(ranks);
    }
}

#[test]
fn a_switch_of_one_tree_that_dies_ends_the_communicator_and_is_named() {
    let mut cluster = Cluster::start(2);
    let mut ranks = group(&cluster, "dead", 2, 2);
    each(&mut ranks, |communicator| all_of(communicator, 20_000));
    let (name, dead) = ranks[0].switches().nth(1).map(|(name, at)| (name.to_owned(), at)).unwrap();
    let number: usize = name.trim_start_matches('s').parse().unwrap();
    drop(cluster.switches.remove(number));
    let errors = each(&mut ranks, |communicator| {
        let mine = vector(0, 100_000);
        let mut result = mine.clone();
        loop {
            if let Err(error) = communicator.all_reduce(&mine, &mut result, Sum) {
                return error;
            }
        }
    });
    for error in errors {
        let CollectiveError::SwitchLost { switch, detail, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(*switch, dead, "{detail}");
        assert!(detail.contains("tree 1, from 127."), "{detail}");
    }
    leave(ranks);
}

#[test]
fn who_does_not_call_is_named_though_the_call_is_on_all_trees() {
    let cluster = Cluster::start(1);
    let late = Duration::from_secs(1);
    let configs = (0..2).map(|rank| {
        let config = cluster.config_with("late", 2, rank, 2);
        JoinConfig { call_timeout: late, ..config }
    });
    let mut ranks = joined(configs);
    let (mine, mut result) = (vector(0, 50_000), vec![0; 50_000]);
    let error = ranks[0].all_reduce(&mine, &mut result, Sum).unwrap_err();
    let CollectiveError::Overdue { ranks: missing, what } = &error else { panic!("{error:?}") };
    assert_eq!((&missing[..], what.starts_with("collective 0 did not end")), (&[1][..], true));
    let other = ranks[1].all_reduce(&mine, &mut result, Sum).unwrap_err();
    assert_eq!(other, error);
    leave(ranks);
}
