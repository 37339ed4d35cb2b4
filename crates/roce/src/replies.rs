//! What a responder still has to say, in the order in which it must be said (IBTA 9.7.3 to 9.7.5),
//! and the READs and atomic operations that a requester may ask for again.

use std::collections::VecDeque;

use millstream_wire::{Mtu, Psn, Syndrome};

use crate::memory::{AtomicOperation, RemoteAccess};

/// Answers, beside those to READs, that wait at most. The driver takes them out between batches of
/// arrivals, and acknowledgements merge: only a flood of repeats comes to this.
const MAX_WAITING: usize = 32;

/// One answer. `msn` counts the messages complete when it was decided, not when it leaves.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Reply {
    /// Acknowledges everything up to this number.
    Acknowledge { psn: u64, msn: Psn },
    /// Negative, or receiver not ready.
    Negative { psn: u64, msn: Psn, syndrome: Syndrome },
    /// The rest of a READ response.
    Read(ReadReply),
    /// The result of an atomic operation.
    Atomic(AtomicReply),
}

impl Reply {
    /// Of an answer to a READ or an atomic operation, whether it was executed before.
    const fn repeated(&self) -> Option<bool> {
        match self {
            Self::Read(ReadReply { repeated, .. }) | Self::Atomic(AtomicReply { repeated, .. }) => {
                Some(*repeated)
            }
            Self::Acknowledge { .. } | Self::Negative { .. } => None,
        }
    }
}

/// The rest of a READ response.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct ReadReply {
    /// The next packet's number.
    pub(crate) psn: u64,
    pub(crate) msn: Psn,
    pub(crate) access: RemoteAccess,
    /// Bytes that are out.
    pub(crate) offset: u32,
    /// It was executed before: it takes nothing from what new ones may use.
    pub(crate) repeated: bool,
}

/// The result of an atomic operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct AtomicReply {
    pub(crate) psn: u64,
    pub(crate) msn: Psn,
    pub(crate) access: RemoteAccess,
    pub(crate) operation: AtomicOperation,
    /// What was there before.
    pub(crate) original: u64,
    /// As of a READ.
    pub(crate) repeated: bool,
}

/// What can be asked for again: READs are executed again, atomic operations are not.
#[derive(Clone, Copy, Debug)]
enum Executed {
    Read(ReadReply),
    Atomic(AtomicReply),
}

/// Answers that are not out, and recent READs and atomic operations.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    queue: VecDeque<Reply>,
    /// The latest READs and atomic operations as they came, oldest first: what may be asked for
    /// again.
    executed: VecDeque<Executed>,
    /// READs and atomic operations at a time: that many new ones wait, as many repeats, and as many
    /// are remembered. A requester has no more unanswered, so what it repeats is remembered.
    pub(crate) resources: usize,
    /// Answers to new READs and atomic operations that are not all out yet.
    new_waiting: usize,
    /// The same of repeated ones.
    repeats_waiting: usize,
}

impl Replies {
    /// Answers that are not out, and what is remembered.
    pub(crate) fn usage(&self) -> (usize, usize) {
        (self.queue.len(), self.executed.len())
    }

    /// How many both can be: new READs and repeats come on top of what waits, and the last word on
    /// top of all.
    pub(crate) fn limits(&self) -> (usize, usize) {
        (MAX_WAITING + 4 * self.resources + 1, self.resources)
    }

    /// Makes room for what waits when the driver is slow, so that no packet costs an allocation later.
    pub(crate) fn make_room(&mut self) {
        self.queue.reserve(2 * self.resources + 8);
        self.executed.reserve(self.resources);
    }

    /// The next answer.
    pub(crate) fn next(&self) -> Option<Reply> {
        self.queue.front().copied()
    }

    /// Whether the next answer is data.
    pub(crate) fn is_data_next(&self) -> bool {
        matches!(self.queue.front(), Some(Reply::Read(_)))
    }

    /// The next answer is out.
    pub(crate) fn pop(&mut self) {
        match self.queue.pop_front().and_then(|reply| reply.repeated()) {
            Some(true) => self.repeats_waiting -= 1,
            Some(false) => self.new_waiting -= 1,
            None => {}
        }
    }

    fn push(&mut self, reply: Reply) {
        match reply.repeated() {
            Some(true) => self.repeats_waiting += 1,
            Some(false) => self.new_waiting += 1,
            None => {}
        }
        self.queue.push_back(reply);
    }

    /// The next answer is a READ response of which `length` more bytes are out.
    pub(crate) fn advance(&mut self, length: u32) {
        if let Some(Reply::Read(read)) = self.queue.front_mut() {
            read.psn += 1;
            read.offset += length;
            if read.offset >= read.access.length {
                self.pop();
            }
        }
    }

