//! Between two soft devices no packet costs an allocation, on any thread: posting, the progress
//! threads with their system calls, the endpoint, completions. The allocator counts for the whole
//! process, so this one test has a binary to itself.

use std::alloc::System;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use millstream_verbs::{
    Access, Completion, CompletionQueue, CompletionStatus, Device, MemoryRegion, Mtu, Piece, Psn,
    QueuePair, QueuePairAttributes, QueuePairCapabilities, QueuePairState, ReceiveRequest,
    SendOperation, SendRequest, SoftConfig,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const MESSAGE: usize = 256 << 10;
const DEPTH: usize = 16;

struct End {
    // Dropped from the top.
    pair: QueuePair,
    completions: CompletionQueue,
    region: MemoryRegion,
    device: Device,
    _memory: Vec<u8>,
}

fn open(host: u8) -> End {
    let process = std::process::id();
    let address: IpAddr =
        Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, host).into();
    let device = Device::open_soft(&SoftConfig::new(address)).unwrap();
    let domain = device.allocate_protection_domain();
    let mut memory = vec![host; MESSAGE];
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    // SAFETY: the memory lives as long as the region, and is not touched meanwhile.
    let region = unsafe { domain.register_memory(memory.as_mut_ptr(), MESSAGE, access).unwrap() };
    let completions = device.create_completion_queue(4 * DEPTH).unwrap();
    let capabilities = QueuePairCapabilities::new(DEPTH, DEPTH);
    let pair = domain.create_queue_pair(&completions, &completions, capabilities).unwrap();
    End { pair, completions, region, device, _memory: memory }
}

fn connect(end: &End, peer: &End) {
    let none = QueuePairAttributes::default();
    let psn = Some(Psn::new(0xff_ff00));
    let states = [
        QueuePairAttributes {
            state: Some(QueuePairState::Initialized),
            access: Some(Access::REMOTE_WRITE | Access::REMOTE_READ),
            ..none
        },
        QueuePairAttributes {
            state: Some(QueuePairState::ReadyToReceive),
            remote_address: Some(peer.device.address()),
            path_mtu: Some(Mtu::B4096),
            destination_qpn: Some(peer.pair.number()),
            receive_psn: psn,
            responder_resources: Some(16),
            minimum_rnr_timer: Some(1),
            ..none
        },
        QueuePairAttributes {
            state: Some(QueuePairState::ReadyToSend),
            send_psn: psn,
            timeout: Some(17),
            retry_count: Some(7),
            rnr_retry: Some(7),
            initiator_depth: Some(16),
            ..none
        },
    ];
    for attributes in &states {
        end.pair.modify(attributes).unwrap();
    }
}

impl End {
    fn pieces(&self) -> [Piece; 1] {
        let (key, address) = (self.region.key(), self.region.address());
        [Piece { key, address, length: MESSAGE as u32 }]
    }

    /// Waits for this many successes.
    fn finish(&self, mut count: usize, out: &mut Vec<Completion>) {
        while count > 0 {
            assert!(
                self.completions.wait(Duration::from_secs(60)),
                "{} completions missing",
                count
            );
            out.clear();
            count -= self.completions.poll(out, DEPTH);
            assert!(out.iter().all(|completion| completion.status == CompletionStatus::Success));
        }
    }
}

#[test]
fn no_packet_costs_an_allocation() {
    let [a, b] = [open(1), open(2)];
    connect(&a, &b);
    connect(&b, &a);
    let (remote_address, remote_key) = (b.region.address(), b.region.remote_key());
    let requests = [
        SendOperation::Write { remote_address, remote_key, immediate: None },
        SendOperation::Read { remote_address, remote_key },
        SendOperation::Send { immediate: None },
        SendOperation::Write { remote_address, remote_key, immediate: Some(7) },
    ]
    .map(|operation| SendRequest::new(1, operation, a.pieces()));
    let receives = [ReceiveRequest { id: 2, pieces: b.pieces() }; 2];
    let mut out = Vec::with_capacity(DEPTH);
    let mut rounds = |count| {
        for _ in 0..count {
            b.pair.post_receive(&receives).unwrap();
            a.pair.post_send(&requests).unwrap();
            a.finish(requests.len(), &mut out);
            b.finish(receives.len(), &mut out);
        }
    };
    // Long enough that every list has had its greatest length, whatever the machine's load.
    rounds(300);
    let packets = |end: &End| end.device.counters().packets_received;
    let before = (packets(&a), packets(&b));
    let region = Region::new(ALLOCATOR);
    rounds(300);
    let change = region.change();
    assert!(packets(&a) > before.0 + 300 * 64, "the READs");
    assert!(packets(&b) > before.1 + 300 * 64 * 3, "the WRITEs and SENDs");
    assert_eq!((change.allocations, change.reallocations), (0, 0), "{change:?}");

    let region = Region::new(ALLOCATOR);
    drop(black_box(vec![0_u8; 100]));
    assert_eq!(region.change().allocations, 1, "the counter counts");
}
