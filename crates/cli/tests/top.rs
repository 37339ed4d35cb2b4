//! Metrics over HTTP, and `top`, which shows them: of nodes, and of who moves bytes to them.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;

use common::{
    Folder, PATIENCE, PROGRAM, Running, address, eventually, millstream, node, run, towards,
};
use serde_json::Value;

/// A node that serves metrics: where, and its segment.
fn watched() -> (Running, String, String) {
    let bind = address();
    let http = format!("{bind}:0");
    let mut command = millstream();
    command.args([
        "node",
        "--protocol=rdma:soft",
        "--bind",
        &bind,
        "--buffer=64MiB",
        "--http",
        &http,
    ]);
    let mut node = Running::start("node", &mut command);
    let ready = node.ready();
    let text = |key: &str| ready[key].as_str().unwrap().to_owned();
    (node, text("http"), text("segment"))
}

/// What is at a path: the head of the reply, and its text.
fn get(at: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (head, text) = reply.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), text.to_owned())
}

/// Somebody who writes to a segment until it is told to stop, and where its metrics are.
fn writer(segment: &str) -> (Running, String) {
    let http = format!("{}:9464", address());
    let mut command = millstream();
    command.args(["bench", "transfer", "--op=write", "--block-size=64KiB", "--duration=60s"]);
    command.args(["--working-set=1MiB", "--http", &http]).args(towards(segment));
    let writer = Running::start("bench", &mut command);
    eventually("its metrics", || TcpStream::connect(&http).is_ok());
    (writer, http)
}

#[test]
fn a_node_says_what_it_has_and_whom_it_serves() {
    let (_node, http, segment) = watched();
    let (head, text) = get(&http, "/metrics");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("content-type: text/plain; version=0.0.4; charset=utf-8"), "{head}");
    assert!(text.contains("# TYPE millstream_requests_total counter\n"), "{text}");
    let sample = format!("millstream_memory_registered_bytes {}\n", 64 << 20);
    assert!(text.contains(&sample), "{text}");
    assert!(text.contains(&format!("millstream_engine_info{{segment=\"{segment}\",")), "{text}");
    let status = |key: &str| {
        let (head, text) = get(&http, "/status");
        assert!(head.contains("content-type: application/json"), "{head}");
        let status: Value = serde_json::from_str(&text).unwrap();
        status[key].clone()
    };
    assert_eq!(status("segment"), *segment);
    let served = || {
        let transports = status("transports");
        let mut all = transports.as_array().unwrap().iter();
        all.find(|it| it["transport"] == "rdma").unwrap()["connections_served"].clone()
    };
    assert_eq!(served(), 0);
    let (_writer, _) = writer(&segment);
    eventually("a connection", || served() == 1);
    assert!(get(&http, "/other").0.starts_with("HTTP/1.1 404 "));
}

#[test]
fn a_setting_says_where_too_and_nothing_is_served_otherwise() {
    let ready = |variable: &str| {
        let mut command = millstream();
        command.args(["node", "--protocol=local", "--bind", &address(), "--buffer=1"]);
        let mut node = Running::start("node", command.env("MILLSTREAM_METRICS_LISTEN", variable));
        node.ready()["http"].clone()
    };
    assert_eq!(ready(""), Value::Null);
    assert!(ready("0").as_str().unwrap().starts_with("127.0.0.1:"));
}

#[test]
fn an_address_that_is_taken_or_none_is_said() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap().to_string();
    let node = |http: &str| {
        run(&["node", "--protocol=local", "--bind", &address(), "--buffer=1", "--http", http])
    };
    let output = node(&at);
    let sentence = output.failure(1);
    assert!(sentence.starts_with(&format!("--http: cannot listen on {at}: ")), "{sentence}");
    assert!(node("nowhere").failure(2).contains("ADDRESS:PORT"));
    let node = |variable: &str, more: &[&str]| {
        let mut command = millstream();
        command.args(["node", "--protocol=local", "--bind", &address(), "--buffer=1"]).args(more);
        let node = Running::start("node", command.env("MILLSTREAM_METRICS_LISTEN", variable));
        node.output().failure(1).to_owned()
    };
    for (sentence, who) in [
        (node(&at, &[]), "MILLSTREAM_METRICS_LISTEN"),
        (node("0", &["--set", &format!("metrics.listen={at}")]), "argument"),
    ] {
        let expected = format!("metrics.listen ({who}): cannot listen on {at}: ");
        assert!(sentence.starts_with(&expected), "{sentence}");
    }
}

