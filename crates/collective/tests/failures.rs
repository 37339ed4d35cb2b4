//! What goes wrong, and what every rank hears of it.

mod common;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use common::{
    Cluster, PATIENCE, address, device, each, join_all, joined, leave, on_both, start_controller,
    start_controller_with,
};
use millstream_collective::{
    Awaited, Call, CollectiveError, Communicator, JoinConfig, JoinError, Path, ReduceOperation,
    Refusal, Waiting,
};
use millstream_control::controller::ControllerConfig;
use millstream_inc::protocol::{
    AbortReason, Commanded, FallbackOffer, FrameDecoder, FromController, Hello, Plan, ToController,
    encode,
};
use millstream_inc::{CommunicatorOptions, Violation};
use millstream_lab::Stopwatch;
use millstream_verbs::{
    Access, Mtu, Piece, Psn, Qpn, QueuePair, QueuePairAttributes, QueuePairCapabilities,
    QueuePairState, SendOperation, SendRequest,
};

use ReduceOperation::Sum;

/// The bound that callers are promised, from the death of someone to the error.
const BOUND: Duration = Duration::from_secs(5);

/// A host that joins as it should, and then does nothing by itself: no queue pair that it did not bring along, no answers.
struct Dummy {
    stream: TcpStream,
    decoder: FrameDecoder,
}

impl Dummy {
    fn join(cluster: &Cluster, group: &str, world: u32, rank: u32, address: IpAddr) -> Self {
        let stream = TcpStream::connect(cluster.controller).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let dummy = Self { stream, decoder: FrameDecoder::new() };
        let group = group.to_owned();
        let (timeout_ms, same_machine, more_addresses) = (30_000, None, Vec::new());
        let options = CommunicatorOptions::default();
        let hello = Hello {
            group,
            world,
            rank,
            address,
            timeout_ms,
            more_addresses,
            same_machine,
            options,
            fallback: FallbackOffer::Off,
            meeting: None,
            avoid: Vec::new(),
        };
        dummy.say(&ToController::Join(hello));
        dummy
    }

    fn say(&self, message: &ToController) {
        (&self.stream).write_all(&encode(message).unwrap()).unwrap();
    }

    fn hear(&mut self) -> FromController {
        loop {
            match self.decoder.next_message().unwrap() {
                Some(FromController::Ping) => self.say(&ToController::Pong),
                Some(FromController::Waiting { .. }) => {}
                Some(message) => return message,
                None => {
                    let mut bytes = [0; 4096];
                    let count = self.stream.read(&mut bytes).unwrap();
                    assert_ne!(count, 0, "the controller closed the connection");
                    self.decoder.extend(&bytes[..count]);
                }
            }
        }
    }

    /// Plays along until the communicator is ready, for which it has this queue pair.
    fn get_ready(&mut self, qpn: Qpn) -> Plan {
        assert!(matches!(self.hear(), FromController::GroupReady { .. }));
        let psn = Psn::new(0);
        self.say(&ToController::Connect {
            qpn,
            psn,
            path_mtu: Mtu::B4096,
            more: Vec::new(),
            receive_share: None,
        });
        let FromController::Plan(plan) = self.hear() else { panic!("a plan") };
        assert!(plan.receive_share.is_some(), "the switch has told how much it has room for");
        plan
    }
}

/// A group of which the last rank is a dummy.
fn with_dummy(cluster: &Cluster, group: &str, world: u32) -> (Vec<Communicator>, Dummy) {
    let (ranks, dummy, _) = with_dummy_at(cluster, group, world, address(), Qpn::new(77));
    (ranks, dummy)
}

/// As above, at this address and with this queue pair; and how that is to be connected.
fn with_dummy_at(
    cluster: &Cluster,
    group: &str,
    world: u32,
    address: IpAddr,
    qpn: Qpn,
) -> (Vec<Communicator>, Dummy, Plan) {
    let mut dummy = Dummy::join(cluster, group, world, world - 1, address);
    let configs = (0..world - 1).map(|rank| cluster.config(group, world, rank)).collect();
    std::thread::scope(|scope| {
        let ranks = scope.spawn(|| join_all(configs));
        let plan = dummy.get_ready(qpn);
        (ranks.join().unwrap().into_iter().map(Result::unwrap).collect(), dummy, plan)
    })
}

