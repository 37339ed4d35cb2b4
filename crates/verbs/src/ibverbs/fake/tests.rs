//! What a device does at the worst moment, and that every request ends exactly once all the same.

use std::sync::mpsc;
use std::time::Duration;

use millstream_roce::{
    AsyncEvent, Completion, CompletionStatus, CreateError, ModifyError, Piece, PortAddress,
    PostError, QueuePairAttributes, QueuePairCapabilities, QueuePairState, ReceiveRequest,
    SendOperation, SendRequest, Transport,
};
use millstream_wire::{Mtu, Psn, Qpn};

mod infiniband;
mod memory;

use super::*;
use crate::ibverbs::{CompletionQueue, ProtectionDomain, QueuePair};

const PATIENCE: Duration = Duration::from_secs(60);

fn requests(ids: std::ops::Range<u64>) -> Vec<SendRequest<[Piece; 0]>> {
    let operation = SendOperation::Send { immediate: None };
    ids.map(|id| SendRequest::new(id, operation, [])).collect()
}

fn to(state: QueuePairState) -> QueuePairAttributes {
    QueuePairAttributes { state: Some(state), ..QueuePairAttributes::default() }
}

impl Fake {
    fn connected(&self, queue: &Arc<CompletionQueue>) -> QueuePair {
        let pair = self.unconnected(queue, Transport::ReliableConnection).unwrap();
        connect(&pair);
        pair
    }

    fn unconnected(
        &self,
        queue: &Arc<CompletionQueue>,
        transport: Transport,
    ) -> Result<QueuePair, CreateError> {
        let domain = ProtectionDomain::allocate(&self.device);
        let capabilities = QueuePairCapabilities::new(64, 64);
        let completions = [queue, queue].map(Arc::clone);
        QueuePair::create(&domain, completions, None, transport, capabilities)
    }

    fn queue(&self) -> Arc<CompletionQueue> {
        CompletionQueue::create(&self.device, 256, None).unwrap()
    }

    /// A queue whose handler sends everything to the receiver.
    fn handled(&self) -> (Arc<CompletionQueue>, mpsc::Receiver<Completion>) {
        let (sender, receiver) = mpsc::channel();
        let handler = Box::new(move |completions: &[Completion]| {
            completions.iter().for_each(|completion| sender.send(*completion).unwrap());
        });
        (CompletionQueue::create(&self.device, 256, Some(handler)).unwrap(), receiver)
    }

    fn wait_for_failure(&self) {
        while !self.device.registry().is_quiet() {
            std::thread::yield_now();
        }
    }
}

fn connect(pair: &QueuePair) {
    let ethernet = std::net::IpAddr::from(std::net::Ipv4Addr::LOCALHOST);
    connect_to(pair, ethernet.into()).unwrap();
}

fn connect_to(pair: &QueuePair, remote: PortAddress) -> Result<(), ModifyError> {
    let access = millstream_roce::Access::REMOTE_WRITE;
    let init = QueuePairAttributes { access: Some(access), ..to(QueuePairState::Initialized) };
    let receive = QueuePairAttributes {
        remote_address: Some(remote.ip),
        remote_lid: remote.lid,
        path_mtu: Some(Mtu::B1024),
        destination_qpn: Some(Qpn::new(1)),
        receive_psn: Some(Psn::new(0)),
        responder_resources: Some(1),
        minimum_rnr_timer: Some(12),
        ..to(QueuePairState::ReadyToReceive)
    };
    let send = QueuePairAttributes {
        send_psn: Some(Psn::new(0)),
        timeout: Some(14),
        retry_count: Some(7),
        rnr_retry: Some(7),
        initiator_depth: Some(1),
        ..to(QueuePairState::ReadyToSend)
    };
    [init, receive, send].iter().try_for_each(|attributes| pair.modify(attributes))
}

fn drained(queue: &CompletionQueue) -> Vec<(u64, CompletionStatus)> {
    let mut out = Vec::new();
    // Bounded: what repeats itself for ever is a failure.
    while out.len() < 1000 && queue.poll(&mut out, 16) > 0 {}
    out.iter().map(|completion| (completion.id, completion.status)).collect()
}

