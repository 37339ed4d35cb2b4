//! Shared memory between processes: who is let in, what they can touch, and what becomes of it when one
//! of them dies, stops or lies.

#![cfg(not(millstream_loom))]

#[path = "shared_memory/fake.rs"]
mod fake;

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fake::{FakeOwner, MAPPED, key};
use millstream_lab::Stopwatch;
use millstream_net::guarded::Caching;
use millstream_net::shared_memory::{
    AccessError, ConnectError, Key, Offer, PATIENCE, Peer, Region, Registration, SharedMemory,
};
use socket2::Socket;

/// Set in processes that this test starts: what they do.
const ROLE: &str = "MILLSTREAM_TEST_ROLE";
const LENGTH: usize = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

/// A number that no other offer of any process has.
fn incarnation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    u64::from(std::process::id()) << 32 | NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Memory of both kinds, offered.
struct Offered {
    offer: Offer,
    incarnation: u64,
    memory: Arc<SharedMemory>,
    own: Box<[u8]>,
    mapped: Registration,
    copied: Registration,
}

impl Offered {
    fn new(capacity: usize) -> Self {
        let incarnation = incarnation();
        let offer = Offer::start(incarnation, capacity).unwrap();
        let memory = Arc::new(SharedMemory::new(LENGTH).unwrap());
        let own = vec![0; LENGTH].into_boxed_slice();
        let address = memory.pointer().as_ptr().expose_provenance() as u64;
        let mapped = offer.register(address, LENGTH as u64, Some(&memory)).unwrap();
        let own_address = own.as_ptr().expose_provenance() as u64;
        let copied = offer.register(own_address, LENGTH as u64, None).unwrap();
        Self { offer, incarnation, memory, own, mapped, copied }
    }

    fn addresses(&self) -> [u64; 2] {
        let mapped = self.memory.pointer().as_ptr().expose_provenance();
        [mapped, self.own.as_ptr().expose_provenance()].map(|address| address as u64)
    }

    fn connect(&self) -> Peer {
        Peer::connect(self.offer.socket(), self.incarnation).unwrap()
    }

    /// The byte there, of the mapped memory and of the other.
    fn bytes(&self, offset: usize) -> [u8; 2] {
        // SAFETY: within the memory, of which nobody has a reference. Volatile, since others write it.
        unsafe {
            [
                self.memory.pointer().as_ptr().add(offset).read_volatile(),
                self.own.as_ptr().add(offset).read_volatile(),
            ]
        }
    }
}

/// Writes bytes at an address of the region.
fn write(peer: &Peer, region: &Region, target: u64, bytes: &[u8]) -> Result<(), AccessError> {
    let visit = peer.enter(region)?.expect("a word is free");
    // SAFETY: from a slice.
    unsafe { visit.write(bytes.as_ptr(), target, bytes.len(), Caching::Around)? };
    visit.confirm()
}

fn read(peer: &Peer, region: &Region, target: u64, bytes: &mut [u8]) -> Result<(), AccessError> {
    let visit = peer.enter(region)?.expect("a word is free");
    // SAFETY: to a slice.
    unsafe { visit.read(bytes.as_mut_ptr(), target, bytes.len(), Caching::Through)? };
    visit.confirm()
}

