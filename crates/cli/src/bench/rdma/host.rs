//! One side of a measurement: a soft device, a buffer that requests and the peer use, and queue
//! pairs.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use millstream_net::own_memory::Pages;
use millstream_verbs::{
    Access, Completion, CompletionQueue, CompletionStatus, Device, MemoryRegion, Piece, Psn, Qpn,
    QueuePair, QueuePairAttributes, QueuePairCapabilities, QueuePairOptions, QueuePairState,
    ReceiveRequest, SoftConfig,
};
use serde::{Deserialize, Serialize};

/// The first packet sequence number of both sides.
const PSN: u32 = 0;
const PAGE: usize = 4096;

/// A side. Fields are dropped in this order: the memory last, when no region names it.
pub(super) struct Host {
    pairs: Arc<OnceLock<Vec<QueuePair>>>,
    /// Of each shard, completions of what is posted here; those of receives go to a handler.
    completions: Vec<CompletionQueue>,
    _receives: Vec<CompletionQueue>,
    region: MemoryRegion,
    pub(super) device: Device,
    part: Part,
}

/// Where a host's buffer is, as its peer names it.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Remote {
    pub(super) address: u64,
    pub(super) key: u32,
}

/// A host, as its peer knows it.
pub(super) struct Far {
    pub(super) address: IpAddr,
    /// Of its queue pairs.
    pub(super) numbers: Vec<Qpn>,
    pub(super) max_reads: u8,
}

impl Host {
    /// Opens a device with so many queue pairs, in its shards in turn, each of which holds `depth`
    /// requests, and as many messages of `size` bytes that come, for which room is made again on the
    /// device's own threads.
    pub(super) fn open(
        config: &SoftConfig,
        part: Part,
        size: usize,
        depth: usize,
        queue_pairs: usize,
    ) -> anyhow::Result<Self> {
        let device = Device::open_soft(config)?;
        let domain = device.allocate_protection_domain();
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        // SAFETY: the memory is mapped until the last `Host` that has it is dropped, after its
        // region. There are no references to its bytes: nothing but devices touches them.
        let region = unsafe { domain.register_memory(part.first(), part.length, access) };
        let region = region.context("cannot register memory")?;
        let pairs = Arc::new(OnceLock::new());
        let (mut completions, mut receives) = (Vec::new(), Vec::new());
        for _ in 0..device.shards() {
            completions.push(device.create_completion_queue(2 * depth)?);
            receives.push(device.create_completion_queue_with_handler(
                2 * depth * queue_pairs,
                Box::new(receiver(&pairs, &region, part.length, size)),
            )?);
        }
        let capabilities = QueuePairCapabilities::new(depth, depth);
        let mut new = Vec::with_capacity(queue_pairs);
        for index in 0..queue_pairs {
            let shard = index % device.shards();
            // As the transfer engine's: what is written is the peer's buffer.
            let pair = domain.create_queue_pair_with(&QueuePairOptions {
                receive_completions: &receives[shard],
                split_writes: true,
                shard: Some(shard),
                ..QueuePairOptions::new(&completions[shard], capabilities)
            })?;
            pair.modify(&QueuePairAttributes {
                state: Some(QueuePairState::Initialized),
                access: Some(Access::REMOTE_READ | Access::REMOTE_WRITE),
                ..Default::default()
            })?;
            for slot in 0..depth {
                let request = receive(&region, part.length, size, slot as u64);
                pair.post_receive(&[request]).map_err(|(_, error)| error)?;
            }
            new.push(pair);
        }
        let _ = pairs.set(new);
        Ok(Self { pairs, completions, _receives: receives, region, device, part })
    }

    fn pairs(&self) -> &[QueuePair] {
        self.pairs.get().map_or(&[], Vec::as_slice)
    }

    /// The queue pairs of one shard.
    pub(super) fn pairs_of(&self, shard: usize) -> Vec<&QueuePair> {
        self.pairs().iter().skip(shard).step_by(self.device.shards()).collect()
    }

    pub(super) fn completions_of(&self, shard: usize) -> &CompletionQueue {
        &self.completions[shard]
    }

    pub(super) fn remote(&self) -> Remote {
        Remote { address: self.region.address(), key: self.region.remote_key() }
    }

    /// The `index`th block of `size` bytes of the buffer, which goes round: its offset.
    pub(super) fn offset(&self, size: usize, index: u64) -> u64 {
        offset(self.part.length, size, index)
    }

    pub(super) fn piece(&self, size: usize, index: u64) -> [Piece; 1] {
        piece(&self.region, self.part.length, size, index)
    }

    /// What a peer has to know to connect to it.
    pub(super) fn far(&self) -> Far {
        let max_reads = self.device.attributes().max_reads;
        let numbers = self.pairs().iter().map(QueuePair::number).collect();
        Far { address: self.device.address(), numbers, max_reads }
    }

    /// Connects the queue pairs of both, each to one.
    pub(super) fn connect(&self, peer: &Self) -> anyhow::Result<()> {
        self.connect_to(&peer.far())?;
        peer.connect_to(&self.far())
    }

    /// Connects these queue pairs to a peer's.
    pub(super) fn connect_to(&self, far: &Far) -> anyhow::Result<()> {
        let path_mtu = self.device.path_mtu(far.address)?;
        for (pair, &number) in self.pairs().iter().zip(&far.numbers) {
            pair.modify(&QueuePairAttributes {
                state: Some(QueuePairState::ReadyToReceive),
                remote_address: Some(far.address),
                path_mtu: Some(path_mtu),
                destination_qpn: Some(number),
                receive_psn: Some(Psn::new(PSN)),
                responder_resources: Some(self.device.attributes().max_reads),
                minimum_rnr_timer: Some(1),
                ..Default::default()
            })?;
            pair.modify(&QueuePairAttributes {
                state: Some(QueuePairState::ReadyToSend),
                send_psn: Some(Psn::new(PSN)),
                timeout: Some(17),
                retry_count: Some(7),
                rnr_retry: Some(7),
                initiator_depth: Some(far.max_reads),
                ..Default::default()
            })?;
        }
        Ok(())
    }
}

