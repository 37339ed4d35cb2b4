//! Vectors that begin at an odd address, where no slice of elements of several bytes can: memory that is named by
//! its address.

use std::marker::PhantomData;

use millstream_collective::{Call, CollectiveError, Communicator, Mode, RawCall};

use crate::collective::{Number, Parts};

/// What an address is told by: no element is aligned to more.
const ALIGNMENT: usize = 8;

/// A vector with one more element before it and one after it, none of which is aligned, unless it has one byte.
pub(super) struct OddVector<T> {
    bytes: Vec<u8>,
    /// Where the element before it begins.
    from: usize,
    length: usize,
    elements: PhantomData<T>,
}

impl<T: Number> OddVector<T> {
    /// So many elements, of which the first is so many bytes, an odd number, behind a multiple of 8.
    pub(super) fn new(length: usize, behind: usize) -> Self {
        assert!(behind % 2 == 1 && behind < ALIGNMENT, "{behind} bytes behind");
        let bytes = vec![0; (length + 2) * size_of::<T>() + ALIGNMENT];
        let first = bytes.as_ptr().addr() + size_of::<T>();
        let from = (ALIGNMENT + behind - first % ALIGNMENT) % ALIGNMENT;
        let mut vector = Self { bytes, from, length, elements: PhantomData };
        for place in 0..length + 2 {
            vector.set(place, T::FILLER);
        }
        vector
    }

    /// The elements, those before and after the vector included.
    pub(super) fn elements(&self) -> impl ExactSizeIterator<Item = T> {
        let range = self.from..self.from + (self.length + 2) * size_of::<T>();
        self.bytes[range].chunks_exact(size_of::<T>()).map(|bytes| {
            // SAFETY: so many bytes are there, and any are an element, which is a plain number.
            unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
        })
    }

    /// Sets an element: that before the vector has place 0.
    pub(super) fn set(&mut self, place: usize, element: T) {
        let start = self.from + place * size_of::<T>();
        let bytes = &mut self.bytes[start..start + size_of::<T>()];
        // SAFETY: so many bytes are there.
        unsafe { bytes.as_mut_ptr().cast::<T>().write_unaligned(element) };
    }

    /// The address of the vector's first element.
    fn first(&mut self) -> *mut u8 {
        self.bytes.as_mut_ptr().wrapping_add(self.from + size_of::<T>())
    }
}

/// Calls a collective with these vectors, or in place of the destination if there is no source.
pub(super) fn call<T: Number>(
    communicator: &Communicator,
    (call, mode, count): (Call, Mode, usize),
    parts: &Parts,
    source: Option<&mut OddVector<T>>,
    destination: &mut OddVector<T>,
) -> Result<(), CollectiveError> {
    let too_long = CollectiveError::TooLong { count: count as u64, data_type: T::DATA_TYPE };
    let [read, written] = call.lengths(communicator.world(), count).ok_or(too_long)?;
    let (to, room) = (destination.first(), destination.length);
    let (from, there) = match source {
        Some(source) => (source.first(), source.length),
        None => (to, room),
    };
    let fits = |start: usize, length: usize, all| start + length <= all;
    assert!(fits(parts.source.start, read, there) && fits(parts.result.start, written, room));
    let raw = RawCall {
        call,
        data_type: T::DATA_TYPE,
        mode,
        count,
        source: from.wrapping_add(parts.source.start * size_of::<T>()),
        destination: to.wrapping_add(parts.result.start * size_of::<T>()),
    };
    // SAFETY: both vectors have as many elements from there on, and are borrowed exclusively until this returns.
    unsafe { communicator.call_raw(&raw) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_begin_at_each_odd_byte() {
        fn check<T: Number>() {
            for behind in [1, 3, 5, 7] {
                let mut vector = OddVector::<T>::new(3, behind);
                assert_eq!(vector.first().addr() % ALIGNMENT, behind);
                assert!(vector.elements().eq([T::FILLER; 5]));
                vector.set(1, T::default());
                let elements: Vec<T> = vector.elements().collect();
                assert!(elements[0] == T::FILLER && elements[1] == T::default());
                assert!(elements[2..] == [T::FILLER; 3]);
            }
        }
        check::<u8>();
        check::<i16>();
        check::<f32>();
        check::<u64>();
    }
}
