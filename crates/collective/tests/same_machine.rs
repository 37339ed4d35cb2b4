//! Ranks that share memory and are processes: some of them are killed or stopped, or call something else. They are of one
//! host, or of two, which are labels here.

mod common;

use std::net::SocketAddr;
use std::time::Duration;

use common::rank::{self, Rank, answer};
use common::{Cluster, address};
use millstream_collective::{Call, Communicator, JoinConfig, Path, ReduceOperation};
use millstream_lab::Stopwatch;
use millstream_verbs::{Device, SoftConfig};

use ReduceOperation::Sum;

/// Within this, the others hear of a death, and those of other hosts within the second.
const BOUND: Duration = Duration::from_secs(1);
const BOUND_ELSEWHERE: Duration = Duration::from_secs(5);

const ONE_HOST: &str = "one";

/// What each of four ranks is of.
const TWO_HOSTS: [&str; 4] = ["a", "b", "b", "a"];

#[test]
fn part_of_another_test() {
    let Some(words) = rank::words() else { return };
    let [controller, world, rank, bind, milliseconds, label] = &words[..] else {
        panic!("{words:?}")
    };
    let device = Device::open_soft(&SoftConfig::new(bind.parse().unwrap())).unwrap();
    let (world, rank) = (world.parse().unwrap(), rank.parse().unwrap());
    let config = JoinConfig::new(
        controller.parse::<SocketAddr>().unwrap(),
        "processes",
        world,
        rank,
        &device,
    );
    let call_timeout = Duration::from_millis(milliseconds.parse().unwrap());
    let path = if label.as_str() == ONE_HOST { Path::SharedMemory } else { Path::Auto };
    let config = JoinConfig { path, host_label: label.to_owned(), call_timeout, ..config };
    let mut communicator = Communicator::join(&config).unwrap();
    assert!(communicator.sharing().contains(&rank));
    answer("joined");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (what, count) = line.split_once(' ').unwrap();
        let count: usize = count.parse().unwrap();
        match what {
            "sum" => {
                let mut vector: Vec<i32> = (0..count).map(|at| at as i32 ^ rank as i32).collect();
                let outcome = communicator.all_reduce_in_place(&mut vector, Sum);
                let wanted =
                    |at: usize| (0..world).map(|rank| at as i32 ^ rank as i32).sum::<i32>();
                let right = vector.iter().enumerate().all(|(at, sum)| *sum == wanted(at));
                match outcome {
                    Ok(()) if right => answer("right"),
                    Ok(()) => answer("wrong"),
                    Err(error) => answer(&format!("error: {error}")),
                }
            }
            // Nobody waits for it.
            "start" => {
                let buffer = communicator.allocate::<i32>(count).unwrap();
                communicator
                    .start(Call::AllReduce(Sum), buffer)
                    .map_err(|(_, error)| error)
                    .unwrap();
                answer("started");
            }
            other => panic!("{other}"),
        }
    }
}

fn start(cluster: &Cluster, world: u32, call_timeout: Duration) -> Vec<Rank> {
    start_at(cluster, &vec![ONE_HOST; world as usize], call_timeout)
}

/// Ranks at these hosts.
fn start_at(cluster: &Cluster, hosts: &[&str], call_timeout: Duration) -> Vec<Rank> {
    let (controller, milliseconds) = (cluster.controller, call_timeout.as_millis());
    let world = hosts.len() as u32;
    Rank::start_all(world, |rank| {
        let label = hosts[rank as usize];
        format!("{controller} {world} {rank} {} {milliseconds} {label}", address())
    })
}

const PATIENT: Duration = Duration::from_secs(60);

/// All sum up so many elements.
fn sums(ranks: &mut [Rank], count: usize) {
    ranks.iter_mut().for_each(|rank| rank.say(&format!("sum {count}")));
    for rank in ranks {
        assert_eq!(rank.hear(), "right");
    }
}

/// What all say, which is the same, and came in time.
fn all_hear(ranks: &mut [Rank], stopwatch: &Stopwatch) -> String {
    let mut heard: Vec<String> = ranks.iter_mut().map(Rank::hear).collect();
    let took = stopwatch.took();
    assert!(took.own() < BOUND, "{heard:?} after {took}");
    assert!(heard.windows(2).all(|pair| pair[0] == pair[1]), "{heard:?}");
    heard.remove(0)
}

#[test]
fn processes_get_exact_sums_of_short_and_long_vectors() {
    let cluster = Cluster::of_shared_memory();
    let mut ranks = start(&cluster, 3, PATIENT);
    for count in [1, 0, 2000, 2049, 100_003, 1 << 20] {
        sums(&mut ranks, count);
    }
}

