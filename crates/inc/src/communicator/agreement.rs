//! What the ranks want to compute, and whether they want the same.

use super::{Child, Communicator, Progress};
use crate::Collective;
use crate::abort::{Abort, Mismatch, Violation};
use crate::descriptor::Descriptor;
use crate::reduce::kernel;
use crate::slots::all_children;
use crate::spec::{RECEIVE_BYTES, RECEIVES_PER_CHILD};

/// A vector that is not long is cut into so many cells. The last of them is behind the vector by its own
/// length at every switch, which is this part of the whole.
const CELLS_PER_VECTOR: u64 = 32;

/// The most bytes of a cell: what the kernel takes as one train of packets.
const LARGEST_CELL: u32 = 64 << 10;

impl Communicator {
    /// A SEND of a child has arrived: its descriptor.
    pub(crate) fn announce(
        &mut self,
        child: usize,
        buffer: usize,
        length: usize,
    ) -> Result<Progress, Violation> {
        if self.abort.is_some() {
            return Ok(Progress::None);
        }
        let start = (child * RECEIVES_PER_CHILD + buffer) * RECEIVE_BYTES;
        let message = &self.control[start..start + length.min(RECEIVE_BYTES)];
        let descriptor = Descriptor::parse(message).map_err(|_| Violation::Descriptor)?;
        let edge = &mut self.children[child];
        if descriptor.sequence != edge.announced {
            return Err(Violation::Sequence);
        }
        // The collective before must be over for this child: agreed on, and all results out.
        let over = edge.announced == self.agreed
            && edge.remaining == 0
            && edge.posted == edge.contributed
            && edge.agreed == self.agreed;
        if !over {
            return Err(Violation::Early);
        }
        let Some(kernel) = kernel(descriptor.data_type, descriptor.operation)
            .filter(|_| descriptor.collective == Collective::AllReduce)
        else {
            return Err(Violation::Unsupported);
        };
        edge.announced += 1;
        edge.descriptor = descriptor;
        edge.remaining = descriptor.bytes().ok_or(Violation::Descriptor)?;
        match self.announced.trailing_zeros() as usize {
            first if first < self.children.len() => {
                let first = &self.children[first].descriptor;
                self.doomed |= first.difference(&descriptor).is_some();
            }
            _ => {
                self.kernel = kernel;
                self.cell_bytes = self.cell_for(self.children[child].remaining);
            }
        }
        self.announced |= 1 << child;
        if self.announced != all_children(self.children.len()) {
            return Ok(Progress::None);
        }
        if let Some(mismatch) = self.mismatch() {
            return Ok(self.abort(Abort::Mismatch(mismatch)));
        }
        self.announced = 0;
        self.agreed += 1;
        Ok(Progress::Ready)
    }

    /// The cells of a vector of so many bytes. A cell waits for its last packet before it goes on, so
    /// they are a small part of the vector; and each costs work, so they are no smaller than that needs.
    fn cell_for(&self, bytes: u64) -> u32 {
        let part = (bytes / CELLS_PER_VECTOR).min(LARGEST_CELL.into()) as u32;
        let packets = part.div_ceil(self.path_mtu).max(1);
        (packets * self.path_mtu).min(self.segment_bytes)
    }

    /// Who differs from most, once all descriptors are here. Among equally many the side of the
    /// lowest rank is taken for the right one.
    fn mismatch(&self) -> Option<Mismatch> {
        let same = |child: &&Child| {
            let ours = &child.descriptor;
            self.children
                .iter()
                .filter(|other| ours.difference(&other.descriptor).is_none())
                .count()
        };
        // `max_by_key` returns the last of equals, so the order is turned around.
        let reference = self.children.iter().rev().max_by_key(same)?;
        self.children.iter().find_map(|child| {
            let (field, expected, found) = reference.descriptor.difference(&child.descriptor)?;
            Some(Mismatch {
                sequence: reference.descriptor.sequence,
                rank: child.rank,
                reference: reference.rank,
                field,
                expected,
                found,
            })
        })
    }
}
