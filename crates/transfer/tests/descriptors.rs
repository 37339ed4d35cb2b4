//! Descriptors that say of some memory what is not so: only requests to that memory fail.

mod common;

use std::net::SocketAddr;
use std::sync::Arc;

use common::{LONG, address, contents, engine, pattern, private, shared};
use millstream_metadata::{
    BufferDesc, Client, Frame, FrameType, Handler, HostPort, SegmentDesc, Server, ServerConfig,
};
use millstream_transfer::{
    Buffer, Opcode, Segment, SubmitAndWaitError, SubmitError, TcpConfig, TransferEngine,
    TransferRequest, TransferState,
};

const LENGTH: usize = 64 << 10;

/// Says of a target what a test wants. What else is asked, the target answers.
struct Said {
    target: HostPort,
    descriptor: SegmentDesc,
}

impl Handler for Said {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        match request.frame_type {
            FrameType::Metadata => Some(Frame::new(request.frame_type, self.descriptor.to_json())),
            _ => Client::default().call(&self.target, &request).ok(),
        }
    }
}

/// An initiator, and a target with two pieces of memory of which something else is said.
struct Ends {
    initiator: TransferEngine,
    target: TransferEngine,
    remotes: [Buffer; 2],
    segment: Segment,
    _server: Server,
}

impl Ends {
    fn new(
        [initiator, target]: [TransferEngine; 2],
        change: impl FnOnce(&mut Vec<BufferDesc>),
    ) -> Self {
        let remotes = [(); 2].map(|()| shared(&target, LENGTH));
        let place: HostPort = target.name().parse().unwrap();
        let ask = Frame::new(FrameType::Metadata, b"{}".to_vec());
        let reply = Client::default().call(&place, &ask).unwrap();
        let mut descriptor = SegmentDesc::from_json(&reply.body).unwrap();
        // In the order of `remotes`.
        descriptor.buffers.sort_by_key(|it| it.addr != remotes[0].address());
        change(&mut descriptor.buffers);
        let handler = Arc::new(Said { target: place, descriptor });
        let listen = (target.listening_at().ip(), 0).into();
        let server = Server::start(listen, ServerConfig::default(), handler).unwrap();
        let segment = initiator.open_segment(&server.address().to_string()).unwrap();
        Self { initiator, target, remotes, segment, _server: server }
    }

    fn request(&self, opcode: Opcode, local: &Buffer, at: u64, length: u64) -> TransferRequest {
        let (source, target) = (local.address(), self.segment.id());
        TransferRequest { opcode, source, target, target_offset: at, length }
    }

    /// Bytes go to the piece of memory that is as it is said to be, and come back.
    fn the_other_one_is_used(&self, index: usize, seed: u64) {
        let local = private(&self.initiator, LENGTH);
        let bytes = pattern(LENGTH, seed);
        local.write(0, &bytes).unwrap();
        let at = self.remotes[index].address();
        let all = |opcode| self.request(opcode, &local, at, LENGTH as u64);
        self.initiator.submit_and_wait(&[all(Opcode::Write)], LONG).unwrap();
        assert!(contents(&self.remotes[index], 0, LENGTH) == bytes);
        local.write(0, &vec![0; LENGTH]).unwrap();
        self.initiator.submit_and_wait(&[all(Opcode::Read)], LONG).unwrap();
        assert!(contents(&local, 0, LENGTH) == bytes);
    }

    /// Both engines do other things.
    fn both_go_on(&self) {
        let third = engine_like(&self.target);
        let bytes = pattern(LENGTH, 77);
        for (from, to) in [(&self.target, &third), (&third, &self.initiator)] {
            let (local, remote) = (private(from, LENGTH), shared(to, LENGTH));
            local.write(0, &bytes).unwrap();
            let segment = from.open_segment(to.name()).unwrap();
            let write = TransferRequest {
                opcode: Opcode::Write,
                source: local.address(),
                target: segment.id(),
                target_offset: remote.address(),
                length: LENGTH as u64,
            };
            from.submit_and_wait(&[write], LONG).unwrap();
            assert!(contents(&remote, 0, LENGTH) == bytes);
        }
    }
}

fn tcp() -> TransferEngine {
    let engine = TransferEngine::new(common::config(address())).unwrap();
    engine.install_tcp(TcpConfig::default()).unwrap();
    engine
}

/// One with the same transport.
fn engine_like(other: &TransferEngine) -> TransferEngine {
    if other.devices().is_empty() { tcp() } else { engine(1) }
}

/// Over `rdma` and over `tcp`.
fn pairs() -> [[TransferEngine; 2]; 2] {
    [[engine(1), engine(1)], [tcp(), tcp()]]
}

