//! Protection domains and the memory registered in them.

use std::ptr;
use std::sync::Arc;

use millstream_net::cuda::{CudaError, Gpu};
use millstream_roce::{Access, CreateError, QueuePairCapabilities, RegionError};
use thiserror::Error;

use crate::completion_queue::CompletionQueue;
use crate::device::Device;
use crate::provider::{Provided, either};
use crate::queue_pair::{QueuePair, QueuePairOptions};
use crate::shared_receive_queue::SharedReceiveQueue;
use crate::{ibverbs, soft};

/// Why memory of a GPU could not be registered.
#[derive(Debug, Error)]
pub enum GpuMemoryError {
    /// As memory of the host could not be either.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Remotes were to do atomic operations on it.
    #[error("remotes cannot do atomic operations on memory of a GPU: leave REMOTE_ATOMIC out")]
    Atomic,
    /// No memory of the host was pinned for it.
    #[error("no memory of the host can be pinned for it: {0}")]
    Pin(#[from] CudaError),
    /// A NIC does not get at it.
    #[error(
        "{call} failed: {}: the NIC does not get at memory of GPU {gpu}; load nvidia-peermem \
         (`modprobe nvidia-peermem`), or use a soft device, which copies through memory of the host",
        std::io::Error::from_raw_os_error(*code)
    )]
    OutOfReach {
        /// The GPU.
        gpu: u32,
        /// The call.
        call: &'static str,
        /// Its error number.
        code: i32,
    },
}

/// A protection domain: memory regions serve only the queue pairs made in the same one.
#[derive(Clone, Debug)]
pub struct ProtectionDomain {
    device: Device,
    domain: Provided<soft::ProtectionDomain, Arc<ibverbs::ProtectionDomain>>,
}

