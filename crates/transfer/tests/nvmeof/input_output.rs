//! Bytes get where they belong, whatever does the I/O.

use std::fs;
use std::io::{Read, Write};
use std::sync::mpsc;
use std::thread;

use millstream_transfer::{NvmeofConfig, Opcode, SubmitOptions, TransferRequest};

use crate::common::{self, LONG, contents, pattern, private};
use crate::fixture::{Folder, done, durable, engine, fake_target, pair, request, ways, writable};

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
                let local = private(&initiator, (COUNT * PIECE) as usize);
                local.write(0, &pattern((COUNT * PIECE) as usize, turn)).unwrap();
                let write = |index| {
                    let at = (2 * index + turn) * PIECE;
                    request(Opcode::Write, (&local, index * PIECE), &segment, at, PIECE)
                };
                let requests: Vec<_> = (0..COUNT).map(write).collect();
                // The last request is of a file that need not be flushed for the others.
                done(&initiator, &requests, &durable(turn == 1));
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
    let able = initiator.transports().into_iter().filter(|(_, can)| can.durable);
    assert_eq!(able.map(|(name, _)| name).collect::<Vec<_>>(), ["nvmeof"]);
    let segment = initiator.open_segment(&target.register_file(&path, writable()).unwrap());
    let segment = segment.unwrap();
    let local = private(&initiator, 10_000);
    local.write(0, &[7; 10_000]).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 10_000);
    done(&initiator, &[write], &durable(true));
    assert_eq!(fs::read(path).unwrap(), [7; 10_000]);

    let memory = initiator.open_segment(initiator.name()).unwrap();
    let remote = common::shared(&initiator, 100);
    let to_memory = TransferRequest {
        target: memory.id(),
        target_offset: remote.address(),
        length: 1,
        ..write
    };
    // All of a submission, or nothing.
    for (transport, expected) in [
        (None, "nothing that goes to segment NAME by local is"),
        (Some("local"), "nothing that goes to segment NAME by local is"),
        (Some("nvmeof"), "only nvmeof may do it"),
    ] {
        let options = SubmitOptions { transport: transport.map(str::to_owned), ..durable(true) };
        let requests = [write, to_memory].map(|request| TransferRequest { length: 1, ..request });
        let range = if transport == Some("local") { 1..2 } else { 0..2 };
        let batch = initiator.allocate_batch(2).unwrap();
        let index = range.len() - 1;
        let error = initiator.submit_with(&batch, &requests[range], &options).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with(&format!("request {index}: ")), "{text}");
        assert!(text.contains(&expected.replace("NAME", initiator.name())), "{text}");
        assert_eq!(error.kind() == "not_durable", transport != Some("nvmeof"), "{text}");
        assert_eq!(batch.len(), 0);
        initiator.free(batch).unwrap();
    }
    done(&initiator, &[to_memory], &durable(false));
}

/// What one thread asks for is not what another one gets, which writes to the same segment at the same time.
#[test]
fn each_submission_is_as_durable_as_it_asks_to_be() {
    const LENGTH: u64 = 4096;
    const EACH: u64 = 64;
    let (said, asked) = mpsc::channel();
    let (_server, name) = fake_target(move |mut stream| {
        stream.write_all(b"MSFILES\n\x01\0\0\0").unwrap();
        stream.read_exact(&mut [0; 12]).unwrap();
        let mut header = [0; 40];
        while stream.read_exact(&mut header).is_ok() {
            let length = if header[0] == 1 { LENGTH } else { 0 };
            stream.read_exact(&mut vec![0; length as usize + 4 * usize::from(header[0])]).unwrap();
            let offset = u64::from_le_bytes(header[16..24].try_into().unwrap());
            said.send((header[0] == 1, offset, header[1] == 1)).unwrap();
            let mut reply = [0; 24];
            reply[0] = 1;
            reply[8..16].copy_from_slice(&header[8..16]);
            if header[0] == 0 {
                reply[4..8].copy_from_slice(&(LENGTH as u32).to_le_bytes());
            }
            stream.write_all(&reply).unwrap();
            if header[0] == 0 {
                stream.write_all(&[0; LENGTH as usize]).unwrap();
            }
        }
    });
    let initiator = engine(NvmeofConfig::default());
    let segment = initiator.open_segment(&name).unwrap();
    thread::scope(|scope| {
        for turn in 0..2 {
            let (initiator, segment) = (&initiator, segment.clone());
            scope.spawn(move || {
                let local = private(initiator, LENGTH as usize);
                for index in 0..EACH {
                    let at = (2 * index + turn) * LENGTH;
                    let all = [Opcode::Write, Opcode::Read];
                    let all = all.map(|it| request(it, (&local, 0), &segment, at, LENGTH));
                    done(initiator, &all, &durable(turn == 1));
                }
            });
        }
    });
    let asked: Vec<_> = asked.try_iter().collect();
    assert_eq!(asked.len() as u64, 4 * EACH);
    for (is_write, offset, durable) in asked {
        assert_eq!(durable, is_write && offset / LENGTH % 2 == 1, "{is_write} {offset}");
    }
}
