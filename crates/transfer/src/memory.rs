//! Registered memory: what a caller promises to leave in place, and copies to and from it.

#![allow(unsafe_code)]

mod gathered;
mod region;
mod unregistering;

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, RwLockWriteGuard};

use millstream_net::cuda::Gpu;
use millstream_net::guarded::{self, Caching};
use millstream_net::shared_memory::{
    AccessError, Offer, Registration as OfferedMemory, SharedMemory, TableFull, Visit,
};
use millstream_net::stream;
use millstream_transfer_core::Borders;
use millstream_verbs::{Access, GpuMemoryError, MemoryRegion, ProtectionDomain};

pub(crate) use self::gathered::Gathered;
pub(crate) use self::region::Region;
pub(crate) use self::unregistering::Unregistering;
use crate::gate::{Gate, Pass};
use crate::gpu::{self, Exchanged};
use crate::keys::Keys;
use crate::pieces::Span;
use crate::regions::RegionMap;
use crate::transport::ANYWHERE;
use crate::{FailureReason, Opcode, RegisterError, TransferEngine};

/// Memory that stays valid as long as this value, by the promise made to [`RawMemory::new`].
#[derive(Debug)]
pub(crate) struct RawMemory {
    pointer: *mut u8,
    length: usize,
    /// What it is of, if processes can map it.
    shared: Option<Arc<SharedMemory>>,
    /// By the caller, who may take it away.
    brought: bool,
    /// The GPU whose memory it is, if it is one's. Nobody follows the pointer then.
    gpu: Option<Arc<Gpu>>,
}

// SAFETY: the promise made to `new` holds on every thread, and what the methods do with the memory
// is what a device would do.
unsafe impl Send for RawMemory {}
// SAFETY: as above.
unsafe impl Sync for RawMemory {}

impl RawMemory {
    /// # Safety
    /// As long as the value or a [`MemoryRegion`] made from it lives, the bytes must stay mapped and
    /// writable, and no reference may be held to them that conflicts with reading or writing them
    /// at any time, from any thread.
    pub(crate) unsafe fn new(
        pointer: *mut u8,
        length: usize,
        shared: Option<Arc<SharedMemory>>,
    ) -> Self {
        Self { pointer, length, shared, brought: false, gpu: None }
    }

    /// # Safety
    /// As of `new`, but for bytes that are not mapped any more, where faults are handled.
    unsafe fn brought(pointer: *mut u8, length: usize) -> Self {
        handle_faults();
        // SAFETY: the caller promises it.
        Self { brought: true, ..unsafe { Self::new(pointer, length, None) } }
    }

    #[cfg(test)]
    pub(crate) fn of(bytes: &'static [std::sync::atomic::AtomicU8]) -> Self {
        // SAFETY: they stay for ever, and references to atomic bytes exclude no access.
        unsafe { Self::new(bytes.as_ptr().cast_mut().cast(), bytes.len(), None) }
    }

    /// Whether it is the caller's, and not the engine's own.
    pub(crate) fn is_brought(&self) -> bool {
        self.brought
    }

    /// It is memory of this GPU.
    pub(crate) fn set_gpu(&mut self, gpu: Arc<Gpu>) {
        self.gpu = Some(gpu);
    }

    pub(crate) const fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.gpu.as_ref()
    }

    pub(crate) fn address(&self) -> u64 {
        self.pointer.expose_provenance() as u64
    }

    pub(crate) fn length(&self) -> u64 {
        self.length as u64
    }

    /// Registers a part of it with a device, by the offsets of its first byte and of the one after it.
    pub(crate) fn register(
        &self,
        part: Range<u64>,
        domain: &ProtectionDomain,
        access: Access,
    ) -> Result<MemoryRegion, GpuMemoryError> {
        let end = (part.end as usize).min(self.length);
        let start = (part.start as usize).min(end);
        if let Some(gpu) = &self.gpu {
            let address = self.address() + start as u64;
            // SAFETY: as below.
            return unsafe { domain.register_gpu_memory(gpu, address, end - start, access) };
        }
        let pointer = self.pointer.wrapping_add(start);
        // SAFETY: it is within the memory, and this is what `new` asked its caller to promise; the caller
        // there keeps the region with the value (`Region`), and drops the region first.
        Ok(unsafe { domain.register_memory(pointer, end - start, access) }?)
    }

    /// Offers it to other processes.
    pub(crate) fn offer(&self, offer: &Offer) -> Result<OfferedMemory, TableFull> {
        offer.register(self.address(), self.length(), self.shared.as_ref())
    }
}

