//! What requests to connect and to fence bring about, with devices and without peers, mostly.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Weak;
use std::thread;

use millstream_lab::Stopwatch;
use millstream_metadata::Gid;

use super::*;
use crate::RdmaConfig;

const LONG: Duration = Duration::from_secs(60);

/// An address that no other test has.
fn address(host: u8) -> IpAddr {
    Ipv4Addr::new(127, 98, std::process::id() as u8, host).into()
}

fn open(host: u8, accepted: &Weak<Accepted>) -> LocalDevice {
    let config = RdmaConfig::new(&[address(host)]);
    LocalDevice::open_all(&config, accepted).unwrap().remove(0)
}

/// Asks nobody whether they are there.
const CONFIG: AcceptedConfig = AcceptedConfig {
    incarnation: 77,
    max_queue_pairs: 64,
    own_queue_pairs: 0,
    acknowledge_timeout: 13,
    interval: LONG,
};

fn by_path(name: &str, host: u8) -> HandShakeDesc {
    HandShakeDesc {
        local_nic_path: format!("{name}:1@nic"),
        local_gid: Some(Gid::from_address(address(host))),
        qp_num: vec![17],
        ..HandShakeDesc::default()
    }
}

fn by_rail(incarnation: u64, rail: u16, epoch: u64) -> HandShakeDesc {
    HandShakeDesc {
        incarnation: Some(incarnation),
        peer_incarnation: Some(CONFIG.incarnation),
        rail: Some(rail),
        epoch: Some(epoch),
        ..by_path("peer", 200)
    }
}

fn fence(incarnation: u64, rail: u16, epoch: u64) -> HandShakeDesc {
    HandShakeDesc { fence: true, qp_num: vec![], ..by_rail(incarnation, rail, epoch) }
}

impl Accepted {
    fn used(&self, device: &LocalDevice) -> usize {
        self.lock().used(device.device.name())
    }

    /// Connections, and queue pairs of a device.
    fn counts(&self, device: &LocalDevice) -> (usize, usize) {
        let store = self.lock();
        (store.connections(), store.used(device.device.name()))
    }

    fn has(&self, incarnation: u64, rail: u16) -> bool {
        self.lock().of(Initiator { incarnation, rail }).is_some()
    }

    /// Waits until this is so. Something changes whenever it can have become so.
    fn wait_until(&self, condition: impl Fn(&Store) -> bool) {
        let mut store = self.lock();
        while !condition(&store) {
            store = self.changed.wait(store).unwrap();
        }
    }
}

#[test]
fn a_peer_that_is_gone_is_forgotten_and_one_that_is_there_is_not() {
    let config = AcceptedConfig { interval: Duration::from_millis(10), ..CONFIG };
    let accepted = Arc::new(Accepted::new(config));
    let (ours, theirs) = (open(1, &Arc::downgrade(&accepted)), open(2, &Weak::new()));
    let asking = thread::spawn({
        let accepted = Arc::clone(&accepted);
        move || accepted.keep_asking()
    });
    accepted.accept(&ours, &by_path("gone", 3)).unwrap();
    accepted.accept(&ours, &by_rail(1, 1, 1)).unwrap();
    let unconnected = Unconnected::new(&theirs, 1, 1).unwrap();
    let there = HandShakeDesc {
        local_gid: Some(theirs.gid()),
        qp_num: unconnected.numbers(),
        start_psn: unconnected.start_psn(),
        ..by_rail(1, 2, 2)
    };
    let reply = accepted.accept(&ours, &there).unwrap();
    let mtu = ours.device.path_mtu(address(2)).unwrap();
    let peer = Peer::parse(&reply, address(1).into(), 1, mtu).unwrap();
    let _connection = unconnected.connect(&peer, 13).unwrap();
    accepted.wait_until(|store| store.connections() == 1);
    assert!(accepted.has(1, 2));
    // It goes on answering.
    let number = accepted.lock().numbers()[0];
    let asked = |accepted: &Accepted| accepted.lock().open(number).unwrap().3.asked;
    for expected in [true, false, true] {
        while asked(&accepted) != expected {
            thread::yield_now();
        }
    }
    assert_eq!(accepted.used(&ours), 1);
    accepted.stop();
    asking.join().unwrap();
}

