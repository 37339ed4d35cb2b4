//! What comes to a port for data from who is no engine, or lies.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use millstream_lab::Stopwatch;
use millstream_metadata::{Client, Frame, FrameType, HandShakeDesc};
use millstream_transfer::{Opcode, TcpConfig, TransferEngine};

use super::fixture::{Pair, descriptor, engine, pair};
use crate::common::{LONG, contents, pattern, private, request, shared};

const OK: [u8; 8] = *b"\0\0\0\0VTCM";
const REJECTED: [u8; 8] = *b"\x01\0\0\0VTCM";

fn place(engine: &TransferEngine) -> SocketAddr {
    (engine.listening_at().ip(), descriptor(engine).tcp_data_port.unwrap()).into()
}

fn connect(engine: &TransferEngine) -> TcpStream {
    let stream = TcpStream::connect(place(engine)).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// A request as the original's C structure.
fn old(opcode: u8, address: u64, length: u64) -> Vec<u8> {
    let mut bytes = [length.to_le_bytes(), address.to_le_bytes()].concat();
    bytes.push(opcode);
    bytes.extend([0xaa; 7]);
    bytes
}

const READ: u8 = 0;
const WRITE: u8 = 1;
const TWO: u8 = 0x80;

/// What a stream says until its end. One that is reset has ended too.
fn rest(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Err(error) = stream.read_to_end(&mut bytes) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "it hangs");
    }
    bytes
}

#[test]
fn requests_of_the_original_are_done_and_its_padding_is_ignored() {
    let target = engine(TcpConfig::default());
    let remote = shared(&target, 4096);
    let mut stream = connect(&target);
    let bytes = pattern(4096, 1);
    // Byte by byte.
    for byte in [&old(WRITE | TWO, remote.address(), 4096)[..], &bytes].concat() {
        stream.write_all(&[byte]).unwrap();
    }
    let mut status = [0; 8];
    stream.read_exact(&mut status).unwrap();
    assert_eq!(status, OK);
    assert!(contents(&remote, 0, 4096) == bytes);
    // Two at once, though the original does not.
    let reads =
        [old(READ | TWO, remote.address() + 5, 100), old(READ, remote.address(), 7)].concat();
    stream.write_all(&reads).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let expected = [&OK[..], &bytes[5..105], &bytes[..7]].concat();
    assert_eq!(rest(stream), expected);
}

#[test]
fn no_byte_outside_of_registered_memory_is_touched_or_shown() {
    let target = engine(TcpConfig::default());
    let remote = shared(&target, 4096);
    let hidden = private(&target, 4096);
    hidden.write(0, &[7; 4096]).unwrap();
    let (first, end) = (remote.address(), remote.address() + 4096);
    for (address, length) in [
        (first, 0),
        (first - 1, 1),
        (first - 1, 2),
        (end, 1),
        (end - 1, 2),
        (first, 4097),
        (first, 1 << 63),
        (first, u64::MAX),
        (u64::MAX, 1),
        (u64::MAX, u64::MAX),
        (0, 1),
        (hidden.address(), 1),
    ] {
        for opcode in [READ, WRITE] {
            let mut stream = connect(&target);
            stream.write_all(&old(opcode | TWO, address, length)).unwrap();
            // What follows a WRITE that is refused goes nowhere.
            let _ = stream.write_all(&[9; 100]);
            let _ = stream.shutdown(Shutdown::Write);
            assert_eq!(rest(stream), REJECTED, "{address:#x} {length:#x}");
            let mut stream = connect(&target);
            stream.write_all(&old(opcode, address, length)).unwrap();
            assert_eq!(rest(stream), b"", "{address:#x} {length:#x}");
        }
    }
    assert_eq!(contents(&remote, 0, 4096), [0; 4096]);
    assert_eq!(contents(&hidden, 0, 4096), [7; 4096]);
}

/// A message as two engines of this project use it, from the description in docs/tcp.md.
fn message(kind: u8, id: u64, pieces: &[(u64, u64)], length: u64) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.extend((pieces.len() as u32).to_le_bytes());
    bytes.extend([id.to_le_bytes(), length.to_le_bytes(), [0; 8]].concat());
    for (address, length) in pieces {
        bytes.extend([address.to_le_bytes(), length.to_le_bytes()].concat());
    }
    bytes
}

