//! Servers that say what they are told to, whatever they are asked.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

/// What a server does on a connection, when the first byte of a request has come.
#[derive(Clone, Debug)]
pub(crate) enum Script {
    /// Says this and closes.
    Say(Vec<u8>),
    /// Says this and nothing more.
    Hang(Vec<u8>),
    /// Says the first, and then the second for as long as anybody listens.
    Forever(Vec<u8>, Vec<u8>),
    /// Says this byte by byte, each some milliseconds after the other.
    Slowly(Vec<u8>),
    /// Answers each request, of which there is no more than one under way, with this.
    Each(Vec<u8>),
}

/// A server on a port of its own. Its threads end with the test's process.
pub(crate) struct Fake {
    port: u16,
    connections: Arc<AtomicU32>,
}

impl Fake {
    pub(crate) fn new(script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&connections);
        thread::spawn(move || {
            for stream in listener.incoming() {
                count.fetch_add(1, Ordering::Relaxed);
                let script = script.clone();
                thread::spawn(move || play(stream.unwrap(), script));
            }
        });
        Self { port, connections }
    }

    pub(crate) const fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }
}

/// A server that takes connections and says nothing.
pub(crate) fn silent() -> Fake {
    Fake::new(Script::Hang(Vec::new()))
}

fn play(mut stream: TcpStream, script: Script) {
    let mut request = [0; 4096];
    // The client may have gone away at any time.
    let Ok(1..) = stream.read(&mut request) else { return };
    match script {
        Script::Say(bytes) => {
            let _ = stream.write_all(&bytes);
            // A close before all of the request is read would take the reply back (RFC 9112 9.6).
            let _ = stream.shutdown(Shutdown::Write);
            drain(&mut stream);
        }
        Script::Hang(bytes) => {
            let _ = stream.write_all(&bytes);
            drain(&mut stream);
        }
        Script::Forever(first, then) => {
            let mut sent = stream.write_all(&first);
            while sent.is_ok() {
                sent = stream.write_all(&then);
            }
        }
        Script::Slowly(bytes) => {
            for byte in bytes {
                thread::sleep(Duration::from_millis(20));
                if stream.write_all(&[byte]).is_err() {
                    return;
                }
            }
        }
        Script::Each(bytes) => loop {
            if stream.write_all(&bytes).is_err() {
                return;
            }
            let Ok(1..) = stream.read(&mut request) else { return };
        },
    }
}

fn drain(stream: &mut TcpStream) {
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(1..) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}
