//! Regions that go away, or lose their rights, while requests for them are under way: an error on
//! the queue pair that used them, and never a byte of what is no longer given.

mod common;

use std::time::Duration;

use common::forge::{Forge, nak};
use common::operations::{REMOTE, SEND, fetch_add, read, write};
use common::{DOMAIN, Lcg, Options, Pair, connect, everything, pattern, piece};
use millstream_roce::{
    Access, CompletionStatus, Node, PostError, QueuePairAttributes, QueuePairCapabilities,
    QueuePairConfig, QueuePairState, SendOperation, SendRequest,
};
use millstream_wire::{NakCode, Opcode, Qpn};

const LOCAL: u64 = 0x1000_0000;
const FIRST: u32 = 100;

fn pair() -> Pair {
    Pair::with(Options { psn: [FIRST, 200], timeout: 14, ..Options::default() })
}

fn deregister(pair: &mut Pair, host: usize, key: u32) -> Vec<u8> {
    pair.hosts[host].endpoint.memory_mut().deregister(key).unwrap()
}

fn ends(pair: &mut Pair, host: usize) -> Vec<(u64, CompletionStatus)> {
    pair.poll(host);
    pair.completions(host).iter().map(|c| (c.id, c.status)).collect()
}

/// A request of host 0 for `remote_key`, of which `packets` have arrived at host 1.
fn begun(pair: &mut Pair, operation: SendOperation, local: u32, length: usize, packets: usize) {
    pair.post(0, 1, operation, &[piece(local, LOCAL, length)]);
    let mut arrived = 0;
    let mut transmit = millstream_roce::Transmit::new();
    while arrived < packets && pair.hosts[0].endpoint.poll_transmit(pair.now, &mut transmit) {
        let host = &pair.hosts[0];
        let mut datagram = Vec::new();
        assert!(transmit.assemble(&host.endpoint, host.address, 4791, 0, &mut datagram));
        pair.inject(1, &datagram);
        arrived += 1;
    }
    assert_eq!(arrived, packets);
}

#[test]
fn the_target_of_a_write_goes_away_in_the_middle() {
    let mut pair = pair();
    let local = pair.register(0, LOCAL, vec![7; 1000]);
    let target = pair.register(1, REMOTE, vec![0; 1000]);
    begun(&mut pair, write(target), local, 1000, 2);
    let bytes = deregister(&mut pair, 1, target);
    assert_eq!(bytes, [vec![7; 512], vec![0; 488]].concat());
    // Another region takes its place, at the same address.
    let other = pair.register(1, REMOTE, vec![1; 1000]);
    pair.run(Duration::from_secs(10));
    assert_eq!(ends(&mut pair, 0), [(1, CompletionStatus::RemoteAccess)]);
    assert_eq!(pair.region(1, other), [1; 1000]);
    assert_eq!([0, 1].map(|host| pair.state(host)), [QueuePairState::Error; 2]);
}

#[test]
fn the_counter_of_an_atomic_operation_goes_away_before_it() {
    let mut pair = pair();
    let local = pair.register(0, LOCAL, vec![0xee; 8]);
    let target = pair.register(1, REMOTE, vec![0; 8]);
    pair.post(0, 1, fetch_add(target), &[piece(local, LOCAL, 8)]);
    pair.post(0, 2, SEND, &[]);
    deregister(&mut pair, 1, target);
    let other = pair.register(1, REMOTE, vec![1; 8]);
    pair.run(Duration::from_secs(10));
    use CompletionStatus as S;
    assert_eq!(ends(&mut pair, 0), [(1, S::RemoteAccess), (2, S::Flushed)]);
    assert_eq!((pair.region(1, other), pair.region(0, local)), (&[1; 8][..], &[0xee; 8][..]));
}

#[test]
fn the_source_goes_away_in_the_middle() {
    for (operation, target) in [(write(0), true), (SEND, false)] {
        let mut pair = pair();
        let local = pair.register(0, LOCAL, vec![7; 1000]);
        let remote = pair.register(1, REMOTE, vec![0; 1000]);
        let operation = if target { write(remote) } else { operation };
        pair.receive(1, 9, &[piece(remote, REMOTE, 1000)]);
        pair.post(0, 0, operation, &[piece(local, LOCAL, 10)]);
        pair.receive(1, 10, &[piece(remote, REMOTE, 1000)]);
        begun(&mut pair, operation, local, 1000, 3);
        deregister(&mut pair, 0, local);
        let other = pair.register(0, LOCAL, vec![0x5e; 1000]);
        pair.run(Duration::from_secs(60));
        use CompletionStatus as S;
        let sent = ends(&mut pair, 0);
        // What was complete stays so; ours is the mistake, so the peer hears of none.
        assert_eq!(sent, [(0, S::Success), (1, S::LocalProtection)], "{operation:?}");
        assert_eq!(pair.state(0), QueuePairState::Error);
        assert_eq!(pair.state(1), QueuePairState::ReadyToSend);
        assert!(pair.region(1, remote).iter().all(|&byte| byte == 0 || byte == 7));
        assert_eq!(pair.region(0, other), [0x5e; 1000]);
    }
}