/// With the default times, and as many as may be.
#[test]
fn many_that_die_at_once_are_forgotten_in_30_s() {
    let defaults = RdmaConfig::new(&[address(4)]);
    let config = AcceptedConfig {
        max_queue_pairs: defaults.max_accepted_queue_pairs,
        acknowledge_timeout: defaults.acknowledge_timeout,
        interval: defaults.keep_alive_interval,
        ..CONFIG
    };
    let accepted = Arc::new(Accepted::new(config));
    let ours = open(4, &Arc::downgrade(&accepted));
    let asking = thread::spawn({
        let accepted = Arc::clone(&accepted);
        move || accepted.keep_asking()
    });
    let stopwatch = Stopwatch::start();
    for rail in 0..512 {
        let request = HandShakeDesc { qp_num: vec![17; 4], ..by_rail(1, rail, 1) };
        accepted.accept(&ours, &request).unwrap();
    }
    assert_eq!(accepted.used(&ours), defaults.max_accepted_queue_pairs);
    accepted.wait_until(|store| store.connections() == 0);
    assert_eq!(accepted.used(&ours), 0);
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_secs(30), "{took}");
    accepted.stop();
    asking.join().unwrap();
}

/// A peer that connects again and again, as one that is killed, has one share.
#[test]
fn a_peer_is_told_what_it_may_send() {
    let accepted = Accepted::new(AcceptedConfig { max_queue_pairs: 1024, ..CONFIG });
    let ours = open(5, &Weak::new());
    let peer = |host: u8| HandShakeDesc {
        qp_num: (17..17 + MAX_QUEUE_PAIRS as u32).collect(),
        ..by_path("peer", host)
    };
    let share = |host| accepted.accept(&ours, &peer(host)).unwrap().receive_share.unwrap();
    let first = share(5);
    for _ in 0..20 {
        assert_eq!(share(5), first);
    }
    let goodbye = HandShakeDesc { disconnect: true, ..peer(5) };
    accepted.accept(&ours, &goodbye).unwrap();
    let shares: Vec<u64> = (6..16).map(share).collect();
    assert_eq!(shares[0], first);
    // Their sum is what there is at most, or each has the least.
    assert!(shares[9] < first || first == 128 << 10, "{shares:?}");
}

#[test]
fn numbers_of_connections_only_rise() {
    let accepted = Accepted::new(CONFIG);
    let ours = open(6, &Weak::new());
    let floor = |epoch| accepted.accept(&ours, &by_rail(1, 0, epoch)).unwrap_err().epoch_floor;
    assert_eq!(floor(0), Some(0));
    assert!(!accepted.has(1, 0));
    accepted.accept(&ours, &by_rail(1, 0, 5)).unwrap();
    assert_eq!([floor(5), floor(4)], [Some(5), Some(5)]);
    accepted.accept(&ours, &by_rail(1, 0, 6)).unwrap();
    assert_eq!(accepted.used(&ours), 1, "one of each rail");
    // It goes by the rail, whatever the address: the last one has it.
    let elsewhere = HandShakeDesc { local_gid: by_path("", 201).local_gid, ..by_rail(1, 0, 7) };
    accepted.accept(&ours, &elsewhere).unwrap();
    assert_eq!(accepted.used(&ours), 1);
    // Who lies about the highest number there is hurts its own rail only.
    accepted.accept(&ours, &by_rail(1, 0, u64::MAX)).unwrap();
    assert_eq!(floor(u64::MAX), Some(u64::MAX));
    assert_eq!(accepted.fence(&fence(1, 0, u64::MAX)).unwrap().fenced, Some(u64::MAX));
    accepted.accept(&ours, &by_rail(1, 1, 8)).unwrap();
    assert_eq!(accepted.used(&ours), 1);
}