    /// Nothing more is said.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.new_waiting = 0;
        self.repeats_waiting = 0;
    }

    /// Acknowledges everything up to `psn`. Without room it is dropped: a requester asks again for
    /// an acknowledgement that was lost.
    pub(crate) fn acknowledge(&mut self, psn: u64, msn: Psn) {
        let reply = Reply::Acknowledge { psn, msn };
        if let Some(last @ Reply::Acknowledge { .. }) = self.queue.back_mut() {
            *last = reply;
        } else if self.has_room() {
            self.push(reply);
        }
    }

    /// Asks for a packet again, now or later. Without room it is dropped, like an acknowledgement.
    pub(crate) fn ask_again(&mut self, psn: u64, msn: Psn, syndrome: Syndrome) {
        let reply = Reply::Negative { psn, msn, syndrome };
        if self.queue.back() != Some(&reply) && self.has_room() {
            self.push(reply);
        }
    }

    /// The last word of a queue pair.
    pub(crate) fn refuse(&mut self, psn: u64, msn: Psn, syndrome: Syndrome) {
        self.push(Reply::Negative { psn, msn, syndrome });
    }

    /// Whether one more new READ or atomic operation may be executed.
    pub(crate) fn has_resources(&self) -> bool {
        self.new_waiting < self.resources
    }

    /// Answers a new READ. The caller has checked [`Replies::has_resources`].
    pub(crate) fn read(&mut self, psn: u64, msn: Psn, access: RemoteAccess) {
        let read = ReadReply { psn, msn, access, offset: 0, repeated: false };
        self.push(Reply::Read(read));
        self.remember(Executed::Read(read));
    }

    /// Answers a new atomic operation. The caller has checked [`Replies::has_resources`].
    pub(crate) fn atomic(&mut self, reply: AtomicReply) {
        self.push(Reply::Atomic(reply));
        self.remember(Executed::Atomic(reply));
    }

    fn remember(&mut self, executed: Executed) {
        if self.executed.len() >= self.resources {
            self.executed.pop_front();
        }
        self.executed.push_back(executed);
    }

    /// Whether a repeated READ is to be answered: it asks for all or the end of one that was
    /// executed.
    pub(crate) fn wants_repeat(&self, psn: u64, access: &RemoteAccess, mtu: Mtu) -> bool {
        self.read_with(psn, access, mtu).is_some()
    }

    /// Answers a repeated READ. Who asks for the end of one has what comes before it: where an
    /// answer to the same READ still waits, it goes on from there, forward or back, so that repeats
    /// do not add up to more than one answer. A requester that waits while old repeats are answered
    /// asks again, and would never see the end of it.
    pub(crate) fn repeat(&mut self, psn: u64, msn: Psn, access: RemoteAccess, mtu: Mtu) {
        let Some(original) = self.read_with(psn, &access, mtu).copied() else { return };
        let answer = ReadReply { psn, msn, access, offset: 0, repeated: true };
        let has_room = self.has_room_to_repeat();
        let waiting = self.queue.iter_mut().find_map(|reply| match reply {
            Reply::Read(read) if original.covers(read.psn, mtu) => Some(read),
            _ => None,
        });
        match waiting {
            Some(waiting) if waiting.covers(psn, mtu) => {
                waiting.offset += ((psn - waiting.psn) * mtu.bytes() as u64) as u32;
                waiting.psn = psn;
            }
            Some(waiting) if waiting.end(mtu) <= answer.end(mtu) => {
                *waiting = ReadReply { repeated: waiting.repeated, ..answer };
            }
            _ if has_room => self.push(Reply::Read(answer)),
            _ => {}
        }
    }

    /// The READ that was executed and that such a repeat is a part of.
    fn read_with(&self, psn: u64, access: &RemoteAccess, mtu: Mtu) -> Option<&ReadReply> {
        self.executed.iter().find_map(|executed| match executed {
            Executed::Read(read) if read.includes(psn, access, mtu) => Some(read),
            _ => None,
        })
    }

    /// Answers a repeated atomic operation with what was found when it was executed (IBTA
    /// 9.7.5.1.4). What is not remembered, or is another operation, gets no answer: to execute it
    /// would be to execute it twice.
    pub(crate) fn repeat_atomic(
        &mut self,
        psn: u64,
        msn: Psn,
        access: &RemoteAccess,
        operation: AtomicOperation,
    ) {
        let same = |executed: &Executed| match executed {
            Executed::Atomic(atomic)
                if (atomic.psn, atomic.access, atomic.operation) == (psn, *access, operation) =>
            {
                Some(*atomic)
            }
            _ => None,
        };
        let waits = |reply: &Reply| matches!(reply, Reply::Atomic(atomic) if atomic.psn == psn);
        if self.has_room_to_repeat()
            && !self.queue.iter().any(waits)
            && let Some(atomic) = self.executed.iter().find_map(same)
        {
            self.push(Reply::Atomic(AtomicReply { msn, repeated: true, ..atomic }));
        }
    }

    fn has_room_to_repeat(&self) -> bool {
        self.repeats_waiting < self.resources
    }

    fn has_room(&self) -> bool {
        self.queue.len() < MAX_WAITING + 2 * self.resources
    }
}

impl ReadReply {
    /// Whether a packet of the rest has this number.
    fn covers(&self, psn: u64, mtu: Mtu) -> bool {
        (self.psn..self.end(mtu)).contains(&psn)
    }

    /// One past the number of its last packet.
    fn end(&self, mtu: Mtu) -> u64 {
        let left = self.access.length - self.offset;
        self.psn + mtu.packets(left.into())
    }

    /// Whether `access`, asked for at `psn`, is all of this or a later part of it, at the place in
    /// memory that `psn` stands for.
    fn includes(&self, psn: u64, access: &RemoteAccess, mtu: Mtu) -> bool {
        let Some(skipped) = psn.checked_sub(self.psn) else { return false };
        let skipped = skipped.saturating_mul(mtu.bytes() as u64);
        let length = u64::from(self.access.length);
        (skipped < length || (skipped, length) == (0, 0))
            && skipped + u64::from(access.length) <= length
            && access.address == self.access.address.wrapping_add(skipped)
            && access.key == self.access.key
    }
}
