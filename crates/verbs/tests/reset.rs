//! A queue pair that was reset reads no memory any more: here its memory is made inaccessible at once,
//! under a thread that sends from it. Were it still read, the kernel would refuse to send.

use std::net::{IpAddr, Ipv4Addr};
use std::{ptr, thread};

use millstream_verbs::{
    Access, CompletionQueue, Device, Piece, ProtectionDomain, Psn, QueuePair, QueuePairAttributes,
    QueuePairCapabilities, QueuePairOptions, QueuePairState, SendOperation, SendRequest,
    SoftConfig,
};

const LENGTH: usize = 1 << 20;

/// Memory that can be made inaccessible.
struct Mapping(*mut u8);

impl Mapping {
    fn new() -> Self {
        const FLAGS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        const PROTECTION: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping touches nothing that exists.
        let memory = unsafe { libc::mmap(ptr::null_mut(), LENGTH, PROTECTION, FLAGS, -1, 0) };
        assert_ne!(memory, libc::MAP_FAILED);
        Self(memory.cast())
    }

    fn protect(&self, protection: libc::c_int) {
        // SAFETY: it is this one's mapping, which nobody but a device accesses.
        assert_eq!(unsafe { libc::mprotect(self.0.cast(), LENGTH, protection) }, 0);
    }
}

struct End {
    pair: QueuePair,
    domain: ProtectionDomain,
    completions: CompletionQueue,
    device: Device,
}

fn open(host: u8) -> End {
    let process = std::process::id();
    let address = Ipv4Addr::new(127, 56 | (process >> 8) as u8 & 7, process as u8, host);
    let device = Device::open_soft(&SoftConfig::new(address.into())).unwrap();
    let completions = device.create_completion_queue(256).unwrap();
    let domain = device.allocate_protection_domain();
    let options = QueuePairOptions::new(&completions, QueuePairCapabilities::new(64, 1));
    let pair = domain.create_queue_pair_with(&options).unwrap();
    End { pair, domain, completions, device }
}

fn change(state: QueuePairState) -> QueuePairAttributes {
    QueuePairAttributes { state: Some(state), ..QueuePairAttributes::default() }
}

fn connect(own: &End, peer: &End) {
    let address: IpAddr = peer.device.address();
    let access = Some(Access::REMOTE_WRITE);
    let steps = [
        QueuePairAttributes { access, ..change(QueuePairState::Initialized) },
        QueuePairAttributes {
            remote_address: Some(address),
            path_mtu: Some(own.device.path_mtu(address).unwrap()),
            destination_qpn: Some(peer.pair.number()),
            receive_psn: Some(Psn::new(0)),
            responder_resources: Some(1),
            minimum_rnr_timer: Some(12),
            ..change(QueuePairState::ReadyToReceive)
        },
        QueuePairAttributes {
            send_psn: Some(Psn::new(0)),
            timeout: Some(14),
            retry_count: Some(7),
            rnr_retry: Some(7),
            initiator_depth: Some(1),
            ..change(QueuePairState::ReadyToSend)
        },
    ];
    steps.iter().for_each(|step| own.pair.modify(step).unwrap());
}

#[test]
fn memory_can_go_after_a_reset() {
    let [own, peer] = [open(1), open(2)];
    let (source, target) = (Mapping::new(), Mapping::new());
    // SAFETY: both stay mapped; while the source is inaccessible no queue pair reads it, which is what
    // this is about, and a kernel that is asked to anyway refuses.
    let [from, to] = [(&own, &source), (&peer, &target)].map(|(end, mapping)| unsafe {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        end.domain.register_memory(mapping.0, LENGTH, access).unwrap()
    });
    let (remote_address, remote_key) = (to.address(), to.remote_key());
    let operation = SendOperation::Write { remote_address, remote_key, immediate: None };
    let piece = Piece { key: from.key(), address: from.address(), length: LENGTH as u32 };
    for round in 0..300_u64 {
        for end in [&own, &peer] {
            end.pair.modify(&change(QueuePairState::Reset)).unwrap();
        }
        connect(&own, &peer);
        connect(&peer, &own);
        let sent = || own.device.driver_counters().sent_datagrams;
        let before = sent();
        own.pair.post_send(&[SendRequest::new(round, operation, [piece]); 8]).unwrap();
        // The device's own thread sends most of it.
        while sent() < before + 1 + round % 16 {
            thread::yield_now();
        }
        own.pair.modify(&change(QueuePairState::Reset)).unwrap();
        source.protect(libc::PROT_NONE);
        // Another lock of the device: what was being sent has been.
        assert_eq!(own.pair.state(), QueuePairState::Reset);
        thread::yield_now();
        source.protect(libc::PROT_READ | libc::PROT_WRITE);
        // It must not overrun.
        own.completions.poll(&mut Vec::new(), 256);
    }
    assert_eq!(own.device.failure(), None);
    assert_eq!(own.device.driver_counters().unsent_datagrams, 0);
}