#[test]
fn nodes_that_commands_start_for_themselves_serve_no_metrics() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap().to_string();
    let folder = Folder::new();
    let file = folder.file("settings.toml");
    fs::write(&file, format!("[metrics]\nlisten = \"{at}\"\n")).unwrap();
    let bench = ["bench", "transfer", "--protocol=rdma:soft", "--op=write", "--block-size=4KiB"];
    let bench = [&bench[..], &["--duration=10ms", "--working-set=1MiB"]].concat();
    let set = format!("metrics.listen={at}");
    let demo = ["demo", "--file-size=1MiB", "--vector-size=4"];
    for arguments in [bench.clone(), [&bench[..], &["--set", &set]].concat(), demo.to_vec()] {
        for (variable, value) in [("MILLSTREAM_METRICS_LISTEN", &at), ("MILLSTREAM_CONFIG", &file)]
        {
            let mut command = millstream();
            command.args(&arguments).env(variable, value);
            Running::start("command", &mut command).output().success();
        }
    }
}

#[test]
fn what_moves_is_shown_as_json_and_as_a_table() {
    let (node, segment) = node("64MiB", &[]);
    let (writer, http) = writer(&segment);
    let find = |view: &Value, list: &str| {
        let all = view["processes"][0][list].as_array().unwrap();
        all.iter().find(|it| it["transport"] == "rdma").cloned()
    };
    let look = || run(&["top", "--json", "--interval=100ms", &http]).success().json();
    let mut view = Value::Null;
    let is_positive = |value: &Value| value.as_f64().is_some_and(|value| value > 0.0);
    // An interval in which something ended, and in which that was timed.
    eventually("requests that end", || {
        view = look();
        let (rail, transport) = (find(&view, "rails"), find(&view, "transports"));
        rail.is_some_and(|rail| is_positive(&rail["written_bytes_per_s"]))
            && transport.is_some_and(|transport| {
                is_positive(&transport["requests_per_s"])
                    && is_positive(&transport["latency_us"]["p99"])
            })
    });
    let rail = find(&view, "rails").unwrap();
    assert_eq!(rail["state"], "up", "{rail}");
    assert_eq!(rail["peer"], *segment, "{rail}");
    assert_eq!((&rail["read_bytes_per_s"], &rail["failed_slices"]), (&0.0.into(), &0.into()));

    // Here stdout is no terminal.
    let output = run(&["top", "--interval=100ms", &http]).success();
    let lines: Vec<_> = output.stdout.lines().collect();
    assert!(lines[0].starts_with(&http), "{output:?}", output = output.stdout);
    assert!(!output.stdout.contains('\x1b'));
    let has = |words: &[&str]| {
        lines.iter().any(|line| {
            let found: Vec<_> = line.split_whitespace().collect();
            words.iter().all(|word| found.contains(word))
        })
    };
    assert!(has(&["rdma", "up", &segment]), "{}", output.stdout);
    drop((writer, node));
}

#[test]
fn who_does_not_answer_is_named_and_others_are_shown() {
    let nobody = format!("{}:9", address());
    let output = run(&["top", "--once", "--interval=50ms", &nobody]);
    assert!(output.failure(1).starts_with(&nobody), "{}", output.stderr);
    let (_node, http, segment) = watched();
    let view = run(&["top", "--json", "--interval=50ms", &nobody, &http]).success().json();
    assert!(view["processes"][0]["error"].as_str().unwrap().starts_with(&nobody), "{view}");
    assert_eq!(view["processes"][1]["segment"], *segment, "{view}");
    // A server of something else.
    let stranger = TcpListener::bind((&*address(), 0)).unwrap();
    let at = stranger.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for stream in stranger.incoming().flatten() {
            let mut stream = stream;
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n\x1b[2J\n");
        }
    });
    let output = run(&["top", "--once", "--interval=50ms", &at]);
    assert!(output.failure(1).contains("is no status"), "{}", output.stderr);
}

