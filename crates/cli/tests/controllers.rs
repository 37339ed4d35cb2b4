//! Several controllers that share their state in an etcd, and one that keeps it in a file: leaders that are killed or
//! stand still, an etcd that is away, and calls that go on through all of it.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{Folder, PATIENCE, Running, address, goes_on, millstream};
use serde_json::Value;

/// The bound that is promised, from the end of a leader to all that is taken over by the next one.
const FAIL_OVER: Duration = Duration::from_secs(10);

/// All deadlines of those that should come back are over after this time.
const SETTLED: Duration = Duration::from_secs(7);

/// An etcd, which is killed when this is dropped.
struct Etcd {
    host: String,
    folder: Folder,
    /// More arguments: with some, clients speak TLS.
    tls: Vec<String>,
    child: Option<Child>,
}

impl Etcd {
    /// `None`, and the test is skipped, where it is not installed.
    fn start() -> Option<Self> {
        Self::start_at(address(), Vec::new())
    }

    fn start_at(host: String, tls: Vec<String>) -> Option<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        if !std::env::split_paths(&path).any(|folder| folder.join("etcd").is_file()) {
            let required = std::env::var_os("MILLSTREAM_REQUIRE").is_some_and(|it| it == "all");
            assert!(!required, "cannot be skipped, as MILLSTREAM_REQUIRE=all: no etcd");
            println!("skipped: etcd is not installed (`cargo xtask test` does)");
            return None;
        }
        let mut etcd = Self { host, folder: Folder::new(), tls, child: None };
        etcd.run();
        Some(etcd)
    }

    fn run(&mut self) {
        let url = |port: u16| format!("http://{}:{port}", self.host);
        let clients =
            if self.tls.is_empty() { url(2379) } else { url(2379).replace("http", "https") };
        let log = self.folder.file("log");
        let log = fs::File::options().create(true).append(true).open(log).unwrap();
        // It must not outlive a test that was killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "etcd", "--name=one", "--data-dir=data"]);
        command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
        command.args(["--listen-peer-urls", &url(2380)]);
        command.args(["--initial-advertise-peer-urls", &url(2380)]);
        command.args(["--initial-cluster", &format!("one={}", url(2380))]).args(&self.tls);
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.child = Some(command.spawn().unwrap());
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    fn uri(&self) -> String {
        let scheme = if self.tls.is_empty() { "etcd" } else { "etcds" };
        format!("{scheme}://{}:2379/inc/test", self.host)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A controller with its page.
struct Controller {
    process: Running,
    listen: String,
    http: String,
}

impl Controller {
    fn start(listen: &str, more: &[&str]) -> Self {
        let http = format!("{}:0", address());
        let mut command = millstream();
        command.env("MILLSTREAM_LOG", "millstream_control=info");
        command.args(["controller", "--listen", listen, "--http", &http]).args(more);
        let mut process = Running::start("controller", &mut command);
        let ready = process.ready();
        let text = |name: &str| ready[name].as_str().unwrap().to_owned();
        Self { process, listen: text("listen"), http: text("http") }
    }

    /// One of several.
    fn of(etcd: &Etcd) -> Self {
        Self::start(&format!("{}:0", address()), &["--state", &etcd.uri()])
    }

    fn leadership(&self) -> Value {
        let mut stream = TcpStream::connect(&self.http).unwrap();
        let (at, path) = (&self.http, "/api/v1/controller");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        serde_json::from_str(reply.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    fn leads(&self) -> bool {
        self.leadership()["leads"] == true
    }

    /// The term that it leads with, as soon as it does.
    fn term(&self) -> u64 {
        let mut term = None;
        until("it leads", || {
            term = self.leadership()["term"].as_u64();
            term.is_some()
        });
        term.unwrap()
    }

    /// Waits until so many hosts have come back.
    fn come_back(&mut self, hosts: usize) {
        for _ in 0..hosts {
            while !self.process.error_line().contains("a host comes back") {}
        }
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Three controllers, of which the first one leads and knows the others.
fn three(etcd: &Etcd) -> Vec<Controller> {
    let first = Controller::of(etcd);
    until("the first one leads", || first.leads());
    let all = vec![first, Controller::of(etcd), Controller::of(etcd)];
    until("it knows the others", || {
        all[0].leadership()["controllers"].as_array().unwrap().len() == all.len()
    });
    all
}

/// The one of these that leads, when there is one.
fn leader(controllers: &[Controller]) -> usize {
    let mut found = None;
    until("one leads", || {
        found = controllers.iter().position(Controller::leads);
        found.is_some()
    });
    found.unwrap()
}

fn list(controllers: &[Controller]) -> String {
    controllers.iter().map(|it| it.listen.as_str()).collect::<Vec<_>>().join(",")
}

fn switch(controller: &str) -> Running {
    switch_that_logs(controller, "warn")
}

fn switch_that_logs(controller: &str, what: &str) -> Running {
    let bind = address();
    let arguments = ["switch", "--controller", controller, "--name=s0", "--bind", &bind];
    let mut command = millstream();
    let mut switch = Running::start("switch", command.args(arguments).env("MILLSTREAM_LOG", what));
    switch.ready();
    switch
}

/// Ranks that go on for minutes, and print a line for each of their thousands of sizes.
fn job(controller: &str, world: u32) -> Vec<Running> {
    job_that_logs(controller, world, "error")
}

fn job_that_logs(controller: &str, world: u32, what: &str) -> Vec<Running> {
    let sizes = vec!["4KiB"; 20_000].join(",");
    let start = |rank: u32| {
        let (world, rank) = (world.to_string(), rank.to_string());
        let mut command = millstream();
        command.args(["allreduce", "--controller", controller, "--group=job", "--world", &world]);
        command.args(["--rank", &rank, "--bind", &address(), "--dtype=int32", "--op=sum"]);
        command.args([
            "--iters=500",
            "--path=switch",
            "--fallback=off",
            "--verify",
            "--size",
            &sizes,
        ]);
        command.env("MILLSTREAM_LOG", what);
        Running::start(&format!("rank {rank}"), &mut command)
    };
    let mut ranks: Vec<Running> = (0..world).map(start).collect();
    for rank in &mut ranks {
        assert!(rank.line().contains("in group job, over switch s0"));
    }
    ranks
}

/// A group of one rank.
fn other(controller: &str, timeout: &str) -> Running {
    let mut command = millstream();
    command.args(["allreduce", "--controller", controller, "--group=other", "--world=1"]);
    command.args([
        "--rank=0",
        "--path=switch",
        "--fallback=off",
        "--size=4",
        "--verify",
        "--bind",
        &address(),
    ]);
    Running::start("another group", command.args(["--timeout", timeout]))
}

/// A group that is new is served.
fn serves(controller: &str) {
    other(controller, "30s").output().success();
}

/// The last rank is killed, and the others name it.
fn is_named(mut ranks: Vec<Running>) {
    let dead = ranks.len() - 1;
    ranks.pop().unwrap().signal("KILL");
    for survivor in ranks {
        let output = survivor.output();
        assert!(output.failure(1).contains(&format!("rank {dead} is lost")), "{}", output.stderr);
    }
}

#[test]
fn when_the_leader_is_killed_another_one_takes_all_over() {
    let Some(etcd) = Etcd::start() else { return };
    let mut controllers = three(&etcd);
    // The others are learned.
    let first = controllers[0].listen.clone();
    let _switch = switch(&first);
    let mut ranks = job(&first, 2);
    let term = controllers[0].term();
    let since = Instant::now();
    drop(controllers.remove(0));
    let leading = leader(&controllers);
    controllers[leading].come_back(2);
    assert!(since.elapsed() < FAIL_OVER, "{:?}", since.elapsed());
    assert!(controllers[leading].term() > term);
    goes_on(&mut ranks, SETTLED);
    // One that does not lead says who does.
    serves(&controllers[1 - leading].listen);
    is_named(ranks);
}

#[test]
fn one_that_is_started_later_takes_over_when_all_that_were_named_are_dead() {
    let Some(etcd) = Etcd::start() else { return };
    let first = Controller::of(&etcd);
    until("the first one leads", || first.leads());
    let second = Controller::of(&etcd);
    let named = format!("{},{}", first.listen, second.listen);
    let mut switch = switch_that_logs(&named, "millstream_control=debug");
    let mut ranks = job_that_logs(&named, 2, "millstream_collective=debug");
    let mut third = Controller::of(&etcd);
    // Those that are connected hear of it.
    for peer in ranks.iter_mut().chain([&mut switch]) {
        while !peer.error_line().contains(&third.listen) {}
    }
    let since = Instant::now();
    drop(first);
    drop(second);
    third.come_back(2);
    assert!(since.elapsed() < FAIL_OVER, "{:?}", since.elapsed());
    goes_on(&mut ranks, SETTLED);
    serves(&third.listen);
    ranks.pop().unwrap().signal("KILL");
    let output = ranks.remove(0).output();
    assert!(output.stderr.contains("rank 1 is lost"), "{}", output.stderr);
}

#[test]
fn a_leader_that_stood_still_commands_nobody() {
    let Some(etcd) = Etcd::start() else { return };
    let mut controllers = three(&etcd);
    let all = list(&controllers);
    let _switch = switch(&all);
    let mut ranks = job(&all, 2);
    let stopped = controllers.remove(0);
    let term = stopped.term();
    let since = Instant::now();
    stopped.process.signal("STOP");
    let leading = leader(&controllers);
    controllers[leading].come_back(2);
    assert!(since.elapsed() < FAIL_OVER, "{:?}", since.elapsed());
    goes_on(&mut ranks, Duration::from_secs(12).saturating_sub(since.elapsed()));
    serves(&all);
    stopped.process.signal("CONT");
    let mut stopped = stopped;
    while !stopped.process.error_line().contains("does not lead any more") {}
    until("it knows who leads", || {
        stopped.leadership()["leader"] == controllers[leading].listen.as_str()
    });
    assert!(!stopped.leads() && controllers[leading].term() > term);
    goes_on(&mut ranks, SETTLED);
    serves(&stopped.listen);
    is_named(ranks);
}

#[test]
fn without_the_etcd_calls_go_on_and_new_groups_are_refused_with_its_name() {
    let Some(mut etcd) = Etcd::start() else { return };
    let mut controllers = three(&etcd);
    let all = list(&controllers);
    let _switch = switch(&all);
    let mut ranks = job(&all, 2);
    let term = controllers[0].term();
    etcd.kill();
    until("the leader stands down", || !controllers[0].leads());
    goes_on(&mut ranks, Duration::from_secs(1));
    let refused = other(&all, "2s").output();
    let text = refused.failure(1);
    assert!(text.contains(&etcd.uri()), "{text}");
    goes_on(&mut ranks, Duration::from_secs(1));
    etcd.run();
    let leading = leader(&controllers);
    controllers[leading].come_back(2);
    assert!(controllers[leading].term() > term);
    goes_on(&mut ranks, SETTLED);
    serves(&all);
    is_named(ranks);
}

#[test]
fn a_controller_with_a_file_knows_after_a_restart_what_there_was() {
    let folder = Folder::new();
    let (state, plans) = (folder.file("state"), folder.file("plans"));
    let location = format!("file:{state}");
    let arguments = ["--state", location.as_str(), "--plans", plans.as_str()];
    let files = || fs::read_dir(&plans).unwrap().map(|it| it.unwrap().file_name());
    let first = Controller::start(&format!("{}:0", address()), &arguments);
    let (listen, _switch) = (first.listen.clone(), switch(&first.listen));
    let mut ranks = job(&listen, 2);
    until("its plan is written", || files().count() == 1);
    let plan = files().next();
    until("its record is written", || fs::read_to_string(&state).unwrap().contains("\"job\""));
    // Another one must not have the file.
    let second = millstream().args(["controller", "--listen=127.0.0.1:0"]).args(arguments).output();
    let text = String::from_utf8(second.unwrap().stderr).unwrap();
    assert!(text.contains("in use by another controller") && text.contains(&state), "{text}");
    assert_eq!(files().next(), plan);
    let term = first.term();
    drop(first);
    let mut again = Controller::start(&listen, &arguments);
    again.come_back(2);
    until("its plan is there again", || files().next() == plan);
    assert!(again.term() > term);
    goes_on(&mut ranks, SETTLED);
    assert_eq!(files().count(), 1);
    serves(&listen);
    is_named(ranks);
    until("its plan is removed", || files().count() == 0);
    drop(again);
    fs::write(&state, "{").unwrap();
    let mut command = millstream();
    command.args(["controller", "--listen=127.0.0.1:0"]).args(arguments);
    let refused = Running::start("controller", &mut command).output();
    let text = refused.failure(1);
    assert!(text.contains("makes no sense") && text.contains(&state), "{text}");
}

#[cfg(feature = "tls")]
#[test]
fn an_etcd_with_tls_is_shared_by_those_who_trust_it_and_show_a_certificate() {
    let files = common::certificates::Files::new();
    let (authority, ca) = files.authority("ours");
    let (_, other) = files.authority("theirs");
    let host = address();
    let [certificate, key] = files.certificate(&authority, &host, false);
    let words = ["--cert-file", &certificate, "--key-file", &key, "--client-cert-auth"];
    let words = [&words[..], &["--trusted-ca-file", &ca]].concat();
    let words = words.into_iter().map(str::to_owned).collect();
    let Some(etcd) = Etcd::start_at(host, words) else { return };
    let uri = etcd.uri();
    let [own, own_key] = files.certificate(&authority, "a-controller", false);
    let start = |files: &[&str]| {
        let words = [&["--state", uri.as_str()][..], files].concat();
        Controller::start(&format!("{}:0", address()), &words)
    };
    let shown = ["--state-certificate-file", own.as_str(), "--state-key-file", own_key.as_str()];
    let ours = [&["--state-ca-file", ca.as_str()][..], &shown].concat();
    let first = start(&ours);
    until("the first one leads", || first.leads());
    let second = start(&ours);
    until("the other one follows", || {
        second.leadership()["leader"].as_str() == Some(first.listen.as_str())
    });
    let _switch = switch(&second.listen);
    serves(&second.listen);
    for (files, reason) in [
        (vec!["--state-ca-file", other.as_str()], "is it in --state-ca-file?"),
        (vec!["--state-ca-file", ca.as_str()], "see --state-certificate-file"),
    ] {
        let mut stranger = start(&files);
        while !stranger.process.error_line().contains(reason) {}
        assert!(!stranger.leads());
    }
    drop(first);
    until("the other one leads", || second.leads());
    serves(&second.listen);
    let run = |words: &[&str]| {
        let all = [&["controller", "--listen=127.0.0.1:0"][..], words].concat();
        common::run(&all)
    };
    let file = format!("file:{ca}.state");
    for (words, text) in [
        (["--state", "etcds://a", "--state-ca-file", "/nowhere/ca"], "/nowhere/ca"),
        (["--state", "etcd://a", "--state-ca-file", ca.as_str()], "has no TLS"),
        (["--state", file.as_str(), "--state-ca-file", ca.as_str()], "has no TLS"),
    ] {
        let output = run(&words);
        let error = output.failure(1);
        assert!(error.contains(text), "{error}");
    }
    for words in [&["--state-ca-file", ca.as_str()][..], &["--state", &uri, shown[0], shown[1]]] {
        assert_eq!(run(words).code(), Some(2), "{words:?}");
    }
}

#[test]
fn controllers_that_nobody_could_find_are_not_started() {
    let uri = "etcd://127.0.0.1:1";
    let any = TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), 0)).unwrap();
    let listen = any.local_addr().unwrap().to_string();
    drop(any);
    for (arguments, code, text) in [
        (vec!["--listen", &listen, "--state", uri], 1, "--advertise"),
        (vec!["--state", "redis://a"], 2, "file:PATH"),
        (vec!["--listen", "127.0.0.1:0", "--state", "etcd://a:b"], 1, "port must be"),
        (vec!["--advertise", "10.0.0.1:1"], 2, "--state"),
    ] {
        let mut command = millstream();
        let output = Running::start("controller", command.arg("controller").args(&arguments));
        let output = output.output();
        assert_eq!(output.code(), Some(code), "{arguments:?}: {}", output.stderr);
        assert!(output.stderr.contains(text), "{arguments:?}: {}", output.stderr);
    }
}
