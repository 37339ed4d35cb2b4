//! Engines with a token: among each other, towards others, and with strangers at their ports.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use millstream_metadata::{
    Client, ClientConfig, Frame, FrameType, Gate, Purpose, SegmentDesc, Token,
};
use millstream_transfer::{Config, Opcode, TcpConfig, TransferEngine};

use super::fixture::{engine, failure, framings, said};
use crate::common::{LONG, address, contents, pattern, private, request, shared};

fn token(text: &str) -> Token {
    Token::new(text.as_bytes()).unwrap()
}

fn ours() -> Token {
    token("the token of this cluster")
}

fn other() -> Token {
    token("the token of another cluster")
}

fn guarded(token: Token, tcp: TcpConfig) -> TransferEngine {
    let mut config = Config::new(address());
    config.client.token = Some(token);
    let engine = TransferEngine::new(config).unwrap();
    engine.install_tcp(tcp).unwrap();
    engine
}

/// What somebody asks for who has this token, if he has one.
fn gate(token: Option<Token>) -> Option<Gate> {
    token.map(|token| Gate::new(token, Purpose::Handshake, "says"))
}

/// What an engine with our token says of itself.
fn descriptor(engine: &TransferEngine) -> SegmentDesc {
    let client = Client::new(ClientConfig { token: Some(ours()), ..ClientConfig::default() });
    let frame = Frame::new(FrameType::Metadata, b"{}".to_vec());
    let reply = client.call(&engine.name().parse().unwrap(), &frame).unwrap();
    SegmentDesc::from_json(&reply.body).unwrap()
}

#[test]
fn engines_with_the_same_token_move_bytes_in_every_framing() {
    for (name, config) in framings() {
        let target = guarded(ours(), TcpConfig::default());
        let initiator = guarded(ours(), config);
        let (remote, local) = (shared(&target, 1 << 20), private(&initiator, 1 << 20));
        let segment = initiator.open_segment(target.name()).unwrap();
        let bytes = pattern(1 << 20, 3);
        local.write(0, &bytes).unwrap();
        for opcode in [Opcode::Write, Opcode::Read] {
            let asked = [request(opcode, (&local, 0), &segment, 0, 1 << 20)];
            assert_eq!(initiator.submit_and_wait(&asked, LONG).unwrap(), 1 << 20, "{name}");
        }
        // Version 1 says nothing of a WRITE, but the READ came behind it on a connection of its own.
        if name != "version 1" {
            assert!(contents(&remote, 0, 1 << 20) == bytes, "{name}");
        }
        assert!(initiator.probe(target.name()).is_ok());
    }
}

#[test]
fn the_descriptor_names_a_port_that_mooncake_does_not_find() {
    let said = descriptor(&guarded(ours(), TcpConfig::default()));
    assert_eq!(said.tcp_data_port, None);
    assert!(said.tcp_token_port.is_some());
}

#[test]
fn another_token_or_none_is_told_where_the_descriptor_is_asked_for() {
    let target = guarded(ours(), TcpConfig::default());
    let open = |engine: &TransferEngine, name: &str| {
        engine.open_segment(name).map(drop).unwrap_err().to_string()
    };
    let error = open(&guarded(other(), TcpConfig::default()), target.name());
    let expected = format!("peer {}: its token is another than ours", target.name());
    assert!(error.contains(&expected), "{error}");
    let plain = engine(TcpConfig::default());
    let error = open(&plain, target.name());
    assert!(error.contains("only who have its token, and none is set here"), "{error}");
    let error = open(&target, plain.name());
    assert!(error.contains("it has no token, and one is set here"), "{error}");
}

