//! Targets that are silent, slow, dead or wrong.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use millstream_lab::{Stopwatch, Took};
use millstream_metadata::Server;
use millstream_transfer::{
    Config, FileOptions, NvmeofConfig, Opcode, SubmitAndWaitError, SubmitOptions, TransferEngine,
    TransferState, TransferStatus,
};

use crate::common::{LONG, address, contents, private};
use crate::fixture::{Folder, HELLO, asked, engine, fake_target, request};

/// What became of a WRITE and a READ, and of how many seconds these took.
fn outcome(name: &str) -> (Vec<String>, Took) {
    let initiator = engine(NvmeofConfig::default());
    let segment = initiator.open_segment(name).unwrap();
    let local = private(&initiator, 1 << 20);
    let batch = initiator.allocate_batch(2).unwrap();
    let all = |opcode| request(opcode, (&local, 0), &segment, 0, 1 << 20);
    let stopwatch = Stopwatch::start();
    initiator.submit(&batch, &[all(Opcode::Write), all(Opcode::Read)]).unwrap();
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_secs(1), "submit does not wait: {took}");
    assert!(initiator.wait(&batch, LONG));
    let took = stopwatch.took();
    let errors = initiator.statuses(&batch).into_iter().map(|status| {
        assert_eq!(status.state, TransferState::Failed);
        status.error.unwrap().to_string()
    });
    let errors = errors.collect();
    initiator.free(batch).unwrap();
    (errors, took)
}

#[test]
fn a_target_that_is_silent_is_given_up_in_time() {
    let (streams, kept) = channel();
    let (_server, name) = fake_target(move |mut stream| {
        stream.write_all(HELLO).unwrap();
        let _ = streams.send(stream);
    });
    let (errors, took) = outcome(&name);
    assert!(took.own() < Duration::from_secs(5), "{took}");
    for error in &errors {
        assert!(error.contains(&name) && error.contains("file /f, bytes 0 to 1048576"), "{error}");
        assert!(error.contains("has not answered for 3s"), "{error}");
    }
    assert!(errors[0].contains("undefined") && !errors[1].contains("undefined"), "{errors:?}");
    drop(kept);
}

/// One with a slow disk, which says that it is there: its silence is no reason to give it up.
#[test]
fn a_target_that_is_slow_is_waited_for() {
    let (_server, name) = fake_target(|mut stream| {
        stream.write_all(HELLO).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let mut alive = [0; 24];
        alive[0] = 2;
        // It reads what comes, and says that it is alive when nothing does, until the other end closes.
        loop {
            match stream.read(&mut [0; 4096]) {
                Ok(0) => return,
                Ok(_) => {}
                Err(_) if stream.write_all(&alive).is_err() => return,
                Err(_) => {}
            }
        }
    });
    let config = NvmeofConfig { silence: Duration::from_secs(2), ..NvmeofConfig::default() };
    let statuses = hanging(&name, config, Some(Duration::from_secs(5)), None).0;
    for status in statuses {
        assert_eq!(status.state, TransferState::Timeout, "{status:?}");
    }
}

