//! What a queue pair counts for itself.

mod common;

use std::time::Duration;

use common::forge::Forge;
use common::{Lcg, Options, Pair, meta, pattern, piece};
use millstream_roce::{
    CompletionStatus, Node, QueuePairCapabilities, QueuePairConfig, QueuePairCounters,
    SendOperation,
};
use millstream_wire::{Opcode, Qpn};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const LENGTH: usize = 300_000;

#[test]
fn a_queue_pair_counts_what_is_its_own() {
    let mut pair = Pair::with(Options::default());
    let mut lcg = Lcg(7);
    pair.wire = Box::new(move |_, datagram| match lcg.below(50) {
        0 => vec![],
        _ => vec![datagram.to_vec()],
    });
    let (queue, used) = (pair.hosts[0].queue, pair.hosts[0].qpn);
    let config = QueuePairConfig::new(common::DOMAIN, queue, QueuePairCapabilities::new(1, 1));
    let idle = pair.hosts[0].endpoint.create_queue_pair(&config).unwrap();
    let source = pair.register(0, LOCAL, pattern(LENGTH, 1));
    let target = pair.register(1, REMOTE, vec![0; LENGTH]);
    let write =
        SendOperation::Write { remote_address: REMOTE, remote_key: target, immediate: None };
    pair.post(0, 1, write, &[piece(source, LOCAL, LENGTH)]);
    pair.run(Duration::from_secs(1));
    assert_eq!(pair.completions(0)[0].status, CompletionStatus::Success);
    // A packet that came before, now with a mark, of which the sender is told.
    let marked = Forge::new(&pair, 1, Opcode::RcWriteOnly, Options::default().psn[0]);
    let marked = marked.reth(REMOTE, target, 4).payload(b"data").datagram(&pair);
    let mut meta = meta(pair.hosts[0].address, pair.hosts[1].address);
    meta.congestion_experienced = true;
    pair.wire = Box::new(|_, datagram| vec![datagram.to_vec()]);
    pair.hosts[1].endpoint.handle_datagram(pair.now, &meta, &marked);
    pair.run(Duration::from_secs(1));
    assert_eq!(pair.counters(0).congestion_notifications, 1);

    for host in &pair.hosts {
        // All that the endpoint has done it did for this one, and nothing was dropped.
        let all = host.endpoint.counters();
        let expected = QueuePairCounters {
            packets_sent: all.packets_sent,
            packets_received: all.packets_received,
            payload_bytes_sent: all.payload_bytes_sent,
            payload_bytes_received: all.payload_bytes_received,
            retransmissions: all.retransmissions,
        };
        assert_eq!(host.endpoint.queue_pair_counters(host.qpn), Some(expected));
    }
    let [sender, receiver] = &pair.hosts;
    let sent = sender.endpoint.queue_pair_counters(used).unwrap();
    assert!(sent.retransmissions > 0 && sent.payload_bytes_sent > LENGTH as u64, "{sent:?}");
    let received = receiver.endpoint.queue_pair_counters(receiver.qpn).unwrap();
    assert_eq!(received.payload_bytes_received, LENGTH as u64);
    let nothing = Some(QueuePairCounters::default());
    assert_eq!(sender.endpoint.queue_pair_counters(idle), nothing);
    let other = Qpn::new(used.value() ^ 1);
    assert_eq!(sender.endpoint.queue_pair_counters(other), None);
}
