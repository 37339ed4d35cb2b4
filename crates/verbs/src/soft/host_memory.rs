//! The memory of a process as an endpoint sees it: regions that the application registered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use millstream_net::cuda::Gpu;
use millstream_net::guarded::{self, Caching};
use millstream_net::prefetch;
use millstream_roce::{
    Access, AccessDenied, AtomicOperation, Destination, Memory, Piece, ProtectionDomainId, Region,
    RegionError, RegionTable, RemoteAccess,
};

use super::staging::{GpuStaging, Staging};

/// Registered regions of this process. A region's virtual address is its real address.
///
/// Soundness rests on one promise, made by whoever registers a region (see
/// [`crate::ProtectionDomain::register_memory`]): its bytes stay mapped, and are not accessed in
/// ways that exclude others, until it is deregistered. Where the process recovers from faults
/// ([`guarded::recover`]), memory that is unmapped before fails what needs it, as if it were not registered.
///
/// Regions of GPUs are among them, whose bytes go through pinned memory ([`Staging`]).
#[derive(Debug)]
pub(crate) struct HostMemory {
    regions: RegionTable<Backing>,
    staging: Staging,
}

/// What lies behind a region.
#[derive(Clone, Debug)]
struct Backing {
    invalidation: Invalidation,
    /// The index of the GPU that it is memory of, in [`Staging`]; `None` for memory of the host.
    gpu: Option<usize>,
}

/// Whether remotes have lost their access to a region, for all shards that have it: a table alone
/// knows only what came to its own shard. Nothing where there is one shard, or remotes may not do so.
#[derive(Clone, Debug)]
pub(super) struct Invalidation(Option<Arc<AtomicBool>>);

impl Invalidation {
    pub(super) fn new(access: Access, shards: usize) -> Self {
        let needed = shards > 1 && access.contains(Access::REMOTE_INVALIDATE);
        Self(needed.then(Arc::default))
    }

    fn has_happened(&self) -> bool {
        self.0.as_ref().is_some_and(|invalidated| invalidated.load(Ordering::SeqCst))
    }
}

impl HostMemory {
    pub(super) fn new(capacity: usize, seed: u64) -> Self {
        Self { regions: RegionTable::new(capacity, seed), staging: Staging::default() }
    }

    /// # Safety
    /// Until [`HostMemory::deregister`], the `length` bytes at `address` must stay mapped, writable
    /// if `access` grants any kind of writing, and must not be borrowed by Rust code in conflict
    /// with what remotes and work requests do to them.
    pub(super) unsafe fn register(
        &mut self,
        domain: ProtectionDomainId,
        address: u64,
        length: u64,
        access: Access,
        invalidation: Invalidation,
    ) -> Result<u32, RegionError> {
        let backing = Backing { invalidation, gpu: None };
        self.regions.register(domain, address, length, access, backing)
    }

    /// Whether memory of this GPU can be registered without anything being opened.
    pub(super) fn knows(&self, gpu: &Arc<Gpu>) -> bool {
        self.staging.index(gpu).is_some()
    }

    /// As [`HostMemory::register`], memory of a GPU, for which `opened` is there unless it is known.
    ///
    /// # Safety
    /// Until [`HostMemory::deregister`], the range must be meant when its bytes are read and written: what is
    /// freed and allocated again there is.
    #[expect(clippy::too_many_arguments, reason = "as of `register`, and what it takes")]
    pub(super) unsafe fn register_gpu(
        &mut self,
        domain: ProtectionDomainId,
        address: u64,
        length: u64,
        access: Access,
        invalidation: Invalidation,
        gpu: &Arc<Gpu>,
        opened: &mut Option<GpuStaging>,
    ) -> Result<u32, RegionError> {
        let known = self.staging.index(gpu);
        let index = known.or_else(|| opened.take().map(|opened| self.staging.add(opened)));
        debug_assert!(index.is_some(), "GPUs that are known are not forgotten");
        let backing = Backing { invalidation, gpu: index };
        self.regions.register(domain, address, length, access, backing)
    }

    /// As [`RegionTable::check`], and whether another shard has taken the remotes' access away.
    fn check(
        &self,
        domain: ProtectionDomainId,
        key: u32,
        address: u64,
        length: u64,
        right: Access,
    ) -> Result<&Region<Backing>, AccessDenied> {
        let region = self.regions.check(domain, key, address, length, right)?;
        if right != Access::LOCAL_WRITE && region.backing.invalidation.has_happened() {
            return Err(AccessDenied::Protection);
        }
        Ok(region)
    }

    pub(super) fn deregister(&mut self, key: u32) -> Result<(), RegionError> {
        debug_assert!(self.staging.is_flushed(), "nothing is collected when the endpoint rests");
        self.regions.deregister(key).map(drop)
    }
}

impl Memory for HostMemory {
    fn authorize(&mut self, access: &RemoteAccess) -> Result<(), AccessDenied> {
        let RemoteAccess { domain, key, address, length, .. } = *access;
        self.check(domain, key, address, length.into(), access.right()).map(drop)
    }

