//! Memory of GPUs, as an endpoint writes it and sends from it: through pinned memory of the host.
//!
//! What arrives is collected as long as it is for neighbouring bytes of a region, and copied by one call of the driver:
//! before anybody is told that it is there ([`millstream_roce::Memory::flush`]). What is sent is copied
//! ahead of the packet that is made, as far as its request goes and the window reaches. It is kept until the round is sent:
//! whoever posts later has what is in memory then.
//!
//! Both wait for the driver with the endpoint's lock held, since the endpoint decides by the outcome what it
//! tells the peer: some ten microseconds for 64 KiB.

use std::slice;
use std::sync::Arc;

use millstream_net::MAX_ROUND_DATAGRAMS;
use millstream_net::cuda::{CudaError, Gpu, Lane};
use millstream_roce::{AccessDenied, Piece};
use millstream_wire::Mtu;

/// So many bytes are collected at most.
const COLLECTED: usize = 256 << 10;

/// What one round sends at most.
const SENT: usize = MAX_ROUND_DATAGRAMS * Mtu::B4096.bytes();

/// So many bytes of a round are copied ahead of their packets at most; and so many at once.
const AHEAD: usize = 512 << 10;
const AHEAD_AT_ONCE: usize = 256 << 10;

/// What is pinned for one GPU.
#[derive(Debug)]
pub(super) struct GpuStaging {
    gpu: Arc<Gpu>,
    incoming: Box<dyn Lane>,
    outgoing: Box<dyn Lane>,
    chunks: Vec<Chunk>,
    /// Bytes of `outgoing` that are in use, and how many of them were copied ahead.
    used: usize,
    ahead: usize,
}

/// Bytes of a GPU in its `outgoing`.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    address: u64,
    length: usize,
    offset: usize,
}

impl GpuStaging {
    pub(super) fn open(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        Ok(Self {
            gpu: Arc::clone(gpu),
            incoming: gpu.open_lane(COLLECTED)?,
            outgoing: gpu.open_lane(SENT + AHEAD)?,
            chunks: Vec::with_capacity(MAX_ROUND_DATAGRAMS),
            used: 0,
            ahead: 0,
        })
    }

    fn find(&self, address: u64, length: usize) -> Option<&Chunk> {
        self.chunks.iter().rev().find(|chunk| {
            let offset = address.checked_sub(chunk.address);
            offset.is_some_and(|offset| offset + length as u64 <= chunk.length as u64)
        })
    }
}

/// The pinned memory of an endpoint.
#[derive(Debug, Default)]
pub(super) struct Staging {
    /// Of each GPU whose memory was registered; none goes.
    gpus: Vec<GpuStaging>,
    collected: Option<Collected>,
    /// What was collected could not be copied, and nobody has asked yet.
    lost: bool,
}

/// Bytes at the start of a GPU's `incoming`, and where they go.
#[derive(Clone, Copy, Debug)]
struct Collected {
    gpu: usize,
    /// The region: the driver copies to one allocation at a time, and two may be neighbours.
    key: u32,
    address: u64,
    length: usize,
}

impl Staging {
    /// The index of a GPU.
    pub(super) fn index(&self, gpu: &Arc<Gpu>) -> Option<usize> {
        self.gpus.iter().position(|known| Arc::ptr_eq(&known.gpu, gpu))
    }

    /// Keeps what was opened for a GPU; its index.
    pub(super) fn add(&mut self, opened: GpuStaging) -> usize {
        self.gpus.push(opened);
        self.gpus.len() - 1
    }

    pub(super) fn is_flushed(&self) -> bool {
        self.collected.is_none() && !self.lost
    }

    /// # Safety
    /// The target must be memory of the GPU with this index, registered with this key, and stay so until the next flush.
    pub(super) unsafe fn write(
        &mut self,
        gpu: usize,
        key: u32,
        mut address: u64,
        payload: &[u8],
    ) -> Result<(), AccessDenied> {
        for payload in payload.chunks(COLLECTED) {
            let neighbour = |collected: &Collected| {
                (collected.gpu, collected.key) == (gpu, key)
                    && collected.address + collected.length as u64 == address
                    && collected.length + payload.len() <= COLLECTED
            };
            if !self.collected.as_ref().is_some_and(neighbour) {
                self.copy()?;
            }
            let collected =
                self.collected.get_or_insert(Collected { gpu, key, address, length: 0 });
            let to = self.gpus[gpu].incoming.buffer().wrapping_add(collected.length);
            // SAFETY: there is room for it, and nothing is under way there: each copy is waited for.
            // Nobody else has the lane, so that it does not overlap with the payload.
            unsafe { payload.as_ptr().copy_to_nonoverlapping(to, payload.len()) };
            collected.length += payload.len();
            address += payload.len() as u64;
        }
        Ok(())
    }