/// A process of ours that plays a role, and talks by lines. Dropped, it is killed.
struct Actor {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Actor {
    fn start(role: &str, prepare: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "a_role", "--nocapture"]).env(ROLE, role);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        prepare(&mut command);
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, input, output }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// The next line of the role, without the test harness's own.
    fn hear(&mut self) -> String {
        loop {
            let line = self.output.next().expect("it ended early").unwrap();
            if let Some((_, line)) = line.split_once("actor: ") {
                return line.to_owned();
            }
        }
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: a child that was not waited for keeps its number.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
    }

    /// Says what makes it run another program (cat), and returns when that does.
    fn run_another_program(&mut self) {
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

    fn wait_until_stopped(&self) {
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
struct Place {
    socket: String,
    incarnation: u64,
    keys: [Key; 2],
    addresses: [u64; 2],
}

fn offering() -> (Actor, Place) {
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

fn writing(offered: &Offered, registration: &Registration, address: u64) -> Actor {
    let (socket, incarnation) = (offered.offer.socket(), offered.incarnation);
    let role = format!("write {socket} {incarnation} {} {address}", registration.key().0);
    Actor::start(&role, |_| {})
}

#[test]
fn memory_of_another_process_is_read_and_written() {
    let (mut actor, place) = offering();
    let peer = Peer::connect(&place.socket, place.incarnation).unwrap();
    for (index, (key, address)) in place.keys.into_iter().zip(place.addresses).enumerate() {
        assert_eq!(peer.obstacle(key), None);
        assert!(peer.region(key).is_none());
        let region = peer.open(key).unwrap();
        assert!(Arc::ptr_eq(&region, &peer.region(key).unwrap()));
        write(&peer, &region, address + 1000, &[1, 2, 3 + index as u8]).unwrap();
        let mut bytes = [9; 5];
        read(&peer, &region, address + 999, &mut bytes).unwrap();
        assert_eq!(bytes, [0, 1, 2, 3 + index as u8, 0]);
        // Its last byte, and beyond.
        let end = address + LENGTH as u64;
        write(&peer, &region, end - 1, &[7]).unwrap();
        for (target, length) in [
            (end - 1, 2),
            (end, 1),
            (address - 1, 1),
            (u64::MAX, 1),
            (0, LENGTH),
            (address, LENGTH + 1),
        ] {
            let error = write(&peer, &region, target, &vec![1; length]).unwrap_err();
            assert!(matches!(error, AccessError::Unregistered), "{target:#x} {length}: {error}");
        }
    }
    actor.say("1002");
    assert_eq!(actor.hear(), "3 4");
    actor.say("1048575");
    assert_eq!(actor.hear(), "7 7");
    actor.say("revoke");
    assert_eq!(actor.hear(), "revoked");
    for (key, address) in place.keys.into_iter().zip(place.addresses) {
        let region = peer.region(key).unwrap();
        let error = write(&peer, &region, address, &[1]).unwrap_err();
        assert!(matches!(error, AccessError::Unregistered), "{error}");
        assert!(matches!(peer.open(Key(key.0 + (1 << 20))), Err(AccessError::Unregistered)));
    }
}

#[test]
fn a_process_that_has_ended_is_noticed_at_once() {
    let (mut actor, place) = offering();
    let peer = Peer::connect(&place.socket, place.incarnation).unwrap();
    let regions = place.keys.map(|key| peer.open(key).unwrap());
    actor.child.kill().unwrap();
    actor.child.wait().unwrap();
    for (region, address) in regions.iter().zip(place.addresses) {
        let error = write(&peer, region, address, &[1]).unwrap_err();
        assert!(matches!(error, AccessError::Ended), "{error}");
    }
    assert!(!peer.is_alive());
    let unopened = peer.open(Key(place.keys[0].0 + 1)).unwrap_err();
    assert!(matches!(unopened, AccessError::Ended), "{unopened}");
    let error = Peer::connect(&place.socket, place.incarnation).unwrap_err();
    assert!(matches!(error, ConnectError::Nobody), "{error}");
}

/// A process that was killed while it copied holds nothing up.
#[test]
fn who_is_killed_inside_is_not_waited_for() {
    let offered = Offered::new(16);
    let [mapped, copied] = offered.addresses();
    for (registration, address) in [(&offered.mapped, mapped), (&offered.copied, copied)] {
        let mut actor = writing(&offered, registration, address);
        assert_eq!(actor.hear(), "writing");
        // Nearly always within a copy.
        actor.signal(libc::SIGKILL);
        let stopwatch = Stopwatch::start();
        registration.revoke(LONG).unwrap();
        let took = stopwatch.took();
        assert!(took.own() < Duration::from_secs(1), "{took}");
    }
}

/// It keeps its number, and its memory is gone.
#[test]
fn who_runs_another_program_is_not_waited_for() {
    let offered = Offered::new(16);
    let [mapped, copied] = offered.addresses();
    for (registration, address) in [(&offered.mapped, mapped), (&offered.copied, copied)] {
        let mut actor = writing(&offered, registration, address);
        assert_eq!(actor.hear(), "writing");
        // Nearly always within a copy.
        actor.run_another_program();
        registration.revoke(Duration::ZERO).unwrap();
    }
}

#[test]
fn memory_of_another_program_is_not_accessed() {
    let (mut actor, place) = offering();
    let peer = Peer::connect(&place.socket, place.incarnation).unwrap();
    let regions = place.keys.map(|key| peer.open(key).unwrap());
    assert!(peer.is_alive());
    actor.run_another_program();
    assert!(!peer.is_alive());
    let [mapped, copied] = &regions;
    let error = write(&peer, mapped, place.addresses[0], &[1]).unwrap_err();
    assert!(matches!(error, AccessError::Ended), "{error}");
    assert!(matches!(peer.enter(copied), Err(AccessError::Ended)));
}

/// A process that was stopped while it copied may go on later: the memory is not taken for unused.
#[test]
fn who_is_stopped_inside_is_waited_for_until_the_deadline() {
    for _ in 0..20 {
        let offered = Offered::new(16);
        let mut actor = writing(&offered, &offered.mapped, offered.addresses()[0]);
        assert_eq!(actor.hear(), "writing");
        actor.signal(libc::SIGSTOP);
        actor.wait_until_stopped();
        let Err(error) = offered.mapped.revoke(Duration::from_millis(50)) else {
            // Stopped between two copies.
            continue;
        };
        assert_eq!(error.pid as u32, actor.child.id());
        assert!(offered.mapped.revoke(Duration::from_millis(1)).is_err());
        actor.signal(libc::SIGCONT);
        offered.mapped.revoke(LONG).unwrap();
        assert_eq!(actor.hear(), "the memory is not registered there any more");
        return;
    }
    panic!("never stopped inside");
}

/// What is written after a revocation has returned stays.
#[test]
fn nothing_is_touched_after_unregistration() {
    const ROUNDS: usize = 2000;
    let offered = Offered::new(16);
    let peer = offered.connect();
    let (memory, length) = (&offered.memory, 4096);
    let [mapped, copied] = offered.addresses();
    for round in 0..ROUNDS {
        let mappable = round % 2 == 0;
        let address = if mappable { mapped } else { copied };
        let memory = mappable.then_some(memory);
        let registration = offered.offer.register(address, length as u64, memory).unwrap();
        let region = peer.open(registration.key()).unwrap();
        let (begun, entered) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let copying = scope.spawn(|| {
                let bytes = vec![round as u8 | 1; length];
                loop {
                    match write(&peer, &region, address, &bytes) {
                        Ok(()) => entered.fetch_add(1, Ordering::Relaxed),
                        Err(error) => return error,
                    };
                    begun.store(true, Ordering::Release);
                }
            });
            while !begun.load(Ordering::Acquire) {
                thread::yield_now();
            }
            registration.revoke(LONG).unwrap();
            let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
            // SAFETY: it was unregistered, so it is ours alone.
            unsafe { pointer.write_bytes(0, length) };
            let error = copying.join().unwrap();
            assert!(matches!(error, AccessError::Unregistered), "{error}");
            assert_eq!(offered.bytes(length - 1)[usize::from(!mappable)], 0, "round {round}");
            assert_eq!(offered.bytes(0)[usize::from(!mappable)], 0, "round {round}");
        });
    }
}

/// Nor does what was copied meanwhile count, once the owner has stopped waiting.
#[test]
fn what_was_copied_during_a_revocation_does_not_count() {
    let offered = Offered::new(16);
    let peer = offered.connect();
    for (registration, address) in
        [&offered.mapped, &offered.copied].into_iter().zip(offered.addresses())
    {
        let region = peer.open(registration.key()).unwrap();
        let visit = peer.enter(&region).unwrap().unwrap();
        visit.confirm().unwrap();
        assert!(registration.revoke(Duration::ZERO).is_err());
        let bytes = [1; 8];
        // SAFETY: from an array.
        unsafe { visit.write(bytes.as_ptr(), address, bytes.len(), Caching::Through).unwrap() };
        let error = visit.confirm().unwrap_err();
        assert!(matches!(error, AccessError::Unregistered), "{error}");
        drop(visit);
        registration.revoke(PATIENCE).unwrap();
    }
}

#[test]
fn a_full_table_says_so() {
    let offered = Offered::new(3);
    let [_, own] = offered.addresses();
    let third = offered.offer.register(own, 1, None).unwrap();
    let error = offered.offer.register(own, 1, None).unwrap_err();
    assert!(error.to_string().starts_with("no more than 3 pieces"), "{error}");
    drop(third);
    assert!(offered.offer.register(own, 1, None).is_ok());
}

#[test]
fn another_incarnation_is_refused() {
    let offered = Offered::new(3);
    let error = Peer::connect(offered.offer.socket(), offered.incarnation + 1).unwrap_err();
    assert!(error.to_string().contains("another process than the one that was meant"), "{error}");
}

#[test]
fn nobody_is_let_in_after_the_offer_has_ended() {
    let offered = Offered::new(3);
    let socket = offered.offer.socket().to_owned();
    let peer = offered.connect();
    let Offered { offer, incarnation, memory: _memory, own: _own, mapped, copied } = offered;
    drop(offer);
    let error = Peer::connect(&socket, incarnation).unwrap_err();
    assert!(matches!(error, ConnectError::Nobody), "{error}");
    // Those who were let in before still have to leave.
    assert!(peer.is_alive());
    drop((mapped, copied));
    assert!(!peer.is_alive());
}

/// Needs root, to be somebody else.
fn may_be_another_user() -> bool {
    // SAFETY: no arguments.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        println!("skipped: only root can be another user");
        assert_ne!(std::env::var("MILLSTREAM_REQUIRE").as_deref(), Ok("all"));
    }
    root
}

