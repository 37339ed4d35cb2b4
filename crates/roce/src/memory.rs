//! What an endpoint delivers into and sends from.

use millstream_wire::Qpn;

use crate::region::ProtectionDomainId;
use crate::{Access, Piece};

/// What a remote wants to do with memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum AccessKind {
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// An atomic operation on 8 bytes.
    Atomic,
}

/// A remote's request for memory, as its RETH or AtomicETH states it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RemoteAccess {
    /// The local queue pair that it came in on.
    pub qpn: Qpn,
    /// That queue pair's protection domain.
    pub domain: ProtectionDomainId,
    /// What it wants.
    pub kind: AccessKind,
    /// The key it gave.
    pub key: u32,
    /// The address it gave.
    pub address: u64,
    /// Bytes of the whole message.
    pub length: u32,
}

/// An atomic operation on 8 bytes, as an unsigned number in this machine's byte order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum AtomicOperation {
    /// The value becomes `swap` if it is `compare`.
    CompareSwap {
        /// What is expected.
        compare: u64,
        /// What replaces it.
        swap: u64,
    },
    /// `add` is added, modulo 2^64.
    FetchAdd {
        /// What is added.
        add: u64,
    },
}

impl AtomicOperation {
    /// What `value` becomes.
    #[must_use]
    pub const fn apply(self, value: u64) -> u64 {
        match self {
            Self::CompareSwap { compare, swap } if value == compare => swap,
            Self::CompareSwap { .. } => value,
            Self::FetchAdd { add } => value.wrapping_add(add),
        }
    }
}

/// Where the payload of one packet goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Destination {
    /// Into a WRITE message that [`Memory::authorize`] admitted, `offset` bytes from its start.
    /// Packets of a message come in order, each once, without gaps.
    Remote {
        /// The message.
        access: RemoteAccess,
        /// Bytes of the message before this packet.
        offset: u32,
    },
    /// Into local memory that a receive request or a READ named.
    Local {
        /// The protection domain of the queue pair.
        domain: ProtectionDomainId,
        /// Key of the region.
        key: u32,
        /// Virtual address of the first byte.
        address: u64,
    },
}

impl RemoteAccess {
    /// The right that a region must grant for it.
    pub const fn right(&self) -> Access {
        match self.kind {
            AccessKind::Write => Access::REMOTE_WRITE,
            AccessKind::Read => Access::REMOTE_READ,
            AccessKind::Atomic => Access::REMOTE_ATOMIC,
        }
    }
}

impl Destination {
    /// For memories of regions: domain and key, the address of the first byte, and the right that
    /// the region must grant.
    pub const fn place(&self) -> (ProtectionDomainId, u32, u64, Access) {
        match *self {
            Self::Remote { access, offset } => {
                let address = access.address.wrapping_add(offset as u64);
                (access.domain, access.key, address, Access::REMOTE_WRITE)
            }
            Self::Local { domain, key, address } => (domain, key, address, Access::LOCAL_WRITE),
        }
    }

    /// Whether what follows these bytes is written next, as far as is known: the rest of the message. Of one that
    /// begins the datagram itself says where ([`Memory::expect`]).
    pub const fn goes_on(&self, length: usize) -> bool {
        match *self {
            Self::Remote { access, offset } => {
                offset as u64 + (length as u64) < access.length as u64
            }
            Self::Local { .. } => true,
        }
    }
}

/// The memory refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum AccessDenied {
    /// Wrong key, range, domain or right: the remote hears "remote access error".
    Protection,
    /// The memory does not do this at all, or not now: the remote hears "invalid request".
    InvalidRequest,
}

/// What an endpoint delivers into and sends from. A host's memory stores, a switch's memory adds.
///
/// The endpoint calls it only with packets that the reliable connection has accepted: in order,
/// once each. It never trusts a remote: every byte it reads or writes for one goes through here,
/// and an implementation must refuse whatever the remote was not given.
pub trait Memory {
    /// Admits a WRITE or READ as a whole, before its first byte moves, and each part of a READ again
    /// before it is sent. A message of zero bytes is admitted without checks of key or address
    /// (IBTA 9.7.4.1.4), so it is not asked about.
    fn authorize(&mut self, access: &RemoteAccess) -> Result<(), AccessDenied>;

    /// Takes the payload of one packet. It may collect what belongs together, and say so by
    /// [`Memory::is_flushed`].
    fn write(&mut self, destination: &Destination, payload: &[u8]) -> Result<(), AccessDenied>;

    /// A datagram that is taken soon says that it writes so many bytes there: they may be loaded meanwhile. Nothing
    /// has been checked, and nothing may change.
    fn expect(&self, _key: u32, _address: u64, _length: u64) {}

    /// Does an atomic operation and returns the value from before. Asked once for each operation:
    /// a repeated request is answered from what was returned. The address is a multiple of 8, the
    /// length is 8. A memory that does not implement this refuses every one.
    fn atomic(
        &mut self,
        _access: &RemoteAccess,
        _operation: AtomicOperation,
    ) -> Result<u64, AccessDenied> {
        Err(AccessDenied::InvalidRequest)
    }

    /// Takes the rights of remotes to a region away, as a SEND from a remote asks (IBTA 9.4.1.1.1).
    /// A memory that does not implement this refuses.
    fn invalidate(&mut self, _domain: ProtectionDomainId, _key: u32) -> Result<(), AccessDenied> {
        Err(AccessDenied::InvalidRequest)
    }

    /// Whether all that was written is where it belongs.
    fn is_flushed(&self) -> bool {
        true
    }

    /// Brings what was written to where it belongs. The endpoint asks before anybody is told that it is
    /// there, before it takes packets of another queue pair, and when it has taken all that had come. After
    /// a failure, of a [`Memory::write`] that had to flush too, nothing counts that was written since
    /// the last time.
    fn flush(&mut self) -> Result<(), AccessDenied> {
        Ok(())
    }

    /// Makes the bytes of a local piece ready to be sent: those that [`Memory::bytes`] is asked for next,
    /// until [`Memory::unstage`]. The `following` bytes after them are of the same request, and may be
    /// sent soon.
    fn stage(&mut self, piece: &Piece, _following: u64) -> Result<(), AccessDenied> {
        self.bytes(piece).map(drop)
    }

    /// All bytes that were staged have been sent, or never will be.
    fn unstage(&mut self) {}

    /// The bytes of a local piece, to be sent. For a READ response the piece is what
    /// [`Memory::authorize`] has just admitted.
    fn bytes(&self, piece: &Piece) -> Result<&[u8], AccessDenied>;

    /// Whether a local piece may be used by work requests of `domain`, for reading or (`write`)
    /// for writing. Asked once when a request is posted or starts.
    fn check_local(
        &self,
        domain: ProtectionDomainId,
        piece: &Piece,
        write: bool,
    ) -> Result<(), AccessDenied>;
}
