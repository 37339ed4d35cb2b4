//! The reference model of a queue pair for datagrams: what it may send, and what it must receive.
//!
//! The network may lose, double and reorder datagrams, the device may not. So what a host's device
//! sends is held against what was posted, and what it delivers against what reaches the host: one
//! for one, and nothing else.

use core::net::IpAddr;
use core::time::Duration;
use std::collections::VecDeque;

use millstream_roce::{
    Completion, CompletionOperation, CompletionStatus, GLOBAL_ROUTE_HEADER_LENGTH, MAX_INLINE,
};
use millstream_wire::{Psn, Qpn};

use super::draw::pick;
use super::execution::UNTOUCHED;
use super::operation::Layout;
use super::pattern::Pattern;
use super::pool::{Pool, PoolPlan, Slot};
use crate::Rng;

/// Bytes before what a datagram brings.
const GRH: u32 = GLOBAL_ROUTE_HEADER_LENGTH as u32;
/// Set in the number of a datagram that is sent.
const SENT: u64 = 1 << 61;
/// Queue keys with this bit stand for that of the sender (IBTA 10.2.5).
const CONTROLLED: u32 = 1 << 31;
/// Bytes that name a datagram which has no immediate data.
const NAME: u32 = 8;

/// What is wrong with a datagram.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Fault {
    None,
    /// It has not the queue key of whom it is for.
    QueueKey,
    /// It is for a queue pair that there is not.
    Number,
    /// It is of memory that is not registered.
    Memory,
}

/// A datagram.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    /// The port that it is for.
    pub(super) to: usize,
    pub(super) length: u32,
    has_immediate: bool,
    pub(super) signaled: bool,
    pub(super) solicited: bool,
    pub(super) inline: bool,
    pub(super) layout: Layout,
    pub(super) fault: Fault,
    offset: u32,
    /// Where and with which key it was sent.
    pub(super) target: (Qpn, u32),
    /// How often it reached a host.
    pub(super) arrived: u32,
}

impl Message {
    pub(super) fn draw(rng: &mut Rng, to: usize, calm: bool) -> Self {
        let length = match rng.below(4) {
            0 => rng.below(16),
            1 => rng.below(300),
            _ => rng.below(4097),
        } as u32;
        let fault = match rng.below(40) {
            0 => Fault::QueueKey,
            1 => Fault::Number,
            2 => Fault::Memory,
            _ => Fault::None,
        };
        let inline = length as usize <= MAX_INLINE && rng.below(2) == 0;
        let no_memory = fault == Fault::Memory && (inline || length == 0);
        Self {
            to,
            length,
            has_immediate: length < NAME || rng.below(2) == 0,
            signaled: rng.below(4) > 0,
            solicited: rng.below(4) == 0,
            inline,
            layout: Layout::draw(rng),
            fault: if calm || no_memory { Fault::None } else { fault },
            offset: 0,
            target: (Qpn::default(), 0),
            arrived: 0,
        }
    }

    /// The last of a port: it must arrive.
    pub(super) fn last(rng: &mut Rng, to: usize) -> Self {
        Self { length: 100, signaled: true, inline: false, ..Self::draw(rng, to, true) }
    }
}

/// What a port is like.
#[derive(Clone, Debug)]
pub(super) struct PortPlan {
    pub(super) host: usize,
    pub(super) messages: Vec<Message>,
    pub(super) send_depth: usize,
    pub(super) pace: Duration,
    /// Its own receive buffers.
    pub(super) pool: PoolPlan,
    /// It takes from the shared receive queue of its host instead.
    pub(super) shares: bool,
    pub(super) queue_key: u32,
}

impl PortPlan {
    pub(super) fn draw(rng: &mut Rng, host: usize, horizon: Duration) -> Self {
        let pool = PoolPlan { length: GRH + 4096, uneven: true, ..PoolPlan::draw(rng) };
        Self {
            host,
            messages: Vec::new(),
            send_depth: *pick(rng, &[1, 2, 8]),
            pace: *pick(rng, &[Duration::ZERO, horizon / 8]),
            pool,
            shares: false,
            queue_key: *pick(rng, &[0x11, 0x22, CONTROLLED | 1, CONTROLLED | 2]),
        }
    }
}

/// The header of a datagram, as it is sent or arrives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Header {
    /// Who sent it, or to whom.
    pub(super) address: IpAddr,
    pub(super) destination: Qpn,
    pub(super) source: Qpn,
    pub(super) queue_key: u32,
    pub(super) psn: Psn,
    immediate: Option<u32>,
    length: u32,
    /// The first bytes.
    name: Option<u64>,
}

