//! Communicators that go on when a switch dies in mid-call.

mod common;

use std::io::{self, Read, Write};
use std::mem;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{
    Cluster, PATIENCE, address, each, join_all, joined, leave, start_controller_with, start_switch,
};
use millstream_collective::{
    Call, CollectiveError, Communicator, Element, FailoverReport, JoinConfig, Path,
    ReduceOperation::{Minimum as Min, Sum},
};
use millstream_control::api::ControllerView;
use millstream_control::controller::ControllerConfig;
use millstream_inc::protocol::{
    Commanded, FrameDecoder, FromController, Presence, SwitchChild, SwitchEdge, SwitchLimits,
    ToController, encode,
};
use millstream_verbs::{Device, Psn, Qpn, SoftConfig};

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

/// Ranks of these hosts, each of which is a label. Those of one share memory.
fn hosts(cluster: &Cluster, group: &str, hosts: &[u32]) -> Vec<Communicator> {
    let config = |(rank, host): (u32, &u32)| {
        let config = cluster.config(group, hosts.len() as u32, rank);
        JoinConfig { path: Path::Auto, host_label: format!("host {host}"), ..config }
    };
    joined((0..).zip(hosts).map(config))
}

/// Groups of 2 and 3 ranks, each with a collective of its own, whose one switch dies.
fn all_go_on(in_place: bool) {
    all_of_go_on(in_place, |cluster, group, number| cluster.group(group, 2 + number % 2));
}

/// As above, of groups that the function makes.
fn all_of_go_on(in_place: bool, make: impl Fn(&Cluster, &str, u32) -> Vec<Communicator>) {
    let mut cluster = cluster(1);
    let groups: Vec<Vec<Communicator>> =
        (0..).zip(SIX).map(|(number, _)| make(&cluster, &format!("g{number}"), number)).collect();
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

/// A host with one rank among them, whose vectors are laid out otherwise; the ranks of a host do not follow each other.
const SEVERAL: [&[u32]; 2] = [&[0, 1, 1, 0], &[0, 1, 0]];

#[test]
fn all_collectives_of_hosts_with_several_ranks_go_on() {
    for in_place in [false, true] {
        all_of_go_on(in_place, |cluster, group, number| {
            hosts(cluster, group, SEVERAL[number as usize % 2])
        });
    }
}

#[test]
fn hosts_with_several_ranks_go_on_again_and_again_over_switches_and_then_their_own() {
    let mut cluster = cluster(2);
    let mut ranks = hosts(&cluster, "again", &[0, 1, 1, 2]);
    let progress = AtomicU64::new(0);
    thread::scope(|scope| {
        let (progress, of) = (&progress, &mut ranks);
        let calls = scope.spawn(move || {
            each(of, |communicator| {
                until_gone_on(communicator, progress, 2, |communicator, number| {
                    for call in SIX {
                        let count = if number % 2 == 0 { 3 } else { 50_000 };
                        one(communicator, call, number, count, number % 3 == 0);
                    }
                })
            })
        });
        // The switch that serves is the one with a communicator: both die, one after the other.
        for _ in 0..2 {
            reached(progress, progress.load(Ordering::Relaxed) + 8);
            cluster.switches.remove(0);
        }
        let reports = calls.join().unwrap();
        for reports in &reports {
            let over = reports.last().unwrap();
            assert!(over.fallback.is_some() && over.reason.contains("is lost"), "{reports:?}");
        }
    });
    leave(ranks);
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
    let alone = |config| JoinConfig { keep_overwritten: false, ..config };
    let shared = |config: JoinConfig| JoinConfig {
        path: Path::Auto,
        host_label: format!("host {}", config.rank.div_ceil(2)),
        ..alone(config)
    };
    for errors in [errors_of(2, alone), errors_of(4, shared)] {
        for error in errors {
            let text = error.to_string();
            assert!(matches!(error, CollectiveError::SwitchLost { .. }), "{text}");
            assert!(text.contains("keeps no copy of what results overwrite"), "{text}");
        }
    }
}

#[test]
fn reproducible_results_end_it_and_the_error_says_so() {
    let errors = errors_of(2, |config| {
        let reproducible = config.rank == 1;
        JoinConfig { reproducible, ..config }
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, CollectiveError::SwitchLost { .. }), "{text}");
        assert!(text.contains("a rank wants reproducible results"), "{text}");
    }
}

