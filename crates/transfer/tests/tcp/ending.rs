//! Requests that end otherwise than COMPLETED, and what may happen after that.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use millstream_lab::Stopwatch;
use millstream_transfer::{
    Buffer, Opcode, SubmitOptions, TcpConfig, TransferEngine, TransferState, TransferStatus,
};

use super::fixture::{Pair, Relay, engine, framings, pair, relayed, saying};
use crate::common::{LONG, contents, pattern, private, request, shared};

const LENGTH: u64 = 64 << 20;

fn wait_for(initiator: &TransferEngine, batch: &millstream_transfer::Batch) -> TransferStatus {
    assert!(initiator.wait(batch, LONG), "it hangs");
    initiator.status(batch, 0).unwrap()
}

/// A peer whose way is slow gets a WRITE that is canceled, or whose time is over, in the middle.
#[test]
fn nothing_arrives_after_a_write_was_canceled_or_its_time_is_over() {
    for cancels in [true, false] {
        let target = engine(TcpConfig::default());
        let relay = Relay::start(&target, Duration::from_millis(2));
        let initiator = engine(TcpConfig::default());
        let (remote, local) =
            (shared(&target, LENGTH as usize), private(&initiator, LENGTH as usize));
        local.write(0, &vec![1; LENGTH as usize]).unwrap();
        let (_server, segment) = relayed(&initiator, &target, &relay);
        let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH);
        let deadline = (!cancels).then(|| Instant::now() + Duration::from_millis(200));
        let options = SubmitOptions { deadline, ..SubmitOptions::default() };
        let batch = initiator.submit_new(&[write], &options).unwrap();
        if cancels {
            while contents(&remote, 0, 1) != [1] {
                initiator.wait(&batch, Duration::from_millis(1));
            }
            assert!(initiator.cancel(&batch, 0).unwrap());
            assert!(!initiator.cancel(&batch, 0).unwrap());
        }
        let status = wait_for(&initiator, &batch);
        let expected = if cancels { TransferState::Canceled } else { TransferState::Timeout };
        assert_eq!(status.state, expected, "{:?}", status.error);
        assert!(!status.target_undefined, "the peer has confirmed it");
        assert!(status.transferred_bytes < LENGTH);
        // What was on its way still comes out of the relay.
        remote.write(0, &vec![0; LENGTH as usize]).unwrap();
        relay.drain();
        let found = contents(&remote, 0, LENGTH as usize);
        assert!(found.iter().all(|&byte| byte == 0), "something arrived later");
        // And others are served.
        let write = request(Opcode::Write, (&local, 0), &segment, 7, 100);
        initiator.submit_and_wait(&[write], LONG).unwrap();
        assert_eq!(contents(&remote, 7, 100), [1; 100]);
    }
}

/// The original has no way to say that nothing arrives any more.
#[test]
fn a_canceled_write_to_the_original_leaves_its_target_undefined() {
    let target = engine(TcpConfig::default());
    let relay = Relay::start(&target, Duration::from_millis(2));
    let initiator = engine(TcpConfig { messages: false, ..TcpConfig::default() });
    let (remote, local) = (shared(&target, LENGTH as usize), private(&initiator, LENGTH as usize));
    local.write(0, &vec![1; LENGTH as usize]).unwrap();
    let (_server, segment) = relayed(&initiator, &target, &relay);
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH);
    let batch = initiator.submit_new(&[write], &SubmitOptions::default()).unwrap();
    while contents(&remote, 0, 1) != [1] {
        initiator.wait(&batch, Duration::from_millis(1));
    }
    assert!(initiator.cancel(&batch, 0).unwrap());
    let status = wait_for(&initiator, &batch);
    assert_eq!(status.state, TransferState::Canceled, "{:?}", status.error);
    assert!(status.target_undefined);
    // The connection is closed, and the next one works.
    initiator
        .submit_and_wait(&[request(Opcode::Read, (&local, 0), &segment, 0, 10)], LONG)
        .unwrap();
}

