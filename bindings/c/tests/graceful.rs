//! Engines that use a metadata server, and take their entries back when their process ends.

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use common::{Program, compile};

type Entries = Arc<Mutex<BTreeMap<String, String>>>;

/// A metadata server, by the original's HTTP: its URI, and what it holds.
fn server() -> (String, Entries) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let uri = format!("http://{}/metadata", listener.local_addr().unwrap());
    let entries = Entries::default();
    let held = Arc::clone(&entries);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let held = Arc::clone(&held);
            thread::spawn(move || while answer(&stream, &held).is_some() {});
        }
    });
    (uri, entries)
}

/// Answers a request; `None` when there is none any more.
fn answer(stream: &TcpStream, held: &Entries) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|length| *length > 0)?;
    let mut words = line.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let key = target.split_once("key=")?.1.replace("%2F", "/");
    let mut length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        if header.trim().is_empty() {
            break;
        }
        let (name, value) = header.split_once(':')?;
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let mut held = held.lock().unwrap();
    let (status, body) = match method.as_str() {
        "PUT" => {
            held.insert(key, String::from_utf8(body).ok()?);
            ("200 OK", String::new())
        }
        "DELETE" => (held.remove(&key).map_or("404 Not Found", |_| "200 OK"), String::new()),
        _ => match held.get(&key) {
            Some(text) => ("200 OK", text.clone()),
            None => ("404 Not Found", String::new()),
        },
    };
    let length = body.len();
    write!(&mut &*stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}").ok()
}

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
}
