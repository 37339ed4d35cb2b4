//! Ranks that take the place of switches.

mod common;

use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use common::rank::{self, Rank, answer};
use common::{Cluster, PATIENCE, address, each, join_all, leave, skip, start_switch};
use millstream_collective::{
    CollectiveError, Communicator, JoinConfig, JoinError, Path, ReduceOperation::Sum, Refusal,
};
use millstream_inc::protocol::{FrameDecoder, LostSwitch, ToController};
use millstream_lab::Stopwatch;
use millstream_verbs::{Device, Driver, SoftConfig};

/// Within this, the others hear of the death of a rank whose switch they use.
const BOUND: Duration = Duration::from_secs(5);

/// Elements of each rank, whose sum wraps.
fn vector(rank: u32, count: usize) -> Vec<u32> {
    let at = |index: usize| (index as u32 + 1).wrapping_mul(0x9e37_79b9) ^ (rank << 27);
    (0..count).map(at).collect()
}

fn sum(world: u32, count: usize) -> Vec<u32> {
    let mut all = vec![0_u32; count];
    for rank in 0..world {
        let mine = vector(rank, count);
        all.iter_mut().zip(mine).for_each(|(sum, it)| *sum = sum.wrapping_add(it));
    }
    all
}

/// Every collective, with its result compared.
fn all_of(communicator: &mut Communicator, count: usize) {
    let (rank, world) = (communicator.rank(), communicator.world());
    let (what, root) = ((rank, world, count), count as u32 % world);
    let all = count * world as usize;
    let (mine, long, total) = (vector(rank, count), vector(rank, all), sum(world, all));
    let part = rank as usize * count..(rank as usize + 1) * count;
    let mut result = vec![7; count];
    communicator.all_reduce(&mine, &mut result, Sum).unwrap();
    assert!(result == total[..count], "all_reduce {what:?}");
    let mut reduced = mine.clone();
    communicator.reduce_in_place(&mut reduced, Sum, root).unwrap();
    let wanted = if rank == root { &total[..count] } else { &mine[..] };
    assert!(reduced == wanted, "reduce {what:?}");
    communicator.broadcast_from(&mine, &mut result, root).unwrap();
    assert!(result == vector(root, count), "broadcast {what:?}");
    communicator.barrier().unwrap();
    communicator.reduce_scatter(&long, &mut result, Sum).unwrap();
    assert!(result == total[part], "reduce_scatter {what:?}");
    let gathered: Vec<u32> = (0..world).flat_map(|rank| vector(rank, count)).collect();
    let mut all_parts = vec![7; all];
    communicator.all_gather(&mine, &mut all_parts).unwrap();
    assert!(all_parts == gathered, "all_gather {what:?}");
}

/// How often each thread of this process has gone to sleep that waits for its communicator to fail, by its number.
fn sleeps_of_watchers() -> Vec<(String, u64)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let sleeps = |folder: std::path::PathBuf| {
        // Others may end meanwhile.
        let status = std::fs::read_to_string(folder.join("status")).ok()?;
        let value =
            |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        (value("Name:")? == "failover").then_some(())?;
        Some((folder.display().to_string(), value("voluntary_ctxt_switches:")?.parse().unwrap()))
    };
    tasks.filter_map(|task| sleeps(task.unwrap().path())).collect()
}

#[test]
fn results_do_not_wake_who_waits_for_a_failure() {
    const CALLS: u64 = 300;
    let cluster = Cluster { fallback: true, ..Cluster::start(1) };
    let mut ranks = cluster.group("results", 2);
    let calls = |ranks: &mut [Communicator], count| {
        each(ranks, |communicator| {
            for _ in 0..count {
                let mut one = [1_u32];
                communicator.all_reduce_in_place(&mut one, Sum).unwrap();
                assert_eq!(one, [2]);
            }
        });
    };
    calls(&mut ranks, 1);
    let before = sleeps_of_watchers();
    assert!(before.len() >= 2, "{before:?}");
    calls(&mut ranks, CALLS);
    let after = sleeps_of_watchers();
    for (thread, sleeps) in &before {
        // Those of other tests may have ended.
        let Some((_, now)) = after.iter().find(|(other, _)| other == thread) else { continue };
        // Some are for its start.
        assert!(now - sleeps < CALLS / 10, "{thread}: {sleeps}, then {now}");
    }
    leave(ranks);
}

