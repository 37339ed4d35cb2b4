//! Shared receive queues: several queue pairs take from one, in order, each request once.

mod common;

use std::time::Duration;

use common::forge::Forge;
use common::{DOMAIN, Options, Pair, connect, everything, pattern, piece};
use millstream_roce::{
    AsyncEvent, CompletionOperation, CompletionStatus, CreateError, Instant, PostError,
    ProtectionDomainId, QueuePairAttributes, QueuePairCapabilities, QueuePairConfig,
    QueuePairState as State, ReceiveRequest, SendOperation, SendRequest, SharedReceiveQueueId,
};
use millstream_wire::{Opcode, Qpn};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const ANYWHERE: ProtectionDomainId = ProtectionDomainId(9);
const SLOT: usize = 1000;
const SEND: SendOperation = SendOperation::Send { immediate: None };

/// Host 1 has a shared queue of 8 and two queue pairs on it, connected to two of host 0.
struct Scene {
    pair: Pair,
    queue: SharedReceiveQueueId,
    /// At host 0.
    senders: [Qpn; 2],
    /// At host 1.
    receivers: [Qpn; 2],
    local: u32,
    target: u32,
}

fn options() -> Options {
    Options { timeout: 14, psn: [100, 200], ..Options::default() }
}

impl Scene {
    fn new() -> Self {
        let mut pair = Pair::with(options());
        let local = pair.register(0, LOCAL, pattern(SLOT, 1));
        let host = &mut pair.hosts[1];
        let memory = host.endpoint.memory_mut();
        // The shared queue has a domain of its own.
        let target = memory.register(ANYWHERE, REMOTE, everything(), vec![0; 8 * SLOT]).unwrap();
        let queue = host.endpoint.create_shared_receive_queue(ANYWHERE, 8).unwrap();
        let [senders, receivers] = [0, 1].map(|side| {
            [0, 1].map(|_| {
                let host = &mut pair.hosts[side];
                let capabilities = QueuePairCapabilities::new(8, if side == 0 { 8 } else { 0 });
                let shared_receive_queue = (side == 1).then_some(queue);
                let config = QueuePairConfig {
                    shared_receive_queue,
                    ..QueuePairConfig::new(DOMAIN, host.queue, capabilities)
                };
                host.endpoint.create_queue_pair(&config).unwrap()
            })
        });
        let mut scene = Self { pair, queue, senders, receivers, local, target };
        scene.connect(0);
        scene.connect(1);
        scene
    }

    fn connect(&mut self, index: usize) {
        for (side, own, other) in
            [(0, self.senders, self.receivers), (1, self.receivers, self.senders)]
        {
            let peer = self.pair.hosts[1 - side].address;
            let endpoint = &mut self.pair.hosts[side].endpoint;
            for attributes in connect(&options(), side, peer, other[index]) {
                endpoint.modify_queue_pair(Instant::ZERO, own[index], &attributes).unwrap();
            }
        }
    }

    /// Posts request `id`, into its own slot of the target.
    fn receive(&mut self, id: u64) -> Result<(), PostError> {
        let pieces = [piece(self.target, REMOTE + id * SLOT as u64, SLOT)];
        let request = ReceiveRequest { id, pieces };
        self.pair.hosts[1].endpoint.post_shared_receive(self.queue, &request)
    }

    fn send(&mut self, sender: usize, id: u64, operation: SendOperation, length: usize) {
        let pieces = [piece(self.local, LOCAL, length)];
        let request = SendRequest::new(id, operation, pieces);
        let endpoint = &mut self.pair.hosts[0].endpoint;
        endpoint.post_send(self.pair.now, self.senders[sender], &request).unwrap();
    }

    fn run(&mut self) {
        self.pair.run(Duration::from_secs(1));
    }

    /// Receives that ended: number, receiver, status.
    fn received(&mut self) -> Vec<(u64, usize, CompletionStatus)> {
        let receivers = self.receivers;
        let index = |qpn| receivers.iter().position(|&other| other == qpn).unwrap();
        self.pair.completions(1).iter().map(|c| (c.id, index(c.qpn), c.status)).collect()
    }

    fn events(&mut self) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| self.pair.hosts[1].endpoint.poll_event()).collect()
    }

    fn go(&mut self, receiver: usize, state: State) {
        let attributes = QueuePairAttributes { state: Some(state), ..Default::default() };
        let endpoint = &mut self.pair.hosts[1].endpoint;
        endpoint.modify_queue_pair(Instant::ZERO, self.receivers[receiver], &attributes).unwrap();
    }
}

const OK: CompletionStatus = CompletionStatus::Success;

