//! One communicator at the switch: a node of its tree. Its ports, what each has sent, and what each is
//! owed.
//!
//! Every port is a reliable connection, in order both ways, to a child (a host, or a switch below) or to
//! the switch above. A child opens a collective with its [`Descriptor`] and sends its segments behind it
//! without waiting. When all children have sent the same descriptor, it goes up, as that of one host would;
//! at the root each is told so, and this goes down. When all have contributed to a cell of a segment, the
//! cell goes up, or is the result at the root; what comes from above goes to the children. All go out in
//! the same order on every port.
//!
//! A vector that fits a packet has no segments: it goes up behind the descriptor and comes down with the
//! answer to it (the module `small`).
//!
//! Every port contributes to every segment, be it nothing (a credit: a SEND without payload), and gets an
//! answer for every segment, be it empty. So one rule holds for all collectives, whoever has bytes:
//!
//! What makes a slot safe to use before all descriptors are known: a child's descriptor comes before its
//! data. The first one decides what the slots compute, every other is compared with it on arrival, and the
//! first difference ends the communicator. Where some children are late, what others have called is told above
//! meanwhile, and compared there (the module `first_calls`).
//!
//! What makes a slot free in time: a child sends segment `x` only when it has all answers up to `x - W`.
//! So when `x` arrives within the window of answers that were sent to this child, all children have
//! contributed to `x - W`, and so every child has all answers up to `x - 2W`: the one that the slot of `x`
//! held among N = 2W. The connection's own acknowledgement of that answer may have been lost; the
//! contribution says the same. If the answer is then sent again from a slot that holds newer bytes, the
//! child drops it as a duplicate. The same holds for what goes up: the answer from above needs it.

mod agreement;
mod child;
mod first_calls;
mod overdue;
mod plain;
mod small;
mod uplink;

use millstream_roce::{Piece, ProtectionDomainId, ReceiveRequest, SendOperation, SendRequest};
use millstream_wire::Qpn;

use crate::abort::{ABORT_BYTES, Abort, Violation};
use crate::answer::Answer;
use crate::descriptor::Descriptor;
use crate::kernels::Kernel;
use crate::layout::{Cut, Layout};
use crate::ranks::Ranks;
use crate::slots::{ChildSet, Slots, all_children};
use crate::spec::{CommunicatorSpec, RECEIVES_PER_CHILD};
use crate::{Collective, DataType, Mode, ReduceOperation, Stripe};

pub(crate) use child::Child;
pub(crate) use uplink::Uplink;

/// Control messages lie at these addresses, slots from 0 on.
const CONTROL_BASE: u64 = 1 << 48;

/// What a child sends by SEND is received at these addresses, which no memory lies at: a segment's bytes go
/// into its slot, a descriptor's to the control messages.
const RECEIVE_BASE: u64 = 1 << 49;

/// What a work request of the switch is, in the low byte of its id; the port is in the second.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Tag {
    Result,
    /// A part of a result that is not the last one.
    Cell,
    Agreed,
    Abort,
    /// To the switch above.
    Up,
    /// Whether the other end lives.
    Probe,
    Receive {
        buffer: usize,
    },
}

impl Tag {
    pub(crate) const fn id(self, port: usize) -> u64 {
        let tag = match self {
            Self::Result => 0,
            Self::Cell => 1,
            Self::Agreed => 2,
            Self::Abort => 3,
            Self::Up => 4,
            Self::Probe => 5,
            Self::Receive { buffer } => 6 + buffer as u64,
        };
        (port as u64) << 8 | tag
    }

    pub(crate) const fn from_id(id: u64) -> (Self, usize) {
        let tag = match id & 0xff {
            0 => Self::Result,
            1 => Self::Cell,
            2 => Self::Agreed,
            3 => Self::Abort,
            4 => Self::Up,
            5 => Self::Probe,
            tag => Self::Receive { buffer: tag as usize - 6 },
        };
        (tag, (id >> 8) as usize)
    }
}

/// Counts of one communicator.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct CommunicatorStatistics {
    /// Collectives that all ranks agreed on.
    pub collectives: u64,
    /// Segments that all children contributed to.
    pub segments: u64,
    /// Payload bytes taken into slots, from below.
    pub bytes: u64,
    /// Payload bytes thrown away because the communicator is aborted, or is about to be.
    pub discarded_bytes: u64,
    /// Slots that hold a segment now.
    pub slots_in_use: u32,
    /// Why it ended, if it did.
    pub abort: Option<Abort>,
}

