//! A process with some ranks of many groups, or one that wants all that there is. It is this program again, told by its
//! environment what to be, and by its stdin what to do.

use std::collections::VecDeque;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use millstream_collective::ReduceOperation::Sum;
use millstream_collective::{
    CollectiveError, Communicator, JoinConfig, JoinError, Path, Refusal, Token,
};
use millstream_verbs::{Device, SoftConfig};
use serde::{Deserialize, Serialize};

use super::{GROUPS, HOSTS, WORLD};

/// What a process is to be, as JSON.
pub(super) const PART: &str = "MILLSTREAM_SOAK_PART";

/// Collectives of a communicator.
const CALLS: usize = 8;

/// Elements of each, by turns: what fits a packet, and what takes slots.
const LENGTHS: [usize; 2] = [16, 4000];

/// Between two communicators of a group, so that processors are not all that is tested.
const PAUSE: Duration = Duration::from_secs(2);

/// For ranks that come and go: some wait for one that was killed, or that has been told before them to stop.
const JOIN_TIME: Duration = Duration::from_secs(10);

/// Between two attempts to join for the last time.
const RETRY: Duration = Duration::from_millis(200);

/// For what must come about, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(120);

/// A hostile host does this many things at a time.
const HOSTILE_THREADS: usize = 24;
const HOSTILE_CONNECTIONS: usize = 100;
const HOSTILE_SOURCE: [u8; 4] = [127, 66, 66, 66];

/// What a process is to be.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Part {
    /// Which of the processes; `None` is the hostile one.
    pub(super) host: Option<usize>,
    pub(super) controller: SocketAddr,
    pub(super) bind: IpAddr,
    pub(super) token: String,
}

/// What has happened since the last report.
#[derive(Debug, Default)]
pub(super) struct Counts {
    communicators: AtomicU64,
    wrong: AtomicU64,
    lost: AtomicU64,
    refused: AtomicU64,
    over_quota: AtomicU64,
    /// Some of what was said.
    said: Mutex<Vec<String>>,
}

/// The same, to be written.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(super) struct Report {
    /// Communicators that have done all their calls.
    pub(super) communicators: u64,
    /// Elements that were not the sum.
    pub(super) wrong: u64,
    /// Calls that have ended with an error.
    pub(super) lost: u64,
    /// Ranks that could not join, for another reason than a quota.
    pub(super) refused: u64,
    pub(super) over_quota: u64,
    pub(super) said: Vec<String>,
}

impl Counts {
    fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn say(&self, text: String) {
        let mut said = self.said.lock().unwrap();
        if said.len() < 8 && !said.contains(&text) {
            said.push(text);
        }
    }

    fn join_failed(&self, error: &JoinError) {
        let over_quota = matches!(error, JoinError::Refused(Refusal::Quota { .. }));
        Self::add(if over_quota { &self.over_quota } else { &self.refused });
        self.say(error.to_string());
    }

    fn call_failed(&self, error: &CollectiveError) {
        Self::add(&self.lost);
        self.say(error.to_string());
    }

    fn report(self) -> Report {
        Report {
            communicators: self.communicators.into_inner(),
            wrong: self.wrong.into_inner(),
            lost: self.lost.into_inner(),
            refused: self.refused.into_inner(),
            over_quota: self.over_quota.into_inner(),
            said: self.said.into_inner().unwrap(),
        }
    }
}

/// That it is time to stop.
#[derive(Default)]
struct Stop {
    told: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    fn tell(&self) {
        *self.told.lock().unwrap() = true;
        self.changed.notify_all();
    }

    /// Whether it is time, now or within this time.
    fn within(&self, time: Duration) -> bool {
        let told = self.told.lock().unwrap();
        *self.changed.wait_timeout_while(told, time, |told| !*told).unwrap().0
    }
}

/// Does a phase for each two lines of stdin, its name and `stop`, and prints a report of it.
pub(super) fn be(part: &Part) {
    let device = Device::open_soft(&SoftConfig::new(part.bind)).unwrap();
    let mut lines = std::io::stdin().lines().map_while(Result::ok);
    while let Some(phase) = lines.next() {
        let (counts, stop) = (Counts::default(), Stop::default());
        thread::scope(|scope| {
            let (counts, stop, device, phase) = (&counts, &stop, &device, &*phase);
            match part.host {
                Some(host) => {
                    for (group, rank) in ranks(host) {
                        scope.spawn(move || {
                            Rank { part, device, group, rank, counts }.come_and_go(phase, stop);
                        });
                    }
                }
                None => {
                    for number in 0..HOSTILE_THREADS {
                        scope.spawn(move || want_groups(part, device, number, counts, stop));
                    }
                    scope.spawn(move || want_connections(part.controller, stop));
                }
            }
            lines.next();
            stop.tell();
        });
        println!("report {}", serde_json::to_string(&counts.report()).unwrap());
        std::io::stdout().flush().unwrap();
    }
}

