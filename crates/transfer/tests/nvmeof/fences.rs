//! Connections that are lost, and what was sent over them: nothing of it arrives after it was sent again.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use millstream_transfer::{NvmeofConfig, Opcode, SubmitOptions, TransferState};

use crate::common::{LONG, address, contents, private};
use crate::fixture::{
    Folder, HELLO, asked, descriptor, engine, fake_target, pair, reply, request, says_at,
    target_at, writable,
};

const LENGTH: u32 = 4096;

/// A hello that asks for the name of its connection.
const ASKS_FOR_NAME: &[u8] = b"MSFILES\n\x01\0\x01\0";

fn named(name: u128) -> [u8; 24] {
    let mut reply = [0; 24];
    reply[0] = 4;
    reply[8..].copy_from_slice(&name.to_le_bytes());
    reply
}

fn fence(id: u64, name: u128) -> [u8; 40] {
    let mut fence = [0; 40];
    fence[0] = 2;
    fence[8..16].copy_from_slice(&id.to_le_bytes());
    fence[24..].copy_from_slice(&name.to_le_bytes());
    fence
}

/// Reads a whole WRITE.
fn read_write(stream: &mut TcpStream) -> Vec<u8> {
    let mut write = vec![0; 40 + LENGTH as usize + 4];
    stream.read_exact(&mut write).unwrap();
    assert_eq!(write[0], 1);
    write
}

/// Passes on what comes, until one of the two closes.
fn pass(mut from: TcpStream, mut to: TcpStream) {
    thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
}

/// Between the two the first connection is lost, and what was sent over it comes to the target very late.
#[test]
fn what_was_sent_over_a_connection_that_was_lost_is_not_written_later() {
    let folder = Folder::new();
    let path = folder.file("f", &[0; LENGTH as usize]);
    let (target, initiator) = pair();
    target.register_file(&path, writable()).unwrap();
    let mut description = descriptor(&target, "f");
    let place = description.file_target.as_mut().unwrap();
    let behind = SocketAddr::new(target.listening_at().ip(), place.port);
    let listener = TcpListener::bind((address(), 0)).unwrap();
    let relay = listener.local_addr().unwrap();
    (place.host, place.port) = (relay.ip().to_string(), relay.port());
    let (lost, kept) = channel();
    thread::spawn(move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut far = TcpStream::connect(behind).unwrap();
        let mut hello = [0; 12];
        near.read_exact(&mut hello).unwrap();
        far.write_all(&hello).unwrap();
        let mut answer = [0; 12 + 24];
        far.read_exact(&mut answer).unwrap();
        near.write_all(&answer).unwrap();
        let write = read_write(&mut near);
        lost.send((far, write)).unwrap();
        drop(near);
        let (near, _) = listener.accept().unwrap();
        let far = TcpStream::connect(behind).unwrap();
        pass(near.try_clone().unwrap(), far.try_clone().unwrap());
        pass(far, near);
    });
    let (_server, name) = says_at(relay.ip(), None, description);
    let segment = initiator.open_segment(&name).unwrap();
    let local = private(&initiator, LENGTH as usize);
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH.into());
    for value in [1, 2] {
        local.write(0, &[value; LENGTH as usize]).unwrap();
        initiator.submit_and_wait(&[write], LONG).unwrap();
    }
    let (mut far, write) = kept.recv_timeout(LONG).unwrap();
    // It has closed that connection.
    let _ = far.write_all(&write);
    far.set_read_timeout(Some(LONG)).unwrap();
    let mut answers = Vec::new();
    match far.read_to_end(&mut answers) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
    }
    assert!(answers.is_empty(), "it was not done: {answers:?}");
    assert_eq!(fs::read(&path).unwrap(), [2; LENGTH as usize]);
}

