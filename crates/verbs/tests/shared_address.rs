//! Devices that share an address: of one process, and of eight, some of which are killed.

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use millstream_verbs::{
    Access, CompletionQueue, CompletionStatus, Device, MemoryRegion, Piece, ProtectionDomain, Psn,
    QueuePair, QueuePairAttributes, QueuePairCapabilities, QueuePairState, SendOperation,
    SendRequest, SoftConfig,
};

const PATIENCE: Duration = Duration::from_secs(60);

const PROCESSES: usize = 8;
const QUEUE_PAIRS: usize = 8;

/// Bytes that each queue pair writes, and reads back, in each round.
const LENGTH: usize = 100_000;

/// An address of 127/8 that no other test process uses, nor other tests of this one.
fn address(host: u8) -> IpAddr {
    let process = std::process::id();
    Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, host).into()
}

fn pattern(seed: u64) -> impl Iterator<Item = u8> {
    (0..LENGTH as u64).map(move |i| (i.wrapping_mul(31) ^ (i >> 8) ^ seed.wrapping_mul(0x9d)) as u8)
}

/// A device with memory and connected queue pairs: fields are dropped from the top.
struct End {
    pairs: Vec<QueuePair>,
    region: MemoryRegion,
    memory: Vec<u8>,
    completions: CompletionQueue,
    _domain: ProtectionDomain,
    device: Device,
}

/// What the other side has to know of a queue pair, as words.
type Name = (IpAddr, Vec<u32>, u64, u64);

impl End {
    /// With room for what all queue pairs write, and for what they read back.
    fn open(address: IpAddr, pairs: usize) -> Self {
        let device = Device::open_soft(&SoftConfig::new(address)).unwrap();
        let domain = device.allocate_protection_domain();
        let completions = device.create_completion_queue(1024).unwrap();
        let capabilities = QueuePairCapabilities::new(8, 8);
        let create =
            |_| domain.create_queue_pair(&completions, &completions, capabilities).unwrap();
        let pairs = (0..pairs).map(create).collect::<Vec<_>>();
        let mut memory = vec![0; 2 * pairs.len() * LENGTH];
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        // SAFETY: the region is dropped before the memory, which is looked at and changed only while
        // no request is outstanding that touches the part in question.
        let region = unsafe { domain.register_memory(memory.as_mut_ptr(), memory.len(), access) };
        Self { pairs, region: region.unwrap(), memory, completions, _domain: domain, device }
    }

    fn name(&self) -> Name {
        let numbers = self.pairs.iter().map(|pair| pair.number().value()).collect();
        (self.device.address(), numbers, self.region.address(), self.region.remote_key().into())
    }

    fn connect(&self, pair: usize, (address, number): (IpAddr, u32)) {
        let pair = &self.pairs[pair];
        let none = QueuePairAttributes::default;
        let access = Some(Access::REMOTE_WRITE | Access::REMOTE_READ);
        let state = |state| Some(state);
        pair.modify(&QueuePairAttributes {
            state: state(QueuePairState::Initialized),
            access,
            ..none()
        })
        .unwrap();
        pair.modify(&QueuePairAttributes {
            state: state(QueuePairState::ReadyToReceive),
            remote_address: Some(address),
            path_mtu: Some(millstream_verbs::Mtu::B1024),
            destination_qpn: Some(millstream_verbs::Qpn::new(number)),
            receive_psn: Some(Psn::new(7)),
            responder_resources: Some(4),
            minimum_rnr_timer: Some(12),
            ..none()
        })
        .unwrap();
        pair.modify(&QueuePairAttributes {
            state: state(QueuePairState::ReadyToSend),
            send_psn: Some(Psn::new(7)),
            // 268 ms, eight times.
            timeout: Some(16),
            retry_count: Some(7),
            rnr_retry: Some(7),
            initiator_depth: Some(4),
            ..none()
        })
        .unwrap();
    }

    fn piece(&self, offset: usize) -> Piece {
        let address = self.region.address() + offset as u64;
        Piece { key: self.region.key(), address, length: LENGTH as u32 }
    }

    /// Each queue pair writes a pattern to its part of the peer's memory and reads it back; all at once.
    fn exchange(&mut self, seed: u64, (peer_address, peer_key): (u64, u64)) {
        let count = self.pairs.len();
        for index in 0..count {
            let bytes: Vec<u8> = pattern(seed + index as u64).collect();
            self.memory[index * LENGTH..][..LENGTH].copy_from_slice(&bytes);
            self.memory[(count + index) * LENGTH..][..LENGTH].fill(0);
        }
        for (index, pair) in self.pairs.iter().enumerate() {
            let remote_address = peer_address + (index * LENGTH) as u64;
            let remote_key = peer_key as u32;
            let write = SendOperation::Write { remote_address, remote_key, immediate: None };
            let read = SendOperation::Read { remote_address, remote_key };
            for (operation, offset) in [(write, index), (read, count + index)] {
                let pieces = [self.piece(offset * LENGTH)];
                pair.post_send(&[SendRequest::new(index as u64, operation, pieces)]).unwrap();
            }
        }
        self.wait_for(2 * count);
        for index in 0..count {
            let got = &self.memory[(count + index) * LENGTH..][..LENGTH];
            assert!(got.iter().copied().eq(pattern(seed + index as u64)), "queue pair {index}");
        }
    }

    fn wait_for(&self, count: usize) {
        let mut out = Vec::new();
        while out.len() < count {
            assert!(self.completions.wait(PATIENCE), "{} of {count} came", out.len());
            self.completions.poll(&mut out, count);
        }
        assert!(out.iter().all(|it| it.status == CompletionStatus::Success), "{out:?}");
    }
}

