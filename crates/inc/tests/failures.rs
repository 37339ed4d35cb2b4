//! What goes wrong ends in an error that says what it was, on every rank that can be reached, and
//! nowhere else.

mod network;

use core::net::{IpAddr, Ipv4Addr};
use core::time::Duration;

use millstream_inc::{
    Abort, Collective, CollectiveCall, CollectiveError, DESCRIPTOR_BYTES, DataType, Descriptor,
    Field, Mismatch, Mode, ReduceOperation, StartError, Stripe, SwitchEvent, Violation,
};
use millstream_roce::{
    Access, CompletionStatus, IcrcCheck, Instant, Piece, ProtectionDomainId, ReceiveRequest,
    SendOperation, SendRequest,
};
use millstream_wire::{Bth, Opcode, Psn};
use network::{COMMUNICATOR, Faults, Network, RAW, Setup, int32};

/// Starts int32 sums with these counts, one a rank; `None` does not call.
fn start(network: &mut Network, counts: &[Option<usize>]) {
    for (rank, count) in counts.iter().enumerate() {
        if let Some(count) = count {
            let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
            let vector = vec![1; *count];
            let call = network.call(rank, &vector, data_type, operation, int32, false);
            network.start(rank, &call);
        }
    }
}

fn all_failed(network: &mut Network, wanted: CollectiveError) {
    for (rank, outcome) in network.outcomes().into_iter().enumerate() {
        assert_eq!(outcome, Some(Err(wanted)), "rank {rank}");
    }
}

/// The events that say why, in any order, then that all know.
fn check_events(network: &mut Network, why: &[SwitchEvent], abort: Abort) {
    network.run_to_rest();
    let aborted = SwitchEvent::Aborted { communicator: COMMUNICATOR, abort };
    assert_eq!(network.events.pop(), Some(aborted));
    assert_eq!(network.events.len(), why.len(), "{:?}", network.events);
    assert!(why.iter().all(|event| network.events.contains(event)), "{:?}", network.events);
    assert_eq!(network.switch.statistics(COMMUNICATOR).unwrap().abort, Some(abort));
}

#[test]
fn a_mismatch_is_an_error_everywhere_that_names_the_rank() {
    for odd in [0, 1, 3] {
        // Several windows, less than one, and next to nothing.
        for (seed, loss, count) in [(1, 0, 2000), (2, 100, 2000), (3, 0, 300), (4, 100, 1)] {
            let faults = Faults { loss, ..Faults::default() };
            let mut network = Network::new(Setup { seed, faults, ..Setup::default() });
            network.all_reduce(10, false);
            let counts: Vec<_> =
                (0..4).map(|rank| Some(count + usize::from(rank == odd))).collect();
            start(&mut network, &counts);
            // It is told as soon as two differ, which need not show who is the odd one.
            network.run_until("an outcome", |network| network.hosts[0].outcome.is_some());
            let outcome = network.hosts[0].outcome;
            let Some(Err(CollectiveError::Aborted(Abort::Mismatch(mismatch)))) = outcome else {
                panic!("{outcome:?}");
            };
            let Mismatch { rank, reference, expected, found, .. } = mismatch;
            let count_of = |rank| count as u64 + u64::from(rank == odd as u32);
            assert!((rank == odd as u32) != (reference == odd as u32), "{mismatch:?}");
            assert_eq!((mismatch.sequence, mismatch.field), (1, Field::Count));
            assert_eq!((expected, found), (count_of(reference), count_of(rank)));
            let abort = Abort::Mismatch(mismatch);
            all_failed(&mut network, abort.into());
            let why = [SwitchEvent::Mismatch { communicator: COMMUNICATOR, mismatch }];
            check_events(&mut network, &why, abort);
        }
    }
}

