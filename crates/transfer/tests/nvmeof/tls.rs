//! Files of engines that have certificates.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use millstream_metadata::{
    Client, ClientConfig, FileTargetDesc, Frame, FrameType, Gate, PeerTls, Purpose, SegmentDesc,
    Server, ServerConfig, Token,
};
use millstream_transfer::{Config, NvmeofConfig, Opcode, TransferEngine};

use crate::authority::Authority;
use crate::common::{LONG, address, contents, pattern, private};
use crate::fixture::{Folder, Says, done, durable, engine, request, says, writable};

/// A busy machine has time for a handshake.
fn patient() -> NvmeofConfig {
    NvmeofConfig { connect_timeout: LONG, ..NvmeofConfig::default() }
}

fn guarded(
    host: IpAddr,
    tls: PeerTls,
    token: Option<Token>,
    files: NvmeofConfig,
) -> TransferEngine {
    let mut config = Config::new(host);
    (config.client.tls, config.client.token) = (Some(tls), token);
    let engine = TransferEngine::new(config).unwrap();
    engine.install_nvmeof(files).unwrap();
    engine
}

/// One whose certificate is as it should be.
fn member(authority: &Authority) -> TransferEngine {
    let host = address();
    guarded(host, authority.good(host), None, patient())
}

/// What an engine says of its file `f`, to who shows this.
fn descriptor(engine: &TransferEngine, tls: PeerTls) -> SegmentDesc {
    let client = Client::new(ClientConfig { tls: Some(tls), ..ClientConfig::default() });
    let query = Frame::new(FrameType::Metadata, br#"{"file":"f"}"#.to_vec());
    let reply = client.call(&engine.name().parse().unwrap(), &query).unwrap();
    SegmentDesc::from_json(&reply.body).unwrap()
}

/// A process at this host, which has TLS by this, that says the same of a file `f`; its address.
fn says_over_tls(host: IpAddr, tls: PeerTls, descriptor: SegmentDesc) -> (Server, SocketAddr) {
    let gate = Gate::with(None, Some(tls), Purpose::Handshake, "says");
    let listener = TcpListener::bind((host, 0)).unwrap();
    let says = Arc::new(Says(descriptor));
    let server = Server::guarded(listener, ServerConfig::default(), gate, says).unwrap();
    let at = server.address();
    (server, at)
}

/// Reads a byte of a file.
fn read(engine: &TransferEngine, name: &str) -> Result<u64, String> {
    let local = private(engine, 1);
    let segment = engine.open_segment(name).map_err(|error| error.to_string())?;
    let asked = [request(Opcode::Read, (&local, 0), &segment, 0, 1)];
    engine.submit_and_wait(&asked, LONG).map_err(|error| error.to_string())
}

#[test]
fn files_are_written_and_read_over_tls_also_with_a_token() {
    const LENGTH: usize = (9 << 20) + 17;
    let authority = Authority::new("one");
    for token in [None, Some(Token::new(b"the token of this cluster").unwrap())] {
        let folder = Folder::new();
        let path = folder.file("f", &vec![0; LENGTH]);
        let [target, initiator] = [(); 2].map(|()| {
            let host = address();
            guarded(host, authority.good(host), token, patient())
        });
        let name = target.register_file(&path, writable()).unwrap();
        let segment = initiator.open_segment(&name).unwrap();
        let (here, back) = (private(&initiator, LENGTH), private(&initiator, LENGTH));
        for (seed, length) in [1, 4096, 70_000, LENGTH].into_iter().enumerate() {
            let (bytes, length) = (pattern(length, seed as u64), length as u64);
            here.write(0, &bytes).unwrap();
            let write = [request(Opcode::Write, (&here, 0), &segment, 0, length)];
            done(&initiator, &write, &durable(seed == 1));
            assert!(fs::read(&path).unwrap()[..bytes.len()] == bytes, "{length}");
            let read = [request(Opcode::Read, (&back, 0), &segment, 0, length)];
            assert_eq!(initiator.submit_and_wait(&read, LONG).unwrap(), length);
            assert!(contents(&back, 0, bytes.len()) == bytes, "{length}");
        }
        // Many at a time, of which each other one goes the other way.
        let (before, part) = (fs::read(&path).unwrap(), 70_001);
        let bytes = pattern(LENGTH, 9);
        here.write(0, &bytes).unwrap();
        let parts: Vec<_> = (0..LENGTH as u64 / part)
            .map(|index| match index % 2 {
                0 => request(Opcode::Write, (&here, index * part), &segment, index * part, part),
                _ => request(Opcode::Read, (&back, index * part), &segment, index * part, part),
            })
            .collect();
        initiator.submit_and_wait(&parts, LONG).unwrap();
        let after = fs::read(&path).unwrap();
        for index in 0..parts.len() {
            let at = index * part as usize..(index + 1) * part as usize;
            if index % 2 == 0 {
                assert!(after[at.clone()] == bytes[at], "{index}");
            } else {
                assert!(contents(&back, at.start, at.len()) == before[at], "{index}");
            }
        }
    }
}

#[test]
fn who_has_no_certificate_is_told_and_who_asks_such_a_one_too() {
    let authority = Authority::new("one");
    let folder = Folder::new();
    let path = folder.file("f", &[7; 5000]);
    let (target, friend, plain) =
        (member(&authority), member(&authority), engine(NvmeofConfig::default()));
    let name = target.register_file(&path, writable()).unwrap();
    assert_eq!(read(&friend, &name), Ok(1));
    let wanted = "only who prove by a certificate who they are, and none is set here";
    // At the port of handshakes, by the descriptor, and by the port for files.
    let error = read(&plain, &name).unwrap_err();
    assert!(error.contains(wanted), "{error}");
    let host = target.listening_at().ip();
    let shown = descriptor(&target, authority.good(host));
    let place = shown.file_target.clone().unwrap();
    assert!(place.tls && !place.token);
    let (_server, copied) = says(shown.clone());
    let error = read(&plain, &copied).unwrap_err();
    assert!(error.contains(wanted), "{error}");
    let lies = FileTargetDesc { tls: false, ..place.clone() };
    let open = SegmentDesc { file_target: Some(lies), ..shown.clone() };
    let (_server, at) = {
        let listening = SocketAddr::new(host, 0);
        let says = Arc::new(Says(open.clone()));
        let server = Server::start(listening, ServerConfig::default(), says).unwrap();
        let at = server.address();
        (server, at)
    };
    let error = read(&plain, &format!("nvmeof/{at}/f")).unwrap_err();
    assert!(error.contains(wanted), "{error}");
    // Who has one has no conversation without.
    let (_server, at) = says_over_tls(host, authority.good(host), open);
    let error = read(&friend, &format!("nvmeof/{at}/f")).unwrap_err();
    assert!(error.contains("does I/O without TLS, and a certificate is set here"), "{error}");
    plain.register_file(&path, writable()).unwrap();
    let own = crate::fixture::descriptor(&plain, "f").file_target.unwrap();
    let wrong = SegmentDesc { file_target: Some(FileTargetDesc { tls: true, ..own }), ..shown };
    let host = plain.listening_at().ip();
    let (_server, at) = says_over_tls(host, authority.good(host), wrong);
    let error = read(&friend, &format!("nvmeof/{at}/f")).unwrap_err();
    assert!(error.contains("it does not speak TLS"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), [7; 5000]);
}

#[test]
fn why_a_certificate_is_of_no_use_at_the_port_for_files_is_told_at_the_caller() {
    let (ours, other) = (Authority::new("one"), Authority::new("another"));
    let folder = Folder::new();
    let path = folder.file("f", &[7; 5000]);
    let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let target = guarded(host, ours.good(host), None, patient());
    target.register_file(&path, writable()).unwrap();
    let shown = descriptor(&target, ours.good(host));
    // It is called by a name that its certificate has not.
    let named = ours.identity("localhost", 4000, &ours.certificates());
    let (_server, at) = says_over_tls(host, named, shown.clone());
    let error = read(&member(&ours), &format!("nvmeof/localhost:{}/f", at.port())).unwrap_err();
    let text = "it was called localhost, and its certificate is for 127.0.0.1";
    assert!(error.contains(text), "{error}");
    assert!(error.contains("localhost:"), "{error}");
    // Somebody of another cluster, who trusts ours, and hears of the port where he is trusted.
    let trusting = || ours.identity(&host.to_string(), 4000, &other.certificates());
    let (_server, at) = says_over_tls(host, trusting(), shown.clone());
    let at_stranger = address();
    let foreign = other.identity(&at_stranger.to_string(), 4000, &ours.certificates());
    let stranger = guarded(at_stranger, foreign, None, patient());
    let error = read(&stranger, &format!("nvmeof/{at}/f")).unwrap_err();
    assert!(error.contains("no authority that it trusts vouches for our certificate"), "{error}");
    // And the other way round: who answers is of another cluster, or his certificate has expired.
    for (tls, reason) in [
        (
            other.identity(&host.to_string(), 4000, &ours.certificates()),
            "no authority in security.ca_file vouches for its certificate",
        ),
        (
            ours.identity(&host.to_string(), 2001, &ours.certificates()),
            "its certificate has expired",
        ),
    ] {
        let (_server, there) = says_over_tls(host, tls, shown.clone());
        let place = shown.file_target.clone().unwrap();
        let place = FileTargetDesc { port: there.port(), ..place };
        let elsewhere = SegmentDesc { file_target: Some(place), ..shown.clone() };
        let (_server, at) = says_over_tls(host, ours.good(host), elsewhere);
        let error = read(&member(&ours), &format!("nvmeof/{at}/f")).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
    assert_eq!(fs::read(&path).unwrap(), [7; 5000]);
}

#[test]
fn strangers_at_the_port_for_files_get_nothing_and_keep_nobody_out() {
    let authority = Authority::new("one");
    let folder = Folder::new();
    let path = folder.file("f", &[7; 5000]);
    let host = address();
    let config = NvmeofConfig { max_connections: 4, ..patient() };
    let target = guarded(host, authority.good(host), None, config);
    let name = target.register_file(&path, writable()).unwrap();
    let place = descriptor(&target, authority.good(host)).file_target.unwrap();
    // A record of a handshake of 16 KiB that is none, half of one, and a beginning of our own protocol.
    let garbage = [&[0x16, 3, 1, 0x40, 0][..], &[9; 16 << 10]].concat();
    let half = vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc];
    let mut waiting = Vec::new();
    for words in [garbage, half, vec![0x16], b"MSFILES\n\x01\0\0\0".to_vec(), Vec::new()] {
        let mut stream = TcpStream::connect((host, place.port)).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let _ = stream.write_all(&words);
        waiting.push(stream);
    }
    // All places are taken by those who say nothing more.
    assert_eq!(read(&member(&authority), &name), Ok(1));
    for mut stream in waiting {
        match stream.read_to_end(&mut Vec::new()) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
    }
    assert_eq!(fs::read(&path).unwrap(), [7; 5000]);
}
