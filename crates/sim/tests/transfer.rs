//! Data arrives exactly, whatever the network does to the packets.

use core::time::Duration;

use millstream_roce::IcrcCheck;
use millstream_sim::plan::Kind;
use millstream_sim::scenarios::transfer::{Transfer, TransferOptions};
use millstream_sim::{
    ConnectionOptions, Happening, HostOptions, IdentificationSource, LinkOptions, Probability,
};
use millstream_wire::{Mtu, Psn};

/// Runs it; nothing may fail, and every checker must be content.
fn exact(options: &TransferOptions) -> Transfer<'static> {
    let mut transfer = Transfer::new(options);
    transfer.run();
    transfer.expect_no_failure();
    let report = transfer.report("test", options.seed);
    assert!(report.passed(), "{report}\n{options:?}");
    transfer
}

/// 20 MiB in one direction, in operations of one kind and length, at path MTU 1024.
fn stream(kind: Kind, link: LinkOptions) -> TransferOptions {
    let mut options = TransferOptions {
        operations: 20,
        kinds: vec![kind],
        max_length: 1 << 20,
        uniform: true,
        both_ways: false,
        link,
        ..TransferOptions::default()
    };
    options.connection.path_mtu = Mtu::B1024;
    options
}

fn with_link(change: impl Fn(&mut LinkOptions)) -> TransferOptions {
    let mut options = TransferOptions::default();
    change(&mut options.link);
    options
}

#[test]
fn over_a_clean_link_nothing_is_sent_twice() {
    let transfer = exact(&TransferOptions::default());
    for peer in transfer.simulation.machines() {
        let counters = peer.counters();
        assert_eq!((counters.retransmissions, counters.naks_sent, counters.duplicates), (0, 0, 0));
    }
}

#[test]
fn under_loss() {
    for per_mille in [10, 100] {
        for seed in 0..5 {
            let mut options = with_link(|link| link.loss = Probability::per_mille(per_mille));
            options.seed = seed;
            let transfer = exact(&options);
            assert!(transfer.simulation.count(Happening::Lost) > 0);
        }
    }
}

#[test]
fn under_duplication() {
    let options = with_link(|link| link.duplicate = Probability::per_mille(300));
    let transfer = exact(&options);
    assert!(transfer.simulation.count(Happening::Duplicated) > 100);
    // Copies of requests are answered again, not executed again.
    assert!(transfer.simulation.machines().all(|peer| peer.counters().duplicates > 0));
}

#[test]
fn under_reordering() {
    let options = with_link(|link| link.reorder = Probability::per_mille(100));
    let transfer = exact(&options);
    assert!(transfer.simulation.count(Happening::HeldBack) > 100);
}

#[test]
fn every_flipped_bit_is_caught_by_the_icrc() {
    let options = with_link(|link| link.corrupt = Probability::per_mille(100));
    let transfer = exact(&options);
    let corrupted = transfer.simulation.count(Happening::Corrupted);
    assert!(corrupted > 100);
    let dropped: u64 = transfer
        .simulation
        .machines()
        .map(|peer| {
            let c = peer.counters();
            // A flip in the headers may be found before the ICRC is looked at.
            c.dropped_icrc
                + c.dropped_malformed
                + c.dropped_opcode
                + c.dropped_qpn
                + c.dropped_partition_key
        })
        .sum();
    assert_eq!(dropped, corrupted);
}

#[test]
fn every_flipped_bit_is_caught_behind_a_udp_socket_too() {
    let mut options = with_link(|link| link.corrupt = Probability::per_mille(100));
    options.icrc = IcrcCheck::AnyIdentification;
    options.host = HostOptions {
        sees_ip_header: false,
        identification: IdentificationSource::Counter,
        ..HostOptions::default()
    };
    exact(&options);
}

#[test]
fn under_everything_at_once() {
    let mut options = with_link(|link| {
        link.loss = Probability::per_mille(50);
        link.duplicate = Probability::per_mille(50);
        link.reorder = Probability::per_mille(50);
        link.corrupt = Probability::per_mille(10);
        link.jitter = Duration::from_micros(20);
    });
    options.connections = 3;
    for seed in 0..5 {
        exact(&TransferOptions { seed, ..options.clone() });
    }
}

#[test]
fn every_kind_alone_at_every_path_mtu() {
    for kind in Kind::ALL {
        for path_mtu in Mtu::ALL {
            let connection = ConnectionOptions { path_mtu, ..ConnectionOptions::default() };
            let options = with_link(|link| link.loss = Probability::per_mille(20));
            exact(&TransferOptions { kinds: vec![kind], connection, ..options });
        }
    }
}