#[test]
fn a_mismatch_that_comes_late_is_found_too() {
    let mut network = Network::new(Setup::default());
    start(&mut network, &[Some(5000), Some(5000), Some(5000), None]);
    // A window of everyone else's data lies in the slots.
    network.run_to_rest();
    let (data_type, operation) = (DataType::Float32, ReduceOperation::Sum);
    let bytes = |x: f32| x.to_le_bytes().to_vec();
    let call = network.call(3, &vec![1.0_f32; 5000], data_type, operation, bytes, false);
    network.start(3, &call);
    let mismatch = Mismatch {
        sequence: 0,
        rank: 3,
        reference: 0,
        field: Field::DataType,
        expected: DataType::Int32.code().into(),
        found: DataType::Float32.code().into(),
    };
    all_failed(&mut network, Abort::Mismatch(mismatch).into());
}

#[test]
fn a_number_or_a_stripe_that_others_do_not_have_is_a_mismatch() {
    let call = |sequence, stripe| {
        let Rude::Send(bytes) = descriptor(sequence, Collective::AllReduce, 100) else {
            unreachable!("a descriptor is sent")
        };
        let descriptor = Descriptor::parse(&bytes).unwrap();
        Rude::Send(Descriptor { stripe, ..descriptor }.to_bytes())
    };
    let stripe = |tree| Stripe::new(tree, 2).unwrap();
    for (rude, field, expected, found) in [
        (call(1, Stripe::WHOLE), Field::Sequence, 0, 1),
        (call(0, stripe(0)), Field::Stripe, 0x100, 0x200),
        (call(0, stripe(1)), Field::Stripe, 0x100, 0x201),
    ] {
        let mut network = Network::new(Setup { hosts: 3, ..Setup::default() });
        start(&mut network, &[None, Some(100), Some(100)]);
        misbehave(&mut network, 0, &[rude]);
        network.run_until("an error on the others", |network| {
            network.hosts[1..].iter().all(|host| host.worker.failure().is_some())
        });
        let mismatch = Mismatch { sequence: 0, rank: 0, reference: 1, field, expected, found };
        let abort = CollectiveError::from(Abort::Mismatch(mismatch));
        assert_eq!(network.hosts[1].worker.failure(), Some(abort));
    }
}

#[test]
fn a_mismatch_of_empty_and_not_empty() {
    let mut network = Network::new(Setup { hosts: 2, ..Setup::default() });
    start(&mut network, &[Some(0), Some(3000)]);
    let mismatch = Mismatch {
        sequence: 0,
        rank: 1,
        reference: 0,
        field: Field::Count,
        expected: 0,
        found: 3000,
    };
    all_failed(&mut network, Abort::Mismatch(mismatch).into());
}

/// What a rank that knows no rules does.
#[derive(Clone, Copy, Debug)]
enum Rude {
    /// A SEND of these bytes.
    Send([u8; DESCRIPTOR_BYTES]),
    /// A descriptor of so many int32 elements, with so many bytes behind it.
    Small(u64, u32),
    /// So many bytes of a SEND.
    Garbage(u32),
    /// A WRITE of so many bytes.
    Write(u32),
    /// The same, with this immediate data.
    WriteWithImmediate(u32, u32),
    Read(u32),
}

/// What no switch computes.
fn floats_bit_by_bit() -> Rude {
    let Rude::Send(mut bytes) = descriptor(0, Collective::AllReduce, 1) else { unreachable!() };
    bytes[6] = ReduceOperation::BitAnd.code();
    bytes[7] = DataType::Float32.code();
    Rude::Send(bytes)
}

/// A descriptor of a vector that does not fit a packet, but for one byte.
fn with_byte(at: usize, byte: u8) -> Rude {
    let Rude::Send(mut bytes) = descriptor(0, Collective::AllReduce, 1000) else { unreachable!() };
    bytes[at] = byte;
    Rude::Send(bytes)
}

fn descriptor(sequence: u64, collective: Collective, count: u64) -> Rude {
    Rude::Send(
        Descriptor {
            sequence,
            stripe: Stripe::WHOLE,
            collective,
            operation: ReduceOperation::Sum,
            data_type: DataType::Int32,
            root: 0,
            count,
            mode: Mode::Write,
            destination_address: 0,
            destination_key: 0,
        }
        .to_bytes(),
    )
}

