use std::cell::RefCell;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use millstream_net::cuda::pretended::Pretended;
use socket2::SockRef;

use super::super::flow::Flow;
use super::super::flow::tests::submit_from;
use super::*;
use crate::memory::LocalMemory;
use crate::tcp::testing::Room;
use crate::{Opcode, TransferEngine, gpu};

const HEADERS: &[u8] = &[0xaa; 100];

/// More than the buffers of a connection hold here, in one and in several copies from a GPU.
const LENGTHS: [usize; 2] = [200 << 10, 600 << 10];

/// Both ends of a connection with small buffers.
fn connection() -> (Wire, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    SockRef::from(&listener).set_recv_buffer_size(16 << 10).unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    SockRef::from(&stream).set_send_buffer_size(16 << 10).unwrap();
    let (peer, _) = listener.accept().unwrap();
    peer.set_nonblocking(true).unwrap();
    (Wire::new(stream, None), peer)
}

/// Takes what has come, without a wait.
fn take(mut peer: &TcpStream, came: &mut Vec<u8>) {
    let mut bytes = [0; 4096];
    while let Ok(count) = peer.read(&mut bytes)
        && count > 0
    {
        came.extend_from_slice(&bytes[..count]);
    }
}

/// Sends a WRITE of so many bytes of this memory. When there is no room, `wanted` is asked, and the peer takes what has
/// come. Whether it was sent, and what came.
fn send(local: &Arc<LocalMemory>, length: usize, wanted: impl Fn() -> bool) -> (bool, Vec<u8>) {
    let (wire, peer) = connection();
    let mut flow = Flow::default();
    let _batch = submit_from(&mut flow, local, length as u64, &[Opcode::Write]);
    let part = flow.begin(usize::MAX).unwrap();
    let came = RefCell::new(Vec::new());
    let sent = send_write(&wire, (HEADERS, &part), &mut Staged::default(), || {
        take(&peer, &mut came.borrow_mut());
        wanted()
    });
    drop(wire);
    let mut came = came.into_inner();
    peer.set_nonblocking(false).unwrap();
    (&peer).read_to_end(&mut came).unwrap();
    (sent.unwrap(), came)
}

/// Memory of the host, and of a GPU that is not there, with what takes it away.
struct Memory {
    local: Arc<LocalMemory>,
    room: RefCell<Option<Room>>,
    gpu: Option<(Pretended, TransferEngine)>,
}

impl Memory {
    /// One of each, all of 7.
    fn both() -> [Self; 2] {
        let room = Room::new(LENGTHS[1]);
        let pretended = Pretended::default();
        let (engine, local) = gpu::tests::registered(&pretended);
        let host =
            Self { local: Arc::clone(&room.local), room: RefCell::new(Some(room)), gpu: None };
        let gpu = Self { local, room: RefCell::default(), gpu: Some((pretended, engine)) };
        for memory in [&host, &gpu] {
            let address = memory.local.span().first;
            assert!(memory.local.enter().unwrap().copy_in(address, &vec![7; LENGTHS[1]]));
        }
        [host, gpu]
    }

    /// It is unregistered, or freed.
    fn go(&self) {
        if let Some(mut room) = self.room.borrow_mut().take() {
            room.unregister();
        }
        if let Some((pretended, _)) = &self.gpu {
            pretended.free(self.local.span().first);
        }
    }
}

#[test]
fn a_write_arrives_whole() {
    for memory in Memory::both() {
        for length in LENGTHS {
            let (sent, came) = send(&memory.local, length, || true);
            assert!(sent);
            assert!(came == [HEADERS, &vec![7; length], &Request::end(true)].concat());
        }
    }
}

/// What is on its way then must not count, though all of it was copied.
#[test]
fn a_write_that_is_not_wanted_any_more_does_not_count() {
    for memory in Memory::both() {
        for length in LENGTHS {
            let (sent, came) = send(&memory.local, length, || false);
            assert!(sent);
            assert_eq!(came.len(), HEADERS.len() + length + 4);
            assert!(came.ends_with(&Request::end(false)), "{length}");
        }
    }
}

/// Some of it was sent: of memory of a GPU what was copied before, which counts if it is all.
#[test]
fn a_write_whose_memory_goes_does_not_count() {
    for length in LENGTHS {
        for memory in Memory::both() {
            let (sent, came) = send(&memory.local, length, || {
                memory.go();
                true
            });
            assert!(sent);
            assert_eq!(came.len(), HEADERS.len() + length + 4);
            let counts = memory.gpu.is_some() && length <= STAGED;
            assert!(came.ends_with(&Request::end(counts)), "{length}, counts: {counts}");
            let copied = if counts { length } else { 1 };
            assert!(came[HEADERS.len()..][..copied].iter().all(|&byte| byte == 7));
        }
    }
}

/// The peer takes nothing.
#[test]
fn a_write_that_finds_no_room_is_taken_back() {
    for memory in Memory::both() {
        let (wire, peer) = connection();
        while wire.send(&[0; 4096]).is_ok() {}
        let mut flow = Flow::default();
        let _batch = submit_from(&mut flow, &memory.local, 4096, &[Opcode::Write]);
        let part = flow.begin(usize::MAX).unwrap();
        let sent = send_write(&wire, (HEADERS, &part), &mut Staged::default(), || false);
        assert!(!sent.unwrap());
        drop(wire);
        peer.set_nonblocking(false).unwrap();
        let mut came = Vec::new();
        (&peer).read_to_end(&mut came).unwrap();
        assert!(came.iter().all(|&byte| byte == 0));
    }
}
