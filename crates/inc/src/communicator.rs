//! One communicator at the switch: its children, what each has sent, and what each is owed.
//!
//! Every child is an edge: one reliable connection, in order both ways. A child opens a collective
//! with its [`Descriptor`] and sends its segments behind it without waiting. When all children
//! have sent the same descriptor, each is told so; when all have contributed to a cell of a segment,
//! each gets that cell of the result. All go out in the same order on every edge.
//!
//! What makes a slot safe to use before all descriptors are known: a child's descriptor comes
//! before its data. The first one decides what the slots compute, every other is compared with it
//! on arrival, and from the first difference on no data is taken into slots any more.
//!
//! What makes a slot free in time: a child sends segment `x` only when it has all results up to
//! `x - W`. So when `x` arrives within the window of results that were sent to this child, all
//! children have contributed to `x - W`, and so every child has all results up to `x - 2W`: the
//! one that the slot of `x` held among N = 2W. The connection's own acknowledgement of that
//! result may have been lost; the contribution says the same. If the result is then sent again
//! from a slot that holds newer bytes, the child drops it as a duplicate.

mod agreement;

use millstream_roce::{
    AccessDenied, Piece, ProtectionDomainId, ReceiveRequest, SendOperation, SendRequest,
};
use millstream_wire::Qpn;

use crate::abort::{ABORT_BYTES, Abort, Violation};
use crate::answer::Answer;
use crate::descriptor::Descriptor;
use crate::reduce::Kernel;
use crate::slots::{ChildSet, SlotError, Slots, all_children};
use crate::spec::{CommunicatorSpec, RECEIVE_BYTES, RECEIVES_PER_CHILD};
use crate::{Collective, DataType, ReduceOperation};

/// Control messages lie at these addresses, slots from 0 on.
const CONTROL_BASE: u64 = 1 << 48;

/// What a work request of the switch is, in the low byte of its id; the child is in the second.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Tag {
    Result,
    /// A part of a result that is not the last one.
    Cell,
    Agreed,
    Abort,
    Receive {
        buffer: usize,
    },
}

impl Tag {
    pub(crate) const fn id(self, child: usize) -> u64 {
        let tag = match self {
            Self::Result => 0,
            Self::Cell => 1,
            Self::Agreed => 2,
            Self::Abort => 3,
            Self::Receive { buffer } => 4 + buffer as u64,
        };
        (child as u64) << 8 | tag
    }

    pub(crate) const fn from_id(id: u64) -> (Self, usize) {
        let tag = match id & 0xff {
            0 => Self::Result,
            1 => Self::Cell,
            2 => Self::Agreed,
            3 => Self::Abort,
            tag => Self::Receive { buffer: tag as usize - 4 },
        };
        (tag, (id >> 8) as usize)
    }
}

/// Counts of one communicator.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct CommunicatorStatistics {
    /// Collectives that all ranks agreed on.
    pub collectives: u64,
    /// Segments that all ranks contributed to.
    pub segments: u64,
    /// Payload bytes taken into slots.
    pub bytes: u64,
    /// Payload bytes thrown away because the communicator is aborted or about to be.
    pub discarded_bytes: u64,
    /// Slots that hold a segment now.
    pub slots_in_use: u32,
    /// Why it ended, if it did.
    pub abort: Option<Abort>,
}

/// Where a child wants the result of a segment: its own memory, opaque to the switch.
#[derive(Clone, Copy, Debug, Default)]
struct Target {
    address: u64,
    key: u32,
}

#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) rank: u32,
    pub(crate) domain: ProtectionDomainId,
    /// Known once the queue pair exists.
    pub(crate) qpn: Qpn,
    /// Its latest descriptor.
    descriptor: Descriptor,
    /// How many descriptors it has sent.
    announced: u64,
    /// Bytes of its current collective that are still to come.
    remaining: u64,
    /// Segments that it has contributed to.
    contributed: u64,
    /// Agreements posted to it.
    agreed: u64,
    /// Results posted to it, whole.
    posted: u64,
    /// Bytes of the next one that are posted to it.
    posted_bytes: u32,
    /// Results that its end of the connection has acknowledged.
    delivered: u64,
    /// Results that it has, as far as is known: acknowledged, or implied by what it sent.
    received: u64,
    /// Send requests that are not complete.
    outstanding: u32,
    /// For the segments in the slots, where the child wants the result.
    targets: Box<[Target]>,
}