/// The ranks of a process, none of one group twice.
fn ranks(host: usize) -> impl Iterator<Item = (usize, usize)> {
    let of = |group: usize, rank: usize| (group + rank * HOSTS / WORLD) % HOSTS;
    let all = (0..GROUPS).flat_map(|group| (0..WORLD).map(move |rank| (group, rank)));
    all.filter(move |&(group, rank)| of(group, rank) == host)
}

struct Rank<'a> {
    part: &'a Part,
    device: &'a Device,
    group: usize,
    rank: usize,
    counts: &'a Counts,
}

impl Rank<'_> {
    /// Joins, calls and leaves until it is time; then once more with all the others.
    fn come_and_go(&self, phase: &str, stop: &Stop) {
        // Not all groups at the same time.
        let mut pause = PAUSE * (1 + self.group as u32 % 8) / 8;
        while !stop.within(std::mem::replace(&mut pause, PAUSE)) {
            match self.join(&format!("group {}", self.group), JOIN_TIME) {
                Ok(communicator) => self.call(communicator),
                Err(error) => self.counts.join_failed(&error),
            }
        }
        // Nobody is killed any more. The controller may have no room for all at once.
        let start = Instant::now();
        loop {
            match self.join(&format!("{phase} ends {}", self.group), PATIENCE) {
                Ok(communicator) => return self.call(communicator),
                Err(error) if start.elapsed() < PATIENCE => self.counts.join_failed(&error),
                Err(error) => panic!("rank {} of group {}: {error}", self.rank, self.group),
            }
            thread::sleep(RETRY);
        }
    }

    fn join(&self, name: &str, timeout: Duration) -> Result<Communicator, JoinError> {
        let (world, rank) = (WORLD as u32, self.rank as u32);
        let config = JoinConfig::new(self.part.controller, name, world, rank, self.device);
        let token = Some(Token::new(self.part.token.as_bytes()).unwrap());
        let path = Path::Switch;
        Communicator::join(&JoinConfig { token, timeout, path, fallback: false, ..config })
    }

    fn call(&self, mut communicator: Communicator) {
        for call in 0..CALLS {
            // Of the ranks: 0 and up to one less than the world.
            let sum = |at: usize| (WORLD * (WORLD - 1) / 2 * (at + 1) + WORLD * call) as i32;
            let mut vector: Vec<i32> = (0..LENGTHS[call % LENGTHS.len()])
                .map(|at| (self.rank * (at + 1) + call) as i32)
                .collect();
            if let Err(error) = communicator.all_reduce_in_place(&mut vector, Sum) {
                return self.counts.call_failed(&error);
            }
            let wrong = vector.iter().enumerate().filter(|&(at, &element)| element != sum(at));
            self.counts.wrong.fetch_add(wrong.count() as u64, Ordering::Relaxed);
        }
        Counts::add(&self.counts.communicators);
    }
}

/// Makes groups that nobody else joins, one after the other.
fn want_groups(part: &Part, device: &Device, number: usize, counts: &Counts, stop: &Stop) {
    let token = Some(Token::new(part.token.as_bytes()).unwrap());
    let mut group = 0;
    while !stop.within(Duration::from_millis(100)) {
        group += 1;
        let config = JoinConfig::new(part.controller, format!("{number} {group}"), 2, 0, device);
        let timeout = Duration::from_secs(1);
        let path = Path::Switch;
        match Communicator::join(&JoinConfig { token, timeout, path, fallback: false, ..config }) {
            Ok(_) => panic!("there is no second rank"),
            Err(error) => counts.join_failed(&error),
        }
    }
}

/// Connects again and again, and says nothing.
fn want_connections(controller: SocketAddr, stop: &Stop) {
    let mut open = VecDeque::new();
    while !stop.within(Duration::from_millis(10)) {
        let socket =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((HOSTILE_SOURCE, 0)).into()).unwrap();
        // It may have no room.
        if socket.connect(&controller.into()).is_ok() {
            open.push_back(socket);
        }
        if open.len() > HOSTILE_CONNECTIONS {
            open.pop_front();
        }
    }
}