#[test]
fn another_user_is_refused() {
    if !may_be_another_user() {
        return;
    }
    let offered = Offered::new(3);
    let (socket, incarnation) = (offered.offer.socket(), offered.incarnation);
    let role = format!("write {socket} {incarnation} 0 0");
    let mut actor = Actor::start(&role, |command| {
        command.uid(65_534);
    });
    assert_eq!(actor.hear(), "it belongs to another user: ours is 65534, and its is 0");
}

/// It is sent away by who it is, and not by what it says.
#[test]
fn another_user_is_not_listened_to() {
    if !may_be_another_user() {
        return;
    }
    let offered = Offered::new(3);
    let mut actor = Actor::start(&format!("listen {}", offered.offer.socket()), |command| {
        command.uid(65_534);
    });
    let refusal = actor.hear();
    assert!(refusal.starts_with("[77, 83, 115, 104, 109, "), "{refusal}");
}

/// Connections that say nothing neither keep the thread busy nor stay.
#[test]
fn strangers_are_waited_for_without_work() {
    let (mut actor, socket, incarnation) = starving();
    actor.say("1000");
    let before = milliseconds(&mut actor);
    let mut strangers: Vec<Socket> = (0..80).map(|_| fake::connect(&socket)).collect();
    // The first ones have been sent away, and there is room for the others.
    assert_eq!(strangers[0].read(&mut [0; 64]).unwrap(), 0);
    actor.say("1000");
    let used = milliseconds(&mut actor) - before;
    assert!(used < 200, "{used} ms of a second");
    drop(strangers);
    Peer::connect(&socket, incarnation).unwrap();
}

