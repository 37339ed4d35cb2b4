//! What is done to memory, held against what is to happen next.

use millstream_roce::AtomicOperation;

use super::operation::{COUNTERS, Kind, Operation};
use super::pattern::Pattern;
use super::pool::Slot;
use super::stream::Stream;
use super::world::Role;

/// What regions are filled with: what must still be there where nothing was to be written.
pub(super) const UNTOUCHED: u8 = 0xa5;

impl Stream {
    /// What a region of this role holds now.
    pub(super) fn content(&self, role: Role) -> Vec<u8> {
        if role == Role::Counters {
            return self.counters.iter().flat_map(|counter| counter.to_ne_bytes()).collect();
        }
        let mut bytes = vec![UNTOUCHED; self.lengths[role as usize] as usize];
        for (index, operation) in self.plan.operations.iter().enumerate() {
            let places = [operation.local(), Some(operation.remote())];
            let Some(side) = places.iter().position(|place| *place == Some(role)) else { continue };
            if role == Role::Inbox && self.plan.shares {
                continue;
            }
            let offset = operation.offsets[side] as usize;
            let slot = &mut bytes[offset..][..operation.length as usize];
            let pattern = self.pattern(index);
            match role {
                Role::Source => fill(pattern, operation.layout.runs(operation.length), slot),
                Role::Readable => pattern.fill(0, slot),
                Role::Sink | Role::Inbox | Role::Target if operation.erased => {}
                Role::Sink if operation.kind.is_atomic() => {
                    // It comes in one packet, which is written piece by piece.
                    let value = operation.original.unwrap_or_default().to_ne_bytes();
                    let mut value = &value[..operation.applied as usize];
                    for (at, run) in operation.layout.runs(operation.length) {
                        let (now, rest) = value.split_at(value.len().min(run as usize));
                        slot[at as usize..][..now.len()].copy_from_slice(now);
                        value = rest;
                    }
                }
                Role::Sink | Role::Inbox | Role::Target | Role::Counters => {
                    let runs = operation.arrival_layout().runs(operation.arrival_length());
                    fill(pattern, prefix(runs, operation.applied), slot);
                }
            }
        }
        bytes
    }

    /// The host of a region is gone, and what was written into it.
    pub(super) fn erase(&mut self, role: Role) {
        if role == Role::Counters {
            self.counters = [0; COUNTERS];
        }
        for operation in &mut self.plan.operations {
            let arrives = if operation.kind.reads() { Role::Sink } else { operation.remote() };
            operation.erased |= arrives == role && operation.applied > 0;
        }
    }

    /// Bytes appeared in a region, at this offset. `slot`: that of the message, if it is of a shared
    /// receive queue.
    pub(super) fn written(
        &mut self,
        role: Role,
        remote: bool,
        place: u64,
        bytes: &[u8],
        slot: Option<&Slot>,
    ) -> Result<(), String> {
        let reads = role == Role::Sink;
        let (life, cursor) = match role {
            Role::Sink => (self.sending_life, &mut self.reading),
            Role::Inbox | Role::Target => (self.receiving_life, &mut self.executing),
            Role::Source | Role::Readable | Role::Counters => {
                return Err(format!("{} bytes written into the {role:?} region", bytes.len()));
            }
        };
        let posted = &mut self.plan.operations[..self.next];
        let (index, operation) = loop {
            let Some(operation) = posted.get_mut(cursor.0).filter(|next| next.life == life) else {
                return Err(format!(
                    "{} bytes written at {role:?} + {place}, where all {} requests of life {life} \
                     were executed before",
                    bytes.len(),
                    self.next,
                ));
            };
            // An atomic operation is done at one end, and then its result written at the other.
            let is_next = operation.kind.reads() == reads || operation.kind.is_atomic();
            let leaves_trace = operation.length > 0 || operation.kind == Kind::SendInvalidate;
            if is_next && leaves_trace {
                break (cursor.0, operation);
            }
            *cursor = (cursor.0 + 1, 0);
        };
        if !reads && self.held.is_some_and(|held| index >= held) {
            return Err(format!("request {index} is executed while the send queue is drained"));
        }
        let (fence, offset) = (operation.fence, cursor.1);
        let is_claimed = self.claims.back().is_some_and(|claim| claim.0 == index);
        let (base, layout, length) = match slot {
            Some(slot) => (slot.offset, slot.layout, slot.length),
            None => {
                let base = operation.offsets[usize::from(!reads)];
                (base, operation.arrival_layout(), operation.arrival_length())
            }
        };
        let (at, left) = layout.place(length, offset);
        let at = base + at;
        let right_place = u64::from(at) == place
            && slot.is_some() == (role == Role::Inbox && self.plan.shares)
            && (slot.is_none() || is_claimed)
            && bytes.len() <= left as usize
            && remote == (role == Role::Target)
            && role == if reads { Role::Sink } else { operation.remote() }
            && operation.kind.reads() == reads
            && (!operation.doomed || operation.kind.is_send());
        if !right_place {
            return Err(format!(
                "{} bytes written at {role:?} + {place}{}, where byte {offset} of request {index} \
                 ({:?}, {} bytes{}) is next, at + {at}",
                bytes.len(),
                if remote { " by a WRITE" } else { "" },
                operation.kind,
                operation.length,
                if operation.doomed { ", by a key that was invalidated" } else { "" },
            ));
        }
        let wrong = match (operation.kind.is_atomic(), operation.original) {
            (false, _) => Pattern::new(self.index, index, 0).first_difference(offset.into(), bytes),
            (true, None) => Some(0),
            (true, Some(original)) => {
                let right = &original.to_ne_bytes()[offset as usize..][..bytes.len()];
                right.iter().zip(bytes).position(|(right, byte)| right != byte)
            }
        };
        if let Some(wrong) = wrong {
            return Err(format!(
                "byte {} of request {index} ({:?}, {} bytes) is wrong: {:#04x}",
                offset as usize + wrong,
                operation.kind,
                operation.length,
                bytes[wrong],
            ));
        }
        cursor.1 += bytes.len() as u32;
        operation.applied = cursor.1;
        if operation.is_done() {
            *cursor = (index + 1, 0);
        }
        if fence && !reads { self.keeps_fence(index) } else { Ok(()) }
    }

