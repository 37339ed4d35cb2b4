//! Engines with memory of a GPU that is not there: nobody but its driver gets at it.

mod files;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use millstream_net::cuda::pretended::Pretended;

use crate::memory::LocalMemory;
use crate::{
    Buffer, Config, FailureReason, Opcode, RdmaConfig, Segment, SubmitAndWaitError, TcpConfig,
    TransferEngine, TransferRequest,
};

const LONG: Duration = Duration::from_secs(60);
const LENGTH: usize = (5 << 20) + 77;

fn address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    [127, 99, std::process::id() as u8, NEXT.fetch_add(1, Ordering::Relaxed)].into()
}

fn engine(transports: &[&str]) -> TransferEngine {
    let address = address();
    let engine = TransferEngine::new(Config::new(address)).unwrap();
    for transport in transports {
        match *transport {
            "rdma" => engine.install_rdma(RdmaConfig::new(&[address])).unwrap(),
            "tcp" => engine.install_tcp(TcpConfig::default()).unwrap(),
            _ => engine.install_shm().unwrap(),
        }
    }
    engine
}

fn pattern(seed: u8) -> Vec<u8> {
    (0..LENGTH)
        .map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ (i >> 16) as u8 ^ seed)
        .collect()
}

/// Memory of an engine, of one kind or the other.
enum Memory {
    Host(Buffer),
    Gpu(Pretended, u64),
}

impl Memory {
    fn new(engine: &TransferEngine, pretended: Option<&Pretended>) -> Self {
        let Some(pretended) = pretended else {
            return Self::Host(engine.allocate_buffer(LENGTH, "*", true).unwrap());
        };
        let address = pretended.allocate(LENGTH);
        register(engine, address).unwrap();
        Self::Gpu(pretended.clone(), address)
    }

    fn address(&self) -> u64 {
        match self {
            Self::Host(buffer) => buffer.address(),
            Self::Gpu(_, address) => *address,
        }
    }

    fn write(&self, bytes: &[u8]) {
        match self {
            Self::Host(buffer) => buffer.write(0, bytes).unwrap(),
            Self::Gpu(pretended, address) => pretended.write(*address, bytes),
        }
    }

    fn read(&self) -> Vec<u8> {
        match self {
            Self::Host(buffer) => {
                let mut bytes = vec![0; LENGTH];
                buffer.read(0, &mut bytes).unwrap();
                bytes
            }
            Self::Gpu(pretended, address) => pretended.read(*address, LENGTH),
        }
    }
}

fn register(engine: &TransferEngine, address: u64) -> Result<(), crate::RegisterError> {
    let pointer = std::ptr::without_provenance_mut(address as usize);
    // SAFETY: there is no such memory: nothing of the process can be touched there.
    unsafe { engine.register_memory(pointer, LENGTH, "*", true) }
}

/// Memory of this GPU that is registered with an engine as long as that lives.
pub(crate) fn registered(pretended: &Pretended) -> (TransferEngine, Arc<LocalMemory>) {
    super::pretended::set(pretended);
    let engine = engine(&[]);
    let address = pretended.allocate(LENGTH);
    register(&engine, address).unwrap();
    let local = engine.inner.memory().find(address, LENGTH as u64).unwrap();
    (engine, local)
}

/// A GPU on this thread.
fn gpu() -> Pretended {
    let pretended = Pretended::default();
    super::pretended::set(&pretended);
    pretended
}

fn request(
    opcode: Opcode,
    own: (&Memory, u64),
    segment: &Segment,
    other: (&Memory, u64),
    length: u64,
) -> TransferRequest {
    TransferRequest {
        opcode,
        source: own.0.address() + own.1,
        target: segment.id(),
        target_offset: other.0.address() + other.1,
        length,
    }
}

