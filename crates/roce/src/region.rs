//! Memory regions: keys, bounds and rights. What lies behind a region is the owner's affair.

use std::collections::VecDeque;

use bitflags::bitflags;
use thiserror::Error;

use crate::memory::{AccessDenied, RemoteAccess};
use crate::work::Piece;

bitflags! {
    /// What may be done with a region (`IBV_ACCESS_*`, same values).
    #[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
    pub struct Access: u32 {
        /// Receives and READ results may be written into it.
        const LOCAL_WRITE = 1;
        /// Remotes may write into it.
        const REMOTE_WRITE = 1 << 1;
        /// Remotes may read from it.
        const REMOTE_READ = 1 << 2;
        /// Remotes may do atomic operations on it.
        const REMOTE_ATOMIC = 1 << 3;
        /// Remotes may end all access of remotes to it, by a SEND that invalidates. On soft devices
        /// only: libibverbs has no such bit, as there only memory windows can be invalidated.
        const REMOTE_INVALIDATE = 1 << 31;
    }
}

impl Access {
    /// Whether bytes can be registered so. Every provider asks this first, so that all of them
    /// refuse alike.
    pub fn check_region(self, address: u64, length: u64) -> Result<(), RegionError> {
        if length == 0 {
            return Err(RegionError::Empty);
        }
        if address.checked_add(length).is_none() {
            return Err(RegionError::Overflow { address, length });
        }
        if self.intersects(Self::REMOTE_WRITE | Self::REMOTE_ATOMIC)
            && !self.contains(Self::LOCAL_WRITE)
        {
            return Err(RegionError::LocalWriteMissing);
        }
        Ok(())
    }
}

/// A protection domain: regions serve only queue pairs of their own domain.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct ProtectionDomainId(pub u32);

/// A registered region and what its owner keeps with it.
#[derive(Clone, Debug)]
pub struct Region<T> {
    /// Its key, local and remote: a 24-bit index and an 8-bit generation.
    pub key: u32,
    /// Its protection domain.
    pub domain: ProtectionDomainId,
    /// Virtual address of the first byte.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// What may be done with it.
    pub access: Access,
    /// What lies behind it.
    pub backing: T,
}

impl<T> Region<T> {
    /// The offset of `address` in the region when `length` bytes from there lie within.
    pub fn offset(&self, address: u64, length: u64) -> Option<u64> {
        let offset = address.checked_sub(self.address)?;
        let end = offset.checked_add(length)?;
        (end <= self.length).then_some(offset)
    }
}

/// Why a region could not be registered or removed.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum RegionError {
    /// A region must hold at least one byte.
    #[error("a memory region of 0 bytes cannot be registered")]
    Empty,
    /// The region would reach beyond the address space.
    #[error("a memory region of {length} bytes at {address:#x} exceeds the address space")]
    Overflow {
        /// First byte.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// Remote write and atomic rights need the local write right (IBTA 10.6.3.1).
    #[error("remote write or atomic access needs LOCAL_WRITE")]
    LocalWriteMissing,
    /// A device of the system lets remotes invalidate memory windows only, no regions; a
    /// [`RegionTable`] does.
    #[error("only soft devices let remotes invalidate a region")]
    InvalidationUnsupported,
    /// The table is full.
    #[error("no more than {0} memory regions can be registered on one device")]
    TooMany(usize),
    /// No region has this key.
    #[error("no memory region has the key {0:#010x}")]
    Unknown(u32),
    /// A device of the system refused; a [`RegionTable`] never does.
    #[error(
        "{call} failed: {} (registered memory is locked: `ulimit -l` limits how much)",
        std::io::Error::from_raw_os_error(*code)
    )]
    System {
        /// The call.
        call: &'static str,
        /// Its error number.
        code: i32,
    },
}

/// So many slots rest before one is used again, so that a key comes back after 65,536 further registrations at the least, and
/// not after 256.
const RESTING: usize = 256;

/// The regions of one device, found by key in constant time.
#[derive(Debug)]
pub struct RegionTable<T> {
    slots: Vec<Slot<T>>,
    /// Those without a region, in the order in which they lost it.
    free: VecDeque<u32>,
    capacity: usize,
    seed: u64,
}

#[derive(Debug)]
struct Slot<T> {
    /// Changes with every use of the slot, so that an old key does not open a new region.
    generation: u8,
    region: Option<Region<T>>,
}