/// How a device can fail in the middle of a post, and what the caller of the post is told.
fn failures() -> Vec<(Answer, bool)> {
    let answers = [Answer::All, Answer::Refuse(0, 5), Answer::Refuse(2, 5), Answer::Doorbell(5)];
    answers.iter().flat_map(|&answer| [false, true].map(|dead| (answer, dead))).collect()
}

#[test]
fn queue_pairs_have_the_traffic_class_and_the_service_level_of_their_device() {
    for (traffic_class, service_level) in [(0, 0), (106, 3), (255, 15)] {
        let default = IbverbsConfig::default();
        let fake = Fake::open_with(&IbverbsConfig { traffic_class, service_level, ..default });
        let _pair = fake.connected(&fake.queue());
        let ways = lock(&fake.script.ways);
        let told = ways.iter().map(|way| (way.grh.traffic_class, way.sl));
        assert_eq!(told.collect::<Vec<_>>(), [(traffic_class, service_level)]);
    }
    let default = IbverbsConfig::default();
    assert_eq!((default.traffic_class, default.service_level), (0, 0));
}

#[test]
fn a_batch_is_one_call_of_the_device() {
    let fake = Fake::open();
    let queue = fake.queue();
    let pair = fake.connected(&queue);
    let script = Arc::clone(&fake.script);
    *lock(&fake.script.in_post) = Some(Box::new(move || {
        // What a second call would get.
        *lock(&script.answer) = Answer::Refuse(0, 5);
    }));
    assert_eq!(pair.post_send(&requests(0..40)), Ok(()));
    let refused = PostError::System { call: "ibv_post_send", code: 5 };
    assert_eq!(pair.post_send(&requests(40..41)), Err((0, refused)));
}

#[test]
fn a_request_posted_as_the_device_fails_ends_once() {
    for (answer, dead) in failures() {
        let fake = Fake::open();
        let queue = fake.queue();
        let pair = fake.connected(&queue);
        pair.post_send(&requests(0..2)).unwrap();
        *lock(&fake.script.answer) = answer;
        fake.script.dead.store(dead, Ordering::SeqCst);
        let (device, polled) = (Arc::clone(&fake.device), Arc::clone(&queue));
        *lock(&fake.script.in_post) = Some(Box::new(move || {
            // Another thread hears of the failure, and polls what there is to poll.
            let failed = Arc::clone(&device);
            std::thread::spawn(move || device.registry().fail("gone".into()));
            while !failed.failed() {
                std::thread::yield_now();
            }
            let mut out = Vec::new();
            polled.poll(&mut out, 100);
            assert_eq!(out, [], "{answer:?}: flushed while the device has them");
        }));
        let accepted = match pair.post_send(&requests(2..5)) {
            Ok(()) => 3,
            Err((accepted, _)) => accepted as u64,
        };
        fake.wait_for_failure();
        assert_eq!(pair.post_send(&requests(7..8)), Err((0, PostError::DeviceFailed)));
        let expected: Vec<_> =
            (0..2 + accepted).map(|id| (id, CompletionStatus::Flushed)).collect();
        assert_eq!(drained(&queue), expected, "{answer:?}, dead: {dead}");
        assert!(!queue.wait(PATIENCE));
    }
}

#[test]
fn a_handler_hears_of_requests_posted_as_the_device_fails() {
    for (answer, dead) in failures() {
        let fake = Fake::open();
        let (queue, received) = fake.handled();
        let pair = fake.connected(&queue);
        *lock(&fake.script.answer) = answer;
        fake.script.dead.store(dead, Ordering::SeqCst);
        let device = Arc::clone(&fake.device);
        *lock(&fake.script.in_post) = Some(Box::new(move || {
            let failed = Arc::clone(&device);
            std::thread::spawn(move || device.registry().fail("gone".into()));
            while !failed.failed() {
                std::thread::yield_now();
            }
        }));
        let accepted = match pair.post_send(&requests(0..3)) {
            Ok(()) => 3,
            Err((accepted, _)) => accepted as u64,
        };
        for id in 0..accepted {
            let completion = received.recv_timeout(PATIENCE).unwrap();
            assert_eq!((completion.id, completion.status), (id, CompletionStatus::Flushed));
        }
        drop((pair, queue, fake));
        // The device's thread has ended: nothing comes twice.
        assert!(received.recv_timeout(PATIENCE).is_err());
    }
}

