//! Several devices on one address: which datagram goes to which, and who gets in.

mod common;

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket as StdSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use common::{PATIENCE, address, eventually, has_ipv6, skip};
use millstream_lab::Stopwatch;
use millstream_net::udp::{ReceiveBatch, SocketConfig, UdpSocket};
use millstream_net::{DriverCounters, OpenError};
use millstream_roce::{DatagramMeta, Identification, QueuePairNumbers, SLOTS};
use millstream_wire::{Qpn, ROCE_PORT};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

fn config(address: IpAddr) -> SocketConfig {
    SocketConfig { address, port: ROCE_PORT, segmentation_offload: true, buffer_length: 1 << 20 }
}

fn open(address: IpAddr) -> UdpSocket {
    UdpSocket::open_shared(&config(address)).unwrap_or_else(|error| panic!("{error}"))
}

/// A device's socket, and what it received.
struct Device {
    socket: UdpSocket,
    batch: ReceiveBatch,
    counters: DriverCounters,
}

impl Device {
    fn open(address: IpAddr) -> Self {
        Self::of(open(address))
    }

    fn of(socket: UdpSocket) -> Self {
        Self { socket, batch: ReceiveBatch::new(8), counters: DriverCounters::default() }
    }

    fn slot(&self) -> usize {
        match self.socket.queue_pair_numbers() {
            QueuePairNumbers::Slot { slot, .. } => slot.into(),
            QueuePairNumbers::All => panic!("it shares its address"),
        }
    }

    fn generation(&self) -> u64 {
        match self.socket.queue_pair_numbers() {
            QueuePairNumbers::Slot { generation, .. } => generation,
            QueuePairNumbers::All => panic!("it shares its address"),
        }
    }

    /// What is there now. Within one machine, what was sent has arrived.
    fn received(&mut self) -> Vec<(DatagramMeta, Vec<u8>)> {
        let mut all = Vec::new();
        while self.socket.receive(&mut self.batch, &mut self.counters).unwrap() > 0 {
            all.extend(self.batch.datagrams().map(|(meta, bytes)| (meta, bytes.to_vec())));
        }
        all
    }

    fn payloads(&mut self) -> Vec<Vec<u8>> {
        self.received().into_iter().map(|(_, bytes)| bytes).collect()
    }
}

/// A datagram for a queue pair, with something to tell it by.
fn datagram(qpn: u32, length: usize, mark: u8) -> Vec<u8> {
    let mut bytes = vec![mark; length.max(12)];
    bytes[0] = 4;
    bytes[1] = 0;
    bytes[5..8].copy_from_slice(&Qpn::new(qpn).to_bytes());
    bytes
}

/// A number in a slot.
fn number(slot: usize) -> u32 {
    (slot as u32) << 19 | 0x1234
}

/// A slot that none of these has, and that nobody had before if there are few.
fn free_slot(used: &[usize]) -> usize {
    (0..SLOTS).find(|slot| !used.contains(slot)).unwrap()
}

/// Somebody on another address, with what tests need to send.
fn stranger(to: IpAddr) -> StdSocket {
    let from = if to.is_ipv6() { to } else { address() };
    let socket = StdSocket::bind((from, 0)).unwrap();
    socket.connect((to, ROCE_PORT)).unwrap();
    socket
}

/// Sends datagrams of `segment` bytes (the last may be shorter) as one message.
fn send_train(socket: &StdSocket, segment: u16, bytes: &[u8]) {
    let value = libc::c_int::from(segment);
    // SAFETY: an integer of the length that is passed, alive during the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_SEGMENT,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    assert_eq!(socket.send(bytes).unwrap(), bytes.len());
}

/// Of the sockets of an address, how many bytes wait, and how many datagrams were dropped.
fn kernel_counts(address: IpAddr) -> (u64, u64) {
    let IpAddr::V4(v4) = address else { panic!("/proc/net/udp is of IPv4") };
    let name = format!("{:08X}:{ROCE_PORT:04X}", u32::from_ne_bytes(v4.octets()));
    let table = std::fs::read_to_string("/proc/net/udp").unwrap();
    let of_address = table.lines().filter(|line| line.split_whitespace().nth(1) == Some(&name));
    of_address.fold((0, 0), |(waiting, dropped), line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let queue = fields[4].split_once(':').unwrap().1;
        let drops: u64 = fields.last().unwrap().parse().unwrap();
        (waiting + u64::from_str_radix(queue, 16).unwrap(), dropped + drops)
    })
}

