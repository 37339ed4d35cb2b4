//! The memory of one case: bytes to send, bytes to be written, and guards around both.
//!
//! Every byte has a value that is known beforehand, so that at the end all of them are compared:
//! those of messages, and those that nothing may have touched.

use anyhow::{Result, bail};
use millstream_verbs::{Access, MemoryRegion, Piece, ProtectionDomain};

/// Bytes before, between and after the two areas.
const GUARD: usize = 512;
/// What nothing was written to. Payloads are lower-case letters.
const BLANK: u8 = b'.';

pub(crate) struct Arena {
    // Dropped before the memory.
    region: MemoryRegion,
    memory: Memory,
    size: usize,
}

impl Arena {
    /// Two areas of `size` bytes: the source has the letters of `seed`.
    pub(crate) fn new(
        domain: &ProtectionDomain,
        size: usize,
        seed: u8,
        access: Access,
    ) -> Result<Self> {
        let memory = Memory::new(image(size, seed, &vec![BLANK; size]));
        // SAFETY: the memory outlives the region, by the order of the fields. It is read by
        // volatile reads, or once nothing that was posted and no peer writes to it any more.
        let region = unsafe { domain.register_memory(memory.0.cast(), memory.0.len(), access) }?;
        Ok(Self { region, memory, size })
    }

    pub(crate) fn region(&self) -> &MemoryRegion {
        &self.region
    }

    /// The address of byte `offset` of the source.
    pub(crate) fn source(&self, offset: usize) -> u64 {
        self.region.address() + (GUARD + offset) as u64
    }

    /// The address of byte `offset` of the target.
    pub(crate) fn target(&self, offset: usize) -> u64 {
        self.region.address() + (2 * GUARD + self.size + offset) as u64
    }

    /// `length` bytes at `address` as a piece of a work request.
    pub(crate) fn piece(&self, address: u64, length: usize) -> Piece {
        Piece { key: self.region.key(), address, length: length as u32 }
    }

    /// A byte of the target while others may be writing to it.
    pub(crate) fn peek(&self, offset: usize) -> u8 {
        assert!(offset < self.size, "byte {offset} of {}", self.size);
        // SAFETY: within the memory, by the assertion.
        unsafe { self.memory.0.cast::<u8>().add(2 * GUARD + self.size + offset).read_volatile() }
    }

    /// Whether nothing was written to byte `offset` of the target so far.
    pub(crate) fn is_blank(&self, offset: usize) -> bool {
        self.peek(offset) == BLANK
    }

    /// The target as it is before anything was written to it.
    pub(crate) fn blank(&self) -> Vec<u8> {
        vec![BLANK; self.size]
    }

    /// Compares every byte: the target with `target`, the rest with what it was at the start. To
    /// be called when nothing is written any more.
    pub(crate) fn verify(&self, seed: u8, target: &[u8]) -> Result<()> {
        let expected = image(self.size, seed, target);
        // SAFETY: all that was posted has completed and the peer has said that it posts no more.
        let actual = unsafe { &*self.memory.0 };
        if actual == expected {
            return Ok(());
        }
        let wrong = actual.iter().zip(&expected).filter(|(a, b)| a != b).count();
        let first = actual.iter().zip(&expected).position(|(a, b)| a != b).unwrap_or(0);
        let place = match first.checked_sub(2 * GUARD + self.size) {
            Some(offset) if offset < self.size => format!("byte {offset} of the target"),
            Some(_) => "the guard behind the target".to_owned(),
            None if (GUARD..GUARD + self.size).contains(&first) => {
                format!("byte {} of the source", first - GUARD)
            }
            None => "a guard before the target".to_owned(),
        };
        let show = |bytes: &[u8]| bytes[first..].iter().take(16).copied().collect::<Vec<u8>>();
        bail!(
            "{wrong} bytes of {} are wrong, first {place}: \"{}\" where \"{}\" should be",
            self.size,
            show(actual).escape_ascii(),
            show(&expected).escape_ascii()
        )
    }
}

/// Owned memory behind a raw pointer, so that no reference to it exists but those asked for.
struct Memory(*mut [u8]);

impl Memory {
    fn new(bytes: Vec<u8>) -> Self {
        Self(Box::into_raw(bytes.into_boxed_slice()))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it came from a box in `new`, and this is the only place that frees it.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// What the whole memory is when the target is this.
fn image(size: usize, seed: u8, target: &[u8]) -> Vec<u8> {
    let guard = [BLANK; GUARD];
    let mut bytes = Vec::with_capacity(3 * GUARD + 2 * size);
    bytes.extend(guard);
    bytes.extend(letters(seed, 0, size));
    bytes.extend(guard);
    bytes.extend(target);
    bytes.extend(guard);
    bytes
}

/// Bytes `offset..offset + length` of the source that has this seed: lower-case letters, as a
/// dissector takes some binary payloads for other protocols.
pub(crate) fn letters(seed: u8, offset: usize, length: usize) -> impl Iterator<Item = u8> {
    (offset..offset + length).map(move |index| {
        // Knuth's multiplicative hash: neighbours differ, and so do bytes a packet apart.
        let hash = (index as u32).wrapping_add(u32::from(seed) << 24).wrapping_mul(2_654_435_761);
        b'a' + (((hash >> 24) * 26) >> 8) as u8
    })
}
