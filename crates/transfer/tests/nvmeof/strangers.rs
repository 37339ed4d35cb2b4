//! Whoever speaks to a target, or describes one, reaches nothing that is not offered.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use millstream_lab::Stopwatch;
use millstream_metadata::{SegmentDesc, Server, ServerConfig};
use millstream_transfer::{FileOptions, NvmeofConfig, Opcode, TransferEngine};

use crate::common::{LONG, contents, private};
use crate::fixture::{Folder, Says, descriptor, engine, pair, request, writable};

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

/// A target with so many places, and a file of 4096 bytes.
fn target_with(max_connections: usize) -> (Folder, TransferEngine, String, SocketAddr) {
    let folder = Folder::new();
    let path = folder.file("places", &[3; 4096]);
    let target = engine(NvmeofConfig { max_connections, ..NvmeofConfig::default() });
    let name = target.register_file(&path, writable()).unwrap();
    let port = descriptor(&target, "places").file_target.unwrap().port;
    let place = SocketAddr::new(target.listening_at().ip(), port);
    (folder, target, name, place)
}

fn read_all(name: &str) -> Result<u64, String> {
    let initiator = engine(NvmeofConfig { silence: LONG, ..NvmeofConfig::default() });
    let segment = initiator.open_segment(name).unwrap();
    let local = private(&initiator, 4096);
    let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
    initiator.submit_and_wait(&[read], LONG).map_err(|error| error.to_string())
}

/// Who has said this to a target, and is served.
fn stranger(place: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(place).unwrap();
    stream.write_all(bytes).unwrap();
    stream.read_exact(&mut [0; 12]).unwrap();
    stream
}

/// A file can be read in less time than the 10 s that strangers may take.
fn assert_is_served(name: &str) {
    let stopwatch = Stopwatch::start();
    assert_eq!(read_all(name), Ok(4096));
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_secs(8), "{took}");
}

/// They have said something, but not what would be a request.
#[test]
fn strangers_that_are_slow_keep_nobody_out() {
    let (_folder, _target, name, place) = target_with(3);
    let header = [&b"MSFILES\n\x01\0\0\0"[..], &[0; 39]].concat();
    let strangers = [&header[..3], &header[..12], &header[..]].map(|bytes| stranger(place, bytes));
    assert_is_served(&name);
    drop(strangers);
}

/// Though they ask for something.
#[test]
fn strangers_without_a_key_keep_nobody_out() {
    let (_folder, _target, name, place) = target_with(2);
    // WRITEs to an unknown file. Their data does not come.
    let write = [&b"MSFILES\n\x01\0\0\0"[..], &[1, 0, 0, 0, 0, 0, 1], &[0; 33]].concat();
    let strangers = [(); 2].map(|()| stranger(place, &write));
    assert_is_served(&name);
    drop(strangers);
}

/// So an initiator knows that what it asks for meanwhile was not begun.
#[test]
fn who_makes_room_is_told_that_its_connection_is_closed() {
    let (_folder, _target, name, place) = target_with(1);
    let mut idle = TcpStream::connect(place).unwrap();
    idle.write_all(b"MSFILES\n\x01\0\0\0").unwrap();
    assert_eq!(read_all(&name), Ok(4096));
    let mut said = Vec::new();
    idle.set_read_timeout(Some(LONG)).unwrap();
    idle.read_to_end(&mut said).unwrap();
    let mut closing = [0; 24];
    closing[0] = 3;
    assert_eq!(said[12..], closing);
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