/// A device has some forty descriptors open, and tests many devices.
fn allow_many_descriptors() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: borrowed exclusively.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: only read.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

#[test]
fn a_datagram_goes_to_the_device_of_its_slot() {
    allow_many_descriptors();
    let own = address();
    let mut devices: Vec<_> = (0..SLOTS).map(|_| Device::open(own)).collect();
    devices.sort_by_key(Device::slot);
    let sender = stranger(own);
    for slot in 0..SLOTS {
        for low in [0, 1, 0x7ffff] {
            sender.send(&datagram((slot as u32) << 19 | low, 60, slot as u8)).unwrap();
        }
    }
    for (slot, device) in devices.iter_mut().enumerate() {
        assert_eq!(device.slot(), slot, "each has another one");
        let expected =
            [0, 1, 0x7ffff].map(|low| datagram((slot as u32) << 19 | low, 60, slot as u8));
        // The management queue pairs 0 and 1 are in the first slot, and multicast is in the last.
        assert_eq!(device.payloads(), expected);
        assert_eq!(device.counters.handed_over_datagrams, 0);
    }
    // What is too short to name a queue pair goes to the first slot, too.
    for length in 1..8 {
        sender.send(&[0; 8][..length]).unwrap();
    }
    assert_eq!(devices[0].payloads().len(), 7);
    // There is no other slot.
    let error = UdpSocket::open_shared(&config(own)).unwrap_err();
    assert!(matches!(error, OpenError::NoSlotFree { .. }), "{error}");
    assert!(error.is_in_use());
    let (slot, generation) = (devices[7].slot(), devices[7].generation());
    drop(devices.remove(7));
    let again = Device::open(own);
    assert_eq!(again.slot(), slot);
    assert_eq!(again.generation(), generation + 1, "its numbers begin elsewhere");
}

#[test]
fn what_is_for_nobody_is_dropped_and_counted_and_the_others_stay_where_they_are() {
    let own = address();
    let mut devices: Vec<_> = (0..3).map(|_| Device::open(own)).collect();
    let sender = stranger(own);
    let gone = devices.remove(1);
    let slot = gone.slot();
    let never_used = free_slot(&[slot, devices[0].slot(), devices[1].slot()]);
    // It waits in the socket, which is emptied when the device goes.
    sender.send(&datagram(number(slot), 60, 1)).unwrap();
    drop(gone);
    assert_eq!(kernel_counts(own), (0, 0));
    for _ in 0..1000 {
        sender.send(&datagram(number(slot), 1000, 1)).unwrap();
        sender.send(&datagram(number(never_used), 1000, 2)).unwrap();
    }
    assert_eq!(kernel_counts(own), (0, 2000), "bytes that wait, and datagrams that were dropped");
    for device in &mut devices {
        let expected = datagram(number(device.slot()), 60, 7);
        sender.send(&expected).unwrap();
        assert_eq!(device.payloads(), [expected]);
    }
    // A slot rests as long as others are free, and has nothing in it when it is used again.
    let mut next = Device::open(own);
    assert_ne!(next.slot(), slot);
    assert_eq!(next.payloads(), [[0; 0]; 0]);
}

#[test]
fn who_is_there_admits_the_next_one() {
    let own = address();
    let mut last = Device::open(own);
    // Always one that the first has not admitted, and that has ended when the next but one comes.
    for _ in 0..10 {
        let mut next = Device::open(own);
        assert_ne!(next.slot(), last.slot());
        let sender = stranger(own);
        for device in [&mut next, &mut last] {
            let expected = datagram(number(device.slot()), 100, 3);
            sender.send(&expected).unwrap();
            assert_eq!(device.payloads(), [expected]);
        }
        last = next;
    }
}