    /// A fenced request was begun: everything that fetches before it must have its data.
    fn keeps_fence(&self, fenced: usize) -> Result<(), String> {
        let life = self.plan.operations[fenced].life;
        let waits = |operation: &&Operation| {
            operation.life == life && operation.kind.reads() && operation.applied < operation.length
        };
        match self.plan.operations[..fenced].iter().find(waits) {
            None => Ok(()),
            Some(before) => Err(format!("fenced request {fenced} is executed before {before:?}")),
        }
    }

    /// Whether what is written next is the first of its message.
    pub(super) const fn is_at_start(&self) -> bool {
        self.executing.1 == 0
    }

    /// An atomic operation was done at this offset of the counters, and returned `original`.
    pub(super) fn changed(
        &mut self,
        role: Role,
        place: u64,
        atomic: AtomicOperation,
        original: u64,
    ) -> Result<(), String> {
        let (life, posted) = (self.receiving_life, &mut self.plan.operations[..self.next]);
        let next = next_trace(posted, self.executing.0, life);
        let expected = next.as_ref().map(|(index, next)| (*index, next.kind));
        let Some((index, operation)) = next.filter(|(_, next)| {
            next.life == life
                && next.kind.is_atomic()
                && next.atomic == atomic
                && next.counter as u64 * 8 == place
                && role == Role::Counters
                && !next.doomed
        }) else {
            return Err(format!(
                "{atomic:?} done at {role:?} + {place}, where {expected:?} is next"
            ));
        };
        if self.held.is_some_and(|held| index >= held) {
            return Err(format!("request {index} is executed while the send queue is drained"));
        }
        let counter = &mut self.counters[operation.counter];
        if *counter != original {
            return Err(format!("{atomic:?} returned {original}, where {counter} is right"));
        }
        *counter = atomic.apply(original);
        operation.original = Some(original);
        let fence = operation.fence;
        self.executing = (index + 1, 0);
        if fence { self.keeps_fence(index) } else { Ok(()) }
    }

    /// A region of this role was invalidated.
    pub(super) fn invalidated(&mut self, role: Role) -> Result<(), String> {
        let (life, posted) = (self.receiving_life, &mut self.plan.operations[..self.next]);
        let (first, offset) = self.executing;
        let next = next_trace(posted, first, life);
        let expected = next.as_ref().map(|(index, next)| (*index, next.kind));
        let Some((index, operation)) = next.filter(|(index, next)| {
            let arrived = if *index == first { offset } else { 0 };
            next.life == life
                && next.kind == Kind::SendInvalidate
                && next.invalidates == role
                && next.key == self.regions[role as usize].key
                && !next.has_wrong_key()
                && arrived == next.length
        }) else {
            return Err(format!("{role:?} invalidated, where {expected:?} is next"));
        };
        if self.held.is_some_and(|held| index >= held) {
            return Err(format!("request {index} is executed while the send queue is drained"));
        }
        operation.invalidated = true;
        self.regions[role as usize].dead = true;
        let fence = operation.fence;
        self.executing = (index + 1, 0);
        if fence { self.keeps_fence(index) } else { Ok(()) }
    }
}

/// The next request, from this one on, that leaves a trace in the target's memory.
fn next_trace(
    posted: &mut [Operation],
    first: usize,
    life: u32,
) -> Option<(usize, &mut Operation)> {
    let mut rest = (first..).zip(posted.get_mut(first..).unwrap_or_default());
    rest.find(|(_, next)| {
        next.life != life
            || next.kind.is_atomic()
            || next.kind == Kind::SendInvalidate
            || (!next.kind.reads() && next.length > 0)
    })
}

fn fill(pattern: Pattern, runs: impl Iterator<Item = (u32, u32)>, slot: &mut [u8]) {
    let mut offset = 0;
    for (at, length) in runs {
        pattern.fill(offset, &mut slot[at as usize..][..length as usize]);
        offset += u64::from(length);
    }
}

/// The runs of the first `length` bytes.
fn prefix(
    runs: impl Iterator<Item = (u32, u32)>,
    mut length: u32,
) -> impl Iterator<Item = (u32, u32)> {
    runs.map(move |(at, run)| {
        let taken = run.min(length);
        length -= taken;
        (at, taken)
    })
}
