//! Seeded random calls on two devices in any order, over a wire that loses, with invariants:
//! every accepted signaled request completes exactly once unless its queue pair was destroyed or
//! reset, in posting order; nothing panics; nothing is left at the end.
//! Every failure of a queue pair makes one event. After each call, what a device keeps is within the
//! limits that it states.
//!
//! `MILLSTREAM_FUZZ_SEEDS=N` makes N sequences of calls in place of the usual number.

mod common;

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::IpAddr;

use common::{DOMAIN, Lcg, Options, connect, everything, meta, pattern, piece};
use millstream_roce::{
    Access, AsyncEvent, Completion, CompletionOperation, CompletionQueueId, CompletionStatus,
    DatagramDestination, Endpoint, EndpointConfig, Instant, ModifyError, Node, OwnedMemory, Piece,
    PostError, QueuePairAttributes, QueuePairCapabilities, QueuePairConfig, QueuePairState,
    ReceiveRequest, SendOperation, SendRequest, SharedReceiveQueueId, Transmit, Transport, Usage,
    attributes_of_transition,
};
use millstream_wire::{Psn, Qpn};

const ADDRESS: u64 = 0x1000_0000;
const LENGTH: usize = 4096;
const MAX_QUEUE_PAIRS: usize = 6;
const QUEUE_KEY: u32 = 0x1234;

/// What the application knows of one queue pair: requests that have not completed.
#[derive(Default)]
struct Ledger {
    /// Identifier, and whether success makes a completion.
    sends: VecDeque<(u64, bool)>,
    receives: VecDeque<u64>,
    /// It is for datagrams.
    datagrams: bool,
    /// It takes its receives from the device's shared queue.
    shares: bool,
    /// It failed, and there was an event of it.
    failed: bool,
}

struct Device {
    endpoint: Endpoint<OwnedMemory>,
    address: IpAddr,
    queues: [CompletionQueueId; 2],
    keys: Vec<u32>,
    pairs: Vec<Qpn>,
    ledgers: HashMap<Qpn, Ledger>,
    shared: SharedReceiveQueueId,
    /// Requests in the shared queue, or of a message that is arriving.
    shared_receives: HashSet<u64>,
    inbound: VecDeque<Vec<u8>>,
}

struct Fuzz {
    lcg: Lcg,
    now: Instant,
    devices: [Device; 2],
    next_id: u64,
    completed: usize,
    succeeded: usize,
}

impl Fuzz {
    fn new(seed: u64) -> Self {
        let devices = [1_u8, 2].map(|n| {
            let address = IpAddr::from([10, 0, 0, n]);
            let config = EndpointConfig {
                max_queue_pairs: MAX_QUEUE_PAIRS,
                ..EndpointConfig::new(address, seed.wrapping_mul(7) + u64::from(n))
            };
            let mut endpoint = Endpoint::new(config, OwnedMemory::new(8));
            // Half of the time READs wait for each other.
            if seed.is_multiple_of(2) {
                endpoint.set_receive_budget(1000);
            }
            let queues = [0, 1].map(|_| endpoint.create_completion_queue(1000).unwrap());
            let shared = endpoint.create_shared_receive_queue(DOMAIN, 12).unwrap();
            let memory = endpoint.memory_mut();
            let register =
                |which| memory.register(DOMAIN, ADDRESS, rights(which), pattern(LENGTH, n));
            let keys = (0..2).map(register).collect::<Result<_, _>>().unwrap();
            Device {
                endpoint,
                address,
                queues,
                keys,
                pairs: Vec::new(),
                ledgers: HashMap::new(),
                shared,
                shared_receives: HashSet::new(),
                inbound: VecDeque::new(),
            }
        });
        let (lcg, now) = (Lcg(seed), Instant::ZERO);
        Self { lcg, now, devices, next_id: 0, completed: 0, succeeded: 0 }
    }

    fn below(&mut self, limit: u32) -> u32 {
        self.lcg.below(limit)
    }

    /// Some queue pair of a device, or one that is no more.
    fn some_pair(&mut self, device: usize) -> Qpn {
        let pairs = &self.devices[device].pairs;
        if pairs.is_empty() || self.lcg.below(50) == 0 {
            return Qpn::new(0x12_3000);
        }
        pairs[self.lcg.below(pairs.len() as u32) as usize]
    }

