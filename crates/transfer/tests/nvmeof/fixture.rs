//! Files, engines that offer them, and processes that say what they want.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use millstream_metadata::{
    Frame, Gate, Handler, Purpose, SegmentDesc, Server, ServerConfig, Token,
};
use millstream_transfer::{
    Buffer, Config, FileEngine, FileOptions, NvmeofConfig, Opcode, Segment, SubmitOptions,
    TransferEngine, TransferRequest, TransferState,
};

use crate::common::{LONG, address};

/// A folder that is removed with its files.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("nvmeof-{}-{number}", std::process::id());
        // On a disk, if the build is on one: memory has other ways around the page cache.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
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

pub(crate) fn engine(config: NvmeofConfig) -> TransferEngine {
    let engine = TransferEngine::new(Config::new(address())).unwrap();
    engine.install_nvmeof(config).unwrap();
    engine
}

pub(crate) fn pair() -> (TransferEngine, TransferEngine) {
    (engine(NvmeofConfig::default()), engine(NvmeofConfig::default()))
}

pub(crate) fn writable() -> FileOptions {
    FileOptions { writable: true, ..FileOptions::default() }
}

pub(crate) fn request(
    opcode: Opcode,
    local: (&Buffer, u64),
    segment: &Segment,
    target_offset: u64,
    length: u64,
) -> TransferRequest {
    let source = local.0.address() + local.1;
    TransferRequest { opcode, source, target: segment.id(), target_offset, length }
}

/// What is to be durable, or not.
pub(crate) fn durable(durable: bool) -> SubmitOptions {
    SubmitOptions { durable, ..SubmitOptions::default() }
}

/// Does these requests, on these terms.
pub(crate) fn done(engine: &TransferEngine, requests: &[TransferRequest], options: &SubmitOptions) {
    let batch = engine.submit_new(requests, options).unwrap();
    assert!(engine.wait(&batch, LONG));
    for status in engine.statuses(&batch) {
        assert_eq!(status.state, TransferState::Completed, "{status:?}");
    }
    engine.free(batch).unwrap();
}

/// All ways to do I/O that this machine has.
pub(crate) fn ways() -> Vec<NvmeofConfig> {
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

pub(crate) fn descriptor(engine: &TransferEngine, file: &str) -> SegmentDesc {
    let client = millstream_metadata::Client::default();
    let query = format!(r#"{{"file":"{file}"}}"#).into_bytes();
    let peer = engine.name().parse().unwrap();
    let frame = Frame::new(millstream_metadata::FrameType::Metadata, query);
    SegmentDesc::from_json(&client.call(&peer, &frame).unwrap().body).unwrap()
}

/// Answers with a descriptor, whatever is asked.
pub(crate) struct Says(pub(crate) SegmentDesc);

impl Handler for Says {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        Some(Frame::new(request.frame_type, self.0.to_json()))
    }
}

/// A process that says this of a file `f`; its segment's name.
pub(crate) fn says(descriptor: SegmentDesc) -> (Server, String) {
    says_at(address(), None, descriptor)
}

/// The same at this address, where the target is looked for, too, whatever the descriptor says.
pub(crate) fn says_at(
    host: IpAddr,
    token: Option<Token>,
    descriptor: SegmentDesc,
) -> (Server, String) {
    let listener = TcpListener::bind((host, 0)).unwrap();
    let gate = Gate::with(token, None, Purpose::Handshake, "says");
    let (config, says) = (ServerConfig::default(), Arc::new(Says(descriptor)));
    let server = Server::guarded(listener, config, gate, says).unwrap();
    let name = format!("nvmeof/{}/f", server.address());
    (server, name)
}

/// A target that does what a thread does with its connections.
pub(crate) fn fake_target(serve: impl Fn(TcpStream) + Send + 'static) -> (Server, String) {
    let listener = TcpListener::bind((address(), 0)).unwrap();
    let place = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            serve(stream.unwrap());
        }
    });
    target_at(place, None)
}

/// A file `f` of a process that is said to answer here. It has this token, if there is one.
pub(crate) fn target_at(place: SocketAddr, token: Option<Token>) -> (Server, String) {
    let text = format!(
        r#"{{"name":"nvmeof/a:1/f","protocol":"nvmeof","file_target":{{"host":"{}","port":{},"token":{}}},
        "buffers":[{{"length":1048576,"file_path":"/f","file_key":"{:032x}"}}]}}"#,
        place.ip(),
        place.port(),
        token.is_some(),
        1
    );
    let descriptor = SegmentDesc::from_json(text.as_bytes()).unwrap();
    says_at(place.ip(), token, descriptor)
}

/// What a target begins with.
pub(crate) const HELLO: &[u8] = b"MSFILES\n\x01\0\0\0";

/// Reads a hello and this many requests, whose WRITEs have so many bytes; what they begin with.
pub(crate) fn asked(stream: &mut TcpStream, count: usize, length: u32) -> Vec<[u8; 40]> {
    stream.write_all(HELLO).unwrap();
    stream.read_exact(&mut [0; 12]).unwrap();
    let mut requests = vec![[0; 40]; count];
    for request in &mut requests {
        stream.read_exact(request).unwrap();
        if request[0] == 1 {
            stream.read_exact(&mut vec![0; length as usize + 4]).unwrap();
        }
    }
    requests
}

/// What answers a request that is done, and so many bytes of a READ follow.
pub(crate) fn reply(request: &[u8], length: u32) -> [u8; 24] {
    let mut reply = [0; 24];
    reply[0] = 1;
    reply[4..8].copy_from_slice(&length.to_le_bytes());
    reply[8..16].copy_from_slice(&request[8..16]);
    reply
}
