//! Slices that are registered as long as a call borrows them.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use millstream_inc::Mode;
use millstream_verbs::RegionError;

use super::regions::register;
use super::{Domains, Operand, Operands, READABLE, Regions, Span, operand, writable};
use crate::Element;
use crate::call::Shape;

/// Slices that are registered for one call.
pub(crate) struct Borrowed<'a, T> {
    source: Option<Regions>,
    destination: Option<Regions>,
    operands: Operands,
    spans: [Span; 2],
    /// Neither used nor released by their owner meanwhile.
    _slices: PhantomData<&'a mut [T]>,
}

impl<'a, T: Element> Borrowed<'a, T> {
    /// Registers what a call reads of one slice and writes of another.
    pub(crate) fn apart(
        domain: &Domains,
        mode: Mode,
        shape: &Shape,
        source: &'a [T],
        destination: &'a mut [T],
    ) -> Result<Self, RegionError> {
        let (source, destination) =
            (&source[shape.source.clone()], &mut destination[shape.destination.clone()]);
        // SAFETY: only read, and both `register` and `Span` ask for what is kept here.
        let (source, source_span) = unsafe {
            let span = Span::of_source(source);
            (register(domain, source.as_ptr().cast_mut(), source.len(), READABLE)?, span)
        };
        let (elements, length) = (destination.as_mut_ptr(), destination.len());
        // SAFETY: the slice is exclusively ours, and the rest is as above.
        let (destination, destination_span) = unsafe {
            let span = Span::new(elements.cast(), length * size_of::<T>());
            (register(domain, elements, length, writable(mode))?, span)
        };
        let spans = [source_span, destination_span];
        let operands = Operands {
            source: operand(source.as_ref()),
            destination: operand(destination.as_ref()),
        };
        Ok(Self { source, destination, operands, spans, _slices: PhantomData })
    }

    /// Registers what a call reads and writes of one slice.
    pub(crate) fn in_place(
        domain: &Domains,
        mode: Mode,
        shape: &Shape,
        vector: &'a mut [T],
    ) -> Result<Self, RegionError> {
        let elements = NonNull::from(vector).cast::<T>();
        // SAFETY: the slice is exclusively ours as long as this lives, and both ranges are within it.
        let (source, destination, spans) = unsafe {
            let (source, destination) = register_in_place(domain, mode, shape, elements)?;
            let span = |range: &Range<usize>| Span::of_range(elements, range);
            (source, destination, [span(&shape.source), span(&shape.destination)])
        };
        let operands = operands_in_place::<T>(shape, source.as_ref(), destination.as_ref());
        Ok(Self { source, destination, operands, spans, _slices: PhantomData })
    }

    /// Source and destination.
    pub(crate) fn spans(&self) -> [Span; 2] {
        self.spans
    }

    pub(crate) fn operands(&self) -> Operands {
        self.operands
    }
}

impl<T> Drop for Borrowed<'_, T> {
    fn drop(&mut self) {
        // Here and not when the fields go, so that the borrow lasts until then.
        self.source = None;
        self.destination = None;
    }
}

/// The regions of what a call reads and writes of one vector: what is read has none of its own where it
/// is a part of what is written.
///
/// # Safety
/// As of [`register`], for all elements of the shape, exclusively.
unsafe fn register_in_place<T: Element>(
    domain: &Domains,
    mode: Mode,
    shape: &Shape,
    elements: NonNull<T>,
) -> Result<(Option<Regions>, Option<Regions>), RegionError> {
    let part = |range: &Range<usize>, access| {
        // SAFETY: within the vector, and the caller promised the rest.
        unsafe { register(domain, elements.as_ptr().add(range.start), range.len(), access) }
    };
    let destination = part(&shape.destination, writable(mode))?;
    let source = match is_within(&shape.source, &shape.destination) {
        true => None,
        false => part(&shape.source, READABLE)?,
    };
    Ok((source, destination))
}

fn is_within(inner: &Range<usize>, outer: &Range<usize>) -> bool {
    inner.start >= outer.start && inner.end <= outer.end
}

/// What work requests of a call in place name, with the regions of [`register_in_place`].
fn operands_in_place<T>(
    shape: &Shape,
    source: Option<&Regions>,
    destination: Option<&Regions>,
) -> Operands {
    let destination = operand(destination);
    let source = match is_within(&shape.source, &shape.destination) {
        true if shape.source.is_empty() => Operand::default(),
        true => destination.at_element::<T>(shape.source.start - shape.destination.start),
        false => operand(source),
    };
    Operands { source, destination }
}
