//! Whoever speaks to a target, or describes one, reaches nothing that is not offered.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use millstream_metadata::{SegmentDesc, Server, ServerConfig};
use millstream_transfer::{FileOptions, Opcode};

use crate::common::{LONG, contents, private};
use crate::fixture::{Folder, Says, descriptor, pair, request, writable};

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