/// Posts requests on a rank past its worker.
fn misbehave(network: &mut Network, rank: usize, requests: &[Rude]) {
    let host = &mut network.hosts[rank];
    for (number, request) in requests.iter().enumerate() {
        let (bytes, length) = match request {
            Rude::Send(bytes) => (bytes.to_vec(), DESCRIPTOR_BYTES as u32),
            Rude::Small(count, vector) => {
                let Rude::Send(bytes) = descriptor(0, Collective::AllReduce, *count) else {
                    unreachable!()
                };
                let length = DESCRIPTOR_BYTES as u32 + vector;
                ([&bytes[..], &vec![1; *vector as usize]].concat(), length)
            }
            Rude::Garbage(length)
            | Rude::Write(length)
            | Rude::WriteWithImmediate(length, _)
            | Rude::Read(length) => (vec![1; *length as usize + 1], *length),
        };
        let address = 1 << 50;
        let memory = host.endpoint.memory_mut();
        let key = memory.register(ProtectionDomainId(1), address, Access::LOCAL_WRITE, bytes);
        let piece = Piece { key: key.unwrap(), address, length };
        let (remote_address, remote_key) = (0, 0);
        let operation = match request {
            Rude::Send(_) | Rude::Small(..) | Rude::Garbage(_) => {
                SendOperation::Send { immediate: None }
            }
            Rude::Write(_) => SendOperation::Write { remote_address, remote_key, immediate: None },
            Rude::WriteWithImmediate(_, immediate) => {
                SendOperation::Write { remote_address, remote_key, immediate: Some(*immediate) }
            }
            Rude::Read(_) => SendOperation::Read { remote_address, remote_key },
        };
        let request = SendRequest::new(RAW | number as u64, operation, [piece]);
        host.endpoint.post_send(network.now, host.qpn, &request).unwrap();
    }
    network.service(rank);
}

#[test]
fn who_breaks_the_protocol_is_named_and_the_others_go_free() {
    use Collective::AllReduce;
    let open = |count| descriptor(0, AllReduce, count);
    for (requests, violation) in [
        (vec![Rude::Garbage(32)], Violation::Descriptor),
        (vec![Rude::Garbage(0)], Violation::Descriptor),
        (vec![Rude::Garbage(64)], Violation::Descriptor),
        (vec![Rude::Garbage(65)], Violation::Descriptor),
        (vec![Rude::Garbage(4000)], Violation::Descriptor),
        (vec![descriptor(u64::MAX, AllReduce, 1)], Violation::Sequence),
        (vec![open(100), descriptor(0, AllReduce, 0)], Violation::Sequence),
        (vec![open(100), descriptor(1, AllReduce, 0)], Violation::Early),
        (vec![open(0), descriptor(1, AllReduce, 0), Rude::Write(4)], Violation::Unannounced),
        (vec![floats_bit_by_bit()], Violation::Unsupported),
        (vec![with_byte(5, 99)], Violation::Unsupported),
        (vec![with_byte(4, 99)], Violation::Descriptor),
        (vec![with_byte(12, 3)], Violation::Root),
        (vec![with_byte(31, 1)], Violation::Count),
        (vec![Rude::Write(4)], Violation::Unannounced),
        (vec![open(100), Rude::Write(400), Rude::Write(400)], Violation::Unannounced),
        (vec![Rude::Small(52, 208), Rude::Write(208)], Violation::Unannounced),
        // What fits a packet comes with the descriptor, and nothing else does.
        (vec![open(1)], Violation::Length),
        (vec![Rude::Small(52, 204)], Violation::Length),
        (vec![Rude::Small(2, 12)], Violation::Length),
        (vec![Rude::Small(53, 208)], Violation::Length),
        (vec![Rude::Small(0, 4)], Violation::Length),
        (vec![Rude::Small(53, 212)], Violation::Descriptor),
        (vec![open(1000), Rude::Write(511)], Violation::Length),
        (vec![open(1000), Rude::Write(1024)], Violation::Length),
        (vec![open(100), Rude::Write(408)], Violation::Length),
        (vec![open(129), Rude::Write(512), Rude::Write(512)], Violation::Length),
        (vec![Rude::Read(4)], Violation::Request),
        // Results go to where it says, which is nowhere.
        (vec![open(128), Rude::Write(512)], Violation::Destination),
        (vec![open(100), Rude::WriteWithImmediate(400, 0)], Violation::Immediate),
    ] {
        let mut network = Network::new(Setup { hosts: 3, ..Setup::default() });
        // The others agree with what it says first, if that is something.
        let count = match requests[0] {
            Rude::Send(bytes) => Descriptor::parse(&bytes).map_or(1000, |it| it.count as usize),
            Rude::Small(count, _) => count as usize,
            _ => 1000,
        };
        start(&mut network, &[None, Some(count), Some(count)]);
        misbehave(&mut network, 0, &requests);
        let abort = Abort::Violation { rank: 0, violation };
        network.run_until("an error on the honest ranks", |network| {
            network.hosts[1..].iter().all(|host| host.worker.failure().is_some())
        });
        for host in &network.hosts[1..] {
            assert_eq!(host.worker.failure(), Some(abort.into()), "{requests:?}");
            // Some break the rules only after all have their result.
            let outcome = host.outcome.unwrap();
            assert!(outcome.is_ok() || outcome == Err(abort.into()), "{requests:?}");
        }
        let status = match violation {
            Violation::Request => Some(CompletionStatus::Flushed),
            Violation::Destination => Some(CompletionStatus::RemoteAccess),
            _ => None,
        };
        let communicator = COMMUNICATOR;
        let mut why = vec![SwitchEvent::Violation { communicator, rank: 0, violation }];
        let (rank, is_switch) = (0, false);
        let lost = |status| SwitchEvent::ChildLost { communicator, rank, is_switch, status };
        why.extend(status.map(lost));
        check_events(&mut network, &why, abort);
        // The offender hears of it in one way or the other (its worker knows nothing of what it
        // sent, and finds answers to it odd).
        let failed = |status| status != CompletionStatus::Success;
        let refused = network.hosts[0].raw.iter().any(|completion| failed(completion.status));
        let told = network.hosts[0].worker.failure().is_some();
        assert!(refused || told, "{requests:?}");
        assert!(network.switch.destroy_communicator(network.now, COMMUNICATOR));
    }
}