#[test]
fn of_a_bad_buffer_the_others_are_used_and_requests_to_it_say_why_not() {
    type Change = fn(&mut BufferDesc);
    let cases: [(Change, &str); 3] = [
        (|it| it.length = u64::MAX, "exceeds the address space"),
        (|it| it.length = 0, "is empty"),
        (|it| it.rkey = vec![1; 7], "has not one remote key for each device"),
    ];
    for (change, what) in cases {
        for engines in pairs() {
            let ends = Ends::new(engines, |buffers| change(&mut buffers[0]));
            let (initiator, bad) = (&ends.initiator, ends.remotes[0].address());
            let local = private(initiator, 64);
            let refused = |requests: &[TransferRequest]| match initiator
                .submit_and_wait(requests, LONG)
                .unwrap_err()
            {
                SubmitAndWaitError::Submit(error) => error,
                other => panic!("{what}: {other}"),
            };
            let write = ends.request(Opcode::Write, &local, bad, 64);
            let error = refused(&[write]);
            assert!(matches!(error, SubmitError::TargetOutOfRange { .. }), "{error}");
            let text = error.to_string();
            assert_eq!(error.code(), -1, "{text}");
            assert!(text.contains(ends.segment.name()), "{text}");
            assert!(text.contains("; buffer 0 ("), "{text}");
            assert!(text.contains(&format!("bytes at {bad:#x}")), "{text}");
            let ends_with = format!("{what}: its process must register that memory anew");
            assert!(text.ends_with(&ends_with), "{text}");
            ends.the_other_one_is_used(1, 5);
            // By its place in the descriptor, too.
            let error = ends.segment.address_of(0, 0, 1).unwrap_err().to_string();
            assert!(error.contains("buffer 0 (") && error.contains(what), "{error}");
            let second = ends.segment.address_of(1, 0, LENGTH as u64).unwrap();
            assert_eq!(second, ends.remotes[1].address());
            assert_eq!(ends.segment.buffers()[0].fault, Some(what));
            ends.both_go_on();
        }
    }
}

/// As long as the text may be, whatever is in it.
#[test]
fn buffers_beyond_the_limit_are_left_out_and_the_others_used() {
    let ends = Ends::new([tcp(), tcp()], |buffers| {
        let one = BufferDesc { name: "c".to_owned(), addr: 1, length: 1, ..BufferDesc::default() };
        buffers.truncate(1);
        buffers.resize(millstream_metadata::MAX_BUFFERS + 2, one);
    });
    ends.the_other_one_is_used(0, 6);
    let local = private(&ends.initiator, 64);
    let beyond = ends.request(Opcode::Write, &local, ends.remotes[1].address(), 64);
    let error = ends.initiator.submit_and_wait(&[beyond], LONG).unwrap_err().to_string();
    assert!(error.contains("its descriptor has 2 more, which are left out"), "{error}");
}

/// The right shape, and a key or a length that is not what is registered there: the peer's device refuses it.
#[test]
fn a_wrong_key_or_length_fails_its_own_request_which_says_what_to_do() {
    type Change = fn(&mut BufferDesc);
    let cases: [(Change, u64); 2] = [
        (|it| it.rkey.iter_mut().for_each(|key| *key ^= 0x5555_0000), 0),
        // It begins in what is registered, and ends beyond.
        (|it| it.length += LENGTH as u64, LENGTH as u64 - 4096),
    ];
    for (seed, (change, offset)) in (0..).zip(cases) {
        let ends = Ends::new([engine(1), engine(1)], |buffers| change(&mut buffers[0]));
        let before = pattern(LENGTH, 100 + seed);
        ends.remotes[0].write(0, &before).unwrap();
        let local = private(&ends.initiator, 8192);
        local.write(0, &[7; 8192]).unwrap();
        for opcode in [Opcode::Write, Opcode::Read, Opcode::Write] {
            let at = ends.remotes[0].address() + offset;
            let lied_about = ends.request(opcode, &local, at, 8192);
            let batch = ends.initiator.allocate_batch(1).unwrap();
            ends.initiator.submit(&batch, &[lied_about]).unwrap();
            assert!(ends.initiator.wait(&batch, LONG));
            let status = ends.initiator.status(&batch, 0).unwrap();
            assert_eq!(status.state, TransferState::Failed, "{opcode:?}: {status:?}");
            let error = status.error.unwrap();
            let (peer, nic) = (ends.segment.name(), &ends.target.devices()[0]);
            let text = error.to_string();
            assert!(text.starts_with(&format!("peer {peer} (nic {nic}): ")), "{text}");
            assert!(text.contains("remote access error"), "{text}");
            assert!(text.contains("look up its buffers again"), "{text}");
            let here = &ends.initiator.devices()[0];
            let place = format!(": 8192 bytes at {at:#x} by nic {here} here: ");
            assert!(text.contains(&place), "{text}");
            assert_eq!((error.code(), error.range), (-201, Some((at, 8192))), "{text}");
        }
        // Of a request that failed, what is registered of its range may have been written, and nothing else.
        let untouched = if offset == 0 { LENGTH } else { offset as usize };
        assert!(contents(&ends.remotes[0], 0, untouched) == before[..untouched]);
        ends.the_other_one_is_used(1, seed);
        ends.both_go_on();
    }
}
