//! Requests of which some are not the engine's: each is submitted as far as that goes, and what is not registered is
//! borrowed.

use std::cmp::Reverse;

use millstream_transfer::{
    RegisterError, SegmentError, SubmitError, SubmitOptions, TransferRequest,
};

use super::{Batch, Engine, Place, Submitted};

/// The requests of a call.
pub(super) struct Submission<'a> {
    pub(super) engine: &'a Engine,
    pub(super) batch: &'a Batch,
    pub(super) requests: &'a [TransferRequest],
    pub(super) submitted: &'a mut Submitted,
}

impl Submission<'_> {
    /// What becomes of each request. It may be `known` already why all of them together were refused.
    pub(super) fn run(
        mut self,
        mut options: SubmitOptions,
        mut known: Option<SubmitError>,
    ) -> Vec<Place> {
        let mut places = vec![Place::Empty; self.requests.len()];
        let all = self.requests.iter().enumerate();
        let mut left: Vec<(usize, TransferRequest)> =
            all.filter(|(_, request)| request.length > 0).map(|(at, it)| (at, *it)).collect();
        self.borrow(&left);
        let mut requests = Vec::with_capacity(left.len());
        // Those before a request that is refused are submitted by themselves, so that each is looked at twice at
        // most.
        let mut end = left.len();
        while !left.is_empty() {
            requests.clear();
            requests.extend(left[..end].iter().map(|(_, request)| *request));
            let first = self.batch.tasks.len();
            let submit =
                || self.engine.transfer.submit_with(&self.batch.tasks, &requests, &options);
            match known.take().map_or_else(submit, Err) {
                Ok(()) => {
                    for (task, (place, _)) in (first..).zip(left.drain(..end)) {
                        places[place] = Place::Task(task);
                    }
                }
                Err(error) => {
                    // A message says that all is done, and that is not so any more.
                    options.notify = None;
                    match single(&error) {
                        Some(index)
                            if index > 0 && !matches!(error, SubmitError::Restarted { .. }) =>
                        {
                            end = index.min(end);
                            continue;
                        }
                        _ => refuse(&mut left, &mut places, &error, &requests, self.engine),
                    }
                }
            }
            end = left.len();
        }
        places
    }

    /// Registers what is not, where that may be. What cannot be registered is refused by the engine.
    fn borrow(&mut self, requests: &[(usize, TransferRequest)]) {
        if self.engine.has_transport("rdma") {
            return;
        }
        let mut all: Vec<(u64, u64)> =
            requests.iter().map(|(_, request)| (request.source, request.length)).collect();
        // Of those that begin together the longest first.
        all.sort_unstable_by_key(|&(source, length)| (source, Reverse(length)));
        let mut rest = &all[..];
        while let Some(&(first, length)) = rest.first() {
            // With those that overlap it, since memory is registered once.
            let (mut end, mut count) = (first.saturating_add(length), 1);
            while let Some(&(next, length)) = rest.get(count).filter(|&&(next, _)| next < end) {
                end = end.max(next.saturating_add(length));
                count += 1;
            }
            let (together, others) = rest.split_at(count);
            rest = others;
            if !self.borrow_range(first, end - first) && count > 1 {
                // Some of it is the caller's.
                for &(source, length) in together {
                    self.borrow_range(source, length);
                }
            }
        }
    }

    /// Whether these bytes are borrowed now.
    fn borrow_range(&mut self, first: u64, length: u64) -> bool {
        let engine = self.engine;
        // SAFETY: who submits a transfer promises that its memory is there until it is over, and when the batch is
        // freed it is given back. What is registered by the caller overlaps, and is left alone.
        let borrow = || unsafe { engine.borrowed.borrow(&engine.transfer, first, length) };
        let borrowed = match borrow() {
            // Perhaps for a batch that is over.
            Err(RegisterError::Overlap { other_address, .. })
                if engine.borrowed.begins_at(other_address) && engine.give_back_borrowed() =>
            {
                borrow()
            }
            borrowed => borrowed,
        };
        self.submitted.borrowed.extend(borrowed.as_ref().ok());
        borrowed.is_ok()
    }
}

/// Refuses for this reason those requests to the segment that it concerns, or the first.
fn refuse(
    left: &mut Vec<(usize, TransferRequest)>,
    places: &mut [Place],
    error: &SubmitError,
    submitted: &[TransferRequest],
    engine: &Engine,
) {
    let concerned = match error {
        // The addresses in the others are those of the process of before, too.
        SubmitError::Restarted { index, .. } => submitted.get(*index).map(|it| it.target),
        SubmitError::Refresh(
            SegmentError::Store { name, .. } | SegmentError::Silent { name, .. },
        ) => {
            let segments = engine.segments();
            segments.iter().find(|(_, open)| open.name == *name).map(|(id, _)| *id)
        }
        _ => None,
    };
    let concerned = concerned.filter(|id| left.iter().any(|(_, request)| request.target == *id));
    let whole = single(error).is_none() && concerned.is_none();
    let reason: Box<str> = error.to_string().into();
    let mut at = 0;
    left.retain(|(place, request)| {
        at += 1;
        let is_refused = concerned.map_or(at == 1 || whole, |id| request.target == id);
        if is_refused {
            places[*place] = Place::Refused(reason.clone());
        }
        !is_refused
    });
}

/// Which request is refused alone. Its task fails, as it does in the original, where the peer refuses it.
fn single(error: &SubmitError) -> Option<usize> {
    match error {
        SubmitError::TargetOutOfRange { index, .. }
        | SubmitError::TargetNotAccessible { index, .. }
        | SubmitError::Overflow { index }
        | SubmitError::SourceNotRegistered { index, .. }
        | SubmitError::NoPath { index, .. }
        | SubmitError::UnknownSegment { index, .. }
        | SubmitError::Restarted { index, .. } => Some(*index),
        _ => None,
    }
}