    fn step(&mut self) {
        let device = self.below(2) as usize;
        match self.below(100) {
            0..4 => self.create(device),
            4 => self.destroy(device),
            5..12 => self.connect_two(),
            12..15 => self.modify(device),
            15..40 => self.post_send(device),
            40..55 => self.post_receive(device),
            55..60 => self.post_shared_receive(device),
            60 => self.exchange_region(device),
            61..70 => self.poll(device, 3),
            70..95 => self.deliver(),
            _ => self.wait(),
        }
        for device in &self.devices {
            let (usage, limits) = (device.endpoint.usage(), device.endpoint.limits());
            assert!(usage.is_within(&limits), "{usage:?} {limits:?}");
        }
    }

    fn create(&mut self, device: usize) {
        let [a, b] = self.devices[device].queues;
        let (datagrams, shares) = (self.below(4) == 0, self.below(4) == 0);
        let config = QueuePairConfig {
            receive_completions: if self.below(2) == 0 { a } else { b },
            transport: match datagrams {
                true => Transport::UnreliableDatagram,
                false => Transport::ReliableConnection,
            },
            shared_receive_queue: shares.then_some(self.devices[device].shared),
            split_writes: shares ^ (self.devices[device].pairs.len() % 2 == 1),
            ..QueuePairConfig::new(
                DOMAIN,
                a,
                QueuePairCapabilities {
                    max_inline: 100,
                    ..QueuePairCapabilities::new(
                        1 + self.below(12) as usize,
                        1 + self.below(12) as usize,
                    )
                },
            )
        };
        let device = &mut self.devices[device];
        if let Ok(qpn) = device.endpoint.create_queue_pair(&config) {
            let ledger = Ledger { datagrams, shares, ..Ledger::default() };
            assert!(device.ledgers.insert(qpn, ledger).is_none(), "number used twice");
            device.pairs.push(qpn);
        } else {
            assert_eq!(device.pairs.len(), MAX_QUEUE_PAIRS);
        }
    }

    fn destroy(&mut self, device: usize) {
        let qpn = self.some_pair(device);
        self.poll(device, usize::MAX);
        let device = &mut self.devices[device];
        let known = device.pairs.contains(&qpn);
        assert_eq!(device.endpoint.destroy_queue_pair(qpn), known);
        device.pairs.retain(|&other| other != qpn);
        device.ledgers.remove(&qpn);
        assert!(!device.endpoint.destroy_queue_pair(qpn));
    }

    /// Takes a queue pair of each device to RTS with the other, from whatever state.
    fn connect_two(&mut self) {
        let pairs = [self.some_pair(0), self.some_pair(1)];
        let psn = [self.below(1 << 24), self.below(1 << 24)];
        let timeout = 8 + self.below(4) as u8;
        let depth = self.below(4) as u8;
        let rnr_retry = self.below(8) as u8;
        let options = Options { psn, timeout, depth, rnr_retry, ..Options::default() };
        for side in 0..2 {
            self.change(side, pairs[side], QueuePairState::Reset);
            let remote = self.devices[1 - side].address;
            let device = &mut self.devices[side];
            let datagrams = device.ledgers.get(&pairs[side]).is_some_and(|l| l.datagrams);
            let steps = match datagrams {
                true => enable_datagrams(psn[side]),
                false => connect(&options, side, remote, pairs[1 - side]),
            };
            for attributes in steps {
                let done = device.endpoint.modify_queue_pair(self.now, pairs[side], &attributes);
                assert_eq!(done.is_ok(), device.pairs.contains(&pairs[side]), "{done:?}");
            }
        }
    }

    fn change(&mut self, device: usize, qpn: Qpn, state: QueuePairState) {
        self.poll(device, usize::MAX);
        let device = &mut self.devices[device];
        let attributes = QueuePairAttributes { state: Some(state), ..Default::default() };
        let before = device.endpoint.queue_pair_state(qpn);
        let done = device.endpoint.modify_queue_pair(self.now, qpn, &attributes);
        match before {
            None => assert_eq!(done, Err(ModifyError::Unknown(qpn))),
            Some(before) => {
                let transport = match device.ledgers[&qpn].datagrams {
                    true => Transport::UnreliableDatagram,
                    false => Transport::ReliableConnection,
                };
                match attributes_of_transition(transport, before, state) {
                    None => assert!(matches!(done, Err(ModifyError::InvalidTransition { .. }))),
                    Some(([], _)) if before == QueuePairState::SendQueueDrained => {
                        assert!(matches!(done, Ok(()) | Err(ModifyError::Draining(_))), "{done:?}");
                    }
                    Some(([], _)) => assert_eq!(done, Ok(())),
                    Some(_) => assert!(matches!(done, Err(ModifyError::Missing { .. }))),
                }
            }
        }
        if done.is_ok() {
            assert_eq!(device.endpoint.queue_pair_state(qpn), Some(state));
            if state == QueuePairState::Reset {
                let ledger = device.ledgers.get_mut(&qpn).unwrap();
                ledger.sends.clear();
                ledger.receives.clear();
                ledger.failed = false;
            }
        } else {
            assert_eq!(device.endpoint.queue_pair_state(qpn), before);
        }
    }

