//! The receive budget: READs that wait for room get it in turn, and whatever becomes of a queue pair,
//! its room is free again.

mod common;

use std::net::IpAddr;
use std::time::Duration;

use common::{DOMAIN, Options, Pair, connect, pattern, piece};
use millstream_roce::{
    Completion, CompletionStatus, Instant, Node, QueuePairAttributes, QueuePairCapabilities,
    QueuePairConfig, QueuePairState, SendOperation, SendRequest, Transmit,
};
use millstream_wire::{Mtu, Opcode, Packet, Qpn};

const ADDRESS: u64 = 0x1000_0000;
/// What READs ask for: four packets, of which the budget holds five.
const LENGTH: usize = 4 * 1024;
const BUDGET: u64 = 5 * (1024 + 352);

/// What becomes of a queue pair.
type End<'a> = &'a dyn Fn(&mut Three);

/// A pair whose host 0 has three queue pairs to host 1, and a budget; the keys of their memory.
struct Three {
    pair: Pair,
    pairs: [[Qpn; 2]; 3],
    keys: [u32; 2],
}

fn three() -> Three {
    let options = Options { mtu: Mtu::B1024, depth: 16, timeout: 17, ..Options::default() };
    let mut pair = Pair::with(options);
    pair.hosts[0].endpoint.set_receive_budget(BUDGET);
    let keys = [0, 1].map(|host| pair.register(host, ADDRESS, pattern(1 << 16, host as u8)));
    let addresses: [IpAddr; 2] = [pair.hosts[0].address, pair.hosts[1].address];
    let pairs = [(); 3].map(|()| {
        let qpns = [0, 1].map(|side| {
            let host = &mut pair.hosts[side];
            let capabilities = QueuePairCapabilities::new(16, 16);
            let config = QueuePairConfig::new(DOMAIN, host.queue, capabilities);
            host.endpoint.create_queue_pair(&config).unwrap()
        });
        for side in 0..2 {
            for attributes in connect(&options, side, addresses[1 - side], qpns[1 - side]) {
                let endpoint = &mut pair.hosts[side].endpoint;
                endpoint.modify_queue_pair(Instant::ZERO, qpns[side], &attributes).unwrap();
            }
        }
        qpns
    });
    Three { pair, pairs, keys }
}

impl Three {
    fn read(&mut self, index: usize) {
        let remote_key = self.keys[1];
        let operation = SendOperation::Read { remote_address: ADDRESS, remote_key };
        let pieces = [piece(self.keys[0], ADDRESS, LENGTH)];
        let request = SendRequest::new(index as u64, operation, pieces);
        let (now, qpn) = (self.pair.now, self.pairs[index][0]);
        self.pair.hosts[0].endpoint.post_send(now, qpn, &request).unwrap();
    }

    /// The queue pairs whose requests leave now, and never arrive.
    fn asking(&mut self) -> Vec<usize> {
        let mut transmit = Transmit::new();
        let mut asking = Vec::new();
        let host = &mut self.pair.hosts[0];
        while host.endpoint.poll_transmit(self.pair.now, &mut transmit) {
            let mut datagram = Vec::new();
            assert!(transmit.assemble(&host.endpoint, host.address, 4791, 0, &mut datagram));
            assert_eq!(Packet::parse(&datagram).unwrap().opcode, Opcode::RcReadRequest);
            asking.extend(self.pairs.iter().position(|qpns| qpns[0] == transmit.source_qpn));
        }
        asking
    }

    fn modify(&mut self, index: usize, state: QueuePairState) {
        let attributes =
            QueuePairAttributes { state: Some(state), ..QueuePairAttributes::default() };
        let (now, qpn) = (self.pair.now, self.pairs[index][0]);
        self.pair.hosts[0].endpoint.modify_queue_pair(now, qpn, &attributes).unwrap();
    }

    fn requested(&self) -> u64 {
        self.pair.hosts[0].endpoint.requested_bytes()
    }
}

#[test]
fn what_does_not_fit_waits_its_turn_and_all_complete() {
    let mut three = three();
    for _ in 0..4 {
        (0..3).for_each(|index| three.read(index));
    }
    let mut completions: Vec<Completion> = Vec::new();
    while completions.len() < 12 {
        assert!(three.pair.step(), "nothing happens any more");
        assert!(three.requested() <= BUDGET);
        let responses = three.pair.hosts[0].inbound.len();
        assert!(responses <= 5, "{responses} answers are under way");
        completions.extend(three.pair.completions(0));
    }
    assert!(completions.iter().all(|one| one.status == CompletionStatus::Success));
    let order: Vec<u64> = completions.iter().map(|one| one.id).collect();
    // The first one, which need not wait, is the first in the line too. Then it is each in turn.
    assert_eq!(order, [0, 0, 1, 2, 0, 1, 2, 0, 1, 2, 1, 2]);
    assert_eq!(three.requested(), 0);
    assert_eq!(three.pair.counters(0).retransmissions, 0);
}

/// The first of three has asked, and its answer does not come.
fn stuck() -> Three {
    let mut three = three();
    (0..3).for_each(|index| three.read(index));
    assert_eq!(three.asking(), [0]);
    assert_eq!(three.asking(), [0; 0]);
    three
}

