//! What the tests of engines share.

#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod devices;
pub(crate) mod node;
pub(crate) mod relay;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use millstream_transfer::{
    Batch, Buffer, Config, Opcode, RdmaConfig, Segment, Settings, Sources, TransferEngine,
    TransferRequest, TransferState, TransferStatus,
};

pub(crate) use devices::address;

/// Longer than anything here takes, unless it hangs.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// An engine with `rdma` over so many devices.
pub(crate) fn engine(devices: usize) -> TransferEngine {
    let addresses: Vec<_> = (0..devices).map(|_| address()).collect();
    engine_with(RdmaConfig::new(&addresses))
}

/// The defaults, with the policy that the environment asks for: all of it runs with both.
pub(crate) fn config(listen: IpAddr) -> Config {
    let settings = Settings::load(&Sources::of_process()).unwrap();
    Config { policy: settings.engine(listen).policy, ..Config::new(listen) }
}

pub(crate) fn engine_with(config: RdmaConfig) -> TransferEngine {
    let engine = TransferEngine::new(self::config(config.addresses[0])).unwrap();
    engine.install_rdma(config).unwrap();
    engine
}

/// Whether the processor is emulated, as `MILLSTREAM_TEST_EMULATED` says, and too slow for bounds of real ones.
pub(crate) fn is_emulated() -> bool {
    std::env::var_os("MILLSTREAM_TEST_EMULATED").is_some()
}

/// Two numbers, as in `64x8`.
pub(crate) fn numbers(text: &str) -> (usize, usize) {
    let (first, second) = text.split_once('x').unwrap();
    (first.parse().unwrap(), second.parse().unwrap())
}

/// How many peers are to be dead at once, and NICs of each, if `MILLSTREAM_TEST_DEAD` says so.
pub(crate) fn dead_peers() -> Option<(usize, usize)> {
    Some(numbers(&std::env::var("MILLSTREAM_TEST_DEAD").ok()?))
}

/// A buffer that peers can access, and one that they cannot.
pub(crate) fn shared(engine: &TransferEngine, length: usize) -> Buffer {
    engine.allocate_buffer(length, "*", true).unwrap()
}

pub(crate) fn private(engine: &TransferEngine, length: usize) -> Buffer {
    engine.allocate_buffer(length, "*", false).unwrap()
}

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

pub(crate) fn contents(buffer: &Buffer, offset: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    buffer.read(offset, &mut bytes).unwrap();
    bytes
}

/// Waits until a task of the batch has moved something. Fails when one ends before without.
pub(crate) fn wait_for_first_bytes(engine: &TransferEngine, batch: &Batch) {
    let start = Instant::now();
    loop {
        let statuses = engine.statuses(batch);
        if statuses.iter().any(|status| status.transferred_bytes > 0) {
            return;
        }
        use TransferState::{Pending, Waiting};
        let goes_on = |status: &TransferStatus| matches!(status.state, Waiting | Pending);
        assert!(statuses.iter().all(goes_on), "{statuses:?}");
        assert!(start.elapsed() < LONG, "{statuses:?}");
        std::thread::yield_now();
    }
}

pub(crate) fn request(
    opcode: Opcode,
    local: (&Buffer, u64),
    segment: &Segment,
    offset: u64,
    length: u64,
) -> TransferRequest {
    TransferRequest {
        opcode,
        source: local.0.address() + local.1,
        target: segment.id(),
        target_offset: segment.address_of(0, offset, length).unwrap(),
        length,
    }
}
