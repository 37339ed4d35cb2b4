//! A metadata server for programs.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

pub(crate) type Entries = Arc<Mutex<BTreeMap<String, String>>>;

/// A metadata server, by the original's HTTP: its URI, and what it holds.
pub(crate) fn server() -> (String, Entries) {
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
