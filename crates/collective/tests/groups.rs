//! Groups, which make several communicators, and runs of one name.

mod common;

use std::thread;
use std::time::Duration;

use common::{Cluster, each, leave, on_both};
use millstream_collective::{Communicator, Group, JoinConfig, JoinError, ReduceOperation, Refusal};
use millstream_lab::Stopwatch;

use ReduceOperation::Sum;

fn groups(configs: Vec<JoinConfig>) -> Vec<Group> {
    thread::scope(|scope| {
        let create = |config| scope.spawn(move || Group::create(&config).unwrap());
        let threads: Vec<_> = configs.into_iter().map(create).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn configs(cluster: &Cluster, name: &str, world: u32) -> Vec<JoinConfig> {
    (0..world).map(|rank| cluster.config(name, world, rank)).collect()
}

fn communicators(groups: &mut [Group]) -> Vec<Communicator> {
    thread::scope(|scope| {
        let threads: Vec<_> =
            groups.iter_mut().map(|group| scope.spawn(|| group.communicator().unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn all_reduce(ranks: &mut [Communicator]) {
    let world = ranks.len() as i32;
    each(ranks, |communicator| {
        let mut vector = vec![communicator.rank() as i32 + 1; 5000];
        communicator.all_reduce_in_place(&mut vector, Sum).unwrap();
        assert!(vector.iter().all(|&element| element == world * (world + 1) / 2));
    });
}

#[test]
fn a_group_makes_several_communicators_which_live_side_by_side() {
    on_both(several_in);
}

fn several_in(cluster: &Cluster) {
    // Longer than a name can be with what is added to it.
    let name = "é".repeat(60);
    let mut groups = groups(configs(cluster, &name, 3));
    let mut first = communicators(&mut groups);
    let mut second = communicators(&mut groups);
    all_reduce(&mut second);
    all_reduce(&mut first);
    leave(first);
    let mut third = communicators(&mut groups);
    all_reduce(&mut third);
    all_reduce(&mut second);
    drop(groups);
    all_reduce(&mut third);
    leave(second);
    leave(third);
}

#[test]
fn a_run_right_after_another_is_a_new_group_whoever_ends_first() {
    on_both(runs_in);
}

fn runs_in(cluster: &Cluster) {
    thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || {
                // Each begins its next run when its own part of the last one is over.
                for run in 0..5 {
                    let mut group = Group::create(&cluster.config("runs", 3, rank)).unwrap();
                    let mut communicator = group.communicator().unwrap();
                    let mut vector = vec![run; 100];
                    communicator.all_reduce_in_place(&mut vector, Sum).unwrap();
                    assert!(vector.iter().all(|&element| element == 3 * run), "{vector:?}");
                }
            });
        }
    });
}

#[test]
fn a_second_job_of_a_name_waits_for_the_first_and_does_not_mix_with_it() {
    on_both(jobs_in);
}

fn jobs_in(cluster: &Cluster) {
    let mut first = groups(configs(cluster, "job", 2));
    let mut ranks = communicators(&mut first);
    let later = configs(cluster, "job", 2);
    let waiting = thread::spawn(move || groups(later));
    let impatient = JoinConfig { timeout: Duration::from_secs(2), ..cluster.config("job", 2, 1) };
    let error = Group::create(&impatient).unwrap_err();
    let taken = |refusal: &Refusal| matches!(refusal, Refusal::RankTaken { rank: 1, .. });
    assert!(matches!(&error, JoinError::Refused(refusal) if taken(refusal)), "{error:?}");
    let larger = JoinConfig { world: 3, rank: 2, ..impatient };
    let error = Group::create(&larger).unwrap_err();
    assert!(matches!(error, JoinError::Refused(Refusal::WorldDiffers { .. })), "{error:?}");
    all_reduce(&mut ranks);

    // Who has had the patience gets its turn.
    leave(ranks);
    let mut second = waiting.join().unwrap();
    all_reduce(&mut communicators(&mut second));
}

#[test]
fn a_rank_that_ends_before_its_communicator_is_made_fails_that_of_others() {
    on_both(ends_early_in);
}

fn ends_early_in(cluster: &Cluster) {
    let mut groups = groups(configs(cluster, "early", 2));
    let stopwatch = Stopwatch::start();
    drop(groups.remove(1));
    // It was there, so it may take a moment to be known.
    let error = match groups[0].communicator() {
        Err(error) => error.to_string(),
        Ok(mut communicator) => communicator.barrier().unwrap_err().to_string(),
    };
    assert!(error.contains("rank 1"), "{error}");
    assert!(stopwatch.took().own() < Duration::from_secs(5));
}