#[test]
fn room_is_free_again_whatever_becomes_of_who_had_it() {
    let destroy = |three: &mut Three| {
        let qpn = three.pairs[0][0];
        assert!(three.pair.hosts[0].endpoint.destroy_queue_pair(qpn));
    };
    let ends: [(&str, End<'_>); 5] = [
        ("destroyed", &destroy),
        ("reset", &|three| three.modify(0, QueuePairState::Reset)),
        ("closed", &|three| three.modify(0, QueuePairState::Error)),
        ("silent", &|three| {
            // It may be slow once or twice, and what is asked for again may come.
            for pause in [30, 60, 120] {
                assert_eq!(three.asking(), if pause > 30 { &[0][..] } else { &[] }, "{pause}");
                three.pair.now = three.pair.now + Duration::from_millis(pause);
                let now = three.pair.now;
                three.pair.hosts[0].endpoint.handle_timeout(now);
            }
        }),
        ("all failed", &|three| {
            three.pair.hosts[0].endpoint.fail_all();
        }),
    ];
    for (what, end) in ends {
        let mut three = stuck();
        end(&mut three);
        let expected: &[usize] = match what {
            // Who recovers asks for no room, and takes none.
            "silent" => &[1, 0],
            "all failed" => &[],
            _ => &[1],
        };
        let mut asking = three.asking();
        asking.sort_unstable_by_key(|&index| core::cmp::Reverse(index));
        assert_eq!(asking, expected, "{what}");
        let left = if what == "all failed" { 0 } else { LENGTH as u64 + 4 * 352 };
        assert_eq!(three.requested(), left, "{what}");
    }
}

#[test]
fn whoever_waits_and_goes_holds_nobody_up() {
    let destroy = |three: &mut Three| {
        let qpn = three.pairs[1][0];
        assert!(three.pair.hosts[0].endpoint.destroy_queue_pair(qpn));
    };
    let ends: [(&str, End<'_>); 3] = [
        ("destroyed", &destroy),
        ("reset", &|three| three.modify(1, QueuePairState::Reset)),
        ("closed", &|three| three.modify(1, QueuePairState::Error)),
    ];
    for (what, end) in ends {
        let mut three = stuck();
        end(&mut three);
        assert_eq!(three.asking(), [0; 0], "{what}");
        three.modify(0, QueuePairState::Reset);
        assert_eq!(three.asking(), [2], "{what}");
    }
}

/// More than the budget: alone it may go.
#[test]
fn a_request_that_is_larger_than_the_budget_goes_alone() {
    let mut three = three();
    three.pair.hosts[0].endpoint.set_receive_budget(1);
    (0..3).for_each(|index| three.read(index));
    three.pair.run(Duration::from_secs(1));
    let completions = three.pair.completions(0);
    assert_eq!(completions.len(), 3);
    assert!(completions.iter().all(|one| one.status == CompletionStatus::Success));
}

/// A WRITE goes as far as the peer has room, each answer lets more of it go, and what a READ asks
/// for takes none of that room.
#[test]
fn what_is_sent_stays_within_the_window_that_was_granted() {
    for (bytes, packets) in [(1, 1), (3 * (1024 + 352), 3), (u32::MAX, 16)] {
        let mut three = three();
        let attributes = QueuePairAttributes {
            send_window_bytes: Some(bytes),
            ..QueuePairAttributes::default()
        };
        let (now, qpn) = (three.pair.now, three.pairs[0][0]);
        three.pair.hosts[0].endpoint.modify_queue_pair(now, qpn, &attributes).unwrap();
        three.read(0);
        assert_eq!(three.asking(), [0]);
        let operation = SendOperation::Write {
            remote_address: ADDRESS,
            remote_key: three.keys[1],
            immediate: None,
        };
        let pieces = [piece(three.keys[0], ADDRESS, 16 << 10)];
        let request = SendRequest::new(7, operation, pieces);
        three.pair.hosts[0].endpoint.post_send(now, qpn, &request).unwrap();
        let mut transmit = Transmit::new();
        let mut sent = 0;
        while three.pair.hosts[0].endpoint.poll_transmit(now, &mut transmit) {
            sent += 1;
        }
        assert_eq!(sent, packets, "{bytes} bytes");
        // All of that is lost, and asked for and sent again.
        three.pair.run(Duration::from_secs(1));
        let statuses: Vec<_> = three.pair.completions(0).iter().map(|one| one.status).collect();
        assert_eq!(statuses, [CompletionStatus::Success; 2]);
    }
}

#[test]
fn shares_come_from_the_budget_and_return_to_it() {
    let mut pair = Pair::new();
    let endpoint = &mut pair.hosts[0].endpoint;
    assert_eq!(endpoint.grant_receive_share(1), None);
    endpoint.set_receive_budget(16 << 20);
    // One window of 128 packets of 4096 bytes.
    assert_eq!(endpoint.grant_receive_share(1), Some(128 * (4096 + 352)));
    let shares: Vec<_> = (0..6).map(|_| endpoint.grant_receive_share(8).unwrap()).collect();
    assert_eq!(shares[0], 2 << 20);
    assert!(shares.iter().sum::<u64>() < 15 << 20);
    let last = endpoint.grant_receive_share(8).unwrap();
    assert!(last < 2 << 20);
    [last, shares[0]].into_iter().for_each(|share| endpoint.withdraw_receive_share(share));
    assert_eq!(endpoint.grant_receive_share(8), Some(2 << 20));
}