/// What was sent but is not acknowledged is not sent again from what lies there now.
#[test]
fn the_source_goes_away_before_the_acknowledgement() {
    let mut pair = pair();
    let local = pair.register(0, LOCAL, vec![7; 100]);
    let target = pair.register(1, REMOTE, vec![0; 100]);
    pair.wire = Box::new(|to, datagram| if to == 1 { vec![] } else { vec![datagram.to_vec()] });
    pair.post(0, 1, write(target), &[piece(local, LOCAL, 100)]);
    pair.answers(0);
    deregister(&mut pair, 0, local);
    pair.wire = Box::new(|_, datagram| vec![datagram.to_vec()]);
    pair.run(Duration::from_secs(10));
    assert_eq!(ends(&mut pair, 0), [(1, CompletionStatus::LocalProtection)]);
    assert_eq!(pair.region(1, target), [0; 100]);
}

#[test]
fn the_place_for_a_result_goes_away() {
    for (operation, length) in [(read(0), 1000), (fetch_add(0), 8)] {
        let mut pair = pair();
        let local = pair.register(0, LOCAL, vec![0; length]);
        let source = pair.register(1, REMOTE, vec![7; length]);
        let operation = match operation {
            SendOperation::Read { .. } => read(source),
            _ => fetch_add(source),
        };
        begun(&mut pair, operation, local, length, 1);
        deregister(&mut pair, 0, local);
        let other = pair.register(0, LOCAL, vec![1; length]);
        pair.run(Duration::from_secs(10));
        assert_eq!(ends(&mut pair, 0), [(1, CompletionStatus::LocalProtection)]);
        assert_eq!(pair.region(0, other), vec![1; length]);
    }
}

#[test]
fn the_receive_buffer_goes_away_in_the_middle_of_a_message() {
    let mut pair = pair();
    let local = pair.register(0, LOCAL, vec![7; 1000]);
    let target = pair.register(1, REMOTE, vec![0; 1000]);
    pair.receive(1, 9, &[piece(target, REMOTE, 1000)]);
    begun(&mut pair, SEND, local, 1000, 2);
    deregister(&mut pair, 1, target);
    let other = pair.register(1, REMOTE, vec![1; 1000]);
    pair.run(Duration::from_secs(10));
    use CompletionStatus as S;
    assert_eq!(ends(&mut pair, 1), [(9, S::LocalProtection)]);
    assert_eq!(ends(&mut pair, 0), [(1, S::RemoteOperational)]);
    assert_eq!(pair.region(1, other), [1; 1000]);
}

/// A second queue pair of host 1, connected to one that answers to nothing.
fn second(pair: &mut Pair) -> Qpn {
    let host = &mut pair.hosts[1];
    let config = QueuePairConfig::new(DOMAIN, host.queue, QueuePairCapabilities::new(4, 4));
    let qpn = host.endpoint.create_queue_pair(&config).unwrap();
    let options = Options { psn: [FIRST, 200], ..Options::default() };
    for attributes in connect(&options, 1, std::net::IpAddr::from([10, 0, 0, 1]), Qpn::new(77)) {
        host.endpoint.modify_queue_pair(pair.now, qpn, &attributes).unwrap();
    }
    qpn
}