    /// Copies what was collected. What cannot be copied is lost, of which `flush` tells.
    fn copy(&mut self) -> Result<(), AccessDenied> {
        let Some(Collected { gpu, address, length, .. }) = self.collected.take() else {
            return Ok(());
        };
        let lane = &mut self.gpus[gpu].incoming;
        // SAFETY: `write` was promised that it is registered memory until it is flushed, which is now. The
        // buffer is not changed before it was waited for.
        let begun = unsafe { lane.write(0, address, length) };
        // Also after a failure: nothing is under way afterwards.
        let copied = begun.and(lane.wait());
        copied.map_err(|error| {
            tracing::warn!(%error, address, length, "memory of a GPU cannot be written");
            self.lost = true;
            AccessDenied::Protection
        })
    }

    /// Copies what was collected. Fails too when something collected since the last flush was lost.
    pub(super) fn flush(&mut self) -> Result<(), AccessDenied> {
        let copied = self.copy();
        let lost = std::mem::take(&mut self.lost);
        if lost { Err(AccessDenied::Protection) } else { copied }
    }

    /// Copies the bytes of a piece, and those `following` it, unless they were copied for this round.
    ///
    /// # Safety
    /// All of them must be registered memory of the GPU with this index.
    pub(super) unsafe fn stage(
        &mut self,
        gpu: usize,
        piece: &Piece,
        following: u64,
    ) -> Result<(), AccessDenied> {
        // It may be for the same bytes.
        debug_assert!(self.is_flushed(), "what was collected is flushed before anything is sent");
        let gpu = &mut self.gpus[gpu];
        let (address, needed) = (piece.address, piece.length as usize);
        if gpu.find(address, needed).is_some() {
            return Ok(());
        }
        // The round sends no more packets like this one, and what it does not send is copied again.
        let sent = needed.saturating_mul(MAX_ROUND_DATAGRAMS - 1);
        let room = (AHEAD - gpu.ahead).min(AHEAD_AT_ONCE).min(sent);
        let ahead = usize::try_from(following).unwrap_or(usize::MAX).min(room);
        let (offset, length) = (gpu.used, needed + ahead);
        if offset + length > gpu.outgoing.length() {
            debug_assert!(false, "a round sends no more than SENT bytes");
            return Err(AccessDenied::Protection);
        }
        // SAFETY: the caller promises it; nobody has been given these bytes of the buffer.
        let begun = unsafe { gpu.outgoing.read(address, offset, length) };
        begun.and(gpu.outgoing.wait()).map_err(|error| {
            tracing::warn!(%error, address, length, "memory of a GPU cannot be read");
            AccessDenied::Protection
        })?;
        gpu.chunks.push(Chunk { address, length, offset });
        gpu.used += length;
        gpu.ahead += ahead;
        Ok(())
    }

    /// The bytes of a piece that was staged for this round.
    pub(super) fn bytes(&self, gpu: usize, piece: &Piece) -> Result<&[u8], AccessDenied> {
        let gpu = &self.gpus[gpu];
        let length = piece.length as usize;
        let chunk = gpu.find(piece.address, length).ok_or(AccessDenied::Protection)?;
        let offset = chunk.offset + (piece.address - chunk.address) as usize;
        // SAFETY: within the chunk, which was copied and is not changed before `unstage`, until which nothing
        // else is copied there. The lane lives as long as the endpoint.
        Ok(unsafe { slice::from_raw_parts(gpu.outgoing.buffer().wrapping_add(offset), length) })
    }

    /// Nobody sends any more what was staged.
    pub(super) fn unstage(&mut self) {
        for gpu in &mut self.gpus {
            gpu.chunks.clear();
            (gpu.used, gpu.ahead) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests;
