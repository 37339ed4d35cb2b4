//! Segments that are files: of another engine, through both ways to do I/O, and mapped here.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{LONG, address, contents, pattern, private};
use millstream_metadata::{Frame, Handler, SegmentDesc, Server, ServerConfig};
use millstream_transfer::{
    Buffer, Config, FileEngine, FileOptions, NvmeofConfig, Opcode, Segment, TransferEngine,
    TransferRequest, TransferState,
};

/// A folder that is removed with its files.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("nvmeof-{}-{number}", std::process::id());
        // On a disk, if the build is on one: memory has other ways around the page cache.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn engine(config: NvmeofConfig) -> TransferEngine {
    let engine = TransferEngine::new(Config::new(address())).unwrap();
    engine.install_nvmeof(config).unwrap();
    engine
}

fn pair() -> (TransferEngine, TransferEngine) {
    (engine(NvmeofConfig::default()), engine(NvmeofConfig::default()))
}

fn writable() -> FileOptions {
    FileOptions { writable: true, ..FileOptions::default() }
}

fn request(
    opcode: Opcode,
    local: (&Buffer, u64),
    segment: &Segment,
    target_offset: u64,
    length: u64,
) -> TransferRequest {
    let source = local.0.address() + local.1;
    TransferRequest { opcode, source, target: segment.id(), target_offset, length }
}

/// All ways to do I/O that this machine has.
fn ways() -> Vec<NvmeofConfig> {
    let mut ways = Vec::new();
    for file_engine in [FileEngine::IoUring, FileEngine::Threads] {
        for direct in [true, false] {
            let file_engine = Some(file_engine);
            ways.push(NvmeofConfig { file_engine, direct, ..NvmeofConfig::default() });
        }
    }
    let engine = TransferEngine::new(Config::new(address())).unwrap();
    if let Err(error) = engine.install_nvmeof(ways[0].clone()) {
        assert_ne!(std::env::var("MILLSTREAM_REQUIRE").as_deref(), Ok("all"), "{error}");
        eprintln!("skipped: {error}");
        ways.drain(..2);
    }
    ways
}

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
fn what_fails_names_the_file_the_range_and_a_remedy_and_others_go_on() {
    let folder = Folder::new();
    let path = folder.file("fails", &[1; 20_000]);
    let (target, initiator) = pair();
    let name = target.register_file(&path, FileOptions::default()).unwrap();
    let segment = initiator.open_segment(&name).unwrap();
    let local = private(&initiator, 20_000);
    let read = request(Opcode::Read, (&local, 0), &segment, 0, 5000);
    let failed = |requests: &[TransferRequest]| {
        initiator.submit_and_wait(requests, LONG).unwrap_err().to_string()
    };
    let beyond = TransferRequest { target_offset: 19_999, length: 2, ..read };
    assert!(failed(&[beyond]).contains("do not lie in a buffer"), "{}", failed(&[beyond]));

    let shown = path.canonicalize().unwrap();
    let shown = shown.display();
    let text = failed(&[TransferRequest { opcode: Opcode::Write, ..read }]);
    let reading = format!(
        "peer {name} (nic nvmeof): file {shown}, bytes 0 to 5000: it is offered for reading only"
    );
    assert!(text.contains(&reading), "{text}");

    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(10_000).unwrap();
    let batch = initiator.allocate_batch(3).unwrap();
    let late = TransferRequest { target_offset: 8000, ..read };
    initiator.submit(&batch, &[read, late, read]).unwrap();
    assert!(initiator.wait(&batch, LONG));
    let states = initiator.statuses(&batch);
    let text = states[1].error.as_ref().unwrap().to_string();
    assert!(text.contains("bytes 8000 to 13000: it has become shorter"), "{text}");
    assert!([0, 2].iter().all(|&index: &usize| states[index].state == TransferState::Completed));
    initiator.free(batch).unwrap();
}

/// On a file system of its own.
#[test]
fn a_full_file_system_is_told() {
    let folder = Folder::new();
    let mount = folder.0.to_str().unwrap();
    let run = |command: &[&str]| {
        let output = std::process::Command::new(command[0]).args(&command[1..]).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !run(&["mount", "-t", "tmpfs", "-o", "size=256k", "millstream", mount]) {
        assert_ne!(std::env::var("MILLSTREAM_REQUIRE").as_deref(), Ok("all"), "cannot mount");
        return eprintln!("skipped: only root can mount");
    }
    let path = folder.file("full", b"x");
    let (target, initiator) = pair();
    let options = FileOptions { length: Some(1 << 20), ..writable() };
    let segment = initiator.open_segment(&target.register_file(&path, options).unwrap()).unwrap();
    let local = private(&initiator, 1 << 20);
    let whole = request(Opcode::Write, (&local, 0), &segment, 0, 1 << 20);
    let text = initiator.submit_and_wait(&[whole], LONG).map_err(|error| error.to_string());
    let some = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
    let read = initiator.submit_and_wait(&[some], LONG);
    drop((initiator, target));
    assert!(run(&["umount", mount]));
    let text = text.unwrap_err();
    assert!(text.contains("No space left on device (os error 28): make room"), "{text}");
    assert!(text.contains("undefined"), "{text}");
    read.unwrap();
}

#[test]
fn a_file_that_was_taken_back_is_refused_until_the_segment_is_refreshed() {
    let folder = Folder::new();
    let path = folder.file("again", &[1; 4096]);
    let other = folder.file("other", &[2; 4096]);
    let (target, initiator) = pair();
    let name = target.register_file(&path, writable()).unwrap();
    assert_eq!(target.files(), [name.as_str()]);
    let twice = target.register_file(&path, writable()).unwrap_err();
    assert_eq!(twice.code(), -7, "{twice}");
    let segment = initiator.open_segment(&name).unwrap();
    let local = private(&initiator, 4096);
    let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
    initiator.submit_and_wait(&[read], LONG).unwrap();

    target.unregister_file(&name).unwrap();
    assert_eq!(target.unregister_file(&name).unwrap_err().code(), -3);
    let text = initiator.submit_and_wait(&[read], LONG).unwrap_err().to_string();
    assert!(text.contains("it is not registered any more"), "{text}");
    let text = initiator.submit_and_wait(&[read], LONG).unwrap_err().to_string();
    assert!(text.contains("has no such segment to offer"), "{text}");

    // Another file, by the same name.
    let options = FileOptions { name: Some("again".to_owned()), ..FileOptions::default() };
    assert_eq!(target.register_file(&other, options).unwrap(), name);
    initiator.submit_and_wait(&[read], LONG).unwrap();
    assert_eq!(contents(&local, 0, 4096), [2; 4096]);
}

#[test]
fn bad_files_are_refused() {
    let folder = Folder::new();
    let target = engine(NvmeofConfig::default());
    let bad = |path: &Path, name: Option<&str>| {
        let options = FileOptions { name: name.map(str::to_owned), ..FileOptions::default() };
        let error = target.register_file(path, options).unwrap_err();
        assert_eq!(error.code(), -1, "{error}");
        error.to_string()
    };
    assert!(bad(&folder.0.join("none"), None).contains("none: No such file"));
    assert!(bad(&folder.0, None).contains("irectory"));
    assert!(bad(&folder.file("empty", &[]), None).contains("it is empty"));
    let path = folder.file("f", b"x");
    for name in ["", "a/b", "a\nb"] {
        assert!(bad(&path, Some(name)).contains("no name of a file"));
    }
    let plain = TransferEngine::new(Config::new(address())).unwrap();
    let error = plain.register_file(&path, FileOptions::default()).unwrap_err();
    assert!(error.to_string().contains("not installed"));
}
