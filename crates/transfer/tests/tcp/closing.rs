//! Peers of the original that close connections.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use millstream_transfer::{Opcode, TcpConfig};

use super::fixture::{at_port, engine};
use crate::common::{LONG, address, private, request, shared};

/// A request of 4096 bytes in version 2, done for nobody.
fn serve_one(mut stream: &TcpStream) {
    let mut header = [0; 24];
    stream.read_exact(&mut header).unwrap();
    if header[16] == 0x81 {
        stream.read_exact(&mut [0; 4096]).unwrap();
    }
    stream.write_all(b"\0\0\0\0VTCM").unwrap();
    if header[16] == 0x80 {
        stream.write_all(&[7; 4096]).unwrap();
    }
}

/// A port whose connections are each given to `serve`, one after the other; how many there were, and word of the end
/// of each.
fn port(
    serve: impl Fn(&TcpStream) + Send + 'static,
) -> (SocketAddr, Arc<AtomicUsize>, Receiver<()>) {
    let listener = TcpListener::bind((address(), 0)).unwrap();
    let place = listener.local_addr().unwrap();
    let accepted = Arc::new(AtomicUsize::new(0));
    let (tell, closed) = channel();
    let counter = Arc::clone(&accepted);
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            counter.fetch_add(1, Ordering::SeqCst);
            serve(&stream);
            drop(stream);
            let _ = tell.send(());
        }
    });
    (place, accepted, closed)
}

/// Mooncake closes connections that rest. The request that finds that out is done over another one.
#[test]
fn a_connection_that_was_closed_while_it_rested_costs_no_request() {
    let (close, may_close) = channel();
    let (place, accepted, closed) = port(move |stream| {
        serve_one(stream);
        may_close.recv().unwrap();
    });
    let target = engine(TcpConfig::default());
    let initiator = engine(TcpConfig { messages: false, ..TcpConfig::default() });
    let (_remote, local) = (shared(&target, 4096), private(&initiator, 4096));
    let (_server, segment) = at_port(&initiator, &target, place);
    for (index, opcode) in [Opcode::Write, Opcode::Write, Opcode::Read].into_iter().enumerate() {
        let one = request(opcode, (&local, 0), &segment, 0, 4096);
        initiator.submit_and_wait(&[one], LONG).unwrap();
        close.send(()).unwrap();
        closed.recv_timeout(LONG).unwrap();
        assert_eq!(accepted.load(Ordering::SeqCst), index + 1);
    }
}