impl Header {
    /// Of a datagram of so many bytes in all, if it is one of this kind.
    pub(super) fn of(address: IpAddr, bytes: &[u8], length: usize) -> Option<Self> {
        const ICRC: usize = millstream_wire::ICRC_LENGTH;
        let word = |at: usize| Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?));
        let has_immediate = match bytes.first()? {
            0x64 => false,
            0x65 => true,
            _ => return None,
        };
        let start = if has_immediate { 24 } else { 20 };
        let padding = usize::from(bytes[1] >> 4 & 3);
        let name = bytes.get(start..).and_then(<[u8]>::first_chunk);
        Some(Self {
            address,
            destination: Qpn::new(word(4)? & 0xff_ffff),
            psn: Psn::new(word(8)? & 0xff_ffff),
            queue_key: word(12)?,
            source: Qpn::new(word(16)? & 0xff_ffff),
            immediate: if has_immediate { word(20) } else { None },
            length: length.checked_sub(start + padding + ICRC)? as u32,
            name: name.map(|name| u64::from_le_bytes(*name)),
        })
    }

    /// The port that sent it, and its number there.
    pub(super) fn message(&self) -> Option<(usize, usize)> {
        let name = self.immediate.map_or(self.name, |immediate| Some(immediate.into()))?;
        Some(((name >> 24) as usize, (name & 0xff_ffff) as usize))
    }
}

/// A datagram that must be delivered.
#[derive(Clone, Debug)]
struct Due {
    header: Header,
    message: (usize, usize),
    solicited: bool,
    slot: Option<usize>,
}

/// How a port's queue pair is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum State {
    Down,
    Up,
    /// Its send queue is drained.
    Drained,
    /// It failed.
    Broken,
}

/// A queue pair for datagrams.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) index: usize,
    pub(super) plan: PortPlan,
    pub(super) qpn: Option<Qpn>,
    pub(super) state: State,
    /// Counts each time that it is taken down.
    pub(super) life: u32,
    /// A request failed, and what follows is flushed until the application has heard of it.
    pub(super) send_error: bool,
    pub(super) draining: bool,
    /// It is to go on, and has not.
    pub(super) held: bool,
    pub(super) took_last: bool,
    /// Completions may be lost.
    pub(super) lossy: bool,
    pub(super) reported: bool,
    pub(super) psn: Psn,
    /// Its source region.
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) pool: Pool,
    pub(super) allowed: usize,
    /// The next to post, to be sent, and to complete.
    pub(super) next: usize,
    sent: usize,
    pub(super) ended: usize,
    pub(super) blocked: bool,
    due: VecDeque<Due>,
}

impl Port {
    /// With `allowed` datagrams that may be posted for now.
    pub(super) fn new(index: usize, mut plan: PortPlan, allowed: usize, rng: &mut Rng) -> Self {
        let mut offset = 0;
        for message in plan.messages.iter_mut().filter(|message| !message.inline) {
            message.offset = offset;
            offset += message.length;
        }
        let pool = Pool::new(plan.pool.clone(), ((0x3000 + index as u64) << 32) + 3, rng);
        Self {
            index,
            allowed,
            plan,
            qpn: None,
            state: State::Down,
            life: 0,
            send_error: false,
            draining: false,
            held: false,
            took_last: false,
            lossy: false,
            reported: false,
            psn: Psn::default(),
            address: ((0x2000 + index as u64) << 32) + 1,
            key: 0,
            pool,
            next: 0,
            sent: 0,
            ended: 0,
            blocked: false,
            due: VecDeque::new(),
        }
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.next >= self.allowed && self.next == self.ended
    }

    /// The immediate data of a datagram.
    pub(super) fn immediate(&self, index: usize) -> Option<u32> {
        let name = (self.index as u32) << 24 | index as u32;
        self.plan.messages[index].has_immediate.then_some(name)
    }

    /// The number of a request.
    pub(super) fn id(&self, index: usize) -> u64 {
        SENT | u64::from(self.life) << 24 | index as u64
    }

    /// Whether a completion is of a datagram that was sent.
    pub(super) const fn is_sent(completion: &Completion) -> bool {
        completion.id >> 61 == 1
    }

