//! Hosts that send no descriptors, and know nothing of this library but its control protocol: `examples/plain_host`.

mod common;
#[path = "../examples/plain_host/host.rs"]
mod host;

use std::thread;

use common::{Cluster, address};
use host::PlainHost;
use millstream_verbs::{Device, SoftConfig};

/// Ranks with one vector of these lengths each, one after the other. What became of each rank.
fn each_sums(world: u32, lengths: impl Fn(u32) -> Vec<usize> + Sync) -> Vec<Result<(), String>> {
    let cluster = Cluster::start(1);
    let controller = cluster.controller.to_string();
    let rank = |rank| {
        let device = Device::open_soft(&SoftConfig::new(address())).unwrap();
        let mut host = PlainHost::join(&controller, "plain", world, rank, &device)?;
        for (call, length) in lengths(rank).into_iter().enumerate() {
            let element = |rank: u32, index| {
                (index as i32).wrapping_mul(0x9e37_79b1_u32.cast_signed() ^ rank as i32)
            };
            let mut vector: Vec<i32> = (0..length).map(|index| element(rank, index)).collect();
            host.all_reduce(&mut vector)?;
            let sum =
                |index| (0..world).fold(0, |sum: i32, rank| sum.wrapping_add(element(rank, index)));
            assert!(vector.iter().copied().eq((0..length).map(sum)), "call {call} of rank {rank}");
        }
        host.leave()
    };
    thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = (0..world).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn hosts_that_send_no_descriptors_have_sums() {
    // Of one packet, of one segment and around it, of many windows.
    let lengths = [1, 257, 16_384, 16_385, 65_536, 1_000_003];
    let ended = each_sums(3, |_| lengths.to_vec());
    assert_eq!(ended, [Ok(()), Ok(()), Ok(())]);
}

#[test]
fn vectors_of_different_lengths_are_told_to_all() {
    let ended = each_sums(3, |rank| vec![1000, if rank == 1 { 999 } else { 1000 }]);
    for (rank, ended) in ended.into_iter().enumerate() {
        let error = ended.unwrap_err();
        assert!(error.contains("rank 1") && error.contains("999"), "rank {rank}: {error}");
    }
}
