//! Two soft devices on loopback addresses of this process: data, errors, waiting, closing.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::mpsc;
use std::time::Duration;

use millstream_verbs::{
    Access, Completion, CompletionOperation, CompletionQueue, CompletionStatus, CreateError,
    Device, Mtu, OpenError, Piece, Psn, Qpn, QueuePair, QueuePairAttributes, QueuePairCapabilities,
    QueuePairState, ReceiveRequest, ScatterGather, SendOperation, SendRequest, SoftConfig,
};

const PATIENCE: Duration = Duration::from_secs(20);

/// An address of 127/8 that no other test process uses, nor other tests of this one.
fn address(test: u8, host: u8) -> IpAddr {
    let process = std::process::id();
    Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, test * 8 + host).into()
}

struct End {
    device: Device,
    domain: millstream_verbs::ProtectionDomain,
    completions: CompletionQueue,
    pair: QueuePair,
}

const CAPABILITIES: QueuePairCapabilities =
    QueuePairCapabilities { max_send_requests: 128, max_receive_requests: 128 };

fn open(config: &SoftConfig) -> End {
    let device = Device::open_soft(config).unwrap();
    let domain = device.allocate_protection_domain();
    let completions = device.create_completion_queue(1024).unwrap();
    let pair = domain.create_queue_pair(&completions, &completions, CAPABILITIES).unwrap();
    End { device, domain, completions, pair }
}

fn connect(pair: &QueuePair, peer: IpAddr, peer_qpn: Qpn) {
    let none = QueuePairAttributes::default();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    for attributes in [
        QueuePairAttributes {
            state: Some(QueuePairState::Initialized),
            access: Some(access),
            ..none
        },
        QueuePairAttributes {
            state: Some(QueuePairState::ReadyToReceive),
            remote_address: Some(peer),
            path_mtu: Some(Mtu::B4096),
            destination_qpn: Some(peer_qpn),
            receive_psn: Some(Psn::new(0xff_fff0)),
            responder_resources: Some(16),
            minimum_rnr_timer: Some(12),
            ..none
        },
        QueuePairAttributes {
            state: Some(QueuePairState::ReadyToSend),
            send_psn: Some(Psn::new(0xff_fff0)),
            timeout: Some(14),
            retry_count: Some(7),
            rnr_retry: Some(7),
            initiator_depth: Some(16),
            ..none
        },
    ] {
        pair.modify(&attributes).unwrap();
    }
}

fn two(test: u8, offload: bool) -> [End; 2] {
    let ends = [0, 1].map(|host| {
        open(&SoftConfig { segmentation_offload: offload, ..SoftConfig::new(address(test, host)) })
    });
    connect(&ends[0].pair, ends[1].device.address(), ends[1].pair.number());
    connect(&ends[1].pair, ends[0].device.address(), ends[0].pair.number());
    ends
}

/// Registers a vector that outlives its region.
fn register(end: &End, bytes: &mut Vec<u8>) -> millstream_verbs::MemoryRegion {
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    // SAFETY: every test drops the region before the vector, and reads the vector only after a
    // completion has said that its bytes are there.
    unsafe { end.domain.register_memory(bytes.as_mut_ptr(), bytes.len(), access).unwrap() }
}

fn piece(region: &millstream_verbs::MemoryRegion, offset: usize, length: usize) -> Piece {
    let address = region.address() + offset as u64;
    Piece { key: region.key(), address, length: length as u32 }
}

fn request(id: u64, operation: SendOperation, piece: Piece) -> SendRequest {
    let pieces = ScatterGather::one(piece);
    SendRequest { id, operation, pieces, signaled: true, solicited: false }
}

fn next(completions: &CompletionQueue, count: usize) -> Vec<Completion> {
    let mut out = Vec::new();
    while out.len() < count {
        assert!(completions.wait(PATIENCE), "{} of {count} completions came", out.len());
        completions.poll(&mut out, count);
    }
    out
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed).collect()
}

fn moves_every_kind_of_message(test: u8, offload: bool) {
    let [a, b] = two(test, offload);
    let length = 3_000_001;
    let mut source = pattern(length, 7);
    let (mut target, mut back) = (vec![0; length], vec![0; length]);
    let regions = [register(&a, &mut source), register(&b, &mut target), register(&a, &mut back)];
    let [source_region, target_region, back_region] = &regions;
    let remote_address = target_region.address();
    let remote_key = target_region.key();
    let pieces = ScatterGather::one(piece(target_region, 0, length));
    b.pair.post_receive(&[1, 2].map(|id| ReceiveRequest { id, pieces })).unwrap();
    let whole = piece(source_region, 0, length);
    a.pair
        .post_send(&[
            request(1, SendOperation::Send { immediate: None }, whole),
            request(
                2,
                SendOperation::Write { remote_address, remote_key, immediate: Some(42) },
                whole,
            ),
            request(
                3,
                SendOperation::Read { remote_address, remote_key },
                piece(back_region, 0, length),
            ),
        ])
        .unwrap();
    let sent = next(&a.completions, 3);
    assert!(sent.iter().all(|c| c.status == CompletionStatus::Success), "{sent:?}");
    let received = next(&b.completions, 2);
    assert_eq!(received[0].operation, CompletionOperation::Receive);
    assert_eq!((received[1].immediate, received[1].length), (Some(42), length as u32));
    drop(regions);
    assert_eq!(target, source);
    assert_eq!(back, source);
}