#[test]
fn packet_sequence_numbers_wrap() {
    for before in [1, 2, 17, 300] {
        let options = with_link(|link| link.loss = Probability::per_mille(20));
        exact(&TransferOptions { first_psn: Some(Psn::new(Psn::COUNT - before)), ..options });
    }
}

#[test]
fn over_ipv6() {
    let options = with_link(|link| link.corrupt = Probability::per_mille(20));
    exact(&TransferOptions { ipv6: true, ..options });
}

#[test]
fn a_slow_receiver_is_waited_for() {
    let transfer = exact(&TransferOptions {
        kinds: vec![Kind::Send, Kind::WriteImmediate],
        receive_depth: 1,
        receive_lag: Duration::from_micros(100),
        ..TransferOptions::default()
    });
    assert!(transfer.simulation.machines().all(|peer| peer.counters().rnr_naks_sent > 0));
}

#[test]
fn many_connections_share_a_slow_link() {
    let slow = LinkOptions {
        queue_bytes: 64 << 10,
        ..LinkOptions::new(100_000_000, Duration::from_micros(20))
    };
    let transfer = exact(&TransferOptions {
        connections: 32,
        operations: 20,
        link: slow,
        ..TransferOptions::default()
    });
    // The queue is far smaller than what all windows allow.
    assert!(transfer.simulation.count(Happening::Overflowed) > 0);
    // Each direction carries half of the bytes; at least half of the rate must be payload.
    let report = transfer.report("test", 1);
    assert!(report.throughput() > 100_000_000, "{report}");
}

/// A window ends where it fills the link and keeps the queue before it short. Which packets ask for acknowledgements depends on their
/// numbers. Acknowledgements wait behind what goes the other way, longer than any was measured to take.
#[test]
fn a_queue_of_20_milliseconds_is_filled_in_slow_start_at_most() {
    let bits_per_second = 100_000_000;
    let slow = LinkOptions {
        queue_bytes: bits_per_second / 8 / 50,
        ..LinkOptions::new(bits_per_second, Duration::from_micros(20))
    };
    for (first_psn, both_ways) in (0..16).flat_map(|psn| [(psn, false), (psn, true)]) {
        let options = TransferOptions {
            both_ways,
            max_window: 256,
            first_psn: Some(Psn::new(first_psn)),
            ..stream(Kind::Write, slow)
        };
        let transfer = exact(&options);
        let report = transfer.report("test", 1);
        let (lost, part) = if both_ways { (100, 166) } else { (1, 91) };
        assert!(transfer.simulation.count(Happening::Overflowed) < lost, "{first_psn}: {report}");
        assert!(report.throughput() > part * bits_per_second / 100, "{first_psn}: {report}");
    }
}

/// A READ asks for up to 128 packets, which take longer than the link's queue holds.
#[test]
fn reads_fill_a_slow_link() {
    let bits_per_second = 50_000_000;
    let slow = LinkOptions {
        queue_bytes: bits_per_second / 8 / 50,
        ..LinkOptions::new(bits_per_second, Duration::from_micros(20))
    };
    let options = TransferOptions { max_window: 256, ..stream(Kind::Read, slow) };
    for seed in 0..4 {
        let transfer = exact(&TransferOptions { seed, ..options.clone() });
        let report = transfer.report("test", seed);
        println!("{report}");
        assert!(report.throughput() > 8 * bits_per_second / 10, "{report}");
    }
}

#[test]
fn packets_that_overtake_each_other_cost_nothing() {
    for kind in [Kind::Write, Kind::Read] {
        for bits_per_second in [1_000_000_000, 10_000_000_000] {
            let mut link = LinkOptions::new(bits_per_second, Duration::from_micros(20));
            link.reorder = Probability::per_mille(5);
            let transfer = exact(&stream(kind, link));
            let report = transfer.report("test", 1);
            assert!(transfer.simulation.count(Happening::HeldBack) > 50, "{report}");
            for peer in transfer.simulation.machines() {
                assert_eq!(peer.counters().retransmissions, 0, "{report}");
            }
            assert!(report.throughput() > 9 * bits_per_second / 10, "{report}");
        }
    }
}

#[test]
fn arrivals_in_batches() {
    let mut options = with_link(|link| {
        link.loss = Probability::per_mille(20);
        link.duplicate = Probability::per_mille(50);
        link.reorder = Probability::per_mille(20);
    });
    options.host.coalescing = Duration::from_micros(50);
    // A requester may have as many READs outstanding as the responder executes, and no more:
    // copies of old ones must not take their place.
    options.connection.reads = 1;
    for seed in 0..10 {
        exact(&TransferOptions { seed, ..options.clone() });
    }
}
