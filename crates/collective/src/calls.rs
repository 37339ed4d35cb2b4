//! The collectives by their names.

use millstream_inc::ReduceOperation;

use crate::{Buffer, Call, CollectiveError, Communicator, Element};

/// Each of these calls one collective and waits for its end. Lengths are in elements, and `count` is the
/// same on all ranks. Wrong arguments ([`CollectiveError::Lengths`], [`CollectiveError::Parts`],
/// [`CollectiveError::Root`], [`CollectiveError::Unsupported`]) are refused before anything is sent, and the
/// communicator is as good as before.
impl Communicator {
    /// Combines the vectors of all ranks; every rank gets the result. Source and destination have
    /// `count` elements.
    ///
    /// The memory is registered for this call; a [`Buffer`] saves that for sources.
    pub fn all_reduce<T: Element>(
        &mut self,
        source: &[T],
        destination: &mut [T],
        operation: ReduceOperation,
    ) -> Result<(), CollectiveError> {
        self.call(Call::AllReduce(operation), source, destination)
    }

    /// As [`Communicator::all_reduce`], with the result in place of this rank's vector. After an
    /// error the vector is a mixture.
    pub fn all_reduce_in_place<T: Element>(
        &mut self,
        vector: &mut [T],
        operation: ReduceOperation,
    ) -> Result<(), CollectiveError> {
        self.call_in_place(Call::AllReduce(operation), vector)
    }

    /// As [`Communicator::all_reduce`], between registered vectors.
    pub fn all_reduce_buffers<T: Element>(
        &mut self,
        source: &Buffer<T>,
        destination: &mut Buffer<T>,
        operation: ReduceOperation,
    ) -> Result<(), CollectiveError> {
        self.call_buffers(Call::AllReduce(operation), source, destination)
    }
}
