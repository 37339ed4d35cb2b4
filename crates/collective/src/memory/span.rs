//! Memory of a caller that is copied from and to, and registered.

use std::ops::Range;
use std::ptr::NonNull;

use millstream_net::shared_memory::GroupMemory;

use crate::Element;
use crate::call::Shape;

/// Memory of a caller that a small vector is copied from, or its result to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(super) address: NonNull<u8>,
    pub(super) length: usize,
}

// SAFETY: whoever makes one promises that its bytes can be used from any thread.
unsafe impl Send for Span {}

impl Span {
    pub(crate) const EMPTY: Self = Self { address: NonNull::dangling(), length: 0 };

    /// # Safety
    /// As long as a collective that names it goes on, the bytes must stay where they are and not be referred to in conflict
    /// with being read, or written where they are a destination.
    pub(crate) unsafe fn new(address: *mut u8, length: usize) -> Self {
        match NonNull::new(address) {
            Some(address) => Self { address, length },
            None => Self::EMPTY,
        }
    }

    /// # Safety
    /// As of [`Span::new`]: the borrow must last as long.
    pub(crate) unsafe fn of_source<T: Element>(elements: &[T]) -> Self {
        // SAFETY: the caller promises it, and a source is only read.
        unsafe { Self::new(elements.as_ptr().cast_mut().cast(), size_of_val(elements)) }
    }

    /// # Safety
    /// As of [`Span::new`]: the borrow must last as long.
    pub(crate) unsafe fn of_destination<T: Element>(elements: &mut [T]) -> Self {
        // SAFETY: the caller promises it. Any bytes are elements, which are plain numbers.
        unsafe { Self::new(elements.as_mut_ptr().cast(), size_of_val(elements)) }
    }

    /// Some of the elements from this one on.
    ///
    /// # Safety
    /// As of [`Span::new`], and the range must be within one allocation that begins there.
    pub(super) unsafe fn of_range<T: Element>(elements: NonNull<T>, range: &Range<usize>) -> Self {
        // SAFETY: the caller promises it.
        unsafe {
            let start = elements.as_ptr().add(range.start);
            Self::new(start.cast(), range.len() * size_of::<T>())
        }
    }

    /// Whether so many bytes from an offset on are also some of another one.
    pub(crate) fn overlaps(self, offset: usize, length: usize, other: Self) -> bool {
        let (start, theirs) = (self.address.addr().get() + offset, other.address.addr().get());
        length > 0 && other.length > 0 && start < theirs + other.length && theirs < start + length
    }

    /// Bytes.
    pub(crate) const fn length(self) -> usize {
        self.length
    }

    /// Where so many bytes from an offset on are, if they are all of it.
    fn range(self, offset: usize, length: usize) -> Option<*mut u8> {
        let within = offset.checked_add(length).is_some_and(|end| end <= self.length);
        within.then(|| self.address.as_ptr().wrapping_add(offset))
    }

    /// Copies bytes of it, from an offset on.
    pub(crate) fn load(self, offset: usize, bytes: &mut [u8]) {
        if let Some(from) = self.range(offset, bytes.len()) {
            // SAFETY: within what whoever made the span promised, and `bytes` is other memory.
            unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        }
    }

    /// Copies bytes to it, from an offset on.
    pub(crate) fn store(self, offset: usize, bytes: &[u8]) {
        if let Some(to) = self.range(offset, bytes.len()) {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        }
    }

    /// Copies a part of another one, which may be the same, to a part of this.
    pub(crate) fn copy(self, offset: usize, other: Self, from: usize, length: usize) {
        if let (Some(to), Some(from)) = (self.range(offset, length), other.range(from, length))
            && from != to
        {
            // SAFETY: within what whoever made the spans promised.
            unsafe { std::ptr::copy(from, to, length) };
        }
    }

    /// Copies a part of it to what ranks share.
    pub(crate) fn share(self, offset: usize, length: usize, to: &GroupMemory, at: usize) {
        if let Some(from) = self.range(offset, length) {
            // SAFETY: within what whoever made the span promised.
            unsafe { to.write_from(at, from, length) };
        }
    }

    /// Copies what ranks share to a part of it.
    pub(crate) fn fetch(self, offset: usize, length: usize, from: &GroupMemory, at: usize) {
        if let Some(to) = self.range(offset, length) {
            // SAFETY: within what whoever made the span promised.
            unsafe { from.read_to(at, to, length) };
        }
    }

    /// The source and the destination of a call in place.
    ///
    /// # Safety
    /// As of [`Span::new`]: the borrow must last as long.
    pub(crate) unsafe fn of_parts<T: Element>(vector: &mut [T], shape: &Shape) -> [Self; 2] {
        // One pointer for both, since they may be the same elements.
        let (start, length) = (vector.as_mut_ptr(), vector.len());
        [&shape.source, &shape.destination].map(|range| {
            assert!(range.start <= range.end && range.end <= length, "{range:?} of {length}");
            // SAFETY: within the vector, and the caller promises the rest.
            unsafe { Self::new(start.add(range.start).cast(), range.len() * size_of::<T>()) }
        })
    }
}