    /// The bytes of a datagram, in the order of the message.
    pub(super) fn bytes(&self, index: usize) -> Vec<u8> {
        let message = &self.plan.messages[index];
        let mut bytes = vec![0; message.length as usize];
        Pattern::new(0x800 + self.index, index, 0).fill(0, &mut bytes);
        if !message.has_immediate {
            let name = (self.index as u64) << 24 | index as u64;
            bytes[..NAME as usize].copy_from_slice(&name.to_le_bytes());
        }
        bytes
    }

    /// What its source region holds.
    pub(super) fn source(&self) -> Vec<u8> {
        let mut region = Vec::new();
        for (index, message) in self.plan.messages.iter().enumerate() {
            if message.inline {
                continue;
            }
            let bytes = self.bytes(index);
            let start = region.len();
            region.resize(start + bytes.len(), 0);
            lay(&bytes, message.layout, message.length, &mut region[start..]);
        }
        region.push(UNTOUCHED);
        region
    }

    /// Where the bytes of a datagram lie.
    pub(super) fn place(&self, index: usize) -> u64 {
        self.address + u64::from(self.plan.messages[index].offset)
    }

    /// The next datagram was posted, for this queue pair with this key.
    pub(super) fn posted(&mut self, target: (Qpn, u32)) {
        self.plan.messages[self.next].target = target;
        self.next += 1;
    }

    /// The device sends a datagram: it must be the next, once.
    pub(super) fn sends(&mut self, header: &Header, to: IpAddr) -> Result<(), String> {
        let index = self.sent;
        if index >= self.next || self.state != State::Up || self.send_error {
            return Err(format!("sends, where nothing is to be sent: {header:?}"));
        }
        let message = &self.plan.messages[index];
        let (destination, key) = message.target;
        let queue_key = if key & CONTROLLED != 0 { self.plan.queue_key } else { key };
        let right = header.address == to
            && header.destination == destination
            && header.queue_key == queue_key
            && header.immediate == self.immediate(index)
            && header.length == message.length
            && header.psn == self.psn
            && message.fault != Fault::Memory;
        self.sent += 1;
        self.psn = self.psn.add(1);
        if right {
            Ok(())
        } else {
            Err(format!("sends {header:?} for datagram {index}: {message:?}"))
        }
    }

    /// A datagram for it has reached its host; `room` is that of the next receive request. Returns
    /// whether it must be delivered.
    pub(super) fn is_due(
        &mut self,
        header: &Header,
        room: Option<u32>,
        solicited: bool,
    ) -> Result<bool, String> {
        let fits = room.is_some_and(|room| room >= GRH + header.length);
        // Of one that lost completions nobody knows when it failed.
        let takes = matches!(self.state, State::Up | State::Drained) || self.lossy;
        if !fits || !takes {
            return Ok(false);
        }
        let Some(message) = header.message() else {
            return Err(format!("nobody sent {header:?}"));
        };
        let slot = if self.plan.shares { None } else { self.pool.take() };
        self.due.push_back(Due { header: *header, message, solicited, slot });
        Ok(true)
    }

    /// The datagram that has just come took a request of the shared receive queue.
    pub(super) fn took(&mut self, slot: usize) -> Result<(), String> {
        match self.due.back_mut() {
            Some(due) if due.slot.is_none() && self.plan.shares => {
                due.slot = Some(slot);
                Ok(())
            }
            _ => Err("a receive request was taken by no datagram".into()),
        }
    }

    /// The slot that may be written.
    pub(super) fn writable(&self) -> Option<usize> {
        self.due.back()?.slot
    }

    /// A datagram was delivered, into a slot of this pool or of its own.
    pub(super) fn received(
        &mut self,
        completion: &Completion,
        pool: Option<&Pool>,
    ) -> Result<Received, String> {
        loop {
            let Some(due) = self.due.pop_front() else {
                return Err(format!("of no datagram: {completion:?}"));
            };
            let Due { header, message, solicited, slot } = due;
            let Some(slot) = slot else {
                if self.lossy {
                    continue;
                }
                return Err(format!("{completion:?}, but nothing was taken for {header:?}"));
            };
            let is_right = pool.unwrap_or(&self.pool).is_of(slot, completion.id)
                && completion.status == CompletionStatus::Success
                && completion.operation == CompletionOperation::Receive
                && completion.length == GRH + header.length
                && completion.immediate == header.immediate
                && completion.source == Some(header.source)
                && completion.invalidated.is_none();
            if is_right || self.lossy {
                return Ok(Received { slot, message, from: header.address, solicited, is_right });
            }
            return Err(format!("{completion:?} for {header:?}"));
        }
    }

