//! Child processes of our own binary that never outlive us, and signals.
//!
//! A child gets SIGKILL from the kernel when its parent dies, however that dies. When we are told
//! to stop (SIGINT, SIGTERM, SIGHUP), children are stopped, scratch folders removed and engines
//! withdrawn from metadata servers first.

pub(crate) use millstream_net::baseline::processor_time;
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Serialize;

use crate::output::escaped;
use crate::{control_proofs, engine, log, output};

/// How long a child has between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(2);
/// Within this time after others have lost a child that was killed, it is seen to have ended: the kernel closes its
/// connections before its parent can wait for it.
pub(crate) const SEEN_TO_END: Duration = Duration::from_millis(500);
const POLL: Duration = Duration::from_millis(2);
/// How long a command that is told to stop may take to say what it has, and then to take back what metadata servers have
/// of it.
const LAST_WORDS_TIME: Duration = Duration::from_secs(2);
/// Within this time a signal that has come is noticed.
const NOTICED: Duration = Duration::from_millis(100);
/// A daemon that is told to stop so long after it was told ends at once. Sooner it may be the same word: a terminal tells
/// its parent, too, which then tells it.
const TOLD_AGAIN: Duration = Duration::from_secs(1);
/// How often who waits for a line looks whether it is told to stop.
const GLANCE: Duration = Duration::from_millis(20);

/// Lines of a child's stdout that wait to be read; the child waits when they are more.
const LINES_WAITING: usize = 256;
/// Lines of a child's stderr that are kept, to tell why it failed.
const LINES_KEPT: usize = 8;

/// What must go when we are told to stop.
#[derive(Default)]
struct Belongings {
    /// Process ids of children that were not waited for yet.
    children: Vec<u32>,
    /// Folders and files.
    scratch: Vec<PathBuf>,
}

static BELONGINGS: Mutex<Belongings> =
    Mutex::new(Belongings { children: Vec::new(), scratch: Vec::new() });

/// The signal that told us to stop; 0 if none has.
static TOLD: AtomicI32 = AtomicI32::new(0);
/// The command has something to say before it stops.
static LAST_WORDS: AtomicBool = AtomicBool::new(false);

fn belongings() -> MutexGuard<'static, Belongings> {
    BELONGINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The signals that ask a process to stop, held back from every thread, to be waited for.
pub(crate) struct StopSignals {
    set: libc::sigset_t,
}

impl StopSignals {
    /// Holds them back in this thread and those that it starts from now on. To be called before
    /// any thread is started, or a signal ends the process at once, as is its default.
    ///
    /// SIGHUP stays ignored if it was when this process was started: that is what `nohup` is for.
    pub(crate) fn hold() -> Self {
        // SAFETY: `sigemptyset` initializes the set before it is read, zeros are a valid
        // `sigaction`, and all pointers are to live locals or null where null is allowed.
        let set = unsafe {
            let mut set = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGINT, libc::SIGTERM] {
                libc::sigaddset(&raw mut set, signal);
            }
            let mut hangup = std::mem::zeroed::<libc::sigaction>();
            libc::sigaction(libc::SIGHUP, std::ptr::null(), &raw mut hangup);
            if hangup.sa_sigaction != libc::SIG_IGN {
                libc::sigaddset(&raw mut set, libc::SIGHUP);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            set
        };
        Self { set }
    }

    /// Waits until one comes; returns its number.
    pub(crate) fn wait(&self) -> i32 {
        let mut signal = 0;
        // SAFETY: `set` was initialized by `hold`, and `signal` is a live local. It fails only for
        // signals that there are not.
        unsafe { libc::sigwait(&raw const self.set, &raw mut signal) };
        signal
    }

    /// Waits until one comes, or the time is over.
    fn wait_for(&self, time: Duration) {
        let time = libc::timespec {
            tv_sec: time.as_secs() as libc::time_t,
            tv_nsec: time.subsec_nanos().into(),
        };
        // SAFETY: `set` was initialized by `hold`, `time` is a live local, and null is allowed for
        // what is not asked for.
        unsafe { libc::sigtimedwait(&raw const self.set, std::ptr::null_mut(), &raw const time) };
    }
}

