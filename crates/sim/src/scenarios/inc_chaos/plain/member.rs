//! A host that sends no descriptors, as a program that knows nothing of this library has it: a queue pair, a receive for each
//! answer, and SENDs.

use millstream_inc::{Abort, CollectiveError};
use millstream_roce::{
    Completion, CompletionQueueId, CompletionStatus, Endpoint, Instant, OwnedMemory, Piece,
    QueuePairAttributes, QueuePairState, ReceiveRequest, SendOperation, SendRequest,
};
use millstream_wire::Qpn;

use super::super::member::Call;
use super::draw::Breach;
use crate::Rng;

/// Of the id of a receive; the rest of an id is the number of the message.
const RECEIVE: u64 = 1 << 32;

/// The one rank of such a host.
#[derive(Debug)]
pub(in super::super) struct Member {
    pub(in super::super) group: usize,
    pub(in super::super) rank: u32,
    pub(super) qpn: Qpn,
    pub(super) completions: CompletionQueueId,
    pub(in super::super) calls: Vec<Call>,
    pub(super) lead: usize,
    /// Messages that it has sent, that the switch has acknowledged, and that are answered.
    posted: usize,
    acknowledged: usize,
    answered: usize,
    /// Messages of which all is over.
    pub(in super::super) ended: usize,
    start_at: Option<Instant>,
    /// A message that it does not send, nor any after it.
    pub(super) leaves_out: Option<usize>,
    /// What it sends in place of one, and from where.
    pub(super) breach: Option<(usize, Breach, Piece)>,
    /// Whether it has.
    pub(in super::super) has_broken: bool,
    /// The message that some rank sends otherwise, and when this one had sent it and could send no other before.
    pub(super) differs_at: Option<usize>,
    pub(in super::super) reached: Option<Instant>,
    /// Whoever watches over the communicator has said that it is over.
    told: Option<Abort>,
    pub(in super::super) failed: Option<CollectiveError>,
    rng: Rng,
}

impl Member {
    pub(super) fn new(
        (group, rank): (usize, u32),
        (qpn, completions): (Qpn, CompletionQueueId),
        calls: Vec<Call>,
        lead: usize,
        rng: Rng,
    ) -> Self {
        Self {
            group,
            rank,
            qpn,
            completions,
            start_at: calls.first().map(|call| Instant::ZERO + call.pause),
            calls,
            lead,
            posted: 0,
            acknowledged: 0,
            answered: 0,
            ended: 0,
            leaves_out: None,
            breach: None,
            has_broken: false,
            differs_at: None,
            reached: None,
            told: None,
            failed: None,
            rng,
        }
    }

    /// The communicator is over, as its controller says.
    pub(in super::super) fn tell(&mut self, abort: Abort) {
        self.told.get_or_insert(abort);
    }

    pub(in super::super) fn run(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
        wrong: &mut Vec<String>,
    ) {
        if let (None, Some(abort)) = (self.failed, self.told)
            && self.ended < self.calls.len()
        {
            self.end(now, endpoint, abort.into(), wrong);
        }
        let mut polled = Vec::new();
        while self.failed.is_none() {
            let mut busy = self.send_next(now, endpoint, wrong);
            endpoint.poll_completions(self.completions, &mut polled, usize::MAX);
            for completion in polled.drain(..) {
                busy = true;
                self.completed(now, endpoint, &completion, wrong);
            }
            while self.failed.is_none() && self.ended < self.answered.min(self.acknowledged) {
                self.succeeded(endpoint, wrong);
            }
            let at = self.differs_at.filter(|&at| self.posted > at && self.answered >= at);
            if at.is_some() {
                self.reached.get_or_insert(now);
            }
            if !busy {
                break;
            }
        }
    }

    /// Sends the next message, if it is time and not too many are under way.
    fn send_next(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
        wrong: &mut Vec<String>,
    ) -> bool {
        let next = self.posted;
        if self.start_at.is_none_or(|at| at > now) || next >= self.ended + self.lead {
            return false;
        }
        self.start_at = None;
        if self.leaves_out == Some(next) {
            return true;
        }
        let call = &mut self.calls[next];
        call.started = Some(now);
        let (key, id) = (call.key, next as u64);
        let piece = |address: u64, length: usize| Piece { key, address, length: length as u32 };
        let request = call.arena.request;
        let target = piece(request.destination_address, call.arena.destination.len());
        let receive = ReceiveRequest { id: RECEIVE | id, pieces: [target] };
        let mut send = SendRequest::new(
            id,
            SendOperation::Send { immediate: None },
            [piece(request.source_address, call.arena.source.len())],
        );
        self.posted += 1;
        self.start_at = self.calls.get(self.posted).map(|call| now + call.pause);
        if let Some((_, breach, scrap)) = self.breach.filter(|&(at, ..)| at == next) {
            (send.operation, send.pieces) = breach.request(scrap);
            self.has_broken = true;
            // It has nothing more to say.
            self.start_at = None;
        }
        let posted = endpoint
            .post_receive(self.qpn, &receive)
            .and_then(|()| endpoint.post_send(now, self.qpn, &send));
        if let Err(error) = posted {
            wrong.push(format!("message {next} was not posted: {error}"));
        }
        true
    }