/// Registered memory as those who copy know it. It outlives the registration, but nobody can enter it
/// then.
#[derive(Debug)]
pub(crate) struct LocalMemory {
    pointer: *mut u8,
    first: u64,
    length: u64,
    gpu: Option<Arc<Gpu>>,
    /// The keys of each transport.
    keys: Box<[Keys]>,
    /// From which offset on it is at which location, by the number of the transport that has keys.
    locations: Box<[(u64, u16)]>,
    gate: Arc<Gate>,
}

// SAFETY: the memory is accessed only by who has entered, and `Region` sees to it that it is there as
// long as somebody is inside.
unsafe impl Send for LocalMemory {}
// SAFETY: as above.
unsafe impl Sync for LocalMemory {}

impl LocalMemory {
    /// Its addresses.
    pub(crate) const fn span(&self) -> Span {
        Span { first: self.first, length: self.length }
    }

    /// Whether all of `length` bytes from `address` on lie in it.
    pub(crate) fn contains(&self, address: u64, length: u64) -> bool {
        address
            .checked_sub(self.first)
            .is_some_and(|offset| offset.checked_add(length).is_some_and(|end| end <= self.length))
    }

    /// The number of the location of an address in it, for the transport that has keys.
    pub(crate) fn location(&self, address: u64) -> u16 {
        let offset = address.saturating_sub(self.first);
        let after = self.locations.partition_point(|(start, _)| *start <= offset);
        after.checked_sub(1).map_or(ANYWHERE, |index| self.locations[index].1)
    }

    /// Whether a transport was asked to register it: one that was installed since was not.
    pub(crate) fn is_known_to(&self, transport: usize) -> bool {
        transport < self.keys.len()
    }

    /// The keys of an address in it for the devices of a transport.
    pub(crate) fn keys(&self, transport: usize, address: u64) -> &[u32] {
        let offset = address.saturating_sub(self.first);
        self.keys.get(transport).map_or(&[], |keys| keys.at(offset))
    }

    /// What work requests of a transport do not go across.
    pub(crate) fn borders(&self, transport: usize) -> Borders {
        self.keys.get(transport).map_or(Borders::NONE, |keys| keys.borders(self.first))
    }

    /// Whether it is memory of a GPU, which the processor does not touch.
    pub(crate) const fn is_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// Whether it is being unregistered.
    pub(crate) fn is_closed(&self) -> bool {
        self.gate.is_closed()
    }

    /// Keeps it registered as long as the result lives. `None` when it is not any more.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        self.gate.enter().map(|pass| Inside { memory: self, _pass: pass })
    }
}

/// Registered memory that stays registered.
#[derive(Debug)]
pub(crate) struct Inside<'a> {
    memory: &'a LocalMemory,
    _pass: Pass<'a>,
}

