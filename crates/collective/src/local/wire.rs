//! The connection to the switches of a rank that has it for all ranks of its host.
//!
//! What the host has contributed to a chunk is copied into one of two places, by turns, sent from there, and the result
//! comes to the same place. All other memory of the host is out of reach of switches.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use millstream_inc::{Collective, CollectiveCall, Stripe};
use millstream_verbs::RegionError;

use super::layout::HOST_SLOT_BYTES;
use crate::CollectiveError;
use crate::memory::{Domains, Operands, Scratch, Span};
use crate::path::Way;
use crate::tree::Work;

/// Chunks of which something is under way: one is on the wire and one comes after it.
const PLACES: u64 = 2;

/// The connection, with the memory that it sends from.
pub(crate) struct Wire {
    /// Nothing is under way any more when the memory goes: [`Way::disconnect`].
    way: Way,
    scratch: Scratch,
    ranks: Box<[u32]>,
}

/// Bytes of a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Of each rank's part, or of the vector where there are no parts.
    pub(super) part: usize,
    /// Of all parts.
    pub(super) whole: usize,
}

impl Wire {
    /// With memory of these domains, for these ranks.
    pub(crate) fn new(way: Way, domains: &Domains, ranks: &[u32]) -> Result<Self, RegionError> {
        let scratch = Scratch::new(domains, PLACES as usize * HOST_SLOT_BYTES)?;
        Ok(Self { way, scratch, ranks: ranks.into() })
    }

    /// Where a part of a chunk's whole vector is.
    pub(super) fn span(&self, chunk: u64, range: Range<usize>) -> Span {
        let start = place(chunk);
        self.scratch.part(start + range.start..start + range.end)
    }

    /// Has the hosts agree on a call that they do in chunks. `None` when other trees were looked for, for at most so long.
    pub(super) fn agree(
        &self,
        work: &Work,
        limit: Duration,
        patience: Duration,
    ) -> Option<Result<u64, CollectiveError>> {
        let call = CollectiveCall { stripe: Stripe::NONE, ..work.call };
        let (source, destination) = (Span::EMPTY, Span::EMPTY);
        let (operands, registered) = (Operands::default(), true);
        let work = Work { call, operands, registered, source, destination, limit };
        self.way.start_within(&work, patience)
    }

    /// Starts the part of a call that a chunk is; gives its number. `None` as above.
    pub(super) fn start(
        &self,
        work: &Work,
        chunk: u64,
        extent: Extent,
        limit: Duration,
        patience: Duration,
    ) -> Option<Result<u64, CollectiveError>> {
        let CollectiveCall { collective, root, .. } = work.call;
        // Where others send whole vectors, a host with one rank sends its part alone, and gets its part alone.
        let alone = |own: bool| match *self.ranks {
            [rank] if own => rank as usize * extent.part..(rank as usize + 1) * extent.part,
            _ => 0..extent.whole,
        };
        let source = alone(collective == Collective::AllGather);
        let destination = alone(collective == Collective::ReduceScatter);
        let start = place(chunk);
        let operands = Operands {
            source: self.scratch.operand_at(start + source.start),
            destination: self.scratch.operand_at(start + destination.start),
        };
        let call = CollectiveCall {
            count: (extent.part / work.call.data_type.size() as usize) as u64,
            source_address: operands.source.address,
            destination_address: operands.destination.address,
            ..work.call
        };
        // Nothing comes over what is sent, elsewhere than at the root.
        let gets = collective != Collective::Reduce || self.ranks.binary_search(&root).is_ok();
        let destination = if gets { self.span(chunk, destination) } else { Span::EMPTY };
        let (source, registered) = (self.span(chunk, source), true);
        let work = Work { call, operands, registered, source, destination, limit };
        self.way.start_within(&work, patience)
    }

    /// Waits for what was started, for at most so long.
    pub(super) fn wait(
        &self,
        number: u64,
        patience: Duration,
    ) -> Option<Result<(), CollectiveError>> {
        self.way.wait(number, patience)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.way.disconnect();
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("ranks", &self.ranks).finish_non_exhaustive()
    }
}

const fn place(chunk: u64) -> usize {
    (chunk % PLACES) as usize * HOST_SLOT_BYTES
}
