//! Soft devices with memory of a GPU at either end, or both. The GPU is not there: its memory cannot be
//! accessed, and copies are made when they are waited for.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use millstream_net::cuda::pretended::Pretended;
use millstream_verbs::{
    Access, Completion, CompletionQueue, CompletionStatus, Device, GpuMemoryError, MemoryRegion,
    Piece, ProtectionDomain, Psn, QueuePair, QueuePairAttributes, QueuePairCapabilities,
    QueuePairOptions, QueuePairState, ReceiveRequest, SendOperation, SendRequest, SoftConfig,
};

const LENGTH: usize = 3 << 20;
const RIGHTS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);

/// Memory of one kind or the other.
enum Memory {
    Host(Box<[u8]>),
    Gpu(Pretended, u64),
}

impl Memory {
    fn new(gpu: bool) -> Self {
        if !gpu {
            return Self::Host(vec![0; LENGTH].into());
        }
        let pretended = Pretended::default();
        let address = pretended.allocate(LENGTH);
        Self::Gpu(pretended, address)
    }

    fn fill(&mut self, seed: u8) -> Vec<u8> {
        let bytes: Vec<u8> =
            (0..LENGTH).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed).collect();
        match self {
            Self::Host(memory) => memory.copy_from_slice(&bytes),
            Self::Gpu(pretended, address) => pretended.write(*address, &bytes),
        }
        bytes
    }

    fn read(&self) -> Vec<u8> {
        match self {
            Self::Host(memory) => memory.to_vec(),
            Self::Gpu(pretended, address) => pretended.read(*address, LENGTH),
        }
    }
}

struct End {
    // Dropped from the top.
    pair: QueuePair,
    region: MemoryRegion,
    completions: CompletionQueue,
    domain: ProtectionDomain,
    device: Device,
    memory: Memory,
}

fn open(test: u8, host: u8, gpu: bool, shards: usize) -> End {
    let process = std::process::id();
    let address = Ipv4Addr::new(127, 48 | (process >> 8) as u8 & 7, process as u8, test * 8 + host);
    let config = SoftConfig { shards, ..SoftConfig::new(address.into()) };
    let device = Device::open_soft(&config).unwrap();
    let completions = device.create_completion_queue(256).unwrap();
    let domain = device.allocate_protection_domain();
    let options = QueuePairOptions::new(&completions, QueuePairCapabilities::new(64, 16));
    let pair = domain.create_queue_pair_with(&options).unwrap();
    let mut memory = Memory::new(gpu);
    // SAFETY: the memory lives as long as the region, and is looked at between transfers only.
    let region = unsafe {
        match &mut memory {
            Memory::Host(memory) => {
                domain.register_memory(memory.as_mut_ptr(), LENGTH, RIGHTS).unwrap()
            }
            Memory::Gpu(pretended, address) => {
                domain.register_gpu_memory(&pretended.gpu(), *address, LENGTH, RIGHTS).unwrap()
            }
        }
    };
    End { pair, region, completions, domain, device, memory }
}

fn connect(own: &End, peer: &End) {
    let change = |state| QueuePairAttributes { state: Some(state), ..Default::default() };
    let address: IpAddr = peer.device.address();
    let access = Some(Access::REMOTE_WRITE | Access::REMOTE_READ);
    let steps = [
        QueuePairAttributes { access, ..change(QueuePairState::Initialized) },
        QueuePairAttributes {
            remote_address: Some(address),
            path_mtu: Some(own.device.path_mtu(address).unwrap()),
            destination_qpn: Some(peer.pair.number()),
            receive_psn: Some(Psn::new(0)),
            responder_resources: Some(16),
            minimum_rnr_timer: Some(12),
            ..change(QueuePairState::ReadyToReceive)
        },
        QueuePairAttributes {
            send_psn: Some(Psn::new(0)),
            timeout: Some(17),
            retry_count: Some(7),
            rnr_retry: Some(7),
            initiator_depth: Some(16),
            ..change(QueuePairState::ReadyToSend)
        },
    ];
    steps.iter().for_each(|step| own.pair.modify(step).unwrap());
}

fn ends(test: u8, own: bool, peer: bool) -> [End; 2] {
    let ends = [open(test, 1, own, 1), open(test, 2, peer, 2)];
    connect(&ends[0], &ends[1]);
    connect(&ends[1], &ends[0]);
    ends
}

impl End {
    fn piece(&self, offset: usize, length: usize) -> Piece {
        let address = self.region.address() + offset as u64;
        Piece { key: self.region.key(), address, length: length as u32 }
    }

