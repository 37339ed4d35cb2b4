//! Communicators that go on when a switch dies in mid-call.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Cluster, PATIENCE, address, each, join_all, leave};
use millstream_collective::{
    Call, CollectiveError, Communicator, Element, FailoverReport, JoinConfig,
    ReduceOperation::{Minimum as Min, Sum},
};
use millstream_verbs::{Device, SoftConfig};

/// Elements, more than a window of segments.
const LONG: usize = 700_001;

/// Of each rank and call, whose sum wraps.
fn element(rank: u32, call: u64, index: usize) -> u32 {
    (index as u32 + 1).wrapping_mul(0x9e37_79b9) ^ (rank << 27) ^ (call as u32).wrapping_mul(77)
}

fn vector(rank: u32, call: u64, length: usize) -> Vec<u32> {
    (0..length).map(|index| element(rank, call, index)).collect()
}

fn sum(world: u32, call: u64, length: usize) -> Vec<u32> {
    let of =
        |index| (0..world).fold(0_u32, |sum, rank| sum.wrapping_add(element(rank, call, index)));
    (0..length).map(of).collect()
}

fn cluster(switches: usize) -> Cluster {
    Cluster { fallback: true, ..Cluster::start(switches) }
}

/// One collective, apart or in place, with its result compared.
fn one(communicator: &mut Communicator, call: Call, number: u64, count: usize, in_place: bool) {
    let (rank, world) = (communicator.rank(), communicator.world());
    let [long, short] = call.lengths(world, count).unwrap();
    let own = rank as usize * count..(rank as usize + 1) * count;
    let source = vector(rank, number, long);
    let wanted = match call {
        Call::AllReduce(_) => sum(world, number, count),
        Call::Reduce { root, .. } if root == rank => sum(world, number, count),
        Call::Reduce { .. } if in_place => source.clone(),
        Call::Reduce { .. } => vec![7; count],
        Call::Broadcast { root } => vector(root, number, count),
        Call::ReduceScatter(_) => sum(world, number, long)[own.clone()].to_vec(),
        Call::AllGather => (0..world).flat_map(|rank| vector(rank, number, count)).collect(),
        Call::Barrier => Vec::new(),
    };
    let found = match (call, in_place) {
        (Call::AllGather, true) => {
            let mut all = vec![7; short];
            all[own].copy_from_slice(&source);
            communicator.call_in_place(call, &mut all).unwrap();
            all
        }
        (Call::ReduceScatter(_), true) => {
            let mut all = source;
            communicator.call_in_place(call, &mut all).unwrap();
            all[own].to_vec()
        }
        (_, true) => {
            let mut vector = source;
            communicator.call_in_place(call, &mut vector).unwrap();
            vector
        }
        (_, false) => {
            let mut result = vec![7; short];
            communicator.call(call, &source, &mut result).unwrap();
            result
        }
    };
    assert!(found == wanted, "{call:?} {number} of rank {rank}, in place: {in_place}");
}

/// Does this again and again until all ranks have gone on over other trees `times` times, and once more.
fn until_gone_on(
    communicator: &mut Communicator,
    progress: &AtomicU64,
    times: usize,
    mut work: impl FnMut(&mut Communicator, u64),
) -> Vec<FailoverReport> {
    let end = Instant::now() + 2 * PATIENCE;
    for number in 0.. {
        work(communicator, number);
        progress.fetch_add(1, Ordering::Relaxed);
        let mut gone_on = [(communicator.failovers().len() >= times) as u32];
        communicator.all_reduce_in_place(&mut gone_on, Min).unwrap();
        if gone_on == [1] {
            work(communicator, number + 1);
            break;
        }
        assert!(Instant::now() < end, "no failure is seen");
    }
    communicator.failovers()
}

/// Waits until so many calls are over.
fn reached(progress: &AtomicU64, calls: u64) {
    let end = Instant::now() + PATIENCE;
    while progress.load(Ordering::Relaxed) < calls {
        assert!(Instant::now() < end, "the ranks do not call");
        thread::sleep(Duration::from_millis(1));
    }
}