/// What happened that others must hear of.
#[must_use]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Progress {
    /// Nothing.
    None,
    /// There is something to send, to some child at least.
    Ready,
}

#[derive(Debug)]
pub(crate) struct Communicator {
    pub(crate) id: u64,
    key: u32,
    path_mtu: u32,
    segment_bytes: u32,
    window: u64,
    memory_bytes: u64,
    /// Send requests on an edge, not counting the abort message, which always has a place.
    send_limit: u32,
    pub(crate) children: Vec<Child>,
    slots: Slots,
    /// Receive buffers of all children, then the abort message.
    control: Box<[u8]>,
    /// Who has sent the descriptor of the next collective to agree on.
    announced: ChildSet,
    /// What the first of them asks for.
    kernel: Kernel,
    /// The cells of its segments.
    cell_bytes: u32,
    /// Some of them differ: the communicator is aborted as soon as it is known who is odd.
    doomed: bool,
    /// Collectives agreed on.
    agreed: u64,
    /// Segments that every child has contributed to.
    completed: u64,
    abort: Option<Abort>,
    /// The abort was told of by [`Communicator::take_report`].
    reported: bool,
    /// To whom the abort message was posted.
    told: ChildSet,
    /// Who will not be heard of any more: lost, refused, or told and confirmed.
    ended: ChildSet,
    /// In the aggregator's list of communicators that have something to send.
    pub(crate) ready: bool,
    statistics: CommunicatorStatistics,
}

impl Communicator {
    /// One that `spec`, which was checked, describes. `domains` are those of the children.
    pub(crate) fn new(
        spec: &CommunicatorSpec,
        key: u32,
        domains: impl Iterator<Item = ProtectionDomainId>,
    ) -> Self {
        let count = spec.children.len();
        let nothing = Descriptor {
            sequence: 0,
            collective: Collective::Barrier,
            operation: ReduceOperation::Sum,
            data_type: DataType::Int8,
            root: 0,
            count: 0,
        };
        let mut ranks: Vec<u32> =
            spec.children.iter().filter_map(|child| child.ranks.first()).collect();
        ranks.sort_unstable();
        let child = |(rank, domain)| Child {
            rank,
            domain,
            qpn: Qpn::default(),
            descriptor: nothing,
            announced: 0,
            remaining: 0,
            contributed: 0,
            agreed: 0,
            posted: 0,
            posted_bytes: 0,
            delivered: 0,
            received: 0,
            outstanding: 0,
            targets: vec![Target::default(); spec.slots() as usize].into(),
        };
        Self {
            id: spec.id,
            key,
            path_mtu: spec.path_mtu.bytes() as u32,
            segment_bytes: spec.segment_bytes,
            window: spec.window.into(),
            memory_bytes: spec.memory_bytes(),
            send_limit: spec.send_requests() - 1,
            children: ranks.into_iter().zip(domains).map(child).collect(),
            slots: Slots::new(
                spec.slots(),
                spec.segment_bytes,
                spec.path_mtu.bytes() as u32,
                count,
            ),
            control: vec![0; spec.control_bytes()].into(),
            announced: 0,
            kernel: |_, _| {},
            cell_bytes: spec.segment_bytes,
            doomed: false,
            agreed: 0,
            completed: 0,
            abort: None,
            reported: false,
            told: 0,
            ended: 0,
            ready: false,
            statistics: CommunicatorStatistics::default(),
        }
    }

    pub(crate) fn statistics(&self) -> CommunicatorStatistics {
        CommunicatorStatistics {
            collectives: self.agreed,
            segments: self.completed,
            slots_in_use: self.slots.occupied(),
            abort: self.abort,
            ..self.statistics
        }
    }

    /// Bytes of memory that it takes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Why it is aborted, the first time that this is asked.
    pub(crate) fn take_report(&mut self) -> Option<Abort> {
        let abort = self.abort.filter(|_| !self.reported);
        self.reported |= abort.is_some();
        abort
    }

    pub(crate) fn aborted(&self) -> Option<Abort> {
        self.abort
    }

