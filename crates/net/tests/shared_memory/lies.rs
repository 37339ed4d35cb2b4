//! The other end of a connection says what is not so, or too much.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use millstream_net::shared_memory::{AccessError, Key, PATIENCE, Peer};
use socket2::Socket;

use super::fake::{self, FakeOwner, MAP, MAPPED, key};
use super::fixture::{Offered, incarnation};

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

#[test]
fn who_does_not_answer_is_not_asked_by_each_who_waits() {
    let asked = AtomicUsize::new(0);
    let listen = |socket: Socket| {
        while let Ok(1..) = (&socket).read(&mut [0; 64]) {
            asked.fetch_add(1, Ordering::Relaxed);
        }
    };
    fake(&[4096; 3], listen, |peer| {
        for index in [0, 1, 2, 0] {
            let error = peer.open(Key(key(index))).unwrap_err();
            assert!(matches!(error, AccessError::NoAnswer), "{index}: {error}");
        }
    });
    assert_eq!(asked.into_inner(), 1);
}

/// Its late answer is none to the next question.
#[test]
fn who_did_not_answer_is_asked_again_later() {
    let file = fake::sealed(c"fake-late", 4096);
    let serve = |socket: Socket| {
        let hear = || (&socket).read(&mut [0; 64]).unwrap();
        // The first question is not answered until there is another one.
        assert_eq!([hear(), hear()], [40; 2]);
        for index in [0, 1] {
            fake::send(&socket, &fake::message(MAPPED, [key(index), 1, 0, 0]), &[&file]);
        }
        // Until it leaves.
        while hear() > 0 {}
    };
    fake(&[4096; 2], serve, |peer| {
        let open = |index| peer.open(Key(key(index)));
        assert!(matches!(open(0), Err(AccessError::NoAnswer)));
        while let Err(error) = open(1) {
            assert!(matches!(error, AccessError::NoAnswer), "{error}");
            thread::sleep(Duration::from_millis(20));
        }
    });
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

/// The lock that this process asks for on all of a file (fcntl(2)); what the kernel says of it.
fn lock(file: &File, command: libc::c_int) -> libc::flock {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the lock is borrowed exclusively.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    lock
}

/// A process that closes a descriptor of a file loses its locks on it. The offer is of this process.
#[test]
fn descriptors_that_nobody_wants_are_not_received() {
    let offered = Offered::new(3);
    let file = fake::sealed(c"fake-locked", 4096);
    lock(&file, libc::F_SETLK);
    let (name, many) = (offered.offer.socket(), [&file; 100]);
    let (socket, _presence) = fake::user_with(name, offered.incarnation, &many);
    // Once the last one is answered, all of those before are done with.
    for files in [&many[..], &[], &[]] {
        fake::send(&socket, &fake::message(MAP, [77, 0, 0, 0]), files);
        assert_eq!((&socket).read(&mut [0; 64]).unwrap(), 40);
    }
    // Of an open file description, the process's own lock is another one's.
    let found = lock(&file, libc::F_OFD_GETLK).l_type;
    assert_eq!(i32::from(found), libc::F_WRLCK, "it was received, and closed");
}