#[test]
fn arguments_are_checked() {
    for (arguments, what) in [
        (["top", "--once", "nowhere"], "nowhere"),
        (["top", "--interval=0s", "1"], "--interval"),
        (["top", "--once", "a:b"], "a:b"),
    ] {
        let output = run(&arguments);
        assert!(output.failure(2).contains(what), "{}", output.stderr);
    }
}

/// A shell in a pseudo-terminal, which `script` makes.
struct Terminal {
    child: Child,
    keys: ChildStdin,
    shown: Receiver<Vec<u8>>,
    text: String,
}

impl Terminal {
    fn run(commands: &str) -> Self {
        let mut command = Command::new("script");
        command.args(["--quiet", "--flush", "--return", "--command", commands, "/dev/null"]);
        command.env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let keys = child.stdin.take().unwrap();
        let mut output = child.stdout.take().unwrap();
        let (sender, shown) = mpsc::channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { child, keys, shown, text: String::new() }
    }

    /// Waits until this is shown.
    fn wait_for(&mut self, what: &str) {
        while !self.text.contains(what) {
            let Ok(more) = self.shown.recv_timeout(PATIENCE) else {
                panic!("{what:?} is not shown: {:?}", self.text)
            };
            self.text.push_str(&String::from_utf8_lossy(&more));
        }
    }

    fn type_in(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).unwrap();
        self.keys.flush().unwrap();
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn on_a_terminal_it_shows_more_until_a_key_ends_it_and_leaves_all_as_it_was() {
    if !common::is_installed("script") || !common::is_installed("stty") {
        return common::skip(
            "there is no script or stty, which Debian has in bsdutils and coreutils",
        );
    }
    let (_node, http, segment) = watched();
    let folder = Folder::new();
    let (before, after) = (folder.file("before"), folder.file("after"));
    for key in [b"q".as_slice(), b"Q", b"\x03", b"xyz q"] {
        let commands = format!(
            "stty -a > {before}; {PROGRAM} top --interval 100ms {http}; echo ended $?; stty -a > {after}; \
             echo all over"
        );
        let mut terminal = Terminal::run(&commands);
        // Twice: it goes on.
        terminal.wait_for("\x1b[?1049h");
        for _ in 0..2 {
            terminal.wait_for(&segment);
            let shown = terminal.text.find(&segment).unwrap() + segment.len();
            terminal.text.drain(..shown);
        }
        terminal.type_in(key);
        terminal.wait_for("all over");
        let text = &terminal.text;
        assert!(text.contains("\x1b[?25h\x1b[?1049l") && text.contains("ended 0"), "{text:?}");
        let modes = |path: &str| fs::read_to_string(path).unwrap();
        assert!(modes(&before).contains("icanon"));
        assert_eq!(modes(&after), modes(&before), "{key:?}");
    }
}

#[test]
fn a_signal_leaves_the_terminal_as_it_was_too() {
    if !common::is_installed("script") || !common::is_installed("stty") {
        return common::skip(
            "there is no script or stty, which Debian has in bsdutils and coreutils",
        );
    }
    let (_node, http, segment) = watched();
    let folder = Folder::new();
    let (before, after, id) = (folder.file("before"), folder.file("after"), folder.file("id"));
    // The shell becomes the command, so that its number is known.
    let commands = format!(
        "stty -a > {before}; sh -c 'echo $$ > {id}; exec {PROGRAM} top --interval 100ms {http}'; \
         stty -a > {after}; echo all over"
    );
    let mut terminal = Terminal::run(&commands);
    terminal.wait_for(&segment);
    let id = fs::read_to_string(id).unwrap();
    assert!(Command::new("kill").arg(id.trim()).status().unwrap().success());
    terminal.wait_for("all over");
    assert!(terminal.text.contains("\x1b[?25h\x1b[?1049l"), "{:?}", terminal.text);
    assert_eq!(fs::read_to_string(after).unwrap(), fs::read_to_string(before).unwrap());
}
