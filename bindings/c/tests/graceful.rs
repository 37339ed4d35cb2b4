//! Engines that use a metadata server, and take their entries back when their process ends.

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use common::server::server;
use common::{Program, compile};

/// The entries that are left when a program has ended this way, of as many as there were.
fn left(program: &Program, end: &str, signal: Option<&str>) -> (usize, usize) {
    let (uri, entries) = server();
    let mut command = program.command();
    let mut child = command.args([&uri, end]).stdout(Stdio::piped()).spawn().unwrap();
    let mut name = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut name).unwrap();
    assert!(name.starts_with("127.0.0.1:"), "{name}");
    let before = entries.lock().unwrap().len();
    if let Some(signal) = signal {
        let killed = Command::new("kill").args([signal, &child.id().to_string()]).status();
        assert!(killed.unwrap().success());
    }
    let status = child.wait().unwrap();
    assert_eq!(status.success(), end == "exit", "{status}");
    let left = entries.lock().unwrap().len();
    (before, left)
}

#[test]
fn an_engine_tells_the_server_that_it_ends_with_its_process() {
    let program = compile("graceful");
    for signal in ["-TERM", "-INT"] {
        assert_eq!(left(&program, "signal", Some(signal)), (2, 0), "{signal}");
        assert_eq!(
            left(&program, "plain", Some(signal)),
            (2, 2),
            "{signal}, and nothing was asked for"
        );
    }
    assert_eq!(left(&program, "exit", None).1, 0);
    assert_eq!(left(&program, "fork", None).1, 0, "in a fork");
}
