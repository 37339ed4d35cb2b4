//! A memory that writes down what is done to it, so that each effect can be held against what was
//! to happen next.

use millstream_roce::{
    AccessDenied, AtomicOperation, Destination, Memory, OwnedMemory, Piece, ProtectionDomainId,
    RemoteAccess,
};
use millstream_wire::Qpn;

use super::datagrams::Header;

/// Something that was done to memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Effect {
    /// The queue pair whose packet did it.
    pub(super) qpn: Option<Qpn>,
    /// A remote named the place, as for a WRITE; else a work request of ours did.
    pub(super) remote: bool,
    /// Key of the region.
    pub(super) key: u32,
    /// Virtual address of the first byte.
    pub(super) address: u64,
    /// Bytes.
    pub(super) length: u32,
    /// What it was.
    pub(super) what: What,
}

impl Effect {
    /// Something that writes no memory.
    pub(super) const fn of(what: What, qpn: Option<Qpn>) -> Self {
        Self { qpn, remote: false, key: 0, address: 0, length: 0, what }
    }
}

/// What was done to memory, or is to be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum What {
    /// Bytes were written.
    Write,
    /// An atomic operation, which returned what was there.
    Atomic(AtomicOperation, u64),
    /// Remotes have no access any more.
    Invalidate,
    /// A request of the shared receive queue was taken.
    Take,
    /// Nothing yet: the device sends this datagram, or this one has reached it.
    Sends(Header),
    Reached(Header),
}

/// Owned regions, and what was written into them since the last look.
#[derive(Debug)]
pub(super) struct WatchedMemory {
    pub(super) regions: OwnedMemory,
    pub(super) effects: Vec<Effect>,
    /// The queue pair that the packet in hand is addressed to.
    pub(super) serving: Option<Qpn>,
}

impl WatchedMemory {
    pub(super) fn new(capacity: usize) -> Self {
        Self { regions: OwnedMemory::new(capacity), effects: Vec::new(), serving: None }
    }
}

impl Memory for WatchedMemory {
    fn authorize(&mut self, access: &RemoteAccess) -> Result<(), AccessDenied> {
        self.regions.authorize(access)
    }

    fn write(&mut self, destination: &Destination, payload: &[u8]) -> Result<(), AccessDenied> {
        self.regions.write(destination, payload)?;
        let (_, key, address, _) = destination.place();
        self.effects.push(Effect {
            qpn: self.serving,
            remote: matches!(destination, Destination::Remote { .. }),
            key,
            address,
            length: payload.len() as u32,
            what: What::Write,
        });
        Ok(())
    }

    fn atomic(
        &mut self,
        access: &RemoteAccess,
        operation: AtomicOperation,
    ) -> Result<u64, AccessDenied> {
        let original = self.regions.atomic(access, operation)?;
        self.effects.push(Effect {
            qpn: self.serving,
            remote: true,
            key: access.key,
            address: access.address,
            length: access.length,
            what: What::Atomic(operation, original),
        });
        Ok(original)
    }

    fn invalidate(&mut self, domain: ProtectionDomainId, key: u32) -> Result<(), AccessDenied> {
        self.regions.invalidate(domain, key)?;
        self.effects.push(Effect {
            qpn: self.serving,
            remote: true,
            key,
            address: 0,
            length: 0,
            what: What::Invalidate,
        });
        Ok(())
    }

    fn bytes(&self, piece: &Piece) -> Result<&[u8], AccessDenied> {
        self.regions.bytes(piece)
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
