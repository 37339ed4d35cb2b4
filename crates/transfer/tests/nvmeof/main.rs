//! Segments that are files: of another engine, through both ways to do I/O, and mapped here.

#[path = "../common/mod.rs"]
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

/// What others say comes to nothing, and the target goes on.
#[test]
fn strangers_at_the_port_change_nothing() {
    let folder = Folder::new();
    let path = folder.file("strangers", &[3; 4096]);
    let (target, initiator) = pair();
    let name = target.register_file(&path, writable()).unwrap();
    let segment = initiator.open_segment(&name).unwrap();
    let port = descriptor(&target, "strangers").file_target.unwrap().port;
    let place = SocketAddr::new(target.listening_at().ip(), port);
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0xff; 5000],
        b"MSFILES\n\x01\0\0\0garbage of some length.....................",
    ] {
        let mut stream = TcpStream::connect(place).unwrap();
        stream.write_all(bytes).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut answer = Vec::new();
        // It may be reset, as there is more that nobody reads.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer.starts_with(b"MSFILES\n"));
    }
    let local = private(&initiator, 4096);
    let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
    initiator.submit_and_wait(&[read], LONG).unwrap();
    assert_eq!(contents(&local, 0, 4096), [3; 4096]);
}

fn descriptor(engine: &TransferEngine, file: &str) -> SegmentDesc {
    let client = millstream_metadata::Client::default();
    let query = format!(r#"{{"file":"{file}"}}"#).into_bytes();
    let peer = engine.name().parse().unwrap();
    let frame = Frame::new(millstream_metadata::FrameType::Metadata, query);
    SegmentDesc::from_json(&client.call(&peer, &frame).unwrap().body).unwrap()
}

/// Answers with a descriptor, whatever is asked.
struct Says(SegmentDesc);

impl Handler for Says {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        Some(Frame::new(request.frame_type, self.0.to_json()))
    }
}

/// A process that says this of a file `f`; its segment's name.
fn says(descriptor: SegmentDesc) -> (Server, String) {
    let address = SocketAddr::new(address(), 0);
    let server =
        Server::start(address, ServerConfig::default(), Arc::new(Says(descriptor))).unwrap();
    let name = format!("nvmeof/{}/f", server.address());
    (server, name)
}

#[test]
fn descriptors_that_lie_reach_no_other_byte() {
    let folder = Folder::new();
    let path = folder.file("f", &[1; 8192]);
    let (target, initiator) = pair();
    let options = FileOptions { length: Some(4096), ..writable() };
    let name = target.register_file(&path, options).unwrap();
    let truth = descriptor(&target, "f");
    let target_host = target.listening_at().ip();
    let local = private(&initiator, 8192);
    let attempt = |change: &dyn Fn(&mut SegmentDesc), length| {
        let mut lie = truth.clone();
        change(&mut lie);
        // At the target's address, where its port is looked for.
        let server = Server::start(
            SocketAddr::new(target_host, 0),
            ServerConfig::default(),
            Arc::new(Says(lie)),
        );
        let server = server.unwrap();
        let name = format!("nvmeof/{}/f", server.address());
        let segment = initiator.open_segment(&name).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, length);
        let result = initiator.submit_and_wait(&[write], LONG).map_err(|error| error.to_string());
        initiator.close_segment(segment.id()).unwrap();
        result
    };
    let text = attempt(&|lie| lie.buffers[0].length = 8192, 8192).unwrap_err();
    assert!(text.contains("not all in what its process has registered"), "{text}");
    let text = attempt(&|lie| lie.buffers[0].file_key = Some(millstream_metadata::FileKey(1)), 10);
    assert!(text.as_ref().unwrap_err().contains("not registered any more"), "{text:?}");
    let text = attempt(&|lie| lie.buffers[0].file_key = None, 10).unwrap_err();
    assert!(text.contains("no process does its I/O"), "{text}");
    let text = attempt(&|lie| lie.file_target.as_mut().unwrap().port = 1, 10).unwrap_err();
    assert!(text.contains("see whether it runs"), "{text}");
    assert_eq!(fs::read(&path).unwrap(), [1; 8192], "nothing was written");
    // The truth works, over the link that was there.
    assert_eq!(attempt(&|_| {}, 4096), Ok(4096));
    assert!(initiator.open_segment(&name).is_ok());
}

/// A target that does what a thread does with its connections.
fn fake_target(serve: impl Fn(TcpStream) + Send + 'static) -> (Server, String) {
    let listener = TcpListener::bind((address(), 0)).unwrap();
    let place = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            serve(stream.unwrap());
        }
    });
    let text = format!(
        r#"{{"name":"nvmeof/a:1/f","protocol":"nvmeof","file_target":{{"host":"{}","port":{}}},
        "buffers":[{{"length":1048576,"file_path":"/f","file_key":"{:032x}"}}]}}"#,
        place.ip(),
        place.port(),
        1
    );
    let descriptor = SegmentDesc::from_json(text.as_bytes()).unwrap();
    let server = Server::start(
        SocketAddr::new(place.ip(), 0),
        ServerConfig::default(),
        Arc::new(Says(descriptor)),
    );
    let server = server.unwrap();
    let name = format!("nvmeof/{}/f", server.address());
    (server, name)
}