/// So often it is tried to have a switch die amid a long call.
const MOMENTS: usize = 20;

/// The errors of ranks that reduce in place when their switch dies. They go on if it does between long calls: then another
/// moment is tried.
fn errors_of(world: u32, change: impl Fn(JoinConfig) -> JoinConfig) -> Vec<CollectiveError> {
    let mut attempts = (0..MOMENTS).map(|_| {
        let mut cluster = cluster(1);
        let mut ranks =
            joined((0..world).map(|rank| change(cluster.config("refused", world, rank))));
        let progress = AtomicU64::new(0);
        let errors = thread::scope(|scope| {
            let (progress, ranks) = (&progress, &mut ranks);
            let errors = scope.spawn(move || each(ranks, |it| error_of(it, progress)));
            reached(progress, 2 * u64::from(world));
            cluster.switches.clear();
            errors.join().unwrap()
        });
        for (rank, error) in ranks.iter().zip(&errors) {
            assert_eq!(rank.failure(), *error);
        }
        errors.into_iter().collect::<Option<Vec<_>>>()
    });
    attempts.find_map(|errors| errors).expect("the switch never dies amid a long call")
}

/// The error with which calls end; none if they go on, on all ranks.
fn error_of(communicator: &mut Communicator, progress: &AtomicU64) -> Option<CollectiveError> {
    let mut vector = vec![1_u32; 4 * LONG];
    loop {
        let long = (0..8).try_for_each(|_| {
            communicator.all_reduce_in_place(&mut vector, Sum)?;
            progress.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        let mut gone_on = [u32::from(!communicator.failovers().is_empty())];
        let short = long.and_then(|()| communicator.all_reduce_in_place(&mut gone_on, Min));
        if short.is_err() || gone_on == [1] {
            return short.err();
        }
    }
}

/// Does all-reduces on all ranks until they have gone on, while `lose` takes something away in mid-call.
fn gone_on(ranks: &mut [Communicator], lose: impl FnOnce()) -> Vec<Vec<FailoverReport>> {
    let progress = AtomicU64::new(0);
    thread::scope(|scope| {
        let progress = &progress;
        let reports = scope.spawn(move || {
            each(ranks, |communicator| {
                until_gone_on(communicator, progress, 1, |communicator, number| {
                    one(communicator, Call::AllReduce(Sum), number, LONG, number % 2 == 1);
                })
            })
        });
        reached(progress, 3);
        lose();
        reports.join().unwrap()
    })
}

#[test]
fn without_a_controller_the_ranks_meet_at_rank_0_and_later_losses_are_told() {
    let mut cluster = cluster(1);
    let mut ranks = cluster.group("alone", 3);
    let reports = gone_on(&mut ranks, || {
        cluster.controller_daemon = None;
        cluster.switches.clear();
    });
    for reports in reports {
        let [FailoverReport { fallback: Some(why), switches, .. }] = &reports[..] else {
            panic!("{reports:?}")
        };
        assert_eq!(why, "no controller can be reached, and rank 0 has taken its place");
        assert_eq!(switches.len(), 3, "{switches:?}");
    }
    // Rank 0 knows who leaves, and who is lost.
    let mut gone = ranks.pop().unwrap();
    gone.start(Call::AllReduce(Sum), gone.allocate::<u32>(LONG).unwrap()).unwrap();
    drop(gone);
    for error in each(&mut ranks, |communicator| {
        communicator.all_reduce_in_place(&mut vec![1_u32; LONG], Sum).unwrap_err()
    }) {
        assert!(matches!(error, CollectiveError::PeerLost { rank: 2, .. }), "{error}");
    }
}

/// A switch that the controller hears and that no rank reaches: it says that it makes what it is asked for.
fn pretend_switch(controller: SocketAddr) {
    let mut stream = TcpStream::connect(controller).unwrap();
    let mut say = {
        let mut stream = stream.try_clone().unwrap();
        move |message: &ToController| stream.write_all(&encode(message).unwrap()).unwrap()
    };
    let presence = Presence { incarnation: 5, ..Presence::default() };
    let (name, limits) = ("pretends".to_owned(), SwitchLimits::NONE);
    say(&ToController::Register { name, address: address(), limits, presence });
    let mut decoder = FrameDecoder::new();
    let mut bytes = [0; 4096];
    loop {
        let Some(Commanded { message, .. }) = decoder.next_message().unwrap() else {
            match stream.read(&mut bytes) {
                Ok(0) | Err(_) => return,
                Ok(count) => decoder.extend(&bytes[..count]),
            }
            continue;
        };
        match message {
            FromController::Ping => say(&ToController::Pong),
            FromController::CreateCommunicator { communicator, children, .. } => {
                let told = |child: &SwitchChild| child.receive_share.is_some();
                assert!(children.iter().all(told), "hosts tell how much they have room for");
                let edge = |child: &SwitchChild| SwitchEdge {
                    rank: child.ranks.first().unwrap(),
                    qpn: Qpn::new(77),
                    psn: Psn::new(0),
                    receive_share: None,
                };
                let edges = children.iter().map(edge).collect();
                say(&ToController::CommunicatorCreated { communicator, edges, uplink: None });
            }
            FromController::DestroyCommunicator { communicator } => {
                say(&ToController::CommunicatorDestroyed { communicator });
            }
            _ => {}
        }
    }
}

#[test]
fn a_switch_that_the_ranks_alone_do_not_reach_is_not_planned_again() {
    let mut cluster = cluster(0);
    let controller = cluster.controller;
    let pretender = thread::spawn(move || pretend_switch(controller));
    let mut ranks = cluster.group("hidden", 2);
    assert_eq!(ranks[0].switch().unwrap().0, "pretends");
    each(&mut ranks, |communicator| one(communicator, Call::AllReduce(Sum), 0, LONG, true));
    for rank in &ranks {
        let reports = rank.failovers();
        let [FailoverReport { fallback: Some(why), .. }] = &reports[..] else {
            panic!("{reports:?}")
        };
        assert_eq!(why, "its ranks have lost the switches that have registered");
    }
    leave(ranks);
    cluster.controller_daemon = None;
    pretender.join().unwrap();
}

/// Makes a group, has its switch die when so many of its first ranks have started a call, and waits until all join again, at a
/// controller that looks for another switch for so long, or for half of their time.
fn joining_again(
    started: usize,
    fallback_patience: Duration,
    make: impl FnOnce(&Cluster) -> Vec<Communicator>,
) -> (Vec<Communicator>, Cluster) {
    let view = Arc::new(ControllerView::new(None));
    let mut config = ControllerConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    config.view = Some(Arc::clone(&view));
    config.rules.fallback_patience = fallback_patience;
    let (daemon, controller) = start_controller_with(config);
    let switches = vec![start_switch(controller, "s0")];
    let controller_daemon = Some(daemon);
    let (path, fallback) = (Path::Switch, true);
    let mut cluster = Cluster { controller, switches, controller_daemon, path, fallback };
    let mut ranks = make(&cluster);
    for communicator in &mut ranks[..started] {
        let buffer = communicator.allocate::<u32>(LONG).unwrap();
        communicator.start(Call::AllReduce(Sum), buffer).unwrap();
    }
    cluster.switches.clear();
    let (pages, world) = (view.pages(), ranks.len());
    let end = Instant::now() + PATIENCE;
    let joined = format!(r#"+1","world":{world},"joined":{world}"#);
    while !pages("/api/v1/groups").unwrap().text.contains(&joined) {
        assert!(Instant::now() < end, "the ranks do not join again");
        thread::sleep(Duration::from_millis(5));
    }
    (ranks, cluster)
}

/// As above, and drops the first rank while all join again. Gives the others.
fn drop_first_while_it_joins(
    started: usize,
    make: impl FnOnce(&Cluster) -> Vec<Communicator>,
    all_have_joined: impl FnOnce(),
) -> (Vec<Communicator>, Cluster) {
    // So that the ranks are joining until something happens, or for half of their time.
    let (mut ranks, cluster) = joining_again(started, PATIENCE, make);
    all_have_joined();
    drop(ranks.remove(0));
    (ranks, cluster)
}

/// Why a rank is of no more use.
fn failure(communicator: &Communicator) -> String {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(error) = communicator.failure() {
            return error.to_string();
        }
        assert!(Instant::now() < end, "no failure is seen");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_rank_that_is_dropped_while_it_joins_again_leaves_at_once() {
    let (ranks, _cluster) =
        drop_first_while_it_joins(1, |cluster| cluster.group("drops", 2), || ());
    // Had it stayed, the other one would have gone on with it, and lost it then.
    let error = failure(&ranks[0]);
    assert!(
        error.contains("do not go on over other trees: ") && error.contains("rank 0"),
        "{error}"
    );
}

#[test]
fn a_rank_of_a_host_with_several_that_is_dropped_while_they_join_again_leaves_at_once() {
    // On the wire, and beside it: ranks 0 and 3 are one host, and so are 1 and 2.
    for dropped in [0, 3] {
        let (ranks, _cluster) = drop_first_while_it_joins(
            2,
            |cluster| {
                let mut ranks = hosts(cluster, "drops", &[0, 1, 1, 0]);
                ranks.swap(1, 3);
                ranks.swap(0, if dropped == 0 { 0 } else { 1 });
                ranks
            },
            || (),
        );
        let named = format!("rank {dropped}");
        for communicator in &ranks {
            let error = failure(communicator);
            assert!(error.contains(&named), "rank {}: {error}", communicator.rank());
        }
    }
}

/// A way to the controller by which it hears nothing once it is mute, not even that a connection is closed.
fn way_to(controller: SocketAddr, mute: &Arc<AtomicBool>) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (at, mute) = (listener.local_addr().unwrap(), Arc::clone(mute));
    thread::spawn(move || {
        for near in listener.incoming() {
            let (near, far) = (near.unwrap(), TcpStream::connect(controller).unwrap());
            let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            let mute = Arc::clone(&mute);
            thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = from.read(&mut bytes) {
                    if !mute.load(Ordering::SeqCst) && to.write_all(&bytes[..count]).is_err() {
                        break;
                    }
                }
                mem::forget(to);
            });
            thread::spawn(move || io::copy(&mut &far, &mut &near));
        }
    });
    at
}

#[test]
fn a_rank_that_ends_with_one_of_its_host_while_they_join_again_says_whom_it_has_lost() {
    let mute = Arc::new(AtomicBool::new(false));
    let make = |cluster: &Cluster| {
        let config = |(rank, host): (u32, u32)| {
            let config = cluster.config("blames", 4, rank);
            let controllers = match rank {
                3 => way_to(cluster.controller, &mute).into(),
                _ => config.controllers.clone(),
            };
            let host_label = format!("host {host}");
            JoinConfig { path: Path::Auto, host_label, controllers, ..config }
        };
        let mut ranks = joined((0..).zip([0, 1, 1, 0]).map(config));
        ranks.swap(1, 3);
        ranks.swap(0, 1);
        ranks
    };
    let (ranks, _cluster) = drop_first_while_it_joins(2, make, || {
        mute.store(true, Ordering::SeqCst);
    });
    // Ranks 1 and 2 are of another host.
    for communicator in ranks.iter().filter(|it| [1, 2].contains(&it.rank())) {
        let error = failure(communicator);
        let named = error.contains("rank 3 is lost") && !error.contains("rank 0 is lost");
        assert!(named, "rank {}: {error}", communicator.rank());
    }
}

#[test]
fn the_time_in_which_hosts_with_several_ranks_look_for_trees_does_not_count() {
    // The loss of the switch is noticed in half of the first, and for another one they wait 3 s.
    for call_timeout in [Duration::from_secs(4), Duration::MAX] {
        let mut cluster = cluster(1);
        let config = |(rank, host): (u32, u32)| JoinConfig {
            path: Path::Auto,
            host_label: format!("host {host}"),
            call_timeout,
            ..cluster.config("patient", 4, rank)
        };
        let mut ranks = joined((0..).zip([0, 1, 1, 0]).map(config));
        cluster.switches.clear();
        each(&mut ranks, |communicator| one(communicator, Call::AllReduce(Sum), 0, LONG, true));
        assert!(ranks.iter().all(|communicator| communicator.failovers().len() == 1));
        leave(ranks);
    }
}

/// The time is over after a second, and the loss is noticed a second later.
#[test]
fn a_switch_that_dies_shortly_before_the_time_of_a_call_is_over_is_lost_and_the_call_goes_on() {
    let mut cluster = cluster(1);
    let config = |rank| JoinConfig {
        call_timeout: Duration::from_secs(1),
        ..cluster.config("short", 2, rank)
    };
    let mut ranks = joined((0..2).map(config));
    cluster.switches.clear();
    each(&mut ranks, |communicator| communicator.barrier().unwrap());
    assert!(ranks.iter().all(|communicator| communicator.failovers().len() == 1));
    leave(ranks);
}

/// The host of ranks 2 and 3 does not call.
#[test]
fn a_call_that_is_started_anew_on_other_trees_has_what_was_left_of_its_time() {
    // Rank 1 waits for rank 0, which is on the wire, for 4.5 s longer than its own time: for less than has passed when the loss is
    // noticed, up to 4 s after the switch has died.
    const LIMIT: Duration = Duration::from_secs(10);
    const DIES_AFTER: Duration = Duration::from_secs(4);
    let mut cluster = cluster(2);
    let config = |(rank, host): (u32, u32)| JoinConfig {
        path: Path::Auto,
        host_label: format!("host {host}"),
        call_timeout: LIMIT,
        ..cluster.config("anew", 4, rank)
    };
    let mut ranks = joined((0..).zip([0, 0, 1, 1]).map(config));
    let serves: usize = ranks[0].switch().unwrap().0.trim_start_matches('s').parse().unwrap();
    let errors = thread::scope(|scope| {
        let callers = &mut ranks[..2];
        let errors =
            scope.spawn(move || each(callers, |communicator| communicator.barrier().unwrap_err()));
        thread::sleep(DIES_AFTER);
        drop(cluster.switches.remove(serves));
        errors.join().unwrap()
    });
    for error in errors {
        let CollectiveError::Overdue { ranks, .. } = &error else { panic!("{error}") };
        assert_eq!(**ranks, [2], "{error}");
    }
    assert!(ranks.iter().all(|communicator| communicator.failovers().len() == 1));
}

/// Rank 2 alone has called when the switch dies, and rank 3 never does.
#[test]
fn a_call_that_a_host_makes_while_it_looks_for_trees_has_all_of_its_time_after_that() {
    const LIMIT: Duration = Duration::from_secs(2);
    // That is over before there are trees.
    let (mut ranks, _cluster) = joining_again(1, LIMIT + Duration::from_secs(3), |cluster| {
        let config = |(rank, host): (u32, u32)| {
            let config = cluster.config("calls", 4, rank);
            let call_timeout = if host == 0 { LIMIT } else { config.call_timeout };
            let host_label = format!("host {host}");
            JoinConfig { path: Path::Auto, host_label, call_timeout, ..config }
        };
        let mut ranks = joined((0..).zip([0, 0, 1, 2]).map(config));
        ranks.swap(0, 2);
        ranks
    });
    let (callers, last) = ranks[1..].split_at_mut(2);
    thread::scope(|scope| {
        let errors = scope.spawn(move || {
            each(callers, |communicator| {
                communicator.all_reduce_in_place(&mut vec![1_u32; LONG], Sum).unwrap_err()
            })
        });
        let end = Instant::now() + PATIENCE;
        while last[0].failovers().is_empty() {
            assert!(Instant::now() < end, "it does not go on");
            thread::sleep(Duration::from_millis(1));
        }
        let since = Instant::now();
        for error in errors.join().unwrap() {
            let CollectiveError::Overdue { ranks, .. } = &error else { panic!("{error}") };
            assert_eq!(**ranks, [3], "{error}");
        }
        // Its time, less what may be between the ranks.
        let took = since.elapsed();
        assert!(took >= LIMIT / 2, "{took:?}");
    });
}

#[test]
fn without_a_controller_hosts_with_several_ranks_meet_at_rank_0() {
    let mut cluster = cluster(1);
    let mut ranks = hosts(&cluster, "alone", &[0, 1, 1, 0]);
    let reports = gone_on(&mut ranks, || {
        cluster.controller_daemon = None;
        cluster.switches.clear();
    });
    for reports in reports {
        let [FailoverReport { fallback: Some(why), .. }] = &reports[..] else {
            panic!("{reports:?}")
        };
        assert_eq!(why, "no controller can be reached, and rank 0 has taken its place");
    }
    leave(ranks);
}

#[test]
fn reproducible_results_end_hosts_with_several_ranks_and_all_hear_why() {
    let mut cluster = cluster(1);
    let config = |(rank, host): (u32, u32)| JoinConfig {
        path: Path::Auto,
        host_label: format!("host {host}"),
        reproducible: true,
        ..cluster.config("exact", 3, rank)
    };
    let mut ranks = joined((0..).zip([0, 1, 0]).map(config));
    cluster.switches.clear();
    for error in each(&mut ranks, |communicator| communicator.barrier().unwrap_err()) {
        let why = "a rank wants reproducible results, and other trees add in another order";
        assert!(matches!(error, CollectiveError::SwitchLost { .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
}
