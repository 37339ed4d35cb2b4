//! What is collected and copied ahead, with a GPU that is not there.

use millstream_net::cuda::pretended::{Copied, Pretended};

use super::*;

struct Bench {
    pretended: Pretended,
    staging: Staging,
    address: u64,
}

const LENGTH: usize = 4 << 20;

fn bench() -> Bench {
    let pretended = Pretended::default();
    let mut staging = Staging::default();
    assert_eq!(staging.add(GpuStaging::open(&pretended.gpu()).unwrap()), 0);
    let address = pretended.allocate(LENGTH);
    Bench { pretended, staging, address }
}

impl Bench {
    fn write(&mut self, offset: u64, payload: &[u8]) -> Result<(), AccessDenied> {
        // SAFETY: it is memory of a GPU that is not there.
        unsafe { self.staging.write(0, 1, self.address + offset, payload) }
    }

    fn stage(&mut self, offset: u64, length: u32, following: u64) -> Result<(), AccessDenied> {
        let piece = Piece { key: 0, address: self.address + offset, length };
        // SAFETY: as above.
        unsafe { self.staging.stage(0, &piece, following) }
    }

    fn bytes(&self, offset: u64, length: u32) -> Result<&[u8], AccessDenied> {
        self.staging.bytes(0, &Piece { key: 0, address: self.address + offset, length })
    }
}

#[test]
fn neighbours_are_one_copy() {
    let mut bench = bench();
    for index in 0..16 {
        bench.write(7 + index * 4096, &[index as u8 + 1; 4096]).unwrap();
        assert!(!bench.staging.is_flushed());
    }
    assert_eq!(bench.pretended.copied(), []);
    bench.staging.flush().unwrap();
    assert!(bench.staging.is_flushed());
    assert_eq!(bench.pretended.copied(), [Copied::In(bench.address + 7, 16 * 4096)]);
    let found = bench.pretended.read(bench.address, 16 * 4096 + 8);
    let expected = (0..16 * 4096).map(|index| (index / 4096 + 1) as u8);
    assert!(found.into_iter().eq([0; 7].into_iter().chain(expected).chain([0])));
    bench.staging.flush().unwrap();
    assert_eq!(bench.pretended.copied(), [], "once");
}

#[test]
fn what_is_no_neighbour_comes_after_what_was_before() {
    let mut bench = bench();
    // The last overwrites the first.
    for (offset, byte) in [(0, 1), (100, 2), (50, 3), (0, 4)] {
        bench.write(offset, &[byte; 100]).unwrap();
    }
    bench.staging.flush().unwrap();
    let base = bench.address;
    let expected = [Copied::In(base, 200), Copied::In(base + 50, 100), Copied::In(base, 100)];
    assert_eq!(bench.pretended.copied(), expected);
    let found = bench.pretended.read(base, 200);
    let expected = [[4; 100], [3; 100]].concat();
    assert_eq!(found[..150], expected[..150]);
    assert_eq!(found[150..], [2; 50]);
}

/// The driver refuses a copy that begins in one allocation and ends in the next.
#[test]
fn neighbours_of_two_allocations_are_two_copies() {
    let mut bench = bench();
    let (end, next) = (LENGTH as u64, bench.pretended.allocate_adjacent(4096));
    assert_eq!(next, bench.address + end);
    bench.write(end - 100, &[1; 100]).unwrap();
    // SAFETY: it is memory of a GPU that is not there.
    unsafe { bench.staging.write(0, 2, next, &[2; 100]) }.unwrap();
    bench.staging.flush().unwrap();
    let copied = bench.pretended.copied();
    assert_eq!(copied, [Copied::In(next - 100, 100), Copied::In(next, 100)]);
    assert_eq!(bench.pretended.read(next - 100, 100), [1; 100]);
    assert_eq!(bench.pretended.read(next, 101)[..], [&[2; 100][..], &[0]].concat());
}

