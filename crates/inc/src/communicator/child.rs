//! What a child sends, and what it is owed.

use millstream_roce::{AccessDenied, Piece, ProtectionDomainId, SendOperation, SendRequest};
use millstream_wire::Qpn;

use super::{Call, Communicator, Progress, Tag};
use crate::Mode;
use crate::abort::Violation;
use crate::answer::Answer;
use crate::descriptor::Descriptor;
use crate::ranks::Ranks;
use crate::slots::SlotError;

/// What the SEND of a child is that is arriving, or has just arrived.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Sending {
    /// A message, or none of its bytes have come.
    Message,
    /// A segment, of which there is more to come.
    Part,
    /// A segment of which all has come: the SEND ends here.
    Whole,
}

/// Where a child wants the result of a segment: its own memory, opaque to the switch.
#[derive(Clone, Copy, Debug, Default)]
struct Target {
    address: u64,
    key: u32,
}

#[derive(Debug)]
pub(crate) struct Child {
    /// The lowest rank below it, which stands for it.
    pub(crate) rank: u32,
    pub(super) ranks: Ranks,
    pub(crate) is_switch: bool,
    /// Its vectors are laid out as the whole one: of a switch, and of a host with several ranks.
    pub(super) is_whole: bool,
    pub(crate) domain: ProtectionDomainId,
    /// Known once the queue pair exists.
    pub(crate) qpn: Qpn,
    /// Its latest collective.
    pub(super) call: Call,
    /// How many descriptors it has sent.
    pub(super) announced: u64,
    /// Of a switch in [`Communicator::heard`], a rank below it and what that has called.
    pub(super) heard: (u32, Descriptor),
    /// The lowest number that its next collective can have.
    pub(super) next_sequence: u64,
    /// Where in the control messages the vector behind the latest is.
    pub(super) small_at: usize,
    /// Segments that it has contributed to.
    pub(super) contributed: u64,
    /// Bytes that it has sent of the next one.
    pub(super) progress: u32,
    sending: Sending,
    /// Agreements posted to it.
    pub(super) agreed: u64,
    /// Answers posted to it, whole.
    pub(super) posted: u64,
    /// Bytes of the next one that are posted to it.
    posted_bytes: u32,
    /// Answers that its end of the connection has acknowledged.
    pub(super) delivered: u64,
    /// Answers that it has, as far as is known: acknowledged, or implied by what it sent.
    received: u64,
    /// Send requests that are not complete.
    pub(super) outstanding: u32,
    /// For the segments in the slots, where the child wants the result.
    targets: Box<[Target]>,
}

impl Child {
    pub(super) fn new(
        ranks: Ranks,
        is_switch: bool,
        domain: ProtectionDomainId,
        slots: u32,
    ) -> Self {
        Self {
            rank: ranks.first().unwrap_or_default(),
            is_whole: is_switch || ranks.len() > 1,
            ranks,
            is_switch,
            domain,
            qpn: Qpn::default(),
            call: Call::none(),
            announced: 0,
            heard: (0, Call::none().descriptor),
            next_sequence: 0,
            small_at: 0,
            contributed: 0,
            progress: 0,
            sending: Sending::Message,
            agreed: 0,
            posted: 0,
            posted_bytes: 0,
            delivered: 0,
            received: 0,
            outstanding: 0,
            targets: vec![Target::default(); slots as usize].into(),
        }
    }

    /// How its vectors travel. Between switches there is but one way.
    fn mode(&self) -> Mode {
        if self.is_switch { Mode::Write } else { self.call.descriptor.mode }
    }

    /// Whether what it gets next is a SEND into its own memory.
    pub(super) fn awaits_sends(&self) -> bool {
        self.mode() == Mode::Send
            && self.agreed == self.announced
            && self.posted < self.call.layout.end()
            && self.call.layout.place(self.posted).targets.among(&self.ranks)
    }

    /// Whether it has called a collective and not contributed all.
    pub(super) fn owes(&self) -> bool {
        self.contributed < self.call.layout.end()
    }

    /// Whether there are bytes of the child in the next segment that it contributes to.
    fn has_data(&self) -> bool {
        self.contributed < self.call.layout.end()
            && self.call.layout.place(self.contributed).sources.among(&self.ranks)
    }
}

/// The checks before leave none of these; were there one, it must not become a wrong sum.
fn slot_refused(error: SlotError) -> Violation {
    debug_assert!(false, "{error}");
    Violation::Window
}

impl Communicator {
    /// The child broke the protocol: its queue pair fails by the answer, the others are told.
    fn violation(&mut self, child: usize, violation: Violation) -> AccessDenied {
        let _ = self.broken(child, violation);
        AccessDenied::InvalidRequest
    }