/// Connections break in the middle: what was under way is done over others, once that is safe.
#[test]
fn connections_that_break_are_replaced() {
    let target = engine(TcpConfig::default());
    let relay = Relay::start(&target, Duration::ZERO);
    let initiator = engine(TcpConfig::default());
    let (remote, local) = (shared(&target, LENGTH as usize), private(&initiator, LENGTH as usize));
    let bytes = pattern(LENGTH as usize, 5);
    local.write(0, &bytes).unwrap();
    let (_server, segment) = relayed(&initiator, &target, &relay);
    for opcode in [Opcode::Write, Opcode::Read] {
        let whole = request(opcode, (&local, 0), &segment, 0, LENGTH);
        let before = relay.moved();
        let batch = initiator.submit_new(&[whole], &SubmitOptions::default()).unwrap();
        while relay.moved() - before < 3 << 20 && !initiator.wait(&batch, Duration::from_millis(1))
        {
        }
        relay.cut();
        let status = wait_for(&initiator, &batch);
        assert_eq!(status.state, TransferState::Completed, "{opcode:?}: {:?}", status.error);
        assert!(contents(&remote, 0, LENGTH as usize) == bytes, "{opcode:?}");
        assert!(contents(&local, 0, LENGTH as usize) == bytes, "{opcode:?}");
        local
            .write(0, &vec![0; if opcode == Opcode::Write { LENGTH as usize } else { 0 }])
            .unwrap();
    }
}

/// Who waits for a READ of the original is not woken for each of its bytes. One that sends few is seen to move all the same.
#[test]
fn what_a_slow_peer_sends_of_a_read_is_taken_before_the_rest_has_come() {
    let (target, initiator) = (engine(TcpConfig::default()), engine(TcpConfig::default()));
    let (_remote, local) = (shared(&target, 1 << 20), private(&initiator, 1 << 20));
    let listener = TcpListener::bind((target.listening_at().ip(), 0)).unwrap();
    let mut said = super::fixture::descriptor(&target);
    // As the original's.
    (said.tcp_data_port, said.tcp_message_version) =
        (Some(listener.local_addr().unwrap().port()), None);
    let (_server, segment) = saying(&initiator, target.listening_at().ip(), said);
    let read = request(Opcode::Read, (&local, 0), &segment, 0, 1 << 20);
    let batch = initiator.submit_new(&[read], &SubmitOptions::default()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| wait_for(&initiator, &batch));
        let mut stream = listener.accept().unwrap().0;
        stream.read_exact(&mut [0; 24]).unwrap();
        stream.write_all(b"\0\0\0\0VTCM").unwrap();
        for (count, byte) in [(1000, 1), (1, 2)] {
            stream.write_all(&vec![byte; count]).unwrap();
            let (at, start) = (if byte == 1 { 0 } else { 1000 }, Instant::now());
            while contents(&local, at, count) != vec![byte; count] {
                assert!(start.elapsed() < LONG, "byte {byte}");
                thread::yield_now();
            }
        }
        // The rest.
        stream.write_all(&vec![3; (1 << 20) - 1001]).unwrap();
    });
    let status = initiator.status(&batch, 0).unwrap();
    assert_eq!(status.state, TransferState::Completed, "{:?}", status.error);
    assert_eq!(contents(&local, 999, 3), [1, 2, 3]);
    assert!(contents(&local, 1001, (1 << 20) - 1001).iter().all(|&byte| byte == 3));
}