#[test]
fn two_devices_of_one_process_share_an_address_and_talk_to_each_other() {
    let [mut one, mut other] = [0, 1].map(|_| End::open(address(1), 2));
    for (end, peer) in [(&one, &other), (&other, &one)] {
        let (address, numbers, ..) = peer.name();
        for (index, &number) in numbers.iter().enumerate() {
            end.connect(index, (address, number));
        }
    }
    let names = [&one, &other].map(End::name);
    for round in 0..10 {
        one.exchange(round, (names[1].2, names[1].3));
        other.exchange(round + 100, (names[0].2, names[0].3));
    }
    let slots = names.map(|name| name.1.into_iter().map(|number| number >> 19).collect::<Vec<_>>());
    assert!(slots[0].iter().all(|slot| !slots[1].contains(slot)), "{slots:?}");
    // What we send is never for two slots at once.
    for end in [&one, &other] {
        let counters = end.device.driver_counters();
        assert_eq!((counters.handed_over_datagrams, counters.taken_over_datagrams), (0, 0));
        assert!(counters.received_datagrams > counters.received_messages, "trains were sent");
    }
}

fn words(words: &[u64]) -> String {
    words.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
}

fn parse(line: &str) -> Vec<u64> {
    line.split_whitespace().map(|word| word.parse().unwrap()).collect()
}

/// One of the processes: does not end by itself.
#[test]
fn one_process_of_several() {
    let Ok(own) = std::env::var("MILLSTREAM_TEST_SHARED_ADDRESS") else { return };
    let mut end = End::open(own.parse().unwrap(), QUEUE_PAIRS);
    let (_, numbers, ..) = end.name();
    let numbers: Vec<u64> = numbers.into_iter().map(u64::from).collect();
    println!("\nI have {}", words(&numbers));
    let mut lines = std::io::stdin().lines();
    let mut next = move || parse(&lines.next().expect("the parent goes on").unwrap());
    // The hub's address, memory, key, and queue pairs.
    let hub = next();
    let address = Ipv4Addr::from_bits(hub[0] as u32).into();
    for (index, &number) in hub[3..].iter().enumerate() {
        end.connect(index, (address, number as u32));
    }
    for round in 0.. {
        end.exchange(std::process::id() as u64 * 1000 + round, (hub[1], hub[2]));
        println!("\nI did {round}");
        let counters = end.device.driver_counters();
        assert_eq!((counters.handed_over_datagrams, counters.taken_over_datagrams), (0, 0));
    }
}

/// A process, and the place in the hub that it works on.
struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    _stdin: ChildStdin,
    place: usize,
}

impl Process {
    /// Starts it and connects it with new queue pairs of a hub.
    fn start(shared: IpAddr, hub: &End, place: usize) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "one_process_of_several", "--nocapture"])
            .env("MILLSTREAM_TEST_SHARED_ADDRESS", shared.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let stdin = child.stdin.take().unwrap();
        let mut process = Self { child, lines, _stdin: stdin, place };
        let numbers = parse(&process.hear("I have "));
        for (index, &number) in numbers.iter().enumerate() {
            hub.connect(place * QUEUE_PAIRS + index, (shared, number as u32));
        }
        let (IpAddr::V4(address), all, memory, key) = hub.name() else { unreachable!() };
        let memory = memory + (place * QUEUE_PAIRS * LENGTH) as u64;
        let mut message = vec![address.to_bits().into(), memory, key];
        message.extend(all[place * QUEUE_PAIRS..][..QUEUE_PAIRS].iter().map(|&it| u64::from(it)));
        writeln!(process._stdin, "{}", words(&message)).unwrap();
        process
    }

    /// What follows the words.
    fn hear(&mut self, words: &str) -> String {
        loop {
            let line = self.lines.next().expect("it does not end by itself").unwrap();
            if let Some(rest) = line.strip_prefix(words) {
                return rest.to_owned();
            }
        }
    }

    fn work(&mut self, rounds: usize) {
        for _ in 0..rounds {
            self.hear("I did ");
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn eight_processes_with_eight_queue_pairs_each_share_an_address_and_some_are_killed() {
    let shared = address(2);
    // Each process has its place in the hub; those that come later have others.
    let hub = End::open(address(3), 2 * PROCESSES * QUEUE_PAIRS);
    let mut processes: Vec<_> =
        (0..PROCESSES).map(|place| Process::start(shared, &hub, place)).collect();
    let mut next = PROCESSES;
    thread::scope(|scope| {
        for process in &mut processes {
            scope.spawn(|| process.work(3));
        }
    });
    // The one that made the sockets, and others, in the middle of their work.
    for killed in [0, 3, 6, 1] {
        processes[killed].child.kill().unwrap();
        processes[killed] = Process::start(shared, &hub, next);
        next += 1;
        thread::scope(|scope| {
            for process in &mut processes {
                scope.spawn(|| process.work(2));
            }
        });
    }
    // All at once, but one, which goes on.
    let survivor = processes.swap_remove(5);
    drop(processes);
    let mut processes = vec![survivor];
    while next < 2 * PROCESSES {
        processes.push(Process::start(shared, &hub, next));
        next += 1;
    }
    thread::scope(|scope| {
        for process in &mut processes {
            scope.spawn(|| process.work(3));
        }
    });
    let places: Vec<_> = processes.iter().map(|process| process.place).collect();
    assert_eq!(places, [5, 12, 13, 14, 15]);
}
