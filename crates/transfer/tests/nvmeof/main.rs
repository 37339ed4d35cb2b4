//! Segments that are files: of another engine, through both ways to do I/O, and mapped here.

#[path = "../common/mod.rs"]
mod common;
mod fixture;
mod refused;
mod strangers;
mod targets;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;

use common::{LONG, contents, pattern, private};
use fixture::{Folder, engine, pair, request, says, ways, writable};
use millstream_metadata::SegmentDesc;
use millstream_transfer::{FileOptions, NvmeofConfig, Opcode, TransferRequest, TransferState};

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

#[test]
fn cancel_ends_and_memory_can_go_meanwhile() {
    const LENGTH: u64 = 64 << 20;
    let folder = Folder::new();
    let path = folder.file("cancel", &[]);
    let (target, initiator) = pair();
    let options = FileOptions { length: Some(LENGTH), ..writable() };
    let segment = initiator.open_segment(&target.register_file(&path, options).unwrap()).unwrap();
    let (local, going) =
        (private(&initiator, LENGTH as usize), private(&initiator, LENGTH as usize));
    let whole = |opcode, local: u64| TransferRequest {
        opcode,
        source: local,
        target: segment.id(),
        target_offset: 0,
        length: LENGTH,
    };
    for opcode in [Opcode::Write, Opcode::Read] {
        let batch = initiator.allocate_batch(20).unwrap();
        initiator.submit(&batch, &[whole(opcode, local.address()); 20]).unwrap();
        for task in 0..20 {
            initiator.cancel(&batch, task).unwrap();
        }
        assert!(initiator.wait(&batch, LONG));
        let statuses = initiator.statuses(&batch);
        assert_eq!(statuses[19].state, TransferState::Canceled);
        assert!(statuses.iter().all(|status| status.error.is_none()), "{statuses:?}");
        initiator.free(batch).unwrap();
    }
    // Nothing comes after the end: what is there now stays.
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&pattern(LENGTH as usize, 8), 0).unwrap();
    let batch = initiator.allocate_batch(8).unwrap();
    let of_both: Vec<_> = [Opcode::Write, Opcode::Read]
        .into_iter()
        .cycle()
        .take(8)
        .map(|opcode| whole(opcode, going.address()))
        .collect();
    initiator.submit(&batch, &of_both).unwrap();
    drop(going);
    assert!(initiator.wait(&batch, LONG));
    for status in initiator.statuses(&batch) {
        let unregistered =
            status.error.is_some_and(|error| error.to_string().contains("unregistered"));
        assert!(unregistered || status.state == TransferState::Completed);
    }
    initiator.free(batch).unwrap();
    // The link is as good as it was.
    initiator.submit_and_wait(&[whole(Opcode::Read, local.address())], LONG).unwrap();
    assert!(contents(&local, 0, LENGTH as usize) == fs::read(&path).unwrap());
}

/// As the engine promises: of a file that is mapped here and of one that is not.
#[test]
fn transfers_go_on_when_their_segment_is_closed_or_refreshed() {
    const LENGTH: u64 = 32 << 20;
    let folder = Folder::new();
    let path = folder.file("closed", &[]);
    for mapped in [false, true] {
        let target = engine(NvmeofConfig::default());
        let initiator = engine(NvmeofConfig {
            mapped_folders: if mapped { vec![folder.0.clone()] } else { Vec::new() },
            server_name: Some("here".to_owned()),
            ..NvmeofConfig::default()
        });
        let options = FileOptions {
            length: Some(LENGTH),
            local_path_map: [("here".to_owned(), path.to_str().unwrap().to_owned())].into(),
            ..writable()
        };
        let name = target.register_file(&path, options).unwrap();
        let segment = initiator.open_segment(&name).unwrap();
        let local = private(&initiator, LENGTH as usize);
        let batch = initiator.allocate_batch(4).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH);
        initiator.submit(&batch, &[write; 2]).unwrap();
        initiator.refresh_segment(segment.id()).unwrap();
        initiator.submit(&batch, &[write; 2]).unwrap();
        initiator.close_segment(segment.id()).unwrap();
        assert!(initiator.wait(&batch, LONG));
        for status in initiator.statuses(&batch) {
            assert_eq!(status.state, TransferState::Completed, "{mapped} {status:?}");
        }
        initiator.free(batch).unwrap();
    }
}

/// As Mooncake does it: the descriptor says where this server has the file, and nobody else does I/O.
#[test]
fn mapped_files_are_opened_here() {
    const LENGTH: usize = 3 << 20;
    let folder = Folder::new();
    let outside = Folder::new();
    let (first, second) =
        (folder.file("a", &vec![1; 1 << 20]), folder.file("b", &vec![2; 2 << 20]));
    let elsewhere = outside.file("c", &[3; 4096]);
    let text = |third: &Path| {
        let file = |path: &Path, length| {
            format!(
                r#"{{"length":{length},"file_path":"/there","local_path_map":{{"here":"{}"}}}}"#,
                path.display()
            )
        };
        let files = [file(&first, 1 << 20), file(&second, 2 << 20), file(third, 4096)];
        format!(r#"{{"name":"nvmeof/a:1/f","protocol":"nvmeof","buffers":[{}]}}"#, files.join(","))
    };
    let (_server, name) = says(SegmentDesc::from_json(text(&elsewhere).as_bytes()).unwrap());
    for way in ways() {
        let folders = vec![folder.0.clone()];
        let server_name = Some("here".to_owned());
        let initiator = engine(NvmeofConfig { mapped_folders: folders, server_name, ..way });
        let segment = initiator.open_segment(&name).unwrap();
        let local = private(&initiator, LENGTH);
        let bytes = pattern(LENGTH, 4);
        local.write(0, &bytes).unwrap();
        segment.set_durable(true);
        // The files of a segment follow each other.
        let requests = |opcode| {
            [(0, 1 << 20), (1 << 20, 100_001), ((1 << 20) + 100_001, (2 << 20) - 100_001)]
                .map(|(at, length)| request(opcode, (&local, at), &segment, at, length))
        };
        initiator.submit_and_wait(&requests(Opcode::Write), LONG).unwrap();
        assert!(fs::read(&first).unwrap() == bytes[..1 << 20]);
        assert!(fs::read(&second).unwrap() == bytes[1 << 20..]);
        local.write(0, &vec![0; LENGTH]).unwrap();
        initiator.submit_and_wait(&requests(Opcode::Read), LONG).unwrap();
        assert!(contents(&local, 0, LENGTH) == bytes);
        let outside = request(Opcode::Write, (&local, 0), &segment, LENGTH as u64, 1);
        let text = initiator.submit_and_wait(&[outside], LONG).unwrap_err().to_string();
        assert!(text.contains("lies in none of the folders for mapped files"), "{text}");
    }
    assert_eq!(fs::read(&elsewhere).unwrap(), [3; 4096]);
}