#[test]
fn a_switch_below_that_notes_something_by_a_write_breaks_the_protocol() {
    // What rank 0 has called, as long as that is; the last segment has as many bytes.
    const CALLED: u32 = 0x8000_0001;
    let mut network =
        Network::new(Setup { hosts: 2, hosts_are_switches: true, ..Setup::default() });
    let (open, last) = (descriptor(0, Collective::AllReduce, 140), DESCRIPTOR_BYTES as u32);
    let requests = [open, Rude::Write(512), Rude::WriteWithImmediate(last, CALLED)];
    misbehave(&mut network, 0, &requests);
    let violation = Violation::Immediate;
    let why = SwitchEvent::Violation { communicator: COMMUNICATOR, rank: 0, violation };
    check_events(&mut network, &[why], Abort::Violation { rank: 0, violation });
}

#[test]
fn a_window_is_a_window() {
    // Four segments of 512 bytes, and one rank has not come: there are no results.
    let mut network = Network::new(Setup { hosts: 3, ..Setup::default() });
    start(&mut network, &[None, Some(1000), None]);
    let mut requests = vec![descriptor(0, Collective::AllReduce, 1000)];
    requests.extend([Rude::Write(512); 4]);
    misbehave(&mut network, 0, &requests);
    network.run_to_rest();
    assert_eq!(network.events, []);
    misbehave(&mut network, 0, &[Rude::Write(512)]);
    let abort = Abort::Violation { rank: 0, violation: Violation::Window };
    network.run_until("an error on the honest ranks", |network| {
        network.hosts[1..].iter().all(|host| host.worker.failure().is_some())
    });
    assert_eq!(network.hosts[1].outcome, Some(Err(abort.into())));
    network.run_to_rest();
    let refused = network.hosts[0].raw.last().map(|completion| completion.status);
    assert_eq!(refused, Some(CompletionStatus::RemoteInvalidRequest));
}

