//! Memory that the kernel can read and write around the page cache.

use std::fmt;

/// Multiples of so many bytes are what I/O around the page cache takes: the largest block of devices, and
/// a page of the machine, whichever is larger.
pub const ALIGNMENT: usize = if cfg!(target_arch = "x86_64") { 4096 } else { 64 << 10 };

/// Bytes whose first is at a multiple of [`ALIGNMENT`].
#[derive(Default)]
pub struct AlignedBuffer {
    /// Has room for the bytes wherever it lies.
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl AlignedBuffer {
    /// So many zeros.
    pub fn new(length: usize) -> Self {
        if length == 0 {
            return Self::default();
        }
        let memory = vec![0; length + ALIGNMENT];
        let address = memory.as_ptr().addr();
        let start = address.next_multiple_of(ALIGNMENT) - address;
        Self { memory, start, length }
    }

    /// How many there are.
    pub const fn length(&self) -> usize {
        self.length
    }

    /// To be read.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.length]
    }

    /// To be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuffer").field("length", &self.length).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_aligned_and_as_long_as_asked() {
        for length in [1, 4096, 5000, 1 << 20] {
            let mut buffer = AlignedBuffer::new(length);
            assert_eq!(buffer.bytes().as_ptr().addr() % ALIGNMENT, 0);
            buffer.bytes_mut().fill(1);
            assert_eq!((buffer.bytes().len(), buffer.length()), (length, length));
        }
        assert_eq!(AlignedBuffer::new(0).bytes(), []);
    }
}
