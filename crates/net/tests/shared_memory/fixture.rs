//! Memory that is offered, and copies to and from it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millstream_net::guarded::Caching;
use millstream_net::shared_memory::{AccessError, Offer, Peer, Region, Registration, SharedMemory};

pub(crate) const LENGTH: usize = 1 << 20;
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A number that no other offer of any process has.
pub(crate) fn incarnation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    u64::from(std::process::id()) << 32 | NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Memory of both kinds, offered.
pub(crate) struct Offered {
    pub(crate) offer: Offer,
    pub(crate) incarnation: u64,
    pub(crate) memory: Arc<SharedMemory>,
    pub(crate) own: Box<[u8]>,
    pub(crate) mapped: Registration,
    pub(crate) copied: Registration,
}

impl Offered {
    pub(crate) fn new(capacity: usize) -> Self {
        let incarnation = incarnation();
        let offer = Offer::start(incarnation, capacity).unwrap();
        let memory = Arc::new(SharedMemory::new(LENGTH).unwrap());
        let own = vec![0; LENGTH].into_boxed_slice();
        let address = memory.pointer().as_ptr().expose_provenance() as u64;
        let mapped = offer.register(address, LENGTH as u64, Some(&memory)).unwrap();
        let own_address = own.as_ptr().expose_provenance() as u64;
        let copied = offer.register(own_address, LENGTH as u64, None).unwrap();
        Self { offer, incarnation, memory, own, mapped, copied }
    }

    pub(crate) fn addresses(&self) -> [u64; 2] {
        let mapped = self.memory.pointer().as_ptr().expose_provenance();
        [mapped, self.own.as_ptr().expose_provenance()].map(|address| address as u64)
    }

    pub(crate) fn connect(&self) -> Peer {
        Peer::connect(self.offer.socket(), self.incarnation).unwrap()
    }

    /// The byte there, of the mapped memory and of the other.
    pub(crate) fn bytes(&self, offset: usize) -> [u8; 2] {
        // SAFETY: within the memory, of which nobody has a reference. Volatile, since others write it.
        unsafe {
            [
                self.memory.pointer().as_ptr().add(offset).read_volatile(),
                self.own.as_ptr().add(offset).read_volatile(),
            ]
        }
    }
}

/// Writes bytes at an address of the region.
pub(crate) fn write(
    peer: &Peer,
    region: &Region,
    target: u64,
    bytes: &[u8],
) -> Result<(), AccessError> {
    let visit = peer.enter(region)?.expect("a word is free");
    // SAFETY: from a slice.
    unsafe { visit.write(bytes.as_ptr(), target, bytes.len(), Caching::Around)? };
    visit.confirm()
}

pub(crate) fn read(
    peer: &Peer,
    region: &Region,
    target: u64,
    bytes: &mut [u8],
) -> Result<(), AccessError> {
    let visit = peer.enter(region)?.expect("a word is free");
    // SAFETY: to a slice.
    unsafe { visit.read(bytes.as_mut_ptr(), target, bytes.len(), Caching::Through)? };
    visit.confirm()
}
