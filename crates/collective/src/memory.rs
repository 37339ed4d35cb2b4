//! Registered memory: the only place of this crate with `unsafe`.
//!
//! Remotes write at any time they like, as far as a queue pair lets them. So the queue pair of a
//! communicator lets the switch write only while a collective runs (see `Engine`), only the
//! destination of that collective is registered for writing, and while it runs no Rust reference to
//! it is used: a [`Buffer`] was given away, a slice is borrowed by the call that waits.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;

use millstream_verbs::{Access, MemoryRegion, ProtectionDomain, RegionError};

use crate::Element;

const READABLE: Access = Access::empty();
const WRITABLE: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

/// Memory as work requests name it. Without elements, nothing is registered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Operand {
    pub(crate) local_key: u32,
    /// As the switch must name it. Only soft devices have one key for both.
    pub(crate) remote_key: u32,
    pub(crate) address: u64,
}

/// A slice that is registered for one call.
pub(crate) struct Borrowed<'a, T> {
    region: Option<MemoryRegion>,
    /// Neither used nor released by its owner meanwhile.
    _slice: std::marker::PhantomData<&'a mut [T]>,
}

impl<'a, T: Element> Borrowed<'a, T> {
    /// A source.
    pub(crate) fn source(domain: &ProtectionDomain, slice: &'a [T]) -> Result<Self, RegionError> {
        // SAFETY: only read, and `register` says the rest.
        unsafe { Self::register(domain, slice.as_ptr().cast_mut(), slice.len(), READABLE) }
    }

    /// A destination, or both at once.
    pub(crate) fn destination(
        domain: &ProtectionDomain,
        slice: &'a mut [T],
    ) -> Result<Self, RegionError> {
        // SAFETY: the slice is exclusively ours, and `register` says the rest.
        unsafe { Self::register(domain, slice.as_mut_ptr(), slice.len(), WRITABLE) }
    }

    /// # Safety
    /// The elements must be borrowed for `'a` in a way that allows `access`.
    unsafe fn register(
        domain: &ProtectionDomain,
        elements: *mut T,
        length: usize,
        access: Access,
    ) -> Result<Self, RegionError> {
        let bytes = length * size_of::<T>();
        let region = match bytes {
            0 => None,
            // SAFETY: the elements stay where they are as long as the borrow lasts, and the region
            // is dropped before it ends: the callers in `communicator` keep it in a local variable, which
            // they neither forget nor give away. Any bytes are elements.
            _ => Some(unsafe { domain.register_memory(elements.cast(), bytes, access)? }),
        };
        Ok(Self { region, _slice: std::marker::PhantomData })
    }

    pub(crate) fn operand(&self) -> Operand {
        operand(self.region.as_ref())
    }
}

fn operand(region: Option<&MemoryRegion>) -> Operand {
    region.map_or_else(Operand::default, |region| Operand {
        local_key: region.key(),
        remote_key: region.remote_key(),
        address: region.address(),
    })
}

/// A vector that is registered as a source as long as it lives, and as a destination while a
/// collective writes to it. Made by [`crate::Communicator::allocate`].
pub struct Buffer<T: Element> {
    /// Only to be read. Goes before the elements do.
    region: Option<MemoryRegion>,
    elements: NonNull<T>,
    length: usize,
    /// Which communicator can use it.
    owner: u64,
}

/// The right of the switch to write to a [`Buffer`].
pub(crate) struct Window(Option<MemoryRegion>);

impl Window {
    pub(crate) fn operand(&self) -> Operand {
        operand(self.0.as_ref())
    }
}

/// A buffer that was given away to a collective. Nobody can refer to its elements.
pub(crate) struct Pending<T: Element> {
    /// Goes before the buffer does.
    window: Window,
    buffer: Buffer<T>,
}

impl<T: Element> Pending<T> {
    /// Takes a buffer and lets the switch write to it.
    pub(crate) fn new(
        mut buffer: Buffer<T>,
        domain: &ProtectionDomain,
    ) -> Result<Self, (Buffer<T>, RegionError)> {
        // SAFETY: the two are kept together, out of reach, and end in this order.
        match unsafe { buffer.open(domain) } {
            Ok(window) => Ok(Self { window, buffer }),
            Err(error) => Err((buffer, error)),
        }
    }

    pub(crate) fn operand(&self) -> Operand {
        self.window.operand()
    }

    pub(crate) fn len(&self) -> usize {
        self.buffer.length
    }

