//! Programs in C with a token and certificates: an engine that talks to one in Rust, and ranks that join by a controller.
//! Both hear why where they are not taken.

mod common;

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use common::cluster::{self, Cluster, Rank};
use common::{Program, compile, compile_with, folder};
use millstream_transfer::{Buffer, Settings, Sources, TcpConfig, TransferEngine};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};

const HOST: &str = "127.0.0.1";

#[test]
fn part_of_another_test() {
    cluster::part_of_another_test();
}

/// Certificates of one authority, and tokens, in files.
struct Files {
    folder: PathBuf,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Files {
    fn new(name: &str) -> Self {
        let folder = folder(name);
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
        let [certificate, key] = self.certificate(name, host);
        let set = |setting: &str, path: &Path| format!("security.{setting}={}", path.display());
        vec![
            set("certificate_file", &certificate),
            set("key_file", &key),
            set("ca_file", &self.folder.join("ca.pem")),
            set("token_file", &self.write(&format!("{name}.token"), token)),
        ]
    }

    /// A certificate for this host, and its key.
    fn certificate(&self, name: &str, host: &str) -> [PathBuf; 2] {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &self.authority).unwrap();
        [
            self.write(&format!("{name}.pem"), &certificate.pem()),
            self.write(&format!("{name}.key"), &key.serialize_pem()),
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
    let (files, program) = (Files::new("secured"), compile("secured"));
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

const TOKENS: &str = r#"
    [[token]]
    name = "ranks"
    kind = "host"
    secret_file = "ranks.token"

    [[token]]
    name = "switches"
    kind = "switch"
    secret_file = "switches.token"
"#;

#[test]
fn ranks_have_a_token_and_certificates_towards_the_controller() {
    let files = Files::new("inccl-secured");
    let tokens = files.write("tokens.toml", TOKENS);
    let token = files.write("ranks.token", "the token of the ranks");
    let of_switches = files.write("switches.token", "the token of the switches");
    let ca = files.folder.join("ca.pem");
    let [certificate, key] = files.certificate("controller", HOST);
    let [own, own_key] = files.certificate("member", "a-member");
    let show = |path: &Path| path.display().to_string();
    let of_controller = format!(
        "--tokens {} --tls-cert {} --tls-key {} --tls-client-ca {}",
        show(&tokens),
        show(&certificate),
        show(&key),
        show(&ca)
    );
    let of_switch = format!(
        "--token-file {} --tls-ca {} --tls-cert {} --tls-key {}",
        show(&of_switches),
        show(&ca),
        show(&own),
        show(&own_key)
    );
    let cluster = Cluster::start_with(1, &of_controller, &of_switch);
    let source = "tests/programs/inccl_failures.c";
    let program = compile_with("inccl_failures-secured", source, &[]);
    let all = [
        ("INCCL_TOKEN_FILE", &token),
        ("INCCL_TLS_CA", &ca),
        ("INCCL_TLS_CERTIFICATE", &own),
        ("INCCL_TLS_KEY", &own_key),
    ];
    let start = |world: u32, rank: u32, variables: &[(&str, &PathBuf)]| {
        let mut command = cluster.rank(&program, &["call"], world, rank);
        Rank::start(command.envs(variables.iter().copied()))
    };
    let mut ranks = [0, 1].map(|rank| start(2, rank, &all));
    ranks.iter_mut().for_each(Rank::go);
    for rank in ranks {
        let printed = rank.printed();
        assert!(printed.starts_with("ready\n0 "), "{printed}");
    }
    let other = Files::new("inccl-strangers").folder.join("ca.pem");
    let missing = files.folder.join("nowhere.pem");
    for (variables, reason) in [
        (&[][..], "TLS in place of the length of a frame"),
        (&all[..2], "it asks for a certificate of ours, and none is set here"),
        (&all[1..], "takes only those who have a token, and none is set here"),
        (&[all[0], ("INCCL_TLS_CA", &other), all[2], all[3]][..], "its certificate is refused"),
        (&all[..3], "INCCL_TLS_CERTIFICATE is set, and INCCL_TLS_KEY is not"),
        (&[("INCCL_TLS_CA", &missing)][..], "INCCL_TLS_CERTIFICATE and INCCL_TLS_KEY: TLS: "),
    ] {
        let output = start(1, 0, variables).output();
        let printed = String::from_utf8(output.stdout).unwrap();
        assert!(printed.starts_with("no group: ") && printed.contains(reason), "{printed}");
    }
}