#[test]
fn what_is_full_is_copied() {
    let mut bench = bench();
    for index in 0..200 {
        bench.write(index * 4096, &[index as u8; 4096]).unwrap();
    }
    let full = |index: u64| Copied::In(bench.address + index * COLLECTED as u64, COLLECTED);
    assert_eq!(bench.pretended.copied(), [full(0), full(1), full(2)]);
    // More at once than there is room for.
    bench.write(200 * 4096, &vec![9; COLLECTED + 5]).unwrap();
    bench.staging.flush().unwrap();
    let end = 200 * 4096 + COLLECTED + 5;
    assert_eq!(bench.pretended.read(bench.address + end as u64 - 5, 6), [9, 9, 9, 9, 9, 0]);
}

/// The failure of a copy that a later write has made is told by the next flush, once.
#[test]
fn what_is_lost_is_told() {
    let mut bench = bench();
    let there = bench.pretended.allocate(4096) - bench.address;
    bench.pretended.free(bench.address);
    bench.write(0, &[1; 100]).unwrap();
    assert_eq!(bench.staging.flush(), Err(AccessDenied::Protection));
    assert_eq!(bench.staging.flush(), Ok(()));
    bench.write(0, &[1; 100]).unwrap();
    assert_eq!(bench.write(there, &[2; 100]), Err(AccessDenied::Protection));
    assert!(!bench.staging.is_flushed());
    assert_eq!(bench.staging.flush(), Err(AccessDenied::Protection));
    assert!(bench.staging.is_flushed());
    bench.write(there, &[3; 100]).unwrap();
    assert_eq!(bench.staging.flush(), Ok(()));
    assert_eq!(bench.pretended.copied(), [Copied::In(bench.address + there, 100)]);
}

#[test]
fn a_request_is_copied_ahead_once_in_a_round() {
    let mut bench = bench();
    let bytes: Vec<u8> = (0..LENGTH).map(|index| (index / 1000) as u8).collect();
    bench.pretended.write(bench.address, &bytes);
    for index in 0..16_u32 {
        let (offset, following) = (3 + u64::from(index) * 4096, u64::from(15 - index) * 4096);
        bench.stage(offset, 4096, following).unwrap();
    }
    for index in 0..16 {
        let offset = 3 + index * 4096;
        assert_eq!(bench.bytes(offset as u64, 4096).unwrap(), &bytes[offset..offset + 4096]);
    }
    assert_eq!(bench.pretended.copied(), [Copied::Out(bench.address + 3, 16 * 4096)]);
    assert!(bench.bytes(3 + 16 * 4096, 1).is_err(), "it was not staged");
    // Who posts now has what is there now.
    bench.pretended.write(bench.address + 3, &[0xee; 10]);
    bench.staging.unstage();
    assert!(bench.bytes(3, 10).is_err());
    bench.stage(3, 10, 0).unwrap();
    assert_eq!(bench.bytes(3, 10).unwrap(), [0xee; 10]);
}

/// Of a request that goes on for long, what follows in this round is copied, and no more.
#[test]
fn no_more_is_copied_ahead_than_a_round_sends() {
    for mtu in [256, 1024, 4096] {
        let mut bench = bench();
        bench.stage(0, mtu, LENGTH as u64 - u64::from(mtu)).unwrap();
        let round = MAX_ROUND_DATAGRAMS * mtu as usize;
        let length = round.min(AHEAD_AT_ONCE + mtu as usize);
        assert_eq!(bench.pretended.copied(), [Copied::Out(bench.address, length)]);
    }
}

/// However many requests have bytes ahead, all packets of a round find room.
#[test]
fn there_is_room_for_all_packets_of_a_round() {
    let mut bench = bench();
    for round in 0..3 {
        for index in 0..MAX_ROUND_DATAGRAMS as u64 {
            // Each of another request, none of which goes on.
            let offset = (index * 37 % 128) * 8192 + round;
            bench.stage(offset, 4096, 1 << 20).unwrap();
            assert_eq!(bench.bytes(offset, 4096).unwrap().len(), 4096);
        }
        bench.staging.unstage();
    }
}

#[test]
fn memory_that_was_freed_cannot_be_staged() {
    let mut bench = bench();
    bench.pretended.free(bench.address);
    assert_eq!(bench.stage(0, 100, 0), Err(AccessDenied::Protection));
    assert!(bench.bytes(0, 100).is_err());
}