fn hello(connection: u128, incarnation: u64) -> Vec<u8> {
    let mut bytes = b"MILLSTR\xff".to_vec();
    bytes.extend([1, 0, 0, 0, 0, 0, 0, 0, 0x7f, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend(connection.to_le_bytes());
    bytes.extend(incarnation.to_le_bytes());
    bytes
}

/// The same with checksums.
fn checked_hello(connection: u128, incarnation: u64) -> Vec<u8> {
    let mut bytes = hello(connection, incarnation);
    bytes[8] = 2;
    let checksum = crc32c::crc32c(&bytes);
    bytes[12..16].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

fn record(payload: &[u8]) -> Vec<u8> {
    let mut bytes = (payload.len() as u32).to_le_bytes().to_vec();
    bytes.extend(crc32c::crc32c(payload).to_le_bytes());
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn welcome(code: u8) -> Vec<u8> {
    [&b"MILLSTR\xff"[..], &[code, 0, 0, 0, 0, 0, 0, 0]].concat()
}

fn ended(id: u64, faults: &[(u32, u32)]) -> Vec<u8> {
    let mut bytes = vec![2, 0, 0, 0];
    bytes.extend((faults.len() as u32).to_le_bytes());
    bytes.extend([id.to_le_bytes(), [0; 8], [0; 8]].concat());
    for (piece, code) in faults {
        bytes.extend([code.to_le_bytes(), piece.to_le_bytes()].concat());
    }
    bytes
}

#[test]
fn of_a_message_only_the_pieces_fail_that_are_wrong() {
    let target = engine(TcpConfig::default());
    let remote = shared(&target, 4096);
    let at = |offset| remote.address() + offset;
    let incarnation = descriptor(&target).incarnation.unwrap();
    let mut stream = connect(&target);
    let pieces = [(at(0), 10), (at(4090), 10), (at(100), 10), (u64::MAX - 3, 10)];
    let mut bytes = [hello(1, incarnation), message(1, 77, &pieces, 40)].concat();
    (1..=4).for_each(|seed| bytes.extend([seed; 10]));
    // The same, read: the data of those that are right follows.
    bytes.extend(message(2, 78, &pieces, 40));
    stream.write_all(&bytes).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut data = ended(78, &[(1, 0), (3, 0)]);
    data[0] = 1;
    data[16] = 20;
    let expected = [
        welcome(0),
        ended(77, &[(1, 0), (3, 0)]),
        data,
        [[1; 10], [3; 10]].concat(),
        ended(78, &[]),
    ];
    assert_eq!(rest(stream), expected.concat());
    assert_eq!(contents(&remote, 4090, 6), [0; 6]);
}

#[test]
fn messages_that_are_none_end_the_connection_and_touch_nothing() {
    let target = engine(TcpConfig::default());
    let remote = shared(&target, 4096);
    let first = remote.address();
    let incarnation = descriptor(&target).incarnation.unwrap();
    let many = vec![(first, 1); 257];
    for (what, bytes) in [
        ("no kind", message(9, 1, &[(first, 1)], 1)),
        ("no piece", message(1, 1, &[], 0)),
        ("too many pieces", message(1, 1, &many, 257)),
        ("too long", message(1, 1, &[(first, 1 << 63)], 1 << 63)),
        ("a piece of nothing", message(1, 1, &[(first, 1), (first, 0)], 1)),
        ("pieces that overflow", message(1, 1, &[(first, u64::MAX), (first, 2)], 1)),
        ("pieces of another length", message(1, 1, &[(first, 5), (first, 5)], 11)),
    ] {
        let mut stream = connect(&target);
        stream.write_all(&[hello(1, incarnation), bytes, vec![9; 64]].concat()).unwrap();
        let said = rest(stream);
        // Where bytes are left unread the end takes back what was said.
        assert!(said.is_empty() || said == welcome(0), "{what}: {said:?}");
    }
    assert_eq!(contents(&remote, 0, 4096), [0; 4096]);
    for (code, bytes) in [
        (2, hello(1, incarnation.wrapping_add(1))),
        (1, {
            let mut bytes = hello(1, incarnation);
            bytes[8] = 3;
            bytes
        }),
    ] {
        let mut stream = connect(&target);
        stream.write_all(&bytes).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(rest(stream), welcome(code));
    }
}

/// A connection that a fence has ended does nothing more, also if it begins only then.
#[test]
fn a_fence_ends_a_connection_for_good() {
    let target = engine(TcpConfig::default());
    let remote = shared(&target, 4096);
    let incarnation = descriptor(&target).incarnation.unwrap();
    let write = message(1, 1, &[(remote.address(), 4096)], 4096);
    let mut old = connect(&target);
    // Half of a WRITE.
    old.write_all(&[hello(1, incarnation), write.clone(), vec![1; 1000]].concat()).unwrap();
    let start = Instant::now();
    while contents(&remote, 999, 1) != [1] {
        assert!(start.elapsed() < LONG);
        thread::yield_now();
    }
    let mut fencing = connect(&target);
    let fence = |connection: u64| message(3, connection, &[(connection, 0)], 0);
    fencing.write_all(&[hello(3, incarnation), fence(1), fence(2)].concat()).unwrap();
    let mut said = vec![0; 16 + 2 * 32];
    fencing.read_exact(&mut said).unwrap();
    assert_eq!(said, [welcome(0), ended(1, &[]), ended(2, &[])].concat());
    remote.write(0, &[0; 4096]).unwrap();
    let _ = old.write_all(&[1; 3096]);
    let _ = rest(old);
    let mut late = connect(&target);
    late.write_all(&[hello(2, incarnation), write, vec![1; 4096]].concat()).unwrap();
    late.shutdown(Shutdown::Write).unwrap();
    let said = rest(late);
    assert!(said.is_empty() || said == welcome(3), "{said:?}");
    assert_eq!(contents(&remote, 0, 4096), [0; 4096]);
}

/// So does one that is asked for at the control port, for its number and this start of the process only.
#[test]
fn a_connection_is_ended_by_the_control_port_too() {
    let target = engine(TcpConfig::default());
    let remote = shared(&target, 4096);
    let incarnation = descriptor(&target).incarnation.unwrap();
    let ask = |stream: &str, peer_incarnation| {
        let stream = Some(stream.to_owned());
        let request = HandShakeDesc { stream, peer_incarnation, ..HandShakeDesc::default() };
        let frame = Frame::new(FrameType::Connection, request.to_json());
        let reply = Client::default().call(&target.name().parse().unwrap(), &frame).unwrap();
        HandShakeDesc::from_json(&reply.body).unwrap().stream_fenced
    };
    let number = 0xfeed_u128 << 100;
    let write = message(1, 1, &[(remote.address(), 4096)], 4096);
    let mut old = connect(&target);
    old.write_all(&[hello(number, incarnation), write, vec![1; 1000]].concat()).unwrap();
    let start = Instant::now();
    while contents(&remote, 999, 1) != [1] {
        assert!(start.elapsed() < LONG);
        thread::yield_now();
    }
    let text = format!("{number:032x}");
    for stream in ["", "x", "-1", &"f".repeat(33), &"0".repeat(100_000)] {
        assert!(!ask(stream, Some(incarnation)), "{} bytes", stream.len());
    }
    assert!(!ask(&text, None) && !ask(&text, Some(incarnation.wrapping_add(1))));
    // None of that has ended it.
    old.write_all(&[1; 1000]).unwrap();
    while contents(&remote, 1999, 1) != [1] {
        assert!(start.elapsed() < LONG);
        thread::yield_now();
    }
    assert!(ask(&text, Some(incarnation)));
    remote.write(0, &[0; 4096]).unwrap();
    let _ = old.write_all(&[1; 2096]);
    let _ = rest(old);
    assert_eq!(contents(&remote, 0, 4096), [0; 4096]);
}

/// Garbage of many kinds, and others are served meanwhile.
#[test]
fn garbage_is_refused_and_others_are_served() {
    let Pair { segment, remote: _remote, local, target, initiator } =
        pair(TcpConfig::default(), 4096);
    let incarnation = descriptor(&target).incarnation.unwrap();
    let tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".repeat(40);
    let get = b"GET / HTTP/1.1\r\nHost: millstream\r\nAccept: */*\r\n\r\n".to_vec();
    for garbage in
        [get, tls, vec![0xff; 10_000], pattern(10_000, 3), hello(9, incarnation)[..40].to_vec()]
    {
        for length in [1, 23, 24, garbage.len()] {
            let mut stream = connect(&target);
            let length = length.min(garbage.len());
            let _ = stream.write_all(&garbage[..length]);
            let _ = stream.shutdown(Shutdown::Write);
            assert_eq!(rest(stream), b"", "{length} of {:?}", &garbage[..24]);
        }
        let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
        initiator.submit_and_wait(&[read], LONG).unwrap();
    }
}

/// Those who say nothing, or half of something, all at once or byte by byte, do not keep others out.
#[test]
fn silent_strangers_make_room() {
    let target = engine(TcpConfig { max_connections: 4, ..TcpConfig::default() });
    let remote = shared(&target, 4096);
    let incarnation = descriptor(&target).incarnation.unwrap();
    let whole = message(1, 1, &[(remote.address(), 1), (remote.address(), 1)], 2);
    let hello_and = |rest: &[u8]| [&hello(1, incarnation)[..], rest].concat();
    for (what, said) in [
        ("nothing", vec![]),
        ("half of a request", old(WRITE | TWO, remote.address(), 4096)[..12].to_vec()),
        ("half of a hello", hello(1, incarnation)[..24].to_vec()),
        ("a hello to another process", hello(1, incarnation.wrapping_add(1))),
        ("a hello", hello_and(&[])),
        ("half of a message", hello_and(&whole[..16])),
        ("a message without all of its pieces", hello_and(&whole[..whole.len() - 1])),
    ] {
        let held: Vec<TcpStream> = (0_u8..12).map(|_| connect(&target)).collect();
        for (number, mut stream) in (0_u8..).zip(&held) {
            let mut said = said.clone();
            // No two have the same number.
            if let Some(byte) = said.get_mut(24) {
                *byte = number;
            }
            let _ = stream.write_all(&said);
        }
        let initiator = engine(TcpConfig::default());
        let local = private(&initiator, 4096);
        let segment = initiator.open_segment(target.name()).unwrap();
        let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
        let stopwatch = Stopwatch::start();
        initiator.submit_and_wait(&[read], LONG).unwrap();
        let took = stopwatch.took();
        assert!(took.own() < Duration::from_secs(9), "{what}: {took}");
        drop(held);
    }
}

/// The time of a request's head begins with its first byte, however many pieces it has.
#[test]
fn who_says_a_byte_now_and_then_is_sent_away() {
    let target = engine(TcpConfig::default());
    let remote = shared(&target, 4096);
    let incarnation = descriptor(&target).incarnation.unwrap();
    let many = message(1, 1, &[(remote.address(), 1); 256], 256);
    let records = [record(&many[..32]), record(&many[32..])].concat();
    let streams = [
        ([old(WRITE | TWO, remote.address(), 100), vec![1; 100]].concat(), 25),
        ([hello(1, incarnation), many].concat(), 48 + 32 + 16 * 3),
        // Nothing of a record counts before all of it: the first one, and the next one amid a message.
        ([checked_hello(2, incarnation), records.clone()].concat(), 48 + 1),
        ([checked_hello(3, incarnation), records].concat(), 48 + 12 + 32 + 1),
    ];
    thread::scope(|scope| {
        for (bytes, at_once) in streams {
            let target = &target;
            scope.spawn(move || {
                let mut stream = connect(target);
                stream.write_all(&bytes[..at_once]).unwrap();
                let mut rest = bytes[at_once..].iter();
                while rest.next().is_some_and(|byte| stream.write_all(&[*byte]).is_ok()) {
                    // Not for an event: it is slow.
                    thread::sleep(Duration::from_millis(500));
                }
                // Who has all the time that he wants comes to the end.
                assert!(rest.len() > 0, "it may go on");
            });
        }
    });
}

/// A stranger that asks and does not take the answers holds up nobody, and is forgotten in bounded memory.
#[test]
fn who_asks_and_does_not_listen_holds_up_nobody() {
    let Pair { segment, remote, local, target, initiator } = pair(TcpConfig::default(), 1 << 20);
    let mut stream = connect(&target);
    let asked = old(READ | TWO, remote.address(), 1 << 20).repeat(1000);
    stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    let _ = stream.write_all(&asked);
    for _ in 0..20 {
        let read = request(Opcode::Read, (&local, 0), &segment, 0, 1 << 20);
        initiator.submit_and_wait(&[read], LONG).unwrap();
    }
    // Nor does it keep the memory.
    let stopwatch = Stopwatch::start();
    drop(remote);
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_secs(5), "{took}");
}
