//! Protection domains and the memory registered in them.

use std::sync::Arc;

use millstream_roce::{Access, CreateError, QueuePairCapabilities, RegionError};

use crate::completion_queue::CompletionQueue;
use crate::device::Device;
use crate::provider::{Provided, either};
use crate::queue_pair::QueuePair;
use crate::{ibverbs, soft};

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

    /// Makes a queue pair in state RESET.
    pub fn create_queue_pair(
        &self,
        send_completions: &CompletionQueue,
        receive_completions: &CompletionQueue,
        capabilities: QueuePairCapabilities,
    ) -> Result<QueuePair, CreateError> {
        let pair = match (&self.domain, &send_completions.queue, &receive_completions.queue) {
            (Provided::Soft(domain), Provided::Soft(send), Provided::Soft(receive)) => {
                Provided::Soft(soft::QueuePair::create(domain, send, receive, capabilities)?)
            }
            (Provided::Ibverbs(domain), Provided::Ibverbs(send), Provided::Ibverbs(receive)) => {
                Provided::Ibverbs(ibverbs::QueuePair::create(domain, send, receive, capabilities)?)
            }
            // One of the queues is of another provider, and so of another device.
            (domain, send, _) => {
                let foreign = match (domain, send) {
                    (Provided::Soft(_), Provided::Soft(_))
                    | (Provided::Ibverbs(_), Provided::Ibverbs(_)) => receive_completions,
                    _ => send_completions,
                };
                return Err(CreateError::UnknownCompletionQueue(foreign.id()));
            }
        };
        Ok(QueuePair { pair })
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