/// A READ that waits reads nothing more once a message has taken the right away, on whatever queue
/// pair: who gets that message may keep other things there.
#[test]
fn a_read_under_way_ends_when_the_right_goes() {
    for whole in [false, true] {
        let mut pair = pair();
        let access = everything() | Access::REMOTE_INVALIDATE;
        let memory = pair.hosts[1].endpoint.memory_mut();
        let source = memory.register(DOMAIN, REMOTE, access, pattern(1000, 1)).unwrap();
        let other = second(&mut pair);
        Forge::new(&pair, 1, Opcode::RcReadRequest, FIRST)
            .reth(REMOTE, source, 1000)
            .inject(&mut pair);
        let mut transmit = millstream_roce::Transmit::new();
        if !whole {
            // The first packet is out.
            assert!(pair.hosts[1].endpoint.poll_transmit(pair.now, &mut transmit));
        }
        let receive = pair.register(1, LOCAL, vec![0; 8]);
        let pieces = [piece(receive, LOCAL, 8)];
        let request = millstream_roce::ReceiveRequest { id: 3, pieces };
        pair.hosts[1].endpoint.post_receive(other, &request).unwrap();
        let mut message =
            Forge::new(&pair, 1, Opcode::RcSendOnlyWithInvalidate, FIRST).invalidate(source);
        message.bth.destination_qpn = other;
        message.inject(&mut pair);
        assert_eq!(ends(&mut pair, 1), [(3, CompletionStatus::Success)]);
        let psn = if whole { FIRST } else { FIRST + 1 };
        assert_eq!(pair.short_answers(1), [nak(psn, NakCode::RemoteAccessError)], "{whole}");
        assert_eq!(pair.state(1), QueuePairState::Error);
        assert_eq!(
            pair.hosts[1].endpoint.queue_pair_state(other),
            Some(QueuePairState::ReadyToSend)
        );
    }
}

/// Generations of keys are 8 bits: a READ that waits through 256 regions does not read the one that
/// has its key again, when that is nothing of its rights.
#[test]
fn a_key_that_comes_round_again_does_not_open_more() {
    let mut pair = pair();
    let source = pair.register(1, REMOTE, pattern(1000, 1));
    Forge::new(&pair, 1, Opcode::RcReadRequest, FIRST).reth(REMOTE, source, 1000).inject(&mut pair);
    let memory = pair.hosts[1].endpoint.memory_mut();
    let mut key = source;
    loop {
        memory.deregister(key).unwrap();
        key = memory.register(DOMAIN, REMOTE, Access::LOCAL_WRITE, vec![0x5e; 1000]).unwrap();
        if key == source {
            break;
        }
    }
    assert_eq!(pair.short_answers(1), [nak(FIRST, NakCode::RemoteAccessError)]);
}

/// Regions come and go at both ends under traffic of every kind in both directions, over a bad
/// wire. Each region has a number, and is written only by requests that were posted for it, and
/// with that number: no byte of another may ever be found in it. What fails is connected again.
#[test]
fn regions_come_and_go_under_load() {
    let (mut good, mut bad) = (0, 0);
    for seed in 0..60 {
        let mut churn = Churn::new(seed);
        for _ in 0..400 {
            churn.step();
        }
        good += churn.good;
        bad += churn.bad;
    }
    assert!(good > 1000 && bad > 1000, "{good} {bad}");
}

const LENGTH: usize = 700;

/// Two hosts, each with a region to be written to and read from by the other, one to send from, one
/// to read into, and one for messages: those may have been sent before the numbers changed.
struct Churn {
    pair: Pair,
    lcg: Lcg,
    options: Options,
    /// Key and number of each host's open region.
    open: [(u32, u8); 2],
    /// And of the one that it reads into.
    inbox: [u32; 2],
    outbox: [u32; 2],
    messages: [u32; 2],
    next: u8,
    good: usize,
    bad: usize,
}

impl Churn {
    fn new(seed: u64) -> Self {
        let options = Options { timeout: 10, retry_count: 3, ..Options::default() };
        let mut pair = Pair::with(options);
        let mut lcg = Lcg(seed);
        pair.wire = Box::new(move |_, datagram| {
            let copies = [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2][lcg.below(12) as usize];
            vec![datagram.to_vec(); copies]
        });
        let open = [0, 1].map(|host| (pair.register(host, REMOTE, vec![1; LENGTH]), 1));
        let inbox = [0, 1].map(|host| pair.register(host, LOCAL, vec![1; LENGTH]));
        let outbox = [0, 1].map(|host| pair.register(host, LOCAL * 2, vec![1; LENGTH]));
        let messages = [0, 1].map(|host| pair.register(host, LOCAL * 3, vec![1; LENGTH]));
        let lcg = Lcg(seed + 1000);
        let (next, good, bad) = (1, 0, 0);
        Self { pair, lcg, options, open, inbox, outbox, messages, next, good, bad }
    }

