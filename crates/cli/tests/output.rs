//! What is printed where: streams that take nothing, names that would act on a terminal, failures
//! as JSON, logs.

mod common;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

use common::{Folder, Running, address, is_installed, millstream, node, run, skip, towards};
use millstream_metadata::{Client, Frame, FrameType, HandShakeDesc};

fn full() -> File {
    File::options().write(true).open("/dev/full").unwrap()
}

fn with_stdout(arguments: &[&str], stdout: impl Into<Stdio>) -> Output {
    millstream().args(arguments).stdout(stdout).stderr(Stdio::piped()).output().unwrap()
}

/// It ended with status 1 and one sentence that says this.
fn failed(output: &Output, says: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("millstream: ") && stderr.contains(says), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

/// Commands that print text, JSON, help and scripts.
const PRINTING: [&[&str]; 8] = [
    &["--help"],
    &["--version"],
    &["help", "put"],
    &["completions", "bash"],
    &["topology"],
    &["topology", "--json"],
    &["sim", "--scenario=swarm"],
    &["sim", "--scenario=swarm", "--json"],
];

#[test]
fn a_full_stdout_is_a_failure() {
    for arguments in PRINTING {
        failed(&with_stdout(arguments, full()), "cannot write to stdout: No space left");
    }
}

#[test]
fn a_closed_stdout_is_a_failure_and_null_is_none() {
    for arguments in PRINTING {
        let mut shell = Command::new("sh");
        shell.args(["-c", r#""$@" >&-"#, "sh", env!("CARGO_BIN_EXE_millstream")]);
        failed(&shell.args(arguments).output().unwrap(), "cannot write to stdout: it is closed");
        // Opened for reading too, as some programs do.
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        assert!(with_stdout(arguments, null).status.success(), "{arguments:?}");
    }
}

#[test]
fn a_reader_that_is_gone_ends_the_command_without_a_word() {
    for arguments in PRINTING {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = with_stdout(arguments, writer);
        // SIGPIPE, as with other programs.
        assert_eq!(output.status.signal(), Some(13), "{arguments:?}");
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn put_and_get_say_that_their_report_was_not_taken() {
    let folder = Folder::new();
    let file = folder.file("file");
    std::fs::write(&file, "some bytes").unwrap();
    let (_node, segment) = node("1KiB", &[]);
    for command in ["put", "get"] {
        for more in [&["--json"][..], &[]] {
            let mut process = millstream();
            process.arg(command).args(towards(&segment)).args(more).arg(&file).stdout(full());
            failed(&process.output().unwrap(), "cannot write to stdout");
        }
    }
}

#[test]
fn a_daemon_whose_ready_line_is_not_taken_ends() {
    let bind = address();
    let node = ["node", "--name=n", "--protocol=rdma:soft", "--buffer=1KiB", "--bind", &bind];
    failed(&with_stdout(&node, full()), "cannot write to stdout");
    failed(&with_stdout(&["controller", "--listen=127.0.0.1:0"], full()), "cannot write to stdout");
    let listen = format!("{}:0", address());
    let mut command = millstream();
    let mut controller =
        Running::start("controller", command.args(["controller", "--listen", &listen]));
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    let bind = address();
    let switch = ["switch", "--controller", &listen, "--name=s", "--bind", &bind];
    failed(&with_stdout(&switch, full()), "cannot write to stdout");
}

#[test]
fn a_stderr_that_takes_nothing_changes_no_status() {
    let status = |arguments: &[&str]| {
        let mut process = millstream();
        process.args(arguments).stdout(Stdio::null()).stderr(full());
        process.status().unwrap().code()
    };
    assert_eq!(status(&["topology", "-vv"]), Some(0));
    assert_eq!(status(&["topology", "--sysfs=/nowhere"]), Some(1));
    assert_eq!(status(&["frobnicate"]), Some(2));
    assert_eq!(status(&[]), Some(2));
}

#[test]
fn names_do_not_act_on_a_terminal() {
    let folder = Folder::new();
    let name = b"a\x1b]0;owned\x07\nmillstream: all is well\x9b31m\xe2\x80\xaeb";
    let shown = r"a\x1b]0;owned\x07\nmillstream: all is well\x9b31m\u{202e}b";
    let path = folder.path().join(OsStr::from_bytes(name));
    let (_node, segment) = node("1KiB", &[]);
    let run = |arguments: &[&str], file: &OsStr| {
        let mut process = millstream();
        process.args(arguments).args(towards(&segment)).arg(file);
        Running::start(arguments[0], &mut process).output()
    };
    let is_quiet = |text: &str| text.trim_end().chars().all(|c| !c.is_control() && c != '\u{202e}');

    let missing = run(&["put"], path.as_os_str());
    assert!(missing.failure(1).contains(shown), "{}", missing.stderr);
    assert!(is_quiet(&missing.stderr), "{:?}", missing.stderr);

    std::fs::write(&path, "some bytes").unwrap();
    for command in ["put", "get"] {
        let done = run(&[command], path.as_os_str()).success();
        assert!(done.stdout.contains(shown) && is_quiet(&done.stdout), "{:?}", done.stdout);
    }
    let json =
        run(&["put", "--json"], folder.path().join(OsStr::from_bytes(b"\x9b\xff")).as_os_str());
    assert!(is_quiet(&json.stdout), "{:?}", json.stdout);

    // A name that is parsed, and one that no command has.
    for (arguments, shown) in [
        (&["get", "--segment=\x1b[2Jx", "f"][..], r"\u{1b}[2Jx"),
        (&["a\u{202e}b\u{9b}"], r"a\u{202e}b\x9b"),
    ] {
        let mut process = millstream();
        let output = Running::start("millstream", process.args(arguments)).output();
        assert!(output.failure(2).contains(shown), "{:?}", output.stderr);
        assert!(is_quiet(&output.stderr), "{:?}", output.stderr);
    }
}

#[test]
fn failures_are_json_too_where_that_is_asked_for() {
    let folder = Folder::new();
    let missing = folder.file("missing");
    let segment = format!("{}:1", address());
    let get = ["get", "--json", "--segment", &segment, &missing];
    for (arguments, status) in [
        (&get[..], 1),
        (&["sim", "--json", "--pcap", "no/such/folder"], 1),
        (&["topology", "--json", "--sysfs", "no/such/folder"], 1),
        // Usage, whether clap finds it or we do.
        (&["put", "--json"], 2),
        (&["frobnicate", "--json"], 2),
        (&["sim", "--json", "--scenario=nothing"], 2),
    ] {
        let output = run(arguments);
        let sentence = output.failure(status);
        let object = output.json();
        let error = &object["error"];
        assert_eq!(error["exit_status"], status, "{object}");
        let causes = error["causes"].as_array().unwrap().iter();
        let parts = [&error["message"]].into_iter().chain(causes);
        let parts: Vec<&str> = parts.map(|part| part.as_str().unwrap()).collect();
        assert_eq!(parts.join(": "), sentence, "together they are the sentence");
    }
    assert!(run(&get).json()["error"]["message"].as_str().unwrap().contains(&segment));
    // `--json` as a file's name asks for nothing.
    let file = run(&["put", "--segment", &segment, "--", "--json"]);
    assert!(file.stdout.is_empty(), "{}", file.stdout);
}

#[test]
fn a_stdout_that_gets_bytes_gets_nothing_else() {
    let (_node, segment) = node("1KiB", &[]);
    let get = |length: &str| {
        let mut process = millstream();
        process.args(["get", "--json", length]).args(towards(&segment)).arg("-");
        process.output().unwrap()
    };
    let done = get("--length=5");
    assert_eq!(done.stdout, [0; 5]);
    let report: serde_json::Value = serde_json::from_slice(&done.stderr).unwrap();
    assert_eq!(report["bytes"], 5);
    let failed = get("--length=2KiB");
    assert!(failed.stdout.is_empty(), "{}", String::from_utf8_lossy(&failed.stdout));
    let stderr = String::from_utf8(failed.stderr).unwrap();
    let (sentence, object) = stderr.trim_end().split_once('\n').unwrap();
    assert!(sentence.contains("2048"), "{stderr}");
    let object: serde_json::Value = serde_json::from_str(object).unwrap();
    assert_eq!(object["error"]["exit_status"], 2);
}

#[test]
fn verbose_says_what_is_tried() {
    let folder = Folder::new();
    let file = folder.file("file");
    std::fs::write(&file, "some bytes").unwrap();
    let (_node, segment) = node("1KiB", &[]);
    let put = |flags: &[&str], variables: &[(&str, &str)]| {
        let mut process = millstream();
        process.args(flags).arg("put").args(towards(&segment)).arg(&file);
        process.envs(variables.iter().copied());
        Running::start("put", &mut process).output().success().stderr
    };
    assert_eq!(put(&[], &[]), "");
    let steps = ["device open", "segment open", "connecting", "connected"];
    for log in [put(&["-v"], &[]), put(&[], &[("RUST_LOG", "info")])] {
        let mut places =
            steps.map(|step| log.find(step).unwrap_or_else(|| panic!("{step}: {log}")));
        assert!(places.is_sorted(), "{places:?}");
        places.sort_unstable();
        assert!(log.contains(&segment) && !log.contains("DEBUG"), "{log}");
        assert!(!log.contains('\x1b'), "no colours: {log:?}");
    }
    assert!(put(&["-vv"], &[]).contains("DEBUG"));
    // Our own variable comes before any program's, and -v before both.
    let both = [("MILLSTREAM_LOG", "off"), ("RUST_LOG", "debug")];
    assert_eq!(put(&[], &both), "");
    assert!(put(&["-v"], &both).contains("INFO"));
    let wrong = put(&[], &[("RUST_LOG", "a=b=c")]);
    assert!(wrong.contains("RUST_LOG is not understood"), "{wrong}");
}

/// What a node logs of so many handshakes that it refuses.
fn log_of_refusals(refusals: usize, handshake: &[u8], variables: &[(&str, &str)]) -> String {
    let bind = address();
    let mut command = millstream();
    command.args(["node", "--protocol=rdma:soft", "--buffer=1KiB", "--bind", &bind]);
    let mut node = Running::start("node", command.envs(variables.iter().copied()));
    let peer = node.ready()["segment"].as_str().unwrap().parse().unwrap();
    for _ in 0..refusals {
        let request = Frame::new(FrameType::Connection, handshake);
        Client::default().call(&peer, &request).unwrap();
    }
    node.signal("TERM");
    node.output().success().stderr
}

#[test]
fn what_happens_again_and_again_is_logged_a_few_times() {
    const REFUSED: usize = 200;
    // For no NIC at all.
    let log = log_of_refusals(REFUSED, &HandShakeDesc::default().to_json(), &[]);
    let told = log.lines().filter(|line| line.contains("handshake refused")).count();
    let counted: usize = log
        .lines()
        .filter_map(|line| line.split_once(" more like this in the last 10 s"))
        .filter_map(|(line, _)| line.rsplit(' ').next()?.parse::<usize>().ok())
        .sum();
    assert_eq!(told + counted, REFUSED, "each is told or counted: {log}");
    // On a slow machine it took longer than a window.
    assert!(told < REFUSED / 2, "{log}");
    assert!(log.lines().all(|line| line.contains("WARN millstream_transfer::rpc")), "{log}");

    // Details are wanted by who asks for them.
    let log = log_of_refusals(20, b"no JSON", &[("MILLSTREAM_LOG", "millstream_transfer=debug")]);
    assert_eq!(log.lines().filter(|line| line.contains("no handshake")).count(), 20, "{log}");
}

#[test]
fn a_switch_without_a_controller_warns_ever_more_rarely() {
    let (bind, nowhere) = (address(), format!("{}:1", address()));
    let mut command = millstream();
    command.args(["switch", "-vv", "--name=s", "--controller", &nowhere, "--bind", &bind]);
    let mut switch = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let log = BufReader::new(switch.stderr.take().unwrap()).lines().map(Result::unwrap);
    let attempts = log.filter(|line| line.contains("no controller; trying again"));
    // Each is tried later than the one before: the fifth after less than a second.
    let levels: Vec<bool> = attempts.take(5).map(|line| line.contains(" WARN ")).collect();
    switch.kill().unwrap();
    switch.wait().unwrap();
    assert_eq!(levels, [true, true, false, true, false]);
}

#[test]
fn help_has_colours_on_a_terminal_that_may_have_them() {
    if !is_installed("script") {
        return skip("script is not installed");
    }
    let help = |no_color: &str| {
        let mut terminal = Command::new("script");
        terminal.args(["--quiet", "--return", "--command"]);
        terminal.arg(format!("{} --help", env!("CARGO_BIN_EXE_millstream"))).arg("/dev/null");
        terminal.env("TERM", "xterm").env("NO_COLOR", no_color).stdin(Stdio::null());
        Running::start("script", &mut terminal).output().success().stdout
    };
    assert!(help("").contains('\x1b'));
    let plain = help("1");
    assert!(plain.contains("allreduce") && !plain.contains('\x1b'), "{plain:?}");
    assert!(!run(&["--help"]).success().stdout.contains('\x1b'), "a pipe is no terminal");
}
