//! Many connections and one receive buffer: with a budget for it nothing is dropped for want of room,
//! and without one much is. The same for collectives, whose switches have many senders.

use core::time::Duration;

use millstream_roce::Counters;
use millstream_sim::plan::Kind;
use millstream_sim::scenarios::allreduce::{AllReduceOptions, Reduction};
use millstream_sim::scenarios::inc_scale::{run_buffered, run_chain};
use millstream_sim::scenarios::transfer::{Transfer, TransferOptions};
use millstream_sim::{ConnectionOptions, Happening, HostOptions, LinkOptions, Probability};
use millstream_wire::Mtu;

/// What the kernel gives an unprivileged process that asks for more, by its account.
const BUFFER: u64 = 416 << 10;

/// Sixteen connections, whose host is busy with other things for long enough to have all of their
/// windows in its buffer.
fn options(seed: u64, kind: Kind) -> TransferOptions {
    TransferOptions {
        seed,
        connections: 16,
        operations: 20,
        kinds: vec![kind],
        max_length: 200_000,
        both_ways: false,
        link: LinkOptions { queue_bytes: u64::MAX, ..LinkOptions::new(100_000_000_000, LATENCY) },
        host: HostOptions {
            coalescing: Duration::from_micros(100),
            receive_buffer: BUFFER,
            ..HostOptions::default()
        },
        connection: ConnectionOptions {
            path_mtu: Mtu::B4096,
            timeout: 18,
            reads: 16,
            ..ConnectionOptions::default()
        },
        ..TransferOptions::default()
    }
}

const LATENCY: Duration = Duration::from_micros(10);

/// Does it, and checks every byte; returns what was dropped for want of room, how often the first
/// host went back, and how long it took.
fn run(options: &TransferOptions) -> (u64, Counters, Duration) {
    let mut transfer = Transfer::new(options);
    transfer.run();
    transfer.expect_no_failure();
    let report = transfer.report("receive buffer", options.seed);
    assert!(report.passed(), "{report}");
    for &host in &transfer.hosts {
        assert_eq!(transfer.simulation.machine(host).endpoint().requested_bytes(), 0);
    }
    let dropped = transfer.simulation.count(Happening::ReceiveBufferFull);
    let end = transfer.finished_at().unwrap();
    (dropped, report.devices[0].1, Duration::from_nanos(end.nanos()))
}

#[test]
fn reads_ask_for_no_more_than_there_is_room_for() {
    for seed in 1..5 {
        let without = options(seed, Kind::Read);
        let with = TransferOptions { receive_budget: Some(BUFFER / 2), ..without.clone() };
        let (dropped, counters, slow) = run(&without);
        assert!(dropped > 100 && counters.retransmissions > 20, "{dropped} {counters:?}");
        let (dropped, counters, fast) = run(&with);
        assert_eq!((dropped, counters.retransmissions), (0, 0), "{counters:?}");
        assert!(fast < slow, "{fast:?} with and {slow:?} without");
    }
}

#[test]
fn writes_stay_within_what_was_granted() {
    for seed in 1..5 {
        let without = options(seed, Kind::Write);
        let granted = ConnectionOptions {
            send_window_bytes: Some((BUFFER / 2 / 16) as u32),
            ..without.connection
        };
        let with = TransferOptions { connection: granted, ..without.clone() };
        let (dropped, counters, _) = run(&without);
        assert!(dropped > 100 && counters.retransmissions > 20, "{dropped} {counters:?}");
        let (dropped, counters, _) = run(&with);
        assert_eq!((dropped, counters.retransmissions), (0, 0), "{counters:?}");
    }
}

/// A budget that holds less than one request, both ways, and every kind of operation: nothing waits
/// for ever, and nothing of the budget is lost.
#[test]
fn a_tiny_budget_and_every_fault_end_well() {
    for seed in 1..20 {
        let usual = options(seed, Kind::Read);
        let link = LinkOptions {
            loss: Probability::per_mille(20),
            duplicate: Probability::per_mille(10),
            reorder: Probability::per_mille(10),
            ..LinkOptions::default()
        };
        let connection = ConnectionOptions { send_window_bytes: Some(1), ..usual.connection };
        run(&TransferOptions {
            connections: 5,
            kinds: Kind::ALL.to_vec(),
            max_length: 60_000,
            both_ways: true,
            link,
            connection,
            host: HostOptions::default(),
            receive_budget: Some(10_000),
            ..usual
        });
    }
}

/// The kernel's account, of machines that are busy with other things for long enough to have all windows in there.
fn short(receive_buffer: u64) -> HostOptions {
    HostOptions { coalescing: Duration::from_micros(100), receive_buffer, ..HostOptions::default() }
}