#[test]
fn a_peer_that_falls_silent_fails_its_requests_in_time() {
    for (name, config) in framings() {
        // It accepts, and says nothing.
        let listener = TcpListener::bind((crate::common::address(), 0)).unwrap();
        let place = listener.local_addr().unwrap();
        thread::spawn(move || {
            let held: Vec<_> = listener.incoming().map(Result::unwrap).collect();
            drop(held);
        });
        let timeout = Duration::from_millis(300);
        let config = TcpConfig { progress_timeout: timeout, status_timeout: timeout, ..config };
        let (target, initiator) = (engine(TcpConfig::default()), engine(config));
        let _remote = shared(&target, 4096);
        let local = private(&initiator, 4096);
        let (_server, segment) = super::fixture::at_port(&initiator, &target, place);
        let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
        let batch = initiator.submit_new(&[read], &SubmitOptions::default()).unwrap();
        let stopwatch = Stopwatch::start();
        let status = wait_for(&initiator, &batch);
        assert_eq!(status.state, TransferState::Failed, "{name}");
        let took = stopwatch.took();
        assert!(took.own() < Duration::from_secs(10), "{name}: {took}");
        let error = status.error.unwrap().to_string();
        assert!(error.contains("nothing has moved over its connection"), "{name}: {error}");
    }
}

/// What answers there is something else.
#[test]
fn strangers_that_answer_are_found_out() {
    for (name, config) in framings() {
        let listener = TcpListener::bind((crate::common::address(), 0)).unwrap();
        let place = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream: TcpStream = stream.unwrap();
                let _ = stream.read(&mut [0; 24]);
                let _ = stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n\r\n".repeat(10));
            }
        });
        let (target, initiator) = (engine(TcpConfig::default()), engine(config));
        let _remote = shared(&target, 4096);
        let local = private(&initiator, 4096);
        let (_server, segment) = super::fixture::at_port(&initiator, &target, place);
        let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
        let stopwatch = Stopwatch::start();
        let batch = initiator.submit_new(&[read], &SubmitOptions::default()).unwrap();
        let status = wait_for(&initiator, &batch);
        assert_eq!(status.state, TransferState::Failed, "{name}");
        let took = stopwatch.took();
        assert!(took.own() < Duration::from_secs(5), "{name}: {took}: {:?}", status.error);
    }
}

/// It takes each connection, says so, and closes it: it is not asked again without a pause.
#[test]
fn a_peer_that_welcomes_and_closes_is_left_alone_for_a_while() {
    let listener = TcpListener::bind((crate::common::address(), 0)).unwrap();
    let place = listener.local_addr().unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream: TcpStream = stream.unwrap();
            counted.fetch_add(1, Ordering::SeqCst);
            let _ = stream.read(&mut [0; 48]);
            let _ = stream.write_all(b"MILLSTR\xff\0\0\0\0\0\0\0\0");
        }
    });
    let (target, initiator) = (engine(TcpConfig::default()), engine(TcpConfig::default()));
    let _remote = shared(&target, 4096);
    let local = private(&initiator, 4096);
    let (_server, segment) = super::fixture::at_port(&initiator, &target, place);
    // What it has become of a WRITE nobody knows, and so a fence is asked for.
    for opcode in [Opcode::Read, Opcode::Write] {
        let whole = request(opcode, (&local, 0), &segment, 0, 4096);
        let batch = initiator.submit_new(&[whole], &SubmitOptions::default()).unwrap();
        let status = wait_for(&initiator, &batch);
        assert_eq!(status.state, TransferState::Failed, "{opcode:?}");
    }
    let count = count.load(Ordering::SeqCst);
    assert!(count < 20, "{count} connections");
}

#[test]
fn a_process_that_was_restarted_is_not_taken_for_the_one_before() {
    let Pair { segment, remote: _remote, local, target, initiator } =
        pair(TcpConfig::default(), 4096);
    let other = engine(TcpConfig::default());
    let _others = shared(&other, 4096);
    let port = super::fixture::descriptor(&other).tcp_data_port.unwrap();
    let place = (other.listening_at().ip(), port).into();
    drop(segment);
    let (_server, segment) = super::fixture::at_port(&initiator, &target, place);
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 4096);
    let batch = initiator.submit_new(&[write], &SubmitOptions::default()).unwrap();
    let status = wait_for(&initiator, &batch);
    let error = status.error.unwrap().to_string();
    assert!(error.contains("restarted"), "{error}");
}

