//! Peers of the original that close connections.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use millstream_transfer::{Opcode, SubmitOptions, TcpConfig, TransferState};

use socket2::{Domain, Socket, Type};

use super::fixture::{Relay, at_port, engine, framings, logged};
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

/// Who is asked again and again is asked with pauses, and the log says it once. In version 1 a connection that ends
/// is an answer.
#[test]
fn a_peer_that_accepts_and_closes_is_left_alone_for_a_while() {
    let framings = framings().into_iter().filter(|(_, config)| !config.version_one);
    for (name, config) in framings {
        let (place, accepted, _closed) = port(|_| {});
        let target = engine(TcpConfig::default());
        let initiator = engine(TcpConfig { lanes: 1, ..config });
        let (_remote, local) = (shared(&target, 4096), private(&initiator, 4096));
        let (server, segment) = at_port(&initiator, &target, place);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(1) {
            let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
            let batch = initiator.submit_new(&[read; 20], &SubmitOptions::default()).unwrap();
            assert!(initiator.wait(&batch, LONG));
            for status in initiator.statuses(&batch) {
                assert_eq!(status.state, TransferState::Failed);
            }
        }
        // The pauses are 20, 40, 80, 160, 320 and 640 ms.
        let accepted = accepted.load(Ordering::SeqCst);
        assert!(accepted <= 8, "{name}: {accepted} connections");
        let lines = logged(&server);
        assert_eq!(lines.len(), 1, "{name}: {lines:?}");
        assert!(lines[0].contains("ends connections unanswered"), "{name}: {lines:?}");
    }
}

/// So it is with one that is not there, in each framing; and the log says when it is there again.
#[test]
fn a_storm_of_connections_that_are_refused_is_one_line_of_the_log() {
    for (name, config) in framings() {
        let (target, initiator) = (engine(TcpConfig::default()), engine(config));
        let (_remote, local) = (shared(&target, 4096), private(&initiator, 4096));
        // Nobody listens there yet.
        let any = SocketAddr::new(target.listening_at().ip(), 0);
        let socket = Socket::new(Domain::for_address(any), Type::STREAM, None).unwrap();
        socket.bind(&any.into()).unwrap();
        let place = socket.local_addr().unwrap().as_socket().unwrap();
        let (server, segment) = at_port(&initiator, &target, place);
        let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
        for _ in 0..100 {
            assert!(initiator.submit_and_wait(&[read], LONG).is_err(), "{name}");
        }
        let lines = logged(&server);
        assert_eq!(lines.len(), 1, "{name}: {lines:?}");
        assert!(lines[0].contains("cannot be reached"), "{name}: {lines:?}");
        socket.listen(16).unwrap();
        let _relay = Relay::with(socket.into(), &target, Duration::ZERO);
        let start = Instant::now();
        while initiator.submit_and_wait(&[read], LONG).is_err() {
            assert!(start.elapsed() < LONG, "{name}");
            thread::yield_now();
        }
        let lines = logged(&server);
        assert_eq!(lines.len(), 2, "{name}: {lines:?}");
        assert!(lines[1].contains("can be reached again"), "{name}: {lines:?}");
    }
}
