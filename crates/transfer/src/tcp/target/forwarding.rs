//! Numbered messages for the segment of another process, which this one relays.
//!
//! The data of a message is staged in memory of this process, and moved by transfers of its own engine. A WRITE is
//! answered when these have ended: so what is COMPLETED is applied at its target. A fence of the connection ends them, and
//! is confirmed when nothing of them can arrive any more, which their own transports have seen to.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::numbered::{answer_fence, answer_read, say_ended};
use super::passage::Passage;
use super::registry::Registered;
use super::{Input, Shared, nonsense};
use crate::batch::{Batch, BatchShared};
use crate::engine::Inner;
use crate::memory::LocalMemory;
use crate::task::TaskHandle;
use crate::tcp::message::{Fault, Header, Piece as Named, Purpose, add_up};
use crate::tcp::pieces::Pieces;
use crate::{
    FailureReason, Opcode, SegmentError, SubmitError, SubmitOptions, TransferRequest,
    TransferState, TransferStatus,
};

/// How long the end of transfers is waited for at a time. They have deadlines.
const LONG: Duration = Duration::from_secs(60);

/// What is under way for a connection, for who wants it ended.
#[derive(Debug, Default)]
pub(super) struct Forwarding(Mutex<UnderWay>);

#[derive(Debug, Default)]
struct UnderWay {
    is_over: bool,
    batch: Option<Arc<BatchShared>>,
}

impl Forwarding {
    fn lock(&self) -> MutexGuard<'_, UnderWay> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cancels what is under way, and what would come.
    pub(super) fn end(&self) {
        let mut under_way = self.lock();
        under_way.is_over = true;
        let batch = under_way.batch.clone();
        drop(under_way);
        if let Some(batch) = batch {
            cancel(&batch);
        }
    }

    /// Whether what comes now is canceled.
    fn is_over(&self) -> bool {
        self.lock().is_over
    }

    /// This is under way from now on, or is canceled.
    fn begin(&self, batch: &Arc<BatchShared>) {
        let mut under_way = self.lock();
        under_way.batch = Some(Arc::clone(batch));
        let is_over = under_way.is_over;
        drop(under_way);
        if is_over {
            cancel(batch);
        }
    }

    /// Nothing is under way any more. Whether more may be.
    fn rest(&self) -> bool {
        let mut under_way = self.lock();
        under_way.batch = None;
        !under_way.is_over
    }
}

fn cancel(batch: &Arc<BatchShared>) {
    for index in 0..batch.submitted() {
        TaskHandle { batch: Arc::clone(batch), index }.cancel();
    }
}

/// Does messages until the end of the connection, whose number is `own`.
pub(super) fn serve(
    mut input: Input<'_>,
    shared: &Shared,
    own: u128,
    passage: &Passage<'_>,
    registered: &Registered<'_>,
) -> io::Result<()> {
    input.ends_when_idle(passage.idle());
    let (mut named, mut requests) = (Vec::new(), Vec::new());
    let (mut pieces, mut answer, mut end) = (Pieces::default(), Vec::new(), Vec::new());
    loop {
        input.rest();
        let Some(header) = input.header::<{ Header::LENGTH }>()? else { return Ok(()) };
        let header = Header::parse(&header).ok_or_else(|| nonsense("no message begins so"))?;
        let id = header.id;
        answer.clear();
        end.clear();
        pieces.clear(false);
        let Purpose::Move(opcode) = header.purpose else {
            answer_fence(&mut input, shared, own, id, &mut answer)?;
            continue;
        };
        named.clear();
        for _ in 0..header.pieces {
            named.push(Named::parse(&input.bytes()?));
        }
        if !add_up(named.iter().map(|piece| piece.length), header.length) {
            return Err(nonsense("the pieces of a message are not as long as it says"));
        }
        let (engine, memory) = passage.staging().ok_or_else(ended)?;
        stage(&named, (passage.address(), &memory), &mut pieces);
        input.begun(header.length);
        if opcode == Opcode::Write {
            input.receive(&mut pieces)?;
        }
        requests.clear();
        requests.extend(pieces.list().iter().zip(&named).map(|(piece, named)| TransferRequest {
            opcode,
            source: piece.address,
            target: passage.segment().id,
            target_offset: named.address,
            length: named.length,
        }));
        let is_there = forward(&engine, passage, &requests, &mut pieces, registered)?;
        if !registered.forwarding().rest() {
            return Err(ended());
        }
        if !is_there {
            passage.target_is_gone();
            return Err(io::Error::other("the process of the segment is another one now"));
        }
        match opcode {
            Opcode::Write => {
                say_ended(id, &pieces, &mut answer);
                input.output().send(&answer)?;
            }
            Opcode::Read => answer_read(input.output(), id, &mut pieces, &mut answer, &mut end)?,
        }
    }
}

fn ended() -> io::Error {
    io::Error::other("it was ended")
}

/// Gives pieces their places, one after the other, in memory that begins at this address.
fn stage(named: &[Named], (mut address, memory): (u64, &Arc<LocalMemory>), pieces: &mut Pieces) {
    for &Named { length, .. } in named {
        pieces.push(Some(memory), address, length);
        address += length;
    }
}

