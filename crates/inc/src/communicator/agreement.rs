//! What the ranks want to compute, and whether they want the same.

use super::{Call, Communicator, Progress};
use crate::Collective;
use crate::abort::{ABORT_BYTES, Abort, Mismatch, Violation};
use crate::descriptor::{DESCRIPTOR_BYTES, Descriptor};
use crate::kernels::Kernel;
use crate::layout::Layout;

/// A vector that is not long is cut into so many cells. The last of them is behind the vector by its own
/// length at every switch, which is this part of the whole.
const CELLS_PER_VECTOR: u64 = 32;

/// The most bytes of a cell: what the kernel takes as one train of packets.
const LARGEST_CELL: u32 = 64 << 10;

impl Communicator {
    /// A SEND of a child has arrived: its descriptor, or why a switch below has ended the communicator.
    pub(crate) fn announce(
        &mut self,
        child: usize,
        buffer: usize,
        length: usize,
    ) -> Result<Progress, Violation> {
        if self.abort.is_some() {
            return Ok(Progress::None);
        }
        let start = self.receive_offset(child, buffer);
        let message = Some(length).filter(|&length| length <= self.path_mtu as usize);
        let message = message.and_then(|length| self.control.get(start..start + length));
        let message = message.unwrap_or_default();
        let edge = &self.children[child];
        if edge.is_switch
            && length == ABORT_BYTES
            && let Some(abort) = Abort::parse(message)
        {
            return Ok(self.abort_heard(child, abort));
        }
        let (descriptor, vector) =
            message.split_at_checked(DESCRIPTOR_BYTES).ok_or(Violation::Descriptor)?;
        let descriptor = Descriptor::parse(descriptor)?;
        // Calls in between are on other trees. Whether all ranks say the same is compared.
        if descriptor.sequence < edge.next_sequence || descriptor.sequence == u64::MAX {
            return Err(Violation::Sequence);
        }
        // The collective before must be over for this child: agreed on, and all answers out.
        let over = edge.announced == self.agreed
            && edge.agreed == self.agreed
            && edge.posted == edge.call.layout.end();
        if !over {
            return Err(Violation::Early);
        }
        let call = self.call_of(&descriptor, edge.call.layout.end())?;
        if vector.len() != edge.small_source(&call.layout).len() {
            return Err(Violation::Length);
        }
        self.statistics.bytes += vector.len() as u64;
        let edge = &mut self.children[child];
        edge.announced += 1;
        edge.next_sequence = descriptor.sequence + 1;
        edge.call = call;
        edge.small_at = start + DESCRIPTOR_BYTES;
        self.announced |= 1 << child;
        self.heard &= !(1 << child);
        if let Some(mismatch) = self.mismatch_of(child) {
            return Ok(self.abort(Abort::Mismatch(mismatch)));
        }
        if !self.is_everyone(self.announced) {
            return Ok(Progress::None);
        }
        self.announced = 0;
        self.first_due = false;
        self.call = call;
        self.combine_small();
        self.called += 1;
        if self.uplink.is_none() {
            self.agreed += 1;
        }
        Ok(Progress::Ready)
    }

    /// What a descriptor asks for, if it is offered.
    fn call_of(&self, descriptor: &Descriptor, first: u64) -> Result<Call, Violation> {
        let kernel = match descriptor.collective {
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => {
                Kernel::of(descriptor.data_type, descriptor.operation)
                    .ok_or(Violation::Unsupported)?
            }
            // One rank's bytes: there is nothing to combine them with.
            Collective::Broadcast | Collective::AllGather | Collective::Barrier => {
                Kernel::of_bytes()
            }
        };
        let world = self.cut.world;
        if descriptor.total_bytes(world).is_none() {
            return Err(Violation::Count);
        }
        if descriptor.root >= world {
            return Err(Violation::Root);
        }
        let layout = Layout::new(descriptor, &self.cut, first);
        Ok(Call {
            descriptor: *descriptor,
            layout,
            kernel,
            cell_bytes: self.cell_for(layout.bytes()),
        })
    }

    /// The cells of a vector of so many bytes. A cell waits for its last packet before it goes on, so
    /// they are a small part of the vector; and each costs work, so they are no smaller than that needs.
    pub(super) fn cell_for(&self, bytes: u64) -> u32 {
        let part = (bytes / CELLS_PER_VECTOR).min(LARGEST_CELL.into()) as u32;
        let packets = part.div_ceil(self.path_mtu).max(1);
        (packets * self.path_mtu).min(self.cut.segment_bytes)
    }

    /// A rank at or below a child and what it has called, if it is known of the collective that is to be agreed on next.
    pub(super) fn known(&self, child: usize) -> Option<(u32, &Descriptor)> {
        let edge = self.children.get(child)?;
        let bit = 1 << child;
        match () {
            () if self.announced & bit != 0 => Some((edge.rank, &edge.call.descriptor)),
            () if self.heard & bit != 0 => Some((edge.heard.0, &edge.heard.1)),
            () => None,
        }
    }

    /// Who differs from most others, if what is known of this child is not what others have called, who agree.
    pub(super) fn mismatch_of(&self, child: usize) -> Option<Mismatch> {
        let others = (self.announced | self.heard) & !(1 << child);
        let (_, reference) = self.known(others.trailing_zeros() as usize)?;
        let (_, called) = self.known(child)?;
        reference.difference(called)?;
        let known = (0..self.children.len()).filter_map(|child| self.known(child));
        let mut known: Vec<_> = known.map(|(rank, &descriptor)| (rank, descriptor)).collect();
        known.sort_unstable_by_key(|&(rank, _)| rank);
        Mismatch::among(known.into_iter())
    }
}
