//! What the tests of the command share: running it, addresses of their own, waiting.

#![allow(dead_code, reason = "each test binary uses a part")]

#[cfg(feature = "tls")]
pub(crate) mod certificates;

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// The command's file.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_millstream");

/// For anything that will happen, on a busy machine too.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What a command printed, and how it ended.
pub(crate) struct Output {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Output {
    pub(crate) fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// It succeeded.
    pub(crate) fn success(self) -> Self {
        let Self { status, stdout, stderr } = &self;
        assert!(status.success(), "{status}\nstdout: {stdout}\nstderr: {stderr}");
        self
    }

    /// Stdout, which must be one JSON object on one line.
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.stdout.lines().count(), 1, "{:?}", self.stdout);
        let value: Value = serde_json::from_str(&self.stdout).unwrap();
        assert!(value.is_object(), "{value}");
        value
    }

    /// It failed with this exit status and one sentence on stderr beside notes, which is returned.
    pub(crate) fn failure(&self, code: i32) -> &str {
        let Self { stdout, stderr, .. } = self;
        assert_eq!(self.code(), Some(code), "stdout: {stdout}\nstderr: {stderr}");
        let mut lines = stderr.lines().filter(|line| !line.starts_with("note: "));
        let sentence = lines.next().and_then(|line| line.strip_prefix("millstream: "));
        assert_eq!(lines.next(), None, "{stderr:?}");
        sentence.unwrap_or_else(|| panic!("{stderr:?}"))
    }
}

/// The command, without arguments.
pub(crate) fn millstream() -> Command {
    let mut command = Command::new(PROGRAM);
    command.env_remove("MILLSTREAM_LOG").env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Runs the command to its end.
pub(crate) fn run(arguments: &[&str]) -> Output {
    Running::start("millstream", millstream().args(arguments)).output()
}

/// A process that ends with this value.
pub(crate) struct Running {
    name: String,
    child: Child,
    stdout: mpsc::Receiver<String>,
    stderr: mpsc::Receiver<String>,
}

impl Running {
    pub(crate) fn start(name: &str, command: &mut Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        let stdout = lines(child.stdout.take().unwrap());
        let stderr = lines(child.stderr.take().unwrap());
        Self { name: name.to_owned(), child, stdout, stderr }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The next line that it prints.
    pub(crate) fn line(&mut self) -> String {
        self.line_within(PATIENCE)
    }

    pub(crate) fn line_within(&mut self, limit: Duration) -> String {
        match self.stdout.recv_timeout(limit) {
            Ok(line) => line,
            Err(_) => {
                let _ = self.child.kill();
                let stderr = self.stderr();
                panic!("{} printed no line: {stderr}", self.name)
            }
        }
    }

    /// The next line that it prints on stderr.
    pub(crate) fn error_line(&mut self) -> String {
        let line = self.stderr.recv_timeout(PATIENCE);
        line.unwrap_or_else(|_| panic!("{} says nothing on stderr", self.name))
    }

    /// Waits until a server of `rdma` listens. Trying its port would be taken for a stranger, or take
    /// the port away from it.
    pub(crate) fn listens(&mut self, at: &str) {
        assert_eq!(self.error_line(), format!("note: waiting for a client at {at}"));
    }

    /// The JSON of its `ready` line.
    pub(crate) fn ready(&mut self) -> Value {
        let line = self.line();
        let json = line.strip_prefix("ready ").unwrap_or_else(|| panic!("{line:?}"));
        serde_json::from_str(json).unwrap()
    }

    /// Its stdin, to write to once; it must have been started with a pipe there.
    pub(crate) fn stdin(&mut self) -> ChildStdin {
        self.child.stdin.take().unwrap()
    }

    /// Waits until it has ended.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn signal(&self, signal: &str) {
        let id = self.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &id]).status().unwrap().success());
    }

    /// Its end and all that it printed and was not read.
    pub(crate) fn output(self) -> Output {
        self.output_within(PATIENCE)
    }

    pub(crate) fn output_within(mut self, limit: Duration) -> Output {
        let start = Instant::now();
        let mut stdout = String::new();
        loop {
            match self.stdout.recv_timeout(limit.saturating_sub(start.elapsed())) {
                Ok(line) => stdout.push_str(&(line + "\n")),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    panic!("{} does not end; it printed {stdout:?}", self.name)
                }
            }
        }
        let status = self.child.wait().unwrap();
        Output { status, stdout, stderr: self.stderr() }
    }

    /// What it printed on stderr and was not read; it must have ended.
    fn stderr(&mut self) -> String {
        self.stderr.iter().map(|line| line + "\n").collect()
    }
}

