//! SQD: what was begun is finished, what was not waits, and an event says when (IBTA 10.3.1.5).

mod common;

use std::time::Duration;

use common::{Options, Pair, pattern, piece};
use millstream_roce::{
    AsyncEvent, CompletionStatus, Instant, ModifyError, QueuePairAttributes,
    QueuePairState as State, SendOperation,
};
use millstream_wire::Packet;

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
/// More packets than the window of [`options`].
const LONG: usize = 20 * 256;

/// A window of four packets: of a long message only the first are out.
fn options() -> Options {
    Options { max_window: 1, timeout: 14, ..Options::default() }
}

fn go(pair: &mut Pair, host: usize, state: State) -> Result<(), ModifyError> {
    modify(pair, host, QueuePairAttributes { state: Some(state), ..Default::default() })
}

fn modify(pair: &mut Pair, host: usize, with: QueuePairAttributes) -> Result<(), ModifyError> {
    let (now, host) = (pair.now, &mut pair.hosts[host]);
    host.endpoint.modify_queue_pair(now, host.qpn, &with)
}

fn events(pair: &mut Pair, host: usize) -> Vec<AsyncEvent> {
    std::iter::from_fn(|| pair.hosts[host].endpoint.poll_event()).collect()
}

/// The numbers of the requests that completed, all of them well.
fn done(pair: &mut Pair, host: usize) -> Vec<u64> {
    let completions = pair.completions(host);
    assert!(completions.iter().all(|c| c.status == CompletionStatus::Success), "{completions:?}");
    completions.iter().map(|c| c.id).collect()
}

struct Scene {
    pair: Pair,
    local: u32,
    remote: u32,
}

impl Scene {
    fn new(options: Options) -> Self {
        let mut pair = Pair::with(options);
        let local = pair.register(0, LOCAL, pattern(LONG, 1));
        let remote = pair.register(1, REMOTE, pattern(LONG, 2));
        Self { pair, local, remote }
    }

    fn write(&mut self, id: u64, length: usize) {
        let operation = SendOperation::Write {
            remote_address: REMOTE,
            remote_key: self.remote,
            immediate: None,
        };
        self.pair.post(0, id, operation, &[piece(self.local, LOCAL, length)]);
    }

    fn read(&mut self, id: u64) {
        let operation = SendOperation::Read { remote_address: REMOTE, remote_key: self.remote };
        self.pair.post(0, id, operation, &[piece(self.local, LOCAL, LONG)]);
    }
}

#[test]
fn what_was_begun_is_finished_and_the_rest_waits() {
    for (read, split_writes) in [(false, false), (false, true), (true, false)] {
        let mut scene = Scene::new(Options { split_writes, ..options() });
        scene.write(1, 10);
        if read {
            scene.read(2);
        } else {
            scene.write(2, LONG);
        }
        scene.write(3, 10);
        // Some packets of the long one are out.
        while scene.pair.counters(0).packets_sent < 3 {
            assert!(scene.pair.step());
        }
        let drained = AsyncEvent::SendQueueDrained(scene.pair.hosts[0].qpn);
        go(&mut scene.pair, 0, State::SendQueueDrained).unwrap();
        assert_eq!(events(&mut scene.pair, 0), []);
        // Posted in SQD: it waits too.
        scene.write(4, 10);
        scene.pair.run(Duration::from_secs(1));
        assert_eq!(done(&mut scene.pair, 0), [1, 2], "read {read}");
        assert_eq!(events(&mut scene.pair, 0), [drained]);
        let sent = scene.pair.counters(0).packets_sent;
        scene.pair.run(Duration::from_secs(1));
        assert_eq!(scene.pair.counters(0).packets_sent, sent);
        assert_eq!(events(&mut scene.pair, 0), []);
        go(&mut scene.pair, 0, State::ReadyToSend).unwrap();
        scene.pair.run(Duration::from_secs(1));
        assert_eq!(done(&mut scene.pair, 0), [3, 4], "read {read}");
        assert_eq!(events(&mut scene.pair, 0), []);
    }
}