#[test]
fn moves_every_kind_of_message_with_offload() {
    moves_every_kind_of_message(0, true);
}

#[test]
fn moves_every_kind_of_message_without_offload() {
    moves_every_kind_of_message(1, false);
}

#[test]
fn a_handler_gets_completions_and_may_post_more() {
    let [a, b] = two(2, true);
    let mut target = vec![0; 64];
    let mut source = vec![9; 64];
    let target_region = register(&b, &mut target);
    let source_region = register(&a, &mut source);
    let write = SendOperation::Write {
        remote_address: target_region.address(),
        remote_key: target_region.key(),
        immediate: None,
    };
    let (sender, receiver) = mpsc::channel();
    let pair: std::sync::Arc<std::sync::OnceLock<QueuePair>> = std::sync::Arc::default();
    let (poster, whole) = (std::sync::Arc::clone(&pair), piece(&source_region, 0, 64));
    let handler = Box::new(move |completions: &[Completion]| {
        for completion in completions {
            assert_eq!(completion.status, CompletionStatus::Success);
            if completion.id < 99 {
                let next = request(completion.id + 1, write, whole);
                poster.get().unwrap().post_send(&[next]).unwrap();
            } else {
                sender.send(completion.id).unwrap();
            }
        }
    });
    let queue = a.device.create_completion_queue_with_handler(256, handler).unwrap();
    let handled = a.domain.create_queue_pair(&queue, &queue, CAPABILITIES).unwrap();
    let other = b.domain.create_queue_pair(&b.completions, &b.completions, CAPABILITIES).unwrap();
    connect(&handled, b.device.address(), other.number());
    connect(&other, a.device.address(), handled.number());
    pair.set(handled).unwrap();
    pair.get().unwrap().post_send(&[request(0, write, whole)]).unwrap();
    assert_eq!(receiver.recv_timeout(PATIENCE), Ok(99));
    drop((source_region, target_region));
}

#[test]
fn remote_access_errors_reach_the_sender_and_touch_nothing() {
    for (test, offset, wrong_key) in [(3, 1_u64, 0_u32), (4, 0, 0x100), (5, u64::MAX - 2000, 0)] {
        let [a, b] = two(test, true);
        let mut source = vec![1; 1000];
        let mut target = vec![0; 1000];
        let source_region = register(&a, &mut source);
        let target_region = register(&b, &mut target);
        let operation = SendOperation::Write {
            remote_address: target_region.address().wrapping_add(offset),
            remote_key: target_region.key() ^ wrong_key,
            immediate: None,
        };
        a.pair.post_send(&[request(1, operation, piece(&source_region, 0, 1000))]).unwrap();
        let failed = next(&a.completions, 1);
        assert_eq!(failed[0].status, CompletionStatus::RemoteAccess);
        assert_eq!(a.pair.state(), QueuePairState::Error);
        drop((source_region, target_region));
        assert_eq!(target, [0; 1000]);
    }
}

#[test]
fn a_closed_peer_is_reported() {
    let [a, b] = two(6, true);
    let mut source = vec![1; 1000];
    let source_region = register(&a, &mut source);
    drop(b);
    let operation = SendOperation::Write { remote_address: 0, remote_key: 0, immediate: None };
    a.pair.post_send(&[request(1, operation, piece(&source_region, 0, 1000))]).unwrap();
    assert_eq!(next(&a.completions, 1)[0].status, CompletionStatus::RetryExceeded);
}

#[test]
fn an_address_in_use_is_refused() {
    let config = SoftConfig::new(address(7, 0));
    let first = Device::open_soft(&config).unwrap();
    let error = Device::open_soft(&config).unwrap_err();
    assert!(matches!(error, OpenError::PortInUse { .. }), "{error}");
    drop(first);
    // Everything of the first is gone, its socket too.
    Device::open_soft(&config).unwrap();
}

#[test]
fn queues_of_another_device_are_refused() {
    let a = open(&SoftConfig::new(address(8, 0)));
    let b = open(&SoftConfig::new(address(8, 1)));
    let mixed = a.domain.create_queue_pair(&a.completions, &b.completions, CAPABILITIES);
    assert!(matches!(mixed, Err(CreateError::UnknownCompletionQueue(_))));
}