    /// Admits a WRITE of a child: a part of its contribution to its next segment.
    pub(crate) fn authorize(
        &mut self,
        child: usize,
        address: u64,
        key: u32,
        length: u32,
    ) -> Result<(), AccessDenied> {
        if self.abort.is_some() {
            // A refusal would break the connection on which the child is about to hear why.
            return Ok(());
        }
        let edge = &self.children[child];
        if self.is_plain() || edge.mode() == Mode::Send || !edge.has_data() {
            return Err(self.violation(child, Violation::Unannounced));
        }
        let (segment, progress) = (edge.contributed, edge.progress);
        let rest = edge.call.layout.place(segment).length - progress;
        // No element and no packet is split between two WRITEs.
        if length > rest || (length < rest && !length.is_multiple_of(self.path_mtu)) {
            return Err(self.violation(child, Violation::Length));
        }
        self.begin(child).map_err(|violation| self.violation(child, violation))?;
        let targets = &mut self.children[child].targets;
        let index = (segment % targets.len() as u64) as usize;
        if progress == 0 {
            targets[index] = Target { address, key };
        }
        Ok(())
    }

    /// A child is about to contribute to its next segment. Who asks ends the communicator if it may not.
    fn begin(&mut self, child: usize) -> Result<(), Violation> {
        let edge = &self.children[child];
        let (segment, call) = (edge.contributed, edge.call);
        if segment >= edge.posted + self.window {
            return Err(Violation::Window);
        }
        self.confirm(child, (segment + 1).saturating_sub(self.window));
        let length = call.layout.place(segment).length;
        let opened = self.slots.open(segment, length, call.cell_bytes, call.kernel);
        opened.map_err(slot_refused)
    }

    /// The child has all answers before `end`.
    pub(super) fn confirm(&mut self, child: usize, end: u64) {
        let edge = &mut self.children[child];
        while edge.received < end.min(edge.posted) {
            let freed = self.slots.acknowledge(edge.received, child);
            debug_assert_eq!(freed, Ok(()), "segment {} of child {child}", edge.received);
            edge.received += 1;
        }
    }

    /// Whether a SEND of the child that is arriving is a segment.
    pub(super) fn sends_data(&self, child: usize) -> bool {
        let edge = self.children.get(child);
        self.is_plain() || edge.is_some_and(|edge| edge.mode() == Mode::Send && edge.has_data())
    }

    /// Takes a packet of a segment that is sent by SEND.
    pub(super) fn contribute_sent(
        &mut self,
        child: usize,
        payload: &[u8],
    ) -> Result<Progress, AccessDenied> {
        if let Some(kernel) = self.plain {
            return self.contribute_plain(child, kernel, payload);
        }
        let edge = &mut self.children[child];
        edge.sending = Sending::Part;
        if self.abort.is_some() {
            // Thrown away: a refusal would break the connection on which the child is about to hear why.
            return self.contribute(child, payload);
        }
        let (segment, progress, length) = (edge.contributed, edge.progress, payload.len() as u32);
        let rest = edge.call.layout.place(segment).length - progress;
        if length > rest || (length < rest && length != self.path_mtu) {
            return Err(self.violation(child, Violation::Length));
        }
        if progress == 0 {
            self.begin(child).map_err(|violation| self.violation(child, violation))?;
        }
        let contributed = self.contribute(child, payload)?;
        let edge = &mut self.children[child];
        if edge.progress == 0 {
            edge.sending = Sending::Whole;
        }
        Ok(contributed)
    }

    /// Refuses a packet of a SEND whose segment has come before it: there is no more of it.
    pub(super) fn check_end(&mut self, child: usize) -> Result<(), AccessDenied> {
        let over = self.abort.is_none()
            && self.children.get(child).is_some_and(|edge| edge.sending == Sending::Whole);
        if over { Err(self.violation(child, Violation::Length)) } else { Ok(()) }
    }

    /// Whether the SEND that has arrived is a segment.
    pub(crate) fn is_segment(&self, child: usize) -> bool {
        self.is_plain() || self.children[child].sending != Sending::Message
    }

    /// A SEND has arrived that was a segment: all of it.
    pub(crate) fn end_segment(&mut self, child: usize) -> Result<Progress, Violation> {
        if self.is_plain() {
            return self.end_plain(child);
        }
        let edge = &mut self.children[child];
        edge.sending = Sending::Message;
        let whole = edge.progress == 0 || self.abort.is_some();
        if whole { Ok(Progress::None) } else { Err(Violation::Length) }
    }