const SIX: [Call; 6] = [
    Call::AllReduce(Sum),
    Call::Reduce { operation: Sum, root: 1 },
    Call::Broadcast { root: 1 },
    Call::Barrier,
    Call::ReduceScatter(Sum),
    Call::AllGather,
];

/// Groups of 2 and 3 ranks, each with a collective of its own, whose one switch dies.
fn all_go_on(in_place: bool) {
    let mut cluster = cluster(1);
    let groups: Vec<Vec<Communicator>> = SIX
        .into_iter()
        .enumerate()
        .map(|(number, _)| cluster.group(&format!("g{number}"), 2 + number as u32 % 2))
        .collect();
    let ranks: u32 = groups.iter().map(|group| group.len() as u32).sum();
    let progress = AtomicU64::new(0);
    thread::scope(|scope| {
        for (mut ranks, call) in groups.into_iter().zip(SIX) {
            let progress = &progress;
            scope.spawn(move || {
                let count = match call {
                    Call::Barrier => 0,
                    Call::ReduceScatter(_) | Call::AllGather => LONG / 3,
                    _ => LONG,
                };
                let reports = each(&mut ranks, |communicator| {
                    until_gone_on(communicator, progress, 1, |communicator, number| {
                        one(communicator, call, number, count, in_place);
                    })
                });
                for report in reports.into_iter().flatten() {
                    assert!(report.reason.contains("is lost"), "{report:?}");
                    assert!(report.fallback.is_some(), "{report:?}");
                }
                leave(ranks);
            });
        }
        reached(&progress, 2 * u64::from(ranks));
        cluster.switches.clear();
    });
}

#[test]
fn all_collectives_go_on_over_the_ranks_own_switches() {
    all_go_on(false);
}

#[test]
fn all_collectives_go_on_in_place() {
    all_go_on(true);
}

#[test]
fn floats_have_the_same_bits_on_all_ranks_and_another_switch_serves() {
    let mut cluster = cluster(2);
    let mut ranks = cluster.group("floats", 3);
    let first = ranks[0].switch().unwrap().0.to_owned();
    let number: usize = first.trim_start_matches('s').parse().unwrap();
    let at = |rank: u32, index: usize| 1.0 / (1.0 + index as f32 + 1000.0 * rank as f32);
    let progress = AtomicU64::new(0);
    let dead = cluster.switches.remove(number);
    let sums = thread::scope(|scope| {
        let (progress, ranks) = (&progress, &mut ranks);
        let sums = scope.spawn(move || {
            each(ranks, |communicator| {
                let mut sums = Vec::new();
                let reports = until_gone_on(communicator, progress, 1, |communicator, _| {
                    let rank = communicator.rank();
                    let mut vector: Vec<f32> = (0..LONG).map(|index| at(rank, index)).collect();
                    communicator.all_reduce_in_place(&mut vector, Sum).unwrap();
                    sums.push(hash(&vector));
                });
                (sums, reports)
            })
        });
        reached(progress, 3);
        drop(dead);
        sums.join().unwrap()
    });
    let (expected, _) = &sums[0];
    for (sums, reports) in &sums {
        assert_eq!(sums, expected);
        let [FailoverReport { switches, fallback: None, .. }] = &reports[..] else {
            panic!("{reports:?}")
        };
        assert!(switches[0].0 != first, "{switches:?}");
    }
    leave(ranks);
}

