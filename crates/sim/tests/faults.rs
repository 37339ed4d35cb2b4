//! Partitions, crashes and scripted faults: what survives, and how the rest ends.

use core::time::Duration;

use millstream_roce::{CompletionStatus, Instant};
use millstream_sim::plan::Kind;
use millstream_sim::scenarios::transfer::{Transfer, TransferOptions};
use millstream_sim::{ConnectionOptions, Happening, LinkOptions, PacketInfo, Verdict};
use millstream_wire::Operation;

const MILLISECOND: Duration = Duration::from_millis(1);
const PARTITION_AT: Instant = Instant::from_nanos(1_000_000);

/// Eight timeouts of 4.096 us * 2^14.
const PATIENCE: Duration = Duration::from_nanos(8 * (4096 << 14));

/// Lasts about 8 ms when nothing fails: only one host starts operations.
fn slow_transfer() -> TransferOptions {
    TransferOptions {
        operations: 200,
        both_ways: false,
        link: LinkOptions::new(1_000_000_000, Duration::from_micros(10)),
        connection: ConnectionOptions { timeout: 14, retry_count: 7, ..Default::default() },
        ..TransferOptions::default()
    }
}

fn passed(transfer: &Transfer<'_>) {
    let report = transfer.report("test", 1);
    assert!(report.passed(), "{report}");
}

#[test]
fn a_partition_shorter_than_the_patience_is_survived() {
    let mut transfer = Transfer::new(&slow_transfer());
    let links = transfer.links;
    // Silence is counted from the last answer before the cut, and a probe must fall into the rest.
    let healed = PARTITION_AT + (PATIENCE - 100 * MILLISECOND);
    transfer.simulation.partition(&links, PARTITION_AT, healed);
    transfer.run();
    transfer.expect_no_failure();
    passed(&transfer);
    assert!(transfer.simulation.count(Happening::Partitioned) > 0);
    assert!(transfer.finished_at().unwrap() > healed);
}

#[test]
fn a_partition_of_one_direction_is_survived() {
    for direction in 0..2 {
        let mut transfer = Transfer::new(&slow_transfer());
        let link = transfer.links[direction];
        let healed = PARTITION_AT + 300 * MILLISECOND;
        transfer.simulation.partition(&[link], PARTITION_AT, healed);
        transfer.run();
        transfer.expect_no_failure();
        passed(&transfer);
    }
}

/// The first host's requests end in error, in bounded time, and with the reason first.
fn gives_up(transfer: &mut Transfer<'_>, silence_from: Instant) {
    transfer.run();
    passed(transfer);
    let (at, status) = transfer.failure(0, 0).expect("the peer is silent for too long");
    assert_eq!(status, CompletionStatus::RetryExceeded);
    let silence = at.saturating_duration_since(silence_from);
    assert!(silence <= PATIENCE + 2 * MILLISECOND, "gave up after {silence:?}");
    assert!(silence >= PATIENCE - 2 * MILLISECOND, "gave up after {silence:?}");
}

#[test]
fn a_partition_longer_than_the_patience_is_reported() {
    let mut options = slow_transfer();
    options.kinds = vec![Kind::Write, Kind::Read];
    options.time_limit = Duration::from_secs(2);
    let mut transfer = Transfer::new(&options);
    let links = transfer.links;
    transfer.simulation.partition(&links, PARTITION_AT, PARTITION_AT + PATIENCE * 2);
    gives_up(&mut transfer, PARTITION_AT);
}

#[test]
fn a_crashed_peer_is_reported() {
    let mut options = slow_transfer();
    options.kinds = vec![Kind::Write, Kind::Read];
    let mut transfer = Transfer::new(&options);
    let peer = transfer.hosts[1];
    transfer.simulation.crash(peer, PARTITION_AT);
    gives_up(&mut transfer, PARTITION_AT);
    assert!(transfer.simulation.count(Happening::ReceiverDown) > 0);
}