    fn modify(&mut self, device: usize) {
        let states = QueuePairState::ALL;
        let state = states[self.below(states.len() as u32) as usize];
        let qpn = self.some_pair(device);
        self.change(device, qpn, state);
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn pieces(&mut self, device: usize) -> Vec<Piece> {
        let count = if self.below(10) == 0 { self.below(18) } else { self.below(4) } as usize;
        (0..count)
            .map(|_| {
                let keys = &self.devices[device].keys;
                let key = keys[self.lcg.below(keys.len() as u32) as usize];
                let length = [0, 1, 100, 256, 700][self.lcg.below(5) as usize];
                // Now and then beyond the region.
                let start = self.lcg.below(LENGTH as u32 - 680);
                piece(key, ADDRESS + u64::from(start), length)
            })
            .collect()
    }

    fn post_send(&mut self, device: usize) {
        let qpn = self.some_pair(device);
        let keys = &self.devices[1 - device].keys;
        let remote_key = keys[self.lcg.below(keys.len() as u32) as usize];
        let remote_address = ADDRESS + u64::from(self.below(LENGTH as u32 / 2));
        let immediate = (self.below(3) == 0).then_some(7);
        let aligned = remote_address & !7;
        let operation = match self.below(5) {
            0 => SendOperation::Send { immediate },
            1 => SendOperation::Write { remote_address, remote_key, immediate },
            2 => SendOperation::Read { remote_address, remote_key },
            3 if self.below(4) == 0 => SendOperation::SendInvalidate { remote_key },
            3 => SendOperation::FetchAdd { remote_address: aligned, remote_key, add: 1 },
            _ => {
                let (compare, swap) = (u64::from(self.below(2)), self.next_id);
                SendOperation::CompareSwap { remote_address: aligned, remote_key, compare, swap }
            }
        };
        let pieces = if operation.is_atomic() && self.below(20) > 0 {
            let keys = &self.devices[device].keys;
            let key = keys[self.lcg.below(keys.len() as u32) as usize];
            vec![piece(key, ADDRESS + u64::from(self.lcg.below(LENGTH as u32)), 8)]
        } else {
            self.pieces(device)
        };
        let signaled = self.below(4) > 0;
        let mut request =
            SendRequest { signaled, ..SendRequest::new(self.id(), operation, pieces) };
        request.fence = self.below(4) == 0;
        let datagrams = self.devices[device].ledgers.get(&qpn).is_some_and(|l| l.datagrams);
        if datagrams && self.below(10) > 0 {
            request.operation = SendOperation::Send { immediate };
            let (address, qpn) = (self.devices[1 - device].address, self.some_pair(1 - device));
            request.datagram = Some(DatagramDestination { address, qpn, queue_key: QUEUE_KEY });
        }
        let inline = (self.below(6) == 0).then(|| pattern(self.below(110) as usize, 1));
        if inline.is_some() && self.below(20) > 0 {
            request.pieces.clear();
        }
        let device = &mut self.devices[device];
        let state = device.endpoint.queue_pair_state(qpn);
        let posted = match &inline {
            Some(data) => device.endpoint.post_send_inline(self.now, qpn, &request, data),
            None => device.endpoint.post_send(self.now, qpn, &request),
        };
        match posted {
            Ok(()) => {
                let ledger = device.ledgers.get_mut(&qpn).unwrap();
                ledger.sends.push_back((request.id, signaled));
            }
            Err(PostError::Unknown(_)) => assert_eq!(state, None),
            Err(PostError::State { .. }) => {
                assert!(!state.unwrap().takes_sends());
            }
            Err(PostError::NotADatagram(_) | PostError::DestinationMissing(_)) => {
                assert!(datagrams && request.datagram.is_none());
            }
            Err(PostError::QueueFull { limit }) => {
                assert!(device.ledgers[&qpn].sends.len() >= limit);
            }
            Err(PostError::InlineTooLong { length, limit: 100 }) => {
                assert!(length > 100 && inline.is_some_and(|data| data.len() == length));
            }
            Err(PostError::TooManyPieces { .. }) => assert!(request.pieces.len() > 16),
            Err(PostError::TooLong { length, limit }) => {
                assert!(datagrams && length > limit.into());
            }
            Err(PostError::NotInline(_)) => {
                assert!(inline.is_some());
                assert!(request.operation.fetches() || !request.pieces.is_empty());
            }
            Err(PostError::NoReads(_)) => assert!(operation.fetches()),
            Err(PostError::AtomicLength { length }) => {
                assert!(operation.is_atomic() && length != 8 && length == request.length());
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn post_receive(&mut self, device: usize) {
        let qpn = self.some_pair(device);
        let request = ReceiveRequest { id: self.id(), pieces: self.pieces(device) };
        let device = &mut self.devices[device];
        match device.endpoint.post_receive(qpn, &request) {
            Ok(()) => device.ledgers.get_mut(&qpn).unwrap().receives.push_back(request.id),
            Err(PostError::TooManyPieces { .. }) => assert!(request.pieces.len() > 16),
            Err(PostError::QueueFull { limit }) => {
                assert!(device.ledgers[&qpn].receives.len() >= limit);
            }
            Err(PostError::SharedReceives(_)) => assert!(device.ledgers[&qpn].shares),
            Err(_) => assert!(matches!(
                device.endpoint.queue_pair_state(qpn),
                None | Some(QueuePairState::Reset)
            )),
        }
    }

    fn post_shared_receive(&mut self, device: usize) {
        let request = ReceiveRequest { id: self.id(), pieces: self.pieces(device) };
        let device = &mut self.devices[device];
        match device.endpoint.post_shared_receive(device.shared, &request) {
            Ok(()) => assert!(device.shared_receives.insert(request.id)),
            Err(PostError::TooManyPieces { .. }) => assert!(request.pieces.len() > 16),
            Err(PostError::QueueFull { limit }) => assert!(device.shared_receives.len() >= limit),
            Err(error) => panic!("{error}"),
        }
    }

    /// One event for each failure.
    fn hear(&mut self, device: usize) {
        let device = &mut self.devices[device];
        while let Some(event) = device.endpoint.poll_event() {
            assert!(!matches!(event, AsyncEvent::DeviceFatal), "nobody said so");
            // Of a queue pair that was destroyed since there is nothing to compare.
            let ledger = event.failed_queue_pair().and_then(|qpn| device.ledgers.get_mut(&qpn));
            if let Some(ledger) = ledger {
                assert!(!std::mem::replace(&mut ledger.failed, true), "{event:?} twice");
            }
        }
    }

    /// Deregisters a region, whatever is going on with it, and registers it anew.
    fn exchange_region(&mut self, device: usize) {
        let which = self.below(2) as usize;
        let device = &mut self.devices[device];
        let memory = device.endpoint.memory_mut();
        let bytes = memory.deregister(device.keys[which]).unwrap();
        device.keys[which] = memory.register(DOMAIN, ADDRESS, rights(which), bytes).unwrap();
    }

    fn poll(&mut self, device: usize, limit: usize) {
        self.hear(device);
        for which in 0..2 {
            let mut out = Vec::new();
            let device = &mut self.devices[device];
            let count = device.endpoint.poll_completions(device.queues[which], &mut out, limit);
            assert!(count == out.len() && count <= limit);
            for completion in &out {
                self.completed += 1;
                self.succeeded += usize::from(completion.status == CompletionStatus::Success);
                // Those of a destroyed queue pair were polled before.
                let ledger = device.ledgers.get_mut(&completion.qpn).expect("a live queue pair");
                let receive = matches!(
                    completion.operation,
                    CompletionOperation::Receive | CompletionOperation::ReceiveWrite
                );
                if receive && ledger.shares {
                    let known = device.shared_receives.remove(&completion.id);
                    assert!(known, "{completion:?}");
                } else {
                    check_off(ledger, completion);
                }
            }
        }
    }

    fn transmit(&mut self) {
        let mut transmit = Transmit::new();
        for i in 0..2 {
            while self.devices[i].endpoint.poll_transmit(self.now, &mut transmit) {
                let device = &self.devices[i];
                let mut datagram = Vec::new();
                let gone =
                    !transmit.assemble(&device.endpoint, device.address, 4791, 0, &mut datagram);
                assert!(!gone, "what was just handed out is there");
                match self.lcg.below(20) {
                    0 => {}
                    1 => self.devices[1 - i].inbound.extend([datagram.clone(), datagram]),
                    _ => self.devices[1 - i].inbound.push_back(datagram),
                }
            }
        }
    }

    fn deliver(&mut self) {
        self.transmit();
        for i in 0..2 {
            let meta = meta(self.devices[1 - i].address, self.devices[i].address);
            let batch = 1 + self.below(40);
            for _ in 0..batch {
                let device = &mut self.devices[i];
                let Some(datagram) = device.inbound.pop_front() else { break };
                device.endpoint.handle_datagram(self.now, &meta, &datagram);
            }
        }
        self.now = self.now + std::time::Duration::from_micros(u64::from(self.below(200)));
    }

    fn wait(&mut self) {
        self.transmit();
        let next = self.devices.iter_mut().filter_map(|d| d.endpoint.poll_timeout()).min();
        self.now = self.now.max(next.unwrap_or(self.now));
        for device in &mut self.devices {
            device.endpoint.handle_timeout(self.now);
        }
    }

    /// Closes everything: all that is open must complete.
    fn finish(&mut self, seed: u64) {
        for i in 0..2 {
            for qpn in self.devices[i].pairs.clone() {
                self.change(i, qpn, QueuePairState::Error);
            }
            self.poll(i, usize::MAX);
            for (qpn, ledger) in &self.devices[i].ledgers {
                let open = ledger.sends.iter().filter(|(_, signaled)| *signaled).count();
                assert_eq!(open, 0, "seed {seed}: {qpn} has requests without completions");
                assert!(ledger.receives.is_empty(), "seed {seed}: {qpn}");
            }
            let mut transmit = Transmit::new();
            let device = &mut self.devices[i];
            assert!(!device.endpoint.poll_transmit(self.now, &mut transmit), "seed {seed}");
            for qpn in std::mem::take(&mut device.pairs) {
                assert!(device.endpoint.destroy_queue_pair(qpn));
            }
            assert_eq!(device.endpoint.poll_timeout(), None, "seed {seed}");
            device.endpoint.destroy_shared_receive_queue(device.shared).unwrap();
            for queue in device.queues {
                device.endpoint.destroy_completion_queue(queue).unwrap();
            }
            assert_eq!(device.endpoint.usage(), Usage::default(), "seed {seed}");
        }
    }
}

/// The steps of a queue pair for datagrams from RESET to RTS.
fn enable_datagrams(psn: u32) -> [QueuePairAttributes; 3] {
    use QueuePairState as S;
    [
        (S::Initialized, Some(QUEUE_KEY), None),
        (S::ReadyToReceive, None, None),
        (S::ReadyToSend, None, Some(Psn::new(psn))),
    ]
    .map(|(state, queue_key, send_psn)| QueuePairAttributes {
        state: Some(state),
        queue_key,
        send_psn,
        ..Default::default()
    })
}

/// The second region of a device can be invalidated.
fn rights(which: usize) -> Access {
    if which == 1 { everything() | Access::REMOTE_INVALIDATE } else { everything() }
}

/// The completion must be of the oldest request of its queue; unsignaled ones before it are done.
fn check_off(ledger: &mut Ledger, completion: &Completion) {
    use CompletionOperation as O;
    let success = completion.status == CompletionStatus::Success;
    match completion.operation {
        O::Receive | O::ReceiveWrite => {
            assert_eq!(ledger.receives.pop_front(), Some(completion.id), "{completion:?}");
        }
        O::Send | O::Write | O::Read | O::CompareSwap | O::FetchAdd => loop {
            let (id, signaled) = ledger.sends.pop_front().expect("a request for each completion");
            if id == completion.id {
                assert!(signaled || !success, "{completion:?}");
                break;
            }
            assert!(!signaled, "{id} was passed over by {completion:?}");
        },
    }
}

#[test]
fn random_calls_keep_the_books() {
    let (mut completed, mut succeeded) = (0, 0);
    for seed in 0..common::seeds(600) {
        let mut fuzz = Fuzz::new(seed);
        for _ in 0..800 {
            fuzz.step();
        }
        fuzz.finish(seed);
        for device in &mut fuzz.devices {
            for &qpn in &device.pairs {
                device.endpoint.destroy_queue_pair(qpn);
            }
            assert_eq!(device.endpoint.requested_bytes(), 0, "seed {seed}: nobody gives it back");
        }
        completed += fuzz.completed;
        succeeded += fuzz.succeeded;
    }
    assert!(completed > 30_000 && succeeded > 10_000, "{completed} {succeeded}");
}
