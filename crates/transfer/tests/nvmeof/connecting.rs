//! What becomes of requests, and of the engine, while a connection is being made that nobody answers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use millstream_lab::{Stopwatch, Took};
use millstream_metadata::{Server, Token};
use millstream_transfer::{
    Batch, Buffer, Config, FailureReason, NvmeofConfig, Opcode, SubmitOptions, TransferEngine,
    TransferState,
};
use socket2::{Domain, SockAddr, Socket, Type};

use crate::common::{LONG, address, private};
use crate::fixture::{request, target_at};

/// One that waits for a connection for longer than a test lasts.
fn engine(token: Option<Token>) -> TransferEngine {
    let mut config = Config::new(address());
    config.client.token = token;
    let engine = TransferEngine::new(config).unwrap();
    let patient = NvmeofConfig { connect_timeout: LONG, ..NvmeofConfig::default() };
    engine.install_nvmeof(patient).unwrap();
    engine
}

/// A place where connections are made by nobody but the kernel, for very few of them.
fn listener() -> (TcpListener, SocketAddr) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SockAddr::from(SocketAddr::new(address(), 0))).unwrap();
    socket.listen(0).unwrap();
    let listener = TcpListener::from(socket);
    let place = listener.local_addr().unwrap();
    (listener, place)
}

/// Takes all that the kernel accepts for a listener: from then on it drops what comes.
fn fill(place: SocketAddr) -> Vec<TcpStream> {
    let connect = || TcpStream::connect_timeout(&place, Duration::from_millis(300)).ok();
    // A busy machine may be late once.
    let taken: Vec<_> = (0..10).map_while(|_| connect().or_else(connect)).collect();
    assert!(taken.len() < 10, "there is room still");
    taken
}

/// What stays as it is while somebody is silent.
type Kept = (TcpListener, Vec<TcpStream>, Server);

/// Files of who never answers, each with an engine that asks him: one whose kernel drops what comes, and one to whom a
/// connection is made, and who then does not prove who he is.
fn silent() -> [(TransferEngine, String, Kept); 2] {
    let token = Token::new(b"the token of this cluster").unwrap();
    [None, Some(token)].map(|token| {
        let (listener, place) = listener();
        let taken = if token.is_some() { Vec::new() } else { fill(place) };
        let (server, name) = target_at(place, token);
        (engine(token), name, (listener, taken, server))
    })
}

/// Has requests of a buffer wait for a connection. How long what follows takes is of interest.
fn submit(
    engine: &TransferEngine,
    name: &str,
    deadline: Option<Duration>,
) -> (Batch, Buffer, Stopwatch) {
    let segment = engine.open_segment(name).unwrap();
    let local = private(engine, 1 << 20);
    let batch = engine.allocate_batch(20).unwrap();
    let all = |opcode| request(opcode, (&local, 0), &segment, 0, 1 << 20);
    let stopwatch = Stopwatch::start();
    let deadline = deadline.map(|time| Instant::now() + time);
    let options = SubmitOptions { deadline, ..SubmitOptions::default() };
    let requests = [Opcode::Write, Opcode::Read].map(all).repeat(10);
    engine.submit_with(&batch, &requests, &options).unwrap();
    (batch, local, stopwatch)
}

/// How all of them have ended.
fn ended(engine: &TransferEngine, batch: &Batch, state: TransferState, took: Took) {
    assert!(took.own() < Duration::from_secs(10), "{took}");
    for status in engine.statuses(batch) {
        assert_eq!(status.state, state, "{status:?}");
        assert!(!status.target_undefined, "nothing was sent: {status:?}");
    }
}

#[test]
fn deadlines_are_kept_while_a_connection_is_made() {
    for (engine, name, _kept) in &silent() {
        let (batch, _local, stopwatch) = submit(engine, name, Some(Duration::from_millis(300)));
        assert!(engine.wait(&batch, LONG), "{name}");
        ended(engine, &batch, TransferState::Timeout, stopwatch.took());
    }
}

/// The connection is being made for others already, which have time.
#[test]
fn deadlines_are_kept_of_what_is_submitted_while_a_connection_is_made() {
    for (engine, name, _kept) in &silent() {
        let (others, _others_local, _) = submit(engine, name, None);
        let (batch, _local, stopwatch) = submit(engine, name, Some(Duration::from_millis(300)));
        assert!(engine.wait(&batch, LONG), "{name}");
        ended(engine, &batch, TransferState::Timeout, stopwatch.took());
        for index in 0..20 {
            assert!(engine.cancel(&others, index).unwrap());
        }
        assert!(engine.wait(&others, LONG), "{name}");
        ended(engine, &others, TransferState::Canceled, stopwatch.took());
    }
}

#[test]
fn an_engine_goes_while_a_connection_is_made() {
    for (engine, name, _kept) in silent() {
        let (batch, _local, stopwatch) = submit(&engine, &name, None);
        drop(engine);
        let other = TransferEngine::new(Config::new(address())).unwrap();
        assert!(other.wait(&batch, Duration::ZERO), "all have ended");
        ended(&other, &batch, TransferState::Failed, stopwatch.took());
        for status in other.statuses(&batch) {
            let error = status.error.unwrap();
            assert!(matches!(error.reason, FailureReason::ShutDown), "{error}");
        }
    }
}

/// A target has closed its connection in order, so that what was sent to it is to be sent again. Nobody answers that.
#[test]
fn what_is_to_begin_again_is_canceled_at_once() {
    let (listener, place) = listener();
    let (server, name) = target_at(place, None);
    let (tell, told) = channel();
    let target = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"MSFILES\n\x01\0\0\0").unwrap();
        // Its hello, and the header of a WRITE.
        stream.read_exact(&mut [0; 12 + 40]).unwrap();
        let taken = fill(place);
        let mut closing = [0; 24];
        closing[0] = 3;
        stream.write_all(&closing).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        // Until the other end has closed it.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
        tell.send((taken, listener)).unwrap();
    });
    let engine = engine(None);
    let (batch, _local, _) = submit(&engine, &name, None);
    let _silent = told.recv_timeout(LONG).unwrap();
    target.join().unwrap();
    let stopwatch = Stopwatch::start();
    for index in 0..20 {
        let status = engine.status(&batch, index).unwrap();
        assert!(engine.cancel(&batch, index).unwrap(), "{index} {status:?}");
    }
    assert!(engine.wait(&batch, LONG));
    ended(&engine, &batch, TransferState::Canceled, stopwatch.took());
    drop(server);
}
