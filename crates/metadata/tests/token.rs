//! Tokens over sockets: who is admitted, and what those hear who are not.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use millstream_metadata::{
    CallError, CallErrorKind, Caller, Client, ClientConfig, Frame, FrameType, Gate, Handler,
    HostPort, Purpose, Server, ServerConfig, Token, TokenError,
};

const LONG: Duration = Duration::from_secs(60);

/// Answers with what was asked, and counts.
#[derive(Default)]
struct Echo(AtomicUsize);

impl Handler for Echo {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Some(request)
    }
}

fn token(text: &str) -> Token {
    Token::new(text.as_bytes()).unwrap()
}

fn ours() -> Token {
    token("the token of this cluster")
}

fn server(token: Option<Token>) -> (Server, Arc<Echo>) {
    let echo = Arc::new(Echo::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let gate = token.map(|token| Gate::new(token, Purpose::Handshake, "n"));
    let config = ServerConfig { max_connections: 4, client_timeout: LONG, ..Default::default() };
    let handler = Arc::clone(&echo) as Arc<dyn Handler>;
    (Server::guarded(listener, config, gate, handler).unwrap(), echo)
}

fn config(token: Option<Token>) -> ClientConfig {
    ClientConfig { token, call_timeout: LONG, ..ClientConfig::default() }
}

fn peer(address: SocketAddr) -> HostPort {
    address.to_string().parse().unwrap()
}

fn probe() -> Frame {
    Frame::new(FrameType::Probe, vec![b' '; 100_000])
}

/// Asked by a client, and by a caller.
fn ask(address: SocketAddr, token: Option<Token>) -> [Result<Frame, CallError>; 2] {
    let by_client = Client::new(config(token)).call(&peer(address), &probe());
    let (sender, told) = mpsc::channel();
    let caller = Caller::new(config(token));
    let done = Box::new(move |result| sender.send(result).unwrap());
    caller.call(&peer(address), probe(), LONG, done);
    [by_client, told.recv().unwrap()]
}

#[test]
fn those_who_have_the_token_talk_and_others_hear_why_not() {
    let other = token("the token of another cluster");
    for (there, here, error) in [
        (Some(ours()), Some(ours()), None),
        (Some(ours()), Some(other), Some(TokenError::OtherToken)),
        (Some(ours()), None, Some(TokenError::Needed)),
        (None, Some(ours()), Some(TokenError::NoneThere)),
    ] {
        let (server, echo) = server(there);
        for result in ask(server.address(), here) {
            match (result, &error) {
                (Ok(reply), None) => assert_eq!(reply, probe()),
                (Err(CallError { peer, kind: CallErrorKind::Token(got) }), Some(error)) => {
                    assert_eq!((peer.port, &got), (server.address().port(), error));
                }
                (result, error) => panic!("{result:?} in place of {error:?}"),
            }
        }
        assert_eq!(echo.0.load(Ordering::SeqCst), if error.is_none() { 2 } else { 0 });
    }
}

#[test]
fn the_error_names_the_peer() {
    let (server, _) = server(Some(ours()));
    let peer = peer(server.address());
    let client = Client::new(config(Some(token("the token of another cluster"))));
    let error = client.call(&peer, &probe()).unwrap_err().to_string();
    assert_eq!(error, format!("peer {peer}: its token is another than ours"));
}

/// What comes from a stream until its end.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut bytes = Vec::new();
    if let Err(error) = stream.read_to_end(&mut bytes) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "it hangs");
    }
    bytes
}

#[test]
fn what_is_no_proof_is_refused_with_a_reason() {
    let (server, echo) = server(Some(ours()));
    let needed = b"\x03\0\0\0\0\0\0\0TV\x05";
    let metadata = Frame::new(FrameType::Metadata, "{}").encode();
    let old = Frame::new(FrameType::OldProtocol, "{}").encode();
    let long = (1_u64 << 20).to_le_bytes();
    for words in [&*metadata, &*old, &long, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0"]
    {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(words).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let said = rest(&mut stream);
        // Where not even a length has come there is nothing to answer.
        assert!(said == needed || (words.len() < 8 && said.is_empty()), "{said:?}");
    }
    assert_eq!(echo.0.load(Ordering::SeqCst), 0);
    assert!(ask(server.address(), Some(ours())).iter().all(Result::is_ok));
}

/// A connection passed on by somebody else: his port is not the one that the caller meant.
#[test]
fn a_conversation_that_is_passed_on_is_refused() {
    let (server, echo) = server(Some(ours()));
    let between = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, behind) = (between.local_addr().unwrap(), server.address());
    let passing = thread::spawn(move || {
        let (mut near, _) = between.accept().unwrap();
        let mut far = TcpStream::connect(behind).unwrap();
        let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let there = thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(std::net::Shutdown::Write);
        });
        let _ = std::io::copy(&mut far, &mut near);
        let _ = near.shutdown(std::net::Shutdown::Write);
        there.join().unwrap();
    });
    let error = Client::new(config(Some(ours()))).call(&peer(address), &probe()).unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::Token(TokenError::OtherAddress)), "{error}");
    passing.join().unwrap();
    assert_eq!(echo.0.load(Ordering::SeqCst), 0);
}

/// All that a caller has said, said again by somebody who has heard it.
#[test]
fn a_conversation_that_is_said_again_is_refused() {
    let (server, echo) = server(Some(ours()));
    // Recorded at the caller, who speaks to the port itself.
    let stream = TcpStream::connect(server.address()).unwrap();
    let address = server.address();
    let mut initiator =
        millstream_metadata::Initiator::new(ours(), Purpose::Handshake, address, None).unwrap();
    let mut recorded = initiator.opening().encode();
    let mut here = stream.try_clone().unwrap();
    here.write_all(&recorded).unwrap();
    let challenge = frame(&mut here);
    let proof = initiator.take(&challenge).unwrap().unwrap().encode();
    here.write_all(&proof).unwrap();
    assert_eq!(initiator.take(&frame(&mut here)), Ok(None));
    recorded.extend_from_slice(&proof);
    recorded.extend_from_slice(&probe().encode());
    let mut again = TcpStream::connect(address).unwrap();
    again.write_all(&recorded).unwrap();
    let said = rest(&mut again);
    assert!(said.ends_with(b"\x03\0\0\0\0\0\0\0TV\x01"), "{said:?}");
    assert_eq!(echo.0.load(Ordering::SeqCst), 0);
}

fn frame(stream: &mut TcpStream) -> Frame {
    let mut length = [0; 8];
    stream.read_exact(&mut length).unwrap();
    let mut body = vec![0; u64::from_le_bytes(length) as usize];
    stream.read_exact(&mut body).unwrap();
    assert_eq!(body.remove(0), b'T');
    Frame::new(FrameType::Token, body)
}

/// More of them than there are places, each at another point of the proof.
#[test]
fn who_never_ends_his_proof_keeps_nobody_out() {
    let (server, _) = server(Some(ours()));
    let mut strangers = Vec::new();
    for index in 0..24 {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        let initiator =
            millstream_metadata::Initiator::new(ours(), Purpose::Handshake, server.address(), None)
                .unwrap();
        let opening = initiator.opening().encode();
        stream.write_all(&opening[..opening.len() * (index % 4) / 3]).unwrap();
        strangers.push(stream);
    }
    let start = Instant::now();
    assert!(ask(server.address(), Some(ours())).iter().all(Result::is_ok));
    assert!(start.elapsed() < LONG, "they were waited for");
}