#[test]
fn the_next_collective_waits_for_the_results_of_this_one() {
    let mut network = Network::new(Setup { hosts: 2, ..Setup::default() });
    let open = |sequence| descriptor(sequence, Collective::AllReduce, 100);
    misbehave(&mut network, 1, &[open(0)]);
    network.run_to_rest();
    misbehave(&mut network, 0, &[open(0), Rude::Write(400), open(1)]);
    let violation = Violation::Early;
    let why = SwitchEvent::Violation { communicator: COMMUNICATOR, rank: 0, violation };
    check_events(&mut network, &[why], Abort::Violation { rank: 0, violation });
}

#[test]
fn a_write_of_nothing_is_nothing() {
    let mut network = Network::new(Setup { hosts: 2, ..Setup::default() });
    misbehave(&mut network, 0, &[Rude::Write(0), Rude::Write(0)]);
    network.all_reduce(1000, false);
    network.check_rest();
    assert_eq!(network.events, []);
}

#[test]
fn a_rank_that_dies_is_named_to_the_others_in_time() {
    let mut network = Network::new(Setup { groups: 2, hosts: 3, ..Setup::default() });
    let (first, second) = (network.group(0), network.group(1));
    network.start_all(first, 20_000, false);
    let (calls, wanted) = network.start_all(second.clone(), 20_000, false);
    for _ in 0..500 {
        network.step();
    }
    assert_ne!(network.switch.statistics(COMMUNICATOR).unwrap().segments, 0);
    network.hosts[1].dead = true;
    let died = network.now;
    let outcomes = network.outcomes();
    assert!(network.now.saturating_duration_since(died) < Duration::from_secs(5));
    let lost = CollectiveError::Aborted(Abort::PeerLost { rank: 1 });
    assert_eq!(outcomes[..3], [Some(Err(lost)), None, Some(Err(lost))]);
    // The other communicator does not notice.
    for ((host, call), outcome) in second.zip(&calls).zip(&outcomes[3..]) {
        network.check(host, call, *outcome, &wanted);
    }
    let why = [SwitchEvent::ChildLost {
        communicator: COMMUNICATOR,
        rank: 1,
        is_switch: false,
        status: CompletionStatus::RetryExceeded,
    }];
    check_events(&mut network, &why, Abort::PeerLost { rank: 1 });
    let again = network.hosts[0].worker.start(&calls[0]);
    assert_eq!(again, Err(StartError::Failed(lost)));
}

#[test]
fn a_switch_that_dies_is_a_broken_connection() {
    let mut network = Network::new(Setup::default());
    start(&mut network, &[Some(5000), Some(5000), Some(5000), None]);
    network.run_to_rest();
    network.setup.faults.loss = 1000;
    // Those who wait find out by asking, the one that comes now by itself.
    for host in 0..3 {
        network.hosts[host].worker.probe();
        network.service(host);
    }
    start(&mut network, &[None, None, None, Some(5000)]);
    let died = network.now;
    all_failed(&mut network, CollectiveError::Transport(CompletionStatus::RetryExceeded));
    assert!(network.now.saturating_duration_since(died) < Duration::from_secs(5));
}

#[test]
fn a_probe_of_a_living_switch_changes_nothing() {
    let mut network = Network::new(Setup::default());
    start(&mut network, &[Some(5000), Some(5000), Some(5000), None]);
    for _ in 0..3 {
        for host in 0..4 {
            network.hosts[host].worker.probe();
            network.service(host);
        }
        network.run_to_rest();
    }
    start(&mut network, &[None, None, None, Some(5000)]);
    assert!(network.outcomes().iter().all(|outcome| matches!(outcome, Some(Ok(_)))));
    network.check_rest();
}

#[test]
fn a_rank_that_does_not_call_is_a_timeout_with_figures() {
    let mut network = Network::new(Setup { hosts: 2, ..Setup::default() });
    start(&mut network, &[Some(1000), None]);
    network.run_to_rest();
    let error = network.hosts[0].worker.timed_out();
    let wanted = CollectiveError::TimedOut { sequence: 0, results: 0, segments: 8 };
    assert_eq!(error, wanted);
    network.hosts[0].worker.fail(error);
    network.service(0);
    assert_eq!(network.hosts[0].outcome, Some(Err(wanted)));
}