/// What it has sent is somewhere on the way when it closes, and does not arrive afterwards.
#[test]
fn nothing_arrives_after_an_engine_has_closed() {
    let target = engine(TcpConfig::default());
    let relay = Relay::start(&target, Duration::from_millis(1));
    let initiator = engine(TcpConfig::default());
    let (remote, local) = (shared(&target, LENGTH as usize), private(&initiator, LENGTH as usize));
    local.write(0, &vec![1; LENGTH as usize]).unwrap();
    let (_server, segment) = relayed(&initiator, &target, &relay);
    let parts: Vec<_> = (0..64)
        .map(|part| request(Opcode::Write, (&local, part << 20), &segment, part << 20, 1 << 20))
        .collect();
    let batch = initiator.submit_new(&parts, &SubmitOptions::default()).unwrap();
    while relay.moved() < 3 << 20 {
        initiator.wait(&batch, Duration::from_millis(1));
    }
    let stopwatch = Stopwatch::start();
    drop((local, initiator));
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_secs(5), "{took}");
    remote.write(0, &vec![0; LENGTH as usize]).unwrap();
    relay.drain();
    assert!(contents(&remote, 0, LENGTH as usize).iter().all(|&byte| byte == 0));
    drop(batch);
}

#[test]
fn an_engine_that_closes_ends_what_is_under_way() {
    for (name, config) in framings() {
        let Pair { segment, remote: _remote, local, target: _target, initiator } =
            pair(config, LENGTH as usize);
        let read = request(Opcode::Read, (&local, 0), &segment, 0, LENGTH);
        let batch = initiator.submit_new(&[read], &SubmitOptions::default()).unwrap();
        let stopwatch = Stopwatch::start();
        drop((local, initiator));
        let took = stopwatch.took();
        assert!(took.own() < Duration::from_secs(5), "{name}: {took}");
        drop(batch);
    }
}

/// Has a buffer, as the future of a task may that waits for a batch, and lets go of it when it is woken.
struct Holder(Mutex<Option<Buffer>>);

impl Wake for Holder {
    fn wake(self: Arc<Self>) {
        let buffer = self.0.lock().unwrap().take();
        drop(buffer);
    }
}

#[test]
fn who_is_told_by_the_end_of_an_engine_can_drop_its_buffer() {
    for (name, config) in framings() {
        // It accepts, and says nothing.
        let listener = TcpListener::bind((crate::common::address(), 0)).unwrap();
        let place = listener.local_addr().unwrap();
        thread::spawn(move || {
            let held: Vec<_> = listener.incoming().map(Result::unwrap).collect();
            drop(held);
        });
        let config = TcpConfig { progress_timeout: LONG, ..config };
        let (target, initiator) = (engine(TcpConfig::default()), engine(config));
        let _remote = shared(&target, 4096);
        let local = private(&initiator, 4096);
        let (_server, segment) = super::fixture::at_port(&initiator, &target, place);
        let read = request(Opcode::Read, (&local, 0), &segment, 0, 4096);
        let batch = initiator.submit_new(&[read], &SubmitOptions::default()).unwrap();
        let holder = Arc::new(Holder(Mutex::new(Some(local))));
        let waker = Waker::from(Arc::clone(&holder));
        let mut finished = pin!(batch.finished());
        assert!(finished.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        let (tell, told) = channel();
        thread::spawn(move || {
            drop(initiator);
            let _ = tell.send(());
        });
        let ended = told.recv_timeout(Duration::from_secs(10));
        assert!(ended.is_ok(), "{name}: it waits for itself");
        assert!(holder.0.lock().unwrap().is_none(), "{name}");
    }
}