/// Connects a dummy's queue pair to its switch.
fn connect(pair: &QueuePair, plan: &Plan) {
    let none = QueuePairAttributes::default();
    for step in [
        QueuePairAttributes {
            state: Some(QueuePairState::Initialized),
            access: Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE),
            ..none
        },
        QueuePairAttributes {
            state: Some(QueuePairState::ReadyToReceive),
            remote_address: Some(plan.address),
            path_mtu: Some(plan.path_mtu),
            destination_qpn: Some(plan.qpn),
            receive_psn: Some(plan.psn),
            responder_resources: Some(0),
            minimum_rnr_timer: Some(1),
            ..none
        },
        QueuePairAttributes {
            state: Some(QueuePairState::ReadyToSend),
            send_psn: Some(Psn::new(0)),
            timeout: Some(17),
            retry_count: Some(7),
            rnr_retry: Some(7),
            initiator_depth: Some(1),
            ..none
        },
    ] {
        pair.modify(&step).unwrap();
    }
}

/// Starts a collective on every rank, lets something happen, and gives the errors.
fn errors_after(ranks: &mut [Communicator], happening: impl FnOnce()) -> Vec<CollectiveError> {
    for rank in ranks.iter_mut() {
        let buffer = rank.allocate::<i32>(1 << 20).unwrap();
        rank.start(Call::AllReduce(Sum), buffer).unwrap();
    }
    happening();
    let stopwatch = Stopwatch::start();
    let errors = each(ranks, |rank| rank.wait::<i32>(PATIENCE).unwrap_err());
    let took = stopwatch.took();
    assert!(took.own() < BOUND, "{errors:?} after {took}");
    errors
}

#[test]
fn a_mismatch_names_two_ranks_that_differ_to_everyone() {
    on_both(mismatch_in);
}

fn mismatch_in(cluster: &Cluster) {
    let mut ranks = cluster.group("mismatch", 3);
    each(&mut ranks, |rank| rank.all_reduce_in_place(&mut [1; 10], Sum).unwrap());
    let errors = each(&mut ranks, |rank| {
        let length = if rank.rank() == 1 { 50_001 } else { 50_000 };
        rank.all_reduce_in_place(&mut vec![1_i32; length], Sum).unwrap_err()
    });
    for error in &errors {
        // It is told as soon as two differ, whichever these are.
        let CollectiveError::Mismatch { rank, what } = error else { panic!("{error:?}") };
        let others = [0, 2].map(|other| match *rank {
            1 => format!("rank 1 has count 50001 where rank {other} has 50000"),
            _ => format!("rank {other} has count 50000 where rank 1 has 50001"),
        });
        let start = "the ranks do not agree on collective 1: ";
        assert!(others.iter().any(|other| *what == format!("{start}{other}")), "{rank}: {what}");
    }
    // It stays so, and is no obstacle to a new group of the same name.
    each(&mut ranks, |rank| {
        let again = rank.all_reduce_in_place(&mut [1; 10], Sum).unwrap_err();
        assert_eq!(again, errors[rank.rank() as usize]);
        assert_eq!(rank.failure(), Some(again));
    });
    let mut again = cluster.group("mismatch", 3);
    each(&mut again, |rank| rank.all_reduce_in_place(&mut [1; 10], Sum).unwrap());
    leave(again);
}

#[test]
fn a_rank_that_dies_in_the_middle_is_named_to_the_others() {
    let cluster = Cluster::start(1);
    let (mut ranks, dummy) = with_dummy(&cluster, "death", 3);
    // A neighbour that must not notice.
    let mut others = cluster.group("neighbour", 2);
    for error in errors_after(&mut ranks, || drop(dummy)) {
        let CollectiveError::PeerLost { rank: 2, detail } = error else { panic!("{error:?}") };
        assert!(!detail.is_empty());
    }
    each(&mut others, |rank| {
        let mut vector = [rank.rank() as i32 + 1; 3];
        rank.all_reduce_in_place(&mut vector, Sum).unwrap();
        assert_eq!(vector, [3; 3]);
    });
    leave(others);
}

