//! What a flow wants done.

use std::sync::{Arc, MutexGuard};

use millstream_transfer_core::{Ended, Instant, Output, Post, RailId, SliceResult};
use millstream_verbs::CompletionStatus;

use super::super::RdmaTransport;
use super::super::work::{Moving, Posting, Work};
use super::{Peer, STALL, State};
use crate::task::{TaskEnd, TaskHandle};
use crate::{FailureReason, TransferState};

impl Peer {
    /// Does what the flow wants, and releases the lock.
    pub(super) fn act(&self, now: Instant, state: MutexGuard<'_, State>) {
        drop(self.act_and_keep(now, state));
    }

    pub(super) fn act_and_keep<'a>(
        &'a self,
        now: Instant,
        mut state: MutexGuard<'a, State>,
    ) -> Option<MutexGuard<'a, State>> {
        loop {
            let mut work = self.shared.works.take();
            self.collect(now, &mut state, &mut work);
            if state.flow.tasks() == 0 {
                state.silent_since = None;
            } else if state.ask_at.is_none() {
                state.ask_at = Some(now + STALL);
            }
            let due = state.flow.poll_timeout().into_iter().chain(state.ask_at).min();
            self.shared.timer.set(&self.due, due);
            if work.is_empty() {
                self.shared.works.give_back(work);
                return Some(state);
            }
            drop(state);
            // First the devices, so that they have work while the tasks are told.
            work.post(&self.shared.devices);
            work.tell();
            if work.has_moving() {
                work.go_on_elsewhere(self.shared.context.elsewhere.as_ref());
            }
            state = self.lock();
            for posting in work.not_posted() {
                state.not_posted(now, posting);
            }
            let failed = work.has_failed();
            work.clear();
            self.shared.works.give_back(work);
            if !failed {
                return Some(state);
            }
        }
    }

    /// Takes what is to be done out of the flow.
    fn collect(&self, now: Instant, state: &mut State, work: &mut Work) {
        while let Some(output) = state.flow.poll_output(now) {
            match output {
                Output::Post(post) => self.prepare(now, state, &post, work),
                Output::Connect { rail, epoch } => {
                    self.in_background(move |peer| peer.connect(rail, epoch));
                }
                Output::Test { rail, epoch } => {
                    let connected = state.connections[usize::from(rail.0)].as_mut();
                    if let Some(connected) = connected.filter(|it| it.epoch == epoch) {
                        // It takes a place of its queue, as slices do.
                        connected.outstanding.add(0, 1);
                        let way = (self.way(rail).local, rail, epoch);
                        work.add_test(way, &connected.connection);
                    }
                }
                Output::Abort { rail, epoch } => {
                    state.blame(rail);
                    let place = &mut state.connections[usize::from(rail.0)];
                    let connected = place.take_if(|connected| connected.epoch == epoch);
                    let connection = connected.map(|connected| connected.connection);
                    if let Some(connection) = &connection {
                        self.device(rail).links.remove(connection);
                        state.aborting.push((rail, epoch, Arc::clone(connection)));
                    }
                    // It may be the thread that makes the device's progress, which cannot wait for
                    // itself.
                    self.in_background(move |peer| {
                        if let Some(connection) = connection {
                            connection.halt();
                        }
                        peer.aborted(rail, epoch);
                    });
                }
                Output::Fence { rail, epoch } if self.has_incarnation => {
                    self.in_background(move |peer| peer.fence(rail, epoch));
                }
                Output::Fence { rail, epoch } => state.flow.fence_refused(now, rail, epoch),
                Output::Ended(ended) => self.end(now, state, &ended, work),
            }
        }
    }

    /// Puts a slice among what is posted.
    fn prepare(&self, now: Instant, state: &mut State, post: &Post, work: &mut Work) {
        if self.add(state, post, work).is_none() {
            // A peer's descriptor that lacks keys, and a rail that ended in `stop`.
            state.refuse(post.user, post.rail, CompletionStatus::RemoteAccess);
            state.flow.completed(now, post.slice, SliceResult::Refused);
            return;
        }
        if let Some((batch, index)) = state.runs.place(post.user) {
            batch.tasks.get(index).begin();
            batch.posted(index);
        }
    }

    /// Adds the work requests of a slice, if there are keys and a connection for them.
    fn add(&self, state: &mut State, post: &Post, work: &mut Work) -> Option<()> {
        let (way, runs) = (self.way(post.rail), &state.runs);
        let connected = state.connections[usize::from(post.rail.0)].as_mut()?;
        let queue_pair = connected.outstanding.fewest();
        let posting = Posting {
            device: way.local,
            epoch: connected.epoch,
            connection: &connected.connection,
            queue_pair,
            post,
        };
        let with_keys = |piece| Some((piece, runs.keys(post.user, &piece, way)?));
        work.add(posting, state.flow.pieces(post.slice).map(with_keys))?;
        connected.outstanding.add(queue_pair, post.pieces);
        Some(())
    }

    fn end(&self, now: Instant, state: &mut State, ended: &Ended, work: &mut Work) {
        use millstream_transfer_core::{End, Failure};
        let found = state.refused.iter().position(|(user, ..)| *user == ended.user);
        let refused = found.map(|index| state.refused.swap_remove(index));
        let (end, failure) = match ended.end {
            End::Completed => (TransferState::Completed, None),
            End::Canceled => (TransferState::Canceled, None),
            End::Timeout => (TransferState::Timeout, None),
            End::Failed(failure) => (TransferState::Failed, Some(failure)),
        };
        let error = failure.map(|failure| {
            if state.stopped {
                return self.error(None, FailureReason::ShutDown);
            }
            if let (Failure::Refused, Some((_, rail, status))) = (failure, refused) {
                return self.error(Some(rail), FailureReason::Completion(status));
            }
            let what = match failure {
                Failure::Attempts => "each way to it has fallen silent too often",
                _ => "no answer",
            };
            let unknown = || (RailId(0), FailureReason::NoPath(what.to_owned()));
            let (rail, last) = state.last.clone().unwrap_or_else(unknown);
            let reason = match failure {
                Failure::PeerRestarted => FailureReason::Restarted,
                Failure::NotFenced => FailureReason::NotFenced(Box::new(last)),
                _ => last,
            };
            self.error(Some(rail), reason)
        });
        if ended.end == End::Completed
            && let Some(segment) = state.runs.segment(ended.user)
        {
            segment.avoided.works(RdmaTransport::NAME);
        }
        // Nothing of it can arrive any more.
        let may_move = matches!(failure, Some(Failure::NoRail | Failure::Attempts))
            && self.shared.context.elsewhere.is_some()
            && !ended.target_undefined
            && !state.is_unreachable(now)
            && !state.stopped;
        let moving = state.runs.run(ended.user).filter(|_| may_move);
        if let Some(TaskHandle { batch, index }) = state.runs.task(ended.user) {
            let end = TaskEnd {
                unconfirmed: false,
                state: end,
                transferred: ended.transferred,
                target_undefined: ended.target_undefined,
                error,
            };
            match moving {
                Some((run, terms)) => work.moving.push(Moving { batch, run, terms, end }),
                None => work.ended.push((batch, index, end)),
            }
        }
        state.runs.ended(ended.user);
    }
}