#[test]
fn every_collective_is_exact_without_a_switch() {
    let cluster = Cluster::of_hosts();
    for world in [1, 2, 3, 8] {
        let mut ranks = cluster.group("hosts", world);
        for rank in &ranks {
            assert_eq!(rank.fallback(), Some("no switch has registered at the controller"));
            assert_eq!(rank.switches().count(), world as usize);
            assert_eq!(rank.switch().unwrap().0, "rank 0");
        }
        each(&mut ranks, |communicator| {
            // Small ones take turns, longer ones are divided.
            for count in [0, 1, 3, 1000, 40_000, 300_001] {
                all_of(communicator, count);
            }
        });
        leave(ranks);
    }
}

#[test]
fn sums_of_floats_have_the_same_bits_on_all_ranks() {
    let cluster = Cluster::of_hosts();
    let mut ranks = cluster.group("floats", 3);
    let at = |rank: u32, index: usize| 1.0 / (1.0 + index as f32 + 1000.0 * rank as f32);
    let sums = each(&mut ranks, |communicator| {
        let rank = communicator.rank();
        let mut vector: Vec<f32> = (0..200_000).map(|index| at(rank, index)).collect();
        communicator.all_reduce_in_place(&mut vector, Sum).unwrap();
        vector.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
    });
    assert!(sums[0] == sums[1] && sums[0] == sums[2]);
    leave(ranks);
}

#[test]
fn trees_use_all_devices_that_every_rank_has() {
    let cluster = Cluster::of_hosts();
    let config = |rank: u32| {
        let more = (0..=rank).map(|_| Device::open_soft(&SoftConfig::new(address())).unwrap());
        JoinConfig { more_devices: more.collect(), ..cluster.config("devices", 3, rank) }
    };
    let joined = join_all((0..3).map(config).collect());
    let mut ranks: Vec<Communicator> = joined.into_iter().map(Result::unwrap).collect();
    each(&mut ranks, |communicator| all_of(communicator, 100_000));
    leave(ranks);
}

#[test]
fn who_leaves_at_once_takes_no_result_away() {
    let cluster = Cluster::of_hosts();
    let joined = join_all((0..3).map(|rank| cluster.config("leave", 3, rank)).collect());
    let ranks: Vec<Communicator> = joined.into_iter().map(Result::unwrap).collect();
    let last = sum(3, 2_000_000);
    thread::scope(|scope| {
        for mut rank in ranks {
            let last = &last;
            scope.spawn(move || {
                let mut vector = vector(rank.rank(), 2_000_000);
                rank.all_reduce_in_place(&mut vector, Sum).unwrap();
                assert!(vector == *last);
            });
        }
    });
}

#[test]
fn a_switch_that_is_there_is_used() {
    let cluster = Cluster { fallback: true, ..Cluster::start(1) };
    let mut ranks = cluster.group("switch", 2);
    assert!(ranks.iter().all(|rank| rank.fallback().is_none()));
    each(&mut ranks, |communicator| all_of(communicator, 1000));
    leave(ranks);
}

#[test]
fn one_rank_that_does_not_want_it_decides_and_a_late_switch_serves() {
    let mut cluster = Cluster::of_hosts();
    let config = |rank: u32| {
        let config = cluster.config("unwanted", 2, rank);
        JoinConfig { fallback: rank == 0, timeout: Duration::from_secs(3), ..config }
    };
    for joined in join_all((0..2).map(config).collect()) {
        let error = joined.unwrap_err();
        assert!(
            matches!(error, JoinError::Refused(Refusal::NoSwitch { hosts: None, .. })),
            "{error:?}"
        );
    }
    let switch = start_switch(cluster.controller, "late");
    cluster.switches.push(switch);
    let ranks = cluster.group("wanted", 2);
    assert!(ranks.iter().all(|rank| rank.fallback().is_none()));
    leave(ranks);
}

#[test]
fn a_device_that_has_its_address_to_itself_is_named() {
    let cluster = Cluster::of_hosts();
    let config = SoftConfig { driver: Driver::Packet, ..SoftConfig::new(address()) };
    let device = match Device::open_soft(&config) {
        Ok(device) => device,
        Err(error) => return skip(&format!("a packet socket needs CAP_NET_RAW: {error}")),
    };
    let timeout = Duration::from_secs(2);
    let config = JoinConfig { device, timeout, ..cluster.config("packet", 1, 0) };
    let error = Communicator::join(&config).unwrap_err().to_string();
    assert!(error.contains("rank 0: its device soft-127.") && error.contains("udp"), "{error}");
}