    fn write(&mut self, destination: &Destination, payload: &[u8]) -> Result<(), AccessDenied> {
        let (domain, key, address, right) = destination.place();
        // Checked for each packet: the region may have gone since the message began.
        let region = self.check(domain, key, address, payload.len() as u64, right)?;
        if let Some(gpu) = region.backing.gpu {
            // SAFETY: `check` found the range inside a registered region of this GPU. The endpoint flushes
            // before it rests, and regions are deregistered when it does.
            return unsafe { self.staging.write(gpu, key, address, payload) };
        }
        // SAFETY: `check` found the whole range inside a registered region that grants writing;
        // `register`'s caller promised that such bytes are mapped and writable. `payload` lies in
        // the driver's receive buffer, which is not registered, so the two do not overlap.
        unsafe {
            let target = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
            guarded::copy(payload.as_ptr(), target, payload.len(), Caching::Through)
                .map_err(|_| AccessDenied::Protection)?;
            if destination.goes_on(payload.len()) {
                prefetch(target.wrapping_add(payload.len()), payload.len());
            }
        }
        Ok(())
    }

    fn expect(&self, key: u32, address: u64, length: u64) {
        // A remote has nothing loaded but what is registered.
        if let Some(region) = self.regions.get(key)
            && region.backing.gpu.is_none()
            && region.offset(address, length).is_some()
        {
            prefetch(std::ptr::without_provenance(address as usize), length as usize);
        }
    }

    fn atomic(
        &mut self,
        access: &RemoteAccess,
        operation: AtomicOperation,
    ) -> Result<u64, AccessDenied> {
        let RemoteAccess { domain, key, address, length, .. } = *access;
        let region = self.check(domain, key, address, length.into(), access.right())?;
        if region.backing.gpu.is_some() {
            // Only the GPU could do it.
            return Err(AccessDenied::InvalidRequest);
        }
        let target = std::ptr::with_exposed_provenance_mut::<u64>(access.address as usize);
        if access.length as usize != size_of::<u64>() || !target.is_aligned() {
            return Err(AccessDenied::InvalidRequest);
        }
        // SAFETY: as below.
        unsafe { guarded::probe_write(target.cast(), size_of::<u64>()) }
            .map_err(|_| AccessDenied::Protection)?;
        // SAFETY: `authorize` found these 8 bytes inside a registered region that grants atomic
        // operations; `register`'s caller promised that such bytes are mapped and writable, and not
        // accessed in conflict. The pointer is aligned.
        let value = unsafe { AtomicU64::from_ptr(target) };
        Ok(match operation {
            AtomicOperation::CompareSwap { compare, swap } => value
                .compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst)
                .unwrap_or_else(|other| other),
            AtomicOperation::FetchAdd { add } => value.fetch_add(add, Ordering::SeqCst),
        })
    }

    fn invalidate(&mut self, domain: ProtectionDomainId, key: u32) -> Result<(), AccessDenied> {
        self.regions.invalidate(domain, key)?;
        if let Some(region) = self.regions.get(key)
            && let Invalidation(Some(invalidated)) = &region.backing.invalidation
        {
            // On another shard it may have been done already.
            if invalidated.swap(true, Ordering::SeqCst) {
                return Err(AccessDenied::Protection);
            }
        }
        Ok(())
    }

    fn is_flushed(&self) -> bool {
        self.staging.is_flushed()
    }

    fn flush(&mut self) -> Result<(), AccessDenied> {
        self.staging.flush()
    }

    fn stage(&mut self, piece: &Piece, following: u64) -> Result<(), AccessDenied> {
        let (region, offset) = self.regions.locate(piece)?;
        let Some(gpu) = region.backing.gpu else { return self.bytes(piece).map(drop) };
        let rest = region.length - offset - u64::from(piece.length);
        // SAFETY: all of it is inside a registered region of this GPU.
        unsafe { self.staging.stage(gpu, piece, following.min(rest)) }
    }

    fn unstage(&mut self) {
        self.staging.unstage();
    }

    fn bytes(&self, piece: &Piece) -> Result<&[u8], AccessDenied> {
        let (region, _) = self.regions.locate(piece)?;
        if let Some(gpu) = region.backing.gpu {
            return self.staging.bytes(gpu, piece);
        }
        let source = std::ptr::with_exposed_provenance::<u8>(piece.address as usize);
        let length = piece.length as usize;
        // Who makes a packet of it probes it then, when it has been prefetched. What that finds is told
        // here, when the packet is made again.
        if guarded::has_faulted() {
            // SAFETY: as below.
            unsafe { guarded::probe(source, length) }.map_err(|_| AccessDenied::Protection)?;
        }
        // SAFETY: the range lies inside a registered region, which its owner keeps mapped. Others
        // may write to it meanwhile, as with any RDMA source: what is sent is then unspecified, and
        // the receiver's ICRC check drops a packet whose bytes changed while it was made. The
        // slice is used only to compute a checksum and to be copied by the kernel.
        Ok(unsafe { std::slice::from_raw_parts(source, length) })
    }

    fn check_local(
        &self,
        domain: ProtectionDomainId,
        piece: &Piece,
        write: bool,
    ) -> Result<(), AccessDenied> {
        self.regions.check_local(domain, piece, write)
    }
}