/// Who has the descriptor from somewhere else has the port for data, and no more.
#[test]
fn another_token_or_none_is_told_by_the_port_for_data() {
    let target = guarded(ours(), TcpConfig::default());
    let friend = guarded(ours(), TcpConfig::default());
    let _remote = shared(&target, 4096);
    let shown = descriptor(&target);
    let stranger = guarded(other(), TcpConfig::default());
    let (_server, segment) = said((&stranger, &target), gate(Some(other())), shown.clone());
    let error = failure(&stranger, &segment);
    assert!(error.contains("its token is another than ours"), "{error}");
    let plain = engine(TcpConfig::default());
    let (_server, segment) = said((&plain, &target), gate(None), shown.clone());
    let error = failure(&plain, &segment);
    assert!(error.contains("only who have its token, and none is set here"), "{error}");
    // Who tries it nevertheless. The port says it in no framing.
    let (tcp_data_port, tcp_token_port) = (shown.tcp_token_port, None);
    let open = SegmentDesc { tcp_data_port, tcp_token_port, ..shown.clone() };
    for checksums in [false, true] {
        let plain = engine(TcpConfig { checksums, ..TcpConfig::default() });
        let (_server, segment) = said((&plain, &target), gate(None), open.clone());
        let error = failure(&plain, &segment);
        let expected = "only who have its token, and none is set here";
        assert!(error.contains(expected), "{checksums}: {error}");
    }
    // Whose memory is for everybody is none of ours.
    let (_server, segment) = said((&friend, &target), gate(Some(ours())), open);
    let error = failure(&friend, &segment);
    assert!(error.contains("asks for no token, and one is set here"), "{error}");
    // A port that is another engine's by now.
    let renamed = SegmentDesc { name: "somebody".to_owned(), ..shown };
    let (_server, segment) = said((&friend, &target), gate(Some(ours())), renamed);
    let error = failure(&friend, &segment);
    assert!(error.contains("which is another than the one that was called"), "{error}");
    // Nobody else is disturbed, and nothing was written.
    let local = private(&friend, 4096);
    let segment = friend.open_segment(target.name()).unwrap();
    let asked = [request(Opcode::Read, (&local, 0), &segment, 0, 4096)];
    assert_eq!(friend.submit_and_wait(&asked, LONG).unwrap(), 4096);
    assert!(contents(&local, 0, 4096) == [0; 4096]);
}

#[test]
fn strangers_at_the_port_for_data_get_nothing_and_keep_nobody_out() {
    let config = TcpConfig { max_connections: 4, ..TcpConfig::default() };
    let (target, friend) = (guarded(ours(), config), guarded(ours(), TcpConfig::default()));
    let remote = shared(&target, 4096);
    let port = descriptor(&target).tcp_token_port.unwrap();
    let place = SocketAddr::new(target.listening_at().ip(), port);
    let old = |opcode: u8| {
        let mut bytes = [4096_u64.to_le_bytes(), remote.address().to_le_bytes()].concat();
        bytes.push(opcode);
        bytes.extend([0xaa; 4096]);
        bytes
    };
    // READ and WRITE of both versions of the original, a hello of ours, an answer to nothing.
    let hello = [&b"MILLSTR\xff\x01\0\0\0\0\0\0\0\x7f"[..], &[0; 31]].concat();
    let mut waiting = Vec::new();
    for words in [old(0), old(1), old(0x80), old(0x81), hello, b"GET / HTTP/1.1\r\n\r\n".to_vec()] {
        let mut stream = TcpStream::connect(place).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        // It may be closed before all of it was sent.
        let _ = stream.write_all(&words);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut said = Vec::new();
        if let Err(error) = stream.read_to_end(&mut said) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "it hangs");
        }
        assert!(said.len() < 16, "{said:?}");
        waiting.push(TcpStream::connect(place).unwrap());
    }
    assert!(contents(&remote, 0, 4096) == [0; 4096]);
    let local = private(&friend, 4096);
    let segment = friend.open_segment(target.name()).unwrap();
    local.write(0, &[7; 4096]).unwrap();
    let asked = [request(Opcode::Write, (&local, 0), &segment, 0, 4096)];
    assert_eq!(friend.submit_and_wait(&asked, LONG).unwrap(), 4096);
    assert!(contents(&remote, 0, 4096) == [7; 4096]);
}
