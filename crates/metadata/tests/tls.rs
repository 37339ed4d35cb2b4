//! `https://`: who is trusted, who is not, and why.
#![cfg(feature = "tls")]

#[path = "common/certificates.rs"]
mod certificates;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use millstream_metadata::{
    Etcd, HttpKeyValue, KeyValue, KeyValueConfig, KeyValueError, Redis, RedisLogin, TlsFiles,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};

use certificates::{Authority, Folder, authority, certificate};

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Answers one connection with a value, if TLS comes about.
fn server(
    identity: &(String, String),
    clients: Option<&Authority>,
) -> (SocketAddr, JoinHandle<()>) {
    let builder = ServerConfig::builder_with_provider(provider());
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            roots.add(authority.der().clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider());
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
    };
    let chain = CertificateDer::from_pem_slice(identity.0.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(identity.1.as_bytes()).unwrap();
    let config = Arc::new(builder.with_single_cert(vec![chain], key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut stream = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read(&mut byte) {
                Ok(1) => head.extend_from_slice(&byte),
                _ => return,
            }
        }
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nvalue");
        stream.conn.send_close_notify();
        let _ = stream.flush();
    });
    (address, thread)
}

fn get(address: SocketAddr, files: &TlsFiles) -> Result<Option<Vec<u8>>, KeyValueError> {
    HttpKeyValue::with_files(&format!("https://{address}"), files).unwrap().get("k")
}

fn trusting(authorities: &Path) -> TlsFiles {
    TlsFiles { authorities: Some(authorities.to_owned()), ..TlsFiles::default() }
}

#[test]
fn a_server_is_who_an_authority_says_or_the_error_says_why_not() {
    let folder = Folder::new("tls-server");
    let (ours, other) = (authority("one"), authority("another"));
    let trusted = trusting(&folder.write("ca.pem", &ours.pem()));
    let (address, thread) = server(&certificate(&ours, "127.0.0.1", 4000), None);
    assert_eq!(get(address, &trusted).unwrap(), Some(b"value".to_vec()));
    thread.join().unwrap();
    for (identity, reason) in [
        (certificate(&other, "127.0.0.1", 4000), "no authority that is trusted here vouches"),
        (certificate(&ours, "127.0.0.2", 4000), "its certificate is of another name"),
        (certificate(&ours, "127.0.0.1", 2001), "its certificate has expired"),
    ] {
        let (address, thread) = server(&identity, None);
        let error = get(address, &trusted).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
        assert!(error.to_string().starts_with(&format!("metadata server https://{address}/")));
        assert!(!error.is_transient(), "{error}");
        thread.join().unwrap();
    }
}

#[test]
fn a_server_can_ask_for_a_certificate_of_the_client() {
    let folder = Folder::new("tls-client");
    let (servers, clients) = (authority("one"), authority("another"));
    let stranger = trusting(&folder.write("ca.pem", &servers.pem()));
    let identity = certificate(&servers, "127.0.0.1", 4000);
    let (address, thread) = server(&identity, Some(&clients));
    let error = get(address, &stranger).unwrap_err();
    assert!(error.to_string().contains("it asks for a certificate of ours"), "{error}");
    thread.join().unwrap();
    let (chain, key) = certificate(&clients, "a client", 4000);
    let known = TlsFiles {
        certificate: Some(folder.write("client.pem", &chain)),
        key: Some(folder.write("client.key", &key)),
        ..stranger
    };
    let (address, thread) = server(&identity, Some(&clients));
    assert_eq!(get(address, &known).unwrap(), Some(b"value".to_vec()));
    thread.join().unwrap();
}

#[test]
fn what_is_no_tls_is_told() {
    let folder = Folder::new("tls-none");
    let trusted = trusting(&folder.write("ca.pem", &authority("one").pem()));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 1024]).unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    });
    let error = get(address, &trusted).unwrap_err();
    assert!(error.to_string().contains("it does not speak TLS"), "{error}");
    thread.join().unwrap();
}

#[test]
fn files_that_are_not_there_or_hold_nothing_are_named() {
    let folder = Folder::new("tls-files");
    let ca = folder.write("ca.pem", &authority("one").pem());
    let empty = folder.write("empty.pem", "");
    let missing = ca.with_file_name("missing.pem");
    let fault = |files: &TlsFiles| HttpKeyValue::with_files("https://a:1", files).unwrap_err();
    let text = fault(&trusting(&missing));
    assert!(text.starts_with(&format!("cannot read {}", missing.display())), "{text}");
    let text = fault(&trusting(&empty));
    assert_eq!(text, format!("{}: there is no certificate in it", empty.display()));
    let half = TlsFiles { certificate: Some(ca.clone()), ..trusting(&ca) };
    assert_eq!(fault(&half), "a certificate and its private key go together");
    let swapped = TlsFiles { key: Some(ca.clone()), ..half };
    assert_eq!(fault(&swapped), format!("{}: there is no private key in it", ca.display()));
}

/// As when a certificate was renewed and its key was not.
#[test]
fn a_key_of_another_certificate_is_told() {
    let folder = Folder::new("tls-pair");
    let issuer = authority("one");
    let [one, other] = ["a", "b"].map(|name| certificate(&issuer, name, 4000));
    let files = TlsFiles {
        authorities: Some(folder.write("ca.pem", &issuer.pem())),
        certificate: Some(folder.write("one.pem", &one.0)),
        key: Some(folder.write("other.key", &other.1)),
    };
    let expected = "the private key is not that of the certificate";
    assert_eq!(HttpKeyValue::with_files("https://a:1", &files).unwrap_err(), expected);
    let etcd = Etcd::with_files("etcds://a:1", KeyValueConfig::default(), &files).unwrap_err();
    let login = RedisLogin::default();
    let redis = Redis::with("rediss://a:1", KeyValueConfig::default(), &login, &files);
    for error in [etcd, redis.unwrap_err()] {
        assert!(error.to_string().ends_with(expected), "{error}");
    }
}
