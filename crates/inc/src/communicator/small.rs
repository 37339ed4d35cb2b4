//! Vectors that fit a packet: they go up behind the descriptor, and the result comes down with the answer.
//!
//! What children send stays in their receive buffers until all have announced, and is combined then, in the
//! order of ports. What a child may send meanwhile, an abort or whom it waits for, is no longer than the descriptor
//! before the vector.
//!
//! There is room for two vectors, by the parity of the collective's number. A child announces collective `n + 2`
//! only when it has the answer to `n + 1`, which there is only when all children have announced that, and so
//! have the answer to `n`. So the room of `n` can be used again when all have announced `n + 2`.

use core::ops::Range;

use millstream_roce::Piece;

use super::{CONTROL_BASE, Child, Communicator};
use crate::Collective;
use crate::descriptor::DESCRIPTOR_BYTES;
use crate::layout::Layout;

impl Child {
    /// What of a whole vector it sends with its descriptor.
    pub(super) fn small_source(&self, layout: &Layout) -> Range<usize> {
        if self.is_whole {
            layout.small_source_of(&self.ranks)
        } else {
            layout.small_source(self.rank)
        }
    }

    /// What of a whole vector it gets with the answer.
    pub(super) fn small_target(&self, layout: &Layout) -> Range<usize> {
        if self.is_whole {
            layout.small_target_of(&self.ranks)
        } else {
            layout.small_target(self.rank)
        }
    }
}

impl Communicator {
    /// Where in the control messages the small vector of a collective is. A descriptor has room before it.
    pub(super) fn small_offset(&self, sequence: u64) -> usize {
        let packet = self.path_mtu as usize;
        let from_end = 3 - (sequence % 2) as usize;
        self.note_start() - from_end * packet + DESCRIPTOR_BYTES
    }

    /// A part of the small vector of a collective.
    pub(super) fn small_piece(&self, sequence: u64, part: Range<usize>) -> Piece {
        if part.is_empty() {
            return Piece::default();
        }
        let address = CONTROL_BASE + (self.small_offset(sequence) + part.start) as u64;
        Piece { key: self.key, address, length: part.len() as u32 }
    }

    /// All children have announced [`Communicator::call`], which is not counted yet: makes one vector of what
    /// came with it.
    pub(super) fn combine_small(&mut self) {
        let layout = &self.call.layout;
        let length = layout.small_bytes();
        if length == 0 {
            return;
        }
        let at = self.small_offset(self.called);
        let (received, vectors) = self.control.split_at_mut(at);
        let vector = &mut vectors[..length];
        match self.call.descriptor.collective {
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => {
                let kernel = &self.call.kernel;
                let sums = match kernel.accumulator_size() / kernel.wire_size() {
                    1 => &mut *vector,
                    times => {
                        if self.wide.is_empty() {
                            self.wide = vec![0; 2 * self.path_mtu as usize].into();
                        }
                        &mut self.wide[..times * length]
                    }
                };
                for (number, child) in self.children.iter().enumerate() {
                    let payload = &received[child.small_at..child.small_at + length];
                    match number {
                        0 => kernel.first(sums, payload),
                        _ => kernel.combine(sums, payload),
                    }
                }
                kernel.finish(sums, self.slots.root_of());
                if kernel.accumulator_size() != kernel.wire_size() {
                    vector.copy_from_slice(&self.wide[..length]);
                }
            }
            Collective::Broadcast | Collective::AllGather | Collective::Barrier => {
                // What is not of this node's ranks says nothing of earlier calls.
                vector.fill(0);
                for child in &self.children {
                    let payload = child.small_source(layout);
                    let payload = &received[child.small_at..child.small_at + payload.len()];
                    if self.call.descriptor.collective == Collective::Broadcast {
                        vector[..payload.len()].copy_from_slice(payload);
                        continue;
                    }
                    for ranks in child.ranks.ranges() {
                        let part = layout.small_part(ranks.clone());
                        let from = if child.is_whole { part.start } else { 0 };
                        vector[part.clone()].copy_from_slice(&payload[from..from + part.len()]);
                    }
                }
            }
        }
    }

    /// The answer from above to the collective that is to be agreed on next has brought so many bytes of the
    /// vector, all or none: they replace what was sent up.
    pub(super) fn receive_small(&mut self, length: usize) {
        let (to, from) = (self.small_offset(self.agreed), self.message_start());
        self.control.copy_within(from..from + length, to);
    }
}