#[test]
fn requests_that_make_no_sense_leave_nothing() {
    let accepted = Accepted::new(CONFIG);
    let ours = open(7, &Weak::new());
    let good = by_rail(1, 0, 1);
    for (bad, why) in [
        (HandShakeDesc { peer_incarnation: Some(78), ..good.clone() }, "was restarted"),
        (HandShakeDesc { rail: None, ..good.clone() }, "names both"),
        (HandShakeDesc { epoch: None, ..good.clone() }, "names both"),
        (HandShakeDesc { incarnation: None, ..good.clone() }, "its incarnation"),
        (HandShakeDesc { qp_num: vec![0], ..good.clone() }, "no queue pair number"),
        (HandShakeDesc { qp_num: vec![1 << 24], ..good.clone() }, "no queue pair number"),
        (HandShakeDesc { qp_num: vec![], ..good.clone() }, "0 queue pairs"),
        (HandShakeDesc { qp_num: vec![1; 17], ..good.clone() }, "17 queue pairs"),
    ] {
        let refusal = accepted.accept(&ours, &bad).unwrap_err().reason;
        assert!(refusal.contains(why), "{refusal:?}: {why}");
        let store = accepted.lock();
        assert_eq!((store.connections(), store.remembered()), (0, 0), "{why}");
    }
    for (bad, why) in [
        (HandShakeDesc { peer_incarnation: Some(78), ..fence(1, 0, 1) }, "was restarted"),
        (HandShakeDesc { rail: None, epoch: None, ..fence(1, 0, 1) }, "a fence names"),
    ] {
        let refusal = accepted.fence(&bad).unwrap_err().reason;
        assert!(refusal.contains(why), "{refusal:?}: {why}");
    }
    assert_eq!(accepted.lock().remembered(), 0);
    accepted.accept(&ours, &good).unwrap();
}

#[test]
fn a_fence_ends_the_connection_and_what_was_asked_for_before_it() {
    let accepted = Accepted::new(CONFIG);
    let ours = open(8, &Weak::new());
    accepted.accept(&ours, &by_rail(1, 0, 1)).unwrap();
    accepted.accept(&ours, &by_rail(1, 1, 2)).unwrap();
    for _ in 0..2 {
        assert_eq!(accepted.fence(&fence(1, 0, 3)).unwrap().fenced, Some(3));
        assert!(!accepted.has(1, 0) && accepted.has(1, 1));
        assert_eq!(accepted.used(&ours), 1, "its queue pairs are there for others");
    }
    assert_eq!(accepted.accept(&ours, &by_rail(1, 0, 3)).unwrap_err().epoch_floor, Some(3));
    accepted.accept(&ours, &by_rail(1, 0, 4)).unwrap();
    // One of an earlier connection, and of one that nobody knows.
    assert_eq!(accepted.fence(&fence(1, 0, 3)).unwrap().fenced, Some(3));
    assert_eq!(accepted.fence(&fence(2, 9, 1)).unwrap().fenced, Some(1));
    assert_eq!(accepted.used(&ours), 2);
    assert!(accepted.lock().fences_waiting() == 0);
}

/// Whoever comes while the connection before is being made waits for its end.
#[test]
fn requests_wait_for_what_others_are_making() {
    let accepted = Accepted::new(CONFIG);
    let ours = open(9, &Weak::new());
    let sender = Arc::new(Sender {
        nic_path: "peer:1@nic".to_owned(),
        gid: Gid::from_address(address(200)),
        device: ours.device.name().to_owned(),
        queue_pairs: vec![17],
        numbered: true,
        told_at: None,
    });
    let numbered = |epoch| Some((Initiator { incarnation: 1, rail: 0 }, epoch));
    let (initiator, epoch) = accepted.admit(numbered(1), &sender).unwrap();
    thread::scope(|scope| {
        let fenced = scope.spawn(|| accepted.fence(&fence(1, 0, 1)));
        let next = scope.spawn(|| accepted.accept(&ours, &by_rail(1, 0, 2)));
        // Both have been taken, and wait.
        while {
            let store = accepted.lock();
            store.fences_waiting() == 0 || !store.waits(initiator, 2)
        } {
            thread::yield_now();
        }
        // Other rails do not wait for them.
        accepted.accept(&ours, &by_rail(1, 1, 3)).unwrap();
        assert!(!fenced.is_finished() && !next.is_finished());
        assert!(accepted.reserve(&ours, (initiator, epoch), 1).is_err(), "it is not wanted");
        accepted.closed(initiator, epoch);
        assert_eq!(fenced.join().unwrap().unwrap().fenced, Some(1));
        next.join().unwrap().unwrap();
    });
    assert_eq!(accepted.counts(&ours), (2, 2));
}

