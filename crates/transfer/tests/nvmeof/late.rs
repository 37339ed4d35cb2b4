//! Data of READs that nobody waits for any more.

use std::io::Write;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use millstream_transfer::{NvmeofConfig, Opcode, SubmitOptions, TransferState};

use crate::common::{LONG, contents, private};
use crate::fixture::{asked, engine, fake_target, reply, request};

const LENGTH: u32 = 512 << 10;

/// The memory is registered still, and its owner uses it for something else.
#[test]
fn what_comes_after_a_deadline_is_thrown_away() {
    // All of it, or the rest.
    for early in [0, LENGTH as usize / 2] {
        let (ended, end) = channel::<()>();
        let end = Mutex::new(end);
        let (_server, name) = fake_target(move |mut stream| {
            let late = asked(&mut stream, 1, 0);
            let answer = [&reply(&late[0], LENGTH)[..], &[7; LENGTH as usize]].concat();
            let before = if early == 0 { 0 } else { 24 + early };
            stream.write_all(&answer[..before]).unwrap();
            end.lock().unwrap().recv_timeout(LONG).unwrap();
            stream.write_all(&answer[before..]).unwrap();
            let next = asked_again(&mut stream);
            stream.write_all(&reply(&next, 4096)).unwrap();
            stream.write_all(&[9; 4096]).unwrap();
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        });
        let initiator = engine(NvmeofConfig { silence: LONG, ..NvmeofConfig::default() });
        let segment = initiator.open_segment(&name).unwrap();
        let (local, other) = (private(&initiator, LENGTH as usize), private(&initiator, 4096));
        let read = request(Opcode::Read, (&local, 0), &segment, 0, LENGTH.into());
        let deadline = Some(Instant::now() + Duration::from_millis(500));
        let options = SubmitOptions { deadline, ..SubmitOptions::default() };
        let batch = initiator.submit_new(&[read], &options).unwrap();
        assert!(initiator.wait(&batch, LONG));
        assert_eq!(initiator.statuses(&batch)[0].state, TransferState::Timeout);
        local.write(0, &[0xee; LENGTH as usize]).unwrap();
        ended.send(()).unwrap();
        // Its data is behind that.
        let next = request(Opcode::Read, (&other, 0), &segment, 0, 4096);
        initiator.submit_and_wait(&[next], LONG).unwrap();
        assert_eq!(contents(&other, 0, 4096), [9; 4096]);
        assert!(contents(&local, 0, LENGTH as usize) == [0xee; LENGTH as usize], "{early}");
    }
}

/// Another request of a connection.
fn asked_again(stream: &mut std::net::TcpStream) -> [u8; 40] {
    let mut request = [0; 40];
    std::io::Read::read_exact(stream, &mut request).unwrap();
    request
}