#[test]
fn a_queue_with_nothing_begun_is_drained_at_once_each_time() {
    let mut scene = Scene::new(options());
    scene.write(1, 10);
    let drained = AsyncEvent::SendQueueDrained(scene.pair.hosts[0].qpn);
    for _ in 0..3 {
        go(&mut scene.pair, 0, State::SendQueueDrained).unwrap();
        assert_eq!(events(&mut scene.pair, 0), [drained]);
        // Once more is no change.
        go(&mut scene.pair, 0, State::SendQueueDrained).unwrap();
        assert_eq!(events(&mut scene.pair, 0), []);
        go(&mut scene.pair, 0, State::ReadyToSend).unwrap();
    }
    scene.pair.run(Duration::from_secs(1));
    assert_eq!(done(&mut scene.pair, 0), [1]);
}

#[test]
fn losses_are_made_good_while_draining() {
    let mut scene = Scene::new(options());
    let mut count = 0;
    scene.pair.wire = Box::new(move |_, datagram| {
        count += 1;
        if count % 3 == 2 { vec![] } else { vec![datagram.to_vec()] }
    });
    scene.write(1, LONG);
    scene.write(2, LONG);
    assert!(scene.pair.step());
    go(&mut scene.pair, 0, State::SendQueueDrained).unwrap();
    scene.pair.run(Duration::from_secs(10));
    assert_eq!(done(&mut scene.pair, 0), [1]);
    assert_eq!(events(&mut scene.pair, 0).len(), 1);
    assert_eq!(scene.pair.region(1, scene.remote), pattern(LONG, 1));
}

#[test]
fn it_receives_meanwhile_and_afterwards() {
    let mut scene = Scene::new(options());
    scene.write(1, LONG);
    assert!(scene.pair.step());
    go(&mut scene.pair, 0, State::SendQueueDrained).unwrap();
    for round in 10..13 {
        let operation = SendOperation::Read { remote_address: LOCAL, remote_key: scene.local };
        scene.pair.post(1, round, operation, &[piece(scene.remote, REMOTE, 1000)]);
        scene.pair.receive(0, round, &[piece(scene.local, LOCAL, 1000)]);
        let send = SendOperation::Send { immediate: None };
        scene.pair.post(1, round, send, &[piece(scene.remote, REMOTE, 1000)]);
        scene.pair.run(Duration::from_secs(1));
        assert_eq!(done(&mut scene.pair, 1), [round, round]);
    }
    let mut ended = done(&mut scene.pair, 0);
    ended.sort_unstable();
    assert_eq!(ended, [1, 10, 11, 12]);
    assert_eq!(scene.pair.state(0), State::SendQueueDrained);
}

#[test]
fn attributes_are_changed_when_it_is_drained_and_not_before() {
    let mut scene = Scene::new(options());
    scene.write(1, LONG);
    assert!(scene.pair.step());
    go(&mut scene.pair, 0, State::SendQueueDrained).unwrap();
    let refused = Err(ModifyError::Draining(scene.pair.hosts[0].qpn));
    let retry =
        QueuePairAttributes { retry_count: Some(1), timeout: Some(8), ..Default::default() };
    assert_eq!(modify(&mut scene.pair, 0, retry), refused);
    assert_eq!(go(&mut scene.pair, 0, State::ReadyToSend), refused);
    scene.pair.run(Duration::from_secs(1));
    assert_eq!(done(&mut scene.pair, 0), [1]);
    modify(&mut scene.pair, 0, retry).unwrap();
    go(&mut scene.pair, 0, State::ReadyToSend).unwrap();
    // The new patience counts: 2 * 4.096 us * 2^8.
    scene.pair.wire = Box::new(|_, _| vec![]);
    scene.write(2, 10);
    let start = scene.pair.now;
    scene.pair.run(Duration::from_secs(1));
    let failed = scene.pair.completions(0)[0];
    assert_eq!((failed.id, failed.status), (2, CompletionStatus::RetryExceeded));
    assert_eq!(scene.pair.now, start + Duration::from_nanos((2 * 4096) << 8));
}

