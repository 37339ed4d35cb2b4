//! Files of engines that have a token.

use std::io::{Read, Write};
use std::net::TcpStream;

use millstream_metadata::{Client, ClientConfig, Frame, FrameType, SegmentDesc, Token};
use millstream_transfer::{Config, FileOptions, NvmeofConfig, Opcode, TransferEngine};

use crate::common::{LONG, address, contents, private};
use crate::fixture::{Folder, engine, request, says};

fn ours() -> Option<Token> {
    Some(Token::new(b"the token of this cluster").unwrap())
}

fn guarded() -> TransferEngine {
    let mut config = Config::new(address());
    config.client.token = ours();
    let engine = TransferEngine::new(config).unwrap();
    engine.install_nvmeof(NvmeofConfig::default()).unwrap();
    engine
}

#[test]
fn files_are_for_those_who_have_the_token() {
    let folder = Folder::new();
    let path = folder.file("f", &[7; 5000]);
    let (target, friend) = (guarded(), guarded());
    let name = target.register_file(&path, FileOptions::default()).unwrap();
    let read = |engine: &TransferEngine, name: &str| {
        let local = private(engine, 5000);
        let segment = engine.open_segment(name).map_err(|error| error.to_string())?;
        let asked = [request(Opcode::Read, (&local, 0), &segment, 0, 5000)];
        let done = engine.submit_and_wait(&asked, LONG).map_err(|error| error.to_string());
        done.map(|_| contents(&local, 0, 5000))
    };
    assert_eq!(read(&friend, &name), Ok(vec![7; 5000]));
    let stranger = engine(NvmeofConfig::default());
    let error = read(&stranger, &name).unwrap_err();
    assert!(error.contains("only who have its token, and none is set here"), "{error}");
    // He may have the descriptor, and with it the key, from somewhere else.
    let client = Client::new(ClientConfig { token: ours(), ..ClientConfig::default() });
    let query = Frame::new(FrameType::Metadata, br#"{"file":"f"}"#.to_vec());
    let reply = client.call(&target.name().parse().unwrap(), &query).unwrap();
    let descriptor = SegmentDesc::from_json(&reply.body).unwrap();
    let place = descriptor.file_target.clone().unwrap();
    assert!(place.token);
    let (_server, copied) = says(descriptor);
    let error = read(&stranger, &copied).unwrap_err();
    assert!(error.contains("only who have its token, and none is set here"), "{error}");
    let mut stream = TcpStream::connect((place.host.as_str(), place.port)).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(&[0; 64]).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut said = Vec::new();
    stream.read_to_end(&mut said).unwrap();
    assert_eq!(said, b"\x03\0\0\0\0\0\0\0TV\x05");
}