    fn completed(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
        completion: &Completion,
        wrong: &mut Vec<String>,
    ) {
        let Completion { id, status, immediate, length, .. } = *completion;
        if self.failed.is_some() {
            return;
        }
        if status != CompletionStatus::Success {
            return self.end(now, endpoint, CollectiveError::Transport(status), wrong);
        }
        let (count, what) = match id & RECEIVE {
            0 => (&mut self.acknowledged, "acknowledged"),
            _ => (&mut self.answered, "answered"),
        };
        if id & !RECEIVE != *count as u64 {
            wrong.push(format!("message {id:#x} is {what} and not {count}"));
        }
        *count += 1;
        let wanted = self.calls[(id & !RECEIVE) as usize].arena.destination.len();
        if id & RECEIVE != 0 && (immediate.is_some() || length as usize != wanted) {
            wrong.push(format!("the answer {id:#x} has {length} bytes of {wanted}, {immediate:?}"));
        }
    }

    /// A message is answered, and it was acknowledged. Its memory is the caller's again, who changes all of it at once.
    fn succeeded(&mut self, endpoint: &mut Endpoint<OwnedMemory>, wrong: &mut Vec<String>) {
        let Call { key, arena, .. } = &mut self.calls[self.ended];
        if let Some(region) = endpoint.memory_mut().region_mut(*key) {
            match &arena.expected {
                None => wrong.push(format!("message {} was answered: ranks differ", self.ended)),
                Some(expected) if *region != **expected => {
                    let at = region.iter().zip(expected).position(|(a, b)| a != b);
                    let target = &arena.destination;
                    wrong.push(format!(
                        "the answer {} is wrong from {at:?} on; it belongs at {target:?}",
                        self.ended
                    ));
                }
                Some(_) => {}
            }
            self.rng.fill(&mut arena.bytes);
            region.copy_from_slice(&arena.bytes);
        }
        self.ended += 1;
    }

    /// The communicator is of no more use.
    fn end(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
        error: CollectiveError,
        wrong: &mut Vec<String>,
    ) {
        self.failed = Some(error);
        self.start_at = None;
        let attributes = QueuePairAttributes {
            state: Some(QueuePairState::Error),
            ..QueuePairAttributes::default()
        };
        if let Err(error) = endpoint.modify_queue_pair(now, self.qpn, &attributes) {
            wrong.push(format!("the queue pair cannot be closed: {error}"));
        }
        for (number, Call { key, arena, .. }) in self.calls.iter_mut().enumerate().skip(self.ended)
        {
            let Some(region) = endpoint.memory().region(*key) else { continue };
            let right = |(at, &byte): (usize, &u8)| {
                let result = arena.expected.as_ref().map(|expected| expected[at]);
                byte == arena.bytes[at] || arena.destination.contains(&at) && result == Some(byte)
            };
            if let Some(at) = region.iter().enumerate().position(|pair| !right(pair)) {
                let target = &arena.destination;
                wrong.push(format!(
                    "message {number} failed, and its answer wrote at {at}; it belongs at {target:?}"
                ));
            }
            arena.bytes.copy_from_slice(region);
        }
    }

    pub(in super::super) fn wake(&self) -> Option<Instant> {
        // Who waits for an answer is woken by that.
        self.start_at.filter(|_| self.posted < self.ended + self.lead)
    }

    /// What is wrong with how it ended.
    pub(in super::super) fn check(&self, endpoint: &Endpoint<OwnedMemory>) -> Vec<String> {
        let mut wrong = Vec::new();
        if self.failed.is_none() && self.ended < self.calls.len() {
            wrong.push(format!("message {} was never answered", self.ended));
        }
        let changed = |call: &Call| endpoint.memory().region(call.key) != Some(&call.arena.bytes);
        if let Some(number) = self.calls.iter().position(changed) {
            wrong.push(format!(
                "the memory of message {number} changed later; {} were over, and then it had {:?}",
                self.ended, self.failed
            ));
        }
        wrong
    }
}

impl Breach {
    /// What is posted, from memory that has room for more than a segment.
    fn request(self, scrap: Piece) -> (SendOperation, [Piece; 1]) {
        let of = |length: u32| [Piece { length, ..scrap }];
        let send = SendOperation::Send { immediate: None };
        let write =
            |immediate| SendOperation::Write { remote_address: 0, remote_key: 0, immediate };
        match self {
            Self::Empty => (send, [Piece::default()]),
            Self::Uneven => (send, of(scrap.length - 9)),
            Self::Long => (send, of(scrap.length)),
            Self::Write => (write(None), of(4)),
            Self::WriteImmediate => (write(Some(5)), [Piece::default()]),
            Self::Immediate(note) => (SendOperation::Send { immediate: Some(note) }, of(8)),
            Self::Note(note) => (SendOperation::Send { immediate: Some(note) }, [Piece::default()]),
        }
    }
}