/// What happened that others must hear of.
#[must_use]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Progress {
    /// Nothing.
    None,
    /// There is something to send, on some port at least.
    Ready,
}

/// A collective as the switch computes it.
#[derive(Clone, Copy, Debug)]
struct Call {
    descriptor: Descriptor,
    layout: Layout,
    /// Of a collective that reduces nothing, one that is never asked to combine.
    kernel: Kernel,
    cell_bytes: u32,
}

impl Call {
    /// Before the first one.
    fn none() -> Self {
        let descriptor = Descriptor {
            sequence: 0,
            collective: Collective::Barrier,
            operation: ReduceOperation::Sum,
            data_type: DataType::Int8,
            root: 0,
            count: 0,
            stripe: Stripe::WHOLE,
            mode: Mode::Write,
            destination_address: 0,
            destination_key: 0,
        };
        Self { descriptor, layout: Layout::none(), kernel: Kernel::of_bytes(), cell_bytes: 1 }
    }
}

/// A set of ports: the children, and then the uplink.
type PortSet = u128;

#[derive(Debug)]
pub(crate) struct Communicator {
    pub(crate) id: u64,
    key: u32,
    path_mtu: u32,
    cut: Cut,
    window: u64,
    memory_bytes: u64,
    /// Send requests on a port, not counting the abort message, which always has a place.
    send_limit: u32,
    pub(crate) children: Vec<Child>,
    /// Not at the root.
    pub(crate) uplink: Option<Uplink>,
    slots: Slots,
    /// What messages without descriptors are added by, if they have none.
    plain: Option<Kernel>,
    /// Receive buffers of all children, then two small vectors behind their descriptors, what comes from above,
    /// who is awaited, and the abort message.
    control: Box<[u8]>,
    /// Accumulators of 16-bit floats of small vectors; empty until there is one.
    wide: Box<[u8]>,
    /// Who has sent the descriptor of the next collective to agree on.
    announced: ChildSet,
    /// Switches that have not, and have told what a rank below has called.
    heard: ChildSet,
    /// The node above is to be told what somebody has called.
    first_due: bool,
    /// The latest collective that all children have announced.
    call: Call,
    /// How many there were.
    called: u64,
    /// Collectives that all ranks have announced.
    agreed: u64,
    /// Segments that every child has contributed to.
    completed: u64,
    /// The node above has said that it waits for the collective that is to be agreed on next, of this number.
    awaited: Option<u64>,
    search: overdue::Search,
    abort: Option<Abort>,
    /// It is because of what the node above has sent, which is none of the protocol's. Nobody else knows that.
    broken_above: bool,
    /// The abort was told of by [`Communicator::take_report`].
    reported: bool,
    /// That all have heard of it was told of by [`Communicator::take_ended`].
    closed: bool,
    /// To whom the abort message was posted.
    told: PortSet,
    /// Who will not be heard of any more: lost, refused, or told and confirmed.
    ended: PortSet,
    /// In the aggregator's list of communicators that have something to send.
    pub(crate) ready: bool,
    statistics: CommunicatorStatistics,
}

