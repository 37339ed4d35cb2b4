//! Bytes get where they belong, whatever does the I/O.

use std::fs;
use std::thread;

use millstream_transfer::{NvmeofConfig, Opcode, TransferRequest};

use crate::common::{self, LONG, contents, pattern, private};
use crate::fixture::{Folder, engine, pair, request, ways, writable};

#[test]
fn a_file_is_written_and_read_whatever_does_the_io() {
    const LENGTH: usize = 64 << 20;
    let bytes = pattern(LENGTH, 5);
    for way in ways() {
        let folder = Folder::new();
        let path = folder.file("data", &vec![0; LENGTH]);
        let (target, initiator) = (engine(way.clone()), engine(NvmeofConfig::default()));
        let name = target.register_file(&path, writable()).unwrap();
        assert_eq!(name, format!("nvmeof/{}/data", target.name()));
        let segment = initiator.open_segment(&name).unwrap();
        assert_eq!(segment.protocol(), "nvmeof");
        let local = private(&initiator, LENGTH);
        local.write(0, &bytes).unwrap();
        let whole = |opcode| request(opcode, (&local, 0), &segment, 0, LENGTH as u64);
        assert_eq!(
            initiator.submit_and_wait(&[whole(Opcode::Write)], LONG).unwrap(),
            LENGTH as u64
        );
        assert!(fs::read(&path).unwrap() == bytes, "{way:?}");
        local.write(0, &vec![0; LENGTH]).unwrap();
        assert_eq!(initiator.submit_and_wait(&[whole(Opcode::Read)], LONG).unwrap(), LENGTH as u64);
        assert!(contents(&local, 0, LENGTH) == bytes, "{way:?}");
    }
}

/// Requests of all lengths at all offsets, aligned or not, many at once: bytes beside them stay.
#[test]
fn pieces_of_a_file_do_not_touch_their_neighbours() {
    const LENGTH: usize = 8 << 20;
    for way in ways() {
        let folder = Folder::new();
        let before = pattern(LENGTH, 1);
        let path = folder.file("pieces", &before);
        let (target, initiator) = (engine(way.clone()), engine(NvmeofConfig::default()));
        let segment = initiator.open_segment(&target.register_file(&path, writable()).unwrap());
        let segment = segment.unwrap();
        let local = private(&initiator, LENGTH);
        let bytes = pattern(LENGTH, 2);
        local.write(0, &bytes).unwrap();
        let mut expected = before;
        // Between them is a gap of one byte to some pages.
        let (mut offset, mut pieces) = (3_usize, Vec::new());
        for (index, length) in [1, 4096, 511, 70_000, 8192, 1 << 20, 5, 300_000, 12_288]
            .into_iter()
            .cycle()
            .enumerate()
        {
            if index % 4 == 3 {
                offset = offset.next_multiple_of(4096);
            }
            if offset + length > LENGTH || pieces.len() == 500 {
                break;
            }
            pieces.push((offset, length));
            expected[offset..offset + length].copy_from_slice(&bytes[offset..offset + length]);
            offset += length + 1 + index % 9000;
        }
        let requests = |opcode| -> Vec<_> {
            let request = |&(offset, length): &(usize, usize)| {
                let (at, length) = (offset as u64, length as u64);
                request(opcode, (&local, at), &segment, at, length)
            };
            pieces.iter().map(request).collect()
        };
        initiator.submit_and_wait(&requests(Opcode::Write), LONG).unwrap();
        assert!(fs::read(&path).unwrap() == expected, "{way:?}");
        let marks = vec![0xee; LENGTH];
        local.write(0, &marks).unwrap();
        initiator.submit_and_wait(&requests(Opcode::Read), LONG).unwrap();
        let mut came = marks;
        for &(offset, length) in &pieces {
            came[offset..offset + length].copy_from_slice(&bytes[offset..offset + length]);
        }
        assert!(contents(&local, 0, LENGTH) == came, "{way:?}");
    }
}

#[test]
fn many_small_requests_of_two_initiators() {
    const COUNT: u64 = 2000;
    const PIECE: u64 = 4096;
    let folder = Folder::new();
    let path = folder.file("small", &vec![0; (2 * COUNT * PIECE) as usize]);
    let target = engine(NvmeofConfig::default());
    let name = target.register_file(&path, writable()).unwrap();
    thread::scope(|scope| {
        for turn in 0..2 {
            let name = &name;
            scope.spawn(move || {
                let initiator = engine(NvmeofConfig::default());
                let segment = initiator.open_segment(name).unwrap();
                // The last request is of a file that need not be flushed for the others.
                segment.set_durable(turn == 1);
                let local = private(&initiator, (COUNT * PIECE) as usize);
                local.write(0, &pattern((COUNT * PIECE) as usize, turn)).unwrap();
                let write = |index| {
                    let at = (2 * index + turn) * PIECE;
                    request(Opcode::Write, (&local, index * PIECE), &segment, at, PIECE)
                };
                let requests: Vec<_> = (0..COUNT).map(write).collect();
                initiator.submit_and_wait(&requests, LONG).unwrap();
            });
        }
    });
    let patterns = [0, 1].map(|turn| pattern((COUNT * PIECE) as usize, turn));
    let file = fs::read(&path).unwrap();
    for (index, piece) in file.chunks(PIECE as usize).enumerate() {
        let start = index / 2 * PIECE as usize;
        assert!(*piece == patterns[index % 2][start..start + PIECE as usize], "{index}");
    }
}

#[test]
fn durable_is_for_files_only() {
    let folder = Folder::new();
    let path = folder.file("durable", &[0; 10_000]);
    let (target, initiator) = pair();
    let durable = initiator.transports().iter().any(|(name, can)| *name == "nvmeof" && can.durable);
    assert!(durable);
    let segment = initiator.open_segment(&target.register_file(&path, writable()).unwrap());
    let segment = segment.unwrap();
    segment.set_durable(true);
    let local = private(&initiator, 10_000);
    local.write(0, &[7; 10_000]).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 10_000);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    assert_eq!(fs::read(path).unwrap(), [7; 10_000]);

    let memory = initiator.open_segment(initiator.name()).unwrap();
    memory.set_durable(true);
    let remote = common::shared(&initiator, 100);
    let write = TransferRequest {
        target: memory.id(),
        target_offset: remote.address(),
        length: 1,
        ..write
    };
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err().to_string();
    assert!(error.contains("nothing is durable there"), "{error}");
}