/// A daemon's [`StopSignals`]. Until it serves, they end the process at once, as is their default:
/// what takes long before that need not look for them. So does one that comes [`TOLD_AGAIN`] after the first.
pub(crate) struct StopWatch {
    serving: Arc<Mutex<bool>>,
    signal: Receiver<i32>,
}

impl StopWatch {
    /// To be called before any thread is started.
    pub(crate) fn start() -> anyhow::Result<Self> {
        let signals = StopSignals::hold();
        let serving = Arc::new(Mutex::new(false));
        let (sender, signal) = sync_channel(1);
        let watched = Arc::clone(&serving);
        let watch = move || {
            let signal = signals.wait();
            if !*watched.lock().unwrap_or_else(PoisonError::into_inner) {
                die_of(signal);
            }
            let told = Instant::now();
            // Received by whoever serves.
            let _ = sender.send(signal);
            loop {
                let again = signals.wait();
                // Nobody waits any more for what takes long at the end, as a server that is silent.
                if told.elapsed() >= TOLD_AGAIN {
                    die_of(again);
                }
            }
        };
        thread::Builder::new()
            .name("signals".into())
            .spawn(watch)
            .context("cannot start a thread")?;
        Ok(Self { serving, signal })
    }

    /// From here on it serves.
    pub(crate) fn serve(&self) {
        *self.serving.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// Waits until a signal comes; returns its number.
    pub(crate) fn wait(&self) -> i32 {
        // The watching thread goes on until the process ends.
        self.signal.recv().unwrap_or(libc::SIGTERM)
    }
}

/// From now on, a signal to stop first ends all children, removes all scratch folders and temporary
/// files and takes back what metadata servers have of engines, and then ends this process as the
/// signal does by default. To be called before any thread is started.
pub(crate) fn clean_up_when_told_to_stop() -> anyhow::Result<()> {
    let signals = StopSignals::hold();
    let watch = move || {
        let signal = signals.wait();
        TOLD.store(signal, Ordering::SeqCst);
        if LAST_WORDS.load(Ordering::SeqCst) {
            // Told again, nobody waits for words.
            signals.wait_for(LAST_WORDS_TIME);
        }
        clean_up_and_die(signal)
    };
    thread::Builder::new().name("signals".into()).spawn(watch).context("cannot start a thread")?;
    Ok(())
}

/// From now on a signal to stop leaves the command a moment: it sees [`told_to_stop`], says what it
/// has, and calls [`step_back_when_told_to_stop`].
pub(crate) fn say_last_words_when_told_to_stop() {
    LAST_WORDS.store(true, Ordering::SeqCst);
}

/// Whether a signal to stop has come.
pub(crate) fn told_to_stop() -> bool {
    TOLD.load(Ordering::SeqCst) != 0
}

/// As [`told_to_stop`], for who has failed, perhaps because of that: a terminal tells children too,
/// and they may have ended before the signal is noticed here.
pub(crate) fn failed_because_told_to_stop() -> bool {
    let deadline = Instant::now() + NOTICED;
    while !told_to_stop() {
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(POLL);
    }
    true
}

/// Never returns when a signal to stop has come: what fails then fails because of it, and is not
/// worth a message.
pub(crate) fn step_back_when_told_to_stop() {
    match TOLD.load(Ordering::SeqCst) {
        0 => {}
        signal => clean_up_and_die(signal),
    }
}

fn clean_up_and_die(signal: i32) -> ! {
    // Held until the end: nobody starts another child, and nobody else does this.
    let belongings = belongings();
    let deadline = Instant::now() + LAST_WORDS_TIME;
    let withdrawn = engine::withdraw_all();
    stop_all(&belongings.children);
    for path in &belongings.scratch {
        // It may be gone already.
        let _ = match path.is_dir() {
            true => std::fs::remove_dir_all(path),
            false => std::fs::remove_file(path),
        };
    }
    // What is not taken back by then stays: the server does not answer.
    let _ = withdrawn.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    die_of(signal)
}

/// Ends this process by a signal's default action, so that our parent sees what happened.
pub(crate) fn die_of(signal: i32) -> ! {
    // SAFETY: the default action of the signal is restored, the signal raised and let through to
    // this thread: the process ends in the last call. The set is initialized before it is read.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
    }
    std::process::exit(128 + signal)
}