#[test]
fn messages_take_requests_in_the_order_in_which_they_begin() {
    let mut scene = Scene::new();
    (0..8).for_each(|id| scene.receive(id).unwrap());
    let full = Err(PostError::QueueFull { limit: 8 });
    assert_eq!(scene.receive(8), full);
    scene.send(0, 0, SEND, SLOT);
    scene.run();
    scene.send(1, 0, SEND, 10);
    scene.run();
    scene.send(0, 0, SEND, 0);
    scene.run();
    assert_eq!(scene.received(), [(0, 0, OK), (1, 1, OK), (2, 0, OK)]);
    // An immediate takes one too.
    let write = SendOperation::Write { remote_address: 0, remote_key: 0, immediate: Some(7) };
    scene.send(1, 0, write, 0);
    scene.run();
    let completion = scene.pair.completions(1)[0];
    assert_eq!((completion.id, completion.operation), (3, CompletionOperation::ReceiveWrite));
    let target = scene.pair.region(1, scene.target);
    assert_eq!(target[..SLOT], pattern(SLOT, 1));
    assert_eq!(target[SLOT..SLOT + 11], [&pattern(SLOT, 1)[..10], &[0]].concat());
}

/// A message of several packets keeps its request while another queue pair takes the next.
#[test]
fn messages_that_arrive_at_the_same_time_do_not_mix() {
    let mut scene = Scene::new();
    (0..2).for_each(|id| scene.receive(id).unwrap());
    let first = |scene: &Scene, receiver: usize, byte| {
        let mut forge = Forge::new(&scene.pair, 1, Opcode::RcSendFirst, 100);
        forge.bth.destination_qpn = scene.receivers[receiver];
        forge.payload(&[byte; 256])
    };
    let last = |scene: &Scene, receiver: usize, byte| {
        let mut forge = Forge::new(&scene.pair, 1, Opcode::RcSendLast, 101);
        forge.bth.destination_qpn = scene.receivers[receiver];
        forge.payload(&[byte; 10])
    };
    for forge in [first(&scene, 0, 1), first(&scene, 1, 2), last(&scene, 1, 2), last(&scene, 0, 1)]
    {
        forge.inject(&mut scene.pair);
    }
    scene.pair.poll(1);
    assert_eq!(scene.received(), [(1, 1, OK), (0, 0, OK)]);
    let target = scene.pair.region(1, scene.target);
    assert_eq!(target[..SLOT], [&[1; 266][..], &[0; SLOT - 266]].concat());
    assert_eq!(target[SLOT..2 * SLOT], [&[2; 266][..], &[0; SLOT - 266]].concat());
}

#[test]
fn an_empty_queue_makes_senders_wait() {
    let mut scene = Scene::new();
    scene.send(0, 1, SEND, 10);
    scene.send(1, 2, SEND, 10);
    for _ in 0..20 {
        assert!(scene.pair.step());
    }
    assert!(scene.pair.counters(1).rnr_naks_sent >= 2);
    assert_eq!(scene.received(), []);
    (0..2).for_each(|id| scene.receive(id).unwrap());
    scene.run();
    let mut received = scene.received();
    received.sort_unstable_by_key(|r| r.0);
    assert!(matches!(received[..], [(0, a, OK), (1, b, OK)] if a != b), "{received:?}");
}

#[test]
fn requests_stay_when_a_queue_pair_fails_and_it_says_when_it_takes_no_more() {
    let mut scene = Scene::new();
    (0..3).for_each(|id| scene.receive(id).unwrap());
    // In the middle of a message: its request is gone with it.
    let mut forge = Forge::new(&scene.pair, 1, Opcode::RcSendFirst, 100).payload(&[1; 256]);
    forge.bth.destination_qpn = scene.receivers[0];
    forge.inject(&mut scene.pair);
    scene.go(0, State::Error);
    scene.pair.poll(1);
    assert_eq!(scene.received(), [(0, 0, CompletionStatus::Flushed)]);
    assert_eq!(scene.events(), [AsyncEvent::LastReceiveRequest(scene.receivers[0])]);
    // Once.
    scene.go(0, State::Error);
    assert_eq!(scene.events(), []);
    // Not in the middle of one.
    let mut broken = Forge::new(&scene.pair, 1, Opcode::RcSendMiddle, 100);
    broken.bth.destination_qpn = scene.receivers[1];
    broken.inject(&mut scene.pair);
    assert_eq!(
        scene.events(),
        [
            AsyncEvent::LastReceiveRequest(scene.receivers[1]),
            AsyncEvent::QueuePairRequestError(scene.receivers[1]),
        ]
    );
    scene.pair.poll(1);
    assert_eq!(scene.received(), []);
    // They are there for the next who comes.
    scene.go(1, State::Reset);
    let reset = QueuePairAttributes { state: Some(State::Reset), ..Default::default() };
    let sender = scene.senders[1];
    scene.pair.hosts[0].endpoint.modify_queue_pair(Instant::ZERO, sender, &reset).unwrap();
    scene.connect(1);
    scene.send(1, 1, SEND, 10);
    scene.send(1, 2, SEND, 10);
    scene.run();
    assert_eq!(scene.received(), [(1, 1, OK), (2, 1, OK)]);
}

