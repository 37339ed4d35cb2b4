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

    /// Combines the vectors of all ranks; the rank `root` gets the result. The source has `count`
    /// elements, and so has the destination at the root. Elsewhere the destination is not touched, and may
    /// have any length.
    pub fn reduce<T: Element>(
        &mut self,
        source: &[T],
        destination: &mut [T],
        operation: ReduceOperation,
        root: u32,
    ) -> Result<(), CollectiveError> {
        self.call(Call::Reduce { operation, root }, source, destination)
    }

    /// As [`Communicator::reduce`], with the result in place of the root's vector. The vectors of
    /// others stay as they are.
    pub fn reduce_in_place<T: Element>(
        &mut self,
        vector: &mut [T],
        operation: ReduceOperation,
        root: u32,
    ) -> Result<(), CollectiveError> {
        self.call_in_place(Call::Reduce { operation, root }, vector)
    }

    /// Every rank gets the vector of the rank `root`. All vectors have `count` elements. After an
    /// error the vector of a rank that is not the root is a mixture.
    pub fn broadcast<T: Element>(
        &mut self,
        vector: &mut [T],
        root: u32,
    ) -> Result<(), CollectiveError> {
        self.call_in_place(Call::Broadcast { root }, vector)
    }

    /// As [`Communicator::broadcast`], from a source at the root to a destination of `count` elements
    /// everywhere, also at the root. Elsewhere the source is not read, and may have any length.
    pub fn broadcast_from<T: Element>(
        &mut self,
        source: &[T],
        destination: &mut [T],
        root: u32,
    ) -> Result<(), CollectiveError> {
        self.call(Call::Broadcast { root }, source, destination)
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.call_in_place::<u8>(Call::Barrier, &mut [])
    }

    /// Combines the vectors of all ranks; every rank gets its part of the result. The destination has
    /// `count` elements, and the source world x `count`: part `r`, from element `r` x `count` on, is
    /// what rank `r` gets the reduction of.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        source: &[T],
        destination: &mut [T],
        operation: ReduceOperation,
    ) -> Result<(), CollectiveError> {
        self.call(Call::ReduceScatter(operation), source, destination)
    }

    /// As [`Communicator::reduce_scatter`], with the result in place of this rank's part of the vector
    /// of world x `count` elements. Its other parts stay as they are.
    pub fn reduce_scatter_in_place<T: Element>(
        &mut self,
        vector: &mut [T],
        operation: ReduceOperation,
    ) -> Result<(), CollectiveError> {
        self.call_in_place(Call::ReduceScatter(operation), vector)
    }

    /// Every rank gets the vectors of all ranks. The source has `count` elements, and the destination
    /// world x `count`: part `r`, from element `r` x `count` on, is the vector of rank `r`.
    pub fn all_gather<T: Element>(
        &mut self,
        source: &[T],
        destination: &mut [T],
    ) -> Result<(), CollectiveError> {
        self.call(Call::AllGather, source, destination)
    }

    /// As [`Communicator::all_gather`], with this rank's part of the vector of world x `count` elements as
    /// the source. After an error the vector is a mixture.
    pub fn all_gather_in_place<T: Element>(
        &mut self,
        vector: &mut [T],
    ) -> Result<(), CollectiveError> {
        self.call_in_place(Call::AllGather, vector)
    }
}