    fn completion(&self) -> Completion {
        let mut completions = Vec::new();
        assert!(self.completions.wait(Duration::from_secs(60)), "nothing completes");
        self.completions.poll(&mut completions, 1);
        completions[0]
    }

    fn post(&self, operation: SendOperation, piece: Piece) {
        self.pair.post_send(&[SendRequest::new(1, operation, [piece])]).unwrap();
    }
}

/// Where in the memories and how much: odd, longer than any buffer, and single bytes.
const PLACES: [(usize, usize, usize); 6] = [
    (0, 0, LENGTH),
    (1, 3, 1),
    (5, 77, 4096),
    (4095, 8193, 65_537),
    (100_001, 13, (1 << 20) + 7),
    (LENGTH - 300_000, 9, 300_000),
];

#[test]
fn bytes_get_from_and_to_memory_of_gpus() {
    for (test, own, peer) in [(0, true, false), (1, false, true), (2, true, true)] {
        let mut ends = ends(test, own, peer);
        for (write, (here, there, length)) in
            [true, false].into_iter().flat_map(|write| PLACES.map(|place| (write, place)))
        {
            let own = ends[0].memory.fill(length as u8);
            let other = ends[1].memory.fill(!length as u8);
            let remote_address = ends[1].region.address() + there as u64;
            let remote_key = ends[1].region.remote_key();
            let operation = match write {
                true => SendOperation::Write { remote_address, remote_key, immediate: None },
                false => SendOperation::Read { remote_address, remote_key },
            };
            ends[0].post(operation, ends[0].piece(here, length));
            assert_eq!(ends[0].completion().status, CompletionStatus::Success);
            let mut expected = if write { other.clone() } else { own.clone() };
            match write {
                true => expected[there..there + length].copy_from_slice(&own[here..][..length]),
                false => expected[here..here + length].copy_from_slice(&other[there..][..length]),
            }
            assert!(ends[usize::from(write)].memory.read() == expected, "{write} {length}");
        }
    }
}

#[test]
fn messages_are_there_when_they_are_received() {
    let mut ends = ends(3, true, true);
    let bytes = ends[0].memory.fill(9);
    for (here, there, length) in PLACES.into_iter().skip(1) {
        let pieces = [ends[1].piece(there, length)];
        ends[1].pair.post_receive(&[ReceiveRequest { id: 2, pieces }]).unwrap();
        ends[0].post(SendOperation::Send { immediate: None }, ends[0].piece(here, length));
        assert_eq!(ends[1].completion().status, CompletionStatus::Success);
        assert!(ends[1].memory.read()[there..there + length] == bytes[here..here + length]);
        assert_eq!(ends[0].completion().status, CompletionStatus::Success);
    }
}

#[test]
fn memory_that_was_freed_fails_what_needs_it() {
    for (test, write, own) in
        [(4, true, true), (5, true, false), (6, false, true), (7, false, false)]
    {
        let ends = ends(test, true, true);
        let Memory::Gpu(pretended, address) = &ends[usize::from(!own)].memory else { panic!() };
        pretended.free(*address);
        let (remote_address, remote_key) = (ends[1].region.address(), ends[1].region.remote_key());
        let operation = match write {
            true => SendOperation::Write { remote_address, remote_key, immediate: None },
            false => SendOperation::Read { remote_address, remote_key },
        };
        ends[0].post(operation, ends[0].piece(0, 100_000));
        let status = ends[0].completion().status;
        let expected = match (write, own) {
            (_, true) => CompletionStatus::LocalProtection,
            (true, false) => CompletionStatus::RemoteOperational,
            (false, false) => CompletionStatus::RemoteAccess,
        };
        assert_eq!(status, expected, "{write} {own}");
        assert_eq!(ends[0].device.failure(), None);
        assert_eq!(ends[1].device.failure(), None);
    }
}

#[test]
fn what_is_refused_says_why() {
    let end = open(8, 1, false, 1);
    let pretended = Pretended::default();
    let (gpu, address) = (pretended.gpu(), pretended.allocate(100));
    let rights = RIGHTS | Access::REMOTE_ATOMIC;
    // SAFETY: nothing uses it.
    let error = unsafe { end.domain.register_gpu_memory(&gpu, address, 100, rights) }.unwrap_err();
    assert!(matches!(error, GpuMemoryError::Atomic), "{error}");
    assert_eq!(pretended.lanes(), 0, "nothing was opened for it");
    let one = || {
        // SAFETY: as above.
        unsafe { end.domain.register_gpu_memory(&gpu, address, 100, RIGHTS) }.unwrap()
    };
    drop([one(), one()]);
    assert_eq!(pretended.lanes(), 2, "one for each way");
    drop(end);
    assert_eq!(pretended.lanes(), 0);
}