#[test]
fn a_write_is_sent_again_behind_a_fence_so_often_as_a_read() {
    let (told, heard) = channel();
    let (_server, name) = fake_target(move |mut stream| {
        let fences = heard_of(&mut stream);
        let write = read_write(&mut stream);
        // The third time it is done.
        let is_done = fences == [20];
        told.send(fences).unwrap();
        if is_done {
            stream.write_all(&reply(&write, 0)).unwrap();
            let _ = stream.read(&mut [0]);
        }
    });
    let initiator = engine(NvmeofConfig::default());
    let segment = initiator.open_segment(&name).unwrap();
    let local = private(&initiator, LENGTH as usize);
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH.into());
    initiator.submit_and_wait(&[write], LONG).unwrap();
    let fences: Vec<_> = heard.try_iter().collect();
    assert_eq!(fences, [vec![], vec![10], vec![20]], "each behind the fence of the one before");
}

/// Says hello and the connection's name, which is 10 more than that of the last one, and confirms the fences that come before
/// all else: their names.
fn heard_of(stream: &mut TcpStream) -> Vec<u128> {
    stream.write_all(HELLO).unwrap();
    let mut hello = [0; 12];
    stream.read_exact(&mut hello).unwrap();
    assert_eq!(hello, ASKS_FOR_NAME);
    let mut fences = Vec::new();
    let mut opcode = [0];
    loop {
        // A first connection has none.
        let count = stream.peek(&mut opcode).unwrap();
        if count == 0 || opcode[0] != 2 {
            break;
        }
        let mut fence = [0; 40];
        stream.read_exact(&mut fence).unwrap();
        fences.push(u128::from_le_bytes(fence[24..].try_into().unwrap()));
        stream.write_all(&reply(&fence, 0)).unwrap();
    }
    stream.write_all(&named(fences.last().unwrap_or(&0) + 10)).unwrap();
    fences
}

/// The target may have it still. It says that it is there.
#[test]
fn a_write_whose_fence_is_not_confirmed_fails_as_undefined_and_a_read_goes_on() {
    let mut first = true;
    let (tell, told) = channel();
    let listener = TcpListener::bind((address(), 0)).unwrap();
    let place = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            if std::mem::take(&mut first) {
                stream.write_all(&[HELLO, &named(5)].concat()).unwrap();
                stream.read_exact(&mut [0; 12]).unwrap();
                let mut both = vec![0; 40 + 40 + LENGTH as usize + 4];
                stream.read_exact(&mut both).unwrap();
                continue;
            }
            let requests = asked(&mut stream, 2, LENGTH);
            tell.send(requests.iter().map(|request| request[0]).collect::<Vec<_>>()).unwrap();
            stream.write_all(&reply(&requests[1], LENGTH)).unwrap();
            stream.write_all(&[9; LENGTH as usize]).unwrap();
            let _ = stream.read(&mut [0]);
        }
    });
    let (_server, name) = target_at(place, None);
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
    let error = statuses[0].error.as_ref().unwrap().to_string();
    assert!(error.contains("has not confirmed that nothing sent over that can arrive"), "{error}");
    assert_eq!(statuses[1].state, TransferState::Completed, "{statuses:?}");
    assert_eq!(contents(&local, LENGTH as usize, LENGTH as usize), [9; LENGTH as usize]);
    assert_eq!(told.recv_timeout(LONG).unwrap(), [2, 0], "a fence and the READ");
    initiator.free(batch).unwrap();
}

/// A target whose first connection breaks with a WRITE. What is said first over each later one it leaves to the function, with
/// how many were before that. They are named by numbers from 5 on.
fn that_breaks(
    then: impl Fn(u32, [u8; 40], TcpStream) + Send + 'static,
) -> (millstream_metadata::Server, String) {
    let turn = AtomicU32::new(0);
    fake_target(move |mut stream| {
        stream.write_all(HELLO).unwrap();
        stream.read_exact(&mut [0; 12]).unwrap();
        let turn = turn.fetch_add(1, Ordering::Relaxed);
        stream.write_all(&named(u128::from(turn) + 5)).unwrap();
        if turn == 0 {
            read_write(&mut stream);
            return;
        }
        let mut asked = [0; 40];
        stream.read_exact(&mut asked).unwrap();
        then(turn, asked, stream);
    })
}