    /// All regions of the remote end are exchanged together, with one new number for all; nobody
    /// but this counts the numbers, so no request knows one that is to come.
    fn exchange(&mut self) {
        self.next = self.next % 250 + 1;
        let number = self.next;
        for host in 0..2 {
            let old = self.open[host];
            let bytes = deregister(&mut self.pair, host, old.0);
            assert!(bytes.iter().all(|&byte| byte == old.1), "{bytes:?} of {}", old.1);
            let key = self.pair.register(host, REMOTE, vec![number; LENGTH]);
            self.open[host] = (key, number);
            for (list, address) in [(&mut self.inbox, LOCAL), (&mut self.outbox, LOCAL * 2)] {
                let memory = self.pair.hosts[host].endpoint.memory_mut();
                let bytes = memory.deregister(list[host]).unwrap();
                assert!(bytes.iter().all(|&byte| byte == old.1), "{bytes:?} of {}", old.1);
                let fresh = vec![number; LENGTH];
                list[host] = memory.register(DOMAIN, address, Access::LOCAL_WRITE, fresh).unwrap();
            }
            let bytes = deregister(&mut self.pair, host, self.messages[host]);
            self.messages[host] = self.pair.register(host, LOCAL * 3, bytes);
        }
    }

    fn step(&mut self) {
        match self.lcg.below(10) {
            0 => self.exchange(),
            1..5 => {
                let host = self.lcg.below(2) as usize;
                self.post(host);
            }
            5 => {
                let host = self.lcg.below(2) as usize;
                let bytes = piece(self.messages[host], LOCAL * 3, LENGTH);
                let pieces = [bytes];
                let host = &mut self.pair.hosts[host];
                let request = millstream_roce::ReceiveRequest { id: 1, pieces };
                // A full queue is as good.
                let _ = host.endpoint.post_receive(host.qpn, &request);
            }
            _ => {
                self.pair.step();
            }
        }
        for host in 0..2 {
            for completion in self.pair.completions(host) {
                match completion.status {
                    CompletionStatus::Success => self.good += 1,
                    _ => self.bad += 1,
                }
            }
        }
        if [0, 1].iter().any(|&host| self.pair.state(host) == QueuePairState::Error) {
            self.reconnect();
        }
    }

    fn post(&mut self, host: usize) {
        let (remote_key, _) = self.open[1 - host];
        let length = [1, 8, 256, 257, LENGTH][self.lcg.below(5) as usize];
        let (operation, key, address) = match self.lcg.below(4) {
            0 => (write(remote_key), self.outbox[host], LOCAL * 2),
            1 => (read(remote_key), self.inbox[host], LOCAL),
            2 => (SEND, self.outbox[host], LOCAL * 2),
            // Adds nothing, and shows what is there.
            _ => {
                let (remote_address, add) = (REMOTE, 0);
                let add = SendOperation::FetchAdd { remote_address, remote_key, add };
                (add, self.inbox[host], LOCAL)
            }
        };
        let length = if operation.is_atomic() { 8 } else { length };
        let pieces = [piece(key, address, length)];
        let request = SendRequest::new(2, operation, pieces);
        let host = &mut self.pair.hosts[host];
        match host.endpoint.post_send(self.pair.now, host.qpn, &request) {
            Ok(()) | Err(PostError::QueueFull { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn reconnect(&mut self) {
        // Nothing of the old connection is under way: its numbers are used again.
        for host in &mut self.pair.hosts {
            host.inbound.clear();
        }
        for side in 0..2 {
            let (remote, qpn) = (self.pair.hosts[1 - side].address, self.pair.hosts[1 - side].qpn);
            let now = self.pair.now;
            let host = &mut self.pair.hosts[side];
            let reset = QueuePairAttributes {
                state: Some(QueuePairState::Reset),
                ..QueuePairAttributes::default()
            };
            host.endpoint.modify_queue_pair(now, host.qpn, &reset).unwrap();
            for attributes in connect(&self.options, side, remote, qpn) {
                host.endpoint.modify_queue_pair(now, host.qpn, &attributes).unwrap();
            }
        }
    }
}

/// The NAK of a READ whose region is gone comes in the place of the data (IBTA 9.7.5.2.4).
#[test]
fn the_reader_hears_that_the_region_is_gone() {
    let mut pair = pair();
    let local = pair.register(0, LOCAL, vec![0xee; 1000]);
    let source = pair.register(1, REMOTE, vec![7; 1000]);
    begun(&mut pair, read(source), local, 1000, 1);
    // One packet of the answer is out.
    let mut transmit = millstream_roce::Transmit::new();
    assert!(pair.hosts[1].endpoint.poll_transmit(pair.now, &mut transmit));
    let (host, mut datagram) = (&pair.hosts[1], Vec::new());
    assert!(transmit.assemble(&host.endpoint, host.address, 4791, 0, &mut datagram));
    pair.inject(0, &datagram);
    deregister(&mut pair, 1, source);
    pair.run(Duration::from_secs(10));
    assert_eq!(ends(&mut pair, 0), [(1, CompletionStatus::RemoteAccess)]);
    assert_eq!(pair.region(0, local), [vec![7; 256], vec![0xee; 744]].concat());
}
