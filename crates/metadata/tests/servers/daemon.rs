//! Servers as processes.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use millstream_metadata::KeyValue;

use crate::until;

/// A server, which is killed when this is dropped.
pub(crate) struct Daemon {
    program: &'static str,
    arguments: Vec<String>,
    directory: PathBuf,
    child: Option<Child>,
}

impl Daemon {
    /// Starts a program in a directory of its own. `None`, and the test is skipped, where the program is not
    /// installed.
    pub(crate) fn start(program: &'static str, arguments: Vec<String>) -> Option<Self> {
        if !installed(program) {
            skip(&format!("{program} is not installed (`cargo xtask test` does)"));
            return None;
        }
        let directory = std::env::temp_dir().join(format!("millstream-{program}-{}", port()));
        let mut daemon = Self { program, arguments, directory, child: None };
        daemon.empty();
        daemon.run();
        Some(daemon)
    }

    /// Runs it, once more.
    pub(crate) fn run(&mut self) {
        let log =
            File::options().create(true).append(true).open(self.directory.join("log")).unwrap();
        // A server must not outlive a test that was killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", self.program]).args(&self.arguments);
        command.current_dir(&self.directory).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.child = Some(command.spawn().unwrap());
    }

    /// Waits until it answers.
    pub(crate) fn ready(&mut self, client: &dyn KeyValue) {
        until(&format!("{} answers", self.program), || {
            let ended = self.child.as_mut().and_then(|child| child.try_wait().unwrap());
            if let Some(status) = ended {
                let log = fs::read_to_string(self.directory.join("log")).unwrap_or_default();
                panic!("{} ended, {status}: {log}", self.program);
            }
            client.get("is it there?").ok()
        });
    }

    /// Kills it, so that it can do nothing any more.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Sends it a signal by name. Of STOP, each of its threads has heard then.
    pub(crate) fn signal(&self, name: &str) {
        let id = self.child.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args(["-s", name, &id]).status().unwrap().success());
        if name == "STOP" {
            let is_stopped = |thread: fs::DirEntry| {
                let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
                // Behind the name, which may have any characters (proc(5)).
                stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with('T'))
            };
            until(&format!("{} has stopped", self.program), || {
                let mut threads = fs::read_dir(format!("/proc/{id}/task")).unwrap();
                threads.all(|thread| is_stopped(thread.unwrap())).then_some(())
            });
        }
    }

    /// Takes all of its files away.
    pub(crate) fn empty(&self) {
        let _ = fs::remove_dir_all(&self.directory);
        fs::create_dir_all(&self.directory).unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

fn skip(reason: &str) {
    let required = std::env::var_os("MILLSTREAM_REQUIRE").is_some_and(|value| value == "all");
    assert!(!required, "cannot be skipped, as MILLSTREAM_REQUIRE=all: {reason}");
    println!("skipped: {reason}");
}

/// A port on which nobody listens. It is below those that the kernel gives to connections, or one of these
/// would have it while a server is down.
pub(crate) fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    /// Ports that each process has for itself, as far as no other one has its number modulo 200: more than
    /// all tests take.
    const EACH: u16 = 100;
    loop {
        let mine = u16::try_from(std::process::id() % 200).unwrap() * EACH;
        let port = 12_000 + mine + NEXT.fetch_add(1, Ordering::Relaxed) % EACH;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
