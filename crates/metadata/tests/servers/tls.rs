//! Etcd, Redis and memcached over TLS: who is trusted, who is not, and why.

use std::path::{Path, PathBuf};
use std::time::Duration;

use millstream_metadata::{
    Etcd, HttpKeyValue, KeyValue, KeyValueConfig, KeyValueErrorKind, Memcached, Redis, RedisLogin,
    Secret, TlsFiles,
};

use crate::certificates::{Authority, Folder, authority, certificate};
use crate::daemon::{Daemon, port};
use crate::{contract, etcd, fake, memcached, patient, redis};

/// A certificate and its key, in files.
struct Identity {
    certificate: PathBuf,
    key: PathBuf,
}

impl Identity {
    fn new(folder: &Folder, authority: &Authority, name: &str, last_year: i32) -> Self {
        let (chain, key) = certificate(authority, name, last_year);
        let file = format!("{name}-{last_year}");
        Self {
            certificate: folder.write(&format!("{file}.pem"), &chain),
            key: folder.write(&format!("{file}.key"), &key),
        }
    }
}

/// Who vouches for servers and clients, and where their certificates are.
struct Place {
    folder: Folder,
    authority: Authority,
    authorities: PathBuf,
}

impl Place {
    fn new(name: &str) -> Self {
        let folder = Folder::new(name);
        let authority = authority("ours");
        let authorities = folder.write("ca.pem", &authority.pem());
        Self { folder, authority, authorities }
    }

    fn identity(&self, name: &str, last_year: i32) -> Identity {
        Identity::new(&self.folder, &self.authority, name, last_year)
    }

    /// What a client has that shows no certificate.
    fn trusting(&self) -> TlsFiles {
        TlsFiles { authorities: Some(self.authorities.clone()), ..TlsFiles::default() }
    }

    /// What a client has that shows this one.
    fn showing(&self, identity: &Identity) -> TlsFiles {
        TlsFiles {
            certificate: Some(identity.certificate.clone()),
            key: Some(identity.key.clone()),
            ..self.trusting()
        }
    }

