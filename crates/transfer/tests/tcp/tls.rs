//! Engines with certificates: among each other, towards others, and with strangers at their ports.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};

use millstream_metadata::{
    Client, ClientConfig, Frame, FrameType, Gate, PeerTls, Purpose, SegmentDesc, Token,
};
use millstream_transfer::{Config, Opcode, TcpConfig, TransferEngine};

use super::authority::Authority;
use super::fixture::{engine, failure, said};
use crate::common::{LONG, address, contents, pattern, private, request, shared};

fn guarded(host: IpAddr, tls: PeerTls, token: Option<Token>, tcp: TcpConfig) -> TransferEngine {
    let mut config = Config::new(host);
    (config.client.tls, config.client.token) = (Some(tls), token);
    let engine = TransferEngine::new(config).unwrap();
    engine.install_tcp(tcp).unwrap();
    engine
}

/// One whose certificate is as it should be.
fn member(authority: &Authority) -> TransferEngine {
    let host = address();
    guarded(host, authority.good(host), None, TcpConfig::default())
}

fn open(engine: &TransferEngine, other: &TransferEngine) -> String {
    engine.open_segment(other.name()).map(drop).unwrap_err().to_string()
}

fn moves_bytes(initiator: &TransferEngine, target: &TransferEngine) {
    const LENGTH: usize = (9 << 20) + 17;
    let (remote, local) = (shared(target, LENGTH), private(initiator, LENGTH));
    let segment = initiator.open_segment(target.name()).unwrap();
    for (seed, length) in [1, 100, 70_000, LENGTH].into_iter().enumerate() {
        let bytes = pattern(length, seed as u64);
        local.write(0, &bytes).unwrap();
        let write = [request(Opcode::Write, (&local, 0), &segment, 0, length as u64)];
        assert_eq!(initiator.submit_and_wait(&write, LONG).unwrap(), length as u64);
        assert!(contents(&remote, 0, length) == bytes);
        let other = pattern(length, 100 + seed as u64);
        remote.write(0, &other).unwrap();
        let read = [request(Opcode::Read, (&local, 0), &segment, 0, length as u64)];
        assert_eq!(initiator.submit_and_wait(&read, LONG).unwrap(), length as u64);
        assert!(contents(&local, 0, length) == other);
    }
    assert!(initiator.probe(target.name()).is_ok());
}

#[test]
fn engines_with_certificates_move_bytes_also_with_a_token() {
    let authority = Authority::new("one");
    let token = || Some(Token::new(b"the token of this cluster").unwrap());
    for token in [None, token()] {
        let [target, initiator] = [(); 2].map(|()| {
            let host = address();
            guarded(host, authority.good(host), token, TcpConfig::default())
        });
        moves_bytes(&initiator, &target);
    }
    // The checksum of a layer that has its own is left out.
    let host = address();
    let checked = TcpConfig { checksums: true, ..TcpConfig::default() };
    moves_bytes(&guarded(host, authority.good(host), None, checked), &member(&authority));
}

#[test]
fn another_token_is_told_over_tls() {
    let authority = Authority::new("one");
    let [target, initiator] =
        ["the token of this cluster", "the token of another one"].map(|text| {
            let (host, token) = (address(), Token::new(text.as_bytes()).unwrap());
            guarded(host, authority.good(host), Some(token), TcpConfig::default())
        });
    let error = open(&initiator, &target);
    assert!(error.contains("its token is another than ours"), "{error}");
}

#[test]
fn a_certificate_of_another_name_is_told_with_both_names() {
    let authority = Authority::new("one");
    let tls = authority.identity("127.250.0.9", 4000, &authority.certificates());
    let target = guarded(address(), tls, None, TcpConfig::default());
    let error = open(&member(&authority), &target);
    let host = target.listening_at().ip();
    let text = format!("it was called {host}, and its certificate is for 127.250.0.9");
    assert!(error.contains(&text), "{error}");
    assert!(error.contains(target.name()), "{error}");
}