#[test]
fn what_the_kernel_coalesced_is_handed_over() {
    let mut addresses = vec![address()];
    if has_ipv6("what_the_kernel_coalesced_is_handed_over over IPv6") {
        addresses.push(std::net::Ipv6Addr::LOCALHOST.into());
    }
    for own in addresses {
        let [mut one, mut other] = [Device::open(own), Device::open(own)];
        let (a, b) = (one.slot(), other.slot());
        let nobody = free_slot(&[a, b]);
        let sender = stranger(own);
        // 63 datagrams of 1,000 bytes, then a shorter one: in a message that leaves no room for more.
        let slots: Vec<_> = (0..64).map(|i| [a, a, b, b, b, a, nobody, b][i % 8]).collect();
        let datagrams = slots.iter().enumerate().map(|(index, &slot)| {
            let length = if index == 63 { 500 } else { 1000 };
            datagram(number(slot), length, index as u8)
        });
        let datagrams = datagrams.collect::<Vec<_>>();
        send_train(&sender, 1000, &datagrams.concat());
        let expected = |of: usize| -> Vec<_> {
            let ours =
                slots.iter().zip(&datagrams).enumerate().filter(|(_, (slot, _))| **slot == of);
            ours.map(|(index, (_, bytes))| (index as u16, bytes.clone())).collect()
        };
        for (device, slot) in [(&mut one, a), (&mut other, b)] {
            let received = device.received();
            for (meta, _) in &received {
                assert_eq!(
                    SocketAddr::new(meta.source, meta.source_port),
                    sender.local_addr().unwrap()
                );
                assert_eq!(meta.destination, own);
                assert!(!meta.congestion_experienced);
            }
            // The places that they had, which are what their ICRCs are checked with.
            let received = received.into_iter().map(|(meta, bytes)| match meta.identification {
                Identification::Guessed(index) => (index, bytes),
                Identification::Known(_) => panic!("a UDP socket does not see it"),
            });
            assert_eq!(received.collect::<Vec<_>>(), expected(slot));
        }
        assert_eq!(one.counters.handed_over_datagrams, 32 + 8);
        assert_eq!((one.counters.lost_hand_overs, one.counters.taken_over_datagrams), (0, 0));
        assert_eq!(other.counters.taken_over_datagrams, 32);
        assert_eq!(other.counters.handed_over_datagrams, 0);
    }
}

#[test]
fn a_train_of_the_longest_datagrams_is_handed_over_too() {
    let own = address();
    let [mut one, mut other] = [Device::open(own), Device::open(own)];
    let sender = stranger(own);
    // Sixteen bytes of the longest message are left, fewer than the header that is put in front.
    let mut train = datagram(number(one.slot()), 4093, 0);
    let for_other: Vec<_> = (1..16).map(|i| datagram(number(other.slot()), 4093, i)).collect();
    train.extend(for_other.concat());
    send_train(&sender, 4093, &train);
    assert_eq!(one.payloads().len(), 1);
    assert_eq!(other.payloads(), for_other);
    assert_eq!(one.counters.handed_over_datagrams, 15);
}

#[test]
fn nobody_else_can_hand_over() {
    let own = address();
    let [mut one, mut other] = [Device::open(own), Device::open(own)];
    // What an honest one looks like, to be sent by somebody who has not the key.
    let mut train = datagram(number(one.slot()), 100, 0);
    train.extend(datagram(number(other.slot()), 100, 1));
    send_train(&stranger(own), 100, &train);
    let stranger = stranger(own);
    assert_eq!(one.payloads().len(), 1);
    assert_eq!(other.payloads().len(), 1);
    for length in 12..100 {
        let mut forged = datagram(number(other.slot()), length, 0xff);
        forged[..2].copy_from_slice(&[0xff, 0x0f]);
        // From the very address and port: what another process of the user can do, and no remote.
        stranger.send(&forged).unwrap();
        let from_here = SockRef::from(&other.socket);
        from_here.send_to(&forged, &SocketAddr::new(own, ROCE_PORT).into()).unwrap();
        assert_eq!(other.payloads(), [forged.clone(), forged], "as it is, for the node to refuse");
    }
    assert_eq!(other.counters.taken_over_datagrams, 1);
}

