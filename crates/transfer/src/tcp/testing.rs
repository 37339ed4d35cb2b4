//! Memory and tasks of unit tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

use millstream_metadata::{Resolver, SegmentDesc};

use super::TcpConfig;
use super::flow::{Flow, Framing, Origin};
use super::peer::{Peer, Place};
use crate::batch::Batch;
use crate::memory::{LocalMemory, RawMemory, Region};
use crate::segment::{OpenSegment, SegmentTable};
use crate::slicing::Slicing;
use crate::task::TaskHandle;
use crate::terms::Terms;
use crate::{Opcode, SegmentId, TransferRequest};

/// Memory that is registered as long as this lives, and stays for ever.
pub(crate) struct Room {
    bytes: &'static [AtomicU8],
    region: Option<Region>,
    pub(crate) local: Arc<LocalMemory>,
}

impl Room {
    pub(crate) fn new(length: usize) -> Self {
        let bytes: Vec<AtomicU8> = (0..length).map(|_| AtomicU8::new(0)).collect();
        let bytes: &'static [AtomicU8] = bytes.leak();
        let memory = RawMemory::of(bytes);
        let region = Region::new(Vec::new(), None, memory, Vec::new(), Box::new([]), true);
        let local = Arc::clone(&region.local);
        Self { bytes, region: Some(region), local }
    }

    pub(crate) fn unregister(&mut self) {
        self.region = None;
    }

    pub(crate) fn address(&self) -> u64 {
        self.local.span().first
    }

    pub(crate) fn contents(&self) -> Vec<u8> {
        self.bytes.iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }
}

/// Tasks of these lengths, each at an address of the peer that is 1 MiB times its number.
pub(crate) fn tasks(opcode: Opcode, source: u64, lengths: &[u64]) -> (Batch, Vec<TaskHandle>) {
    with_deadline(opcode, source, lengths, None)
}

pub(crate) fn with_deadline(
    opcode: Opcode,
    source: u64,
    lengths: &[u64],
    deadline: Option<Instant>,
) -> (Batch, Vec<TaskHandle>) {
    let batch = Batch::new(lengths.len(), Slicing::new(1024, 4), true, &Arc::default()).unwrap();
    for (index, &length) in lengths.iter().enumerate() {
        let (target, target_offset) = (SegmentId::LOCAL, (index as u64) << 20);
        let request = TransferRequest { opcode, source, target, target_offset, length };
        batch.shared.tasks.get(index).start(&request, &batch.shared.slicing, deadline);
    }
    batch.shared.added(lengths.len());
    let handles = (0..lengths.len()).map(|index| batch.task(index).unwrap()).collect();
    (batch, handles)
}

/// Has a flow take these tasks of one batch, between this memory and a segment; their names.
pub(super) fn push(flow: &mut Flow, room: &Room, tasks: &[TaskHandle]) -> Vec<u64> {
    let (batch, local) = (Arc::clone(&tasks[0].batch), Arc::clone(&room.local));
    let origin = Origin { batch, local, segment: segment(), terms: Terms::default() };
    let origin = flow.begin(origin, tasks.len());
    tasks.iter().map(|task| flow.push(origin, task.index)).collect()
}

pub(crate) fn segment() -> Arc<OpenSegment> {
    let descriptor = SegmentDesc { name: "a:1".to_owned(), ..SegmentDesc::default() };
    SegmentTable::new(descriptor).by_id(SegmentId::LOCAL).unwrap()
}

/// A peer that is not connected. Its address is for documentation (RFC 5737), and known at once: an answer that comes from
/// a thread would end what tests begin.
pub(super) fn peer() -> Arc<Peer> {
    peer_with(Framing::Numbered)
}

/// The same of one that speaks so.
pub(super) fn peer_with(framing: Framing) -> Arc<Peer> {
    let (name, host) = ("a".to_owned(), "192.0.2.1".to_owned());
    let place =
        Place { name, host, port: 7, framing, checked: false, incarnation: None, relays: false };
    let config = Arc::new(TcpConfig::default());
    let resolver = Resolver::system();
    Peer::new((&segment(), None), place, None, &config, &Arc::default(), &resolver)
}
