//! Hosts that send no descriptors: each SEND is a vector of 32-bit integers, and the answer a SEND of the sum.
//!
//! The k-th message of all hosts is the k-th segment. Its length is known when the first of them is whole.
//!
//! Such a host need not count: it is asked for patience (RNR NAK) while it is a window ahead of the answers that it has
//! acknowledged, since a receive is posted for each of these. So what the rule for slots needs holds: who sends
//! segment `x` has the answer to `x - W`.
//!
//! It hears of no abort, since all its receives are for answers: its connection is closed. Its controller tells why.

use millstream_roce::{AccessDenied, Piece, SendOperation, SendRequest};

use super::{Communicator, Progress, Tag};
use crate::abort::{Abort, Mismatch, Violation};
use crate::descriptor::Field;
use crate::kernels::Kernel;
use crate::slots::SlotError;
use crate::spec::CommunicatorSpec;
use crate::{DataType, ReduceOperation};

/// What messages are added by, where there are no descriptors.
pub(super) fn kernel(spec: &CommunicatorSpec) -> Option<Kernel> {
    let kernel = Kernel::of(DataType::Int32, ReduceOperation::Sum);
    kernel.filter(|_| spec.options.plain)
}

impl Communicator {
    /// Whether its hosts send no descriptors.
    pub(crate) const fn is_plain(&self) -> bool {
        self.plain.is_some()
    }

    /// Takes a packet of a message.
    pub(super) fn contribute_plain(
        &mut self,
        child: usize,
        kernel: Kernel,
        payload: &[u8],
    ) -> Result<Progress, AccessDenied> {
        if self.abort.is_some() {
            self.statistics.discarded_bytes += payload.len() as u64;
            return Ok(Progress::None);
        }
        let edge = &self.children[child];
        let (segment, progress) = (edge.contributed, edge.progress);
        let taken = match progress == 0 && segment >= edge.posted + self.window {
            // There is no receive for it.
            true => Err(SlotError::Busy),
            false => self.slots.open_message(segment, kernel),
        };
        let taken = taken.and_then(|()| self.slots.accumulate(segment, child, progress, payload));
        let length = payload.len() as u32;
        match taken {
            Ok(()) => self.statistics.bytes += u64::from(length),
            // Another message was shorter. By how much is told when all of this one has come.
            Err(SlotError::Length) if progress + length <= self.cut.segment_bytes => {
                self.statistics.discarded_bytes += u64::from(length);
            }
            Err(error) => {
                let longer = matches!(error, SlotError::Length);
                let violation = if longer { Violation::Length } else { Violation::Window };
                let _ = self.broken(child, violation);
                return Err(AccessDenied::InvalidRequest);
            }
        }
        self.children[child].progress += length;
        Ok(Progress::None)
    }

    /// All of a message has come.
    pub(super) fn end_plain(&mut self, child: usize) -> Result<Progress, Violation> {
        if self.abort.is_some() {
            return Ok(Progress::None);
        }
        let edge = &mut self.children[child];
        let (segment, length) = (edge.contributed, core::mem::take(&mut edge.progress));
        if length == 0 || !length.is_multiple_of(DataType::Int32.size()) {
            return Err(Violation::Length);
        }
        match self.slots.end_message(segment, child, length) {
            Ok(contribution) => {
                self.children[child].contributed += 1;
                Ok(self.contributed(segment, contribution))
            }
            Err(_) => Ok(self.lengths_differ(child, segment, length)),
        }
    }

    /// A message has another length than those of others with its number.
    fn lengths_differ(&mut self, child: usize, segment: u64, length: u32) -> Progress {
        let expected = self.slots.result(segment).map_or(0, |(_, length)| length);
        let other = self.children.iter().find(|other| other.contributed > segment);
        let Some(reference) = other.map(|other| other.rank) else {
            return self.broken(child, Violation::Length);
        };
        let elements = |bytes: u32| u64::from(bytes) / u64::from(DataType::Int32.size());
        self.abort(Abort::Mismatch(Mismatch {
            sequence: segment,
            rank: self.children[child].rank,
            reference,
            field: Field::Count,
            expected: elements(expected),
            found: elements(length),
        }))
    }

    /// The next sum to a child.
    pub(super) fn next_plain(&mut self, child: usize) -> Option<SendRequest> {
        let segment = self.children[child].posted;
        let (available, length) = self.slots.result(segment).ok()?;
        if available != length {
            return None;
        }
        let edge = &mut self.children[child];
        edge.posted += 1;
        edge.outstanding += 1;
        let piece = Piece { key: self.key, address: self.slots.offset(segment), length };
        let operation = SendOperation::Send { immediate: None };
        Some(SendRequest {
            solicited: true,
            ..SendRequest::new(Tag::Result.id(child), operation, [piece])
        })
    }
}