#[test]
fn whose_certificate_is_of_no_use_is_told_at_the_caller() {
    let (ours, other) = (Authority::new("one"), Authority::new("another"));
    let friend = member(&ours);
    let expired = |host: IpAddr| ours.identity(&host.to_string(), 2001, &ours.certificates());
    let foreign = |host: IpAddr| other.identity(&host.to_string(), 4000, &ours.certificates());
    type Identity<'a> = &'a dyn Fn(IpAddr) -> PeerTls;
    let cases: [(Identity<'_>, &str, &str); 2] = [
        (&expired, "its certificate has expired", "our certificate has expired"),
        (
            &foreign,
            "no authority in security.ca_file vouches",
            "no authority that it trusts vouches",
        ),
    ];
    for (identity, at_target, at_caller) in cases {
        let host = address();
        let stranger = guarded(host, identity(host), None, TcpConfig::default());
        let error = open(&friend, &stranger);
        assert!(error.contains(at_target), "{error}");
        let error = open(&stranger, &friend);
        assert!(error.contains(at_caller), "{error}");
    }
}

#[test]
fn who_has_no_certificate_is_told_and_who_asks_such_a_one_too() {
    let authority = Authority::new("one");
    let (member, plain) = (member(&authority), engine(TcpConfig::default()));
    let error = open(&plain, &member);
    assert!(error.contains("only who prove by a certificate who they are"), "{error}");
    let error = open(&member, &plain);
    assert!(error.contains("it does not speak TLS"), "{error}");
}

#[test]
fn what_the_original_has_no_tls_for_is_refused() {
    let authority = Authority::new("one");
    let host = address();
    let mut config = Config::new(host);
    config.client.tls = Some(authority.good(host));
    let engine = TransferEngine::new(config).unwrap();
    let one = TcpConfig { version_one: true, ..TcpConfig::default() };
    let error = engine.install_tcp(one).unwrap_err().to_string();
    assert!(error.contains("the original has no TLS"), "{error}");
}

/// What somebody asks for who has TLS by this, if by anything.
fn gate(tls: Option<PeerTls>) -> Option<Gate> {
    Gate::with(None, tls, Purpose::Handshake, "says")
}

/// What a member says of itself.
fn descriptor(engine: &TransferEngine, tls: PeerTls) -> SegmentDesc {
    let client = Client::new(ClientConfig { tls: Some(tls), ..ClientConfig::default() });
    let frame = Frame::new(FrameType::Metadata, b"{}".to_vec());
    let reply = client.call(&engine.name().parse().unwrap(), &frame).unwrap();
    SegmentDesc::from_json(&reply.body).unwrap()
}

/// Who has the descriptor from somewhere else has the port for data, and no more.
#[test]
fn the_port_for_data_asks_for_a_certificate_too() {
    let (ours, other) = (Authority::new("one"), Authority::new("another"));
    let (target, friend) = (member(&ours), member(&ours));
    let host = target.listening_at().ip();
    let remote = shared(&target, 4096);
    let shown = descriptor(&target, ours.good(host));
    assert_eq!((shown.tcp_data_port, shown.tcp_token_port), (None, None));
    let port = shown.tcp_tls_port.unwrap();
    let plain = engine(TcpConfig::default());
    let (_server, segment) = said((&plain, &target), gate(None), shown.clone());
    let error = failure(&plain, &segment);
    assert!(error.contains("only who prove by a certificate who they are"), "{error}");
    // Who tries it nevertheless.
    let open = SegmentDesc { tcp_data_port: Some(port), tcp_tls_port: None, ..shown.clone() };
    let (_server, segment) = said((&plain, &target), gate(None), open.clone());
    let error = failure(&plain, &segment);
    assert!(error.contains("only who prove by a certificate who they are"), "{error}");
    // Somebody of another cluster, who trusts ours.
    let at = address();
    let foreign = other.identity(&at.to_string(), 4000, &ours.certificates());
    let stranger = guarded(at, foreign, None, TcpConfig::default());
    // Where he is told of the port his authority is trusted.
    let trusting = ours.identity(&host.to_string(), 4000, &other.certificates());
    let (_server, segment) = said((&stranger, &target), gate(Some(trusting)), shown.clone());
    let error = failure(&stranger, &segment);
    assert!(error.contains("no authority that it trusts vouches for our certificate"), "{error}");
    // Whose memory is for everybody is none of ours, and a port without TLS is not talked to.
    let (_server, segment) = said((&friend, &target), gate(Some(ours.good(host))), open);
    let error = failure(&friend, &segment);
    assert!(error.contains("has no TLS, and a certificate is set here"), "{error}");
    let elsewhere = super::fixture::descriptor(&plain).tcp_data_port;
    let wrong = SegmentDesc { tcp_tls_port: elsewhere, tcp_data_host: None, ..shown };
    let near = guarded(
        plain.listening_at().ip(),
        ours.good(plain.listening_at().ip()),
        None,
        TcpConfig::default(),
    );
    let (_server, segment) =
        said((&friend, &near), gate(Some(ours.good(near.listening_at().ip()))), wrong);
    let error = failure(&friend, &segment);
    assert!(error.contains("it does not speak TLS"), "{error}");
    assert!(contents(&remote, 0, 4096) == [0; 4096]);
}

#[test]
fn strangers_at_the_port_for_data_get_nothing_and_keep_nobody_out() {
    let authority = Authority::new("one");
    let host = address();
    let config = TcpConfig { max_connections: 4, ..TcpConfig::default() };
    let target = guarded(host, authority.good(host), None, config);
    let port = descriptor(&target, authority.good(host)).tcp_tls_port.unwrap();
    let place = SocketAddr::new(host, port);
    // A record of a handshake of 16 KiB that is none, half of one, and the longest message of a handshake.
    let garbage = [&[0x16, 3, 1, 0x40, 0][..], &[9; 16 << 10]].concat();
    let half = vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc];
    let long = [&[0x16, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff][..], &[0; (16 << 10) - 4]].concat();
    let mut waiting = Vec::new();
    for words in [garbage, half, long, vec![0x16], b"GET / HTTP/1.1\r\n\r\n".to_vec(), Vec::new()] {
        let mut stream = TcpStream::connect(place).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let _ = stream.write_all(&words);
        waiting.push(stream);
    }
    // All places are taken by those who say nothing more.
    moves_bytes(&member(&authority), &target);
    for mut stream in waiting {
        match stream.read_to_end(&mut Vec::new()) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
    }
}