/// Moves pieces between their places here and the segment, and returns when nothing of that is under way any more. Notes
/// what has failed. `false` if the segment's process is another one now.
fn forward(
    engine: &Inner,
    passage: &Passage<'_>,
    requests: &[TransferRequest],
    pieces: &mut Pieces,
    registered: &Registered<'_>,
) -> io::Result<bool> {
    let batch = engine.allocate_batch(requests.len()).map_err(io::Error::other)?;
    let deadline = Instant::now().checked_add(passage.timeout());
    let options = SubmitOptions { deadline, ..SubmitOptions::default() };
    let submit = |requests: &[TransferRequest]| engine.submit(&batch.shared, requests, &options);
    let mut is_there = true;
    let mut submitted: Vec<usize> = (0..requests.len()).collect();
    if let Err(error) = submit(requests) {
        submitted.clear();
        is_there = !is_of_another(&error);
        let is_late = || deadline.is_some_and(|deadline| deadline <= Instant::now());
        for (index, request) in requests.iter().enumerate() {
            // Each attempt may ask the segment's process for its descriptor, which takes seconds where it is silent.
            if is_there && (!is_of_one(&error) || registered.forwarding().is_over() || is_late()) {
                pieces.set_fault(index, refusal(&error));
                continue;
            }
            let result = if is_there { submit(std::slice::from_ref(request)) } else { Ok(()) };
            match result {
                Ok(()) if is_there => submitted.push(index),
                Ok(()) => {}
                Err(error) => {
                    is_there = !is_of_another(&error);
                    let segment = &*passage.segment().name;
                    tracing::debug!(segment, %error, "a request is not relayed");
                    pieces.set_fault(index, refusal(&error));
                }
            }
        }
    }
    registered.forwarding().begin(&batch.shared);
    while !engine.wait(&batch, LONG) {
        tracing::warn!(segment = passage.segment().name, "still waiting for what is relayed");
    }
    for (&index, status) in submitted.iter().zip(batch.statuses()) {
        // A peer of Mooncake's first framing confirms no WRITE.
        if status.state == TransferState::Completed && !status.unconfirmed {
            continue;
        }
        is_there &= !matches!(
            status.error.as_ref().map(|error| &error.reason),
            Some(FailureReason::Restarted | FailureReason::Closed | FailureReason::ProcessEnded)
        );
        let is_undefined = (status.target_undefined || status.unconfirmed)
            && requests[index].opcode == Opcode::Write;
        if is_undefined {
            registered.leaves_undefined();
        }
        tell(passage, &batch, &status);
        let fault = if is_undefined { Fault::RelayUndefined } else { Fault::RelayFailed };
        pieces.set_fault(index, fault);
    }
    Ok(is_there)
}

fn tell(passage: &Passage<'_>, batch: &Batch, status: &TransferStatus) {
    let (segment, requests) = (&*passage.segment().name, batch.len());
    let error = status.error.as_ref().map(ToString::to_string).unwrap_or_default();
    tracing::warn!(segment, state = ?status.state, error, requests, "relaying failed");
}

/// Whether one of several requests may be to blame, and others be fine.
const fn is_of_one(error: &SubmitError) -> bool {
    matches!(
        error,
        SubmitError::TargetOutOfRange { .. }
            | SubmitError::TargetNotAccessible { .. }
            | SubmitError::Overloaded { .. }
            | SubmitError::OverLimit { .. }
            | SubmitError::DeadlineInfeasible { .. }
    )
}

/// Whether addresses of the segment mean nothing any more.
const fn is_of_another(error: &SubmitError) -> bool {
    matches!(
        error,
        SubmitError::Restarted { .. }
            | SubmitError::Refresh(SegmentError::Restarted { .. })
            | SubmitError::UnknownSegment { .. }
    )
}

/// What an initiator is told of that.
const fn refusal(error: &SubmitError) -> Fault {
    match error {
        SubmitError::TargetOutOfRange { .. } | SubmitError::TargetNotAccessible { .. } => {
            Fault::NotRegistered
        }
        _ => Fault::NotRelayed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SegmentId;
    use crate::tcp::testing::tasks;

    #[test]
    fn what_is_ended_stays_so() {
        let state = |batch: &Batch| batch.status(0).unwrap().state;
        let forwarding = Forwarding::default();
        let (first, _) = tasks(Opcode::Write, 0, &[1024]);
        forwarding.begin(&first.shared);
        assert!(forwarding.rest(), "it is over, and more may come");
        forwarding.begin(&first.shared);
        forwarding.end();
        assert_eq!(state(&first), TransferState::Canceled);
        assert!(!forwarding.rest());
        let (second, _) = tasks(Opcode::Write, 0, &[1024]);
        forwarding.begin(&second.shared);
        assert_eq!(state(&second), TransferState::Canceled, "it comes too late");
    }

    #[test]
    fn initiators_learn_whose_fault_it_is() {
        let segment = "a".to_owned();
        let nearest = "which has none".to_owned();
        let (index, target_offset, length) = (0, 1, 1);
        let error =
            SubmitError::TargetOutOfRange { index, segment, target_offset, length, nearest };
        assert_eq!(refusal(&error), Fault::NotRegistered);
        assert_eq!(refusal(&SubmitError::ShutDown), Fault::NotRelayed);
        let unknown = SubmitError::UnknownSegment { index, segment: SegmentId(7) };
        assert!(is_of_another(&unknown) && !is_of_another(&error));
        let restarted = SegmentError::Restarted { name: "a".to_owned() };
        assert!(is_of_another(&SubmitError::Refresh(restarted)));
    }
}