    /// Gives the buffer back; the switch can write no more.
    pub(crate) fn close(self) -> Buffer<T> {
        let Self { window, buffer } = self;
        drop(window);
        buffer
    }
}

// SAFETY: it owns its elements, which are plain numbers.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: as above; shared, it only gives shared references.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    pub(crate) fn new(
        domain: &ProtectionDomain,
        length: usize,
        owner: u64,
    ) -> Result<Self, RegionError> {
        let elements = Box::into_raw(vec![T::default(); length].into_boxed_slice()).cast::<T>();
        // A pointer to a boxed slice is never null.
        let elements = NonNull::new(elements).unwrap_or(NonNull::dangling());
        let mut buffer = Self { region: None, elements, length, owner };
        let bytes = length * size_of::<T>();
        if bytes > 0 {
            // SAFETY: the elements are ours until `drop`, where the region goes first, and nobody
            // can write through it.
            let region =
                unsafe { domain.register_memory(elements.as_ptr().cast(), bytes, READABLE)? };
            buffer.region = Some(region);
        }
        Ok(buffer)
    }

    /// As a source.
    pub(crate) fn operand(&self) -> Operand {
        operand(self.region.as_ref())
    }

    /// Lets the switch write to it, as long as the window lives.
    ///
    /// # Safety
    /// Until the window is dropped, nobody may refer to the elements, and the buffer must live.
    pub(crate) unsafe fn open(&mut self, domain: &ProtectionDomain) -> Result<Window, RegionError> {
        let bytes = self.length * size_of::<T>();
        let region = match bytes {
            0 => None,
            // SAFETY: ours, and the caller promised the rest. Any bytes are elements.
            _ => Some(unsafe {
                domain.register_memory(self.elements.as_ptr().cast(), bytes, WRITABLE)?
            }),
        };
        Ok(Window(region))
    }

    pub(crate) fn owner(&self) -> u64 {
        self.owner
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: so many elements, initialised, ours; the switch writes only through a `Window`.
        unsafe { slice::from_raw_parts(self.elements.as_ptr(), self.length) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.elements.as_ptr(), self.length) }
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        self.region = None;
        let elements = std::ptr::slice_from_raw_parts_mut(self.elements.as_ptr(), self.length);
        // SAFETY: from a box of this length, and nobody else has it.
        drop(unsafe { Box::from_raw(elements) });
    }
}

impl<T: Element> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} x {})", self.length, T::DATA_TYPE)
    }
}

/// Room for control messages: descriptors out, aborts in.
pub(crate) struct ControlBlock<const BYTES: usize> {
    /// Goes before the bytes do.
    region: Option<MemoryRegion>,
    bytes: NonNull<[u8; BYTES]>,
}

// SAFETY: it owns its bytes.
unsafe impl<const BYTES: usize> Send for ControlBlock<BYTES> {}

impl<const BYTES: usize> ControlBlock<BYTES> {
    pub(crate) fn new(domain: &ProtectionDomain) -> Result<Self, RegionError> {
        let bytes = NonNull::from(Box::leak(Box::new([0; BYTES])));
        let mut block = Self { region: None, bytes };
        // SAFETY: the bytes are ours until `drop`, where the region goes first, and never referred
        // to: `load` and `store` copy. Remotes cannot write here, only receives of ours can.
        let region =
            unsafe { domain.register_memory(bytes.as_ptr().cast(), BYTES, Access::LOCAL_WRITE)? };
        block.region = Some(region);
        Ok(block)
    }

    pub(crate) fn operand(&self) -> Operand {
        operand(self.region.as_ref())
    }

    /// What it holds now.
    pub(crate) fn load(&self) -> [u8; BYTES] {
        // SAFETY: allocated, initialised, and any bytes are bytes. What the device may be writing
        // belongs to a receive that is not complete; the worker looks at it when it is.
        unsafe { self.bytes.as_ptr().read_volatile() }
    }

    /// Copies bytes to its start. Those beyond its end are left out.
    pub(crate) fn store(&mut self, bytes: &[u8]) {
        let length = bytes.len().min(BYTES);
        // SAFETY: within the allocation, and `bytes` is another one.
        unsafe {
            let start = self.bytes.as_ptr().cast::<u8>();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, length);
        }
    }
}

impl<const BYTES: usize> Drop for ControlBlock<BYTES> {
    fn drop(&mut self) {
        self.region = None;
        // SAFETY: from the box in `new`, and nobody else has it.
        drop(unsafe { Box::from_raw(self.bytes.as_ptr()) });
    }
}