fn send_signal(process: u32, signal: i32) {
    // SAFETY: takes no pointers. The process is a child that nobody has waited for: its id cannot
    // mean another process.
    unsafe { libc::kill(process as libc::pid_t, signal) };
}

/// Whether a child has ended, leaving it to be waited for.
fn has_ended(process: u32) -> bool {
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: a zeroed `siginfo_t` is a valid one, and the pointer is to it.
    unsafe {
        let mut info = std::mem::zeroed::<libc::siginfo_t>();
        libc::waitid(libc::P_PID, process, &raw mut info, flags) != 0 || info.si_pid() != 0
    }
}

fn stop_all(children: &[u32]) {
    children.iter().for_each(|&child| send_signal(child, libc::SIGTERM));
    let deadline = Instant::now() + GRACE;
    while Instant::now() < deadline && !children.iter().all(|&child| has_ended(child)) {
        thread::sleep(POLL);
    }
    children.iter().for_each(|&child| send_signal(child, libc::SIGKILL));
}

/// A folder of our own for temporary files, removed with all that is in it when dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
}

impl Scratch {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let base = std::env::temp_dir();
        for attempt in 0..100 {
            let path = base.join(format!("millstream-{}-{attempt}", std::process::id()));
            let mut belongings = belongings();
            match std::fs::create_dir(&path) {
                Ok(()) => {
                    belongings.scratch.push(path.clone());
                    return Ok(Self { path });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(error).with_context(|| {
                        format!("cannot make a folder in {} (TMPDIR names another)", escaped(&base))
                    });
                }
            }
        }
        bail!("{} is full of old folders named millstream-*: remove them", escaped(&base))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        belongings().scratch.retain(|path| *path != self.path);
        // Nothing can be done about what cannot be removed.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// A file beside another one, which is to replace that one: removed when dropped.
#[derive(Debug)]
pub(crate) struct TemporaryFile {
    path: PathBuf,
}

impl TemporaryFile {
    /// Makes one beside `path`, with this mode or else as the umask says. Its name is that of `path`
    /// with a dot before it and `.millstream-PROCESS-NUMBER` after it.
    pub(crate) fn create_beside(path: &Path, mode: Option<u32>) -> io::Result<(Self, File)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?.as_bytes();
        // A name has at most 255 bytes.
        let name = OsStr::from_bytes(&name[..name.len().min(200)]);
        for number in 0..100 {
            let mut hidden = OsString::from(".");
            hidden.push(name);
            hidden.push(format!(".millstream-{}-{number}", std::process::id()));
            let path = path.with_file_name(hidden);
            let mut belongings = belongings();
            // What replaces a private file is never open to others.
            let at_first = if mode.is_some() { 0o600 } else { 0o666 };
            match OpenOptions::new().write(true).create_new(true).mode(at_first).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
                Ok(file) => {
                    belongings.scratch.push(path.clone());
                    drop(belongings);
                    // Dropped, and so removed, if this fails.
                    let own = Self { path };
                    if let Some(mode) = mode {
                        file.set_permissions(Permissions::from_mode(mode))?;
                    }
                    return Ok((own, file));
                }
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it the name of another file, which is replaced if it is there.
    pub(crate) fn rename(self, to: &Path) -> io::Result<()> {
        // Under the lock: a signal finds either name, and removes only the temporary one.
        let mut belongings = belongings();
        std::fs::rename(&self.path, to)?;
        belongings.scratch.retain(|path| *path != self.path);
        drop(belongings);
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        belongings().scratch.retain(|path| *path != self.path);
        // Nothing can be done about what cannot be removed.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A child that runs our own binary. Dropping it stops it.
pub(crate) struct Child {
    name: String,
    child: std::process::Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    complaints: Arc<Mutex<VecDeque<String>>>,
    readers: Vec<JoinHandle<()>>,
    status: Option<ExitStatus>,
}

impl Child {
    /// Starts `millstream ARGUMENTS`. `name` is for messages. The child dies with the calling
    /// thread, so this is for threads that last.
    pub(crate) fn start(
        name: impl Into<String>,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> anyhow::Result<Self> {
        Self::start_with(name.into(), arguments, Stdio::null())
    }

    /// The same, for one that is told things: see [`Child::tell`].
    pub(crate) fn start_to_tell(
        name: impl Into<String>,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> anyhow::Result<Self> {
        Self::start_with(name.into(), arguments, Stdio::piped())
    }

    fn start_with(
        name: String,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
        stdin: Stdio,
    ) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find our own executable")?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(stdin);
        Self::start_command(name, command, None)
    }

    /// Starts a command that becomes our own binary, with the stdin that it has. What it says on stderr is kept in a
    /// file, too, if there is one.
    pub(crate) fn start_command(
        name: String,
        mut command: Command,
        log_file: Option<File>,
    ) -> anyhow::Result<Self> {
        let parent = std::process::id();
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        // It is for another controller: that of our children is our own, and refuses those who bring a token.
        command.env_remove(control_proofs::VARIABLE);
        if let Some(level) = log::asked_for() {
            command.env(log::VARIABLES[0], level);
        }
        // SAFETY: between fork and exec only functions are called that are async-signal-safe, and
        // nothing is allocated. The set is initialized before it is read.
        unsafe {
            command.pre_exec(move || {
                // Signals that we hold back would be held back in the child too.
                let mut none = std::mem::zeroed::<libc::sigset_t>();
                libc::sigemptyset(&raw mut none);
                libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(io::Error::last_os_error());
                }
                // If the parent died before that call, its signal will never come.
                if libc::getppid() as u32 != parent {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
                Ok(())
            });
        }
        // Under the lock: whoever cleans up sees the child, or it is not there yet.
        let mut belongings = belongings();
        let mut child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        belongings.children.push(child.id());
        drop(belongings);
        let stdin = child.stdin.take();
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (sender, lines) = sync_channel(LINES_WAITING);
        let complaints = Arc::new(Mutex::new(VecDeque::new()));
        let kept = Arc::clone(&complaints);
        let label = name.clone();
        let readers = vec![
            thread::spawn(move || read_lines(stdout, &sender)),
            thread::spawn(move || keep_last_lines(stderr, &kept, &label, log_file)),
        ];
        Ok(Self { name, child, stdin, lines, complaints, readers, status: None })
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Writes a line of JSON to its stdin.
    pub(crate) fn tell(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        let line = serde_json::to_string(value)? + "\n";
        let told = self.stdin.as_mut().map(|stdin| stdin.write_all(line.as_bytes()));
        match told {
            Some(Ok(())) => Ok(()),
            // It has ended.
            _ => {
                self.wait(GRACE);
                Err(self.failed("does not listen"))
            }
        }
    }

    /// Closes its stdin: nothing more will be told.
    pub(crate) fn hush(&mut self) {
        self.stdin = None;
    }

    /// Waits for its `ready` line and returns the JSON on it.
    pub(crate) fn ready(&mut self, timeout: Duration) -> anyhow::Result<serde_json::Value> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    if let Some(json) = line.strip_prefix("ready ") {
                        return serde_json::from_str(json).with_context(|| {
                            format!("the ready line of {} is no JSON", self.name)
                        });
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    bail!("{} was not ready within {timeout:?}", self.name)
                }
                Err(RecvTimeoutError::Disconnected) => {
                    self.wait(GRACE);
                    return Err(self.failed("ended before it was ready"));
                }
            }
        }
    }

    /// Waits until it ends with status 0; returns what it printed on stdout since the `ready` line.
    pub(crate) fn finish(self, timeout: Duration) -> anyhow::Result<String> {
        self.finish_as(timeout, |status| status.success())
    }

    /// The same, where other statuses can be as good as 0.
    pub(crate) fn finish_as(
        mut self,
        timeout: Duration,
        good: impl FnOnce(ExitStatus) -> bool,
    ) -> anyhow::Result<String> {
        let deadline = Instant::now() + timeout;
        let mut output = String::new();
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    output.push_str(&line);
                    output.push('\n');
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    bail!("{} was not done within {timeout:?}", self.name)
                }
            }
        }
        match self.wait(deadline.saturating_duration_since(Instant::now()).max(GRACE)) {
            Some(status) if good(status) => Ok(output),
            _ => Err(self.failed("failed")),
        }
    }