#[test]
fn a_rank_that_breaks_the_protocol_is_named_for_that_and_not_as_lost() {
    let (cluster, device) = (Cluster::start(1), device());
    let completions = device.create_completion_queue(16).unwrap();
    let domain = device.allocate_protection_domain();
    let capabilities = QueuePairCapabilities::new(1, 1);
    let pair = domain.create_queue_pair(&completions, &completions, capabilities).unwrap();
    let (mut ranks, _dummy, plan) =
        with_dummy_at(&cluster, "breach", 3, device.address(), pair.number());
    connect(&pair, &plan);
    // No switch takes a READ: its end of the connection breaks, and it knows why.
    let read = SendOperation::Read { remote_address: 0, remote_key: 0 };
    let errors = errors_after(&mut ranks, || {
        pair.post_send(&[SendRequest::new(0, read, [Piece::default()])]).unwrap();
    });
    let what = format!("rank 2 broke the protocol: {}", Violation::Request);
    for error in errors {
        assert_eq!(error, CollectiveError::Protocol(what.clone()));
    }
}

#[test]
fn a_rank_that_gives_up_is_named_with_its_reason() {
    let cluster = Cluster::start(1);
    let (mut ranks, dummy) = with_dummy(&cluster, "gives up", 2);
    let errors = errors_after(&mut ranks, || {
        dummy.say(&ToController::Fail { reason: "tired".to_owned(), cause: None });
    });
    let detail = "it gave up: tired".to_owned();
    assert_eq!(errors, [CollectiveError::PeerLost { rank: 1, detail }]);
}

#[test]
fn a_communicator_that_is_dropped_in_the_middle_ends_it_for_all() {
    on_both(dropped_in);
}

fn dropped_in(cluster: &Cluster) {
    let mut ranks = cluster.group("dropped", 3);
    let mut last = ranks.pop().unwrap();
    // Not all have started, so it cannot end.
    let buffer = last.allocate::<i32>(1 << 20).unwrap();
    last.start(Call::AllReduce(Sum), buffer).unwrap();
    for rank in &mut ranks[..1] {
        let buffer = rank.allocate::<i32>(1 << 20).unwrap();
        rank.start(Call::AllReduce(Sum), buffer).unwrap();
    }
    drop(last);
    let error = ranks[0].wait::<i32>(PATIENCE).unwrap_err();
    assert!(matches!(error, CollectiveError::PeerLost { rank: 2, .. }), "{error:?}");
}

/// As after a loss of power: nothing closes the connection of before.
#[test]
fn a_rank_joins_again_though_its_connection_is_open_at_which_nobody_answers() {
    let (cluster, device) = (Cluster::start(1), device());
    let (mut ranks, dummy, _) = with_dummy_at(&cluster, "reset", 2, device.address(), Qpn::new(77));
    let config = JoinConfig { device, ..cluster.config("reset", 2, 1) };
    let stopwatch = Stopwatch::start();
    let mut again = std::thread::scope(|scope| {
        let second = scope.spawn(|| Communicator::join(&config).unwrap());
        let error = ranks[0].all_reduce_in_place(&mut vec![1_i32; 1 << 20], Sum).unwrap_err();
        assert!(matches!(error, CollectiveError::PeerLost { rank: 1, .. }), "{error:?}");
        let first = cluster.join("reset", 2, 0);
        vec![first, second.join().unwrap()]
    });
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_secs(8), "{took}");
    each(&mut again, |rank| rank.all_reduce_in_place(&mut [1; 10], Sum).unwrap());
    leave(again);
    drop(dummy);
}

