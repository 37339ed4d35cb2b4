//! Hosts that send no descriptors: plain SENDs of 32-bit integers, answered by SENDs of their sums.

mod network;

use millstream_inc::{Abort, CommunicatorOptions, Field, SwitchEvent, Violation};
use millstream_roce::{
    Access, CompletionStatus, Piece, ProtectionDomainId, ReceiveRequest, SendOperation, SendRequest,
};
use network::{COMMUNICATOR, Faults, Network, RAW, Setup, vector_address};

/// A host's memory for what it sends, and for what it gets: so much for each message.
const ROOM: usize = 1024;

fn network(hosts: u32, seed: u64, faults: Faults) -> Network {
    let options = CommunicatorOptions { plain: true, reproducible: false };
    Network::new(Setup { hosts, seed, faults, options, ..Setup::default() })
}

fn register(network: &mut Network, rank: usize, is_target: bool, bytes: Vec<u8>) -> u32 {
    let address = vector_address(rank as u32, is_target);
    let memory = network.hosts[rank].endpoint.memory_mut();
    memory.register(ProtectionDomainId(1), address, Access::LOCAL_WRITE, bytes).unwrap()
}

/// Posts receives and then messages, all at once.
fn post(network: &mut Network, rank: usize, messages: &[Vec<u8>]) -> [u32; 2] {
    let mut source = vec![0; ROOM * messages.len()];
    for (place, message) in source.chunks_mut(ROOM).zip(messages) {
        place[..message.len()].copy_from_slice(message);
    }
    let target = vec![0xa5; source.len()];
    let keys = [register(network, rank, false, source), register(network, rank, true, target)];
    let now = network.now;
    let host = &mut network.hosts[rank];
    let piece = |key: u32, is_target: bool, index: usize, length: usize| Piece {
        key,
        address: vector_address(rank as u32, is_target) + (index * ROOM) as u64,
        length: length as u32,
    };
    for index in 0..messages.len() {
        let pieces = [piece(keys[1], true, index, ROOM)];
        host.endpoint.post_receive(host.qpn, &ReceiveRequest { id: RAW, pieces }).unwrap();
    }
    for (index, message) in messages.iter().enumerate() {
        let pieces = [piece(keys[0], false, index, message.len())];
        let send = SendOperation::Send { immediate: None };
        let request = SendRequest::new(RAW | (1 + index as u64), send, pieces);
        host.endpoint.post_send(now, host.qpn, &request).unwrap();
    }
    network.service(rank);
    keys
}

fn bytes(vector: &[i32]) -> Vec<u8> {
    vector.iter().flat_map(|element| element.to_le_bytes()).collect()
}

#[test]
fn plain_messages_are_answered_by_their_sums() {
    let lossy = Faults {
        loss: 20,
        duplication: 20,
        reordering: 20,
        corruption: 0,
        acknowledgement_loss: 50,
    };
    for (seed, faults) in [(1, Faults::default()), (2, lossy), (3, lossy), (4, lossy), (5, lossy)] {
        for hosts in [1, 2, 5] {
            let mut network = network(hosts, seed, faults);
            // More than a window of four at a time; a segment has 128 elements, a packet 64.
            for round in [[128, 1, 64, 65, 100, 128], [3, 3, 128, 127, 128, 63], [64; 6]] {
                let vectors: Vec<Vec<Vec<i32>>> = (0..hosts)
                    .map(|_| {
                        let next = |length: usize| {
                            (0..length).map(|_| (network.random.next() << 8) as i32).collect()
                        };
                        round.map(next).into()
                    })
                    .collect();
                let mut keys = Vec::new();
                for (rank, vectors) in vectors.iter().enumerate() {
                    let messages: Vec<Vec<u8>> = vectors.iter().map(|it| bytes(it)).collect();
                    keys.push(post(&mut network, rank, &messages));
                }
                network.run_until("all answers have come", |network| {
                    network.hosts.iter().all(|host| host.raw.len() == 2 * round.len())
                });
                for (rank, keys) in keys.into_iter().enumerate() {
                    let completions = core::mem::take(&mut network.hosts[rank].raw);
                    let received = completions.iter().filter(|it| it.id == RAW);
                    let lengths: Vec<u32> = received.map(|it| it.length).collect();
                    assert_eq!(lengths, round.map(|elements| 4 * elements as u32));
                    let plain = |it: &millstream_roce::Completion| {
                        it.status == CompletionStatus::Success && it.immediate.is_none()
                    };
                    assert!(completions.iter().all(plain), "{completions:?}");
                    let memory = network.hosts[rank].endpoint.memory_mut();
                    memory.deregister(keys[0]).unwrap();
                    let target = memory.deregister(keys[1]).unwrap();
                    for (index, target) in target.chunks(ROOM).enumerate() {
                        let mut sum = vec![0_i32; round[index]];
                        for vectors in &vectors {
                            let all = sum.iter_mut().zip(&vectors[index]);
                            all.for_each(|(sum, element)| *sum = sum.wrapping_add(*element));
                        }
                        let (result, rest) = target.split_at(4 * sum.len());
                        assert!(result == bytes(&sum), "message {index} of rank {rank}");
                        assert!(rest.iter().all(|&byte| byte == 0xa5));
                    }
                }
            }
            network.check_rest();
        }
    }
}