#[test]
fn requests_are_handed_back_when_the_device_does_not_touch_them_any_more() {
    let fake = Fake::open();
    let queue = fake.queue();
    let pair = fake.connected(&queue);
    let number = pair.number().value();
    pair.post_send(&requests(0..4)).unwrap();
    pair.post_receive(&[ReceiveRequest { id: 9, pieces: [] }]).unwrap();
    fake.complete_sends(number, 1);
    fake.event(ffi::EVENT_DEVICE_FATAL, None);
    fake.wait_for_failure();
    assert_eq!(fake.state(number), RESET);
    assert_eq!(pair.state(), QueuePairState::Error);
    // What had completed stays so, though a reset drops completions from the queue.
    let flushed = |id| (id, CompletionStatus::Flushed);
    let expected = [(0, CompletionStatus::Success), flushed(1), flushed(2), flushed(3), flushed(9)];
    assert_eq!(drained(&queue), expected);
    // Whoever wants to be sure is not refused.
    assert_eq!(pair.modify(&to(QueuePairState::Error)), Ok(()));
    let refused = pair.modify(&to(QueuePairState::Initialized));
    assert_eq!(refused, Err(ModifyError::DeviceFailed));
    assert!(fake.device.failure().unwrap().contains("fatal"));
}

#[test]
fn queue_pairs_of_one_queue_are_flushed_each_after_its_own_reset() {
    let fake = Fake::open();
    let queue = fake.queue();
    let pairs = [fake.connected(&queue), fake.connected(&queue), fake.connected(&queue)];
    for (pair, id) in pairs.iter().zip(0..) {
        pair.post_send(&requests(id..id + 1)).unwrap();
    }
    let (polled, stopped) = (Arc::clone(&queue), Arc::new(Mutex::new(Vec::new())));
    let seen = Arc::clone(&stopped);
    *lock(&fake.script.before_reset) = Some(Box::new(move || {
        lock(&seen).push(drained(&polled).len());
    }));
    fake.device.registry().fail("gone".into());
    // Before the first reset nothing, before each other what the one before it left.
    assert_eq!(*lock(&stopped), [0, 1, 1]);
    assert_eq!(drained(&queue).len(), 1);
}

#[test]
fn a_queue_that_overran_stops_its_queue_pairs_and_no_others() {
    let fake = Fake::open();
    let (queue, other_queue) = (fake.queue(), fake.queue());
    let (pair, other) = (fake.connected(&queue), fake.connected(&other_queue));
    let number = pair.number();
    pair.post_send(&requests(0..3)).unwrap();
    other.post_send(&requests(5..6)).unwrap();
    fake.queue_error(number.value());
    assert!(queue.wait(PATIENCE));
    let flushed = |id| (id, CompletionStatus::Flushed);
    assert_eq!(drained(&queue), [0, 1, 2].map(flushed));
    assert_eq!(fake.device.poll_event(), Some(AsyncEvent::CompletionQueueOverrun(queue.id())));
    assert_eq!(fake.device.poll_event(), Some(AsyncEvent::QueuePairFatal(number)));
    assert_eq!(fake.device.poll_event(), None);
    // As in any error state: requests are taken and flushed.
    pair.post_send(&requests(3..5)).unwrap();
    assert!(queue.wait(PATIENCE));
    assert_eq!(drained(&queue), [3, 4].map(flushed));
    assert_eq!(other.state(), QueuePairState::ReadyToSend);
    fake.complete_sends(other.number().value(), 1);
    assert_eq!(drained(&other_queue), [(5, CompletionStatus::Success)]);
    // A reset makes it work again.
    pair.modify(&to(QueuePairState::Reset)).unwrap();
    connect(&pair);
    pair.post_send(&requests(6..7)).unwrap();
    fake.complete_sends(number.value(), 1);
    assert_eq!(drained(&queue), [(6, CompletionStatus::Success)]);
}