/// Moves bytes both ways between all kinds of memory, and looks at all of both.
fn exchange(engine: &TransferEngine, peer: &TransferEngine, kinds: &[(bool, bool)]) {
    let gpu = gpu();
    for &(own, other) in kinds {
        let own = Memory::new(engine, own.then_some(&gpu));
        let other = Memory::new(peer, other.then_some(&gpu));
        let segment = engine.open_segment(peer.name()).unwrap();
        for (here, there, length) in
            [(0, 0, LENGTH), (3, 70_001, 1), (77, 5, 4096), (1, 2, 200_003), (9, 0, 4_300_001)]
        {
            for opcode in [Opcode::Write, Opcode::Read] {
                let (mine, theirs) = (pattern(length as u8), pattern(!length as u8));
                own.write(&mine);
                other.write(&theirs);
                let one = request(
                    opcode,
                    (&own, here as u64),
                    &segment,
                    (&other, there as u64),
                    length as u64,
                );
                engine.submit_and_wait(&[one], LONG).unwrap();
                let (mut mine_after, mut theirs_after) = (mine.clone(), theirs.clone());
                match opcode {
                    Opcode::Write => theirs_after[there..there + length]
                        .copy_from_slice(&mine[here..here + length]),
                    Opcode::Read => mine_after[here..here + length]
                        .copy_from_slice(&theirs[there..there + length]),
                }
                assert!(own.read() == mine_after, "{opcode:?} {length}");
                assert!(other.read() == theirs_after, "{opcode:?} {length}");
            }
        }
    }
}

const ALL: [(bool, bool); 3] = [(true, false), (false, true), (true, true)];

#[test]
fn bytes_within_an_engine() {
    let engine = engine(&[]);
    exchange(&engine, &engine, &ALL);
}

#[test]
fn bytes_between_engines() {
    exchange(&engine(&["rdma"]), &engine(&["rdma"]), &ALL);
}

/// Through buffers of the host, whoever has them: messages, records with checksums, requests as the original has them.
#[test]
fn bytes_between_engines_over_tcp() {
    let best = TcpConfig::default();
    let checked = TcpConfig { checksums: true, ..best.clone() };
    let original = TcpConfig { messages: false, ..best.clone() };
    for config in [best, checked, original] {
        let own = engine(&[]);
        own.install_tcp(config).unwrap();
        exchange(&own, &engine(&["tcp"]), &ALL);
    }
}

/// Memory of a GPU and of the host in one message.
#[test]
fn kinds_of_memory_change_within_a_message() {
    let (own, peer, gpu) = (engine(&["tcp"]), engine(&["tcp"]), gpu());
    let memory = |engine, gpu| Memory::new(engine, gpu);
    let kinds = [None, Some(&gpu), None, Some(&gpu)];
    let near: Vec<_> = kinds.iter().map(|&gpu| memory(&own, gpu)).collect();
    let far: Vec<_> = kinds.iter().rev().map(|&gpu| memory(&peer, gpu)).collect();
    let segment = own.open_segment(peer.name()).unwrap();
    for opcode in [Opcode::Write, Opcode::Read] {
        let (mut requests, length) = (Vec::new(), 5000);
        for (seed, (near, far)) in (1..).zip(near.iter().zip(&far)) {
            near.write(&pattern(seed));
            far.write(&pattern(!seed));
            for round in 0..20 {
                let at = round * length;
                requests.push(request(opcode, (near, at), &segment, (far, at), length));
            }
        }
        own.submit_and_wait(&requests, LONG).unwrap();
        for (seed, (near, far)) in (1..).zip(near.iter().zip(&far)) {
            let (copied, seed) = match opcode {
                Opcode::Write => (far, seed),
                Opcode::Read => (near, !seed),
            };
            assert!(copied.read()[..100_000] == pattern(seed)[..100_000], "{opcode:?} {seed}");
        }
    }
}

/// A peer's processor does not get at memory of a GPU, but ours gets at memory of the peer's.
#[test]
fn shm_is_for_the_host_memory_of_peers() {
    let (own, peer) = (engine(&["shm", "rdma"]), engine(&["shm", "rdma"]));
    exchange(&own, &peer, &[(true, false)]);
    let segment = own.open_segment(peer.name()).unwrap();
    let gpu = gpu();
    let _memory = Memory::new(&peer, Some(&gpu));
    own.refresh_segment(segment.id()).unwrap();
    assert_eq!(segment.buffers()[0].location, "cuda:7");
    let paths = own.paths(segment.id()).unwrap();
    let shm = paths.iter().find(|path| path.transport == "shm").unwrap();
    assert!(!shm.chosen);
    assert!(shm.reason.as_ref().unwrap().contains("memory of GPUs"), "{:?}", shm.reason);
    assert!(paths.iter().any(|path| path.transport == "rdma" && path.chosen));
    // Without RDMA it is reached over TCP.
    let others = ["shm", "tcp"];
    exchange(&self::engine(&others), &self::engine(&others), &[(false, true), (true, true)]);
}