    /// Takes a packet of a segment.
    pub(crate) fn contribute(
        &mut self,
        child: usize,
        payload: &[u8],
    ) -> Result<Progress, AccessDenied> {
        if self.abort.is_some() {
            self.statistics.discarded_bytes += payload.len() as u64;
            return Ok(Progress::None);
        }
        let edge = &self.children[child];
        let (segment, progress) = (edge.contributed, edge.progress);
        let contribution = self
            .slots
            .contribute(segment, child, progress, payload)
            .map_err(|error| self.violation(child, slot_refused(error)))?;
        self.statistics.bytes += payload.len() as u64;
        let edge = &mut self.children[child];
        edge.progress += payload.len() as u32;
        if contribution.whole {
            edge.contributed += 1;
            edge.progress = 0;
        }
        Ok(self.contributed(segment, contribution))
    }

    pub(super) fn contributed(
        &mut self,
        segment: u64,
        contribution: crate::slots::Contribution,
    ) -> Progress {
        if contribution.complete {
            // Every child contributes in order, so segments complete in order.
            debug_assert_eq!(segment, self.completed);
            self.completed += 1;
        }
        if contribution.more { Progress::Ready } else { Progress::None }
    }

    /// A child has nothing for the segments before the one with these low bits.
    pub(crate) fn credit(&mut self, child: usize, end: Answer) -> Result<Progress, Violation> {
        if self.abort.is_some() {
            return Ok(Progress::None);
        }
        let first = self.children[child].contributed;
        let count = end.distance_from(first).ok_or(Violation::Immediate)?;
        if count == 0 || count > self.window {
            return Err(Violation::Window);
        }
        let mut progress = Progress::None;
        for segment in first..first + count {
            let edge = &self.children[child];
            if segment >= edge.call.layout.end() || edge.has_data() {
                return Err(Violation::Length);
            }
            self.begin(child)?;
            let outcome = self.slots.contribute_nothing(segment, child);
            let contribution = outcome.map_err(slot_refused)?;
            self.children[child].contributed += 1;
            if self.contributed(segment, contribution) == Progress::Ready {
                progress = Progress::Ready;
            }
        }
        Ok(progress)
    }

    /// The next message to a child.
    pub(super) fn next_down(&mut self, child: usize) -> Option<SendRequest> {
        if self.is_plain() {
            return self.next_plain(child);
        }
        let edge = &mut self.children[child];
        if edge.agreed < self.agreed {
            let answer = Answer::agreed(edge.agreed).to_immediate();
            let result = edge.small_target(&edge.call.layout);
            let piece = self.small_piece(self.children[child].agreed, result);
            self.children[child].agreed += 1;
            return Some(self.message(child, Tag::Agreed, Some(answer), piece));
        }
        // Answers go out in order, and before all descriptors are known there is none.
        if edge.agreed < edge.announced {
            return None;
        }
        let segment = edge.posted;
        if segment >= edge.call.layout.end() {
            return None;
        }
        let (available, length) = self.slots.result(segment).ok()?;
        let place = edge.call.layout.place(segment);
        let targeted = place.targets.among(&edge.ranks);
        // A message of SEND mode is whole, and so is one that says that there is nothing.
        let whole = available == length;
        if available <= edge.posted_bytes || !(whole || targeted && edge.mode() == Mode::Write) {
            return None;
        }
        let offset = edge.posted_bytes;
        edge.posted += u64::from(whole);
        edge.posted_bytes = if whole { 0 } else { available };
        edge.outstanding += 1;
        let immediate = whole.then(|| Answer::result(segment).to_immediate());
        let operation = match edge.mode() {
            Mode::Send => SendOperation::Send { immediate },
            Mode::Write => {
                let (address, key) = edge.target(segment);
                SendOperation::Write {
                    remote_address: if targeted { address.wrapping_add(offset.into()) } else { 0 },
                    remote_key: if targeted { key } else { 0 },
                    immediate,
                }
            }
        };
        let piece = Piece {
            key: self.key,
            address: self.slots.offset(segment) + u64::from(offset),
            length: available - offset,
        };
        let piece = if targeted { piece } else { Piece::default() };
        let tag = if whole { Tag::Result } else { Tag::Cell };
        Some(SendRequest {
            solicited: whole,
            ..SendRequest::new(tag.id(child), operation, [piece])
        })
    }
}

impl Child {
    /// Where the child wants the result of a segment.
    fn target(&self, segment: u64) -> (u64, u32) {
        let Call { descriptor, layout, .. } = &self.call;
        if self.is_switch {
            // It knows by the order what the bytes are.
            return (layout.place(segment).start, 0);
        }
        if layout.reflects() {
            let target = self.targets[(segment % self.targets.len() as u64) as usize];
            return (target.address, target.key);
        }
        let offset = match self.is_whole {
            true => layout.target_offset_of(segment, &self.ranks),
            false => layout.target_offset(segment, self.rank),
        };
        let offset = offset.unwrap_or_default();
        (descriptor.destination_address.wrapping_add(offset), descriptor.destination_key)
    }
}