#[test]
fn nobody_waits_for_ever_and_what_nobody_waits_for_is_closed() {
    let accepted = Accepted::new(CONFIG);
    let ours = open(10, &Weak::new());
    let sender = Arc::new(Sender {
        nic_path: "peer:1@nic".to_owned(),
        gid: Gid::from_address(address(200)),
        device: ours.device.name().to_owned(),
        queue_pairs: vec![17],
        numbered: true,
        told_at: None,
    });
    let stuck = (Initiator { incarnation: 1, rail: 0 }, 1);
    accepted.admit(Some(stuck), &sender).unwrap();
    let stopwatch = Stopwatch::start();
    thread::scope(|scope| {
        let fenced = scope.spawn(|| accepted.fence(&fence(1, 0, 1)).unwrap_err().reason);
        let next = scope.spawn(|| accepted.accept(&ours, &by_rail(1, 0, 2)).unwrap_err().reason);
        assert!(fenced.join().unwrap().contains("still being closed"));
        assert!(next.join().unwrap().contains("still being closed"));
    });
    let took = stopwatch.took();
    assert!(took.own() < 10 * PATIENCE, "{took}");
    accepted.closed(stuck.0, stuck.1);
    assert_eq!(accepted.counts(&ours), (0, 0));
    accepted.accept(&ours, &by_rail(1, 0, 3)).unwrap();
}

#[test]
fn of_requests_for_one_rail_at_once_one_connection_is_left() {
    let accepted = Accepted::new(CONFIG);
    let ours = open(11, &Weak::new());
    for round in 0..50 {
        let accept = |epoch| accepted.accept(&ours, &by_rail(1, 0, round * 8 + epoch)).is_ok();
        let accept = &accept;
        let done: Vec<bool> = thread::scope(|scope| {
            let all: Vec<_> = (1..=8).map(|epoch| scope.spawn(move || accept(epoch))).collect();
            all.into_iter().map(|each| each.join().unwrap()).collect()
        });
        assert!(done[7], "the newest is accepted: {done:?}");
        let store = accepted.lock();
        assert_eq!((store.connections(), store.used(ours.device.name())), (1, 1));
        assert_eq!(store.of(Initiator { incarnation: 1, rail: 0 }).unwrap().epoch, round * 8 + 8);
    }
    // Those that have no numbers likewise.
    for _ in 0..50 {
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| accepted.accept(&ours, &by_path("plain", 200)));
            }
        });
        assert_eq!(accepted.counts(&ours), (2, 2));
    }
}

#[test]
fn a_thousand_rails_have_the_queue_pairs_that_peers_may_have() {
    let accepted = Accepted::new(AcceptedConfig { max_queue_pairs: 10, ..CONFIG });
    let ours = open(12, &Weak::new());
    thread::scope(|scope| {
        for rails in [0..500, 500..1000] {
            let (accepted, ours) = (&accepted, &ours);
            scope.spawn(move || {
                for rail in rails {
                    let qp_num = vec![17; 1 + usize::from(rail) % 4];
                    let request = HandShakeDesc { qp_num, ..by_rail(1, rail, 1) };
                    accepted.accept(ours, &request).unwrap();
                    assert!(accepted.used(ours) <= 10);
                }
            });
        }
    });
    assert!(accepted.used(&ours) >= 7);
    for rail in 0..1000 {
        accepted.fence(&fence(1, rail, 1)).unwrap();
    }
    assert_eq!(accepted.counts(&ours), (0, 0));
    let many = HandShakeDesc { qp_num: vec![17; 11], ..by_rail(1, 0, 2) };
    let refusal = accepted.accept(&ours, &many).unwrap_err().reason;
    assert!(refusal.contains("all of the 10 queue pairs"), "{refusal}");
    assert_eq!(accepted.lock().connections(), 0);
}

#[test]
fn what_is_remembered_of_rails_is_bounded() {
    let accepted = Accepted::new(CONFIG);
    for rail in 0..20_000 {
        accepted.fence(&fence(1, rail, 1)).unwrap();
    }
    assert_eq!(accepted.lock().remembered(), 8192);
}