impl Inside<'_> {
    /// Whether it has this byte.
    pub(crate) fn has(&self, address: u64) -> bool {
        self.memory.contains(address, 1)
    }

    pub(crate) fn contains(&self, address: u64, length: u64) -> bool {
        self.memory.contains(address, length)
    }

    pub(crate) fn gpu(&self) -> Option<&Gpu> {
        self.memory.gpu.as_deref()
    }

    /// Where bytes of it are; `None` when they are not in it, or it is memory of a GPU.
    pub(crate) fn pointer(&self, address: u64, length: u64) -> Option<*mut u8> {
        let LocalMemory { pointer, first, .. } = *self.memory;
        let found = self.memory.contains(address, length) && !self.memory.is_gpu();
        found.then(|| pointer.wrapping_add((address - first) as usize))
    }

    /// Copies `length` bytes to an address in the other memory, which may be the same and may overlap.
    #[inline]
    pub(crate) fn copy_to(
        &self,
        from: u64,
        other: &Self,
        to: u64,
        length: u64,
        caching: Caching,
    ) -> Result<(), FailureReason> {
        let (Some(from), Some(to)) = (self.pointer(from, length), other.pointer(to, length)) else {
            return self.copy_elsewhere(from, other, to, length);
        };
        let overlap =
            caching == Caching::Around && from.addr().abs_diff(to.addr()) < length as usize;
        let caching = if overlap { Caching::Through } else { caching };
        // SAFETY: both ranges are in registered memory, which stays valid while it is entered.
        unsafe { guarded::copy(from, to, length as usize, caching) }
            .map_err(|fault| FailureReason::MemoryGone { address: fault.address })
    }

    /// [`Inside::copy_to`] of what the processor does not copy.
    #[cold]
    fn copy_elsewhere(
        &self,
        from: u64,
        other: &Self,
        to: u64,
        length: u64,
    ) -> Result<(), FailureReason> {
        match self.memory.is_gpu() || other.memory.is_gpu() {
            true => gpu::copy((self, from), (other, to), length),
            false => Err(FailureReason::Unregistered),
        }
    }

    /// Copies ranges of one length, [`guarded::TOGETHER`] at most, to addresses in the other memory, which may be the same,
    /// around the caches; whether it did. It does not where one of them is not in its memory or overlaps where it goes,
    /// and after a fault, when any part of them may have been copied. A [`guarded::fence`] must follow, before
    /// anybody is told.
    pub(crate) fn copy_together_to(
        &self,
        other: &Self,
        ranges: impl ExactSizeIterator<Item = (u64, u64)>,
        length: u64,
    ) -> bool {
        let count = ranges.len();
        let mut places = [(ptr::null(), ptr::null_mut()); guarded::TOGETHER];
        for (place, (from, to)) in places.iter_mut().zip(ranges) {
            let (Some(from), Some(to)) = (self.pointer(from, length), other.pointer(to, length))
            else {
                return false;
            };
            if from.addr().abs_diff(to.addr()) < length as usize {
                return false;
            }
            *place = (from.cast_const(), to);
        }
        let Some(places) = places.get(..count) else { return false };
        // SAFETY: as in `copy_to`. Pieces that overlap each other have no order.
        unsafe { guarded::copy_together(places, length as usize).is_ok() }
    }

    /// [`Visit::copy_together`] for ranges in the memory, with its fence to follow.
    pub(crate) fn exchange_together(
        &self,
        opcode: Opcode,
        visit: &Visit<'_>,
        ranges: impl ExactSizeIterator<Item = (u64, u64)>,
        length: u64,
    ) -> bool {
        let count = ranges.len();
        let mut places = [(ptr::null_mut(), 0); guarded::TOGETHER];
        for (place, (near, far)) in places.iter_mut().zip(ranges) {
            let Some(here) = self.pointer(near, length) else { return false };
            *place = (here, far);
        }
        let Some(places) = places.get(..count) else { return false };
        // SAFETY: the ranges are in registered memory, which stays valid while it is entered.
        unsafe { visit.copy_together(opcode == Opcode::Write, places, length as usize) }
    }

    /// Sends `before`, bytes of the memory and `after` to a stream, as [`stream::send`] does.
    pub(crate) fn send(
        &self,
        stream: BorrowedFd<'_>,
        before: &[u8],
        (address, length): (u64, u64),
        after: &[u8],
    ) -> io::Result<usize> {
        let pointer = self.pointer(address, length).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range is in registered memory, which stays valid while it is entered.
        unsafe { stream::send(stream, before, pointer, length as usize, after) }
    }

    /// Receives bytes of a stream into the memory, as [`stream::receive`] does.
    pub(crate) fn receive(
        &self,
        stream: BorrowedFd<'_>,
        address: u64,
        length: u64,
    ) -> io::Result<usize> {
        let pointer = self.pointer(address, length).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: as in `send`.
        unsafe { stream::receive(stream, pointer, length as usize) }
    }

    /// Fills `bytes` from the memory; `false` when they are not in it, or it is gone.
    pub(crate) fn copy_out(&self, address: u64, bytes: &mut [u8]) -> bool {
        if let Some(gpu) = self.gpu() {
            return gpu::stage_out((self, gpu), address, bytes);
        }
        let Some(from) = self.pointer(address, bytes.len() as u64) else { return false };
        // SAFETY: as in `send`; nobody else has `bytes`.
        unsafe { guarded::copy(from, bytes.as_mut_ptr(), bytes.len(), Caching::Through) }.is_ok()
    }

    /// Copies `bytes` into the memory; `false` when they do not fit there, or it is gone.
    pub(crate) fn copy_in(&self, address: u64, bytes: &[u8]) -> bool {
        if let Some(gpu) = self.gpu() {
            return gpu::stage_in((self, gpu), address, bytes);
        }
        let Some(to) = self.pointer(address, bytes.len() as u64) else { return false };
        // SAFETY: as in `send`; nobody writes to `bytes`.
        unsafe { guarded::copy(bytes.as_ptr(), to, bytes.len(), Caching::Through) }.is_ok()
    }

    /// Copies `length` bytes to (a WRITE) or from (a READ) an address of a peer.
    pub(crate) fn exchange(
        &self,
        opcode: Opcode,
        address: u64,
        visit: &Visit<'_>,
        target: u64,
        length: u64,
        caching: Caching,
    ) -> Result<(), Exchanged> {
        if let Some(gpu) = self.gpu() {
            return gpu::exchange((self, gpu), opcode, address, (visit, target), length);
        }
        let pointer = self.pointer(address, length);
        let pointer = pointer.ok_or(Exchanged::Access(AccessError::Unregistered))?;
        // SAFETY: the range is in registered memory, which stays valid while it is entered.
        let exchanged = unsafe {
            match opcode {
                Opcode::Write => visit.write(pointer, target, length as usize, caching),
                Opcode::Read => visit.read(pointer, target, length as usize, caching),
            }
        };
        exchanged.map_err(Exchanged::Access)
    }
}