/// Takes what is asked of it, tells when some of that has come, and does nothing. It is given up by nobody
/// for its silence.
fn with_a_disk_that_hangs() -> (Server, String, NvmeofConfig, Receiver<()>) {
    let (came, coming) = channel();
    let (server, name) = fake_target(move |mut stream| {
        stream.write_all(HELLO).unwrap();
        // Some of the data of a WRITE.
        let _ = stream.read_exact(&mut [0; 100]);
        let _ = came.send(());
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    (server, name, NvmeofConfig { silence: LONG, ..NvmeofConfig::default() }, coming)
}

/// What becomes of more WRITEs and READs than may be under way at a time, and after how long. They may have a
/// deadline, or be canceled once the target has something to do.
fn hanging(
    name: &str,
    config: NvmeofConfig,
    deadline: Option<Duration>,
    cancel_after: Option<&Receiver<()>>,
) -> (Vec<TransferStatus>, Took) {
    hanging_at([Opcode::Write, Opcode::Read], name, config, deadline, cancel_after)
}

/// The same, by turns, of these. If all are WRITEs, they are more than the buffers of sockets hold.
fn hanging_at(
    opcodes: [Opcode; 2],
    name: &str,
    config: NvmeofConfig,
    deadline: Option<Duration>,
    cancel_after: Option<&Receiver<()>>,
) -> (Vec<TransferStatus>, Took) {
    let initiator = engine(config);
    let segment = initiator.open_segment(name).unwrap();
    let local = private(&initiator, 1 << 20);
    let batch = initiator.allocate_batch(20).unwrap();
    let all = |opcode| request(opcode, (&local, 0), &segment, 0, 1 << 20);
    let stopwatch = Stopwatch::start();
    let deadline = deadline.map(|time| Instant::now() + time);
    let options = SubmitOptions { deadline, ..SubmitOptions::default() };
    let requests = opcodes.map(all).repeat(10);
    initiator.submit_with(&batch, &requests, &options).unwrap();
    if let Some(begun) = cancel_after {
        begun.recv_timeout(LONG).unwrap();
        for index in 0..20 {
            assert!(initiator.cancel(&batch, index).unwrap(), "{index}");
            assert!(!initiator.cancel(&batch, index).unwrap(), "{index}");
        }
    }
    assert!(initiator.wait(&batch, LONG));
    let took = stopwatch.took();
    // Nothing is written to this memory any more.
    drop(local);
    let statuses = initiator.statuses(&batch);
    initiator.free(batch).unwrap();
    (statuses, took)
}

/// A deadline for requests of which some have to be begun by then: on a machine that stands still for a while, too.
const DEADLINE: Duration = Duration::from_secs(2);

/// Whether a WRITE that was begun is said to have left its target undefined, and no other request is.
fn only_writes_are_undefined(statuses: &[TransferStatus]) -> bool {
    let undefined = |index: &usize| statuses[*index].target_undefined;
    undefined(&0) && !(0..20).filter(|index| index % 2 == 1).any(|index| undefined(&index))
}

#[test]
fn deadlines_are_kept_though_a_disk_hangs() {
    let (_server, name, config, _begun) = with_a_disk_that_hangs();
    let (statuses, took) = hanging(&name, config, Some(DEADLINE), None);
    assert!(took.own() < Duration::from_secs(6), "{took}");
    assert!(statuses.iter().all(|status| status.state == TransferState::Timeout), "{statuses:?}");
    assert!(only_writes_are_undefined(&statuses), "{statuses:?}");
    assert!(!statuses[18].target_undefined, "it never began");
}

/// Says hello to whoever comes, and reads nothing: the thread that sends waits for room all the time.
fn that_reads_nothing() -> (Server, String, NvmeofConfig, Receiver<TcpStream>) {
    let (streams, kept) = channel();
    let (server, name) = fake_target(move |mut stream| {
        stream.write_all(HELLO).unwrap();
        let _ = streams.send(stream);
    });
    (server, name, NvmeofConfig { silence: LONG, ..NvmeofConfig::default() }, kept)
}

#[test]
fn deadlines_are_kept_though_nothing_is_read() {
    let (_server, name, config, _kept) = that_reads_nothing();
    for opcodes in [[Opcode::Write, Opcode::Read], [Opcode::Write; 2]] {
        let (statuses, took) = hanging_at(opcodes, &name, config.clone(), Some(DEADLINE), None);
        assert!(took.own() < Duration::from_secs(6), "{took}");
        let late = statuses.iter().all(|status| status.state == TransferState::Timeout);
        assert!(late, "{statuses:?}");
        let writes = opcodes == [Opcode::Write; 2] || only_writes_are_undefined(&statuses);
        assert!(writes && statuses[0].target_undefined, "{statuses:?}");
    }
}

#[test]
fn a_target_that_reads_nothing_is_given_up_some_time() {
    let (_server, name, config, _kept) = that_reads_nothing();
    let config = NvmeofConfig { io_timeout: Duration::from_millis(300), ..config };
    let (statuses, took) = hanging_at([Opcode::Write; 2], &name, config, None, None);
    assert!(took.own() < Duration::from_secs(10), "{took}");
    for status in &statuses {
        let text = status.error.as_ref().unwrap().to_string();
        assert!(text.contains("its device has not answered for 300ms"), "{text}");
    }
    assert!(statuses[0].target_undefined, "{statuses:?}");
}

#[test]
fn requests_are_canceled_though_a_disk_hangs() {
    let (_server, name, config, begun) = with_a_disk_that_hangs();
    let (statuses, took) = hanging(&name, config, None, Some(&begun));
    assert!(took.own() < Duration::from_secs(6), "{took}");
    assert!(statuses.iter().all(|status| status.state == TransferState::Canceled), "{statuses:?}");
    assert!(only_writes_are_undefined(&statuses), "{statuses:?}");
}

#[test]
fn a_disk_that_hangs_is_given_up_some_time() {
    let (_server, name, config, _begun) = with_a_disk_that_hangs();
    let config = NvmeofConfig { io_timeout: Duration::from_millis(300), ..config };
    let (statuses, took) = hanging(&name, config, None, None);
    assert!(took.own() < Duration::from_secs(10), "{took}");
    for status in &statuses {
        let text = status.error.as_ref().unwrap().to_string();
        assert!(text.contains("its device has not answered for 300ms"), "{text}");
    }
    assert!(only_writes_are_undefined(&statuses), "{statuses:?}");
}

/// It has taken some requests from the stream, and says that it has begun none of them.
#[test]
fn what_a_target_has_not_begun_when_it_closes_is_asked_for_again() {
    // One request each.
    const LENGTH: u32 = 512 << 10;
    let connections = AtomicU32::new(0);
    let (_server, name) = fake_target(move |mut stream| {
        stream.write_all(HELLO).unwrap();
        let mut hello = [0; 12];
        let mut request = [0; 40];
        stream.read_exact(&mut hello).unwrap();
        let mut ended = vec![[0; 24]; 0];
        for _ in 0..2 {
            stream.read_exact(&mut request).unwrap();
            let is_write = request[0] == 1;
            if is_write {
                stream.read_exact(&mut vec![0; LENGTH as usize + 4]).unwrap();
            }
            let mut reply = [0; 24];
            reply[0] = 1;
            reply[8..16].copy_from_slice(&request[8..16]);
            if !is_write {
                reply[4..8].copy_from_slice(&LENGTH.to_le_bytes());
            }
            ended.push(reply);
        }
        if connections.fetch_add(1, Ordering::Relaxed) < 2 {
            let mut closing = [0; 24];
            closing[0] = 3;
            stream.write_all(&closing).unwrap();
            return;
        }
        for reply in ended {
            stream.write_all(&reply).unwrap();
            if reply[4..8] != [0; 4] {
                stream.write_all(&vec![7; LENGTH as usize]).unwrap();
            }
        }
        let _ = stream.read(&mut [0]);
    });
    let initiator = engine(NvmeofConfig::default());
    let segment = initiator.open_segment(&name).unwrap();
    let length = u64::from(LENGTH);
    let local = private(&initiator, 2 * LENGTH as usize);
    let requests = [(Opcode::Write, 0), (Opcode::Read, length)]
        .map(|(opcode, at)| request(opcode, (&local, at), &segment, 0, length));
    assert_eq!(initiator.submit_and_wait(&requests, LONG).unwrap(), 2 * length);
    let came = contents(&local, LENGTH as usize, LENGTH as usize);
    assert!(came.iter().all(|&byte| byte == 7));
}

/// The connection breaks under both, twice amid the data. What the target has of the WRITE may be written at any time.
#[test]
fn a_read_is_asked_for_again_when_its_connection_is_lost_and_a_write_fails() {
    // One request each.
    const LENGTH: u32 = 512 << 10;
    let connections = AtomicU32::new(0);
    let (counts, counted) = channel();
    let (_server, name) = fake_target(move |mut stream| {
        let turn = connections.fetch_add(1, Ordering::Relaxed);
        let requests = asked(&mut stream, if turn == 0 { 2 } else { 1 }, LENGTH);
        let writes = requests.iter().filter(|request| request[0] == 1).count();
        counts.send(writes).unwrap();
        let read = requests.iter().find(|request| request[0] == 0).unwrap();
        let mut reply = [0; 24];
        reply[0] = 1;
        reply[4..8].copy_from_slice(&LENGTH.to_le_bytes());
        reply[8..16].copy_from_slice(&read[8..16]);
        stream.write_all(&reply).unwrap();
        let amid = LENGTH as usize / 2;
        stream.write_all(&vec![turn as u8; if turn < 2 { amid } else { 2 * amid }]).unwrap();
        if turn >= 2 {
            let _ = stream.read(&mut [0]);
        }
    });
    let initiator = engine(NvmeofConfig::default());
    let segment = initiator.open_segment(&name).unwrap();
    let local = private(&initiator, 2 * LENGTH as usize);
    let length = u64::from(LENGTH);
    let requests = [(Opcode::Write, 0), (Opcode::Read, length)]
        .map(|(opcode, at)| request(opcode, (&local, at), &segment, 0, length));
    let batch = initiator.submit_new(&requests, &SubmitOptions::default()).unwrap();
    assert!(initiator.wait(&batch, LONG));
    let statuses = initiator.statuses(&batch);
    assert_eq!(statuses[0].state, TransferState::Failed, "{statuses:?}");
    assert!(statuses[0].target_undefined);
    assert_eq!(statuses[1].state, TransferState::Completed, "{statuses:?}");
    assert_eq!(contents(&local, LENGTH as usize, LENGTH as usize), vec![2; LENGTH as usize]);
    assert_eq!([(); 3].map(|()| counted.recv_timeout(LONG).unwrap()), [1, 0, 0]);
    initiator.free(batch).unwrap();
}

#[test]
fn a_read_that_no_connection_outlives_fails_some_time_and_a_write_at_once() {
    for (opcode, expected) in [(Opcode::Read, 3), (Opcode::Write, 1)] {
        let (came, coming) = channel();
        let (_server, name) = fake_target(move |mut stream| {
            came.send(asked(&mut stream, 1, 4096).len()).unwrap();
        });
        let initiator = engine(NvmeofConfig::default());
        let segment = initiator.open_segment(&name).unwrap();
        let local = private(&initiator, 4096);
        let one = request(opcode, (&local, 0), &segment, 0, 4096);
        let error = initiator.submit_and_wait(&[one], LONG).unwrap_err().to_string();
        assert!(error.contains("connection"), "{error}");
        assert_eq!(coming.try_iter().sum::<usize>(), expected, "{opcode:?}");
    }
}

/// Each connection breaks amid the data, so that something was heard over it.
#[test]
fn a_read_that_begins_again_and_again_fails_some_time() {
    const LENGTH: u32 = 4096;
    let (came, coming) = channel();
    let (_server, name) = fake_target(move |mut stream| {
        let requests = asked(&mut stream, 1, LENGTH);
        came.send(()).unwrap();
        let mut reply = [0; 24];
        reply[0] = 1;
        reply[4..8].copy_from_slice(&LENGTH.to_le_bytes());
        reply[8..16].copy_from_slice(&requests[0][8..16]);
        stream.write_all(&reply).unwrap();
        stream.write_all(&[7; LENGTH as usize / 2]).unwrap();
    });
    let initiator = engine(NvmeofConfig::default());
    let segment = initiator.open_segment(&name).unwrap();
    let local = private(&initiator, LENGTH as usize);
    let one = request(Opcode::Read, (&local, 0), &segment, 0, LENGTH.into());
    let error = initiator.submit_and_wait(&[one], LONG).unwrap_err();
    assert!(matches!(error, SubmitAndWaitError::Failed { .. }), "{error}");
    assert!(error.to_string().contains("connection"), "{error}");
    assert_eq!(coming.try_iter().count(), 3);
}

#[test]
fn a_target_that_dies_or_talks_nonsense_is_given_up_at_once() {
    type Serve = fn(TcpStream);
    let cases: [(Serve, &str); 4] = [
        (|_| {}, "closed the connection"),
        (
            |mut stream| {
                // A hello and a request: READs come again.
                let _ = stream.read_exact(&mut [0; 52]);
            },
            "closed the connection",
        ),
        (
            |mut stream| {
                stream.write_all(&[b'x'; 100]).unwrap();
                let _ = stream.read_to_end(&mut Vec::new());
            },
            "does not speak the protocol for files",
        ),
        (
            |mut stream| {
                let mut says = HELLO.to_vec();
                says.extend([1; 24]);
                says[14..].fill(0);
                stream.write_all(&says).unwrap();
                let _ = stream.read_to_end(&mut Vec::new());
            },
            "makes no sense",
        ),
    ];
    for (serve, what) in cases {
        let (_server, name) = fake_target(serve);
        let (errors, took) = outcome(&name);
        assert!(took.own() < Duration::from_secs(3), "{took}");
        for error in errors {
            let broke = what == "closed the connection" && error.contains("broke");
            assert!(error.contains(what) || broke, "{what}: {error}");
        }
    }
}

#[test]
fn after_a_target_was_started_anew_the_next_requests_succeed() {
    let folder = Folder::new();
    let path = folder.file("f", &[9; 4096]);
    let place = address();
    let start = |port| {
        let mut config = Config::new(place);
        config.listen.set_port(port);
        let engine = TransferEngine::new(config).unwrap();
        engine.install_nvmeof(NvmeofConfig::default()).unwrap();
        let name = engine.register_file(&path, FileOptions::default()).unwrap();
        (engine, name)
    };
    let (target, name) = start(0);
    let port = target.listening_at().port();
    let initiator = engine(NvmeofConfig::default());
    let segment = initiator.open_segment(&name).unwrap();
    let local = private(&initiator, 4096);
    let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
    initiator.submit_and_wait(&[read], LONG).unwrap();
    drop(target);
    initiator.submit_and_wait(&[read], LONG).unwrap_err();
    let (_target, again) = start(port);
    assert_eq!(again, name);
    initiator.refresh_segment(segment.id()).unwrap();
    initiator.submit_and_wait(&[read], LONG).unwrap();
    assert_eq!(contents(&local, 0, 4096), [9; 4096]);
}
