//! An engine in C with a token and certificates talks to one in Rust, and hears why where it does not.

mod common;

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use common::{Program, compile, folder};
use millstream_transfer::{Buffer, Settings, Sources, TcpConfig, TransferEngine};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};

const HOST: &str = "127.0.0.1";

/// Certificates of one authority, and tokens, in files.
struct Files {
    folder: PathBuf,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Files {
    fn new() -> Self {
        let folder = folder("secured");
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, "an authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        fs::write(folder.join("ca.pem"), authority.pem()).unwrap();
        Self { folder, authority }
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// Settings of an engine with a certificate for this host, and this token.
    fn settings(&self, name: &str, host: &str, token: &str) -> Vec<String> {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &self.authority).unwrap();
        let set = |setting: &str, path: &Path| format!("security.{setting}={}", path.display());
        vec![
            set("certificate_file", &self.write(&format!("{name}.pem"), &certificate.pem())),
            set("key_file", &self.write(&format!("{name}.key"), &key.serialize_pem())),
            set("ca_file", &self.folder.join("ca.pem")),
            set("token_file", &self.write(&format!("{name}.token"), token)),
        ]
    }
}

/// An engine in this process, with memory.
fn target(arguments: &[String]) -> (TransferEngine, Buffer) {
    let sources = Sources { arguments: arguments.to_vec(), ..Sources::default() };
    let settings = Settings::load(&sources).unwrap();
    let engine = TransferEngine::new(settings.engine(HOST.parse::<IpAddr>().unwrap())).unwrap();
    engine.install_tcp(TcpConfig::default()).unwrap();
    let memory = engine.allocate_buffer(4096, "*", true).unwrap();
    (engine, memory)
}

fn said(program: &Program, target: &(TransferEngine, Buffer), settings: &[String]) -> String {
    let address = target.1.address().to_string();
    let settings = settings.iter().map(String::as_str);
    let arguments: Vec<&str> = [target.0.name(), &address].into_iter().chain(settings).collect();
    String::from_utf8(program.run(&arguments).stdout).unwrap()
}

#[test]
fn a_token_and_certificates_are_settings_of_engines_in_c() {
    let (files, program) = (Files::new(), compile("secured"));
    let token = "the token of this cluster";
    let ours = files.settings("ours", HOST, token);
    let target = target(&files.settings("target", HOST, token));
    assert_eq!(said(&program, &target, &ours), "done\n");
    let mut bytes = vec![0; 4096];
    target.1.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 9));
    let misnamed = self::target(&files.settings("misnamed", "127.250.0.9", token));
    for (target, settings, reason) in [
        (
            &target,
            files.settings("stranger", HOST, "another token, as long"),
            "its token is another than ours",
        ),
        (
            &misnamed,
            ours.clone(),
            "it was called 127.0.0.1, and its certificate is for 127.250.0.9",
        ),
        (&target, Vec::new(), "only who prove by a certificate who they are"),
        (&target, ours[..1].to_vec(), "a certificate, its private key and authorities go together"),
    ] {
        let said = said(&program, target, &settings);
        assert!(said.contains(reason), "{said}");
    }
}