/// Overlapping ranges are copied as if through a buffer.
#[test]
fn copies_within_a_gpu_may_overlap() {
    let (engine, gpu) = (engine(&[]), gpu());
    let memory = Memory::new(&engine, Some(&gpu));
    let segment = engine.open_segment(engine.name()).unwrap();
    let length = LENGTH - 1000;
    for (from, to) in [(0, 1000), (1000, 0)] {
        let bytes = pattern(1);
        memory.write(&bytes);
        let one = request(
            Opcode::Write,
            (&memory, from as u64),
            &segment,
            (&memory, to as u64),
            length as u64,
        );
        engine.submit_and_wait(&[one], LONG).unwrap();
        assert!(memory.read()[to..to + length] == bytes[from..from + length]);
    }
}

#[test]
fn memory_that_was_freed_fails_its_own_requests() {
    for transports in [&[] as &[&str], &["rdma"], &["tcp"]] {
        let own = engine(transports);
        let gpu = gpu();
        let peer = if transports.is_empty() { &own } else { &engine(transports) };
        let (freed, there) = (Memory::new(peer, Some(&gpu)), Memory::new(peer, Some(&gpu)));
        let (gone, source) = (Memory::new(&own, Some(&gpu)), Memory::new(&own, None));
        source.write(&pattern(5));
        let segment = own.open_segment(peer.name()).unwrap();
        gpu.free(freed.address());
        gpu.free(gone.address());
        for _ in 0..2 {
            for (own_memory, other) in [(&source, &freed), (&gone, &there)] {
                for opcode in [Opcode::Write, Opcode::Read] {
                    let one = request(opcode, (own_memory, 0), &segment, (other, 0), 100_000);
                    let error = own.submit_and_wait(&[one], LONG).unwrap_err();
                    let SubmitAndWaitError::Failed { error, .. } = error else { panic!("{error}") };
                    if transports.is_empty() {
                        assert!(matches!(error.reason, FailureReason::Gpu(_)), "{error}");
                    }
                }
            }
            // A READ that failed may have left anything in its range.
            source.write(&pattern(5));
            let one = request(Opcode::Write, (&source, 0), &segment, (&there, 0), LENGTH as u64);
            own.submit_and_wait(&[one], LONG).unwrap();
            assert!(there.read() == pattern(5));
        }
    }
}

/// Once it is unregistered, nobody touches it any more, whatever is under way.
#[test]
fn memory_can_be_unregistered_while_transfers_run() {
    for transports in [&[] as &[&str], &["rdma"], &["tcp"]] {
        let own = engine(transports);
        let gpu = gpu();
        let peer = if transports.is_empty() { &own } else { &engine(transports) };
        let memory = Memory::new(peer, Some(&gpu));
        let source = Memory::new(&own, None);
        let segment = own.open_segment(peer.name()).unwrap();
        let one = request(Opcode::Write, (&source, 0), &segment, (&memory, 0), LENGTH as u64);
        for round in 0..10_u8 {
            source.write(&vec![round; LENGTH]);
            let batch = own.allocate_batch(16).unwrap();
            own.submit(&batch, &[one; 16]).unwrap();
            let pointer = std::ptr::without_provenance_mut(memory.address() as usize);
            peer.unregister_memory(pointer).unwrap();
            gpu.write(memory.address(), &vec![0xee; LENGTH]);
            assert!(own.wait(&batch, LONG));
            assert!(memory.read().iter().all(|byte| *byte == 0xee), "round {round}");
            drop(batch);
            register(peer, memory.address()).unwrap();
            own.refresh_segment(segment.id()).unwrap();
        }
    }
}
