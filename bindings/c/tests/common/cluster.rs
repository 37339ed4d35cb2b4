//! A controller and switches for the ranks of C programs. They are processes of this program again, told by their
//! environment what to be.

use std::future;
use std::io::{self, BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::{env, thread};

use millstream_control::controller::ControllerConfig;
use millstream_control::metadata_server::ServerTls;
use millstream_control::switch::SwitchConfig;
use millstream_control::tokens::Tokens;
use millstream_control::{controller, switch};
use millstream_net::tls::{CallerFiles, CallerTls};
use millstream_net::token::Token;

use super::Program;

/// What a daemon is told, as the arguments of the command `millstream` that matter here.
pub(crate) const PART: &str = "MILLSTREAM_C_TEST_PART";

/// What a daemon does, in a test of this name; in others, nothing. Ends with its stdin, unless `--keep`
/// comes first.
pub(crate) fn part_of_another_test() {
    let Ok(words) = env::var(PART) else { return };
    let words = match words.strip_prefix("--keep ") {
        Some(words) => words,
        None => {
            thread::spawn(|| {
                let _ = io::stdin().read_to_end(&mut Vec::new());
                process::exit(0);
            });
            &words
        }
    };
    let words: Vec<&str> = words.split_whitespace().collect();
    let option = |name: &str| {
        let at = words.iter().position(|word| *word == name);
        at.map(|at| words[at + 1])
    };
    let needed = |name: &str| option(name).unwrap_or_else(|| panic!("no {name}"));
    // On a line of its own, whatever the test harness has said before.
    match words[0] {
        "controller" => {
            let mut config = ControllerConfig::new(
                option("--listen").unwrap_or("127.0.0.1:52200").parse().unwrap(),
            );
            if let Some(groups) = option("--groups") {
                config.rules.source_quotas.groups = groups.parse().unwrap();
            }
            config.tokens = option("--tokens").map(|path| Tokens::read(Path::new(path)).unwrap());
            config.tls = option("--tls-cert").map(|certificate| ServerTls {
                certificate: certificate.into(),
                key: needed("--tls-key").into(),
                client_authorities: option("--tls-client-ca").map(PathBuf::from),
            });
            let ready = |address| println!("\nready {address}");
            controller::run(config, ready, future::pending()).unwrap();
        }
        "switch" => {
            let controller: SocketAddr = needed("--controller").parse().unwrap();
            let bind = needed("--bind").parse().unwrap();
            let mut config = SwitchConfig::new(controller, needed("--name"), bind);
            config.token =
                option("--token-file").map(|path| Token::from_file(Path::new(path)).unwrap());
            config.tls = option("--tls-ca").map(|authorities| {
                let own = (needed("--tls-cert").into(), needed("--tls-key").into());
                let files = CallerFiles { authorities: authorities.into(), own: Some(own) };
                CallerTls::from_files(&files, &controller.ip().to_string()).unwrap()
            });
            let ready = |address| println!("\nready {address}");
            switch::run(config, ready, future::pending()).unwrap();
        }
        other => panic!("no part {other}"),
    }
}

/// The program that a daemon is, with its arguments; [`PART`] says which.
pub(crate) const DAEMON: [&str; 3] = ["--exact", "part_of_another_test", "--nocapture"];

/// A daemon that serves. Dropped, it is killed.
pub(crate) struct Daemon {
    child: Child,
    /// Where it serves.
    pub(crate) address: String,
}

impl Daemon {
    /// With a command that runs this program, anywhere.
    pub(crate) fn start(mut command: Command, words: &str) -> Self {
        command.args(DAEMON).env(PART, words);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines.find_map(|line| line.unwrap().strip_prefix("ready ").map(str::to_owned));
        Self { child, address: ready.expect("it gets ready") }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let ended = self.child.try_wait();
        let _ = self.child.kill();
        let _ = self.child.wait();
        assert!(matches!(ended, Ok(None)) || thread::panicking(), "a daemon has ended: {ended:?}");
        if thread::panicking() {
            eprintln!("the daemon at {}: {ended:?}", self.address);
        }
    }
}

/// A controller, and switches.
pub(crate) struct Cluster {
    pub(crate) controller: SocketAddr,
    _daemons: Vec<Daemon>,
    /// By which way its ranks reach each other.
    path: &'static str,
}

impl Cluster {
    pub(crate) fn start(switches: usize) -> Self {
        Self::start_with(switches, "", "")
    }

    /// With further words for the controller, and for each switch.
    pub(crate) fn start_with(switches: usize, of_controller: &str, of_switch: &str) -> Self {
        let here = || Command::new(env::current_exe().unwrap());
        let words = format!("controller --listen 127.0.0.1:0 {of_controller}");
        let controller = Daemon::start(here(), &words);
        let at = controller.address.clone();
        let mut daemons = vec![controller];
        for number in 0..switches {
            let bind = address();
            let words =
                format!("switch --controller {at} --name s{number} --bind {bind} {of_switch}");
            daemons.push(Daemon::start(here(), &words));
        }
        Self { controller: at.parse().unwrap(), _daemons: daemons, path: "switch" }
    }

    /// Whose ranks share memory.
    pub(crate) fn of_shared_memory() -> Self {
        Self { path: "shared-memory", ..Self::start(0) }
    }

    /// A rank of a program whose arguments end with the world's size, the controller and the rank.
    pub(crate) fn rank(&self, program: &Program, first: &[&str], world: u32, rank: u32) -> Command {
        let mut command = program.command();
        command.args(first).args([
            world.to_string(),
            self.controller.to_string(),
            rank.to_string(),
        ]);
        command.env("WORLD", world.to_string()).env("INCCL_PATH", self.path);
        command.env("INCCL_FALLBACK", "off");
        command
    }

    /// All ranks, each a process, to their ends.
    pub(crate) fn run(&self, program: &Program, world: u32) -> Vec<Output> {
        let start = |rank| Rank::start(&mut self.rank(program, &[], world, rank));
        let ranks: Vec<Rank> = (0..world).map(start).collect();
        ranks.into_iter().map(Rank::output).collect()
    }
}

/// An address of 127/8 that no other test process uses, a new one for every call.
fn address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let process = std::process::id();
    let host = NEXT.fetch_add(1, Ordering::Relaxed);
    assert_ne!(host, 255, "this process has used all its addresses");
    Ipv4Addr::new(127, 192 | (process >> 8) as u8 & 31, process as u8, host).into()
}