/// The lines of a stream as they come.
fn lines(stream: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        while stream.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
            let text = String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(&line));
            if sender.send(text.into_owned()).is_err() {
                return;
            }
            line.clear();
        }
    });
    lines
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An address of 127/8 that no other test has, in this process or another.
pub(crate) fn address() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let process = std::process::id();
    let host = NEXT.fetch_add(1, Ordering::Relaxed);
    Ipv4Addr::new(127, 128 | (process >> 8) as u8 & 63, process as u8, host).to_string()
}

/// A folder that is removed with this value.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("millstream-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// A path in it, as text.
    pub(crate) fn file(&self, name: &str) -> String {
        self.0.join(name).into_os_string().into_string().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Bytes without a period, the same for the same seed.
pub(crate) fn bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// A node on an address of its own, and its segment's name.
pub(crate) fn node(buffer: &str, more: &[&str]) -> (Running, String) {
    let address = address();
    let mut command = millstream();
    command.args(["node", "--name", "test", "--metadata", "p2p", "--protocol", "rdma:soft"]);
    command.args(["--bind", &address, "--buffer", buffer]).args(more);
    let mut node = Running::start("node", &mut command);
    let ready = node.ready();
    let segment = ready["segment"].as_str().unwrap().to_owned();
    (node, segment)
}

/// The arguments of put, get and bench transfer that are always the same.
pub(crate) fn towards(segment: &str) -> Vec<String> {
    let bind = address();
    ["--metadata", "p2p", "--protocol", "rdma", "--bind", &bind, "--segment", segment]
        .map(str::to_owned)
        .to_vec()
}

/// Runs `put`, `get` or `bench transfer` towards a segment.
pub(crate) fn transfer(command: &[&str], segment: &str, more: &[&str]) -> Output {
    let mut process = millstream();
    process.args(command).args(towards(segment)).args(more);
    Running::start(command[0], &mut process).output()
}

/// Waits until something is so that gives no sign when it becomes so: another process's state.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// What `/proc` says of the processes that have not ended: process id, and from its state on, the
/// fields of `stat`.
fn processes() -> Vec<(u32, Vec<String>)> {
    let process = |entry: fs::DirEntry| {
        let id = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // After the name, which may contain anything.
        let fields = stat.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect();
        Some((id, fields))
    };
    let all = fs::read_dir("/proc").unwrap().filter_map(|entry| process(entry.ok()?));
    all.filter(|(_, fields): &(u32, Vec<String>)| fields[0] != "Z").collect()
}

/// The processes of a group that have not ended.
pub(crate) fn processes_of_group(group: u32) -> Vec<u32> {
    let group = group.to_string();
    let members = processes().into_iter().filter(|(_, fields)| fields[2] == group);
    members.map(|(id, _)| id).collect()
}

/// The child of a process that has these words among its arguments.
pub(crate) fn child(parent: u32, words: &[&str]) -> Option<u32> {
    let parent = parent.to_string();
    let of_parent = processes().into_iter().filter(|(_, fields)| fields[1] == parent);
    of_parent.map(|(id, _)| id).find(|id| {
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let arguments: Vec<&[u8]> = line.split(|&byte| byte == 0).collect();
        arguments
            .windows(words.len())
            .any(|some| some == words.iter().map(|w| w.as_bytes()).collect::<Vec<_>>())
    })
}

/// Time on processors that a process has used, in hundredths of a second.
pub(crate) fn processor_ticks(process: u32) -> u64 {
    let fields = processes().into_iter().find(|&(id, _)| id == process).unwrap().1;
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// A controller, a switch, and where the controller listens.
pub(crate) fn serve() -> ([Running; 2], String) {
    serve_with(&[])
}

/// The same, with more arguments for the switch.
pub(crate) fn serve_with(more: &[&str]) -> ([Running; 2], String) {
    let listen = format!("{}:0", address());
    let mut controller =
        Running::start("controller", millstream().args(["controller", "--listen", &listen]));
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    let bind = address();
    let arguments = ["switch", "--controller", &listen, "--name=s0", "--bind", &bind];
    let mut switch = Running::start("switch", millstream().args(arguments).args(more));
    switch.ready();
    ([controller, switch], listen)
}

/// Says that a test cannot run, or fails where everything must.
pub(crate) fn skip(reason: &str) {
    let required = std::env::var_os("MILLSTREAM_REQUIRE").is_some_and(|value| value == "all");
    assert!(!required, "cannot be skipped, as MILLSTREAM_REQUIRE=all: {reason}");
    println!("skipped: {reason}");
}

/// Whether a program can be started.
pub(crate) fn is_installed(program: impl AsRef<OsStr>) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// All ranks go on for so long, and all results are right.
pub(crate) fn goes_on(ranks: &mut [Running], duration: Duration) {
    let start = Instant::now();
    while start.elapsed() < duration {
        for rank in &mut *ranks {
            let line = rank.line();
            assert!(line.ends_with(" 0 wrong"), "{line}");
        }
    }
}