#[test]
fn a_handler_hears_of_requests_posted_to_a_stopped_queue_pair() {
    let fake = Fake::open();
    let (queue, received) = fake.handled();
    let pair = fake.connected(&queue);
    pair.post_send(&requests(0..1)).unwrap();
    fake.queue_error(pair.number().value());
    assert_eq!(received.recv_timeout(PATIENCE).unwrap().id, 0);
    for id in 1..4 {
        pair.post_send(&requests(id..id + 1)).unwrap();
        let completion = received.recv_timeout(PATIENCE).unwrap();
        assert_eq!((completion.id, completion.status), (id, CompletionStatus::Flushed));
    }
}

#[test]
fn a_panic_of_one_handler_leaves_the_others_with_all_their_completions() {
    let fake = Fake::open();
    let (queue, received) = fake.handled();
    let pair = fake.connected(&queue);
    pair.post_send(&requests(0..2)).unwrap();
    let handler = Box::new(|_: &[Completion]| panic!("on purpose"));
    let bad_queue = CompletionQueue::create(&fake.device, 16, Some(handler)).unwrap();
    let bad = fake.connected(&bad_queue);
    bad.post_send(&requests(0..1)).unwrap();
    fake.complete_sends(bad.number().value(), 1);
    for id in 0..2 {
        let completion = received.recv_timeout(PATIENCE).unwrap();
        assert_eq!((completion.id, completion.status), (id, CompletionStatus::Flushed));
    }
    assert!(fake.device.failure().unwrap().contains("panicked"));
}

#[test]
fn an_event_is_of_the_queue_pair_that_it_was_of() {
    let fake = Fake::open();
    let queue = fake.queue();
    let pair = fake.connected(&queue);
    let number = pair.number();
    // Between the acknowledgement and the end of that call, another takes its number.
    let (acknowledged, wait_acknowledged) = mpsc::channel();
    let (replaced, wait_replaced) = mpsc::channel();
    *lock(&fake.script.after_acknowledgement) = Some(Box::new(move || {
        acknowledged.send(()).unwrap();
        wait_replaced.recv_timeout(PATIENCE).unwrap();
    }));
    fake.event(ffi::EVENT_QP_FATAL, Some(number.value()));
    wait_acknowledged.recv_timeout(PATIENCE).unwrap();
    drop(pair);
    let other = fake.connected(&queue);
    replaced.send(()).unwrap();
    // One after the other: when this is known, the event before it has been dealt with.
    fake.event(ffi::EVENT_DEVICE_FATAL, None);
    fake.wait_for_failure();
    let events: Vec<_> = std::iter::from_fn(|| fake.device.poll_event()).collect();
    assert!(number != other.number() || events.is_empty(), "{events:?}");
    drop(other);
}

#[test]
fn who_watches_a_port_hears_of_its_changes_and_of_no_other_port() {
    let fake = Fake::open();
    let (told, hears) = mpsc::channel();
    fake.device.watch_port(Box::new(move |works| told.send(works).unwrap()));
    fake.port_event(ffi::EVENT_PORT_ERR, 1);
    fake.port_event(ffi::EVENT_PORT_ERR, 2);
    fake.port_event(ffi::EVENT_PORT_ACTIVE, 2);
    fake.port_event(ffi::EVENT_PORT_ACTIVE, 1);
    // When this is known, the events before it have been dealt with.
    fake.event(ffi::EVENT_DEVICE_FATAL, None);
    fake.wait_for_failure();
    assert_eq!(hears.try_iter().collect::<Vec<_>>(), [false, true]);
}

#[test]
fn an_error_that_is_refused_leaves_failures_to_be_told() {
    let fake = Fake::open();
    let queue = fake.queue();
    let pair = fake.connected(&queue);
    fake.script.dead.store(true, Ordering::SeqCst);
    let refused = pair.modify(&to(QueuePairState::Error));
    assert!(matches!(refused, Err(ModifyError::System { .. })), "{refused:?}");
    fake.script.dead.store(false, Ordering::SeqCst);
    fake.event(ffi::EVENT_QP_FATAL, Some(pair.number().value()));
    let event = fake.device.wait_event(PATIENCE);
    assert_eq!(event, Some(AsyncEvent::QueuePairFatal(pair.number())));
}