#[test]
fn a_peer_that_comes_back_has_forgotten_the_connection() {
    let mut options = slow_transfer();
    options.kinds = vec![Kind::Write, Kind::Read];
    let mut transfer = Transfer::new(&options);
    let peer = transfer.hosts[1];
    transfer.simulation.crash(peer, PARTITION_AT);
    transfer.simulation.restart(peer, PARTITION_AT + 10 * MILLISECOND);
    gives_up(&mut transfer, PARTITION_AT);
    let counters = transfer.simulation.machine(peer).counters();
    assert!(counters.dropped_qpn > 0);
    assert_eq!(counters.packets_sent, 0);
}

#[test]
fn a_receiver_that_is_never_ready_is_reported() {
    let mut options = slow_transfer();
    options.kinds = vec![Kind::Send];
    options.receive_lag = Duration::from_secs(1000);
    options.receive_depth = 1;
    options.connection.rnr_retry = 3;
    options.connection.minimum_rnr_timer = 14;
    options.time_limit = Duration::from_secs(2);
    let mut transfer = Transfer::new(&options);
    let host = transfer.hosts[0];
    let outcome = transfer.simulation.run_until(Instant::from_nanos(2_000_000_000), |simulation| {
        simulation.machine(host).failure(0).is_some()
    });
    assert_eq!(outcome, millstream_sim::Outcome::Done);
    let (_, status) = transfer.failure(0, 0).unwrap();
    assert_eq!(status, CompletionStatus::ReceiverNotReadyExceeded);
    let responder = transfer.simulation.machine(transfer.hosts[1]).counters();
    assert_eq!(responder.rnr_naks_sent, 4);
}

/// Runs one connection with a rule for its packets, by their operation and how many of it were
/// seen before.
fn scripted(kinds: &[Kind], rule: impl Fn(Operation, u64) -> Verdict) -> Transfer<'_> {
    let options = TransferOptions { kinds: kinds.to_vec(), ..slow_transfer() };
    let mut transfer = Transfer::new(&options);
    let mut seen = std::collections::HashMap::new();
    // Boxed closures of the simulation outlive this call: the rule decides before they are made.
    let script: Vec<(Operation, Vec<Verdict>)> = [
        Operation::Send,
        Operation::Write,
        Operation::ReadRequest,
        Operation::ReadResponse,
        Operation::Acknowledge,
    ]
    .map(|operation| (operation, (0..2000).map(|index| rule(operation, index)).collect()))
    .into();
    transfer.simulation.add_rule(move |info: &PacketInfo<'_>| {
        let Some(packet) = &info.packet else { return Verdict::Pass };
        let operation = packet.opcode.operation();
        let index = seen.entry(operation).or_insert(0_usize);
        *index += 1;
        let verdicts = script.iter().find(|(of, _)| *of == operation);
        verdicts.and_then(|(_, list)| list.get(*index - 1)).copied().unwrap_or(Verdict::Pass)
    });
    transfer.run();
    transfer.expect_no_failure();
    passed(&transfer);
    transfer
}

#[test]
fn a_lost_packet_costs_one_nak_and_no_timeout() {
    let transfer = scripted(&[Kind::Write], |operation, index| match (operation, index) {
        (Operation::Write, 50) => Verdict::Drop,
        _ => Verdict::Pass,
    });
    let [requester, responder] =
        transfer.hosts.map(|host| *transfer.simulation.machine(host).counters());
    assert_eq!((responder.naks_sent, requester.naks_received), (1, 1));
    assert_eq!((requester.retransmissions, requester.timeouts), (1, 0));
}