#[test]
fn part_of_another_test() {
    let Some(words) = rank::words() else { return };
    let [controller, world, rank, bind] = &words[..] else { panic!("{words:?}") };
    let device = Device::open_soft(&SoftConfig::new(bind.parse().unwrap())).unwrap();
    let (world, rank) = (world.parse().unwrap(), rank.parse().unwrap());
    let controller: SocketAddr = controller.parse().unwrap();
    let config = JoinConfig::new(controller, "processes", world, rank, &device);
    let mut communicator =
        Communicator::join(&JoinConfig { path: Path::Switch, ..config }).unwrap();
    answer("joined");
    for line in std::io::stdin().lines() {
        let count: usize = line.unwrap().parse().unwrap();
        let mut result = vector(rank, count);
        match communicator.all_reduce_in_place(&mut result, Sum) {
            Ok(()) if result == sum(world, count) => answer("right"),
            Ok(()) => answer("wrong"),
            Err(error) => answer(&format!("error: {error}")),
        }
    }
}

fn processes(cluster: &Cluster, world: u32) -> Vec<Rank> {
    processes_at(cluster, &(0..world).map(|_| address()).collect::<Vec<IpAddr>>())
}

/// At these addresses, one for each.
fn processes_at(cluster: &Cluster, addresses: &[IpAddr]) -> Vec<Rank> {
    let world = addresses.len() as u32;
    let words =
        |rank: u32| format!("{} {world} {rank} {}", cluster.controller, addresses[rank as usize]);
    Rank::start_all(world, words)
}

/// Has each of them begin a sum of so many elements.
fn call(ranks: &mut [Rank], count: usize) {
    ranks.iter_mut().for_each(|rank| rank.say(&count.to_string()));
}

#[test]
fn a_rank_that_is_killed_in_a_call_ends_it_for_the_others() {
    let cluster = Cluster::of_hosts();
    let mut ranks = processes(&cluster, 3);
    call(&mut ranks, 100_000);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "right");
    }
    // Two are in the call, and the third is the root of a tree.
    let mut killed = ranks.pop().unwrap();
    call(&mut ranks, 4_000_000);
    killed.child.kill().unwrap();
    let stopwatch = Stopwatch::start();
    for rank in &mut ranks {
        let heard = rank.hear();
        assert!(heard.starts_with("error: ") && heard.contains("lost"), "{heard}");
    }
    let took = stopwatch.took();
    assert!(took.own() < BOUND, "after {took}");
}

/// The next thing that a rank says to a controller.
fn next(stream: &mut TcpStream, decoder: &mut FrameDecoder) -> ToController {
    loop {
        if let Some(message) = decoder.next_message().unwrap() {
            return message;
        }
        let mut bytes = [0; 4096];
        let count = stream.read(&mut bytes).unwrap();
        assert_ne!(count, 0, "it has closed the connection");
        decoder.extend(&bytes[..count]);
    }
}

/// A controller that was restarted knows no trees: it cannot tell which host it is.
#[test]
fn a_rank_says_which_host_has_the_switch_that_does_not_answer() {
    let mut cluster = Cluster::of_hosts();
    let addresses = [address(), address(), address()];
    let mut ranks = processes_at(&cluster, &addresses);
    let silent = ranks.pop().unwrap();
    silent.signal("STOP");
    drop(cluster.controller_daemon.take());
    let listener = TcpListener::bind(cluster.controller).unwrap();
    call(&mut ranks, 1_000_000);
    // One of both is enough.
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut decoder = FrameDecoder::new();
    let first = next(&mut stream, &mut decoder);
    assert!(matches!(first, ToController::Resume(_)), "{first:?}");
    let said = next(&mut stream, &mut decoder);
    let ToController::SwitchLost { switch: Some(switch), further_up: false, .. } = said else {
        panic!("{said:?}")
    };
    assert_eq!(switch, LostSwitch { address: addresses[2], incarnation: Some(0) });
}

#[test]
fn ranks_that_stand_still_for_a_short_time_only_delay_the_others() {
    let cluster = Cluster::of_hosts();
    let mut ranks = processes(&cluster, 3);
    for _ in 0..2 {
        ranks[1].signal("STOP");
        call(&mut ranks, 1_000_000);
        // So long that the others wait for it.
        thread::sleep(Duration::from_millis(200));
        ranks[1].signal("CONT");
        for rank in &mut ranks {
            assert_eq!(rank.hear(), "right");
        }
    }
}

#[test]
fn in_a_communicator_of_hosts_different_calls_are_an_error_of_all() {
    let cluster = Cluster::of_hosts();
    let mut ranks = cluster.group("differ", 2);
    let errors = each(&mut ranks, |communicator| match communicator.rank() {
        0 => communicator.all_reduce_in_place(&mut [1_u32; 8], Sum).unwrap_err(),
        _ => communicator.broadcast(&mut [1_u32; 8], 0).unwrap_err(),
    });
    for error in errors {
        assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error:?}");
    }
    drop(ranks);
    // The name is free.
    let mut again = cluster.group("differ", 2);
    each(&mut again, |communicator| all_of(communicator, 100));
    leave(again);
}