#[test]
fn want_of_descriptors_is_waited_for_without_work() {
    let (mut actor, socket, incarnation) = starving();
    // It has more already, but not as many to poll.
    actor.say("5");
    let before = milliseconds(&mut actor);
    let error = Peer::connect(&socket, incarnation).unwrap_err();
    assert!(matches!(error, ConnectError::NoAnswer), "{error}");
    actor.say("1000");
    let used = milliseconds(&mut actor) - before;
    assert!(used < 200, "{used} ms of a second");
    Peer::connect(&socket, incarnation).unwrap();
}

/// It does not say that somebody else is at fault.
#[test]
fn who_lacks_descriptors_is_named() {
    let (mut actor, socket, incarnation) = starving();
    actor.say("one");
    milliseconds(&mut actor);
    let error = Peer::connect(&socket, incarnation).unwrap_err().to_string();
    assert!(error.starts_with("it refused: it lacks what it needs"), "{error}");
    actor.say("1000");
    milliseconds(&mut actor);
    Peer::connect(&socket, incarnation).unwrap();

    let offered = Offered::new(3);
    let (socket, key) = (offered.offer.socket(), offered.mapped.key().0);
    let mut actor = Actor::start(&format!("lack {socket} {} {key}", offered.incarnation), |_| {});
    let error = actor.hear();
    assert!(error.contains("this process may have no more descriptors"), "{error}");
}

