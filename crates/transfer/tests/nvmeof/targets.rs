//! Targets that are silent, slow, dead or wrong.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use millstream_transfer::{
    Config, FileOptions, NvmeofConfig, Opcode, TransferEngine, TransferState,
};

use crate::common::{LONG, address, contents, private};
use crate::fixture::{Folder, engine, fake_target, request};

/// What became of a WRITE and a READ, and of how many seconds these took.
fn outcome(name: &str) -> (Vec<String>, Duration) {
    let initiator = engine(NvmeofConfig::default());
    let segment = initiator.open_segment(name).unwrap();
    let local = private(&initiator, 1 << 20);
    let batch = initiator.allocate_batch(2).unwrap();
    let all = |opcode| request(opcode, (&local, 0), &segment, 0, 1 << 20);
    let start = Instant::now();
    initiator.submit(&batch, &[all(Opcode::Write), all(Opcode::Read)]).unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "submit does not wait");
    assert!(initiator.wait(&batch, LONG));
    let took = start.elapsed();
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
    let (streams, kept) = std::sync::mpsc::channel();
    let (_server, name) = fake_target(move |mut stream| {
        stream.write_all(b"MSFILES\n\x01\0\0\0").unwrap();
        let _ = streams.send(stream);
    });
    let (errors, took) = outcome(&name);
    assert!(took < Duration::from_secs(5), "{took:?}");
    for error in &errors {
        assert!(error.contains(&name) && error.contains("file /f, bytes 0 to 1048576"), "{error}");
        assert!(error.contains("has not answered for 3s"), "{error}");
    }
    assert!(errors[0].contains("undefined") && !errors[1].contains("undefined"), "{errors:?}");
    drop(kept);
}

/// One with a slow disk, which says that it is there.
#[test]
fn a_target_that_is_slow_is_waited_for() {
    let (_server, name) = fake_target(|mut stream| {
        stream.write_all(b"MSFILES\n\x01\0\0\0").unwrap();
        let mut alive = [0; 24];
        alive[0] = 2;
        for _ in 0..8 {
            thread::sleep(Duration::from_millis(500));
            stream.write_all(&alive).unwrap();
        }
    });
    let (errors, took) = outcome(&name);
    assert!(took >= Duration::from_secs(4), "{took:?} {errors:?}");
}

#[test]
fn a_target_that_dies_or_talks_nonsense_is_given_up_at_once() {
    type Serve = fn(TcpStream);
    let cases: [(Serve, &str); 4] = [
        (|_| {}, "closed the connection"),
        (
            |mut stream| {
                let _ = stream.read_exact(&mut [0; 5000]);
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
                let mut says = b"MSFILES\n\x01\0\0\0".to_vec();
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
        assert!(took < Duration::from_secs(3), "{took:?}");
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