/// FNV-1a of the bits.
fn hash(vector: &[f32]) -> u64 {
    let step =
        |hash: u64, value: &f32| (hash ^ u64::from(value.to_bits())).wrapping_mul(0x100_0000_01b3);
    vector.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[test]
fn it_goes_on_twice_with_several_devices() {
    let mut cluster = cluster(2);
    let config = |rank: u32| {
        let more = vec![Device::open_soft(&SoftConfig::new(address())).unwrap()];
        JoinConfig { more_devices: more, ..cluster.config("twice", 2, rank) }
    };
    let joined = join_all((0..2).map(config).collect());
    let mut ranks: Vec<Communicator> = joined.into_iter().map(Result::unwrap).collect();
    assert_eq!(ranks[0].switches().count(), 2);
    for times in 1..=2 {
        let progress = AtomicU64::new(0);
        let reports = thread::scope(|scope| {
            let (progress, ranks) = (&progress, &mut ranks);
            let reports = scope.spawn(move || {
                each(ranks, |communicator| {
                    until_gone_on(communicator, progress, times, |communicator, number| {
                        one(communicator, Call::AllReduce(Sum), number, LONG, true);
                        one(communicator, Call::AllReduce(Sum), number, 5, false);
                        one(communicator, Call::AllGather, number, 300, false);
                    })
                })
            });
            reached(progress, 2);
            drop(cluster.switches.pop());
            reports.join().unwrap()
        });
        for reports in &reports {
            assert_eq!(reports.len(), times);
            assert_eq!(reports[times - 1].fallback.is_some(), times == 2, "{reports:?}");
        }
    }
    leave(ranks);
}

/// The buffer of a call that was started is registered once, and serves on all trees.
#[test]
fn what_one_rank_has_not_called_yet_is_done_on_the_new_trees() {
    fn filled<T: Element>(
        communicator: &Communicator,
        value: T,
    ) -> millstream_collective::Buffer<T> {
        let mut buffer = communicator.allocate(LONG).unwrap();
        buffer.fill(value);
        buffer
    }
    let mut cluster = cluster(1);
    let mut ranks = cluster.group("late", 2);
    let call = Call::AllReduce(Sum);
    let buffer = filled(&ranks[0], 3_i64);
    ranks[0].start(call, buffer).unwrap();
    cluster.switches.clear();
    let end = Instant::now() + 2 * PATIENCE;
    while ranks.iter().any(|rank| rank.failovers().is_empty()) {
        assert!(Instant::now() < end, "no failure is seen");
        thread::sleep(Duration::from_millis(10));
    }
    let buffer = filled(&ranks[1], 4_i64);
    ranks[1].start(call, buffer).unwrap();
    for rank in &mut ranks {
        let buffer = rank.wait::<i64>(PATIENCE).unwrap().unwrap();
        assert!(buffer.iter().all(|&it| it == 7));
    }
    leave(ranks);
}

#[test]
fn in_place_without_copies_it_ends_and_says_so() {
    let (errors, calls) = errors_of(|config| JoinConfig { keep_overwritten: false, ..config });
    assert!(calls > 0);
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, CollectiveError::SwitchLost { .. }), "{text}");
        assert!(text.contains("in place and keeps no copy of what results overwrite"), "{text}");
    }
}

#[test]
fn reproducible_results_end_it_and_the_error_says_so() {
    let (errors, _) = errors_of(|config| {
        let reproducible = config.rank == 1;
        JoinConfig { reproducible, ..config }
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, CollectiveError::SwitchLost { .. }), "{text}");
        assert!(text.contains("a rank wants reproducible results"), "{text}");
    }
}

/// The errors of two ranks that reduce in place when their switch dies.
fn errors_of(change: impl Fn(JoinConfig) -> JoinConfig) -> (Vec<CollectiveError>, u64) {
    let mut cluster = cluster(1);
    let configs = (0..2).map(|rank| change(cluster.config("refused", 2, rank))).collect();
    let mut ranks: Vec<Communicator> = join_all(configs).into_iter().map(Result::unwrap).collect();
    let progress = AtomicU64::new(0);
    let errors = thread::scope(|scope| {
        let (progress, ranks) = (&progress, &mut ranks);
        let errors = scope.spawn(move || {
            each(ranks, |communicator| {
                loop {
                    let mut vector = vec![1_u32; LONG];
                    match communicator.all_reduce_in_place(&mut vector, Sum) {
                        Ok(()) => progress.fetch_add(1, Ordering::Relaxed),
                        Err(error) => break error,
                    };
                }
            })
        });
        reached(progress, 2);
        cluster.switches.clear();
        errors.join().unwrap()
    });
    for (rank, error) in ranks.iter().zip(&errors) {
        assert_eq!(rank.failure().as_ref(), Some(error));
    }
    (errors, progress.load(Ordering::Relaxed))
}
