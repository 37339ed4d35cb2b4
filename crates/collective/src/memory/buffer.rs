//! Vectors that are registered as long as they live, and what a collective has that one was given away to.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::slice;

use millstream_inc::Mode;
use millstream_verbs::RegionError;

use super::regions::register;
use super::{Domains, Operand, Operands, READABLE, Regions, Span, operand, writable};
use crate::Element;
use crate::call::Shape;

/// A vector that is registered as a source as long as it lives, and as a destination while a
/// collective writes to it. Made by [`crate::Communicator::allocate`].
pub struct Buffer<T: Element> {
    /// Only to be read. Goes before the elements do.
    region: Option<Regions>,
    elements: NonNull<T>,
    length: usize,
    /// Which communicator can use it.
    owner: u64,
}

/// The right of a call to write to a [`Buffer`].
pub(crate) struct Window {
    /// Until the window goes.
    _region: Option<Regions>,
    operand: Operand,
}

impl Window {
    pub(crate) fn operand(&self) -> Operand {
        self.operand
    }
}

/// A buffer that was given away to a collective. Nobody can refer to its elements.
pub(crate) struct Pending<T: Element> {
    /// Goes before the buffer does. None where the result is copied.
    window: Option<Window>,
    operands: Operands,
    buffer: Buffer<T>,
}

impl<T: Element> Pending<T> {
    /// Takes a buffer and lets a call in place write to it.
    pub(crate) fn new(
        mut buffer: Buffer<T>,
        domain: &Domains,
        mode: Mode,
        shape: &Shape,
    ) -> Result<Self, (Buffer<T>, RegionError)> {
        // SAFETY: the two are kept together, out of reach, and end in this order.
        match unsafe { buffer.open(domain, mode, &shape.destination) } {
            Ok(window) => {
                let operands = buffer.operands_in_place(shape, &window);
                Ok(Self { window: Some(window), operands, buffer })
            }
            Err(error) => Err((buffer, error)),
        }
    }

    /// Takes a buffer whose result is copied.
    pub(crate) fn copied(buffer: Buffer<T>) -> Self {
        Self { window: None, operands: Operands::default(), buffer }
    }

    /// A part of its elements, as long as it lives.
    pub(crate) fn span(&self, range: &Range<usize>) -> Span {
        // SAFETY: nobody can refer to the buffer. Its owner keeps it until the collective is over, or ends that first.
        unsafe { self.buffer.span(range) }
    }

    pub(crate) fn operands(&self) -> Operands {
        self.operands
    }

    /// Gives the buffer back; the switch can write no more.
    pub(crate) fn close(self) -> Buffer<T> {
        let Self { window, buffer, .. } = self;
        drop(window);
        buffer
    }
}

// SAFETY: it owns its elements, which are plain numbers.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: as above; shared, it only gives shared references.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    pub(crate) fn new(domain: &Domains, length: usize, owner: u64) -> Result<Self, RegionError> {
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

    /// A part of it, as a source.
    pub(crate) fn source(&self, range: &Range<usize>) -> Operand {
        match range.is_empty() {
            true => Operand::default(),
            false => operand(self.region.as_ref()).at_element::<T>(range.start),
        }
    }

    /// A part of it.
    ///
    /// # Safety
    /// As of [`Span::new`]: the buffer must live, and not be referred to in conflict with the collective.
    pub(crate) unsafe fn span(&self, range: &Range<usize>) -> Span {
        debug_assert!(range.end <= self.length);
        // SAFETY: within the buffer, and the caller promises the rest.
        unsafe { Span::of_range(self.elements, range) }
    }

    /// What a call in place reads and writes.
    pub(crate) fn operands_in_place(&self, shape: &Shape, window: &Window) -> Operands {
        Operands { source: self.source(&shape.source), destination: window.operand() }
    }

    /// Lets a call write to a part of it, as long as the window lives.
    ///
    /// # Safety
    /// Until the window is dropped, nobody may refer to the elements, and the buffer must live.
    pub(crate) unsafe fn open(
        &mut self,
        domain: &Domains,
        mode: Mode,
        range: &Range<usize>,
    ) -> Result<Window, RegionError> {
        debug_assert!(range.end <= self.length);
        // SAFETY: within the buffer, which is ours, and the caller promised the rest.
        let region = unsafe {
            let elements = self.elements.as_ptr().add(range.start);
            register(domain, elements, range.len(), writable(mode))?
        };
        let operand = operand(region.as_ref());
        Ok(Window { _region: region, operand })
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