#[test]
fn an_address_is_shared_with_none_that_does_not_share() {
    let own = address();
    let alone = UdpSocket::open(&config(own)).unwrap();
    let error = UdpSocket::open_shared(&config(own)).unwrap_err();
    assert!(matches!(error, OpenError::PortInUse { port: ROCE_PORT, .. }), "{error}");
    drop(alone);
    let device = Device::open(own);
    let error = UdpSocket::open(&config(own)).unwrap_err();
    assert!(matches!(error, OpenError::PortInUse { .. }), "{error}");
    drop(device);
    UdpSocket::open(&config(own)).unwrap();
    let any = SocketConfig { port: 0, ..config(own) };
    assert!(matches!(UdpSocket::open_shared(&any), Err(OpenError::System { .. })));
}

/// Runs on a thread that is another user's. The system call concerns only the thread that makes it.
fn as_nobody<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    const NOBODY: libc::uid_t = 65534;
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: no pointers.
            let result = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
            assert_eq!(result, 0, "{}", io::Error::last_os_error());
            work()
        });
        thread.join().unwrap()
    })
}

#[test]
fn an_address_is_shared_with_no_other_user() {
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return skip("an_address_is_shared_with_no_other_user", "root, to become another user");
    }
    let (own, nobodys) = (address(), address());
    let _device = Device::open(own);
    let error = as_nobody(|| UdpSocket::open_shared(&config(own)).unwrap_err());
    assert!(matches!(error, OpenError::OtherUser { user: 0, .. }), "{error}");
    let _device = as_nobody(|| open(nobodys));
    let error = UdpSocket::open_shared(&config(nobodys)).unwrap_err();
    assert!(matches!(error, OpenError::OtherUser { user: 65534, .. }), "{error}");
    assert!(error.is_in_use());
}

/// Whoever has the name of an address, and does with it what he likes.
fn usurper(address: IpAddr) -> Socket {
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
    let name = format!("\0millstream/{address}/{ROCE_PORT}");
    socket.bind(&SockAddr::unix(name).unwrap()).unwrap();
    socket
}

#[test]
fn nobody_is_waited_for_for_ever() {
    let (silent, unfinished) = (address(), address());
    let listener = usurper(silent);
    listener.listen(1).unwrap();
    let _not_listening = usurper(unfinished);
    for address in [silent, unfinished] {
        let stopwatch = Stopwatch::start();
        let error = UdpSocket::open_shared(&config(address)).unwrap_err();
        assert!(matches!(error, OpenError::NotAdmitted { .. }), "{error}");
        let took = stopwatch.took();
        assert!(took.own() < PATIENCE / 4, "{took}");
    }
}

#[test]
fn who_is_killed_while_he_makes_the_sockets_is_succeeded() {
    let own = address();
    // It has the name, and the port that is bound first; the sockets of a process close one by one.
    let (name, first) = (usurper(own), StdSocket::bind((own, ROCE_PORT)).unwrap());
    name.listen(1).unwrap();
    let successor = std::thread::spawn(move || drop(open(own)));
    // It asks, and gets no answer.
    drop(name.accept().unwrap());
    drop(name);
    let line = format!("@millstream/{own}/{ROCE_PORT}");
    eventually("the successor has the name", || {
        std::fs::read_to_string("/proc/net/unix").unwrap().lines().any(|it| it.ends_with(&line))
    });
    drop(first);
    successor.join().unwrap();
}