/// What became of a WRITE and a READ, and of how many seconds these took.
fn outcome(name: &str) -> (Vec<String>, Duration) {
    let initiator = engine(NvmeofConfig::default());
    let segment = initiator.open_segment(name).unwrap();
    let local = private(&initiator, 1 << 20);
    let batch = initiator.allocate_batch(2).unwrap();
    let all = |opcode| request(opcode, (&local, 0), &segment, 0, 1 << 20);
    let start = Instant::now();
    initiator.submit(&batch, &[all(Opcode::Write), all(Opcode::Read)]).unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "submit does not wait");
    assert!(initiator.wait(&batch, LONG));
    let took = start.elapsed();
    let errors = initiator.statuses(&batch).into_iter().map(|status| {
        assert_eq!(status.state, TransferState::Failed);
        status.error.unwrap().to_string()
    });
    let errors = errors.collect();
    initiator.free(batch).unwrap();
    (errors, took)
}

#[test]
fn a_target_that_is_silent_is_given_up_in_time() {
    let (streams, kept) = std::sync::mpsc::channel();
    let (_server, name) = fake_target(move |mut stream| {
        stream.write_all(b"MSFILES\n\x01\0\0\0").unwrap();
        let _ = streams.send(stream);
    });
    let (errors, took) = outcome(&name);
    assert!(took < Duration::from_secs(5), "{took:?}");
    for error in &errors {
        assert!(error.contains(&name) && error.contains("file /f, bytes 0 to 1048576"), "{error}");
        assert!(error.contains("has not answered for 3s"), "{error}");
    }
    assert!(errors[0].contains("undefined") && !errors[1].contains("undefined"), "{errors:?}");
    drop(kept);
}

/// One with a slow disk, which says that it is there.
#[test]
fn a_target_that_is_slow_is_waited_for() {
    let (_server, name) = fake_target(|mut stream| {
        stream.write_all(b"MSFILES\n\x01\0\0\0").unwrap();
        let mut alive = [0; 24];
        alive[0] = 2;
        for _ in 0..8 {
            thread::sleep(Duration::from_millis(500));
            stream.write_all(&alive).unwrap();
        }
    });
    let (errors, took) = outcome(&name);
    assert!(took >= Duration::from_secs(4), "{took:?} {errors:?}");
}

#[test]
fn a_target_that_dies_or_talks_nonsense_is_given_up_at_once() {
    type Serve = fn(TcpStream);
    let cases: [(Serve, &str); 4] = [
        (|_| {}, "closed the connection"),
        (
            |mut stream| {
                let _ = stream.read_exact(&mut [0; 5000]);
            },
            "closed the connection",
        ),
        (
            |mut stream| {
                stream.write_all(&[b'x'; 100]).unwrap();
                let _ = stream.read_to_end(&mut Vec::new());
            },
            "does not speak the protocol for files",
        ),
        (
            |mut stream| {
                let mut says = b"MSFILES\n\x01\0\0\0".to_vec();
                says.extend([1; 24]);
                says[14..].fill(0);
                stream.write_all(&says).unwrap();
                let _ = stream.read_to_end(&mut Vec::new());
            },
            "makes no sense",
        ),
    ];
    for (serve, what) in cases {
        let (_server, name) = fake_target(serve);
        let (errors, took) = outcome(&name);
        assert!(took < Duration::from_secs(3), "{took:?}");
        for error in errors {
            let broke = what == "closed the connection" && error.contains("broke");
            assert!(error.contains(what) || broke, "{what}: {error}");
        }
    }
}

#[test]
fn after_a_target_was_started_anew_the_next_requests_succeed() {
    let folder = Folder::new();
    let path = folder.file("f", &[9; 4096]);
    let place = address();
    let start = |port| {
        let mut config = Config::new(place);
        config.listen.set_port(port);
        let engine = TransferEngine::new(config).unwrap();
        engine.install_nvmeof(NvmeofConfig::default()).unwrap();
        let name = engine.register_file(&path, FileOptions::default()).unwrap();
        (engine, name)
    };
    let (target, name) = start(0);
    let port = target.listening_at().port();
    let initiator = engine(NvmeofConfig::default());
    let segment = initiator.open_segment(&name).unwrap();
    let local = private(&initiator, 4096);
    let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
    initiator.submit_and_wait(&[read], LONG).unwrap();
    drop(target);
    initiator.submit_and_wait(&[read], LONG).unwrap_err();
    let (_target, again) = start(port);
    assert_eq!(again, name);
    initiator.refresh_segment(segment.id()).unwrap();
    initiator.submit_and_wait(&[read], LONG).unwrap();
    assert_eq!(contents(&local, 0, 4096), [9; 4096]);
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
