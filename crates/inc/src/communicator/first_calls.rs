//! What a rank has called is told above before all have called, so that ranks that differ hear of it wherever they are
//! and whoever is late.
//!
//! A node does so once for each collective, the next time that its switch tells such things, and only if others have not
//! called by then; and at once when a switch below does. All that it knows is the same, or it would have ended the
//! communicator, so the descriptor of one rank stands for all of them. Where two such meet they are compared.
//!
//! Nothing else follows from it: no slot is opened, nothing is agreed on, and when all have called the descriptor goes up
//! as ever. It stays true when the rank dies.

use millstream_roce::{Piece, SendRequest};

use super::{CONTROL_BASE, Communicator, Progress, Tag};
use crate::abort::{Abort, Violation};
use crate::answer::Answer;
use crate::descriptor::{DESCRIPTOR_BYTES, Descriptor};

impl Communicator {
    /// Whether some have called what others have not, and the node above does not know what.
    pub(crate) fn has_first_call_to_tell(&self) -> bool {
        let unknown = self.uplink.as_ref().is_some_and(|uplink| uplink.told <= self.called);
        let known = self.announced | self.heard != 0;
        unknown && known && !self.first_due && self.abort.is_none()
    }

    /// Has it told, if so.
    pub(crate) fn tell_first_call(&mut self) -> Progress {
        if !self.has_first_call_to_tell() {
            return Progress::None;
        }
        self.first_due = true;
        Progress::Ready
    }

    /// The note to the node above, if it is due and all have not called meanwhile. There is room for it.
    pub(super) fn next_first_call(&mut self) -> Option<SendRequest> {
        if !core::mem::take(&mut self.first_due) {
            return None;
        }
        // Who is known to have called it has the answer to the one before, so that has gone up.
        let next = self.called;
        let first = (self.announced | self.heard).trailing_zeros() as usize;
        let (rank, &descriptor) = self.known(first)?;
        // Where the descriptor of all will be: it has the same bytes, should the note have to be sent again. Who calls has
        // the answer to the collective before, so what was here two before is above.
        let descriptor = Descriptor { destination_address: 0, destination_key: 0, ..descriptor };
        let start = self.small_offset(next) - DESCRIPTOR_BYTES;
        self.control[start..start + DESCRIPTOR_BYTES].copy_from_slice(&descriptor.to_bytes());
        let address = CONTROL_BASE + start as u64;
        let piece = Piece { key: self.key, address, length: DESCRIPTOR_BYTES as u32 };
        self.uplink.as_mut()?.told = next + 1;
        let note = Answer::Called(rank).to_immediate();
        Some(self.message(self.children.len(), Tag::Up, Some(note), piece))
    }

    /// A switch below tells what a rank of its own has called, while others there have not.
    pub(crate) fn called_below(
        &mut self,
        child: usize,
        buffer: usize,
        rank: u32,
    ) -> Result<Progress, Violation> {
        if self.abort.is_some() {
            return Ok(Progress::None);
        }
        let start = self.receive_offset(child, buffer);
        let descriptor = Descriptor::parse(&self.control[start..start + DESCRIPTOR_BYTES])?;
        let edge = &mut self.children[child];
        if !edge.ranks.contains(rank) {
            return Err(Violation::Immediate);
        }
        if descriptor.sequence < edge.next_sequence {
            return Err(Violation::Sequence);
        }
        // Once, when the collective before is agreed on, and before all below it have called.
        if edge.announced != self.agreed || self.heard & 1 << child != 0 {
            return Err(Violation::Early);
        }
        edge.heard = (rank, descriptor);
        self.heard |= 1 << child;
        match self.mismatch_of(child) {
            Some(mismatch) => Ok(self.abort(Abort::Mismatch(mismatch))),
            None => Ok(self.tell_first_call()),
        }
    }
}
