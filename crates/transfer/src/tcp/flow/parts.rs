//! Messages, and how they are filled from tasks.

use std::sync::Arc;
use std::time::Instant;

use super::Framing;
use crate::batch::BatchShared;
use crate::gpu;
use crate::memory::LocalMemory;
use crate::segment::OpenSegment;
use crate::task::WideSlice;
use crate::tcp::message::{Fault, MAX_DATA, MAX_PIECES};
use crate::tcp::pieces::Pieces;
use crate::terms::Terms;
use crate::{FailureReason, Opcode, TransferState};

/// What the tasks of a run are of.
#[derive(Clone)]
pub(in crate::tcp) struct Origin {
    pub(in crate::tcp) batch: Arc<BatchShared>,
    pub(in crate::tcp) local: Arc<LocalMemory>,
    pub(in crate::tcp) segment: Arc<OpenSegment>,
    pub(in crate::tcp) terms: Terms,
}

/// What is left to do of a task. There are many at a time, so what few of them have is kept apart.
pub(super) struct Task {
    pub(super) generation: u32,
    /// Its [`Origin`], and its index in the batch of that.
    pub(super) origin: u32,
    pub(super) index: u32,
    pub(super) under_way: u32,
    /// The next piece to post, and how much of it was.
    pub(super) next: u64,
    pub(super) offset: u64,
    pub(super) done: u64,
    pub(super) opcode: Opcode,
    pub(super) posted: bool,
    /// It failed for want of a connection, and not by what it asks for.
    pub(super) stranded: bool,
    pub(super) undefined: bool,
    pub(super) unconfirmed: bool,
    /// It ends so whatever becomes of it, since then.
    pub(super) ending: Option<Box<(TransferState, Instant)>>,
    pub(super) failure: Option<Box<FailureReason>>,
}

/// A batch of many is queued, sent and ended in little more time than its memory takes.
const _: () = assert!(size_of::<Option<Task>>() <= 64);

impl Task {
    pub(super) fn is_wanted(&self) -> bool {
        self.ending.is_none() && self.failure.is_none()
    }

    /// The first reason is the one to report.
    pub(super) fn fail(&mut self, reason: FailureReason, stranded: bool) {
        if self.is_wanted() {
            self.failure = Some(Box::new(reason));
            self.stranded = stranded;
        }
    }
}

/// Something of a task that is moved by a message.
pub(super) struct Part {
    pub(super) slot: u32,
    pub(super) remote: u64,
    pub(super) length: u64,
    /// What the peer has said of it.
    pub(super) fault: Option<Fault>,
}

/// What is sent at a time, and answered.
#[derive(Default)]
pub(in crate::tcp) struct Message {
    pub(in crate::tcp) id: u64,
    /// `None` of a fence.
    pub(in crate::tcp) opcode: Option<Opcode>,
    /// The connection that a fence ends.
    pub(in crate::tcp) fence: u128,
    /// Local memory.
    pub(in crate::tcp) pieces: Pieces,
    pub(super) parts: Vec<Part>,
    pub(in crate::tcp) length: u64,
    pub(super) attempts: u32,
    /// Its data has come, or comes.
    pub(super) has_data: bool,
}

impl Message {
    /// Where its parts are at the peer: addresses and lengths.
    pub(in crate::tcp) fn remote(&self) -> impl ExactSizeIterator<Item = (u64, u64)> {
        self.parts.iter().map(|part| (part.remote, part.length))
    }

    /// The peer has said this of a part; whether there is one.
    pub(in crate::tcp) fn set_fault(&mut self, index: u32, fault: Fault) -> bool {
        match self.parts.get_mut(index as usize) {
            Some(part) => {
                part.fault = Some(fault);
                true
            }
            None => false,
        }
    }

    /// The peer has rejected all of it.
    pub(in crate::tcp) fn reject(&mut self) {
        self.parts.iter_mut().for_each(|part| part.fault = Some(Fault::NotRegistered));
    }

    /// Its data comes, but for the parts that the peer has found fault with. `false` if it has come already.
    pub(in crate::tcp) fn expect_data(&mut self) -> bool {
        if std::mem::replace(&mut self.has_data, true) {
            return false;
        }
        for (index, part) in self.parts.iter().enumerate() {
            if let Some(fault) = part.fault {
                self.pieces.set_fault(index, fault);
            }
        }
        self.pieces.skip_faulty();
        true
    }

    /// Whether a READ can end: its data has come, or there is none.
    pub(in crate::tcp) fn is_received(&self) -> bool {
        let all_faulty = self.parts.iter().all(|part| part.fault.is_some());
        all_faulty || (self.has_data && self.pieces.left() == 0)
    }

    pub(super) fn is_write(&self) -> bool {
        self.opcode == Some(Opcode::Write)
    }
}

/// Adds what there is room for of a task; whether the message is full.
pub(super) fn fill(
    message: &mut Message,
    slot: u32,
    task: &mut Task,
    origin: &Origin,
    framing: Framing,
) -> bool {
    let whole = origin.batch.tasks.get(task.index as usize);
    let shape = whole.shape();
    let count = shape.map_or(1, |shape| shape.count());
    while task.next < count {
        let WideSlice { source, target, length } =
            shape.map_or_else(|| whole.whole(), |shape| shape.piece(task.next));
        let rest = length - task.offset;
        let room = match framing {
            Framing::Old(_) => rest,
            Framing::Numbered => MAX_DATA - message.length,
        };
        let now = rest.min(room);
        let (address, remote) = (source + task.offset, target + task.offset);
        message.pieces.push(Some(&origin.local), address, now);
        message.parts.push(Part { slot, remote, length: now, fault: None });
        message.length += now;
        task.under_way += 1;
        task.offset += now;
        if task.offset == length {
            (task.next, task.offset) = (task.next + 1, 0);
        }
        task.posted = task.next == count;
        let full = match framing {
            Framing::Old(_) => true,
            Framing::Numbered => message.length == MAX_DATA || message.parts.len() == MAX_PIECES,
        };
        if full {
            return true;
        }
    }
    false
}

/// What the peer has said of its memory.
pub(super) fn peers_fault(fault: Fault) -> FailureReason {
    let text = match fault {
        Fault::NotRegistered => {
            "it rejected the request: the range is not in memory that is registered there"
        }
        Fault::Gone => "the memory that is registered there was unmapped, or cannot be accessed",
        Fault::Gpu => {
            "it is memory of a GPU, which cannot be accessed: it was freed, or its driver failed"
        }
        Fault::NotFenced => "it did not confirm that nothing sent before can arrive any more",
        Fault::NotRelayed => {
            "the relay refused the request: it has no way to the segment now, or as much under way as it may; \
             its log says which"
        }
        Fault::RelayFailed => "the relay's own transfer failed: its log says why",
        Fault::RelayUndefined => {
            "the relay's own transfer failed, and the target did not confirm that nothing of it can arrive any \
             more: the relay's log says why"
        }
    };
    FailureReason::Connection(text.into())
}

pub(super) fn own_fault(fault: Fault, address: u64) -> FailureReason {
    match fault {
        Fault::Gone => FailureReason::MemoryGone { address },
        Fault::Gpu => gpu::not_staged(),
        Fault::NotRegistered
        | Fault::NotFenced
        | Fault::NotRelayed
        | Fault::RelayFailed
        | Fault::RelayUndefined => FailureReason::Unregistered,
    }
}
