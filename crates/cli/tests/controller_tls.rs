//! A controller over TLS: real processes, certificates made for the test.
#![cfg(feature = "tls")]

mod common;

use std::fs;
use std::io::Write;
use std::net::TcpStream;

use common::{Folder, Running, address, millstream};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, date_time_ymd,
};

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Files in PEM: those of authorities, and of certificates with their keys.
struct Files(Folder);

impl Files {
    fn authority(&self, name: &str) -> (Authority, String) {
        let authority = authority(name);
        let path = self.0.file(&format!("{name}.pem"));
        fs::write(&path, authority.pem()).unwrap();
        (authority, path)
    }

    /// A certificate of a host, which is over if `expired`, and its key.
    fn certificate(&self, authority: &Authority, host: &str, expired: bool) -> [String; 2] {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        if expired {
            params.not_before = date_time_ymd(2001, 1, 1);
            params.not_after = date_time_ymd(2002, 1, 1);
        }
        let certificate = params.signed_by(&key, authority).unwrap();
        let write = |kind: &str, text: String| {
            let path = self.0.file(&format!("{host}-{expired}-{kind}.pem"));
            fs::write(&path, text).unwrap();
            path
        };
        [write("certificate", certificate.pem()), write("key", key.serialize_pem())]
    }
}

/// A controller at this address; where it listens.
fn controller(host: &str, more: &[&str]) -> (Running, String) {
    let mut command = millstream();
    command.args(["controller", "--listen", &format!("{host}:0")]).args(more);
    let mut controller = Running::start("controller", &mut command);
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    (controller, listen)
}

fn rank(listen: &str, world: &str, rank: &str, more: &[&str]) -> Running {
    let mut command = millstream();
    let bind = address();
    command.args(["allreduce", "--controller", listen, "--world", world, "--rank", rank]);
    command.args(["--bind", &bind, "--dtype=int32", "--op=sum", "--size=1MiB", "--verify"]);
    Running::start("host", command.args(more))
}

/// Why a rank of a controller with this certificate does not join.
fn refusal(listen: &str, more: &[&str]) -> String {
    rank(listen, "1", "0", more).output().failure(1).to_owned()
}

#[test]
fn hosts_and_switches_with_certificates_work_over_tls_and_others_hear_why_not() {
    let files = Files(Folder::new());
    let (servers, ca) = files.authority("servers");
    let (clients, client_ca) = files.authority("clients");
    let host = address();
    let [certificate, key] = files.certificate(&servers, &host, false);
    let tls = ["--tls-cert", &certificate, "--tls-key", &key, "--tls-client-ca", &client_ca];
    let (_controller, listen) = controller(&host, &tls);
    // Handshakes that never end.
    let half_open: Vec<TcpStream> = (0..300)
        .map(|_| {
            let mut stream = TcpStream::connect(&listen).unwrap();
            let _ = stream.write_all(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03");
            stream
        })
        .collect();
    let [own, own_key] = files.certificate(&clients, "a-client", false);
    let [over, over_key] = files.certificate(&clients, "a-late-client", true);
    let mine = ["--tls-ca", &ca, "--tls-cert", &own, "--tls-key", &own_key];
    let mut command = millstream();
    let bind = address();
    command.args(["switch", "--controller", &listen, "--name=s", "--bind", &bind]).args(mine);
    let mut switch = Running::start("switch", &mut command);
    switch.ready();
    let ranks = ["0", "1"].map(|number| rank(&listen, "2", number, &mine));
    ranks.into_iter().for_each(|rank| drop(rank.output().success()));
    drop(half_open);
    for (more, reason) in [
        (&["--tls-ca", &ca][..], "it asks for a certificate of ours, and none is set here"),
        (
            &["--tls-ca", &ca, "--tls-cert", &over, "--tls-key", &over_key],
            "it says that our certificate has expired",
        ),
        (
            &["--tls-ca", &client_ca, "--tls-cert", &own, "--tls-key", &own_key],
            "none of the authorities that are set here vouches for its certificate",
        ),
        (&[], "TLS in place of the length of a frame"),
    ] {
        let error = refusal(&listen, more);
        assert!(error.contains(reason) && error.contains(&listen), "{error}");
    }
    assert!(switch.is_running());
}

#[test]
fn a_controller_that_is_another_or_late_or_in_the_clear_is_not_called() {
    let files = Files(Folder::new());
    let (servers, ca) = files.authority("servers");
    let host = address();
    for (name, expired, reason) in [
        ("elsewhere", false, format!("it was called {host}, and its certificate is for elsewhere")),
        (&host, true, "its certificate has expired".to_owned()),
    ] {
        let [certificate, key] = files.certificate(&servers, name, expired);
        let (_controller, listen) =
            controller(&host, &["--tls-cert", &certificate, "--tls-key", &key]);
        let error = refusal(&listen, &["--tls-ca", &ca]);
        assert!(error.contains(&reason), "{error}");
    }
    let (_controller, listen) = controller(&host, &[]);
    let error = refusal(&listen, &["--tls-ca", &ca]);
    assert!(error.contains("it does not speak TLS"), "{error}");
    // Without authorities, a certificate of ours is nothing.
    let arguments = ["switch", "--controller", &listen, "--tls-cert", "c", "--tls-key", "k"];
    assert_eq!(common::run(&arguments).code(), Some(2));
}
