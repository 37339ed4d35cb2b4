//! A memory that collects what is written: nobody is told that bytes are there before they are.

mod common;

use std::net::IpAddr;

use common::{DOMAIN, Lcg, Options, connect, everything, meta, pattern, piece};
use millstream_roce::{
    AccessDenied, Completion, CompletionQueueId, CompletionStatus, Destination, Endpoint,
    EndpointConfig, Instant, Memory, Node, OwnedMemory, Piece, ProtectionDomainId,
    QueuePairCapabilities, QueuePairConfig, QueuePairState, ReceiveRequest, RemoteAccess,
    SendOperation, SendRequest, Transmit,
};
use millstream_wire::{NakCode, Packet, Qpn, Syndrome};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const LENGTH: usize = 40 * 256 + 17;

/// Writes nothing before it is flushed. One of its flushes fails.
struct Collecting {
    memory: OwnedMemory,
    collected: Vec<(Destination, Vec<u8>)>,
    /// So many flushes of something succeed before the one that fails.
    left: Option<u32>,
}

impl Memory for Collecting {
    fn authorize(&mut self, access: &RemoteAccess) -> Result<(), AccessDenied> {
        self.memory.authorize(access)
    }
    fn write(&mut self, to: &Destination, payload: &[u8]) -> Result<(), AccessDenied> {
        self.collected.push((*to, payload.to_vec()));
        Ok(())
    }
    fn is_flushed(&self) -> bool {
        self.collected.is_empty()
    }
    fn flush(&mut self) -> Result<(), AccessDenied> {
        let collected = std::mem::take(&mut self.collected);
        if collected.is_empty() {
            return Ok(());
        }
        if let Some(left) = self.left {
            self.left = left.checked_sub(1);
            self.left.ok_or(AccessDenied::Protection)?;
        }
        collected.iter().try_for_each(|(to, payload)| self.memory.write(to, payload))
    }
    fn bytes(&self, piece: &Piece) -> Result<&[u8], AccessDenied> {
        self.memory.bytes(piece)
    }
    fn check_local(
        &self,
        domain: ProtectionDomainId,
        piece: &Piece,
        write: bool,
    ) -> Result<(), AccessDenied> {
        self.memory.check_local(domain, piece, write)
    }
}

struct Host {
    endpoint: Endpoint<Collecting>,
    address: IpAddr,
    queue: CompletionQueueId,
    qpns: Vec<Qpn>,
}

/// Two hosts and so many queue pairs between them.
fn hosts(pairs: usize, left: [Option<u32>; 2]) -> [Host; 2] {
    let mut hosts = [0_u8, 1].map(|n| {
        let address = IpAddr::from([10, 0, 0, n + 1]);
        let memory = OwnedMemory::new(8);
        let left = left[usize::from(n)];
        let memory = Collecting { memory, collected: Vec::new(), left };
        let mut endpoint = Endpoint::new(EndpointConfig::new(address, n.into()), memory);
        let queue = endpoint.create_completion_queue(256).unwrap();
        let config = QueuePairConfig::new(DOMAIN, queue, QueuePairCapabilities::new(64, 64));
        let qpns = (0..pairs).map(|_| endpoint.create_queue_pair(&config).unwrap()).collect();
        Host { endpoint, address, queue, qpns }
    });
    let options = Options { psn: [1000, 1000], ..Options::default() };
    for side in 0..2 {
        let (address, qpns) = (hosts[1 - side].address, hosts[1 - side].qpns.clone());
        let Host { endpoint, qpns: own, .. } = &mut hosts[side];
        for (own, other) in own.iter().zip(qpns) {
            for attributes in connect(&options, side, address, other) {
                endpoint.modify_queue_pair(Instant::ZERO, *own, &attributes).unwrap();
            }
        }
    }
    hosts
}

impl Host {
    fn register(&mut self, address: u64, bytes: Vec<u8>) -> u32 {
        self.endpoint.memory_mut().memory.register(DOMAIN, address, everything(), bytes).unwrap()
    }

    fn region(&self, key: u32) -> &[u8] {
        self.endpoint.memory().memory.region(key).unwrap()
    }

    fn post(&mut self, pair: usize, id: u64, operation: SendOperation, pieces: &[Piece]) {
        let request = SendRequest::new(id, operation, pieces);
        self.endpoint.post_send(Instant::ZERO, self.qpns[pair], &request).unwrap();
    }

    fn completions(&mut self) -> Vec<(u64, CompletionStatus)> {
        let mut completions: Vec<Completion> = Vec::new();
        self.endpoint.poll_completions(self.queue, &mut completions, usize::MAX);
        completions.iter().map(|completion| (completion.id, completion.status)).collect()
    }

    fn state(&self, pair: usize) -> QueuePairState {
        self.endpoint.queue_pair_state(self.qpns[pair]).unwrap()
    }
}

