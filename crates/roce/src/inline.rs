//! Inline data: bytes that a send request brings with it. They are copied when it is posted, so that
//! they need no registered memory, and whoever posted has his buffer back at once.

/// The most inline bytes that a request can have. They fit into one packet of the smallest path
/// MTU, and travel with its headers.
pub const MAX_INLINE: usize = 256;

/// Room for the inline bytes of every request that a send queue can hold. Requests leave the queue
/// in the order in which they came, so a ring of slots does.
#[derive(Debug)]
pub(crate) struct InlineData {
    bytes: Box<[u8]>,
    slot_length: usize,
    next: usize,
}

/// Where the inline bytes of a request are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct InlineSlot {
    start: u32,
    length: u16,
}

impl InlineSlot {
    pub(crate) fn length(self) -> u64 {
        self.length.into()
    }
}

impl InlineData {
    /// For `requests` at a time, of up to `slot_length` bytes each.
    pub(crate) fn new(requests: usize, slot_length: usize) -> Self {
        Self { bytes: vec![0; requests * slot_length].into(), slot_length, next: 0 }
    }

    /// Keeps the bytes of a request that the queue has room for. The caller has checked that they
    /// are not more than a slot holds.
    pub(crate) fn keep(&mut self, bytes: &[u8]) -> InlineSlot {
        debug_assert!(bytes.len() <= self.slot_length && bytes.len() <= MAX_INLINE);
        let start = self.next;
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
        self.next += self.slot_length;
        if self.next >= self.bytes.len() {
            self.next = 0;
        }
        InlineSlot { start: start as u32, length: bytes.len() as u16 }
    }

    /// The bytes that were kept there.
    pub(crate) fn get(&self, slot: InlineSlot) -> &[u8] {
        &self.bytes[slot.start as usize..][..slot.length.into()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_kept_as_the_queue_holds() {
        let mut data = InlineData::new(3, 4);
        let texts: [&[u8]; 7] = [b"abcd", b"", b"x", b"efgh", b"ij", b"klm", b"n"];
        let slots: Vec<_> = texts.iter().map(|text| data.keep(text)).collect();
        for (slot, text) in slots.iter().zip(texts).skip(4) {
            assert_eq!(data.get(*slot), text);
            assert_eq!(slot.length(), text.len() as u64);
        }
    }

    #[test]
    fn no_room_for_none() {
        let mut data = InlineData::new(8, 0);
        let slot = data.keep(b"");
        assert_eq!(data.get(slot), b"");
        assert_eq!(data.keep(b""), slot);
    }
}
