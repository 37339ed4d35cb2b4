//! Processes that tests start, and what they do.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use millstream_net::shared_memory::{Key, Peer, Registration};

use super::fake;
use super::fixture::{LENGTH, LONG, Offered, write};

/// Set in processes that this test starts: what they do.
const ROLE: &str = "MILLSTREAM_TEST_ROLE";

/// A process of ours that plays a role, and talks by lines. Dropped, it is killed.
pub(crate) struct Actor {
    pub(crate) child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Actor {
    pub(crate) fn start(role: &str, prepare: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "actor::a_role", "--nocapture"]).env(ROLE, role);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        prepare(&mut command);
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, input, output }
    }

    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// The next line of the role, without the test harness's own.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            let line = self.output.next().expect("it ended early").unwrap();
            if let Some((_, line)) = line.split_once("actor: ") {
                return line.to_owned();
            }
        }
    }

    pub(crate) fn signal(&self, signal: libc::c_int) {
        // SAFETY: a child that was not waited for keeps its number.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
    }

    /// Says what makes it run another program (cat), and returns when that does.
    pub(crate) fn run_another_program(&mut self) {
        self.say("exec");
        let path = format!("/proc/{}/comm", self.child.id());
        let start = Instant::now();
        while std::fs::read_to_string(&path).unwrap() != "cat\n" {
            assert!(start.elapsed() < LONG);
            thread::yield_now();
        }
        self.say("actor: here");
        assert_eq!(self.hear(), "here");
    }

    pub(crate) fn wait_until_stopped(&self) {
        let path = format!("/proc/{}/stat", self.child.id());
        let start = Instant::now();
        while !std::fs::read_to_string(&path).unwrap().contains(") T ") {
            assert!(start.elapsed() < LONG);
            thread::yield_now();
        }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where an actor's memory is.
pub(crate) struct Place {
    pub(crate) socket: String,
    pub(crate) incarnation: u64,
    pub(crate) keys: [Key; 2],
    pub(crate) addresses: [u64; 2],
}

pub(crate) fn offering() -> (Actor, Place) {
    let mut actor = Actor::start("offer", |_| {});
    let line = actor.hear();
    let words: Vec<&str> = line.split(' ').collect();
    let number = |index: usize| words[index].parse::<u64>().unwrap();
    let place = Place {
        socket: words[0].to_owned(),
        incarnation: number(1),
        keys: [Key(number(2)), Key(number(3))],
        addresses: [number(4), number(5)],
    };
    (actor, place)
}

pub(crate) fn writing(offered: &Offered, registration: &Registration, address: u64) -> Actor {
    let (socket, incarnation) = (offered.offer.socket(), offered.incarnation);
    let role = format!("write {socket} {incarnation} {} {address}", registration.key().0);
    Actor::start(&role, |_| {})
}

pub(crate) fn starving() -> (Actor, String, u64) {
    let mut actor = Actor::start("starve", |_| {});
    let line = actor.hear();
    let (socket, incarnation) = line.split_once(' ').unwrap();
    (actor, socket.to_owned(), incarnation.parse().unwrap())
}

pub(crate) fn milliseconds(actor: &mut Actor) -> u64 {
    actor.hear().parse().unwrap()
}

/// What processes started by other tests do. As a test of its own, nothing.
#[test]
fn a_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    match words[0] {
        "offer" => {
            let offered = Offered::new(16);
            let ([mapped, copied], [first, second]) =
                ([offered.mapped.key().0, offered.copied.key().0], offered.addresses());
            let (socket, incarnation) = (offered.offer.socket(), offered.incarnation);
            println!("actor: {socket} {incarnation} {mapped} {copied} {first} {second}");
            for line in std::io::stdin().lines() {
                let line = line.unwrap();
                if line == "revoke" {
                    offered.mapped.revoke(LONG).unwrap();
                    offered.copied.revoke(LONG).unwrap();
                    println!("actor: revoked");
                } else if line == "exec" {
                    panic!("{}", Command::new("cat").exec());
                } else {
                    let [mapped, copied] = offered.bytes(line.parse().unwrap());
                    println!("actor: {mapped} {copied}");
                }
            }
        }
        // Connects, says nothing, and hears what comes.
        "listen" => {
            let socket = fake::connect(words[1]);
            let mut bytes = [0; 64];
            let length = (&socket).read(&mut bytes).unwrap();
            println!("actor: {:?}", &bytes[..length]);
        }
        // Opens memory without a descriptor for it, and then with one.
        "lack" => {
            let peer = Peer::connect(words[1], words[2].parse().unwrap()).unwrap();
            let key = Key(words[3].parse().unwrap());
            descriptor_limit(free_descriptor());
            let error = peer.open(key).unwrap_err();
            descriptor_limit(1000);
            peer.open(key).unwrap();
            println!("actor: {error}");
        }
        // As "offer", without descriptors for more peers from some time on.
        "starve" => {
            let offered = Offered::new(16);
            println!("actor: {} {}", offered.offer.socket(), offered.incarnation);
            for line in std::io::stdin().lines() {
                let line = line.unwrap();
                descriptor_limit(match line.as_str() {
                    "one" => free_descriptor() + 1,
                    limit => limit.parse().unwrap(),
                });
                println!("actor: {}", processor_time().as_millis());
            }
        }
        // Writes all of one region, as long as it may.
        "write" => {
            let number = |index: usize| words[index].parse::<u64>().unwrap();
            let peer = match Peer::connect(words[1], number(2)) {
                Ok(peer) => peer,
                Err(error) => return println!("actor: {error}"),
            };
            let region = peer.open(Key(number(3))).unwrap();
            let bytes = vec![0xa5; LENGTH];
            thread::spawn(|| {
                if std::io::stdin().lines().next().is_some() {
                    panic!("{}", Command::new("cat").exec());
                }
            });
            for round in 0.. {
                if let Err(error) = write(&peer, &region, number(4), &bytes) {
                    println!("actor: {error}");
                    break;
                }
                if round == 0 {
                    println!("actor: writing");
                }
            }
        }
        _ => unreachable!("{role}"),
    }
    // Not the other tests' end.
    std::process::exit(0);
}

/// Lets this process open descriptors below this number only.
fn descriptor_limit(limit: u64) {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limits are borrowed, by the first call exclusively.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limits), 0);
        limits.rlim_cur = limit;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits), 0);
    }
}

/// The number that the next descriptor gets.
fn free_descriptor() -> u64 {
    std::fs::File::open("/dev/null").unwrap().as_raw_fd() as u64
}

/// What this process has used so far.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is borrowed exclusively.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