#[test]
fn a_device_keeps_queue_pairs_for_the_engine_itself() {
    let limit = |own_queue_pairs| {
        let config = AcceptedConfig { max_queue_pairs: 4096, own_queue_pairs, ..CONFIG };
        Accepted::new(config).limit(&open(13, &Weak::new()))
    };
    assert_eq!([limit(0), limit(1000), limit(10_000)], [4096, 3096, 2048]);
    assert_eq!(Accepted::new(CONFIG).limit(&open(13, &Weak::new())), 64);
}

/// Other users of the device have all of its queue pairs.
#[test]
fn where_the_device_has_no_more_one_makes_room() {
    let accepted = Accepted::new(CONFIG);
    let ours = open(14, &Weak::new());
    accepted.accept(&ours, &by_rail(1, 0, 1)).unwrap();
    let mut others = Vec::new();
    while let Ok(other) = Unconnected::new(&ours, 1, 1) {
        others.push(other);
    }
    accepted.accept(&ours, &by_rail(1, 1, 2)).unwrap();
    assert!(!accepted.has(1, 0) && accepted.has(1, 1));
    let both = HandShakeDesc { qp_num: vec![17, 18], ..by_rail(1, 2, 3) };
    let refusal = accepted.accept(&ours, &both).unwrap_err().reason;
    assert!(refusal.contains("queue pairs"), "{refusal}");
    drop(others);
    accepted.accept(&ours, &HandShakeDesc { epoch: Some(4), ..both }).unwrap();
    assert_eq!(accepted.used(&ours), 2);
}

/// Of two real connections the one goes that is idle, though it is the younger one.
#[test]
fn idle_goes_before_busy() {
    let accepted = Accepted::new(AcceptedConfig { max_queue_pairs: 2, ..CONFIG });
    let (ours, theirs) = (open(15, &Weak::new()), open(16, &Weak::new()));
    let mtu = ours.device.path_mtu(address(16)).unwrap();
    let connect = |rail, epoch| {
        let unconnected = Unconnected::new(&theirs, 1, 64).unwrap();
        let request = HandShakeDesc {
            local_gid: Some(theirs.gid()),
            qp_num: unconnected.numbers(),
            start_psn: unconnected.start_psn(),
            ..by_rail(1, rail, epoch)
        };
        let reply = accepted.accept(&ours, &request).unwrap();
        let peer = Peer::parse(&reply, address(15).into(), 1, mtu).unwrap();
        unconnected.connect(&peer, 13).unwrap()
    };
    let use_it = |connection: &Connection| {
        let before = connection_of(&accepted, 0).receive_psn();
        let operation = millstream_verbs::SendOperation::Write {
            remote_address: 0,
            remote_key: 0,
            immediate: None,
        };
        let write = millstream_verbs::SendRequest::new(1, operation, []);
        connection.queue_pairs[0].post_send(&[write]).unwrap();
        while connection_of(&accepted, 0).receive_psn() == before {
            theirs.device.progress();
            thread::yield_now();
        }
    };
    let busy = connect(0, 1);
    let _idle = connect(1, 2);
    for epoch in 3..10 {
        use_it(&busy);
        accepted.ask();
        // It had its turn, and nobody used it since.
        let _next = connect(epoch as u16, epoch);
        assert!(accepted.has(1, 0), "{epoch}");
        assert_eq!(accepted.used(&ours), 2);
    }
    accepted.ask();
    let _next = connect(20, 20);
    let _next = connect(21, 21);
    assert!(!accepted.has(1, 0), "it is idle, and the oldest");
}

fn connection_of(accepted: &Accepted, rail: u16) -> Arc<Connection> {
    let store = accepted.lock();
    match &store.of(Initiator { incarnation: 1, rail }).unwrap().state {
        store::State::Open(open) => Arc::clone(&open.connection),
        _ => panic!("it is not open"),
    }
}