    /// Aborts it, unless it is already.
    pub(crate) fn abort(&mut self, abort: Abort) -> Progress {
        if self.abort.is_some() {
            return Progress::None;
        }
        self.abort = Some(abort);
        let message = self.control.len() - ABORT_BYTES;
        self.control[message..].copy_from_slice(&abort.to_bytes());
        Progress::Ready
    }

    /// The child is gone, or was told and nothing more is expected of it; `false` when that was
    /// known.
    pub(crate) fn end(&mut self, child: usize) -> bool {
        let before = self.ended;
        self.ended |= 1 << child;
        self.ended != before
    }

    pub(crate) fn has_ended(&self, child: usize) -> bool {
        self.ended & 1 << child != 0
    }

    pub(crate) fn all_ended(&self) -> bool {
        self.ended == all_children(self.children.len())
    }

    /// The child broke the protocol: its queue pair fails by the answer, the others are told.
    fn violation(&mut self, child: usize, violation: Violation) -> AccessDenied {
        let rank = self.children[child].rank;
        let _ = self.abort(Abort::Violation { rank, violation });
        AccessDenied::InvalidRequest
    }

    /// Admits a WRITE: the child's contribution to its next segment.
    pub(crate) fn authorize(
        &mut self,
        child: usize,
        address: u64,
        key: u32,
        length: u32,
    ) -> Result<(), AccessDenied> {
        if self.abort.is_some() || self.doomed {
            // A refusal would break the connection on which the child is about to hear why.
            return Ok(());
        }
        let edge = &self.children[child];
        let segment = edge.contributed;
        if edge.remaining == 0 {
            return Err(self.violation(child, Violation::Unannounced));
        }
        if u64::from(length) != edge.remaining.min(self.segment_bytes.into()) {
            return Err(self.violation(child, Violation::Length));
        }
        if segment >= edge.posted + self.window {
            return Err(self.violation(child, Violation::Window));
        }
        self.confirm(child, (segment + 1).saturating_sub(self.window));
        self.slots
            .open(segment, length, self.cell_bytes)
            .map_err(|error| self.slot_refused(child, error))?;
        let targets = &mut self.children[child].targets;
        let index = segment % targets.len() as u64;
        targets[index as usize] = Target { address, key };
        Ok(())
    }

    fn slot_refused(&mut self, child: usize, error: SlotError) -> AccessDenied {
        // The checks before leave none of these; were there one, it must not become a wrong sum.
        debug_assert!(false, "{error}");
        self.violation(child, Violation::Window)
    }

    /// The child has all results before `end`.
    fn confirm(&mut self, child: usize, end: u64) {
        let edge = &mut self.children[child];
        while edge.received < end.min(edge.posted) {
            let freed = self.slots.acknowledge(edge.received, child);
            debug_assert_eq!(freed, Ok(()), "segment {} of child {child}", edge.received);
            edge.received += 1;
        }
    }

    /// Takes a packet of a WRITE that was admitted.
    pub(crate) fn contribute(
        &mut self,
        child: usize,
        offset: u32,
        payload: &[u8],
    ) -> Result<Progress, AccessDenied> {
        if self.abort.is_some() || self.doomed {
            self.statistics.discarded_bytes += payload.len() as u64;
            return Ok(Progress::None);
        }
        let segment = self.children[child].contributed;
        let contribution = self
            .slots
            .contribute(segment, child, offset, payload, self.kernel)
            .map_err(|error| self.slot_refused(child, error))?;
        self.statistics.bytes += payload.len() as u64;
        let edge = &mut self.children[child];
        edge.remaining -= payload.len() as u64;
        edge.contributed += u64::from(contribution.whole);
        if contribution.complete {
            // Every child contributes in order, so segments complete in order.
            debug_assert_eq!(segment, self.completed);
            self.completed += 1;
        }
        Ok(if contribution.more { Progress::Ready } else { Progress::None })
    }

    /// Takes bytes of a SEND into a receive buffer.
    pub(crate) fn store(&mut self, address: u64, payload: &[u8]) -> Result<(), AccessDenied> {
        let start = self.receive_offset(address, payload.len()).ok_or(AccessDenied::Protection)?;
        self.control[start..start + payload.len()].copy_from_slice(payload);
        Ok(())
    }