    /// What a client has that trusts somebody else.
    fn other(&self) -> TlsFiles {
        let other = self.folder.write("other.pem", &authority("other").pem());
        TlsFiles { authorities: Some(other), ..TlsFiles::default() }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A server of Redis that speaks TLS and asks clients for certificates if that is `yes`.
fn start_redis(place: &Place, identity: &Identity, asks: &str) -> Option<(Daemon, u16)> {
    let port = port();
    let words = [
        ("--tls-port", port.to_string()),
        ("--port", "0".to_owned()),
        ("--tls-cert-file", text(&identity.certificate).to_owned()),
        ("--tls-key-file", text(&identity.key).to_owned()),
        ("--tls-ca-cert-file", text(&place.authorities).to_owned()),
        ("--tls-auth-clients", asks.to_owned()),
        ("--bind", "127.0.0.1".to_owned()),
        ("--save", String::new()),
        ("--requirepass", "secret".to_owned()),
    ];
    let words = words.into_iter().flat_map(|(word, value)| [word.to_owned(), value]).collect();
    Some((Daemon::start("redis-server", words)?, port))
}

fn start_etcd(place: &Place, identity: &Identity, asks: bool) -> Option<(Daemon, u16)> {
    let files = ["--cert-file", text(&identity.certificate), "--key-file", text(&identity.key)];
    let clients = ["--client-cert-auth", "--trusted-ca-file", text(&place.authorities)];
    etcd::start_tls(&[&files[..], if asks { &clients } else { &[] }].concat())
}

/// A memcached that speaks TLS, and asks clients for certificates if that is so.
fn start_memcached(place: &Place, identity: &Identity, asks: bool) -> Option<(Daemon, u16)> {
    let Identity { certificate, key } = identity;
    let mut options = format!("ssl_chain_cert={},ssl_key={}", text(certificate), text(key));
    if asks {
        options += &format!(",ssl_verify_mode=2,ssl_ca_cert={}", text(&place.authorities));
    }
    memcached::start(&["-Z", "-o", &options])
}

fn memcached_client(place: &str, files: &TlsFiles) -> Memcached {
    Memcached::with_files(&format!("memcacheds://{place}"), patient(), files).unwrap()
}

/// A client by the address of the certificate, or by another name of the server.
fn redis_client(place: &str, files: &TlsFiles) -> Redis {
    let login =
        RedisLogin { password: Some(Secret::new("secret".to_owned())), ..RedisLogin::default() };
    Redis::with(&format!("rediss://{place}"), patient(), &login, files).unwrap()
}

fn etcd_client(place: &str, files: &TlsFiles) -> Etcd {
    Etcd::with_files(&format!("etcds://{place}"), patient(), files).unwrap()
}

/// This client is told this, and that trying again is of no use.
fn refused(client: &dyn KeyValue, reason: &str) {
    let error = client.get("k").unwrap_err();
    let shown = error.to_string();
    assert!(shown.starts_with(&format!("metadata server {}, key", client.uri())), "{shown}");
    assert!(shown.contains(reason) && !shown.contains("secret"), "{shown}");
    assert!(matches!(error.kind, KeyValueErrorKind::Untrusted(_)), "{error:?}");
    assert!(!error.is_transient(), "{shown}");
}

const UNKNOWN: &str = "no authority that is trusted here vouches for its certificate";
const OTHER_NAME: &str = "its certificate is of another name";
const EXPIRED: &str = "its certificate has expired";
const ASKED: &str = "it asks for a certificate of ours";

#[test]
fn redis_over_tls_does_all_that_a_store_asks() {
    let place = Place::new("redis-tls");
    let Some((mut daemon, port)) = start_redis(&place, &place.identity("127.0.0.1", 4000), "no")
    else {
        return;
    };
    let client = redis_client(&format!("127.0.0.1:{port}"), &place.trusting());
    daemon.ready(&client);
    contract::operations(&client);
    contract::odd_keys(&client);
    contract::long_values(&client);
    contract::threads(&client);
    contract::killed_in_mid_run(&client, &mut daemon);
    daemon.ready(&client);
    refused(&redis_client(&format!("127.0.0.1:{port}"), &place.other()), UNKNOWN);
    refused(&redis_client(&format!("localhost:{port}"), &place.trusting()), OTHER_NAME);
    // Without TLS it is told that the server speaks it.
    let plain = Redis::new(&format!("redis://:secret@127.0.0.1:{port}"), patient()).unwrap();
    let error = plain.get("k").unwrap_err().to_string();
    assert!(error.contains("does it speak TLS (rediss://)"), "{error}");
}

#[test]
fn redis_with_client_certificates() {
    let place = Place::new("redis-client-certificates");
    let server = place.identity("127.0.0.1", 4000);
    let Some((mut daemon, port)) = start_redis(&place, &server, "yes") else { return };
    let at = format!("127.0.0.1:{port}");
    let client = redis_client(&at, &place.showing(&place.identity("a client", 4000)));
    daemon.ready(&client);
    contract::operations(&client);
    refused(&redis_client(&at, &place.trusting()), ASKED);
    // One of a stranger.
    let folder = Folder::new("redis-strangers");
    let stranger = Identity::new(&folder, &authority("strangers"), "a client", 4000);
    refused(
        &redis_client(&at, &place.showing(&stranger)),
        "no authority that it trusts vouches for our certificate",
    );
}

#[test]
fn redis_whose_certificate_has_expired() {
    let place = Place::new("redis-expired");
    let Some((_daemon, port)) = start_redis(&place, &place.identity("127.0.0.1", 2001), "no")
    else {
        return;
    };
    let client = redis_client(&format!("127.0.0.1:{port}"), &place.trusting());
    crate::until("it listens", || client.get("k").err().filter(|error| !error.is_transient()));
    refused(&client, EXPIRED);
}

#[test]
fn redis_without_tls_is_told() {
    let Some((mut daemon, port)) = redis::start(&[]) else { return };
    daemon.ready(&Redis::new(&format!("redis://127.0.0.1:{port}"), patient()).unwrap());
    let place = Place::new("redis-plain");
    let times = millstream_metadata::KeyValueConfig::default();
    let uri = format!("rediss://127.0.0.1:{port}");
    let client = Redis::with(&uri, times, &RedisLogin::default(), &place.trusting()).unwrap();
    let error = client.get("k").unwrap_err().to_string();
    assert!(error.starts_with(&format!("metadata server {uri}, key")), "{error}");
    assert!(error.contains("redis://") && error.contains("TLS"), "{error}");
}

#[test]
fn memcached_over_tls_does_all_that_a_store_asks() {
    let place = Place::new("memcached-tls");
    let server = place.identity("127.0.0.1", 4000);
    let Some((mut daemon, port)) = start_memcached(&place, &server, false) else { return };
    let at = format!("127.0.0.1:{port}");
    let client = memcached_client(&at, &place.trusting());
    daemon.ready(&client);
    contract::operations(&client);
    contract::odd_keys(&client);
    contract::long_values(&client);
    contract::threads(&client);
    contract::killed_in_mid_run(&client, &mut daemon);
    daemon.ready(&client);
    refused(&memcached_client(&at, &place.other()), UNKNOWN);
    refused(&memcached_client(&format!("localhost:{port}"), &place.trusting()), OTHER_NAME);
    // Without TLS it is told that the server speaks it.
    let plain = Memcached::new(&format!("memcached://{at}"), patient()).unwrap();
    let error = plain.get("k").unwrap_err().to_string();
    assert!(error.contains("does it speak TLS (memcacheds://)"), "{error}");
}

#[test]
fn memcached_with_client_certificates() {
    let place = Place::new("memcached-client-certificates");
    let server = place.identity("127.0.0.1", 4000);
    let Some((mut daemon, port)) = start_memcached(&place, &server, true) else { return };
    let at = format!("127.0.0.1:{port}");
    let client = memcached_client(&at, &place.showing(&place.identity("a client", 4000)));
    daemon.ready(&client);
    contract::operations(&client);
    // One that shows none hears of it, or finds the connection closed.
    let error = memcached_client(&at, &place.trusting()).get("k").unwrap_err().to_string();
    assert!(error.contains(ASKED) || error.contains("closed the connection"), "{error}");
}

/// Who accepts a connection is no machine that is down, and no firewall.
#[test]
fn a_handshake_that_stalls_is_told_as_one() {
    let place = Place::new("stalled");
    let silent = fake::silent();
    let at = format!("127.0.0.1:{}", silent.port());
    let short = KeyValueConfig {
        connect_timeout: Duration::from_millis(300),
        call_timeout: Duration::from_secs(1),
        ..patient()
    };
    let files = place.trusting();
    let etcd = Etcd::with_files(&format!("etcds://{at}"), short, &files).unwrap();
    let memcached = Memcached::with_files(&format!("memcacheds://{at}"), short, &files).unwrap();
    let http = HttpKeyValue::with_files(&format!("https://{at}/metadata"), &files).unwrap();
    let clients: [&dyn KeyValue; 3] = [&etcd, &memcached, &http];
    for client in clients {
        let error = client.get("k").unwrap_err();
        let shown = error.to_string();
        assert!(shown.contains("accepted the connection and said nothing of TLS"), "{shown}");
        assert!(error.is_transient() && !shown.contains("firewall"), "{shown}");
    }
}

#[test]
fn etcd_over_tls_does_all_that_a_store_asks() {
    let place = Place::new("etcd-tls");
    let Some((mut daemon, port)) = start_etcd(&place, &place.identity("127.0.0.1", 4000), false)
    else {
        return;
    };
    let client = etcd_client(&format!("127.0.0.1:{port}"), &place.trusting());
    daemon.ready(&client);
    contract::operations(&client);
    contract::odd_keys(&client);
    contract::long_values(&client);
    contract::threads(&client);
    // As etcd's own clients write it.
    let uri = format!("etcd://https://127.0.0.1:{port}");
    let same = Etcd::with_files(&uri, patient(), &place.trusting()).unwrap();
    assert_eq!(same.uri(), client.uri());
    contract::operations(&same);
    refused(&etcd_client(&format!("127.0.0.1:{port}"), &place.other()), UNKNOWN);
    refused(&etcd_client(&format!("localhost:{port}"), &place.trusting()), OTHER_NAME);
    let both = format!("localhost:{port},127.0.0.1:{port}");
    refused(&etcd_client(&both, &place.other()), UNKNOWN);
    // Without TLS it is told that the server speaks it.
    let plain = Etcd::new(&format!("etcd://127.0.0.1:{port}"), patient()).unwrap();
    let error = plain.get("k").unwrap_err().to_string();
    assert!(error.contains("does it speak TLS (etcds://)"), "{error}");
}

#[test]
fn etcd_with_client_certificates() {
    let place = Place::new("etcd-client-certificates");
    let server = place.identity("127.0.0.1", 4000);
    let Some((mut daemon, port)) = start_etcd(&place, &server, true) else { return };
    let at = format!("127.0.0.1:{port}");
    let client = etcd_client(&at, &place.showing(&place.identity("a client", 4000)));
    daemon.ready(&client);
    contract::operations(&client);
    refused(
        &etcd_client(&at, &place.trusting()),
        "it refuses our certificate, or that there is none: see metadata.certificate_file",
    );
}

#[test]
fn etcd_whose_certificate_has_expired() {
    let place = Place::new("etcd-expired");
    let Some((_daemon, port)) = start_etcd(&place, &place.identity("127.0.0.1", 2001), false)
    else {
        return;
    };
    let client = etcd_client(&format!("127.0.0.1:{port}"), &place.trusting());
    crate::until("it listens", || client.get("k").err().filter(|error| !error.is_transient()));
    refused(&client, EXPIRED);
}

#[test]
fn etcd_without_tls_is_told() {
    let Some((mut daemon, port)) = etcd::start() else { return };
    daemon.ready(&Etcd::new(&format!("etcd://127.0.0.1:{port}"), patient()).unwrap());
    let place = Place::new("etcd-plain");
    let error = etcd_client(&format!("127.0.0.1:{port}"), &place.trusting()).get("k").unwrap_err();
    let error = error.to_string();
    assert!(
        error.starts_with(&format!("metadata server etcds://127.0.0.1:{port}, key")),
        "{error}"
    );
    assert!(error.contains("does it speak no TLS (etcd://)"), "{error}");
}