/// The packet is lost, and so is the first packet that is sent after its loss was reported.
#[test]
fn a_repeat_that_is_lost_costs_another_nak_and_no_timeout() {
    let options = TransferOptions { kinds: vec![Kind::Write], ..slow_transfer() };
    let mut transfer = Transfer::new(&options);
    let (mut count, mut lost) = (0, Vec::new());
    transfer.simulation.add_rule(move |info: &PacketInfo<'_>| {
        let Some(packet) = info.packet else { return Verdict::Pass };
        if packet.opcode.operation() != Operation::Write {
            return Verdict::Pass;
        }
        count += 1;
        if count == 50 || lost == [packet.bth.psn] {
            lost.push(packet.bth.psn);
            return Verdict::Drop;
        }
        Verdict::Pass
    });
    transfer.run();
    transfer.expect_no_failure();
    passed(&transfer);
    let requester = transfer.simulation.machine(transfer.hosts[0]).counters();
    assert_eq!((requester.naks_received, requester.retransmissions), (2, 2));
    assert_eq!(requester.timeouts, 0);
}

/// A peer that answered within microseconds and then takes 8 ms, as one that is emulated does: the
/// timer learns of it from a few needless probes.
#[test]
fn a_peer_that_becomes_slow_is_not_flooded() {
    let mut transfer = Transfer::new(&TransferOptions {
        kinds: vec![Kind::Write],
        max_length: 4096,
        send_depth: 1,
        ..slow_transfer()
    });
    let mut count = 0;
    transfer.simulation.add_rule(move |info: &PacketInfo<'_>| {
        let answer = info.packet.is_some_and(|p| p.opcode.operation() == Operation::Acknowledge);
        count += u32::from(answer);
        if answer && count > 20 { Verdict::Delay(8 * MILLISECOND) } else { Verdict::Pass }
    });
    transfer.run();
    transfer.expect_no_failure();
    passed(&transfer);
    let requester = transfer.simulation.machine(transfer.hosts[0]).counters();
    assert!((1..16).contains(&requester.timeouts), "{requester:?}");
}

#[test]
fn a_lost_acknowledgement_costs_nothing_when_a_later_one_comes() {
    let transfer = scripted(&[Kind::Write], |operation, index| match (operation, index) {
        (Operation::Acknowledge, 5..8) => Verdict::Drop,
        _ => Verdict::Pass,
    });
    let requester = transfer.simulation.machine(transfer.hosts[0]).counters();
    assert_eq!(requester.retransmissions, 0);
}

#[test]
fn a_lost_last_packet_is_sent_again_after_a_timeout() {
    let options = TransferOptions {
        operations: 1,
        kinds: vec![Kind::Write],
        max_length: 10_000,
        uniform: true,
        ..slow_transfer()
    };
    let mut transfer = Transfer::new(&options);
    let mut count = 0;
    transfer.simulation.add_rule(move |info: &PacketInfo<'_>| {
        let write = info.packet.is_some_and(|p| p.opcode.operation() == Operation::Write);
        count += u32::from(write);
        if write && count == 10 { Verdict::Drop } else { Verdict::Pass }
    });
    transfer.run();
    transfer.expect_no_failure();
    passed(&transfer);
    assert_eq!(transfer.simulation.machine(transfer.hosts[0]).counters().timeouts, 1);
}

#[test]
fn parts_of_a_read_are_lost() {
    let transfer = scripted(&[Kind::Read], |operation, index| match (operation, index % 40) {
        (Operation::ReadRequest, 7) | (Operation::ReadResponse, 13 | 30) => Verdict::Drop,
        _ => Verdict::Pass,
    });
    let requester = transfer.simulation.machine(transfer.hosts[0]).counters();
    assert!(requester.retransmissions > 0);
}

#[test]
fn ghosts_of_old_packets_change_nothing() {
    // Copies that arrive long after the original was acknowledged.
    let transfer = scripted(&Kind::ALL, |_, index| match index % 5 {
        0 => Verdict::Duplicate,
        1 => Verdict::Delay(3 * MILLISECOND),
        _ => Verdict::Pass,
    });
    assert!(transfer.simulation.count(Happening::HeldBack) > 0);
}