    fn receive_offset(&self, address: u64, length: usize) -> Option<usize> {
        let start = usize::try_from(address.checked_sub(CONTROL_BASE)?).ok()?;
        (start.checked_add(length)? <= self.control.len() - ABORT_BYTES).then_some(start)
    }

    /// The bytes of a piece that this communicator made.
    pub(crate) fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
        match piece.address.checked_sub(CONTROL_BASE) {
            None => self.slots.get(piece.address, piece.length),
            Some(start) => {
                let start = usize::try_from(start).ok()?;
                self.control.get(start..start.checked_add(piece.length as usize)?)
            }
        }
    }

    /// Whether a piece is one that work requests may use.
    pub(crate) fn check_local(&self, piece: &Piece, write: bool) -> bool {
        if write {
            self.receive_offset(piece.address, piece.length as usize).is_some()
        } else {
            self.bytes(piece).is_some()
        }
    }

    /// A receive request of a child.
    pub(crate) fn receive_request(&self, child: usize, buffer: usize) -> ReceiveRequest {
        let index = child * RECEIVES_PER_CHILD + buffer;
        let piece = Piece {
            key: self.key,
            address: CONTROL_BASE + (index * RECEIVE_BYTES) as u64,
            length: RECEIVE_BYTES as u32,
        };
        ReceiveRequest { id: Tag::Receive { buffer }.id(child), pieces: [piece] }
    }

    /// The next message to post to a child, if it is owed one and there is room for it.
    pub(crate) fn next_send(&mut self, child: usize) -> Option<SendRequest> {
        let bit = 1 << child;
        if self.ended & bit != 0 {
            return None;
        }
        if self.abort.is_some() {
            if self.told & bit != 0 {
                return None;
            }
            self.told |= bit;
            let address = CONTROL_BASE + (self.control.len() - ABORT_BYTES) as u64;
            let piece = Piece { key: self.key, address, length: ABORT_BYTES as u32 };
            return Some(self.message(child, Tag::Abort, Answer::Aborted, piece));
        }
        let edge = &mut self.children[child];
        if edge.outstanding >= self.send_limit {
            return None;
        }
        if edge.agreed < self.agreed {
            let answer = Answer::agreed(edge.agreed);
            edge.agreed += 1;
            return Some(self.message(child, Tag::Agreed, answer, Piece::default()));
        }
        // Results go out in order, and before all descriptors are known there is none.
        let segment = edge.posted;
        let (complete, length) = self.slots.result(segment).ok()?;
        let offset = edge.posted_bytes;
        if complete <= offset {
            return None;
        }
        let last = complete == length;
        let target = edge.targets[(segment % edge.targets.len() as u64) as usize];
        if last {
            edge.posted += 1;
        }
        edge.posted_bytes = if last { 0 } else { complete };
        edge.outstanding += 1;
        let piece = Piece {
            key: self.key,
            address: self.slots.offset(segment) + u64::from(offset),
            length: complete - offset,
        };
        let operation = SendOperation::Write {
            remote_address: target.address.wrapping_add(offset.into()),
            remote_key: target.key,
            immediate: last.then(|| Answer::result(segment).to_immediate()),
        };
        let tag = if last { Tag::Result } else { Tag::Cell };
        Some(SendRequest { solicited: last, ..SendRequest::new(tag.id(child), operation, [piece]) })
    }

    fn message(&mut self, child: usize, tag: Tag, answer: Answer, piece: Piece) -> SendRequest {
        self.children[child].outstanding += 1;
        SendRequest {
            solicited: true,
            ..SendRequest::new(
                tag.id(child),
                SendOperation::Send { immediate: Some(answer.to_immediate()) },
                [piece],
            )
        }
    }

    /// A send request to the child is complete: it has the message.
    pub(crate) fn delivered(&mut self, child: usize, tag: Tag) -> Progress {
        let edge = &mut self.children[child];
        let full = edge.outstanding >= self.send_limit;
        edge.outstanding = edge.outstanding.saturating_sub(1);
        if tag == Tag::Result {
            edge.delivered += 1;
            let delivered = edge.delivered;
            self.confirm(child, delivered);
        }
        if full { Progress::Ready } else { Progress::None }
    }
}
