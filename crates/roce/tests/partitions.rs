//! Partition keys (IBTA 10.9), and the migration bit that adapters set.

mod common;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use common::forge::Forge;
use common::{Options, Pair, connect, pattern, piece};
use millstream_roce::{
    Attribute, CompletionStatus, Instant, ModifyError, QueuePairAttributes, QueuePairState,
    SendOperation,
};
use millstream_wire::{Opcode, Packet};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const FIRST: u32 = 100;
const KEYS: [u16; 3] = [0xffff, 0x8123, 0x0123];

/// Two hosts in the partitions of [`KEYS`], connected by entry `index[0]` and `index[1]`.
fn in_partitions(index: [u16; 2]) -> Pair {
    let options =
        Options { psn: [FIRST, 200], partition_keys: &KEYS, timeout: 8, ..Options::default() };
    let mut pair = Pair::with(options);
    for (side, index) in index.into_iter().enumerate() {
        let (peer, qpn) = (pair.hosts[1 - side].address, pair.hosts[1 - side].qpn);
        let host = &mut pair.hosts[side];
        let reset =
            QueuePairAttributes { state: Some(QueuePairState::Reset), ..Default::default() };
        let [mut init, rtr, rts] = connect(&options, side, peer, qpn);
        init.partition_key_index = Some(index);
        for attributes in [reset, init, rtr, rts] {
            host.endpoint.modify_queue_pair(Instant::ZERO, host.qpn, &attributes).unwrap();
        }
    }
    pair
}

/// How a WRITE of 600 bytes ends, and the keys and migration bits on the wire, both ways.
fn write(mut pair: Pair) -> (CompletionStatus, BTreeSet<u16>, BTreeSet<bool>, [u64; 2]) {
    let seen: Rc<RefCell<(BTreeSet<u16>, BTreeSet<bool>)>> = Rc::default();
    let tap = Rc::clone(&seen);
    pair.wire = Box::new(move |_, datagram| {
        let bth = Packet::parse(datagram).unwrap().bth;
        tap.borrow_mut().0.insert(bth.partition_key);
        tap.borrow_mut().1.insert(bth.migration_request);
        vec![datagram.to_vec()]
    });
    let local = pair.register(0, LOCAL, pattern(600, 1));
    let remote = pair.register(1, REMOTE, vec![0; 600]);
    let operation =
        SendOperation::Write { remote_address: REMOTE, remote_key: remote, immediate: None };
    pair.post(0, 1, operation, &[piece(local, LOCAL, 600)]);
    pair.run(Duration::from_secs(1));
    let status = pair.completions(0)[0].status;
    let same = pair.region(1, remote) == pair.region(0, local);
    assert_eq!(same, status == CompletionStatus::Success);
    let dropped = [0, 1].map(|host| pair.counters(host).dropped_partition_key);
    let seen = seen.borrow().clone();
    (status, seen.0, seen.1, dropped)
}

#[test]
fn queue_pairs_talk_within_a_partition_of_which_one_is_a_full_member() {
    for (index, keys) in [([0, 0], &[0xffff][..]), ([1, 1], &[0x8123]), ([1, 2], &[0x8123, 0x123])]
    {
        let (status, seen, _, dropped) = write(in_partitions(index));
        assert_eq!(status, CompletionStatus::Success);
        assert_eq!(seen, keys.iter().copied().collect(), "each sends its own key");
        assert_eq!(dropped, [0, 0]);
    }
    // Two limited members, and two partitions.
    for index in [[2, 2], [0, 1], [1, 0], [0, 2]] {
        let (status, _, _, dropped) = write(in_partitions(index));
        assert_eq!(status, CompletionStatus::RetryExceeded, "{index:?}");
        assert!(dropped[1] >= 3 && dropped[0] == 0, "{dropped:?}");
    }
}

#[test]
fn an_index_beyond_the_table_is_refused() {
    let mut pair = Pair::new();
    let host = &mut pair.hosts[0];
    for state in [QueuePairState::Reset, QueuePairState::Initialized] {
        let access = (state == QueuePairState::Initialized).then(common::everything);
        let index = access.map(|_| 1);
        let attributes = QueuePairAttributes {
            state: Some(state),
            access,
            partition_key_index: index,
            ..Default::default()
        };
        let result = host.endpoint.modify_queue_pair(Instant::ZERO, host.qpn, &attributes);
        if index.is_some() {
            assert!(
                matches!(
                    result,
                    Err(ModifyError::OutOfRange {
                        attribute: Attribute::PartitionKeyIndex,
                        value: 1,
                        ..
                    })
                ),
                "{result:?}"
            );
        }
    }
    assert_eq!(pair.state(0), QueuePairState::Reset);
}

/// IBTA 17.2.8.1: a path without an alternate is "migrated", and says so in every packet.
#[test]
fn packets_say_that_the_path_is_migrated() {
    let (_, _, migrated, _) = write(in_partitions([0, 0]));
    assert_eq!(migrated, BTreeSet::from([true]));
}

/// The kernel's soft-RoCE sends 0, adapters send 1.
#[test]
fn the_migration_bit_is_taken_either_way() {
    for migrated in [false, true] {
        let mut pair = in_partitions([0, 0]);
        let key = pair.register(1, REMOTE, vec![0; 4]);
        let mut write =
            Forge::new(&pair, 1, Opcode::RcWriteOnly, FIRST).reth(REMOTE, key, 4).payload(b"good");
        write.bth.migration_request = migrated;
        write.inject(&mut pair);
        assert_eq!(pair.region(1, key), b"good");
    }
}