    /// The next line that it prints on stdout, for which it may take as long as it lives if there
    /// is no timeout.
    pub(crate) fn line(&mut self, timeout: Option<Duration>) -> anyhow::Result<String> {
        let start = Instant::now();
        loop {
            match self.lines.recv_timeout(GLANCE) {
                Ok(line) => return Ok(line),
                Err(_) if told_to_stop() => bail!("told to stop"),
                Err(RecvTimeoutError::Timeout) => match timeout {
                    Some(timeout) if start.elapsed() >= timeout => {
                        bail!("{} printed nothing for {timeout:?}", self.name)
                    }
                    _ => {}
                },
                Err(RecvTimeoutError::Disconnected) => {
                    self.wait(GRACE);
                    return Err(self.failed("failed"));
                }
            }
        }
    }

    /// Fails with its last words if it has ended or ends within this time, which it should not.
    pub(crate) fn check(&mut self, within: Duration) -> anyhow::Result<()> {
        match self.wait(within) {
            None => Ok(()),
            Some(_) => Err(self.failed("ended while it was in use")),
        }
    }

    fn failed(&mut self, how: &str) -> anyhow::Error {
        // Its stderr is complete once its readers are done; it has ended, so they soon are.
        if self.status.is_some() {
            self.readers.drain(..).for_each(|reader| drop(reader.join()));
        }
        let complaints = self.complaints.lock().unwrap_or_else(PoisonError::into_inner);
        let said = complaints.back().map(|line| {
            let line = line.strip_prefix("millstream: ").unwrap_or(line);
            format!(": {line}")
        });
        let status = self.status.map_or_else(String::new, |status| format!(" ({status})"));
        anyhow::anyhow!("{} {how}{status}{}", self.name, said.unwrap_or_default())
    }