/// Confirms a fence, and does the WRITE that follows.
fn confirm(fence: [u8; 40], mut stream: TcpStream) {
    stream.write_all(&reply(&fence, 0)).unwrap();
    let write = read_write(&mut stream);
    stream.write_all(&reply(&write, 0)).unwrap();
    let _ = stream.read(&mut [0]);
}

/// The target closes the second connection in order before it has confirmed the fence.
#[test]
fn a_fence_that_has_no_answer_is_asked_for_again_over_the_next_connection() {
    let (tell, told) = channel();
    let (_server, name) = that_breaks(move |turn, asked, mut stream| {
        tell.send(asked).unwrap();
        match turn {
            1 => {
                let mut closing = [0; 24];
                closing[0] = 3;
                stream.write_all(&closing).unwrap();
                let _ = stream.read_to_end(&mut Vec::new());
            }
            _ => confirm(asked, stream),
        }
    });
    let initiator = engine(NvmeofConfig::default());
    let segment = initiator.open_segment(&name).unwrap();
    let local = private(&initiator, LENGTH as usize);
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH.into());
    initiator.submit_and_wait(&[write], LONG).unwrap();
    let asked: Vec<_> = told.try_iter().collect();
    assert_eq!(asked.len(), 2);
    for asked in asked {
        assert_eq!(asked, fence(u64::from_le_bytes(asked[8..16].try_into().unwrap()), 5));
    }
}

/// The fence of the connection before was given up over it.
#[test]
fn a_connection_that_went_on_without_a_fence_is_fenced_itself() {
    let (tell, told) = channel();
    let (_server, name) = that_breaks(move |turn, asked, mut stream| {
        tell.send(asked[24]).unwrap();
        match turn {
            1 => {}
            2 => {
                // Not confirmed: the WRITE fails, and others follow.
                let write = read_write(&mut stream);
                stream.write_all(&reply(&write, 0)).unwrap();
                read_write(&mut stream);
            }
            _ => confirm(asked, stream),
        }
    });
    let initiator = engine(NvmeofConfig::default());
    let segment = initiator.open_segment(&name).unwrap();
    let local = private(&initiator, LENGTH as usize);
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH.into());
    initiator.submit_and_wait(&[write], LONG).unwrap_err();
    for _ in 0..2 {
        initiator.submit_and_wait(&[write], LONG).unwrap();
    }
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [5, 5, 7]);
}

#[test]
fn connections_end_at_the_fence_of_another_one_and_at_no_strangers() {
    let folder = Folder::new();
    let path = folder.file("ends", &[0; LENGTH as usize]);
    let target = engine(NvmeofConfig::default());
    target.register_file(&path, writable()).unwrap();
    let port = descriptor(&target, "ends").file_target.unwrap().port;
    let place = SocketAddr::new(target.listening_at().ip(), port);
    let connect = || {
        let mut stream = TcpStream::connect(place).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(ASKS_FOR_NAME).unwrap();
        let mut said = [0; 12 + 24];
        stream.read_exact(&mut said).unwrap();
        assert_eq!((&said[..12], said[12]), (HELLO, 4));
        (stream, u128::from_le_bytes(said[20..].try_into().unwrap()))
    };
    let answer = |stream: &mut TcpStream| {
        let mut answer = [0; 24];
        stream.read_exact(&mut answer).unwrap();
        answer
    };
    let [(mut first, first_name), (mut second, own_name), (mut third, _)] =
        [(); 3].map(|()| connect());
    second.write_all(&fence(7, first_name)).unwrap();
    assert_eq!(answer(&mut second), reply(&fence(7, 0), 0));
    assert_eq!(first.read(&mut [0]).unwrap(), 0, "it was closed");
    // Nobody has this name, or not any more.
    for (id, name) in [(8, first_name), (9, 1)] {
        second.write_all(&fence(id, name)).unwrap();
        assert_eq!(answer(&mut second), reply(&fence(id, 0), 0));
    }
    // Its own.
    second.write_all(&fence(10, own_name)).unwrap();
    assert_eq!(second.read(&mut [0]).unwrap(), 0);
    third.write_all(&fence(11, 1)).unwrap();
    assert_eq!(answer(&mut third), reply(&fence(11, 0), 0), "it is still there");
}