#[test]
fn who_is_killed_before_it_calls_is_named_within_a_second() {
    let cluster = Cluster::of_shared_memory();
    // Rank 0 has made the memory, and the others have it all the same.
    for (victim, count) in [(2, 10), (0, 1 << 20)] {
        let mut ranks = start(&cluster, 3, PATIENT);
        sums(&mut ranks, 1000);
        let mut dead = ranks.remove(victim);
        ranks.iter_mut().for_each(|rank| rank.say(&format!("sum {count}")));
        let pid = dead.child.id();
        let stopwatch = Stopwatch::start();
        dead.child.kill().unwrap();
        let heard = all_hear(&mut ranks, &stopwatch);
        let lost = format!("rank {victim} is lost: process {pid} of this machine has ended");
        assert_eq!(heard, format!("error: {lost}"));
    }
}

#[test]
fn who_is_killed_in_the_middle_is_named_within_a_second() {
    let cluster = Cluster::of_shared_memory();
    let mut ranks = start(&cluster, 3, PATIENT);
    let mut dead = ranks.remove(1);
    // It has contributed the first of its vector, and waits for the others, one of which has not called yet.
    dead.say("start 1000000");
    assert_eq!(dead.hear(), "started");
    ranks[0].say("sum 1000000");
    let pid = dead.child.id();
    dead.child.kill().unwrap();
    let stopwatch = Stopwatch::start();
    ranks[1].say("sum 1000000");
    let heard = all_hear(&mut ranks, &stopwatch);
    assert_eq!(heard, format!("error: rank 1 is lost: process {pid} of this machine has ended"));
}

#[test]
fn who_is_stopped_is_named_to_all_when_the_time_is_over() {
    let cluster = Cluster::of_shared_memory();
    // As long as the first sum may take on a busy machine.
    let mut ranks = start(&cluster, 3, Duration::from_secs(3));
    sums(&mut ranks, 1000);
    ranks[1].signal("STOP");
    for rank in [0, 2] {
        ranks[rank].say("sum 100000");
    }
    let overdue = "error: collective 1 did not end in time: rank 1 has not called it, or not sent \
                   what is due";
    for rank in [0, 2] {
        assert_eq!(ranks[rank].hear(), overdue);
    }
    ranks[1].signal("CONT");
    ranks[1].say("sum 100000");
    assert_eq!(ranks[1].hear(), overdue);
}

#[test]
fn who_calls_something_else_is_named_before_the_last_one_has_called() {
    let cluster = Cluster::of_shared_memory();
    let mut ranks = start(&cluster, 3, PATIENT);
    sums(&mut ranks, 1000);
    ranks[0].say("sum 5000");
    ranks[2].say("sum 5001");
    let differ = "error: the ranks do not agree on collective 1: rank 2 has count 5001 where rank 0 \
                  has 5000";
    for rank in [0, 2] {
        assert_eq!(ranks[rank].hear(), differ);
    }
    ranks[1].say("sum 5000");
    assert_eq!(ranks[1].hear(), differ);
}

#[test]
fn who_is_killed_is_named_on_its_host_within_a_second_and_elsewhere_within_five() {
    let cluster = Cluster::start(1);
    // Rank 2 has others send for it, and rank 1 sends for it.
    for (victim, count) in [(2, 10), (2, 1 << 20), (1, 1 << 20)] {
        let mut ranks = start_at(&cluster, &TWO_HOSTS, PATIENT);
        sums(&mut ranks, 400_000);
        let mut dead = ranks.remove(victim);
        ranks.iter_mut().for_each(|rank| rank.say(&format!("sum {count}")));
        let pid = dead.child.id();
        let stopwatch = Stopwatch::start();
        dead.child.kill().unwrap();
        let lost = format!("error: rank {victim} is lost: process {pid} of this machine has ended");
        // Of the others one is of its host: rank 1 or 2.
        assert_eq!(ranks[1].hear(), lost);
        let took = stopwatch.took();
        assert!(took.own() < BOUND, "{took}");
        for rank in [0, 2] {
            let heard = ranks[rank].hear();
            let start = format!("error: rank {victim} is lost: ");
            assert!(heard.starts_with(&start), "{heard}");
        }
        let took = stopwatch.took();
        assert!(took.own() < BOUND_ELSEWHERE, "{took}");
    }
}

#[test]
fn who_is_killed_while_its_host_waits_for_others_is_named() {
    let cluster = Cluster::start(1);
    let mut ranks = start_at(&cluster, &TWO_HOSTS, PATIENT);
    sums(&mut ranks, 10);
    // It has called, and so has the other rank of its host; the other host has not.
    let mut dead = ranks.remove(2);
    dead.say("start 1000000");
    assert_eq!(dead.hear(), "started");
    ranks[1].say("sum 1000000");
    dead.child.kill().unwrap();
    for rank in [0, 2] {
        ranks[rank].say("sum 1000000");
    }
    for rank in &mut ranks {
        let heard = rank.hear();
        assert!(heard.starts_with("error: rank 2 is lost: "), "{heard}");
    }
}