#[test]
fn an_abort_on_request_reaches_all_and_only_its_communicator() {
    for (steps, loss) in [(0, 0), (50, 0), (300, 100)] {
        let faults = Faults { loss, ..Faults::default() };
        let setup = Setup { groups: 2, hosts: 3, faults, ..Setup::default() };
        let mut network = Network::new(setup);
        let (first, second) = (network.group(0), network.group(1));
        network.start_all(first.clone(), 5000, false);
        let (calls, wanted) = network.start_all(second.clone(), 5000, false);
        for _ in 0..steps {
            network.step();
        }
        let abort = Abort::Requested { code: 9 };
        assert!(network.switch.abort_communicator(network.now, COMMUNICATOR, abort));
        // The first reason stays.
        let other = Abort::Requested { code: 10 };
        assert!(network.switch.abort_communicator(network.now, COMMUNICATOR, other));
        assert!(!network.switch.abort_communicator(network.now, 99, abort));
        let switch = network.hosts.len();
        network.service(switch);
        for outcome in network.outcomes_of(first) {
            assert_eq!(outcome, Some(Err(abort.into())), "after {steps} steps");
        }
        for (host, call) in second.clone().zip(&calls) {
            let outcome = network.outcomes_of(host..host + 1).pop().unwrap();
            network.check(host, call, outcome, &wanted);
        }
        network.run_to_rest();
        let aborted = SwitchEvent::Aborted { communicator: COMMUNICATOR, abort };
        assert_eq!(network.events, [aborted]);
        assert!(network.switch.destroy_communicator(network.now, COMMUNICATOR));
        assert!(!network.switch.destroy_communicator(network.now, COMMUNICATOR));
        assert_eq!(network.switch.communicators(), 1);
    }
}

#[test]
fn an_abort_while_idle_fails_the_next_call() {
    let mut network = Network::new(Setup { hosts: 2, ..Setup::default() });
    network.all_reduce(100, false);
    let abort = Abort::Requested { code: 1 };
    network.switch.abort_communicator(network.now, COMMUNICATOR, abort);
    let switch = network.hosts.len();
    network.service(switch);
    network.run_to_rest();
    let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
    let call = network.call(0, &[1], data_type, operation, int32, false);
    let started = network.hosts[0].worker.start(&call);
    assert_eq!(started, Err(StartError::Failed(abort.into())));
}

#[test]
fn a_connection_is_closed_once_its_rank_has_been_told() {
    let mut network = Network::new(Setup { hosts: 2, ..Setup::default() });
    let abort = Abort::Requested { code: 1 };
    network.switch.abort_communicator(network.now, COMMUNICATOR, abort);
    let switch = network.hosts.len();
    network.service(switch);
    network.run_to_rest();
    assert!(network.hosts.iter().all(|host| host.worker.failure() == Some(abort.into())));
    // Nobody takes what is sent now.
    misbehave(&mut network, 0, &[Rude::Write(0)]);
    network.run_until("an end", |network| !network.hosts[0].raw.is_empty());
    assert_eq!(network.hosts[0].raw[0].status, CompletionStatus::RetryExceeded);
}

