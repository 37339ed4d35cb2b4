//! A controller with tokens, and switches, hosts and readers that have one, another one, or none: real processes.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;

use common::{Folder, Output, Running, address, millstream};

const HOSTS: &str = "the token of the hosts";
const SWITCHES: &str = "the token of the switches";
const READERS: &str = "the token of the readers";

/// A token file, and a file for each secret.
struct Tokens {
    folder: Folder,
}

impl Tokens {
    fn new() -> Self {
        let tokens = Self { folder: Folder::new() };
        for (name, secret) in [("host", HOSTS), ("switch", SWITCHES), ("read", READERS)] {
            fs::write(tokens.file(name), format!("{secret}\n")).unwrap();
        }
        fs::write(tokens.file("other"), "the token of others").unwrap();
        let entry = |kind: &str| {
            format!("[[token]]\nname = \"{kind}\"\nkind = \"{kind}\"\nsecret_file = \"{kind}\"\n")
        };
        let text: String = ["host", "switch", "read"].map(entry).concat();
        fs::write(tokens.file("tokens.toml"), text).unwrap();
        tokens
    }

    fn file(&self, name: &str) -> String {
        self.folder.file(name)
    }

    /// A controller with these tokens; where it listens, and where its page is.
    fn controller(&self) -> (Running, String, String) {
        let (listen, file) = (format!("{}:0", address()), self.file("tokens.toml"));
        let arguments = ["controller", "--listen", &listen, "--tokens", &file, "--http", "0"];
        let mut controller = Running::start("controller", millstream().args(arguments));
        let ready = controller.ready();
        let at = |name: &str| ready[name].as_str().unwrap().to_owned();
        (controller, at("listen"), at("http"))
    }

    /// With the token of this name, if one is given, as an argument.
    fn switch(&self, listen: &str, token: Option<&str>) -> Running {
        let mut command = millstream();
        let bind = address();
        command.args(["switch", "--controller", listen, "--name=s", "--bind", &bind]);
        if let Some(token) = token {
            command.args(["--token-file", &self.file(token)]);
        }
        Running::start("switch", &mut command)
    }

    /// With the token of this name, if one is given, by the environment.
    fn host(&self, listen: &str, world: u32, rank: u32, token: Option<&str>) -> Running {
        let mut command = millstream();
        let (world, rank, bind) = (world.to_string(), rank.to_string(), address());
        command.args(["allreduce", "--controller", listen, "--world", &world, "--rank", &rank]);
        command.args(["--bind", &bind, "--dtype=int32", "--op=sum", "--size=1MiB", "--verify"]);
        if let Some(token) = token {
            command.env("INCCL_TOKEN_FILE", self.file(token));
        }
        Running::start("host", &mut command)
    }
}

fn refused(output: Output, reason: &str) {
    let error = output.failure(1);
    assert!(error.contains(reason), "{error}");
}

#[test]
fn daemons_and_hosts_with_tokens_work_and_others_hear_why_not() {
    let tokens = Tokens::new();
    let (_controller, listen, _) = tokens.controller();
    let needed = "only those who have a token, and none is set here";
    refused(tokens.switch(&listen, None).output(), needed);
    refused(tokens.switch(&listen, Some("other")).output(), "none of the controller's tokens");
    refused(tokens.switch(&listen, Some("host")).output(), "token \"host\" is for hosts");
    let mut switch = tokens.switch(&listen, Some("switch"));
    switch.ready();
    refused(tokens.host(&listen, 1, 0, None).output(), needed);
    refused(tokens.host(&listen, 1, 0, Some("other")).output(), "none of the controller's tokens");
    refused(
        tokens.host(&listen, 1, 0, Some("switch")).output(),
        "token \"switch\" is for switches",
    );
    refused(tokens.host(&listen, 1, 0, Some("missing")).output(), "cannot read the token in");
    let hosts = [0, 1].map(|rank| tokens.host(&listen, 2, rank, Some("host")));
    hosts.into_iter().for_each(|host| drop(host.output().success()));
}

/// Their controllers have no tokens, and refuse those who bring one.
#[test]
fn commands_with_a_controller_of_their_own_use_no_token() {
    let tokens = Tokens::new();
    let few = ["--hosts=2", "--size=4", "--iters=1", "--warmup-iters=0"];
    for words in [
        vec!["demo", "--file-size=1MiB", "--vector-size=4"],
        [&["bench", "allreduce"][..], &few].concat(),
        [&["bench", "collective", "--collective=allgather"][..], &few].concat(),
    ] {
        let mut command = millstream();
        command.args(&words).env("INCCL_TOKEN_FILE", tokens.file("host"));
        Running::start(words[0], &mut command).output().success();
    }
}

#[test]
fn a_token_file_that_is_wrong_is_named() {
    let tokens = Tokens::new();
    let file = tokens.file("tokens.toml");
    fs::write(&file, "[[token]]\nname = \"a\"\nkind = \"guest\"\nsecret = \"unseen\"\n").unwrap();
    let arguments = ["controller", "--listen=127.0.0.1:0", "--tokens", &file];
    let output = Running::start("controller", millstream().args(arguments)).output();
    let error = output.failure(1);
    assert!(error.contains(&file) && error.contains("line 3: unknown variant"), "{error}");
    assert!(!output.stderr.contains("unseen"), "{}", output.stderr);
}

/// Status and text of what is at a path.
fn get(at: &str, path: &str, headers: &str) -> (String, String) {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (head, text) = reply.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), text.to_owned())
}

#[test]
fn pages_are_for_those_who_show_a_token_of_readers() {
    let tokens = Tokens::new();
    let (_controller, _, http) = tokens.controller();
    for path in ["/", "/api/v1/groups", "/metrics", "/nothing"] {
        for headers in [
            String::new(),
            format!("Authorization: Bearer {HOSTS}\r\n"),
            "Authorization: x\r\n".into(),
        ] {
            let (head, text) = get(&http, path, &headers);
            assert!(head.starts_with("HTTP/1.1 401 Unauthorized\r\n"), "{head}");
            let asks = "www-authenticate: Basic realm=\"millstream\"";
            assert!(head.contains(asks) && text.contains("Bearer TOKEN"), "{head}\n{text}");
        }
    }
    let shown = format!("Authorization: Bearer {READERS}\r\n");
    let (head, text) = get(&http, "/api/v1/groups", &shown);
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && text.contains("\"groups\""), "{head}");
    let (head, _) = get(&http, "/metrics", &shown);
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
}