    /// The datagram that is sent next.
    pub(super) const fn next_sent(&self) -> usize {
        self.sent
    }

    /// A request of ours ended.
    pub(super) fn completed(&mut self, completion: &Completion) -> Result<(), String> {
        let index = (completion.id & 0xff_ffff) as usize;
        if completion.id != self.id(index) || !(self.ended..self.next).contains(&index) {
            let (ended, next) = (self.ended, self.next);
            return Err(format!("{completion:?} of none of {ended}..{next} in life {}", self.life));
        }
        let flushed = self.send_error || self.state == State::Broken;
        let passed_over =
            |before: usize| self.plan.messages[before].signaled || before >= self.sent;
        if !self.lossy && (self.ended..index).any(passed_over) {
            return Err(format!("{completion:?} before {}", self.ended));
        }
        self.ended = index + 1;
        let message = &self.plan.messages[index];
        let right = match completion.status {
            CompletionStatus::Success => {
                message.signaled && index < self.sent && completion.length == message.length
            }
            CompletionStatus::LocalProtection => {
                let first = !flushed && index == self.sent;
                let fails = message.fault == Fault::Memory && (first || self.lossy);
                self.send_error |= fails;
                fails
            }
            CompletionStatus::Flushed => flushed,
            _ => false,
        };
        if right && completion.operation == CompletionOperation::Send {
            return Ok(());
        }
        Err(format!("no reason for {completion:?} of {message:?}, {} sent", self.sent))
    }

    /// All completions were seen, and the send queue is empty: what has none was sent, and asked for
    /// none.
    pub(super) fn flushed(&mut self) -> Result<(), String> {
        let passed_over =
            |before: usize| self.plan.messages[before].signaled || before >= self.sent;
        let index = (self.ended..self.next).find(|&index| passed_over(index));
        self.settle();
        index.map_or(Ok(()), |index| Err(format!("datagram {index} has no completion")))
    }

    /// The send queue starts anew, empty.
    pub(super) fn settle(&mut self) {
        self.sent = self.next;
        self.ended = self.next;
        self.send_error = false;
        self.blocked = false;
    }

    /// Nothing more is delivered: returns the slots of what was not heard of.
    pub(super) fn forget_due(&mut self) -> Vec<usize> {
        self.due.drain(..).filter_map(|due| due.slot).collect()
    }

    /// Whether the last datagram has not come, though it has the queue key of whom it is for.
    pub(super) fn is_last_missing(&self) -> bool {
        let key = self.plan.queue_key;
        self.plan.messages.last().is_some_and(|message| {
            let (_, given) = message.target;
            message.arrived == 0 && (given & CONTROLLED == 0 || given == key)
        })
    }

    /// Whether it is owed completions of datagrams.
    pub(super) fn is_owed(&self) -> bool {
        !self.due.is_empty()
    }
}

/// A delivered datagram.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    pub(super) slot: usize,
    /// Who sent it, and its number there.
    pub(super) message: (usize, usize),
    pub(super) from: IpAddr,
    pub(super) solicited: bool,
    /// It is the one that completed: others of a queue that lost completions may be before it.
    pub(super) is_right: bool,
}

/// Whether a slot holds a datagram and nothing else, with the addresses that it came by.
pub(super) fn holds(slot: &Slot, bytes: &[u8], payload: &[u8], from: IpAddr, to: IpAddr) -> bool {
    let mut gathered = Vec::with_capacity(bytes.len());
    for (at, run) in slot.layout.runs(slot.length) {
        gathered.extend_from_slice(&bytes[at as usize..][..run as usize]);
    }
    let split = gathered.split_at_checked(GLOBAL_ROUTE_HEADER_LENGTH);
    let Some((header, rest)) = split else { return false };
    let addresses = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            header[32..36] == from.octets() && header[36..40] == to.octets()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            header[8..24] == from.octets() && header[24..40] == to.octets()
        }
        _ => false,
    };
    addresses
        && rest.get(..payload.len()) == Some(payload)
        && rest[payload.len()..].iter().all(|&byte| byte == UNTOUCHED)
}

/// Writes a message as its pieces lie.
fn lay(bytes: &[u8], layout: Layout, length: u32, slot: &mut [u8]) {
    let mut rest = bytes;
    for (at, run) in layout.runs(length) {
        let (now, later) = rest.split_at(run as usize);
        slot[at as usize..][..now.len()].copy_from_slice(now);
        rest = later;
    }
}