#[test]
fn packets_from_outside_change_only_counters() {
    let mut network = Network::new(Setup { icrc: IcrcCheck::Exact, ..Setup::default() });
    network.all_reduce(100, false);
    let hosts = 0..network.hosts.len();
    let (calls, wanted) = network.start_all(hosts.clone(), 5000, false);
    let stranger = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
    let switch = network.switch.config().address;
    let mut garbage = 0;
    while network.hosts.iter().any(|host| host.outcome.is_none()) {
        // Noise, and well-formed headers with noise behind, for the queue pairs of hosts.
        let length = network.random.next() as usize % 200;
        let mut bytes: Vec<u8> = (0..length).map(|_| network.random.next() as u8).collect();
        let host = network.random.next() as usize % network.hosts.len();
        let (qpn, address) = (network.hosts[host].qpn, network.hosts[host].address);
        if bytes.len() >= Bth::LENGTH && network.random.next().is_multiple_of(2) {
            let opcodes = [Opcode::RcWriteOnly, Opcode::RcAcknowledge, Opcode::RcSendOnly];
            let opcode = opcodes[network.random.next() as usize % opcodes.len()];
            let psn = Psn::new(network.random.next() as u32);
            bytes[..Bth::LENGTH].copy_from_slice(&Bth::new(opcode as u8, qpn, psn).to_bytes());
        }
        let known = network.random.next().is_multiple_of(2);
        let to_switch = network.random.next().is_multiple_of(2);
        let (source, destination) = match (known, to_switch) {
            (true, true) => (address, switch),
            (true, false) => (switch, address),
            (false, true) => (stranger, switch),
            (false, false) => (stranger, address),
        };
        network.inject(Duration::from_nanos(100), source, destination, bytes);
        garbage += 1;
        assert!(network.step());
    }
    assert!(garbage > 500);
    for (host, call) in hosts.zip(&calls) {
        let outcome = network.hosts[host].outcome.take();
        network.check(host, call, outcome, &wanted);
    }
    network.check_rest();
    let counters = network.switch.counters();
    assert_eq!(network.events, []);
    assert_ne!(counters.dropped_malformed + counters.dropped_opcode + counters.dropped_qpn, 0);
    assert!(network.now > Instant::ZERO);
}

#[test]
fn who_has_called_and_not_sent_its_data_is_named_and_who_waits_for_results_is_not() {
    let mut network = Network::new(Setup::default());
    start(&mut network, &[Some(5000), None, Some(5000), Some(5000)]);
    // The others have sent their window of four segments.
    misbehave(&mut network, 1, &[descriptor(0, Collective::AllReduce, 5000)]);
    network.run_to_rest();
    assert_eq!(network.switch.statistics(COMMUNICATOR).map(|it| it.collectives), Some(1));
    network.hosts[3].worker.give_up();
    network.service(3);
    network.run_until("the others have heard", |network| {
        [0, 2, 3].iter().all(|&rank| network.hosts[rank].outcome.is_some())
    });
    for rank in [0, 2, 3] {
        let outcome = network.hosts[rank].outcome;
        let Some(Err(CollectiveError::Aborted(Abort::Overdue(overdue)))) = outcome else {
            panic!("{outcome:?}");
        };
        assert_eq!(overdue.named(), [1]);
    }
}

/// They have nothing to send, and say so of half a window at once.
#[test]
fn who_waits_for_the_root_of_a_broadcast_is_not_named() {
    for (window, written) in [(4, 0), (4, 1), (8, 1), (8, 3), (8, 5)] {
        let mut network = Network::new(Setup { window, ..Setup::default() });
        let calls = [0, 1, 2, 3].map(|rank| {
            let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
            let call = network.call(rank, &[1; 5000], data_type, operation, int32, false);
            CollectiveCall { collective: Collective::Broadcast, ..call }
        });
        (1..4).for_each(|rank| network.start(rank, &calls[rank]));
        let Rude::Send(bytes) = descriptor(0, Collective::Broadcast, 5000) else { unreachable!() };
        let CollectiveCall { destination_address, destination_key, .. } = calls[0];
        let root = Descriptor::parse(&bytes).unwrap();
        let root = Descriptor { destination_address, destination_key, ..root };
        let mut rude = vec![Rude::Send(root.to_bytes())];
        let host = &mut network.hosts[0];
        // As many as there may be, for what it is told.
        let receive = ReceiveRequest { id: RAW | 1 << 16, pieces: [Piece::default()] };
        while host.endpoint.post_receive(host.qpn, &receive).is_ok() {}
        rude.resize(written + 1, Rude::Write(512));
        misbehave(&mut network, 0, &rude);
        network.run_to_rest();
        network.hosts[3].worker.give_up();
        network.service(3);
        network.run_until("the others have heard", |network| {
            network.hosts[1..].iter().all(|host| host.outcome.is_some())
        });
        for host in &network.hosts[1..] {
            let Some(Err(CollectiveError::Aborted(Abort::Overdue(overdue)))) = host.outcome else {
                panic!("{:?}", host.outcome);
            };
            assert_eq!(overdue.named(), [0], "{written} of a window of {window}");
        }
    }
}