#[test]
fn a_rank_that_lives_keeps_its_place_and_who_wants_it_is_told_so_in_time() {
    let cluster = Cluster::start(1);
    let configs = [0, 1].map(|rank| cluster.config("taken", 2, rank));
    let mut ranks = joined(configs.clone());
    // Whoever has another address is told so at once.
    let stopwatch = Stopwatch::start();
    let error = Communicator::join(&cluster.config("taken", 2, 1)).unwrap_err();
    let taken = matches!(error, JoinError::Refused(Refusal::RankTaken { rank: 1, .. }));
    let took = stopwatch.took();
    assert!(taken && took.own() < Duration::from_secs(3), "{error:?}, {took}");
    // It waits for 6 s, or as long as it may if that is less.
    for (timeout, waits) in [(1, 1), (30, 6)] {
        let timeout = Duration::from_secs(timeout);
        let config = JoinConfig { timeout, ..configs[1].clone() };
        let (stopwatch, mut refusals) = (Stopwatch::start(), 0);
        let joined = Communicator::join_reporting(&config, |waiting| {
            refusals += usize::from(waiting.refused.is_some());
        });
        let took = stopwatch.took();
        let error = joined.unwrap_err();
        let taken = matches!(error, JoinError::Refused(Refusal::RankTaken { rank: 1, .. }));
        assert!(taken && refusals > 1, "{error:?}, {refusals}");
        let waits = Duration::from_secs(waits);
        assert!(took.wall >= waits && took.own() < waits + Duration::from_secs(3), "{took}");
    }
    each(&mut ranks, |rank| rank.all_reduce_in_place(&mut [1; 10], Sum).unwrap());
    leave(ranks);
}

#[test]
fn a_rank_that_leaves_early_is_named_when_it_is_missed() {
    on_both(early_in);
}

fn early_in(cluster: &Cluster) {
    let mut ranks = cluster.group("early", 2);
    each(&mut ranks, |rank| rank.all_reduce_in_place(&mut [1; 10], Sum).unwrap());
    drop(ranks.pop());
    let error = ranks[0].all_reduce_in_place(&mut [1; 10], Sum).unwrap_err();
    let detail = "it left after 1 collectives".to_owned();
    assert_eq!(error, CollectiveError::PeerLost { rank: 1, detail });
}

/// The controller took it for lost, and named it to those who called later.
#[test]
fn who_cannot_go_on_since_a_rank_has_left_leaves_as_well() {
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let mut config = ControllerConfig::new(listen);
    config.rules.resume_timeout = Duration::from_millis(100);
    let (daemon, controller) = start_controller_with(config);
    let switches = vec![common::start_switch(controller, "s")];
    let controller_daemon = Some(daemon);
    let cluster =
        Cluster { controller, switches, controller_daemon, path: Path::Switch, fallback: false };
    for path in [Path::Switch, Path::SharedMemory] {
        let config = |rank| JoinConfig { path, ..cluster.config("left", 3, rank) };
        let mut ranks = joined((0..3).map(config));
        each(&mut ranks, |rank| rank.all_reduce_in_place(&mut [1; 10], Sum).unwrap());
        drop(ranks.pop());
        let detail = "it left after 1 collectives".to_owned();
        let missed = CollectiveError::PeerLost { rank: 2, detail };
        let error = ranks[0].all_reduce_in_place(&mut [1; 10], Sum).unwrap_err();
        assert_eq!(error, missed);
        drop(ranks.remove(0));
        // Who is away from later on is given up later, and its group hears of that.
        let (mut others, dummy) = with_dummy(&cluster, "away", 2);
        errors_after(&mut others, || drop(dummy));
        let error = ranks[0].all_reduce_in_place(&mut [1; 10], Sum).unwrap_err();
        assert_eq!(error, missed, "{path:?}");
    }
}

#[test]
fn a_switch_that_dies_is_named_to_its_ranks_and_another_takes_over() {
    let mut cluster = Cluster::start(1);
    let (mut ranks, _dummy) = with_dummy(&cluster, "switch", 3);
    let switch = ranks[0].switch().unwrap().1;
    let dead = cluster.switches.pop();
    for error in errors_after(&mut ranks, || drop(dead)) {
        let CollectiveError::SwitchLost { switch: lost, .. } = error else { panic!("{error:?}") };
        assert_eq!(lost, switch);
    }
    cluster.switches.push(common::start_switch(cluster.controller, "spare"));
    let mut again = cluster.group("switch", 2);
    each(&mut again, |rank| rank.all_reduce_in_place(&mut [1; 10], Sum).unwrap());
    assert_eq!(again[0].switch().unwrap().0, "spare");
    leave(again);
}

#[test]
fn a_rank_that_does_not_call_is_named_to_who_does() {
    on_both(slow_in);
}