#[test]
fn a_message_that_does_not_fit_ends_its_request_only() {
    let mut scene = Scene::new();
    let short = ReceiveRequest { id: 7, pieces: [piece(scene.target, REMOTE, 5)] };
    let (queue, endpoint) = (scene.queue, &mut scene.pair.hosts[1].endpoint);
    endpoint.post_shared_receive(queue, &short).unwrap();
    scene.receive(1).unwrap();
    scene.send(0, 1, SEND, 6);
    scene.run();
    assert_eq!(scene.received(), [(7, 0, CompletionStatus::LocalLength)]);
    scene.send(1, 2, SEND, 6);
    scene.run();
    assert_eq!(scene.received(), [(1, 1, OK)]);
}

#[test]
fn pieces_are_of_the_domain_of_the_queue() {
    let mut scene = Scene::new();
    // Of the queue pairs' domain.
    let key = scene.pair.register(1, LOCAL, vec![0; SLOT]);
    let request = ReceiveRequest { id: 7, pieces: [piece(key, LOCAL, SLOT)] };
    let (queue, endpoint) = (scene.queue, &mut scene.pair.hosts[1].endpoint);
    endpoint.post_shared_receive(queue, &request).unwrap();
    scene.send(0, 1, SEND, 10);
    scene.run();
    assert_eq!(scene.received(), [(7, 0, CompletionStatus::LocalProtection)]);
    assert_eq!(scene.pair.region(1, key), [0; SLOT]);
    let sent = scene.pair.completions(0)[0];
    assert_eq!(sent.status, CompletionStatus::RemoteOperational);
}

#[test]
fn the_limit_is_an_event_each_time_that_it_is_set() {
    let mut scene = Scene::new();
    let reached = AsyncEvent::SharedReceiveLimit(scene.queue);
    let mut next = 0;
    for limit in [1, 3] {
        (0..5).for_each(|_| {
            scene.receive(next % 8).unwrap();
            next += 1;
        });
        let (queue, endpoint) = (scene.queue, &mut scene.pair.hosts[1].endpoint);
        endpoint.set_shared_receive_limit(queue, limit).unwrap();
        for taken in 1..=5 {
            scene.send(taken % 2, 1, SEND, 1);
            scene.run();
            let expected = if 5 - taken == limit - 1 { vec![reached] } else { vec![] };
            assert_eq!(scene.events(), expected, "limit {limit}, {taken} taken");
        }
    }
    let (queue, endpoint) = (scene.queue, &mut scene.pair.hosts[1].endpoint);
    let refused = endpoint.set_shared_receive_limit(queue, 9);
    assert!(matches!(refused, Err(CreateError::OutOfRange { value: 9, limit: 8, .. })));
}

#[test]
fn what_is_not_there_or_in_use_is_refused() {
    let mut scene = Scene::new();
    let (queue, receivers) = (scene.queue, scene.receivers);
    let endpoint = &mut scene.pair.hosts[1].endpoint;
    let empty = ReceiveRequest { id: 1, pieces: [] };
    // A queue pair of a shared queue has none of its own.
    let refused = endpoint.post_receive(receivers[0], &empty);
    assert_eq!(refused, Err(PostError::SharedReceives(receivers[0])));
    let in_use = Err(CreateError::SharedReceiveQueueInUse(queue));
    assert_eq!(endpoint.destroy_shared_receive_queue(queue), in_use);
    receivers.iter().for_each(|&qpn| assert!(endpoint.destroy_queue_pair(qpn)));
    assert_eq!(endpoint.destroy_shared_receive_queue(queue), Ok(()));
    let unknown = CreateError::UnknownSharedReceiveQueue(queue);
    assert_eq!(endpoint.destroy_shared_receive_queue(queue), Err(unknown));
    assert_eq!(endpoint.set_shared_receive_limit(queue, 0), Err(unknown));
    let refused = endpoint.post_shared_receive(queue, &empty);
    assert_eq!(refused, Err(PostError::UnknownSharedReceiveQueue(queue)));
    let config = QueuePairConfig {
        shared_receive_queue: Some(queue),
        ..QueuePairConfig::new(DOMAIN, scene.pair.hosts[1].queue, QueuePairCapabilities::new(1, 1))
    };
    let endpoint = &mut scene.pair.hosts[1].endpoint;
    assert_eq!(endpoint.create_queue_pair(&config), Err(unknown));
    for capacity in [0, 16_385] {
        let refused = endpoint.create_shared_receive_queue(DOMAIN, capacity);
        assert!(matches!(refused, Err(CreateError::OutOfRange { .. })), "{capacity}");
    }
    // The number is used again.
    let limit = endpoint.config().max_shared_receive_queues;
    for _ in 0..limit {
        endpoint.create_shared_receive_queue(DOMAIN, 1).unwrap();
    }
    let refused = endpoint.create_shared_receive_queue(DOMAIN, 1);
    let what = "shared receive queues";
    assert_eq!(refused, Err(CreateError::TooMany { what, limit }));
}