    /// Waits until it has ended, at most `timeout`.
    fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + timeout;
        while self.status.is_none() {
            let mut belongings = belongings();
            if let Ok(Some(status)) = self.child.try_wait() {
                belongings.children.retain(|&child| child != self.child.id());
                self.status = Some(status);
                break;
            }
            drop(belongings);
            if Instant::now() >= deadline {
                break;
            }
            thread::sleep(POLL);
        }
        self.status
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.wait(Duration::ZERO).is_some() {
            return;
        }
        send_signal(self.child.id(), libc::SIGTERM);
        // What it still prints must not hold it up.
        let deadline = Instant::now() + GRACE;
        while Instant::now() < deadline && self.wait(Duration::ZERO).is_none() {
            while self.lines.try_recv().is_ok() {}
            thread::sleep(POLL);
        }
        if self.status.is_none() {
            send_signal(self.child.id(), libc::SIGKILL);
            self.wait(GRACE);
        }
    }
}

fn read_lines(stdout: Option<impl Read>, sender: &SyncSender<String>) {
    let Some(stdout) = stdout else { return };
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        if sender.send(line).is_err() {
            return;
        }
    }
}

/// Keeps the last lines, and shows all of them when logs are asked for.
fn keep_last_lines(
    stderr: Option<impl Read>,
    kept: &Mutex<VecDeque<String>>,
    label: &str,
    mut log_file: Option<File>,
) {
    let Some(stderr) = stderr else { return };
    let show = log::is_asked_for();
    for line in BufReader::new(stderr).lines().map_while(Result::ok) {
        if let Some(file) = &mut log_file {
            // Where the disk is full, the last lines are kept all the same.
            let _ = writeln!(file, "{line}");
        }
        if show {
            output::complain(&format!("{label}: {line}"));
        }
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == LINES_KEPT {
            kept.pop_front();
        }
        kept.push_back(line);
    }
}
