//! Two ends on devices of the chosen provider.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use millstream_verbs::{
    Access, Completion, CompletionQueue, CompletionStatus, Device, IbverbsConfig, MemoryRegion,
    Piece, ProtectionDomain, Provider, Psn, QueuePair, QueuePairAttributes, QueuePairCapabilities,
    QueuePairOptions, QueuePairState, SendOperation, SendRequest, SoftConfig,
};

/// For what must happen. Emulated machines are slow.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const CAPABILITIES: QueuePairCapabilities = QueuePairCapabilities::new(64, 64);

pub(crate) const ALL_ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

/// Numbers close to their wrap.
const FIRST_PSN: Psn = Psn::new(0xff_fff0);

/// A device of the provider under test. Soft ones have an address each, that no other test process
/// uses.
pub(crate) fn open_device() -> Device {
    open_device_with(true)
}

/// With or without segmentation offload, where the provider has it.
fn open_device_with(segmentation_offload: bool) -> Device {
    let chosen = std::env::var("MILLSTREAM_TEST_PROVIDER").unwrap_or_else(|_| "soft".into());
    match chosen.as_str() {
        "soft" => {
            static HOST: AtomicU8 = AtomicU8::new(1);
            let host = HOST.fetch_add(1, Ordering::Relaxed);
            assert!((1..255).contains(&host), "too many devices for one process");
            let process = std::process::id();
            let address = Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, host);
            let chosen = std::env::var("MILLSTREAM_TEST_DRIVER").unwrap_or_else(|_| "udp".into());
            let driver = chosen.parse().unwrap_or_else(|error| panic!("{error}"));
            let shards = crate::SHARDS;
            let config = SoftConfig {
                driver,
                segmentation_offload,
                shards,
                ..SoftConfig::new(address.into())
            };
            let device = Device::open_soft(&config).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(device.driver(), Some(driver));
            device
        }
        "ibverbs" => {
            let name = std::env::var("MILLSTREAM_TEST_DEVICE").ok();
            let gid_index = std::env::var("MC_GID_INDEX").ok().map(|index| index.parse().unwrap());
            let config = IbverbsConfig { name, gid_index, ..IbverbsConfig::default() };
            Device::open_ibverbs(&config).unwrap_or_else(|error| panic!("{error}"))
        }
        other => panic!("MILLSTREAM_TEST_PROVIDER={other}: it is soft or ibverbs"),
    }
}

/// Whether it is the kernel's soft-RoCE, which differs from the specification here and there.
pub(crate) fn is_rxe(device: &Device) -> bool {
    device.provider() == Provider::Ibverbs && device.name().starts_with("rxe")
}

/// Says what a device does without. Soft devices and soft-RoCE offer everything: there the test must
/// not pass for want of what it tests.
pub(crate) fn not_offered(device: &Device, what: &str) {
    let name = device.name();
    assert!(device.provider() == Provider::Ibverbs && !is_rxe(device), "{name} offers no {what}");
    println!("not offered by {name}: {what}");
}

/// One end. Fields are dropped from the top: the queue pair first.
pub(crate) struct End {
    pub(crate) pair: QueuePair,
    pub(crate) completions: CompletionQueue,
    pub(crate) domain: ProtectionDomain,
    pub(crate) device: Device,
}

pub(crate) fn open() -> End {
    open_on(open_device())
}

fn open_on(device: Device) -> End {
    let domain = device.allocate_protection_domain();
    let completions = device.create_completion_queue(256).unwrap();
    // In any shard, and those of two ends in different ones.
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let shard = Some(NEXT.fetch_add(1, Ordering::Relaxed) % device.shards());
    let options = QueuePairOptions { shard, ..QueuePairOptions::new(&completions, CAPABILITIES) };
    let pair = domain.create_queue_pair_with(&options).unwrap();
    End { pair, completions, domain, device }
}

/// What a test may want to connect with.
#[derive(Clone, Copy)]
pub(crate) struct Connection {
    pub(crate) timeout: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) initiator_depth: u8,
}

/// 268 ms, seven times: even a slow machine answers in that time, and one that stands still for a while.
pub(crate) const USUAL: Connection =
    Connection { timeout: 16, retry_count: 6, rnr_retry: 7, initiator_depth: 16 };

pub(crate) fn to_init() -> QueuePairAttributes {
    QueuePairAttributes {
        state: Some(QueuePairState::Initialized),
        access: Some(ALL_ACCESS),
        ..QueuePairAttributes::default()
    }
}

