//! A GPU that is not there: its memory is bytes of its own at made-up addresses, which the processor cannot
//! access. For tests, on machines without a GPU.
//!
//! Copies are made when they are waited for, and not before: so who looks too early sees it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Backend, CudaError, Gpu, Lane};

/// Where its memory begins: no process has memory of the host there.
pub const FIRST: u64 = 0x00f0_0000_0000_0000;

/// What a copy was, of those that were made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Copied {
    /// To so many bytes of the GPU.
    In(u64, usize),
    /// From so many bytes of the GPU.
    Out(u64, usize),
    /// Within the GPU, from and to.
    Within(u64, u64, usize),
}

/// The memory of a GPU that is not there.
#[derive(Clone, Debug, Default)]
pub struct Pretended {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    allocations: BTreeMap<u64, Vec<u8>>,
    copied: Vec<Copied>,
    lanes: usize,
}

impl Pretended {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The GPU, as number 7.
    pub fn gpu(&self) -> Arc<Gpu> {
        Gpu::new(7, Box::new(self.clone()))
    }

    /// Allocates zeros; their address.
    pub fn allocate(&self, length: usize) -> u64 {
        // A gap between them.
        self.allocate_behind(4096, length)
    }

    /// Allocates zeros right behind the last allocation, as another one: no copy touches both.
    pub fn allocate_adjacent(&self, length: usize) -> u64 {
        self.allocate_behind(0, length)
    }

    fn allocate_behind(&self, gap: u64, length: usize) -> u64 {
        let mut state = self.lock();
        let last = state.allocations.last_key_value();
        let address = last.map_or(FIRST, |(address, bytes)| address + bytes.len() as u64 + gap);
        state.allocations.insert(address, vec![0; length]);
        address
    }

    /// Frees an allocation: copies to and from it fail.
    pub fn free(&self, address: u64) {
        self.lock().allocations.remove(&address);
    }

    /// Its bytes there.
    ///
    /// # Panics
    /// When it has no memory there.
    pub fn read(&self, address: u64, length: usize) -> Vec<u8> {
        self.lock().bytes(address, length).expect("it is allocated").to_vec()
    }

    /// Changes its bytes there.
    ///
    /// # Panics
    /// When it has no memory there.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.lock().bytes(address, bytes.len()).expect("it is allocated").copy_from_slice(bytes);
    }

    /// The copies that were made since this was called last.
    pub fn copied(&self) -> Vec<Copied> {
        std::mem::take(&mut self.lock().copied)
    }

    /// How many lanes there are.
    pub fn lanes(&self) -> usize {
        self.lock().lanes
    }
}

impl State {
    fn bytes(&mut self, address: u64, length: usize) -> Result<&mut [u8], CudaError> {
        let found = self.allocations.range_mut(..=address).next_back();
        let bytes = found.and_then(|(first, bytes)| {
            let offset = usize::try_from(address - first).ok()?;
            bytes.get_mut(offset..offset.checked_add(length)?)
        });
        let name = "CUDA_ERROR_INVALID_VALUE".to_owned();
        bytes.ok_or(CudaError::Call { call: "a pretended copy", code: 1, name })
    }
}

// SAFETY: the buffer has that length.
unsafe impl Backend for Pretended {
    fn open_lane(&self, length: usize) -> Result<Box<dyn Lane>, CudaError> {
        self.lock().lanes += 1;
        let (buffer, gpu) = (vec![0; length].into_boxed_slice(), self.clone());
        let buffer = Box::into_raw(buffer);
        Ok(Box::new(PretendedLane { gpu, buffer, begun: Vec::new() }))
    }
}

#[derive(Debug)]
struct PretendedLane {
    gpu: Pretended,
    buffer: *mut [u8],
    begun: Vec<(usize, Copied)>,
}

// SAFETY: it owns its buffer.
unsafe impl Send for PretendedLane {}

impl PretendedLane {
    fn at(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(offset + length <= self.length(), "{offset} + {length}: not in the buffer");
        self.buffer().wrapping_add(offset)
    }

    fn make(&self, offset: usize, copy: Copied) -> Result<(), CudaError> {
        let mut state = self.gpu.lock();
        match copy {
            Copied::In(to, length) => {
                let to = state.bytes(to, length)?;
                // SAFETY: `at` checks the range; who began the copy changes the buffer there only after it.
                unsafe { self.at(offset, length).copy_to_nonoverlapping(to.as_mut_ptr(), length) };
            }
            Copied::Out(from, length) => {
                let from = state.bytes(from, length)?;
                // SAFETY: as above.
                unsafe { self.at(offset, length).copy_from_nonoverlapping(from.as_ptr(), length) };
            }
            Copied::Within(from, to, length) => {
                let bytes = state.bytes(from, length)?.to_vec();
                state.bytes(to, length)?.copy_from_slice(&bytes);
            }
        }
        state.copied.push(copy);
        Ok(())
    }
}

// SAFETY: it owns its buffer until it is dropped, and copies only when it is waited for.
unsafe impl Lane for PretendedLane {
    fn buffer(&self) -> *mut u8 {
        self.buffer.cast()
    }

    fn length(&self) -> usize {
        self.buffer.len()
    }

    unsafe fn write(&mut self, offset: usize, to: u64, length: usize) -> Result<(), CudaError> {
        self.begun.push((offset, Copied::In(to, length)));
        Ok(())
    }

    unsafe fn read(&mut self, from: u64, offset: usize, length: usize) -> Result<(), CudaError> {
        self.begun.push((offset, Copied::Out(from, length)));
        Ok(())
    }

    unsafe fn copy(&mut self, from: u64, to: u64, length: usize) -> Result<(), CudaError> {
        self.begun.push((0, Copied::Within(from, to, length)));
        Ok(())
    }

    fn wait(&mut self) -> Result<(), CudaError> {
        let begun = std::mem::take(&mut self.begun);
        begun.into_iter().try_for_each(|(offset, copy)| self.make(offset, copy))
    }
}

impl Drop for PretendedLane {
    fn drop(&mut self) {
        self.gpu.lock().lanes -= 1;
        // SAFETY: it was made of a box, and nobody uses it any more.
        drop(unsafe { Box::from_raw(self.buffer) });
    }
}