impl Communicator {
    /// One that `spec`, which was checked, describes. `domains` are those of the children, and then that of
    /// the uplink, if it has one. The slots are those of [`Slots::of`].
    pub(crate) fn new(
        spec: &CommunicatorSpec,
        slots: Slots,
        key: u32,
        mut domains: impl Iterator<Item = ProtectionDomainId>,
    ) -> Self {
        let mut children: Vec<_> =
            spec.children.iter().map(|child| (child.ranks.clone(), child.is_switch)).collect();
        children.sort_unstable_by_key(|(ranks, _)| ranks.first());
        let below: Ranks =
            children.iter().flat_map(|(ranks, _)| ranks.ranges().iter().cloned()).collect();
        let children = children
            .into_iter()
            .zip(&mut domains)
            .map(|((ranks, is_switch), domain)| Child::new(ranks, is_switch, domain, spec.slots()))
            .collect();
        let uplink = domains.next().filter(|_| spec.has_parent);
        let path_mtu = spec.path_mtu.bytes() as u32;
        Self {
            id: spec.id,
            key,
            path_mtu,
            cut: Cut::new(spec.world, spec.segment_bytes, spec.path_mtu),
            window: spec.window.into(),
            memory_bytes: spec.memory_bytes(),
            send_limit: spec.send_requests() - 1,
            children,
            uplink: uplink.map(|domain| Uplink::new(domain, below)),
            slots,
            plain: plain::kernel(spec),
            control: vec![0; spec.control_bytes()].into(),
            wide: Box::default(),
            announced: 0,
            heard: 0,
            first_due: false,
            call: Call::none(),
            called: 0,
            agreed: 0,
            completed: 0,
            awaited: None,
            search: overdue::Search::default(),
            abort: None,
            broken_above: false,
            reported: false,
            closed: false,
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

    /// How many ports it has: the children, and then the uplink.
    pub(crate) fn ports(&self) -> usize {
        self.children.len() + usize::from(self.uplink.is_some())
    }

    pub(crate) fn is_uplink(&self, port: usize) -> bool {
        port == self.children.len()
    }

    /// The protection domain of a port.
    pub(crate) fn domain(&self, port: usize) -> ProtectionDomainId {
        match (self.children.get(port), &self.uplink) {
            (Some(child), _) => child.domain,
            (None, Some(uplink)) => uplink.domain,
            (None, None) => ProtectionDomainId(u32::MAX),
        }
    }

    /// A port has this queue pair.
    pub(crate) fn set_qpn(&mut self, port: usize, qpn: Qpn) {
        match (self.children.get_mut(port), &mut self.uplink) {
            (Some(child), _) => child.qpn = qpn,
            (None, Some(uplink)) => uplink.qpn = qpn,
            (None, None) => debug_assert!(false, "there is no port {port}"),
        }
    }

    /// The way up is open.
    pub(crate) fn connected(&mut self) {
        if let Some(uplink) = &mut self.uplink {
            uplink.connected = true;
        }
    }

    /// The queue pair of a port.
    pub(crate) fn qpn(&self, port: usize) -> Qpn {
        match (self.children.get(port), &self.uplink) {
            (Some(child), _) => child.qpn,
            (None, Some(uplink)) => uplink.qpn,
            (None, None) => Qpn::default(),
        }
    }

    /// Why it is aborted, the first time that this is asked.
    pub(crate) fn take_report(&mut self) -> Option<Abort> {
        let abort = self.abort.filter(|_| !self.reported);
        self.reported |= abort.is_some();
        abort
    }

    /// Whether it is aborted because the node above has broken the protocol, as was found here.
    pub(crate) const fn is_broken_above(&self) -> bool {
        self.broken_above
    }

    /// Why it is aborted, the first time that this is asked after all have heard of it.
    pub(crate) fn take_ended(&mut self) -> Option<Abort> {
        let ended = self.abort.filter(|_| !self.closed && self.all_ended());
        self.closed |= ended.is_some();
        ended
    }

    /// Whether it is aborted, and not all have heard of that.
    pub(crate) fn is_ending(&self) -> bool {
        self.abort.is_some() && !self.all_ended()
    }

    pub(crate) fn aborted(&self) -> Option<Abort> {
        self.abort
    }

    /// Whether all ports have what they are owed; once it is aborted, whether all have heard of that.
    pub(crate) fn is_settled(&self) -> bool {
        if self.abort.is_some() {
            return self.all_ended();
        }
        let has_all = |child: &Child| {
            // What one has begun that has left is not agreed on, and nobody is owed it.
            child.outstanding == 0 && child.agreed >= self.called && child.posted >= self.completed
        };
        self.children.iter().all(has_all)
            && self.uplink.as_ref().is_none_or(|uplink| uplink.outstanding == 0)
    }

    /// Aborts it, unless it is already.
    pub(crate) fn abort(&mut self, abort: Abort) -> Progress {
        if self.abort.is_some() {
            return Progress::None;
        }
        self.abort = Some(abort);
        let message = self.control.len() - ABORT_BYTES;
        self.control[message..].copy_from_slice(&abort.to_bytes());
        if self.uplink.as_ref().is_some_and(|uplink| !uplink.connected) {
            // There is nobody to tell.
            self.ended |= 1 << self.children.len();
        }
        Progress::Ready
    }

    /// Aborts it because of what the switch at the other end of a port says: that one knows.
    pub(crate) fn abort_heard(&mut self, port: usize, abort: Abort) -> Progress {
        self.ended |= 1 << port;
        self.abort(abort)
    }

    /// Aborts it because of what came on a port.
    pub(crate) fn broken(&mut self, port: usize, violation: Violation) -> Progress {
        match self.children.get(port) {
            Some(child) => self.abort(Abort::Violation { rank: child.rank, violation }),
            None => self.abort_above(),
        }
    }

    /// Aborts it because of what the node above has sent.
    fn abort_above(&mut self) -> Progress {
        self.broken_above |= self.abort.is_none();
        self.abort(Abort::ParentLost)
    }

    /// The port is gone, or was told and nothing more is expected of it.
    pub(crate) fn end(&mut self, port: usize) {
        self.ended |= 1 << port;
    }

    pub(crate) fn has_ended(&self, port: usize) -> bool {
        self.ended & 1 << port != 0
    }

    fn all_ended(&self) -> bool {
        self.ended == PortSet::MAX >> (PortSet::BITS as usize - self.ports())
    }

    /// Takes bytes of a SEND: of a child's segment, or of a message.
    pub(crate) fn store(
        &mut self,
        port: usize,
        address: u64,
        payload: &[u8],
    ) -> Result<Progress, millstream_roce::AccessDenied> {
        let denied = millstream_roce::AccessDenied::Protection;
        let Some(place) = address.checked_sub(RECEIVE_BASE) else {
            let start = self.message_offset(address, payload.len()).ok_or(denied)?;
            self.control[start..start + payload.len()].copy_from_slice(payload);
            return Ok(Progress::None);
        };
        self.check_end(port)?;
        if self.sends_data(port) {
            return self.contribute_sent(port, payload);
        }
        // A message that is longer than any descriptor: it is refused by its length when it is complete.
        let (buffer, offset) = (place / self.receive_stride(), place % self.receive_stride());
        let start = self.receive_offset(port, buffer as usize);
        let kept = payload.len().min((self.path_mtu as usize).saturating_sub(offset as usize));
        let start = start + offset as usize;
        if kept > 0 {
            self.control[start..start + kept].copy_from_slice(&payload[..kept]);
        }
        Ok(Progress::None)
    }

    /// From the address of one receive buffer of a child to that of the next.
    fn receive_stride(&self) -> u64 {
        // No less than a packet.
        u64::from(self.cut.segment_bytes)
    }

    /// Where in the control messages a receive buffer of a child is.
    fn receive_offset(&self, child: usize, buffer: usize) -> usize {
        (child * RECEIVES_PER_CHILD + buffer) * self.path_mtu as usize
    }

    /// Where in the control messages the one from above is.
    fn message_start(&self) -> usize {
        self.note_start() - self.path_mtu as usize
    }

    /// Where in the control messages it is said who is awaited.
    fn note_start(&self) -> usize {
        self.control.len() - 2 * ABORT_BYTES
    }

    /// Where in the control messages the one from above is, and others may not be written.
    fn message_offset(&self, address: u64, length: usize) -> Option<usize> {
        let start = usize::try_from(address.checked_sub(CONTROL_BASE)?).ok()?;
        let first = self.message_start();
        let end = self.note_start();
        (start >= first && start.checked_add(length)? <= end).then_some(start)
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

    /// Whether a piece is one that work requests of a port may use.
    pub(crate) fn check_local(&self, port: usize, piece: &Piece, write: bool) -> bool {
        if !write {
            return self.bytes(piece).is_some();
        }
        match piece.address.checked_sub(RECEIVE_BASE) {
            Some(place) => {
                let end = place.checked_add(piece.length.into());
                let limit = RECEIVES_PER_CHILD as u64 * self.receive_stride();
                !self.is_uplink(port) && end.is_some_and(|end| end <= limit)
            }
            None => {
                let length = piece.length as usize;
                self.is_uplink(port) && self.message_offset(piece.address, length).is_some()
            }
        }
    }

    /// A receive request of a port.
    pub(crate) fn receive_request(&self, port: usize, buffer: usize) -> ReceiveRequest {
        let (address, length) = if self.is_uplink(port) {
            // All share one buffer: what a message brings is taken out before the next packet.
            (CONTROL_BASE + self.message_start() as u64, self.path_mtu)
        } else {
            let stride = self.receive_stride();
            (RECEIVE_BASE + buffer as u64 * stride, stride as u32)
        };
        let piece = Piece { key: self.key, address, length };
        ReceiveRequest { id: Tag::Receive { buffer }.id(port), pieces: [piece] }
    }

    /// How many receive requests a port has.
    pub(crate) fn receives(&self, port: usize) -> usize {
        match self.plain {
            _ if self.is_uplink(port) => self.window as usize + 2,
            Some(_) => self.window as usize,
            None => RECEIVES_PER_CHILD,
        }
    }

    /// Whether a port is to be closed without a word: the other end has receives for the results of SEND
    /// mode, and none for another message.
    pub(crate) fn closes_silently(&mut self, port: usize) -> bool {
        let bit = 1 << port;
        let waits = self.is_plain() || self.children.get(port).is_some_and(Child::awaits_sends);
        let closes = self.abort.is_some() && waits && self.told & bit == 0;
        if closes {
            self.told |= bit;
        }
        closes
    }

    /// The next message to post on a port, if it is owed one and there is room for it.
    pub(crate) fn next_send(&mut self, port: usize) -> Option<SendRequest> {
        let bit = 1 << port;
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
            let immediate = (!self.is_uplink(port)).then(|| Answer::Aborted.to_immediate());
            return Some(self.message(port, Tag::Abort, immediate, piece));
        }
        let outstanding = match (self.children.get(port), &self.uplink) {
            (Some(child), _) => child.outstanding,
            (None, Some(uplink)) if uplink.connected => uplink.outstanding,
            (None, _) => return None,
        };
        if outstanding >= self.send_limit {
            return None;
        }
        if let Some(note) = self.next_note(port) {
            return Some(note);
        }
        if self.is_uplink(port) { self.next_up() } else { self.next_down(port) }
    }

    /// Whether something is awaited on a port that silence could hide: a contribution, or an answer.
    pub(crate) fn awaits(&self, port: usize) -> bool {
        // Whose regions are not known is asked nothing.
        if self.abort.is_some() || self.has_ended(port) || self.is_plain() {
            return false;
        }
        match (self.children.get(port), &self.uplink) {
            (Some(child), _) => child.owes() || self.lacks_next(child),
            (None, Some(uplink)) => uplink.awaits(self.agreed < self.called, &self.call.layout),
            (None, None) => false,
        }
    }

    /// Whether others have announced the next collective, here or elsewhere, and this child has not.
    fn lacks_next(&self, child: &Child) -> bool {
        let others = self.announced | self.heard != 0 || self.awaited == Some(self.agreed);
        others && child.announced <= self.agreed
    }

    /// The question whether the other end of a port lives, unless what is under way asks that already: an
    /// RDMA WRITE of no bytes, which every device answers by itself. A switch below is told that it is awaited,
    /// and asks its own children.
    pub(crate) fn probe(&mut self, port: usize) -> Option<SendRequest> {
        let child = self.children.get(port);
        if child.is_some_and(|it| it.is_switch && it.outstanding == 0 && self.lacks_next(it)) {
            let note = Answer::awaited(self.agreed).to_immediate();
            return Some(self.message(port, Tag::Probe, Some(note), Piece::default()));
        }
        let outstanding = match (self.children.get_mut(port), &mut self.uplink) {
            (Some(child), _) => &mut child.outstanding,
            (None, Some(uplink)) => &mut uplink.outstanding,
            (None, None) => return None,
        };
        if *outstanding > 0 {
            return None;
        }
        *outstanding += 1;
        let write = SendOperation::Write { remote_address: 0, remote_key: 0, immediate: None };
        Some(SendRequest::new(Tag::Probe.id(port), write, [Piece::default()]))
    }

    fn message(
        &mut self,
        port: usize,
        tag: Tag,
        immediate: Option<u32>,
        piece: Piece,
    ) -> SendRequest {
        match (self.children.get_mut(port), &mut self.uplink) {
            (Some(child), _) => child.outstanding += 1,
            (None, Some(uplink)) => uplink.outstanding += 1,
            (None, None) => debug_assert!(false, "there is no port {port}"),
        }
        SendRequest {
            solicited: true,
            ..SendRequest::new(tag.id(port), SendOperation::Send { immediate }, [piece])
        }
    }

    /// A send request on a port is complete: the other end has the message.
    pub(crate) fn delivered(&mut self, port: usize, tag: Tag) -> Progress {
        let limit = self.send_limit;
        let outstanding = match (self.children.get_mut(port), &mut self.uplink) {
            (Some(child), _) => &mut child.outstanding,
            (None, Some(uplink)) => &mut uplink.outstanding,
            (None, None) => return Progress::None,
        };
        let full = *outstanding >= limit;
        *outstanding = outstanding.saturating_sub(1);
        if tag == Tag::Result {
            let child = &mut self.children[port];
            child.delivered += 1;
            let delivered = child.delivered;
            self.confirm(port, delivered);
        }
        if full { Progress::Ready } else { Progress::None }
    }

    /// Whether all children are in the set.
    fn is_everyone(&self, children: ChildSet) -> bool {
        children == all_children(self.children.len())
    }
}

#[cfg(test)]
mod tests;
