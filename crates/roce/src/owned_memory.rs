//! A memory whose regions own their bytes: for tests, the simulator and small tools.

use crate::memory::{AccessDenied, AtomicOperation, Destination, Memory, RemoteAccess};
use crate::region::{Access, ProtectionDomainId, RegionError, RegionTable};
use crate::work::Piece;

/// Regions of owned bytes at made-up addresses. No `unsafe`: what a simulation needs.
#[derive(Debug)]
pub struct OwnedMemory {
    regions: RegionTable<Vec<u8>>,
}

impl OwnedMemory {
    /// An empty memory for at most `capacity` regions. Its keys are the same every time.
    pub fn new(capacity: usize) -> Self {
        Self { regions: RegionTable::new(capacity, 0) }
    }

    /// Registers `bytes` as if they lay at `address`; returns the key.
    pub fn register(
        &mut self,
        domain: ProtectionDomainId,
        address: u64,
        access: Access,
        bytes: Vec<u8>,
    ) -> Result<u32, RegionError> {
        self.regions.register(domain, address, bytes.len() as u64, access, bytes)
    }

    /// Removes a region and returns its bytes.
    pub fn deregister(&mut self, key: u32) -> Result<Vec<u8>, RegionError> {
        self.regions.deregister(key).map(|region| region.backing)
    }

    /// The bytes of a region.
    pub fn region(&self, key: u32) -> Option<&[u8]> {
        self.regions.get(key).map(|region| region.backing.as_slice())
    }

    /// The bytes of a region, to change.
    pub fn region_mut(&mut self, key: u32) -> Option<&mut [u8]> {
        self.regions.get_mut(key).map(|region| region.backing.as_mut_slice())
    }
}

impl Memory for OwnedMemory {
    fn authorize(&mut self, access: &RemoteAccess) -> Result<(), AccessDenied> {
        self.regions.authorize(access)
    }

    fn write(&mut self, destination: &Destination, payload: &[u8]) -> Result<(), AccessDenied> {
        let (domain, key, address, right) = destination.place();
        let length = payload.len() as u64;
        self.regions.check(domain, key, address, length, right)?;
        let region = self.regions.get_mut(key).ok_or(AccessDenied::Protection)?;
        let offset = region.offset(address, length).ok_or(AccessDenied::Protection)? as usize;
        region.backing[offset..offset + payload.len()].copy_from_slice(payload);
        Ok(())
    }

    fn atomic(
        &mut self,
        access: &RemoteAccess,
        operation: AtomicOperation,
    ) -> Result<u64, AccessDenied> {
        self.authorize(access)?;
        let region = self.regions.get_mut(access.key).ok_or(AccessDenied::Protection)?;
        let offset = region.offset(access.address, access.length.into());
        let (value, _) = offset
            .and_then(|offset| region.backing.get_mut(offset as usize..))
            .and_then(<[u8]>::split_first_chunk_mut)
            .ok_or(AccessDenied::Protection)?;
        let original = u64::from_ne_bytes(*value);
        *value = operation.apply(original).to_ne_bytes();
        Ok(original)
    }

    fn invalidate(&mut self, domain: ProtectionDomainId, key: u32) -> Result<(), AccessDenied> {
        self.regions.invalidate(domain, key)
    }

    fn bytes(&self, piece: &Piece) -> Result<&[u8], AccessDenied> {
        let (region, offset) = self.regions.locate(piece)?;
        Ok(&region.backing[offset as usize..][..piece.length as usize])
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
