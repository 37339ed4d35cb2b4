//! A metadata server over TLS: real processes, certificates made for the test.
#![cfg(feature = "tls")]

mod common;

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::process::Command;

use common::{Folder, Output, Running, address, bytes, millstream};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// The files of an authority, and of a certificate of this name and its key.
fn files(folder: &Folder, authority: &Authority, name: &str) -> (String, String, String) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let certificate = params.signed_by(&key, authority).unwrap();
    let write = |kind: &str, text: String| {
        let path = folder.file(&format!("{name}-{kind}.pem"));
        fs::write(&path, text).unwrap();
        path
    };
    (
        write("ca", authority.pem()),
        write("certificate", certificate.pem()),
        write("key", key.serialize_pem()),
    )
}

/// The end of a `get` from a segment that is found at this server.
fn get(uri: &str, copy: &str, environment: &[(&str, &str)]) -> Output {
    let mut command = millstream();
    command.args(["get", "--metadata", uri, "--segment", "n", "--length=1000", copy]);
    Running::start("get", with(&mut command, environment)).output()
}

fn with<'a>(command: &'a mut Command, environment: &[(&str, &str)]) -> &'a mut Command {
    command.envs(environment.iter().copied())
}

#[test]
fn nodes_are_found_over_tls_by_those_who_have_a_certificate() {
    let folder = Folder::new();
    let host = address();
    let (ca, certificate, key) = files(&folder, &authority("servers"), &host);
    let (client_ca, client, client_key) = files(&folder, &authority("clients"), "a-client");
    let mut command = millstream();
    command.args(["metadata-server", "--listen", &format!("{host}:0"), "--tls-cert", &certificate]);
    command.args(["--tls-key", &key, "--tls-client-ca", &client_ca]);
    let mut server = Running::start("server", &mut command);
    let ready = server.ready();
    let (uri, listen) = (ready["metadata"].as_str().unwrap(), ready["listen"].as_str().unwrap());
    assert_eq!(uri, format!("https://{listen}/metadata"));
    // Handshakes that never end, more of them than it has places for.
    let half_open: Vec<_> = (0..600)
        .map(|_| {
            let mut stream = TcpStream::connect(listen).unwrap();
            // The beginning of a ClientHello.
            let _ = stream.write_all(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03");
            stream
        })
        .collect();
    let (file, copy) = (folder.file("a"), folder.file("b"));
    fs::write(&file, bytes(1000, 1)).unwrap();
    let known = [
        ("MILLSTREAM_METADATA_CA_FILE", ca.as_str()),
        ("MILLSTREAM_METADATA_CERTIFICATE_FILE", client.as_str()),
        ("MILLSTREAM_METADATA_KEY_FILE", client_key.as_str()),
    ];
    let mut command = millstream();
    command.args(["node", "--name", "n", "--metadata", uri, "--protocol", "rdma:soft"]);
    command.args(["--bind", &address(), "--buffer", "1MiB", "--file", &file]);
    let mut node = Running::start("node", with(&mut command, &known));
    node.ready();
    get(uri, &copy, &known).success();
    assert_eq!(fs::read(&copy).unwrap(), bytes(1000, 1));
    drop(half_open);
    for (environment, reason) in [
        (&known[..1], "it asks for a certificate of ours"),
        (&[("MILLSTREAM_METADATA_CA_FILE", &*client_ca)], "no authority that is trusted here"),
    ] {
        let output = get(uri, &copy, environment);
        let error = output.failure(1);
        assert!(error.contains(uri) && error.contains(reason), "{error}");
    }
    // Without TLS it says nothing that is understood.
    let output = get(&uri.replace("https", "http"), &copy, &known);
    assert!(output.failure(1).contains("http://"), "{}", output.stderr);
    let output = get(uri, &copy, &[("MILLSTREAM_METADATA_CA_FILE", "/nonexistent/ca.pem")]);
    assert!(output.failure(2).contains("cannot read /nonexistent/ca.pem"), "{}", output.stderr);
}

#[test]
fn a_server_without_usable_files_does_not_start() {
    let folder = Folder::new();
    let (ca, certificate, _) = files(&folder, &authority("servers"), "a");
    let (_, _, other_key) = files(&folder, &authority("servers"), "b");
    let start = |key: &str| {
        let arguments = ["metadata-server", "--listen", "127.0.0.1:0", "--tls-cert", &certificate];
        common::run(&[&arguments[..], &["--tls-key", key]].concat())
    };
    assert!(start(&ca).failure(1).contains("TLS: private key"));
    assert!(start(&other_key).failure(1).contains("TLS: "));
    common::run(&["metadata-server", "--tls-cert", &certificate]).failure(2);
}