/// What the switch tells of a group whose second rank sends this, and all others 40 elements.
fn ended(message: Vec<u8>) -> Abort {
    ended_in(1, Faults::default(), message)
}

fn ended_in(seed: u64, faults: Faults, message: Vec<u8>) -> Abort {
    let mut network = network(3, seed, faults);
    for (rank, message) in [bytes(&[1; 40]), message, bytes(&[1; 40])].into_iter().enumerate() {
        post(&mut network, rank, &[message]);
    }
    network.run_to_rest();
    // Whoever sends more finds the connection closed.
    for rank in 0..3 {
        let (now, host) = (network.now, &mut network.hosts[rank]);
        let send = SendOperation::Send { immediate: None };
        let request = SendRequest::new(RAW | 9, send, [Piece::default()]);
        host.endpoint.post_send(now, host.qpn, &request).unwrap();
        network.service(rank);
    }
    network.run_to_rest();
    for host in &network.hosts {
        assert!(host.raw.iter().any(|it| it.status != CompletionStatus::Success), "{:?}", host.raw);
    }
    let aborted = network.events.iter().find_map(|event| match event {
        SwitchEvent::Aborted { abort, .. } => Some(*abort),
        _ => None,
    });
    aborted.unwrap()
}

#[test]
fn a_message_of_another_length_ends_the_communicator_and_its_rank_is_named() {
    for count in [1, 39, 41, 64, 65, 100, 128] {
        let abort = ended(bytes(&vec![1; count]));
        let Abort::Mismatch(mismatch) = abort else { panic!("{abort:?}") };
        assert_eq!((mismatch.rank, mismatch.reference, mismatch.field), (1, 0, Field::Count));
        assert_eq!((mismatch.expected, mismatch.found), (40, count as u64));
    }
    // No vectors, and what no receive is long enough for.
    for length in [0, 1, 42, 516, 1024] {
        let abort = ended(vec![1; length]);
        let violation = Violation::Length;
        assert_eq!(abort, Abort::Violation { rank: 1, violation }, "{length} bytes");
    }
}

#[test]
fn what_is_taken_of_messages_is_counted_and_what_is_not() {
    let counted = |counts: [usize; 3]| {
        let options = CommunicatorOptions { plain: true, reproducible: false };
        let mut network =
            Network::new(Setup { hosts: 3, options, rounds: true, ..Setup::default() });
        for (rank, count) in counts.into_iter().enumerate() {
            post(&mut network, rank, &[bytes(&vec![1; count])]);
        }
        network.run_to_rest();
        assert!(network.in_one_round > 0);
        let statistics = network.switch.statistics(COMMUNICATOR).unwrap();
        (statistics.bytes, statistics.discarded_bytes)
    };
    assert_eq!(counted([40, 40, 40]), (480, 0));
    assert_eq!(counted([100, 100, 100]), (1200, 0));
    // The first is whole, the second is longer, and the third comes when that has ended the communicator.
    assert_eq!(counted([40, 100, 40]), (160, 400 + 160));
}

#[test]
fn immediate_data_is_a_breach_whatever_it_says_of_others() {
    // Credits, that somebody waits no longer, who is awaited, what somebody has called, an abort.
    let notes = [0xc000_0000, 0xc000_0001, 0xa000_0000, 0xb000_0000, 0x8000_0001, 0x8000_0000];
    for immediate in notes {
        let mut network = network(3, 1, Faults::default());
        post(&mut network, 0, &[bytes(&[1; 40])]);
        let (now, host) = (network.now, &mut network.hosts[1]);
        let send = SendOperation::Send { immediate: Some(immediate) };
        let request = SendRequest::new(RAW | 9, send, [Piece::default()]);
        host.endpoint.post_send(now, host.qpn, &request).unwrap();
        network.service(1);
        network.run_to_rest();
        let abort = Abort::Violation { rank: 1, violation: Violation::Immediate };
        let aborted = |event: &SwitchEvent| matches!(event, SwitchEvent::Aborted { abort: it, .. } if *it == abort);
        assert!(network.events.iter().any(aborted), "{immediate:#x}: {:?}", network.events);
    }
}

/// Whichever is whole first, and if one is whole amid the other.
#[test]
fn the_counts_that_differ_are_told_in_whatever_order_messages_come() {
    let mut named_first = [0, 0];
    for seed in 1..40 {
        let faults = Faults { reordering: 500, loss: 100, ..Faults::default() };
        let abort = ended_in(seed, faults, bytes(&[1; 100]));
        let Abort::Mismatch(mismatch) = abort else { panic!("{abort:?}") };
        let longer = (mismatch.rank == 1, mismatch.reference == 1);
        assert!(longer.0 != longer.1 && mismatch.field == Field::Count, "{mismatch:?}");
        let counts = if longer.0 { (40, 100) } else { (100, 40) };
        assert_eq!((mismatch.expected, mismatch.found), counts);
        named_first[usize::from(longer.0)] += 1;
    }
    assert!(named_first.iter().all(|&it| it > 0), "{named_first:?}");
}