fn slow_in(cluster: &Cluster) {
    let configs = (0..2).map(|rank| JoinConfig {
        call_timeout: Duration::from_secs(1),
        ..cluster.config("slow", 2, rank)
    });
    let joined = join_all(configs.collect());
    let mut ranks: Vec<Communicator> = joined.into_iter().map(Result::unwrap).collect();
    let error = ranks[0].all_reduce_in_place(&mut vec![1_i32; 1 << 20], Sum).unwrap_err();
    let text =
        "collective 0 did not end in time: rank 1 has not called it, or not sent what is due";
    let overdue = CollectiveError::Overdue { ranks: [1].into(), what: text.to_owned() };
    assert_eq!(error, overdue);
    // The other hears of it when it calls, or before.
    let error = ranks[1].all_reduce_in_place(&mut vec![1_i32; 1 << 20], Sum).unwrap_err();
    assert_eq!(error, overdue);
}

#[test]
fn without_a_switch_joining_fails_and_says_so() {
    let cluster = Cluster::start(0);
    let configs = (0..2).map(|rank| JoinConfig {
        timeout: Duration::from_secs(2),
        ..cluster.config("lonely", 2, rank)
    });
    for joined in join_all(configs.collect()) {
        let error = joined.unwrap_err();
        assert!(matches!(error, JoinError::Refused(Refusal::NoSwitch { .. })), "{error:?}");
        assert!(error.to_string().starts_with("there is no switch for group \"lonely\""));
    }
}

#[test]
fn without_all_ranks_joining_fails_and_names_the_missing() {
    let cluster = Cluster::start(1);
    let config =
        JoinConfig { timeout: Duration::from_secs(2), ..cluster.config("incomplete", 3, 1) };
    let error = Communicator::join(&config).unwrap_err();
    assert_eq!(
        error.to_string(),
        "group \"incomplete\" is incomplete: 2 of its 3 ranks did not join in time: 0, 2"
    );
}

#[test]
fn who_waits_hears_for_whom() {
    let cluster = Cluster::start(1);
    let (heard, waiting) = std::sync::mpsc::channel();
    let config = cluster.config("late", 3, 1);
    let (first, others) = std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            Communicator::join_reporting(&config, |waiting| heard.send(waiting.clone()).unwrap())
        });
        let Waiting { awaited, left, .. } = waiting.recv_timeout(PATIENCE).unwrap();
        assert_eq!(awaited, Some(Awaited::Ranks { missing: [0, 2].into_iter().collect() }));
        assert!(left <= config.timeout && left > Duration::ZERO, "{left:?}");
        let others = join_all([0, 2].map(|rank| cluster.config("late", 3, rank)).into());
        (first.join().unwrap(), others)
    });
    let others = others.into_iter().map(Result::unwrap);
    leave(others.chain([first.unwrap()]).collect());
}

#[test]
fn a_controller_that_says_nothing_is_what_one_waits_for() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let cluster = Cluster::start(0);
    let config = JoinConfig {
        controllers: listener.local_addr().unwrap().into(),
        timeout: Duration::ZERO,
        ..cluster.config("silence", 1, 0)
    };
    let mut heard = Vec::new();
    let error = Communicator::join_reporting(&config, |waiting| heard.push(waiting.clone()));
    assert!(matches!(error, Err(JoinError::Timeout { .. })), "{error:?}");
    assert!(!heard.is_empty() && heard.iter().all(|waiting| waiting.awaited.is_none()));
}

#[test]
fn without_a_controller_joining_fails_at_once() {
    let cluster = Cluster::start(0);
    let config = cluster.config("g", 1, 0);
    let controller = config.controllers.first();
    drop(cluster);
    let error = Communicator::join(&config).unwrap_err();
    assert!(matches!(error, JoinError::Unreachable { .. }), "{error:?}");
    assert!(error.to_string().contains(&controller.to_string()));
}

/// Sums up for so long, and checks every result; gives the number of calls.
fn sums_for(ranks: &mut [Communicator], duration: Duration) -> u64 {
    let (stopwatch, mut calls) = (Stopwatch::start(), 0);
    while stopwatch.took().own() < duration {
        each(ranks, |rank| {
            let mut vector = vec![1_i32; 1000];
            rank.all_reduce_in_place(&mut vector, Sum).unwrap();
            assert!(vector.iter().all(|&element| element == 2));
        });
        calls += 1;
    }
    calls
}