#[test]
fn nonsense_is_refused() {
    let greeting = |version: u32, slots: u32| {
        let mut bytes = b"RoCEslot".to_vec();
        bytes.extend(version.to_le_bytes());
        bytes.extend(slots.to_le_bytes());
        // SAFETY: no arguments.
        bytes.extend(unsafe { libc::geteuid() }.to_le_bytes());
        bytes
    };
    let messages = [
        b"?".to_vec(),
        vec![0; 10_000],
        greeting(2, SLOTS as u32),
        greeting(1, u32::MAX),
        // As it should be, but for the descriptors, of which there are none.
        greeting(1, SLOTS as u32),
    ];
    for message in messages {
        let own = address();
        let listener = usurper(own);
        listener.listen(1).unwrap();
        let asker = std::thread::spawn(move || UdpSocket::open_shared(&config(own)).unwrap_err());
        let (peer, _) = listener.accept().unwrap();
        peer.send(&message).unwrap();
        let error = asker.join().unwrap();
        assert!(matches!(error, OpenError::OtherVersion { .. }), "{error}");
    }
}

#[test]
fn claimants_that_hang_hold_up_nobody() {
    allow_many_descriptors();
    let own = address();
    let _first = Device::open(own);
    let name = SockAddr::unix(format!("\0millstream/{own}/{ROCE_PORT}")).unwrap();
    let hanging: Vec<_> = (0..100)
        .map(|_| {
            let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
            socket.connect(&name).unwrap();
            socket
        })
        .collect();
    let stopwatch = Stopwatch::start();
    let _next = Device::open(own);
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_secs(1), "{took}");
    drop(hanging);
}

#[test]
fn many_at_once_get_in_each_with_a_slot_of_its_own() {
    allow_many_descriptors();
    let own = address();
    let threads: Vec<_> = (0..16).map(|_| std::thread::spawn(move || open(own))).collect();
    let devices = threads.into_iter().map(|thread| Device::of(thread.join().unwrap()));
    let devices: Vec<_> = devices.collect();
    let mut slots: Vec<_> = devices.iter().map(Device::slot).collect();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), devices.len());
}

/// The part of a test that runs in a process of its own.
#[test]
fn owner_of_a_slot() {
    let Ok(own) = std::env::var("MILLSTREAM_TEST_SHARED_ADDRESS") else { return };
    let device = Device::open(own.parse().unwrap());
    println!("slot {} of {own}", device.slot());
    loop {
        std::thread::park();
    }
}

#[test]
fn the_slot_of_one_that_was_killed_takes_nothing_any_more() {
    use std::io::{BufRead, BufReader};
    let own = address();
    let mut first = Device::open(own);
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "owner_of_a_slot", "--nocapture"])
        .env("MILLSTREAM_TEST_SHARED_ADDRESS", own.to_string())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let slot: usize = lines
        .map(Result::unwrap)
        .find_map(|line| line.split_once("slot ").map(|(_, rest)| rest.to_owned()))
        .and_then(|rest| rest.split(' ').next().unwrap().parse().ok())
        .unwrap();
    let sender = stranger(own);
    let expected = datagram(number(first.slot()), 60, 1);
    for _ in 0..10 {
        sender.send(&datagram(number(slot), 60, 2)).unwrap();
        sender.send(&expected).unwrap();
    }
    assert_eq!(first.payloads(), vec![expected.clone(); 10]);
    assert!(kernel_counts(own).0 > 0, "the child does not receive");
    child.kill().unwrap();
    child.wait().unwrap();
    // Whatever comes meanwhile.
    eventually("the slot is cleared", || {
        sender.send(&datagram(number(slot), 60, 2)).unwrap();
        kernel_counts(own).0 == 0
    });
    sender.send(&expected).unwrap();
    assert_eq!(first.payloads(), [expected]);
    let next = Device::open(own);
    assert!(next.slot() != slot && next.slot() != first.slot());
}

/// The kernel counts them with the socket, which has had others before.
#[test]
fn what_was_dropped_before_a_device_came_is_not_its_loss() {
    let address = address();
    let first = Device::open(address);
    let stranger = stranger(address);
    for slot in (0..SLOTS).filter(|&slot| slot != first.slot()) {
        for mark in 0..3 {
            stranger.send(&datagram(number(slot), 100, mark)).unwrap();
        }
    }
    let mut second = Device::open(address);
    stranger.send(&datagram(number(second.slot()), 100, 9)).unwrap();
    assert_eq!(second.payloads().len(), 1);
    assert_eq!(second.counters.overflowed_messages, 0);
}