/// Ranks that have sent nothing, or whose vectors travel by SEND, are asked too.
#[test]
fn a_rank_that_is_gone_and_has_not_called_is_noticed() {
    let probe_interval = Duration::from_secs(1);
    for before in [false, true] {
        let mut network = Network::new(Setup { probe_interval, ..Setup::default() });
        if before {
            network.all_reduce(1000, false);
            network.all_reduce(5, false);
        }
        network.hosts[1].dead = true;
        start(&mut network, &[Some(1000), None, Some(1000), Some(1000)]);
        let died = network.now;
        for (rank, outcome) in network.outcomes().into_iter().enumerate() {
            let wanted = (rank != 1).then_some(Err(Abort::PeerLost { rank: 1 }.into()));
            assert_eq!(outcome, wanted, "rank {rank}");
        }
        // A second until it is asked, and eight timeouts of 0.54 s.
        let time = network.now.saturating_duration_since(died);
        assert!(time < Duration::from_secs(6), "{time:?}");
    }
}

#[test]
fn a_rank_in_send_mode_is_asked_and_what_it_is_owed_does_not_suffer() {
    let probe_interval = Duration::from_millis(1);
    let mut network = Network::new(Setup { hosts: 3, probe_interval, ..Setup::default() });
    let mut calls = Vec::new();
    for rank in 0..3 {
        let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
        let call = network.call(rank, &[rank as i32; 1000], data_type, operation, int32, false);
        let call = CollectiveCall { mode: Mode::Send, ..call };
        network.start(rank, &call);
        calls.push(call);
        // The others come later, and are asked often before.
        let until = network.now + Duration::from_millis(50);
        network.run_until("a while has passed", |network| rank == 2 || network.now >= until);
    }
    let wanted: Vec<u8> = (0..1000).flat_map(|_| int32(3)).collect();
    for (rank, outcome) in network.outcomes().into_iter().enumerate() {
        network.check(rank, &calls[rank], outcome, &wanted);
    }
    network.check_rest();

    // One that dies amid it.
    let mut network = Network::new(Setup { hosts: 3, probe_interval, ..Setup::default() });
    for rank in 0..2 {
        let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
        let call = network.call(rank, &[1; 1000], data_type, operation, int32, false);
        network.start(rank, &CollectiveCall { mode: Mode::Send, ..call });
    }
    let until = network.now + Duration::from_millis(50);
    network.run_until("a while has passed", |network| network.now >= until);
    network.hosts[1].dead = true;
    network.run_until("the switch has noticed", |network| !network.events.is_empty());
    let status = CompletionStatus::RetryExceeded;
    let (communicator, rank, is_switch) = (COMMUNICATOR, 1, false);
    let lost = SwitchEvent::ChildLost { communicator, rank, is_switch, status };
    assert_eq!(network.events[0], lost);
}

/// Everything is acknowledged, and it says nothing: only a question shows that it is gone.
#[test]
fn a_rank_that_is_gone_and_owes_its_data_is_noticed() {
    let probe_interval = Duration::from_secs(1);
    let mut network = Network::new(Setup { probe_interval, ..Setup::default() });
    start(&mut network, &[Some(1000), None, Some(1000), Some(1000)]);
    misbehave(&mut network, 1, &[descriptor(0, Collective::AllReduce, 1000)]);
    let quiet = network.now + Duration::from_millis(100);
    network.run_until("a while has passed", |network| network.now >= quiet);
    assert_eq!(network.switch.statistics(COMMUNICATOR).map(|it| it.collectives), Some(1));
    network.hosts[1].dead = true;
    for (rank, outcome) in network.outcomes().into_iter().enumerate() {
        let wanted = (rank != 1).then_some(Err(Abort::PeerLost { rank: 1 }.into()));
        assert_eq!(outcome, wanted, "rank {rank}");
    }
}