impl<T> RegionTable<T> {
    /// An empty table for at most `capacity` regions (and 2^24 - 1). By the seed its keys differ
    /// from those of other tables, so that a key from before a restart seldom opens anything. It
    /// is no secret: 8 bits of a key are what an attacker has to guess.
    pub fn new(capacity: usize, seed: u64) -> Self {
        let capacity = capacity.min((1 << 24) - 1);
        // With room for those that rest: later registrations do not allocate for them.
        let room = capacity.min(RESTING + 1);
        let (slots, free) = (Vec::with_capacity(room), VecDeque::with_capacity(room));
        Self { slots, free, capacity, seed }
    }

    /// Registers a region and returns its key, which is never 0.
    pub fn register(
        &mut self,
        domain: ProtectionDomainId,
        address: u64,
        length: u64,
        access: Access,
        backing: T,
    ) -> Result<u32, RegionError> {
        access.check_region(address, length)?;
        let is_full = self.slots.len() >= self.capacity;
        let rested = (is_full || self.free.len() > RESTING).then(|| self.free.pop_front());
        let index = match rested.flatten() {
            Some(index) => index,
            None if !is_full => {
                let index = self.slots.len() as u32;
                // Odd multipliers spread the seed and the index into the top bits (Knuth 6.4).
                let mixed = (self.seed ^ u64::from(index)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                self.slots.push(Slot { generation: (mixed >> 56) as u8, region: None });
                index
            }
            None => return Err(RegionError::TooMany(self.capacity)),
        };
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        let key = (index + 1) << 8 | u32::from(slot.generation);
        slot.region = Some(Region { key, domain, address, length, access, backing });
        Ok(key)
    }

    /// Removes a region; its key opens nothing from now on.
    pub fn deregister(&mut self, key: u32) -> Result<Region<T>, RegionError> {
        let index = self.index(key).ok_or(RegionError::Unknown(key))?;
        let region = self.slots[index].region.take().ok_or(RegionError::Unknown(key))?;
        self.free.push_back(index as u32);
        Ok(region)
    }

    /// The region with this key.
    pub fn get(&self, key: u32) -> Option<&Region<T>> {
        self.slots[self.index(key)?].region.as_ref()
    }

    /// The region with this key, to change.
    pub fn get_mut(&mut self, key: u32) -> Option<&mut Region<T>> {
        let index = self.index(key)?;
        self.slots[index].region.as_mut()
    }

    /// The region that holds these bytes, when it is of this domain and grants `access`.
    pub fn check(
        &self,
        domain: ProtectionDomainId,
        key: u32,
        address: u64,
        length: u64,
        access: Access,
    ) -> Result<&Region<T>, AccessDenied> {
        self.get(key)
            .filter(|region| region.domain == domain)
            .filter(|region| region.access.contains(access))
            .filter(|region| region.offset(address, length).is_some())
            .ok_or(AccessDenied::Protection)
    }

    /// Whether a remote may have all of what it asks for: [`crate::Memory::authorize`].
    pub fn authorize(&self, access: &RemoteAccess) -> Result<(), AccessDenied> {
        let RemoteAccess { domain, key, address, length, .. } = *access;
        self.check(domain, key, address, length.into(), access.right()).map(drop)
    }

    /// Whether work requests of `domain` may use a piece: [`crate::Memory::check_local`].
    pub fn check_local(
        &self,
        domain: ProtectionDomainId,
        piece: &Piece,
        write: bool,
    ) -> Result<(), AccessDenied> {
        let right = if write { Access::LOCAL_WRITE } else { Access::empty() };
        self.check(domain, piece.key, piece.address, piece.length.into(), right).map(drop)
    }

    /// The region of a piece, whose rights were checked before, and the piece's offset in it.
    pub fn locate(&self, piece: &Piece) -> Result<(&Region<T>, u64), AccessDenied> {
        let region = self.get(piece.key).ok_or(AccessDenied::Protection)?;
        let offset = region.offset(piece.address, piece.length.into());
        Ok((region, offset.ok_or(AccessDenied::Protection)?))
    }

    /// Ends all access of remotes to a region that lets them do so (IBTA 10.6.6.2). Work requests of
    /// its owner go on.
    pub fn invalidate(&mut self, domain: ProtectionDomainId, key: u32) -> Result<(), AccessDenied> {
        let region = self.get_mut(key).filter(|region| region.domain == domain);
        let region = region.filter(|region| region.access.contains(Access::REMOTE_INVALIDATE));
        region.ok_or(AccessDenied::Protection)?.access &= Access::LOCAL_WRITE;
        Ok(())
    }

    /// How many regions there are.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn index(&self, key: u32) -> Option<usize> {
        let index = (key >> 8).checked_sub(1)? as usize;
        let slot = self.slots.get(index)?;
        (slot.generation == key as u8 && slot.region.is_some()).then_some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOMAIN: ProtectionDomainId = ProtectionDomainId(7);

    #[test]
    fn a_key_opens_its_own_region_only() {
        let mut table = RegionTable::new(2, 7);
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let key = table.register(DOMAIN, 0x1000, 0x100, all, ()).unwrap();
        assert!(table.check(DOMAIN, key, 0x1000, 0x100, Access::REMOTE_WRITE).is_ok());
        assert!(table.check(DOMAIN, key, 0x10ff, 1, Access::REMOTE_WRITE).is_ok());
        for (domain, key, address, length, access) in [
            (DOMAIN, key, 0x0fff, 1, Access::REMOTE_WRITE),
            (DOMAIN, key, 0x1000, 0x101, Access::REMOTE_WRITE),
            (DOMAIN, key, 0x1100, 1, Access::REMOTE_WRITE),
            (DOMAIN, key, u64::MAX, u64::MAX, Access::REMOTE_WRITE),
            (DOMAIN, key, 0x1001, u64::MAX, Access::REMOTE_WRITE),
            (DOMAIN, key, 0x1000, 1, Access::REMOTE_READ),
            (DOMAIN, key ^ 1, 0x1000, 1, Access::REMOTE_WRITE),
            (DOMAIN, key + 0x100, 0x1000, 1, Access::REMOTE_WRITE),
            (DOMAIN, 0, 0x1000, 1, Access::REMOTE_WRITE),
            (ProtectionDomainId(8), key, 0x1000, 1, Access::REMOTE_WRITE),
        ] {
            assert!(
                table.check(domain, key, address, length, access).is_err(),
                "{domain:?} {key:#x} {address:#x} {length:#x} {access:?}"
            );
        }
    }

    #[test]
    fn an_old_key_does_not_open_a_new_region() {
        let mut table = RegionTable::new(1, 7);
        let old = table.register(DOMAIN, 0, 8, Access::empty(), ()).unwrap();
        assert_eq!(table.register(DOMAIN, 0, 8, Access::empty(), ()), Err(RegionError::TooMany(1)));
        table.deregister(old).unwrap();
        assert_eq!(table.deregister(old).unwrap_err(), RegionError::Unknown(old));
        let new = table.register(DOMAIN, 0, 8, Access::empty(), ()).unwrap();
        assert_ne!(old, new);
        assert!(table.get(old).is_none());
        assert_eq!(table.len(), 1);
    }

    /// A peer that has a descriptor of long ago must not write where something else is registered now.
    #[test]
    fn a_key_comes_back_after_65536_registrations_at_the_least() {
        let mut table = RegionTable::new(1 << 20, 7);
        let mut known = std::collections::HashSet::new();
        for round in 0..256 * RESTING {
            let key = table.register(DOMAIN, 0, 8, Access::empty(), ()).unwrap();
            assert!(known.insert(key), "{key:#x} is there again after {round} registrations");
            table.deregister(key).unwrap();
            assert_eq!(table.len(), 0);
        }
        assert!(table.slots.len() <= RESTING + 1, "{}", table.slots.len());
    }

    #[test]
    fn keys_differ_from_table_to_table() {
        let keys = |seed| {
            let mut table = RegionTable::new(4, seed);
            [(); 4].map(|()| table.register(DOMAIN, 0, 8, Access::empty(), ()).unwrap())
        };
        let distinct: std::collections::HashSet<_> = (0..64).flat_map(keys).collect();
        // 256 keys of 1024 possible ones: more than 200 are expected to differ.
        assert!(distinct.len() > 180, "{}", distinct.len());
        assert_eq!(keys(5), keys(5));
        assert!(keys(5).iter().zip(1..).all(|(key, index)| key >> 8 == index));
    }

    #[test]
    fn bad_regions_are_refused() {
        let mut table = RegionTable::new(1, 7);
        let mut register =
            |address, length, access| table.register(DOMAIN, address, length, access, ());
        assert_eq!(register(0, 0, Access::empty()), Err(RegionError::Empty));
        assert!(matches!(
            register(u64::MAX, 2, Access::empty()),
            Err(RegionError::Overflow { .. })
        ));
        assert_eq!(register(0, 1, Access::REMOTE_WRITE), Err(RegionError::LocalWriteMissing));
    }
}