fn starving() -> (Actor, String, u64) {
    let mut actor = Actor::start("starve", |_| {});
    let line = actor.hear();
    let (socket, incarnation) = line.split_once(' ').unwrap();
    (actor, socket.to_owned(), incarnation.parse().unwrap())
}

fn milliseconds(actor: &mut Actor) -> u64 {
    actor.hear().parse().unwrap()
}

/// More than are let in at a time.
#[test]
fn many_come_and_go() {
    let offered = Offered::new(3);
    let address = offered.addresses()[0];
    for _ in 0..600 {
        let peer = offered.connect();
        let region = peer.open(offered.mapped.key()).unwrap();
        write(&peer, &region, address, &[1]).unwrap();
    }
}

#[test]
fn threads_of_one_peer_have_a_limit_and_no_more_is_lost() {
    let offered = Offered::new(3);
    let peer = offered.connect();
    let region = peer.open(offered.mapped.key()).unwrap();
    let visits: Vec<_> = std::iter::from_fn(|| peer.enter(&region).unwrap()).collect();
    assert_eq!(visits.len(), 64);
    assert!(offered.mapped.revoke(Duration::ZERO).is_err());
    drop(visits);
    offered.mapped.revoke(PATIENCE).unwrap();
}

/// Lets a peer in, and does this with the connection meanwhile.
fn fake<T>(lengths: &[u64], serve: impl FnOnce(Socket) + Send, test: impl FnOnce(Peer) -> T) -> T {
    let incarnation = incarnation();
    let owner = FakeOwner::new(incarnation, lengths);
    thread::scope(|scope| {
        scope.spawn(|| serve(owner.welcome()));
        test(Peer::connect(owner.name(), incarnation).unwrap())
    })
}

#[test]
fn answers_to_other_questions_are_not_taken_for_ever() {
    // Without waiting for room, so that there always is a message.
    let flood = |mut socket: Socket| {
        let other = fake::message(MAPPED, [77, 1, 0, 0]);
        socket.set_nonblocking(true).unwrap();
        let full = |error: std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
        while socket.write(&other).map_or_else(full, |_| true) {}
    };
    let error = fake(&[4096], flood, |peer| peer.open(Key(key(0))).unwrap_err());
    assert!(matches!(error, AccessError::NoAnswer), "{error}");
}

/// It still has what it has mapped.
#[test]
fn who_was_sent_away_is_still_waited_for() {
    let offered = Offered::new(3);
    let (socket, presence) = fake::user(offered.offer.socket(), offered.incarnation);
    fake::send(&socket, b"nonsense", &[]);
    assert_eq!((&socket).read(&mut [0; 64]).unwrap(), 0, "sent away");
    let inside = (offered.copied.key().0 & 0xffff) as u32 + 1;
    presence.write_all_at(&inside.to_le_bytes(), 0).unwrap();
    let error = offered.copied.revoke(Duration::ZERO).unwrap_err();
    assert_eq!(error.pid as u32, std::process::id());
    presence.write_all_at(&[0; 4], 0).unwrap();
    offered.copied.revoke(PATIENCE).unwrap();
}

/// What it sends costs it nothing, since no page of it was ever used.
#[test]
fn no_more_is_mapped_than_is_registered_and_this_host_could_have() {
    const TERABYTE: u64 = 1 << 40;
    let file = fake::sealed(c"fake-memory", 64 * TERABYTE);
    let serve = |socket: Socket| {
        let answer = |index| fake::message(MAPPED, [key(index), 1, 0, 0]);
        let mut bytes = [0; 64];
        while let Ok(1..) = (&socket).read(&mut bytes) {
            let index = usize::from(bytes[8]);
            fake::send(&socket, &answer(index), &[&file]);
        }
    };
    fake(&[8192, 64 * TERABYTE, 4096], serve, |peer| {
        for index in [0, 2] {
            peer.open(Key(key(index))).unwrap();
        }
        let error = peer.open(Key(key(1))).unwrap_err();
        assert!(error.to_string().contains("more memory mapped here"), "{error}");
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut lengths: Vec<u64> = maps
            .lines()
            .filter(|line| line.contains("/memfd:fake-memory"))
            .map(|line| {
                let (start, rest) = line.split_once('-').unwrap();
                let (end, _) = rest.split_once(' ').unwrap();
                let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
                end - start
            })
            .collect();
        lengths.sort_unstable();
        assert_eq!(lengths, [4096, 8192]);
    });
}