/// Makes room for another message for each that came.
fn receiver(
    pairs: &Arc<OnceLock<Vec<QueuePair>>>,
    region: &MemoryRegion,
    length: usize,
    size: usize,
) -> impl FnMut(&[Completion]) + Send + use<> {
    // The queue pairs keep the completion queue, and with it this.
    let pairs: Weak<OnceLock<Vec<QueuePair>>> = Arc::downgrade(pairs);
    let (key, address) = (region.key(), region.address());
    let mut next = 0;
    move |completions| {
        let Some(pairs) = pairs.upgrade() else { return };
        let Some(pairs) = pairs.get() else { return };
        for completion in completions {
            if completion.status != CompletionStatus::Success {
                continue;
            }
            let own = |pair: &&QueuePair| pair.number() == completion.qpn;
            let Some(pair) = pairs.iter().find(own) else { continue };
            let at = address + offset(length, size, next);
            let pieces = [Piece { key, address: at, length: size as u32 }];
            next += 1;
            // There is room where one has just completed, unless the pair has failed.
            let _ = pair.post_receive(&[ReceiveRequest { id: 0, pieces }]);
        }
    }
}

fn receive(region: &MemoryRegion, length: usize, size: usize, index: u64) -> ReceiveRequest {
    ReceiveRequest { id: 0, pieces: piece(region, length, size, index) }
}

fn piece(region: &MemoryRegion, length: usize, size: usize, index: u64) -> [Piece; 1] {
    let address = region.address() + offset(length, size, index);
    [Piece { key: region.key(), address, length: size as u32 }]
}

fn offset(length: usize, size: usize, index: u64) -> u64 {
    let blocks = (length / size).max(1) as u64;
    index % blocks * size as u64
}

/// Bytes that no reference exists to.
pub(super) enum Memory {
    Boxed(*mut [u8]),
    Pages(Pages),
}

// SAFETY: it owns the bytes, and nothing but devices touches them.
unsafe impl Send for Memory {}
// SAFETY: as above; a shared reference gives no access to the bytes.
unsafe impl Sync for Memory {}

impl Memory {
    /// Bytes that are not zero: a page of zeros may be shared by all.
    pub(super) fn new(length: usize) -> anyhow::Result<Arc<Self>> {
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(length)
            .with_context(|| format!("there is no memory for a buffer of {length} bytes"))?;
        bytes.resize(length, 0x5a_u8);
        Ok(Arc::new(Self::Boxed(Box::into_raw(bytes.into_boxed_slice()))))
    }

    /// With pages as those of a transfer engine's buffers, for who compares with them.
    pub(super) fn of_pages(length: usize) -> anyhow::Result<Arc<Self>> {
        let pages = Pages::new(length);
        pages
            .map(|pages| Arc::new(Self::Pages(pages)))
            .with_context(|| format!("there is no memory for a buffer of {length} bytes"))
    }

    fn first(&self) -> *mut u8 {
        match self {
            Self::Boxed(bytes) => bytes.cast(),
            Self::Pages(pages) => pages.pointer().as_ptr(),
        }
    }

    fn length(&self) -> usize {
        match self {
            Self::Boxed(bytes) => bytes.len(),
            Self::Pages(pages) => pages.length(),
        }
    }

    /// So many parts of one length, which begin with pages.
    pub(super) fn parts(self: &Arc<Self>, count: usize) -> impl Iterator<Item = Part> {
        let length = part_length(self.length(), count);
        (0..count).map(move |index| Part {
            memory: Arc::clone(self),
            start: index * length,
            length,
        })
    }
}

/// Bytes of each of so many parts.
pub(super) const fn part_length(length: usize, count: usize) -> usize {
    if count == 1 { length } else { length / count / PAGE * PAGE }
}

/// A part of a memory, that one host has.
pub(super) struct Part {
    memory: Arc<Memory>,
    start: usize,
    length: usize,
}

impl Part {
    fn first(&self) -> *mut u8 {
        self.memory.first().wrapping_add(self.start)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Self::Boxed(bytes) = *self {
            // SAFETY: it came from a box in `new`, and this is the only place that frees it.
            drop(unsafe { Box::from_raw(bytes) });
        }
    }
}

/// How soft devices are opened.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Options {
    /// Threads look for work without a pause, instead of sleeping
    #[arg(long)]
    pub(super) busy_poll: bool,
    /// Send every packet as its own datagram
    #[arg(long)]
    pub(super) no_segmentation_offload: bool,
    /// Shards of each device: each has a thread, a socket, and queue pairs of its own, and on the side
    /// that posts a thread that does so
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub(super) shards: u16,
}

impl Options {
    pub(super) fn config(&self, address: IpAddr) -> SoftConfig {
        SoftConfig {
            segmentation_offload: !self.no_segmentation_offload,
            busy_poll: self.busy_poll.then_some(Duration::MAX),
            shards: self.shards.into(),
            ..SoftConfig::new(address)
        }
    }

    /// As arguments of another process.
    pub(super) fn words(&self) -> impl Iterator<Item = String> + use<> {
        let flags = [
            (self.busy_poll, "--busy-poll"),
            (self.no_segmentation_offload, "--no-segmentation-offload"),
        ];
        let flags = flags.into_iter().filter(|(set, _)| *set).map(|(_, flag)| flag.to_owned());
        flags.chain([format!("--shards={}", self.shards)])
    }
}