/// Sums of hosts below one switch: how many datagrams found a buffer full. Every element of every sum is checked.
fn sum(options: AllReduceOptions) -> u64 {
    let mut reduction = Reduction::new(&AllReduceOptions {
        counts: vec![128 << 10, 1, 128 << 10],
        segment_bytes: 256 << 10,
        window: 8,
        link: LinkOptions { queue_bytes: u64::MAX, ..LinkOptions::new(100_000_000_000, LATENCY) },
        connection: ConnectionOptions {
            path_mtu: Mtu::B4096,
            timeout: 18,
            reads: 0,
            ..ConnectionOptions::default()
        },
        call_limit: Duration::from_secs(600),
        time_limit: Duration::from_secs(3600),
        ..options
    });
    reduction.run();
    let failures: Vec<_> = reduction.failures().collect();
    assert!(failures.is_empty(), "{failures:?}");
    let report = reduction.report();
    assert!(report.passed(), "{report}");
    reduction.simulation.count(Happening::ReceiveBufferFull)
}

#[test]
fn hosts_below_a_switch_divide_its_buffer() {
    let buffer = 4 << 20;
    for seed in 1..3 {
        let without = AllReduceOptions { seed, hosts: 64, ..AllReduceOptions::default() };
        let without = AllReduceOptions { switch: Some(short(buffer)), ..without };
        let with = AllReduceOptions { receive_budget: Some(buffer / 2), ..without.clone() };
        let dropped = sum(without);
        assert!(dropped > 100, "seed {seed}: {dropped} without");
        assert_eq!(sum(with), 0, "seed {seed}");
    }
}

#[test]
fn a_switch_sends_a_host_no_more_than_that_has_room_for() {
    for seed in 1..5 {
        let without = AllReduceOptions { seed, hosts: 2, ..AllReduceOptions::default() };
        let switch = Some(HostOptions::default());
        let without = AllReduceOptions { host: short(BUFFER), switch, ..without };
        let with = AllReduceOptions { host_budget: Some(BUFFER / 2), ..without.clone() };
        let dropped = sum(without);
        assert!(dropped > 20, "seed {seed}: {dropped} without");
        assert_eq!(sum(with), 0, "seed {seed}");
    }
}

#[test]
fn switches_below_a_switch_divide_its_buffer() {
    let (bytes, buffer) = (512 << 10, 4 << 20);
    let (dropped, report) = run_buffered(1, 64, bytes, buffer, false);
    assert!(dropped > 100 && report.passed(), "{dropped} without, {report}");
    let (dropped, report) = run_buffered(1, 64, bytes, buffer, true);
    assert_eq!(dropped, 0, "{report}");
    assert!(report.passed(), "{report}");
}

/// How long a vector takes over a link of 1 Gbit/s, in packets of `mtu` bytes.
fn one_way(bytes: u64, mtu: Mtu) -> Duration {
    // Ethernet with preamble and gap, IPv4, UDP, BTH and ICRC.
    let headers = bytes.div_ceil(mtu.bytes() as u64) * 82;
    Duration::from_nanos((bytes + headers) * 8)
}

/// A host lets its switch send a fifth of what it may send itself. If it did, results would have a fifth of the link.
#[test]
fn results_come_as_fast_as_vectors_go_where_less_of_them_is_under_way() {
    let bytes = 4 << 20;
    let mut reduction = Reduction::new(&AllReduceOptions {
        hosts: 2,
        counts: vec![bytes / 4],
        segment_bytes: 64 << 10,
        window: 32,
        host_budget: Some(2 << 20),
        link: LinkOptions { queue_bytes: u64::MAX, ..LinkOptions::new(1_000_000_000, LATENCY) },
        ..AllReduceOptions::default()
    });
    reduction.run();
    let report = reduction.report();
    assert!(report.passed(), "{report}");
    let bound = one_way(bytes, Mtu::B1024);
    assert!(report.virtual_time < bound * 11 / 10, "{:?} of {bound:?}", report.virtual_time);
}

/// A switch that has many below it lets the one above send less than that, which has none but it, lets it send.
#[test]
fn the_same_between_switches() {
    let (bytes, hosts) = (4 << 20, 8);
    let report = run_chain(1, hosts, bytes, 4 << 20);
    assert!(report.passed(), "{report}");
    let bound = one_way(bytes, Mtu::B4096);
    assert!(report.virtual_time < bound * 11 / 10, "{:?} of {bound:?}", report.virtual_time);
}