/// Moves datagrams between the hosts until nothing happens any more, in batches as drivers do, those of several queue
/// pairs mixed. Some are doubled, and some overtake others. `seen` looks at each when it is sent.
fn run(hosts: &mut [Host; 2], seed: u64, mut seen: impl FnMut(&[Host; 2], usize, &Packet<'_>)) {
    let mut random = Lcg(seed);
    let mut now = Instant::ZERO;
    let mut transmit = Transmit::new();
    let mut inbound: [Vec<Vec<u8>>; 2] = [Vec::new(), Vec::new()];
    loop {
        for side in 0..2 {
            let mut datagram = Vec::new();
            while hosts[side].endpoint.poll_transmit(now, &mut transmit) {
                datagram.clear();
                let Host { endpoint, address, .. } = &hosts[side];
                assert!(transmit.assemble(endpoint, *address, 4791, 0, &mut datagram));
                seen(hosts, side, &Packet::parse(&datagram).unwrap());
                inbound[1 - side].push(datagram.clone());
            }
        }
        if inbound.iter().all(Vec::is_empty) {
            let deadlines = hosts.iter_mut().filter_map(|host| host.endpoint.poll_timeout());
            let Some(next) = deadlines.min() else { return };
            now = now.max(next);
        }
        for queue in &mut inbound {
            for index in 1..queue.len() {
                let qpn = |at: usize| Packet::parse(&queue[at]).unwrap().bth.destination_qpn;
                let odds = if qpn(index - 1) == qpn(index) { 20 } else { 2 };
                if random.below(odds) == 0 {
                    queue.swap(index - 1, index);
                }
            }
            if !queue.is_empty() && random.below(8) == 0 {
                let doubled = queue[random.below(queue.len() as u32) as usize].clone();
                queue.insert(random.below(queue.len() as u32) as usize, doubled);
            }
        }
        for side in 0..2 {
            let count = inbound[side].len().min(1 + random.below(24) as usize);
            let meta = meta(hosts[1 - side].address, hosts[side].address);
            for datagram in inbound[side].drain(..count) {
                hosts[side].endpoint.handle_datagram(now, &meta, &datagram);
            }
            hosts[side].endpoint.handle_timeout(now);
            // Now others may look, or take the memory away.
            assert!(hosts[side].endpoint.memory().is_flushed());
        }
    }
}

/// How many packets the answer of a responder says were executed, and whether it refuses the next.
fn executed(packet: &Packet<'_>) -> (usize, Option<NakCode>) {
    let count = (packet.bth.psn.value() - 1000) as usize;
    match packet.extended.aeth.unwrap().syndrome() {
        Syndrome::Ack { .. } => (count + 1, None),
        Syndrome::Nak(code) => (count, Some(code)),
        other => panic!("{other:?}"),
    }
}

fn write(key: u32, offset: u64) -> SendOperation {
    SendOperation::Write { remote_address: REMOTE + offset, remote_key: key, immediate: None }
}

#[test]
fn what_is_acknowledged_is_there() {
    for seed in 0..200 {
        let mut hosts = hosts(1, [None; 2]);
        let bytes = pattern(LENGTH, seed as u8);
        let local = hosts[0].register(LOCAL, bytes.clone());
        let remote = hosts[1].register(REMOTE, vec![0; LENGTH]);
        hosts[0].post(0, 1, write(remote, 0), &[piece(local, LOCAL, LENGTH)]);
        let mut acknowledged = 0;
        run(&mut hosts, seed, |hosts, side, packet| {
            if side == 1 {
                acknowledged += 1;
                let end = LENGTH.min(executed(packet).0 * 256);
                assert_eq!(hosts[1].region(remote)[..end], bytes[..end]);
            }
        });
        assert!(acknowledged >= 2);
        assert_eq!(hosts[0].completions(), [(1, CompletionStatus::Success)]);
    }
}

/// Of what was asked for, the first that is not there is refused, and all before it is there.
#[test]
fn what_cannot_be_flushed_is_refused_with_all_after_it() {
    let mut kinds = [0; 2];
    for seed in 0..200 {
        let left = Some(seed as u32 % 5);
        let mut hosts = hosts(1, [None, left]);
        let bytes = pattern(LENGTH, seed as u8);
        let local = hosts[0].register(LOCAL, bytes.clone());
        let remote = hosts[1].register(REMOTE, vec![0; LENGTH]);
        let half = LENGTH / 2;
        hosts[0].post(0, 1, write(remote, 0), &[piece(local, LOCAL, half)]);
        let rest = piece(local, LOCAL + half as u64, LENGTH - half);
        hosts[0].post(0, 2, write(remote, half as u64), &[rest]);
        let first = half.div_ceil(256);
        let bytes_of = |count: usize| match count.checked_sub(first) {
            None => count * 256,
            Some(more) => LENGTH.min(half + more * 256),
        };
        let mut refused = None;
        run(&mut hosts, seed, |hosts, side, packet| {
            if side == 1 {
                let (count, code) = executed(packet);
                let end = bytes_of(count);
                assert_eq!(hosts[1].region(remote)[..end], bytes[..end]);
                if code == Some(NakCode::RemoteOperationalError) {
                    refused = Some(count);
                }
            }
        });
        let count = refused.expect("it is told");
        assert_eq!(hosts[1].state(0), QueuePairState::Error);
        let there = bytes_of(count);
        assert!(hosts[1].region(remote)[there..].iter().all(|byte| *byte == 0));
        let completions = hosts[0].completions();
        let failed = (if count < first { 1 } else { 2 }, CompletionStatus::RemoteOperational);
        assert!(completions.contains(&failed), "{completions:?}");
        let complete = (1, CompletionStatus::Success);
        assert_eq!(completions.contains(&complete), count >= first);
        kinds[usize::from(count >= first)] += 1;
    }
    assert!(kinds.iter().all(|count| *count > 0), "{kinds:?}");
}

#[test]
fn a_read_that_does_not_get_there_fails() {
    for (seed, left) in (0..50).flat_map(|seed| [(seed, Some(0)), (seed, Some(1)), (seed, None)]) {
        let mut hosts = hosts(1, [left, None]);
        let bytes = pattern(LENGTH, 3);
        let local = hosts[0].register(LOCAL, vec![0; LENGTH]);
        let remote = hosts[1].register(REMOTE, bytes.clone());
        let read = SendOperation::Read { remote_address: REMOTE, remote_key: remote };
        hosts[0].post(0, 1, read, &[piece(local, LOCAL, LENGTH)]);
        run(&mut hosts, seed, |_, _, _| {});
        let whole = hosts[0].region(local) == bytes;
        let completions = hosts[0].completions();
        match whole {
            true => assert_eq!(completions, [(1, CompletionStatus::Success)]),
            false => assert_eq!(completions, [(1, CompletionStatus::LocalProtection)]),
        }
        assert_eq!(whole, left.is_none());
    }
}

#[test]
fn a_receive_is_complete_when_its_bytes_are_there() {
    for left in [Some(0), None] {
        let mut hosts = hosts(1, [None, left]);
        let bytes = pattern(700, 9);
        let local = hosts[0].register(LOCAL, bytes.clone());
        let remote = hosts[1].register(REMOTE, vec![0; 700]);
        let pieces = &[piece(remote, REMOTE, 700)];
        let qpn = hosts[1].qpns[0];
        hosts[1].endpoint.post_receive(qpn, &ReceiveRequest { id: 7, pieces }).unwrap();
        let send = SendOperation::Send { immediate: None };
        hosts[0].post(0, 1, send, &[piece(local, LOCAL, 700)]);
        run(&mut hosts, 1, |_, _, _| {});
        let (here, there) = (hosts[0].completions(), hosts[1].completions());
        if left.is_some() {
            assert_eq!(there, [(7, CompletionStatus::Flushed)]);
            assert_eq!(here, [(1, CompletionStatus::RemoteOperational)]);
        } else {
            assert_eq!(hosts[1].region(remote), bytes);
            assert_eq!(there, [(7, CompletionStatus::Success)]);
            assert_eq!(here, [(1, CompletionStatus::Success)]);
        }
    }
}

/// The one whose bytes were lost fails, and no other.
#[test]
fn a_failure_is_of_the_queue_pair_that_wrote() {
    let mut failed = [0; 3];
    for seed in 0..100 {
        let left = Some(seed as u32 % 8);
        let mut hosts = hosts(3, [None, left]);
        let bytes = pattern(3000, 5);
        let local = hosts[0].register(LOCAL, bytes.clone());
        let remote = hosts[1].register(REMOTE, vec![0; 9000]);
        for pair in 0..3 {
            let to = write(remote, pair as u64 * 3000);
            hosts[0].post(pair, pair as u64, to, &[piece(local, LOCAL, 3000)]);
        }
        // Later flushes succeed again.
        run(&mut hosts, seed, |_, _, _| {});
        let completions = hosts[0].completions();
        for (pair, failed) in failed.iter_mut().enumerate() {
            let there = hosts[1].region(remote)[pair * 3000..][..3000] == bytes;
            let success = completions.contains(&(pair as u64, CompletionStatus::Success));
            assert_eq!(there, success, "{completions:?}");
            assert_eq!(hosts[1].state(pair) == QueuePairState::Error, !success);
            *failed += u32::from(!success);
        }
    }
    assert!(failed.iter().all(|count| *count > 0), "{failed:?}");
}