/// All registered memory of an engine.
#[derive(Default)]
pub(crate) struct Memory {
    /// `None` while it is being registered or unregistered.
    pub(crate) regions: RwLock<RegionMap<Option<Region>>>,
    /// Of those who wait until it is not any more. Before `regions`, where both are locked.
    waiting: Mutex<()>,
    settled: Condvar,
}

impl Memory {
    pub(crate) fn lock(&self) -> RwLockWriteGuard<'_, RegionMap<Option<Region>>> {
        self.regions.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many pieces there are, and their bytes.
    pub(crate) fn registered(&self) -> (u64, u64) {
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let all = regions.iter();
        all.fold((0, 0), |(count, bytes), (_, length, _)| (count + 1, bytes + length))
    }

    /// What holds all of these bytes.
    pub(crate) fn find(&self, address: u64, length: u64) -> Option<Arc<LocalMemory>> {
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let (_, region) = regions.find(address, length)?;
        let region = region.as_ref()?;
        (!region.local.is_closed()).then(|| Arc::clone(&region.local))
    }

    /// What holds all of these bytes, and is offered to peers.
    pub(crate) fn find_offered(&self, address: u64, length: u64) -> Option<Arc<LocalMemory>> {
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let (_, region) = regions.find(address, length)?;
        let region = region.as_ref()?;
        region.is_offered().then(|| Arc::clone(&region.local))
    }
}

impl TransferEngine {
    /// Registers memory, so that transfers can use it and, if it is `remote_accessible`, peers can
    /// read and write it. `location` names where it is (`cpu:0`); `"*"` leaves that open.
    ///
    /// Installs a handler of SIGSEGV and SIGBUS, which passes on what does not concern it. When memory is
    /// unmapped or protected while it is registered, or its file becomes shorter, requests that touch it
    /// fail, and the process goes on; others are served. That is so on x86-64, for `local`, `shm` and soft
    /// devices, as long as nobody installs a handler that does not call the one of before. Devices of the
    /// system keep the pages that they were given.
    ///
    /// # Safety
    /// Until [`TransferEngine::unregister_memory`] has returned for it, or the engine and all its
    /// buffers have been dropped, nothing else may be mapped there, and no Rust reference
    /// may be held to the bytes that conflicts with what transfers and peers do: peers read and write at
    /// any time. Where faults are not handled (see above), the bytes must stay mapped and writable.
    /// [`TransferEngine::allocate_buffer`] needs no such promise.
    pub unsafe fn register_memory(
        &self,
        address: *mut u8,
        length: usize,
        location: &str,
        remote_accessible: bool,
    ) -> Result<(), RegisterError> {
        // SAFETY: the caller promises it.
        let memory = unsafe { RawMemory::brought(address, length) };
        self.inner.register(vec![memory], location, remote_accessible)
    }

    /// Registers several pieces of memory, each given by its address and length, as
    /// [`TransferEngine::register_memory`] does. All or none: when one of them cannot be registered, none
    /// is. Peers see all of them at once.
    ///
    /// # Safety
    /// As of [`TransferEngine::register_memory`], for each of them.
    pub unsafe fn register_memory_batch(
        &self,
        pieces: &[(*mut u8, usize)],
        location: &str,
        remote_accessible: bool,
    ) -> Result<(), RegisterError> {
        // SAFETY: the caller promises it.
        let memory = |&(address, length)| unsafe { RawMemory::brought(address, length) };
        self.inner.register(pieces.iter().map(memory).collect(), location, remote_accessible)
    }
}