impl ProtectionDomain {
    pub(crate) fn allocate(device: &Device) -> Self {
        let domain = match &device.device {
            Provided::Soft(device) => Provided::Soft(soft::ProtectionDomain::allocate(device)),
            Provided::Ibverbs(device) => {
                Provided::Ibverbs(Arc::new(ibverbs::ProtectionDomain::allocate(device)))
            }
        };
        Self { device: device.clone(), domain }
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Registers `length` bytes at `address`, so that work requests and, as far as `access`
    /// grants, remotes can use them.
    ///
    /// # Safety
    /// Until the region is dropped, the bytes must stay mapped (and writable, where `access`
    /// grants writing), and Rust code must not hold references to them that conflict with what
    /// remotes and work requests do: remotes write at any time they like. Data that a completion
    /// or a message has announced may be read; data that is being sent must not be changed before
    /// its work request completes.
    pub unsafe fn register_memory(
        &self,
        address: *mut u8,
        length: usize,
        access: Access,
    ) -> Result<MemoryRegion, RegionError> {
        let region = match &self.domain {
            Provided::Soft(domain) => {
                // SAFETY: the caller's promise is the one asked for.
                let region =
                    unsafe { soft::MemoryRegion::register(domain, address, length, access) };
                Provided::Soft(region?)
            }
            Provided::Ibverbs(domain) => {
                // SAFETY: as above.
                let region =
                    unsafe { ibverbs::MemoryRegion::register(domain, address, length, access) };
                Provided::Ibverbs(region?)
            }
        };
        Ok(MemoryRegion { region, address: address.addr() as u64, length })
    }

    /// Registers `length` bytes of a GPU, as [`ProtectionDomain::register_memory`] does memory of the host.
    /// A soft device copies through memory of the host that it pins, 1.25 MiB for each of its shards and
    /// GPU; a NIC gets at it by itself, which takes a module of the kernel. Atomic operations are not for it.
    ///
    /// # Safety
    /// As of [`ProtectionDomain::register_memory`], but the memory may be freed before: what needs it
    /// fails then, on soft devices. What is allocated there afterwards is taken for it.
    pub unsafe fn register_gpu_memory(
        &self,
        gpu: &Arc<Gpu>,
        address: u64,
        length: usize,
        access: Access,
    ) -> Result<MemoryRegion, GpuMemoryError> {
        if access.contains(Access::REMOTE_ATOMIC) {
            return Err(GpuMemoryError::Atomic);
        }
        let region = match &self.domain {
            Provided::Soft(domain) => {
                // SAFETY: the caller's promise is the one asked for.
                let region = unsafe {
                    soft::MemoryRegion::register_gpu(domain, gpu, address, length, access)
                };
                Provided::Soft(region?)
            }
            Provided::Ibverbs(domain) => {
                let pointer = ptr::with_exposed_provenance_mut(address as usize);
                // SAFETY: as above. Nobody but the NIC follows the pointer.
                let region =
                    unsafe { ibverbs::MemoryRegion::register(domain, pointer, length, access) };
                let refused = |source| match source {
                    RegionError::System { call, code } => {
                        let gpu = gpu.ordinal();
                        GpuMemoryError::OutOfReach { gpu, call, code }
                    }
                    other => GpuMemoryError::Region(other),
                };
                Provided::Ibverbs(region.map_err(refused)?)
            }
        };
        Ok(MemoryRegion { region, address, length })
    }

    /// Makes a reliable-connection queue pair in state RESET.
    pub fn create_queue_pair(
        &self,
        send_completions: &CompletionQueue,
        receive_completions: &CompletionQueue,
        capabilities: QueuePairCapabilities,
    ) -> Result<QueuePair, CreateError> {
        let options = QueuePairOptions::new(send_completions, capabilities);
        self.create_queue_pair_with(&QueuePairOptions { receive_completions, ..options })
    }

    /// Makes a queue pair of any kind in state RESET.
    pub fn create_queue_pair_with(
        &self,
        options: &QueuePairOptions<'_>,
    ) -> Result<QueuePair, CreateError> {
        let QueuePairOptions { send_completions, receive_completions, shared_receives, .. } =
            *options;
        let foreign = |queue: &CompletionQueue| CreateError::UnknownCompletionQueue(queue.id());
        let foreign_shared =
            |queue: &SharedReceiveQueue| CreateError::UnknownSharedReceiveQueue(queue.id());
        let pair = match &self.domain {
            Provided::Soft(domain) => {
                let own = |queue: &CompletionQueue| match &queue.queue {
                    Provided::Soft(queue) => Ok(Arc::clone(queue)),
                    Provided::Ibverbs(_) => Err(foreign(queue)),
                };
                let own_shared = |queue: &SharedReceiveQueue| match &queue.queue {
                    Provided::Soft(queue) => Ok(Arc::clone(queue)),
                    Provided::Ibverbs(_) => Err(foreign_shared(queue)),
                };
                let completions = [own(send_completions)?, own(receive_completions)?];
                let shared = shared_receives.map(own_shared).transpose()?;
                Provided::Soft(soft::QueuePair::create(domain, completions, shared, options)?)
            }
            Provided::Ibverbs(domain) => {
                let own = |queue: &CompletionQueue| match &queue.queue {
                    Provided::Ibverbs(queue) => Ok(Arc::clone(queue)),
                    Provided::Soft(_) => Err(foreign(queue)),
                };
                let own_shared = |queue: &SharedReceiveQueue| match &queue.queue {
                    Provided::Ibverbs(queue) => Ok(Arc::clone(queue)),
                    Provided::Soft(_) => Err(foreign_shared(queue)),
                };
                let completions = [own(send_completions)?, own(receive_completions)?];
                let shared = shared_receives.map(own_shared).transpose()?;
                let QueuePairOptions { transport, capabilities, .. } = *options;
                Provided::Ibverbs(ibverbs::QueuePair::create(
                    domain,
                    completions,
                    shared,
                    transport,
                    capabilities,
                )?)
            }
        };
        Ok(QueuePair { pair })
    }

    /// Makes a receive queue of so many requests for several queue pairs. The pieces of its
    /// requests are of regions of this domain, whatever domain the queue pairs are of.
    pub fn create_shared_receive_queue(
        &self,
        capacity: usize,
    ) -> Result<SharedReceiveQueue, CreateError> {
        let queue = match &self.domain {
            Provided::Soft(domain) => {
                let queue = soft::SharedReceiveQueue::create(domain, capacity)?;
                Provided::Soft(Arc::new(queue))
            }
            Provided::Ibverbs(domain) => {
                let queue = ibverbs::SharedReceiveQueue::create(domain, capacity)?;
                Provided::Ibverbs(Arc::new(queue))
            }
        };
        Ok(SharedReceiveQueue { queue })
    }
}

/// Registered memory. Dropping it deregisters: its key opens nothing any more, requests that
/// still name it fail, and the drop returns once no packet is being sent from it.
#[derive(Debug)]
pub struct MemoryRegion {
    region: Provided<soft::MemoryRegion, ibverbs::MemoryRegion>,
    address: u64,
    length: usize,
}

impl MemoryRegion {
    /// Its key for work requests here. Soft devices know one key for both uses, see
    /// [`MemoryRegion::remote_key`].
    pub fn key(&self) -> u32 {
        either!(&self.region, region => region.key())
    }

    /// Its key for the requests of peers. Meaningless when no access for remotes was granted.
    pub fn remote_key(&self) -> u32 {
        either!(&self.region, region => region.remote_key())
    }

    /// Virtual address of its first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        self.length
    }
}