pub(crate) fn to_rtr(device: &Device, peer: IpAddr, peer_pair: &QueuePair) -> QueuePairAttributes {
    QueuePairAttributes {
        state: Some(QueuePairState::ReadyToReceive),
        remote_address: Some(peer),
        path_mtu: Some(device.path_mtu(peer).unwrap()),
        destination_qpn: Some(peer_pair.number()),
        receive_psn: Some(FIRST_PSN),
        responder_resources: Some(16),
        // 0.64 ms.
        minimum_rnr_timer: Some(12),
        ..QueuePairAttributes::default()
    }
}

pub(crate) fn to_rts(connection: Connection) -> QueuePairAttributes {
    QueuePairAttributes {
        state: Some(QueuePairState::ReadyToSend),
        send_psn: Some(FIRST_PSN),
        timeout: Some(connection.timeout),
        retry_count: Some(connection.retry_count),
        rnr_retry: Some(connection.rnr_retry),
        initiator_depth: Some(connection.initiator_depth),
        ..QueuePairAttributes::default()
    }
}

pub(crate) fn to(state: QueuePairState) -> QueuePairAttributes {
    QueuePairAttributes { state: Some(state), ..QueuePairAttributes::default() }
}

/// Connects `pair`, of `device`, to `peer_pair`, of `peer`.
pub(crate) fn connect_one(
    (pair, device): (&QueuePair, &Device),
    (peer_pair, peer): (&QueuePair, &Device),
    connection: Connection,
) {
    pair.modify(&to_init()).unwrap();
    pair.modify(&to_rtr(device, peer.address(), peer_pair)).unwrap();
    pair.modify(&to_rts(connection)).unwrap();
}

pub(crate) fn connect(a: (&QueuePair, &Device), b: (&QueuePair, &Device), connection: Connection) {
    connect_one(a, b, connection);
    connect_one(b, a, connection);
}

pub(crate) fn two_with(connection: Connection) -> [End; 2] {
    let [a, b] = [open(), open()];
    connect((&a.pair, &a.device), (&b.pair, &b.device), connection);
    [a, b]
}

pub(crate) fn two() -> [End; 2] {
    two_with(USUAL)
}

pub(crate) fn two_without_offload() -> [End; 2] {
    let [a, b] = [false; 2].map(|offload| open_on(open_device_with(offload)));
    connect((&a.pair, &a.device), (&b.pair, &b.device), USUAL);
    [a, b]
}

/// Registers a vector that outlives its region.
pub(crate) fn register_with(
    domain: &ProtectionDomain,
    bytes: &mut Vec<u8>,
    access: Access,
) -> MemoryRegion {
    // SAFETY: every test drops the region before the vector, and reads the vector only after a
    // completion has said that its bytes are there.
    unsafe { domain.register_memory(bytes.as_mut_ptr(), bytes.len(), access).unwrap() }
}

pub(crate) fn register(end: &End, bytes: &mut Vec<u8>) -> MemoryRegion {
    register_with(&end.domain, bytes, ALL_ACCESS)
}

pub(crate) fn piece(region: &MemoryRegion, offset: usize, length: usize) -> Piece {
    let address = region.address() + offset as u64;
    Piece { key: region.key(), address, length: length as u32 }
}

pub(crate) fn write_to(region: &MemoryRegion, offset: u64) -> SendOperation {
    SendOperation::Write {
        remote_address: region.address().wrapping_add(offset),
        remote_key: region.remote_key(),
        immediate: None,
    }
}

pub(crate) fn read_from(region: &MemoryRegion) -> SendOperation {
    SendOperation::Read { remote_address: region.address(), remote_key: region.remote_key() }
}

pub(crate) const SEND: SendOperation = SendOperation::Send { immediate: None };

pub(crate) fn request(id: u64, operation: SendOperation, piece: Piece) -> SendRequest {
    let pieces = [piece];
    SendRequest::new(id, operation, pieces)
}

/// Waits for so many completions.
pub(crate) fn next(completions: &CompletionQueue, count: usize) -> Vec<Completion> {
    let mut out = Vec::new();
    while out.len() < count {
        assert!(completions.wait(PATIENCE), "{} of {count} completions came: {out:?}", out.len());
        let missing = count - out.len();
        completions.poll(&mut out, missing);
    }
    out
}

/// Waits for so many completions, which must be successes.
pub(crate) fn next_good(completions: &CompletionQueue, count: usize) -> Vec<Completion> {
    let out = next(completions, count);
    assert!(out.iter().all(|c| c.status == CompletionStatus::Success), "{out:?}");
    out
}

pub(crate) fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed).collect()
}