#[test]
fn reads_that_wait_are_done_even_when_the_depth_became_zero() {
    let mut scene = Scene::new(options());
    scene.read(1);
    scene.read(2);
    go(&mut scene.pair, 0, State::SendQueueDrained).unwrap();
    let none = QueuePairAttributes { initiator_depth: Some(0), ..Default::default() };
    modify(&mut scene.pair, 0, none).unwrap();
    go(&mut scene.pair, 0, State::ReadyToSend).unwrap();
    scene.pair.run(Duration::from_secs(1));
    assert_eq!(done(&mut scene.pair, 0), [1, 2]);
}

#[test]
fn failing_while_draining_is_no_draining() {
    let mut scene = Scene::new(options());
    scene.pair.wire = Box::new(|_, _| vec![]);
    scene.write(1, LONG);
    scene.write(2, 10);
    assert!(scene.pair.step());
    go(&mut scene.pair, 0, State::SendQueueDrained).unwrap();
    scene.pair.run(Duration::from_secs(1000));
    let ends: Vec<_> = scene.pair.completions(0).iter().map(|c| (c.id, c.status)).collect();
    let expected = [(1, CompletionStatus::RetryExceeded), (2, CompletionStatus::Flushed)];
    assert_eq!(ends, expected);
    let qpn = scene.pair.hosts[0].qpn;
    assert_eq!(events(&mut scene.pair, 0), [AsyncEvent::QueuePairFatal(qpn)]);
}

#[test]
fn reset_and_error_do_not_wait() {
    for state in [State::Reset, State::Error] {
        let mut scene = Scene::new(options());
        scene.write(1, LONG);
        assert!(scene.pair.step());
        go(&mut scene.pair, 0, State::SendQueueDrained).unwrap();
        go(&mut scene.pair, 0, state).unwrap();
        assert_eq!(scene.pair.state(0), state);
        assert_eq!(events(&mut scene.pair, 0), []);
    }
}

/// A queue pair is reset in the middle of its work and connected again, while packets of its old
/// life are still on their way: none of them reaches the new one.
#[test]
fn a_queue_pair_is_reset_under_load_and_used_again() {
    let mut scene = Scene::new(Options { timeout: 14, ..Options::default() });
    let first = Options::default().psn;
    for life in 0..20_u32 {
        scene.write(1, LONG);
        scene.read(2);
        // Cut off in a different place each time.
        for _ in 0..life {
            scene.pair.step();
        }
        let old: Vec<Vec<u8>> =
            scene.pair.hosts[1].inbound.iter().map(|(_, d)| d.clone()).collect();
        scene.pair.hosts.iter_mut().for_each(|host| host.inbound.clear());
        let next = (life + 1) * 0x1_1111;
        let psn = first.map(|psn| (psn + next) & 0xff_ffff);
        let options = Options { psn, timeout: 14, ..Options::default() };
        for side in 0..2 {
            go(&mut scene.pair, side, State::Reset).unwrap();
            let (peer, qpn) = (scene.pair.hosts[1 - side].address, scene.pair.hosts[1 - side].qpn);
            for attributes in common::connect(&options, side, peer, qpn) {
                modify(&mut scene.pair, side, attributes).unwrap();
            }
        }
        scene.pair.completions(0);
        scene.pair.hosts[1].endpoint.memory_mut().region_mut(scene.remote).unwrap().fill(0);
        for datagram in old {
            assert!(Packet::parse(&datagram).is_ok());
            scene.pair.inject(1, &datagram);
        }
        assert_eq!(scene.pair.region(1, scene.remote), [0; LONG]);
        scene.write(3, LONG);
        scene.pair.run(Duration::from_secs(1));
        assert_eq!(done(&mut scene.pair, 0), [3], "life {life}");
        assert_eq!(scene.pair.region(1, scene.remote), scene.pair.region(0, scene.local));
    }
    assert!(scene.pair.now > Instant::ZERO);
}