/// What a caller brought may be gone when it is needed.
fn handle_faults() {
    if let Err(error) = guarded::recover() {
        tracing::warn!(%error, "registered memory must not be unmapped: no signal handler");
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::placement::pretended;
    use crate::{Config, RdmaConfig, SegmentId, TransferRequest};

    #[test]
    fn memory_of_the_caller() {
        let engine = TransferEngine::new(Config::new("127.0.0.1".parse().unwrap())).unwrap();
        let mut memory = vec![0u8; 3000].into_boxed_slice();
        memory[..1000].fill(5);
        let pointer = memory.as_mut_ptr();
        let part = |offset: usize| pointer.wrapping_add(offset);
        let register = |offset, length| {
            // SAFETY: `memory` is not used otherwise until all of it has been unregistered.
            unsafe { engine.register_memory(part(offset), length, "cpu:0", true) }
        };
        register(0, 1000).unwrap();
        register(1000, 2000).unwrap();
        assert_eq!(register(0, 1000).unwrap_err().code(), -7);
        assert_eq!(register(999, 1).unwrap_err().code(), -7);
        assert_eq!(register(0, 0).unwrap_err().code(), -1);
        let address = |offset| part(offset).expose_provenance() as u64;
        let request = TransferRequest {
            opcode: Opcode::Write,
            source: address(0),
            target: SegmentId::LOCAL,
            target_offset: address(1500),
            length: 1000,
        };
        engine.submit_and_wait(&[request], Duration::from_secs(60)).unwrap();
        let across = TransferRequest { length: 1001, ..request };
        let error = engine.submit_and_wait(&[across], Duration::from_secs(60)).unwrap_err();
        assert_eq!(error.code(), -3, "two pieces are not one: {error}");
        engine.unregister_memory(part(0)).unwrap();
        assert_eq!(engine.unregister_memory(part(0)).unwrap_err().code(), -3);
        engine.unregister_memory(part(1000)).unwrap();
        assert!(memory[1500..2500].iter().all(|&byte| byte == 5));
        assert!(memory[2500..].iter().all(|&byte| byte == 0));
    }

    /// A piece of memory on two nodes is two buffers for peers, and one for requests.
    #[test]
    fn memory_on_two_nodes() {
        const LENGTH: usize = 300_000;
        let address = |last| [127, 98, std::process::id() as u8, last].into();
        let engine = |last, shm: bool| {
            let engine = TransferEngine::new(Config::new(address(last))).unwrap();
            match shm {
                true => engine.install_shm().unwrap(),
                false => engine.install_rdma(RdmaConfig::new(&[address(last)])).unwrap(),
            }
            engine
        };
        pretended::set(vec![(0, Some(1)), (100_000, Some(0)), (200_000, Some(1))]);
        for shm in [false, true] {
            let (target, initiator) = (engine(1, shm), engine(2, shm));
            let remote = target.allocate_buffer(LENGTH, "*", true).unwrap();
            let local = initiator.allocate_buffer(LENGTH, "*", false).unwrap();
            let bytes: Vec<u8> = (0..LENGTH).map(|index| (index / 1000) as u8).collect();
            local.write(0, &bytes).unwrap();
            let segment = initiator.open_segment(target.name()).unwrap();
            let seen: Vec<_> =
                segment.buffers().into_iter().map(|it| (it.length, it.location)).collect();
            let expected = ["cpu:1", "cpu:0", "cpu:1"].map(|it| (100_000, it.to_owned()));
            assert_eq!(seen, expected);
            let request = TransferRequest {
                opcode: Opcode::Write,
                source: local.address(),
                target: segment.id(),
                target_offset: remote.address(),
                length: LENGTH as u64,
            };
            initiator.submit_and_wait(&[request], Duration::from_secs(60)).unwrap();
            let mut found = vec![0; LENGTH];
            remote.read(0, &mut found).unwrap();
            assert!(found == bytes);
            let beyond = TransferRequest { target_offset: remote.address() + 1, ..request };
            assert!(initiator.submit_and_wait(&[beyond], Duration::from_secs(60)).is_err());
        }
    }
}