/// A rank that runs. Dropped, it is killed.
pub(crate) struct Rank {
    child: Option<Child>,
}

impl Rank {
    pub(crate) fn start(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.stderr(Stdio::piped()).spawn();
        Self { child: Some(child.unwrap()) }
    }

    fn child(&mut self) -> &mut Child {
        self.child.as_mut().expect("it runs")
    }

    /// Waits for a line of its output.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        // Byte by byte, since the rest is for `output`.
        let stdout = self.child().stdout.as_mut().unwrap();
        BufReader::with_capacity(1, stdout).read_line(&mut line).unwrap();
        line
    }

    /// Ends its stdin.
    pub(crate) fn go(&mut self) {
        drop(self.child().stdin.take());
    }

    pub(crate) fn kill(mut self) -> ExitStatus {
        self.child().kill().unwrap();
        self.child().wait().unwrap()
    }

    /// Ends its stdin, and waits for its end. Every part of a test ends by itself, with an error at worst; whoever hangs is ended by the tests' runner.
    pub(crate) fn output(mut self) -> Output {
        self.child.take().expect("it runs").wait_with_output().unwrap()
    }

    /// As above, of one that ends well: what it prints.
    pub(crate) fn printed(self) -> String {
        let output = self.output();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{}: {said}", output.status);
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