#[test]
fn who_closes_leaves_nothing_and_others_stay() {
    let accepted = Accepted::new(CONFIG);
    let ours = open(17, &Weak::new());
    for rail in 0..5 {
        accepted.accept(&ours, &by_rail(1, rail, 1)).unwrap();
        accepted.accept(&ours, &by_rail(2, rail, 1)).unwrap();
    }
    accepted.peer_closes(3);
    assert_eq!(accepted.used(&ours), 10);
    accepted.peer_closes(1);
    assert_eq!(accepted.used(&ours), 5);
    // One connection at a time, by its numbers and its queue pairs.
    let goodbye = HandShakeDesc { disconnect: true, ..by_rail(2, 0, 1) };
    let other = HandShakeDesc { qp_num: vec![18], ..goodbye.clone() };
    accepted.accept(&ours, &other).unwrap();
    assert_eq!(accepted.used(&ours), 5);
    accepted.accept(&ours, &goodbye).unwrap();
    assert_eq!(accepted.used(&ours), 4);
}

#[test]
fn an_engine_that_stops_knows_whom_to_tell_and_accepts_nobody() {
    let accepted = Accepted::new(CONFIG);
    let ours = open(18, &Weak::new());
    accepted.accept(&ours, &by_rail(1, 0, 1)).unwrap();
    accepted.accept(&ours, &by_rail(1, 1, 2)).unwrap();
    let nobody = HandShakeDesc { local_nic_path: "no path".to_owned(), ..by_rail(3, 0, 1) };
    accepted.accept(&ours, &nobody).unwrap();
    accepted.accept(&ours, &by_path("plain", 200)).unwrap();
    // Nor has a stranger a name looked up, here by `peer`.
    for (rail, server) in [(1, "127.3.2.1:9"), (2, "[::1]:9")] {
        let path = format!("{server}@nic");
        let known = HandShakeDesc { local_nic_path: path, ..by_rail(4, rail, 1) };
        accepted.accept(&ours, &known).unwrap();
    }
    // Names need no lookup where it is said what they lead to. This engine itself is not told.
    for (incarnation, at) in [(5, "127.3.2.3:9"), (6, "127.3.2.3:9"), (77, "127.3.2.4:9")] {
        let control_address = Some(at.parse().unwrap());
        let known = HandShakeDesc { control_address, ..by_rail(incarnation, 1, 1) };
        accepted.accept(&ours, &known).unwrap();
    }
    let told = ["127.3.2.1:9", "127.3.2.3:9", "[::1]:9"].map(|at| at.parse().unwrap());
    assert_eq!(accepted.stop(), Some(told.into()));
    let refusal = accepted.accept(&ours, &by_rail(1, 0, 9)).unwrap_err().reason;
    assert!(refusal.contains("closes"), "{refusal}");
    accepted.fence(&fence(1, 0, 9)).unwrap_err();
    assert_eq!(accepted.lock().connections(), 0);
}

/// The peer takes it as the word that nothing of its connections arrives any more.
#[test]
fn an_engine_that_stops_tells_nobody_while_others_reset_queue_pairs() {
    let at = "127.3.2.1:9".parse().unwrap();
    for ends in [true, false] {
        let accepted = Accepted::new(CONFIG);
        let ours = open(21 + u8::from(ends), &Weak::new());
        for rail in [0, 1] {
            let known = HandShakeDesc { control_address: Some(at), ..by_rail(1, rail, 1) };
            accepted.accept(&ours, &known).unwrap();
        }
        // As a fence does it, on a thread that has not come further.
        let mut store = accepted.lock();
        store.fence(Initiator { incarnation: 1, rail: 0 }, 1);
        let mut endings = store.carry_out();
        drop(store);
        assert_eq!(endings.len(), 1);
        if ends {
            drop(accepted.reset(endings.remove(0)));
        }
        assert_eq!(accepted.stop(), ends.then(|| [at].into()));
    }
}

#[test]
fn who_is_at_a_port_of_infiniband_is_told_where_this_one_is() {
    let accepted = Arc::new(Accepted::new(CONFIG));
    let ours = open(9, &Arc::downgrade(&accepted));
    let gid = Some(Gid::from_address("fe80::7".parse().unwrap()));
    let request = HandShakeDesc { local_lid: 0x2a, local_gid: gid, ..by_rail(1, 0, 1) };
    let refused = accepted.accept(&ours, &request).unwrap_err();
    assert!(refused.reason.contains("fe80::7"), "{}", refused.reason);
    assert!(refused.reason.contains(&address(9).to_string()), "{}", refused.reason);
    assert_eq!(accepted.counts(&ours), (0, 0));
}
