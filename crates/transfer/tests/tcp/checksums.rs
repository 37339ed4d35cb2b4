//! Bits that change on their way.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use millstream_transfer::{Opcode, TcpConfig, TransferEngine, TransferState};

use super::fixture::{at_port, descriptor, engine, failure};
use crate::common::{LONG, contents, pattern, private, request, shared};

const LENGTH: usize = 1 << 20;

/// Which way bits change.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    There,
    Back,
}

/// Passes on what goes to a target, and back, and changes a bit at this place of the first so many connections.
struct Flipping {
    address: SocketAddr,
    flipped: Arc<AtomicUsize>,
}

impl Flipping {
    fn start(target: &TransferEngine, way: Way, place: usize, connections: usize) -> Self {
        let ip = target.listening_at().ip();
        let port = descriptor(target).tcp_data_port.unwrap();
        let listener = TcpListener::bind((ip, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let flipped = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&flipped);
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect((ip, port)) else { continue };
                let clone = |stream: &TcpStream| stream.try_clone().unwrap();
                let there = (clone(&near), clone(&far), Way::There);
                for (from, to, this) in [there, (far, near, Way::Back)] {
                    let counted = Arc::clone(&counted);
                    thread::spawn(move || {
                        let flips = || {
                            let flips = |count| (count < connections).then_some(count + 1);
                            let relaxed = Ordering::Relaxed;
                            counted.fetch_update(relaxed, relaxed, flips).is_ok()
                        };
                        pump(from, &to, |passed, bytes| {
                            if way == this
                                && let Some(byte) =
                                    place.checked_sub(passed).and_then(|at| bytes.get_mut(at))
                                && flips()
                            {
                                *byte ^= 0x10;
                            }
                        });
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        Self { address, flipped }
    }
}

fn pump(mut from: TcpStream, mut to: &TcpStream, mut see: impl FnMut(usize, &mut [u8])) {
    let (mut bytes, mut passed) = (vec![0; 16 << 10], 0);
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        see(passed, &mut bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            return;
        }
        passed += count;
    }
}

fn checked() -> TcpConfig {
    TcpConfig { checksums: true, lanes: 1, ..TcpConfig::default() }
}

/// What came of moving bytes.
struct Moved {
    state: TransferState,
    error: String,
    /// What is there then.
    bytes: Vec<u8>,
    /// How many bits changed.
    flipped: usize,
    /// The peer as the initiator calls it, and where its memory is.
    peer: String,
    address: u64,
}

/// Moves bytes through a relay that changes what goes the way of the bytes.
fn moved(opcode: Opcode, config: TcpConfig, place: usize, connections: usize) -> Moved {
    let way = if opcode == Opcode::Write { Way::There } else { Way::Back };
    let (target, initiator) = (engine(TcpConfig::default()), engine(config));
    moved_by((&target, &initiator), way, opcode, place, connections)
}

fn moved_by(
    (target, initiator): (&TransferEngine, &TransferEngine),
    way: Way,
    opcode: Opcode,
    place: usize,
    connections: usize,
) -> Moved {
    let (remote, local) = (shared(target, LENGTH), private(initiator, LENGTH));
    let (source, sink) = match opcode {
        Opcode::Write => (&local, &remote),
        Opcode::Read => (&remote, &local),
    };
    source.write(0, &pattern(LENGTH, 3)).unwrap();
    let relay = Flipping::start(target, way, place, connections);
    let (server, segment) = at_port(initiator, target, relay.address);
    let batch = initiator.allocate_batch(1).unwrap();
    let request = request(opcode, (&local, 0), &segment, 0, LENGTH as u64);
    initiator.submit(&batch, &[request]).unwrap();
    assert!(initiator.wait(&batch, LONG));
    let status = initiator.status(&batch, 0).unwrap();
    let error = status.error.map_or_else(String::new, |error| error.to_string());
    Moved {
        state: status.state,
        error,
        bytes: contents(sink, 0, LENGTH),
        flipped: relay.flipped.load(Ordering::Relaxed),
        peer: server.address().to_string(),
        address: remote.address(),
    }
}

#[test]
fn what_was_damaged_on_its_way_is_sent_again() {
    for opcode in [Opcode::Write, Opcode::Read] {
        // In the header of the first record, in that of a message, and in data.
        for place in [50, 70, 500_000] {
            let Moved { state, error, bytes, flipped, .. } = moved(opcode, checked(), place, 2);
            assert_eq!(state, TransferState::Completed, "{opcode:?} {place}: {error}");
            assert!(bytes == pattern(LENGTH, 3), "{opcode:?} {place}");
            assert_eq!(flipped, 2, "{opcode:?} {place}");
        }
    }
}

/// What both sides say first is as likely to be damaged as the rest: another connection is made, and nothing fails.
#[test]
fn a_hello_or_welcome_that_was_damaged_costs_a_connection() {
    let plain = TcpConfig { lanes: 1, ..TcpConfig::default() };
    let target = engine(TcpConfig::default());
    let (checked, plain) = (engine(checked()), engine(plain));
    let mut cases = Vec::new();
    for opcode in [Opcode::Write, Opcode::Read] {
        // The magic, the version and the number of the hello; the record of the welcome, and what is in it.
        cases.extend([2, 8, 30].map(|place| (&checked, Way::There, opcode, place)));
        cases.extend([1, 6, 14, 20].map(|place| (&checked, Way::Back, opcode, place)));
        cases.extend([2, 8].map(|place| (&plain, Way::There, opcode, place)));
        cases.extend([2, 8].map(|place| (&plain, Way::Back, opcode, place)));
    }
    for (initiator, way, opcode, place) in cases {
        let what = format!("{way:?} {opcode:?} {place}, {initiator:?}");
        let engines = (&target, initiator);
        let Moved { state, error, bytes, flipped, .. } = moved_by(engines, way, opcode, place, 1);
        assert_eq!(state, TransferState::Completed, "{what}: {error}");
        assert!(bytes == pattern(LENGTH, 3), "{what}");
        assert_eq!(flipped, 1, "{what}");
    }
}

#[test]
fn damage_without_end_is_an_error_that_names_it_and_reaches_no_memory() {
    for opcode in [Opcode::Write, Opcode::Read] {
        let moved = moved(opcode, checked(), 500_000, usize::MAX);
        let Moved { state, error, bytes, flipped, peer, address } = moved;
        assert_eq!(state, TransferState::Failed, "{opcode:?}");
        let what = match opcode {
            Opcode::Write => "what was sent to it was damaged on its way",
            Opcode::Read => "what it sent was damaged on its way here",
        };
        // Which peer, what, and which of its bytes: the request is one message.
        let expected = format!(
            "peer {peer} (nic tcp): checksum mismatch: {what}, with {LENGTH} bytes at {address:#x} of its memory under way"
        );
        assert_eq!(error, expected, "{opcode:?}");
        assert!(flipped >= 3, "{opcode:?}: {flipped}");
        let right = pattern(LENGTH, 3);
        assert!(bytes.iter().zip(&right).all(|(a, b)| a == b || *a == 0), "{opcode:?}");
    }
}

/// A peer that says in its descriptor that it knows of records, and does not.
#[test]
fn who_answers_without_records_is_told_of() {
    for (code, reason) in [
        (1, "it does not understand this version of the framing"),
        (0, "it answers without checksums, though it says that it knows of them"),
    ] {
        let (target, initiator) = (engine(TcpConfig::default()), engine(checked()));
        let _remote = shared(&target, 4096);
        let listener = TcpListener::bind((target.listening_at().ip(), 0)).unwrap();
        let (_server, segment) = at_port(&initiator, &target, listener.local_addr().unwrap());
        thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let mut welcome = *b"MILLSTR\xff\0\0\0\0\0\0\0\0";
                welcome[8] = code;
                let _ = stream.read_exact(&mut [0; 48]);
                let _ = stream.write_all(&welcome);
                let _ = stream.shutdown(Shutdown::Write);
                // What was not read would take back what was said.
                while stream.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {}
            }
        });
        let error = failure(&initiator, &segment);
        assert!(error.contains(reason), "{error}");
    }
}

/// So it would be: TCP's own checksum is of each hop.
#[test]
fn without_checksums_nobody_notices() {
    let Moved { state, bytes, flipped, .. } =
        moved(Opcode::Write, TcpConfig::default(), 500_000, 1);
    assert_eq!((state, flipped), (TransferState::Completed, 1));
    let right = pattern(LENGTH, 3);
    assert_eq!(bytes.iter().zip(&right).filter(|(a, b)| a != b).count(), 1);
}