/// The last of two ranks leaves, and the other one hears of it, by the controller.
fn hears_who_leaves(mut ranks: Vec<Communicator>, calls: u64) {
    drop(ranks.pop());
    let error = ranks[0].all_reduce_in_place(&mut [1; 10], Sum).unwrap_err();
    let detail = format!("it left after {calls} collectives");
    assert_eq!(error, CollectiveError::PeerLost { rank: 1, detail });
}

/// The controller ends, and something happens before the next one starts at its place.
fn restart_controller(cluster: &mut Cluster, meanwhile: impl FnOnce()) {
    drop(cluster.controller_daemon.take());
    meanwhile();
    let (daemon, controller) = start_controller(cluster.controller);
    assert_eq!(controller, cluster.controller);
    cluster.controller_daemon = Some(daemon);
}

#[test]
fn a_controller_that_is_restarted_disturbs_no_call_and_the_next_one_knows_the_ranks() {
    restarted(Cluster::start(1));
}

#[test]
fn nor_those_through_shared_memory() {
    restarted(Cluster::of_shared_memory());
}

fn restarted(mut cluster: Cluster) {
    let mut ranks = cluster.group("orphans", 2);
    let mut calls = 0;
    restart_controller(&mut cluster, || calls += sums_for(&mut ranks, Duration::from_millis(300)));
    // The switch comes back by itself.
    let mut next = cluster.group("next", 2);
    each(&mut next, |rank| rank.all_reduce_in_place(&mut [1; 10], Sum).unwrap());
    leave(next);
    // Longer than anyone has to come back.
    calls += sums_for(&mut ranks, Duration::from_secs(5));
    hears_who_leaves(ranks, calls);
}

#[test]
fn a_rank_that_dies_while_there_is_no_controller_is_named_when_there_is_one() {
    let mut cluster = Cluster::start(1);
    let (mut ranks, dummy) = with_dummy(&cluster, "death", 3);
    restart_controller(&mut cluster, || drop(dummy));
    let stopwatch = Stopwatch::start();
    each(&mut ranks, |rank| {
        // The others do not call, so only the end of the communicator ends this.
        let error = rank.all_reduce_in_place(&mut vec![1_i32; 1 << 20], Sum).unwrap_err();
        assert!(matches!(error, CollectiveError::PeerLost { rank: 2, .. }), "{error:?}");
    });
    let took = stopwatch.took();
    assert!(took.own() < BOUND, "{took}");
}

#[test]
fn ranks_try_again_when_they_are_refused_for_load_or_by_one_that_was_replaced() {
    let mut cluster = Cluster::start(1);
    let mut ranks = cluster.group("storm", 2);
    let controller = cluster.controller;
    restart_controller(&mut cluster, || {
        let listener = TcpListener::bind(controller).unwrap();
        let reason = Refusal::Limit { what: "connections".to_owned(), limit: 1 };
        let loaded = Commanded { term: 1 << 20, message: FromController::Refused { reason } };
        let detail = "it was long ago".to_owned();
        let reason = AbortReason::PeerLost { rank: 0, detail };
        // One that commands with a lower term than this.
        let replaced = Commanded { term: 1, message: FromController::Abort { reason } };
        let mut resumes = [0; 2];
        while resumes.iter().any(|&count| count < 4) {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut decoder = FrameDecoder::new();
            let first = loop {
                let mut bytes = [0; 4096];
                let count = stream.read(&mut bytes).unwrap();
                decoder.extend(&bytes[..count]);
                if let Some(message) = decoder.next_message::<ToController>().unwrap() {
                    break message;
                }
            };
            // The switch comes too, and is left alone.
            let ToController::Resume(resume) = first else { continue };
            let count = &mut resumes[resume.rank as usize];
            *count += 1;
            let answer = if *count < 3 { &loaded } else { &replaced };
            stream.write_all(&encode(answer).unwrap()).unwrap();
            // Until it has read that.
            let _ = stream.read(&mut [0; 1]);
        }
    });
    let calls = sums_for(&mut ranks, Duration::from_millis(300));
    let next = cluster.group("next", 2);
    leave(next);
    hears_who_leaves(ranks, calls);
}
