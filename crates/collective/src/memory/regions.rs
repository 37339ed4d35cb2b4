//! The regions of memory, one for each device, and what work requests name of them.

use millstream_inc::MAX_TREES;
use millstream_verbs::{Access, Device, MemoryRegion, ProtectionDomain, RegionError};

use super::Span;
use crate::Element;

/// The protection domains of a communicator: one for each device, for all trees that use it. Trees that replace lost ones
/// have the same, so what is registered serves them, too.
#[derive(Clone, Debug)]
pub(crate) struct Domains(Vec<ProtectionDomain>);

impl Domains {
    /// Of 1 to [`MAX_TREES`] devices.
    pub(crate) fn of<'a>(devices: impl IntoIterator<Item = &'a Device>) -> Self {
        let domains: Vec<_> = devices.into_iter().map(Device::allocate_protection_domain).collect();
        debug_assert!((1..=MAX_TREES).contains(&domains.len()));
        Self(domains)
    }

    /// Those of the first devices only.
    pub(crate) fn first(&self, count: usize) -> Self {
        Self(self.0.iter().take(count).cloned().collect())
    }

    /// That of each device.
    pub(crate) fn each(&self) -> &[ProtectionDomain] {
        &self.0
    }

    /// Registers the memory of a span. Who has the regions lets go of them before the collective is over that names
    /// the span.
    pub(crate) fn register_span(
        &self,
        span: Span,
        access: Access,
    ) -> Result<Option<Regions>, RegionError> {
        Ok(match span.length {
            0 => None,
            // SAFETY: whoever made the span promised that so many bytes can be used as long.
            length => Some(unsafe { self.register_memory(span.address.as_ptr(), length, access)? }),
        })
    }

    /// Registers memory with all devices.
    ///
    /// # Safety
    /// As of [`ProtectionDomain::register_memory`], until the regions are dropped.
    pub(crate) unsafe fn register_memory(
        &self,
        address: *mut u8,
        length: usize,
        access: Access,
    ) -> Result<Regions, RegionError> {
        let register = |domain: &ProtectionDomain| {
            // SAFETY: the caller promises it.
            unsafe { domain.register_memory(address, length, access) }
        };
        Ok(Regions(self.0.iter().map(register).collect::<Result<_, _>>()?))
    }
}

/// The regions of the same memory on all devices.
#[derive(Debug)]
pub(crate) struct Regions(Box<[MemoryRegion]>);

/// The keys of a region.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Keys {
    pub(crate) local: u32,
    /// As the switch must name it. Only soft devices have one key for both.
    pub(crate) remote: u32,
}

/// Memory as work requests name it. Without elements, nothing is registered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Operand {
    /// On each device.
    pub(crate) keys: [Keys; MAX_TREES],
    pub(crate) address: u64,
}

impl Operand {
    /// All of what was registered.
    pub(crate) fn of(regions: &Regions) -> Self {
        let mut keys = [Keys::default(); MAX_TREES];
        for (keys, region) in keys.iter_mut().zip(&regions.0) {
            *keys = Keys { local: region.key(), remote: region.remote_key() };
        }
        // Where the memory is, for all of them.
        let address = regions.0.first().map_or(0, MemoryRegion::address);
        Self { keys, address }
    }

    /// The part of it from this element on.
    pub(super) fn at_element<T>(self, index: usize) -> Self {
        Self { address: self.address + (index * size_of::<T>()) as u64, ..self }
    }
}

/// What a call reads and writes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Operands {
    pub(crate) source: Operand,
    pub(crate) destination: Operand,
}

pub(crate) fn operand(region: Option<&Regions>) -> Operand {
    region.map_or_else(Operand::default, Operand::of)
}

/// # Safety
/// The elements must be borrowed, in a way that allows `access`, until the region is dropped. The callers in
/// `communicator` keep what has it in a local variable, which they neither forget nor give away.
pub(super) unsafe fn register<T: Element>(
    domain: &Domains,
    elements: *mut T,
    length: usize,
    access: Access,
) -> Result<Option<Regions>, RegionError> {
    Ok(match length * size_of::<T>() {
        0 => None,
        // SAFETY: the elements stay where they are as long as the borrow lasts. Any bytes are elements.
        bytes => Some(unsafe { domain.register_memory(elements.cast(), bytes, access)? }),
    })
}
